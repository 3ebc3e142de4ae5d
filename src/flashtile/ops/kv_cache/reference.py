"""The eager reference: the definition of the semantics, written to be read, not to be fast.

One sequence after another: its new rows are rotated and stored, all its rows are gathered, and the reference of
`flashtile.attention` attends to them. It reads the lengths on the host.
"""

from __future__ import annotations

import torch
from torch import Tensor

from flashtile.ops.attention.api import attention
from flashtile.ops.kv_cache.spec import CacheCall, CacheSpec, lengths_before, lse_dtype, places
from flashtile.ops.rotary.api import apply_rotary


def forward(call: CacheCall, spec: CacheSpec) -> tuple[Tensor, Tensor]:
    """(out, lse); shapes as in `flashtile.attention_with_kv_cache`."""
    q, device = call.q, call.q.device
    batch, seq_q, heads, _ = q.shape
    out = q.new_zeros(batch, seq_q, heads, call.v_cache.shape[-1])
    lse = q.new_zeros(batch, heads, seq_q, dtype=lse_dtype(q.dtype))
    left = [0] * batch if call.cache_left_padding is None else call.cache_left_padding.tolist()
    before = lengths_before(call, spec).tolist()
    for sequence in range(batch):
        _append(call, spec, sequence, before[sequence])
    for sequence in range(batch):
        total = before[sequence] + call.seq_new
        rows = torch.arange(min(left[sequence], total), total, device=device)
        where = places(call, torch.full_like(rows, sequence), rows)
        slopes = call.alibi_slopes
        out[sequence], lse[sequence] = (
            result[0]
            for result in attention(
                _rotated_queries(call, spec, sequence, before[sequence]),
                call.k_cache[where][None],
                call.v_cache[where][None],
                window=(spec.window_left, spec.window_right),
                scale=spec.scale,
                softcap=spec.softcap,
                alibi_slopes=slopes[sequence] if slopes is not None and slopes.dim() == 2 else slopes,
                sinks=call.sinks,
                return_lse=True,
                backend="reference",
            )
        )
    return out, lse


def _append(call: CacheCall, spec: CacheSpec, sequence: int, before: int) -> None:
    """Stores the new rows of one sequence."""
    if call.k is None or call.v is None:
        return
    rows = torch.arange(before, before + call.seq_new, device=call.q.device)
    where = places(call, torch.full_like(rows, sequence), rows)
    call.k_cache[where] = _rotated(call.k[sequence, None], call, spec, before)[0]
    call.v_cache[where] = call.v[sequence]


def _rotated_queries(call: CacheCall, spec: CacheSpec, sequence: int, before: int) -> Tensor:
    """`[1, seq_q, heads, head_dim]`."""
    q = call.q[sequence, None]
    if spec.banded:
        return _rotated(q, call, spec, before)
    # All rows at one position: as heads of a single row.
    return _rotated(q.flatten(1, 2)[:, None], call, spec, before).view(q.shape) if q.numel() else q


def _rotated(x: Tensor, call: CacheCall, spec: CacheSpec, position: int) -> Tensor:
    if call.rotary_cos is None or call.rotary_sin is None:
        return x
    return apply_rotary(
        x, call.rotary_cos, call.rotary_sin, spec.interleaved, seqlen_offsets=position, backend="reference"
    )
