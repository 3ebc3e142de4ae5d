"""Steps of decoding like an earlier one, for which nothing is checked and decided again.

A program's steps differ in the lengths of its sequences. Where these are on a CPU and alike, nothing is appended by
the call, and a step of one query over the same cache was served before, only the lengths are checked.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import NamedTuple

import torch
from torch import Tensor

from flashtile.ops.common import dispatch

Results = tuple[Tensor, Tensor]
Forward = Callable[[Tensor, Tensor, Tensor], "Results | None"]

#: Steps by their keys, few in a program.
_STEPS: dict[Hashable, Step] = {}
_MOST_STEPS = 1024

_TENSORS = (Tensor, torch.nn.Parameter)
_LENGTH_DTYPES = (torch.int32, torch.int64)


class Step(NamedTuple):
    """How steps over a cache are recognised and served.

    Attributes:
        recognises: whether q and both caches are laid out as in the earlier step.
        forward: from q and the rows in use of the caches to (out, lse), or None where it cannot tell.
    """

    recognises: Callable[..., bool]
    forward: Forward


def step_key(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, causal: bool, scale: float | None, return_lse: bool, backend: str
) -> Hashable:
    """The key of a step of one query on a CPU, without arguments beside these and the lengths; None where PyTorch would
    do something first, or an argument equals one of another type."""
    if not (type(q) in _TENSORS and type(k_cache) in _TENSORS and type(v_cache) in _TENSORS and q.is_cpu):
        return None
    if q.dim() != 4 or q.shape[1] != 1 or not dispatch.undisturbed():
        return None
    if not (
        type(causal) is type(return_lse) is bool and type(backend) is str and (scale is None or type(scale) is float)
    ):
        return None
    return q.shape, k_cache.shape, scale, backend


def repeated(
    key: Hashable, q: Tensor, k_cache: Tensor, v_cache: Tensor, cache_lengths: int | Tensor | None
) -> Results | None:
    """(out, lse) of a step like an earlier one; None for all others."""
    step = _STEPS.get(key)
    if step is None or not step.recognises(q, k_cache, v_cache):
        return None
    capacity = k_cache.shape[1]
    length = capacity if cache_lengths is None else _common_length(cache_lengths, q.shape[0])
    if length is None or not 1 <= length <= capacity:
        return None
    if length < capacity:
        k_cache, v_cache = k_cache[:, :length], v_cache[:, :length]
    return step.forward(q, k_cache, v_cache)


def _common_length(cache_lengths: int | Tensor, batch: int) -> int | None:
    """The length of all sequences; None where they differ or have to be checked."""
    if type(cache_lengths) is int:
        return cache_lengths
    if type(cache_lengths) is not Tensor or not cache_lengths.is_cpu or cache_lengths.dtype not in _LENGTH_DTYPES:
        return None
    if cache_lengths.dim() != 1 or cache_lengths.shape[0] != batch:
        return None
    lengths = cache_lengths.tolist()
    return lengths[0] if lengths.count(lengths[0]) == batch else None


def remember(key: Hashable, q: Tensor, k_cache: Tensor, v_cache: Tensor, forward: Forward | None) -> None:
    """Keeps the function that serves steps like one that was checked and served."""
    tensors = q, k_cache, v_cache
    if forward is None or not dispatch.plain(*tensors) or any(tensor.requires_grad for tensor in tensors):
        return
    if len(_STEPS) >= _MOST_STEPS:
        _STEPS.clear()
    _STEPS[key] = Step(dispatch.recogniser(*tensors), forward)


def forget_steps() -> None:
    """Forgets all steps, for tests and tools that change what decides about them."""
    _STEPS.clear()
