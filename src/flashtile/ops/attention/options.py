"""The optional arguments that functions of attention share, and the canonical form of a call with them: its spec and
auxiliary tensors.

Each argument has its name, type and default once. `attention` and `attention_varlen`, whose host time counts, name each
argument, and say what it means. The other functions take `**options: Unpack[...]`, which type checkers and editors
read, with a class of this file. `with_options` lets `help` and `inspect.signature` show the arguments by name, and
`take` gives their values or defaults.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple, TypedDict, TypeVar

import torch
from torch import Tensor

from flashtile.ops.attention import checks, select
from flashtile.ops.attention.block_mask import BlockMask
from flashtile.ops.attention.philox import draw_dropout_seed
from flashtile.ops.attention.score_arguments import add_score_mod, check_derivative
from flashtile.ops.attention.score_program import ScoreFunction
from flashtile.ops.attention.spec import FP8, AttentionSpec, SideInputs
from flashtile.ops.common.batch_invariance import MODE, check_attention
from flashtile.ops.common.checks import (
    check_choice,
    check_lengths,
    check_max_seqlen,
    check_tensors,
    raise_not_bool,
    resolve_alibi_slopes,
    resolve_scale,
    resolve_sinks,
    resolve_softcap,
    resolve_window,
)
from flashtile.ops.common.checks import resolve_dropout as checked_dropout
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


class PackedOptions(Options, total=False):
    """Arguments of `attention_varlen` that say how it computes."""

    max_seqlen_q: int | None
    max_seqlen_k: int | None


class ExplainOptions(PackedOptions, total=False):
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

    @property
    def modifiers(self) -> tuple[Any, ...]:
        """What changes or hides scores, or belongs to inputs of 8 bits."""
        return (
            self.bias, self.mask, self.alibi_slopes, self.sinks, self.block_mask, self.score_mod,
            self.descale_q, self.descale_k, self.descale_v,
        )  # fmt: skip


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


DENSE_LAYOUT = ("batch", "seq", "heads", "head_dim")
PACKED_LAYOUT = ("total", "heads", "head_dim")
ALIGNMENTS = ("bottom_right", "top_left")

#: A scale below it might be 0 in float32, in which scores are computed, and hidden ones times 0 are NaN; so it is one
#: of 0, for which backends are made.
_LEAST_SCALE = 2.0**-126


def checked_qkv(
    q: Tensor, k: Tensor, v: Tensor, layout: tuple[str, ...], eight_bits: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    """q, k and v after the checks of their shapes, dtypes and devices, under autocast in its dtype."""
    try:
        q, k, v = checks.autocast(q, k, v)
        checks.check_qkv(q, k, v, layout, eight_bits)
    except AttributeError:
        # Looked into only now, so that a call with tensors does not pay for it.
        check_tensors(q=q, k=k, v=v)
        raise
    checks.warn_swapped_layout(q, layout)
    return q, k, v


def resolve_call(
    q: Tensor, k: Tensor, v: Tensor, given: Taken, cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None, dropout: tuple[float, Tensor | None] = (0.0, None),
) -> tuple[SideInputs, AttentionSpec]:  # fmt: skip
    """The canonical form of a call whose q, k and v are checked, packed if it has cu_seqlens_q. `dropout`: probability
    and seed, checked."""
    side, batch = resolve_lengths(q, k, cu_seqlens_q, cu_seqlens_k, given)
    spec = make_spec(q, given, dropout[0])
    return add_scores(side._replace(dropout_seed=dropout[1]), spec, q, k, v, batch, given)


def make_spec(q: Tensor, given: Taken, dropout_p: float) -> AttentionSpec:
    """The spec of a call, without modifiers. `dropout_p`: as it was checked."""
    check_choice("align", given.align, ALIGNMENTS, "'bottom_right' ends the diagonal at the last key")
    select.BACKENDS.check(given.backend)
    raise_not_bool(causal=given.causal, deterministic=given.deterministic, batch_invariant=given.batch_invariant)
    left, right = resolve_window(given.causal, given.window)
    scale = representable_scale(resolve_scale(given.scale, q.shape[-1], q.dtype), q.dtype)
    softcap = resolve_softcap(given.softcap, scale, q.dtype)
    invariant = given.batch_invariant or MODE.enabled
    if invariant:
        check_attention(q.dtype, dropout_p)
    return AttentionSpec(
        scale, left, right, given.align == "top_left", dropout_p, softcap=softcap, batch_invariant=invariant,
        deterministic=given.deterministic or invariant or deterministic_mode(),
        returns_max_scores=given.return_max_scores,
    )  # fmt: skip


def deterministic_mode() -> bool:
    """Whether the program asked all of PyTorch for results that are the same in every run."""
    return torch.are_deterministic_algorithms_enabled()


def representable_scale(scale: float, dtype: torch.dtype) -> float:
    """0 for a scale that float32 flushes."""
    return 0.0 if -_LEAST_SCALE < scale < _LEAST_SCALE and dtype is not torch.float64 else scale


def resolve_lengths(
    q: Tensor, k: Tensor, cu_seqlens_q: Tensor | None, cu_seqlens_k: Tensor | None, given: Taken
) -> tuple[SideInputs, int]:
    """The lengths of a call, and how many batch entries or sequences it has."""
    if cu_seqlens_q is None:
        of_packed = {
            "cu_seqlens_k": cu_seqlens_k, "max_seqlen_q": given.max_seqlen_q, "max_seqlen_k": given.max_seqlen_k
        }  # fmt: skip
        for name, argument in of_packed.items():
            if argument is not None:
                raise ValueError(
                    f"{name}: expected it beside cu_seqlens_q only, got {argument!r}; leave it out of a dense call"
                )
        batch, each = q.shape[0], "batch entry"
    else:
        cu_seqlens_k = cu_seqlens_q if cu_seqlens_k is None else cu_seqlens_k
        batch, each = checks.check_cu_seqlens(cu_seqlens_q, cu_seqlens_k, q.device), "sequence"
        check_max_seqlen("max_seqlen_q", given.max_seqlen_q)
        check_max_seqlen("max_seqlen_k", given.max_seqlen_k)
    if given.key_lengths is not None:
        check_lengths("key_lengths", given.key_lengths, batch, q.device, f"one length for each {each}")
    longest_q = q.shape[-3] if given.max_seqlen_q is None else given.max_seqlen_q
    longest_k = k.shape[-3] if given.max_seqlen_k is None else given.max_seqlen_k
    return SideInputs(cu_seqlens_q, cu_seqlens_k, longest_q, longest_k, given.key_lengths), batch


def resolve_dropout(dropout_p: float, dropout_seed: Tensor | None, device: torch.device) -> tuple[float, Tensor | None]:
    """The probability as a float, and the seed that goes with it: None where nothing is dropped."""
    dropout_p = checked_dropout(dropout_p, dropout_seed, device)
    if not dropout_p:
        return 0.0, None
    return dropout_p, draw_dropout_seed(device) if dropout_seed is None else dropout_seed


def add_scores(
    side: SideInputs, spec: AttentionSpec, q: Tensor, k: Tensor, v: Tensor, batch: int, given: Taken
) -> tuple[SideInputs, AttentionSpec]:
    """Side inputs and spec with all that changes scores. `side` has the lengths of the call; `batch` counts its batch
    entries or packed sequences."""
    if q.dtype is not FP8 and all(modifier is None for modifier in given.modifiers):
        return side, spec
    packed = side.cu_seqlens_q is not None
    if packed and not (given.bias is given.mask is None and given.block_mask is None):
        checks.check_longest(given.max_seqlen_q, given.max_seqlen_k)
    sizes = 1 if packed else batch, q.shape[-2], side.max_seqlen_q, side.max_seqlen_k
    bias, mask, slopes, sinks = given.bias, given.mask, given.alibi_slopes, given.sinks
    side = side._replace(
        bias=None if bias is None else checks.resolve_bias(bias, sizes, q),
        mask=None if mask is None else checks.resolve_mask(mask, sizes, q.device),
        alibi_slopes=None if slopes is None else resolve_alibi_slopes(slopes, batch, sizes[1], q),
        sinks=None if sinks is None else resolve_sinks(sinks, sizes[1], q),
    )
    if given.block_mask is not None:
        blocks = given.block_mask
        checks.check_block_mask(blocks, q, (batch, *sizes[1:]))
        side = side._replace(block_lists=blocks.lists, block_patterns=blocks.tile_masks)
        spec = spec._replace(block_shape=(*blocks.shape[:2], *blocks.tile))
    if given.score_mod is not None:
        side, spec = add_score_mod(side, spec, q, given.score_mod)
        check_derivative(side, spec, q, k, v)
    if q.dtype is FP8 or not (given.descale_q is given.descale_k is given.descale_v is None):
        factors = {"descale_q": given.descale_q, "descale_k": given.descale_k, "descale_v": given.descale_v}
        resolved: dict[str, Any] = {
            name: checks.resolve_descale(name, factor, batch, k.shape[-2], q)
            for name, factor in factors.items()
            if factor is not None
        }
        side = side._replace(**resolved)
        checks.check_forward_only(q, k, v, side)
    return side, spec
