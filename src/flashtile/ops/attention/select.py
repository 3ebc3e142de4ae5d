"""Which backend serves a call: a pure choice from facts about it, with its reason.

Forward and backward are chosen apart: (out, lse) mean the same in every backend, so that any backward can follow any
forward.
"""

from __future__ import annotations

import functools
import importlib
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from flashtile._backends import devices
from flashtile.ops.attention.hopper import configs as hopper
from flashtile.ops.attention.spec import FP8, AttentionSpec, SideInputs
from flashtile.ops.attention.split import configs as split
from flashtile.ops.common import backends
from flashtile.ops.common.backends import BackendChoice
from flashtile.ops.common.watch import watched

_MODULES = {
    "reference": "flashtile.ops.attention.reference",
    "cpu": "flashtile.ops.attention.cpu",
    "triton": "flashtile.ops.attention.triton.launch",
    "hopper": "flashtile.ops.attention.hopper.launch",
    "split": "flashtile.ops.attention.split.launch",
}
#: In the order in which "auto" tries them.
_AUTOMATIC = ("split", "hopper", "triton", "cpu")
_NO_SHORT_CALL = "it is for the forward of a few queries against many keys"
_NO_REFERENCE = "it holds the whole score matrix; it runs only when asked for by name"


def choose_backend(
    requested: str,
    device_type: str,
    dtype: torch.dtype,
    triton_missing: str | None,
    interpreting: bool,
    hopper_call: hopper.HopperCall | None = None,
    split_obstacle: str | None = _NO_SHORT_CALL,
) -> BackendChoice:
    """The choice, from facts alone. `hopper_call`: those that decide about the Hopper kernels; None away from a GPU.
    `split_obstacle`: why a call's keys are not split (`split_obstacle`).

    A backward asked for from "hopper" by name goes, where the Hopper kernels have none for it, to the portable kernels.
    """
    obstacles = {
        "split": _triton_obstacle(device_type, dtype, triton_missing, interpreting) or split_obstacle,
        "hopper": _hopper_obstacle(hopper_call, device_type, triton_missing, interpreting),
        "triton": _triton_obstacle(device_type, dtype, triton_missing, interpreting),
        "cpu": backends.cpu_obstacle(device_type),
        "reference": None,
    }
    if requested == "hopper" and obstacles["hopper"] and hopper_call and hopper_call.phase == "backward":
        requested = "triton"
    return backends.choose(requested, obstacles, _AUTOMATIC, f"{dtype} on {device_type}", interpreting, _NO_REFERENCE)


def _triton_obstacle(
    device_type: str, dtype: torch.dtype, triton_missing: str | None, interpreting: bool
) -> str | None:
    if interpreting and dtype is torch.bfloat16 and not triton_missing:
        return "Triton's interpreter multiplies bfloat16 wrongly; use float16 or float32 there"
    return backends.triton_obstacle(device_type, dtype, triton_missing, interpreting)


def _hopper_obstacle(
    call: hopper.HopperCall | None, device_type: str, triton_missing: str | None, interpreting: bool
) -> str | None:
    if call is None:
        return f"its kernels are for sm_90, and the tensors are on {device_type}"
    if triton_missing:
        return triton_missing
    if interpreting:
        return "Triton's interpreter does not know the language of its kernels"
    return hopper.obstacle(call)


def implementation(
    phase: hopper.Phase,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    side: SideInputs,
    spec: AttentionSpec,
    backend: str,
    learned_slopes: bool = False,
) -> ModuleType:
    """The module that serves a phase (`forward` or `backward`, its functions) of a call. `learned_slopes`: the backward
    is to give the gradient of `alibi_slopes`.

    Raises:
        ValueError: the backend asked for, or every one for "auto", cannot serve it.
    """
    if backend == "split" and phase == "backward":
        backend = "auto"
    if not q.is_cuda:
        why_not = split_obstacle(phase, q, k, side, spec, backend, 1)
        return _implementation(backend, q.device.type, q.dtype, None, why_not)
    multiprocessors = devices.multiprocessors(q.device)
    why_not = split_obstacle(phase, q, k, side, spec, backend, multiprocessors)
    return _gpu_implementation(backend, q.device, phase, why_not, *_hopper_facts(q, k, v, side, spec), learned_slopes)


def split_obstacle(
    phase: hopper.Phase, q: Tensor, k: Tensor, side: SideInputs, spec: AttentionSpec, backend: str, multiprocessors: int
) -> str | None:
    """Why the keys of a call are not split: for "auto" also that it would not be faster; None where they are.
    `multiprocessors`: of the device; 1 for a CPU."""
    if q.dtype is FP8:
        return "it has no 8-bit inputs"
    automatic = backend == "auto" and multiprocessors > 1 and q.shape[-3] <= split.MAX_QUERIES
    if phase == "backward" or not (automatic or backend == "split"):
        return _NO_SHORT_CALL
    tables = side.bias is not None or side.mask is not None or side.block_lists is not None
    packed = side.cu_seqlens_q is not None
    return _split_obstacle(q.shape, k.shape, packed, tables, spec, multiprocessors if automatic else None)


@functools.lru_cache(maxsize=4096)
def _split_obstacle(
    q_shape: tuple[int, ...],
    k_shape: tuple[int, ...],
    packed: bool,
    tables: bool,
    spec: AttentionSpec,
    multiprocessors: int | None,
) -> str | None:
    """`multiprocessors`: None where the gain is not asked for."""
    facts = split.facts_of(q_shape, k_shape, packed, tables, spec)
    return split.obstacle(facts) or (None if multiprocessors is None else split.no_gain(facts, multiprocessors))


def column_sums_implementation(q: Tensor, backend: str) -> ModuleType:
    """The module whose `column_sums` serves a call.

    Raises:
        ValueError: the backend asked for, or every one for "auto", cannot serve it.
    """
    return _column_sums_implementation(backend, q.device.type, q.dtype)


def choose_column_sums(
    requested: str, device_type: str, dtype: torch.dtype, triton_missing: str | None, interpreting: bool
) -> BackendChoice:
    """Which backend serves `flashtile.attention_column_sums`, from facts alone."""
    obstacles = {
        "split": "it has no kernel for column sums; backend='triton' has one",
        "hopper": "it has no kernel for column sums; backend='triton' has one, on sm_90 too",
        "triton": _triton_obstacle(device_type, dtype, triton_missing, interpreting),
        "cpu": backends.cpu_obstacle(device_type),
        "reference": None,
    }
    return backends.choose(requested, obstacles, _AUTOMATIC, f"{dtype} on {device_type}", interpreting, _NO_REFERENCE)


@functools.cache
def _column_sums_implementation(backend: str, device_type: str, dtype: torch.dtype) -> ModuleType:
    choice = choose_column_sums(backend, device_type, dtype, devices.triton_missing(), devices.interpreting())
    if choice.backend is None:
        raise ValueError(f"backend: {backend!r} cannot serve this call: {choice.reason}")
    return importlib.import_module(_MODULES[choice.backend])


def hopper_call(
    phase: hopper.Phase,
    arch: str,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    side: SideInputs,
    spec: AttentionSpec,
    learned_slopes: bool,
) -> hopper.HopperCall:
    """The facts that decide whether the Hopper kernels serve a call."""
    return hopper.HopperCall(phase, arch, *_hopper_facts(q, k, v, side, spec))._replace(learned_slopes=learned_slopes)


def _hopper_facts(q: Tensor, k: Tensor, v: Tensor, side: SideInputs, spec: AttentionSpec) -> tuple:
    """Those of a call itself, in the order of `HopperCall`."""
    head_dim = q.shape[-1]
    # Of a scale that is not positive, the sign goes into a copy of q, whose rows lie side by side.
    readable = hopper.aligned(q, k, v) and (spec.scale > 0 or head_dim * q.itemsize % 16 == 0)
    dropout, key_lengths = spec.dropout_p > 0, side.key_lengths is not None
    tables, placed = side.bias is not None or side.mask is not None, spec.origin is not None
    block_tile = None if spec.block_shape is None else spec.block_shape[2:]
    return q.dtype, head_dim, v.shape[-1], readable, dropout, key_lengths, tables, placed, block_tile


@functools.lru_cache(maxsize=4096)
def _gpu_implementation(
    backend: str, device: torch.device, phase: hopper.Phase, split_obstacle: str | None, *facts: Any
) -> ModuleType:
    call = hopper.HopperCall(phase, devices.device_facts(device).arch, *facts)
    return _implementation(backend, device.type, call.dtype, call, split_obstacle)


@functools.cache
def _implementation(
    backend: str,
    device_type: str,
    dtype: torch.dtype,
    hopper_call: hopper.HopperCall | None,
    split_obstacle: str | None,
) -> ModuleType:
    triton_missing, interpreting = devices.triton_missing(), devices.interpreting()
    choice = choose_backend(backend, device_type, dtype, triton_missing, interpreting, hopper_call, split_obstacle)
    if choice.backend is None:
        raise ValueError(f"backend: {backend!r} cannot serve this call: {choice.reason}")
    call = f"attention, {dtype} on {device_type}"
    if hopper_call is not None:
        call = f"attention {hopper_call.phase}, {dtype} on {hopper_call.arch}"
    backends.log_choice(call, backend, choice)
    return watched("attention", choice.backend, importlib.import_module(_MODULES[choice.backend]))
