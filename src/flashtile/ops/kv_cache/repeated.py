"""Calls over a cache like an earlier one, for which nothing is checked and decided again.

The steps of a program differ in the lengths of its sequences, the pages and the addresses. A key of the arguments and a
guard on the tensors tell everything else that decides what a call does, and `RepeatedCall` holds what was decided. What
checks and plans know of addresses is compared in each call.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flashtile._backends import forgetters
from flashtile.ops.common import dispatch
from flashtile.ops.common.repeated import Memory
from flashtile.ops.common.tiles import power_of_two
from flashtile.ops.kv_cache.spec import CacheCall, CacheSpec, address_facts

Results = tuple[Tensor, Tensor]
#: The arguments in the order of `CacheCall`. The lengths may be an int.
Given = tuple[Any, ...]
#: From the tensors of a call, as `CacheCall` has them, and the length of all sequences to (out, lse); None where it
#: cannot tell.
Serve = Callable[[Given, int], "Results | None"]

_CALLS: Memory[RepeatedCall] = Memory()
forgetters.append(_CALLS.forget)

#: Types of the other arguments. The key has types too: True equals 1, and is refused.
_OPTION_TYPES = frozenset((bool, int, float, str, type(None)))
_LENGTHS, _STARTS, _NEW_STARTS = map(CacheCall._fields.index, ("cache_lengths", "cu_seqlens_q", "cu_seqlens_new"))
_PAIRS = tuple(map(CacheCall._fields.index, ("k_cache", "v_cache", "descale_k", "descale_v")))
#: Longer sequences are not counted in 32 bits.
_LONGEST = 2**31


class Pair(NamedTuple):
    """Two tensors that are written, at places of the given ones.

    Attributes:
        distance: between their addresses in the call that was checked.
        apart: at distances outside of this range they share no memory; None where that was not so.
    """

    first: int
    second: int
    distance: int
    apart: tuple[int, int] | None


class RepeatedCall(NamedTuple):
    """What was decided about a call and those like it. It holds no tensor.

    Attributes:
        serve: what runs them.
        length: of all sequences, where neither an int nor a tensor says it.
        longest: the largest length that an int may say.
        facts: what is known of addresses (`address_facts`).
        pairs: those that must not share memory.
        written: places of the given tensors that are written.
    """

    serve: Serve
    length: int
    longest: int
    facts: Hashable
    pairs: tuple[Pair, ...]
    written: tuple[int, ...]

    def fits(self, given: Given) -> bool:
        """Whether addresses and an int of lengths are as they may be."""
        lengths = given[_LENGTHS]
        if type(lengths) is int and not 0 <= lengths <= self.longest:
            return False
        for first, second, distance, apart in self.pairs:
            found = given[second].data_ptr() - given[first].data_ptr()
            if found != distance and (apart is None or apart[0] < found < apart[1]):
                return False
        return address_facts(given) == self.facts

    def run(self, given: Given) -> Results | None:
        """(out, lse); None where `serve` cannot tell."""
        lengths, length = given[_LENGTHS], self.length
        if type(lengths) is int:
            length = lengths
            given = (*given[:_LENGTHS], None, *given[_LENGTHS + 1 :])
        if given[_NEW_STARTS] is None and given[_STARTS] is not None and self.written:
            given = (*given[:_NEW_STARTS], given[_STARTS], *given[_NEW_STARTS + 1 :])
        results = self.serve(given, length)
        if self.written and results is not None:
            mark_written([given[place] for place in self.written])
        return results


def mark_written(tensors: list[Tensor]) -> None:
    """Kernels write past PyTorch's back: what keeps a cache for a gradient must learn of it."""
    torch.autograd.graph.increment_version([tensor for tensor in tensors if not tensor.is_inference()])


def call_key(
    given: Given, options: tuple[Any, ...], window: tuple[int | None, int | None] | None, max_seqlen_q: int | None
) -> Hashable:
    """What `served` looks a call up by; None where PyTorch would do something first, or an argument has a type that
    is to be checked. `options`: all other scalars."""
    if not dispatch.undisturbed():
        return None
    if window is not None:
        if type(window) is not tuple:
            return None
        options = (*options, *window)
    types, option_types = (*map(type, given),), (*map(type, options),)
    if not _OPTION_TYPES.issuperset(option_types):
        return None
    if max_seqlen_q is not None:
        if type(max_seqlen_q) is not int or not 0 < max_seqlen_q < _LONGEST:
            return None
        # Plans know the power of two; a tree must have as many columns.
        max_seqlen_q = power_of_two(max_seqlen_q) if given[-1] is None else max_seqlen_q
    try:
        return given[0].shape, types, options, option_types, max_seqlen_q, torch._C._get_cublas_allow_tf32()
    except (AttributeError, RuntimeError):  # no tensor has no shape, nor has a nested one in the strided layout
        return None


def served(key: Hashable, given: Given) -> Results | None:
    """(out, lse) of a call like an earlier one; None for all others."""
    alike = _CALLS.find(key)
    if alike is None:
        return None
    present = _present(given)
    for recognises, call in alike:
        if recognises(*present) and call.fits(given):
            return call.run(given)
    return None


def _present(given: Given) -> list[Tensor]:
    return [each for each in given if each is not None and type(each) is not int]


def remember(
    key: Hashable,
    given: Given,
    call: CacheCall,
    spec: CacheSpec,
    prepare: Callable[[CacheCall, CacheSpec], Serve | None],
) -> None:
    """Keeps what serves calls like one that was checked and served. `call`: as the backend got it. `prepare`: the
    backend's, which makes that."""
    present = _present(given)
    if not dispatch.plain(*present) or any(not each.numel() or each.requires_grad for each in present):
        return
    # What serves a call is given the tensors themselves, so the backend must have got these, or views of them.
    for name, tensor, got in zip(CacheCall._fields, given, call):
        implied = name == "cu_seqlens_new" or type(tensor) is int
        if got is not tensor and not (
            implied if tensor is None or got is None else tensor.data_ptr() == got.data_ptr()
        ):
            return
    serve = prepare(call, spec)
    if serve is None:
        return
    k_cache, v_cache, descale_k, descale_v = _PAIRS
    written = () if call.k is None else (k_cache, v_cache, *((descale_k, descale_v) if spec.factors_of_rows else ()))
    pairs = tuple(_pair(given, *places, call.v is not None) for places in zip(written[::2], written[1::2]))
    kept = RepeatedCall(serve, spec.length, _longest(call, spec), address_facts(given), pairs, written)
    _CALLS.keep(key, present, kept)


def _pair(given: Given, first: int, second: int, apart: bool) -> Pair:
    one, other = given[first], given[second]
    distance = other.data_ptr() - one.data_ptr()
    reaches = [
        each.element_size() * (1 + sum((size - 1) * step for size, step in zip(each.shape, each.stride())))
        for each in (one, other)
    ]
    between = -reaches[1], reaches[0]
    return Pair(first, second, distance, None if between[0] < distance < between[1] or not apart else between)


def _longest(call: CacheCall, spec: CacheSpec) -> int:
    """The largest length of all sequences, at which there is room for the new rows, and an angle for each position."""
    if call.cu_seqlens_q is not None:
        return call.capacity
    new, seq_q = 0 if call.k is None else call.k.shape[1], call.q.shape[1]
    if call.rotary_cos is None:
        return call.capacity - new
    return min(call.capacity - new, call.rotary_cos.shape[0] - max(new, seq_q if spec.banded else 1))


def forget_calls() -> None:
    """Forgets all calls, for tests and tools that change what decides about them."""
    _CALLS.forget()
