"""flash_attn.losses.cross_entropy and ops.triton.cross_entropy over `flashtile.cross_entropy`.

With a log-sum-exp that the caller has already, `precomputed_lse`, the loss is one of PyTorch operations.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import flashtile
from flashtile import modules
from flashtile.compat.adapter import refuse
from flashtile.compat.signatures import VERSION_2

#: Elements of logits that the backward makes wide at a time.
_CHUNK = 1 << 24


def cross_entropy_loss(logits: Tensor, labels: Tensor, precomputed_lse: Tensor | None, **given: Any) -> Any:
    """Cross-entropy of each row, and the part of lse² in it.

    logits are `[rows, classes]`, labels integers `[rows]`, and precomputed_lse `[rows]` is the log-sum-exp of
    `logit_scale · logits`, where the caller has it, not with process_group. The others are arguments of
    `flashtile.cross_entropy`.

    Returns:
        losses and z_losses, float32 `[rows]`; the former contain the latter. Only the former are differentiable.
    """
    if precomputed_lse is None:
        return flashtile.cross_entropy(logits, labels, reduction="none", return_z_loss=True, **given)
    if given.pop("process_group") is not None:
        refuse("precomputed_lse", "None with process_group", precomputed_lse, "each process makes its own part then")
    return cross_entropy_of_lse(logits, labels, precomputed_lse, **given)


class CrossEntropyLoss(modules.CrossEntropyLoss):
    """`flashtile.modules.CrossEntropyLoss` with flash_attn's order of arguments, and `precomputed_lse` in a call."""

    def __init__(self, reduction: str, **given: Any) -> None:
        if reduction not in ("mean", "sum", "none"):
            raise ValueError(f"reduction: expected 'mean', 'sum' or 'none', got {reduction!r}")
        super().__init__(reduction=reduction, **given)

    def forward(self, input: Tensor, target: Tensor, precomputed_lse: Tensor | None = None) -> Any:
        """The loss of `input` `[rows, classes]` against `target` `[rows]`, or (loss, z_loss)."""
        if precomputed_lse is None:
            return super().forward(input, target)
        options = self.options()
        del options["class_weights"], options["softcap"]  # flash_attn has none
        reduction, return_z_loss = options.pop("reduction"), options.pop("return_z_loss")
        results = cross_entropy_loss(input, target, precomputed_lse, **options)
        if reduction != "none":
            counted = (target != options["ignore_index"]).sum() if reduction == "mean" else 1
            results = [each.sum() / counted for each in results]
        return tuple(results) if return_z_loss else results[0]


def cross_entropy_of_lse(
    logits: Tensor, labels: Tensor, lse: Tensor, *, label_smoothing: float, logit_scale: float = 1.0,
    lse_square_scale: float = 0.0, ignore_index: int, inplace_backward: bool = False,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """`cross_entropy_loss` from a log-sum-exp: losses and their part of lse², float32 (float64 for float64)."""
    if logits.dim() != 2 or labels.shape != logits.shape[:1] or lse.shape != labels.shape:
        raise ValueError(
            f"precomputed_lse: expected logits [rows, classes], labels and lse [rows], got {list(logits.shape)}, "
            f"{list(labels.shape)} and {list(lse.shape)}; flatten them"
        )
    scalars = (label_smoothing, logit_scale, lse_square_scale, ignore_index, inplace_backward)
    return _CrossEntropy.apply(logits, labels, lse.detach(), *scalars)


class _CrossEntropy(torch.autograd.Function):
    """The loss, and the gradient from lse: `scale · (softmax · (1 + 2 · z · lse) - target)`."""

    @staticmethod
    def forward(ctx, logits, labels, lse, smoothing, scale, lse_square_scale, ignore_index, inplace):
        wide = torch.promote_types(logits.dtype, torch.float32)
        counts = labels != ignore_index
        label = labels.masked_fill(~counts, 0).long()
        lse = lse.to(wide)
        of_label = logits.gather(1, label[:, None]).squeeze(1).to(wide) * scale
        loss = lse - (1 - smoothing) * of_label
        if smoothing:
            loss = loss - smoothing * scale * logits.mean(1, dtype=wide)
        z_loss = (lse_square_scale * lse * lse).masked_fill(~counts, 0)  # a square may be infinite, and 0 · inf NaN
        ctx.save_for_backward(logits, label, counts, lse)
        ctx.scalars = smoothing, scale, lse_square_scale, inplace
        ctx.mark_non_differentiable(z_loss)
        return loss.masked_fill(~counts, 0) + z_loss, z_loss

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, dloss, _):
        logits, label, counts, lse = ctx.saved_tensors
        smoothing, scale, lse_square_scale, inplace = ctx.scalars
        grad = logits if inplace else torch.empty_like(logits)
        classes = logits.shape[1]
        rows = max(_CHUNK // max(classes, 1), 1)
        factor = (dloss.to(lse.dtype) * scale).masked_fill(~counts, 0)
        for first in range(0, logits.shape[0], rows):
            part = slice(first, first + rows)
            probs = (logits[part].to(lse.dtype) * scale - lse[part, None]).exp_()
            probs *= 1 + 2 * lse_square_scale * lse[part, None]
            probs -= smoothing / classes
            probs.scatter_add_(1, label[part, None], probs.new_full((probs.shape[0], 1), smoothing - 1))
            grad[part] = (probs * factor[part, None]).masked_fill_(~counts[part, None], 0)
        return grad, *(None,) * 7


VERSION_2.serve(globals())
