"""flash_attn.modules.embedding and layers.patch_embed: tokens, positions, segments and patches, on one device.

`flashtile.distributed` has an embedding whose vocabulary processes share.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from flashtile import modules
from flashtile.compat.adapter import refuse_given
from flashtile.compat.signatures import VERSION_2

_ONE_DEVICE = "these layers compute on one device, flashtile.distributed.VocabParallelEmbedding on several"


class GPT2Embeddings(nn.Module):
    """Embeddings of tokens and positions, added up.

    Args:
        embed_dim: of the result.
        vocab_size, max_position_embeddings: numbers of tokens and positions; 0 or less for no embedding of positions.
        padding_idx: a token whose embedding is 0 and is not learned.
        word_embed_proj_dim: tokens are embedded in so many dimensions and projected to embed_dim; None for embed_dim.
        device, dtype: of the parameters.
    """

    def __init__(
        self, embed_dim: int, vocab_size: int, max_position_embeddings: int, padding_idx: int | None,
        word_embed_proj_dim: int | None, **place: Any,
    ) -> None:  # fmt: skip
        super().__init__()
        width = embed_dim if word_embed_proj_dim is None else word_embed_proj_dim
        self.word_embeddings = nn.Embedding(vocab_size, width, padding_idx, **place)
        self.project_in = None
        if word_embed_proj_dim is not None:
            self.project_in = nn.Linear(width, embed_dim, bias=False, **place)
        self.max_position_embeddings = max_position_embeddings
        if max_position_embeddings > 0:
            self.position_embeddings = nn.Embedding(max_position_embeddings, embed_dim, **place)

    def forward(self, input_ids: Tensor, position_ids: Tensor | None = None) -> Tensor:
        """`[batch, seq]` -> `[batch, seq, embed_dim]`; position_ids `[batch, seq]` or `[seq]`, by default from 0 on."""
        embeddings = self.word_embeddings(input_ids)
        if self.project_in is not None:
            embeddings = self.project_in(embeddings)
        if self.max_position_embeddings > 0:
            if position_ids is None:
                position_ids = torch.arange(input_ids.shape[1], device=input_ids.device)
            embeddings = embeddings + self.position_embeddings(position_ids)
        return embeddings


class BertEmbeddings(GPT2Embeddings):
    """Embeddings of tokens, positions and segments, added up; arguments as `GPT2Embeddings`, and `type_vocab_size`, the
    number of segments; 0 or less for no embedding of segments."""

    def __init__(self, embed_dim: int, type_vocab_size: int, **given: Any) -> None:
        super().__init__(embed_dim, **given)
        self.type_vocab_size = type_vocab_size
        if type_vocab_size > 0:
            place = {name: given[name] for name in ("device", "dtype")}
            self.token_type_embeddings = nn.Embedding(type_vocab_size, embed_dim, **place)

    def forward(
        self, input_ids: Tensor, position_ids: Tensor | None = None, token_type_ids: Tensor | None = None
    ) -> Tensor:
        """`[batch, seq]` -> `[batch, seq, embed_dim]`; positions by default from 0 on, segments by default 0."""
        embeddings = super().forward(input_ids, position_ids)
        if self.type_vocab_size > 0:
            segments = torch.zeros_like(input_ids) if token_type_ids is None else token_type_ids
            embeddings = embeddings + self.token_type_embeddings(segments)
        return embeddings


class ColumnParallelEmbedding(nn.Embedding):
    """`torch.nn.Embedding`; `process_group` must be None."""

    def __init__(
        self, num_embeddings: int, embedding_dim: int, *args: Any, process_group: Any = None, **kwargs: Any
    ) -> None:
        refuse_given(_ONE_DEVICE, process_group=process_group)
        super().__init__(num_embeddings, embedding_dim, *args, **kwargs)
        self.process_group = process_group


class VocabParallelEmbedding(ColumnParallelEmbedding):
    """`torch.nn.Embedding`; `process_group` must be None."""

    def __init__(
        self, num_embeddings: int, *args: Any, process_group: Any = None, padding_idx: int | None = None, **kwargs: Any
    ) -> None:
        super().__init__(num_embeddings, *args, process_group=process_group, padding_idx=padding_idx, **kwargs)


class PatchEmbed(nn.Module):
    """Cuts images into patches and projects each by a linear layer, `proj`, and a norm, `norm`.

    Args:
        img_size, patch_size: height and width of images and patches, an int for squares; the latter divide the former.
        in_chans, embed_dim: channels of the images, and of the result.
        norm_layer: makes a norm of embed_dim; None for none.
        flatten: the patches are one dimension of the result, row after row, else two.
        bias, fused_bias_fc: the projection has a bias; it is a `flashtile.modules.FusedDense`.
    """

    def __init__(
        self, img_size: Any, patch_size: Any, in_chans: int, embed_dim: int, norm_layer: Any, flatten: bool, bias: bool,
        fused_bias_fc: bool,
    ) -> None:  # fmt: skip
        super().__init__()
        self.img_size, self.patch_size = (
            (size, size) if isinstance(size, int) else tuple(size) for size in (img_size, patch_size)
        )
        self.grid_size = self.img_size[0] // self.patch_size[0], self.img_size[1] // self.patch_size[1]
        self.num_patches = self.grid_size[0] * self.grid_size[1]
        self.flatten = flatten
        layer = modules.FusedDense if fused_bias_fc else nn.Linear
        self.proj = layer(in_chans * self.patch_size[0] * self.patch_size[1], embed_dim, bias=bias)
        self.norm = nn.Identity() if norm_layer is None else norm_layer(embed_dim)

    def forward(self, x: Tensor) -> Tensor:
        """`[batch, in_chans, height, width]` -> `[batch, patches, embed_dim]`, or `[batch, rows, columns, embed_dim]`.

        The elements of a patch come in the order (channel, row, column).
        """
        if x.dim() != 4 or tuple(x.shape[2:]) != self.img_size:
            raise ValueError(
                f"x: expected images [batch, in_chans, {self.img_size[0]}, {self.img_size[1]}], got {list(x.shape)}; "
                "resize them, or make the layer with their img_size"
            )
        # [B, C, rows, height, columns, width] -> [B, rows, columns, C · height · width]
        (rows, columns), (height, width) = self.grid_size, self.patch_size
        cut = x.unflatten(3, (columns, width)).unflatten(2, (rows, height))
        patches = self.proj(cut.permute(0, 2, 4, 1, 3, 5).flatten(3))
        return self.norm(patches.flatten(1, 2) if self.flatten else patches)


VERSION_2.serve(globals())
