"""Host side of the parts of float32 numbers: where they lie, and the launch that writes them."""

from __future__ import annotations

import torch

from flashtile._backends.alignment import batch_row_head
from flashtile._backends.allocate import Layout, contiguous
from flashtile._backends.launch import Plan, int32, make_plan, pointer_to, strides_of
from flashtile.ops.attention.hopper.float32_configs import PARTS
from flashtile.ops.attention.hopper.float32_parts import attention_parts_kernel
from flashtile.ops.common.checks import check_programs

#: Numbers that a program splits: of so many rows and the power of two that holds a row.
_SPLIT_NUMBERS = 8192


def parts_layout(shape: tuple[int, ...], width: int) -> Layout:
    """The parts of a tensor `[batch, rows, heads, head_dim]`, of `width` columns each."""
    return contiguous((*shape[:-1], PARTS * width), torch.bfloat16)


def plan_parts(shape: tuple[int, ...], strides: tuple[int, ...], width: int, device: torch.device) -> Plan:
    """The launch that writes the parts of a tensor."""
    batch, rows, heads, head_dim = shape
    apart = dict(zip(("batch", "row", "head"), batch_row_head(shape, strides)))
    rows_together = _SPLIT_NUMBERS >> (width - 1).bit_length()
    tiles = -(-rows // rows_together)
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
    constants = {"HEAD_DIM": head_dim, "WIDTH": width, "ROWS": rows_together}
    return make_plan(attention_parts_kernel, parameters, constants, programs, device, num_warps=4)
