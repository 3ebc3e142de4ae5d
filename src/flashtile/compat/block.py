"""flash_attn.modules.block: blocks of a Transformer over the fused dropout, addition and norm of flashtile."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from flashtile import modules
from flashtile.compat import norms as flash_norms
from flashtile.compat.mha import MHA
from flashtile.compat.signatures import VERSION_2
from flashtile.modules.layers import computes_only

_RMS_NORMS = nn.RMSNorm, modules.RMSNorm, flash_norms.RMSNorm
Make = Callable[[int], nn.Module]


class DropPath(nn.Module):
    """Drops whole batch entries of a branch, in training, with a probability p; the others are scaled by 1/(1 - p)."""

    def __init__(self, p: float) -> None:
        super().__init__()
        if not 0.0 <= p <= 1.0:
            raise ValueError(f"drop_path: expected a probability from 0 to 1, got {p}")
        self.p = p

    def forward(self, hidden: Tensor) -> Tensor:
        """`[batch, ..., dim]` without those that are dropped."""
        if not self.p or not self.training:
            return hidden
        return hidden * F.dropout(hidden.new_ones(hidden.shape[0], *(1,) * (hidden.dim() - 1)), self.p)

    def extra_repr(self) -> str:
        return f"p={self.p}"


class _Block(nn.Module):
    """The mixer, the MLP, and what comes before the first of them."""

    mha: Any = MHA

    def _make(
        self, dim: int, mixer_cls: Make | None, mlp_cls: Make | None, norm_cls: Make,
        dropout_cls: Callable[[float], nn.Module], resid_dropout1: float, fused_dropout_add_ln: bool,
        residual_in_fp32: bool,
    ) -> None:  # fmt: skip
        self.fused_dropout_add_ln, self.residual_in_fp32 = fused_dropout_add_ln, residual_in_fp32
        self.mixer: Any = (mixer_cls or partial(self.mha, num_heads=dim // 64))(dim)
        self.dropout1, self.norm1 = dropout_cls(resid_dropout1), norm_cls(dim)
        self.mlp: Any = (mlp_cls or partial(modules.Mlp, hidden_features=4 * dim))(dim)

    def _mark(self, sequence_parallel: bool, mark_shared_params: bool) -> None:
        """Sets attributes of the norms' parameters by which training loops find those whose gradients they add up."""
        marks = {"_sequence_parallel": sequence_parallel, "_shared_params": mark_shared_params}
        for norm in (self.norm1, getattr(self, "norm2", self.norm1)):
            for parameter in norm.parameters():
                vars(parameter).update({name: True for name, wanted in marks.items() if wanted})

    def allocate_inference_cache(
        self, batch_size: int, max_seqlen: int, dtype: torch.dtype | None = None, **kwargs: Any
    ) -> Any:
        """The cache of the mixer."""
        return self.mixer.allocate_inference_cache(batch_size, max_seqlen, dtype=dtype, **kwargs)

    def _dtype(self, hidden: Tensor) -> torch.dtype:
        """The dtype of a norm's result: its input's if it is fused with what comes before, else its weight's."""
        weight = getattr(self.norm1, "weight", None)
        return hidden.dtype if self.fused_dropout_add_ln or weight is None else weight.dtype


class Block(_Block):
    """`flashtile.modules.Block` with what else flash_attn's has; arguments that are not listed here are those there.

    Args:
        mixer_cls: default `MHA` with heads of 64.
        mlp_cls: default `Mlp` with four times dim. `nn.Identity` for none, and no second norm.
        norm_cls: makes a norm of any class.
        dropout_cls: makes a dropout of its probability.
        drop_path1, drop_path2: probabilities that a branch is dropped for a whole batch entry, in training.
        fused_dropout_add_ln: the norm's result has the dtype of the hidden states, else that of its weight. Either is
            computed in one pass where the norm is a layer norm or RMS norm and the dropout is PyTorch's.
        sequence_parallel, mark_shared_params: the norms' parameters get the attribute `_sequence_parallel`,
            `_shared_params`.
    """

    def __init__(
        self, prenorm: bool, resid_dropout2: float, drop_path1: float, drop_path2: float, return_residual: bool,
        sequence_parallel: bool, mark_shared_params: bool, **given: Any,
    ) -> None:  # fmt: skip
        super().__init__()
        if given["residual_in_fp32"] and not prenorm:
            raise ValueError("residual_in_fp32: expected False with prenorm=False, got True; a norm ends its residual")
        self.prenorm, self.return_residual = prenorm, return_residual
        self._make(**given)
        self.drop_path1 = DropPath(drop_path1)
        if not isinstance(self.mlp, nn.Identity):
            self.dropout2, self.drop_path2 = given["dropout_cls"](resid_dropout2), DropPath(drop_path2)
            self.norm2 = given["norm_cls"](given["dim"])
        self._mark(sequence_parallel, mark_shared_params)

    def forward(
        self, hidden_states: Tensor, residual: Tensor | None, mixer_subset: Any, mixer_kwargs: dict[str, Any] | None
    ) -> Tensor | tuple[Tensor, Tensor]:
        """One block, as `flashtile.modules.Block.forward`; hidden_states and residual are `[batch, seq, dim]`, and
        mixer_subset is an index of tokens that go on, which the mixer must know."""
        kwargs = dict(mixer_kwargs or {})
        if mixer_subset is not None:
            kwargs["mixer_subset"] = mixer_subset
        has_mlp = not isinstance(self.mlp, nn.Identity)
        if self.prenorm:
            hidden, residual = self._add_norm(1, hidden_states, residual)
            hidden = self.mixer(hidden, **kwargs)
            residual = residual if mixer_subset is None else residual[:, mixer_subset]
            if has_mlp:
                hidden, residual = self._add_norm(2, hidden, residual)
                hidden = self.mlp(hidden)
            return hidden, residual
        if residual is not None:
            raise ValueError("residual: expected None with prenorm=False, got a tensor; hidden states are their own")
        out = self.mixer(hidden_states, **kwargs)
        out, hidden = out if self.return_residual else (out, hidden_states)
        hidden, _ = self._add_norm(1, out, hidden if mixer_subset is None else hidden[:, mixer_subset])
        if not has_mlp:
            return hidden
        out = self.mlp(hidden)
        out, hidden = out if self.return_residual else (out, hidden)
        return self._add_norm(2, out, hidden)[0]

    def _add_norm(self, number: int, hidden: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
        """`norm(drop_path(dropout(hidden)) + residual)`, and the sum."""
        norm, dropout, drop_path = (getattr(self, f"{name}{number}") for name in ("norm", "dropout", "drop_path"))
        dtype = self._dtype(hidden)
        normed, total = add_norm([norm], [hidden], residual, [dropout], drop_path, self.residual_in_fp32, dtype)
        return normed[0], total


class ParallelBlock(_Block):
    """A mixer and an MLP side by side, pre-norm; arguments as `Block`.

    Args:
        tied_norm: the MLP reads the mixer's norm; there is no norm2.
    """

    def __init__(
        self, resid_dropout2: float, tied_norm: bool, sequence_parallel: bool, mark_shared_params: bool, **given: Any
    ) -> None:
        super().__init__()
        self.tied_norm = tied_norm
        self._make(**given)
        self.dropout2 = given["dropout_cls"](resid_dropout2)
        if not tied_norm:
            self.norm2 = given["norm_cls"](given["dim"])
        self._mark(sequence_parallel, mark_shared_params)

    def forward(
        self, hidden_states1: Tensor, hidden_states2: Tensor | None, residual: Tensor | None,
        mixer_kwargs: dict[str, Any] | None,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        """One block, as `flashtile.modules.ParallelBlock.forward`: hidden states of mixer and MLP, and the residual,
        each `[batch, seq, dim]`, and the same three of the next block."""
        both = [self.norm1] if self.tied_norm else [self.norm1, self.norm2]
        branches, dropouts = [hidden_states1], [self.dropout1]
        if hidden_states2 is not None:
            branches, dropouts = [hidden_states1, hidden_states2], [self.dropout1, self.dropout2]
        dtype = self._dtype(hidden_states1)
        normed, residual = add_norm(both, branches, residual, dropouts, None, self.residual_in_fp32, dtype)
        return self.mixer(normed[0], **(mixer_kwargs or {})), self.mlp(normed[-1]), residual


def add_norm(
    norms: Sequence[Any], branches: Sequence[Tensor], residual: Tensor | None, dropouts: Sequence[Any],
    drop_path: DropPath | None, residual_in_fp32: bool, dtype: torch.dtype,
) -> tuple[list[Tensor], Tensor]:  # fmt: skip
    """One or two norms of `Σ drop_path(dropout(branch)) + residual`, in a dtype, and the sum: fused where flashtile has
    them. Each of the branches `[batch, ..., dim]` has a dropout; drop_path is for a single branch. With
    residual_in_fp32 the sum is float32 where there is no residual to say so."""
    first, last, fusible = norms[0], norms[-1], _fusible(norms)
    dropout_p = {dropout.p if dropout.training else 0.0 for dropout in dropouts if computes_only(dropout, nn.Dropout)}
    left = fusible and all(computes_only(dropout, nn.Dropout) for dropout in dropouts) and len(dropout_p) == 1
    if not left or max(dropout_p) == 1 or (drop_path is not None and drop_path.p and drop_path.training):
        # else one probability of PyTorch's dropout is left to the fused norm
        branches, dropout_p = [dropout(branch) for branch, dropout in zip(branches, dropouts)], {0.0}
        branches = branches if drop_path is None else [drop_path(branch) for branch in branches]
    if not fusible:
        total = branches[0] if residual is None else branches[0] + residual
        total = total + branches[1] if len(branches) == 2 else total
        in_fp32 = residual_in_fp32 and total.dtype is not torch.float64
        return [norm(total.to(dtype)) for norm in norms], total.float() if in_fp32 else total
    eps = torch.finfo(torch.promote_types(branches[0].dtype, torch.float32)).eps if first.eps is None else first.eps
    second = {} if len(norms) == 1 else {"weight1": last.weight, "bias1": getattr(last, "bias", None)}
    results: Any = flash_norms.layer_norm_fn(
        branches[0], first.weight, getattr(first, "bias", None), residual, branches[1] if len(branches) == 2 else None,
        **second, eps=eps, dropout_p=dropout_p.pop(), prenorm=True, residual_in_fp32=residual_in_fp32,
        is_rms_norm=isinstance(first, _RMS_NORMS), out_dtype=dtype,
    )  # fmt: skip
    return list(results[:-1]), results[-1]


def _fusible(norms: Sequence[Any]) -> bool:
    """Whether flashtile has these norms: layer norms, or RMS norms, whose weights and biases of the last dimension say
    all that they compute, with one epsilon."""
    for norm in norms:
        if isinstance(norm, flash_norms.TritonRMSNorm) and (norm.drop is not None or norm.zero_centered_weight):
            return False
        if not computes_only(norm, nn.LayerNorm, modules.LayerNorm, flash_norms.TritonRMSNorm, *_RMS_NORMS):
            return False
        if norm.weight is None or norm.weight.dim() != 1:
            return False
    return len({(isinstance(norm, _RMS_NORMS), norm.eps) for norm in norms}) == 1


VERSION_2.serve(globals())
