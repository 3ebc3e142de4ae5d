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

from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

import torch
from torch import Tensor
from typing_extensions import NamedTuple  # PyTorch needs it too; from Python 3.11 on typing's

from flashtile.ops.common.rows import compute_dtype

if TYPE_CHECKING:
    from typing_extensions import Self

#: The one dtype of 8 bits, for inputs of the forward.
FP8 = torch.float8_e4m3fn

#: A tensor, or what is known of it.
Of = TypeVar("Of", bound="HasShape")

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

    def shifted(self, keys: int) -> AttentionSpec:
        """The same band, moved right by so many keys."""
        left, right = self.window_left, self.window_right
        left, right = None if left is None else left - keys, None if right is None else right + keys
        return self._replace(window_left=left, window_right=right)


class HasShape(Protocol):
    @property
    def shape(self) -> tuple[int, ...]: ...


class AuxInputs(NamedTuple, Generic[Of]):
    """The tensors beside q, k and v, or what is known of them. Everything is `None` in a plain dense call.

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

    cu_seqlens_q: Of | None = None
    cu_seqlens_k: Of | None = None
    max_seqlen_q: int = 0
    max_seqlen_k: int = 0
    key_lengths: Of | None = None
    dropout_seed: Of | None = None
    bias: Of | None = None
    mask: Of | None = None
    alibi_slopes: Of | None = None
    sinks: Of | None = None
    block_lists: Of | None = None
    block_patterns: Of | None = None
    descale_q: Of | None = None
    descale_k: Of | None = None
    descale_v: Of | None = None
    captured: tuple[Of, ...] = ()

    @property
    def packed(self) -> bool:
        return self.cu_seqlens_q is not None

    @property
    def descales(self) -> tuple[Of | None, Of | None, Of | None]:
        return self.descale_q, self.descale_k, self.descale_v

    @property
    def learnable(self) -> tuple[Of | None, Of | None, Of | None]:
        """The tensors that may want a gradient, in the order of `Wanted`, without those of the score function."""
        return self.bias, self.alibi_slopes, self.sinks

    @property
    def by_distance(self) -> bool:
        """True if scores depend on how far a key is from its query's diagonal."""
        return self.alibi_slopes is not None

    @property
    def slope_dims(self) -> int:
        """Dimensions of ALiBi's slopes: 1 if all sequences share them, 2 if not; 0 without slopes."""
        return 0 if self.alibi_slopes is None else len(self.alibi_slopes.shape)

    @property
    def row_logits(self) -> Of | None:
        """`[heads_q]`: logits in the softmax of each row of a head that belong to no key."""
        return self.sinks

    @property
    def has_row_logit(self) -> bool:
        return self.sinks is not None

    def without_row_logit(self) -> Self:
        """The tensors for a backward, whose lse counts the logit already."""
        return self._replace(sinks=None)

    @property
    def modifies_scores(self) -> bool:
        """True if a tensor changes or hides scores; but for block masks and score functions."""
        return not (self.bias is self.mask is self.alibi_slopes is None)

    @property
    def changes_scores(self) -> bool:
        """True if a tensor changes or hides scores, or adds to their softmax; but for block masks and functions."""
        return self.modifies_scores or self.has_row_logit

    @property
    def plain(self) -> bool:
        """True if there is no tensor: the commonest call, for which launches take short cuts."""
        cu_seqlens, _, _, _, lengths, seed, bias, mask, slopes, sinks, lists, _, of_q, of_k, of_v, captured = self
        tables = bias is mask is slopes is sinks is lists is None
        factors = of_q is of_k is of_v is None
        return tables and factors and cu_seqlens is lengths is seed is None and len(captured) == 0

    @property
    def leaves_scores(self) -> bool:
        """True if there is no tensor, or sinks alone."""
        return self.without_row_logit().plain


class SideInputs(AuxInputs[Tensor]):
    """The tensors of a call themselves."""

    __slots__ = ()

    def sequences(self) -> Iterator[tuple[int, slice, slice, SideInputs]]:
        """For each sequence of a packed call: its number, queries and keys, and the side inputs of a dense call of it
        alone. This reads `cu_seqlens` on the host."""
        assert self.cu_seqlens_q is not None and self.cu_seqlens_k is not None
        bounds = zip(pairwise(self.cu_seqlens_q.tolist()), pairwise(self.cu_seqlens_k.tolist()))
        for sequence, (rows, keys) in enumerate(bounds):
            yield sequence, slice(*rows), slice(*keys), self.for_sequence(sequence)

    def for_sequence(self, sequence: int) -> SideInputs:
        """The side inputs of a dense call of one packed sequence."""
        lengths, slopes = self.key_lengths, self.alibi_slopes
        return self._replace(
            cu_seqlens_q=None,
            cu_seqlens_k=None,
            key_lengths=None if lengths is None else lengths[sequence : sequence + 1],
            alibi_slopes=slopes[sequence] if slopes is not None and slopes.dim() == 2 else slopes,
        )


class Wanted(NamedTuple):
    """The side inputs that require gradients. Gradients of q, k and v are always computed."""

    bias: bool = False
    alibi_slopes: bool = False
    sinks: bool = False
    captured: tuple[bool, ...] = ()

    @property
    def slopes(self) -> bool:
        """Whether the gradient of ALiBi's slopes is wanted."""
        return self.alibi_slopes

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
    """Inputs of a backward beside the side inputs. `dlse` is None if no gradient comes through lse."""

    dout: Tensor
    dlse: Tensor | None
    q: Tensor
    k: Tensor
    v: Tensor
    out: Tensor
    lse: Tensor

    def as_batch(self) -> BackwardInputs:
        """Packed tensors as a batch of one."""
        return BackwardInputs(*(None if tensor is None else tensor[None] for tensor in self))  # type: ignore[arg-type]


class Gradients(NamedTuple):
    """Results of a backward: a gradient in the shape and dtype of each input; None for what was not wanted."""

    q: Tensor
    k: Tensor
    v: Tensor
    bias: Tensor | None = None
    alibi_slopes: Tensor | None = None
    sinks: Tensor | None = None
    captured: tuple[Tensor | None, ...] = ()


#: Runs a backward, from dout, dlse, and what is saved for it: q, k, v, out, lse and the tensors beside them.
RunBackward = Callable[[Tensor, Tensor | None, Sequence[Any]], Gradients]


def out_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of the result of inputs of a dtype."""
    return torch.bfloat16 if dtype is FP8 else dtype


def lse_shape(q: HasShape) -> tuple[int, ...]:
    """`[batch, heads, seq_q]` for q `[batch, seq_q, heads, head_dim]`; `[heads, total_q]` for packed q."""
    return *q.shape[:-3], q.shape[-2], q.shape[-3]


#: The dtype of lse, from that of q.
lse_dtype = compute_dtype


def dequantized(q: Tensor, k: Tensor, v: Tensor, side: SideInputs) -> tuple[Tensor, Tensor, Tensor, SideInputs]:
    """The numbers that 8-bit inputs stand for, in float32, and the side inputs without the factors: a number of q is
    itself times the `descale_q` of its sequence and key/value head, and likewise of k and v."""
    q, k, v = (
        _times(tensor.float(), descale, cu_seqlens)
        for tensor, descale, cu_seqlens in zip(
            (q, k, v), side.descales, (side.cu_seqlens_q, side.cu_seqlens_k, side.cu_seqlens_k)
        )
    )
    return q, k, v, side._replace(descale_q=None, descale_k=None, descale_v=None)


def _times(x: Tensor, descale: Tensor | None, cu_seqlens: Tensor | None) -> Tensor:
    """x, dense or packed, times the factor `[batch, heads_kv]` of each of its rows."""
    if descale is None:
        return x
    descale = descale.repeat_interleave(x.shape[-2] // descale.shape[-1], dim=-1)
    if cu_seqlens is None:
        return x * descale[:, None, :, None]
    # Rows past the last sequence are no queries or keys of any.
    row = torch.arange(x.shape[0], device=x.device)
    sequence = torch.searchsorted(cu_seqlens[1:].contiguous(), row, right=True).clamp(max=descale.shape[0] - 1)
    return x * descale[sequence].unsqueeze(-1) if descale.shape[0] else x


# A call as the flat arguments of operators and autograd functions: schemas, and the way there and back.

#: Types of fields as the schemas of operators write them.
_SCHEMA_TYPES = {
    "Of | None": "Tensor?",
    "tuple[Of, ...]": "Tensor[]",
    "int": "SymInt",
    "int | None": "int?",
    "float": "float",
    "bool": "bool",
    "tuple[bool, ...]": "bool[]",
    "str | None": "str?",
    "tuple[int, int, int, int] | None": "int[]?",
    "Origin | None": "int[]?",
}


def _schema(fields: type[NamedTuple], prefix: str = "") -> list[str]:
    """The arguments of an operator that are the fields of a NamedTuple, such as "Tensor? bias"."""
    written = {name: str(getattr(kind, "__forward_arg__", kind)) for name, kind in fields.__annotations__.items()}
    return [f"{_SCHEMA_TYPES[kind]} {prefix}{name}" for name, kind in written.items()]


_SIDE, _WANTED = _schema(AuxInputs), _schema(Wanted, "wants_")
#: The arguments behind the tensors, of the forward and of the backward. The single ones have no captured tensors, which
#: come last in side inputs and in what is wanted.
SIDE_SCHEMA, SINGLE_SIDE_SCHEMA = ", ".join(_SIDE), ", ".join(_SIDE[:-1])
SPEC_SCHEMA = ", ".join(_schema(AttentionSpec))
WANTED_SCHEMA, SINGLE_WANTED_SCHEMA = ", ".join(_WANTED), ", ".join(_WANTED[:-1])
#: The gradients of single tensors.
GRADIENTS_SCHEMA = ", ".join(f"Tensor d{name}" for name in Gradients._fields[:-1])

# The ends of the side inputs and of the spec in the flat argument lists of the schemas.
SIDE = len(SideInputs._fields)
SPEC = SIDE + len(AttentionSpec._fields)
# The places of single side inputs that may want a gradient.
LEARNED = tuple(SideInputs._fields.index(name) for name in Wanted._fields[:-1])
#: The side inputs that are a tensor each, in the order of `side_tensors`; captured tensors follow there.
SINGLE = tuple(name for name in SideInputs._fields[:-1] if name not in ("max_seqlen_q", "max_seqlen_k"))

#: The tensors of a call beside q, k and v, in the order of `side_tensors`; those that there are.
Aux = tuple[Tensor, ...]


def side_tensors(side: SideInputs) -> tuple[Tensor | None, ...]:
    """The side inputs without the two lengths among them."""
    single: tuple[Any, ...] = side[:2] + side[4:-1]
    return single + side.captured


def saved_side(saved: Sequence[Tensor | None], max_seqlens: tuple[int, int]) -> SideInputs:
    """The side inputs from their `side_tensors` and lengths. Nothing is saved of a call without such tensors."""
    if not saved:
        return SideInputs(None, None, *max_seqlens)
    rest: list[Any] = [*saved[2 : SIDE - 3], tuple(saved[SIDE - 3 :])]
    return SideInputs(saved[0], saved[1], *max_seqlens, *rest)


class AuxForm(NamedTuple):
    """A call's side inputs without tensors: `places` of those of `Aux` in `side_tensors`, and `max_seqlens`."""

    places: tuple[int, ...]
    max_seqlens: tuple[int, int]

    @classmethod
    def from_side(cls, side: SideInputs) -> AuxForm:
        places = (place for place, tensor in enumerate(side_tensors(side)) if tensor is not None)
        return cls(tuple(places), (side.max_seqlen_q, side.max_seqlen_k))

    def side(self, aux: Sequence[Tensor]) -> SideInputs:
        """The side inputs with these tensors."""
        if not aux:
            return SideInputs(None, None, *self.max_seqlens)
        tensors: list[Tensor | None] = [None] * max(len(SINGLE), self.places[-1] + 1)
        for place, tensor in zip(self.places, aux, strict=True):
            tensors[place] = tensor
        return saved_side(tensors, self.max_seqlens)


def flat(side: SideInputs, scalars: Sequence, backend: str) -> tuple:
    """Side inputs, scalars and backend as arguments of an autograd.Function, which sees only tensors that are arguments
    themselves: captured tensors come one by one at the end."""
    return (*side[:-1], None, *scalars, backend, *side.captured)


def unflatten_backward(
    arguments: Sequence,
) -> tuple[Sequence[Tensor], SideInputs, AttentionSpec, Wanted, str]:
    """The tensors in front of the side inputs, and the rest of the backward's arguments: an operator's, or `flat`."""
    tensors, rest = arguments[:7], arguments[7:]
    after = SPEC + len(Wanted._fields)
    side, spec, backend = unflatten((*rest[:SPEC], *rest[after:]))
    *single, captured = rest[SPEC:after]
    if isinstance(captured, int):
        captured = [bool(captured >> place & 1) for place in range(len(side.captured))]
    wanted = Wanted(*single)._replace(captured=tuple(captured))
    return tensors, side, spec, wanted, backend


def unflatten(rest: Sequence) -> tuple[SideInputs, AttentionSpec, str]:
    """Side inputs, spec and backend as objects: from an operator's arguments, or `flat`."""
    spec = AttentionSpec(*rest[SIDE:SPEC])
    if spec.block_shape is not None:
        batch, heads, tile_q, tile_k = spec.block_shape
        spec = spec._replace(block_shape=(batch, heads, tile_q, tile_k))  # the dispatcher passes a list
    if spec.origin is not None:
        spec = spec._replace(origin=Origin(*spec.origin))
    captured = rest[SPEC + 1 :] if rest[SIDE - 1] is None else rest[SIDE - 1]
    side = SideInputs(*rest[:SIDE])._replace(captured=tuple(captured))
    return side, spec, rest[SPEC]
