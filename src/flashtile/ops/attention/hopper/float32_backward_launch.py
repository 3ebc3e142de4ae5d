"""Host side of the Hopper backwards of float32: the parts of the operands, descriptors and the kernels' plans."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from flashtile._backends.allocate import contiguous
from flashtile._backends.tma import chunks_maker, descriptor_parameter, strided_layout
from flashtile.ops.attention.hopper.apart_launch import ApartPlan, Frame, GradientKernel, apart_plan, gradient_kernel
from flashtile.ops.attention.hopper.configs import CONSUMER_ROWS
from flashtile.ops.attention.hopper.float32_backward import (
    attention_float32_dk_dq_kernel,
    attention_float32_dv_kernel,
)
from flashtile.ops.attention.hopper.float32_backward_configs import (
    WIDTH,
    choose_float32_wide_config,
    is_wide_float32,
)
from flashtile.ops.attention.hopper.float32_parts_launch import parts_layout, plan_parts
from flashtile.ops.attention.hopper.float32_wide_backward import (
    attention_float32_wide_dk_dq_kernel,
    attention_float32_wide_dv_kernel,
)
from flashtile.ops.attention.hopper.wide_backward_configs import CHUNK

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


class _Kernels(NamedTuple):
    """The kernels that serve a call.

    Attributes:
        columns: of a tile.
        widths: columns of a part of q and k, and of dout and v.
        of_dv, of_dk_dq: constants of either kernel, of its own.
    """

    dv: Any
    dk_dq: Any
    columns: int
    widths: dict[str, int]
    of_dv: dict[str, Any]
    of_dk_dq: dict[str, Any]


def plan_float32_backward(frame: Frame) -> ApartPlan:
    """The plan of a call in float32."""
    head_dim, head_dim_v = frame.written["dk"][-1], frame.written["dv"][-1]
    kernels = _kernels_for(head_dim, head_dim_v)
    box = (1, CONSUMER_ROWS, 1, kernels.columns)
    descriptor = descriptor_parameter(torch.bfloat16, box)
    parts = {name: parts_layout(shape, kernels.widths[name]) for name, (shape, _) in frame.read.items()}
    makers = {
        name: chunks_maker(torch.bfloat16, (box,), strided_layout(of.shape, of.strides)) for name, of in parts.items()
    }

    def kernel(name: str, function: Any, moved: dict[str, str], gradient_ptr: str, **constants: int) -> GradientKernel:
        descriptors = dict.fromkeys(moved.values(), descriptor)
        return gradient_kernel(frame, name, function, moved, descriptors, makers, constants, gradient_ptr)

    of_dk_dq = {"HEAD_DIM": head_dim, **kernels.of_dk_dq}
    return apart_plan(
        frame,
        {name: contiguous(shape, frame.call.dtype) for name, shape in frame.written.items()},
        dv=kernel("dv", kernels.dv, _MOVED_FOR_DV, "dv_ptr", HEAD_DIM_V=head_dim_v, **kernels.of_dv),
        dk=kernel("dk", kernels.dk_dq, _MOVED_FOR_DK, "gradient_ptr", OF_KEYS=True, **of_dk_dq),
        dq=kernel("dq", kernels.dk_dq, _MOVED_FOR_DQ, "gradient_ptr", OF_KEYS=False, **of_dk_dq),
        splits=tuple(
            plan_parts(shape, apart, kernels.widths[name], frame.call.device)
            for name, (shape, apart) in frame.read.items()
        ),
        parts=tuple(parts.values()),
    )


def _kernels_for(head_dim: int, head_dim_v: int) -> _Kernels:
    if not is_wide_float32(head_dim, head_dim_v):
        widths = dict.fromkeys(("q", "k", "v", "dout"), WIDTH)
        return _Kernels(attention_float32_dv_kernel, attention_float32_dk_dq_kernel, WIDTH, widths, {}, {})
    config = choose_float32_wide_config(head_dim, head_dim_v)
    width, value_width = config.chunks * CHUNK, config.value_chunks * CHUNK
    chunks = {"CHUNKS": config.chunks, "VALUE_CHUNKS": config.value_chunks}
    return _Kernels(
        attention_float32_wide_dv_kernel,
        attention_float32_wide_dk_dq_kernel,
        CHUNK,
        {"q": width, "k": width, "v": value_width, "dout": value_width},
        of_dv={**chunks, "STAYING": config.staying, "PLACES": config.places},
        of_dk_dq={
            **chunks,
            "STAYING_SCORES": config.staying_scores,
            "STAYING_VALUES": config.staying_values,
            "WEIGHT_PLACES": config.weight_places,
            "GRADIENT_PLACES": config.gradient_places,
        },
    )
