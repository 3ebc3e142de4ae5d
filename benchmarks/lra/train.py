"""Trains the classifier in each way to attend, from the same weights on the same batches, and says what came of it."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.nn.functional as F

from benchmarks.evidence.budget import Budget
from benchmarks.evidence.measure import Stopwatch
from benchmarks.lra.attentions import ATTENTIONS
from benchmarks.lra.examples import Examples
from benchmarks.lra.model import Classifier, Sizes
from benchmarks.lra.tasks import Task
from flashtile.bench.record import make_row

_WARM_UP_STEPS, _TIMED_STEPS = 5, 9
#: Points of a loss curve.
_POINTS = 50


@dataclass(frozen=True)
class Settings:
    """Settings of a training; the keys of `case` in a record."""

    task: str
    B: int = 64
    layers: int = 4
    width: int = 256
    heads: int = 4
    examples: int = 20000
    held_out: int = 2000
    learning_rate: float = 5e-4
    dtype: str = "bf16"


class Run:
    """A model, its optimizer, and batches that depend on the seed and the step alone."""

    def __init__(
        self, settings: Settings, task: Task, impl: str, seed: int, training: Examples, device: torch.device
    ) -> None:
        self.settings, self.task, self.impl, self.seed, self.device = settings, task, impl, seed, device
        self._training = training
        sizes = Sizes(task.vocabulary, task.classes, task.context, settings.layers, settings.width, settings.heads)
        torch.manual_seed(seed)
        self.model = Classifier(sizes, ATTENTIONS[impl], task.grid).to(device)
        self._optimizer = torch.optim.AdamW(self.model.parameters(), lr=settings.learning_rate, weight_decay=0.01)

    def step(self, step: int, steps: int) -> torch.Tensor:
        """One of so many steps; the loss, on the device."""
        for group in self._optimizer.param_groups:
            group["lr"] = self.settings.learning_rate * _schedule(step, steps)
        generator = torch.Generator().manual_seed(1_000_003 * self.seed + step)
        rows = torch.randint(len(self._training), (self.settings.B,), generator=generator)
        batch = self._training.batch(rows, self.device)
        loss = F.cross_entropy(self._logits(batch), batch.labels)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self._optimizer.step()
        self._optimizer.zero_grad()
        return loss.detach()

    @torch.no_grad()
    def accuracy(self, examples: Examples) -> float:
        """Share of the examples whose class the model names."""
        right = [
            (self._logits(batch).argmax(-1) == batch.labels).sum()
            for batch in examples.batches(2 * self.settings.B, self.device)
        ]
        return float(torch.stack(right).sum()) / len(examples)

    def _logits(self, batch: Examples) -> torch.Tensor:
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.settings.dtype == "bf16"):
            return self.model(batch).float()


def train_all(
    settings: Settings,
    task: Task,
    impls: Sequence[str],
    seeds: Sequence[int],
    budget: Budget,
    device: torch.device,
    workers: int = 1,
    on_row: Callable[[dict[str, Any]], None] = lambda row: None,
) -> list[dict[str, Any]]:
    """A row for each way to attend and seed; within a seed all see the same weights and batches.

    Every run takes as many steps as the others, so their accuracies compare; their times are what differs.
    """
    begin = time.perf_counter()
    training, test = task.make(settings.examples + settings.held_out, 0, task.options, workers).split(settings.held_out)
    left = budget
    if budget.minutes is not None:
        # The time that the examples took is gone.
        left = Budget(minutes=max(budget.minutes - (time.perf_counter() - begin) / 60, budget.minutes / 10))
    seconds = [_step_seconds(Run(settings, task, impl, 0, training, device), device) for impl in impls]
    steps = left.steps_each(seconds, len(seeds))
    rows = []
    for seed in seeds:
        for impl in impls:
            rows.append(_train(Run(settings, task, impl, seed, training, device), steps, test))
            on_row(rows[-1])
    return rows


def _train(run: Run, steps: int, test: Examples) -> dict[str, Any]:
    watch, settings = Stopwatch(run.device), run.settings
    watch.start()
    losses = [run.step(step, steps) for step in range(steps)]
    seconds = watch.seconds()
    curve = torch.stack(losses).tolist()
    every = math.ceil(steps / _POINTS)
    means = [sum(part) / len(part) for part in (curve[first : first + every] for first in range(0, steps, every))]
    # `examples` says how they were made; null where a loss is no number, which JSON does not have.
    case = {**asdict(settings), "S": run.task.context, "steps": steps, "seed": run.seed}
    case["made"] = asdict(run.task.options)
    return make_row(
        f"lra-{settings.task}",
        "train",
        run.impl,
        case,
        ms=1e3 * seconds / steps,
        accuracy=run.accuracy(test),
        loss=means[-1] if math.isfinite(means[-1]) else None,
        seconds=seconds,
        peak_mib=watch.peak_mib(),
        curve=[mean if math.isfinite(mean) else None for mean in means],
        curve_every=every,
        note=ATTENTIONS[run.impl].note,
        timer="perf-counter",
    )


def _step_seconds(run: Run, device: torch.device) -> float:
    """Seconds of one step: the median, because a batch of a length that did not occur before takes longer. The
    first ones, which compile, do not count."""
    watch, seconds = Stopwatch(device), []
    for step in range(_WARM_UP_STEPS + _TIMED_STEPS):
        watch.start()
        run.step(step, 1000)
        seconds.append(watch.seconds())
    return statistics.median(seconds[_WARM_UP_STEPS:])


def _schedule(step: int, steps: int) -> float:
    """Up in a straight line over a tenth of the steps, then down as a cosine."""
    rise = max(1, steps // 10)
    if step < rise:
        return (step + 1) / rise
    return 0.5 * (1 + math.cos(math.pi * (step - rise) / max(1, steps - rise)))
