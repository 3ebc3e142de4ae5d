"""Writes the steps of a score program as lines of Triton source, which is Gluon source too. Strings only: no Triton
here. Reads that stay within their tensors need no checks, so the ranges of a program's integers are found first."""

from __future__ import annotations

import math
from collections.abc import Container, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flashtile.ops.attention.call import Call
from flashtile.ops.attention.intervals import Range, number_range, operation_range
from flashtile.ops.attention.score_program import (
    CAST,
    CONSTANT,
    INPUTS,
    LOAD,
    UPSTREAM,
    ScoreProgram,
    Step,
    is_value,
    named_steps,
)

#: Values past it may have wrapped around.
_LARGEST = 2**31 - 1


class ScoreBounds(NamedTuple):
    """How many batch entries, heads, queries and keys there are, and the shapes of the captured tensors. If a plan
    has them, no tile ends past the queries and keys."""

    batch: int
    heads: int
    rows_q: int
    rows_k: int
    shapes: tuple[tuple[int, ...], ...]


def score_bounds(call: Call) -> ScoreBounds:
    """The bounds of a dense call whose tiles divide it."""
    captured = tuple(of.shape for of in call.aux.captured)
    return ScoreBounds(call.batch, call.heads, call.rows_q, call.rows_k, captured)


def ranges(program: ScoreProgram, bounds: ScoreBounds) -> dict[str, tuple[int, int]]:
    """The least and the greatest value of integers of which they are known, by the names of the values."""
    known = {name: Range(_tensor(0), _tensor(count - 1)) for name, count in zip(INPUTS[1:], bounds[:4])}
    for name, step in named_steps(program.steps).items():
        if step.dtype not in ("int32", "int64") or step.keywords:
            continue
        given = [known.get(each) if is_value(each) else number_range(each) for each in step.arguments]
        found = given[0] if step.operation in (CONSTANT, CAST) else operation_range(step, given)
        if found is not None and -_LARGEST <= found.least and found.most <= _LARGEST:
            known[name] = found
    return {name: (int(of.least), int(of.most)) for name, of in known.items()}


def _tensor(number: int) -> Tensor:
    return torch.full((1, 1), number, dtype=torch.int32, device="cpu")


_TYPES = {
    "float16": "tl.float16", "bfloat16": "tl.bfloat16", "float32": "tl.float32", "float64": "tl.float64",
    "bool": "tl.int1", "uint8": "tl.uint8", "int8": "tl.int8", "int16": "tl.int16", "int32": "tl.int32",
    "int64": "tl.int64",
}  # fmt: skip

_SCORE, _BATCH, _HEAD, _Q_INDEX, _K_INDEX = INPUTS

#: Expressions of operations with one argument of floating point.
_OF_ONE = {
    "abs": "tl.abs({0})", "neg": "-{0}", "exp": "tl.exp({0})", "exp2": "tl.exp2({0})", "log": "tl.log({0})",
    "log2": "tl.log2({0})", "sqrt": "tl.sqrt({0})", "rsqrt": "1.0 / tl.sqrt({0})", "sin": "sine({0}, 0)",
    "cos": "sine({0}, 1)", "tanh": "hyperbolic_tangent({0}, True)", "sigmoid": "1.0 / (1.0 + tl.exp(-{0}))",
    "erf": "tl.erf({0})", "floor": "tl.floor({0})", "ceil": "tl.ceil({0})", "reciprocal": "1.0 / {0}",
    "square": "{0} * {0}", "relu": "tl.where({0} < 0, 0.0, {0})", "silu": "{0} / (1.0 + tl.exp(-{0}))",
    "sgn": "tl.where({0} > 0, 1.0, tl.where({0} < 0, -1.0, 0.0))",
    "sign": "tl.where({0} > 0, 1.0, tl.where({0} < 0, -1.0, 0.0))",
}  # fmt: skip

#: The same of integers.
_OF_ONE_INTEGER = {
    "abs": "tl.abs({0})", "neg": "-{0}", "square": "{0} * {0}", "relu": "tl.where({0} < 0, 0, {0})",
    "floor": "{0}", "ceil": "{0}", "bitwise_not": "~{0}",
    "sgn": "tl.where({0} > 0, 1, tl.where({0} < 0, -1, 0))", "sign": "tl.where({0} > 0, 1, tl.where({0} < 0, -1, 0))",
}  # fmt: skip

#: Functions of arguments in the dtype of the result.
_OF_MORE = {
    "add": "{0} + {1}", "sub": "{0} - {1}", "rsub": "{1} - {0}", "mul": "{0} * {1}",
    "maximum": "tl.maximum({0}, {1})", "minimum": "tl.minimum({0}, {1})",
    "clamp_min": "tl.maximum({0}, {1})", "clamp_max": "tl.minimum({0}, {1})",
    "bitwise_and": "{0} & {1}", "bitwise_or": "{0} | {1}", "bitwise_xor": "{0} ^ {1}",
    "logical_and": "{0} & {1}", "logical_or": "{0} | {1}", "logical_xor": "{0} ^ {1}",
    "tanh_backward": "{0} * (1.0 - {1} * {1})", "sigmoid_backward": "{0} * ({1} * (1.0 - {1}))",
    "threshold_backward": "tl.where({1} <= {2}, 0.0, {0})",
}  # fmt: skip

_COMPARISONS = {"eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">="}
_LARGEST_POWER = 8
_MOST_SUMMANDS = 16


class UnsupportedOperationError(Exception):
    """A program has an operation that the kernels lack. The message is its name."""


class ScoreWriter:
    """Writes a program line by line.

    Attributes:
        lines: one or more for each step.
        checks: names of what says whether a read lies within its tensor. None where `bounds` say that it does.

    Args:
        given: names of loads that are in the tuple `reads`, in its order.
        only: names of the values that are wanted; None = all.
        names: of arguments of the function in the source, where they are not their own.
        prefix: of the names of results in the source.
    """

    def __init__(
        self,
        program: ScoreProgram,
        bounds: ScoreBounds | None = None,
        given: Sequence[str] = (),
        only: Container[str] | None = None,
        names: Mapping[str, str] | None = None,
        prefix: str = "v",
    ) -> None:
        self.program = program
        self._names, self._prefix = names or {}, prefix
        self._given = {name: f"reads[{place}]" for place, name in enumerate(given)}
        self._shapes = () if bounds is None else bounds.shapes
        self._ranges = {} if bounds is None else ranges(program, bounds)
        self.lines: list[str] = []
        self.checks: list[str] = []
        self._dtypes = dict.fromkeys(INPUTS, "int32") | dict.fromkeys((_SCORE, UPSTREAM), "float32")
        self._inputs = program.value_inputs
        for number, step in enumerate(program.steps):
            name = f"%{number}"
            self._dtypes[name] = step.dtype
            if only is not None and name not in only:
                continue
            if step.operation == LOAD:
                self._load(number, step)
            else:
                self.lines.append(f"{self.value_name(name)} = {self._expression(step)}")

    def value_name(self, value: str) -> str:
        return f"{self._prefix}{value[1:]}" if value[1:].isdigit() else self._names.get(value, value[1:])

    def argument_inputs(self, value: str) -> frozenset[str]:
        """The arguments of the function that a value depends on."""
        return self._inputs[value]

    def place(self, captured: int, indices: Sequence[str], name: str) -> tuple[list[str], str, str]:
        """Lines that find an entry of a captured tensor, its offset, and whether it is one."""
        lines, inside, offset = [], [], ""
        for dim, index in enumerate(indices):
            size, at, given = f"sizes.size{captured}_{dim}", f"{name}_{dim}", self.value_name(index)
            lines.append(f"{at} = tl.where({given} < 0, {given} + {size}, {given})")
            inside.append(f"({at} >= 0) & ({at} < {size})")
            offset = f"({offset} * {size} + {at})" if offset else at
        lines.append(f"{name}_inside = {' & '.join(inside)}")
        return lines, offset, f"{name}_inside"

    def _stays_within(self, captured: int, indices: Sequence[str]) -> bool:
        """Whether all indices are known to lie in their dimension, counted from its start."""
        found = [self._ranges.get(index) for index in indices]
        return bool(self._shapes) and all(
            each is not None and each[0] >= 0 and each[1] < size
            for each, size in zip(found, self._shapes[captured], strict=True)
        )

    def _offsets(self, captured: int, indices: Sequence[str]) -> list[str]:
        """Parts of the offset of an entry in 64 bits: what all scores of the tile share, then what its rows or columns
        do. A thread then has an address for each row, and constants beside it."""
        parts: dict[int, list[str]] = {}
        for dim, index in enumerate(indices):
            strides = [f" * sizes.size{captured}_{after}" for after in range(dim + 1, len(indices))]
            for sign, value in self._summands(index):
                for shared, term in self._wide(value):
                    parts.setdefault(shared, []).append(f"{sign} {term}{''.join(strides)}")
        return ["".join(f" {each}" for each in parts[shared]) for shared in sorted(parts)]

    def _summands(self, value: str) -> list[tuple[str, str]]:
        """Values whose signed sum an index is, until each belongs to rows, columns, or neither."""
        found: list[tuple[str, str]] = []
        rest = [("+", value)]
        while rest:
            sign, value = rest.pop()
            terms = self._terms(sign, value) if len(found) + len(rest) < _MOST_SUMMANDS else None
            if terms is None:
                found.append((sign, value))
            else:
                rest += reversed(terms)
        return found

    def _terms(self, sign: str, value: str) -> list[tuple[str, str]] | None:
        """The two terms of a sum that depends on rows and columns, with their signs."""
        if not is_value(value) or not {_Q_INDEX, _K_INDEX} <= self.argument_inputs(value):
            return None
        step = self.program.steps[int(value[1:])]
        other = "-" if sign == "+" else "+"
        signs = {"add": (sign, sign), "sub": (sign, other), "rsub": (other, sign)}.get(step.name)
        if signs is None or len(step.arguments) != 2 or step.keywords:
            return None
        return list(zip(signs, map(str, step.arguments)))

    def _wide(self, value: str) -> list[tuple[int, str]]:
        """Terms of 64 bits that add up to a value, each with how much of a tile it differs in."""
        if value in (_Q_INDEX, _K_INDEX):
            first = "first_q" if value == _Q_INDEX else "first_k"
            name = self.value_name(value)
            return [
                (0, f"tl.cast({first}, tl.int64)"),
                (1 + (value == _K_INDEX), f"tl.cast({name} - {first}, tl.int64)"),
            ]
        if not is_value(value):
            return [(0, value if not value.startswith("-") else f"({value})")]
        inputs = self.argument_inputs(value)
        return [((_Q_INDEX in inputs) + 2 * (_K_INDEX in inputs), f"tl.cast({self.value_name(value)}, tl.int64)")]

    def _load(self, number: int, step: Step) -> None:
        captured, *indices = step.arguments
        name, pointer = self.value_name(f"%{number}"), f"captured.tensor{captured}"
        given = self._given.get(f"%{number}")
        within = self._stays_within(captured, indices)
        if indices and not within:
            lines, offset, inside = self.place(captured, indices, f"at{number}")
            self.lines += lines
            self.checks.append(inside)
        if given is not None:
            self.lines.append(f"{name} = {given}")
            return
        if indices and within:
            for part in self._offsets(captured, indices):
                self.lines.append(f"{name} = {pointer} + ({part.strip().removeprefix('+ ')})")
                pointer = name
            self.lines.append(f"{name} = tl.load({pointer})")
        elif indices:
            self.lines.append(f"{name} = tl.load({pointer} + {offset}, mask={inside}, other=0)")
        else:
            self.lines.append(f"{name} = tl.load({pointer})")
        if step.dtype == "bool":
            self.lines.append(f"{name} = {name} != 0")

    def _expression(self, step: Step) -> str:
        if step.operation == CONSTANT:
            return f"constant({_literal(step.arguments[0])}, {_TYPES[step.dtype]})"
        if step.operation == CAST:
            return self._cast(step.arguments[0], step.dtype)
        name = step.name
        computed = "float32" if step.dtype in ("float16", "bfloat16") else step.dtype
        expression = self._computed(name, step, computed)
        if expression is None:
            raise UnsupportedOperationError(step.operation)
        return expression if computed == step.dtype else f"({expression}).to({_TYPES[step.dtype]})"

    def _computed(self, name: str, step: Step, dtype: str) -> str | None:
        """The expression of an operation of PyTorch in a dtype; None for one that there is not."""
        keywords, arguments = dict(step.keywords), step.arguments
        if name in _COMPARISONS:
            common = self._common(arguments)
            first, second = (self._cast(argument, common) for argument in arguments)
            return f"{first} {_COMPARISONS[name]} {second}"
        if name in ("logical_not", "isnan") or (name == "bitwise_not" and dtype == "bool"):
            given = self._cast(arguments[0], self._common(arguments))
            return f"{given} != {given}" if name == "isnan" else f"{given} == 0"
        if name == "where":
            condition, chosen, other = arguments
            return f"tl.where({self._cast(condition, 'bool')}, {self._cast(chosen, dtype)}, {self._cast(other, dtype)})"
        if name == "masked_fill":
            kept, mask, value = arguments
            return f"tl.where({self._cast(mask, 'bool')}, {self._cast(value, dtype)}, {self._cast(kept, dtype)})"
        if name == "pow":
            return self._power(step, dtype)
        if name in ("div", "floor_divide", "remainder", "fmod"):
            rounding = {"floor_divide": "floor"}.get(name, keywords.get("rounding_mode"))
            if name == "div" and rounding is None and not is_value(arguments[1]) and arguments[1]:
                return f"{self._cast(arguments[0], dtype)} * {_literal(1 / arguments[1])}"  # as PyTorch does on a GPU
            first, second = (self._cast(argument, dtype) for argument in arguments)
            return _divided(name, rounding, first, second, "float" in dtype)
        if name == "clamp":
            given, low, high = (*arguments, None, keywords.get("max"))[:3]
            low = keywords.get("min", low)
            expression = self._cast(given, dtype)
            expression = expression if low is None else f"tl.maximum({expression}, {self._cast(low, dtype)})"
            return expression if high is None else f"tl.minimum({expression}, {self._cast(high, dtype)})"
        if name in ("add", "sub", "rsub"):
            first, second = (self._cast(argument, dtype) for argument in arguments[:2])
            alpha = keywords.get("alpha", arguments[2] if len(arguments) > 2 else 1)
            scaled = second if alpha == 1 else f"({_literal(alpha)} * {second})"
            return _OF_MORE[name].format(first, scaled)
        if keywords:
            return None
        cast = [self._cast(argument, dtype) for argument in arguments]
        if len(cast) == 1:
            return (_OF_ONE if "float" in dtype else _OF_ONE_INTEGER).get(name, "").format(*cast) or None
        return _OF_MORE[name].format(*cast) if name in _OF_MORE else None

    def _power(self, step: Step, dtype: str) -> str | None:
        base, exponent = step.arguments
        if is_value(base) and is_value(exponent):
            return None
        if not is_value(base):
            return f"tl.exp2({self._cast(exponent, dtype)} * {_literal(math.log2(base))})" if base > 0 else None
        given = self._cast(base, dtype)
        if float(exponent).is_integer() and 0 < abs(exponent) <= _LARGEST_POWER:
            product = " * ".join([given] * int(abs(exponent)))
            return product if exponent > 0 else f"1.0 / ({product})"
        if exponent in (0.5, -0.5):
            return _OF_ONE["sqrt" if exponent > 0 else "rsqrt"].format(given)
        return None

    def _common(self, arguments: Sequence[Any]) -> str:
        """The dtype in which PyTorch compares scalars."""
        found = [
            torch.empty((), dtype=getattr(torch, self._dtypes[a]), device="cpu") if is_value(a) else a
            for a in arguments
        ]
        common = found[0].dtype if len(found) == 1 else torch.result_type(*found)
        return str(common).removeprefix("torch.")

    def _cast(self, argument: Any, dtype: str) -> str:
        """An argument in a dtype: a name, or a number, which takes that of what it meets."""
        if not is_value(argument):
            return _literal(float(argument) if "float" in dtype else argument)
        name = self.value_name(argument)
        if self._dtypes[argument] == dtype:
            return name
        return f"({name} != 0)" if dtype == "bool" else f"tl.cast({name}, {_TYPES[dtype]})"


def _divided(name: str, rounding: str | None, first: str, second: str, floating: bool) -> str:
    """Division as PyTorch rounds it: remainders have the sign of the divisor."""
    if name == "fmod":
        return f"{first} % {second}"
    if name == "remainder":
        if floating:
            return f"{first} - tl.floor({first} / {second}) * {second}"
        return f"({first} % {second} + {second}) % {second}"
    if rounding is None:
        return f"{first} / {second}"
    if floating:
        quotient = f"{first} / {second}"
        return (
            f"tl.floor({quotient})"
            if rounding == "floor"
            else f"tl.where({quotient} < 0, tl.ceil({quotient}), tl.floor({quotient}))"
        )
    exact = f"{first} - ({first} % {second} + {second}) % {second}" if rounding == "floor" else first
    return f"({exact}) // {second}"


def _literal(value: Any) -> str:
    if isinstance(value, bool):
        return str(int(value))
    if isinstance(value, float) and not math.isfinite(value):
        return f'float("{value}")'
    return f"({value!r})" if value < 0 else repr(value)
