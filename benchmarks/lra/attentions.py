"""The ways in which the classifier attends. All but the block-sparse one compute the same.

Shapes: q, k, v `[B, S, H, D]`, of packed batches `[total, H, D]`.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

import flashtile
from flashtile import BlockMask, patterns

#: Size of the tiles of the butterfly pattern.
_BLOCK = 64


@dataclass(frozen=True)
class Where:
    """The places of the tokens of a batch.

    Attributes:
        lengths: int32 `[B]` of a padded batch; None where all are as long as the tensor.
        cu_seqlens: int32 `[B + 1]` of a packed batch, else None.
        max_seqlen: of the longest sequence.
    """

    lengths: Tensor | None
    cu_seqlens: Tensor | None
    max_seqlen: int


Attend = Callable[[Tensor, Tensor, Tensor, Where], Tensor]


@dataclass(frozen=True)
class Attention:
    """One way to attend.

    Attributes:
        attend: q, k, v -> out.
        packed: it wants batches without padding.
        note: what it is, for a record.
    """

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
