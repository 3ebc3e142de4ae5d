"""The demo's pictures."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from flashtile.cli.demo.results import OURS, PLAIN, Results

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Told apart by colour-blind readers, and in grey by their markers.
_COLOR = {OURS: "#0072B2", PLAIN: "#D55E00"}
_MARKER = {OURS: "o", PLAIN: "s"}
_LABEL = {OURS: "flashtile", PLAIN: "plain, N×N matrices"}
_DPI = 160


def draw_scaling(results: Results, path: Path) -> None:
    """Memory and time of attention against the sequence length, side by side."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4.8), layout="constrained")
    left, right = figure.subplots(1, 2)
    _draw_curves(left, results, lambda point: point.peak_bytes / 2**20, "peak memory beyond the inputs (MiB)", "less")
    _draw_curves(right, results, lambda point: point.ms, "time, forward + backward (ms)", "faster")
    left.set_title("Memory")
    right.set_title("Time")
    left.legend(frameon=False, loc="upper left")
    dtype = str(results.plan.attention_dtype).removeprefix("torch.")
    figure.suptitle(f"Causal attention, batch 1, {results.plan.heads} heads of 64, {dtype}: {device_name(results)}")
    figure.savefig(path, dpi=_DPI)


def draw_losses(results: Results, path: Path) -> None:
    """The two loss curves, and below them their difference with the tolerance."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    ours, plain = results.trainings[OURS].losses, results.trainings[PLAIN].losses
    steps = range(1, len(ours) + 1)
    figure = Figure(figsize=(8, 5.6), layout="constrained")
    top, bottom = figure.subplots(2, 1, sharex=True, height_ratios=[2, 1])
    top.plot(steps, plain, color=_COLOR[PLAIN], linewidth=4, alpha=0.45, label=_LABEL[PLAIN])
    top.plot(steps, ours, color=_COLOR[OURS], linewidth=1.3, label=_LABEL[OURS])
    top.set_ylabel("loss (nats per byte)")
    top.set_title("The same training on flashtile and on plain attention")
    top.legend(frameon=False)
    # A logarithmic axis has no zero: equal losses are drawn at the smallest difference that float32 can show.
    bottom.plot(steps, [max(abs(a - b), 1e-8) for a, b in zip(ours, plain)], color="#444444", linewidth=1)
    bottom.axhline(results.plan.tolerance, color="#B00020", linestyle="--", linewidth=1)
    bottom.annotate(
        "tolerance", (1, results.plan.tolerance), xytext=(0, -11), textcoords="offset points", color="#B00020", size=9
    )
    bottom.set_yscale("log")
    bottom.set_xlabel("step")
    bottom.xaxis.set_major_locator(MaxNLocator(integer=True))
    bottom.set_ylabel("|difference| (nats)")
    for axes in (top, bottom):
        _tidy(axes)
    figure.savefig(path, dpi=_DPI)


def device_name(results: Results) -> str:
    from flashtile.bench.record import machine

    facts = machine(results.plan.device)
    return facts.get("gpu") or f"{facts['cpu']}, {facts['torch_threads']} threads"


def _draw_curves(axes: Axes, results: Results, value, label: str, comparative: str) -> None:
    """Both implementations' `value` over the length, and their ratio at the longest length of both."""
    curves: dict[str, dict[int, float]] = {}
    for name in (OURS, PLAIN):
        curve = {point.length: value(point) for point in results.points if point.implementation == name}
        curves[name] = curve
        axes.plot(list(curve), list(curve.values()), label=_LABEL[name], color=_COLOR[name], marker=_MARKER[name])
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    lengths = sorted({point.length for point in results.points})
    axes.set_xticks(lengths, [f"{n // 1024}k" if n >= 1024 else str(n) for n in lengths])
    axes.minorticks_off()
    # Room for the ratio above the last point of the plain curve.
    axes.set_xlim(lengths[0] / 1.3, lengths[-1] * 1.6)
    axes.set_ylim(top=2 * axes.get_ylim()[1])
    axes.set_xlabel("sequence length (tokens)")
    axes.set_ylabel(label)
    _tidy(axes)
    both = sorted(set(curves[OURS]) & set(curves[PLAIN]))
    if both:
        _mark_ratio(axes, both[-1], curves[OURS][both[-1]], curves[PLAIN][both[-1]], comparative)


def _mark_ratio(axes: Axes, length: int, ours: float, plain: float, comparative: str) -> None:
    """An arrow between the curves that says how far apart they are. A small call may take no new memory: no ratio."""
    if not 0 < ours < plain:
        return
    arrow = {"arrowstyle": "<->", "color": "#444444", "linewidth": 1, "shrinkA": 5, "shrinkB": 5}
    axes.annotate("", (length, ours), xytext=(length, plain), arrowprops=arrow)
    ratio = plain / ours
    text = f"{ratio:.0f}× {comparative}" if ratio >= 10 else f"{ratio:.1f}× {comparative}"
    place = {"xytext": (0, 9), "textcoords": "offset points", "ha": "center"}
    axes.annotate(text, (length, plain), size=11, weight="bold", **place)


def _tidy(axes: Axes) -> None:
    axes.grid(True, which="major", color="#DDDDDD", linewidth=0.7)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(which="minor", length=0)
