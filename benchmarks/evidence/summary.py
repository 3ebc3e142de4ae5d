"""Tables of what the training scripts found, over seeds where there are several."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from flashtile.bench.record import Row


def summary(rows: Sequence[Row]) -> str:
    """All tables, in Markdown."""
    parts = [_lra(rows), _steps(rows), _curves(rows)]
    return "\n\n".join(part for part in parts if part)


def over_seeds(rows: Sequence[Row]) -> dict[tuple[str, str], list[Row]]:
    """(op, implementation) -> its rows, of Long Range Arena's tasks."""
    groups: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        if row["op"].startswith("lra-"):
            groups.setdefault((row["op"], row["impl"]), []).append(row)
    return groups


def _lra(rows: Sequence[Row]) -> str:
    lines = []
    for (op, impl), group in over_seeds(rows).items():
        accuracies = [100 * row["accuracy"] for row in group]
        spread = f" ± {statistics.stdev(accuracies):.1f}" if len(accuracies) > 1 else ""
        ms = statistics.mean(row["ms"] for row in group)
        memory = group[0]["peak_mib"]
        lines.append(
            [op.removeprefix("lra-"), impl, f"{statistics.mean(accuracies):.1f}{spread}", str(len(group)),
             str(group[0]["case"]["steps"]), f"{ms:.2f}", "" if memory is None else f"{memory:,.0f}"]
        )  # fmt: skip
    return _table(["task", "attention", "accuracy, %", "seeds", "steps", "ms a step", "peak MiB"], lines)


def _steps(rows: Sequence[Row]) -> str:
    lines = []
    for row in rows:
        if row["op"] in ("train-step", "bert-step"):
            case = row["case"]
            dropout = f", dropout {case['dropout_p']:g}" if case.get("dropout_p") else ""
            head = [case["model"] + dropout, str(case["S"]), str(case["B"]), row["impl"]]
            if row["ms"] is None:
                lines.append([*head, "", "", "", _short(row["why"])])
                continue
            share = "" if row["mfu"] is None else f"{row['mfu']:.1%}"
            memory = "" if row.get("peak_mib") is None else f"{row['peak_mib']:,.0f}"
            lines.append([*head, f"{row['ms']:.1f}", f"{row['tokens_per_s']:,.0f}", share, memory])
    headings = ["model", "context", "batch", "implementation", "ms", "tokens/s", "of the peak", "MiB, or why not"]
    return _table(headings, lines)


def _short(why: str) -> str:
    """A reason for a table: torch's report on a full memory is a paragraph."""
    return "out of memory" if why.startswith("OutOfMemoryError") else why


def _curves(rows: Sequence[Row]) -> str:
    lines = []
    for row in rows:
        if row["op"] == "train-curve":
            last = [loss for loss in row["curve"][-max(1, len(row["curve"]) // 10) :] if loss is not None]
            loss = f"{statistics.mean(last):.4f}" if last else "not finite"
            lines.append([row["case"]["model"], row["impl"], str(row["case"]["steps"]), loss, f"{row['ms']:.1f}"])
    return _table(["model", "implementation", "steps", "loss, mean of the last tenth", "ms a step"], lines)


def _table(headings: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    """Markdown; empty where there is no line."""
    if not lines:
        return ""
    rows = [headings, ["---"] * len(headings), *lines]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in rows)
