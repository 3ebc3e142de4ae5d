"""flash_attn 1.0.9's functions: packed calls with the diagonal at the first key, padded lse, weights in fragments."""

import math

import pytest
import torch

import flashtile
import flashtile.modules
from flashtile.compat.flash_attn_1 import blockmask_layout
from flashtile.testing import assert_close, assert_same
from support.attention.compat_cases import (
    Meaning,
    attention_by_definition,
    check_against,
    cumulative,
    every_dtype,
    group_head_dropout,
    normal,
    packed_by_definition,
    places,
    scores_by_definition,
    served,
    visible_keys,
)
from support.running.each_case import each_case

interface = served(1, "flash_attn_interface")
flash_attn_triton = served(1, "flash_attn_triton")
pad_input = served(1, "bert_padding").pad_input
unpad_input = served(1, "bert_padding").unpad_input
FlashAttention = served(1, "flash_attention").FlashAttention
flash_attn_unpadded_func = served(1, "flash_attn_interface").flash_attn_unpadded_func
flash_attn_unpadded_qkvpacked_func = served(1, "flash_attn_interface").flash_attn_unpadded_qkvpacked_func
flash_attn_unpadded_qkvpacked_split_func = served(1, "flash_attn_interface").flash_attn_unpadded_qkvpacked_split_func
FlashBlocksparseAttention = served(1, "flash_blocksparse_attention").FlashBlocksparseAttention
FlashBlocksparseMHA = served(1, "flash_blocksparse_attention").FlashBlocksparseMHA
convert_blockmask = served(1, "flash_blocksparse_attn_interface").convert_blockmask
flash_blocksparse_attn_func = served(1, "flash_blocksparse_attn_interface").flash_blocksparse_attn_func

OPTIONS = {
    "plain": ({}, Meaning(top_left=True)),
    "causal": ({"causal": True, "deterministic": True}, Meaning(causal=True, top_left=True)),
    "scale": ({"softmax_scale": 0.2}, Meaning(scale=0.2, top_left=True)),
}
LENGTHS_Q, LENGTHS_K = [5, 0, 9, 3], [7, 4, 6, 11]


@places
@each_case("options, meaning", OPTIONS.values())
def test_packed(options, meaning, device, dtype):
    cu_q, cu_k = cumulative(LENGTHS_Q, device), cumulative(LENGTHS_K, device)
    q, k, v = normal(17, 4, 12), normal(28, 4, 12, seed=1), normal(28, 4, 12, seed=2)
    check_against(
        lambda q, k, v: flash_attn_unpadded_func(q, k, v, cu_q, cu_k, 9, 11, 0.0, **options),
        lambda q, k, v: packed_by_definition(q, k, v, LENGTHS_Q, LENGTHS_K, meaning)[0],
        [q, k, v], device, dtype,
    )  # fmt: skip


@places
@each_case("first", [0, 2, 4])
def test_split(first, device, dtype):
    cu = cumulative(LENGTHS_Q, device)
    meaning = Meaning(causal=True, top_left=True)
    longest = [max(part, default=0) for part in (LENGTHS_Q[:first], LENGTHS_Q[first:])]
    check_against(
        lambda qkv: flash_attn_unpadded_qkvpacked_split_func(qkv, cu, *longest, first, 0.0, causal=True),
        lambda qkv: packed_by_definition(*qkv.unbind(1), LENGTHS_Q, LENGTHS_Q, meaning)[0],
        [normal(17, 3, 4, 12)], device, dtype,
    )  # fmt: skip


@places
def test_split_with_dropout_and_weights(device, dtype):
    qkv, cu, p = normal(17, 3, 2, 16).to(device, dtype), cumulative(LENGTHS_Q, device), 0.25
    kept = group_head_dropout(8, device, p, 2, 2, 5, 5)
    torch.manual_seed(8)
    out, lse, first, rest = flash_attn_unpadded_qkvpacked_split_func(qkv, cu, 5, 9, 2, p, return_attn_probs=True)
    assert out.shape == (17, 2, 16) and lse.shape == (4, 2, 16)
    assert first.shape == rest.shape == (2, 2, 16, 64)
    weights, dropout = softmax_from(first[:1], scores_by_definition(*qkv[None, :5].double().unbind(2)[:2], Meaning()))
    assert torch.equal(dropout[0], kept[0])
    # The weights are those of the call, so that they are its rounding too.
    expected = torch.einsum("bhqk,bkhd->bqhd", weights * dropout / (1 - p), qkv[None, :5, 2].to(weights.dtype))
    assert_same(out[:5], expected[0].to(dtype))
    torch.manual_seed(8)
    again = flash_attn_unpadded_qkvpacked_split_func(qkv, cu, 5, 9, 2, p)
    assert torch.equal(out, again)
    whole = flash_attn_unpadded_qkvpacked_func(qkv, cu, 9, 0.0, return_attn_probs=True)[1]
    assert_same(lse, whole)


def softmax_from(S_dmask, scores):
    """Weights and dropout as a test of flash_attn 1 gets them: by the inverse of the layout, from one block of keys."""
    batch, heads, rows, columns = S_dmask.shape
    block = interface._get_block_size(S_dmask.device, 16, True)
    loops = -(-columns // block)
    mmas = columns // 64 if columns <= block else block // 64
    # b h (loop nsteps mmas_n warps_n eight t r c0 c1) -> b h (nsteps r eight) (loop mmas_n warps_n c0 t c1)
    flat = S_dmask.reshape(batch, heads, loops, rows // 16, mmas, 4, 8, 4, 2, 2, 2)
    logical = flat.permute(0, 1, 3, 8, 6, 2, 4, 5, 9, 7, 10).reshape(batch, heads, rows, columns)
    seq_q, seq_k = scores.shape[-2:]
    assert (logical[:, :, seq_q:] == 0).all() and (logical[..., seq_k:] == 0).all()
    logical = logical[:, :, :seq_q, :seq_k].to(scores.dtype)
    lse = scores.logsumexp(-1)
    factor = (scores.amax(-1) - lse.masked_fill(lse.isneginf(), math.inf)).exp()
    return logical.abs() * factor.nan_to_num(0)[..., None], logical >= 0


@every_dtype
@each_case("p, causal", [(0.0, False), (0.25, True)])
def test_weights(p, causal, device, dtype):
    lengths_q, lengths_k = [33, 5, 0], [70, 4, 9]
    q, k = normal(38, 2, 16).to(device, dtype), normal(83, 2, 16, seed=1).to(device, dtype)
    cu_q, cu_k = cumulative(lengths_q, device), cumulative(lengths_k, device)
    kept = group_head_dropout(5, device, p, 3, 2, 33, 70)
    torch.manual_seed(5)
    out, lse, S_dmask = flash_attn_unpadded_func(q, k, k, cu_q, cu_k, 33, 70, p, causal=causal, return_attn_probs=True)
    assert lse.shape == (3, 2, 48) and S_dmask.shape == (3, 2, 48, 128) and S_dmask.dtype is dtype
    for number, (length_q, length_k) in enumerate(zip(lengths_q, lengths_k)):
        rows = slice(int(cu_q[number]), int(cu_q[number + 1]))
        columns = slice(int(cu_k[number]), int(cu_k[number + 1]))
        meaning = Meaning(causal=causal, top_left=True, dropout_p=p)
        scores = scores_by_definition(q[None, rows].double(), k[None, columns].double(), meaning)
        weights, dropout = softmax_from(S_dmask[number : number + 1], scores)
        assert (weights - scores.softmax(-1)).abs().sum() <= max(weights.numel(), 1) * torch.finfo(dtype).eps
        seen = visible_keys(length_q, length_k, meaning).to(device)
        mask = kept[number, :, :length_q, :length_k] if p else torch.ones_like(dropout[0])
        assert torch.equal(dropout[0][:, seen], mask[:, seen])
        assert lse[number, :, length_q:].isneginf().all()
        oracle, eager = (
            attention_by_definition(*(t[None].to(wide) for t in (q[rows], k[columns], k[columns])), meaning, mask[None])
            for wide in (torch.float64, dtype)
        )
        assert_close("lse", lse[number, :, :length_q], oracle[1][0], eager[1][0])
        assert_close("out", out[rows], oracle[0][0], eager[0][0])


@places
@each_case("shape", [(1, 1, 1, 14), (2, 4, 9, 14), (1, 4, 1, 14), None])
def test_bias(shape, device, dtype):
    q, k, v = normal(2, 9, 4, 12), normal(2, 14, 4, 12, seed=1), normal(2, 14, 4, 12, seed=2)
    inputs = [q, k, v] if shape is None else [q, k, v, normal(*shape, seed=3)]
    check_against(
        lambda q, k, v, bias=None: flash_attn_triton.flash_attn_func(q, k, v, bias, True, 0.3),
        lambda q, k, v, bias=None: attention_by_definition(
            q, k, v, Meaning(scale=0.3, causal=True, top_left=True, bias=bias))[0],
        inputs, device, dtype,
    )  # fmt: skip


def test_forward_with_bias():
    (q, k, v), bias = normal(2, 9, 3, 4, 12).float().unbind(2), normal(1, 4, 1, 9).float()
    expected = flash_attn_triton.flash_attn_func(q, k, v, bias, causal=True)
    out, lse, scale = flash_attn_triton._flash_attn_forward(q, k, v, bias, True)
    assert torch.equal(out, expected) and lse.shape == (2, 4, 128) and scale == 1 / math.sqrt(12)


MASK = torch.arange(9) < torch.tensor([[9], [4], [0]])


@places
def test_module(device, dtype):
    """FlashSelfAttention of flashtile, over the rows that a mask keeps."""
    module, plain = FlashAttention(softmax_scale=0.3), flashtile.modules.FlashSelfAttention(softmax_scale=0.3)
    qkv, mask = normal(3, 9, 3, 2, 8).to(device, dtype).requires_grad_(), MASK.to(device)
    assert torch.equal(module(qkv, causal=True)[0], plain(qkv, True))
    rows, indices, ends, longest = unpad_input(qkv, mask)
    expected = pad_input(plain(rows, False, ends, longest), indices, 3, 9)
    packed, weights = module(rows, cu_seqlens=ends, max_s=longest)
    assert weights is None and torch.equal(pad_input(packed, indices, 3, 9), expected)
    padded, _ = module(qkv, mask)
    assert torch.equal(padded, expected)
    assert_same(*(torch.autograd.grad(out.square().sum(), qkv, retain_graph=True) for out in (padded, expected)))


def test_module_drops_in_training_only():
    module, qkv = FlashAttention(attention_dropout=0.5), normal(2, 9, 3, 2, 8).float()
    torch.manual_seed(0)
    first = module(qkv)[0]
    assert not torch.equal(first, module(qkv)[0])
    torch.manual_seed(0)
    assert torch.equal(first, module(qkv)[0])
    module.eval()
    assert torch.equal(module(qkv)[0], FlashAttention()(qkv)[0])
    with pytest.raises(ValueError, match="need_weights"):
        module(qkv, need_weights=True)
    with pytest.raises(ValueError, match="cu_seqlens: expected max_s"):
        module(qkv.flatten(0, 1), cu_seqlens=cumulative([9, 9]))


def test_lists_of_tiles():
    layout = torch.tensor([[1, 0, 1], [0, 0, 0], [0, 1, 0], [1, 1, 1]])
    lists = convert_blockmask(layout, causal=False)
    # row · 4 + 2 · last of its row + first of its row
    assert lists.tolist() == [[1, 13, -1, -1], [11, 12, -1, -1], [2, 14, -1, -1]]
    assert lists.dtype is torch.int32
    assert torch.equal(blockmask_layout(lists), layout.bool())
    with pytest.raises(ValueError, match="causal"):
        convert_blockmask(layout, causal=True)


class Config:
    """A sparsity configuration: tiles at random, with those of the diagonal."""

    def make_layout(self, length):
        layout = torch.rand(-(-length // 16), -(-length // 256), generator=torch.Generator().manual_seed(0)) < 0.5
        layout[torch.arange(len(layout)), torch.arange(len(layout)) // 16] = True
        return layout


@each_case("causal", [False, True])
def test_blocksparse(causal):
    layout, qkv, ends = Config().make_layout(300), normal(340, 3, 2, 8).float(), cumulative([300, 40])
    expected = flashtile.modules.flash_blocksparse_attn_func(qkv, ends, layout, 0.0, 300, 0.3, causal)
    for mask, convert in ((layout, True), (convert_blockmask(layout, causal=False), False)):
        found = flash_blocksparse_attn_func(qkv, ends, mask, 0.0, 300, 0.3, causal, convert_mask=convert)
        assert torch.equal(found, expected)


def test_blocksparse_modules():
    attention = FlashBlocksparseAttention(Config(), softmax_temp=0.3, max_seq_length=512)
    qkv, cu = normal(1, 300, 3, 2, 8).float(), cumulative([300])
    out, weights = attention(qkv, causal=True)
    expected = flash_blocksparse_attn_func(qkv[0], cu, Config().make_layout(300), 0.0, 300, 0.3, True)
    assert_same(out[0], expected)
    assert weights is None
    with pytest.raises(ValueError, match="max_seq_length"):
        attention(normal(1, 600, 3, 2, 8).float())
    with pytest.raises(ValueError, match="attn_mask"):
        attention(qkv, attn_mask=torch.ones(300, 300))
    mha = FlashBlocksparseMHA(16, 2, Config())
    x = normal(1, 300, 16).float()
    inner = mha.inner_attn(mha.Wqkv(x).unflatten(-1, (3, 2, 8)))[0]
    assert_same(mha(x, x, x)[0], mha.out_proj(inner.flatten(2)))
    with pytest.raises(ValueError, match="x_ignored_"):
        mha(x, x.clone(), x)
    with pytest.raises(TypeError, match="depth"):
        FlashBlocksparseMHA(16, 2, Config(), depth=3)


def test_one_split_asks_for_the_same_gradients_in_every_run(monkeypatch):
    asked, ours = [], flashtile.attention_backward

    def watched(*tensors, **options):
        asked.append(options["deterministic"])
        return ours(*tensors, **options)

    monkeypatch.setattr(flashtile, "attention_backward", watched)
    q, ends = normal(17, 2, 16).float(), cumulative(LENGTHS_Q)
    rest = (ends, ends, 9, 9, 0.0, 0.3, False)
    out, lse, *_ = interface._flash_attn_forward(q, q, q, torch.empty_like(q), *rest, False)
    for splits in (0, 1):
        grads = [torch.empty_like(q) for _ in range(3)]
        interface._flash_attn_backward(q, q, q, q, out, lse, *grads, *rest, num_splits=splits)
    assert asked == [False, True]


@each_case("call, names", [
        (lambda x, cu: flash_attn_unpadded_qkvpacked_func(x[:, 0], cu, 9, 0.0), "qkv: expected shape"),
        (lambda x, cu: flash_attn_unpadded_qkvpacked_split_func(x, cu, 9, 9, 5, 0.0), "batch_size0: expected from 0"),
        (lambda x, cu: flash_attn_unpadded_qkvpacked_func(x, cu, 8, 0.0), "max_seqlen"),
        (lambda x, cu: flash_attn_unpadded_qkvpacked_func(x, cu, 9, -0.5), "dropout_p"),
    ])  # fmt: skip
def test_errors(call, names):
    with pytest.raises(ValueError, match=names):
        call(torch.randn(17, 3, 2, 8), cumulative(LENGTHS_Q))
