"""Which backend serves a call: the list of backends, and the facts of a call that they decide by.

Forward and backward are chosen apart: (out, lse) mean the same in every backend, so that any backward can follow any
forward.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from flashtile._backends import devices
from flashtile._backends.alignment import aligned
from flashtile.ops.attention.backend import AttentionCall, KernelChoice, Phase, facts_of_side
from flashtile.ops.attention.cpu.backend import BACKEND as CPU
from flashtile.ops.attention.hopper.backend import BACKEND as HOPPER
from flashtile.ops.attention.spec import NOTHING_WANTED, AttentionSpec, SideInputs, Wanted
from flashtile.ops.attention.split.backend import BACKEND as SPLIT
from flashtile.ops.attention.triton.backend import BACKEND as TRITON
from flashtile.ops.common.backends import Backend, BackendChoice, Backends


def _reference_unsupported_reason(call: AttentionCall) -> str | None:
    if call.requested == "auto":
        return "it holds the whole score matrix; it runs only when asked for by name"
    return None


def _describe_reference(call: AttentionCall) -> tuple[KernelChoice, ...]:
    return (KernelChoice("eager PyTorch, with the whole score matrix in memory"),)


REFERENCE = Backend(
    "reference", "flashtile.ops.attention.reference", _reference_unsupported_reason, _describe_reference
)


def _call_of(requested: str, phase: Phase, device: torch.device, *facts: Any) -> AttentionCall:
    """`facts`: the fields of the description from dtype on."""
    gpu = devices.device_facts(device), devices.multiprocessors(device)
    return AttentionCall(requested, phase, device.type, *gpu, devices.triton_missing(), devices.interpreting(), *facts)


class AttentionBackends(Backends[AttentionCall]):
    """Backends of attention. If one was asked for by name, and serves the forward of a call but not its backward,
    another one computes the gradients."""

    def choose(self, call: AttentionCall) -> BackendChoice:
        if call.phase == "backward" and call.requested != "auto":
            supports = self.by_name[call.requested].unsupported_reason
            # The backward may get its tensors in another layout than the forward had.
            if supports(call) and not supports(call._replace(phase="forward", aligned=True)):
                call = call._replace(requested="auto")
        return super().choose(call)


#: In the order in which "auto" tries them. A new backend is a line here.
BACKENDS = AttentionBackends("attention", _call_of, (SPLIT, HOPPER, TRITON, CPU, REFERENCE))


def implementation(
    phase: Phase,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    side: SideInputs,
    spec: AttentionSpec,
    backend: str,
    wanted: Wanted = NOTHING_WANTED,
) -> ModuleType:
    """The module whose function `phase` serves a call. `wanted`: of a backward.

    Raises:
        ValueError: the backend asked for, or every one for "auto", cannot serve it.
    """
    return BACKENDS.implementation(
        backend,
        phase,
        q.device,
        q.dtype,
        q.shape,
        k.shape,
        v.shape,
        q.is_cuda and aligned(q, k, v),
        *facts_of_side(side),
        wanted,
        spec,
        q.dtype is torch.float32 and torch._C._get_cublas_allow_tf32(),
    )
