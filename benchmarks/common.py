"""The common parts of these programs: command line, text to learn from, steps that fit the time, a stopwatch."""

from __future__ import annotations

import argparse
import hashlib
import itertools
import sys
import sysconfig
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from flashtile.bench.record import Recorder, command_line

#: More is not read; a few thousand steps see less.
_MOST_BYTES = 64 * 2**20
_ENDINGS = {".py", ".txt", ".md", ".rst"}
#: Share of the minutes for training steps; the rest is for data, compilation and evaluation.
_SHARE = 0.75


class Program(argparse.ArgumentParser):
    """The command line of a program, with `--device` and `--output` beside its own options."""

    def __init__(self, name: str, description: str, written: str) -> None:
        super().__init__(prog=f"python -m benchmarks.{name}", description=description.partition("\n")[0])
        self.add_argument("--device", choices=("cpu", "cuda"), help="default: a GPU where there is one")
        self.add_argument("--output", type=Path, help=f"file for the record, written after every {written}")

    def start(self, arguments: Sequence[str] | None) -> tuple[argparse.Namespace, torch.device, Recorder]:
        """The options, the device, and the record."""
        given = self.parse_args(arguments)
        device = torch.device(given.device or ("cuda" if torch.cuda.is_available() else "cpu"))
        return given, device, Recorder(device, command_line(self.prog, arguments), given.output)

    def fail(self, error: Exception) -> int:
        """Prints what is wrong; the exit status."""
        print(f"{self.prog}: {error}", file=sys.stderr)
        return 2


@dataclass(frozen=True)
class Text:
    """Bytes to learn from: uint8 `tokens`, in one dimension. `documents`: where each file begins, and the end."""

    tokens: Tensor
    name: str
    sha256: str
    documents: list[int]


def load_text(data: Path | None = None) -> Text:
    """A file, all text files of a folder in the order of their names, or the sources and help texts of Python's
    standard library. Raises ValueError if there is no text."""
    folder = Path(sysconfig.get_path("stdlib")) if data is None else data
    # What is installed beside the standard library is left out, unless the user named the folder.
    left_out = {"site-packages", "dist-packages", "__pycache__"} if data is None else set()
    found = [folder] if folder.is_file() else sorted(path for path in folder.rglob("*") if path.suffix in _ENDINGS)
    pieces, size = [], 0
    for file in found:
        if size < _MOST_BYTES and file.is_file() and not left_out & set(file.parts):
            pieces.append(file.read_bytes()[: _MOST_BYTES - size])
            size += len(pieces[-1])
    if not size:
        raise ValueError(f"data: expected a file or a folder with text, got {folder}; name another with --data")
    whole = b"".join(pieces)
    name = f"Python {sysconfig.get_python_version()}'s standard library" if data is None else data.name
    tokens = torch.frombuffer(bytearray(whole), dtype=torch.uint8)
    starts = itertools.accumulate(map(len, pieces), initial=0)
    return Text(tokens, name, hashlib.sha256(whole).hexdigest(), list(starts))


def batch_of(text: Text, batch: int, length: int, seed: int) -> Tensor:
    """int64 `[batch, length]`: pieces of the text at places that depend on the seed alone. Raises ValueError if the
    text is shorter than a piece."""
    if len(text.tokens) <= length:
        raise ValueError(f"data: expected more than {length} bytes, got {len(text.tokens)}; take a shorter context")
    generator = torch.Generator().manual_seed(seed)
    places = torch.randint(len(text.tokens) - length, (batch,), generator=generator)
    return torch.stack([text.tokens[place : place + length] for place in places.tolist()]).long()


@dataclass(frozen=True)
class Budget:
    """Either a number of steps for each run, or minutes for all of them together. Raises ValueError if both are given,
    or neither, or one is not positive."""

    steps: int | None = None
    minutes: float | None = None

    def __post_init__(self) -> None:
        given = [value for value in (self.steps, self.minutes) if value is not None]
        if len(given) != 1 or given[0] <= 0:
            raise ValueError(
                f"budget: expected either --steps or --minutes, and more than 0, got steps={self.steps} and "
                f"minutes={self.minutes}"
            )

    def steps_each(self, step_seconds: Sequence[float], repeats: int = 1) -> int:
        """Steps of each run, the same for all, when one step of each takes so many seconds and there are so many
        repetitions of them."""
        if self.steps is not None:
            return self.steps
        assert self.minutes is not None
        return max(1, int(60 * self.minutes * _SHARE / (repeats * sum(step_seconds))))


class Stopwatch:
    """Time and peak memory since it was made, without waiting for the device between steps. What was allocated before
    counts as well."""

    def __init__(self, device: torch.device) -> None:
        self._cuda, self._device = device.type == "cuda", device
        self._wait()
        if self._cuda:
            torch.cuda.reset_peak_memory_stats(device)
        self._begin = time.perf_counter()

    def seconds(self) -> float:
        """When the device has done everything."""
        self._wait()
        return time.perf_counter() - self._begin

    def peak_mib(self) -> float | None:
        """Largest memory of tensors on the device; None where PyTorch does not count it."""
        return torch.cuda.max_memory_allocated(self._device) / 2**20 if self._cuda else None

    def _wait(self) -> None:
        if self._cuda:
            torch.cuda.synchronize(self._device)
