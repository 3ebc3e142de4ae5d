"""Sizes and choices of the models, checked when they are made."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

from torch import Tensor, nn

from flashtile.modules import FusedMlp, LayerNorm, RMSNorm
from flashtile.modules.layers import check_sizes

#: The activations between the two layers of an MLP; "swiglu" is a gate, `values · silu(gates)`.
Activation = Literal["gelu", "gelu_tanh", "relu", "swiglu"]
ACTIVATIONS: tuple[Activation, ...] = ("gelu", "gelu_tanh", "relu", "swiglu")


@dataclass(frozen=True)
class GPTConfig:
    """Configuration of a decoder. The defaults are GPT-2; other values make GPT-NeoX or Llama.

    Attributes:
        context: length of the longest sequence.
        layers: number of blocks.
        heads: attention heads of each block.
        width: width of the residual stream, a multiple of `heads`.
        vocabulary: number of tokens; 256 for bytes.
        heads_kv: heads of keys and values, a divisor of `heads`; None = `heads`.
        hidden: width inside the MLP; None = `4 · width`.
        positions: a learned embedding, or rotary in each block.
        rotary_dim: elements of a head that are rotated; None = all.
        rotary_base: base of the rotary frequencies.
        norm: layer norm or RMS norm.
        norm_eps: added to the variance.
        activation: activation of the MLP.
        attention_bias: the projections of attention have biases.
        mlp_bias: the layers of the MLP have biases.
        parallel: attention and MLP in parallel.
        tied: input and output share their embedding.
        window: number of keys that a token sees to its left; None = all.
        embedding_dropout: dropout on the embeddings, in training.
        attention_dropout: dropout on attention weights, in training.
        residual_dropout: dropout on what is added to the residual stream, in training.
        residual_in_fp32: the residual stream is float32.
        fused_loss: `GPT.loss` never has all logits in memory (`flashtile.linear_cross_entropy`).
        initial_std: standard deviation of the initial weights.
    """

    context: int = 1024
    layers: int = 12
    heads: int = 12
    width: int = 768
    vocabulary: int = 256
    heads_kv: int | None = None
    hidden: int | None = None
    positions: Literal["learned", "rotary"] = "learned"
    rotary_dim: int | None = None
    rotary_base: float = 10000.0
    norm: Literal["layer", "rms"] = "layer"
    norm_eps: float = 1e-5
    activation: Activation = "gelu_tanh"
    attention_bias: bool = True
    mlp_bias: bool = True
    parallel: bool = False
    tied: bool = True
    window: int | None = None
    embedding_dropout: float = 0.0
    attention_dropout: float = 0.0
    residual_dropout: float = 0.0
    residual_in_fp32: bool = False
    fused_loss: bool = False
    initial_std: float = 0.02

    def __post_init__(self) -> None:
        check_sizes(
            context=self.context, layers=self.layers, heads=self.heads, width=self.width, vocabulary=self.vocabulary,
            **_given(self, "heads_kv", "hidden", "rotary_dim"),
        )  # fmt: skip
        check_heads(self.width, self.heads)
        check_choice("positions", self.positions, ("learned", "rotary"))
        check_choice("norm", self.norm, ("layer", "rms"))
        check_choice("activation", self.activation, ACTIVATIONS)
        if self.positions == "learned" and self.rotary_dim is not None:
            raise ValueError(
                f"rotary_dim: expected None with positions='learned', got {self.rotary_dim}; positions='rotary' rotates"
            )

    @property
    def head_dim(self) -> int:
        return self.width // self.heads


@dataclass(frozen=True)
class BertConfig:
    """Configuration of an encoder. The defaults are BERT base.

    Attributes:
        context: length of the longest sequence.
        layers: number of blocks.
        heads: attention heads of each block.
        width: width of the hidden states, a multiple of `heads`.
        vocabulary: number of tokens.
        hidden: width inside the MLP; None = `4 · width`.
        segments: number of kinds of tokens (first sentence, second sentence).
        activation: activation of the MLP and of the masked-LM head; not a gated one.
        norm_eps: added to the variance.
        dropout: dropout on embeddings and on what is added to the hidden states, in training.
        attention_dropout: dropout on attention weights, in training.
        initial_std: standard deviation of the initial weights.
    """

    context: int = 512
    layers: int = 12
    heads: int = 12
    width: int = 768
    vocabulary: int = 30522
    hidden: int | None = None
    segments: int = 2
    activation: Activation = "gelu"
    norm_eps: float = 1e-12
    dropout: float = 0.1
    attention_dropout: float = 0.1
    initial_std: float = 0.02

    def __post_init__(self) -> None:
        check_sizes(
            context=self.context, layers=self.layers, heads=self.heads, width=self.width, vocabulary=self.vocabulary,
            segments=self.segments, **_given(self, "hidden"),
        )  # fmt: skip
        check_heads(self.width, self.heads)
        check_choice("activation", self.activation, ACTIVATIONS[:3])


def _given(config: GPTConfig | BertConfig, *names: str) -> dict[str, int]:
    """The sizes that were not left out."""
    return {name: size for name in names if (size := getattr(config, name)) is not None}


def check_heads(width: int, heads: int) -> None:
    if heads < 1 or width % heads:
        raise ValueError(f"width: expected a multiple of heads, {heads}, got {width}")


def check_choice(name: str, value: str, choices: tuple[str, ...]) -> None:
    if not isinstance(value, str) or value not in choices:
        raise ValueError(f"{name}: expected one of {', '.join(map(repr, choices))}, got {value!r}")


def check_tokens(tokens: Tensor) -> None:
    if tokens.dim() != 2:
        raise ValueError(f"tokens: expected [batch, seq], got shape {tuple(tokens.shape)}; add a batch of 1")


def make_mlp(config: GPTConfig | BertConfig, bias: bool, **where: Any) -> Callable[[int], nn.Module]:
    """The maker of a block's MLP; `where` is device and dtype."""
    gated = config.activation == "swiglu"
    hidden = 4 * config.width if config.hidden is None else config.hidden
    activation = "silu" if gated else config.activation
    return partial(
        FusedMlp, hidden_features=hidden, bias1=bias, bias2=bias, activation=activation, gated=gated, **where
    )


def draw_weights(modules: Iterable[nn.Module], config: GPTConfig | BertConfig) -> None:
    """Initial weights, from torch's generator; biases are 0, and norms leave their input as it is."""
    for module in modules:
        if isinstance(module, (nn.Linear, nn.Embedding)):
            nn.init.normal_(module.weight, std=config.initial_std)
        elif isinstance(module, (LayerNorm, RMSNorm)):
            module.reset_parameters()
        if isinstance(module, nn.Linear) and module.bias is not None:
            nn.init.zeros_(module.bias)
