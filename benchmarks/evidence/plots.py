"""Pictures of what the training scripts found, drawn by matplotlib as SVG files."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.evidence.summary import over_seeds
from flashtile.bench.record import Row


def draw_all(rows: Sequence[Row], folder: Path) -> list[Path]:
    """Every picture that there are rows for.

    Raises:
        ModuleNotFoundError: matplotlib is not installed.
    """
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams["svg.hashsalt"] = "flashtile"  # the same rows draw the same file
    folder.mkdir(parents=True, exist_ok=True)
    drawings: list[tuple[str, list[Row], Callable[[Any, list[Row]], None], int]] = []
    curves = [row for row in rows if row["op"] == "train-curve"]
    for model in dict.fromkeys(row["case"]["model"] for row in curves):
        drawings.append((f"loss-{model}", [r for r in curves if r["case"]["model"] == model], _curves, 2))
    steps = [row for row in rows if row["op"] == "train-step" and row["ms"] is not None]
    for model in dict.fromkeys(row["case"]["model"] for row in steps):
        drawings.append((f"context-{model}", [r for r in steps if r["case"]["model"] == model], _contexts, 2))
    for op in dict.fromkeys(op for op, _ in over_seeds(rows)):
        drawings.append((op, [row for row in rows if row["op"] == op], _accuracies, 1))
    return [_draw(folder / f"{name}.svg", found, draw, panels) for name, found, draw, panels in drawings]


def _draw(path: Path, rows: list[Row], draw: Callable[[Any, list[Row]], None], panels: int) -> Path:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5.5 * panels, 4), layout="constrained")
    axes = figure.subplots(1, panels, squeeze=False)[0]
    draw(axes, rows)
    for axis in axes:
        axis.grid(alpha=0.3)
    figure.savefig(path, metadata={"Date": None})
    return path


def _curves(axes: Any, rows: list[Row]) -> None:
    """All losses, and how far those of each lie from the first's."""
    first = [loss or float("nan") for loss in rows[0]["curve"]]
    for row, style in zip(rows, _styles()):
        losses = [loss or float("nan") for loss in row["curve"]]
        axes[0].plot(losses, label=row["impl"], **style)
        if row is not rows[0]:
            apart = [loss - other for loss, other in zip(losses, first)]
            axes[1].plot(apart, label=f"{row['impl']} − {rows[0]['impl']}", **style)
    axes[0].set(xlabel="step", ylabel="loss, nats a token", title=rows[0]["case"]["model"])
    axes[1].set(xlabel="step", ylabel="difference of the losses")
    for axis in axes:
        axis.legend()


def _contexts(axes: Any, rows: list[Row]) -> None:
    """Tokens each second and share of the peak; what found no memory has no point."""
    for impl, style in zip(dict.fromkeys(row["impl"] for row in rows), _styles()):
        own = sorted((row for row in rows if row["impl"] == impl), key=lambda row: row["case"]["S"])
        contexts = [row["case"]["S"] for row in own]
        axes[0].plot(contexts, [row["tokens_per_s"] for row in own], marker="o", label=impl, **style)
        axes[1].plot(contexts, [100 * (row["mfu"] or float("nan")) for row in own], marker="o", label=impl, **style)
    axes[0].set(ylabel="tokens a second", title=rows[0]["case"]["model"])
    axes[1].set(ylabel="of the GPU's peak, %")
    for axis in axes:
        axis.set_xscale("log", base=2)
        axis.set_xlabel("context, tokens")
        axis.set_ylim(bottom=0)
        axis.legend()


def _accuracies(axes: Any, rows: list[Row]) -> None:
    """A point for each seed, and the mean."""
    for impl, style in zip(dict.fromkeys(row["impl"] for row in rows), _styles()):
        own = [row for row in rows if row["impl"] == impl]
        ms, accuracies = [row["ms"] for row in own], [100 * row["accuracy"] for row in own]
        axes[0].scatter(ms, accuracies, alpha=0.5, s=20, color=style["color"])
        middle = statistics.mean(ms), statistics.mean(accuracies)
        axes[0].scatter(*middle, marker="D", s=50, color=style["color"], label=impl)
    axes[0].set(xlabel="ms a step", ylabel="accuracy, %", title=rows[0]["op"].removeprefix("lra-"))
    axes[0].set_xlim(left=0)
    axes[0].legend()


def _styles() -> Iterable[dict[str, Any]]:
    colours = ("#2f6db5", "#c05d12", "#2e7d46", "#7b4bab", "#a8324a", "#5b6776")
    return [{"color": colour, "linewidth": 1.3} for colour in colours]
