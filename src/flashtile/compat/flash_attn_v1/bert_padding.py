"""flash_attn.bert_padding of version 1 over `flashtile.modules.unpad_input` and `pad_input`."""

from __future__ import annotations

from torch import Tensor

from flashtile import modules
from flashtile.compat.shared.padding import (
    index_first_axis,
    index_first_axis_residual,
    index_put_first_axis,
    kept_rows,
    pad_input,
)

__all__ = ["index_first_axis", "index_first_axis_residual", "index_put_first_axis", "pad_input", "unpad_input"]


def unpad_input(hidden_states: Tensor, attention_mask: Tensor) -> tuple[Tensor, Tensor, Tensor, int]:
    """Takes the rows that a mask keeps out of a padded batch. Waits for the GPU once.

    Args:
        hidden_states: `[batch, seqlen, ...]`.
        attention_mask: bool or integers `[batch, seqlen]`, not 0 = valid.

    Returns:
        The rows `[total, ...]`, their indices int64 `[total]`, cu_seqlens int32 `[batch + 1]`, the longest sequence.
    """
    return modules.unpad_input(hidden_states, kept_rows(attention_mask))[:4]
