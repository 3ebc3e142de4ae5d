"""The memory that a call takes beside its inputs and what it returns."""

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
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    results = call()
    torch.cuda.synchronize(device)
    given = {tensor.untyped_storage().data_ptr() for tensor in inputs}
    own = {(storage := t.untyped_storage()).data_ptr(): storage.nbytes() for t in results}
    kept = sum(size for pointer, size in own.items() if pointer not in given)
    return {"peak_mib": round((torch.cuda.max_memory_allocated(device) - before - kept) / 2**20, 1)}
