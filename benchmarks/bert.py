"""Masked-LM steps of BERT, packed and padded: `python -m benchmarks.bert --output bert.json`.

From the root of a checkout, with flashtile on the path, and transformers, whose model is what all are checked by.

A sequence begins with the token that stands for it and holds paragraphs of one document, as many as fit; so its length
is what the text makes it (Python's standard library, or `--data`). Words and signs are tokens, with numbers from a
hash: the work of a step depends on lengths alone. A batch is padded to the longest possible sequence.

All implementations begin with the same weights and take the same padded batch. The losses of every token of the
shortest and the longest sequence, at first and after two steps on these, must be those of transformers' eager model in
float64. Its eager model under autocast says what rounding may do to them. There PyTorch's norms give float32 and ours
bfloat16, so ours is held to an eager model whose norms give bfloat16 as well.

With dropout this check is made without it. Then the weights are set back, and what training with dropout does to the
whole batch is compared with transformers' eager model in `flashtile.bench.training_steps`.
"""

from __future__ import annotations

import importlib.util
import re
import sys
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.common import Program, Text, load_text
from flashtile.bench.base import AnyCase, Implementation
from flashtile.bench.runner import run_case, side_stream
from flashtile.bench.training_steps import PHASE, Steps, StepsProblem, check_dropout, sample_reference
from flashtile.models import BertConfig, BertForPreTraining, to_hugging_face

IGNORED = -100
_CLASS, _MASK, _FIRST_WORD = 1, 2, 5
#: Share of the tokens that the model has to guess (Devlin et al. 2019, section 3.1).
_GUESSED = 0.15
#: More of a text is not read.
_MOST_BYTES = 8 * 2**20
_WORD = re.compile(r"\w+|[^\w\s]")
_PARAGRAPH = re.compile(r"\n\s*\n")


class Batch(NamedTuple):
    """One step's sequences.

    Attributes:
        tokens: int64 `[B, S]`, some of them masked; 0 where nothing is.
        labels: int64 `[B, S]`, the tokens to guess; `IGNORED` elsewhere.
        mask: bool `[B, S]`, True = a token.
        total: number of tokens, which who makes a batch knows.
    """

    tokens: Tensor
    labels: Tensor
    mask: Tensor
    total: int

    def shortest_and_longest(self) -> Batch:
        """These two sequences alone, cut to the length of the latter."""
        lengths = self.mask.sum(1)
        rows = torch.stack((lengths.argmin(), lengths.argmax()))
        return _batch(*(tensor[rows, : int(lengths.max())] for tensor in self[:3]))

    def parts(self, size: int) -> list[Batch]:
        """Batches of so many of the sequences, one after another."""
        if size >= len(self.tokens):
            return [self]
        return [_batch(*tensors) for tensors in zip(*(tensor.split(size) for tensor in self[:3]), strict=True)]

    def to(self, device: torch.device) -> Batch:
        return Batch(*(tensor.to(device) for tensor in self[:3]), self.total)


def sequences(text: Text, longest: int, vocabulary: int) -> list[list[int]]:
    """Tokens of every sequence of a text, each at most so long."""
    found: list[list[int]] = []
    for start, end in zip(text.documents, text.documents[1:]):
        current: list[int] = []
        document = bytes(text.tokens[start : min(end, _MOST_BYTES)].tolist()).decode(errors="replace")
        for paragraph in _PARAGRAPH.split(document):
            words = [
                _FIRST_WORD + zlib.crc32(word.encode()) % (vocabulary - _FIRST_WORD)
                for word in _WORD.findall(paragraph)
            ]
            if current and len(current) + len(words) >= longest:
                found.append([_CLASS, *current])
                current = []
            current += words
            while len(current) >= longest:  # a paragraph that is longer than a sequence
                found.append([_CLASS, *current[: longest - 1]])
                current = current[longest - 1 :]
        if current:
            found.append([_CLASS, *current])
    return found


def make_batch(text: Text, size: int, longest: int, vocabulary: int, seed: int = 0) -> Batch:
    """A batch of sequences that a seed draws from the text. Raises ValueError if the text has fewer sequences."""
    known = sequences(text, longest, vocabulary)
    if len(known) < size:
        raise ValueError(
            f"data: expected text for {size} sequences, got {len(known)}; take more text or a smaller batch"
        )
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.zeros(size, longest, dtype=torch.int64)
    mask = torch.zeros(size, longest, dtype=torch.bool)
    for row, place in enumerate(torch.randperm(len(known), generator=generator)[:size].tolist()):
        tokens[row, : len(known[place])] = torch.tensor(known[place])
        mask[row, : len(known[place])] = True
    guessed = (torch.rand(size, longest, generator=generator) < _GUESSED) & mask
    guessed[:, 0] = False
    guessed[:, 1] = mask[:, 1]  # so that every sequence has one
    labels = tokens.masked_fill(~guessed, IGNORED)
    return _batch(tokens.masked_fill(guessed, _MASK), labels, mask)


def _batch(tokens: Tensor, labels: Tensor, mask: Tensor) -> Batch:
    return Batch(tokens, labels, mask, int(mask.sum()))


#: Sequences that the eager model takes at once where it trains with dropout: it keeps S×S matrices of each head.
_EAGER_BATCH = 16
_OPTIONS: dict[str, Any] = {"lr": 1e-4, "weight_decay": 0.01, "fused": True}

#: Layers, heads, width, vocabulary.
MODELS = {"bert-large": (24, 16, 1024, 30522), "bert-base": (12, 12, 768, 30522), "bert-tiny": (2, 2, 32, 128)}


@dataclass(frozen=True)
class BertCase(AnyCase):
    """Steps of a model on B sequences, padded to S tokens. `lengths`: those of the sequences without padding."""

    model: str
    B: int
    S: int
    dtype: str
    lengths: tuple[int, ...] = ()
    dropout_p: float = 0.0

    op: ClassVar[str] = "bert-step"
    later: ClassVar[tuple[str, ...]] = ("dropout_p",)

    @property
    def name(self) -> str:
        dropout = f"-p{self.dropout_p}" if self.dropout_p else ""
        return f"{self.model}-b{self.B}-s{self.S}{dropout}-{self.dtype}"

    @property
    def config(self) -> BertConfig:
        layers, heads, width, vocabulary = MODELS[self.model]
        return BertConfig(
            self.S, layers, heads, width, vocabulary, dropout=self.dropout_p, attention_dropout=self.dropout_p
        )

    @property
    def tokens(self) -> int:
        """Tokens that are no padding."""
        return sum(self.lengths)

    def flops(self, phase: str) -> float:
        """Operations of the model on the tokens that are there: two for each weight of a product, attention's
        S² of each sequence; a backward twice that. Padding is no work of the model."""
        config = self.config
        weights = 12 * config.layers * config.width**2 + config.width**2 + config.vocabulary * config.width
        attention = 4 * config.layers * config.width * sum(length**2 for length in self.lengths)
        return 3.0 * (2 * weights * self.tokens + attention)


class Model(nn.Module):
    """One implementation of the model: logits `[B, S, V]` and the mean loss of a batch."""

    def __init__(self, inner: nn.Module, ours: bool) -> None:
        super().__init__()
        self.inner, self.ours = inner, ours

    def logits(self, batch: Batch) -> Tensor:
        if self.ours:
            return self.inner(batch.tokens, batch.mask, total=batch.total)[0]
        return self.inner(input_ids=batch.tokens, attention_mask=batch.mask.long()).prediction_logits

    def forward(self, batch: Batch) -> Tensor:
        if self.ours:
            return self.inner.loss(batch.tokens, batch.labels, mask=batch.mask, total=batch.total)
        return F.cross_entropy(_wide(self.logits(batch)).flatten(0, 1), batch.labels.flatten(), ignore_index=IGNORED)

    def token_losses(self, batch: Batch) -> Tensor:
        """Losses of all tokens, with themselves as labels where none is asked for: the rounding of a few is luck."""
        labels = torch.where(batch.labels == IGNORED, batch.tokens, batch.labels)
        return F.cross_entropy(_wide(self.logits(batch))[batch.mask], labels[batch.mask], reduction="none")


def _wide(logits: Tensor) -> Tensor:
    return logits if logits.dtype is torch.float64 else logits.float()


Build = Callable[[BertConfig, dict[str, Tensor]], Model]


def _flashtile(config: BertConfig, state: dict[str, Tensor]) -> Model:
    model = BertForPreTraining(config)
    model.load_state_dict(state)
    return Model(model, True)


def _compiled(build: Build) -> Build:
    """The same by torch.compile, for one shape, with nothing left of what was compiled before."""

    def compiled(config: BertConfig, state: dict[str, Tensor]) -> Model:
        model = build(config, state)
        torch.compiler.reset()
        model.compile(dynamic=False)
        return model

    return compiled


def _transformers(attention: str) -> Build:
    def build(config: BertConfig, state: dict[str, Tensor]) -> Model:
        from transformers import BertConfig as TheirConfig
        from transformers import BertForPreTraining as TheirModel

        if attention == "flashtile":
            from flashtile.integrations.transformers import register

            register()
        theirs = TheirConfig(
            vocab_size=config.vocabulary, hidden_size=config.width, num_hidden_layers=config.layers,
            num_attention_heads=config.heads, intermediate_size=4 * config.width, hidden_act="gelu",
            max_position_embeddings=config.context, layer_norm_eps=config.norm_eps,
            hidden_dropout_prob=config.dropout, attention_probs_dropout_prob=config.attention_dropout,
            attn_implementation=attention,
        )  # fmt: skip
        model = TheirModel(theirs)
        # Not strict: some versions have constants in their state. That every weight is in its place, the losses tell.
        model.load_state_dict(to_hugging_face(state, config, "bert"), strict=False)
        return Model(model, False)

    return build


def _narrow_eager(config: BertConfig, state: dict[str, Tensor]) -> Model:
    """The eager model whose layers pass bfloat16 on under autocast, as ours do, in the place of its norms' float32."""
    model = _transformers("eager")(config, state)
    for module in model.inner.bert.encoder.modules():
        if isinstance(module, nn.LayerNorm):
            module.register_forward_hook(lambda module, inputs, output: output.bfloat16())
    return model


_BUILDS: dict[str, Build] = {
    "flashtile": _flashtile,
    "flashtile-compile": _compiled(_flashtile),
    **{f"transformers-{name}": _transformers(name) for name in ("eager", "sdpa", "flashtile")},
    "transformers-compile": _compiled(_transformers("sdpa")),
}
IMPLEMENTATIONS = {name: Implementation(name, build=build) for name, build in _BUILDS.items()}


class Training(Steps[Batch]):
    """Steps on a padded batch. `size`: sequences whose gradients are made at once; None = all."""

    def __init__(
        self, model: Model, batch: Batch, autocast: bool, drops: bool = False, size: int | None = None
    ) -> None:
        self.model, self.ours, size = model.train(), model.ours, size or len(batch.tokens)
        super().__init__(
            list(model.parameters()), batch, _OPTIONS, autocast, drops, loss=model, train=model.train,
            token_losses=model.token_losses, parts=lambda whole: whole.parts(size),
            share=lambda part, whole: (part.labels != IGNORED).sum() / (whole.labels != IGNORED).sum(),
        )  # fmt: skip

    def results(self, phase: str) -> dict[str, Tensor]:
        """The first steps on two sequences: losses of tokens before and after, those of the steps, and samples of what
        dropout does to the whole batch."""
        found = self.first_losses(self._batch.shortest_and_longest()) | self.samples(self._batch)
        self.step()  # what has no memory for the whole batch fails here
        return found


class BertProblem(StepsProblem):
    """A case on a device. Raises ValueError if transformers, whose model is the oracle, is not installed."""

    def __init__(self, batch: Batch, case: BertCase, device: torch.device) -> None:
        if importlib.util.find_spec("transformers") is None:
            raise ValueError(
                "transformers: expected it to be installed, its model is what all are checked by; install it"
            )
        super().__init__(case, device)
        self._batch = batch.to(device)
        torch.manual_seed(0)
        with device:  # where random weights take the least time
            self._state = BertForPreTraining(case.config).state_dict()
        eager = _transformers("eager")
        self.exact, self.eager = self._trained(eager, torch.float64), self._trained(eager)
        self._narrow = self._trained(_narrow_eager) if self.autocast else self.eager
        self.dropped = self._sampled() if case.dropout_p else None

    def bind(self, implementation: Implementation) -> Training:
        model = self._built(implementation.build, self.case)
        return Training(model, self._batch, self.autocast, drops=bool(self.case.dropout_p))

    def _built(self, build: Build, case: BertCase) -> Model:
        with self.device:
            return build(case.config, self._state)

    def eager_results(self, bound: Training) -> dict[str, Tensor]:
        return self._narrow if bound.ours else self.eager

    def _trained(self, build: Build, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
        """The first losses of a model without dropout; in float32 as autocast has it."""
        model = self._built(build, replace(self.case, dropout_p=0.0)).to(dtype)
        some = self._batch.shortest_and_longest()
        return Training(model, some, self.autocast and dtype is torch.float32).results(PHASE)

    def _sampled(self) -> dict[str, Tensor]:
        """Samples of the effect of dropout in transformers' eager model."""

        def make() -> Training:
            model = self._built(_transformers("eager"), self.case)
            return Training(model, self._batch, self.autocast, drops=True, size=_EAGER_BATCH)

        return sample_reference(make, self._batch)


def make_case(
    model: str, size: int, longest: int, dtype: str, text: Text, seed: int = 0, dropout_p: float = 0.0
) -> tuple[BertCase, Batch]:
    """A case and its batch."""
    batch = make_batch(text, size, longest, MODELS[model][3], seed)
    return BertCase(model, size, longest, dtype, tuple(batch.mask.sum(1).tolist()), dropout_p), batch


def main(arguments: Sequence[str] | None = None) -> int:
    program = Program("bert", __doc__, "case")
    add = program.add_argument
    add("--model", choices=list(MODELS), default="bert-large")
    add("--impl", nargs="+", choices=list(IMPLEMENTATIONS), default=list(IMPLEMENTATIONS), help="default: all")
    add("--batch", type=int, nargs="+", default=[16, 64], help="sequences in a step; several are several cases")
    add("--context", type=int, default=512, help="tokens to which a batch is padded")
    add("--dropout", type=float, default=0.0, help="probability of each of BERT's dropouts")
    add("--seconds", type=float, default=2.0, help="for the samples of each implementation")
    add("--data", type=Path, help="file or folder of text; default: Python's standard library")
    given, device, recorder = program.start(arguments)
    dtype = "bf16" if device.type == "cuda" else "fp32"
    try:
        check_dropout(given.dropout)
        text = load_text(given.data)
        for size in given.batch:
            case, batch = make_case(given.model, size, given.context, dtype, text, dropout_p=given.dropout)
            print(
                f"{case.name}: {sum(case.lengths)} tokens, {sum(case.lengths) / size / given.context:.0%} of the batch"
            )
            with side_stream(device):
                chosen = [IMPLEMENTATIONS[name] for name in given.impl]
                found = run_case(case, chosen, device, partial(BertProblem, batch), given.seconds)
            recorder.add([{**row, "text": text.name, "text_sha256": text.sha256} for row in found])
            for row in found:
                speed = row.get("why") or f"{row['ms']:.1f} ms, {row['tokens_per_s']:.0f} tokens/s"
                print(f"  {row['impl']:20} {speed}", flush=True)
    except ValueError as error:
        return program.fail(error)
    return 0


if __name__ == "__main__":
    sys.exit(main())
