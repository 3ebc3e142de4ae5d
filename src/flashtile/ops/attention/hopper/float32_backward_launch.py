"""Host side of the Hopper backward of float32: the parts of the operands, descriptors and the kernels' plans."""

from __future__ import annotations

from typing import Any

import torch

from flashtile._backends.alignment import batch_row_head
from flashtile._backends.allocate import contiguous
from flashtile._backends.launch import Plan, int32, make_plan, pointer_to, strides_of
from flashtile._backends.tma import chunks_maker, descriptor_parameter, strided_layout
from flashtile.ops.attention.hopper.apart_launch import ApartPlan, Frame, GradientKernel, apart_plan, gradient_kernel
from flashtile.ops.attention.hopper.configs import CONSUMER_ROWS
from flashtile.ops.attention.hopper.float32_backward import (
    attention_float32_dk_dq_kernel,
    attention_float32_dv_kernel,
    attention_split_kernel,
)
from flashtile.ops.attention.hopper.float32_backward_configs import PARTS, WIDTH
from flashtile.ops.common.checks import check_programs

#: Rows that a program splits.
_SPLIT_ROWS = 64

#: What a copy moves.
_BOX = (1, CONSUMER_ROWS, 1, WIDTH)

#: The descriptors that each kernel takes, in order, and the tensors whose parts they are of.
_MOVED_FOR_DV = {"k_desc": "k", "q_desc": "q", "dout_desc": "dout"}
_MOVED_FOR_DK = {
    "own_scores_desc": "k",
    "own_values_desc": "v",
    "visited_scores_desc": "q",
    "visited_values_desc": "dout",
}
_MOVED_FOR_DQ = {
    "own_scores_desc": "q",
    "own_values_desc": "dout",
    "visited_scores_desc": "k",
    "visited_values_desc": "v",
}


def plan_float32_backward(frame: Frame) -> ApartPlan:
    """The plan of a call in float32."""
    parts = {name: contiguous((*shape[:-1], PARTS * WIDTH), torch.bfloat16) for name, (shape, _) in frame.read.items()}
    makers = {
        name: chunks_maker(torch.bfloat16, (_BOX,), strided_layout(of.shape, of.strides)) for name, of in parts.items()
    }

    def kernel(name: str, function: Any, moved: dict[str, str], gradient_ptr: str, **constants: int) -> GradientKernel:
        descriptor = descriptor_parameter(torch.bfloat16, _BOX)
        return gradient_kernel(frame, name, function, moved, descriptor, makers, constants, gradient_ptr)

    dk_or_dq, head_dim, head_dim_v = attention_float32_dk_dq_kernel, frame.written["dk"][-1], frame.written["dv"][-1]
    return apart_plan(
        frame,
        {name: contiguous(shape, frame.dtype) for name, shape in frame.written.items()},
        dv=kernel("dv", attention_float32_dv_kernel, _MOVED_FOR_DV, "dv_ptr", HEAD_DIM_V=head_dim_v),
        dk=kernel("dk", dk_or_dq, _MOVED_FOR_DK, "gradient_ptr", HEAD_DIM=head_dim, OF_KEYS=True),
        dq=kernel("dq", dk_or_dq, _MOVED_FOR_DQ, "gradient_ptr", HEAD_DIM=head_dim, OF_KEYS=False),
        splits=tuple(_plan_split(shape, apart, WIDTH, frame.device) for shape, apart in frame.read.values()),
        parts=tuple(parts.values()),
    )


def _plan_split(shape: tuple[int, ...], strides: tuple[int, ...], width: int, device: torch.device) -> Plan:
    """The launch that writes the parts of a tensor `[batch, rows, heads, head_dim]`, side by side, of `width` columns
    each."""
    batch, rows, heads, head_dim = shape
    apart = dict(zip(("batch", "row", "head"), batch_row_head(shape, strides)))
    tiles = -(-rows // _SPLIT_ROWS)
    programs = batch * tiles * heads
    check_programs("q", programs)
    parameters = {
        "numbers_ptr": pointer_to(torch.float32, 16),
        "parts_ptr": pointer_to(torch.bfloat16, 16),
        **strides_of("numbers", apart, 4),  # multiples of 16 bytes
        "heads": int32(heads),
        "rows": int32(rows),
        "tiles": int32(tiles),
    }
    constants = {"HEAD_DIM": head_dim, "WIDTH": width, "ROWS": _SPLIT_ROWS}
    return make_plan(attention_split_kernel, parameters, constants, programs, device, num_warps=4)
