"""Long Range Arena's ListOps and Pathfinder in each way to attend: `python -m benchmarks.lra --task pathfinder`.

From the root of a checkout, with flashtile on the path. All ways begin with the same weights and see the same batches.
With `--minutes` the script times a few steps of each way first, and then gives every run as many steps as fit; with
`--steps` it takes that many. Every run takes as many as the others, so accuracies compare; times are what differs.
"""

from __future__ import annotations

import math
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass

import torch
import torch.nn.functional as F

from benchmarks.common import Budget, Program, Stopwatch
from benchmarks.lra import listops, pathfinder
from benchmarks.lra.examples import Examples, Task
from benchmarks.lra.model import ATTENTIONS, Classifier
from flashtile.bench.record import Row, make_row

_WARM_UP_STEPS, _TIMED_STEPS = 5, 9
#: Points of a loss curve.
_POINTS = 50


@dataclass(frozen=True)
class Settings:
    """Settings of a training; the keys of `case` in a record."""

    task: str
    B: int
    layers: int
    width: int
    heads: int
    examples: int
    held_out: int
    learning_rate: float
    dtype: str


def make_task(name: str, size: int | None = None, dashes: int | None = None) -> Task:
    """The task "listops" or "pathfinder". `size`: longest expression, or side of an image; None for Long Range Arena's,
    2,000 and 32. `dashes`: of a long path of Pathfinder. Raises ValueError if its examples cannot be made."""
    if name == "listops":
        longest = 2000 if size is None else size
        limits = listops.Limits(min_length=max(1, longest // 4), max_length=longest)
        return Task(listops.make_listops, limits, listops.VOCABULARY, listops.DIGITS, longest)
    side = 32 if size is None else size
    whole = side >= 32  # a smaller image has room for less
    drawing = pathfinder.Drawing(side, dashes or (6 if whole else 2), 3 if whole else 0)
    return Task(pathfinder.make_pathfinder, drawing, pathfinder.VOCABULARY, 2, side**2, side)


class Run:
    """A model, its optimizer, and batches that depend on the seed and the step alone."""

    def __init__(
        self, settings: Settings, task: Task, impl: str, seed: int, training: Examples, device: torch.device
    ) -> None:
        self.settings, self.task, self.impl, self.seed, self.device = settings, task, impl, seed, device
        self._training = training
        torch.manual_seed(seed)
        self.model = Classifier(task, ATTENTIONS[impl], settings.layers, settings.width, settings.heads).to(device)
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

    def seconds(self) -> float:
        """Seconds of one step: the median, because a batch of a length that did not occur before takes longer. The
        first ones, which compile, do not count."""
        found = []
        for step in range(_WARM_UP_STEPS + _TIMED_STEPS):
            watch = Stopwatch(self.device)
            self.step(step, 1000)
            found.append(watch.seconds())
        return statistics.median(found[_WARM_UP_STEPS:])

    def train(self, steps: int, test: Examples) -> Row:
        """The row of a whole training."""
        watch, settings = Stopwatch(self.device), self.settings
        losses = [self.step(step, steps) for step in range(steps)]
        seconds, accuracy = watch.seconds(), self._accuracy(test)
        curve, every = torch.stack(losses).tolist(), math.ceil(steps / _POINTS)
        means = [sum(part) / len(part) for part in (curve[first : first + every] for first in range(0, steps, every))]
        # null where a loss is no number, which JSON does not have
        points = [mean if math.isfinite(mean) else None for mean in means]
        case = {**asdict(settings), "S": self.task.context, "steps": steps, "seed": self.seed}
        case["made"] = asdict(self.task.options)
        return make_row(
            f"lra-{settings.task}", "train", self.impl, case, ms=1e3 * seconds / steps, accuracy=accuracy,
            loss=points[-1], seconds=seconds, peak_mib=watch.peak_mib(), curve=points, curve_every=every,
            note=ATTENTIONS[self.impl].note, timer="perf-counter",
        )  # fmt: skip

    @torch.no_grad()
    def _accuracy(self, examples: Examples) -> float:
        """Share of the examples whose class the model names."""
        batches = examples.batches(2 * self.settings.B, self.device)
        right = [(self._logits(batch).argmax(-1) == batch.labels).sum() for batch in batches]
        return float(torch.stack(right).sum()) / len(examples)

    def _logits(self, batch: Examples) -> torch.Tensor:
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.settings.dtype == "bf16"):
            return self.model(batch).float()


def _schedule(step: int, steps: int) -> float:
    """Up in a straight line over a tenth of the steps, then down as a cosine."""
    rise = max(1, steps // 10)
    if step < rise:
        return (step + 1) / rise
    return 0.5 * (1 + math.cos(math.pi * (step - rise) / max(1, steps - rise)))


def main(arguments: Sequence[str] | None = None) -> int:
    program = Program("lra", __doc__, "run")
    add = program.add_argument
    add("--task", choices=("listops", "pathfinder"), required=True)
    add("--impl", nargs="+", choices=list(ATTENTIONS), help="ways to attend; default: all")
    add("--seeds", type=int, default=3, help="runs of each")
    add("--steps", type=int, help="of each run")
    add("--minutes", type=float, help="for everything, in place of --steps")
    add("--batch", type=int, default=64, help="sequences in a step")
    add("--layers", type=int, default=4)
    add("--width", type=int, default=256)
    add("--heads", type=int, default=4)
    add("--learning-rate", type=float, default=5e-4)
    add("--size", type=int, help="longest expression (2000), or side of the images (32)")
    add("--dashes", type=int, help="of a long path of Pathfinder (6)")
    add("--examples", type=int, default=20000, help="to learn from")
    add("--held-out", type=int, default=2000, help="to measure the accuracy with")
    add("--workers", type=int, default=1, help="processes that make the examples")
    given, device, recorder = program.start(arguments)
    begin = time.perf_counter()
    try:
        budget, task = Budget(given.steps, given.minutes), make_task(given.task, given.size, given.dashes)
    except ValueError as error:
        return program.fail(error)
    names = ("task", "layers", "width", "heads", "examples", "held_out", "learning_rate")
    dtype = "bf16" if device.type == "cuda" else "fp32"
    settings = Settings(B=given.batch, dtype=dtype, **{name: getattr(given, name) for name in names})
    # Images are all of one size: there is nothing to unpad.
    impls = given.impl or [name for name, way in ATTENTIONS.items() if not (way.packed and task.grid)]
    made = task.make(given.examples + given.held_out, 0, task.options, given.workers)
    training, test = made.split(given.held_out)
    if budget.minutes is not None:  # the time that the examples took is gone
        left = budget.minutes - (time.perf_counter() - begin) / 60
        budget = Budget(minutes=max(left, budget.minutes / 10))

    def run(impl: str, seed: int) -> Run:
        return Run(settings, task, impl, seed, training, device)

    steps = budget.steps_each([run(impl, 0).seconds() for impl in impls], given.seeds)
    for seed in range(given.seeds):
        for impl in impls:
            row = run(impl, seed).train(steps, test)
            recorder.add([row])
            memory = "" if row["peak_mib"] is None else f", {row['peak_mib']:.0f} MiB"
            print(
                f"{row['op']} {impl:16} seed {seed}: {steps} steps, {row['ms']:.1f} ms each{memory}, accuracy "
                f"{row['accuracy']:.3f}",
                flush=True,
            )
    return 0


if __name__ == "__main__":
    sys.exit(main())
