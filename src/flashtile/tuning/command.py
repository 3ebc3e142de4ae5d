"""What `flashtile tune` does: asks what calls ask, tunes one key after the other, and keeps the table."""

from __future__ import annotations

import itertools
import os
import runpy
import shlex
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import flashtile
from flashtile._backends import tuned
from flashtile._backends.devices import device_facts
from flashtile._backends.tuned import Lookup, TunedRow, as_data, watching
from flashtile.ops.common.split_keys import configs as split_keys
from flashtile.ops.cross_entropy import kernels as cross_entropy
from flashtile.ops.layer_norm import kernels as layer_norm
from flashtile.tuning.choice import UntunableError
from flashtile.tuning.measure import CHOICES, compilers, tune

__all__ = ["Lookup", "TunedRow", "as_data", "watching"]

#: Tokens of a problem, and on a GPU with less memory than so many bytes.
_TOKENS, _FEW_TOKENS, _LITTLE_MEMORY = 16384, 8192, 12 * 2**30


def run_program(command: str) -> None:
    """Runs a Python program in this process: `train.py --steps 10`, or `-m package.train`."""
    arguments, before = shlex.split(command), sys.argv
    module = arguments[:1] == ["-m"]
    sys.argv = arguments[module:]
    try:
        run: Callable[..., Any] = runpy.run_module if module else runpy.run_path
        run(sys.argv[0], run_name="__main__")
    except SystemExit as end:
        if end.code:
            raise
    finally:
        sys.argv = before


def ask(calls: Any, operations: Sequence[str], dtypes: Sequence[torch.dtype], device: torch.device) -> None:
    """Asks what calls of some operations ask. `calls`: their sizes, as the options of `flashtile tune`."""
    facts, masks = device_facts(device), (False, True) if calls.causal is None else (calls.causal,)
    if "attention" in operations:
        for head_dim, dtype, causal, seq in itertools.product(calls.head_dim, dtypes, masks, calls.seq):
            shape = max(1, _TOKENS // seq), seq, calls.heads, head_dim
            q, k, v = (torch.empty(shape, dtype=dtype, device="meta") for _ in range(3))
            flashtile.explain(q, k, v, causal=causal, backend=calls.backend, device=device)
    if "decoding" in operations:  # single tokens, of few sequences and of many
        rows = calls.heads // calls.heads_kv
        for head_dim, dtype, page_size in itertools.product(calls.head_dim, dtypes, calls.page_size):
            for many in (False, True):
                key = split_keys.TileKey(dtype, head_dim, head_dim, rows, page_size, many=many)
                split_keys.choose_tiles(facts, key)
    for width in calls.width if "norms" in operations else ():  # RMS and layer norms, with and without a residual
        layer_norm.forward_config(layer_norm.ForwardKey(width), facts)
        for sums, bytes_per_column in itertools.product((1, 2), (4, 6)):
            layer_norm.backward_config(layer_norm.BackwardKey(width, sums, bytes_per_column, False), facts)
    for vocabulary in calls.vocabulary if "losses" in operations else ():
        for itemsize, backward in itertools.product((2, 4), (False, True)):
            cross_entropy.tile_config(cross_entropy.TileKey(vocabulary, itemsize, 16 // itemsize, backward), facts)


@dataclass(frozen=True)
class Outcome:
    """What became of a key. `row`: None where there is none; `why` says why. `unfinished`: as the time was over."""

    lookup: Lookup
    row: TunedRow | None
    why: str = ""
    unfinished: bool = False


class TunedTable:
    """The table of this machine's GPU, as a file that grows."""

    def __init__(self, device: torch.device) -> None:
        self.gpu = torch.cuda.get_device_name(device) if device.type == "cuda" else "interpreter"
        self.path = tuned.path_for(self.gpu)
        self.rows: list[TunedRow] = []
        if self.path.exists():
            try:
                self.rows = list(tuned.read(self.path, self.gpu).rows)
            except ValueError:
                self.rows = []  # of other versions: a new table takes its place

    def has(self, lookup: Lookup) -> bool:
        key = as_data(lookup.key)
        return any(row.choice == lookup.choice and row.key == key for row in self.rows)

    def add(self, row: TunedRow) -> None:
        """Adds a row, in the place of one for the same key, and writes the file."""
        others = [each for each in self.rows if (each.choice, each.key) != (row.choice, row.key)]
        self.rows = [*others, row]
        tuned.write(self.path, self.gpu, self.rows)

    def export(self, path: Path) -> None:
        """Writes a copy, for another machine with such a GPU."""
        tuned.write(path, self.gpu, self.rows)

    def reset(self) -> None:
        self.path.unlink(missing_ok=True)
        self.rows = []


def tune_all(
    lookups: Sequence[Lookup],
    table: TunedTable,
    device: torch.device,
    seconds: float,
    say: Callable[[int, str], None],
    jobs: int | None = None,
) -> Iterator[Outcome]:
    """Tunes one key after the other, until the time is over. Rows are in the table as soon as they are found. `say`:
    told the number of keys that are done, and what is done now. `jobs`: processes that compile; default one for each
    core."""
    until, tokens = time.monotonic() + seconds, _tokens(device)
    # What is timed by a CUDA graph cannot be captured on the default stream.
    stream = torch.cuda.stream(torch.cuda.Stream(device)) if device.type == "cuda" else nullcontext()
    with compilers(jobs or os.cpu_count() or 1) as pool, stream:
        for done, lookup in enumerate(lookups):
            if lookup.choice not in CHOICES:
                yield Outcome(lookup, None, "it is not tuned")
                continue
            if time.monotonic() > until:
                yield Outcome(lookup, None, "the time is over; run the command again to go on", True)
                continue

            def tell(what: str, done: int = done, lookup: Lookup = lookup) -> None:
                say(done, f"{lookup.choice}: {what}")

            try:
                row = tune(lookup, device, tokens, pool, until, tell)
            except UntunableError as error:
                yield Outcome(lookup, None, f"{error} are not tuned")
                continue
            table.add(row)
            yield Outcome(lookup, row)


def _tokens(device: torch.device) -> int:
    if device.type == "cpu":
        return 4
    memory = torch.cuda.get_device_properties(device).total_memory
    return _TOKENS if memory >= _LITTLE_MEMORY else _FEW_TOKENS


def in_words(data: dict[str, Any]) -> str:
    """A key or a cut, without what it has not: `bfloat16, head_dim 128, banded`."""
    words = (
        value if name == "dtype" else name if value is True else f"{name} {value}"
        for name, value in data.items()
        if value not in (None, False, 0) and (name, value) not in (("precision", "ieee"), ("resident", 1))
    )
    return ", ".join(map(str, words))
