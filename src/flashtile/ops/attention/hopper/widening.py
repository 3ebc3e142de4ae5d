"""Host side of the kernel that makes bfloat16 of 8-bit values, before the forward runs (`eight_bits`)."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from flashtile._backends.alignment import used_strides
from flashtile._backends.allocate import contiguous_strides, empty
from flashtile._backends.devices import device_facts
from flashtile._backends.launch import KernelSource, make_launcher
from flashtile.ops.attention.hopper.eight_bits import attention_widen_kernel
from flashtile.ops.attention.plans import Layout
from flashtile.ops.common.checks import check_programs

#: Values of a program: eight loads of each thread.
_VALUES = 8192


class Widening(NamedTuple):
    """A launch without its pointers, `launch(programs, *pointers, *scalars)`, and what it fills."""

    launch: Callable[..., None]
    programs: int
    scalars: tuple[int, ...]
    output: Layout


def make_widening(shape: torch.Size, strides: tuple[int, ...], device: torch.device) -> Widening:
    """That of values `[batch, rows_k, heads_kv, head_dim_v]`, or packed `[rows_k, heads_kv, head_dim_v]`."""
    *batch, rows_k, heads_kv, head_dim_v = shape
    sequences = batch[0] if batch else 1
    tiles = -(-rows_k // _tile(head_dim_v)[0])
    programs = sequences * tiles * heads_kv
    check_programs("v", programs)
    scalars = (*(0, *used_strides(tuple(shape), strides))[-4:-1], heads_kv, rows_k, tiles)
    return Widening(
        _launcher(head_dim_v, device),
        programs,
        scalars,
        Layout(tuple(shape), contiguous_strides(tuple(shape)), torch.bfloat16),
    )


def widen(v: Tensor, widening: Widening) -> Tensor:
    wide = empty(*widening.output, v.device)
    widening.launch(widening.programs, v.data_ptr(), wide.data_ptr(), *widening.scalars)
    return wide


def _tile(head_dim_v: int) -> tuple[int, int]:
    """Rows and columns of a program."""
    columns = max(8, 1 << (head_dim_v - 1).bit_length())
    return _VALUES // columns, columns


@functools.cache
def _launcher(head_dim_v: int, device: torch.device) -> Callable[..., None]:
    return make_launcher(widen_source(head_dim_v), device, device_facts(device))


def widen_source(head_dim_v: int) -> KernelSource:
    """The specialisation for values of so many columns."""
    rows, columns = _tile(head_dim_v)
    constants = {"HEAD_DIM_V": head_dim_v, "E": columns, "ROWS": rows}
    names = [name for name in attention_widen_kernel.arg_names if name not in constants]
    # Addresses and strides are multiples of 16 bytes.
    types = {"v_ptr": "*fp8e4nv", "out_ptr": "*bf16"} | {name: "i64" for name in names if name.startswith("stride_")}
    return KernelSource(
        attention_widen_kernel,
        tuple(types.get(name, "i32") for name in names),
        tuple(16 if name in types else 1 for name in names),
        constants,
        num_warps=4,
        num_stages=1,
    )
