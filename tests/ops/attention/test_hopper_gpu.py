"""The Hopper kernels on a GPU against the fp64 oracle: what they serve of the portable kernels, and their own cases."""

from __future__ import annotations

import functools
import itertools
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

import flashtile
from flashtile import BlockMask, patterns
from flashtile._backends.launch import clear_plans
from flashtile.ops.attention.gpu import schedule
from flashtile.ops.attention.hopper import configs
from flashtile.ops.attention.hopper import schedule as hopper_schedule
from flashtile.testing import AttentionCase, Size, assert_close, assert_same, check, make_inputs, run, with_arguments
from support.attention import left_out_tiles
from support.attention.attention_cases import BASE, COMBINED, EDGES, check_again, check_forward
from support.running.covering import turns

pytestmark = [pytest.mark.gpu, pytest.mark.hopper]

_BF16 = torch.bfloat16


def _served(cases: dict[str, AttentionCase]) -> dict[str, AttentionCase]:
    """Without what stays with the portable kernels, as `explain` tells."""
    return {name: case for name, case in cases.items() if _answer(replace(case, dtype=_BF16)).backend == "hopper"}


def _answer(case: AttentionCase) -> flashtile.Explanation:
    inputs = make_inputs(case)
    given = {**inputs.tensors, **case.keywords(), "backend": "hopper", "device": "sm_90"}
    return flashtile.explain(inputs.q, inputs.k, inputs.v, **given)


_SERVED = _served(COMBINED | EDGES)


@pytest.fixture
def several_consumers(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Small calls have the tiles of large ones, which several consumers share."""
    monkeypatch.setattr(configs, "one_consumer_pays", lambda *_: False)
    monkeypatch.setattr(configs, "short_tiles_pay", lambda *_: False)
    monkeypatch.setattr(configs, "gives_at_most", lambda *_: False)
    clear_plans()
    yield
    clear_plans()


@pytest.mark.usefixtures("several_consumers")
@pytest.mark.parametrize("name, dtype", turns(_SERVED, [torch.float16, _BF16]), ids=str)
def test_kernels_agree_with_the_oracle(name: str, dtype: torch.dtype) -> None:
    """The other dtype is in `test_hopper_features_gpu.test_pairs_of_features`."""
    check(replace(_SERVED[name], dtype=dtype), "hopper", "cuda")


_LARGE = replace(BASE, seq_q=517, seq_k=643, heads=4, dtype=_BF16)
_MASKS = [{}, {"causal": True}, {"window": (200, 30)}, {"window": (90, None), "align": "top_left"}]


_EACH_WIDTH = [
    (40, 40), (64, 64), (80, 80), (96, 96), (128, 128), (160, 160), (192, 192), (256, 256), (192, 128), (136, 72),
    (64, 128), (256, 192), (24, 200), (272, 40), (192, 512), (320, 320), (512, 384), (512, 512),
]  # fmt: skip


@pytest.mark.parametrize("widths, arguments", turns(_EACH_WIDTH[:-6], _MASKS[::-1], 2), ids=str)
def test_few_tiles(widths: tuple[int, int], arguments: dict) -> None:
    """Of a single consumer each."""
    check(with_arguments(replace(_LARGE, head_dim=widths[0], head_dim_v=widths[1]), **arguments), "hopper", "cuda")


@pytest.mark.usefixtures("several_consumers")
@pytest.mark.parametrize("widths, arguments", turns(_EACH_WIDTH, [*_MASKS, {}], 2), ids=str)
def test_many_tiles(widths: tuple[int, int], arguments: dict) -> None:
    check(with_arguments(replace(_LARGE, head_dim=widths[0], head_dim_v=widths[1]), **arguments), "hopper", "cuda")


@pytest.mark.parametrize(
    "head_dim, head_dim_v, dtype",
    [(16, 16, _BF16), (32, 32, torch.float16), (40, 64, _BF16), (64, 64, torch.float16), (80, 80, _BF16),
     (96, 96, torch.float16), (128, 128, _BF16), (64, 96, torch.float16), (160, 160, _BF16), (192, 128, torch.float16),
     (256, 256, _BF16)],
    ids=str,
)  # fmt: skip
def test_all_keys_in_one_tile(head_dim: int, head_dim_v: int, dtype: torch.dtype) -> None:
    """dq is stored, not summed, where every query tile visits the only key tile; also by many thread blocks."""
    sizes = ((3, 49, 49), (3, 77, 77), (3, 128, 128), (3, 513, 77), (3, 1, 100), (400, 49, 49))
    for (batch, seq_q, seq_k), arguments in turns(sizes, ({}, {"causal": True}, {"deterministic": True}), 2):
        case = replace(_LARGE, batch=batch, heads=6, heads_kv=3, seq_q=seq_q, seq_k=seq_k, dtype=dtype)
        case = with_arguments(replace(case, head_dim=head_dim, head_dim_v=head_dim_v), **arguments)
        check(case, "hopper", "cuda")


@pytest.mark.parametrize("arguments", [{}, {"causal": True, "deterministic": True}], ids=str)
@pytest.mark.parametrize("packed", [False, True], ids=["dense", "packed"])
@pytest.mark.parametrize("head_dim", [1, 36, 65, 100, 187, 250])
def test_heads_that_are_no_multiple_of_16_bytes(head_dim: int, packed: bool, arguments: dict) -> None:
    """Their rows must begin at one; gradients are views of such rows too."""
    lengths = {"lengths_q": (129, 0, 300), "lengths_k": (129, 33, 400)} if packed else {}
    case = with_arguments(replace(_LARGE, head_dim=head_dim, head_dim_v=64, **lengths), **arguments)
    inputs = make_inputs(case, "cuda")
    rows = -(-head_dim // 8) * 8
    inputs.q, inputs.k = (
        torch.full((*t.shape[:-1], rows), float("nan"), dtype=t.dtype, device="cuda")[..., :head_dim].copy_(t)
        for t in (inputs.q, inputs.k)
    )
    check(case, "hopper", "cuda", inputs=inputs)


@pytest.mark.parametrize("head_dim, arguments", turns([64, 128, 192, 256, 512], _MASKS, 2), ids=str)
def test_packed_sequences_over_many_tiles(head_dim: int, arguments: dict) -> None:
    lengths_q, lengths_k = (129, 0, 700, 1, 64, 191), (129, 33, 300, 1, 0, 800)
    case = replace(_LARGE, head_dim=head_dim, head_dim_v=head_dim, lengths_q=lengths_q, lengths_k=lengths_k)
    check(with_arguments(case, **arguments), "hopper", "cuda")


_WIDE = [
    (264, 264, torch.float16), (384, 320, _BF16), (448, 448, torch.float16), (512, 64, _BF16), (128, 512, _BF16),
    (8, 264, torch.float16), (512, 512, torch.float16),
]  # fmt: skip


@pytest.mark.parametrize("heads, arguments", turns(_WIDE, _MASKS, 2), ids=str)
def test_backward_of_wide_heads(heads: tuple[int, int, torch.dtype], arguments: dict) -> None:
    """Sums have a fixed order, so a second run has the same bits."""
    head_dim, head_dim_v, dtype = heads
    for heads_kv, seq_q, seq_k in ((4, 517, 643), (2, 300, 65), (1, 1, 700), (2, 700, 1)):
        case = replace(_LARGE, heads_kv=heads_kv, seq_q=seq_q, seq_k=seq_k, dtype=dtype, sinks=heads_kv == 2)
        case = with_arguments(replace(case, head_dim=head_dim, head_dim_v=head_dim_v), **arguments)
        check_again(case, "hopper")


_WIDE_LENGTHS = {
    "packed": {"lengths_q": (129, 0, 700, 1, 64, 191), "lengths_k": (129, 33, 300, 1, 0, 800)},
    "packed, key lengths": {
        "lengths_q": (129, 700, 64), "lengths_k": (129, 300, 800), "key_lengths": (70, 300, 0),
    },
    "key lengths": {"key_lengths": (643, 70), "sinks": True},
    "soft cap": {"arguments": {"softcap": 3.0}},
    "packed, soft cap": {"lengths_q": (129, 0, 700, 1), "lengths_k": (129, 33, 300, 1), "arguments": {"softcap": 3.0}},
}  # fmt: skip


_WIDE_KINDS = turns([(512, 512), (320, 264), (512, 64), (128, 512), (64, 320)], _MASKS, 4)[::3]


@pytest.mark.parametrize("name, kind", turns(_WIDE_LENGTHS, _WIDE_KINDS, 3), ids=str)
def test_lengths_and_soft_caps_of_wide_heads(name: str, kind: tuple[tuple[int, int], dict]) -> None:
    """Sums have a fixed order, so a second run has the same bits."""
    changes, (heads, arguments) = _WIDE_LENGTHS[name], kind
    case = with_arguments(replace(_LARGE, head_dim=heads[0], head_dim_v=heads[1], heads_kv=2, **changes), **arguments)
    check_again(case, "hopper")


_SCORES = {
    "softcap": {"arguments": {"softcap": 3.0}},
    "alibi": {"alibi_slopes": "bh", "constant": ("alibi_slopes",)},
    "sinks": {"sinks": True},
    "all": {"alibi_slopes": "h", "constant": ("alibi_slopes",), "sinks": True, "arguments": {"softcap": 3.0}},
}


@pytest.mark.parametrize("dtype", [_BF16, torch.float16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("arguments", [{}, {"causal": True}, {"window": (90, None), "align": "top_left"}], ids=str)
@pytest.mark.parametrize("packed", [False, True], ids=["dense", "packed"])
@pytest.mark.parametrize(
    "head_dim, head_dim_v", [(40, 40), (64, 64), (128, 128), (192, 128), (256, 256), (512, 512)], ids=str
)
@pytest.mark.parametrize("scores", _SCORES)
def test_scores_that_change(
    scores: str, head_dim: int, head_dim_v: int, packed: bool, arguments: dict, dtype: torch.dtype
) -> None:
    case = replace(_LARGE, head_dim=head_dim, head_dim_v=head_dim_v, heads_kv=2, dtype=dtype, **_SCORES[scores])
    if packed:
        case = replace(case, lengths_q=(129, 0, 300, 1, 64), lengths_k=(129, 33, 200, 1, 0))
    check(with_arguments(case, **arguments), "hopper", "cuda")


def _course(name: str, keys: int) -> torch.Tensor:
    """What one column of every key holds, from the first key to the last; that of every query holds 40."""
    place = torch.arange(keys, device="cuda")
    return {
        "rising": torch.linspace(-60, -10, keys, device="cuda"),
        "falling": torch.linspace(-10, -60, keys, device="cuda"),
        "jump": torch.where(place < keys // 5, 60.0, -60.0),
        "steps": place // 128 * 3.0 - 50,
    }[name]


@pytest.mark.parametrize("dtype", [_BF16, torch.float16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("arguments", [{}, {"causal": True}, {"window": (1030, 0)}, {"window": (1030, 50)}], ids=str)
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("course", ["rising", "falling", "jump", "steps"])
def test_scores_that_move_along_the_keys(course: str, head_dim: int, arguments: dict, dtype: torch.dtype) -> None:
    """Tiles whose scores all lie far above or below those of the tiles before, all of them negative or not; with a
    mask, rows that see nothing of their first tile."""
    q, k, v = (torch.randn(1, rows, 2, head_dim, device="cuda", dtype=dtype) for rows in (1100, 1500, 1500))
    q[..., 0] = 40.0
    k[..., 0] = _course(course, 1500)[:, None].to(dtype)
    check_forward(q, k, v, "hopper", **arguments)


_LEAPING = {
    "none": [],
    "one": [(0, 3)],
    "some": [(0, 0), (1, 2), (1, 5)],
    "all": [(batch_entry, head) for batch_entry in (0, 1) for head in range(8)],
}


@pytest.mark.parametrize("dtype", [_BF16, torch.float16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("arguments", [{}, {"causal": True}, {"window": (1900, 0)}], ids=str)
@pytest.mark.parametrize("head_dim, head_dim_v", [(64, 64), (128, 128), (192, 128), (256, 256)], ids=str)
@pytest.mark.parametrize("heads", _LEAPING)
def test_weights_that_leave_their_range(
    heads: str, head_dim: int, head_dim_v: int, arguments: dict, dtype: torch.dtype
) -> None:
    """The scores of the first keys, which are visited last, are larger than the others by more than weights can be."""
    torch.manual_seed(5)
    q, k = (torch.randn(2, 2700, 8, head_dim, device="cuda", dtype=dtype) for _ in range(2))
    v = torch.randn(2, 2700, 8, head_dim_v, device="cuda", dtype=dtype)
    q[..., 0] = 50.0
    k[..., 0] = 0.0
    for batch_entry, head in _LEAPING[heads]:
        k[batch_entry, :9, head, 0] = 50.0
    out, lse = flashtile.attention(q, k, v, return_lse=True, backend="hopper", **arguments)
    again, _ = flashtile.attention(q, k, v, return_lse=True, backend="hopper", **arguments)
    assert torch.equal(out, again)
    for first in (0, 4):  # the scores of all heads at once would fill the memory
        part = [t[:, :, first : first + 4] for t in (q, k, v)]
        oracle = flashtile.attention(*(t.double() for t in part), return_lse=True, backend="reference", **arguments)
        eager = flashtile.attention(*part, return_lse=True, backend="reference", **arguments)
        assert_close("out", out[:, :, first : first + 4], oracle[0], eager[0], Size())
        assert_close("lse", lse[:, first : first + 4], oracle[1], eager[1], Size(1, 1))


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_weights_that_leave_their_range_over_a_block_mask(head_dim: int, causal: bool) -> None:
    """A list begins with any tile of keys, and may hold none or one."""
    torch.manual_seed(9)
    q, k, v = (torch.randn(1, 2700, 4, head_dim, device="cuda", dtype=_BF16) for _ in range(3))
    q[..., 0] = 50.0
    k[..., 0] = 0.0
    k[:, 300:320, 1:3, 0] = 50.0
    layout = torch.rand(4, 11, 11, generator=torch.Generator().manual_seed(1)) < 0.4
    layout[:, 5] = False
    layout[:, 7] = True
    block_mask = BlockMask.from_layout(layout[None].cuda(), (256, 256), 2700, 2700)
    check_forward(q, k, v, "hopper", block_mask=block_mask, causal=causal)


_SPREADS = {
    "normal": lambda q, k: (q, k),
    "wide": lambda q, k: (q * 16, k),
    "growing": lambda q, k: (q, k * torch.linspace(0.05, 20, k.shape[1], device="cuda", dtype=k.dtype)[:, None, None]),
    "sink": lambda q, k: (q, torch.cat([k[:, :1] * 50, k[:, 1:]], 1)),
    "spike": lambda q, k: (q, torch.cat([k[:, :900], k[:, 900:901] * 100, k[:, 901:]], 1)),
}


#: Of 64, 128, 192 and 256 columns, some causal, some in each dtype.
_KINDS = [(64, False, _BF16), (128, True, torch.float16), (192, False, torch.float16), (256, True, _BF16)]


@pytest.mark.parametrize("values, kind", turns(_SPREADS, _KINDS, 2), ids=str)
def test_bits_of_a_row_depend_on_that_row_alone(values: str, kind: tuple[int, bool, torch.dtype]) -> None:
    """Not on other rows of its tile, other heads or batch entries, whose references rise where its own does not."""
    head_dim, causal, dtype = kind
    torch.manual_seed(7)
    q, k, v = (torch.randn(2, 1300, 3, head_dim, device="cuda", dtype=dtype) for _ in range(3))
    q, k = _SPREADS[values](q, k)
    call = {"causal": causal, "return_lse": True, "backend": "hopper"}
    out, lse = flashtile.attention(q, k, v, **call)
    mine = torch.zeros(2, 1300, 3, dtype=torch.bool, device="cuda")
    mine[0, 5::9, 0] = True
    mine[0, 64:128, 2] = True
    q[~mine] = q[~mine].flip(-1) * 30
    k[1], v[1] = 7.0, float("nan")
    other_out, other_lse = flashtile.attention(q, k, v, **call)
    assert torch.equal(out[mine], other_out[mine])
    assert torch.equal(lse.mT[mine], other_lse.mT[mine])
    alone = flashtile.attention(q[:1, :, :1], k[:1, :, :1], v[:1, :, :1], causal=causal, backend="hopper")
    assert torch.equal(alone[:, 5::9], out[:1, 5::9, :1])


@pytest.mark.parametrize("values, kind", turns(_SPREADS, _KINDS[::-1], 2), ids=str)
def test_values_of_every_kind(values: str, kind: tuple[int, bool, torch.dtype]) -> None:
    head_dim, causal, dtype = kind
    torch.manual_seed(8)
    q, k, v = (torch.randn(1, 2100, 2, head_dim, device="cuda", dtype=dtype) for _ in range(3))
    q, k = _SPREADS[values](q, k)
    check_forward(q, k, v, "hopper", causal=causal)


@pytest.mark.parametrize("exponents", [(-4.0, 0.0), (0.0, -9.6)], ids=["rising", "falling"])
@pytest.mark.parametrize("dtype", [_BF16, torch.float16], ids=["bf16", "fp16"])
def test_many_small_weights_beside_a_large_one(dtype: torch.dtype, exponents: tuple[float, float]) -> None:
    """Thousands of equal weights that together are as heavy as the largest one. All are rounded alike, so that what a
    format cannot hold would show in the sum."""
    q, k = (torch.zeros(1, 8192, 2, 64, device="cuda", dtype=dtype) for _ in range(2))
    q[..., 0] = 8.0  # times 1/8
    k[..., 0] = exponents[1]
    k[:, -1, :, 0] = exponents[0]
    v = torch.rand(1, 8192, 2, 64, device="cuda", dtype=dtype)
    check_forward(q, k, v, "hopper")


@pytest.mark.parametrize("causal", [False, True])
def test_large_values_beside_scores_that_rise(causal: bool) -> None:
    """Sums of weights alone would fit, their products with such values would not."""
    q, k = (torch.zeros(1, 2000, 2, 64, device="cuda", dtype=_BF16) for _ in range(2))
    q[..., 0] = 1.0
    k[:, :700, :, 0] = 160.0  # times 1/8: weights up to 2^28.9
    v = torch.full_like(q, 2.0**105)
    out = flashtile.attention(q, k, v, causal=causal, backend="hopper")
    assert_same(out, v)


def test_weights_that_leave_their_range_in_some_packed_sequences() -> None:
    torch.manual_seed(6)
    lengths = torch.tensor([1300, 40, 0, 2100, 900])
    cu_seqlens = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)]).to("cuda", torch.int32)
    q, k, v = (torch.randn(int(lengths.sum()), 4, 128, device="cuda", dtype=_BF16) for _ in range(3))
    q[..., 0] = 50.0
    k[..., 0] = 0.0
    k[1400:1500, 1::2, 0] = 50.0  # the first keys of the fourth sequence
    bounds = {"max_seqlen_q": 2100, "max_seqlen_k": 2100}
    check_forward(q, k, v, "hopper", cu_seqlens_q=cu_seqlens, cu_seqlens_k=cu_seqlens, causal=True, **bounds)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_nan_and_infinite_scores_stay_in_their_rows(head_dim: int, bad: float) -> None:
    q, k, v = (torch.randn(1, 1700, 2, head_dim, device="cuda", dtype=_BF16) for _ in range(3))
    k[..., 0] = k[..., 0].abs() + 0.1
    clean = flashtile.attention(q, k, v, causal=True, backend="hopper")
    broken = q.clone()
    seen = [3, 200, 699, 1500]
    broken[0, seen, :, 0] = bad
    out, lse = flashtile.attention(broken, k, v, causal=True, return_lse=True, backend="hopper")
    rows = torch.zeros(1700, dtype=torch.bool, device="cuda")
    rows[seen] = True
    assert out[:, rows].isnan().all() and lse[..., rows].isnan().all()
    oracle = flashtile.attention(q.double(), k.double(), v.double(), causal=True, backend="reference")
    assert_close("out", out[:, ~rows], oracle[:, ~rows], clean[:, ~rows])


@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_an_infinite_gradient_stays_in_its_column_of_dv(head_dim: int) -> None:
    """delta of that row is not finite, and nor are dq and dk; its weights are."""
    q, k, v, dout = (torch.randn(1, 300, 2, head_dim, device="cuda", dtype=_BF16) for _ in range(4))
    v.requires_grad_()
    out = flashtile.attention(q, k, v, causal=True, backend="hopper")
    (clean,) = torch.autograd.grad(out, v, dout, retain_graph=True)
    dout[0, 200, :, 5] = torch.inf
    (broken,) = torch.autograd.grad(out, v, dout)
    others = torch.arange(head_dim, device="cuda") != 5
    assert_same(broken[..., others], clean[..., others])
    assert broken[:, :201, :, 5].isinf().all()  # of keys that the row does not see 0 · inf, NaN, as in eager mode


@pytest.mark.parametrize("exponent", [-40, -80])
@pytest.mark.parametrize("head_dim", [64, 128, 192])
def test_tiny_scales(head_dim: int, exponent: int) -> None:
    """lse in units of scores is as much larger; below 2⁻⁶⁴ it is not an operand."""
    q, k, v, dout = (torch.randn(1, 300, 2, head_dim, device="cuda", dtype=_BF16) for _ in range(4))
    q, k, v = q * 2.0 ** (-exponent / 2 - 2), k * 2.0 ** (-exponent / 2 - 2), v[..., :128]
    dout = dout[..., :128]
    expected, mine, eager = (
        torch.autograd.grad(flashtile.attention(*given, scale=2.0**exponent, backend=backend), given, dout.to(dtype))
        for dtype, backend in ((torch.float64, "reference"), (_BF16, "hopper"), (_BF16, "reference"))
        for given in [[x.to(dtype).requires_grad_() for x in (q, k, v)]]
    )
    for name, exact, of_mine, of_eager in zip("qkv", expected, mine, eager):
        scale = exact.abs().max()
        assert_close(name, of_mine.double() / scale, exact / scale, of_eager.double() / scale, Size())


def test_a_large_sink_and_rows_that_see_nothing_else() -> None:
    q, k, v = (torch.randn(1, 96, 2, 64, device="cuda", dtype=_BF16) for _ in range(3))
    sinks = torch.tensor([200.0, -torch.inf], device="cuda")
    _, lse = check_forward(q, k[:, :64], v[:, :64], "hopper", sinks=sinks, causal=True)
    assert (lse[:, 0].round() == 200).all() and (lse[:, 1, :32] == -torch.inf).all()


@pytest.mark.parametrize("batch", [1, 300])
def test_rows_past_the_last_sequence(batch: int) -> None:
    cu_seqlens = torch.arange(0, 7 * batch + 1, 7, device="cuda", dtype=torch.int32)
    q, k, v = (torch.randn(7 * batch + 150, 2, 64, device="cuda", dtype=_BF16) for _ in range(3))
    for cu_q, cu_k in ((cu_seqlens, cu_seqlens.long()), (cu_seqlens.long(), cu_seqlens)):
        out, lse = flashtile.attention_varlen(q, k, v, cu_q, cu_k, causal=True, return_lse=True, backend="hopper")
        assert not out[7 * batch :].any() and (lse[:, 7 * batch :] == -torch.inf).all()
        dense = [t[: 7 * batch].unflatten(0, (batch, 7)) for t in (q, k, v)]
        oracle, eager = (
            flashtile.attention(*(t.to(dtype) for t in dense), causal=True, backend="reference").flatten(0, 1)
            for dtype in (torch.float64, _BF16)
        )
        assert_close("out", out[: 7 * batch], oracle, eager)


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("causal", [False, True])
def test_programs_with_many_tiles_each(head_dim: int, causal: bool) -> None:
    """More tiles than multiprocessors: the order of tiles, the counters, and what a tile leaves behind for the next."""
    case = replace(_LARGE, batch=6, heads=8, head_dim=head_dim, head_dim_v=head_dim, seq_q=1300, seq_k=1000)
    check(with_arguments(case, causal=causal), "hopper", "cuda")


@pytest.mark.usefixtures("several_consumers")
@pytest.mark.parametrize(
    "changes, arguments",
    [
        ({"seq_q": 1300, "seq_k": 1500}, {"softcap": 3.0}),
        ({"seq_q": 1300, "seq_k": 1}, {}),
        ({"lengths_q": (1500, 0, 1, 300), "lengths_k": (1200, 33, 1, 0)}, {}),
        ({"seq_q": 2300, "seq_k": 2200}, {"causal": True}),
        ({"seq_q": 2200, "seq_k": 2500}, {"causal": True, "align": "top_left"}),
        ({"lengths_q": (2200, 0, 1, 200), "lengths_k": (2300, 33, 1, 0)}, {"causal": True}),
    ],
    ids=str,
)
def test_three_consumers(changes: dict, arguments: dict) -> None:
    """Calls so long that three take turns: as often as there are key tiles, which may be never."""
    case = replace(_LARGE, batch=1, head_dim=64, head_dim_v=64, **changes)
    check(with_arguments(case, **arguments), "hopper", "cuda")


@pytest.mark.parametrize(
    "arguments", [{"causal": True}, {"causal": True, "align": "top_left"}, {"causal": True, "deterministic": True}, {}],
    ids=str,
)  # fmt: skip
@pytest.mark.parametrize("seq_q, seq_k", [(1100, 1000), (1030, 1300)])
def test_long_walks(seq_q: int, seq_k: int, arguments: dict) -> None:
    """There are enough queries and heads for each key tile that the steps which a mask or the end of the keys cuts have
    a loop of their own. The end of the keys cuts all steps of the last tile."""
    sizes = {"batch": 32, "heads": 8, "heads_kv": 1, "seq_q": seq_q, "seq_k": seq_k}
    check(with_arguments(replace(_LARGE, **sizes, head_dim=128, head_dim_v=128), **arguments), "hopper", "cuda")


@pytest.mark.parametrize("changes", [{}, {"alibi_slopes": "h", "constant": ("alibi_slopes",)}], ids=["plain", "alibi"])
@pytest.mark.parametrize("seq_q, seq_k", [(4096, 4096), (4100, 4300)])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_walks_that_go_up(head_dim: int, seq_q: int, seq_k: int, changes: dict) -> None:
    """Each line has enough key tiles that programs take a second one, whose queries come in the opposite order."""
    sizes = {"batch": 1, "heads": 16, "heads_kv": 8, "seq_q": seq_q, "seq_k": seq_k}
    case = replace(_LARGE, **sizes, head_dim=head_dim, head_dim_v=head_dim, **changes)
    check(with_arguments(case, causal=True), "hopper", "cuda")


_WALKS = [{}, {"causal": True}, {"causal": True, "deterministic": True}, {"window": (1100, 0)}, {"softcap": 5.0}]


@pytest.mark.parametrize(
    "arguments, heads", turns(_WALKS, [(64, 64), (104, 80), (128, 128), (192, 128), (256, 256), (64, 64)], 3), ids=str
)
def test_heads_that_share_keys_among_several_walks(arguments: dict, heads: tuple[int, int]) -> None:
    """So few key tiles that the query heads of a key/value head are divided."""
    head_dim, head_dim_v = heads
    sizes = {"batch": 1, "heads": 12, "heads_kv": 2, "seq_q": 1500, "seq_k": 1400}
    case = replace(_LARGE, **sizes, head_dim=head_dim, head_dim_v=head_dim_v)
    check(with_arguments(case, **arguments), "hopper", "cuda")


@pytest.mark.parametrize("arguments", [{"causal": True}, {"causal": True, "deterministic": True}], ids=str)
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_heads_that_share_keys_are_divided_for_the_cache(head_dim: int, arguments: dict) -> None:
    """There are enough walks for all programs, which would find too little in the L2 cache (`shares_in_cache`)."""
    sizes = {"batch": 12, "heads": 16, "heads_kv": 2, "seq_q": 1100, "seq_k": 1100}
    case = replace(_LARGE, **sizes, head_dim=head_dim, head_dim_v=head_dim)
    check(with_arguments(case, **arguments), "hopper", "cuda")


@pytest.mark.parametrize("dtype", [_BF16, torch.float16], ids=["bf16", "fp16"])
@pytest.mark.parametrize(
    "arguments",
    [{}, {"causal": True}, {"causal": True, "softcap": 5.0}, {"dropout_p": 0.2}, {"window": (40, 30)}],
    ids=str,
)
@pytest.mark.parametrize("head_dim, head_dim_v", [(176, 176), (192, 256), (208, 208), (256, 256)], ids=str)
def test_short_sequences_of_wide_heads(head_dim: int, head_dim_v: int, arguments: dict, dtype: torch.dtype) -> None:
    """Two key tiles, whose dq a thread block sums alone, so that it has the same bits again; also several lines."""
    lines = torch.cuda.get_device_properties(0).multi_processor_count
    for batch in (lines, 3 * lines):
        sizes = {"batch": batch, "heads": 1, "heads_kv": 1, "seq_q": 111, "seq_k": 128, "dtype": dtype}
        case = with_arguments(replace(_LARGE, **sizes, head_dim=head_dim, head_dim_v=head_dim_v), **arguments)
        check_again(case, "hopper", names=("dq", "dk", "dv"))


_WHOLE_LINES: list[dict[str, Any]] = [
    {},
    {"arguments": {"causal": True}},
    {"arguments": {"window": (90, 60)}, "dtype": torch.float16},
    {"arguments": {"causal": True, "deterministic": True, "softcap": 5.0}, "sinks": True},
    {"heads": 3, "seq_q": 100, "seq_k": 200},
    {"arguments": {"dropout_p": 0.2}, "seq_q": 120, "seq_k": 150},
    {"bias": "b1qk", "seq_q": 130, "seq_k": 200},
]


@pytest.mark.parametrize(
    "changes, kind", turns(_WHOLE_LINES, [(32, 32, 500), (64, 64, 300), (80, 104, 200), (128, 128, 200)], 2), ids=str
)
def test_thread_blocks_of_whole_lines_sum_dq_alone(changes: dict, kind: tuple[int, int, int]) -> None:
    """Each has as many lines as any other one. Their sums have one order: equal bits."""
    head_dim, head_dim_v, rows = kind
    lines = torch.cuda.get_device_properties(0).multi_processor_count
    sizes = {"batch": lines, "heads": 1, "heads_kv": 1, "seq_q": rows, "seq_k": rows + 33}
    others = {name: value for name, value in changes.items() if name != "arguments"}
    case = replace(_LARGE, **{**sizes, **others}, head_dim=head_dim, head_dim_v=head_dim_v)
    case = with_arguments(case, **changes.get("arguments", {}))
    check_again(case, "hopper", names=("dq", "dk", "dv"))


@pytest.mark.parametrize("heads", [3, 7])
@pytest.mark.parametrize(
    "changes",
    [{"lengths_q": (700, 0, 900), "lengths_k": (650, 70, 1000), "batch": 3}, {"block_mask": (128, 128)}],
    ids=["packed", "blocks"],
)
def test_heads_among_several_walks_of_packed_and_listed_tiles(heads: int, changes: dict) -> None:
    sizes = {"batch": 1, "heads": heads, "heads_kv": 1, "seq_q": 1500, "seq_k": 1400, "dtype": torch.float16}
    case = replace(_LARGE, **{**sizes, **changes}, head_dim=128, head_dim_v=128)
    check(with_arguments(case, causal=True), "hopper", "cuda")


@pytest.fixture
def plans_of_this_test() -> Iterator[None]:
    """No plan of the backward is from before or stays, as the test changes what they depend on."""
    clear_plans()
    yield
    clear_plans()


@pytest.mark.parametrize("changes", [{}, {"alibi_slopes": "h", "constant": ("alibi_slopes",)}], ids=["plain", "alibi"])
@pytest.mark.parametrize("seq_q, seq_k, heads_kv", [(512, 2304, 4), (500, 2190, 2)])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.usefixtures("plans_of_this_test")
def test_walks_that_begin_where_others_are(
    head_dim: int, seq_q: int, seq_k: int, heads_kv: int, changes: dict, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where the L2 cache would not hold what a walk reads."""
    monkeypatch.setattr(hopper_schedule, "WALK_BEYOND_CACHE", 512)
    sizes = {"batch": 8, "heads": 4, "heads_kv": heads_kv, "seq_q": seq_q, "seq_k": seq_k}
    check(replace(_LARGE, **sizes, head_dim=head_dim, head_dim_v=head_dim, **changes), "hopper", "cuda")


_BANDS = [
    {"causal": True}, {"causal": True, "align": "top_left"}, {"window": (70, 0)}, {"window": (5, 200)},
    {"window": (None, 130)}, {"window": (0, 0)},
]  # fmt: skip


@pytest.mark.parametrize("arguments", _BANDS, ids=str)
@pytest.mark.parametrize(
    "changes",
    [
        {"batch": 3, "heads": 8, "seq_q": 901, "seq_k": 1333},
        {"batch": 3, "heads": 8, "seq_q": 1333, "seq_k": 901},
        {"lengths_q": (700, 0, 1, 300), "lengths_k": (500, 33, 1, 0)},
    ],
    ids=str,
)
@pytest.mark.parametrize("head_dim", [192, 256])
def test_consumers_that_skip_key_tiles(head_dim: int, changes: dict, arguments: dict) -> None:
    """Tiles of more rows than a key tile has keys: a band hides key tiles from one consumer that another visits."""
    case = replace(_LARGE, head_dim=head_dim, head_dim_v=head_dim, **changes)
    check(with_arguments(case, **arguments), "hopper", "cuda")


def test_strided_and_expanded_inputs() -> None:
    storage = torch.randn(2, 3, 300, 3, 8, 96, device="cuda", dtype=_BF16)
    q, k, v = storage[:, 1].unbind(2)  # heads interleaved, a batch stride three times too wide
    k = k[..., 16:80].transpose(1, 2).contiguous().transpose(1, 2)
    q, v = q[..., 8:72], v[:, :, :1].expand(-1, -1, 8, -1)
    oracle = flashtile.attention(q.double(), k.double(), v.double(), causal=True, backend="reference")
    eager = flashtile.attention(q, k, v, causal=True, backend="reference")
    assert_close("out", flashtile.attention(q, k, v, causal=True, backend="hopper"), oracle, eager)
    with pytest.raises(ValueError, match="multiples of 16 bytes"):
        flashtile.attention(storage[:, 1, :, 0, :, 3:67], k, v, backend="hopper")


@pytest.mark.parametrize("backend", ["hopper", "triton", "split"])
def test_a_batch_of_one_may_have_any_stride(backend: str) -> None:
    """Such tensors are contiguous, so that nobody can make them so."""
    q, k, v = torch.randn(3, 200, 2, 64, 1, device="cuda", dtype=_BF16).permute(0, 4, 1, 2, 3)
    assert q.stride(0) == 1 and q.is_contiguous()
    results = []
    for given in ((q, k, v), [t.reshape(200, 2, 64)[None] for t in (q, k, v)]):
        leaves = [t.detach().requires_grad_() for t in given]
        out = flashtile.attention(*leaves, causal=True, deterministic=True, backend=backend)
        results.append((out, *torch.autograd.grad(out.sum(), leaves)))
    assert all(map(torch.equal, *results))


def test_tensors_past_two_to_the_31_elements() -> None:
    shape, stride = (3, 200, 2, 64), 2**30 + 4096
    storage = torch.zeros(2 * stride + 2**20, device="cuda", dtype=_BF16)
    small = [torch.randn(shape, device="cuda", dtype=_BF16) for _ in range(3)]
    for strides in ((stride, 128, 64, 1), (128 * 200, 128, stride, 1)):
        large = [storage.as_strided(shape, strides, 2**17 * i).copy_(t) for i, t in enumerate(small)]
        actual, expected = (flashtile.attention(*tensors, causal=True, backend="hopper") for tensors in (large, small))
        assert torch.equal(actual, expected)


_FAR = {
    "batch": ((2, 200, 2, 64), (2**31 + 8, 128, 64, 1)),
    "row": ((2, 2, 2, 64), (128, 2**31 + 8, 64, 1)),
    "head": ((2, 200, 2, 64), (200 * 64, 64, 2**31 + 8, 1)),
}


@pytest.mark.parametrize("backend", ["hopper", "triton"])
@pytest.mark.parametrize("far", _FAR)
def test_gradients_with_strides_past_two_to_the_31(far: str, backend: str) -> None:
    shape, strides = _FAR[far]
    storage = torch.zeros(2**31 + 2**20, device="cuda", dtype=_BF16)
    small = [torch.randn(shape, device="cuda", dtype=_BF16) for _ in range(4)]
    large = [storage.as_strided(shape, strides, 2**17 * i).copy_(t) for i, t in enumerate(small)]
    results = []
    for *inputs, dout in (small, large):
        leaves = [t.detach().requires_grad_() for t in inputs]
        out = flashtile.attention(*leaves, causal=True, deterministic=True, backend=backend)
        results.append((out, *torch.autograd.grad(out, leaves, dout)))
    assert all(map(torch.equal, *results))


def test_gradients_of_a_sequence_of_two_to_the_31_elements() -> None:
    """Far from the edges of a part of it, a window makes the part's results those of the whole."""
    seq, part, edge = 2**19, 512, 128
    q, k, v, dout = (torch.randn(1, seq, 32, 128, device="cuda", dtype=_BF16) for _ in range(4))
    leaves = [t.requires_grad_() for t in (q, k, v)]
    out = flashtile.attention(*leaves, window=(64, 0), backend="hopper")
    actual = dict(zip(("out", "dq", "dk", "dv"), (out.detach(), *torch.autograd.grad(out, leaves, dout))))
    for first in (0, seq // 2 - 100, seq - part):
        inside = slice(0 if first == 0 else edge, part if first + part == seq else part - edge)
        expected = []
        for dtype in (torch.float64, _BF16):
            parts = [t[:, first : first + part].detach().to(dtype).requires_grad_() for t in (q, k, v)]
            of_part = flashtile.attention(*parts, window=(64, 0), backend="reference")
            grads = torch.autograd.grad(of_part, parts, dout[:, first : first + part].to(dtype))
            expected.append((of_part.detach(), *grads))
        for (name, value), oracle, eager in zip(actual.items(), *expected):
            mine = value[:, first : first + part]
            assert_close(f"{name} at {first}", *(t[:, inside] for t in (mine, oracle, eager)))


@pytest.mark.parametrize(
    "changes, arguments",
    [
        ({"seq_q": 400, "seq_k": 4000}, {"causal": True, "align": "top_left", "deterministic": True}),
        ({"lengths_q": (1, 0, 900, 0, 150), "lengths_k": (3000, 900, 1, 2300, 700)}, {"deterministic": True}),
        ({"seq_q": 400, "seq_k": 4000}, {"causal": True, "align": "top_left"}),
    ],
    ids=str,
)
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_keys_that_no_query_sees(head_dim: int, changes: dict, arguments: dict) -> None:
    """Their tiles take so little time that a warpgroup which is held up comes to them late. It once waited without an
    end, in some order of events (`test_hopper_emulated`)."""
    case = with_arguments(replace(_LARGE, heads=16, head_dim=head_dim, head_dim_v=head_dim, **changes), **arguments)
    check_again(case, "hopper", 20, ("dk", "dv"))


@pytest.mark.parametrize("packed", [False, True], ids=["dense", "packed"])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_backwards_in_order_on_two_streams(head_dim: int, packed: bool) -> None:
    """Each has the multiprocessors that the other left, so that some of its programs begin when others have ended;
    nobody may wait for those that have not begun (`test_programs_that_begin_late`)."""
    lengths = {"lengths_q": (700, 300, 1100, 90), "lengths_k": (700, 300, 1100, 90)} if packed else {}
    case = replace(_LARGE, heads=16, head_dim=head_dim, head_dim_v=head_dim, seq_q=1500, seq_k=1500, **lengths)
    case = with_arguments(case, causal=True, deterministic=True)
    inputs = make_inputs(case, "cuda")
    first = check(case, "hopper", inputs=inputs)
    streams = [torch.cuda.Stream() for _ in range(2)]
    torch.cuda._sleep(100_000_000)  # until all calls are in line
    for stream in streams:
        stream.wait_stream(torch.cuda.current_stream())
    found = []
    for turn in range(40):
        with torch.cuda.stream(streams[turn % 2]):
            found.append(run(case, inputs, "hopper"))
    torch.cuda.synchronize()
    assert all(torch.equal(each[name], first[name]) for each in found for name in first)


@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_hundred_runs_give_the_same_bits(head_dim: int) -> None:
    case = replace(_LARGE, batch=4, heads=12, heads_kv=3, head_dim=head_dim, head_dim_v=head_dim, seq_q=1500)
    inputs = make_inputs(with_arguments(case, causal=True), "cuda")
    first = run(with_arguments(case, causal=True), inputs, "hopper")
    for _ in range(99):
        out, lse = flashtile.attention(inputs.q, inputs.k, inputs.v, causal=True, return_lse=True, backend="hopper")
        assert torch.equal(out, first["out"]) and torch.equal(lse, first["lse"])


@pytest.mark.parametrize("rows", ["dense", "one query each"])
def test_a_cuda_graph_and_eager_calls_do_not_share_their_counters(rows: str) -> None:
    """Nor does the memory of a graph's results begin where the counters of its launch lie."""
    if rows == "dense":
        q, k, v = (torch.randn(4, 1500, 16, 64, device="cuda", dtype=_BF16) for _ in range(3))
        call = functools.partial(flashtile.attention, q, k, v, causal=True, return_lse=True, backend="hopper")
    else:
        lengths = torch.arange(2048, 4096, 64)
        starts = [torch.tensor([0, *counts], device="cuda").cumsum(0).int() for counts in ([1] * 32, lengths)]
        q, k, v = (torch.randn(n, 32, 128, device="cuda", dtype=_BF16) for n in (32, *[int(lengths.sum())] * 2))
        options = {"max_seqlen_q": 1, "max_seqlen_k": 4096, "causal": True, "return_lse": True, "backend": "hopper"}
        call = functools.partial(flashtile.attention_varlen, q, k, v, *starts, **options)
    expected = call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = [call() for _ in range(3)]
    side = torch.cuda.Stream()
    torch.cuda.synchronize()
    for _ in range(20):
        for tensor in itertools.chain(*captured):
            tensor.fill_(7)
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            graph.replay()
        eager = [call() for _ in range(3)]
        torch.cuda.synchronize()
        for results in (*captured, *eager):
            assert all(torch.equal(found, wanted) for found, wanted in zip(results, expected))


_LISTS = {
    "tiles": ((128, 128), {}),
    "wide_queries-causal": ((256, 128), {"causal": True}),
    "wide_keys-window": ((128, 384), {"window": (200, 30)}),
    "small": ((64, 64), {}),
    "small_queries-causal": ((64, 128), {"causal": True}),
    "small_keys": ((384, 64), {}),
}


_HEADS_OF_LISTS = [(40, 40), (64, 64), (96, 96), (128, 128), (192, 128), (256, 256), (64, 64)]


@pytest.mark.parametrize("lists, heads", turns(_LISTS, _HEADS_OF_LISTS, 3), ids=str)
def test_block_masks(lists: str, heads: tuple[int, int]) -> None:
    """A mask for each head, of grouped heads; tiles that stick out, and some that lie past the end as a whole."""
    head_dim, head_dim_v = heads
    tile, arguments = _LISTS[lists]
    case = replace(_LARGE, heads_kv=2, head_dim=head_dim, head_dim_v=head_dim_v, block_mask=tile)
    check(with_arguments(case, **arguments), "hopper", "cuda")


@pytest.mark.parametrize("lists, heads", turns(_LISTS, _HEADS_OF_LISTS[::-1], 3), ids=str)
def test_block_masks_of_packed_sequences(lists: str, heads: tuple[int, int]) -> None:
    """Lists are those of the longest sequence; shorter ones end within their tiles, or before them."""
    head_dim, head_dim_v = heads
    tile, arguments = _LISTS[lists]
    lengths = {"lengths_q": (700, 0, 1, 130, 1100), "lengths_k": (650, 70, 1, 390, 1000), "batch": 5}
    case = replace(_LARGE, heads_kv=2, head_dim=head_dim, head_dim_v=head_dim_v, block_mask=tile, **lengths)
    for deterministic in (False, True):
        check(with_arguments(case, deterministic=deterministic, **arguments), "hopper", "cuda")


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("scores", _SCORES)
def test_block_masks_and_scores_that_change(scores: str, head_dim: int) -> None:
    case = replace(_LARGE, head_dim=head_dim, head_dim_v=head_dim, block_mask=(128, 128), **_SCORES[scores])
    check(case, "hopper", "cuda")


def _pattern(name: str, seq: int) -> BlockMask:
    if name == "documents":
        return patterns.documents(lengths=(17, 400, 1, 128, 300, seq - 846), causal=True, device="cuda")
    if name == "no_document":
        ids = torch.arange(seq, device="cuda") // 300
        return patterns.documents(ids=torch.where(ids % 2 == 0, ids, -1), device="cuda")
    if name == "window":
        return patterns.sliding_window(seq, left=200, right=100, global_tokens=70, device="cuda")
    if name == "big_bird":
        return patterns.big_bird(seq, block=128, heads=4, device="cuda")
    layout = torch.rand(-(-seq // 128), -(-seq // 128), generator=torch.Generator().manual_seed(0)) < float(name)
    return BlockMask.from_layout(layout.cuda(), (128, 128), seq, seq)


@pytest.mark.parametrize("seq", [1500, 2048])
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("name", ["documents", "no_document", "window", "big_bird", "0.05", "0.5"])
def test_patterns(name: str, head_dim: int, seq: int) -> None:
    """Also rows without a tile, and NaN from above at rows that see nothing."""
    block_mask = _pattern(name, seq)
    q, k, v, dout = (torch.randn(2, seq, 4, head_dim, device="cuda", dtype=_BF16) for _ in range(4))
    blind = ~block_mask.to_dense().any(dim=3)[0, 0]
    dout[:, blind] = float("nan")

    def results(dtype: torch.dtype, backend: str) -> dict[str, torch.Tensor]:
        leaves = [t.to(dtype).requires_grad_() for t in (q, k, v)]
        out, lse = flashtile.attention(*leaves, block_mask=block_mask, return_lse=True, backend=backend)
        grads = torch.autograd.grad(out, leaves, dout.to(dtype))
        return dict(zip(("out", "lse", "dq", "dk", "dv"), (out.detach(), lse.detach(), *grads)))

    actual, oracle, eager = results(_BF16, "hopper"), results(torch.float64, "reference"), results(_BF16, "reference")
    for which, value in actual.items():
        assert_close(which, value, oracle[which], eager[which])
    assert not actual["out"][:, blind].any() and actual["lse"][..., blind].isneginf().all()


@pytest.mark.parametrize("packed", [False, True], ids=["dense", "packed"])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_ordered_gradients_of_block_masks_have_the_same_bits_in_every_run(head_dim: int, packed: bool) -> None:
    case = replace(_LARGE, heads_kv=2, seq_q=1500, seq_k=1700, head_dim=head_dim, head_dim_v=head_dim)
    if packed:
        case = replace(case, batch=4, lengths_q=(1500, 300, 0, 900), lengths_k=(1700, 333, 60, 1200))
    case = with_arguments(replace(case, block_mask=(128, 256)), deterministic=True)
    check_again(case, "hopper", 20)


def test_automatic_choice_on_this_gpu() -> None:
    q = torch.randn(1, 65, 2, 64, device="cuda", dtype=_BF16)
    assert flashtile.explain(q, q, q).backend == "hopper"
    assert torch.equal(flashtile.attention(q, q, q), flashtile.attention(q, q, q, backend="hopper"))
    assert flashtile.explain(q, q, q, dropout_p=0.1).backend == "hopper"
    few, wide = q[:, :64], q.float()
    assert flashtile.explain(few, few, few).backend == flashtile.explain(wide, wide, wide).backend == "triton"


@pytest.mark.multi_gpu
def test_inputs_on_a_device_that_is_not_current() -> None:
    inputs = make_inputs(with_arguments(_LARGE, causal=True), "cuda:1")
    with torch.cuda.device(0):
        check(with_arguments(_LARGE, causal=True), "hopper", "cuda:1", inputs=inputs)


@pytest.mark.parametrize("packed", [False, True], ids=["dense", "packed"])
@pytest.mark.parametrize("heads_kv, divides", [(2, False), (2, True), (8, True)])  # but for the first lines may rise
@pytest.mark.parametrize("window", [None, (600, None)], ids=["causal", "window"])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.usefixtures("plans_of_this_test")
def test_ordered_gradients_have_the_same_bits_in_every_run(
    head_dim: int, window: tuple[int, None] | None, heads_kv: int, divides: bool, packed: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Heads that share keys walk together, or each by itself."""
    if not divides:
        monkeypatch.setattr(schedule, "_STEPS_OF_A_SUM", 2**31)
    lengths = {"lengths_q": (900, 40, 0, 1500), "lengths_k": (1000, 7, 30, 1500)} if packed else {}
    case = replace(
        BASE, seq_q=1500, seq_k=1700, heads=8, heads_kv=heads_kv, head_dim=head_dim, head_dim_v=head_dim, dtype=_BF16
    )
    case = with_arguments(replace(case, **lengths), causal=True, window=window, deterministic=True)
    check_again(case, "hopper", 30)


def test_no_tile_is_left_out() -> None:
    """Of processes that share the GPU, none finds results that nobody wrote (`left_out_tiles`)."""
    command = [sys.executable, left_out_tiles.__file__, "15"]
    processes = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(6)]
    lines = [line for process in processes for line in process.communicate()[0].splitlines()]
    assert len(lines) == 6 * left_out_tiles.CASES and not [line for line in lines if not line.endswith(": 0 0 0 0")]
