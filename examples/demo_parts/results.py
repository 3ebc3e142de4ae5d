"""The results of a demo run: as JSON, as tables, as a page in Markdown, as pictures."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from demo_parts.scaling import Point
from demo_parts.training import Comparison, Plan, Training
from flashtile.bench.html.drawing import LineChart, Series, save_picture
from flashtile.bench.record import commit, machine, versions
from flashtile.bench.report import Table

OURS, PLAIN = "flashtile", "plain"
#: Names of the attentions, as in records.
_NAMES = {OURS: "flashtile-auto", PLAIN: "plain"}
_MEMORY_OF_A_GPU = (
    "Memory: growth of torch.cuda.max_memory_allocated over what was there before (for attention: its inputs)."
)
_MEMORY_OF_A_PROCESS = (
    "Memory: growth of the peak resident size of a fresh process for each measurement, over what was there before (for "
    "attention: its inputs). It counts whole pages of everything the process took, so a MiB or two is noise."
)


@dataclass(frozen=True)
class Results:
    """All of a run. Dictionaries go by implementation, "flashtile" and "plain"."""

    plan: Plan
    text: str
    trainings: dict[str, Training]
    comparison: Comparison
    points: list[Point]
    stopped: dict[str, str]


def write_results(results: Results, folder: Path, draw: bool) -> None:
    """Writes figures, a page, and where `draw` is set pictures."""
    pictures = ["attention.png", "losses.png"] if draw else []
    if draw:
        draw_scaling(results, folder / pictures[0])
        draw_losses(results, folder / pictures[1])
    plan, facts = results.plan, machine(results.plan.device)
    figures: dict[str, Any] = {
        "machine": facts,
        "versions": versions(),
        "commit": commit(),
        "plan": {**asdict(plan), "device": plan.device.type},
        "text": results.text,
        "training": {name: asdict(training) for name, training in results.trainings.items()},
        "comparison": asdict(results.comparison),
        "attention": [asdict(point) for point in results.points],
        "stopped": results.stopped,
    }
    (folder / "results.json").write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")
    page = [
        "# flashtile demo",
        f"On {facts.get('gpu') or facts['cpu']}, {facts['cpu_cores']} cores, torch {figures['versions']['torch']}. "
        f"Text: {results.text}.",
        verdict(results),
        *(f"**{table.title}**\n\n{table.markdown()}" for table in (training_table(results), scaling_table(results))),
        _MEMORY_OF_A_GPU if plan.device.type == "cuda" else _MEMORY_OF_A_PROCESS,
        *(f"- {name} stopped: {reason}." for name, reason in results.stopped.items()),
        *(f"![{picture}]({picture})" for picture in pictures),
    ]
    (folder / "report.md").write_text("\n\n".join(page) + "\n", encoding="utf-8")


def verdict(results: Results) -> str:
    """One sentence about the two loss curves."""
    plan, found = results.plan, results.comparison
    ours, plain = results.trainings[OURS].losses, results.trainings[PLAIN].losses
    figures = (
        f"first losses differ by {found.first_difference:.1e} (allowed {plan.first_tolerance:g}), "
        f"first gradients of q, k, v by {_percent(found.gradient_difference)} "
        f"(allowed {_percent(plan.gradient_tolerance)}), "
        f"the largest difference of {len(ours)} steps is {found.largest_difference:.1e} at step "
        f"{found.largest_at_step + 1} (allowed {plan.tolerance:g})"
    )
    if not found.agree:
        return f"The loss curves DISAGREE: {figures}."
    return f"The loss curves agree, {ours[0]:.3f} to {ours[-1]:.3f} and {plain[0]:.3f} to {plain[-1]:.3f}: {figures}."


def training_table(results: Results) -> Table:
    model = results.plan.model
    lines = []
    for name, training in results.trainings.items():
        losses = (f"{loss:.4f}" for loss in (training.losses[0], training.losses[-1]))
        lines.append([name, *losses, f"{training.tokens_per_second:,.0f}", mebibytes(training.peak_bytes)])
    title = (
        f"Training a GPT, {model.layers} layers of width {model.width}, "
        f"batch {results.plan.batch} × {model.context} bytes, {len(results.trainings[OURS].losses)} steps"
    )
    return Table(title, ["attention", "first loss", "last loss", "bytes/s", "peak memory (MiB)"], lines)


def scaling_table(results: Results) -> Table:
    by_key = {(point.implementation, point.length): point for point in results.points}
    lines = []
    for length in sorted({point.length for point in results.points}):
        ours, plain = by_key.get((OURS, length)), by_key.get((PLAIN, length))
        saved, faster = "–", "–"
        if ours is not None and plain is not None:
            saved = f"{plain.peak_bytes / max(ours.peak_bytes, 1):.1f}×"
            faster = f"{plain.ms / ours.ms:.1f}×"
        memory = [mebibytes(point.peak_bytes) if point else "–" for point in (ours, plain)]
        times = [f"{point.ms:.1f}" if point else "–" for point in (ours, plain)]
        lines.append([str(length), *memory, saved, *times, faster])
    headings = ["length", "flashtile MiB", "plain MiB", "memory saved", "flashtile ms", "plain ms", "speed-up"]
    title = (
        f"Causal attention alone, forward + backward, batch 1, {results.plan.heads} heads of 64, "
        f"{str(results.plan.attention_dtype).removeprefix('torch.')}"
    )
    return Table(title, headings, lines)


def mebibytes(count: int) -> str:
    return f"{count / 2**20:,.1f}" if count < 100 * 2**20 else f"{count / 2**20:,.0f}"


def _percent(share: float) -> str:
    return f"{100 * share:.2g}%"


def draw_scaling(results: Results, path: Path) -> None:
    """Memory and time of attention against the sequence length, side by side."""

    def chart(title: str, unit: str, value: Callable[[Point], float]) -> LineChart:
        series = (
            Series(name, tuple((p.length, value(p)) for p in results.points if p.implementation == implementation))
            for implementation, name in _NAMES.items()
        )
        return LineChart(title, tuple(series), "sequence length (tokens)", unit, logarithmic=True)

    memory = chart("Memory", "peak memory beyond the inputs (MiB)", lambda point: point.peak_bytes / 2**20)
    time = chart("Time", "forward and backward (ms)", lambda point: point.ms)
    dtype, facts = str(results.plan.attention_dtype).removeprefix("torch."), machine(results.plan.device)
    device = facts.get("gpu") or f"{facts['cpu']}, {facts['torch_threads']} threads"
    title = f"Causal attention, batch 1, {results.plan.heads} heads of 64, {dtype}: {device}"
    save_picture([memory, time], title, path)


def draw_losses(results: Results, path: Path) -> None:
    """The two loss curves, and beside them their difference with the tolerance."""
    losses = {name: results.trainings[implementation].losses for implementation, name in _NAMES.items()}
    series = (Series(name, tuple(enumerate(values, 1))) for name, values in losses.items())
    curves = LineChart("Losses", tuple(series), "step", "loss (nats per byte)", steps=True)
    # A logarithmic axis has no zero: equal losses are drawn at the smallest difference that float32 can show.
    apart = tuple(max(abs(ours - plain), 1e-8) for ours, plain in zip(*losses.values()))
    difference = LineChart(
        "Difference, and what is allowed", (Series("difference", tuple(enumerate(apart, 1))),), "step",
        "|difference| (nats)", logarithmic=True, level=results.plan.tolerance, steps=True,
    )  # fmt: skip
    save_picture([curves, difference], "The same training on flashtile and on plain attention", path)
