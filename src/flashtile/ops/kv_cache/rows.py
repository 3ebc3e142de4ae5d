"""The CPU and the reference share this: appending rows, rotating queries, and the call of attention."""

from __future__ import annotations

import torch
from torch import Tensor

from flashtile.ops.attention.api import checked_forward
from flashtile.ops.kv_cache import spec as formulas
from flashtile.ops.kv_cache.spec import CacheCall, CacheSpec
from flashtile.ops.rotary.api import apply_rotary


def append(call: CacheCall, spec: CacheSpec, backend: str) -> Tensor:
    """Stores the new rows, and returns the queries. Both are rotated first, on a backend."""
    if call.k is None:
        return call.q
    before = formulas.lengths_before(call, spec)
    sequence, number = formulas.numbered(formulas.new_counts(call), before.device)
    row = before[sequence] + number
    if row.shape[0]:
        k = formulas.packed_rows(call.k, call.cu_seqlens_new)[: row.shape[0]]
        v = None if call.v is None else formulas.packed_rows(call.v, call.cu_seqlens_new)[: row.shape[0]]
        formulas.store(call, spec, formulas.places(call, sequence, row), _rotated(k, call, spec, row, backend), v)
    q = formulas.packed_rows(call.q, call.cu_seqlens_q)
    if call.rotary_cos is None or not q.numel():
        return call.q
    sequence, number = formulas.numbered(formulas.query_counts(call), before.device)
    position = before[sequence] + number if spec.banded else before[sequence]
    rows = position.shape[0]
    turned = _rotated(q[:rows], call, spec, position, backend)
    return (turned if rows == q.shape[0] else torch.cat([turned, q[rows:]])).view(call.q.shape)


def _rotated(x: Tensor, call: CacheCall, spec: CacheSpec, position: Tensor, backend: str) -> Tensor:
    """`[rows, heads, head_dim]`, each row by a position of its own."""
    if call.rotary_cos is None or call.rotary_sin is None:
        return x
    return apply_rotary(x, call.rotary_cos, call.rotary_sin, spec.interleaved, position_ids=position, backend=backend)


def attend(
    q: Tensor, keys: Tensor, values: Tensor, call: CacheCall, spec: CacheSpec, *, sequences: slice,
    tree: Tensor | None, backend: str,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """(out, lse) of some sequences: queries `[sequences, seq_q, heads, head_dim]`, all their keys and values, and None
    or their trees `[sequences, seq_q, seq_q]`."""
    slopes = call.alibi_slopes
    return checked_forward(
        q,
        keys,
        values,
        window=(spec.window_left, spec.window_right),
        scale=spec.scale,
        softcap=spec.softcap,
        alibi_slopes=slopes[sequences] if slopes is not None and slopes.dim() == 2 else slopes,
        sinks=call.sinks,
        backend=backend,
        mask=None if tree is None else formulas.visible_in_tree(tree, keys.shape[1])[:, None],
        batch_invariant=spec.batch_invariant,
    )
