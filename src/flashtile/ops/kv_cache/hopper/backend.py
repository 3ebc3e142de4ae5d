"""Which calls over a cache the Hopper kernels serve. Nothing here needs Triton."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

from flashtile._backends.allocate import contiguous_strides
from flashtile._backends.devices import DeviceFacts, interpreting

if TYPE_CHECKING:
    from flashtile.ops.common.split_keys.plan import SplitCall

#: Keys of a tile.
_TILE = 64
#: Rows of the cache that a copy moves at least: those that are swizzled together.
_LEAST_BOX = 8


def unsupported_reason(call: SplitCall, device: DeviceFacts) -> str | None:
    """Why this kernel does not serve a call; None where it does."""
    batch, seq_q, heads, heads_kv, head_dim, head_dim_v = call.shape
    _, k_strides, _ = call.strides
    outer, row, _ = k_strides
    queries = (batch, seq_q) if call.total_q is None else (1, call.total_q)
    right = call.window_right
    for holds, reason in (
        (device.arch == "sm_90" and not interpreting(), f"it runs on sm_90, not on {device.arch}"),
        (call.values_in_keys and heads_kv == 1, "it takes one key head whose first columns are the values"),
        (
            512 < head_dim <= 576 and head_dim % 8 == 0 and head_dim_v == 512,
            f"it takes heads of 520 to 576 columns with 512 of values, not {head_dim} with {head_dim_v}",
        ),
        (
            call.dtype in (torch.float16, torch.bfloat16) and call.cache_dtype in (None, call.dtype),
            "it takes q and the cache in one 16-bit dtype",
        ),
        (call.window_left is None and right in (None, 0), "it has no window"),
        (not call.softcap and not call.slope_dims and not call.sinks, "it has no soft cap, ALiBi or sinks"),
        (call.index_dtypes[2] is None and call.tree is None, "it has no left padding and no tree"),
        (call.scale > 0 and call.capacity > 0, "it takes a positive scale, and a cache that has rows"),
        (
            call.misalignment % 16 == 0 and row % 8 == 0 and row > 0 and outer % row == 0,
            "TMA reads rows at multiples of 16 bytes, and entries or pages at multiples of a row",
        ),
        (_consecutive((*queries, heads, head_dim), call.strides[0]), "TMA reads q as it is where it is contiguous"),
        (
            call.page_size == 0 or copied_rows(call.page_size) >= _LEAST_BOX,
            f"8 divides the pages that it takes, not {call.page_size}",
        ),
    ):  # fmt: skip
        if not holds:
            return reason
    return None


def _consecutive(shape: tuple[int, ...], strides: tuple[int, ...]) -> bool:
    """Whether rows follow one another; `strides` without that of columns."""
    return all(size == 1 or is_ == of for size, is_, of in zip(shape, strides, contiguous_strides(shape)))


def copied_rows(page_size: int) -> int:
    """Rows of the cache that a copy moves."""
    return math.gcd(page_size, _TILE) if page_size else _TILE
