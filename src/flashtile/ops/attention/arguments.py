"""A call as the flat arguments of operators and autograd functions: schemas, and the way there and back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import Tensor

from flashtile.ops.attention.spec import AttentionSpec, AuxInputs, Gradients, Origin, SideInputs, Wanted

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
    """The form of a call's side inputs, without the tensors.

    Attributes:
        places: where each tensor of `Aux` is in `side_tensors`.
        max_seqlens: as in `SideInputs`.
    """

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
