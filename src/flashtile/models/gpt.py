"""A decoder-only, pre-norm Transformer: GPT-2, GPT-NeoX and Llama by configuration, with replaceable attention.

Shape letters: B batch, S sequence, W width, H heads, D head_dim (W = H · D), V vocabulary.

Reference:
    Radford et al., "Language Models are Unsupervised Multitask Learners" (2019); Black et al., "GPT-NeoX-20B" (2022);
    Touvron et al., "LLaMA" (2023).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

import flashtile
from flashtile import BlockMask
from flashtile.models.config import GPTConfig, check_tokens, draw_weights, make_mlp
from flashtile.modules import MHA, Block, KVCache, LayerNorm, ParallelBlock, RMSNorm, add_norm
from flashtile.modules.layers import computes_only

#: Causal self-attention: (q, k, v) -> out, each `[B, S, H, D]`.
CausalAttention = Callable[[Tensor, Tensor, Tensor], Tensor]

#: The remedy for a model whose weights ranks share.
_OF_PARTS = "compute hidden(tokens), and its loss with flashtile.distributed.vocabulary_loss"


def flashtile_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal attention in tiles: memory linear in the sequence length."""
    return flashtile.attention(q, k, v, causal=True)


def plain_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal attention as its formula says: every step is an S×S matrix in memory."""
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))  # [B, H, S, D]
    future = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool, device=q.device).triu(1)
    scores = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])  # [B, H, S, S]
    weights = scores.masked_fill(future, float("-inf")).softmax(dim=-1)
    return (weights.to(v.dtype) @ v).transpose(1, 2)


class GPT(nn.Module):
    """A decoder: computes the logits of the next token. There is no padding mask.

    Args:
        config: sizes and choices.
        attention: a function that replaces the attention of all blocks, such as `plain_attention`.
        device: device of the parameters. On "meta" nothing is allocated; `to_empty` followed by `initialise` or
            `load_state_dict` makes it a model.
        dtype: dtype of the parameters.

    Attributes:
        numbered: a function from a number of tokens and a device to their positions, int64 `[S]`, for a model that has
            a part of each sequence (`flashtile.distributed.context_parallel` sets it); None = tokens follow one
            another.
        cut: whether the weights are divided over ranks (`flashtile.distributed.tensor_parallel_plan` sets it). Then
            only `hidden` can be called.
    """

    numbered: Callable[[int, torch.device], Tensor] | None = None
    cut = False

    def __init__(
        self, config: GPTConfig, attention: CausalAttention | None = None, device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        self.config = config
        where: dict[str, Any] = {"device": device, "dtype": dtype}
        self.token = nn.Embedding(config.vocabulary, config.width, **where)
        self.position = nn.Embedding(config.context, config.width, **where) if config.positions == "learned" else None
        self.blocks = nn.ModuleList(_block(config, layer, where) for layer in range(config.layers))
        self.norm = _norm(config, where)(config.width)
        self.head = None if config.tied else nn.Linear(config.width, config.vocabulary, bias=False, **where)
        if attention is not None:
            for mixer in self.modules():
                if isinstance(mixer, MHA):
                    mixer.inner_attn = _Exchanged(config, attention)
        self.initialise()

    def initialise(self) -> None:
        """Draws the weights from torch's generator."""
        self._check_whole("initialise", "call it before the model is cut, or load_state_dict instead")
        draw_weights(self.modules(), self.config)
        # Each block adds two terms to the residual stream: scaled so that its variance does not grow with depth.
        for name, parameter in self.named_parameters():
            if name.endswith(("mixer.out_proj.weight", "mlp.fc2.weight")):
                nn.init.normal_(parameter, std=self.config.initial_std / math.sqrt(2 * self.config.layers))

    def forward(
        self, tokens: Tensor, cache: Sequence[KVCache] | None = None, position_ids: Tensor | None = None,
        block_mask: BlockMask | None = None,
    ) -> Tensor:  # fmt: skip
        """Logits of the next token.

        Args:
            tokens: int64 `[B, S]`, S at most the context unless position_ids are given.
            cache: from `new_cache`: the tokens follow those in the cache, and are appended to it.
            position_ids: int32 or int64 `[B, S]` or `[1, S]`, less than both S and the context, for rows that are no
                single sequence, such as that of a `flashtile.prefix_trees.PrefixTree`; None = tokens follow one
                another.
            block_mask: which tokens see which; no token sees a later one in any case.

        Returns:
            `[B, S, V]`.
        """
        self._check_whole("logits", _OF_PARTS)
        return self._logits(self.hidden(tokens, cache, position_ids, block_mask))

    def hidden(
        self, tokens: Tensor, cache: Sequence[KVCache] | None = None, position_ids: Tensor | None = None,
        block_mask: BlockMask | None = None,
    ) -> Tensor:  # fmt: skip
        """The output of the last norm, from which the logits are computed: `[B, S, W]`. Arguments as for `forward`."""
        check_tokens(tokens)
        if self.numbered is not None and (position_ids is not None or block_mask is not None):
            raise ValueError(
                "position_ids, block_mask: expected None with a model that takes shards of sequences, got a value"
            )
        before = 0 if cache is None else cache[0].length
        end = before + tokens.shape[1]
        if end > self.config.context and position_ids is None:
            raise ValueError(f"tokens: expected at most {self.config.context} in a row (the context), got {end}")
        numbers = position_ids if self.numbered is None else self.numbered(tokens.shape[1], tokens.device)
        hidden = self.token(tokens)  # [B, S, W]
        if self.position is not None:
            if numbers is None:
                numbers = torch.arange(before, end, device=tokens.device)
            hidden = hidden + self.position(numbers)
        options: dict[str, Any] = {"cache": cache, "position_ids": position_ids, "block_mask": block_mask}
        options = {name: value for name, value in options.items() if value is not None}
        branch = residual = None
        for block in self.blocks:
            if self.config.parallel:
                hidden, branch, residual = block(hidden, branch, residual, options)
            else:
                hidden, residual = block(hidden, residual, options)
        p = self.config.residual_dropout if self.training else 0.0
        return add_norm(self.norm, hidden, residual, p, branch)

    def loss(self, tokens: Tensor) -> Tensor:
        """Mean cross-entropy, in nats, of each token of `[B, S + 1]` given the tokens before it. Every token counts."""
        self._check_whole("a loss", _OF_PARTS)
        if self.numbered is not None:
            raise ValueError(
                "tokens: expected whole sequences for loss, got a model of context_parallel, which takes shards: the "
                "next token may be on another rank; shift labels before shard_sequence, and take mean_over_shards"
            )
        hidden, labels = self.hidden(tokens[:, :-1]), tokens[:, 1:]
        if self.config.fused_loss and (self.head is None or computes_only(self.head, nn.Linear)):
            return flashtile.linear_cross_entropy(hidden, self.output_weight, labels)
        return flashtile.cross_entropy(self._logits(hidden), labels)

    def _logits(self, hidden: Tensor) -> Tensor:
        """`[..., W]` -> `[..., V]`."""
        return flashtile.fused_dense(hidden, self.token.weight) if self.head is None else self.head(hidden)

    def _check_whole(self, wanted: str, instead: str) -> None:
        if self.cut:
            raise ValueError(
                f"model: expected whole weights for {wanted}, got a model of tensor_parallel_plan, whose heads and "
                f"vocabulary ranks share; {instead}"
            )

    @property
    def output_weight(self) -> Tensor:
        """The output embedding, `[V, W]`: the input embedding if they are tied."""
        return self.token.weight if self.head is None else self.head.weight

    def new_cache(self, batch: int, capacity: int, dtype: torch.dtype | None = None) -> list[KVCache]:
        """Empty caches of all layers, for `capacity` tokens of each of `batch` sequences.

        `dtype` is the dtype of the keys. None is the dtype of the parameters, or under `torch.autocast` that of the
        outputs of linear layers.
        """
        config, weight = self.config, self.token.weight
        heads_kv = config.heads if config.heads_kv is None else config.heads_kv
        sizes = (batch, capacity, heads_kv, config.head_dim)
        return [KVCache(*sizes, weight.device, dtype or _projected(weight)) for _ in range(config.layers)]

    @torch.no_grad()
    def generate(
        self, tokens: Tensor, new_tokens: int, temperature: float = 0.0, top_k: int | None = None,
        generator: torch.Generator | None = None,
    ) -> Tensor:  # fmt: skip
        """Continues sequences, one token at a time, with a cache of keys and values.

        Args:
            tokens: int64 `[B, S]`, S at least 1; all prompts have the same length.
            new_tokens: number of tokens to generate; with the prompt at most the context.
            temperature: 0 takes the most probable token. Otherwise logits are divided by it, and tokens are drawn.
            top_k: draw from this many of the most probable tokens.
            generator: random generator of the draws.

        Returns:
            `[B, S + new_tokens]`.

        Raises:
            TypeError: new_tokens is no int.
            ValueError: the weights are divided over ranks, the prompt is empty, there are more tokens than the context
                has, or arguments cannot be combined.
        """
        self._check_whole("generation", _OF_PARTS)
        if tokens.dim() != 2 or not tokens.shape[1]:
            raise ValueError(f"tokens: expected [batch, seq] with at least one token, got shape {tuple(tokens.shape)}")
        if isinstance(new_tokens, bool) or not isinstance(new_tokens, int):
            raise TypeError(f"new_tokens: expected an int, got {new_tokens!r}; it is how many follow the prompt")
        if new_tokens < 0:
            raise ValueError(f"new_tokens: expected at least 0, got {new_tokens}; it is how many follow the prompt")
        if tokens.shape[1] + new_tokens > self.config.context:
            raise ValueError(
                f"new_tokens: expected at most {self.config.context} tokens with the prompt (the context), got "
                f"{tokens.shape[1]} and {new_tokens}; ask for fewer, or cut the prompt"
            )
        if not temperature >= 0:
            raise ValueError(f"temperature: expected at least 0, got {temperature}; 0 takes the most probable token")
        if not temperature and not (top_k is None and generator is None):
            raise ValueError("top_k, generator: expected None with temperature=0, got a value; nothing is drawn then")
        if top_k is not None and top_k < 1:
            raise ValueError(f"top_k: expected at least 1, got {top_k}; None draws from all tokens")
        batch, length = tokens.shape
        cache = self.new_cache(batch, length + new_tokens)
        out = torch.cat((tokens, tokens.new_empty(batch, new_tokens)), dim=1)
        step = tokens
        for place in range(length, length + new_tokens):
            logits = self._logits(self.hidden(step, cache)[:, -1])  # [B, V]
            out[:, place] = _choose(logits, temperature, top_k, generator)
            step = out[:, place : place + 1]
        return out


class _Exchanged(nn.Module):
    """Another causal attention in the place of a block's own."""

    def __init__(self, config: GPTConfig, attention: CausalAttention) -> None:
        super().__init__()
        if config.attention_dropout or config.window is not None or config.heads_kv not in (None, config.heads):
            raise ValueError(
                "attention: expected None with attention_dropout, window or heads_kv in the config, got a function; "
                "it takes q, k and v alone"
            )
        self.attention = attention

    def forward(self, q: Tensor, k: Tensor, v: Tensor, *packing: Any) -> Tensor:
        if q.shape != k.shape or any(argument is not None for argument in packing):
            raise ValueError("attention: expected None with a cache, got a function; it knows whole sequences only")
        return self.attention(q, k, v)


def _block(config: GPTConfig, layer: int, where: dict[str, Any]) -> Block | ParallelBlock:
    rotary_dim = 0
    if config.positions == "rotary":
        rotary_dim = config.head_dim if config.rotary_dim is None else config.rotary_dim
    mixer = partial(
        MHA, num_heads=config.heads, num_heads_kv=config.heads_kv, qkv_proj_bias=config.attention_bias,
        out_proj_bias=config.attention_bias, dropout=config.attention_dropout, causal=True, layer_idx=layer,
        rotary_emb_dim=rotary_dim, rotary_emb_base=config.rotary_base, window_size=(config.window, 0), **where,
    )  # fmt: skip
    mlp = make_mlp(config, config.mlp_bias, **where)
    # The first block gets the embeddings.
    dropout = config.residual_dropout if layer else config.embedding_dropout
    common: dict[str, Any] = {"residual_in_fp32": config.residual_in_fp32, "norm_cls": _norm(config, where)}
    if config.parallel:
        return ParallelBlock(config.width, mixer, mlp, resid_dropout=dropout, **common)
    return Block(config.width, mixer, mlp, resid_dropout1=dropout, resid_dropout2=config.residual_dropout, **common)


def _norm(config: GPTConfig, where: dict[str, Any]) -> Callable[[int], nn.Module]:
    return partial(LayerNorm if config.norm == "layer" else RMSNorm, eps=config.norm_eps, **where)


def _projected(weight: Tensor) -> torch.dtype:
    """The dtype of what a linear layer gives whose weight has the dtype and device of this one."""
    kind = weight.device.type
    if weight.dtype is torch.float64 or kind == "meta" or not torch.is_autocast_enabled(kind):
        return weight.dtype
    return torch.get_autocast_dtype(kind)


def _choose(logits: Tensor, temperature: float, top_k: int | None, generator: torch.Generator | None) -> Tensor:
    """One token for each row `[B, V]`."""
    if not temperature:
        return logits.argmax(dim=-1)
    logits = logits.float() / temperature
    if top_k is not None and top_k < logits.shape[-1]:
        lowest = logits.topk(top_k, dim=-1).values[:, -1:]
        logits = logits.masked_fill(logits < lowest, float("-inf"))
    # The largest of p / e with exponential e is a draw from p; `multinomial` would wait for the GPU.
    noise = torch.empty_like(logits).exponential_(generator=generator)
    return (logits.softmax(dim=-1) / noise).argmax(dim=-1)
