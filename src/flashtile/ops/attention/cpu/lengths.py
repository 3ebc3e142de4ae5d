"""Key lengths as a mask: for batches of short sequences, each of which would be computed alone."""

from __future__ import annotations

import torch
from torch import Tensor

from flashtile.ops.attention.spec import SideInputs

#: How many scores take as long as what a sequence of another length costs the host.
_SCORES_OF_A_SEQUENCE = 2**16
#: How many scores of a key take as long as reading it.
_SCORES_OF_READING = 32


#: Largest hidden number that is multiplied by a weight of 0. Its products with queries and gradients are finite.
_LARGEST_HIDDEN = 2.0**16


def lengths_as_mask(q: Tensor, k: Tensor, v: Tensor, side: SideInputs) -> tuple[Tensor, Tensor, SideInputs]:
    """k, v and side inputs of a call `[B, S, H, D]` with a mask in place of its key lengths; as given if that does not
    pay. Hidden keys and values that could overflow, or are NaN, become 0 in copies, so the same path computes them."""
    lengths = side.key_lengths
    if lengths is None or side.packed or (side.mask is not None and side.mask.shape[2] > 1):
        return k, v, side
    others = int((lengths[1:] != lengths[:-1]).sum())
    hidden = int((k.shape[1] - lengths.clamp(max=k.shape[1])).sum())
    cost = hidden * q.shape[2] * (q.shape[1] + _SCORES_OF_READING)
    if not others or cost > others * _SCORES_OF_A_SEQUENCE:
        return k, v, side
    shown = torch.arange(k.shape[1], device="cpu") < lengths[:, None]
    k, v = _without_large(k, ~shown), _without_large(v, ~shown)
    mask = shown[:, None, None]
    return k, v, side._replace(key_lengths=None, mask=mask if side.mask is None else side.mask & mask)


def _without_large(tensor: Tensor, hidden: Tensor) -> Tensor:
    """Keys or values `[B, S, H, D]`; a copy with zeros in hidden rows `[B, S]` if one of their numbers is large."""
    rows = tensor[hidden]
    if not rows.numel() or rows.abs().amax() <= _LARGEST_HIDDEN:
        return tensor
    return tensor.masked_fill(hidden[:, :, None, None], 0)
