"""The choice of a backend for a call: the list of backends, and the facts of a call that they decide by.

Forward and backward are chosen apart: (out, lse) mean the same in every backend, so that any backward can follow any
forward.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

from torch import Tensor

from flashtile._backends.allocate import contiguous_strides
from flashtile.ops.attention.call import Call, KernelChoice, Phase, TensorFacts, describe_call
from flashtile.ops.attention.cpu.backend import BACKEND as CPU
from flashtile.ops.attention.hopper.backend import BACKEND as HOPPER
from flashtile.ops.attention.spec import NOTHING_WANTED, AttentionSpec, SideInputs, Wanted
from flashtile.ops.attention.split.backend import BACKEND as SPLIT
from flashtile.ops.attention.triton.backend import BACKEND as TRITON
from flashtile.ops.attention.triton.backend import invariant_tiles as invariant_tiles
from flashtile.ops.common.backends import Backend, BackendChoice, Backends


def _reference_unsupported_reason(call: Call) -> str | None:
    if call.requested == "auto":
        return "it holds the whole score matrix; it runs only when asked for by name"
    if call.spec.batch_invariant:
        return "its products are PyTorch's, whose bits depend on the sizes of a call, and this one is batch-invariant"
    return None


def _describe_reference(call: Call) -> tuple[KernelChoice, ...]:
    return (KernelChoice("eager PyTorch, with the whole score matrix in memory"),)


REFERENCE = Backend(
    "reference", "flashtile.ops.attention.reference", _reference_unsupported_reason, _describe_reference
)


class AttentionBackends(Backends):
    """Backends of attention. If one was asked for by name, and serves the forward of a call but not its backward,
    another one computes the gradients."""

    def choose(self, call: Call) -> BackendChoice:
        if call.phase == "backward" and call.requested != "auto":
            supports = self.by_name[call.requested].unsupported_reason
            # The backward may get its tensors in another layout than the forward had.
            if supports(call) and not supports(call._replace(phase="forward", **_aligned(call))):
                call = call._replace(requested="auto")
        return super().choose(call)


def _aligned(call: Call) -> dict[str, Any]:
    """q, k and v where kernels can read them best."""
    return {
        name: TensorFacts(of.dtype, of.shape, contiguous_strides(of.shape))
        for name, of in (("q", call.q), ("k", call.k), ("v", call.v))
    }


#: In the order in which "auto" tries them. A new backend is a line here.
BACKENDS = AttentionBackends("attention", lambda call: call, (SPLIT, HOPPER, TRITON, CPU, REFERENCE))


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
    return BACKENDS.implementation(describe_call(phase, (q, k, v), side, spec, backend, wanted))
