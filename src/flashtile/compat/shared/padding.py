"""Rows of padded batches by number, as `flash_attn.bert_padding` has them in both versions."""

from __future__ import annotations

import torch
from torch import Tensor

from flashtile import modules


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
