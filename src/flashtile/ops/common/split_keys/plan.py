"""What the launches of attention with split keys need beside their pointers: compiled kernels, cuts, sizes and strides.

Attention over a cache and attention of a few queries to many keys both come here, each with a `SplitCall`. How long
sequences are is no part of it, where that stands in a tensor.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from flashtile._backends.alignment import power_of_two_factor
from flashtile._backends.allocate import contiguous_strides
from flashtile._backends.devices import DeviceFacts, device_facts, multiprocessors
from flashtile._backends.launch import ELEMENT_TYPES, KernelSource, make_launcher
from flashtile.ops.common.checks import MAX_POSITIONS, check_programs, check_rows
from flashtile.ops.common.split_keys.attend import attend_kernel, combine_kernel
from flashtile.ops.common.split_keys.configs import (
    AttendTiles,
    CombineCut,
    Situation,
    choose_cut,
    combine_cut,
    tile_width,
)

#: Bytes that a copy past the registers moves at least.
_ASYNCHRONOUS = 4

_Shape = tuple[int, ...]


class Launch(NamedTuple):
    """A launch without its pointers: `launch(programs, *pointers, *scalars)`. No programs: nothing to launch."""

    launch: Callable[..., None]
    programs: int
    scalars: tuple[int | float | None, ...]


class Layout(NamedTuple):
    """An output: shape, strides and dtype."""

    shape: _Shape
    strides: _Shape
    dtype: torch.dtype


class SplitCall(NamedTuple):
    """A call as its plan sees it.

    Attributes:
        shape: (batch, seq_q, heads_q, heads_kv, head_dim, head_dim_v).
        strides: those of q, k and v without the last, used ones: (batch or outer, row, head).
        misalignment: of the addresses of q, k and v, modulo 16.
        capacity: rows that a sequence of keys can have.
        index_dtypes: of lengths, entries, left padding and table; None for one that there is not.
        page_size, stride_table: of a cache in pages, else 0.
        seq_new: rows that a length does not count.
        window_left, window_right: keys visible on each side of the diagonal; None = all.
        diagonal: the key on the diagonal of the first query; None: that of the last query is the last row of its
            sequence.
        slope_diagonal: likewise, for the distances of ALiBi.
        visible: rows of a sequence that its queries see at most.
        softcap: 0 = none.
        slope_dims: dimensions of ALiBi's slopes; 0 without.
        num_splits: 0 = to be chosen.
    """

    dtype: torch.dtype
    shape: tuple[int, int, int, int, int, int]
    strides: tuple[_Shape, ...]
    misalignment: int
    capacity: int
    scale: float
    allow_tf32: bool
    index_dtypes: tuple[torch.dtype | None, ...] = (None, None, None, None)
    page_size: int = 0
    stride_table: int = 0
    seq_new: int = 0
    window_left: int | None = None
    window_right: int | None = None
    diagonal: int | None = None
    slope_diagonal: int | None = None
    visible: int = 0
    softcap: float = 0.0
    slope_dims: int = 0
    sinks: bool = False
    num_splits: int = 0


class SplitPlan(NamedTuple):
    """The launches of a call. `attend` takes the length of the sequences as its last argument.

    Attributes:
        attend: writes to `out` and `lse`, or to `parts` and `parts_lse` where `combine` is there.
    """

    attend: Launch
    combine: Launch | None
    out: Layout
    lse: Layout
    parts: Layout
    parts_lse: Layout


class AttendVariant(NamedTuple):
    """All that decides the attending kernel's machine code on one device."""

    dtype: torch.dtype
    head_dim: int
    head_dim_v: int
    group: int
    row_strides: tuple[int, int]
    page_size: int
    index_dtypes: tuple[torch.dtype | None, ...]
    has_left: bool
    has_right: bool
    placed: bool
    slopes_placed: bool
    softcap: bool
    slopes: bool
    sinks: bool
    partial: bool
    precision: str
    pointer_multiple: int
    stride_multiple: int
    tiles: AttendTiles


class CombineVariant(NamedTuple):
    """All that decides the combining kernel's machine code on one device."""

    dtype: torch.dtype
    head_dim_v: int
    cut: CombineCut


def split_plan(call: SplitCall, device: torch.device) -> SplitPlan:
    """Everything that can be decided before the tensors' contents are known."""
    facts = device_facts(device)
    batch, seq_q, heads, heads_kv, head_dim, head_dim_v = call.shape
    group_rows = heads // heads_kv * seq_q
    check_rows("q", seq_q, MAX_POSITIONS)
    check_rows("q with all heads that share keys", group_rows)
    pointer_multiple, stride_multiple = _multiples(call)
    whole_words = min(pointer_multiple, stride_multiple * call.dtype.itemsize) >= _ASYNCHRONOUS
    tiles, splits = choose_cut(
        Situation(call.dtype, head_dim, head_dim_v, group_rows, call.page_size, whole_words),
        batch * heads_kv,
        call.visible,
        facts,
        multiprocessors(device),
        call.num_splits,
    )
    programs = batch * heads_kv * -(-group_rows // tiles.block_m) * splits
    check_programs("q", programs)
    attend = Launch(_launcher(_variant(call, tiles, splits, facts), device), programs, _scalars(call, splits))
    combine = None
    if splits > 1:
        rows = batch * seq_q * heads
        variant = CombineVariant(call.dtype, head_dim_v, combine_cut(splits, head_dim_v, facts))
        combine = Launch(_launcher(variant, device), rows, (rows, heads, seq_q, splits))
    out_shape, lse_shape = (batch, seq_q, heads, head_dim_v), (batch, heads, seq_q)
    return SplitPlan(
        attend,
        combine,
        layout(out_shape, call.dtype),
        layout(lse_shape, torch.float32),
        layout((splits, *out_shape), torch.float32),
        layout((splits, *lse_shape), torch.float32),
    )


def _variant(call: SplitCall, tiles: AttendTiles, splits: int, facts: DeviceFacts) -> AttendVariant:
    _, seq_q, heads, heads_kv, head_dim, head_dim_v = call.shape
    right = call.window_right
    # A single query at the last row, which nothing is right of.
    last = call.diagonal is None and seq_q == 1 and right is not None and right >= 0
    _, k_strides, v_strides = call.strides
    pointer_multiple, stride_multiple = _multiples(call)
    return AttendVariant(
        call.dtype,
        head_dim,
        head_dim_v,
        heads // heads_kv,
        (k_strides[1], v_strides[1]),
        call.page_size,
        call.index_dtypes,
        call.window_left is not None,
        right is not None and not last,
        call.diagonal is not None,
        call.slope_diagonal is not None,
        call.softcap > 0,
        call.slope_dims > 0,
        call.sinks,
        splits > 1,
        _dot_precision(call.dtype, facts, call.allow_tf32),
        pointer_multiple,
        stride_multiple,
        tiles,
    )


def _multiples(call: SplitCall) -> tuple[int, int]:
    """Powers of two that divide the addresses, in bytes, and the strides, in elements."""
    strides = (stride for of_tensor in call.strides for stride in of_tensor)
    return power_of_two_factor(call.misalignment), power_of_two_factor(*strides)


def _scalars(call: SplitCall, splits: int) -> tuple[int | float | None, ...]:
    batch, seq_q, heads, heads_kv, *_ = call.shape
    q_strides, k_strides, v_strides = call.strides
    sides = (max(-MAX_POSITIONS, min(side or 0, MAX_POSITIONS)) for side in (call.window_left, call.window_right))
    return (
        *q_strides, k_strides[0], k_strides[2], v_strides[0], v_strides[2], call.stride_table,
        (heads if call.slope_dims == 2 else 0) if call.slope_dims else None,
        batch, heads_kv, seq_q, call.seq_new, call.capacity, splits, *sides, call.diagonal, call.slope_diagonal,
        call.scale, call.softcap or None,
    )  # fmt: skip


def visible_rows(capacity: int, seq_q: int, window_left: int | None, window_right: int | None) -> int:
    """How many rows of a sequence its queries see at most."""
    if window_left is None:
        return capacity
    # Of rows past the last there are none, so an unlimited right side shows fewer than the queries have.
    right = seq_q if window_right is None else min(window_right, seq_q)
    return min(capacity, max(window_left + seq_q + right, 0))


def layout(shape: _Shape, dtype: torch.dtype) -> Layout:
    shape = tuple(shape)  # a plain one: the allocation takes no torch.Size
    return Layout(shape, contiguous_strides(shape), dtype)


def _dot_precision(dtype: torch.dtype, facts: DeviceFacts, allow_tf32: bool) -> str:
    """float32 products are IEEE, unless PyTorch's own setting allows TF32 where there is such a thing."""
    if dtype is torch.float32 and allow_tf32 and facts.is_cuda and facts.capability >= 80:
        return "tf32"
    return "ieee"


@functools.cache
def _launcher(variant: AttendVariant | CombineVariant, device: torch.device) -> Callable[..., None]:
    return make_launcher(kernel_source(variant), device, device_facts(device))


def kernel_source(variant: AttendVariant | CombineVariant) -> KernelSource:
    """The specialisation of a kernel for a variant, as the launcher and ahead-of-time compilation take it."""
    parameter: Callable[[str], tuple[str, int]]
    if isinstance(variant, AttendVariant):
        function, constants, stages = attend_kernel, _attend_constants(variant), variant.tiles.num_stages
        parameter, warps = functools.partial(_attend_parameter, variant), variant.tiles.num_warps
    else:
        constants = {
            "HEAD_DIM_V": variant.head_dim_v,
            "BLOCK_E": tile_width(variant.head_dim_v),
            "BLOCK_S": variant.cut.block_s,
        }
        function, stages, warps = combine_kernel, 2, variant.cut.num_warps
        parameter = functools.partial(_combine_parameter, variant)
    return source_of(function, parameter, constants, warps, stages)


def source_of(
    function: Any,
    parameter: Callable[[str], tuple[str, int]],
    constants: dict[str, Any],
    warps: int,
    stages: int,
) -> KernelSource:
    """A specialisation, given type and a dividing power of two of each run-time parameter by its name."""
    parameters = {name: parameter(name) for name in function.arg_names if name not in constants}
    constants = constants | {name: None for name, (of, _) in parameters.items() if of == "constexpr"}
    types, multiples = zip(*parameters.values())
    return KernelSource(function, types, multiples, constants, warps, stages)


def _attend_constants(variant: AttendVariant) -> dict[str, Any]:
    tiles = variant.tiles
    return {
        "STRIDE_K_ROW": variant.row_strides[0],
        "STRIDE_V_ROW": variant.row_strides[1],
        "GROUP": variant.group,
        "PAGE_SIZE": variant.page_size,
        "HEAD_DIM": variant.head_dim,
        "HEAD_DIM_V": variant.head_dim_v,
        "BLOCK_D": tile_width(variant.head_dim),
        "BLOCK_E": tile_width(variant.head_dim_v),
        "BLOCK_M": tiles.block_m,
        "BLOCK_N": tiles.block_n,
        "CHUNK": tiles.chunk,
        "HAS_LEFT": variant.has_left,
        "HAS_RIGHT": variant.has_right,
        "PARTIAL": variant.partial,
        "PRECISION": variant.precision,
    }


#: Parameter that a specialisation does not have.
ABSENT = "constexpr", 1


def index_parameter(dtype: torch.dtype | None) -> tuple[str, int]:
    """That of a pointer to integers."""
    return ABSENT if dtype is None else ("*" + ELEMENT_TYPES[dtype], 1)


def _attend_parameter(variant: AttendVariant, name: str) -> tuple[str, int]:
    """Type of a run-time parameter, and a power of two that divides it."""
    indices = ("lengths_ptr", "entries_ptr", "left_ptr", "table_ptr")
    if name in indices:
        return index_parameter(variant.index_dtypes[indices.index(name)])
    optional = {
        "slopes_ptr": ("*fp32", variant.slopes),
        "stride_slopes": ("i32", variant.slopes),
        "sinks_ptr": ("*fp32", variant.sinks),
        "softcap": ("fp32", variant.softcap),
        "diagonal": ("i32", variant.placed),
        "slope_diagonal": ("i32", variant.slopes_placed),
    }
    if name in optional:
        of, present = optional[name]
        return (of, 1) if present else ABSENT
    if name == "lse_ptr":
        return "*fp32", 1
    if name == "out_ptr":
        return ("*fp32" if variant.partial else "*" + ELEMENT_TYPES[variant.dtype]), 16
    if name.endswith("_ptr"):
        return "*" + ELEMENT_TYPES[variant.dtype], variant.pointer_multiple
    if name == "stride_table":
        return "i64", 1
    if name.startswith("stride_"):
        return "i64", variant.stride_multiple
    return ("fp32" if name == "scale" else "i32"), 1


def _combine_parameter(variant: CombineVariant, name: str) -> tuple[str, int]:
    """Type of a run-time parameter, and a power of two that divides it."""
    if name == "out_ptr":
        return "*" + ELEMENT_TYPES[variant.dtype], 16
    if name.endswith("_ptr"):
        return "*fp32", 16
    return "i32", 1
