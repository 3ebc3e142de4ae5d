"""Padded batches in both versions of flash_attn: `bert_padding` (rows by number) and `flash_attn_triton`.

The calls of `flash_attn_triton` are dense, with a bias, and the diagonal begins at the first key.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

import flashtile
from flashtile import modules
from flashtile.compat.shared.arguments import unpacked


def kept_rows(attention_mask: Tensor) -> Tensor:
    """A mask of any dtype as bool; not 0 is kept."""
    return attention_mask if attention_mask.dtype is torch.bool else attention_mask != 0


def index_first_axis(input: Tensor, indices: Tensor) -> Tensor:
    """Rows of `input` `[rows, ...]` by number: `[len(indices), ...]`. Differentiable."""
    _check_indices(indices)
    return input.index_select(0, indices)


def index_put_first_axis(values: Tensor, indices: Tensor, first_axis_dim: int) -> Tensor:
    """`[first_axis_dim, ...]`, 0 but for the rows that `indices` names, each once. Differentiable."""
    return modules.pad_input(values, indices, 1, first_axis_dim).squeeze(0)


def index_first_axis_residual(input: Tensor, indices: Tensor) -> tuple[Tensor, Tensor]:
    """As `index_first_axis`, and the input itself beside it."""
    return index_first_axis(input, indices), input.view_as(input)


def pad_input(hidden_states: Tensor, indices: Tensor, batch: int, seqlen: int) -> Tensor:
    """Puts packed rows `[total, ...]` back into a padded batch `[batch, seqlen, ...]`, 0 elsewhere."""
    return modules.pad_input(hidden_states, indices, batch, seqlen)


def _check_indices(indices: Tensor) -> None:
    if indices.dim() != 1 or indices.dtype not in (torch.int32, torch.int64):
        raise ValueError(
            f"indices: expected int64 [rows], got {indices.dtype} {list(indices.shape)}; take those of unpad_input"
        )


def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None = None,
    causal: bool = False,
    softmax_scale: float | None = None,
) -> Tensor:
    """Attention of a dense batch; `flashtile.attention` with `align="top_left"`.

    Args:
        q: `[batch, seq_q, heads, head_dim]`.
        k: `[batch, seq_k, heads, head_dim]`.
        v: likewise.
        bias: broadcasts to `[batch, heads, seq_q, seq_k]`, in q's dtype or float32; differentiable.
        causal: no key right of the diagonal is visible, which begins at the first key.
        softmax_scale: factor on the scores; default `1/sqrt(head_dim)`.
    """
    return flashtile.attention(q, k, v, bias=bias, causal=bool(causal), align="top_left", scale=softmax_scale)


def flash_attn_kvpacked_func(
    q: Tensor, kv: Tensor, bias: Tensor | None = None, causal: bool = False, softmax_scale: float | None = None
) -> Tensor:
    """As `flash_attn_func`, with kv `[batch, seq_k, 2, heads, head_dim]`."""
    k, v = unpacked("kv", kv, 2, "batch, seq_k")
    return flash_attn_func(q, k, v, bias, causal, softmax_scale)


def flash_attn_qkvpacked_func(
    qkv: Tensor, bias: Tensor | None = None, causal: bool = False, softmax_scale: float | None = None
) -> Tensor:
    """As `flash_attn_func`, with qkv `[batch, seq, 3, heads, head_dim]`."""
    q, k, v = unpacked("qkv", qkv, 3, "batch, seq")
    return flash_attn_func(q, k, v, bias, causal, softmax_scale)


def _flash_attn_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None = None,
    causal: bool = False,
    softmax_scale: float | None = None,
) -> tuple[Tensor, Tensor, float]:
    """The forward by itself: out, lse `[batch, heads, seq_q rounded up to 128]`, -inf past the end, and the scale."""
    scale = 1 / math.sqrt(q.shape[-1]) if softmax_scale is None else softmax_scale
    with torch.no_grad():
        out, lse = flashtile.attention(
            q, k, v, bias=bias, causal=bool(causal), align="top_left", scale=scale, return_lse=True
        )
        return out, torch.nn.functional.pad(lse, (0, -lse.shape[-1] % 128), value=-math.inf), scale
