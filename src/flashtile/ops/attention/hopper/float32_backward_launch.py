"""Host side of the Hopper backward of float32: the parts of the operands, descriptors and the kernels' plans."""

from __future__ import annotations

import torch

from flashtile._backends.alignment import batch_row_head
from flashtile._backends.allocate import contiguous
from flashtile._backends.launch import Plan, int32, make_plan, plan_cache, pointer_to, strides_of
from flashtile._backends.tma import chunks_maker, descriptor_parameter, strided_layout
from flashtile.ops.attention.hopper.apart_launch import ApartPlan, GradientKernel, apart_plan, frame_of, gradient_kernel
from flashtile.ops.attention.hopper.configs import CONSUMER_ROWS
from flashtile.ops.attention.hopper.float32_backward import (
    attention_float32_dk_dq_kernel,
    attention_float32_dv_kernel,
    attention_split_kernel,
)
from flashtile.ops.attention.hopper.float32_backward_configs import PARTS, WIDTH
from flashtile.ops.attention.spec import AttentionSpec
from flashtile.ops.common.checks import check_programs

#: Rows that a program splits.
_SPLIT_ROWS = 64

#: What a copy moves.
_BOX = (1, CONSUMER_ROWS, 1, WIDTH)

#: The tensors of which each kernel moves the parts, in the order of its parameters.
_MOVED = {"dv": ("k", "q", "dout"), "dk": ("k", "v", "q", "dout"), "dq": ("q", "dout", "k", "v")}
_DV_PARAMETERS = ("k_desc", "q_desc", "dout_desc")
_DK_DQ_PARAMETERS = ("own_scores_desc", "own_values_desc", "visited_scores_desc", "visited_values_desc")


@plan_cache
def plan_float32_backward(
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
    splits = tuple(_plan_split(shape, apart, device) for shape, apart in frame.read.values())
    parts = {name: contiguous((*shape[:-1], PARTS * WIDTH), torch.bfloat16) for name, (shape, _) in frame.read.items()}
    makers = {
        name: chunks_maker(torch.bfloat16, (_BOX,), strided_layout(of.shape, of.strides)) for name, of in parts.items()
    }
    descriptor = descriptor_parameter(torch.bfloat16, _BOX)
    constants = {"HEAD_DIM": shapes[0][-1], "HEAD_DIM_V": shapes[2][-1]}

    def dk_or_dq(name: str) -> GradientKernel:
        return gradient_kernel(
            frame, name, attention_float32_dk_dq_kernel, dict.fromkeys(_DK_DQ_PARAMETERS, descriptor),
            [(moved, makers[moved]) for moved in _MOVED[name]], {**constants, "OF_KEYS": name == "dk"}, "gradient_ptr",
        )  # fmt: skip

    dv = gradient_kernel(
        frame, "dv", attention_float32_dv_kernel, dict.fromkeys(_DV_PARAMETERS, descriptor),
        [(moved, makers[moved]) for moved in _MOVED["dv"]], constants, "dv_ptr",
    )  # fmt: skip
    gradients = {name: contiguous(shape, dtype) for name, shape in frame.written.items()}
    return apart_plan(frame, gradients, dv, dk_or_dq("dk"), dk_or_dq("dq"), splits, tuple(parts.values()))


def _plan_split(shape: tuple[int, ...], strides: tuple[int, ...], device: torch.device) -> Plan:
    """The launch that writes the parts of a tensor `[batch, rows, heads, head_dim]`, side by side."""
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
    constants = {"HEAD_DIM": head_dim, "ROWS": _SPLIT_ROWS}
    return make_plan(attention_split_kernel, parameters, constants, programs, device, num_warps=4)
