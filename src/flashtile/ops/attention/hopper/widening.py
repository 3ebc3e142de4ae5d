"""Host side of the kernel that makes bfloat16 of 8-bit values, before the forward runs (`eight_bits`)."""

from __future__ import annotations

import torch
from torch import Tensor

from flashtile._backends.alignment import batch_row_head
from flashtile._backends.allocate import contiguous
from flashtile._backends.launch import Plan, int32, make_plan, pointer_to, strides_of
from flashtile.ops.attention.hopper.eight_bits import attention_widen_kernel
from flashtile.ops.common.checks import check_programs

#: Values of a program: eight loads of each thread.
_VALUES = 8192


def make_widening(shape: tuple[int, ...], strides: tuple[int, ...], device: torch.device) -> Plan:
    """The launch for values `[batch, rows_k, heads_kv, head_dim_v]`, or packed `[rows_k, heads_kv, head_dim_v]`."""
    *batch, rows_k, heads_kv, head_dim_v = shape
    sequences = batch[0] if batch else 1
    rows, columns = _tile(head_dim_v)
    tiles = -(-rows_k // rows)
    programs = sequences * tiles * heads_kv
    check_programs("v", programs)
    apart = batch_row_head(shape, strides)
    # Addresses and strides are multiples of 16 bytes.
    parameters = {
        "v_ptr": pointer_to(torch.float8_e4m3fn, 16),
        "out_ptr": pointer_to(torch.bfloat16, 16),
        **strides_of("v", dict(zip(("batch", "row", "head"), apart)), 16),
        "heads_kv": int32(heads_kv),
        "rows_k": int32(rows_k),
        "tiles": int32(tiles),
    }
    constants = {"HEAD_DIM_V": head_dim_v, "E": columns, "ROWS": rows}
    outputs = (contiguous(shape, torch.bfloat16),)
    return make_plan(attention_widen_kernel, parameters, constants, programs, device, num_warps=4, outputs=outputs)


def widen(v: Tensor, widening: Plan) -> Tensor:
    (wide,) = widening.allocate()
    widening.launch(v.data_ptr(), wide.data_ptr())
    return wide


def _tile(head_dim_v: int) -> tuple[int, int]:
    """Rows and columns of a program."""
    columns = max(8, 1 << (head_dim_v - 1).bit_length())
    return _VALUES // columns, columns
