"""Keys of a dense call that its band hides from every query: a call is computed without them.

Their contents, NaN included, therefore have no effect on any backend, and no kernel loads them. A call over the other
keys is a part of the call: the sides of the window are shifted, and `Origin` says where its columns lie.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from flashtile.ops.attention.spec import AttentionSpec, Gradients, Origin, SideInputs


class SeenCall(NamedTuple):
    """A call over the keys that some query sees, `[first, last)` of those given. Fields as in `attention`."""

    k: Tensor
    v: Tensor
    side: SideInputs
    spec: AttentionSpec
    first: int
    last: int


def visible_keys(seq_q: int, seq_k: int, spec: AttentionSpec) -> tuple[int, int]:
    """First key that the band shows some query, and one past the last."""
    diagonal = 0 if spec.top_left else seq_k - seq_q
    first, last = 0, seq_k
    if spec.window_left is not None:
        first = min(max(first, diagonal - spec.window_left), seq_k)
    if spec.window_right is not None:
        last = min(last, diagonal + seq_q + spec.window_right)
    return first, max(first, last)


def seen_call(q: Tensor, k: Tensor, v: Tensor, side: SideInputs, spec: AttentionSpec) -> SeenCall | None:
    """The call over the keys that some query sees; None where these are all, or where it would be another call.

    A block mask has the length of all keys. Dropout bits, score functions and the tiles of the batch-invariant mode
    depend on the number of a key, so such calls leave out only keys at the end.
    """
    if not spec.banded or side.packed or spec.block_shape is not None:
        return None
    seq_q, seq_k = q.shape[1], k.shape[1]
    first, last = visible_keys(seq_q, seq_k, spec)
    if spec.dropout_p or spec.score_program is not None or spec.batch_invariant:
        first = 0
    if not seq_q or last - first == seq_k:
        return None
    # The key of query 0's diagonal, counted from `first`, less where the shorter call would have it.
    shift = -first if spec.top_left else seq_k - last
    changes: dict[str, Any] = {
        "window_left": None if spec.window_left is None else spec.window_left - shift,
        "window_right": None if spec.window_right is None else spec.window_right + shift,
    }
    if last < seq_k and side.by_distance:
        origin = Origin(0, 0, 0, 0, q.shape[2]) if spec.origin is None else spec.origin
        changes["origin"] = origin._replace(diagonal=origin.diagonal + seq_k - last)
    lengths = side.key_lengths
    side = side._replace(
        max_seqlen_k=last - first,
        key_lengths=lengths if lengths is None or not first else (lengths - first).clamp(min=0),
        bias=_columns(side.bias, first, last),
        mask=_columns(side.mask, first, last),
    )
    return SeenCall(k[:, first:last], v[:, first:last], side, spec._replace(**changes), first, last)


def _columns(table: Tensor | None, first: int, last: int) -> Tensor | None:
    return table if table is None or table.shape[3] == 1 else table[..., first:last]


def unseen_gradients(found: Gradients, k: Tensor, v: Tensor, bias: Tensor | None, call: SeenCall) -> Gradients:
    """The gradients of a call from those of its `seen_call`. `k`, `v`, `bias`: as they were given."""
    dbias = found.bias
    if dbias is not None and bias is not None and bias.shape[3] > 1:
        dbias = _with_zeros(dbias, bias, 3, call)
    return found._replace(k=_with_zeros(found.k, k, 1, call), v=_with_zeros(found.v, v, 1, call), bias=dbias)


def _with_zeros(gradient: Tensor, of: Tensor, dim: int, call: SeenCall) -> Tensor:
    """A gradient in the shape of the whole tensor, 0 for keys that no query sees."""
    whole = torch.zeros(of.shape, dtype=gradient.dtype, device=gradient.device)
    whole.narrow(dim, call.first, call.last - call.first).copy_(gradient)
    return whole
