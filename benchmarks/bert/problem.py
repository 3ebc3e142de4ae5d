"""BERT's masked-LM step as the runner of `flashtile.bench` asks for it: ours on packed sequences beside transformers'.

All implementations begin with the same weights and take the same padded batch. The losses of every token of the
shortest and the longest sequence, at first and after two steps on these, must be those of transformers' eager model in
float64. Its eager model under autocast says what rounding may do to them. There PyTorch's norms give float32 and ours
bfloat16, so ours is held to an eager model whose norms give bfloat16 as well.

With dropout this check is made without it. Then the weights are set back, and what training with dropout does to the
whole batch is compared with transformers' eager model in `flashtile.bench.training_steps`.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.bert.batches import IGNORED, Batch, make_batch
from benchmarks.evidence.text import Text
from flashtile.bench.base import AnyCase, Implementation
from flashtile.bench.training_steps import PHASE, Steps, StepsProblem, sample_reference
from flashtile.models import BertConfig, BertForPreTraining, to_hugging_face

#: Sequences that the eager model takes at once where it trains with dropout: it keeps S×S matrices of each head.
_EAGER_BATCH = 16
_OPTIONS: dict[str, Any] = {"lr": 1e-4, "weight_decay": 0.01, "fused": True}

#: Layers, heads, width, vocabulary.
MODELS = {"bert-large": (24, 16, 1024, 30522), "bert-base": (12, 12, 768, 30522), "bert-tiny": (2, 2, 32, 128)}


@dataclass(frozen=True)
class BertCase(AnyCase):
    """Steps of a model on B sequences, padded to S tokens."""

    model: str
    B: int
    S: int
    dtype: str
    lengths: tuple[int, ...] = ()
    dropout_p: float = 0.0

    op: ClassVar[str] = "bert-step"

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

    def record(self) -> dict[str, Any]:
        """The `case` object of a record; `lengths` are those of the sequences without padding. Without dropout it has
        no such key, as in records that are older than dropout."""
        names = ("model", "B", "S", "dtype", *(["dropout_p"] if self.dropout_p else []))
        return {**{name: getattr(self, name) for name in names}, "lengths": list(self.lengths)}

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
        logits = self.logits(batch)
        wide = logits if logits.dtype is torch.float64 else logits.float()
        return F.cross_entropy(wide.flatten(0, 1), batch.labels.flatten(), ignore_index=IGNORED)

    def token_losses(self, batch: Batch) -> Tensor:
        """Losses of all tokens, with themselves as labels where none is asked for: the rounding of a few is luck."""
        logits = self.logits(batch)
        labels = torch.where(batch.labels == IGNORED, batch.tokens, batch.labels)
        wide = logits if logits.dtype is torch.float64 else logits.float()
        return F.cross_entropy(wide[batch.mask], labels[batch.mask], reduction="none")


def _flashtile(config: BertConfig, state: dict[str, Tensor]) -> Model:
    model = BertForPreTraining(config)
    model.load_state_dict(state)
    return Model(model, True)


def _compiled(build: Callable[[BertConfig, dict[str, Tensor]], Model]) -> Callable[..., Model]:
    """The same by torch.compile, for one shape, with nothing left of what was compiled before."""

    def compiled(config: BertConfig, state: dict[str, Tensor]) -> Model:
        model = build(config, state)
        torch.compiler.reset()
        model.compile(dynamic=False)
        return model

    return compiled


def _transformers(attention: str) -> Callable[[BertConfig, dict[str, Tensor]], Model]:
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


_TRANSFORMERS = ("transformers", "transformers")
IMPLEMENTATIONS = {
    each.name: each
    for each in (
        Implementation("flashtile", build=_flashtile),
        Implementation("flashtile-compile", build=_compiled(_flashtile)),
        Implementation("transformers-eager", build=_transformers("eager"), package=_TRANSFORMERS),
        Implementation("transformers-sdpa", build=_transformers("sdpa"), package=_TRANSFORMERS),
        Implementation("transformers-flashtile", build=_transformers("flashtile"), package=_TRANSFORMERS),
        Implementation("transformers-compile", build=_compiled(_transformers("sdpa")), package=_TRANSFORMERS),
    )
}


class Training(Steps[Batch]):
    """Steps on a padded batch.

    Args:
        model: what is trained.
        batch: of all steps that name no other.
        autocast: products are bfloat16.
        drops: the model has dropout.
        size: sequences whose gradients are made at once; None = all.
    """

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
    """A case on a device.

    Raises:
        ValueError: transformers, whose model is the oracle, is not installed.
    """

    def __init__(self, case: BertCase, batch: Batch, device: torch.device) -> None:
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

    def _built(self, build: Callable[[BertConfig, dict[str, Tensor]], Model], case: BertCase) -> Model:
        with self.device:
            return build(case.config, self._state)

    def eager_results(self, bound: Training) -> dict[str, Tensor]:
        return self._narrow if bound.ours else self.eager

    def _trained(
        self, build: Callable[[BertConfig, dict[str, Tensor]], Model], dtype: torch.dtype = torch.float32
    ) -> dict[str, Tensor]:
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


def select(names: Sequence[str]) -> list[Implementation]:
    """The named implementations, or all."""
    return [IMPLEMENTATIONS[name] for name in names or IMPLEMENTATIONS]
