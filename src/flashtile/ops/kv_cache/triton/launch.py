"""Host side of the kernels over a cache: plans and launches. The backend module for "triton".

New rows are appended (and queries rotated). Then programs attend to their splits, and where there are several, their
parts are combined; or, on Hopper, kernels of their own serve a call. How long sequences are is no part of a plan.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from flashtile._backends.alignment import batch_row_head, power_of_two_factor
from flashtile._backends.allocate import Layout, contiguous, contiguous_strides, layouts
from flashtile._backends.devices import device_facts, interpreting, multiprocessors
from flashtile._backends.launch import (
    GIVEN,
    Parameter,
    int32,
    int64,
    named_constants,
    plan_cache,
    pointer_to,
    pointers,
)
from flashtile._backends.pipeline import Kernel, Pipeline
from flashtile.ops.attention.api import invariant_tiles
from flashtile.ops.common import checks
from flashtile.ops.common.checks import MAX_POSITIONS, check_rows
from flashtile.ops.common.split_keys.configs import AttendTiles
from flashtile.ops.common.split_keys.plan import Cut, SplitCall, split_pipeline, visible_rows, wide_cut
from flashtile.ops.common.split_keys.rows import CacheStrides, Descales, RowStrides, Sequences
from flashtile.ops.common.tiles import power_of_two
from flashtile.ops.kv_cache.hopper.backend import (
    chunks_unsupported_reason,
    gathered_sequences,
    gathers_latent,
    is_gathered,
    latent_unsupported_reason,
    mixes_tokens,
    most_left,
    segment_call,
    segments_unsupported_reason,
    shares_steps,
    unreadable_by_forward,
)
from flashtile.ops.kv_cache.spec import MAX_HEAD_DIM_V, CacheCall, CacheSpec, address_facts
from flashtile.ops.kv_cache.triton.append import append_cut, append_kernel
from flashtile.ops.kv_cache.triton.prefix import plan_behind_prefix

if TYPE_CHECKING:
    from flashtile.ops.attention.hopper.cache_launch import CacheForward, PrefixPlan, StepsPlan
    from flashtile.ops.kv_cache.hopper.gather import Gather

_Shape = tuple[int, ...]


def forward(call: CacheCall, spec: CacheSpec) -> tuple[Tensor, Tensor]:
    """(out, lse); shapes as in `flashtile.attention_with_kv_cache`."""
    if interpreting() and call.k_cache.dtype is torch.bfloat16:
        raise ValueError(
            "backend: 'triton' cannot serve this call: Triton's interpreter multiplies bfloat16 wrongly; use float16 "
            "or float32 there"
        )
    _check_eight_bits(call)
    if spec.batch_invariant and spec.scale <= 0:
        # As attention's forward has it, whose kernel takes the maximum before it scales.
        call = call._replace(q=-call.q if spec.scale else torch.zeros_like(call.q))
        spec = spec._replace(scale=-spec.scale or 1.0)
    if not call.batch and call.cu_seqlens_q is not None:
        return _unowned_results(call)
    return _launch(plan_for(call, spec), call, spec.length)


def forward_behind_prefix(call: CacheCall, spec: CacheSpec) -> tuple[Tensor, Tensor] | None:
    """`forward` of a call with shared rows; None where the prefix is to be a call of its own."""
    plan = plan_for(call, spec)
    return None if plan.prefix is None else _launch(plan, call, spec.length)


def prepare_calls(call: CacheCall, spec: CacheSpec) -> Callable[..., tuple[Tensor, Tensor]] | None:
    """`forward` of all calls that look like this one, from their tensors and the length of all sequences; None where
    values are read first, or q is changed."""
    changed = spec.batch_invariant and spec.scale <= 0
    if interpreting() or checks.CHECK_VALUES or changed or not call.batch:
        return None
    plan = plan_for(call, spec)
    if spec.shared_rows and plan.prefix is None:
        return None
    return functools.partial(_launch, plan)


def _launch(plan: CachePlan, tensors: Sequence[Any], length: int) -> tuple[Tensor, Tensor]:
    """`tensors`: those of `CacheCall`."""
    (
        q, k_cache, v_cache, k, v, lengths, entries, left, table, cos, sin, slopes, sinks, starts, new_starts,
        descale_k, descale_v, tree,
    ) = tensors  # fmt: skip
    indices = lengths, entries, left, table, starts, new_starts, tree
    if plan.append is not None:
        rotates = bool(plan.append.outputs)
        angles = (cos, sin) if rotates else ()
        made = plan.append.run(*pointers((q, k, v, k_cache, v_cache, *angles, *indices, descale_k, descale_v)), length)
        q = made[0] if rotates else q
    attended = q, k_cache, v_cache
    if plan.prefix is not None:
        return plan.prefix.run((*attended, *indices, slopes, sinks, descale_k, descale_v), length)
    factors = [descale_k, descale_v]
    if plan.latent is not None:
        rows = [k_cache]
        if plan.gather is not None:
            rows, indices, factors = plan.gather.run(rows, indices, factors, length)
        out, lse, *_ = plan.latent.run(*pointers((q, *rows, *indices, *factors)), length)
        return out, lse
    if plan.split is not None:
        given = *attended, *indices, slopes, sinks, *factors
        out, lse, *_ = plan.split.run(*pointers(given), length)
        if plan.chunks is None:
            return out, lse
    if plan.steps is not None:
        return plan.steps.run(attended, (starts, slopes, sinks, lengths, entries, table, new_starts), length)
    assert plan.chunks is not None
    results = None if plan.split is None else (out, lse)
    if plan.gather is not None:
        rows, indices, factors = plan.gather.run([k_cache, v_cache], indices, factors, length)
        attended = q, rows[0], rows[1]
    lengths, entries, _, table, starts, new_starts, tree = indices
    others = starts, slopes, sinks, lengths, entries, table, new_starts, *factors, tree
    results = plan.chunks.run(attended, results, others, length)
    return results if plan.tokens is None else plan.tokens.run(attended, results, others, length)


def _unowned_results(call: CacheCall) -> tuple[Tensor, Tensor]:
    """Those of packed queries that belong to no sequence."""
    total_q, heads, _ = call.q.shape
    out = call.q.new_zeros(total_q, heads, call.v_cache.shape[-1])
    return out, call.q.new_full((heads, total_q), float("-inf"), dtype=torch.float32)


def _check_eight_bits(call: CacheCall) -> None:
    """Raises where Triton cannot read or write the caches."""
    dtype, facts = call.k_cache.dtype, device_facts(call.q.device)
    if interpreting() and call.k is not None and dtype in (torch.float8_e4m3fn, torch.float8_e5m2):
        raise ValueError(
            f"backend: 'triton' cannot serve this call: Triton's interpreter rounds to {dtype} wrongly; append to "
            "caches of int8 there"
        )
    unknown = (facts.is_cuda and facts.capability < 89) or facts.arch in ("gfx942", "gfx1100")
    if dtype is torch.float8_e4m3fn and unknown and not interpreting():
        raise ValueError(
            f"k_cache: expected float8_e5m2 or int8 on {facts.arch}, whose Triton has no float8_e4m3fn, got it; make "
            "the caches in one of those"
        )


class CachePlan(NamedTuple):
    """The launches of a call. Appending and attending are given the length of the sequences last.

    Attributes:
        append: None where nothing is appended. Writes rotated queries, if they are rotated.
        split: None where `latent` or `chunks` serves all sequences.
        chunks: of the sequences with many queries, on Hopper.
        gather: what brings rows together for `chunks` or `latent`, where these cannot read them as they lie.
        tokens: of those with one, in the batch-invariant mode.
        steps: of one query of each of a few sequences, on Hopper in the batch-invariant mode.
        prefix: of sequences with shared rows. None where these are a call of their own.
    """

    append: Pipeline | None
    split: Pipeline | None
    latent: Pipeline | None = None
    chunks: CacheForward | None = None
    tokens: CacheForward | None = None
    steps: StepsPlan | None = None
    prefix: PrefixPlan | None = None
    gather: Gather | None = None


class CacheFacts(NamedTuple):
    """All that decides how a call is launched.

    Attributes:
        call: the layouts of its tensors.
        spec: without the length.
        addresses: of `spec.address_facts`.
        allow_tf32: PyTorch's own setting.
    """

    call: Any
    spec: CacheSpec
    addresses: tuple[int, int, bool, bool]
    allow_tf32: bool
    device: torch.device

    @property
    def half(self) -> int:
        """Pairs of a head that are rotated."""
        return 0 if self.call.rotary_cos is None else self.call.rotary_cos.shape[1]


def plan_for(call: CacheCall, spec: CacheSpec) -> CachePlan:
    # Only tiles depend on the longest sequence: steps that differ a little in it share a plan.
    longest = 0 if call.cu_seqlens_q is None else power_of_two(spec.max_seqlen_q)
    spec, allow_tf32 = spec._replace(length=0, max_seqlen_q=longest), torch._C._get_cublas_allow_tf32()
    return _plan(CacheFacts(layouts(call), spec, address_facts(call), allow_tf32, call.q.device))


@plan_cache
def _plan(facts: CacheFacts) -> CachePlan:
    """Everything that can be decided before the tensors' contents are known."""
    spec, device = facts.spec, facts.device
    outer, capacity = facts.call.k_cache.shape[0], facts.call.capacity
    check_rows("k_cache" if facts.call.block_table is None else "block_table", capacity, MAX_POSITIONS)
    call = _split_call(facts)
    machine = device_facts(device)
    if spec.shared_rows:
        return _plan_behind_prefix(facts, _behind_prefix(call, spec.shared_rows))
    append = None if facts.call.k is None else _append(facts)
    if latent_unsupported_reason(call, machine) is None:
        from flashtile.ops.kv_cache.hopper.latent import latent_pipeline

        if not gathers_latent(call):
            return CachePlan(append, None, latent_pipeline(call, device))
        from flashtile.ops.kv_cache.hopper.gather import plan_gather

        gather = plan_gather(call, 1, gathered_sequences(call, 1), device, keys_alone=True)
        return CachePlan(append, None, latent_pipeline(gather.call, device), gather=gather)
    if spec.batch_invariant and latent_unsupported_reason(call._replace(page_size=0), machine) is None:
        raise ValueError(
            "block_table: expected latent rows in pages of a multiple of 8 rows in the batch-invariant mode, got pages "
            f"of {call.page_size}, which a kernel with other bits would read; choose other pages, or leave the mode"
        )
    if chunks_unsupported_reason(call, machine, multiprocessors(device)):
        return CachePlan(append, split_pipeline(call, device))
    from flashtile.ops.attention.hopper.cache_launch import plan_chunks, plan_steps

    if spec.batch_invariant:
        if reason := unreadable_by_forward(call, gathered=False):
            raise ValueError(
                f"k_cache: expected pages and strides that the forward of attention reads in the batch-invariant mode: "
                f"{reason}; choose others, or leave the mode"
            )
        if shares_steps(call, multiprocessors(device)):
            return CachePlan(append, None, steps=plan_steps(call, outer, device))
        if not mixes_tokens(call):
            return CachePlan(append, None, chunks=plan_chunks(call, outer, 0, device))
        tokens = plan_chunks(call, outer, 0, device, by_sequence=True)
        return CachePlan(append, None, chunks=plan_chunks(call, outer, 1, device), tokens=tokens)
    most = most_left(call)
    split = None if call.total_q is None else split_pipeline(call._replace(most=most), device)
    if not is_gathered(call):
        return CachePlan(append, split, chunks=plan_chunks(call, outer, most, device))
    from flashtile.ops.kv_cache.hopper.gather import plan_gather

    sequences = gathered_sequences(call, most + 1)
    gather = plan_gather(call, most + 1, sequences, device)
    chunks = plan_chunks(gather.call, sequences, most, device, some=call.total_q is not None)
    return CachePlan(append, split, chunks=chunks, gather=gather)


def _plan_behind_prefix(facts: CacheFacts, call: SplitCall) -> CachePlan:
    """`call`: that of the rows behind the prefix."""
    device = facts.device
    of_prefix = segment_call(call, facts.spec.shared_rows)
    if segments_unsupported_reason(call, of_prefix, device_facts(device)):
        return CachePlan(None, None)
    from flashtile.ops.attention.hopper.cache_launch import PrefixPlan, plan_segments

    forward = plan_segments(of_prefix, facts.call.k_cache.shape[0], device)
    append = None if facts.call.k is None else _append(facts)
    pipeline = plan_behind_prefix(call, of_prefix, forward, device)
    return CachePlan(append, None, prefix=PrefixPlan(pipeline, forward.dynamic))


def _split_call(facts: CacheFacts) -> SplitCall:
    """The call as the kernels' plans see it, behind what is appended and rotated."""
    call, spec, (misalignment, _, at_one_address, one_factor) = facts.call, facts.spec, facts.addresses
    q, k_cache, v_cache, table, tree = call.q, call.k_cache, call.v_cache, call.block_table, call.tree_mask
    packed = call.cu_seqlens_q is not None
    batch, seq_q, heads, head_dim = shape = (1, *q.shape)[-4:]  # packed rows are those of one long sequence
    page_size, heads_kv, head_dim_v = v_cache.shape[1:]
    total_q = None
    if packed:
        batch, seq_q, total_q = call.batch, min(spec.max_seqlen_q, seq_q), seq_q
    q_strides = contiguous_strides(shape)[:3] if facts.half else batch_row_head(q.shape, q.strides)
    descale_strides = tuple(None if each is None else each.strides for each in (call.descale_k, call.descale_v))
    return SplitCall(
        dtype=q.dtype,
        shape=(batch, seq_q, heads, heads_kv, head_dim, head_dim_v),
        strides=(q_strides, *(batch_row_head(cache.shape, cache.strides) for cache in (k_cache, v_cache))),
        misalignment=misalignment,
        capacity=call.capacity,
        scale=spec.scale,
        allow_tf32=facts.allow_tf32,
        index_dtypes=_index_dtypes(call),
        page_size=0 if table is None else page_size,
        pages=0 if table is None else k_cache.shape[0],
        stride_table=0 if table is None else table.strides[0],
        total_q=total_q,
        seq_new=0 if packed or call.k is None else call.k.shape[1],
        window_left=spec.window_left,
        window_right=spec.window_right,
        visible=visible_rows(call.capacity, seq_q, spec.window_left, spec.window_right),
        softcap=spec.softcap,
        slope_dims=0 if call.alibi_slopes is None else len(call.alibi_slopes.shape),
        row_logits=call.sinks is not None,
        num_splits=1 if spec.batch_invariant else spec.num_splits,
        cache_dtype=k_cache.dtype,
        descale_strides=descale_strides,
        tree=None if tree is None else ((0, *tree.strides)[-3], tree.strides[-2], tree.shape[-1]),
        values_in_keys=at_one_address and k_cache.strides == v_cache.strides and 0 not in k_cache.shape,
        one_factor=one_factor and descale_strides[0] == descale_strides[1],
        cut=_invariant_cut(facts) if spec.batch_invariant else None,
    )


def _index_dtypes(call: Any) -> tuple[torch.dtype | None, ...]:
    """Of what `Sequences` has, from the layouts of a call."""
    indices = *call[5:9], call.cu_seqlens_q, call.cu_seqlens_new
    return (*(each and each.dtype for each in indices), call.tree_mask and torch.uint8)


def _behind_prefix(call: SplitCall, shared: int) -> SplitCall:
    """The call of the rows behind so many."""
    lengths, entries, _, *others = call.index_dtypes
    return call._replace(index_dtypes=(lengths, entries, torch.int32, *others), visible=max(call.visible - shared, 0))


def _invariant_cut(facts: CacheFacts) -> Cut:
    """The cut of a call in the batch-invariant mode, which is that of attention's forward where it has such heads."""
    dtype, head_dims = facts.call.q.dtype, (facts.call.q.shape[-1], facts.call.v_cache.shape[-1])
    device, allow_tf32 = device_facts(facts.device), facts.allow_tf32
    if max(head_dims) > MAX_HEAD_DIM_V:
        return wide_cut(dtype, *head_dims, device, allow_tf32)
    tiles, precision, widths = invariant_tiles(dtype, *head_dims, facts.spec.banded, device, allow_tf32)
    return Cut(AttendTiles(*tiles[:5]), precision, widths)


def _append(facts: CacheFacts) -> Pipeline:
    """The launch that appends and rotates. Of `CacheCall` it is given q, k, v, the caches, angles, indices and factors
    that there are, then the length. Its output is the rotated queries."""
    call, spec, half, (misalignment, of_tables, *_) = facts.call, facts.spec, facts.half, facts.addresses
    dtype, cache_dtype, packed = call.q.dtype, call.k_cache.dtype, call.cu_seqlens_q is not None
    batch, seq_q, heads, head_dim = (1, *call.q.shape)[-4:]  # packed rows are those of one long sequence
    heads_kv, head_dim_v = call.v_cache.shape[2:]
    angles = (call.rotary_cos, call.rotary_sin) if half else ()
    table_dtype = call.rotary_cos.dtype if half else torch.float32
    # Columns of the keys are not written once more.
    forms = {name: getattr(call, name) for name in ("q", "k", "v", "k_cache", "v_cache")}
    forms["v"] = call.v or call.k
    strides = {name: batch_row_head(form.shape, form.strides) for name, form in forms.items()}
    index_dtypes, factors = _index_dtypes(call), (call.descale_k, call.descale_v)
    seq_new = call.k.shape[-3]
    tokens = seq_new + (seq_q if half else 0)
    cut = append_cut(max(heads, heads_kv) if half else heads_kv, head_dim, head_dim_v, half, device_facts(facts.device))
    apart = power_of_two_factor(*(stride for of_tensor in strides.values() for stride in of_tensor))
    aligned = power_of_two_factor(misalignment)
    itemsize = table_dtype.itemsize
    angle_strides = [each.strides[0] for each in angles] or [0, 0]
    tables = power_of_two_factor(of_tables, *(stride * itemsize for stride in angle_strides))
    stride_cos, stride_sin = (int64(stride, max(1, tables // itemsize)) for stride in angle_strides)
    parameters = {
        **{f"{name}_ptr": pointer_to(cache_dtype if "cache" in name else dtype, aligned) for name in forms},
        **({} if call.v else {"v_ptr": pointer_to(None)}),
        "rotated_ptr": pointer_to(dtype if half else None, 16),
        **dict.fromkeys(("cos_ptr", "sin_ptr"), pointer_to(table_dtype if half else None, tables)),
        "sequences": Sequences(*map(pointer_to, index_dtypes)),
        "descales": Descales(*(pointer_to(each and torch.float32) for each in factors)),
        "length": Parameter("i32", 1, GIVEN),
        **{f"{of}_strides": RowStrides(*_stride_parameters(strides[of], apart)) for of in ("q", "k", "v")},
        **{f"{of}_strides": CacheStrides(*_stride_parameters(strides[of], apart)) for of in ("k_cache", "v_cache")},
        **{f"{of}_descale_strides": _factor_strides(each) for of, each in zip("kv", factors)},
        "stride_cos": stride_cos,
        "stride_sin": stride_sin,
        "stride_table": int64(0 if call.block_table is None else call.block_table.strides[0]),
        "batch": int32(call.batch if packed else None),
        "heads_q": int32(heads),
        "heads_kv": int32(heads_kv),
        "seq_q": int32(seq_q),
        "seq_new": int32(seq_new),
        "capacity": int32(call.capacity),
        "positions": int32(call.rotary_cos.shape[0] if half else 0),
    }
    constants = {
        "HEAD_DIM": head_dim,
        "HEAD_DIM_V": head_dim_v,
        "HALF": half,
        **named_constants(cut),
        "PAGE_SIZE": 0 if call.block_table is None else call.k_cache.shape[1],
        "INTERLEAVED": spec.interleaved,
        "BANDED": spec.banded,
        "FACTORS_OF_ROWS": spec.factors_of_rows,
    }
    rotated = contiguous(call.q.shape, dtype) if half else None
    programs = tokens if packed else batch * tokens
    kernel = Kernel(append_kernel, parameters, constants, programs, {"k": "descale_k", "v": "descale_v"}, cut.num_warps)
    optional = {
        "v": call.v, "cos": half, "sin": half, **dict(zip(Sequences._fields, index_dtypes)),
        **dict(zip(("descale_k", "descale_v"), factors)),
    }  # fmt: skip
    names = "q", "k", "v", "k_cache", "v_cache", "cos", "sin", *Sequences._fields, "descale_k", "descale_v", "length"
    given = [name for name in names if optional.get(name, True)]
    return Pipeline(facts.device, {"append": kernel}, given, {"rotated": rotated})


def _factor_strides(factors: Layout | None) -> CacheStrides:
    return CacheStrides(*map(int64, factors.strides if factors else (None, None, None)))


def _stride_parameters(strides: _Shape, multiple: int) -> list[Parameter]:
    """Strides as parameters; `multiple` divides them."""
    return [int64(stride, multiple) for stride in strides]
