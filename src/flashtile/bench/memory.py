"""The memory that calls take beside what is there before."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor


def peak_facts(call: Callable[[], Iterable[Tensor]], inputs: Sequence[Tensor]) -> dict[str, Any]:
    """`peak_mib` of a row, in MiB: the largest amount that a call takes on a GPU beside its inputs and results; nothing
    elsewhere.

    Args:
        call: returns its results, gradients for example; those in the memory of an input are no results.
        inputs: tensors that are there before.
    """
    device = inputs[0].device
    if device.type != "cuda":
        return {}
    results, peak = _called(call, device)
    given = {tensor.untyped_storage().data_ptr() for tensor in inputs}
    own = {(storage := t.untyped_storage()).data_ptr(): storage.nbytes() for t in results}
    kept = sum(size for pointer, size in own.items() if pointer not in given)
    return {"peak_mib": round((peak - kept) / 2**20, 1)}


def step_facts(step: Callable[[], Any], device: torch.device) -> dict[str, Any]:
    """`peak_mib` of a training step, in MiB: the largest amount that it takes on a GPU beside what was there; nothing
    elsewhere."""
    return {"peak_mib": _called(step, device)[1] / 2**20} if device.type == "cuda" else {}


def _called(call: Callable[[], Any], device: torch.device) -> tuple[Any, int]:
    """What a call returns, and the bytes by which memory grew at most."""
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    results = call()
    torch.cuda.synchronize(device)
    return results, torch.cuda.max_memory_allocated(device) - before
