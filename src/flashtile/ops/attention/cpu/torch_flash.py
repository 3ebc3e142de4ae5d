"""Calls that are `served_by_torch`: rectangles of scores by PyTorch's own CPU flash attention, put together.

A result that cannot be told from a wrong one is none: the caller computes the call by tiles then. Letters as in
`tiles`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from flashtile.ops.attention.cpu import tiles
from flashtile.ops.attention.cpu.scores import SideGradients
from flashtile.ops.attention.cpu.torch_parts import (
    Statistics,
    attend,
    attend_split,
    gradients,
    merged,
    row_parts,
    splitting_pays,
    with_logits,
)
from flashtile.ops.attention.spec import AttentionSpec, Gradients, SideInputs, Wanted


def forward_unmasked(q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Tensor] | None:
    """(out, lse) where every row sees every key; None as in `forward`."""
    found = attend_split(q, k, v, scale) if splitting_pays(q, k) else attend(q, k, v, False, scale)
    return None if found is None else (found.out.contiguous(), found.lse.contiguous())


def forward(q: Tensor, k: Tensor, v: Tensor, side: SideInputs, spec: AttentionSpec) -> tuple[Tensor, Tensor] | None:
    """(out, lse) of a call that is `served_by_torch`; None where PyTorch's result cannot be told from a wrong one."""
    causal = _one_rectangle(side, spec, q.shape[-3], k.shape[-3])
    if causal is not None:
        if not causal:
            return forward_unmasked(q, k, v, spec.scale)
        whole = attend(q, k, v, True, spec.scale)
        return None if whole is None else (whole.out.contiguous(), whole.lse.contiguous())
    if side.packed:
        q, k, v = q[None], k[None], v[None]
    total: Statistics | None = None
    for parts in row_parts(q, k, side, spec):
        found: Statistics | None = None
        for part in parts:
            keys = k[part.keys_index], v[part.keys_index]
            more = attend(q[part.queries_index], *keys, part.causal, spec.scale, part.table)
            found = more if found is None or more is None else merged(found, more)
            if found is None or (found is not more and found.lse.isnan().any()):
                return None
        if found is not None and parts[0].raised is not None:
            found = Statistics(found.out, found.lse - parts[0].raised)
        if found is not None and found.out.shape == q.shape:
            total = Statistics(found.out.contiguous(), found.lse.contiguous())
        elif found is not None:
            total = total or _empty_statistics(q)
            total.out[parts[0].queries_index] = found.out
            total.lse[parts[0].statistics_index] = found.lse
    total = total or _empty_statistics(q)
    logits = side.row_logits
    if logits is not None:
        if not (logits < float("inf")).all():
            return None
        for segment in tiles.segments(q, k, side, spec):  # the rows that belong to one
            rows, places = (segment.batches, segment.rows), (segment.batches, slice(None), segment.rows)
            total.out[rows], total.lse[places] = with_logits(Statistics(total.out[rows], total.lse[places]), logits)
    return (total.out[0], total.lse[0]) if side.packed else total


def _empty_statistics(q: Tensor) -> Statistics:
    """The result where no row belongs to a segment, or sees a key."""
    lse = torch.full(
        (q.shape[0], q.shape[2], q.shape[1]), float("-inf"), dtype=tiles.compute_dtype(q.dtype), device="cpu"
    )
    return Statistics(torch.zeros(q.shape, dtype=q.dtype, device="cpu"), lse)


def _one_rectangle(side: SideInputs, spec: AttentionSpec, seq_q: int, seq_k: int) -> bool | None:
    """Whether a call is one causal rectangle (True), one in which every row sees every key (False), or neither (None).
    The commonest calls are one: this saves them the work of finding out."""
    if side.packed or side.key_lengths is not None or side.changes_scores:
        return None
    _, left, right, top_left, *_ = spec
    first, last = (0, seq_q - 1) if top_left else (seq_k - seq_q, seq_k - 1)  # the keys on the diagonal
    if left is not None and left < last:
        return None
    if right is None or first + right >= seq_k - 1:
        return False
    return True if first + right == 0 else None


def backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    side: SideInputs,
    spec: AttentionSpec,
    wanted: Wanted,
) -> Gradients | None:
    """The gradients of a call that is `served_by_torch`, without a gradient of lse; None as in `forward`."""
    causal = _one_rectangle(side, spec, q.shape[-3], k.shape[-3])
    if causal is not None:
        dq, dk, dv = (t.contiguous() for t in gradients(dout, q, k, v, out, lse, causal, scale=spec.scale))
        return Gradients(dq, dk, dv)
    if side.packed:
        dout, q, k, v, out, lse = (t[None] for t in (dout, q, k, v, out, lse))
    hides = side.changes_scores or spec.window_left is not None
    blind = lse.isneginf()
    if hides and blind.any():
        # Whatever comes from above, and even if it is NaN, nothing may pass through such a row.
        blind_rows = blind.transpose(1, 2).unsqueeze(-1)
        q, dout, lse = q.masked_fill(blind_rows, 0), dout.masked_fill(blind_rows, 0), lse.masked_fill(blind, 0)
    sums = _summed(dout, q, k, v, out, lse, side, spec=spec)
    dq, dk, dv = (t.to(of.dtype) for t, of in zip(sums, (q, k, v)))
    if hides and not tiles.are_finite(dq, dk, dv):
        return None  # a hidden key may have been NaN
    of_side = SideGradients(side, wanted, lse.dtype)
    of_side.add_call(out, dout, lse, blind, side)
    if side.packed:
        dq, dk, dv = dq[0], dk[0], dv[0]
    return Gradients(dq, dk, dv, *of_side.finish(side))


def _summed(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, side: SideInputs, spec: AttentionSpec
) -> tuple[Tensor, ...]:
    """(dq, dk, dv), those of the keys in the compute dtype where rectangles may share them."""
    sums: tuple[Tensor, ...] | None = None
    for parts in row_parts(q, k, side, spec):
        for part in parts:
            rows, keys = part.queries_index, part.keys_index
            of_rows = lse[part.statistics_index]
            of_rows = of_rows if part.raised is None else of_rows + part.raised
            of_part = gradients(
                dout[rows], q[rows], k[keys], v[keys], out[rows], of_rows, part.causal,
                scale=spec.scale, table=part.table,
            )  # fmt: skip
            if of_part[0].shape == q.shape and of_part[1].shape == k.shape:
                return tuple(grad.contiguous() for grad in of_part)
            sums = sums or _zeros(q, k, v)
            for total, index, share in zip(sums, (rows, keys, keys), of_part):
                total[index] += share
    return sums or _zeros(q, k, v)


def _zeros(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
    dk, dv = (torch.zeros(t.shape, dtype=tiles.compute_dtype(t.dtype), device="cpu") for t in (k, v))
    return torch.zeros(q.shape, dtype=q.dtype, device="cpu"), dk, dv
