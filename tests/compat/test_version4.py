"""FlashAttention-4's names: values by their definition, always with lse, sinks, blocks, and what raises."""

from __future__ import annotations

import math

import pytest
import torch

from compat_cases import PLACES, Meaning, check_against, cumulative, normal, scores_by_definition
from flashtile.compat.flash_attn_4.cute import flash_attn_func, flash_attn_varlen_func
from flashtile.compat.flash_attn_4.cute.block_sparsity import BlockSparseTensorsTorch
from flashtile.testing import assert_close, assert_same

places = pytest.mark.parametrize(("device", "dtype"), PLACES)
devices = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
OPTIONS = {
    "plain": ({}, Meaning()),
    "causal": ({"causal": True, "num_splits": 4, "pack_gqa": True, "deterministic": True}, Meaning(causal=True)),
    "left": ({"causal": True, "window_size": (4, None)}, Meaning(causal=True, window=(4, -1))),
    "window": ({"window_size": (4, 2), "softcap": 2.0, "softmax_scale": 0.3}, Meaning(0.3, window=(4, 2), softcap=2.0)),
}
options_and_meaning = pytest.mark.parametrize(("options", "meaning"), OPTIONS.values(), ids=OPTIONS.keys())


def definition(q, k, v, meaning, sinks=None, shown=None):
    """out and lse of a dense call; `sinks` `[heads]`, `shown` bool that broadcasts to the scores."""
    scores = scores_by_definition(q, k, meaning)
    if shown is not None:
        scores = scores.masked_fill(~shown, -math.inf)
    if sinks is not None:
        scores = torch.cat((scores, sinks.to(scores)[None, :, None, None].expand(*scores.shape[:3], 1)), -1)
    blind = scores.isneginf().all(-1, keepdim=True)
    lse = scores.masked_fill(blind, 0).logsumexp(-1).masked_fill(blind[..., 0], -math.inf)
    weights = scores.masked_fill(blind, 0).softmax(-1).masked_fill(blind, 0)[..., : k.shape[1]]
    v = v.repeat_interleave(q.shape[2] // v.shape[2], 2)
    return torch.einsum("bhqk,bkhd->bqhd", weights.to(v.dtype), v), lse


def packed_definition(q, k, v, lengths_q, lengths_k, meaning, sinks=None):
    parts = [
        definition(*(x[None] for x in given), meaning, sinks)
        for given in zip(q.split(lengths_q), k.split(lengths_k), v.split(lengths_k))
    ]
    return torch.cat([out[0] for out, _ in parts]), torch.cat([lse[0] for _, lse in parts], 1)


@places
@options_and_meaning
@pytest.mark.parametrize("sinks", [False, True])
def test_dense(sinks, options, meaning, device, dtype):
    inputs = [normal(2, 9, 4, 16), normal(2, 14, 2, 16, seed=1), normal(2, 14, 2, 24, seed=2)]
    inputs += [normal(4, seed=3)] * sinks
    check_against(
        lambda q, k, v, *sink: flash_attn_func(q, k, v, **options, learnable_sink=sink[0] if sink else None),
        lambda q, k, v, *sink: definition(q, k, v, meaning, *sink), inputs, device, dtype,
    )  # fmt: skip


@places
@options_and_meaning
@pytest.mark.parametrize("sinks", [False, True])
def test_packed(sinks, options, meaning, device, dtype):
    lengths_q, lengths_k = [5, 0, 9, 3], [7, 4, 9, 11]
    ends = cumulative(lengths_q, device), cumulative(lengths_k, device)
    inputs = [normal(17, 4, 16), normal(31, 2, 16, seed=1), normal(31, 2, 24, seed=2)] + [normal(4, seed=3)] * sinks
    check_against(
        lambda q, k, v, *sink: flash_attn_varlen_func(
            q, k, v, *ends, 9, 11, **options, learnable_sink=sink[0] if sink else None
        ),
        lambda q, k, v, *sink: packed_definition(q, k, v, lengths_q, lengths_k, meaning, *sink), inputs, device, dtype,
    )  # fmt: skip


@devices
@pytest.mark.parametrize("keys", ["packed", "dense", "pages"])
@pytest.mark.parametrize("dense_queries", [False, True])
def test_layouts_of_packed_calls(dense_queries, keys, device):
    """Queries dense or packed; keys packed, dense with used rows, or in pages."""
    lengths_q, lengths_k = [6, 6, 6] if dense_queries else [6, 0, 3], [7, 4, 12]
    q, k, v = normal(sum(lengths_q), 4, 16), normal(23, 2, 16, seed=1), normal(23, 2, 16, seed=2)
    meaning = Meaning(causal=True)
    oracle = packed_definition(q, k, v, lengths_q, lengths_k, meaning)
    eager = packed_definition(*(x.float() for x in (q, k, v)), lengths_q, lengths_k, meaning)
    given = {} if dense_queries else {"cu_seqlens_q": cumulative(lengths_q, device), "max_seqlen_q": 6}
    q, k, v = (x.float().to(device) for x in (q, k, v))
    used = torch.tensor(lengths_k, dtype=torch.int32, device=device)
    if keys == "packed":
        given |= {"cu_seqlens_k": cumulative(lengths_k, device), "max_seqlen_k": 12}
    else:
        rows = [torch.nn.utils.rnn.pad_sequence(x.split(lengths_k), batch_first=True) for x in (k, v)]
        if keys == "pages":
            rows = [x.unflatten(1, (3, 4)).flatten(0, 1).flip(0) for x in rows]
            given["page_table"] = (8 - torch.arange(9, device=device)).view(3, 3).int()
        k, v = rows
        given["seqused_k"] = used
    out, lse = flash_attn_varlen_func(q.view(3, 6, 4, 16) if dense_queries else q, k, v, **given, causal=True)
    if dense_queries:
        assert out.shape == (3, 6, 4, 16) and lse.shape == (3, 4, 6)
        out, lse = out.flatten(0, 1), lse.transpose(0, 1).flatten(1)
    for name, got, exact, plain in zip(("out", "lse"), (out, lse), oracle, eager, strict=True):
        assert_close(name, got, exact, plain)


def test_used_rows_and_whole_pages():
    q, pages = normal(9, 4, 16).float(), normal(6, 4, 2, 16, seed=1).float()
    table, ends = torch.tensor([[1, 0], [5, 3]], dtype=torch.int32), cumulative([4, 5])
    used = torch.tensor([4, 2], dtype=torch.int32)
    out, lse = flash_attn_varlen_func(q, pages, pages, ends, seqused_q=used, page_table=table)
    keys = pages[table.long()].flatten(1, 2)
    for b, rows in enumerate((slice(0, 4), slice(4, 6))):
        expected, expected_lse = definition(q[None, rows], keys[b : b + 1], keys[b : b + 1], Meaning())
        assert_same(out[rows], expected[0])
        assert_same(lse[:, rows], expected_lse[0])
    assert not out[6:].any() and lse[:, 6:].isneginf().all()


def lists(layout):
    """Counts and numbers of the blocks of a layout, the rest of the numbers out of range."""
    count = layout.sum(-1, dtype=torch.int32)
    order = (~layout).int().argsort(dim=-1, stable=True).int()
    past = torch.arange(layout.shape[-1]) >= count[..., None]
    return count, order.masked_fill(past, 99)


@places
@pytest.mark.parametrize("way", ["arguments", "tensors", "full only", "a size"])
def test_block_sparsity(way, device, dtype):
    seq_q, seq_k, size = 200, 300, (128, 128)
    generator = torch.Generator().manual_seed(0)
    if way == "a size":
        size = (64, 96)
    blocks = -(-seq_q // size[0]), -(-seq_k // size[1])
    full = torch.rand(2, 1, *blocks, generator=generator) < 0.3
    partial = (torch.rand(1, 2, *blocks, generator=generator) < 0.4) & (way != "full only")
    full[0, 0, 0] = partial[:, :, 0] = False  # rows that see nothing
    shown = (full | partial).repeat_interleave(size[0], 2)[:, :, :seq_q].repeat_interleave(size[1], 3)[..., :seq_k]
    names = ("full_block_cnt", "full_block_idx", "mask_block_cnt", "mask_block_idx")
    given = dict(zip(names, (x.to(device) for layout in (full, partial) for x in lists(layout))))
    if way == "full only":
        del given["mask_block_cnt"], given["mask_block_idx"]
    if way == "tensors":
        given = {"block_sparse_tensors": BlockSparseTensorsTorch(*(given[name] for name in (*names[2:], *names[:2])))}
    if way == "a size":
        given["block_size"] = size
    q, k, v = normal(2, seq_q, 2, 16), normal(2, seq_k, 1, 16, seed=1), normal(2, seq_k, 1, 16, seed=2)
    check_against(
        lambda q, k, v: flash_attn_func(q, k, v, causal=True, **given)[0],
        lambda q, k, v: definition(q, k, v, Meaning(causal=True), shown=shown.to(q.device))[0], [q, k, v],
        device, dtype,
    )  # fmt: skip


def test_blocks_of_256_queries():
    """The shape of the lists tells that a block has 256 queries, as two tiles of a Blackwell GPU have."""
    layout = torch.tensor([[[[True, False, True]], [[False, True, False]]]]).view(1, 1, 2, 3)
    q, k = normal(1, 400, 1, 8).float(), normal(1, 300, 1, 8, seed=1).float()
    count, index = lists(layout)
    shown = layout.repeat_interleave(256, 2)[:, :, :400].repeat_interleave(128, 3)[..., :300]
    out, _ = flash_attn_func(q, k, k, full_block_cnt=count, full_block_idx=index)
    assert_same(out, definition(q, k, k, Meaning(), shown=shown)[0])
    with pytest.raises(ValueError, match="block_size: expected blocks of"):
        flash_attn_func(q[:, :100], k, k, full_block_cnt=count, full_block_idx=index)
    with pytest.raises(ValueError, match="mask_block_cnt, mask_block_idx: expected"):
        flash_attn_func(q, k, k, mask_block_cnt=count)


@devices
def test_a_sink_of_16_bits_keeps_its_dtype(device):
    q = normal(1, 5, 2, 16).to(device, torch.float16).requires_grad_()
    sink = normal(2).to(device, torch.bfloat16).requires_grad_()
    flash_attn_func(q, q, q, learnable_sink=sink)[0].sum().backward()
    assert sink.grad.dtype is torch.bfloat16 and sink.grad.any()


X = torch.randn(1, 5, 2, 8)


@pytest.mark.parametrize("name", ["score_mod", "mask_mod", "aux_tensors"])
def test_functions_in_another_language_raise(name):
    remedy = "flashtile.BlockMask.from_predicate" if name == "mask_mod" else "flashtile.attention"
    with pytest.raises(ValueError, match=f"{name}: expected None.*{remedy}"):
        flash_attn_func(X, X, X, **{name: [X]})
    if name != "mask_mod":
        with pytest.raises(ValueError, match=f"{name}: expected None.*{remedy}"):
            flash_attn_varlen_func(X[0], X[0], X[0], cumulative([5]), cumulative([5]), **{name: [X]})
