"""What the launches of a call need beside their pointers: the compiled kernels, their cuts, sizes and strides.

A `Plan` is looked up under what the call looks like from outside. A call like an earlier one costs no decision and no
compilation; how long sequences are is no part of it.
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
from flashtile.ops.kv_cache.spec import CacheCall, CacheSpec
from flashtile.ops.kv_cache.triton.append import append_kernel
from flashtile.ops.kv_cache.triton.attend import attend_kernel, combine_kernel
from flashtile.ops.kv_cache.triton.configs import (
    AppendCut,
    AttendTiles,
    CombineCut,
    Situation,
    append_cut,
    choose_splits,
    choose_tiles,
    combine_cut,
    resident_programs,
    tile_width,
)

#: Windows are clipped to this, far above any sequence and far below overflow.
_WIDEST_WINDOW = 2**29

_Shape = tuple[int, ...]
#: (shape, strides) of a tensor, or None for one that is not there.
_Form = tuple[_Shape, _Shape] | None


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


class Plan(NamedTuple):
    """The launches of a call. `attend` and `append` take the length of the sequences as their last argument.

    Attributes:
        append: None where nothing is appended.
        rotated: where the rotated queries go; None where none are.
        attend: writes to `out` and `lse`, or to `parts` and `parts_lse` where `combine` is there.
    """

    append: Launch | None
    rotated: Layout | None
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
    softcap: bool
    slopes: bool
    sinks: bool
    partial: bool
    precision: str
    pointer_multiple: int
    stride_multiple: int
    tiles: AttendTiles


class AppendVariant(NamedTuple):
    """All that decides the appending kernel's machine code on one device."""

    dtype: torch.dtype
    table_dtype: torch.dtype
    head_dim: int
    head_dim_v: int
    half: int
    page_size: int
    index_dtypes: tuple[torch.dtype | None, ...]
    interleaved: bool
    banded: bool
    pointer_multiple: int
    stride_multiple: int
    table_multiple: int
    cut: AppendCut


class CombineVariant(NamedTuple):
    """All that decides the combining kernel's machine code on one device."""

    dtype: torch.dtype
    head_dim_v: int
    cut: CombineCut


Variant = AttendVariant | AppendVariant | CombineVariant


def plan_for(call: CacheCall, spec: CacheSpec) -> Plan:
    q, k_cache, v_cache, k, v, lengths, entries, left, table, cos, sin, slopes, sinks = call
    addresses = q.data_ptr() | k_cache.data_ptr() | v_cache.data_ptr()
    table_addresses = 0
    if k is not None and v is not None:
        addresses |= k.data_ptr() | v.data_ptr()
    if cos is not None and sin is not None:
        table_addresses = cos.data_ptr() | sin.data_ptr()
    return _plan(
        q.dtype,
        q.device,
        tuple((t.shape, t.stride()) for t in (q, k_cache, v_cache)),
        None if k is None or v is None else ((k.shape, k.stride()), (v.shape, v.stride())),
        None if cos is None or sin is None else (tuple(cos.shape), cos.stride(0), sin.stride(0), cos.dtype),
        tuple(None if t is None else t.dtype for t in (lengths, entries, left, table)),
        None if table is None else (table.shape, table.stride()),
        0 if slopes is None else slopes.dim(),
        sinks is not None,
        (addresses & 15, table_addresses & 15),
        spec._replace(length=0),
        torch._C._get_cublas_allow_tf32(),
    )


@functools.lru_cache(maxsize=4096)
def _plan(
    dtype: torch.dtype,
    device: torch.device,
    forms: tuple[tuple[_Shape, _Shape], ...],
    new_forms: tuple[tuple[_Shape, _Shape], ...] | None,
    angles: tuple[tuple[int, int], int, int, torch.dtype] | None,
    index_dtypes: tuple[torch.dtype | None, ...],
    table_form: _Form,
    slope_dims: int,
    has_sinks: bool,
    misalignments: tuple[int, int],
    spec: CacheSpec,
    allow_tf32: bool,
) -> Plan:
    """Everything that can be decided before the tensors' contents are known."""
    (q_shape, q_strides), (_, k_strides), (v_shape, v_strides) = forms
    batch, seq_q, heads, head_dim = q_shape
    _, cache_rows, heads_kv, head_dim_v = v_shape
    facts = device_facts(device)
    page_size = 0 if table_form is None else cache_rows
    capacity = cache_rows if table_form is None else cache_rows * table_form[0][1]
    seq_new = 0 if new_forms is None else new_forms[0][0][1]
    stride_table = 0 if table_form is None else table_form[1][0]
    rotates = angles is not None and angles[0][1] > 0
    append = None
    if new_forms is not None:
        append = _append(
            dtype,
            forms,
            new_forms,
            angles,
            index_dtypes,
            stride_table,
            page_size,
            capacity,
            misalignments,
            spec,
            device,
        )
    if rotates:
        q_strides = contiguous_strides(q_shape)

    group = heads // heads_kv
    situation = Situation(dtype, head_dim, head_dim_v, group * seq_q)
    tiles = choose_tiles(facts, situation)
    programs = batch * heads_kv * -(-group * seq_q // tiles.block_m)
    key_tiles = -(-_visible_rows(capacity, seq_q, spec) // tiles.block_n)
    slots = multiprocessors(device) * resident_programs(facts, tiles, situation)
    splits = min(spec.num_splits, max(key_tiles, 1)) or choose_splits(programs, key_tiles, slots)
    variant = AttendVariant(
        dtype,
        head_dim,
        head_dim_v,
        group,
        (k_strides[1], v_strides[1]),
        page_size,
        index_dtypes,
        spec.window_left is not None,
        spec.window_right is not None and seq_q > 1,  # a single query lies at the last row, which nothing is right of
        spec.softcap > 0,
        slope_dims > 0,
        has_sinks,
        splits > 1,
        _dot_precision(dtype, facts, allow_tf32),
        power_of_two_factor(misalignments[0]),
        power_of_two_factor(*q_strides[:-1], *k_strides[:-1], *v_strides[:-1]),
        tiles,
    )
    window_left, window_right = (min(side or 0, _WIDEST_WINDOW) for side in (spec.window_left, spec.window_right))
    scalars = (
        *q_strides[:3], k_strides[0], k_strides[2], v_strides[0], v_strides[2], stride_table,
        (heads if slope_dims == 2 else 0) if slope_dims else None,
        batch, heads_kv, seq_q, seq_new, capacity, splits, window_left, window_right, spec.scale, spec.softcap or None,
    )  # fmt: skip
    attend = Launch(_launcher(variant, device), programs * splits, scalars)
    combine = None
    if splits > 1:
        cut = combine_cut(splits, head_dim_v, facts)
        rows = batch * seq_q * heads
        combine_launcher = _launcher(CombineVariant(dtype, head_dim_v, cut), device)
        combine = Launch(combine_launcher, rows, (rows, heads, seq_q, splits))
    out_shape, lse_shape = (batch, seq_q, heads, head_dim_v), (batch, heads, seq_q)
    return Plan(
        append,
        _layout(q_shape, dtype) if rotates else None,
        attend,
        combine,
        _layout(out_shape, dtype),
        _layout(lse_shape, torch.float32),
        _layout((splits, *out_shape), torch.float32),
        _layout((splits, *lse_shape), torch.float32),
    )


def _append(
    dtype: torch.dtype,
    forms: tuple[tuple[_Shape, _Shape], ...],
    new_forms: tuple[tuple[_Shape, _Shape], ...],
    angles: tuple[tuple[int, int], int, int, torch.dtype] | None,
    index_dtypes: tuple[torch.dtype | None, ...],
    stride_table: int,
    page_size: int,
    capacity: int,
    misalignments: tuple[int, int],
    spec: CacheSpec,
    device: torch.device,
) -> Launch:
    (q_shape, q_strides), (_, k_cache_strides), (v_shape, v_cache_strides) = forms
    (k_new_shape, k_strides), (_, v_strides) = new_forms
    batch, seq_q, heads, head_dim = q_shape
    heads_kv, head_dim_v = v_shape[2:]
    (positions, half), *angle_strides, table_dtype = angles or ((0, 0), 0, 0, torch.float32)
    row_strides = q_strides[:3], k_strides[:3], v_strides[:3], k_cache_strides[:3], v_cache_strides[:3]
    strides = tuple(stride for three in row_strides for stride in three)
    seq_new = k_new_shape[1]
    tokens = seq_new + (seq_q if half else 0)
    variant = AppendVariant(
        dtype,
        table_dtype,
        head_dim,
        head_dim_v,
        half,
        page_size,
        (*index_dtypes[:2], index_dtypes[3]),
        spec.interleaved,
        spec.banded,
        power_of_two_factor(misalignments[0]),
        power_of_two_factor(*strides),
        power_of_two_factor(misalignments[1], *(stride * table_dtype.itemsize for stride in angle_strides)),
        append_cut(max(heads, heads_kv) if half else heads_kv, head_dim, head_dim_v, half, device_facts(device)),
    )
    scalars = (*strides, *angle_strides, stride_table, tokens, heads, heads_kv, seq_q, seq_new, capacity, positions)
    return Launch(_launcher(variant, device), batch * tokens, scalars)


def _visible_rows(capacity: int, seq_q: int, spec: CacheSpec) -> int:
    """How many rows of a sequence its queries see at most."""
    if spec.window_left is None:
        return capacity
    # Of rows past the last there are none, so an unlimited right side shows fewer than the queries have.
    right = seq_q if spec.window_right is None else min(spec.window_right, seq_q)
    return min(capacity, spec.window_left + seq_q + right)


def _layout(shape: _Shape, dtype: torch.dtype) -> Layout:
    shape = tuple(shape)  # a plain one: the allocation takes no torch.Size
    return Layout(shape, contiguous_strides(shape), dtype)


def _dot_precision(dtype: torch.dtype, facts: DeviceFacts, allow_tf32: bool) -> str:
    """float32 products are IEEE, unless PyTorch's own setting allows TF32 where there is such a thing."""
    if dtype is torch.float32 and allow_tf32 and facts.is_cuda and facts.capability >= 80:
        return "tf32"
    return "ieee"


@functools.cache
def _launcher(variant: Variant, device: torch.device) -> Callable[..., None]:
    return make_launcher(kernel_source(variant), device, device_facts(device))


def kernel_source(variant: Variant) -> KernelSource:
    """The specialisation of a kernel for a variant, as the launcher and ahead-of-time compilation take it."""
    if isinstance(variant, AttendVariant):
        function, constants, stages = attend_kernel, _attend_constants(variant), variant.tiles.num_stages
        parameter, warps = functools.partial(_attend_parameter, variant), variant.tiles.num_warps
    elif isinstance(variant, AppendVariant):
        function, constants, stages = append_kernel, _append_constants(variant), 1
        parameter, warps = functools.partial(_append_parameter, variant), variant.cut.num_warps
    else:
        width = tile_width(variant.head_dim_v)
        constants = {"HEAD_DIM_V": variant.head_dim_v, "BLOCK_E": width, "BLOCK_S": variant.cut.block_s}
        function, stages, parameter, warps = combine_kernel, 2, _combine_parameter, variant.cut.num_warps
        parameter = functools.partial(_combine_parameter, variant)
    names = [name for name in function.arg_names if name not in constants]
    parameters = {name: parameter(name) for name in names}
    constants |= {name: None for name, (of, _) in parameters.items() if of == "constexpr"}
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


def _append_constants(variant: AppendVariant) -> dict[str, Any]:
    cut = variant.cut
    return {
        "HEAD_DIM": variant.head_dim,
        "HEAD_DIM_V": variant.head_dim_v,
        "HALF": variant.half,
        "BLOCK_H": cut.block_h,
        "BLOCK_HALF": cut.block_half,
        "BLOCK_REST": cut.block_rest,
        "BLOCK_E": cut.block_e,
        "PAGE_SIZE": variant.page_size,
        "INTERLEAVED": variant.interleaved,
        "BANDED": variant.banded,
    }


_ABSENT = "constexpr", 1


def _index_parameter(dtype: torch.dtype | None) -> tuple[str, int]:
    return _ABSENT if dtype is None else ("*" + ELEMENT_TYPES[dtype], 1)


def _attend_parameter(variant: AttendVariant, name: str) -> tuple[str, int]:
    """Type of a run-time parameter, and a power of two that divides it."""
    indices = ("lengths_ptr", "entries_ptr", "left_ptr", "table_ptr")
    if name in indices:
        return _index_parameter(variant.index_dtypes[indices.index(name)])
    optional = {
        "slopes_ptr": ("*fp32", variant.slopes),
        "stride_slopes": ("i32", variant.slopes),
        "sinks_ptr": ("*fp32", variant.sinks),
        "softcap": ("fp32", variant.softcap),
    }
    if name in optional:
        of, present = optional[name]
        return (of, 1) if present else _ABSENT
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


def _append_parameter(variant: AppendVariant, name: str) -> tuple[str, int]:
    """Type of a run-time parameter, and a power of two that divides it."""
    indices = ("lengths_ptr", "entries_ptr", "table_ptr")
    if name in indices:
        return _index_parameter(variant.index_dtypes[indices.index(name)])
    if name in ("cos_ptr", "sin_ptr", "rotated_ptr") and not variant.half:
        return _ABSENT
    if name in ("cos_ptr", "sin_ptr"):
        return "*" + ELEMENT_TYPES[variant.table_dtype], variant.table_multiple
    if name == "rotated_ptr":
        return "*" + ELEMENT_TYPES[variant.dtype], 16
    if name.endswith("_ptr"):
        return "*" + ELEMENT_TYPES[variant.dtype], variant.pointer_multiple
    if name in ("stride_cos", "stride_sin"):
        return "i64", max(1, variant.table_multiple // variant.table_dtype.itemsize)
    if name == "stride_table":
        return "i64", 1
    if name.startswith("stride_"):
        return "i64", variant.stride_multiple
    return "i32", 1


def _combine_parameter(variant: CombineVariant, name: str) -> tuple[str, int]:
    """Type of a run-time parameter, and a power of two that divides it."""
    if name == "out_ptr":
        return "*" + ELEMENT_TYPES[variant.dtype], 16
    if name.endswith("_ptr"):
        return "*fp32", 16
    return "i32", 1
