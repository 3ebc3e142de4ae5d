"""The forward-mode derivative (Jacobian-vector product), by formula, some rows at a time: memory linear in the length.

With the tangents of all inputs, weights `p` of a row and of its sink, and dropout `z = kept / (1 - dropout_p)`::

    ds   = f'(d(scale · q kᵀ) · (1 - tanh²)) + dbias - distance · dslope    1 - tanh²: of the soft cap, f' of score_mod
    dlse = rowsum(p · ds) + p_sink · dsink
    dout = (z · p · (ds - dlse)) v + (z · p) dv

Everything is out of place and in PyTorch's own operations on any device, so that the result can be differentiated
again and mapped (`torch.func.jacfwd`). Shapes as in `row_weights`.

Reference: Griewank and Walther, "Evaluating Derivatives" (2008), section 3.1, for the rule; the softmax's derivative as
in Dao et al., "FlashAttention" (2022), appendix B.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flashtile.ops.attention import row_weights
from flashtile.ops.attention.row_weights import Part
from flashtile.ops.attention.score_program import UPSTREAM, read, run
from flashtile.ops.attention.score_tracing import derivative
from flashtile.ops.attention.spec import AttentionSpec, SideInputs

#: Scores that are made at a time, but for at least as many rows as `_FEWEST_ROWS` of all heads.
_SCORES_AT_ONCE = 2**22
_FEWEST_ROWS = 64


class Tangents(NamedTuple):
    """Tangents of the inputs, in their shapes and dtypes; None = 0."""

    q: Tensor | None
    k: Tensor | None
    v: Tensor | None
    bias: Tensor | None
    alibi_slopes: Tensor | None
    sinks: Tensor | None
    captured: tuple[Tensor | None, ...] = ()


def forward_derivative(
    q: Tensor, k: Tensor, v: Tensor, side: SideInputs, spec: AttentionSpec, tangents: Tangents
) -> tuple[Tensor, Tensor]:
    """The tangents of out and lse; shapes as in `flashtile.attention` and `attention_varlen`."""
    with row_weights.no_autocast(q.device):
        if side.packed:
            return _packed(q, k, v, side, spec, tangents)
        return _dense(q, k, v, side, spec, tangents, None)


def _dense(
    q: Tensor, k: Tensor, v: Tensor, side: SideInputs, spec: AttentionSpec, tangents: Tangents, sequence: int | None
) -> tuple[Tensor, Tensor]:
    batch, seq_q, heads, _ = q.shape
    seq_k, group = k.shape[1], heads // k.shape[2]
    scores_of_row = max(1, batch * heads * seq_k)
    rows_at_once = max(_FEWEST_ROWS, _SCORES_AT_ONCE // scores_of_row)
    outs, lses = [], []
    for first in range(0, max(seq_q, 1), rows_at_once):
        last = min(first + rows_at_once, seq_q)
        rows = torch.arange(first, last, device=q.device)
        first_key, keys = _keys_of(first, last, seq_q, seq_k, spec)
        part = Part(rows, None, group, first_key, keys, seq_q, seq_k, sequence)
        dout, dlse = _rows(q, k, v, part, side, spec, tangents)
        outs.append(dout.transpose(1, 2))
        lses.append(dlse)
    return torch.cat(outs, dim=1).to(q.dtype), torch.cat(lses, dim=2)


def _keys_of(first: int, last: int, seq_q: int, seq_k: int, spec: AttentionSpec) -> tuple[int, int]:
    """The first of the keys that the band shows any row from `first` to `last - 1`, and how many they are."""
    shift = 0 if spec.top_left else seq_k - seq_q
    begin = 0 if spec.window_left is None else min(max(0, first + shift - spec.window_left), seq_k)
    end = seq_k if spec.window_right is None else min(seq_k, last + shift + spec.window_right)
    return begin, max(0, end - begin)


def _rows(
    q: Tensor, k: Tensor, v: Tensor, part: Part, side: SideInputs, spec: AttentionSpec, tangents: Tangents
) -> tuple[Tensor, Tensor]:
    """Tangents of some rows: out `[B, H, R, Dv]` and lse `[B, H, R]`."""
    batch, _, heads, _ = q.shape
    q_rows, keys = row_weights.load_rows(q, part), row_weights.load_keys(k, part, heads, side)
    product = row_weights.products(q_rows, keys, part)
    scores, shown, changes = row_weights.scores(product, part, side, spec)
    weights = row_weights.softmax(scores, shown, part, side)

    dscores = torch.zeros_like(scores)
    if tangents.q is not None:
        dscores = dscores + row_weights.products(row_weights.load_rows(tangents.q, part), keys, part)
    if tangents.k is not None:
        dkeys = row_weights.load_keys(tangents.k, part, heads, side)
        dscores = dscores + row_weights.products(q_rows, dkeys, part)
    dscores = dscores * spec.scale
    if changes.cap is not None:
        dscores = dscores * changes.cap
    if changes.inputs is not None:
        dscores = _through_function(dscores, changes.inputs, side, spec, tangents.captured)
    if tangents.bias is not None:
        dscores = dscores + row_weights.part_of(tangents.bias, part).to(scores.dtype)
    if tangents.alibi_slopes is not None:
        dslopes = row_weights.by_head(tangents.alibi_slopes, part)
        dscores = dscores - dslopes * row_weights.distance(part, spec, scores.dtype)
    dscores = dscores.masked_fill(~shown, 0)

    dlse = (weights.keys * dscores).sum(dim=-1, keepdim=True)
    if tangents.sinks is not None and weights.sink is not None:
        dlse = dlse + weights.sink * row_weights.by_head(tangents.sinks, part)
    kept = row_weights.kept(part, batch, heads, side, spec)

    def dropped(weights: Tensor) -> Tensor:
        return weights if kept is None else weights * kept / (1 - spec.dropout_p)

    values = row_weights.load_keys(v, part, heads, side)
    dout = row_weights.weighted(dropped(weights.keys * (dscores - dlse)), values, part)
    if tangents.v is not None:
        dvalues = row_weights.load_keys(tangents.v, part, heads, side)
        dout = dout + row_weights.weighted(dropped(weights.keys), dvalues, part)
    return dout, dlse.squeeze(-1)


def _through_function(
    dscores: Tensor,
    inputs: dict[str, Tensor],
    side: SideInputs,
    spec: AttentionSpec,
    dcaptured: Sequence[Tensor | None],
) -> Tensor:
    """The tangents behind the score function, from those in front of it."""
    assert spec.score_program is not None
    gradient = derivative(spec.score_program, dscores.dtype)
    inputs = {**inputs, UPSTREAM: torch.ones_like(dscores)}
    values = run(gradient.program, inputs, lambda _, step, at: read(side.captured[step.arguments[0]], at, 4)[0])
    total = torch.zeros_like(dscores) if gradient.score is None else dscores * values[gradient.score]
    for captured, indices, name in gradient.loads:
        tangent = dcaptured[captured] if dcaptured else None
        if tangent is not None:
            total = total + values[name] * read(tangent, [values[index] for index in indices], 4)[0]
    return total


def _packed(
    q: Tensor, k: Tensor, v: Tensor, side: SideInputs, spec: AttentionSpec, tangents: Tangents
) -> tuple[Tensor, Tensor]:
    """Each sequence as a batch of one; this reads `cu_seqlens` on the host."""
    assert side.cu_seqlens_q is not None and side.cu_seqlens_k is not None
    starts_q, starts_k = side.cu_seqlens_q.tolist(), side.cu_seqlens_k.tolist()
    outs, lses = [], []
    for sequence in range(len(starts_q) - 1):
        rows = slice(starts_q[sequence], starts_q[sequence + 1])
        keys = slice(starts_k[sequence], starts_k[sequence + 1])
        one = side._replace(
            cu_seqlens_q=None,
            cu_seqlens_k=None,
            key_lengths=None if side.key_lengths is None else side.key_lengths[sequence : sequence + 1],
            alibi_slopes=_of_sequence(side.alibi_slopes, sequence),
        )
        moved: dict[str, Any] = {
            name: None if tangent is None else tangent[None, where]
            for name, tangent, where in (("q", tangents.q, rows), ("k", tangents.k, keys), ("v", tangents.v, keys))
        }
        own = tangents._replace(**moved, alibi_slopes=_of_sequence(tangents.alibi_slopes, sequence))
        dout, dlse = _dense(q[None, rows], k[None, keys], v[None, keys], one, spec, own, sequence)
        outs.append(dout[0])
        lses.append(dlse[0])
    rest = q.shape[0] - starts_q[-1]  # rows past the last sequence
    outs.append(q.new_zeros(rest, q.shape[1], v.shape[-1]))
    lses.append(q.new_zeros(q.shape[1], rest, dtype=row_weights.statistics_dtype(q.dtype)))
    return torch.cat(outs, dim=0), torch.cat(lses, dim=1)


def _of_sequence(slopes: Tensor | None, sequence: int) -> Tensor | None:
    return slopes[sequence] if slopes is not None and slopes.dim() == 2 else slopes
