"""Blocks of a Transformer, built on the fused dropout, addition and norm: sequential or parallel."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import flashtile
from flashtile.modules.layers import computes_only
from flashtile.modules.norm import LayerNorm, RMSNorm

_LAYER_NORMS, _RMS_NORMS = (LayerNorm, nn.LayerNorm), (RMSNorm, nn.RMSNorm)


class Block(nn.Module):
    """A mixer (attention) and an MLP, each with dropout, residual addition and norm in one pass over memory.

    A pre-norm block starts with the addition that the previous block left open, so that the addition is fused with the
    norm after it::

        residual = dropout1(hidden) + residual            y = mixer(norm1(residual))
        residual = dropout2(y) + residual                 hidden = mlp(norm2(residual))

    It returns hidden and residual. The last norm of a model performs the last addition (`add_norm`). A post-norm
    block::

        h = norm1(dropout1(mixer(hidden)) + hidden)       hidden = norm2(dropout2(mlp(h)) + h)

    Args:
        dim: width of the hidden states.
        mixer_cls: creates the mixer from dim: `functools.partial(MHA, num_heads=8)`.
        mlp_cls: creates the MLP from dim; `nn.Identity` for a block without MLP, which has no second norm either.
        norm_cls: creates a norm from dim: `LayerNorm` or `RMSNorm`, flashtile's or PyTorch's.
        prenorm: pre-norm, else post-norm.
        resid_dropout1: probability that an element of the first summand is dropped, in training.
        resid_dropout2: probability for the second summand.
        residual_in_fp32: the residual stream is float32; pre-norm only.
        return_residual: mixer and MLP return their input with their output (`MHA(return_residual=True)`), and the block
            adds that input; post-norm only.

    Raises:
        TypeError: a norm is neither of these.
        ValueError: an option does not exist for this order of norms.
    """

    def __init__(
        self, dim: int, mixer_cls: Callable[[int], nn.Module], mlp_cls: Callable[[int], nn.Module],
        norm_cls: Callable[[int], nn.Module] = LayerNorm, prenorm: bool = True, resid_dropout1: float = 0.0,
        resid_dropout2: float = 0.0, residual_in_fp32: bool = False, return_residual: bool = False,
    ) -> None:  # fmt: skip
        super().__init__()
        if residual_in_fp32 and not prenorm:
            raise ValueError("residual_in_fp32: expected False with prenorm=False, got True; a norm ends its residual")
        if return_residual and prenorm:
            raise ValueError(
                "return_residual: expected False with prenorm=True, got True; the block keeps its residual"
            )
        self.prenorm = prenorm
        self.resid_dropout1 = resid_dropout1
        self.resid_dropout2 = resid_dropout2
        self.residual_in_fp32 = residual_in_fp32
        self.return_residual = return_residual
        self.mixer = mixer_cls(dim)
        self.norm1 = _checked("norm_cls", norm_cls(dim))
        self.mlp = mlp_cls(dim)
        if not isinstance(self.mlp, nn.Identity):
            self.norm2 = _checked("norm_cls", norm_cls(dim))
        elif resid_dropout2:
            raise ValueError(f"resid_dropout2: expected 0 without an MLP, got {resid_dropout2}; there is one sum only")

    def forward(
        self, hidden: Tensor, residual: Tensor | None = None, mixer_kwargs: Mapping[str, Any] | None = None
    ) -> Tensor | tuple[Tensor, Tensor]:
        """One block.

        Args:
            hidden: `[..., dim]`: what is added to the residual; in the first block the embeddings.
            residual: `[..., dim]`, None in the first block; pre-norm only.
            mixer_kwargs: further arguments of the mixer.

        Returns:
            Pre-norm: hidden and residual, each `[..., dim]`. Post-norm: hidden.
        """
        if self.prenorm:
            return self._prenorm(hidden, residual, mixer_kwargs or {})
        if residual is not None:
            raise ValueError("residual: expected None with prenorm=False, got a tensor; hidden is its own residual")
        return self._postnorm(hidden, mixer_kwargs or {})

    def _prenorm(
        self, hidden: Tensor, residual: Tensor | None, mixer_kwargs: Mapping[str, Any]
    ) -> tuple[Tensor, Tensor]:
        p1, p2 = self._dropout()
        hidden, residual = add_prenorm(self.norm1, hidden, residual, p1, self.residual_in_fp32)
        hidden = self.mixer(hidden, **mixer_kwargs)
        if not isinstance(self.mlp, nn.Identity):
            hidden, residual = add_prenorm(self.norm2, hidden, residual, p2)
            hidden = self.mlp(hidden)
        return hidden, residual

    def _postnorm(self, hidden: Tensor, mixer_kwargs: Mapping[str, Any]) -> Tensor:
        p1, p2 = self._dropout()
        out = self.mixer(hidden, **mixer_kwargs)
        out, residual = out if self.return_residual else (out, hidden)
        hidden = add_norm(self.norm1, out, residual, p1)
        if isinstance(self.mlp, nn.Identity):
            return hidden
        out = self.mlp(hidden)
        out, residual = out if self.return_residual else (out, hidden)
        return add_norm(self.norm2, out, residual, p2)

    def _dropout(self) -> tuple[float, float]:
        return (self.resid_dropout1, self.resid_dropout2) if self.training else (0.0, 0.0)

    def extra_repr(self) -> str:
        dropout = f"resid_dropout1={self.resid_dropout1}, resid_dropout2={self.resid_dropout2}"
        return f"prenorm={self.prenorm}, {dropout}, residual_in_fp32={self.residual_in_fp32}"


class ParallelBlock(nn.Module):
    """A mixer and an MLP in parallel, pre-norm: both read the same residual stream, and both are added to it later.

    ::

        residual = dropout(hidden1) + dropout(hidden2) + residual
        hidden1 = mixer(norm1(residual))                  hidden2 = mlp(norm2(residual))

    The two additions and both norms are one pass over memory.

    Args:
        dim: width of the hidden states.
        mixer_cls: creates the mixer from dim.
        mlp_cls: creates the MLP from dim.
        norm_cls: creates a norm from dim: `LayerNorm` or `RMSNorm`, flashtile's or PyTorch's.
        resid_dropout: probability that an element of either branch is dropped, in training.
        tied_norm: the MLP reads the mixer's norm; there is no norm2.
        residual_in_fp32: the residual stream is float32.

    Raises:
        TypeError: a norm is neither of these.

    Reference:
        Wang, Komatsuzaki, "GPT-J-6B" (2021).
    """

    def __init__(
        self, dim: int, mixer_cls: Callable[[int], nn.Module], mlp_cls: Callable[[int], nn.Module],
        norm_cls: Callable[[int], nn.Module] = LayerNorm, resid_dropout: float = 0.0, tied_norm: bool = False,
        residual_in_fp32: bool = False,
    ) -> None:  # fmt: skip
        super().__init__()
        self.resid_dropout = resid_dropout
        self.tied_norm = tied_norm
        self.residual_in_fp32 = residual_in_fp32
        self.mixer = mixer_cls(dim)
        self.norm1 = _checked("norm_cls", norm_cls(dim))
        self.mlp = mlp_cls(dim)
        self.norm2 = None if tied_norm else _checked("norm_cls", norm_cls(dim))

    def forward(
        self, hidden1: Tensor, hidden2: Tensor | None = None, residual: Tensor | None = None,
        mixer_kwargs: Mapping[str, Any] | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        """One block.

        Args:
            hidden1: `[..., dim]`: the output of the previous mixer; in the first block the embeddings.
            hidden2: `[..., dim]`: the output of the previous MLP, None in the first block.
            residual: `[..., dim]`, None in the first block.
            mixer_kwargs: further arguments of the mixer.

        Returns:
            hidden1, hidden2 and residual for the next block.
        """
        p = self.resid_dropout if self.training else 0.0
        normed1, normed2, residual = add_parallel_norm(
            self.norm1, self.norm2, hidden1, hidden2, residual, p, self.residual_in_fp32
        )
        return self.mixer(normed1, **(mixer_kwargs or {})), self.mlp(normed2), residual

    def extra_repr(self) -> str:
        return f"resid_dropout={self.resid_dropout}, residual_in_fp32={self.residual_in_fp32}"


def add_norm(
    norm: nn.Module,
    hidden: Tensor,
    residual: Tensor | None,
    dropout_p: float = 0.0,
    hidden2: Tensor | None = None,
) -> Tensor:
    """`norm(dropout(hidden) + dropout(hidden2) + residual)` in one pass over memory: the end of the last block.

    A norm that does more than its class is called after the addition, in a pass of its own: a subclass with a forward
    of its own, a norm with hooks, or one over several dimensions.

    Args:
        norm: a `LayerNorm` or `RMSNorm`, flashtile's or PyTorch's, or a subclass.
        hidden: `[..., dim]`.
        residual: `[..., dim]`, or None for 0.
        dropout_p: probability that an element of either branch is dropped.
        hidden2: `[..., dim]`, a second branch, or None.

    Returns:
        `[..., dim]`, in the dtype of hidden.

    Raises:
        TypeError: norm is neither of these.
    """
    if not _fusible(norm, hidden):
        return _called(norm, _sum(hidden, hidden2, residual, dropout_p, False), hidden.dtype)
    fused, options = _fused(norm, hidden, residual, False)
    return fused(hidden, residual, dropout_p=dropout_p, x1=hidden2, **options)


def add_prenorm(
    norm: nn.Module, hidden: Tensor, residual: Tensor | None, dropout_p: float = 0.0, residual_in_fp32: bool = False
) -> tuple[Tensor, Tensor]:
    """The norm of `dropout(hidden) + residual`, as `add_norm`, and the sum itself."""
    normed, _, total = add_parallel_norm(norm, None, hidden, None, residual, dropout_p, residual_in_fp32)
    return normed, total


def add_parallel_norm(
    norm1: nn.Module,
    norm2: nn.Module | None,
    hidden1: Tensor,
    hidden2: Tensor | None,
    residual: Tensor | None,
    dropout_p: float = 0.0,
    residual_in_fp32: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """Both norms of `dropout(hidden1) + dropout(hidden2) + residual`, and the sum. If norm2 is None, it is norm1.
    Raises TypeError as `add_norm`, ValueError if the norms differ in kind or eps."""
    if not all(norm is None or _fusible(norm, hidden1) for norm in (norm1, norm2)):
        total = _sum(hidden1, hidden2, residual, dropout_p, residual_in_fp32)
        normed = _called(norm1, total, hidden1.dtype)
        return normed, normed if norm2 is None else _called(norm2, total, hidden1.dtype), total
    fused, options = _fused(norm1, hidden1, residual, residual_in_fp32)
    options |= {"x1": hidden2, "dropout_p": dropout_p, "prenorm": True}
    if norm2 is not None:
        second, of_second = _fused(norm2, hidden1, residual, residual_in_fp32)
        weight1, bias1 = of_second["weight"], of_second["bias"]
        alike = second is fused and of_second["epsilon"] == options["epsilon"]
        if not alike or (weight1 is None) is not (options["weight"] is None):
            raise ValueError(
                f"norm2: expected a norm of the kind and eps of norm1, {norm1}, got {norm2}; one pass makes both"
            )
        if weight1 is not None:
            return fused(hidden1, residual, weight1=weight1, bias1=bias1, **options)
    # One norm for both: norms without weights are the same.
    normed, residual = fused(hidden1, residual, **options)
    return normed, normed, residual


def _fusible(norm: nn.Module, hidden: Tensor) -> bool:
    """Whether a norm's parameters say all that it computes, so that it can be fused with what comes before it."""
    _checked("norm", norm)
    same_width = tuple(cast("Sequence[int]", norm.normalized_shape)) == tuple(hidden.shape[-1:])
    return same_width and computes_only(norm, *_LAYER_NORMS, *_RMS_NORMS)


def _sum(
    hidden: Tensor, hidden2: Tensor | None, residual: Tensor | None, dropout_p: float, residual_in_fp32: bool
) -> Tensor:
    """`dropout(hidden) + dropout(hidden2) + residual` in the dtype that the fused functions return."""
    dtype = residual.dtype if residual is not None else torch.float32 if residual_in_fp32 else hidden.dtype
    total = F.dropout(hidden, dropout_p)
    if hidden2 is not None:
        total = total + F.dropout(hidden2, dropout_p)
    if residual is not None:
        total = total + residual
    return total.to(dtype)


def _called(norm: nn.Module, total: Tensor, dtype: torch.dtype) -> Tensor:
    """A norm by its own call, hooks included, in a dtype; with other parameters if ranks share the tokens, or the
    parameters are narrower than the sum."""
    given, shared = dict(norm.named_parameters()), getattr(norm, "shared", None)
    wide = total.dtype
    for parameter in given.values():
        wide = torch.promote_types(wide, parameter.dtype)
    if shared is not None and any(type(parameter) is not nn.Parameter for parameter in given.values()):
        with _sharing(norm, shared):
            return norm(total.to(wide)).to(dtype)
    others = {name: cast(Tensor, _read(norm, name)) if name in ("weight", "bias") else given[name] for name in given}
    for name, other in others.items():
        if type(other) in (Tensor, nn.Parameter):  # a sharded one is left to the hooks that gather it
            others[name] = other.to(wide)
    if all(others[name] is parameter for name, parameter in given.items()):
        return norm(total.to(wide)).to(dtype)
    return torch.func.functional_call(norm, others, total.to(wide)).to(dtype)


@contextmanager
def _sharing(norm: nn.Module, shared: Callable[[Tensor], Tensor]) -> Iterator[None]:
    """Lets the norm's forward read its parameters through `shared`, once FSDP's hook has gathered them."""
    kept: dict[str, Any] = {}

    def exchange(module: nn.Module, _: Any) -> None:
        kept.update((name, own) for name, own in module._parameters.items() if name in ("weight", "bias"))
        others: Any = {name: own if own is None else shared(own) for name, own in kept.items()}
        module._parameters.update(others)

    def restore(module: nn.Module, *_: Any) -> None:
        module._parameters.update(kept)

    hooks = norm.register_forward_pre_hook(exchange), norm.register_forward_hook(restore, prepend=True)
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _fused(
    norm: nn.Module, hidden: Tensor, residual: Tensor | None, residual_in_fp32: bool
) -> tuple[Callable[..., Any], dict[str, Any]]:
    """The function that fuses a norm with what comes before it, and the arguments which the norm says."""
    options: dict[str, Any] = {"weight": _read(norm, "weight"), "bias": _read(norm, "bias"), "epsilon": norm.eps}
    options["residual_in_fp32"] = residual_in_fp32
    if isinstance(norm, _LAYER_NORMS):
        return flashtile.dropout_add_layer_norm, options
    if norm.eps is None:
        narrow = residual.dtype if residual is not None else torch.float32 if residual_in_fp32 else hidden.dtype
        options["epsilon"] = torch.finfo(torch.promote_types(narrow, torch.float32)).eps
    return flashtile.dropout_add_rms_norm, options


def _read(norm: nn.Module, name: str) -> Tensor | None:
    """A norm's parameter; where ranks share the tokens, through the function that adds up its gradient over them."""
    parameter, shared = getattr(norm, name, None), getattr(norm, "shared", None)
    return parameter if parameter is None or shared is None else shared(parameter)


def _checked(name: str, norm: nn.Module) -> nn.Module:
    if not isinstance(norm, (*_LAYER_NORMS, *_RMS_NORMS)):
        raise TypeError(
            f"{name}: expected a LayerNorm or an RMSNorm, of flashtile.modules or torch.nn, got "
            f"{type(norm).__name__}; no other is fused with dropout and addition"
        )
    return norm
