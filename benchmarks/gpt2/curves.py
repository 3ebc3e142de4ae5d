"""Trains GPT-2 from one set of weights on one sequence of batches, in several implementations.

The models, optimizer and arithmetic are those of `flashtile bench train`, which judges each by the plain formula in
float64 before its speed counts. Here they go on for as many steps as wanted, each on a batch of its own.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from benchmarks.evidence.budget import Budget
from benchmarks.evidence.measure import Stopwatch
from benchmarks.evidence.text import Text, batch_of
from flashtile.bench.base import Implementation
from flashtile.bench.record import make_row
from flashtile.bench.training import TrainCase, Training, make_weights
from flashtile.bench.training_steps import peak_tflops

OP = "train-curve"
_WARM_UP_STEPS, _TIMED_STEPS = 3, 5


def train_curves(
    case: TrainCase,
    implementations: Sequence[Implementation],
    text: Text,
    budget: Budget,
    device: torch.device,
    seed: int = 0,
    on_row: Callable[[dict[str, Any]], None] = lambda row: None,
) -> list[dict[str, Any]]:
    """A row for each implementation, with the loss of every step (`curve`).

    Raises:
        ValueError: the text is too short.
    """
    weights = make_weights(case, device, seed)
    seconds = [_step_seconds(_bind(case, each, weights), case, text, device) for each in implementations]
    steps = budget.steps_each(seconds)
    rows: list[dict[str, Any]] = []
    for implementation in implementations:
        training = _bind(case, implementation, weights)
        watch = Stopwatch(device)
        watch.start()
        losses = [training.step(_tokens(case, text, step, seed).to(device)) for step in range(steps)]
        seconds_taken = watch.seconds()
        curve = torch.stack(losses).tolist()
        ms = 1e3 * seconds_taken / steps
        tflops, peak = case.flops("") / ms / 1e9, peak_tflops(device)
        rows.append(
            make_row(
                OP,
                "train",
                implementation.name,
                {**case.record(), "steps": steps, "seed": seed, "text": text.name, "text_sha256": text.sha256},
                ms=ms,
                tflops=tflops,
                mfu=peak and tflops / peak,
                tokens_per_s=case.tokens / ms * 1e3,
                peak_mib=watch.peak_mib(),
                curve=[loss if math.isfinite(loss) else None for loss in curve],
                timer="perf-counter",
            )
        )
        on_row(rows[-1])
    return rows


def differences(rows: Sequence[dict[str, Any]]) -> dict[str, tuple[float, float]]:
    """Implementation -> largest and mean difference of its losses from those of the first row.

    Ratios are of the second half of the steps, each the mean over a tenth: single losses differ by rounding that grows
    from step to step, so curves are compared by what they show.
    """
    first = _smooth(rows[0]["curve"])
    found = {}
    for row in rows[1:]:
        apart = [abs(a - b) for a, b in zip(_smooth(row["curve"]), first)]
        found[row["impl"]] = max(apart), sum(apart) / len(apart)
    return found


def _smooth(curve: Sequence[float | None]) -> list[float]:
    values = [math.inf if value is None else value for value in curve]
    size, half = max(1, len(values) // 10), len(values) // 2
    return [sum(values[first : first + size]) / size for first in range(half, max(half + 1, len(values) - size + 1))]


def _bind(case: TrainCase, implementation: Implementation, weights: dict[str, torch.Tensor]) -> Training:
    nothing = torch.zeros(case.B, case.S + 1, dtype=torch.int64, device=next(iter(weights.values())).device)
    return Training(implementation.build(case, weights), nothing, case.dtype == "bf16")


def _tokens(case: TrainCase, text: Text, step: int, seed: int) -> torch.Tensor:
    return batch_of(text, case.B, case.S + 1, 1_000_003 * seed + step)


def _step_seconds(training: Training, case: TrainCase, text: Text, device: torch.device) -> float:
    batches = [_tokens(case, text, step, 0).to(device) for step in range(_TIMED_STEPS)]
    for _ in range(_WARM_UP_STEPS):
        training.step(batches[0])
    watch = Stopwatch(device)
    watch.start()
    for batch in batches:
        training.step(batch)
    return watch.seconds() / len(batches)
