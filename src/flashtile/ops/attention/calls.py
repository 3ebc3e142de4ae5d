"""Running a call on the backend that serves it, and calls like an earlier one, for which nothing is decided again.

Most calls of a program have no tensor beside q, k and v, and look like an earlier one. `key_of` and a recogniser of
the tensors give all that decides what such a call does, and `PlainCall` is what was decided: the checks, the canonical
form, the backend and its plan. So the host's time of a call like it is that of a look-up, the outputs and the launch.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Sequence
from types import ModuleType
from typing import Any, TypeVar

import torch
from torch import Tensor

from flashtile._backends import together
from flashtile.ops.attention import checks, select
from flashtile.ops.attention.spec import (
    FP8,
    NOTHING_WANTED,
    AttentionSpec,
    Gradients,
    SideInputs,
    Wanted,
    out_dtype,
    plain_side,
    wanted_of,
)
from flashtile.ops.common import dispatch, watch

#: Calls by their keys. They are few in a program; one of ever new shapes starts anew from time to time.
_CALLS: dict[Hashable, list[tuple[Callable[..., bool], PlainCall]]] = {}
_MOST_CALLS = 4096
#: Of one key, with tensors that differ in strides, dtype, device or in whether they want a gradient.
_MOST_ALIKE = 8

_TENSORS = (Tensor, torch.nn.Parameter)

#: Types of the sides of a window: True and 1.0 equal 1, but are refused.
_SIDES = frozenset((int, type(None)))

Results = tuple[Tensor, ...]
Kept = TypeVar("Kept")


def serve_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    side: SideInputs,
    spec: AttentionSpec,
    backend: str,
    plain: bool,
    recorded: bool = False,
) -> Results:
    """Runs the forward of the backend that serves the call. `plain`: there is no tensor beside q, k and v. `recorded`:
    by autograd, so a backward follows."""
    if not plain:
        checks.check_values(side, q.shape[0], k.shape[0])
    q, k, v = rows_contiguous(q), rows_contiguous(k), rows_contiguous(v)
    implementation = select.implementation("forward", q, k, v, side, spec, backend)
    wanted = wanted_of(side) if recorded else NOTHING_WANTED
    side = side if plain else readable_side(side)
    if not recorded:
        return implementation.forward(q, k, v, side, spec)
    with together.Soon(functools.partial(_backward_plans, q, k, v, side, spec, backend, wanted)):
        return implementation.forward(q, k, v, side, spec)


def _backward_plans(
    q: Tensor, k: Tensor, v: Tensor, side: SideInputs, spec: AttentionSpec, backend: str, wanted: Wanted
) -> Sequence[Any]:
    """The launches of the backward that follows a forward, where out has a gradient that is contiguous, and lse none;
    none where no backend serves it or has such."""
    spec = spec._replace(returns_max_scores=False)
    try:
        module = select.implementation("backward", q, k, v, side, spec, backend, wanted)
    except ValueError:  # the backward will say so
        return ()
    plans = _preparing(module, "backward_plans")
    dout = torch.empty(*q.shape[:-1], v.shape[-1], dtype=out_dtype(q.dtype), device="meta")
    return () if plans is None else plans(dout, q, k, v, side, spec, wanted)


def serve_backward(
    dout: Tensor,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    side: SideInputs,
    spec: AttentionSpec,
    wanted: Wanted,
    backend: str,
) -> Gradients:
    """Runs the backward of the backend that serves the call."""
    dout, q, k, v = rows_contiguous(dout), rows_contiguous(q), rows_contiguous(k), rows_contiguous(v)
    implementation = select.implementation("backward", q, k, v, side, spec, backend, wanted)
    side = side if plain_side(side) else readable_side(side)
    return implementation.backward(dout, dlse, q, k, v, out, lse, side, spec, wanted)


def rows_contiguous(tensor: Tensor) -> Tensor:
    """Kernels take any strides whose last dimension is contiguous."""
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


def readable_side(side: SideInputs) -> SideInputs:
    """Kernels read small side inputs element after element: a slice or an expanded length is copied. Bias, mask and
    factors may have any strides."""
    copies: dict[str, Any] = {
        name: entry.contiguous()
        for name, entry in zip(SideInputs._fields, side)
        if isinstance(entry, Tensor)
        and not entry.is_contiguous()
        and name not in ("bias", "mask", "descale_q", "descale_k", "descale_v")
    }
    if side.captured:
        copies["captured"] = tuple(tensor.contiguous() for tensor in side.captured)
    return side._replace(**copies) if copies else side


def key_of(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    causal: bool,
    align: str,
    window: tuple[int | None, int | None] | None,
    scale: float | None,
    softcap: float | None,
    deterministic: bool,
    backend: str,
) -> Hashable:
    """What `found` looks a call of `flashtile.attention` without other arguments up by; None where PyTorch would do
    something first, or arguments equal those of another type."""
    if not dispatch.undisturbed() or not (type(q) in _TENSORS and type(k) in _TENSORS and type(v) in _TENSORS):
        return None
    if torch._C._is_any_autocast_enabled() and checks.autocast_casts(q, k, v):
        return None
    if not (
        type(causal) is type(deterministic) is bool
        and type(align) is type(backend) is str
        and (scale is None or type(scale) is float)
        and (softcap is None or type(softcap) is float)
        and (window is None or (type(window) is tuple and _SIDES.issuperset(map(type, window))))
    ):
        return None
    mode = torch._C._get_deterministic_algorithms()
    try:
        return q.shape, k.shape, causal, align, window, scale, softcap, deterministic, backend, mode
    except RuntimeError:  # a nested tensor in the strided layout has no shape, and the checks refuse it
        return None


def found(key: Hashable, q: Tensor, k: Tensor, v: Tensor) -> PlainCall | None:
    """The call that such tensors with such a key made before; None for a new one."""
    for recognises, call in _CALLS.get(key, ()):
        if recognises(q, k, v):
            return call
    return None


def new_call(
    key: Hashable, q: Tensor, k: Tensor, v: Tensor, side: SideInputs, spec: AttentionSpec, backend: str
) -> PlainCall | None:
    """The call, which `found` gives from now on; None for tensors that are not plain, or of 8 bits."""
    if not dispatch.plain(q, k, v) or q.dtype is FP8:
        return None
    if len(_CALLS) >= _MOST_CALLS:
        _CALLS.clear()
    call = PlainCall(side, spec, backend)
    _keep(_CALLS.setdefault(key, []), dispatch.recogniser(q, k, v), call)
    return call


def _keep(entries: list[tuple[Callable[..., bool], Kept]], recognises: Callable[..., bool], kept: Kept) -> None:
    """Keeps something for tensors that are recognised."""
    if len(entries) >= _MOST_ALIKE:
        entries.clear()
    entries.append((recognises, kept))


def forget_calls() -> None:
    """Forgets all calls, for tests and tools that change what decides about them."""
    _CALLS.clear()


class PlainCall:
    """A call without a tensor beside q, k and v, of one layout of these: its canonical form, and what runs it.

    Attributes:
        scalars: what the backward that autograd records reads of it.
        forward: from q, k and v to (out, lse).
        recorded_forward: the same where autograd records it, so that a backward follows.
    """

    __slots__ = ("_backwards", "backend", "forward", "recorded_forward", "scalars", "side", "spec")

    def __init__(self, side: SideInputs, spec: AttentionSpec, backend: str) -> None:
        self.side, self.spec, self.backend = side, spec, backend
        self.scalars = (side.max_seqlen_q, side.max_seqlen_k), spec, backend, 1
        self.forward = self._first_forward
        self.recorded_forward = self._first_recorded_forward
        self._backwards: tuple[list, list] = [], []

    def backward(self, dout: Tensor, dlse: Tensor | None, *saved: Tensor) -> Results | None:
        """(dq, dk, dv), from q, k, v, out and lse as they were saved, or what hooks of saved tensors made of them; None
        where these or the gradients are not plain."""
        given = (dout, *saved) if dlse is None else (dout, dlse, *saved)
        entries = self._backwards[dlse is None]
        for recognises, run in entries:
            if recognises(*given):
                return run(dout, dlse, *saved)
        if not dispatch.plain(*given) or dispatch.batched(dout, dlse):
            return None
        run = self._general_backward
        if _lie_as_usual(dout, *saved):
            run = self._backward_like(dout, dlse, *saved)
            _keep(entries, dispatch.recogniser(*given), run)
        return run(dout, dlse, *saved)

    def _first_forward(self, q: Tensor, k: Tensor, v: Tensor) -> Results:
        if not _lie_as_usual(q, k, v):
            return self._general_forward(q, k, v)
        self.forward = self._forward_like(q, k, v)
        return self.forward(q, k, v)

    def _first_recorded_forward(self, q: Tensor, k: Tensor, v: Tensor) -> Results:
        arguments = q, k, v, self.side, self.spec, self.backend, NOTHING_WANTED
        with together.Soon(functools.partial(_backward_plans, *arguments)):
            results = self.forward(q, k, v)
        if self.forward != self._first_forward:
            self.recorded_forward = self.forward
        return results

    def _general_forward(self, q: Tensor, k: Tensor, v: Tensor) -> Results:
        return serve_forward(q, k, v, self.side, self.spec, self.backend, plain=True)

    def _general_backward(
        self, dout: Tensor, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor
    ) -> Results:
        side, spec = self.side, self.spec
        return serve_backward(dout, dlse, q, k, v, out, lse, side, spec, NOTHING_WANTED, self.backend)[:3]

    def _forward_like(self, q: Tensor, k: Tensor, v: Tensor) -> Callable[..., Results]:
        """What runs forwards of tensors that lie like these."""
        side, spec, general = self.side, self.spec, self._general_forward
        module = select.implementation("forward", q, k, v, side, spec, self.backend)
        prepare = _preparing(module, "prepare_forward")
        launch = None if prepare is None else prepare(q, k, v, side, spec)
        if launch is None:
            return general if q.is_cuda else lambda q, k, v: module.forward(q, k, v, side, spec)

        def run(q: Tensor, k: Tensor, v: Tensor) -> Results:
            of_q, of_k, of_v = q.data_ptr(), k.data_ptr(), v.data_ptr()
            return general(q, k, v) if (of_q | of_k | of_v) % 16 else launch(of_q, of_k, of_v)

        return run

    def _backward_like(
        self, dout: Tensor, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor
    ) -> Callable[..., Results]:
        """What runs backwards of tensors that lie like these."""
        side, spec, general = self.side, self.spec, self._general_backward
        contiguous = out.is_contiguous() and lse.is_contiguous() and (dlse is None or dlse.is_contiguous())
        module = select.implementation("backward", q, k, v, side, spec, self.backend)
        prepare = _preparing(module, "prepare_backward") if contiguous else None
        launch = None if prepare is None else prepare(dout, dlse is not None, q, k, v, side, spec)
        if launch is None:
            return general

        def run(
            dout: Tensor, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor
        ) -> Results:
            of_q, of_k, of_v, of_out, of_dout = (
                q.data_ptr(),
                k.data_ptr(),
                v.data_ptr(),
                out.data_ptr(),
                dout.data_ptr(),
            )
            if (of_q | of_k | of_v | of_out | of_dout) % 16:
                return general(dout, dlse, q, k, v, out, lse)
            return launch(of_dout, 0 if dlse is None else dlse.data_ptr(), of_q, of_k, of_v, of_out, lse.data_ptr())

        return run


def prepared_unmasked(
    q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec, backend: str
) -> Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor] | None] | None:
    """A function that computes calls like this one, in which every query sees every key, for any number of keys; None
    where the backend has none."""
    module = select.implementation("forward", q, k, v, SideInputs(), spec, backend)
    prepare = _preparing(module, "prepare_unmasked")
    return None if prepare is None or not _lie_as_usual(q, k, v) else prepare(q, k, v, spec)


def _lie_as_usual(*tensors: Tensor) -> bool:
    """Whether rows are contiguous, and on a GPU addresses multiples of 16 bytes. What the backend is chosen by follows
    from the layout then."""
    bits = 0
    for tensor in tensors:
        if tensor.stride(-1) != 1:
            return False
        if tensor.is_cuda:
            bits |= tensor.data_ptr()
    return bits % 16 == 0


def _preparing(module: ModuleType, name: str) -> Callable[..., Any] | None:
    """A function of a backend's module that decides once for calls that are alike; None where it has none, or where
    each call is watched."""
    return None if watch.watching() else getattr(module, name, None)
