"""GPT-2 in the implementations that are measured beside one another: ours, transformers', and the plain formula."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from flashtile.bench.cases import select_named
from flashtile.bench.training.cases import TrainCase

_NORM_EPS = 1e-5


@dataclass(frozen=True)
class Model:
    """A model made from given weights.

    Attributes:
        parameters: what is trained.
        logits: tokens `[B, S]` -> `[B, S, V]`.
        loss: tokens `[B, S + 1]` -> the mean cross-entropy of each given those before it.
        train: called with False, it ends dropout, and with True it begins it again.
    """

    parameters: list[Tensor]
    logits: Callable[[Tensor], Tensor]
    loss: Callable[[Tensor], Tensor]
    train: Callable[[bool], Any]


@dataclass(frozen=True)
class Implementation:
    """One way to train.

    Attributes:
        name: as it stands in records.
        build: makes the model of a case from weights, of which it takes copies.
        package: what must be installed; None where nothing must be.
        default: measured on a GPU when no `--impl` is given.
        context: what must be entered around its calls.
    """

    name: str
    build: Callable[[TrainCase, dict[str, Tensor]], Model]
    package: str | None = None
    default: bool = True
    context: Callable[[], AbstractContextManager[Any]] = nullcontext

    def missing(self) -> str | None:
        """Why it cannot run at all, or None."""
        if self.package is None or importlib.util.find_spec(self.package) is not None:
            return None
        return f"{self.package} is not installed"


def build_plain(case: TrainCase, weights: dict[str, Tensor]) -> Model:
    """The formula in ordinary PyTorch functions."""
    model = _Plain(case, weights)
    return Model(list(model.weights.values()), model, _loss_of(model), model.train)


class _Plain(nn.Module):
    def __init__(self, case: TrainCase, weights: dict[str, Tensor]) -> None:
        super().__init__()
        self.case = case
        self.weights = {name: weight.clone().requires_grad_() for name, weight in weights.items()}

    def forward(self, tokens: Tensor) -> Tensor:
        return plain_logits(self.case, self.weights, tokens, self.case.dropout_p if self.training else 0.0)


def plain_logits(case: TrainCase, weights: dict[str, Tensor], tokens: Tensor, dropout_p: float) -> Tensor:
    """GPT-2's forward: tokens `[B, S]` -> logits `[B, S, V]`."""
    width = case.sizes.width

    def dropped(x: Tensor) -> Tensor:
        return F.dropout(x, dropout_p) if dropout_p else x

    def norm(name: str, x: Tensor) -> Tensor:
        return F.layer_norm(x, (width,), weights[f"{name}.weight"], weights[f"{name}.bias"], _NORM_EPS)

    def linear(name: str, x: Tensor) -> Tensor:
        return F.linear(x, weights[f"{name}.weight"].T, weights[f"{name}.bias"])

    embedding = weights["transformer.wte.weight"]
    stream = dropped(F.embedding(tokens, embedding) + weights["transformer.wpe.weight"][: tokens.shape[1]])  # [B, S, W]
    for layer in range(case.sizes.layers):
        block = f"transformer.h.{layer}"
        qkv = linear(f"{block}.attn.c_attn", norm(f"{block}.ln_1", stream))  # [B, S, 3 W]
        q, k, v = qkv.unflatten(-1, (3, case.sizes.heads, -1)).permute(2, 0, 3, 1, 4)  # each [B, H, S, D]
        attended = F.scaled_dot_product_attention(q, k, v, dropout_p=dropout_p, is_causal=True)  # [B, H, S, D]
        stream = stream + dropped(linear(f"{block}.attn.c_proj", attended.transpose(1, 2).flatten(2)))
        inner = F.gelu(linear(f"{block}.mlp.c_fc", norm(f"{block}.ln_2", stream)), approximate="tanh")
        stream = stream + dropped(linear(f"{block}.mlp.c_proj", inner))
    return F.linear(norm("transformer.ln_f", stream), embedding)


def token_losses(logits: Tensor, tokens: Tensor) -> Tensor:
    """Cross-entropy of each label `[B, S]`, in float32 (float64 for float64)."""
    wide = logits if logits.dtype is torch.float64 else logits.float()
    return F.cross_entropy(wide.flatten(0, 1), tokens[:, 1:].flatten(), reduction="none").view(logits.shape[:2])


def _loss_of(logits: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    return lambda tokens: token_losses(logits(tokens[:, :-1]), tokens).mean()


def _build_flashtile(fused_loss: bool, compiled: bool = False) -> Callable[[TrainCase, dict[str, Tensor]], Model]:
    def build(case: TrainCase, weights: dict[str, Tensor]) -> Model:
        from flashtile.models import GPT, GPTConfig, from_hugging_face

        sizes = case.sizes
        config = GPTConfig(
            context=case.S,
            layers=sizes.layers,
            heads=sizes.heads,
            width=sizes.width,
            vocabulary=sizes.vocabulary,
            norm_eps=_NORM_EPS,
            embedding_dropout=case.dropout_p,
            attention_dropout=case.dropout_p,
            residual_dropout=case.dropout_p,
            fused_loss=fused_loss,
        )
        model = GPT(config, device=next(iter(weights.values())).device)
        model.load_state_dict(from_hugging_face(weights, config))
        loss = _compiled(model.loss) if compiled else model.loss
        return Model(list(model.parameters()), model, loss, model.train)

    return build


def _compiled(loss: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """By torch.compile, for one shape, with nothing left of what was compiled before."""
    torch.compiler.reset()
    return torch.compile(loss, dynamic=False)


def _build_transformers(attention: str, compiled: bool = False) -> Callable[[TrainCase, dict[str, Tensor]], Model]:
    def build(case: TrainCase, weights: dict[str, Tensor]) -> Model:
        from transformers import AutoModelForCausalLM, GPT2Config

        if attention == "flashtile":
            from flashtile.integrations.transformers import register

            register()
        sizes = case.sizes
        config = GPT2Config(
            vocab_size=sizes.vocabulary,
            n_positions=case.S,
            n_embd=sizes.width,
            n_layer=sizes.layers,
            n_head=sizes.heads,
            layer_norm_epsilon=_NORM_EPS,
            activation_function="gelu_pytorch_tanh",  # GPT-2's own formula, in one kernel instead of eight
            embd_pdrop=case.dropout_p,
            attn_pdrop=case.dropout_p,
            resid_pdrop=case.dropout_p,
            use_cache=False,
            bos_token_id=None,
            eos_token_id=None,
        )
        model = AutoModelForCausalLM.from_config(config, attn_implementation=attention)
        model.to(next(iter(weights.values())).device, torch.float32)
        # Not strict: some versions have constants in their state. That every weight is in its place, the losses tell.
        model.load_state_dict({**weights, "lm_head.weight": weights["transformer.wte.weight"]}, strict=False)
        model.train()

        def logits(tokens: Tensor) -> Tensor:
            return model(input_ids=tokens).logits

        loss = _loss_of(logits)
        return Model(list(model.parameters()), logits, _compiled(loss) if compiled else loss, model.train)

    return build


IMPLEMENTATIONS = (
    Implementation("flashtile", _build_flashtile(fused_loss=False)),
    Implementation("flashtile-fused-loss", _build_flashtile(fused_loss=True)),
    Implementation("flashtile-compile", _build_flashtile(fused_loss=False, compiled=True)),
    Implementation("transformers-eager", _build_transformers("eager"), "transformers"),
    Implementation("transformers-sdpa", _build_transformers("sdpa"), "transformers"),
    Implementation("transformers-compile", _build_transformers("sdpa", compiled=True), "transformers"),
    Implementation("transformers-flashtile", _build_transformers("flashtile"), "transformers", default=False),
    Implementation("plain", build_plain, default=False),
)


def select_implementations(names: Sequence[str], device: torch.device) -> list[Implementation]:
    """The named implementations, or all defaults.

    Raises:
        ChoiceError: a name is unknown.
    """
    known = {each.name: each for each in IMPLEMENTATIONS}
    return select_named("--impl", names or [each.name for each in IMPLEMENTATIONS if each.default], known, device.type)
