"""Trains the GPT, and compares two trainings."""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch

from flashtile.cli.demo.isolation import PeakMemory, Report
from flashtile.cli.demo.plan import Plan
from flashtile.models import GPT
from flashtile.models.gpt import CausalAttention

_SEED = 1
_WARM_UP_STEPS = 10
_MAX_GRADIENT_NORM = 1.0
#: Steps at the start that do not count for speed: kernels compile, memory is first touched.
_UNTIMED_STEPS = 2


@dataclass(frozen=True)
class Training:
    """What a training gave.

    Attributes:
        losses: of each step, in nats for a byte.
        tokens_per_second: over all steps but the first ones.
        peak_bytes: growth of peak memory from before the model was made.
    """

    losses: list[float]
    tokens_per_second: float
    peak_bytes: int


@dataclass(frozen=True)
class Comparison:
    """Differences of two loss curves, and whether they are within the plan's tolerances."""

    first_difference: float
    largest_difference: float
    largest_at_step: int
    agree: bool


def train(plan: Plan, text: bytes, attention: CausalAttention, steps: int, report: Report) -> Training:
    """Trains a model from a fixed seed on batches from a fixed seed; reports (step, loss)."""
    device = plan.device
    tokens = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    _touch_libraries(device)
    memory = PeakMemory(device)
    torch.manual_seed(_SEED)
    model = GPT(plan.model, attention).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=plan.learning_rate, betas=(0.9, 0.95), weight_decay=0.1)
    batches = torch.Generator().manual_seed(_SEED)
    losses = []
    start = time.perf_counter()
    for step in range(steps):
        if step == min(_UNTIMED_STEPS, steps - 1):
            start = time.perf_counter()
        batch = _sample(tokens, plan, batches).to(device)
        for group in optimizer.param_groups:
            group["lr"] = plan.learning_rate * min(1.0, (step + 1) / _WARM_UP_STEPS)
        losses.append(_step(model, optimizer, batch, plan.autocast))
        report(step, losses[-1])
    seconds = time.perf_counter() - start
    timed = steps - min(_UNTIMED_STEPS, steps - 1)
    return Training(losses, timed * plan.batch * plan.model.context / seconds, memory.growth())


def compare(plan: Plan, ours: list[float], plain: list[float]) -> Comparison:
    """Two trainings from the same weights on the same batches differ by rounding alone, or one of them is wrong."""
    differences = [abs(a - b) for a, b in zip(ours, plain, strict=True)]
    largest = max(differences, key=lambda d: (d != d, d))  # NaN counts as the largest
    agree = differences[0] <= plan.first_tolerance and largest <= plan.tolerance
    return Comparison(differences[0], largest, differences.index(largest), agree)


def _step(model: GPT, optimizer: torch.optim.Optimizer, batch: torch.Tensor, autocast: bool) -> float:
    with torch.autocast(batch.device.type, torch.bfloat16, enabled=autocast):
        loss = model.loss(batch)
    optimizer.zero_grad(set_to_none=True)
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), _MAX_GRADIENT_NORM)
    optimizer.step()
    return loss.item()


def _sample(tokens: torch.Tensor, plan: Plan, generator: torch.Generator) -> torch.Tensor:
    """A batch `[B, context + 1]` of pieces of the text."""
    length = plan.model.context + 1
    starts = torch.randint(len(tokens) - length + 1, (plan.batch,), generator=generator)
    return torch.stack([tokens[start : start + length] for start in starts]).long()


def _touch_libraries(device: torch.device) -> None:
    """Matrix libraries allocate on first use; that is neither training's memory."""
    small = torch.ones(64, 64, device=device, requires_grad=True)
    (small @ small).sum().backward()
