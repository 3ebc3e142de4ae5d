"""Attention with a block mask: against the same mask written out, on every backend. Pairs with other features are in
`attention_cases`."""

from dataclasses import replace

import pytest
import torch
from torch.nn.attention import flex_attention

import flashtile
from flashtile import BlockMask, patterns
from flashtile.ops.attention.cpu import tiles
from flashtile.testing import AttentionCase, assert_close, check, make_inputs, run
from support.attention.attention_cases import BASE, changed
from support.running.each_case import each_case
from support.running.places import places

_DENSE = replace(BASE, seq_q=90, seq_k=140, heads=4)
#: A call, the mask's tile as a user gives it, and its batch entries and heads, of which 1 is shared.
_MASKS: dict[str, tuple[AttentionCase, tuple[int, int], tuple[int, int]]] = {
    "shared": (_DENSE, (64, 64), (1, 1)),
    "of batch, in small tiles": (_DENSE, (16, 32), (2, 1)),
    "of heads": (changed(_DENSE, seq_q=140, window=(40, 3), softcap=5.0), (128, 128), (1, 4)),
    "of all": (_DENSE, (64, 128), (2, 4)),
    "in odd tiles, beside a bias": (changed(BASE, seq_q=96, seq_k=96, bias="1hqk", causal=True), (48, 48), (1, 1)),
    "packed, shared": (replace(BASE, lengths_q=(70, 0, 1, 90), lengths_k=(70, 3, 1, 129)), (64, 64), (1, 2)),
}


@places("reference", "cpu", "interpreted", "gpu")
@pytest.mark.parametrize("name", _MASKS)
def test_agrees_with_the_mask_written_out(name, backend, device):
    """A third of the tiles are full and a third partial; a row of tiles is empty."""
    case, tile, outer = _MASKS[name]
    generator = torch.Generator().manual_seed(1)
    seq_q, seq_k = case.shape_of("qk")
    kind = torch.rand(*outer, -(-seq_q // tile[0]), -(-seq_k // tile[1]), generator=generator)
    kind[:, :, 1] = 1
    kind = kind.repeat_interleave(tile[0], 2).repeat_interleave(tile[1], 3)[..., :seq_q, :seq_k]
    dense = (kind < 0.33) | (kind < 0.67) & (torch.rand(kind.shape, generator=generator) < 0.8)
    inputs, written_out = make_inputs(case, device), make_inputs(case, device)
    inputs.tensors["block_mask"] = BlockMask.from_dense(dense.to(device), tile)
    written_out.tensors["mask"] = dense.to(device)
    longest = {"max_seqlen_q": seq_q, "max_seqlen_k": seq_k} if case.packed else {}
    case = changed(case, **longest)
    oracle, eager = (run(case, written_out, "reference", dtype) for dtype in (torch.float64, None))
    for result, value in run(case, inputs, backend).items():
        assert_close(result, value, oracle[result], eager[result])


def test_tables_of_tiles_are_made_once_for_each_call_on_a_cpu(monkeypatch):
    made = []
    kind_table = BlockMask.kind_table
    monkeypatch.setattr(BlockMask, "kind_table", lambda mask: made.append(0) or kind_table(mask))
    monkeypatch.setattr(tiles, "_TILE_ELEMENTS_PER_THREAD", 1)  # a block for each head of each batch entry
    q = torch.randn(3, 70, 2, 8, requires_grad=True)
    flashtile.attention(q, q, q, block_mask=patterns.causal(70, 70)).sum().backward()
    assert len(made) == 2  # forward and backward


@each_case("lengths", [((0, 5), (5, 0)), ((0, 0), (0, 0)), (0, 5), (5, 0), (0, 0)])
def test_empty_sequences(lengths):
    of_q, of_k = lengths
    packed = {"lengths_q": of_q, "lengths_k": of_k} if isinstance(of_q, tuple) else {"seq_q": of_q, "seq_k": of_k}
    check(replace(BASE, **packed, block_mask=(64, 64)), "cpu")


@each_case(
    "bounds, words",
    [
        ({}, "max_seqlen_q, max_seqlen_k: expected both beside bias, mask or block_mask"),
        ({"max_seqlen_q": 8, "max_seqlen_k": 5}, "built for seq_q 5, the call has 8"),
        ({"max_seqlen_q": 5, "max_seqlen_k": 5, "batch": 3}, "built for batch 3, the call has 2"),
    ],
)
def test_a_packed_call_needs_the_bounds_that_its_mask_was_built_for(bounds, words):
    q, cu_seqlens = torch.randn(8, 2, 8), torch.tensor([0, 3, 8])
    shown = torch.ones(bounds.get("batch", 1), 1, 5, 5, dtype=torch.bool)
    given = {name: bound for name, bound in bounds.items() if name != "batch"}
    with pytest.raises(ValueError, match=words):
        flashtile.attention_varlen(q, q, q, cu_seqlens, block_mask=BlockMask.from_dense(shown), **given)


_CAUSAL = flex_attention.create_block_mask(lambda b, h, q, k: q >= k, None, None, 8, 8, device="cpu")


@each_case(
    "block_mask, error, words",
    [
        (torch.ones(8, 8, dtype=torch.bool), TypeError, "expected a flashtile.BlockMask, got torch.Tensor"),
        (
            _CAUSAL,
            TypeError,
            r"got torch\.nn\.attention\.flex_attention\.BlockMask; build one with BlockMask\.from_flex",
        ),
        (patterns.causal(9, 8), ValueError, "built for seq_q 9, the call has 8"),
        (BlockMask.from_dense(torch.ones(1, 3, 8, 8) > 0), ValueError, "built for heads 3, the call has 2"),
        (patterns.causal(8, 8).to("meta"), ValueError, "expected the device of q, cpu, got meta"),
    ],
)
def test_errors(block_mask, error, words):
    q = torch.randn(1, 8, 2, 8)
    with pytest.raises(error, match=words):
        flashtile.attention(q, q, q, block_mask=block_mask)
