"""BERT: an encoder of post-norm blocks, a pooler, and the two heads of its pre-training.

Shape letters: B batch, S sequence, T tokens that a mask keeps, W width, V vocabulary.

Reference:
    Devlin, Chang, Lee, Toutanova, "BERT" (2019).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import flashtile
from flashtile.models.config import BertConfig, check_tokens, draw_weights, make_mlp
from flashtile.modules import MHA, Block, LayerNorm, Unpadded, pad_input, unpad_input
from flashtile.modules.mlp import ACTIVATIONS
from flashtile.ops.common.sizes import differ

#: Label of a token that the masked-LM loss leaves out.
IGNORED = -100


class Bert(nn.Module):
    """An encoder: computes hidden states, and the pooled state of each sequence's first token.

    With a mask the padding is removed once, at the start, and all layers work on packed sequences.

    Args:
        config: sizes and choices.
        device: device of the parameters.
        dtype: dtype of the parameters.
    """

    def __init__(
        self, config: BertConfig, device: torch.device | str | None = None, dtype: torch.dtype | None = None
    ) -> None:
        super().__init__()
        self.config = config
        where: dict[str, Any] = {"device": device, "dtype": dtype}
        norm: Callable[[int], nn.Module] = partial(LayerNorm, eps=config.norm_eps, **where)
        self.token = nn.Embedding(config.vocabulary, config.width, **where)
        self.position = nn.Embedding(config.context, config.width, **where)
        self.segment = nn.Embedding(config.segments, config.width, **where)
        self.norm = norm(config.width)
        mixer = partial(MHA, num_heads=config.heads, dropout=config.attention_dropout, **where)
        mlp = make_mlp(config, True, **where)
        dropout: dict[str, Any] = {"resid_dropout1": config.dropout, "resid_dropout2": config.dropout}
        self.blocks = nn.ModuleList(
            Block(config.width, mixer, mlp, norm, prenorm=False, **dropout) for _ in range(config.layers)
        )
        self.pooler = nn.Linear(config.width, config.width, **where)
        self.initialise()

    def initialise(self) -> None:
        """Draws the weights from torch's generator."""
        draw_weights(self.modules(), self.config)

    def forward(
        self, tokens: Tensor, mask: Tensor | None = None, segments: Tensor | None = None, total: int | None = None
    ) -> tuple[Tensor, Tensor]:
        """Hidden states and pooled state.

        Args:
            tokens: int64 `[B, S]`, S at most the context.
            mask: bool `[B, S]`, True = keep. The first token of each sequence must be kept: the pooled state is its.
                Without `total` a mask waits for the GPU. On a GPU with `total` the first tokens are not looked at.
            segments: int64 `[B, S]`, 0 = first sentence; default all 0.
            total: number of tokens that the mask keeps, if the host knows it, as for `unpad_input`.

        Returns:
            `[B, S, W]`, 0 where the mask is False, and `[B, W]`.
        """
        hidden, kept = self.hidden(tokens, mask, segments, total)
        if kept is not None:
            hidden = pad_input(hidden, kept.indices, *tokens.shape)
        return hidden, self.pool(hidden[:, 0])

    def hidden(
        self, tokens: Tensor, mask: Tensor | None, segments: Tensor | None, total: int | None = None
    ) -> tuple[Tensor, Unpadded | None]:
        """Hidden states `[B, S, W]`; with a mask those of the kept tokens, `[T, W]`, and the places of these."""
        check_tokens(tokens)
        length = tokens.shape[1]
        if length > self.config.context:
            raise ValueError(f"tokens: expected at most {self.config.context} in a row (the context), got {length}")
        if segments is not None and differ(segments.shape, tokens.shape):
            raise ValueError(
                f"segments: expected the shape of tokens, {tuple(tokens.shape)}, got {tuple(segments.shape)}"
            )
        if mask is None and total is not None:
            raise ValueError(f"total: expected None without a mask, got {total}; it counts what a mask keeps")
        positions = torch.arange(length, device=tokens.device)
        packing, kept = {}, None
        if mask is not None:
            kept = unpad_input(tokens, mask, total=total)
            _check_first_tokens(mask, waits=total is None)
            tokens, positions = kept.x, kept.indices % length
            segments = None if segments is None else segments.flatten()[kept.indices]
            packing = {"cu_seqlens": kept.cu_seqlens, "max_seqlen": kept.max_seqlen}
        kinds = self.segment(torch.zeros_like(tokens) if segments is None else segments)
        hidden = self.norm(self.token(tokens) + self.position(positions) + kinds)
        hidden = F.dropout(hidden, self.config.dropout, self.training)
        for block in self.blocks:
            hidden = block(hidden, mixer_kwargs=packing)
        return hidden, kept

    def pool(self, first: Tensor) -> Tensor:
        """The state of a sequence, computed from the hidden state of its first token."""
        return self.pooler(first).tanh()


class BertForPreTraining(nn.Module):
    """BERT with its heads: which token was masked, and whether the second sentence follows the first.

    Args:
        config: sizes and choices.
        device: device of the parameters.
        dtype: dtype of the parameters.
    """

    def __init__(
        self, config: BertConfig, device: torch.device | str | None = None, dtype: torch.dtype | None = None
    ) -> None:
        super().__init__()
        self.config = config
        where: dict[str, Any] = {"device": device, "dtype": dtype}
        self.bert = Bert(config, **where)
        self.transform = nn.Linear(config.width, config.width, **where)
        self.norm = LayerNorm(config.width, eps=config.norm_eps, **where)
        self.bias = nn.Parameter(torch.zeros(config.vocabulary, **where))
        self.next_sentence = nn.Linear(config.width, 2, **where)
        self._initialise_heads()

    def initialise(self) -> None:
        """Draws the weights from torch's generator."""
        self.bert.initialise()
        self._initialise_heads()

    def _initialise_heads(self) -> None:
        draw_weights((self.transform, self.norm, self.next_sentence), self.config)
        nn.init.zeros_(self.bias)

    def forward(
        self, tokens: Tensor, mask: Tensor | None = None, segments: Tensor | None = None, total: int | None = None
    ) -> tuple[Tensor, Tensor]:
        """Logits of masked tokens, `[B, S, V]`, and of the next sentence, `[B, 2]`. Arguments as for `Bert.forward`."""
        hidden, pooled = self.bert(tokens, mask, segments, total)
        return self.token_logits(hidden), self.next_sentence(pooled)

    def token_logits(self, hidden: Tensor) -> Tensor:
        """Logits `[..., V]` of hidden states `[..., W]`. The output embedding is the input embedding."""
        hidden = ACTIVATIONS[self.config.activation](self.transform(hidden))
        return flashtile.fused_dense(self.norm(hidden), self.bert.token.weight, self.bias)

    def loss(
        self, tokens: Tensor, labels: Tensor, next_sentence: Tensor | None = None, mask: Tensor | None = None,
        segments: Tensor | None = None, total: int | None = None,
    ) -> Tensor:  # fmt: skip
        """Mean cross-entropy of the labelled tokens, plus that of the next sentence if it is given.

        Args:
            tokens: int64 `[B, S]`.
            labels: int64 `[B, S]`, `IGNORED` (-100) for tokens that do not count.
            next_sentence: int64 `[B]`, 0 = the second sentence follows the first.
            mask: as for `Bert.forward`; labels of tokens that are not kept have no effect.
            segments: as for `Bert.forward`.
            total: as for `Bert.forward`.
        """
        if differ(labels.shape, tokens.shape):
            raise ValueError(f"labels: expected the shape of tokens, {tuple(tokens.shape)}, got {tuple(labels.shape)}")
        hidden, kept = self.bert.hidden(tokens, mask, segments, total)
        labels = labels if kept is None else labels.flatten()[kept.indices]
        loss = _mean_loss(self.token_logits(hidden), labels)
        if next_sentence is None:
            return loss
        whole = hidden if kept is None else pad_input(hidden, kept.indices, *tokens.shape)
        return loss + _mean_loss(self.next_sentence(self.bert.pool(whole[:, 0])), next_sentence)


def _check_first_tokens(mask: Tensor, waits: bool) -> None:
    """Refuses a mask that hides the first token of a sequence. `waits`: for the GPU, which is else not asked."""
    readable = mask.device.type == "cpu" or (waits and mask.device.type != "meta")
    if readable and not torch.compiler.is_compiling() and not mask[:, :1].all():
        sequence = int((mask[:, 0] == 0).nonzero()[0])
        raise ValueError(
            f"mask: expected the first token of each sequence to be kept, got False at [{sequence}, 0]; pad at the end"
        )


def _mean_loss(logits: Tensor, labels: Tensor) -> Tensor:
    return flashtile.cross_entropy(logits, labels, ignore_index=IGNORED)
