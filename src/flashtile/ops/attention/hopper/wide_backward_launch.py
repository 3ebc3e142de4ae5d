"""Host side of the Hopper backward of heads wider than 256 columns: layouts, descriptors and the kernels' plans."""

from __future__ import annotations

from typing import Any

from flashtile._backends.allocate import Layout
from flashtile._backends.launch import constants_of
from flashtile._backends.tma import chunks_maker, descriptor_parameter, strided_layout
from flashtile.ops.attention.hopper.apart_launch import ApartPlan, Frame, GradientKernel, apart_plan, gradient_kernel
from flashtile.ops.attention.hopper.backward_configs import padded_strides
from flashtile.ops.attention.hopper.bounds import bounded_layout
from flashtile.ops.attention.hopper.configs import CONSUMER_ROWS
from flashtile.ops.attention.hopper.wide_backward import attention_wide_dk_dq_kernel, attention_wide_dv_kernel
from flashtile.ops.attention.hopper.wide_backward_configs import CHUNK, choose_wide_backward_config

#: A copy moves so many rows and columns of a dense tensor, and of one whose rows TMA ends where their sequence does.
_BOX, _ENDED_BOX = (1, CONSUMER_ROWS, 1, CHUNK), (1, 1, CONSUMER_ROWS, 1, CHUNK)

#: The descriptors that each kernel takes, in order, and the tensors that they are of.
_MOVED_FOR_DV = {"k_desc": "k", "q_desc": "q", "dout_desc": "dout", "dv_desc": "dv"}
_MOVED_FOR_DK = {
    "own_scores_desc": "k",
    "own_values_desc": "v",
    "visited_scores_desc": "q",
    "visited_values_desc": "dout",
    "gradient_desc": "dk",
}
_MOVED_FOR_DQ = {
    "own_scores_desc": "q",
    "own_values_desc": "dout",
    "visited_scores_desc": "k",
    "visited_values_desc": "v",
    "gradient_desc": "dq",
}


def plan_wide_backward(frame: Frame) -> ApartPlan:
    """The plan of a call whose heads are wider than 256 columns."""
    config = choose_wide_backward_config(frame.written["dk"][-1], frame.written["dv"][-1])
    gradients = {name: Layout(shape, padded_strides(shape), frame.call.dtype) for name, shape in frame.written.items()}
    layouts = {**frame.read, **{name: (of.shape, of.strides) for name, of in gradients.items()}}
    descriptors, makers = {}, {}
    for name, layout in layouts.items():
        box, described = (_ENDED_BOX, bounded_layout) if frame.ends_rows(name) else (_BOX, strided_layout)
        descriptors[name] = descriptor_parameter(frame.call.dtype, box)
        makers[name] = chunks_maker(frame.call.dtype, (box,), described(*layout))

    def kernel(name: str, function: Any, moved: dict[str, str], parts: int = 1, **more: bool) -> GradientKernel:
        constants = {**constants_of(config), **more}
        return gradient_kernel(frame, name, function, moved, descriptors, makers, constants, parts=parts)

    return apart_plan(
        frame,
        gradients,
        dv=kernel("dv", attention_wide_dv_kernel, _MOVED_FOR_DV, config.parts),
        dk=kernel("dk", attention_wide_dk_dq_kernel, _MOVED_FOR_DK, OF_KEYS=True),
        dq=kernel("dq", attention_wide_dk_dq_kernel, _MOVED_FOR_DQ, OF_KEYS=False),
    )
