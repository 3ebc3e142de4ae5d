"""How large the demo is on this machine."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from flashtile.models import GPTConfig


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
