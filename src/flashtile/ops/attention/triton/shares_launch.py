"""Host side of the sums of dk and dv where query heads, or their queries, have shares."""

from __future__ import annotations

import math

import torch
import triton
from torch import Tensor

from flashtile._backends.allocate import Layout, contiguous
from flashtile._backends.launch import Plan, int32, int64, make_plan, pointer, pointer_to
from flashtile.ops.attention.triton.shares import attention_shares_kernel
from flashtile.ops.common.checks import check_programs

#: Numbers of a share that a program reads at a time.
_AT_ONCE = 2048


def plan_of_shares(dk: Layout, dv: Layout, shares: int, device: torch.device) -> Plan | None:
    """The launch that adds up dk and dv, `[..., heads_kv · shares, head_dim]` in lines that lie one after another; None
    where there is one share."""
    if shares == 1:
        return None
    (head_dim, head_dim_v), heads = (dk.shape[-1], dv.shape[-1]), dk.shape[-2] // shares
    width, width_v = triton.next_power_of_2(head_dim), triton.next_power_of_2(head_dim_v)
    together = max(_AT_ONCE // max(width, width_v), 1)
    lines = math.prod(dk.shape[:-2]) * heads
    tiles = -(-lines // together)
    check_programs("k", 2 * tiles)
    number = pointer_to(dk.dtype, 16)
    parameters = {
        **dict.fromkeys(("dk_shares_ptr", "dv_shares_ptr", "dk_ptr", "dv_ptr"), number),
        "lines": int64(lines),
        "shares": int32(shares),
        "tiles": int32(tiles),
    }
    constants = {
        "HEAD_DIM": head_dim,
        "HEAD_DIM_V": head_dim_v,
        "APART": dk.strides[-2],
        "APART_V": dv.strides[-2],
        "LINES": together,
        "D": width,
        "E": width_v,
    }
    outputs = tuple(contiguous((*of.shape[:-2], heads, of.shape[-1]), of.dtype) for of in (dk, dv))
    return make_plan(attention_shares_kernel, parameters, constants, 2 * tiles, device, num_warps=4, outputs=outputs)


def sum_of_shares(plan: Plan | None, dk: Tensor, dv: Tensor) -> tuple[Tensor, Tensor]:
    """dk and dv `[..., heads_kv, head_dim]`."""
    if plan is None:
        return dk, dv
    total, total_v = plan.allocate()
    plan.launch(*map(pointer, (dk, dv, total, total_v)))
    return total, total_v
