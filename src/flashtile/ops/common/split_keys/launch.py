"""Host side of attention with split keys: outputs, parts and launches."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from flashtile._backends.launch import pointers
from flashtile.ops.common.split_keys.plan import SplitPlan


def attend(
    plan: SplitPlan,
    tensors: tuple[Tensor, Tensor, Tensor],
    others: Sequence[Tensor | None],
    length: int,
) -> tuple[Tensor, Tensor]:
    """Attends to the splits, and puts their parts together where there are several.

    Args:
        tensors: q, k and v.
        others: those of `rows.Sequences`, slopes, sinks, and the factors `[outer, rows, heads_kv]` of k and v of 8
            bits; in this order those that there are.
        length: of all sequences, where no tensor has them.

    Returns:
        out `[batch, seq_q, heads_q, head_dim_v]` and lse `[batch, heads_q, seq_q]`; packed `[total_q, heads_q,
        head_dim_v]` and `[heads_q, total_q]`.
    """
    out, lse = written = plan.attend.allocate()
    plan.attend.launch(*pointers((*tensors, *written, *others)), length)
    if plan.combine is not None:
        out, lse = plan.combine.allocate()
        plan.combine.launch(*pointers((*written, out, lse)))
    return out, lse
