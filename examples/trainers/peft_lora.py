"""LoRA of a transformers model on flashtile's attention, with PEFT: train, save the adapter, load it, merge it.

pip install peft
python examples/trainers/peft_lora.py
"""

from __future__ import annotations

import tempfile
from typing import Any

import peft
import tiny_llama
import torch

from flashtile.testing import assert_same


def make_lora(attention: str = "flashtile") -> Any:
    """A frozen model with adapters of rank 4 at the projections of attention."""
    config = peft.LoraConfig(
        r=4, lora_alpha=8, target_modules=["q_proj", "k_proj", "v_proj", "o_proj"], task_type="CAUSAL_LM"
    )
    return peft.get_peft_model(tiny_llama.make_model(attention), config)


def main(steps: int = 60) -> list[float]:
    """Trains the adapters, and returns the losses."""
    model, batch = make_lora(), tiny_llama.make_batch(tiny_llama.TEXTS)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=3e-2)
    losses = []
    for _ in range(steps):
        loss = model(**batch).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())

    model.eval()
    with tempfile.TemporaryDirectory() as folder, torch.no_grad():
        model.save_pretrained(folder)
        loaded = peft.PeftModel.from_pretrained(tiny_llama.make_model(), folder).eval()
        assert_same(loaded(**batch).logits, model(**batch).logits)
        assert_same(loaded.merge_and_unload()(**batch).logits, model(**batch).logits)
    return losses


if __name__ == "__main__":
    found = main()
    print(f"loss: {found[0]:.2f}, after training {found[-1]:.2f}; the loaded and the merged model give the same logits")
