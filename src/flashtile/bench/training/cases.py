"""Cases of the training benchmark: models, batches, the work of a step, and random weights.

A step is forward, backward and AdamW, on float32 weights; "bf16" is `torch.autocast`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor

from flashtile.bench.cases import select_named
from flashtile.bench.errors import ChoiceError
from flashtile.bench.values import help_text_tokens

OP = "train-step"
PHASE = "fwd+bwd+step"

#: Standard deviation of the weights at the start, as in GPT-2.
_INITIAL_STD = 0.02


@dataclass(frozen=True)
class Sizes:
    """Sizes of a GPT-2. The vocabulary is rounded up to a multiple of 64, as is usual where one is trained."""

    layers: int
    heads: int
    width: int
    vocabulary: int = 50304


MODELS = {
    "gpt2-small": Sizes(12, 12, 768),
    "gpt2-medium": Sizes(24, 16, 1024),
    "gpt2-tiny": Sizes(2, 2, 64, vocabulary=256),
}


@dataclass(frozen=True)
class TrainCase:
    """Training steps of a model on B sequences of S tokens. Field names are the keys of `case` in a record.

    With `steps` the model has been trained for so many steps before, on Python's help texts byte by byte, and goes on
    with them. Else weights and tokens are random, so that scores are small.

    `dropout_p` is GPT-2's three dropouts: of embeddings, of attention weights, and of what is added to the residual
    stream.
    """

    model: str
    B: int
    S: int
    dtype: str = "bf16"
    steps: int = 0
    dropout_p: float = 0.0

    @property
    def name(self) -> str:
        """A readable identifier, such as `gpt2-small-b16-s1024-bf16`."""
        after = f"-after{self.steps}" if self.steps else ""
        dropout = f"-p{self.dropout_p}" if self.dropout_p else ""
        return f"{self.model}-b{self.B}-s{self.S}{after}{dropout}-{self.dtype}"

    @property
    def sizes(self) -> Sizes:
        return MODELS[self.model]

    @property
    def tokens(self) -> int:
        return self.B * self.S

    def record(self) -> dict[str, Any]:
        """The `case` object of a record: the same for every implementation. Without dropout it has no such key, as
        in records that are older than dropout."""
        return {name: value for name, value in asdict(self).items() if name != "dropout_p" or value}

    def flops(self, phase: str) -> float:
        """Operations of the model: two for each weight of a product and token, and attention's half of S²; a backward
        twice that.

        What an implementation computes again is no work of the model.
        """
        sizes = self.sizes
        weights = 12 * sizes.layers * sizes.width**2 + sizes.vocabulary * sizes.width
        attention = 2 * sizes.layers * self.S * sizes.width
        return 3.0 * self.tokens * (2 * weights + attention)


def training_cases(device: torch.device, batch: int | None = None) -> list[TrainCase]:
    """Cases of a device, with another batch size where one is given."""
    cases = [TrainCase("gpt2-tiny", 2, 64, "fp32")]
    if device.type == "cuda":
        cases = [TrainCase("gpt2-small", 16, 1024), TrainCase("gpt2-medium", 8, 1024)]
    return cases if batch is None else [replace(case, B=batch) for case in cases]


def cases_of(
    device: torch.device,
    models: Sequence[str],
    batch: int | None,
    contexts: Sequence[int] = (),
    steps: int = 0,
    dropout_p: float = 0.0,
) -> list[TrainCase]:
    """The cases of the named models, of all when none is named.

    Args:
        contexts: lengths of the sequences; the case's own when empty. Where no batch is given, a step has as many
            tokens as that case, and at least one sequence.
        steps: of training before what is measured, without dropout.
        dropout_p: probability of each dropout in what is measured.

    Raises:
        ChoiceError: there is no such model on this device, or `dropout_p` is no probability below 1.
    """
    check_dropout(dropout_p)
    known = {case.model: case for case in training_cases(device, batch)}
    chosen = select_named("--model", models or list(known), known, device.type)
    chosen = [_with_context(case, context, batch) for context in contexts for case in chosen] or chosen
    return [replace(case, steps=steps, dropout_p=dropout_p) for case in chosen]


def check_dropout(dropout_p: float) -> None:
    if not 0 <= dropout_p < 1:
        raise ChoiceError(f"--dropout: expected a probability in [0, 1), got {dropout_p}; 0.1 is GPT-2's and BERT's")


def _with_context(case: TrainCase, context: int, batch: int | None) -> TrainCase:
    return replace(case, S=context, B=batch or max(1, case.tokens // context))


def make_weights(case: TrainCase, device: torch.device, seed: int = 0) -> dict[str, Tensor]:
    """Random weights as transformers names and lays them out: matrices are `[in, out]`; the head is tied."""
    generator = torch.Generator(device).manual_seed(seed)
    weights = {}
    for name, shape in weight_shapes(case.sizes, case.S):
        if len(shape) == 2:
            # Each block adds two terms to the residual stream: scaled so that its variance does not grow with depth.
            std = _INITIAL_STD / (math.sqrt(2 * case.sizes.layers) if name.endswith("c_proj.weight") else 1.0)
            weights[name] = torch.randn(shape, generator=generator, device=device).mul_(std)
        else:
            norm = ".ln_" in name and name.endswith("weight")
            weights[name] = torch.full(shape, float(norm), device=device)
    return weights


def make_tokens(case: TrainCase, device: torch.device, seed: int = 0) -> Tensor:
    """Tokens `[B, S + 1]`: inputs, and a place further the labels. Random ones, or bytes of text where there is a
    training before."""
    if case.steps:
        return help_text_tokens(case.B, case.S, torch.Generator().manual_seed(seed)).to(device)
    generator = torch.Generator(device).manual_seed(seed)
    return torch.randint(case.sizes.vocabulary, (case.B, case.S + 1), generator=generator, device=device)


def weight_shapes(sizes: Sizes, context: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Names and shapes of the weights of a model."""
    width = sizes.width
    yield "transformer.wte.weight", (sizes.vocabulary, width)
    yield "transformer.wpe.weight", (context, width)
    layers = {"attn.c_attn": (width, 3 * width), "attn.c_proj": (width, width)}
    layers |= {"mlp.c_fc": (width, 4 * width), "mlp.c_proj": (4 * width, width)}
    for layer in range(sizes.layers):
        for norm in ("ln_1", "ln_2"):
            yield f"transformer.h.{layer}.{norm}.weight", (width,)
            yield f"transformer.h.{layer}.{norm}.bias", (width,)
        for name, shape in layers.items():
            yield f"transformer.h.{layer}.{name}.weight", shape
            yield f"transformer.h.{layer}.{name}.bias", shape[1:]
    yield "transformer.ln_f.weight", (width,)
    yield "transformer.ln_f.bias", (width,)
