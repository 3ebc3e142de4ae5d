"""What the launches of a call need beside their pointers: the compiled kernels, their cuts, sizes and strides.

A `Plan` is looked up under what the call looks like from outside. A call like an earlier one costs no decision and no
compilation; how long sequences are is no part of it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from flashtile._backends.alignment import power_of_two_factor, used_strides
from flashtile._backends.allocate import contiguous_strides
from flashtile._backends.devices import device_facts
from flashtile._backends.launch import ELEMENT_TYPES, KernelSource, make_launcher
from flashtile.ops.common.checks import MAX_POSITIONS, check_rows
from flashtile.ops.common.split_keys.plan import (
    ABSENT,
    Launch,
    Layout,
    SplitCall,
    SplitPlan,
    index_parameter,
    layout,
    source_of,
    split_plan,
    visible_rows,
)
from flashtile.ops.kv_cache.spec import CacheCall, CacheSpec
from flashtile.ops.kv_cache.triton.append import append_kernel
from flashtile.ops.kv_cache.triton.configs import AppendCut, append_cut

_Shape = tuple[int, ...]
#: (shape, strides) of a tensor, or None for one that is not there.
_Form = tuple[_Shape, _Shape] | None


class Plan(NamedTuple):
    """The launches of a call. Appending and attending take the length of the sequences as their last argument.

    Attributes:
        append: None where nothing is appended.
        rotated: where the rotated queries go; None where none are.
    """

    append: Launch | None
    rotated: Layout | None
    split: SplitPlan


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
    q_shape, _, v_shape = (shape for shape, _ in forms)
    strides = [used_strides(shape[:-1], stride) for shape, stride in forms]
    batch, seq_q, heads, head_dim = q_shape
    _, cache_rows, heads_kv, head_dim_v = v_shape
    page_size = 0 if table_form is None else cache_rows
    capacity = cache_rows if table_form is None else cache_rows * table_form[0][1]
    check_rows("k_cache" if table_form is None else "block_table", capacity, MAX_POSITIONS)
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
        strides[0] = contiguous_strides(q_shape)[:3]

    split_call = SplitCall(
        dtype,
        (batch, seq_q, heads, heads_kv, head_dim, head_dim_v),
        tuple(strides),
        misalignments[0],
        capacity,
        spec.scale,
        allow_tf32,
        index_dtypes,
        page_size,
        stride_table,
        seq_new,
        spec.window_left,
        spec.window_right,
        visible=visible_rows(capacity, seq_q, spec.window_left, spec.window_right),
        softcap=spec.softcap,
        slope_dims=slope_dims,
        sinks=has_sinks,
        num_splits=spec.num_splits,
    )
    return Plan(append, layout(q_shape, dtype) if rotates else None, split_plan(split_call, device))


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
    q_form, k_cache_form, v_cache_form = forms
    k_form, v_form = new_forms
    batch, seq_q, heads, head_dim = q_form[0]
    heads_kv, head_dim_v = v_cache_form[0][2:]
    (positions, half), *angle_strides, table_dtype = angles or ((0, 0), 0, 0, torch.float32)
    in_order = q_form, k_form, v_form, k_cache_form, v_cache_form
    strides = tuple(stride for shape, all_four in in_order for stride in used_strides(shape[:-1], all_four))
    seq_new = k_form[0][1]
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


@functools.cache
def _launcher(variant: AppendVariant, device: torch.device) -> Callable[..., None]:
    return make_launcher(kernel_source(variant), device, device_facts(device))


def kernel_source(variant: AppendVariant) -> KernelSource:
    """The specialisation of the appending kernel for a variant, as the launcher and ahead-of-time compilation take
    it."""
    parameter = functools.partial(_append_parameter, variant)
    return source_of(append_kernel, parameter, _append_constants(variant), variant.cut.num_warps, 1)


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


def _append_parameter(variant: AppendVariant, name: str) -> tuple[str, int]:
    """Type of a run-time parameter, and a power of two that divides it."""
    indices = ("lengths_ptr", "entries_ptr", "table_ptr")
    if name in indices:
        return index_parameter(variant.index_dtypes[indices.index(name)])
    if name in ("cos_ptr", "sin_ptr", "rotated_ptr") and not variant.half:
        return ABSENT
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
