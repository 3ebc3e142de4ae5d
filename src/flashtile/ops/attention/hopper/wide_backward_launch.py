"""Host side of the Hopper backward of heads wider than 256 columns: layouts, descriptors and the kernels' plans."""

from __future__ import annotations

import torch

from flashtile._backends.allocate import Layout
from flashtile._backends.launch import constants_of, plan_cache
from flashtile._backends.tma import chunks_maker, descriptor_parameter, strided_layout
from flashtile.ops.attention.hopper.apart_launch import ApartPlan, GradientKernel, apart_plan, frame_of, gradient_kernel
from flashtile.ops.attention.hopper.backward_configs import padded_strides
from flashtile.ops.attention.hopper.configs import CONSUMER_ROWS
from flashtile.ops.attention.hopper.wide_backward import attention_wide_dk_dq_kernel, attention_wide_dv_kernel
from flashtile.ops.attention.hopper.wide_backward_configs import CHUNK, choose_wide_backward_config
from flashtile.ops.attention.spec import AttentionSpec

#: What a copy moves.
_BOX = (1, CONSUMER_ROWS, 1, CHUNK)

#: The tensors that each kernel moves, in the order of its parameters.
_MOVED = {
    "dv": ("k", "q", "dout", "dv"),
    "dk": ("k", "v", "q", "dout", "dk"),
    "dq": ("q", "dout", "k", "v", "dq"),
}
_DV_PARAMETERS = ("k_desc", "q_desc", "dout_desc", "dv_desc")
_DK_DQ_PARAMETERS = (
    "own_scores_desc", "own_values_desc", "visited_scores_desc", "visited_values_desc", "gradient_desc",
)  # fmt: skip


@plan_cache
def plan_wide_backward(
    dtype: torch.dtype,
    device: torch.device,
    shapes: tuple[torch.Size, ...],
    strides: tuple[tuple[int, ...], ...],
    sinks: bool,
    spec: AttentionSpec,
    has_dlse: bool,
    has_empty_rows: bool,
) -> ApartPlan:
    """Everything that can be decided before the tensors' contents are known. `strides`: of q, k, v and dout."""
    frame = frame_of(dtype, device, shapes, strides, sinks, spec, has_dlse, has_empty_rows)
    config = choose_wide_backward_config(shapes[0][-1], shapes[2][-1])
    gradients = {name: Layout(shape, padded_strides(shape), dtype) for name, shape in frame.written.items()}
    layouts = {**frame.read, **{name: (of.shape, of.strides) for name, of in gradients.items()}}
    makers = {name: chunks_maker(dtype, (_BOX,), strided_layout(*layout)) for name, layout in layouts.items()}
    descriptor = descriptor_parameter(dtype, _BOX)

    def dk_or_dq(name: str) -> GradientKernel:
        return gradient_kernel(
            frame, name, attention_wide_dk_dq_kernel, dict.fromkeys(_DK_DQ_PARAMETERS, descriptor),
            [(moved, makers[moved]) for moved in _MOVED[name]], {**constants_of(config), "OF_KEYS": name == "dk"},
        )  # fmt: skip

    dv = gradient_kernel(
        frame, "dv", attention_wide_dv_kernel, dict.fromkeys(_DV_PARAMETERS, descriptor),
        [(moved, makers[moved]) for moved in _MOVED["dv"]], constants_of(config), parts=config.parts,
    )  # fmt: skip
    return apart_plan(frame, gradients, dv, dk_or_dq("dk"), dk_or_dq("dq"))
