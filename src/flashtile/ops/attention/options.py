"""The optional arguments that functions of attention share: their names and types once, and their defaults once.

`attention` and `attention_varlen`, whose host time counts, name each argument, and say what it means. The other
functions take `**options: Unpack[...]`, which type checkers and editors read, with a class of this file. `with_options`
lets `help` and `inspect.signature` show the arguments by name, and `take` gives their values or defaults.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple, TypedDict, TypeVar

from torch import Tensor

from flashtile.ops.attention.block_mask import BlockMask
from flashtile.ops.attention.score_program import ScoreFunction
from flashtile.ops.common.other_names import refuse_other_names

Align = Literal["bottom_right", "top_left"]
Window = tuple[int | None, int | None]
#: `(score, batch, head, q_index, k_index) -> score`, scalars each.
ScoreMod = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor] | ScoreFunction
Function = TypeVar("Function", bound=Callable[..., Any])


class ScoreOptions(TypedDict, total=False):
    """Options that decide the softmax weights."""

    causal: bool
    align: Align
    window: Window | None
    scale: float | None
    key_lengths: Tensor | None
    softcap: float | None
    bias: Tensor | None
    alibi_slopes: Tensor | None
    mask: Tensor | None


class PartOptions(ScoreOptions, total=False):
    """Options of `attention_part`."""

    dropout_p: float
    dropout_seed: Tensor | None
    deterministic: bool
    backend: str
    block_mask: BlockMask | None
    score_mod: ScoreMod | None


class AttentionOptions(PartOptions, total=False):
    """The optional arguments that `attention`, its parts and context parallelism share, as a type for functions that
    hand them on. Their meaning and defaults are those of `flashtile.attention`."""

    sinks: Tensor | None


class Options(AttentionOptions, total=False):
    """Arguments of both `attention` and `attention_varlen`, except for those that say what a call returns."""

    descale_q: Tensor | None
    descale_k: Tensor | None
    descale_v: Tensor | None
    batch_invariant: bool


class DenseOptions(Options, total=False):
    """Options of `attention`."""


class PackedOptions(Options, total=False):
    """Options of `attention_varlen` that say how it computes."""

    max_seqlen_q: int | None
    max_seqlen_k: int | None


class VarlenOptions(PackedOptions, total=False):
    """Options of `attention_varlen`."""

    block_table: Tensor | None


class ExplainOptions(DenseOptions, PackedOptions, total=False):
    """Options of `explain`."""

    return_lse: bool
    return_max_scores: bool


class ProbsOptions(ScoreOptions, total=False):
    """Options of `attention_probs`."""

    dropout_p: float
    dropout_seed: Tensor | None
    block_mask: BlockMask | None
    score_mod: ScoreMod | None
    sinks: Tensor | None


class ColumnSumsOptions(ScoreOptions, total=False):
    """Options of `attention_column_sums`."""

    max_seqlen_q: int | None
    max_seqlen_k: int | None
    block_mask: BlockMask | None
    backend: str


class Taken(NamedTuple):
    """The values of a call's options, with the defaults of those that it does not give."""

    causal: bool = False
    align: Align = "bottom_right"
    window: Window | None = None
    scale: float | None = None
    key_lengths: Tensor | None = None
    softcap: float | None = None
    bias: Tensor | None = None
    alibi_slopes: Tensor | None = None
    mask: Tensor | None = None
    dropout_p: float = 0.0
    dropout_seed: Tensor | None = None
    deterministic: bool = False
    backend: str = "auto"
    sinks: Tensor | None = None
    descale_q: Tensor | None = None
    descale_k: Tensor | None = None
    descale_v: Tensor | None = None
    block_mask: BlockMask | None = None
    max_seqlen_q: int | None = None
    max_seqlen_k: int | None = None
    return_lse: bool = False
    return_max_scores: bool = False
    score_mod: ScoreMod | None = None
    batch_invariant: bool = False

    @property
    def by_distance(self) -> bool:
        """As `SideInputs.by_distance`."""
        return self.alibi_slopes is not None


def take(function: Callable[..., Any], options: Mapping[str, Any], names: frozenset[str]) -> Taken:
    """The values of a call's options.

    Raises:
        TypeError: the function has no argument of such a name.
    """
    others = [name for name in options if name not in names]
    if others:
        refuse_other_names(function, others)
    return Taken(**options)


def option_names(options: type) -> frozenset[str]:
    """The names of the arguments in one of the classes of this file."""
    return frozenset(options.__annotations__)


def with_options(options: type) -> Callable[[Function], Function]:
    """Gives a function whose last parameter is `**options` the signature that names each of them."""

    def named(function: Function) -> Function:
        own = [*inspect.signature(function).parameters.values()][:-1]
        keyword, defaults = inspect.Parameter.KEYWORD_ONLY, Taken._field_defaults
        shared = [
            inspect.Parameter(name, keyword, default=defaults[name], annotation=_written(kind))
            for name, kind in options.__annotations__.items()
        ]
        signature = inspect.signature(function).replace(parameters=[*own, *shared])
        function.__signature__ = signature  # type: ignore[attr-defined]
        return function

    return named


def _written(kind: Any) -> str:
    """A type as the sources write it."""
    return str(getattr(kind, "__forward_arg__", kind))
