"""FlashAttention-4's functions of scores and of positions, as flashtile takes them.

There `score_mod(score, batch, head, q_idx=, kv_idx=, seqlen_info=, aux_tensors=)` and `mask_mod(batch, head, q_idx,
kv_idx, seqlen_info, aux_tensors)` are written in CuTe. Here they are plain Python functions of PyTorch operations. With
aux_scalars, these are one more argument. `seqlen_info` has `seqlen_q` and `seqlen_k`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

_POINTS = 64  #: at which a derivative is compared
_TOLERANCE = 2e-3


class SeqlenInfo(NamedTuple):
    """The lengths of one sequence, which are read from a tensor only where a function asks."""

    lengths_q: int | Tensor
    lengths_k: int | Tensor
    batch: Any

    @property
    def seqlen_q(self) -> Any:
        return self.lengths_q if isinstance(self.lengths_q, int) else self.lengths_q[self.batch]

    @property
    def seqlen_k(self) -> Any:
        return self.lengths_k if isinstance(self.lengths_k, int) else self.lengths_k[self.batch]


class Problem(NamedTuple):
    """What functions are told beside a score and its place.

    Attributes:
        batch, heads, seq_q, seq_k: sizes; of packed sequences the longest.
        lengths_q, lengths_k: int, or integers `[batch]` of packed sequences.
        aux_tensors, aux_scalars: as the caller gave them.
        device: of q.
    """

    batch: int
    heads: int
    seq_q: int
    seq_k: int
    lengths_q: int | Tensor
    lengths_k: int | Tensor
    aux_tensors: list[Tensor] | None
    aux_scalars: tuple[Any, ...] | None
    device: torch.device

    def told(self, batch: Any) -> dict[str, Any]:
        """The further arguments of functions."""
        told = {"seqlen_info": SeqlenInfo(self.lengths_q, self.lengths_k, batch), "aux_tensors": self.aux_tensors}
        return told if self.aux_scalars is None else told | {"aux_scalars": self.aux_scalars}


def score_function(score_mod: Callable[..., Any], problem: Problem) -> Callable[..., Tensor]:
    """The same for `flashtile.attention(score_mod=)`."""
    check_language("score_mod", score_mod)
    problem = problem._replace(aux_tensors=problem.aux_tensors or ())  # type: ignore[arg-type]

    def function(score: Any, batch: Any, head: Any, q_index: Any, k_index: Any) -> Any:
        return score_mod(score, batch, head, q_idx=q_index, kv_idx=k_index, **problem.told(batch))

    return function


def mask_function(mask_mod: Callable[..., Any], problem: Problem) -> Callable[..., Tensor]:
    """The same for `flashtile.BlockMask.from_predicate`."""
    check_language("mask_mod", mask_mod)

    def predicate(batch: Any, head: Any, q_index: Any, k_index: Any) -> Any:
        return mask_mod(batch, head, q_index, k_index, *problem.told(batch).values())

    return predicate


def check_derivative(function: Callable[..., Tensor], score_mod_bwd: Callable[..., Any], problem: Problem) -> None:
    """Compares a caller's derivative with flashtile's own at some places, which reads values on the host.

    `score_mod_bwd(grad, score, batch, head, q_idx=, ...)` returns the gradient of the score. flashtile computes with
    its own, so another one would be ignored.
    """
    check_language("score_mod_bwd", score_mod_bwd)
    if not all(problem[:4]):
        return
    generator = torch.Generator("cpu").manual_seed(0)
    places = [torch.randint(size, (_POINTS,), generator=generator, device="cpu") for size in problem[:4]]
    scores, upstream = (torch.randn(_POINTS, generator=generator, device="cpu") for _ in range(2))
    scores, upstream, *places = (tensor.to(problem.device) for tensor in (scores, upstream, *places))
    backward = score_function(lambda score, *place, **told: score_mod_bwd(upstream, score, *place, **told), problem)
    with torch.enable_grad():
        result = function(scores.requires_grad_(), *places)
        own = torch.zeros_like(scores)
        if result.requires_grad:
            (own,) = torch.autograd.grad(result, scores, upstream, allow_unused=True, materialize_grads=True)
    with torch.no_grad():
        given = torch.as_tensor(backward(scores.detach(), *places), device=own.device).expand_as(own)
    error = (given - own).abs().max().item()
    if not error <= _TOLERANCE * max(1.0, own.abs().max().item()):
        raise ValueError(
            f"score_mod_bwd: expected the derivative of score_mod, which flashtile computes by itself, got one that "
            f"differs by {error:.2g}; correct it, or leave it out"
        )


def check_language(name: str, function: Callable[..., Any]) -> None:
    """Refuses what is no function of PyTorch operations."""
    if not callable(function):
        raise TypeError(f"{name}: expected a function of PyTorch operations, got {type(function).__name__}")
    for part in (function, inspect.unwrap(function)):
        space = getattr(part, "__globals__", {})
        used = [space.get(found) for found in getattr(getattr(part, "__code__", None), "co_names", ())]
        modules = [value.__name__ if inspect.ismodule(value) else getattr(value, "__module__", "") for value in used]
        if "cutlass" in (
            str(found).split(".")[0] for found in (space.get("__name__"), type(part).__module__, *modules)
        ):
            raise ValueError(
                f"{name}: expected a Python function of PyTorch operations, got one written in CuTe, which only CuTe "
                "compiles; write it with the same arguments and PyTorch operations, without cute.jit"
            )
