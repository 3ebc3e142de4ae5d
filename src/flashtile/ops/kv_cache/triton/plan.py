"""What the launches of a call need beside their pointers: cuts, sizes and strides. How long sequences are is no part of
it."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch

from flashtile._backends.alignment import power_of_two_factor, used_strides
from flashtile._backends.allocate import contiguous, contiguous_strides
from flashtile._backends.devices import device_facts, multiprocessors
from flashtile._backends.launch import (
    GIVEN,
    Parameter,
    Plan,
    int32,
    int64,
    make_plan,
    named_constants,
    plan_cache,
    pointer_to,
)
from flashtile.ops.attention.api import invariant_tiles
from flashtile.ops.common.checks import MAX_POSITIONS, check_rows
from flashtile.ops.common.split_keys.configs import AttendTiles
from flashtile.ops.common.split_keys.plan import Cut, SplitCall, SplitPlan, split_plan, visible_rows, wide_cut
from flashtile.ops.common.split_keys.rows import CacheStrides, Descales, RowStrides, Sequences
from flashtile.ops.common.tiles import power_of_two
from flashtile.ops.kv_cache.hopper.backend import (
    chunks_unsupported_reason,
    latent_unsupported_reason,
    most_left,
    unreadable_by_forward,
)
from flashtile.ops.kv_cache.rows import address_facts
from flashtile.ops.kv_cache.spec import MAX_HEAD_DIM_V, CacheCall, CacheSpec
from flashtile.ops.kv_cache.triton.append import append_kernel
from flashtile.ops.kv_cache.triton.configs import append_cut

if TYPE_CHECKING:
    from flashtile.ops.attention.hopper.cache_launch import CacheForward
    from flashtile.ops.kv_cache.hopper.latent_launch import LatentPlan

_Shape = tuple[int, ...]
#: (shape, strides) of a tensor, or None for one that is not there.
_Form = tuple[_Shape, _Shape] | None


class CachePlan(NamedTuple):
    """The launches of a call. Appending and attending are given the length of the sequences last.

    Attributes:
        append: None where nothing is appended. Writes rotated queries, if they are rotated.
        split: None where `latent` or `chunks` serves all sequences.
        chunks: of the sequences with many queries, on Hopper.
    """

    append: Plan | None
    split: SplitPlan | None
    latent: LatentPlan | None = None
    chunks: CacheForward | None = None


def plan_for(call: CacheCall, spec: CacheSpec) -> CachePlan:
    q, k_cache, v_cache, k, v = call[:5]
    cos, sin, table, tree = call.rotary_cos, call.rotary_sin, call.block_table, call.tree_mask
    misalignment, of_tables, at_one_address = address_facts(call)
    new = tuple(rows for rows in (k, v) if rows is not None)
    packed = call.cu_seqlens_q is not None
    indices = (*call[5:9], call.cu_seqlens_q, call.cu_seqlens_new)
    return _plan(
        q.dtype,
        q.device,
        tuple((t.shape, t.stride()) for t in (q, k_cache, v_cache)),
        tuple((rows.shape, rows.stride()) for rows in new) or None,
        None if cos is None or sin is None else (tuple(cos.shape), cos.stride(0), sin.stride(0), cos.dtype),
        (*(None if t is None else t.dtype for t in indices), None if tree is None else torch.uint8),
        None if table is None else (table.shape, table.stride()),
        0 if call.alibi_slopes is None else call.alibi_slopes.dim(),
        call.sinks is not None,
        call.batch if packed else None,
        k_cache.dtype,
        tuple(None if t is None else t.stride() for t in (call.descale_k, call.descale_v)),
        None if tree is None else (*(0, *tree.stride())[-3:-1], tree.shape[-1]),
        at_one_address and k_cache.numel() > 0 and k_cache.stride() == v_cache.stride(),
        (misalignment, of_tables),
        # Only tiles depend on the longest sequence: steps that differ a little in it share a plan.
        spec._replace(length=0, max_seqlen_q=power_of_two(spec.max_seqlen_q) if packed else 0),
        torch._C._get_cublas_allow_tf32(),
    )


@plan_cache
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
    sequences: int | None,
    cache_dtype: torch.dtype,
    descale_strides: tuple[_Shape | None, ...],
    tree_form: tuple[int, int, int] | None,
    values_in_keys: bool,
    misalignments: tuple[int, int],
    spec: CacheSpec,
    allow_tf32: bool,
) -> CachePlan:
    """Everything that can be decided before the tensors' contents are known. `sequences`: how many are packed; None
    where they are not."""
    if sequences is not None:
        # As one long sequence, whose rows the kernels find by where the packed ones begin.
        forms = (_as_one(forms[0]), *forms[1:])
        new_forms = None if new_forms is None else tuple(map(_as_one, new_forms))
    q_shape, _, v_shape = (shape for shape, _ in forms)
    strides = [used_strides(shape[:-1], stride) for shape, stride in forms]
    batch, seq_q, heads, head_dim = q_shape
    total_q = None
    if sequences is not None:
        batch, seq_q, total_q = sequences, min(spec.max_seqlen_q, seq_q), seq_q
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
            batch,
            sequences is not None,
            cache_dtype,
            descale_strides,
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
        total_q,
        0 if sequences is not None else seq_new,
        spec.window_left,
        spec.window_right,
        visible=visible_rows(capacity, seq_q, spec.window_left, spec.window_right),
        softcap=spec.softcap,
        slope_dims=slope_dims,
        row_logits=has_sinks,
        num_splits=1 if spec.batch_invariant else spec.num_splits,
        cache_dtype=cache_dtype,
        descale_strides=descale_strides,
        tree=tree_form,
        values_in_keys=values_in_keys,
        cut=_invariant_cut(dtype, head_dim, head_dim_v, spec, device, allow_tf32) if spec.batch_invariant else None,
    )
    facts = device_facts(device)
    if latent_unsupported_reason(split_call, facts) is None:
        from flashtile.ops.kv_cache.hopper.latent_launch import plan_latent

        return CachePlan(append, None, plan_latent(split_call, device))
    if chunks_unsupported_reason(split_call, facts, multiprocessors(device)):
        return CachePlan(append, split_plan(split_call, device))
    from flashtile.ops.attention.hopper.cache_launch import plan_chunks

    if spec.batch_invariant:
        if reason := unreadable_by_forward(split_call):
            raise ValueError(
                f"k_cache: expected pages and strides that the forward of attention reads in the batch-invariant mode: "
                f"{reason}; choose others, or leave the mode"
            )
        return CachePlan(append, None, chunks=plan_chunks(split_call, forms[1][0][0], 0, device))
    most = most_left(split_call)
    split = None if sequences is None else split_plan(split_call._replace(most=most, num_splits=1), device)
    return CachePlan(append, split, chunks=plan_chunks(split_call, forms[1][0][0], most, device))


def _invariant_cut(
    dtype: torch.dtype, head_dim: int, head_dim_v: int, spec: CacheSpec, device: torch.device, allow_tf32: bool
) -> Cut:
    """The cut of a call in the batch-invariant mode, which is that of attention's forward where it has such heads."""
    facts = device_facts(device)
    if max(head_dim, head_dim_v) > MAX_HEAD_DIM_V:
        return wide_cut(dtype, head_dim, head_dim_v, facts, allow_tf32)
    tiles, precision, widths = invariant_tiles(dtype, head_dim, head_dim_v, spec.banded, facts, allow_tf32)
    return Cut(AttendTiles(*tiles[:5]), precision, widths)


def _as_one(form: tuple[_Shape, _Shape]) -> tuple[_Shape, _Shape]:
    """Packed rows as those of a single sequence."""
    shape, strides = form
    return (1, *shape), (0, *strides)


def _append(
    dtype: torch.dtype,
    batch: int,
    packed: bool,
    cache_dtype: torch.dtype,
    descale_strides: tuple[_Shape | None, ...],
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
) -> Plan:
    q_form, k_cache_form, v_cache_form = forms
    k_form, *v_forms = new_forms
    v_form = v_forms[0] if v_forms else k_form  # columns of the keys are not written once more
    _, seq_q, heads, head_dim = q_form[0]
    heads_kv, head_dim_v = v_cache_form[0][2:]
    (positions, half), *angle_strides, table_dtype = angles or ((0, 0), 0, 0, torch.float32)
    tensors = {"q": q_form, "k": k_form, "v": v_form, "k_cache": k_cache_form, "v_cache": v_cache_form}
    strides = {name: used_strides(shape[:-1], all_four) for name, (shape, all_four) in tensors.items()}
    seq_new = k_form[0][1]
    tokens = seq_new + (seq_q if half else 0)
    cut = append_cut(max(heads, heads_kv) if half else heads_kv, head_dim, head_dim_v, half, device_facts(device))
    apart = power_of_two_factor(*(stride for of_tensor in strides.values() for stride in of_tensor))
    aligned = power_of_two_factor(misalignments[0])
    itemsize = table_dtype.itemsize
    tables = power_of_two_factor(misalignments[1], *(stride * itemsize for stride in angle_strides))
    stride_cos, stride_sin = (int64(stride, max(1, tables // itemsize)) for stride in angle_strides)
    parameters = {
        **{f"{name}_ptr": pointer_to(cache_dtype if "cache" in name else dtype, aligned) for name in tensors},
        **({} if v_forms else {"v_ptr": pointer_to(None)}),
        "rotated_ptr": pointer_to(dtype if half else None, 16),
        **dict.fromkeys(("cos_ptr", "sin_ptr"), pointer_to(table_dtype if half else None, tables)),
        "sequences": Sequences(*map(pointer_to, index_dtypes)),
        "descales": Descales(*(pointer_to(None if each is None else torch.float32) for each in descale_strides)),
        "length": Parameter("i32", 1, GIVEN),
        **{f"{of}_strides": RowStrides(*_apart(strides[of], apart)) for of in ("q", "k", "v")},
        **{f"{of}_strides": CacheStrides(*_apart(strides[of], apart)) for of in ("k_cache", "v_cache")},
        **{f"{of}_descale_strides": _factor_strides(each) for of, each in zip("kv", descale_strides)},
        "stride_cos": stride_cos,
        "stride_sin": stride_sin,
        "stride_table": int64(stride_table),
        "batch": int32(batch if packed else None),
        "heads_q": int32(heads),
        "heads_kv": int32(heads_kv),
        "seq_q": int32(seq_q),
        "seq_new": int32(seq_new),
        "capacity": int32(capacity),
        "positions": int32(positions),
    }
    constants = {
        "HEAD_DIM": head_dim,
        "HEAD_DIM_V": head_dim_v,
        "HALF": half,
        **named_constants(cut),
        "PAGE_SIZE": page_size,
        "INTERLEAVED": spec.interleaved,
        "BANDED": spec.banded,
        "FACTORS_OF_ROWS": spec.factors_of_rows,
    }
    rotated = contiguous(q_form[0][packed:], dtype) if half else None
    programs = tokens if packed else batch * tokens
    return make_plan(append_kernel, parameters, constants, programs, device, cut.num_warps, outputs=(rotated,))


def _factor_strides(strides: _Shape | None) -> CacheStrides:
    return CacheStrides(*map(int64, strides or (None, None, None)))


def _apart(strides: _Shape, multiple: int) -> list[Parameter]:
    """Strides as parameters; `multiple` divides them."""
    return [int64(stride, multiple) for stride in strides]
