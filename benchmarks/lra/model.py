"""A small pre-norm Transformer encoder that classifies sequences; how it attends is an argument."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from benchmarks.lra.attentions import Attention, Where
from benchmarks.lra.examples import Examples
from flashtile.modules import unpad_input


@dataclass(frozen=True)
class Sizes:
    """Sizes of an encoder."""

    vocabulary: int
    classes: int
    context: int
    layers: int = 4
    width: int = 256
    heads: int = 4


class Layer(nn.Module):
    """Attention and a perceptron, each after a norm and beside a residual stream of `[..., W]`."""

    def __init__(self, sizes: Sizes, attention: Attention) -> None:
        super().__init__()
        self.heads, self.attend = sizes.heads, attention.attend
        self.norm1, self.norm2 = nn.LayerNorm(sizes.width), nn.LayerNorm(sizes.width)
        self.qkv, self.out = nn.Linear(sizes.width, 3 * sizes.width), nn.Linear(sizes.width, sizes.width)
        self.mlp = nn.Sequential(
            nn.Linear(sizes.width, 4 * sizes.width), nn.GELU(), nn.Linear(4 * sizes.width, sizes.width)
        )

    def forward(self, x: Tensor, where: Where) -> Tensor:
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, self.heads, -1)).unbind(-3)
        x = x + self.out(self.attend(q, k, v, where).flatten(-2))
        return x + self.mlp(self.norm2(x))


class Classifier(nn.Module):
    """Embeddings of tokens and places, layers, and the mean over the tokens of a sequence, of an image the maximum.

    A pixel's embedding is made from the 5 × 5 pixels around it, so that the first layer knows already which way a dash
    runs. The sequence is that of the pixels all the same.

    Args:
        sizes: of the encoder.
        attention: how it attends; the weights do not depend on it.
        grid: side of an image whose pixels are the tokens: places are then rows and columns. None = a sequence.
    """

    def __init__(self, sizes: Sizes, attention: Attention, grid: int | None = None) -> None:
        super().__init__()
        self.sizes, self.attention, self.grid = sizes, attention, grid
        self.token: nn.Module = nn.Embedding(sizes.vocabulary, sizes.width)
        if grid is not None:
            self.token = nn.Conv2d(1, sizes.width, 5, padding=2)
        self.place = nn.Embedding(sizes.context if grid is None else 2 * grid, sizes.width)
        self.layers = nn.ModuleList(Layer(sizes, attention) for _ in range(sizes.layers))
        self.norm = nn.LayerNorm(sizes.width)
        self.head = nn.Linear(sizes.width, sizes.classes)
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
            return self.head(self._mean_packed(self._encode(packed.x, where), packed.indices, kept))
        encoded = self._encode(x, Where(lengths, None, seq))
        return self.head((encoded * kept[..., None]).sum(1) / lengths[:, None])

    def _encode(self, x: Tensor, where: Where) -> Tensor:
        for layer in self.layers:
            x = layer(x, where)
        return self.norm(x)

    def _mean_packed(self, x: Tensor, indices: Tensor, kept: Tensor) -> Tensor:
        batch, seq = kept.shape
        total = x.new_zeros(batch, x.shape[-1]).index_add(0, indices // seq, x)
        return total / kept.sum(1, keepdim=True)

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
