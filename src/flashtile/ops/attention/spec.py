"""The meaning of an attention call, apart from the numbers in its tensors.

`AttentionSpec` is the one description that every backend receives. It is a plain tuple, because one is built on every
call, and canonical: calls that mean the same compare equal (`causal=True` is a window whose right side is 0), so that
selection and launch caches key on it.

Visibility, for query row `i` and key column `j` of one sequence::

    diagonal = i + (0 if top_left else seq_k - seq_q)
    visible  = diagonal - window_left <= j <= diagonal + window_right  and  j < key_length  and  mask[i, j]

Scores, of which the softmax is taken over what is visible (and over the sink, which has no value)::

    s = scale · q kᵀ
    s = softcap · tanh(s / softcap)
    s = score_mod(s, sequence, head, i, j)
    s = s + bias[i, j] - alibi_slope · |i + seq_k - seq_q - j|
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

#: The one dtype of 8 bits, for inputs of the forward.
FP8 = torch.float8_e4m3fn

#: Largest head dimension (of q/k, and separately of v) that any backend takes.
MAX_HEAD_DIM = 512


class Origin(NamedTuple):
    """The place of a call in a larger one, of which it computes a rectangle of the scores: the meaning of positions.

    The band needs none of it, because it is shifted instead: a side of the window may then be negative.

    Attributes:
        row, column: number of the first query and of the first key, for the dropout bits.
        diagonal: added to seq_k - seq_q, for the distances of ALiBi.
        matrix: `sequence · heads + head` of the first sequence and head, for the dropout bits.
        heads: of the larger call.
    """

    row: int
    column: int
    diagonal: int
    matrix: int
    heads: int


class AttentionSpec(NamedTuple):
    """The meaning of a call: scalars only, hashable, canonical.

    Attributes:
        scale: factor on `q kᵀ`.
        window_left: keys visible left of the diagonal; `None` = all, negative = only keys so far right of it.
        window_right: keys visible right of the diagonal; `None` = all, 0 = causal, negative likewise.
        top_left: the diagonal starts at the first key (else it ends at the last key).
        dropout_p: probability that an attention weight is dropped, in [0, 1).
        deterministic: the gradients must be the same, bit for bit, in every run.
        softcap: bound of the scores before bias and ALiBi; 0 = none.
        block_shape: (batch or 1, heads or 1, tile_q, tile_k) of the block mask; None without one.
        origin: where the call lies in a larger one; None where that changes nothing.
        returns_max_scores: the forward also returns the largest score of each row.
        score_program: the score function as text (see `score_program`); None without one.
        batch_invariant: the results of a sequence must be the same, bit for bit, in any company (docs/contract.md).
    """

    scale: float
    window_left: int | None = None
    window_right: int | None = None
    top_left: bool = False
    dropout_p: float = 0.0
    deterministic: bool = False
    softcap: float = 0.0
    block_shape: tuple[int, int, int, int] | None = None
    origin: Origin | None = None
    returns_max_scores: bool = False
    score_program: str | None = None
    batch_invariant: bool = False

    @property
    def banded(self) -> bool:
        """Whether visibility depends on the distance from the diagonal."""
        return self.window_left is not None or self.window_right is not None


class SideInputs(NamedTuple):
    """The tensors beside q, k and v. Everything is `None` in a plain dense call.

    With `cu_seqlens_q` set the layout is packed: q, k, v are `[total, heads, head_dim]`, `lse` is
    `[heads, total_q]`, and sequence `b` owns rows `cu_seqlens[b]` to `cu_seqlens[b + 1]`. Rows past
    `cu_seqlens[-1]` belong to no sequence: their `out` is 0, their `lse` is -inf, their gradients are 0.

    Attributes:
        cu_seqlens_q: `[batch + 1]` int32 or int64, or None.
        cu_seqlens_k: `[batch + 1]` int32 or int64, None exactly when `cu_seqlens_q` is.
        max_seqlen_q: upper bound of the query lengths (packed layout; `total_q` where the caller gave none).
        max_seqlen_k: upper bound of the key lengths, likewise.
        key_lengths: `[batch]` int32 or int64, number of valid keys of each batch entry, or None.
        dropout_seed: `[2]` int64 (seed, offset), each in [0, 2³²), or None where `dropout_p` is 0.
        bias: `[batch | 1, heads_q | 1, seq_q | 1, seq_k | 1]`, any strides, added to the scores; in a packed call the
            first is 1, and the others count within each sequence.
        mask: bool, likewise; True = visible.
        alibi_slopes: `[heads_q]` or `[batch, heads_q]`, in the dtype of lse.
        sinks: `[heads_q]`, in the dtype of lse: a logit beside those of the keys in each row's softmax.
        block_lists: int32, which tiles of the scores have something visible (see `BlockMask.lists`).
        block_patterns: uint8 `[patterns, tile_q, tile_k]`, what is visible in those that are partly so.
        descale_q, descale_k, descale_v: `[batch, heads_kv]` float32, any strides, only of 8-bit q, k and v: what their
            numbers are multiplied by.
        captured: the tensors that the score function reads, any shapes and strides.
    """

    cu_seqlens_q: Tensor | None = None
    cu_seqlens_k: Tensor | None = None
    max_seqlen_q: int = 0
    max_seqlen_k: int = 0
    key_lengths: Tensor | None = None
    dropout_seed: Tensor | None = None
    bias: Tensor | None = None
    mask: Tensor | None = None
    alibi_slopes: Tensor | None = None
    sinks: Tensor | None = None
    block_lists: Tensor | None = None
    block_patterns: Tensor | None = None
    descale_q: Tensor | None = None
    descale_k: Tensor | None = None
    descale_v: Tensor | None = None
    captured: tuple[Tensor, ...] = ()

    @property
    def packed(self) -> bool:
        return self.cu_seqlens_q is not None

    @property
    def descales(self) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        return self.descale_q, self.descale_k, self.descale_v

    @property
    def learnable(self) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """The tensors that may want a gradient, in the order of `Wanted`, without those of the score function."""
        return self.bias, self.alibi_slopes, self.sinks

    @property
    def by_distance(self) -> bool:
        """True if scores depend on how far a key is from its query's diagonal."""
        return self.alibi_slopes is not None

    @property
    def has_row_logit(self) -> bool:
        """True if the softmax of a row has a logit that belongs to no key."""
        return self.sinks is not None


class Wanted(NamedTuple):
    """The side inputs that require gradients. Gradients of q, k and v are always computed."""

    bias: bool = False
    alibi_slopes: bool = False
    sinks: bool = False
    captured: tuple[bool, ...] = ()

    @property
    def flags(self) -> tuple[bool, ...]:
        """One for each tensor."""
        return (self.bias, self.alibi_slopes, self.sinks, *self.captured)


#: No side input requires a gradient.
NOTHING_WANTED = Wanted()


def wanted_gradients(side: SideInputs) -> Wanted:
    """The side inputs that require gradients."""
    bias, slopes, sinks = (tensor is not None and tensor.requires_grad for tensor in side.learnable)
    return Wanted(bias, slopes, sinks, tuple(tensor.requires_grad for tensor in side.captured))


class BackwardInputs(NamedTuple):
    """Inputs of a backward beside the side inputs: upstream gradients, inputs and results of the forward. `dlse` is
    None if no gradient comes through lse."""

    dout: Tensor
    dlse: Tensor | None
    q: Tensor
    k: Tensor
    v: Tensor
    out: Tensor
    lse: Tensor


class Gradients(NamedTuple):
    """Results of a backward: a gradient in the shape and dtype of each input; None for what was not wanted."""

    q: Tensor
    k: Tensor
    v: Tensor
    bias: Tensor | None = None
    alibi_slopes: Tensor | None = None
    sinks: Tensor | None = None
    captured: tuple[Tensor | None, ...] = ()


def changes_scores(side: Any) -> bool:
    """Whether a tensor changes or hides scores, or adds to their softmax; but for block masks and score functions.
    `side`: `SideInputs`, or what `call.AuxFacts` says of them."""
    return side.bias is not None or side.mask is not None or side.alibi_slopes is not None or side.sinks is not None


def plain_side(side: SideInputs) -> bool:
    """Whether there is no tensor beside q, k and v: the commonest call, for which launches take short cuts."""
    (
        cu_seqlens,
        _,
        _,
        _,
        key_lengths,
        seed,
        bias,
        mask,
        slopes,
        sinks,
        lists,
        _,
        descale_q,
        descale_k,
        descale_v,
        captured,
    ) = side
    return (
        cu_seqlens is None
        and key_lengths is None
        and seed is None
        and bias is None
        and mask is None
        and slopes is None
        and sinks is None
        and lists is None
        and descale_q is None
        and descale_k is None
        and descale_v is None
        and len(captured) == 0
    )


def out_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of the result of inputs of a dtype."""
    return torch.bfloat16 if dtype is FP8 else dtype


def lse_shape(q: Tensor) -> tuple[int, ...]:
    """`[batch, heads, seq_q]` for q `[batch, seq_q, heads, head_dim]`; `[heads, total_q]` for packed q."""
    return (q.shape[0], q.shape[2], q.shape[1]) if q.dim() == 4 else (q.shape[1], q.shape[0])


def lse_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype is torch.float64 else torch.float32
