"""The benchmark of whole training steps: flashtile's GPT beside that of transformers, from the same weights.

A step is forward, backward and AdamW, on float32 weights; "bf16" is `torch.autocast`. The losses of every token, before
the first step (forward) and after some steps on the same batch (gradients, optimizer), must be those of the plain
formula trained in float64, within the tolerance policy. Longer contexts are checked in the first tokens of each
sequence. With dropout this check is made without it; `training_steps.py` then judges training with dropout.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from flashtile.bench.base import AnyCase, Implementation, select_named
from flashtile.bench.training_steps import PHASE, Steps, StepsProblem, check_dropout, sample_reference
from flashtile.bench.values import help_text_tokens
from flashtile.models import GPT, GPTConfig, from_hugging_face, to_hugging_face

#: The vocabulary is rounded up to a multiple of 64, as is usual where one is trained.
MODELS = {
    "gpt2-small": GPTConfig(vocabulary=50304),
    "gpt2-medium": GPTConfig(layers=24, heads=16, width=1024, vocabulary=50304),
    "gpt2-tiny": GPTConfig(layers=2, heads=2, width=64),
}


@dataclass(frozen=True)
class TrainCase(AnyCase):
    """Training steps of a model on B sequences of S tokens.

    With `steps` the model has been trained for so many steps before, on Python's help texts byte by byte, and goes on
    with them. Else weights and tokens are random, so that scores are small. `dropout_p` is that of embeddings, of
    attention weights, and of what is added to the residual stream.
    """

    model: str
    B: int
    S: int
    dtype: str = "bf16"
    steps: int = 0
    dropout_p: float = 0.0

    op: ClassVar[str] = "train-step"
    later: ClassVar[tuple[str, ...]] = ("dropout_p",)

    @property
    def name(self) -> str:
        """Such as `gpt2-small-b16-s1024-bf16`."""
        after = f"-after{self.steps}" if self.steps else ""
        dropout = f"-p{self.dropout_p}" if self.dropout_p else ""
        return f"{self.model}-b{self.B}-s{self.S}{after}{dropout}-{self.dtype}"

    @property
    def config(self) -> GPTConfig:
        dropped: dict[str, Any] = {f"{what}_dropout": self.dropout_p for what in ("embedding", "attention", "residual")}
        return replace(MODELS[self.model], context=self.S, **dropped)

    @property
    def tokens(self) -> int:
        return self.B * self.S

    def flops(self, phase: str) -> float:
        """Two for each weight and token, and attention's half of S²; a backward twice that, no recomputation."""
        sizes = MODELS[self.model]
        weights = 12 * sizes.layers * sizes.width**2 + sizes.vocabulary * sizes.width
        attention = 2 * sizes.layers * self.S * sizes.width
        return 3.0 * self.tokens * (2 * weights + attention)


def training_cases(device: torch.device) -> list[TrainCase]:
    """Cases of a device."""
    if device.type == "cuda":
        return [TrainCase("gpt2-small", 16, 1024), TrainCase("gpt2-medium", 8, 1024)]
    return [TrainCase("gpt2-tiny", 2, 64, "fp32")]


def chosen_cases(given: Mapping[str, Any], device: torch.device) -> list[TrainCase]:
    """The cases that options choose; without a batch a step has as many tokens as the model's case. UserError for an
    unknown model or a dropout that is no probability below 1."""
    check_dropout(dropout_p := given.get("dropout", 0.0))
    known = {case.model: case for case in training_cases(device)}
    chosen = select_named("--model", given.get("model") or list(known), known, device.type)
    batch, wanted = given.get("batch"), {"steps": given.get("after", 0), "dropout_p": dropout_p}
    cases = [
        replace(case, S=seq, B=batch or max(1, case.tokens // seq), **wanted)
        for context in given.get("context") or [None]
        for case in chosen
        for seq in [context or case.S]
    ]
    return cases[: 1 if given.get("quick") else None]


def make_weights(case: TrainCase, device: torch.device) -> dict[str, Tensor]:
    """Random weights as transformers names and lays them out: matrices are `[in, out]`; the head is tied."""
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        torch.manual_seed(0)
        state = GPT(case.config, device=device).state_dict()
    weights = to_hugging_face(state, case.config, "gpt2")
    return {name: weight for name, weight in weights.items() if name != "lm_head.weight"}


def make_tokens(case: TrainCase, device: torch.device, seed: int = 0) -> Tensor:
    """Tokens `[B, S + 1]`, inputs and labels one further: random ones, or text where there is a training before."""
    if case.steps:
        return help_text_tokens(case.B, case.S, torch.Generator().manual_seed(seed)).to(device)
    generator = torch.Generator(device).manual_seed(seed)
    return torch.randint(case.config.vocabulary, (case.B, case.S + 1), generator=generator, device=device)


@dataclass(frozen=True)
class Model:
    """A model made from given weights."""

    parameters: list[Tensor]  # what is trained
    logits: Callable[[Tensor], Tensor]  # tokens `[B, S]` -> `[B, S, V]`
    loss: Callable[[Tensor], Tensor]  # tokens `[B, S + 1]` -> the mean cross-entropy of each given those before it
    train: Callable[[bool], Any]  # called with False, it ends dropout, and with True it begins it again


def build_plain(case: TrainCase, weights: dict[str, Tensor]) -> Model:
    """The formula in ordinary PyTorch functions."""
    own = {name: weight.clone().requires_grad_() for name, weight in weights.items()}
    dropout = nn.Dropout(case.dropout_p)

    def logits(tokens: Tensor) -> Tensor:
        return plain_logits(case, own, tokens, dropout.p if dropout.training else 0.0)

    return Model(list(own.values()), logits, _training_loss(logits), dropout.train)


def plain_logits(case: TrainCase, weights: dict[str, Tensor], tokens: Tensor, dropout_p: float) -> Tensor:
    """GPT-2's forward: tokens `[B, S]` -> logits `[B, S, V]`."""
    width = case.config.width

    def dropped(x: Tensor) -> Tensor:
        return F.dropout(x, dropout_p) if dropout_p else x

    def norm(name: str, x: Tensor) -> Tensor:
        return F.layer_norm(x, (width,), weights[f"{name}.weight"], weights[f"{name}.bias"], case.config.norm_eps)

    def linear(name: str, x: Tensor) -> Tensor:
        return F.linear(x, weights[f"{name}.weight"].T, weights[f"{name}.bias"])

    embedding = weights["transformer.wte.weight"]
    stream = dropped(F.embedding(tokens, embedding) + weights["transformer.wpe.weight"][: tokens.shape[1]])  # [B, S, W]
    for layer in range(case.config.layers):
        block = f"transformer.h.{layer}"
        qkv = linear(f"{block}.attn.c_attn", norm(f"{block}.ln_1", stream))  # [B, S, 3 W]
        q, k, v = qkv.unflatten(-1, (3, case.config.heads, -1)).permute(2, 0, 3, 1, 4)  # each [B, H, S, D]
        attended = F.scaled_dot_product_attention(q, k, v, dropout_p=dropout_p, is_causal=True)  # [B, H, S, D]
        stream = stream + dropped(linear(f"{block}.attn.c_proj", attended.transpose(1, 2).flatten(2)))
        inner = F.gelu(linear(f"{block}.mlp.c_fc", norm(f"{block}.ln_2", stream)), approximate="tanh")
        stream = stream + dropped(linear(f"{block}.mlp.c_proj", inner))
    return F.linear(norm("transformer.ln_f", stream), embedding)


def token_losses(logits: Tensor, tokens: Tensor) -> Tensor:
    """Cross-entropy of each label `[B, S]`, in float32 (float64 for float64)."""
    wide = logits if logits.dtype is torch.float64 else logits.float()
    return F.cross_entropy(wide.flatten(0, 1), tokens[:, 1:].flatten(), reduction="none").view(logits.shape[:2])


def _training_loss(logits: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    return lambda tokens: token_losses(logits(tokens[:, :-1]), tokens).mean()


def _build_flashtile(
    case: TrainCase, weights: dict[str, Tensor], fused_loss: bool = False, compiled: bool = False
) -> Model:
    config = replace(case.config, fused_loss=fused_loss)
    model = GPT(config, device=next(iter(weights.values())).device)
    model.load_state_dict(from_hugging_face(weights, config))
    loss = _compiled(model.loss) if compiled else model.loss
    return Model(list(model.parameters()), model, loss, model.train)


def _compiled(loss: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """By torch.compile, for one shape, with nothing left of what was compiled before."""
    torch.compiler.reset()
    return torch.compile(loss, dynamic=False)


def _build_transformers(
    case: TrainCase, weights: dict[str, Tensor], attention: str = "sdpa", compiled: bool = False
) -> Model:
    from transformers import AutoModelForCausalLM, GPT2Config

    if attention == "flashtile":
        from flashtile.integrations.transformers import register

        register()
    sizes = case.config
    dropped: dict[str, Any] = {f"{what}_pdrop": case.dropout_p for what in ("embd", "attn", "resid")}
    config = GPT2Config(
        vocab_size=sizes.vocabulary, n_positions=case.S, n_embd=sizes.width, n_layer=sizes.layers,
        n_head=sizes.heads, layer_norm_epsilon=sizes.norm_eps, use_cache=False, bos_token_id=None,
        eos_token_id=None, activation_function="gelu_pytorch_tanh",  # GPT-2's own formula, one kernel, not eight
        **dropped,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config, attn_implementation=attention)
    model.to(next(iter(weights.values())).device, torch.float32)
    # Not strict: some versions have constants in their state. That every weight is in its place, the losses tell.
    model.load_state_dict({**weights, "lm_head.weight": weights["transformer.wte.weight"]}, strict=False)
    model.train()

    def logits(tokens: Tensor) -> Tensor:
        return model(input_ids=tokens).logits

    loss = _training_loss(logits)
    return Model(list(model.parameters()), logits, _compiled(loss) if compiled else loss, model.train)


def _transformers(name: str, default: bool = True, **how: Any) -> Implementation:
    build, package = partial(_build_transformers, **how), ("transformers", "transformers")
    return Implementation(f"transformers-{name}", build=build, package=package, default=default)


IMPLEMENTATIONS = (
    Implementation("flashtile", build=_build_flashtile),
    Implementation("flashtile-fused-loss", build=partial(_build_flashtile, fused_loss=True)),
    Implementation("flashtile-compile", build=partial(_build_flashtile, compiled=True)),
    _transformers("eager", attention="eager"),
    _transformers("sdpa"),
    _transformers("compile", compiled=True),
    _transformers("flashtile", attention="flashtile", default=False),
    Implementation("plain", build=build_plain, default=False),
)


#: Tokens of each sequence that are checked.
_CHECKED_TOKENS = 1024
#: Sequences that the oracle takes at once; it has the S×S matrices of attention in float64.
_ORACLE_BATCH = 2
_OPTIONS: dict[str, Any] = {"lr": 1e-4, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1, "fused": True}


class Training(Steps[Tensor]):
    """Steps on tokens `[B, S + 1]`. `batch`: sequences whose gradients are made at once; None = all."""

    def __init__(
        self, model: Model, tokens: Tensor, autocast: bool, batch: int | None = None, drops: bool = False
    ) -> None:
        super().__init__(
            model.parameters, tokens, _OPTIONS, autocast, drops, loss=model.loss, train=model.train,
            token_losses=lambda part: token_losses(model.logits(part[:, :-1]), part),
            parts=lambda whole: whole.split(batch or len(tokens)), share=lambda part, whole: len(part) / len(whole),
        )  # fmt: skip

    def results(self, phase: str) -> dict[str, Tensor]:
        """Takes the first steps: losses of tokens before and after, those of steps, and samples of dropout."""
        checked = checked_tokens(self._batch)
        found = self.first_losses(checked) | self.samples(checked)
        if checked.shape != self._batch.shape:
            self.step()  # what a whole sequence has no memory for fails here, where a reason is made of it
        return found


class TrainProblem(StepsProblem):
    """A case on a device."""

    def __init__(self, case: TrainCase, device: torch.device) -> None:
        super().__init__(case, device)
        self._tokens = make_tokens(case, device)
        self._weights = trained_weights(case, device) if case.steps else make_weights(case, device)
        self.exact, self.eager = self._trained(torch.float64), self._trained(torch.float32)
        self.dropped = self._sampled() if case.dropout_p else None

    def bind(self, implementation: Implementation) -> Training:
        model = implementation.build(self.case, self._weights)
        found, expected = (sum(t.numel() for t in group) for group in (model.parameters, self._weights.values()))
        if found != expected:
            raise ValueError(f"{implementation.name} has {found} parameters, expected {expected}")
        return Training(model, self._tokens, self.autocast, drops=bool(self.case.dropout_p))

    def _trained(self, dtype: torch.dtype) -> dict[str, Tensor]:
        """The first losses of the plain formula without dropout; in float32 as autocast has it."""
        weights = {name: weight.to(dtype) for name, weight in self._weights.items()}
        model = build_plain(replace(self.case, dropout_p=0.0), weights)
        autocast = self.autocast and dtype is torch.float32
        checked = checked_tokens(self._tokens)  # alone: of a whole sequence it would hold all scores
        return Training(model, checked, autocast, _ORACLE_BATCH).results(PHASE)

    def _sampled(self) -> dict[str, Tensor]:
        """Samples of the effect of dropout in the plain formula."""
        checked = checked_tokens(self._tokens)

        def make() -> Training:
            model = build_plain(self.case, self._weights)
            return Training(model, checked, self.autocast, _ORACLE_BATCH, drops=True)

        return sample_reference(make, checked)


def checked_tokens(tokens: Tensor) -> Tensor:
    """The inputs and labels of each sequence that are checked."""
    return tokens[:, : _CHECKED_TOKENS + 1]


def trained_weights(case: TrainCase, device: torch.device) -> dict[str, Tensor]:
    """The weights after a case's earlier steps, by the plain formula without dropout, a new batch in each."""
    weights = make_weights(case, device)
    model = build_plain(replace(case, dropout_p=0.0), weights)
    training = Training(model, make_tokens(case, device), case.dtype == "bf16")
    for step in range(case.steps):
        training.step(make_tokens(case, device, seed=1 + step))
    return {name: parameter.detach() for name, parameter in zip(weights, model.parameters, strict=True)}
