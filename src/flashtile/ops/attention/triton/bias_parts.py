"""The sum of the parts in which kernels store the gradient of a bias: by one kernel, in a fixed order, in the bias's
dtype."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from flashtile._backends.allocate import contiguous_strides, empty
from flashtile._backends.launch import Plan, int32, int64, make_plan, plan_cache, pointer, pointer_to

#: Numbers that a program reads at a time, of some parts, and parts at most.
_AT_ONCE, _MOST_PARTS = 1024, 32


@triton.jit
def attention_bias_parts_kernel(
    parts_ptr, sum_ptr, size, parts, PARTS: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """`parts`: float32 `[parts, size]`. Of `PARTS` at a time, a program adds up `BLOCK` numbers."""
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = place < size
    total = tl.zeros((PARTS, BLOCK), tl.float32)
    for first in range(0, parts, PARTS):
        part = first + tl.arange(0, PARTS)
        pointers = parts_ptr + part.to(tl.int64)[:, None] * size + place[None, :]
        total += tl.load(pointers, mask=(part < parts)[:, None] & inside[None, :], other=0.0)
    tl.store(sum_ptr + place, tl.sum(total, 0).to(sum_ptr.dtype.element_ty), mask=inside)


def sum_of_parts(parts: Tensor, dtype: torch.dtype) -> Tensor:
    """The gradient of a bias of `dtype`, from its parts, float32 `[parts, *shape]`; of a single one, which has that
    dtype already, itself."""
    count, *shape = parts.shape
    if count == 1:
        return parts.squeeze(0)
    total = empty(tuple(shape), contiguous_strides(tuple(shape)), dtype, parts.device)
    _plan(count, total.numel(), dtype, parts.device).launch(pointer(parts), pointer(total))
    return total


@plan_cache
def _plan(parts: int, size: int, dtype: torch.dtype, device: torch.device) -> Plan:
    together = min(_MOST_PARTS, triton.next_power_of_2(parts))
    block = _AT_ONCE // together
    parameters = {
        "parts_ptr": pointer_to(torch.float32, 16),
        "sum_ptr": pointer_to(dtype, 16),
        "size": int64(size),
        "parts": int32(parts),
    }
    constants = {"PARTS": together, "BLOCK": block}
    return make_plan(attention_bias_parts_kernel, parameters, constants, -(-size // block), device, num_warps=4)
