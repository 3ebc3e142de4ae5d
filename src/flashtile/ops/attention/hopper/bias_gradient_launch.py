"""Host side of the gradient of a bias on Hopper: how it is cut, and its launch."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from flashtile._backends.allocate import Layout, contiguous
from flashtile._backends.launch import Plan
from flashtile.ops.attention.call import Call, TensorFacts
from flashtile.ops.attention.gpu.parameters import SidePointers
from flashtile.ops.attention.gpu.reductions import BiasWork, plan_of_sum, sum_of_parts
from flashtile.ops.attention.hopper.backward_configs import BIAS_QUERIES, bias_config_of, bias_programs_together
from flashtile.ops.attention.hopper.backward_descriptors import MOVED_FOR_BIAS, describer
from flashtile.ops.attention.hopper.backward_source import Numbers, backward_plan
from flashtile.ops.attention.hopper.backward_variant import BackwardVariant, function_of_call
from flashtile.ops.attention.hopper.parameters import is_covered, side_of_call

#: Parts of a bias at most: each costs a write and a read of the whole bias in float32.
_MOST_PARTS = 8

#: The share of the time for which multiprocessors shall be busy.
_BUSY = 7 / 8


class BiasGradientPlan(NamedTuple):
    """The launch, which writes sums `[parts, *bias.shape]`, what makes its descriptors from the addresses of
    `MOVED_FOR_BIAS`, and the launch that adds up the parts, if there are several."""

    kernel: Plan
    describe: Callable[..., tuple]
    sum_of_parts: Plan | None

    @property
    def launches(self) -> tuple[Plan, ...]:
        return (self.kernel,) if self.sum_of_parts is None else (self.kernel, self.sum_of_parts)


def run_bias_gradient(
    plan: BiasGradientPlan, addresses: tuple[int, ...], side: SidePointers, captured: tuple
) -> Tensor:
    """Enqueues the kernel. Returns the gradient in the bias's shape and dtype. `addresses`: of q, k, v, dout and
    statistics."""
    (sums,) = plan.kernel.allocate()
    descriptors = plan.describe(*addresses, side.bias)
    plan.kernel.launch(*descriptors, sums.data_ptr(), *side, 0, *captured)
    return sum_of_parts(plan.sum_of_parts, sums)


def plan_bias_gradient(
    call: Call,
    variant: BackwardVariant,
    numbers: Numbers,
    strides_dout: tuple[int, ...],
    gradients: tuple[Layout, Layout, Layout],
    tiles: int,
) -> BiasGradientPlan:
    """The plan of a call.

    Args:
        variant, numbers: of the call's main kernel.
        strides_dout: of the dout that the kernels read.
        gradients: dq, dk and dv.
        tiles: of queries, in all heads.
    """
    bias = call.aux.bias
    assert bias is not None
    cut = bias_config_of(call)
    block = BIAS_QUERIES * cut.query_tiles, cut.keys
    at_once = call.multiprocessors * bias_programs_together(cut, *call.head_dims)
    work = _cut_work(bias, call.batch * call.heads, block, at_once)
    covered = is_covered(call, *block)
    variant = variant._replace(
        config=variant.config._replace(bias_by_tma=True),
        side=side_of_call(call, covered=covered, by_column=True),
        function=function_of_call(call, covered),
        slope_sums=False,
        bias_in_parts=work.parts > 1,
        bias_shared_by_heads=bias.shape[1] < call.heads,
        masks=call.spec.banded or call.bounded,
    )
    of_work = {f"work.{name}": number.value for name, number in work.numbers(bias.shape)._asdict().items()}
    sums = contiguous((work.parts, *bias.shape), torch.float32 if work.parts > 1 else variant.dtype)
    kernel = backward_plan("bias", variant, {**numbers, **of_work}, work.own * work.parts, call.device, (sums,))
    describe = describer(variant, call, strides_dout, gradients, tiles, 0, MOVED_FOR_BIAS)
    return BiasGradientPlan(kernel, describe, plan_of_sum(work.parts, bias, call.device))


def _cut_work(bias: TensorFacts, matrices: int, block: tuple[int, int], programs: int) -> BiasWork:
    """So many parts that multiprocessors are busy. `matrices`: sequences times heads, `block`: queries and keys of a
    tile. `programs`: that run at once."""
    planes = bias.shape[0] * bias.shape[1]
    own = planes * math.prod(-(-size // along) for size, along in zip(bias.shape[2:], block))
    sharing = matrices // planes
    candidates = range(1, min(sharing, _MOST_PARTS) + 1)
    parts = next((parts for parts in candidates if _busy(own * parts, programs) >= _BUSY), candidates[-1])
    return BiasWork(own, sharing, parts)


def _busy(tiles: int, programs: int) -> float:
    """The share of the time for which so many multiprocessors compute so many equal tiles."""
    return tiles / (-(-tiles // programs) * programs)
