"""Tasks and their labelled sequences, and how many processes make them without changing them."""

from __future__ import annotations

import math
import multiprocessing
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from itertools import repeat
from typing import Any, NamedTuple

import torch
from torch import Tensor

#: Examples that share a generator of random numbers: the unit of work of a process.
_PART = 128
#: Batches are as wide as a multiple of this.
_WIDTH = 64


class Examples(NamedTuple):
    """Sequences with a class each: `tokens` uint8 `[N, S]`, 0 past a length; `lengths` int32 `[N]`; `labels` int64
    `[N]`."""

    tokens: Tensor
    lengths: Tensor
    labels: Tensor

    def __len__(self) -> int:
        return int(self.tokens.shape[0])

    def split(self, count: int) -> tuple[Examples, Examples]:
        """All but the last `count`, and those."""
        return Examples(*(t[:-count] for t in self)), Examples(*(t[-count:] for t in self))

    def batch(self, rows: Tensor, device: torch.device) -> Examples:
        """Some rows on a device, cut after the longest of them, so that there are few sizes of batches."""
        lengths = self.lengths[rows]
        tokens = self.tokens[rows, : _WIDTH * math.ceil(int(lengths.max()) / _WIDTH)]
        return Examples(*(t.to(device, non_blocking=True) for t in (tokens, lengths, self.labels[rows])))

    def batches(self, size: int, device: torch.device) -> Iterator[Examples]:
        """All of them, in order."""
        for rows in torch.arange(self.tokens.shape[0]).split(size):
            yield self.batch(rows, device)


@dataclass(frozen=True)
class Task:
    """One of Long Range Arena's tasks. `make`: number, seed, options, workers -> examples. `context`: longest sequence.
    `grid`: side of the image whose pixels are the tokens, or None."""

    make: Callable[[int, int, Any, int], Examples]
    options: Any
    vocabulary: int
    classes: int
    context: int
    grid: int | None = None


def padded(sequences: list[list[int]], labels: list[int]) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens, lengths and labels of sequences of different lengths."""
    lengths = torch.tensor([len(sequence) for sequence in sequences], dtype=torch.int32)
    tokens = torch.zeros(len(sequences), int(lengths.max()), dtype=torch.uint8)
    for row, sequence in zip(tokens, sequences):
        row[: len(sequence)] = torch.tensor(sequence, dtype=torch.uint8)
    return tokens, lengths, torch.tensor(labels)


def in_parts(
    make: Callable[[int, int, Any], tuple[Tensor, Tensor, Tensor]], count: int, seed: int, limits: Any, workers: int
) -> Examples:
    """`count` examples from `make(count, seed, limits)`, part by part, each with a seed of its own."""
    counts = [min(_PART, count - first) for first in range(0, count, _PART)]
    seeds = [seed * 1_000_003 + part for part in range(len(counts))]
    if workers > 1:
        # Not forked: the process may have threads and a GPU.
        with ProcessPoolExecutor(workers, multiprocessing.get_context("spawn")) as pool:
            parts = list(pool.map(make, counts, seeds, repeat(limits)))
    else:
        parts = list(map(make, counts, seeds, repeat(limits)))
    longest = max(tokens.shape[1] for tokens, _, _ in parts)
    tokens = [torch.nn.functional.pad(tokens, (0, longest - tokens.shape[1])) for tokens, _, _ in parts]
    return Examples(torch.cat(tokens), *(torch.cat([part[place] for part in parts]) for place in (1, 2)))
