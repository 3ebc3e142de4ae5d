"""Running a call on the backend that serves it, and calls like an earlier one, for which nothing is decided again.

Most calls of a program have no tensor beside q, k and v, and look like an earlier one. `key_of` gives all that decides
what such a call does, and `PlainCall` is what was decided: the checks, the canonical form, the backend and its plan. So
the host's time of a call like it is that of a look-up, the outputs and the launch.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from flashtile.ops.attention import checks, select
from flashtile.ops.attention.spec import FP8, AttentionSpec, Gradients, SideInputs, Wanted, plain_side
from flashtile.ops.common import dispatch, watch

NOTHING_WANTED = Wanted()

#: Calls by their keys. They are few in a program; one of ever new shapes starts anew from time to time.
_CALLS: dict[Hashable, PlainCall] = {}
_MOST_CALLS = 4096

#: Types of the sides of a window: True and 1.0 equal 1, but are refused.
_SIDES = frozenset((int, type(None)))

Results = tuple[Tensor, ...]


def serve_forward(
    q: Tensor, k: Tensor, v: Tensor, side: SideInputs, spec: AttentionSpec, backend: str, plain: bool
) -> Results:
    """Runs the forward of the backend that serves the call. `plain`: there is no tensor beside q, k and v."""
    if not plain:
        checks.check_values(side, q.shape[0], k.shape[0])
    q, k, v = rows_contiguous(q), rows_contiguous(k), rows_contiguous(v)
    implementation = select.implementation("forward", q, k, v, side, spec, backend)
    return implementation.forward(q, k, v, side if plain else readable_side(side), spec)


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
    learned = wanted.alibi_slopes, any(wanted.captured)
    implementation = select.implementation("backward", q, k, v, side, spec, backend, *learned)
    side = side if plain_side(side) else readable_side(side)
    return implementation.backward(dout, dlse, q, k, v, out, lse, side, spec, wanted)


def rows_contiguous(tensor: Tensor) -> Tensor:
    """Kernels take any strides whose last dimension is contiguous."""
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


def readable_side(side: SideInputs) -> SideInputs:
    """Kernels read small side inputs element after element: a slice or an expanded length is copied. Bias, mask and
    factors may have any strides."""
    tensors: dict[str, Any] = {
        name: entry.contiguous()
        for name, entry in side._asdict().items()
        if isinstance(entry, Tensor) and name not in ("bias", "mask", "descale_q", "descale_k", "descale_v")
    }
    return side._replace(**tensors, captured=tuple(tensor.contiguous() for tensor in side.captured))


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
    """All that decides what a call of `flashtile.attention` without other arguments does; None where more does: what
    PyTorch would do first, 8 bits, or arguments that equal those of another type."""
    if not dispatch.plain_eager(q, k, v) or q.dtype is FP8:
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
    return *_layout(q, k, v), causal, align, window, scale, softcap, deterministic, backend, mode


def _layout(q: Tensor, k: Tensor, v: Tensor) -> tuple:
    """What q, k and v are, but for addresses and contents."""
    return (
        q.shape, k.shape, v.shape, q.stride(), k.stride(), v.stride(),
        q.dtype, k.dtype, v.dtype, q.device, k.device, v.device,
    )  # fmt: skip


#: The call that has a key; None for a new one.
found: Callable[[Hashable], PlainCall | None] = _CALLS.get


def new_call(key: Hashable, side: SideInputs, spec: AttentionSpec, backend: str) -> PlainCall:
    """The call of a new key, which `found` gives from now on."""
    call = PlainCall(side, spec, backend)
    if len(_CALLS) >= _MOST_CALLS:
        _CALLS.clear()
    _CALLS[key] = call
    return call


def forget_calls() -> None:
    """Forgets all calls, for tests and tools that change what decides about them."""
    _CALLS.clear()


class PlainCall:
    """A call without a tensor beside q, k and v, of one layout of these: its canonical form, and what runs it.

    Attributes:
        scalars: what the backward that autograd records reads of it.
        forward: from q, k and v to (out, lse).
    """

    __slots__ = ("_backwards", "backend", "forward", "scalars", "side", "spec")

    def __init__(self, side: SideInputs, spec: AttentionSpec, backend: str) -> None:
        self.side, self.spec, self.backend = side, spec, backend
        self.scalars = (side.max_seqlen_q, side.max_seqlen_k), spec, backend, 1
        self.forward = self._first_forward
        self._backwards: dict[Hashable, Callable[..., Results]] = {}

    def backward(
        self, dout: Tensor, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor
    ) -> Results:
        """(dq, dk, dv)."""
        # Hooks of saved tensors may have given others for q, k and v.
        key = *_layout(q, k, v), dout.stride(), dlse is None
        run = self._backwards.get(key)
        if run is None:
            run = self._general_backward
            if _lie_as_usual(q, k, v, dout):
                run = self._backwards[key] = self._backward_like(dout, dlse, q, k, v)
        return run(dout, dlse, q, k, v, out, lse)

    def _first_forward(self, q: Tensor, k: Tensor, v: Tensor) -> Results:
        if not _lie_as_usual(q, k, v):
            return self._general_forward(q, k, v)
        self.forward = self._forward_like(q, k, v)
        return self.forward(q, k, v)

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
        self, dout: Tensor, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor
    ) -> Callable[..., Results]:
        """What runs backwards of tensors that lie like these."""
        side, spec, general = self.side, self.spec, self._general_backward
        module = select.implementation("backward", q, k, v, side, spec, self.backend)
        prepare = _preparing(module, "prepare_backward")
        launch = None if prepare is None else prepare(dout, dlse is not None, q, k, v, side, spec)
        if launch is None:
            return general

        def run(
            dout: Tensor, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor
        ) -> Results:
            contiguous = out.is_contiguous() and lse.is_contiguous() and (dlse is None or dlse.is_contiguous())
            of_q, of_k, of_v, of_out = q.data_ptr(), k.data_ptr(), v.data_ptr(), out.data_ptr()
            of_dout, of_dlse = dout.data_ptr(), 0 if dlse is None else dlse.data_ptr()
            if (of_q | of_k | of_v | of_out | of_dout) % 16 or not contiguous:
                return general(dout, dlse, q, k, v, out, lse)
            return launch(of_dout, of_dlse, of_q, of_k, of_v, of_out, lse.data_ptr())

        return run


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
