"""flash_attn.flash_blocksparse_attn_interface over `flashtile.modules.flash_blocksparse_attn_func`."""

from __future__ import annotations

import torch
from torch import Tensor

from flashtile import modules


def convert_blockmask(blockmask: Tensor, causal: bool) -> Tensor:
    """A layout of tiles as lists: for each column the rows that are visible in it.

    Args:
        blockmask: `[rows, columns]`, not 0 where a tile is visible.
        causal: must be False; the calls take care of it.

    Returns:
        int32 `[columns, rows]`: `4 · row + 2 · (last of its row) + (first of its row)` in the order of rows, then -1.
    """
    if causal:
        raise ValueError("causal: expected False, got True; pass causal to the call of attention")
    visible = blockmask != 0
    along = visible.to(torch.int32)
    first = visible & (along.cumsum(1) == 1)
    last = visible & (along.flip(1).cumsum(1).flip(1) == 1)
    row = torch.arange(visible.shape[0], device=visible.device)[:, None]
    entries = (4 * row + 2 * last + first).masked_fill(~visible, -1).t()
    # A stable sort by "is there" keeps the order of rows.
    order = visible.t().to(torch.uint8).sort(dim=1, descending=True, stable=True).indices
    return entries.gather(1, order).to(torch.int32).contiguous()


def layout_of(converted: Tensor) -> Tensor:
    """What `convert_blockmask` undoes: bool `[rows, columns]`."""
    columns, rows = converted.shape
    layout = torch.zeros(rows + 1, columns, dtype=torch.bool, device=converted.device)
    row = converted.long().div(4, rounding_mode="floor").masked_fill(converted < 0, rows)
    return layout.scatter_(0, row.t(), True)[:rows]


def flash_blocksparse_attn_func(
    qkv: Tensor,
    cu_seqlens: Tensor,
    blockmask: Tensor,
    dropout_p: float,
    max_s: int,
    softmax_scale: float | None = None,
    causal: bool = False,
    return_attn_probs: bool = False,
    convert_mask: bool = True,
) -> Tensor:
    """Block-sparse attention of packed sequences.

    Args:
        qkv: `[total, 3, heads, head_dim]`.
        cu_seqlens: `[batch + 1]`.
        blockmask: `[ceil(max_s / 16), ceil(max_s / 256)]`, not 0 where a tile is visible; without convert_mask what
            `convert_blockmask` makes of it.
        dropout_p, max_s, softmax_scale, causal, return_attn_probs: as `flashtile.modules.flash_blocksparse_attn_func`.
        convert_mask: whether blockmask is a layout.

    Returns:
        `[total, heads, head_dim]`.
    """
    layout = blockmask if convert_mask else layout_of(blockmask)
    return modules.flash_blocksparse_attn_func(
        qkv, cu_seqlens, layout, dropout_p, max_s, softmax_scale, bool(causal), return_attn_probs
    )
