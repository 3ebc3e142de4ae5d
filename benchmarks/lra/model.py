"""A small pre-norm Transformer encoder that classifies sequences, and the ways in which it attends. All but the
block-sparse one compute the same.

Shapes: q, k, v `[B, S, H, D]`, of packed batches `[total, H, D]`.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import flashtile
from benchmarks.lra.examples import Examples, Task
from flashtile import BlockMask, patterns
from flashtile.modules import unpad_input

#: Size of the tiles of the butterfly pattern.
_BLOCK = 64


@dataclass(frozen=True)
class Where:
    """The places of the tokens of a batch. `lengths`: int32 `[B]` of a padded one; None where all are as long as the
    tensor. `cu_seqlens`: int32 `[B + 1]` of a packed one, else None."""

    lengths: Tensor | None
    cu_seqlens: Tensor | None
    max_seqlen: int


Attend = Callable[[Tensor, Tensor, Tensor, Where], Tensor]


@dataclass(frozen=True)
class Attention:
    """One way to attend. `note`: what it is, for a record. `packed`: it wants batches without padding."""

    attend: Attend
    note: str
    packed: bool = False


def _standard(q: Tensor, k: Tensor, v: Tensor, where: Where) -> Tensor:
    scores = torch.einsum("bihd,bjhd->bhij", q, k) / math.sqrt(q.shape[-1])
    if where.lengths is not None:
        scores = scores.masked_fill(_padding(where.lengths, q.shape[1])[:, None, None, :], float("-inf"))
    wide = scores if scores.dtype is torch.float64 else scores.float()
    return torch.einsum("bhij,bjhd->bihd", torch.softmax(wide, dim=-1).to(v.dtype), v)


def _sdpa(q: Tensor, k: Tensor, v: Tensor, where: Where) -> Tensor:
    mask = None if where.lengths is None else ~_padding(where.lengths, q.shape[1])[:, None, None, :]
    heads_first = (x.transpose(1, 2) for x in (q, k, v))
    return F.scaled_dot_product_attention(*heads_first, attn_mask=mask).transpose(1, 2)


def _flashtile(q: Tensor, k: Tensor, v: Tensor, where: Where) -> Tensor:
    return flashtile.attention(q, k, v, key_lengths=where.lengths)


def _packed(q: Tensor, k: Tensor, v: Tensor, where: Where) -> Tensor:
    if where.cu_seqlens is None:
        return flashtile.attention(q, k, v)
    longest = where.max_seqlen
    return flashtile.attention_varlen(q, k, v, where.cu_seqlens, max_seqlen_q=longest, max_seqlen_k=longest)


def _block_sparse(q: Tensor, k: Tensor, v: Tensor, where: Where) -> Tensor:
    return flashtile.attention(q, k, v, key_lengths=where.lengths, block_mask=_butterfly(q.shape[1], q.device))


@functools.lru_cache(maxsize=64)
def _butterfly(seq: int, device: torch.device) -> BlockMask:
    return patterns.butterfly(seq, _BLOCK, device=device)


def _padding(lengths: Tensor, seq: int) -> Tensor:
    """bool `[B, S]`: what is padding."""
    return torch.arange(seq, device=lengths.device) >= lengths[:, None]


ATTENTIONS: dict[str, Attention] = {
    "standard": Attention(_standard, "eager PyTorch, with all scores in memory"),
    "sdpa": Attention(_sdpa, "PyTorch's scaled_dot_product_attention"),
    "flashtile": Attention(_flashtile, "flashtile.attention, padded"),
    "flashtile-packed": Attention(_packed, "flashtile.attention_varlen, the whole model without padding", packed=True),
    "block-sparse": Attention(_block_sparse, f"flashtile.attention with a butterfly of tiles of {_BLOCK}"),
}


class Layer(nn.Module):
    """Attention and a perceptron, each after a norm and beside a residual stream of `[..., W]`."""

    def __init__(self, width: int, heads: int, attend: Attend) -> None:
        super().__init__()
        self.heads, self.attend = heads, attend
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor, where: Where) -> Tensor:
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, self.heads, -1)).unbind(-3)
        x = x + self.out(self.attend(q, k, v, where).flatten(-2))
        return x + self.mlp(self.norm2(x))


class Classifier(nn.Module):
    """Embeddings of tokens and places, layers, and the mean over the tokens of a sequence, of an image the maximum.

    A pixel's embedding is made from the 5 × 5 pixels around it, so that the first layer knows already which way a dash
    runs. The sequence is that of the pixels all the same.

    Of an image whose pixels are the tokens, places are rows and columns. The weights do not depend on how it attends.
    """

    def __init__(self, task: Task, attention: Attention, layers: int, width: int, heads: int) -> None:
        super().__init__()
        self.attention, self.grid = attention, task.grid
        self.token: nn.Module = nn.Embedding(task.vocabulary, width)
        if task.grid is not None:
            self.token = nn.Conv2d(1, width, 5, padding=2)
        self.place = nn.Embedding(task.context if task.grid is None else 2 * task.grid, width)
        self.layers = nn.ModuleList(Layer(width, heads, attention.attend) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, task.classes)
        for embedding in (self.token, self.place):
            if isinstance(embedding, nn.Embedding):
                nn.init.normal_(embedding.weight, std=0.02)

    def forward(self, batch: Examples) -> Tensor:
        """Logits `[B, classes]`."""
        tokens, lengths = batch.tokens, batch.lengths
        seq = tokens.shape[1]
        x = self._embedded(tokens) + self._places(seq, tokens.device)  # [B, S, W]
        kept = torch.arange(seq, device=tokens.device) < lengths[:, None]  # [B, S]
        if self.grid is not None:  # every image is as large as the others, and few of its pixels say anything
            return self.head(self._encode(x, Where(None, None, seq)).amax(1))
        if self.attention.packed:
            packed = unpad_input(x, kept)
            where = Where(None, packed.cu_seqlens, packed.max_seqlen)
            encoded = self._encode(packed.x, where)
            total = encoded.new_zeros(len(x), x.shape[-1]).index_add(0, packed.indices // seq, encoded)
            return self.head(total / kept.sum(1, keepdim=True))
        encoded = self._encode(x, Where(lengths, None, seq))
        return self.head((encoded * kept[..., None]).sum(1) / lengths[:, None])

    def _encode(self, x: Tensor, where: Where) -> Tensor:
        for layer in self.layers:
            x = layer(x, where)
        return self.norm(x)

    def _embedded(self, tokens: Tensor) -> Tensor:
        if self.grid is None:
            return self.token(tokens.int())
        images = tokens.view(-1, 1, self.grid, self.grid).to(self.place.weight.dtype) / 255
        return self.token(images).flatten(2).transpose(1, 2)

    def _places(self, seq: int, device: torch.device) -> Tensor:
        place = torch.arange(seq, device=device)
        if self.grid is None:
            return self.place(place)
        return self.place(place // self.grid) + self.place(self.grid + place % self.grid)
