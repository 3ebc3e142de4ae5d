"""Dropout, addition and norms of blocks that take any class of either: fused where flashtile has them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from flashtile import modules
from flashtile.compat.norms import norm_fn
from flashtile.modules.layers import computes_only, is_hooked

_NORMS = (nn.LayerNorm, nn.RMSNorm, modules.LayerNorm, modules.RMSNorm)


class DropPath(nn.Module):
    """Drops whole batch entries of a branch, in training.

    Args:
        p: the probability; the others are scaled by 1/(1 - p).
    """

    def __init__(self, p: float) -> None:
        super().__init__()
        if not 0.0 <= p <= 1.0:
            raise ValueError(f"drop_path: expected a probability from 0 to 1, got {p}")
        self.p = p

    def scale(self, hidden: Tensor) -> Tensor | None:
        """A factor for each row of `[batch, ..., dim]`, `[batch, ...]`; None where nothing is dropped."""
        if not self.p or not self.training:
            return None
        kept = torch.empty(hidden.shape[0], *(1,) * (hidden.dim() - 2), device=hidden.device).bernoulli_(1 - self.p)
        factor = kept / (1 - self.p) if self.p < 1 else kept
        return factor.to(hidden.dtype).expand(hidden.shape[:-1])

    def forward(self, hidden: Tensor) -> Tensor:
        """`[batch, ..., dim]` without those that are dropped."""
        scale = self.scale(hidden)
        return hidden if scale is None else hidden * scale.unsqueeze(-1)

    def extra_repr(self) -> str:
        return f"p={self.p}"


def mark(norms: Sequence[Any], sequence_parallel: bool, shared: bool) -> None:
    """Sets attributes by which training loops find parameters whose gradients they add up."""
    for parameter in (parameter for norm in norms for parameter in norm.parameters()):
        if sequence_parallel:
            parameter._sequence_parallel = True
        if shared:
            parameter._shared_params = True


def norm_dtype(norm: Any, hidden: Tensor, fused: bool) -> torch.dtype:
    """The dtype of a norm's result: that of its input where it is fused with what comes before, else of its weight."""
    weight = getattr(norm, "weight", None)
    return hidden.dtype if fused or weight is None else weight.dtype


def add_norm(
    norms: Sequence[Any],
    branches: Sequence[Tensor],
    residual: Tensor | None,
    dropouts: Sequence[Any],
    drop_path: DropPath | None,
    residual_in_fp32: bool,
    dtype: torch.dtype,
) -> tuple[list[Tensor], Tensor]:
    """The norms of `Σ drop_path(dropout(branch)) + residual`, in a dtype, and the sum.

    Args:
        norms: one or two modules.
        branches: one or two, `[batch, ..., dim]`.
        residual: of their shape, or None for 0.
        dropouts: one for each branch.
        drop_path: of a single branch.
        residual_in_fp32: the sum is float32 where there is no residual to say so.
        dtype: of the norms' results.
    """
    branches, dropout_p = _dropped(branches, dropouts)
    scale = None if drop_path is None else drop_path.scale(branches[0])
    if not _fusible(norms):
        return _one_by_one(norms, branches, residual, dropouts, dropout_p, scale, residual_in_fp32, dtype)
    first, last = norms[0], norms[-1]
    both = len(norms) == 2
    results = norm_fn(
        _is_rms(first), branches[0], first.weight, getattr(first, "bias", None), residual,
        branches[1] if len(branches) == 2 else None, last.weight if both else None,
        getattr(last, "bias", None) if both else None, _eps(first, branches[0]), dropout_p, scale, True,
        residual_in_fp32, False, False, dtype, None, None,
    )  # fmt: skip
    assert isinstance(results, tuple)
    *normed, total = results
    return [tensor for tensor in normed if tensor is not None], total  # type: ignore[return-value]


def _dropped(branches: Sequence[Tensor], dropouts: Sequence[Any]) -> tuple[list[Tensor], float]:
    """Branches, and the probability by which elements of each are still to be dropped.

    PyTorch's dropout of one probability is left to the fused norm; another one is applied here.
    """
    if all(computes_only(dropout, nn.Dropout) for dropout in dropouts):
        active = {dropout.p if dropout.training else 0.0 for dropout in dropouts}
        if len(active) == 1 and max(active) < 1:
            return list(branches), active.pop()
    return [dropout(branch) for branch, dropout in zip(branches, dropouts)], 0.0


def _fusible(norms: Sequence[Any]) -> bool:
    """Whether flashtile has these norms: layer norms, or RMS norms, of the last dimension with one epsilon."""
    known = all(computes_only(norm, *_NORMS) or _is_plain(norm) for norm in norms)
    return known and len({(_is_rms(norm), norm.eps) for norm in norms}) == 1 and all(
        norm.weight is not None and norm.weight.dim() == 1 for norm in norms
    )  # fmt: skip


def _is_rms(norm: Any) -> bool:
    return isinstance(norm, (nn.RMSNorm, modules.RMSNorm)) or getattr(norm, "plain_rms_norm", False)


def _is_plain(norm: Any) -> bool:
    # The classes of flash_attn's names tell it themselves: there is one of each for each name that they were loaded by.
    return getattr(norm, "plain_rms_norm", False) and "forward" not in vars(norm) and not is_hooked(norm)


def _eps(norm: Any, hidden: Tensor) -> float:
    return torch.finfo(torch.promote_types(hidden.dtype, torch.float32)).eps if norm.eps is None else norm.eps


def _one_by_one(
    norms: Sequence[Any],
    branches: Sequence[Tensor],
    residual: Tensor | None,
    dropouts: Sequence[Any],
    dropout_p: float,
    scale: Tensor | None,
    residual_in_fp32: bool,
    dtype: torch.dtype,
) -> tuple[list[Tensor], Tensor]:
    """The same with norms of any other class, by PyTorch operations."""
    total = residual
    for branch, dropout in zip(branches, dropouts):
        branch = dropout(branch) if dropout_p else branch
        branch = branch if scale is None else branch * scale.unsqueeze(-1)
        total = branch if total is None else branch + total
    assert total is not None
    normed = [norm(total.to(dtype)) for norm in norms]
    return normed, total.float() if residual_in_fp32 and total.dtype is not torch.float64 else total
