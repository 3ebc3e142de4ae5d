"""Parts of a call: rectangles of the scores whose merged results, and summed gradients, are those of the whole."""

from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

import flashtile
from flashtile import AttentionPart, attention_backward, attention_part
from flashtile.ops.attention import select
from flashtile.ops.attention.options import Taken
from flashtile.ops.attention.partial import Rectangle, _described, mask_part
from flashtile.testing import AttentionCase, Inputs, assert_close, assert_same, make_inputs, run
from flashtile.testing.cases import RelativeScore, cancelled_sizes
from flashtile.testing.tolerance import Size
from support.attention.backend_calls import hopper_call

_ROWS, _COLUMNS = (0, 32, 48, 80), (0, 16, 64, 96)  # where the whole is cut
_ODD_ROWS, _ODD_COLUMNS = (0, 37, 80), (0, 21, 96)
_WHOLE = AttentionCase(seq_q=80, seq_k=96, batch=2, heads=4, heads_kv=2, head_dim=16, head_dim_v=16)

_CASES = {
    "plain": _WHOLE,
    "causal": replace(_WHOLE, arguments={"causal": True}),
    "top-left": replace(_WHOLE, arguments={"causal": True, "align": "top_left"}),
    "window": replace(_WHOLE, arguments={"window": (20, 7)}),
    "narrow-window": replace(_WHOLE, arguments={"window": (5, None), "causal": True}),
    "ahead": replace(_WHOLE, arguments={"window": (3, 30), "align": "top_left"}),
    "key-lengths": replace(_WHOLE, key_lengths=(70, 10)),
    "softcap": replace(_WHOLE, arguments={"softcap": 2.0, "causal": True}),
    "alibi": replace(_WHOLE, alibi_slopes="bh", arguments={"causal": True, "align": "top_left"}),
    "bias": replace(_WHOLE, bias="1hqk"),
    "mask": replace(_WHOLE, mask="b1qk", arguments={"window": (30, 30)}),
    "dropout": replace(_WHOLE, arguments={"dropout_p": 0.3, "causal": True}),
    "dropout-alibi": replace(_WHOLE, alibi_slopes="h", arguments={"dropout_p": 0.2, "window": (40, 4)}),
}


def _rectangle(tensor: Tensor, rows: slice, columns: slice) -> Tensor:
    tensor = tensor[..., rows, :] if tensor.shape[-2] > 1 else tensor
    return tensor[..., columns] if tensor.shape[-1] > 1 else tensor


def _options(case: AttentionCase, inputs: Inputs, backend: str) -> dict[str, Any]:
    """The arguments that all parts share."""
    names = ("dropout_seed", "key_lengths", "alibi_slopes", "block_mask", "score_mod")
    return {
        **case.arguments,
        **{name: inputs.tensors[name] for name in names if name in inputs.tensors},
        "backend": backend,
    }


def _tables(inputs: Inputs, rows: slice, columns: slice) -> dict[str, Tensor]:
    """Bias and mask of a rectangle; the bias wants its gradient."""
    tables = {n: _rectangle(inputs.tensors[n], rows, columns) for n in ("bias", "mask") if n in inputs.tensors}
    return {n: t.clone().requires_grad_() if n == "bias" else t for n, t in tables.items()}


def _forward_in_parts(case: AttentionCase, inputs: Inputs, backend: str) -> list[Tensor]:
    """out and lse of each rectangle."""
    found: list[Tensor] = []
    for rows, columns in ((slice(*r), slice(*c)) for r in pairwise(_ODD_ROWS) for c in pairwise(_ODD_COLUMNS)):
        part = AttentionPart(rows.start, columns.start, case.seq_q, case.seq_k)
        options = _options(case, inputs, backend) | _tables(inputs, rows, columns)
        found += attention_part(inputs.q[:, rows], inputs.k[:, columns], inputs.v[:, columns], part, **options)
    return [t.detach() for t in found]


def _in_parts(case: AttentionCase, inputs: Inputs, backend: str, cuts_q: tuple, cuts_k: tuple) -> dict[str, Tensor]:
    """out, lse and gradients of a case, of which each call computes one rectangle."""
    arguments = _options(case, inputs, backend)
    slopes = inputs.tensors.get("alibi_slopes")
    if slopes is not None:
        arguments["alibi_slopes"] = slopes.clone().requires_grad_()
    function = inputs.tensors.get("score_mod")
    if function is not None:
        arguments["score_mod"] = RelativeScore(function.table.clone().requires_grad_())

    def of(rows: slice, columns: slice) -> tuple[AttentionPart, dict[str, Any]]:
        part = AttentionPart(rows.start, columns.start, case.seq_q, case.seq_k)
        return part, arguments | _tables(inputs, rows, columns)

    grid = [[(slice(*r), slice(*c)) for c in pairwise(cuts_k)] for r in pairwise(cuts_q)]
    results: dict[str, list[Tensor]] = {"out": [], "lse": []}
    totals = {name: torch.zeros_like(t, dtype=torch.float64) for name, t in
              (("dq", inputs.q), ("dk", inputs.k), ("dv", inputs.v))}  # fmt: skip
    totals |= {
        f"d{name}": torch.zeros_like(inputs.tensors[name], dtype=torch.float64)
        for name in ("bias", "alibi_slopes") if name in inputs.tensors
    }  # fmt: skip
    if function is not None:
        totals["dscore_mod"] = torch.zeros_like(function.table, dtype=torch.float64)
    for line in grid:
        q = inputs.q[:, line[0][0]]
        parts = []
        for rows, columns in line:
            part, options = of(rows, columns)
            parts.append(attention_part(q, inputs.k[:, columns], inputs.v[:, columns], part, **options))
        out, lse = flashtile.logsumexp_merge([p[0].detach() for p in parts], [p[1].detach() for p in parts])
        results["out"].append(out)
        results["lse"].append(lse)
        for rows, columns in line:
            part, options = of(rows, columns)
            grads = attention_backward(
                inputs.dout[:, rows], q, inputs.k[:, columns], inputs.v[:, columns], out, lse, part,
                dlse=inputs.dlse[..., rows], **options,
            )  # fmt: skip
            totals["dq"][:, rows] += grads.q
            totals["dk"][:, columns] += grads.k
            totals["dv"][:, columns] += grads.v
            if grads.bias is not None:
                _rectangle(totals["dbias"], rows, columns).add_(grads.bias)
            if grads.alibi_slopes is not None:
                totals["dalibi_slopes"] += grads.alibi_slopes
            for of_function in grads.captured:
                totals["dscore_mod"] += of_function
    dtypes = {"dalibi_slopes": inputs.tensors["alibi_slopes"].dtype} if slopes is not None else {}
    summed = {name: total.to(dtypes.get(name, case.dtype)) for name, total in totals.items()}
    return {"out": torch.cat(results["out"], 1), "lse": torch.cat(results["lse"], -1), **summed}


def _check(case: AttentionCase, backend: str, cuts: tuple, device: str = "cpu") -> None:
    inputs = make_inputs(case, device)
    actual = _in_parts(case, inputs, backend, *cuts)
    oracle, eager = run(case, inputs, "reference", torch.float64), run(case, inputs, "reference")
    cancelled = cancelled_sizes(case, inputs, oracle)
    for name, value in actual.items():
        assert_close(f"{case}: {name}", value, oracle[name], eager[name], cancelled.get(name, Size()))


_FUNCTIONS = {
    "score-mod": replace(_WHOLE, score_mod=True, arguments={"causal": True}),
    "block-mask": replace(_WHOLE, block_mask=(64, 64)),
    "both": replace(_WHOLE, block_mask=(64, 64), score_mod=True, alibi_slopes="bh", arguments={"dropout_p": 0.2}),
}
_CUTS = {"16": (_ROWS, _COLUMNS), "odd": (_ODD_ROWS, _ODD_COLUMNS), "tiles": ((0, 64, 80), (0, 64, 96))}


@pytest.mark.parametrize("cuts, name", [(cuts, name) for cuts in ("16", "odd") for name in _CASES | _FUNCTIONS]
                         + [("tiles", name) for name in _FUNCTIONS])  # fmt: skip
def test_parts_make_up_the_whole(name, cuts):
    _check((_CASES | _FUNCTIONS)[name], "cpu", _CUTS[cuts])


@pytest.mark.parametrize("first", [(0, 0), (64, 128), (100, 37)], ids=str)
def test_the_rectangle_of_a_mask(first):
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, 4, (3, 400), generator=generator).sort(dim=1).values
    window = flashtile.BlockMask.from_predicate(
        lambda b, h, q, k: (ids[b, q] == ids[b, k]) & (k <= q + 20 * h), batch=3, heads=2, seq_q=400, seq_k=400,
        tile=(64, 128),
    )  # fmt: skip
    (row, column), dense = first, window.to_dense()
    place = Rectangle((1, 2), (1, 1), (row, 250), (column, 200))
    part = mask_part(window, place)
    assert part.tile == (64, 128) and torch.equal(
        part.to_dense(), dense[1:, 1:, row : row + 250, column : column + 200]
    )
    assert mask_part(window, place) is part
    assert mask_part(window, Rectangle((0, 3), (0, 2), (0, 400), (0, 400))) is window


def test_packed_sequences_of_some_heads():
    """A part of whole sequences: the numbers of sequences and heads that functions and dropout count by, and masks."""
    case = replace(
        _WHOLE, lengths_q=(30, 17, 0, 50), lengths_k=(30, 17, 0, 50), batch=1, block_mask=(64, 64), score_mod=True,
        arguments={"dropout_p": 0.4},
    )  # fmt: skip
    inputs = make_inputs(case)
    whole, tensors = run(case, inputs, "cpu"), inputs.tensors
    rows, heads = slice(30, 97), slice(2, 4)
    out, lse = attention_part(
        inputs.q[rows, heads], inputs.k[rows, 1:], inputs.v[rows, 1:], AttentionPart(0, 0, 0, 0, 2, 4, 1),
        cu_seqlens=torch.tensor([0, 17, 17, 67], dtype=torch.int32), max_seqlen=50, dropout_p=0.4, backend="cpu",
        **{name: tensors[name] for name in ("block_mask", "score_mod", "dropout_seed")},
    )  # fmt: skip
    assert_same(out, whole["out"][rows, heads])
    assert_same(lse, whole["lse"][heads, rows])


def test_a_mask_of_another_call_is_refused():
    q, mask = torch.zeros(1, 8, 2, 8), flashtile.patterns.causal(12)
    with pytest.raises(ValueError, match=r"block_mask: expected the mask of the larger call, with seq_q at least 16"):
        attention_part(q, q, q, AttentionPart(8, 0, 20, 20), block_mask=mask)
    with pytest.raises(TypeError, match=r"block_mask: expected a flashtile\.BlockMask, got builtins\.int"):
        attention_part(q, q, q, AttentionPart(0, 0, 8, 8), block_mask=3)


@pytest.mark.parametrize("name", _CASES)
def test_the_reference_computes_the_same_parts(name):
    case = replace(_CASES[name], dtype=torch.float64)
    inputs = make_inputs(case)
    found = _forward_in_parts(case, inputs, "reference")
    for actual, expected in zip(found, _forward_in_parts(case, inputs, "cpu"), strict=True):
        assert_same(actual, expected)


#: What the portable kernels are told of a part: shifted bands and lengths, where tables and counters begin, functions.
_PORTABLE = ("top-left", "narrow-window", "key-lengths", "dropout-alibi", "score-mod", "block-mask", "both")


@pytest.mark.interpreter
@pytest.mark.parametrize("name", _PORTABLE)
def test_parts_of_the_portable_kernels_make_up_the_whole(name):
    case = (_CASES | _FUNCTIONS)[name]
    case = replace(case, batch=1, heads=2, heads_kv=1, key_lengths=case.key_lengths and (70,))
    # A part that begins at multiples of 16 draws the bits of four elements at once.
    _check(case, "triton", ((0, 48, 80), (0, 64, 96)) if name == "dropout-alibi" else (_ODD_ROWS, _ODD_COLUMNS))


@pytest.mark.gpu
@pytest.mark.parametrize("cuts", ["16", "odd"])
@pytest.mark.parametrize("name", _CASES)
def test_parts_on_a_gpu(name, cuts):
    _check(replace(_CASES[name], dtype=torch.float16), "triton", _CUTS[cuts], "cuda")


@pytest.mark.hopper
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("name", ["plain", "causal", "top-left", "window", "narrow-window", "ahead"])
def test_parts_of_the_hopper_kernels(name, deterministic):
    """Shifted bands, whose sides may be negative, over more than one tile."""
    case = replace(_CASES[name], seq_q=640, seq_k=768, head_dim=64, head_dim_v=64, dtype=torch.bfloat16)
    window = case.arguments.get("window")
    scaled = window and tuple(None if side is None else 8 * side for side in window)
    arguments = {**case.arguments, "deterministic": deterministic} | ({"window": scaled} if window else {})
    case = replace(case, arguments=arguments)
    for cuts in (((0, 256, 384, 640), (0, 128, 512, 768)), ((0, 301, 640), (0, 170, 768))):
        _check(case, "hopper", cuts, "cuda")


def test_dropout_bits_are_those_of_the_larger_call():
    """Heads, sequence, row and column count; with values that are a unit matrix the output shows the mask."""
    seed = torch.tensor([5, 7])
    mask = flashtile.dropout_mask(seed, 0.5, batch=3, heads=8, seq_q=40, seq_k=40)
    q, k = torch.zeros(1, 20, 2, 16), torch.zeros(1, 16, 2, 16)
    v = torch.eye(16)[None, :, None].expand(1, 16, 2, 16)
    part = AttentionPart(row=20, column=13, seq_q=40, seq_k=40, head=6, heads=8, sequence=2)
    for backend in ("cpu", "reference"):
        out, _ = attention_part(q, k, v, part, dropout_p=0.5, dropout_seed=seed, backend=backend)
        assert torch.equal(out[0].transpose(0, 1) != 0, mask[2, 6:, 20:, 13:29])


def test_backward_from_results_is_that_of_autograd():
    """The gradients of a whole call, with sinks, are the same to the bit."""
    case = replace(_WHOLE, sinks=True, bias="bhqk", alibi_slopes="h", arguments={"causal": True})
    inputs = make_inputs(case)
    expected = run(case, inputs, "cpu")
    learned = {name: t.clone().requires_grad_() for name, t in inputs.tensors.items()}
    found = attention_backward(
        inputs.dout, inputs.q, inputs.k, inputs.v, expected["out"], expected["lse"], dlse=inputs.dlse, causal=True,
        backend="cpu", **learned,
    )  # fmt: skip
    assert found.captured == ()  # it takes no score function
    for name, grad in list(found._asdict().items())[:-1]:
        assert torch.equal(grad, expected[f"d{name}"]), name
        assert not grad.requires_grad


@pytest.mark.parametrize("packed", [False, True])
def test_autocast_is_followed_as_attention_follows_it(packed):
    shape = (8, 2, 4) if packed else (1, 8, 2, 4)
    wide = [torch.randn(shape, requires_grad=True) for _ in range(3)]
    part = AttentionPart(0, 0, 0, 0) if packed else AttentionPart(4, 2, 16, 16)
    cu_seqlens = torch.tensor([0, 3, 8]) if packed else None

    def attend(q, k, v):
        return attention_part(q, k, v, part, cu_seqlens=cu_seqlens, causal=True)

    with torch.autocast("cpu", torch.bfloat16):
        out, lse = attend(wide[0], wide[1].bfloat16(), wide[2])
    by_hand, _ = attend(*(t.bfloat16() for t in wide))
    assert (out.dtype, lse.dtype) == (torch.bfloat16, torch.float32)
    assert torch.equal(out, by_hand)
    grads = torch.autograd.grad(out.float().sum(), wide)
    for grad, expected in zip(grads, torch.autograd.grad(by_hand.float().sum(), wide), strict=True):
        assert torch.equal(grad, expected)
    with pytest.raises(ValueError, match=r"dout: expected torch\.float32 .* which autocast may have cast"):
        attention_backward(out, *wide, out, lse, cu_seqlens=cu_seqlens)


@pytest.mark.parametrize(
    ("part", "arguments", "message"),
    [
        ((0, 0, 8, 8), {}, "part: expected a flashtile.AttentionPart, got tuple"),
        (AttentionPart(0.0, 0, 8, 8), {}, "part: expected an int as row, got 0.0"),  # type: ignore[arg-type]
        (AttentionPart(0, 0, 8, 8, heads=True), {}, "part: expected an int as heads, got True"),
        (AttentionPart(12, 0, 16, 8), {}, "part: expected rows 12 to 20 within the 16"),
        (AttentionPart(0, 1, 8, 8), {}, "part: expected columns 1 to 9 within the 8"),
        (AttentionPart(0, 0, 8, 8, head=1), {}, "part: expected heads 1 to 3 within the 2"),
        (AttentionPart(0, 0, 8, 8), {"dropout_p": 0.1}, "dropout_seed: expected a seed beside dropout_p"),
        # A bound of a dense call was taken for the size of its mask.
        (
            AttentionPart(0, 0, 8, 8),
            {"max_seqlen": 4, "mask": torch.ones(4, 4, dtype=torch.bool)},
            "max_seqlen: expected it beside cu_seqlens only, got 4",
        ),
    ],
)
def test_what_does_not_fit_is_refused(part, arguments, message):
    q = torch.randn(1, 8, 2, 4)
    with pytest.raises((TypeError, ValueError), match=message):
        attention_part(q, q, q, part, **arguments)


def test_results_that_do_not_fit_are_refused():
    q = torch.randn(1, 8, 2, 4)
    out, lse = flashtile.attention(q, q, q, return_lse=True)
    with pytest.raises(ValueError, match=r"lse: expected torch.float32 \(1, 2, 8\)"):
        attention_backward(q, q, q, q, out, lse.transpose(1, 2))
    with pytest.raises(ValueError, match="part: expected row and column 0 with cu_seqlens"):
        attention_part(q[0], q[0], q[0], AttentionPart(1, 0, 8, 8), cu_seqlens=torch.tensor([0, 8]))


def test_backward_of_keys_with_lengths_of_their_own():
    case = AttentionCase(lengths_q=(5, 0, 9), lengths_k=(7, 4, 6), heads=4, heads_kv=2, arguments={"causal": True})
    inputs = make_inputs(case)
    expected = run(case, inputs, "cpu")
    q, k, v, lengths = inputs.q, inputs.k, inputs.v, inputs.tensors
    grads = attention_backward(
        inputs.dout, q, k, v, expected["out"], expected["lse"], dlse=inputs.dlse, causal=True,
        cu_seqlens=lengths["cu_seqlens_q"], max_seqlen=9, cu_seqlens_k=lengths["cu_seqlens_k"], max_seqlen_k=7,
    )  # fmt: skip
    for name, grad in zip("qkv", grads):
        assert torch.equal(grad, expected[f"d{name}"])
    with pytest.raises(ValueError, match="cu_seqlens_k: expected None without cu_seqlens"):
        attention_backward(inputs.dout, q, k, v, expected["out"], expected["lse"], cu_seqlens_k=lengths["cu_seqlens_k"])
    with pytest.raises(ValueError, match="max_seqlen_k: expected it beside cu_seqlens_k only, got 7"):
        attention_backward(
            inputs.dout, q, k, v, expected["out"], expected["lse"], cu_seqlens=lengths["cu_seqlens_q"], max_seqlen_k=7
        )


def test_distances_of_a_part_are_for_kernels_that_know_where_it_lies():
    """The Hopper kernels count them from where the part lies."""
    q = torch.empty(1, 128, 2, 64, dtype=torch.bfloat16)
    slopes = torch.ones(2)
    for given in (None, slopes):
        taken = Taken(causal=True, alibi_slopes=given)
        side, spec = _described(q, q, q, AttentionPart(128, 0, 256, 256), None, None, taken)
        for phase in ("forward", "backward"):
            assert select.BACKENDS.choose(hopper_call(phase, q, q, q, side, spec)).backend == "hopper"


@pytest.mark.interpreter
def test_weights_of_far_keys_are_those_of_near_ones_where_one_tile_has_all():
    """An ALiBi part 15,000 keys away, with an lse that float32 holds exactly: not a bit is another one."""
    generator = torch.Generator().manual_seed(0)
    q, k, v, dout = (torch.randn(1, size, 1, 16, generator=generator).half() for size in (20, 24, 24, 20))
    slopes = torch.full((1,), 4.0, requires_grad=True)

    def gradients(first_query: int) -> list[Tensor]:
        part, apart = AttentionPart(first_query, 0, 20_000, 20_000), 4 * (first_query - 24.0)
        lse = torch.full((1, 1, 20), 2.0) - 4 * torch.arange(20) - apart
        grads = attention_backward(dout, q, k, v, dout, lse, part, alibi_slopes=slopes, backend="triton")
        return [grads.q, grads.k, grads.v]

    near, far = gradients(30), gradients(15_030)
    assert all(torch.equal(one, other) and one.any() for one, other in zip(near, far))
