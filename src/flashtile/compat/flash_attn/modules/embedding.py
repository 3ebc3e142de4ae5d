"""flash_attn.modules.embedding: embeddings of tokens, positions and segments, on one device.

`flashtile.distributed` has an embedding whose vocabulary processes share.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from flashtile.compat.arguments import refuse_given

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

_ONE_DEVICE = "these layers compute on one device, flashtile.distributed.VocabParallelEmbedding on several"


class GPT2Embeddings(nn.Module):
    """Embeddings of tokens and positions, added up.

    Args:
        embed_dim: of the result.
        vocab_size: number of tokens.
        max_position_embeddings: number of positions; 0 or less for no embedding of positions.
        padding_idx: a token whose embedding is 0 and is not learned.
        word_embed_proj_dim: tokens are embedded in so many dimensions and projected to embed_dim; None for embed_dim.
        device, dtype: of the parameters.
    """

    def __init__(
        self,
        embed_dim: int,
        vocab_size: int,
        max_position_embeddings: int,
        padding_idx: int | None = None,
        word_embed_proj_dim: int | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        width = embed_dim if word_embed_proj_dim is None else word_embed_proj_dim
        self.word_embeddings = nn.Embedding(vocab_size, width, padding_idx, device=device, dtype=dtype)
        self.project_in = None
        if word_embed_proj_dim is not None:
            self.project_in = nn.Linear(width, embed_dim, bias=False, device=device, dtype=dtype)
        self.max_position_embeddings = max_position_embeddings
        if max_position_embeddings > 0:
            self.position_embeddings = nn.Embedding(max_position_embeddings, embed_dim, device=device, dtype=dtype)

    def forward(self, input_ids: Tensor, position_ids: Tensor | None = None) -> Tensor:
        """`[batch, seq]` -> `[batch, seq, embed_dim]`; position_ids `[batch, seq]` or `[seq]`, by default from 0 on."""
        embeddings = self.word_embeddings(input_ids)
        if self.project_in is not None:
            embeddings = self.project_in(embeddings)
        if self.max_position_embeddings > 0:
            embeddings = embeddings + self.position_embeddings(_positions(input_ids, position_ids))
        return embeddings


class BertEmbeddings(nn.Module):
    """Embeddings of tokens, positions and segments, added up.

    Args:
        embed_dim: of the result.
        vocab_size: number of tokens.
        max_position_embeddings: number of positions; 0 or less for no embedding of positions.
        type_vocab_size: number of segments; 0 or less for no embedding of segments.
        padding_idx: a token whose embedding is 0 and is not learned.
        device, dtype: of the parameters.
    """

    def __init__(
        self,
        embed_dim: int,
        vocab_size: int,
        max_position_embeddings: int,
        type_vocab_size: int,
        padding_idx: int | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.word_embeddings = nn.Embedding(vocab_size, embed_dim, padding_idx, device=device, dtype=dtype)
        self.max_position_embeddings = max_position_embeddings
        self.type_vocab_size = type_vocab_size
        if max_position_embeddings > 0:
            self.position_embeddings = nn.Embedding(max_position_embeddings, embed_dim, device=device, dtype=dtype)
        if type_vocab_size > 0:
            self.token_type_embeddings = nn.Embedding(type_vocab_size, embed_dim, device=device, dtype=dtype)

    def forward(
        self, input_ids: Tensor, position_ids: Tensor | None = None, token_type_ids: Tensor | None = None
    ) -> Tensor:
        """`[batch, seq]` -> `[batch, seq, embed_dim]`; positions by default from 0 on, segments by default 0."""
        embeddings = self.word_embeddings(input_ids)
        if self.max_position_embeddings > 0:
            embeddings = embeddings + self.position_embeddings(_positions(input_ids, position_ids))
        if self.type_vocab_size > 0:
            if token_type_ids is None:
                token_type_ids = torch.zeros_like(input_ids)
            embeddings = embeddings + self.token_type_embeddings(token_type_ids)
        return embeddings


class VocabParallelEmbedding(nn.Embedding):
    """`torch.nn.Embedding`; `process_group` must be None."""

    def __init__(
        self,
        num_embeddings: int,
        *args: Any,
        process_group: ProcessGroup | None = None,
        padding_idx: int | None = None,
        **kwargs: Any,
    ) -> None:
        refuse_given(_ONE_DEVICE, process_group=process_group)
        super().__init__(num_embeddings, *args, **kwargs, padding_idx=padding_idx)  # type: ignore[misc]
        self.process_group = process_group


class ColumnParallelEmbedding(nn.Embedding):
    """`torch.nn.Embedding`; `process_group` must be None."""

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        *args: Any,
        process_group: ProcessGroup | None = None,
        **kwargs: Any,
    ) -> None:
        refuse_given(_ONE_DEVICE, process_group=process_group)
        super().__init__(num_embeddings, embedding_dim, *args, **kwargs)
        self.process_group = process_group


def _positions(input_ids: Tensor, position_ids: Tensor | None) -> Tensor:
    return torch.arange(input_ids.shape[1], device=input_ids.device) if position_ids is None else position_ids
