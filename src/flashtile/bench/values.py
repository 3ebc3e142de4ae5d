"""Contents of the tensors of a case: random normal numbers, others that make scores large, and a trained model's.

A kernel's time may depend on its inputs: scores that rise late make an online softmax rescale. `Case.values` names
the contents of q, k and v:

- `normal`: standard normal numbers.
- `q-times-8`: normal, q multiplied by 8. Scores then have a standard deviation of 8.
- `shifted`: q + 3 and k + 3.
- `growing-keys`: k multiplied by 0.05 at the first key to 20 at the last.
- `first-key-times-50`: an attention sink.
- `late-key-times-100`: one key, at three quarters of the sequence.
- `trained-0`, `trained-1`, ...: what the layers of a small language model compute, after training.
"""

from __future__ import annotations

import functools
import importlib.util
import sys
from pathlib import Path

import torch
from torch import Tensor

import flashtile
from flashtile.bench.start import UserError
from flashtile.models import GPT, GPTConfig

NORMAL = "normal"
_TIMES = "q-times-"
#: Before the number of a layer of the trained model.
TRAINED = "trained-"

#: Values of the table, beside those of the trained model's layers.
MADE = (
    NORMAL, *(f"{_TIMES}{factor}" for factor in (2, 4, 8, 16)), "shifted", "growing-keys", "first-key-times-50",
    "late-key-times-100",
)  # fmt: skip

#: The model whose activations are taken: a decoder with RMS norm and rotary positions, on bytes.
MODEL = GPTConfig(
    context=4096, layers=8, heads=8, width=512, positions="rotary", norm="rms", activation="swiglu",
    attention_bias=False, mlp_bias=False,
)  # fmt: skip
BATCH = 4
_STEPS = 1000
_LEARNING_RATE = 1e-3


def changed(values: str, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Normal tensors `[B, S, heads, D]`, changed as `values` says. They stay in their dtype."""
    seq = k.shape[1]
    if values.startswith(_TIMES):
        return q * float(values.removeprefix(_TIMES)), k, v
    if values == "shifted":
        return q + 3, k + 3, v
    if values == "growing-keys":
        return q, k * torch.linspace(0.05, 20, seq, device=k.device, dtype=k.dtype)[:, None, None], v
    if values != NORMAL:
        place, factor = {"first-key-times-50": (0, 50), "late-key-times-100": (seq * 3 // 4, 100)}[values]
        k = k.clone()
        k[:, place] *= factor
    return q, k, v


@functools.cache
def activations(device: torch.device, steps: int = _STEPS, config: GPTConfig = MODEL) -> list[tuple[Tensor, ...]]:
    """(q, k, v) of every layer, float32 `[BATCH, context, heads, D]`, after so many steps on Python's help texts."""
    generator = torch.Generator().manual_seed(0)
    taken: list[tuple[Tensor, ...]] = []

    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if not torch.is_grad_enabled():
            taken.append(tuple(t.float() for t in (q, k, v)))
        return flashtile.attention(q, k, v, causal=True)

    def batch() -> Tensor:
        return help_text_tokens(BATCH, config.context, generator).to(device)

    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        torch.manual_seed(0)
        model = GPT(config, attention, device=device)
        optimizer = torch.optim.AdamW(model.parameters(), lr=_LEARNING_RATE, weight_decay=0.1)
        warm_up = torch.optim.lr_scheduler.LinearLR(optimizer, 0.01, total_iters=min(100, steps))
        for _ in range(steps):
            with torch.autocast(device.type, torch.bfloat16):
                loss = model.loss(batch())
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            warm_up.step()
        with torch.no_grad(), torch.autocast(device.type, torch.bfloat16):
            model(batch()[:, :-1])
    print(f"a model of {config.layers} layers: loss {loss.item():.2f} after {steps} steps", file=sys.stderr)
    return taken


def help_text_tokens(batch: int, seq: int, generator: torch.Generator) -> Tensor:
    """Bytes of Python's help texts, int64 `[batch, seq + 1]`, from places that the generator draws."""
    return sample_text(torch.frombuffer(bytearray(help_texts().read_bytes()), dtype=torch.uint8), batch, seq, generator)


def sample_text(text: Tensor, batch: int, seq: int, generator: torch.Generator) -> Tensor:
    """Pieces of a text, int64 `[batch, seq + 1]`, from places that the generator draws."""
    starts = torch.randint(text.numel() - seq, (batch,), generator=generator, device="cpu")
    return torch.stack([text[start : start + seq + 1] for start in starts.tolist()]).long()


@functools.cache
def help_texts() -> Path:
    """The texts that every Python brings along, `pydoc_data/topics.py`. Raises UserError if they are missing."""
    spec = importlib.util.find_spec("pydoc_data.topics")
    if spec is None or spec.origin is None or not spec.origin.endswith(".py"):
        raise UserError("this Python comes without pydoc_data/topics.py, the default text; give a file to learn from")
    return Path(spec.origin)
