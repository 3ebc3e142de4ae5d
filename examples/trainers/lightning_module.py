"""flashtile's GPT as a LightningModule, with a checkpoint from which training goes on.

pip install lightning
python examples/trainers/lightning_module.py
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import lightning
import torch
from torch import Tensor

from flashtile.models import GPT, GPTConfig

CONTEXT = 32


class Gpt(lightning.LightningModule):
    """Trains on `[batch, context + 1]` tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.losses: list[float] = []
        self.model = GPT(
            GPTConfig(
                context=CONTEXT, layers=2, heads=4, heads_kv=2, width=32, vocabulary=64, positions="rotary", norm="rms"
            )
        )

    def training_step(self, tokens: Tensor) -> Tensor:
        loss = self.model.loss(tokens)
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=3e-3)


def make_trainer(steps: int) -> lightning.Trainer:
    return lightning.Trainer(
        max_steps=steps, accelerator="cpu", precision="bf16-mixed", gradient_clip_val=1.0, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip


def main(steps: int = 60) -> list[float]:
    """Trains in two halves, the second from a checkpoint, and returns the losses."""
    lightning.seed_everything(0, verbose=False)
    rows = (torch.arange(CONTEXT + 1) * torch.arange(1, 5)[:, None]) % 64  # rows that can be learned
    loader = torch.utils.data.DataLoader(rows, batch_size=4)
    first = Gpt()
    trainer = make_trainer(steps // 2)
    trainer.fit(first, loader)
    with tempfile.TemporaryDirectory() as folder:
        trainer.save_checkpoint(Path(folder) / "half.ckpt")
        second = Gpt()
        make_trainer(steps).fit(second, loader, ckpt_path=Path(folder) / "half.ckpt")
    return first.losses + second.losses


if __name__ == "__main__":
    found = main()
    print(f"loss: {found[0]:.2f}, after training {found[-1]:.2f}, through a checkpoint")
