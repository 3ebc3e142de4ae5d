"""Host side of attention with split keys: outputs, parts and launches."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from flashtile._backends.allocate import empty
from flashtile._backends.launch import pointer
from flashtile.ops.common.split_keys.plan import SplitPlan

#: No lengths, entries, left padding and table.
NO_INDICES = (pointer(None),) * 4


def attend(
    plan: SplitPlan,
    tensors: tuple[Tensor, Tensor, Tensor],
    indices: tuple[Any, ...],
    slopes: Tensor | None,
    sinks: Tensor | None,
    length: int,
    device: torch.device,
) -> tuple[Tensor, Tensor]:
    """Attends to the splits, and puts their parts together where there are several.

    Args:
        tensors: q, k and v.
        indices: pointers to lengths, entries, left padding and table.
        length: of all sequences, where no tensor has them.

    Returns:
        out `[batch, seq_q, heads_q, head_dim_v]` and lse `[batch, heads_q, seq_q]`.
    """
    out, lse = empty(*plan.out, device), empty(*plan.lse, device)
    before, after = tuple(map(pointer, tensors)), (*indices, pointer(slopes), pointer(sinks), length)
    if plan.combine is None:
        plan.attend.launch(*before, pointer(out), pointer(lse), *after)
        return out, lse
    parts, parts_lse = empty(*plan.parts, device), empty(*plan.parts_lse, device)
    plan.attend.launch(*before, pointer(parts), pointer(parts_lse), *after)
    plan.combine.launch(*map(pointer, (parts, parts_lse, out, lse)))
    return out, lse
