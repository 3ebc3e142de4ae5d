"""Padded batches: `bert_padding` (rows by number) and `flash_attn_triton` (dense attention with a bias) of flash_attn.

In the calls of `flash_attn_triton` the diagonal begins at the first key.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from flashtile import modules
from flashtile.compat.calls import computed, taken_apart
from flashtile.compat.signatures import VERSION_2


def kept_rows(attention_mask: Tensor) -> Tensor:
    """A mask of any dtype as bool; not 0 is kept."""
    return attention_mask if attention_mask.dtype is torch.bool else attention_mask != 0


def unpad_input(
    hidden_states: Tensor, attention_mask: Tensor, unused_mask: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor, int, Tensor]:
    """Takes the rows that a mask keeps out of a padded batch. Waits for the GPU once.

    Args:
        hidden_states: `[batch, seqlen, ...]`.
        attention_mask: bool or integers `[batch, seqlen]`, not 0 = valid.
        unused_mask: likewise, rows that are kept too, but do not count as used.

    Returns:
        The rows `[total, ...]`, their indices int64 `[total]`, cu_seqlens int32 `[batch + 1]`, the longest sequence,
        and how many rows of each are used, int32 `[batch]`.
    """
    used = kept_rows(attention_mask)
    kept = used if unused_mask is None else used | kept_rows(unused_mask)
    rows = modules.unpad_input(hidden_states, kept)
    lengths = rows.lengths if unused_mask is None else used.sum(1, dtype=torch.int32)
    return rows.x, rows.indices, rows.cu_seqlens, rows.max_seqlen, lengths


def unpad_input_for_concatenated_sequences(
    hidden_states: Tensor, attention_mask_in_length: Tensor
) -> tuple[Tensor, Tensor, Tensor, int]:
    """As `unpad_input`, where each row of the batch holds several sequences, one behind the other.

    Args:
        hidden_states: `[batch, seqlen, ...]`.
        attention_mask_in_length: integers `[batch, seqlen]`: the lengths of a row's sequences, then 0.

    Returns:
        The rows `[total, ...]`, their indices, cu_seqlens of all sequences, and the longest.
    """
    filled = attention_mask_in_length.sum(1, keepdim=True)
    kept = torch.arange(attention_mask_in_length.shape[1], device=filled.device) < filled
    rows = modules.unpad_input(hidden_states, kept)
    lengths = attention_mask_in_length[attention_mask_in_length != 0]
    cu_seqlens = torch.nn.functional.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))
    return rows.x, rows.indices, cu_seqlens, int(cu_seqlens.diff(prepend=cu_seqlens[:1]).max())


def index_first_axis(input: Tensor, indices: Tensor) -> Tensor:
    """Rows of `input` `[rows, ...]` by number: `[len(indices), ...]`. Differentiable."""
    if indices.dim() != 1 or indices.dtype not in (torch.int32, torch.int64):
        raise ValueError(
            f"indices: expected int64 [rows], got {indices.dtype} {list(indices.shape)}; take those of unpad_input"
        )
    return input.index_select(0, indices)


def index_put_first_axis(values: Tensor, indices: Tensor, first_axis_dim: int) -> Tensor:
    """`[first_axis_dim, ...]`, 0 but for the rows that `indices` names, each once. Differentiable."""
    return modules.pad_input(values, indices, 1, first_axis_dim).squeeze(0)


def index_first_axis_residual(input: Tensor, indices: Tensor) -> tuple[Tensor, Tensor]:
    """As `index_first_axis`, and the input itself beside it."""
    return index_first_axis(input, indices), input.view_as(input)


def flash_attn_func(bias: Tensor | None, **given: Any) -> Tensor:
    """Attention of a dense batch; `flashtile.attention` with `align="top_left"`.

    Args:
        q: `[batch, seq_q, heads, head_dim]`; k and v `[batch, seq_k, heads, head_dim]`; or kv `[batch, seq_k, 2, ...]`,
            or qkv `[batch, seq, 3, ...]`.
        bias: broadcasts to `[batch, heads, seq_q, seq_k]`, in q's dtype or float32; differentiable.
        causal: no key right of the diagonal is visible, which begins at the first key.
        softmax_scale: factor on the scores; default `1/sqrt(head_dim)`.
    """
    return computed(*taken_apart(given, top_left=True)[:5], bias=bias)


flash_attn_kvpacked_func = flash_attn_qkvpacked_func = flash_attn_func


@torch.no_grad()
def _flash_attn_forward(softmax_scale: float | None, bias: Tensor | None, **given: Any) -> tuple[Tensor, Tensor, float]:
    """The forward by itself: out, lse `[batch, heads, seq_q rounded up to 128]`, -inf past the end, and the scale."""
    scale = 1 / math.sqrt(given["q"].shape[-1]) if softmax_scale is None else softmax_scale
    apart = taken_apart(given | {"softmax_scale": scale}, top_left=True)
    out, lse = computed(*apart[:5], bias=bias, return_lse=True)
    return out, torch.nn.functional.pad(lse, (0, -lse.shape[-1] % 128), value=-math.inf), scale


VERSION_2.serve(globals())
