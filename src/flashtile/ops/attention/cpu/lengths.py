"""Key lengths as a mask: for batches of short sequences, each of which would be computed alone."""

from __future__ import annotations

import torch
from torch import Tensor

from flashtile.ops.attention.spec import SideInputs

#: How many scores take as long as what a sequence of another length costs the host.
_SCORES_OF_A_SEQUENCE = 2**16
#: How many scores of a key take as long as reading it.
_SCORES_OF_READING = 32


def lengths_as_mask(q: Tensor, k: Tensor, side: SideInputs) -> SideInputs | None:
    """The side inputs of a call `[B, S, H, D]` with a mask in place of its key lengths; None where that does not pay.

    A hidden key that holds NaN is multiplied by 0 then: results that are not finite must be computed by the lengths.
    """
    lengths = side.key_lengths
    if lengths is None or side.packed or (side.mask is not None and side.mask.shape[2] > 1):
        return None
    others = int((lengths[1:] != lengths[:-1]).sum())
    hidden = int((k.shape[1] - lengths.clamp(max=k.shape[1])).sum())
    cost = hidden * q.shape[2] * (q.shape[1] + _SCORES_OF_READING)
    if not others or cost > others * _SCORES_OF_A_SEQUENCE:
        return None
    shown = (torch.arange(k.shape[1], device="cpu") < lengths[:, None])[:, None, None]
    return side._replace(key_lengths=None, mask=shown if side.mask is None else side.mask & shown)
