"""The eager reference: the definition of the semantics, written to be read, not to be fast.

One sequence after another: its new rows are rotated and stored, all its rows are gathered, and the reference of
`flashtile.attention` attends to them. It reads the lengths on the host.
"""

from __future__ import annotations

from itertools import accumulate

import torch
from torch import Tensor

from flashtile.ops.attention.api import checked_forward
from flashtile.ops.kv_cache import spec as formulas
from flashtile.ops.kv_cache.spec import CacheCall, CacheSpec
from flashtile.ops.rotary.api import apply_rotary


def forward(call: CacheCall, spec: CacheSpec) -> tuple[Tensor, Tensor]:
    """(out, lse); shapes as in `flashtile.attention_with_kv_cache`."""
    q = formulas.packed_rows(call.q, call.cu_seqlens_q)
    total_q, heads, _ = q.shape
    out = q.new_zeros(total_q, heads, call.v_cache.shape[-1])
    lse = q.new_full((heads, total_q), float("-inf"), dtype=formulas.lse_dtype(q.dtype))
    left = [0] * call.batch if call.cache_left_padding is None else call.cache_left_padding.tolist()
    before, new = formulas.lengths_before(call, spec).tolist(), formulas.new_counts(call)
    for sequence, rows in enumerate(_slices(new)):
        _append(call, spec, sequence, before[sequence], rows)
    for sequence, queries in enumerate(_slices(formulas.query_counts(call))):
        total = before[sequence] + new[sequence]
        row = torch.arange(min(left[sequence], total), total, device=q.device)
        where = formulas.places(call, torch.full_like(row, sequence), row)
        slopes, mask = call.alibi_slopes, None
        if call.tree_mask is not None:
            tree = call.tree_mask[queries] if call.cu_seqlens_q is not None else call.tree_mask[sequence]
            mask = formulas.visible_in_tree(tree[:, : q[queries].shape[0]], row.shape[0])
        result, result_lse = checked_forward(
            _rotated_queries(call, spec, q[queries], before[sequence])[None],
            formulas.gathered(call.k_cache, call.descale_k, where, q.dtype)[None],
            formulas.gathered(call.v_cache, call.descale_v, where, q.dtype)[None],
            window=(spec.window_left, spec.window_right),
            scale=spec.scale,
            softcap=spec.softcap,
            alibi_slopes=slopes[sequence] if slopes is not None and slopes.dim() == 2 else slopes,
            sinks=call.sinks,
            backend="reference",
            mask=None if mask is None else mask[None, None],
            batch_invariant=spec.batch_invariant,
        )
        out[queries], lse[:, queries] = result[0], result_lse[0]
    return formulas.shaped_results(call, out, lse)


def _slices(counts: list[int]) -> list[slice]:
    """The rows of each sequence, where they are packed."""
    ends = list(accumulate(counts))
    return [slice(end - count, end) for count, end in zip(counts, ends)]


def _append(call: CacheCall, spec: CacheSpec, sequence: int, before: int, new: slice) -> None:
    """Stores the new rows of one sequence."""
    if call.k is None:
        return
    k = formulas.packed_rows(call.k, call.cu_seqlens_new)[new]
    v = None if call.v is None else formulas.packed_rows(call.v, call.cu_seqlens_new)[new]
    row = torch.arange(before, before + k.shape[0], device=k.device)
    where = formulas.places(call, torch.full_like(row, sequence), row)
    formulas.store(call, spec, where, _rotated(k, call, spec, before), v)


def _rotated_queries(call: CacheCall, spec: CacheSpec, q: Tensor, before: int) -> Tensor:
    """Queries of one sequence, `[seq_q, heads, head_dim]`."""
    if spec.banded:
        return _rotated(q, call, spec, before)
    # All rows at one position: as heads of a single row.
    return _rotated(q.flatten(0, 1)[None], call, spec, before).view(q.shape) if q.numel() else q


def _rotated(x: Tensor, call: CacheCall, spec: CacheSpec, position: int) -> Tensor:
    """`[rows, heads, head_dim]`, whose first row is at a position."""
    if call.rotary_cos is None or call.rotary_sin is None:
        return x
    angles = call.rotary_cos, call.rotary_sin, spec.interleaved
    return apply_rotary(x[None], *angles, seqlen_offsets=position, backend="reference")[0]
