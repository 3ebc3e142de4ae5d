"""Offline tuner of attention over a cache: times tiles and numbers of splits on the GPU of this machine, beside a copy.

    python tools/tune_decode.py --output decode.json [--cases 1x4096 8x32768 32x32768] [--page 16] [--head-dim 128]

Prints, for each case (sequences × rows in the cache), the cuts from fast to slow, with GB/s of the cache and what part
of a copy's GB/s that is (of as many bytes, read and written). The cut that a call takes by itself is marked. A person
copies the winner, with its reason, into `flashtile/ops/common/split_keys/configs.py`; nothing is tuned on a user's
machine. A cut must give the results of the first before its time counts.

    --sweep tiles    tiles of the table of candidates, each with the splits that they choose (default)
    --sweep splits   the call's own tiles, with other numbers of splits
    --sweep both     all pairs
"""

from __future__ import annotations

import argparse
import itertools
import json
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor
from tuning import DEVICE, choosing, milliseconds, time_right

import flashtile
from flashtile._backends.devices import device_facts, multiprocessors
from flashtile.ops.common.split_keys import configs
from flashtile.ops.common.split_keys.configs import (
    AttendTiles,
    TileKey,
    choose_splits,
    choose_tiles,
    power_of_two,
    resident_programs,
    shared_memory,
)

SPLITS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128)


class Problem:
    """A step of decoding without new rows: bfloat16, lengths on the device, pages in no order."""

    def __init__(self, arguments: argparse.Namespace, batch: int, rows: int) -> None:
        dtype, page = getattr(torch, arguments.dtype), arguments.page
        self.batch, self.rows, self.heads_kv = batch, rows, arguments.heads_kv
        outer, self.table = (batch, rows), None
        if page:
            pages = rows // page
            outer = (batch * pages, page)
            self.table = torch.randperm(batch * pages, device=DEVICE).view(batch, pages).int()
        make = lambda *shape: torch.randn(shape, device=DEVICE, dtype=dtype)  # noqa: E731
        self.q = make(batch, arguments.seq_q, arguments.heads, arguments.head_dim)
        self.k, self.v = (make(*outer, arguments.heads_kv, arguments.head_dim) for _ in range(2))
        self.lengths = torch.full((batch,), rows, dtype=torch.int32, device=DEVICE)
        group_rows = arguments.seq_q * arguments.heads // arguments.heads_kv
        self.tile_key = TileKey(dtype, arguments.head_dim, arguments.head_dim, group_rows, page or 0)

    @property
    def bytes(self) -> int:
        return self.k.nbytes + self.v.nbytes

    def call(self, splits: int | None) -> Tensor:
        return flashtile.attention_with_kv_cache(
            self.q, self.k, self.v, cache_lengths=self.lengths, block_table=self.table, num_splits=splits,
            backend="triton",
        )  # fmt: skip

    def chosen_splits(self, tiles: AttendTiles) -> int:
        """The tiles that a call would take, with these."""
        programs = self.batch * self.heads_kv * -(-self.tile_key.rows // tiles.block_m)
        slots = multiprocessors(DEVICE) * resident_programs(device_facts(DEVICE), tiles, self.tile_key)
        return choose_splits(programs, -(-self.rows // tiles.block_n), slots)


def candidates(tile_key: TileKey) -> Iterator[AttendTiles]:
    """Tiles worth timing: those that fit, with at least two of them in flight."""
    facts = device_facts(DEVICE)
    block_m = min(64, max(16, power_of_two(tile_key.rows)))
    for block_n, warps, stages in itertools.product((32, 64, 128), (2, 4, 8), (2, 3, 4, 5)):
        tiles = AttendTiles(block_m, block_n, warps, stages)
        if shared_memory(facts, tiles, tile_key) <= facts.shared_memory:
            yield tiles


def copy_gbps(moved: int, seconds: float) -> float:
    """Speed of a copy that reads and writes `moved` bytes together, the faster of PyTorch's two ways."""
    source = torch.empty(moved // 2, dtype=torch.uint8, device=DEVICE)
    target = torch.empty_like(source)
    times = [
        milliseconds(lambda: target.copy_(source), seconds),
        milliseconds(lambda: torch.add(source.view(torch.int32), 1, out=target.view(torch.int32)), seconds),
    ]
    return moved / min(times) / 1e6


def cuts(problem: Problem, sweep: str) -> Iterator[tuple[AttendTiles, int | None]]:
    """Tiles and splits to time, the call's own first."""
    own = choose_tiles(device_facts(DEVICE), problem.tile_key)
    every = [own, *(tiles for tiles in candidates(problem.tile_key) if tiles != own)]
    yield own, None
    if sweep in ("tiles", "both"):
        yield from ((tiles, None) for tiles in every[1:])
    if sweep in ("splits", "both"):
        yield from itertools.product(every if sweep == "both" else [own], SPLITS)


def measure(problem: Problem, sweep: str, seconds: float) -> list[dict[str, Any]]:
    expected, rows = [problem.call(None)], []
    for tiles, splits in cuts(problem, sweep):
        row = {"tiles": list(tiles), "splits": splits or problem.chosen_splits(tiles), "own": not rows}
        with choosing(configs, "choose_tiles", lambda *_, tiles=tiles: tiles):
            rows.append(row | time_right(lambda splits=splits: [problem.call(splits)], expected, seconds, 0.02))
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", default=["1x4096", "1x131072", "8x32768", "32x32768", "128x4096"])
    parser.add_argument("--sweep", choices=("tiles", "splits", "both"), default="tiles")
    parser.add_argument("--page", type=int, help="rows of a page; a cache in one piece without")
    parser.add_argument("--heads", type=int, default=32)
    parser.add_argument("--heads-kv", type=int, default=8)
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--seq-q", type=int, default=1)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--seconds", type=float, default=0.02, help="time for each cut")
    parser.add_argument("--show", type=int, default=12, help="how many cuts of a case are printed")
    parser.add_argument("--output", help="JSON file for all of them")
    arguments = parser.parse_args()
    found = {}
    # A stream of its own: what is timed by a graph cannot be captured on the default one.
    own_stream = torch.cuda.stream(torch.cuda.Stream(DEVICE)) if DEVICE.type == "cuda" else nullcontext()
    with torch.no_grad(), own_stream:
        for case in arguments.cases:
            batch, rows = map(int, case.split("x"))
            problem = Problem(arguments, batch, rows)
            copy = copy_gbps(problem.bytes, arguments.seconds)
            timed = measure(problem, arguments.sweep, arguments.seconds)
            found[case] = {"bytes": problem.bytes, "copy_gbps": copy, "cuts": timed}
            report(case, problem.bytes, copy, timed, arguments.show)
            del problem
            if DEVICE.type == "cuda":
                torch.cuda.empty_cache()
            if arguments.output:
                with open(arguments.output, "w") as file:
                    json.dump(found, file, indent=1)


def report(case: str, moved: int, copy: float, rows: list[dict[str, Any]], show: int) -> None:
    print(f"{case}: {moved / 2**20:.0f} MiB, copy {copy:.0f} GB/s")
    timed = sorted((row for row in rows if row["ms"] is not None), key=lambda row: row["ms"])
    kept = timed[:show] + [row for row in timed[show:] if row["own"]]
    for row in kept:
        gbps = moved / row["ms"] / 1e6
        own = "  <- the call's own" if row["own"] else ""
        print(
            f"  {AttendTiles(*row['tiles'])!s:80} splits {row['splits']:3}  {row['ms'] * 1e3:8.1f} µs  {gbps:6.0f} GB/s"
            f"  {gbps / copy:.0%}{own}"
        )
    for row in rows:
        if row["ms"] is None:
            print(f"  {AttendTiles(*row['tiles'])}: no time, {row['why']}")
    print(flush=True)


if __name__ == "__main__":
    main()
