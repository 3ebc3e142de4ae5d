"""Loss curves of GPT-2 on real text: `python -m benchmarks.gpt2 --minutes 3 --output curves.json`.

From the root of a checkout, with flashtile on the path. The text is Python's own standard library, as bytes, or that of
`--data`. All implementations begin with the same weights and see the same batches, a new one in each step. Models,
optimizer and arithmetic are those of `flashtile bench train`, which judges each by the plain formula in float64 before
its speed counts; `--context 1024 4096 16384 65536` there times longer sequences.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.common import Budget, Program, Stopwatch, Text, batch_of, load_text
from flashtile.bench.base import Implementation
from flashtile.bench.record import Row, make_row
from flashtile.bench.training import IMPLEMENTATIONS, MODELS, TrainCase, Training, make_weights
from flashtile.bench.training_steps import peak_tflops

_WARM_UP_STEPS, _TIMED_STEPS = 3, 5


def main(arguments: Sequence[str] | None = None) -> int:
    program = Program("gpt2", __doc__, "implementation")
    add = program.add_argument
    add("--model", choices=list(MODELS), default="gpt2-small")
    add("--impl", nargs="+", choices=[each.name for each in IMPLEMENTATIONS],
        default=["transformers-eager", "flashtile"], help="the first is what the others are compared with")  # fmt: skip
    add("--steps", type=int, help="of each implementation")
    add("--minutes", type=float, help="for everything, in place of --steps")
    add("--batch", type=int, default=16)
    add("--context", type=int, default=1024)
    add("--data", type=Path, help="file or folder of text; default: Python's standard library")
    given, device, recorder = program.start(arguments)
    case = TrainCase(given.model, given.batch, given.context, "bf16" if device.type == "cuda" else "fp32")
    chosen = [each for name in given.impl for each in IMPLEMENTATIONS if each.name == name]
    try:
        if missing := [reason for each in chosen if (reason := each.missing())]:
            raise ValueError(f"impl: {'; '.join(missing)}")
        text, budget, weights = load_text(given.data), Budget(given.steps, given.minutes), make_weights(case, device)
        steps = budget.steps_each([_step_seconds(case, each, weights, text) for each in chosen])
        for implementation in chosen:
            row = train_curve(case, implementation, weights, text, steps)
            recorder.add([row])
            print(
                f"{row['impl']:20} {steps} steps, {row['ms']:.1f} ms each, {row['tokens_per_s']:.0f} tokens/s, "
                f"last loss {row['curve'][-1]}",
                flush=True,
            )
    except ValueError as error:
        return program.fail(error)
    for impl, (largest, mean) in differences(recorder.rows).items():
        first = recorder.rows[0]["impl"]
        print(f"{impl} from {first}, smoothed losses of the second half: at most {largest:.4f}, {mean:.4f} mean")
    return 0


def train_curve(
    case: TrainCase, implementation: Implementation, weights: dict[str, torch.Tensor], text: Text, steps: int
) -> Row:
    """The row of an implementation, with the loss of every step (`curve`). Raises ValueError if the text is short."""
    training, device = _bind(case, implementation, weights)
    watch = Stopwatch(device)
    losses = [training.step(batch_of(text, case.B, case.S + 1, step).to(device)) for step in range(steps)]
    ms = 1e3 * watch.seconds() / steps
    tflops, peak = case.flops("") / ms / 1e9, peak_tflops(device)
    described = {**case.record(), "steps": steps, "seed": 0, "text": text.name, "text_sha256": text.sha256}
    return make_row(
        "train-curve", "train", implementation.name, described, ms=ms, tflops=tflops, mfu=peak and tflops / peak,
        tokens_per_s=case.tokens / ms * 1e3, peak_mib=watch.peak_mib(), timer="perf-counter",
        curve=[loss if math.isfinite(loss) else None for loss in torch.stack(losses).tolist()],
    )  # fmt: skip


def differences(rows: Sequence[dict[str, Any]]) -> dict[str, tuple[float, float]]:
    """Implementation -> largest and mean difference of its losses from those of the first row.

    Losses are of the second half of the steps, each the mean over a tenth: single losses differ by rounding that grows
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


def _bind(
    case: TrainCase, implementation: Implementation, weights: dict[str, torch.Tensor]
) -> tuple[Training, torch.device]:
    device = next(iter(weights.values())).device
    nothing = torch.zeros(case.B, case.S + 1, dtype=torch.int64, device=device)
    return Training(implementation.build(case, weights), nothing, case.dtype == "bf16"), device


def _step_seconds(
    case: TrainCase, implementation: Implementation, weights: dict[str, torch.Tensor], text: Text
) -> float:
    training, device = _bind(case, implementation, weights)
    batches = [batch_of(text, case.B, case.S + 1, step).to(device) for step in range(_TIMED_STEPS)]
    for _ in range(_WARM_UP_STEPS):
        training.step(batches[0])
    watch = Stopwatch(device)
    for batch in batches:
        training.step(batch)
    return watch.seconds() / len(batches)


if __name__ == "__main__":
    sys.exit(main())
