"""The demo's pictures."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from flashtile.bench.html.drawing import LineChart, Series, save_picture
from flashtile.bench.record import machine
from flashtile.cli.demo.results import OURS, PLAIN, Results
from flashtile.cli.demo.scaling import Point

#: Names of the attentions, as in records.
_NAMES = {OURS: "flashtile-auto", PLAIN: "plain"}


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
    dtype = str(results.plan.attention_dtype).removeprefix("torch.")
    title = f"Causal attention, batch 1, {results.plan.heads} heads of 64, {dtype}: {device_name(results)}"
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


def device_name(results: Results) -> str:
    facts = machine(results.plan.device)
    return facts.get("gpu") or f"{facts['cpu']}, {facts['torch_threads']} threads"
