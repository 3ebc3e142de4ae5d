"""flash_attn.bert_padding over `flashtile.modules.unpad_input` and `pad_input`."""

from __future__ import annotations

import torch
from torch import Tensor

from flashtile import modules
from flashtile.compat.shared.padding import (
    index_first_axis,
    index_first_axis_residual,
    index_put_first_axis,
    kept_rows,
    pad_input,
)

__all__ = [
    "index_first_axis",
    "index_first_axis_residual",
    "index_put_first_axis",
    "pad_input",
    "unpad_input",
    "unpad_input_for_concatenated_sequences",
]


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
