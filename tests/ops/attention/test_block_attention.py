"""Attention with a block mask: against dense attention with the same mask written out, on every backend."""

from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.nn.attention import flex_attention

import flashtile
from flashtile import BlockMask, patterns
from flashtile.ops.attention.cpu import tiles
from flashtile.testing import assert_close, assert_same
from support.running.places import places


class Case(NamedTuple):
    """A call whose mask has empty, full and partial tiles.

    Attributes:
        tile: of the mask as a user gives it.
        outer: batch entries and heads of the mask, 1 = shared.
        bias: with a bias that wants a gradient.
    """

    seq_q: int
    seq_k: int
    tile: tuple[int, int] = (64, 64)
    outer: tuple[int, int] = (1, 1)
    heads: int = 2
    heads_kv: int = 2
    head_dim: int = 16
    bias: bool = False
    arguments: dict[str, Any] = {}
    dtype: torch.dtype = torch.float32


CASES = {
    "shared": Case(130, 130),
    "small_tiles_of_batch": Case(100, 200, (16, 32), (2, 1)),
    "of_heads": Case(200, 150, (128, 128), (1, 2)),
    "of_grouped_heads": Case(130, 200, (64, 128), (2, 4), heads=4),
    "causal": Case(130, 130, arguments={"causal": True}),
    "window_softcap": Case(130, 130, arguments={"window": (40, 3), "softcap": 5.0}),
    "bias": Case(130, 192, outer=(1, 2), bias=True),
    "bias_causal_odd_tiles": Case(96, 96, (48, 48), bias=True, arguments={"causal": True}),
    "dropout": Case(70, 70, arguments={"dropout_p": 0.2}),
}
LARGE = {
    "d64": Case(1100, 900, (128, 128), (1, 2), head_dim=64, dtype=torch.bfloat16),
    "d128_grouped": Case(1024, 1024, (128, 128), heads=4, head_dim=128, dtype=torch.bfloat16),
    "d128_small_tiles": Case(777, 1024, (16, 256), (2, 4), heads=4, head_dim=128, dtype=torch.float16),
    "d256_causal": Case(600, 600, head_dim=256, dtype=torch.bfloat16, arguments={"causal": True}),
    "d64_bias": Case(520, 640, (128, 64), (1, 2), head_dim=64, bias=True, dtype=torch.bfloat16),
}


def mask_of(case: Case, generator: torch.Generator) -> Tensor:
    """A third of the tiles full, a third partial, the rest empty: bool `[*outer, seq_q, seq_k]`."""

    def spread(layout: Tensor) -> Tensor:
        rows = layout.repeat_interleave(case.tile[0], -2)[..., : case.seq_q, :]
        return rows.repeat_interleave(case.tile[1], -1)[..., : case.seq_k]

    layout = torch.rand(
        *case.outer, -(-case.seq_q // case.tile[0]), -(-case.seq_k // case.tile[1]), generator=generator
    )
    elements = torch.rand(*case.outer, case.seq_q, case.seq_k, generator=generator) < 0.8
    return spread(layout < 0.33) | (spread(layout < 0.67) & elements)


def results(case: Case, inputs: dict[str, Tensor], dtype: torch.dtype, backend: str, **masks: Any) -> dict[str, Tensor]:
    leaves = {name: tensor.to(dtype).requires_grad_() for name, tensor in inputs.items()}
    options = dict(case.arguments)
    if case.arguments.get("dropout_p"):
        options["dropout_seed"] = torch.tensor([5, 7], device=inputs["q"].device)
    out, lse = flashtile.attention(**leaves, **options, **masks, return_lse=True, backend=backend)
    upstream = torch.ones_like(out).cumsum(1) / case.seq_q, torch.ones_like(lse)
    grads = torch.autograd.grad((out, lse), list(leaves.values()), upstream)
    return {"out": out.detach(), "lse": lse.detach(), **dict(zip((f"d{name}" for name in leaves), grads))}


def check(case: Case, backend: str, device: str = "cpu") -> None:
    generator = torch.Generator().manual_seed(1)
    mask = mask_of(case, generator).to(device)
    shapes = {
        "q": (2, case.seq_q, case.heads, case.head_dim),
        "k": (2, case.seq_k, case.heads_kv, case.head_dim),
        "v": (2, case.seq_k, case.heads_kv, case.head_dim),
    }
    if case.bias:
        shapes["bias"] = (1, case.heads, case.seq_q, case.seq_k)
    inputs = {
        name: torch.randn(shape, generator=generator, dtype=torch.float64).to(case.dtype).to(device)
        for name, shape in shapes.items()
    }
    block_mask = BlockMask.from_dense(mask, case.tile)
    actual = results(case, inputs, case.dtype, backend, block_mask=block_mask)
    oracle = results(case, inputs, torch.float64, "reference", mask=mask)
    eager = results(case, inputs, case.dtype, "reference", mask=mask)
    for name, value in actual.items():
        assert_close(name, value, oracle[name], eager[name])


@places("reference", "cpu", "gpu")
@pytest.mark.parametrize("name", CASES)
def test_agrees_with_the_mask_written_out(name, backend, device):
    check(CASES[name], backend, device)


@pytest.mark.interpreter
@pytest.mark.parametrize("name", ["small_tiles_of_batch", "of_heads", "of_grouped_heads", "bias_causal_odd_tiles"])
def test_interpreted_masks_of_batch_and_heads(name):
    """Those of `test_triton` have the mask beside every other feature."""
    check(CASES[name], "triton")


@pytest.mark.gpu
@pytest.mark.parametrize("name", LARGE)
def test_kernels_over_many_tiles(name):
    check(LARGE[name], "triton", "cuda")


@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_rows_without_a_tile_see_nothing(backend):
    mask = torch.zeros(200, 200, dtype=torch.bool)
    mask[130:, :3] = True
    q = torch.randn(1, 200, 2, 8, requires_grad=True)
    out, lse = flashtile.attention(
        q, q, q, block_mask=BlockMask.from_dense(mask, (64, 64)), return_lse=True, backend=backend
    )
    assert not out[:, :130].any()
    assert lse[..., :130].isneginf().all() and lse[..., 130:].isfinite().all()
    (dq,) = torch.autograd.grad(out.sum(), q)
    assert dq.isfinite().all() and not dq[:, 3:130].any()


def test_tables_of_tiles_are_made_once_for_each_call_on_a_cpu(monkeypatch):
    made = []
    kind_table = BlockMask.kind_table
    monkeypatch.setattr(BlockMask, "kind_table", lambda mask: made.append(0) or kind_table(mask))
    monkeypatch.setattr(tiles, "_TILE_ELEMENTS_PER_THREAD", 1)  # a block for each head of each batch entry
    q = torch.randn(3, 70, 2, 8, requires_grad=True)
    flashtile.attention(q, q, q, block_mask=patterns.causal(70, 70)).sum().backward()
    assert len(made) == 2  # forward and backward


def test_packed_sequences_share_a_mask_or_have_their_own():
    """As each sequence alone with its corner of the mask; bounds of the lengths may be larger than the lengths."""
    lengths, bound = [70, 0, 1, 129], 150
    cu_seqlens = torch.tensor([0, *lengths]).cumsum(0).int()
    q, k, v = (torch.randn(sum(lengths), 2, 16) for _ in range(3))
    for batch in (1, len(lengths)):
        dense = torch.rand(batch, 2, bound, bound) < 0.6
        bounds = {"max_seqlen_q": bound, "max_seqlen_k": bound}
        block_mask = BlockMask.from_dense(dense, (64, 64))
        packed = flashtile.attention_varlen(q, k, v, cu_seqlens, **bounds, block_mask=block_mask)
        oracle, eager = (_one_by_one(q, k, v, cu_seqlens, dense, dtype) for dtype in (torch.float64, torch.float32))
        assert_close("out", packed, oracle, eager)


def _one_by_one(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, dense: Tensor, dtype: torch.dtype) -> Tensor:
    """Each packed sequence alone, with its corner of its mask."""
    outs = []
    for sequence, (start, end) in enumerate(zip(cu_seqlens.tolist(), cu_seqlens[1:].tolist())):
        own = [t[None, start:end].to(dtype) for t in (q, k, v)]
        corner = dense[sequence % len(dense), None, :, : end - start, : end - start]
        outs.append(flashtile.attention(*own, mask=corner, backend="reference"))
    return torch.cat(outs, dim=1)[0]


def test_a_packed_call_needs_the_bounds_that_its_mask_was_built_for():
    q, cu_seqlens = torch.randn(8, 2, 8), torch.tensor([0, 3, 8])
    for bounds, words in (
        ({}, "max_seqlen_q, max_seqlen_k: expected both beside bias, mask or block_mask"),
        ({"max_seqlen_q": 8, "max_seqlen_k": 5}, "built for seq_q 5, the call has 8"),
    ):
        with pytest.raises(ValueError, match=words):
            flashtile.attention_varlen(q, q, q, cu_seqlens, block_mask=patterns.causal(5), **bounds)
    three = BlockMask.from_dense(torch.ones(3, 1, 5, 5, dtype=torch.bool))
    with pytest.raises(ValueError, match="built for batch 3, the call has 2"):
        flashtile.attention_varlen(q, q, q, cu_seqlens, block_mask=three, max_seqlen_q=5, max_seqlen_k=5)


def test_documents_are_packed_sequences():
    lengths = [70, 1, 129]
    q, k, v = (torch.randn(1, sum(lengths), 2, 16) for _ in range(3))
    masked = flashtile.attention(q, k, v, block_mask=patterns.documents(lengths=lengths, causal=True))
    cu_seqlens = torch.tensor([0, *lengths]).cumsum(0).int()
    packed = flashtile.attention_varlen(q[0], k[0], v[0], cu_seqlens, causal=True)
    assert_same(masked[0], packed)


@pytest.mark.parametrize(
    "block_mask, error, words",
    [
        (torch.ones(8, 8, dtype=torch.bool), TypeError, "expected a flashtile.BlockMask, got torch.Tensor"),
        (
            flex_attention.create_block_mask(lambda b, h, q, k: q >= k, None, None, 8, 8, device="cpu"),
            TypeError,
            r"got torch\.nn\.attention\.flex_attention\.BlockMask; build one with BlockMask\.from_flex from PyTorch's",
        ),
        (patterns.causal(9, 8), ValueError, "built for seq_q 9, the call has 8"),
        (
            BlockMask.from_dense(torch.ones(1, 3, 8, 8, dtype=torch.bool)),
            ValueError,
            "built for heads 3, the call has 2",
        ),
        (patterns.causal(8, 8).to("meta"), ValueError, "expected the device of q, cpu, got meta"),
    ],
    ids=["tensor", "flex", "length", "heads", "device"],
)
def test_errors(block_mask, error, words):
    q = torch.randn(1, 8, 2, 8)
    with pytest.raises(error, match=words):
        flashtile.attention(q, q, q, block_mask=block_mask)


@pytest.mark.parametrize("packed", [False, True], ids=["dense", "packed"])
@pytest.mark.parametrize(("seq_q", "seq_k"), [(0, 5), (5, 0), (0, 0)])
def test_empty_sequences(seq_q, seq_k, packed):
    q, k = torch.randn(1, seq_q, 2, 8, requires_grad=True), torch.randn(1, seq_k, 1, 8, requires_grad=True)
    mask = BlockMask.from_dense(torch.ones(seq_q, seq_k, dtype=torch.bool))
    if packed:
        ends = torch.tensor([0, 0, seq_q]), torch.tensor([0, 0, seq_k])
        longest = {"max_seqlen_q": seq_q, "max_seqlen_k": seq_k}
        out, lse = flashtile.attention_varlen(q[0], k[0], k[0], *ends, **longest, block_mask=mask, return_lse=True)
    else:
        out, lse = flashtile.attention(q, k, k, block_mask=mask, return_lse=True)
    assert out.numel() == q.numel() and not out.any()
    assert lse.numel() == 2 * seq_q and lse.isneginf().all()
    for leaf, grad in zip((q, k), torch.autograd.grad(out.sum(), (q, k))):
        assert_same(grad, torch.zeros_like(leaf))
