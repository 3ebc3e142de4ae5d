"""flash_attn.modules.block: blocks of a Transformer over the fused dropout, addition and norm of flashtile."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from flashtile.compat.add_norm import DropPath, add_norm, mark, norm_dtype

from .mha import MHA
from .mlp import Mlp

Make = Callable[[int], nn.Module]


def _default_mixer(dim: int) -> nn.Module:
    return MHA(dim, num_heads=dim // 64)


class Block(nn.Module):
    """A mixer and an MLP, each with dropout, residual addition and norm.

    Pre-norm blocks begin with dropout, addition and norm, and return hidden states and residual; post-norm blocks end
    with them.

    Args:
        dim: of the hidden states.
        mixer_cls: makes the mixer of dim; default `MHA` with heads of 64.
        mlp_cls: makes the MLP of dim; default `Mlp` with four times dim. `nn.Identity` for none, and no second norm.
        norm_cls: makes a norm of dim.
        dropout_cls: makes a dropout of its probability.
        prenorm: pre-norm, else post-norm.
        resid_dropout1, resid_dropout2: probabilities of the dropouts.
        drop_path1, drop_path2: probabilities that a branch is dropped for a whole batch entry, in training.
        fused_dropout_add_ln: the norm's result has the dtype of the hidden states, else that of its weight. Either is
            computed in one pass where the norm is a layer norm or RMS norm and the dropout is PyTorch's.
        return_residual: mixer and MLP return their input beside their output; post-norm only.
        residual_in_fp32: the residual is float32; pre-norm only.
        sequence_parallel, mark_shared_params: the norms' parameters get the attribute `_sequence_parallel`,
            `_shared_params`.
    """

    mixer_of = staticmethod(_default_mixer)

    def __init__(
        self,
        dim: int,
        mixer_cls: Make | None = None,
        mlp_cls: Make | None = None,
        norm_cls: Make = nn.LayerNorm,
        dropout_cls: Callable[[float], nn.Module] = nn.Dropout,
        prenorm: bool = True,
        resid_dropout1: float = 0.0,
        resid_dropout2: float = 0.0,
        drop_path1: float = 0.0,
        drop_path2: float = 0.0,
        fused_dropout_add_ln: bool = False,
        return_residual: bool = False,
        residual_in_fp32: bool = False,
        sequence_parallel: bool = False,
        mark_shared_params: bool = False,
    ) -> None:
        super().__init__()
        if residual_in_fp32 and not prenorm:
            raise ValueError("residual_in_fp32: expected False with prenorm=False, got True; a norm ends its residual")
        self.prenorm = prenorm
        self.fused_dropout_add_ln = fused_dropout_add_ln
        self.return_residual = return_residual
        self.residual_in_fp32 = residual_in_fp32
        self.mixer: Any = (mixer_cls or self.mixer_of)(dim)
        self.dropout1 = dropout_cls(resid_dropout1)
        self.drop_path1 = DropPath(drop_path1)
        self.norm1 = norm_cls(dim)
        self.mlp = _mlp(mlp_cls, dim)
        norms = [self.norm1]
        if not isinstance(self.mlp, nn.Identity):
            self.dropout2 = dropout_cls(resid_dropout2)
            self.drop_path2 = DropPath(drop_path2)
            self.norm2 = norm_cls(dim)
            norms.append(self.norm2)
        mark(norms, sequence_parallel, mark_shared_params)

    def allocate_inference_cache(
        self, batch_size: int, max_seqlen: int, dtype: torch.dtype | None = None, **kwargs: Any
    ) -> Any:
        """The cache of the mixer."""
        return self.mixer.allocate_inference_cache(batch_size, max_seqlen, dtype=dtype, **kwargs)

    def forward(
        self,
        hidden_states: Tensor,
        residual: Tensor | None = None,
        mixer_subset: Any = None,
        mixer_kwargs: dict[str, Any] | None = None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """One block.

        Args:
            hidden_states: `[batch, seq, dim]`.
            residual: likewise, None in the first block; pre-norm only.
            mixer_subset: an index of tokens that go on; the mixer must know it.
            mixer_kwargs: further arguments of the mixer.

        Returns:
            Pre-norm hidden states and residual; post-norm hidden states.
        """
        kwargs = dict(mixer_kwargs or {})
        if mixer_subset is not None:
            kwargs["mixer_subset"] = mixer_subset
        if not self.prenorm:
            if residual is not None:
                raise ValueError(
                    "residual: expected None with prenorm=False, got a tensor; hidden states are their own"
                )
            return self._postnorm(hidden_states, mixer_subset, kwargs)
        hidden_states, residual = self._add_norm(1, hidden_states, residual, self.residual_in_fp32)
        hidden_states = self.mixer(hidden_states, **kwargs)
        if mixer_subset is not None:
            residual = residual[:, mixer_subset]
        if not isinstance(self.mlp, nn.Identity):
            hidden_states, residual = self._add_norm(2, hidden_states, residual, self.residual_in_fp32)
            hidden_states = self.mlp(hidden_states)
        return hidden_states, residual

    def _postnorm(self, hidden: Tensor, mixer_subset: Any, kwargs: dict[str, Any]) -> Tensor:
        out = self.mixer(hidden, **kwargs)
        out, hidden = out if self.return_residual else (out, hidden)
        if mixer_subset is not None:
            hidden = hidden[:, mixer_subset]
        hidden, _ = self._add_norm(1, out, hidden, False)
        if isinstance(self.mlp, nn.Identity):
            return hidden
        out = self.mlp(hidden)
        out, hidden = out if self.return_residual else (out, hidden)
        return self._add_norm(2, out, hidden, False)[0]

    def _add_norm(self, number: int, hidden: Tensor, residual: Tensor | None, in_fp32: bool) -> tuple[Tensor, Tensor]:
        """`norm(drop_path(dropout(hidden)) + residual)`, and the sum."""
        norm, dropout, drop_path = (getattr(self, f"{name}{number}") for name in ("norm", "dropout", "drop_path"))
        dtype = norm_dtype(norm, hidden, self.fused_dropout_add_ln)
        normed, total = add_norm([norm], [hidden], residual, [dropout], drop_path, in_fp32, dtype)
        return normed[0], total


class ParallelBlock(nn.Module):
    """A mixer and an MLP side by side, pre-norm; arguments as `Block`.

    Args:
        tied_norm: the MLP reads the mixer's norm; there is no norm2.
    """

    mixer_of = staticmethod(_default_mixer)

    def __init__(
        self,
        dim: int,
        mixer_cls: Make | None = None,
        mlp_cls: Make | None = None,
        norm_cls: Make = nn.LayerNorm,
        dropout_cls: Callable[[float], nn.Module] = nn.Dropout,
        resid_dropout1: float = 0.0,
        resid_dropout2: float = 0.0,
        tied_norm: bool = False,
        fused_dropout_add_ln: bool = False,
        residual_in_fp32: bool = False,
        sequence_parallel: bool = False,
        mark_shared_params: bool = False,
    ) -> None:
        super().__init__()
        self.tied_norm = tied_norm
        self.fused_dropout_add_ln = fused_dropout_add_ln
        self.residual_in_fp32 = residual_in_fp32
        self.mixer: Any = (mixer_cls or self.mixer_of)(dim)
        self.dropout1 = dropout_cls(resid_dropout1)
        self.norm1 = norm_cls(dim)
        self.mlp = _mlp(mlp_cls, dim)
        self.dropout2 = dropout_cls(resid_dropout2)
        norms = [self.norm1]
        if not tied_norm:
            self.norm2 = norm_cls(dim)
            norms.append(self.norm2)
        mark(norms, sequence_parallel, mark_shared_params)

    def allocate_inference_cache(
        self, batch_size: int, max_seqlen: int, dtype: torch.dtype | None = None, **kwargs: Any
    ) -> Any:
        """The cache of the mixer."""
        return self.mixer.allocate_inference_cache(batch_size, max_seqlen, dtype=dtype, **kwargs)

    def forward(
        self,
        hidden_states1: Tensor,
        hidden_states2: Tensor | None = None,
        residual: Tensor | None = None,
        mixer_kwargs: dict[str, Any] | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """One block.

        Args:
            hidden_states1: `[batch, seq, dim]`, of the mixer before; of the first block the embeddings.
            hidden_states2: likewise, of the MLP before; None in the first block.
            residual: likewise, None in the first block.
            mixer_kwargs: further arguments of the mixer.

        Returns:
            The same three of the next block.
        """
        norms = [self.norm1] if self.tied_norm else [self.norm1, self.norm2]
        branches, dropouts = [hidden_states1], [self.dropout1]
        if hidden_states2 is not None:
            branches, dropouts = [hidden_states1, hidden_states2], [self.dropout1, self.dropout2]
        dtype = norm_dtype(self.norm1, hidden_states1, self.fused_dropout_add_ln)
        normed, residual = add_norm(norms, branches, residual, dropouts, None, self.residual_in_fp32, dtype)
        return self.mixer(normed[0], **(mixer_kwargs or {})), self.mlp(normed[-1]), residual


def _mlp(mlp_cls: Make | None, dim: int) -> nn.Module:
    return (partial(Mlp, hidden_features=4 * dim) if mlp_cls is None else mlp_cls)(dim)
