"""xentropy_cuda_lib: cross-entropy of rows and its gradient apart, by PyTorch operations."""

from __future__ import annotations

import torch
from torch import Tensor

from flashtile.compat.shared.arguments import refuse
from flashtile.compat.shared.cross_entropy import cross_entropy_of_lse

#: No label is ignored here: the loss around it does that.
_NO_LABEL = -(1 << 62)


@torch.no_grad()
def forward(logits: Tensor, labels: Tensor, smoothing: float, total_classes: int = -1) -> tuple[Tensor, Tensor]:
    """Losses and log-sum-exp of each row of logits `[rows, classes]`, float32."""
    _check_classes(logits, total_classes)
    lse = logits.to(torch.promote_types(logits.dtype, torch.float32)).logsumexp(1)
    losses, _ = cross_entropy_of_lse(logits, labels, lse, smoothing, 1.0, 0.0, _NO_LABEL, False)
    return losses, lse


def backward(
    grad_loss: Tensor,
    logits: Tensor,
    max_log_sum_exp: Tensor,
    labels: Tensor,
    smoothing: float,
    inplace: bool,
    total_classes: int = -1,
) -> Tensor:
    """The gradient of the logits, with inplace in their memory."""
    _check_classes(logits, total_classes)
    with torch.enable_grad():
        leaf = logits.detach().requires_grad_()
        losses, _ = cross_entropy_of_lse(leaf, labels, max_log_sum_exp, smoothing, 1.0, 0.0, _NO_LABEL, bool(inplace))
        (grad,) = torch.autograd.grad(losses, leaf, grad_loss.to(losses.dtype))
    return grad


def _check_classes(logits: Tensor, total_classes: int) -> None:
    if total_classes not in (-1, logits.shape[1]):
        refuse(
            "total_classes", f"-1 or {logits.shape[1]}, the columns of logits", total_classes,
            "flashtile.cross_entropy takes a process_group",
        )  # fmt: skip
