"""Host side of the Hopper forward of float32: the parts of q, k and v, descriptors and the launch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flashtile._backends.allocate import allocator, contiguous
from flashtile._backends.launch import Plan, constants_of, make_plan, plan_cache, pointer_to
from flashtile._backends.tma import chunks_maker, descriptor_parameter, joined, strided_layout
from flashtile.ops.attention.call import AuxFacts, Call, describe_call
from flashtile.ops.attention.hopper.configs import CONSUMER_ROWS, PRODUCER_REGISTERS
from flashtile.ops.attention.hopper.float32_forward import attention_float32_forward_kernel
from flashtile.ops.attention.hopper.float32_forward_configs import choose_float32_forward_config
from flashtile.ops.attention.hopper.float32_parts_launch import parts_layout, plan_parts
from flashtile.ops.attention.hopper.parameters import side_of_call
from flashtile.ops.attention.hopper.wide_backward import Problem
from flashtile.ops.attention.hopper.wide_backward_configs import CHUNK, MAX_REGISTERS, REGISTERS
from flashtile.ops.attention.parameters import NO_SIDE
from flashtile.ops.attention.spec import AttentionSpec, SideInputs
from flashtile.ops.common.checks import check_programs

#: A copy moves a part of so many rows and columns.
_BOX = (1, CONSUMER_ROWS, 1, CHUNK)


class Float32ForwardPlan(NamedTuple):
    """The launches: the parts of q, k and v, and the kernel.

    Attributes:
        allocate: makes out, lse, and what `splits` write.
        describe: makes the descriptors of the parts from their addresses.
    """

    splits: tuple[Plan, ...]
    kernel: Plan
    allocate: Callable[[], list[Tensor]]
    describe: Callable[..., tuple]

    def launch(self, q: int, k: int, v: int, sinks: int) -> tuple[Tensor, Tensor]:
        """Enqueues the kernels, from addresses; 0 stands for sinks that are not there. Returns out and lse."""
        out, lse, *parts = self.allocate()
        if not self.kernel.programs:
            return out, lse
        for split, numbers, part in zip(self.splits, (q, k, v), parts):
            split.launch(numbers, part.data_ptr())
        descriptors = self.describe(*(part.data_ptr() for part in parts))
        self.kernel.launch(*descriptors, out.data_ptr(), lse.data_ptr(), sinks, *NO_SIDE)
        return out, lse


def forward_float32(q: Tensor, k: Tensor, v: Tensor, side: SideInputs, spec: AttentionSpec) -> tuple[Tensor, Tensor]:
    """Runs the kernels, for a scale that is positive. Shapes as in `flashtile.attention`. Returns out and lse, which
    are not written where there are no queries or no keys."""
    plan = plan_float32_forward(describe_call("forward", (q, k, v), side, spec))
    sinks = 0 if side.sinks is None else side.sinks.data_ptr()
    return plan.launch(q.data_ptr(), k.data_ptr(), v.data_ptr(), sinks)


@plan_cache
def plan_float32_forward(call: Call) -> Float32ForwardPlan:
    """Everything that can be decided before the tensors' contents are known."""
    call.check_sizes()
    spec, rows_q, rows_k = call.spec, call.rows_q, call.rows_k
    head_dim, head_dim_v = call.head_dims
    config = choose_float32_forward_config(head_dim, head_dim_v)
    widths = (CHUNK * config.chunks, CHUNK * config.chunks, CHUNK * config.value_chunks)
    parts = [parts_layout(of.shape, width) for of, width in zip((call.q, call.k, call.v), widths)]
    tiles = -(-rows_q // CONSUMER_ROWS)
    programs = tiles * call.batch * call.heads if rows_k else 0
    check_programs("q", programs)
    descriptor = descriptor_parameter(torch.bfloat16, _BOX)
    without_side = side_of_call(call._replace(aux=AuxFacts()), covered=False, by_column=False)
    parameters: dict[str, Any] = {
        **dict.fromkeys(("q_desc", "k_desc", "v_desc"), descriptor),
        "out_ptr": pointer_to(torch.float32, 16),
        "lse_ptr": pointer_to(torch.float32, 16),
        "sinks_ptr": pointer_to(torch.float32 if call.aux.sinks else None),
        "problem": Problem.from_call(call, without_side.pointers, own_tiles=tiles),
    }
    constants = {
        **constants_of(config),
        "HEAD_DIM_V": head_dim_v,
        "REGISTERS": REGISTERS,
        "PRODUCER_REGISTERS": PRODUCER_REGISTERS,
        "HAS_LEFT": spec.window_left is not None,
        "HAS_RIGHT": spec.window_right is not None,
        "TOP_LEFT": spec.banded and spec.top_left,
        "MASKS": spec.banded or rows_k % CONSUMER_ROWS != 0,
    }
    kernel = make_plan(
        attention_float32_forward_kernel, parameters, constants, programs, call.device,
        num_warps=4, max_registers=MAX_REGISTERS,
    )  # fmt: skip
    outputs = (
        contiguous(call.out_shape, torch.float32),
        contiguous(call.lse_shape, torch.float32),
    )
    if not programs:
        return Float32ForwardPlan((), kernel, allocator(outputs, call.device), joined(()))
    makers = [chunks_maker(torch.bfloat16, (_BOX,), strided_layout(of.shape, of.strides)) for of in parts]
    return Float32ForwardPlan(
        splits=tuple(
            plan_parts(of.shape, of.strides, width, call.device) for of, width in zip((call.q, call.k, call.v), widths)
        ),
        kernel=kernel,
        allocate=allocator((*outputs, *parts), call.device),
        describe=joined(makers),
    )
