"""A GPT for bytes: a decoder-only, pre-norm Transformer in which the attention can be exchanged.

Shape letters: B batch, S sequence, W width, H heads, D head_dim (W = H · D), V vocabulary.

Reference:
    Radford et al., "Language Models are Unsupervised Multitask Learners" (2019).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import flashtile

#: Causal self-attention: (q, k, v) -> out, each `[B, S, H, D]`.
CausalAttention = Callable[[Tensor, Tensor, Tensor], Tensor]

_INITIAL_STD = 0.02


def flashtile_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal attention in tiles: memory linear in the sequence length."""
    return flashtile.attention(q, k, v, causal=True)


def plain_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal attention as it is written on paper: every step is an S×S matrix in memory."""
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))  # [B, H, S, D]
    future = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool, device=q.device).triu(1)
    scores = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])  # [B, H, S, S]
    weights = scores.masked_fill(future, float("-inf")).softmax(dim=-1)
    return (weights.to(v.dtype) @ v).transpose(1, 2)


@dataclass(frozen=True)
class GPTConfig:
    """Sizes of a GPT.

    Attributes:
        context: longest sequence.
        layers: number of blocks.
        heads: attention heads of each block.
        width: size of the residual stream, a multiple of `heads`.
        vocabulary: number of tokens; 256 for bytes.
    """

    context: int = 1024
    layers: int = 12
    heads: int = 12
    width: int = 768
    vocabulary: int = 256

    def __post_init__(self) -> None:
        if self.width % self.heads:
            raise ValueError(f"width: expected a multiple of heads, {self.heads}, got {self.width}")


class GPT(nn.Module):
    """Tokens to logits of the next token.

    Args:
        config: sizes.
        attention: how each block attends; `flashtile_attention` or a function of the same signature.
    """

    def __init__(self, config: GPTConfig, attention: CausalAttention = flashtile_attention) -> None:
        super().__init__()
        self.config = config
        self.token = nn.Embedding(config.vocabulary, config.width)
        self.position = nn.Embedding(config.context, config.width)
        self.blocks = nn.ModuleList(Block(config, attention) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.width)
        self.apply(_initialise)
        # Each block adds two terms to the residual stream: scaled so that its variance does not grow with depth.
        for name, parameter in self.named_parameters():
            if name.endswith(("attention.out.weight", "mlp.2.weight")):
                nn.init.normal_(parameter, std=_INITIAL_STD / math.sqrt(2 * config.layers))

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits of the next token.

        Args:
            tokens: int64 `[B, S]`, S at most the context.

        Returns:
            `[B, S, V]`.
        """
        length = tokens.shape[1]
        if length > self.config.context:
            raise ValueError(f"tokens: expected at most {self.config.context} in a row (the context), got {length}")
        stream = self.token(tokens) + self.position.weight[:length]  # [B, S, W]
        for block in self.blocks:
            stream = block(stream)
        return F.linear(self.norm(stream), self.token.weight)  # input and output share their embedding

    def loss(self, tokens: Tensor) -> Tensor:
        """Mean cross-entropy, in nats, of each token of `[B, S + 1]` given those before it."""
        logits = self(tokens[:, :-1])
        return F.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())


class Block(nn.Module):
    """Attention, then a two-layer perceptron, each added to the residual stream."""

    def __init__(self, config: GPTConfig, attention: CausalAttention) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(config.width)
        self.attention = SelfAttention(config, attention)
        self.mlp_norm = nn.LayerNorm(config.width)
        self.mlp = nn.Sequential(
            nn.Linear(config.width, 4 * config.width),
            nn.GELU(approximate="tanh"),
            nn.Linear(4 * config.width, config.width),
        )

    def forward(self, stream: Tensor) -> Tensor:
        stream = stream + self.attention(self.attention_norm(stream))
        return stream + self.mlp(self.mlp_norm(stream))


class SelfAttention(nn.Module):
    """Projections around an attention function."""

    def __init__(self, config: GPTConfig, attention: CausalAttention) -> None:
        super().__init__()
        self.heads = config.heads
        self.attend = attention
        self.qkv = nn.Linear(config.width, 3 * config.width)
        self.out = nn.Linear(config.width, config.width)

    def forward(self, stream: Tensor) -> Tensor:
        q, k, v = self.qkv(stream).unflatten(-1, (3, self.heads, -1)).unbind(2)  # each [B, S, H, D], a view
        return self.out(self.attend(q, k, v).flatten(2))


def _initialise(module: nn.Module) -> None:
    if isinstance(module, (nn.Linear, nn.Embedding)):
        nn.init.normal_(module.weight, std=_INITIAL_STD)
    if isinstance(module, nn.Linear):
        nn.init.zeros_(module.bias)
