"""The output of a training: lines or a progress bar, metrics.jsonl, speed, and the picture of the losses."""

from __future__ import annotations

import importlib.util
import json
import re
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from flashtile.models import GPT

#: Dense bfloat16 products in TFLOP/s, by the data sheets of the vendors; the first name that is part of the device's.
_PEAK_TFLOPS = {
    "B200": 2250.0, "GH200": 989.4, "H200": 989.4, "H100 PCIe": 756.0, "H100 NVL": 835.0, "H100": 989.4, "A100": 312.0,
    "L40S": 362.0, "L4": 121.0, "RTX 4090": 165.2, "MI300X": 1307.4,
}  # fmt: skip


def peak_flops(device: torch.device, precision: str, given_tflops: float | None) -> float | None:
    """FLOP/s of a device: as given, by its name, or None where that is not known, as always in float32."""
    if given_tflops is not None:
        return given_tflops * 1e12
    if device.type != "cuda" or precision != "bf16":
        return None
    return peak_of_name(torch.cuda.get_device_name(device))


def peak_of_name(name: str) -> float | None:
    """FLOP/s in bfloat16 of a GPU of this name."""
    return next((peak * 1e12 for part, peak in _PEAK_TFLOPS.items() if re.search(rf"\b{part}\b", name)), None)


def flops_of_token(model: GPT) -> float:
    """Operations of the model, forward and backward: six for each weight of a product, and three times attention's
    forward.

    Only half of the scores is counted, because the other half is masked. Work that is done again is no work of the
    model.
    """
    config = model.config
    matrices = sum(parameter.numel() for parameter in model.blocks.parameters() if parameter.dim() == 2)
    attention = 2 * config.layers * config.context * config.width
    return 6.0 * (matrices + model.output_weight.numel()) + 3.0 * attention


class Clock:
    """Tokens each second, without the time of validations and checkpoints."""

    def __init__(self, tokens_of_step: int) -> None:
        self._tokens_of_step, self._begin, self._steps = tokens_of_step, time.perf_counter(), 0

    def tick(self) -> None:
        self._steps += 1

    def rate(self) -> float:
        """Since the last call."""
        now = time.perf_counter()
        rate = self._steps * self._tokens_of_step / (now - self._begin)
        self._begin, self._steps = now, 0
        return rate

    @contextmanager
    def stopped(self) -> Iterator[None]:
        begin = time.perf_counter()
        yield
        self._begin += time.perf_counter() - begin


class Report:
    """The report of rank 0; the others write nothing.

    Args:
        folder: of metrics.jsonl.
        active: whether this is rank 0.
        start: steps that are done. Lines of an interrupted process about later ones are dropped.
        steps: of the whole training.
    """

    def __init__(self, folder: Path, active: bool, start: int, steps: int) -> None:
        self.file = folder / "metrics.jsonl"
        self._active, self._bar = active, None
        if not active:
            return
        folder.mkdir(parents=True, exist_ok=True)
        lines = [json.dumps(entry) for entry in self.entries() if start and entry["step"] <= start]
        partial = self.file.with_suffix(".partial")
        partial.write_text("".join(line + "\n" for line in lines), "utf-8")
        partial.replace(self.file)
        if sys.stdout.isatty() and importlib.util.find_spec("rich") is not None:
            self._bar = _Bar(start, steps)

    def entries(self) -> list[dict[str, Any]]:
        """The lines of metrics.jsonl. A last line that was cut off is none."""
        if not self.file.exists():
            return []
        text = self.file.read_text("utf-8")
        return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]

    def metrics(self, step: int, **values: float | None) -> None:
        """Writes what is known after a step, and prints it."""
        if not self._active:
            return
        known = {name: value for name, value in values.items() if value is not None}
        with self.file.open("a", encoding="utf-8") as stream:
            stream.write(json.dumps({"step": step, **known}) + "\n")
        self.line(f"step {step:6d}  " + "  ".join(_written(name, value) for name, value in known.items()))

    def line(self, text: str) -> None:
        if not self._active:
            return
        if self._bar is None:
            print(text, flush=True)
        else:
            self._bar.line(text)

    def advance(self, step: int) -> None:
        if self._bar is not None:
            self._bar.advance(step)

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()
            self._bar = None


class _Bar:
    """A progress bar at the foot of a terminal."""

    def __init__(self, start: int, steps: int) -> None:
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        columns = (TextColumn("training"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        self._progress = Progress(*columns, transient=True)
        self._task = self._progress.add_task("training", total=steps, completed=start)
        self._progress.start()

    def line(self, text: str) -> None:
        self._progress.console.print(text, markup=False, highlight=False, soft_wrap=True)

    def advance(self, step: int) -> None:
        self._progress.update(self._task, completed=step)

    def close(self) -> None:
        self._progress.stop()


_FORMATS = {
    "loss": "loss {:.4f}",
    "validation_loss": "validation loss {:.4f}",
    "gradient_norm": "norm {:.3f}",
    "learning_rate": "lr {:.2e}",
    "tokens_per_second": "{:,.0f} tokens/s",
    "mfu": "MFU {:.1%}",
}


def _written(name: str, value: float) -> str:
    return _FORMATS[name].format(value)


def draw_losses(entries: list[dict[str, Any]], path: Path) -> None:
    """Losses of training and validation over the steps."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.subplots()
    curves = (("loss", "training", "#0072B2", ""), ("validation_loss", "validation", "#D55E00", "o"))
    for key, label, color, marker in curves:
        points = [(entry["step"], entry[key]) for entry in entries if key in entry]
        axes.plot(*zip(*points), label=label, color=color, marker=marker, linewidth=1.3)
    axes.set_xlabel("step")
    axes.set_ylabel("loss (nats per token)")
    axes.grid(True, color="#DDDDDD", linewidth=0.7)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    figure.savefig(path, dpi=160)
