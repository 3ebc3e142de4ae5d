"""The size of the demo on this machine, its text, the training of the GPT on it, and the comparison of trainings."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from pathlib import Path

import torch

from demo_parts.isolation import PeakMemory, Report
from flashtile.bench.start import UserError
from flashtile.bench.values import help_texts, sample_text
from flashtile.models import GPT, GPTConfig
from flashtile.models.gpt import CausalAttention

_SEED = 1
_MAX_GRADIENT_NORM = 1.0
#: No division by zero, where a wrong attention passes no gradient on.
_SMALLEST_NORM = 1e-30
#: Steps at the start that do not count for speed: kernels compile, memory is first touched.
_UNTIMED_STEPS = 2
#: Fewer steps than this say nothing, however slow they are.
FEWEST_STEPS = 12
#: More than this much text changes nothing in a few hundred steps.
_MAX_BYTES = 32 * 2**20


@dataclass(frozen=True)
class Plan:
    """Sizes of a demo run, which takes `seconds`.

    Attributes:
        max_steps: training steps, unless the time is short.
        learning_rate: of AdamW, after `warm_up_steps`, over which it grows linearly from almost nothing.
        autocast: bf16 in matrix products and attention.
        first_tolerance: largest difference of the first losses, in nats: the weights are still the same there.
        gradient_tolerance: largest relative difference of the first gradients of q, k and v, as norms.
        tolerance: largest difference at any later step, in nats: rounding has had time to grow.
        lengths, heads: of the measurement of attention alone, ascending; head_dim is 64, the batch 1.
    """

    device: torch.device
    model: GPTConfig
    batch: int
    max_steps: int
    learning_rate: float
    warm_up_steps: int
    autocast: bool
    first_tolerance: float
    gradient_tolerance: float
    tolerance: float
    lengths: tuple[int, ...]
    heads: int
    seconds: float

    @property
    def attention_dtype(self) -> torch.dtype:
        return torch.bfloat16 if self.autocast else torch.float32


def make_plan(device: torch.device, seconds: float) -> Plan:
    """Sizes by device: a model that trains in seconds on two cores, or one that keeps a GPU busy."""
    if device.type == "cuda":
        return Plan(
            device=device, model=GPTConfig(context=1024, layers=12, heads=12, width=768),
            batch=_cuda_batch(device), max_steps=200,
            # Adam's first steps move every weight by the learning rate, all in step: the wider and deeper the model,
            # the smaller they must be. At a spike of the loss, differences by rounding grow to whole nats; at 3e-4
            # they grow ten times as large as here, and the loss falls no faster.
            learning_rate=1e-4, warm_up_steps=100, autocast=True,
            # At the first step bf16 alone was seen to make 4e-5 and, in the gradients, 1e-4; a scale that is off by 4 %
            # makes 8e-4 and 0.04.
            first_tolerance=5e-4, gradient_tolerance=5e-3,
            # Rounding grew to 0.01 in 200 steps of this model on batches of 256 bytes, which are noisier than these.
            tolerance=0.1, lengths=tuple(1024 * 2**n for n in range(8)), heads=16, seconds=seconds,
        )  # fmt: skip
    return Plan(
        device=device, model=GPTConfig(context=512, layers=4, heads=2, width=128), batch=4, max_steps=120,
        learning_rate=2e-3, warm_up_steps=10, autocast=False,
        # Rounding alone was seen to make 1e-6 in 100 steps, a gradient that is off by 1 % makes 0.02 in 30.
        first_tolerance=1e-5, gradient_tolerance=1e-4, tolerance=1e-3,
        lengths=tuple(512 * 2**n for n in range(7)), heads=2, seconds=seconds,
    )  # fmt: skip


def _cuda_batch(device: torch.device) -> int:
    """As many sequences, 16 at most, as let plain attention fit: about 1.5 GiB of matrices and activations for each."""
    free, _ = torch.cuda.mem_get_info(device)
    return max(1, min(16, int(free * 0.7 / (1.5 * 2**30))))


@dataclass(frozen=True)
class Training:
    """The results of a training. `losses`: of each step, in nats for a byte. `first_gradients`: norms, at the first
    step, of the weight gradients that make q, k and v, over all layers. `tokens_per_second`: over all steps but the
    first ones. `peak_bytes`: growth of peak memory from before the model was made."""

    losses: list[float]
    first_gradients: list[float]
    tokens_per_second: float
    peak_bytes: int


@dataclass(frozen=True)
class Comparison:
    """Differences of two trainings, and whether they are within the plan's tolerances."""

    first_difference: float
    gradient_difference: float
    largest_difference: float
    largest_at_step: int
    agree: bool


def load_text(path: Path | None, context: int) -> tuple[bytes, str]:
    """(bytes, name) of a file, None for Python's help texts. UserError unless it holds twice the `context`."""
    path, name = (help_texts(), "Python's help topics") if path is None else (path, path.name)
    try:
        with path.open("rb") as file:
            text = file.read(_MAX_BYTES)
    except IsADirectoryError:
        raise UserError(f"{path} is a folder; give a file") from None
    except FileNotFoundError:
        raise UserError(f"there is no file {path}") from None
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from None
    if len(text) < 2 * context:
        raise UserError(
            f"{path} holds {len(text)} bytes; the model sees {context} at once and needs at least {2 * context}"
        )
    return text, name


def train(
    plan: Plan, text: bytes, attention: CausalAttention, steps: int, report: Report, *, seconds: float = math.inf
) -> Training:
    """Trains a model from a fixed seed on batches from a fixed seed; reports (step, loss). It makes fewer steps, though
    not fewer than `FEWEST_STEPS`, if `seconds` are over before."""
    device = plan.device
    tokens = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    small = torch.ones(64, 64, device=device, requires_grad=True)
    (small @ small).sum().backward()  # libraries of products allocate on first use: that is no training's memory
    memory = PeakMemory(device)
    torch.manual_seed(_SEED)
    model = GPT(plan.model, attention).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)
    batches = torch.Generator().manual_seed(_SEED)
    losses: list[float] = []
    first_gradients: list[float] = []
    begin = start = time.perf_counter()
    for step in range(steps):
        if step >= FEWEST_STEPS and time.perf_counter() - begin > seconds:
            break
        if step == min(_UNTIMED_STEPS, steps - 1):
            start = time.perf_counter()
        batch = sample_text(tokens, plan.batch, plan.model.context, batches).to(device)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(plan, step)
        losses.append(_step(model, optimizer, batch, plan.autocast))
        if step == 0:
            first_gradients = _qkv_gradients(model)
        report(step, losses[-1])
    timed = len(losses) - min(_UNTIMED_STEPS, steps - 1)
    rate = timed * plan.batch * plan.model.context / (time.perf_counter() - start)
    return Training(losses, first_gradients, rate, memory.growth())


def learning_rate(plan: Plan, step: int) -> float:
    """The rate of a step, counted from zero: it grows linearly, then stays."""
    return plan.learning_rate * min(1.0, (step + 1) / plan.warm_up_steps)


def compare(plan: Plan, ours: Training, plain: Training) -> Comparison:
    """Two trainings from the same weights on the same batches differ by rounding alone. Small errors show at the first
    step, where the weights are the same; later the curves tell whether training goes on alike."""
    differences = [abs(a - b) for a, b in zip(ours.losses, plain.losses, strict=True)]
    largest = _largest(differences)
    norms = zip(ours.first_gradients, plain.first_gradients, strict=True)
    gradients = _largest([abs(a - b) / max(b, _SMALLEST_NORM) for a, b in norms])
    agree = (
        differences[0] <= plan.first_tolerance and gradients <= plan.gradient_tolerance and largest <= plan.tolerance
    )
    return Comparison(differences[0], gradients, largest, differences.index(largest), agree)


def _largest(differences: list[float]) -> float:
    """NaN counts as the largest."""
    return max(differences, key=lambda d: (d != d, d))


def _qkv_gradients(model: GPT) -> list[float]:
    """Norms of the gradients of the weights that make q, k and v. Clipping scales all three alike."""
    weights = [weight for name, weight in model.named_parameters() if name.endswith("Wqkv.weight")]
    gradients = [weight.grad.unflatten(0, (3, -1)).flatten(1) for weight in weights if weight.grad is not None]
    return torch.cat(gradients, dim=1).norm(dim=1).tolist()


def _step(model: GPT, optimizer: torch.optim.Optimizer, batch: torch.Tensor, autocast: bool) -> float:
    with torch.autocast(batch.device.type, torch.bfloat16, enabled=autocast):
        loss = model.loss(batch)
    optimizer.zero_grad(set_to_none=True)
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), _MAX_GRADIENT_NORM)
    optimizer.step()
    return loss.item()
