"""flash_attn.ops.triton.cross_entropy over `flashtile.cross_entropy`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

import flashtile
from flashtile.compat.cross_entropy import cross_entropy_of_lse

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


def cross_entropy_loss(
    logits: Tensor,
    labels: Tensor,
    precomputed_lse: Tensor | None = None,
    label_smoothing: float = 0.0,
    logit_scale: float = 1.0,
    lse_square_scale: float = 0.0,
    ignore_index: int = -100,
    inplace_backward: bool = False,
    process_group: ProcessGroup | None = None,
) -> tuple[Tensor, Tensor]:
    """Cross-entropy of each row, and the part of lse² in it.

    Args:
        logits: `[rows, classes]`, of all classes or with process_group of a part.
        labels: integers `[rows]`.
        precomputed_lse: `[rows]`, the log-sum-exp of `logit_scale · logits`, where the caller has it. Not with
            process_group. The computation is then one of PyTorch operations.
        label_smoothing, logit_scale, lse_square_scale, ignore_index, inplace_backward, process_group: as
            `flashtile.cross_entropy`.

    Returns:
        losses and z_losses, float32 `[rows]`; the former contain the latter. Only the former are differentiable.
    """
    if precomputed_lse is not None:
        if process_group is not None:
            raise ValueError(
                "precomputed_lse: expected None with process_group, got a tensor; leave it out, each process then "
                "makes its own part"
            )
        return cross_entropy_of_lse(
            logits, labels, precomputed_lse, label_smoothing, logit_scale, lse_square_scale, ignore_index,
            inplace_backward,
        )  # fmt: skip
    losses = flashtile.cross_entropy(
        logits,
        labels,
        label_smoothing=label_smoothing,
        logit_scale=logit_scale,
        lse_square_scale=lse_square_scale,
        ignore_index=ignore_index,
        reduction="none",
        inplace_backward=inplace_backward,
        process_group=process_group,
        return_z_loss=True,
    )
    assert isinstance(losses, tuple)
    return losses
