"""A training loop with accelerate: bfloat16, accumulated gradients, and a checkpoint from which training goes on.

pip install accelerate
accelerate launch examples/trainers/accelerate_loop.py
"""

from __future__ import annotations

import itertools
import tempfile
from typing import Any

import accelerate
import tiny_llama
import torch


def prepared(accelerator: accelerate.Accelerator) -> tuple[Any, Any, Any]:
    """The model, its optimizer and its batches, two texts each."""
    model = tiny_llama.make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    loader = torch.utils.data.DataLoader(tiny_llama.TEXTS, batch_size=2, collate_fn=tiny_llama.make_batch)
    return accelerator.prepare(model, optimizer, loader)


def train(accelerator: accelerate.Accelerator, model: Any, optimizer: Any, loader: Any, batches: int) -> list[float]:
    losses = []
    for batch in itertools.islice(itertools.cycle(loader), batches):
        with accelerator.accumulate(model):
            loss = model(**batch).loss
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        losses.append(accelerator.gather(loss.detach()).mean().item())
    return losses


def main(batches: int = 60, precision: str = "bf16") -> list[float]:
    """Trains in two halves, with a checkpoint between them, and returns the losses."""
    half = batches // 2
    accelerator = accelerate.Accelerator(cpu=True, mixed_precision=precision, gradient_accumulation_steps=2)
    parts = prepared(accelerator)
    losses = train(accelerator, *parts, half)
    with tempfile.TemporaryDirectory() as folder:
        accelerator.save_state(folder)
        went_on = train(accelerator, *parts, batches - half)
        accelerator.load_state(folder)
        again = train(accelerator, *parts, batches - half)
    assert again == went_on, "training from a checkpoint differs"
    return losses + went_on


if __name__ == "__main__":
    found = main()
    print(f"loss: {found[0]:.2f}, after training {found[-1]:.2f}; training from the checkpoint gives the same losses")
