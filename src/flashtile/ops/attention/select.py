"""The choice of a backend for a call, and running the call on it. Forward and backward are chosen apart: (out, lse)
mean the same in every backend."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from flashtile._backends import together
from flashtile._backends.alignment import aligned
from flashtile._backends.allocate import contiguous_strides
from flashtile.ops.attention import checks
from flashtile.ops.attention.call import (
    Call,
    KernelChoice,
    Phase,
    TensorFacts,
    describe_backward,
    describe_call,
    seen_call,
    unseen_gradients,
)
from flashtile.ops.attention.cpu import BACKEND as CPU
from flashtile.ops.attention.hopper import BACKEND as HOPPER
from flashtile.ops.attention.score_program import check_captured
from flashtile.ops.attention.spec import (
    NOTHING_WANTED,
    AttentionSpec,
    BackwardInputs,
    Gradients,
    SideInputs,
    Wanted,
    out_dtype,
    wanted_gradients,
)
from flashtile.ops.attention.split import BACKEND as SPLIT
from flashtile.ops.attention.triton import BACKEND as TRITON
from flashtile.ops.common import watch
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
    """Backends of attention. If the one asked for has no backward, another one computes the gradients."""

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
    """The module whose function `phase` serves a call; ValueError if the backend asked for, or every one, cannot.
    `wanted`: of a backward."""
    return BACKENDS.implementation(describe_call(phase, (q, k, v), side, spec, backend, wanted))


def serve_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    side: SideInputs,
    spec: AttentionSpec,
    backend: str,
    plain: bool,
    recorded: bool = False,
) -> tuple[Tensor, ...]:
    """Runs the forward. `plain`: no tensor beside q, k and v. `recorded`: by autograd, so a backward follows."""
    if not plain:
        checks.check_values(side, q.shape[0], k.shape[0])
    _check_program(side, spec)
    wanted = wanted_gradients(side) if recorded else NOTHING_WANTED
    if seen := seen_call(q, k, v, side, spec):
        k, v, side, spec, *_ = seen
    q, k, v = (readable_rows(tensor, spec) for tensor in (q, k, v))
    module = implementation("forward", q, k, v, side, spec, backend)
    side = side if plain else readable_side(side)
    if not recorded:
        return owned(module.forward(q, k, v, side, spec))
    with together.Soon(functools.partial(backward_plans, q, k, v, side, spec, backend, wanted=wanted)):
        return owned(module.forward(q, k, v, side, spec))


def owned(results: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """The results, without views: autograd refuses to change a view in place that an autograd.Function returned."""
    return tuple(tensor.detach() if tensor._is_view() else tensor for tensor in results)


def _check_program(side: SideInputs, spec: AttentionSpec) -> None:
    """Refuses a score program that does not belong to the captured tensors."""
    if spec.score_program is not None:
        check_captured(spec.score_program, side.captured)


def backward_plans(
    q: Tensor, k: Tensor, v: Tensor, side: SideInputs, spec: AttentionSpec, backend: str, wanted: Wanted
) -> Sequence[Any]:
    """The launches of the backward that follows if out has a contiguous gradient and lse none; or nothing."""
    spec = spec._replace(returns_max_scores=False)
    if seen := seen_call(q, k, v, side, spec):
        k, v, side, spec, *_ = seen
    try:
        module = implementation("backward", q, k, v, side, spec, backend, wanted=wanted)
    except ValueError:  # the backward will say so
        return ()
    plan = prepared_function(module, "plan_backward")
    if plan is None or spec.scale <= 0 or not (q.numel() and k.numel() and v.numel()):
        return ()
    dout = torch.empty(*q.shape[:-1], v.shape[-1], dtype=out_dtype(q.dtype), device="meta")
    call = describe_backward(BackwardInputs(dout, None, q, k, v, dout, dout), side, spec, wanted)
    launches: Sequence[Any] = plan(call).pipeline.launches
    return launches


def serve_backward(
    given: BackwardInputs, side: SideInputs, spec: AttentionSpec, wanted: Wanted, backend: str
) -> Gradients:
    """Runs the backward of the backend that serves the call."""
    _check_program(side, spec)
    dout, dlse, q, k, v, out, lse = given
    bias = side.bias
    seen = seen_call(q, k, v, side, spec)
    if seen is not None:
        k, v, side, spec, *_ = seen
    dout, q, k, v = (readable_rows(tensor, spec) for tensor in (dout, q, k, v))
    module = implementation("backward", q, k, v, side, spec, backend, wanted=wanted)
    side = side if side.plain else readable_side(side)
    gradients = module.backward(BackwardInputs(dout, dlse, q, k, v, out, lse), side, spec, wanted)
    return gradients if seen is None else unseen_gradients(gradients, given.k, given.v, bias, seen)


def readable_rows(tensor: Tensor, spec: AttentionSpec) -> Tensor:
    """Kernels take any strides whose last dimension is contiguous. In the batch-invariant mode a GPU also gets a copy
    of what TMA cannot read: which backend serves a call must not depend on where its tensors lie."""
    tensor = rows_contiguous(tensor)
    return tensor if read_as_given(spec, tensor) else tensor.clone(memory_format=torch.contiguous_format)


def rows_contiguous(tensor: Tensor) -> Tensor:
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


def read_as_given(spec: AttentionSpec, *tensors: Tensor) -> bool:
    """Whether `readable_rows` copies no tensors whose rows are contiguous."""
    return not spec.batch_invariant or all(
        not tensor.is_cuda or aligned(tensor) or (tensor.is_contiguous() and tensor.data_ptr() % 16 == 0)
        for tensor in tensors
    )


def readable_side(side: SideInputs) -> SideInputs:
    """Copies small side inputs that are not contiguous. Bias, mask and factors may have any strides."""
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


def prepared_unmasked(
    q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec, backend: str
) -> Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor] | None] | None:
    """A function for calls like this one without a mask, for any number of keys; None where the backend has none."""
    module = implementation("forward", q, k, v, SideInputs(), spec, backend)
    prepare = prepared_function(module, "prepare_unmasked")
    return None if prepare is None or not lie_as_usual(q, k, v) else prepare(q, k, v, spec)


def lie_as_usual(*tensors: Tensor) -> bool:
    """Whether rows are contiguous, on a GPU at multiples of 16 bytes: then the layout decides the backend."""
    bits = 0
    for tensor in tensors:
        if tensor.stride(-1) != 1:
            return False
        if tensor.is_cuda:
            bits |= tensor.data_ptr()
    return bits % 16 == 0


def prepared_function(module: ModuleType, name: str) -> Callable[..., Any] | None:
    """A backend module's function that decides once for calls alike; None without, or if calls are watched."""
    return None if watch.watching() else getattr(module, name, None)
