"""Reads ratios off rows: ours against the best peer of the same case and phase, in the same run."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from flashtile.bench.record import Row


@dataclass(frozen=True)
class Ratio:
    """How many times as fast ours is as a peer in one case; above 1 ours is the faster."""

    ours: str
    op: str
    phase: str
    case: dict[str, Any]
    peer: str
    value: float


def is_ours(impl: str) -> bool:
    return impl.startswith("flashtile")


def case_key(row: Row) -> str:
    """Cases are the same when their operations and `case` objects are."""
    return json.dumps([row["op"], row["case"]], sort_keys=True)


def ratios_to_best(rows: Iterable[Row]) -> list[Ratio]:
    """One ratio for each of our rows with a speed, against the fastest peer with a speed; none without a peer."""
    groups: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        if row["ms"] is not None:
            groups.setdefault((case_key(row), row["phase"]), []).append(row)
    found = []
    for group in groups.values():
        peers = [row for row in group if not is_ours(row["impl"])]
        if not peers:
            continue
        best = min(peers, key=lambda row: row["ms"])
        found += [
            Ratio(row["impl"], row["op"], row["phase"], row["case"], best["impl"], best["ms"] / row["ms"])
            for row in group
            if is_ours(row["impl"])
        ]
    return found


def ratios_to_peer(rows: Sequence[Row], peer: str) -> list[Ratio]:
    """The same against one peer, in the cases that it ran."""
    return ratios_to_best([row for row in rows if is_ours(row["impl"]) or row["impl"] == peer])


def geometric_mean(values: Iterable[float]) -> float:
    """The mean for ratios; NaN for none."""
    logs = [math.log(value) for value in values]
    return math.exp(sum(logs) / len(logs)) if logs else math.nan


def peers(rows: Iterable[Row]) -> list[str]:
    """Peers with at least one speed, in the order of the rows."""
    return list(dict.fromkeys(row["impl"] for row in rows if row["ms"] is not None and not is_ours(row["impl"])))
