"""Block-sparse attention under the original's names, against dense attention with the mask written out."""

from typing import Any

import pytest
import torch
from torch import Tensor

import flashtile
from flashtile import patterns
from flashtile.modules import FlashBlocksparseAttention, FlashBlocksparseMHA, flash_blocksparse_attn_func
from flashtile.testing import assert_same
from support.running.each_case import each_case

LENGTHS = (300, 0, 37, 512)
LONGEST = max(LENGTHS)


class _Layout:
    """As the original's sparsity configurations: tiles of 16 × 256, the diagonal and some others."""

    def make_layout(self, length: int) -> Tensor:
        rows, columns = -(-length // 16), -(-length // 256)
        layout = torch.rand(rows, columns, generator=torch.Generator().manual_seed(3)) < 0.5
        layout[torch.arange(rows), torch.arange(rows) * 16 // 256] = True
        return layout


def _dense(layout: Tensor, length: int) -> Tensor:
    return layout.repeat_interleave(16, 0).repeat_interleave(256, 1)[:length, :length]


@pytest.mark.parametrize("head_dim", [16, 128])
@pytest.mark.parametrize("causal", [False, True])
def test_packed_function_is_dense_attention_of_each_sequence(causal, head_dim):
    layout = _Layout().make_layout(LONGEST)
    tail = 2  # tokens of no sequence
    qkv = torch.randn(sum(LENGTHS) + tail, 3, 2, head_dim, dtype=torch.float64, requires_grad=True)
    cu_seqlens = torch.tensor([0, *LENGTHS]).cumsum(0).int()
    out = flash_blocksparse_attn_func(qkv, cu_seqlens, layout, 0.0, LONGEST, causal=causal)
    expected = []
    for start, length in zip(cu_seqlens.tolist(), LENGTHS):
        q, k, v = qkv[None, start : start + length].unbind(2)
        mask = _dense(layout, length)
        expected.append(flashtile.attention(q, k, v, mask=mask, causal=causal, backend="reference")[0])
    expected.append(torch.zeros(tail, 2, head_dim, dtype=torch.float64))
    reference = torch.cat(expected)
    assert_same(out, reference)
    upstream = torch.randn_like(out)
    grads = [torch.autograd.grad(result, qkv, upstream)[0] for result in (out, reference)]
    assert_same(*grads)


@each_case("config", [_Layout(), patterns.butterfly, lambda length: patterns.fixed(length, 32)])
def test_module_attends_within_its_mask(config):
    module = FlashBlocksparseAttention(config, softmax_scale=0.3)
    qkv = torch.randn(2, LONGEST, 3, 2, 16)
    keep = torch.arange(LONGEST) < torch.tensor([[LONGEST], [200]])
    out, weights = module(qkv, key_padding_mask=keep)
    mask = module.mask(LONGEST, qkv.device)
    q, k, v = qkv.unbind(2)
    shown = mask.to_dense() & keep[:, None, None]
    expected = flashtile.attention(q, k, v, mask=shown, scale=0.3, backend="reference") * keep[:, :, None, None]
    assert_same(out, expected)
    assert weights is None
    assert module.mask(LONGEST, qkv.device) is mask, "a mask is made once"


@each_case("config", [_Layout(), patterns.butterfly])
def test_a_mask_made_in_inference_mode_serves_training(config):
    module = FlashBlocksparseAttention(config)
    qkv = torch.randn(1, LONGEST, 3, 2, 16, requires_grad=True)
    with torch.inference_mode():
        module(qkv)
    module(qkv)[0].sum().backward()
    assert qkv.grad is not None and qkv.grad.any()


def test_module_takes_packed_sequences():
    module = FlashBlocksparseAttention(_Layout()).eval()
    qkv = torch.randn(sum(LENGTHS), 3, 2, 16)
    cu_seqlens = torch.tensor([0, *LENGTHS]).cumsum(0).int()
    out, _ = module(qkv, cu_seqlens=cu_seqlens, max_s=LONGEST, causal=True)
    expected = flash_blocksparse_attn_func(qkv, cu_seqlens, _Layout().make_layout(LONGEST), 0.0, LONGEST, causal=True)
    assert_same(out, expected)


def test_dropout_in_training_only():
    module = FlashBlocksparseAttention(patterns.causal, attention_dropout=0.5)
    qkv = torch.randn(1, 64, 3, 1, 8)
    assert not torch.equal(module(qkv)[0], module(qkv)[0])
    module.eval()
    assert torch.equal(module(qkv)[0], module(qkv)[0])


def test_multi_head_attention_learns():
    module = FlashBlocksparseMHA(32, 4, patterns.butterfly, causal=True)
    assert set(module.state_dict()) == {"Wqkv.weight", "Wqkv.bias", "out_proj.weight", "out_proj.bias"}
    x = torch.randn(2, 100, 32, requires_grad=True)
    out, weights = module(x)
    assert out.shape == x.shape and weights is None
    out.sum().backward()
    assert all(parameter.grad is not None and parameter.grad.isfinite().all() for parameter in module.parameters())


@each_case(
    "call, words",
    [
        (lambda: FlashBlocksparseAttention(3), "sparsity_config: expected a function"),
        (lambda: FlashBlocksparseMHA(30, 4, patterns.butterfly), "embed_dim: expected a multiple"),
        (lambda: FlashBlocksparseMHA(32, 4, patterns.butterfly, batch_first=False), "batch_first: expected True"),
        (
            lambda: FlashBlocksparseAttention(patterns.causal)(torch.zeros(1, 4, 3, 1, 8), need_weights=True),
            "need_weig",
        ),
        (lambda: _function(return_attn_probs=True), "return_attn_probs: expected False"),
        (lambda: _function(convert_mask=False), "convert_mask: expected True"),
        (lambda: _function(qkv=torch.zeros(4, 2, 1, 8)), r"qkv: expected shape \[total, 3"),
        (
            lambda: FlashBlocksparseAttention(patterns.causal)(
                torch.zeros(4, 3, 1, 8), cu_seqlens=torch.tensor([0, 4])
            ),
            "cu_seqlens: expected max_s beside it",
        ),
    ],
)
def test_errors(call, words):
    with pytest.raises((TypeError, ValueError), match=words):
        call()


def _function(qkv: Tensor | None = None, **options: Any) -> Tensor:
    qkv = torch.zeros(4, 3, 1, 8) if qkv is None else qkv
    return flash_blocksparse_attn_func(qkv, torch.tensor([0, 4]), torch.ones(1, 1).bool(), 0.0, 4, **options)
