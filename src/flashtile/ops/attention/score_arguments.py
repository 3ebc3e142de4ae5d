"""A score function as side inputs and spec of a call: as the arguments that say the same, and as a program.

Kernels serve arguments faster, so a function is taken apart. A soft cap stands innermost, slopes and a bias are terms
of the sum that is the result::

    f(s) = softcap · tanh(s / softcap) - slope[b, h] · |i - j| + bias[b, h, i, j] + …

The rest, if anything, stays a function.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flashtile.ops.attention.score_program import (
    CAST,
    INPUTS,
    LOAD,
    UNCHANGED,
    ProgramBuilder,
    ScoreFunction,
    ScoreProgram,
    Step,
    apply,
    dtype_name,
    is_value,
    named_steps,
    parse,
)
from flashtile.ops.attention.score_tracing import derivative, resolve_score_mod, score_dtype
from flashtile.ops.attention.spec import AttentionSpec, SideInputs, out_dtype
from flashtile.ops.common.sizes import known

_SCORE, _BATCH, _HEAD, _Q_INDEX, _K_INDEX = INPUTS


def add_score_mod(
    side: SideInputs, spec: AttentionSpec, q: Tensor, score_mod: Callable[..., Any] | ScoreFunction
) -> tuple[SideInputs, AttentionSpec]:
    """Side inputs and spec of a call with a score function, beside its other arguments. The function is taken apart
    only if the call can take all parts that arguments say as well."""
    function = resolve_score_mod(score_mod, q)
    if torch.compiler.is_compiling():
        return add_program(side, spec, function)
    parts = function_parts(function.program, dtype_name(function.dtype))
    batch = q.shape[0] if side.cu_seqlens_q is None else side.cu_seqlens_q.shape[0] - 1
    sizes = dict(zip(INPUTS[1:], (batch, q.shape[-2], side.max_seqlen_q, side.max_seqlen_k)))
    if parts is None or not _can_be_arguments(parts, function, side, spec, q, sizes):
        return add_program(side, spec, function)
    if parts.softcap:
        spec = spec._replace(softcap=parts.softcap)
    if parts.slopes is not None:
        side = side._replace(alibi_slopes=_slopes(parts.slopes, function, q.device, batch, q.shape[-2]))
    if parts.bias is not None:
        side = side._replace(bias=_bias(parts.bias, function, sizes))
    rest = tuple(function.captured[number] for number in parts.captured)
    return add_program(side, spec, function._replace(program=parts.rest, captured=rest))


def add_program(side: SideInputs, spec: AttentionSpec, function: ScoreFunction) -> tuple[SideInputs, AttentionSpec]:
    """The same with the whole function as it is."""
    if function.program == UNCHANGED:
        return side, spec
    return side._replace(captured=function.captured), spec._replace(score_program=function.program)


def check_derivative(side: SideInputs, spec: AttentionSpec, q: Tensor, k: Tensor, v: Tensor) -> None:
    """Refuses a function that has no derivative where a backward will ask for it."""
    if spec.score_program is None or not torch.is_grad_enabled() or torch.compiler.is_compiling():
        return
    of_captured = any(tensor.requires_grad for tensor in side.captured)
    if of_captured or q.requires_grad or k.requires_grad or v.requires_grad:
        derivative(spec.score_program, score_dtype(q), of_score_alone=not of_captured)


def _can_be_arguments(
    parts: Parts, function: ScoreFunction, side: SideInputs, spec: AttentionSpec, q: Tensor, sizes: dict[str, int]
) -> bool:
    """Whether the call has none of the arguments that parts become, and they mean what the function does. `sizes`: how
    far each index of the function counts."""
    slopes, bias = parts.slopes, parts.bias
    if (parts.softcap and spec.softcap) or (slopes and side.by_distance) or (bias and side.bias is not None):
        return False
    if slopes is not None:
        # ALiBi's distance counts from the last query and key.
        same_lengths = side.cu_seqlens_q is side.cu_seqlens_k and (
            side.packed or known(side.max_seqlen_q == side.max_seqlen_k)
        )
        no_later_key = spec.window_right is not None and spec.window_right <= 0
        if not same_lengths or (slopes.below_diagonal and not no_later_key):
            return False
    if bias is None:
        return True
    tensor = function.captured[bias.captured]
    has_all = all(known(size >= sizes[index]) for size, index in zip(tensor.shape, bias.indices))
    return not side.packed and tensor.dtype in (out_dtype(q.dtype), function.dtype) and has_all


def _slopes(slopes: Slopes, function: ScoreFunction, device: torch.device, batch: int, heads: int) -> Tensor:
    """`[heads]`, or `[batch, heads]`."""
    captured = [function.captured[number] for number in slopes.captured]
    program = parse(slopes.program)
    steps = [(step.operation, step.arguments) for step in program.steps]
    if steps == [(LOAD, (0, _HEAD))] and captured[0].shape == (heads,) and captured[0].dtype is function.dtype:
        return captured[0]
    of_batch = torch.arange(batch if slopes.by_batch else 1, dtype=torch.int32, device=device)[:, None]
    of_head = torch.arange(heads, dtype=torch.int32, device=device)[None]
    no_score = torch.zeros(len(of_batch), heads, dtype=function.dtype, device=device)
    inputs = dict(zip(INPUTS, (no_score, of_batch, of_head, of_batch, of_batch)))
    found = apply(program, inputs, captured).to(function.dtype)
    return found if slopes.by_batch else found[0]


def _bias(table: Table, function: ScoreFunction, sizes: dict[str, int]) -> Tensor:
    """`[batch | 1, heads | 1, seq_q | 1, seq_k | 1]`, a view of the tensor."""
    order = sorted(range(len(table.indices)), key=lambda dimension: list(sizes).index(table.indices[dimension]))
    found = function.captured[table.captured].permute(order)
    for dimension, (index, size) in enumerate(sizes.items()):
        found = found.narrow(dimension, 0, size) if index in table.indices else found.unsqueeze(dimension)
    return found


class Slopes(NamedTuple):
    """ALiBi's slopes as a function of batch entry and head.

    Attributes:
        program: computes them; it changes nothing but the score, and ignores that.
        captured: numbers of the captured tensors that it reads, in its order.
        by_batch: they depend on the batch entry.
        below_diagonal: the distance is `i - j`, which is `|i - j|` only where no query sees a later key.
    """

    program: str
    captured: tuple[int, ...]
    by_batch: bool
    below_diagonal: bool


class Table(NamedTuple):
    """A bias: the number of a captured tensor, and for each of its dimensions the index that it is read by."""

    captured: int
    indices: tuple[str, ...]


class Parts(NamedTuple):
    """A score function taken apart.

    Attributes:
        softcap: 0 for none.
        slopes, bias: None for none.
        rest: the program of what is left, as text.
        captured: numbers of the captured tensors that the rest reads, in its order.
    """

    softcap: float
    slopes: Slopes | None
    bias: Table | None
    rest: str
    captured: tuple[int, ...]


@functools.lru_cache(maxsize=1024)
def function_parts(text: str, dtype: str) -> Parts | None:
    """The parts of a function, of each kind at most one; None where it has none. `dtype`: of the scores."""
    expression = _Expression(parse(text))
    slopes: Slopes | None = None
    bias: Table | None = None
    replaced: dict[str, str] = {}
    name = expression.program.results[0]
    while (found := expression.linear_terms(name, dtype)) is not None:
        scores, term, sign = found
        found_slopes = expression.slopes_in(term, sign, dtype) if slopes is None else None
        found_bias = expression.table_in(term) if bias is None and sign > 0 else None
        slopes, bias = found_slopes or slopes, found_bias or bias
        if found_slopes or found_bias:
            replaced[name] = scores
        name = scores
    softcap = expression.softcap_in(name)
    if softcap:
        replaced[name] = _SCORE
    if not replaced:
        return None
    rest, captured = expression.extracted(expression.program.results[0], replaced)
    return Parts(softcap, slopes, bias, rest, captured)


#: A distance times more coefficients than this stays a function.
_MOST_COEFFICIENTS = 16


class _Distance(NamedTuple):
    """`sign · |i - j|`, or `sign · (i - j)`, times the coefficients."""

    sign: int
    absolute: bool
    coefficients: tuple[Any, ...] = ()


class _Expression:
    """A program as a tree of values, each by its name."""

    def __init__(self, program: ScoreProgram) -> None:
        self.program = program
        self.steps = named_steps(program.steps)
        self.inputs = program.value_inputs

    def argument_inputs(self, arguments: Iterable[Any]) -> frozenset[str]:
        """The arguments of the function that values depend on."""
        return frozenset().union(*(self.inputs[argument] for argument in arguments if is_value(argument)))

    def step(self, name: Any, *operations: str) -> Step | None:
        """The step that makes a value, if it is one of these operations without options."""
        step = self.steps.get(name) if isinstance(name, str) else None
        return step if step is not None and step.name in operations and not step.keywords else None

    def linear_terms(self, name: str, dtype: str) -> tuple[str, Any, int] | None:
        """A value as what depends on the score, plus a term that does not: both, and the sign of the term."""
        step = self.step(name, "add", "sub")
        if step is None or step.dtype != dtype:
            return None
        first, second = step.arguments
        by_score = [_SCORE in self.argument_inputs([each]) for each in step.arguments]
        if by_score == [True, False]:
            return first, second, -1 if step.name == "sub" else 1
        return (second, first, 1) if by_score == [False, True] and step.name == "add" else None

    def softcap_in(self, name: str) -> float:
        """The cap, if a value is `cap · tanh(score / cap)`; else 0."""
        scaled = self.step(name, "mul")
        cap, capped = (None, None) if scaled is None else _number_first(scaled.arguments)
        tanh = self.step(capped, "tanh")
        divided = None if tanh is None else self.step(tanh.arguments[0], "div", "mul")
        if cap is None or cap <= 0 or divided is None:
            return 0.0
        if divided.name == "div":
            return float(cap) if divided.arguments == (_SCORE, cap) else 0.0
        factor, of = _number_first(divided.arguments)
        return float(cap) if of == _SCORE and factor is not None and abs(cap * factor - 1) < 1e-7 else 0.0

    def table_in(self, term: Any) -> Table | None:
        """The bias that a term is."""
        step = self.steps.get(term) if isinstance(term, str) else None
        if step is None or step.operation != LOAD:
            return None
        number, *indices = step.arguments
        places = set(indices)
        known = places <= set(INPUTS[1:]) and len(places) == len(indices)
        return Table(number, tuple(indices)) if known and places & {_Q_INDEX, _K_INDEX} else None

    def slopes_in(self, term: Any, sign: int, dtype: str) -> Slopes | None:
        """ALiBi's slopes, if `sign` times a term is minus a slope times the distance."""
        found = self.distances.get(term) if is_value(term) else None
        if found is None or self.argument_inputs(found.coefficients) & {_SCORE, _Q_INDEX, _K_INDEX}:
            return None
        builder = ProgramBuilder(self.program.steps)
        product: Any = 1.0
        for coefficient in found.coefficients:
            value = builder.copied(coefficient)[0] if is_value(coefficient) else coefficient
            product = value if product == 1.0 else builder.step("aten.mul.Tensor", (product, value), dtype)
        if sign * found.sign > 0:  # a slope is subtracted
            product = builder.step("aten.mul.Tensor", (product, -1.0), dtype) if is_value(product) else -product
        if not is_value(product):
            product = builder.step("constant", (float(product),), dtype)
        by_batch = _BATCH in self.argument_inputs(found.coefficients)
        return Slopes(*self._finished(builder, product), by_batch, not found.absolute)

    @functools.cached_property
    def distances(self) -> dict[str, _Distance]:
        """The values that are the distance of query and key times coefficients. Each step is looked at once."""
        found: dict[str, _Distance] = {}
        for name, step in self.steps.items():
            distance = None if step.keywords else _distance(step, found)
            if distance is not None and len(distance.coefficients) <= _MOST_COEFFICIENTS:
                found[name] = distance
        return found

    def extracted(self, name: str, replaced: dict[str, str]) -> tuple[str, tuple[int, ...]]:
        """The program of a value as text, with some values replaced, and the captured tensors that it reads."""
        builder = ProgramBuilder(self.program.steps, replaced=replaced)
        return self._finished(builder, builder.copied(name)[0])

    def _finished(self, builder: ProgramBuilder, result: str) -> tuple[str, tuple[int, ...]]:
        captured = tuple(self.program.captured[number] for number in builder.captured)
        return ScoreProgram(captured, tuple(builder.steps), (result,)).text, tuple(builder.captured)


def _distance(step: Step, known: Mapping[str, _Distance]) -> _Distance | None:
    """A step as a distance times coefficients, from those of earlier steps."""
    if step.name == "sub" and set(step.arguments) == {_Q_INDEX, _K_INDEX}:
        return _Distance(1 if step.arguments[0] == _Q_INDEX else -1, absolute=False)
    if step.operation == CAST and step.dtype.startswith("float"):
        return known.get(step.arguments[0])
    if step.name in ("neg", "abs"):
        found = known.get(step.arguments[0])
        if found is None or step.name == "neg":
            return found and found._replace(sign=-found.sign)
        return None if found.coefficients else _Distance(1, absolute=True)
    if step.name == "mul":
        first, second = step.arguments
        for of, coefficient in ((first, second), (second, first)):
            found = known.get(of)
            if found is not None:
                return found._replace(coefficients=(*found.coefficients, coefficient))
    return None


def _number_first(arguments: tuple[Any, ...]) -> tuple[float | None, Any]:
    """A product of a number and a value, in this order; the number is None where there is none."""
    first, second = arguments
    if isinstance(first, (int, float)):
        return first, second
    return (second, first) if isinstance(second, (int, float)) else (None, first)
