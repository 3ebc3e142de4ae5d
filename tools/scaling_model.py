"""Prints what the cost model of context parallelism says: efficiencies, what overlaps from where, which strategy wins.

python tools/scaling_model.py
python tools/scaling_model.py --ranks 8 64 1024 --near 240 --far 40 --forward 684 --backward 585
python tools/scaling_model.py --record benchmarks/results/h200x4-context-parallel.json
"""

from __future__ import annotations

import argparse
import itertools
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from flashtile.distributed.cost_model import H200, Load, Machine, cost, efficiency, overlap_length

_LENGTHS = tuple(2**power for power in range(15, 24))
_STRATEGIES = ("ring", "all_to_all", "all_gather", "ring_all_to_all")


def table(machine: Machine, ranks: tuple[int, ...], load: Load) -> Iterator[str]:
    """Efficiency of forward and backward: a line for each number of GPUs and length, `-` where heads do not divide."""
    yield "| GPUs | length | " + " | ".join(_STRATEGIES) + " | best |"
    yield "| --- | --- |" + " --- |" * (len(_STRATEGIES) + 1)
    for count, length, found, best in _efficiencies(machine, ranks, load):
        cells = ["-" if value is None else f"{value:.2f}" for value in found.values()]
        yield f"| {count:,} | {length // 1024:,}k | " + " | ".join(cells) + f" | {best} |"


def winners(machine: Machine, ranks: tuple[int, ...], load: Load) -> Iterator[str]:
    """From which length on a strategy is the best, until the next one is."""
    last = None
    for count, length, found, best in _efficiencies(machine, ranks, load):
        if (count, best) != last:
            yield f"{count:>5,} GPUs, from {length // 1024:,}k: {best} ({found[best] or 0.0:.2f})"
        last = count, best


def _efficiencies(
    machine: Machine, ranks: tuple[int, ...], load: Load
) -> Iterator[tuple[int, int, dict[str, float | None], str]]:
    """For each number of GPUs and length the efficiency of each strategy, None where heads do not divide; the best."""
    for count, length in itertools.product(ranks, _LENGTHS):
        if length // count >= 128:
            found = {name: _efficiency(name, replace(load, length=length), count, machine) for name in _STRATEGIES}
            yield count, length, found, max(found, key=lambda name: found[name] or 0.0)


def _efficiency(strategy: str, load: Load, ranks: int, machine: Machine) -> float | None:
    inner = min(machine.node, load.heads_kv, ranks)
    try:
        return efficiency(cost(strategy, load, ranks, machine, inner=inner), load, ranks, machine)
    except ValueError:
        return None


def compared(record: Path, machine: Machine) -> Iterator[str]:
    """Measured and predicted efficiency of each row of a record that has one."""
    yield "| GPUs | length | causal | phase | strategy | measured | predicted |"
    yield "| --- | --- | --- | --- | --- | --- | --- |"
    for row in json.loads(record.read_text("utf-8"))["rows"]:
        case, strategy = row["case"], row["impl"].removeprefix("flashtile-")
        if row.get("efficiency") is None or strategy not in _STRATEGIES:
            continue
        load = Load(case["S"], case["H"], case["Hkv"], case["D"], case["causal"], case["B"])
        predicted = efficiency(
            cost(strategy, load, case["gpus"], machine, row["phase"]), load, case["gpus"], machine, row["phase"]
        )
        yield (
            f"| {case['gpus']} | {case['S']:,} | {case['causal']} | {row['phase']} | {strategy} | "
            f"{row['efficiency']:.3f} | {predicted:.3f} |"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[8, 32, 128, 1024])
    parser.add_argument("--heads", type=int, default=32)
    parser.add_argument("--heads-kv", type=int, default=8)
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--full", action="store_true", help="without a causal mask")
    parser.add_argument("--near", type=float, default=H200.near / 1e9, help="GB/s within a node")
    parser.add_argument("--far", type=float, default=H200.far / 1e9, help="GB/s between nodes, for each GPU")
    parser.add_argument("--forward", type=float, default=H200.forward / 1e12, help="TFLOP/s of the forward")
    parser.add_argument("--backward", type=float, default=H200.backward / 1e12, help="TFLOP/s of the backward")
    parser.add_argument("--node", type=int, default=H200.node, help="GPUs of a node")
    parser.add_argument("--record", type=Path, help="a record of the benchmark, to compare with")
    given = parser.parse_args()
    machine = replace(
        H200, forward=given.forward * 1e12, backward=given.backward * 1e12, near=given.near * 1e9,
        far=given.far * 1e9, node=given.node,
    )  # fmt: skip
    if given.record:
        print(*compared(given.record, machine), sep="\n")
        return
    load = Load(0, given.heads, given.heads_kv, given.head_dim, not given.full)
    for name, bandwidth in (("within a node", machine.near), ("between nodes", machine.far)):
        print(
            f"a ring's forward hides its transfers {name} from {overlap_length(load, machine, bandwidth):,.0f} tokens"
        )
    print(*table(machine, tuple(given.ranks), load), sep="\n")
    print(*winners(machine, tuple(given.ranks), load), sep="\n")


if __name__ == "__main__":
    main()
