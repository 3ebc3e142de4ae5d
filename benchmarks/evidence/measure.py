"""Time and memory of training."""

from __future__ import annotations

import time

import torch


class Stopwatch:
    """Time of steps and peak memory, without waiting for the device between steps."""

    def __init__(self, device: torch.device) -> None:
        self._cuda, self._device = device.type == "cuda", device

    def start(self) -> None:
        """Begins to count; what was allocated before counts as well."""
        self._wait()
        if self._cuda:
            torch.cuda.reset_peak_memory_stats(self._device)
        self._begin = time.perf_counter()

    def seconds(self) -> float:
        """Since the start, when the device has done everything."""
        self._wait()
        return time.perf_counter() - self._begin

    def peak_mib(self) -> float | None:
        """Largest memory of tensors on the device since the start; None where PyTorch does not count it."""
        return torch.cuda.max_memory_allocated(self._device) / 2**20 if self._cuda else None

    def _wait(self) -> None:
        if self._cuda:
            torch.cuda.synchronize(self._device)
