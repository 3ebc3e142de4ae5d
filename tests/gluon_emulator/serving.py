"""Puts an emulated machine in the place of the Hopper kernels."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from flashtile.ops.attention import select
from flashtile.ops.attention.hopper import unsupported_reason
from flashtile.ops.attention.hopper.separate_configs import is_wide, serves_float32
from flashtile.ops.attention.spec import NOTHING_WANTED, Wanted
from gluon_emulator.hopper import EmulatedHopper
from support.attention.backend_calls import hopper_call

_serve = select.implementation


class NotServedError(Exception):
    """The Hopper kernels do not serve a call."""


def served_by(emulated: EmulatedHopper) -> Callable[..., Any]:
    """What to put in the place of `select.implementation`, after `repeated.forget_calls()`: it runs on the machine what
    asks for "hopper", and other calls as before. Backwards that the kernels lack run on the CPU, and so does the other
    direction of float32 where they have one alone.

    Raises:
        NotServedError: on such a call.
    """

    def implementation(
        phase: Any, q: Any, k: Any, v: Any, side: Any, spec: Any, backend: str,
        wanted: Wanted = NOTHING_WANTED,
    ) -> Any:  # fmt: skip
        call = hopper_call(phase, q, k, v, side, spec, wanted)._replace(requested="hopper")
        reason = unsupported_reason(call)
        may_lack = is_wide(*call.head_dims) or any(wanted.captured)
        if backend == "hopper" and phase == "backward" and may_lack and reason:
            backend = "cpu"  # any backward follows any forward
        if backend == "hopper" and q.dtype is torch.float32:
            of_forward = serves_float32(call._replace(phase="forward"))
            served = of_forward if phase == "forward" else not of_forward or serves_float32(call)
            backend = "hopper" if served else "cpu"
        if backend != "hopper":
            return _serve(phase, q, k, v, side, spec, backend, wanted)
        if reason:
            raise NotServedError(reason)
        return emulated

    return implementation
