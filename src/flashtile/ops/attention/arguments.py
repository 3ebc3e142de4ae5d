"""A call as the flat arguments of operators and autograd functions: schemas, and the way there and back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from flashtile.ops.attention.spec import AttentionSpec, Origin, SideInputs, Wanted

SINGLE_SIDE_SCHEMA = (
    "Tensor? cu_seqlens_q, Tensor? cu_seqlens_k, SymInt max_seqlen_q, SymInt max_seqlen_k, "
    "Tensor? key_lengths, Tensor? dropout_seed, Tensor? bias, Tensor? mask, Tensor? alibi_slopes, Tensor? sinks, "
    "Tensor? block_lists, Tensor? block_patterns, Tensor? descale_q, Tensor? descale_k, Tensor? descale_v"
)
SIDE_SCHEMA = f"{SINGLE_SIDE_SCHEMA}, Tensor[] captured"
SPEC_SCHEMA = (
    "float scale, int? window_left, int? window_right, bool top_left, float dropout_p, bool deterministic, "
    "float softcap, int[]? block_shape, int[]? origin, bool returns_max_scores, str? score_program"
)

# Where the side inputs end and the spec ends in the flat argument lists of the schemas.
SIDE = len(SideInputs._fields)
SPEC = SIDE + len(AttentionSpec._fields)
# Where those single side inputs stand that may want a gradient.
LEARNED = tuple(SideInputs._fields.index(name) for name in Wanted._fields[:-1])


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
    """Side inputs, spec and backend as objects: given as those, as an operator's arguments, or `flat`."""
    if len(rest) == 3:
        return tuple(rest)
    spec = AttentionSpec(*rest[SIDE:SPEC])
    if spec.block_shape is not None:
        batch, heads, tile_q, tile_k = spec.block_shape
        spec = spec._replace(block_shape=(batch, heads, tile_q, tile_k))  # the dispatcher passes a list
    if spec.origin is not None:
        spec = spec._replace(origin=Origin(*spec.origin))
    captured = rest[SPEC + 1 :] if rest[SIDE - 1] is None else rest[SIDE - 1]
    side = SideInputs(*rest[:SIDE])._replace(captured=tuple(captured))
    return side, spec, rest[SPEC]
