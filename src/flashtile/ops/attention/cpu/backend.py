"""The backend "cpu": which calls it serves, and what computes them."""

from __future__ import annotations

import torch

from flashtile.ops.attention.backend import KernelChoice
from flashtile.ops.attention.call import Call
from flashtile.ops.attention.cpu.torch_served import served_by_torch
from flashtile.ops.attention.spec import FP8
from flashtile.ops.common.backends import Backend, cpu_unsupported_reason


def describe(call: Call) -> tuple[KernelChoice, ...]:
    """The code that computes the forward, or the backward."""
    dtype = torch.float32 if call.dtype is FP8 else call.dtype
    wanted = call.wanted if call.phase == "backward" else None
    _, computed_by = served_by_torch(call.spec, call.aux, call.q.shape, call.k.shape, call.v.shape, dtype, wanted)
    return (KernelChoice(computed_by, backend="cpu"),)


BACKEND = Backend("cpu", "flashtile.ops.attention.cpu", cpu_unsupported_reason, describe)
