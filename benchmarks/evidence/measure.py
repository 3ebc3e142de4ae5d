"""Time and memory of training, and records of them."""

from __future__ import annotations

import shlex
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from flashtile.bench.record import Record, make_record, write_record


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


def make_row(op: str, phase: str, impl: str, case: dict[str, Any], **found: Any) -> dict[str, Any]:
    """A row in the format of benchmarks/results/README.md; what is not given is null."""
    return {"op": op, "phase": phase, "impl": impl, "case": case, "ms": None, "tflops": None, "gbps": None,
            "error": None, **found}  # fmt: skip


def command_of(module: str, arguments: Sequence[str] | None) -> str:
    """How a script was started: its arguments (None = the program's own), without the place of its output."""
    kept: list[str] = []
    given = iter(sys.argv[1:] if arguments is None else arguments)
    for argument in given:
        if argument == "--output":
            next(given, None)
        elif not argument.startswith("--output="):
            kept.append(argument)
    return shlex.join(["python", "-m", module, *kept])


class Recorder:
    """A record that grows, and is written whenever it has grown, so that a run that is cut short leaves its rows.

    Machine, versions and commit are those of the start: what the run has loaded.
    """

    def __init__(self, device: torch.device, command: str, output: Path | None) -> None:
        self.record: Record = make_record(device, command, [])
        self._output = output

    @property
    def rows(self) -> list[dict[str, Any]]:
        return self.record["rows"]

    def add(self, rows: Sequence[dict[str, Any]]) -> None:
        """Takes some more rows."""
        self.rows.extend(rows)
        if self._output is not None:
            write_record(self.record, self._output)
