"""Host side of attention with split keys: outputs, parts and launches."""

from __future__ import annotations

from torch import Tensor

from flashtile._backends.launch import pointers
from flashtile.ops.common.split_keys.plan import SplitPlan


def attend(
    plan: SplitPlan,
    tensors: tuple[Tensor, Tensor, Tensor],
    indices: tuple[Tensor | None, ...],
    slopes: Tensor | None,
    sinks: Tensor | None,
    length: int,
    descales: tuple[Tensor | None, Tensor | None] = (None, None),
) -> tuple[Tensor, Tensor]:
    """Attends to the splits, and puts their parts together where there are several.

    Args:
        tensors: q, k and v.
        indices: those of `rows.Sequences`, the first ones.
        length: of all sequences, where no tensor has them.
        descales: factors of k and v of 8 bits, `[outer, rows, heads_kv]`.

    Returns:
        out `[batch, seq_q, heads_q, head_dim_v]` and lse `[batch, heads_q, seq_q]`; packed `[total_q, heads_q,
        head_dim_v]` and `[heads_q, total_q]`.
    """
    out, lse = written = plan.attend.allocate()
    plan.attend.launch(*pointers((*tensors, *written, *indices, slopes, sinks, *descales)), length)
    if plan.combine is not None:
        out, lse = plan.combine.allocate()
        plan.combine.launch(*pointers((*written, out, lse)))
    return out, lse
