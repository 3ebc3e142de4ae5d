"""Host side of the sum of the parts in which kernels store the gradient of a bias."""

from __future__ import annotations

import math

import torch
import triton
from torch import Tensor

from flashtile._backends.allocate import contiguous
from flashtile._backends.launch import Plan, int32, int64, make_plan, pointer, pointer_to
from flashtile.ops.attention.call import TensorFacts
from flashtile.ops.attention.triton.bias_gradient import attention_bias_parts_kernel

#: Numbers that a program reads at a time, of some parts, and parts at most.
_AT_ONCE, _MOST_PARTS = 1024, 32


def plan_of_sum(parts: int, bias: TensorFacts, device: torch.device) -> Plan | None:
    """The launch that adds up so many parts of the gradient of a bias; None where there is one."""
    if parts == 1:
        return None
    together = min(_MOST_PARTS, triton.next_power_of_2(parts))
    block, size = _AT_ONCE // together, math.prod(bias.shape)
    parameters = {
        "parts_ptr": pointer_to(torch.float32, 16),
        "sum_ptr": pointer_to(bias.dtype, 16),
        "size": int64(size),
        "parts": int32(parts),
    }
    constants = {"PARTS": together, "BLOCK": block}
    programs, outputs = -(-size // block), (contiguous(bias.shape, bias.dtype),)
    return make_plan(attention_bias_parts_kernel, parameters, constants, programs, device, num_warps=4, outputs=outputs)


def sum_of_parts(plan: Plan | None, parts: Tensor) -> Tensor:
    """The gradient of a bias, from its parts `[parts, *shape]`. A single one has the bias's dtype already."""
    if plan is None:
        return parts.squeeze(0)
    total: Tensor
    (total,) = plan.allocate()
    plan.launch(pointer(parts), pointer(total))
    return total
