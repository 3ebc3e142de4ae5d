"""Interval arithmetic: bounds of mask functions for whole tiles, and of what score functions index tensors by.

A mask function is traced into a program, as a score function is, and the program evaluated once for all tiles: each
value is then the least and the greatest number that it takes within a tile. Most tiles of a long mask are therefore
known to be empty or full before any pair is looked at. The result of an operation without a rule may be anything, and
so may that of a function that cannot be traced, which costs time and changes no result.

Reference:
    Moore, "Interval Analysis" (1966).
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flashtile.ops.attention.mask_sources import Predicate, on_device
from flashtile.ops.attention.score_program import (
    CAST,
    CONSTANT,
    INPUTS,
    LOAD,
    ScoreProgram,
    Step,
    is_value,
    named_steps,
)
from flashtile.ops.attention.score_symbols import Capturing, Recorder
from flashtile.ops.attention.tile_lists import Bounds, Tiles

#: Entries of a looked-up tensor of which only the least and the greatest are kept.
_ENTRIES_TOGETHER = 16


def tile_bounds(predicate: Predicate) -> Callable[[Tiles], Bounds]:
    """Returns a function that bounds all pairs of a tile at once, by interval arithmetic."""
    traced = functools.cache(functools.partial(_Traced.of, predicate))

    def bounds(tiles: Tiles) -> Bounds:
        device = tiles.batch.device
        function = traced(device)
        known = _truth(None if function is None else function.range(tiles))
        return Bounds(*(on_device(end, device) for end in (known.most, known.least)))

    return bounds


class Range(NamedTuple):
    """The least and greatest value in each of some tiles, `[rows, tiles_k]` or numbers; one object if equal."""

    least: Any
    most: Any

    @property
    def exact(self) -> bool:
        return self.least is self.most


def number_range(given: Any) -> Range | None:
    """The range of an argument of a step that names no value; None where it is no number."""
    return Range(given, given) if isinstance(given, (bool, int, float)) and given == given else None


def operation_range(step: Step, arguments: Sequence[Range | None]) -> Range | None:
    """The range of the result of an operation of PyTorch; None where nothing is known."""
    # PyTorch writes None for a bound that clamp does not have.
    given = [known for known, argument in zip(arguments, step.arguments) if argument is not None]
    name = "clamp_max" if step.name == "clamp" and step.arguments[1] is None else step.name
    rule = _RULES.get((name, len(given), *(keyword for keyword, _ in step.keywords)))
    try:
        return None if rule is None else rule(*given, **dict(step.keywords))
    except (OverflowError, RuntimeError):
        # PyTorch refuses some operations, such as subtracting a bool from a tensor, that `torch.vmap` serves.
        return None


def _truth(known: Range | None) -> Range:
    """The range of a bool."""
    return Range(False, True) if known is None else known


class _Traced(NamedTuple):
    """A mask function as a program. `tables`: what is known of `captured` tensors that were looked up."""

    program: ScoreProgram
    captured: list[Tensor]
    tables: dict[tuple[int, int], _Extremes]

    @classmethod
    def of(cls, predicate: Predicate, device: torch.device) -> _Traced | None:
        """None for a function that does more than elementwise operations on scalars and look-ups."""
        recorder = Recorder(device)
        indices = [recorder.input(name, torch.int64) for name in INPUTS[1:]]
        try:
            with torch._C._DisableAutocast(), Capturing(recorder):
                visible = recorder.scalar(predicate(*indices))
        except (ArithmeticError, AttributeError, LookupError, NotImplementedError, RuntimeError, TypeError, ValueError):
            return None  # if `torch.vmap` refuses it too, the error comes when pairs are looked at
        return None if visible.value is None else cls(recorder.program([visible.value])[0], recorder.captured, {})

    def range(self, tiles: Tiles) -> Range | None:
        """The range of the result in some tiles; None where nothing is known."""
        ends = (tiles.batch,) * 2, (tiles.head,) * 2, (tiles.first_q, tiles.last_q), (tiles.first_k, tiles.last_k)
        known: dict[str, Range | None] = {name: Range(*pair) for name, pair in zip(INPUTS[1:], ends)}
        for name, step in named_steps(self.program.steps).items():
            given = [known[each] if is_value(each) else number_range(each) for each in step.arguments]
            known[name] = _without_nan(_in_tensors(self._step(step, given, tiles.batch.device), tiles.batch.device))
        return known[self.program.results[0]]

    def _step(self, step: Step, given: Sequence[Range | None], device: torch.device) -> Range | None:
        if step.operation == LOAD:
            return self._looked_up(step.arguments[0], given[1:])
        dtype = getattr(torch, step.dtype)
        if step.operation == CONSTANT:
            value = torch.full((1, 1), step.arguments[0], dtype=dtype, device=device)
            return Range(value, value)
        return _cast(dtype)(given[0]) if step.operation == CAST else operation_range(step, given)

    def _looked_up(self, number: int, indices: Sequence[Range | None]) -> Range | None:
        """The range of an entry of a captured tensor, of which one index may be a range."""
        table = self.captured[number]
        if not indices:
            value = table.reshape(1, 1)  # with dimensions, as those of tiles have: PyTorch's promotion asks for them
            return Range(value, value)
        known = [entry for entry in indices if entry is not None]
        ranging = [place for place, entry in enumerate(known) if not entry.exact]
        if table.numel() == 0 or len(known) < len(indices) or len(ranging) > 1:
            return None
        place = ranging[0] if ranging else table.dim() - 1
        if (number, place) not in self.tables:
            self.tables[number, place] = _Extremes.of(table, place)
        others = [entry.least for at, entry in enumerate(known) if at != place]
        return self.tables[number, place].within(others, known[place])


class _Extremes(NamedTuple):
    """The least and greatest entries of a tensor in all ranges of a length that is a power of two, along one dimension.
    `table`: the tensor. `least`, `most`: `[levels, ..., groups]`: those of `2**level` groups of entries, from a group
    on. `level`: `[groups + 1]`: for a number of groups the largest level that is not longer."""

    table: Tensor
    least: Tensor
    most: Tensor
    level: Tensor

    @classmethod
    def of(cls, table: Tensor, place: int) -> _Extremes:
        entries = table.movedim(place, -1)
        padding = -entries.shape[-1] % _ENTRIES_TOGETHER
        entries = torch.cat((entries, entries[..., -1:].expand(*entries.shape[:-1], padding)), dim=-1)
        groups = entries.unflatten(-1, (-1, _ENTRIES_TOGETHER))
        least, most = [groups.amin(-1)], [groups.amax(-1)]
        number = least[0].shape[-1]
        for level in range(1, number.bit_length()):
            ahead = torch.arange(number, device=table.device) + 2 ** (level - 1)
            ahead = ahead.clamp(max=number - 1)
            least.append(_smaller(least[-1], least[-1][..., ahead]))
            most.append(_larger(most[-1], most[-1][..., ahead]))
        level_of = torch.arange(number + 1, device=table.device).double().log2().floor().clamp(min=0).long()
        return cls(entries, torch.stack(least), torch.stack(most), level_of)

    def within(self, others: list[Any], index: Range) -> Range:
        """The range of the entries that `index` may stand for, at the other indices."""
        size, groups = self.table.shape[-1], self.least.shape[-1]
        if index.exact:
            place = *others, index.least
            value = self.table[place]
            return Range(value, value)
        # An index that is past the ends, or counts from the end, may stand for any entry.
        outside = (index.least < 0) | (index.most >= size)
        first = torch.where(outside, 0, index.least.clamp(0, size - 1) // _ENTRIES_TOGETHER)
        last = torch.where(outside, groups - 1, index.most.clamp(0, size - 1) // _ENTRIES_TOGETHER)
        level = self.level[last - first + 1]
        second = last - (1 << level) + 1
        ends = (level, *others, first), (level, *others, second)
        least = _smaller(*(self.least[end] for end in ends))
        return Range(least, _larger(*(self.most[end] for end in ends)))


def _in_tensors(known: Range | None, device: torch.device) -> Range | None:
    """A range whose ends are tensors: of two bools of which nothing is known, `&` and `|` make one of numbers."""
    if known is None or isinstance(known.least, Tensor):
        return known
    least = torch.full((1, 1), known.least, device=device)
    return Range(least, least if known.exact else torch.full((1, 1), known.most, device=device))


def _smaller(first: Any, second: Any) -> Any:
    """The smaller of two numbers or tensors; NaN, which stands for an unknown number, wins."""
    return _chosen(torch.minimum, min, first, second)


def _larger(first: Any, second: Any) -> Any:
    return _chosen(torch.maximum, max, first, second)


def _chosen(of_tensors: Callable, of_numbers: Callable, first: Any, second: Any) -> Any:
    device = next((end.device for end in (first, second) if isinstance(end, Tensor)), None)
    return of_numbers(first, second) if device is None else of_tensors(*(on_device(x, device) for x in (first, second)))


def _without_nan(known: Range | None) -> Range | None:
    """A range whose ends are both NaN where one of them is: there nothing is known."""
    if known is None or not known.least.is_floating_point():
        return known
    unknown = known.least.isnan() | known.most.isnan()
    return Range(torch.where(unknown, torch.nan, known.least), torch.where(unknown, torch.nan, known.most))


def _monotone(operation: Callable[..., Any]) -> Callable[..., Range | None]:
    """The rule of an operation that rises or falls in each argument: its extremes are at those of the arguments."""

    def rule(*given: Range | None) -> Range | None:
        ranges = [known for known in given if known is not None]
        if len(ranges) != len(given):
            return None
        corners: list[tuple] = [()]
        for known in ranges:
            ends = known[:1] if known.exact else known
            corners = [(*corner, end) for corner in corners for end in ends]
        values = [operation(*corner) for corner in corners]
        if len(values) == 1:
            return Range(values[0], values[0])
        least = most = values[0]
        for value in values[1:]:
            least, most = _smaller(least, value), _larger(most, value)
        if least.is_floating_point() or least.dtype is torch.bool:
            return Range(least, most)
        # Integers that may have wrapped around may be any.
        limits = torch.iinfo(least.dtype)
        wrapped = torch.zeros_like(least, dtype=torch.bool)
        for corner in corners:
            exact = operation(*(end.double() if isinstance(end, Tensor) else float(end) for end in corner))
            wrapped = wrapped | ~(exact.abs() <= limits.max // 2)
        return Range(torch.where(wrapped, limits.min, least), torch.where(wrapped, limits.max, most))

    return rule


_subtract = _monotone(lambda a, b: a - b)


def _swapped(rule: Callable[..., Range | None]) -> Callable[..., Range | None]:
    return lambda first, second: rule(second, first)


_multiply = _monotone(lambda a, b: a * b)


def _absolute(a: Range | None) -> Range | None:
    known = _monotone(torch.abs)(a)
    if known is None or a is None or a.exact:
        return known
    return Range(torch.where((a.least < 0) & (a.most > 0), 0, known.least), known.most)


def _integers(a: Range | None, b: Range | None) -> tuple[Range, int] | None:
    """A range of integers and a positive number to divide it by; None where they are something else."""
    if a is None or b is None or type(b.least) is not int or b.least <= 0 or not isinstance(a.least, Tensor):
        return None
    return None if a.least.is_floating_point() or a.least.dtype is torch.bool else (a, b.least)


def _floor_divide(a: Range | None, b: Range | None) -> Range | None:
    known = _integers(a, b)
    if known is None:
        return None
    (least, most), divisor = known
    quotient = least // divisor
    return Range(quotient, quotient if known[0].exact else most // divisor)


def _remainder(a: Range | None, b: Range | None) -> Range | None:
    known = _integers(a, b)
    if known is None:
        return None
    (least, most), divisor = known
    if known[0].exact:
        return Range(rest := least % divisor, rest)
    near = least // divisor == most // divisor
    return Range(torch.where(near, least % divisor, 0), torch.where(near, most % divisor, divisor - 1))


def _divide(a: Range | None, b: Range | None, rounding_mode: str | None = None) -> Range | None:
    if rounding_mode == "floor":
        return _floor_divide(a, b)
    if rounding_mode is not None or b is None or not isinstance(b.least, (int, float)) or b.least == 0:
        return None
    return _monotone(lambda x, y: x / y)(a, b)


def _comparison(certain: Callable, impossible: Callable) -> Callable[..., Range | None]:
    """The rule of a comparison, from when it must hold and when it cannot. Both are False of an unknown number."""

    def rule(a: Range | None, b: Range | None) -> Range | None:
        if a is None or b is None:
            return None
        return Range(certain(a, b), ~impossible(a, b))

    return rule


_less = _comparison(lambda a, b: a.most < b.least, lambda a, b: a.least >= b.most)
_less_or_equal = _comparison(lambda a, b: a.most <= b.least, lambda a, b: a.least > b.most)
_equal = _comparison(
    lambda a, b: (a.least == b.most) & (a.most == b.least), lambda a, b: (a.most < b.least) | (b.most < a.least)
)


def _not(a: Range | None) -> Range | None:
    return None if a is None or not _is_truth(a) else Range(~a.most, ~a.least)


def _logical(operation: Callable[[Any, Any], Any]) -> Callable[..., Range | None]:
    """The rule of `&` or `|`, also for one bool and something unknown, because False or True decides."""

    def rule(a: Range | None, b: Range | None) -> Range | None:
        if not (_is_truth(a) and _is_truth(b)):
            return None
        a, b = _truth(a), _truth(b)
        return Range(operation(a.least, b.least), operation(a.most, b.most))

    return rule


def _is_truth(a: Range | None) -> bool:
    """Whether it is a bool, or may be one."""
    return a is None or isinstance(a.least, bool) or (isinstance(a.least, Tensor) and a.least.dtype is torch.bool)


def _where(condition: Range | None, a: Range | None, b: Range | None) -> Range | None:
    if a is None or b is None:
        return None
    if condition is None:
        return Range(_smaller(a.least, b.least), _larger(a.most, b.most))
    a, b = (Range(*(on_device(end, condition.least.device) for end in known)) for known in (a, b))
    least = torch.where(condition.least, a.least, torch.where(condition.most, _smaller(a.least, b.least), b.least))
    most = torch.where(condition.least, a.most, torch.where(condition.most, _larger(a.most, b.most), b.most))
    return Range(least, most)


def _cast(dtype: torch.dtype) -> Callable[[Range | None], Range | None]:
    def rule(a: Range | None) -> Range | None:
        if a is None:
            return None
        least, most = a.least.to(dtype), a.most.to(dtype)
        if dtype is torch.bool:
            return Range((a.least > 0) | (a.most < 0), ~((a.least == 0) & (a.most == 0)))
        if dtype.is_floating_point:
            return Range(least, most)
        limits = torch.iinfo(dtype)
        fits = (a.least >= limits.min // 2) & (a.most <= limits.max // 2)
        return Range(torch.where(fits, least, limits.min), torch.where(fits, most, limits.max))

    return rule


_Rule = Callable[..., Range | None]

#: The rules by number of arguments and the names of PyTorch's operations.
_RULES_OF_NAMES: dict[int, dict[_Rule, str]] = {
    1: {
        _monotone(lambda a: -a): "neg",
        _absolute: "abs",
        _not: "logical_not bitwise_not",
        lambda a: _multiply(_absolute(a), _absolute(a)): "square",
    },
    2: {
        _monotone(lambda a, b: a + b): "add",
        _subtract: "sub",
        _swapped(_subtract): "rsub",
        _multiply: "mul",
        _floor_divide: "floor_divide",
        _remainder: "remainder",
        _divide: "div true_divide",
        _monotone(_smaller): "minimum clamp_max",
        _monotone(_larger): "maximum clamp_min clamp",
        _less: "lt",
        _less_or_equal: "le",
        _swapped(_less): "gt",
        _swapped(_less_or_equal): "ge",
        _equal: "eq",
        lambda a, b: _not(_equal(a, b)): "ne",
        _logical(operator.and_): "logical_and bitwise_and",
        _logical(operator.or_): "logical_or bitwise_or",
    },
    3: {
        _where: "where",
        lambda a, least, most: _monotone(_smaller)(_monotone(_larger)(a, least), most): "clamp",
    },
}
_RULES: dict[tuple, _Rule] = {
    (name, count): rule
    for count, rules in _RULES_OF_NAMES.items()
    for rule, names in rules.items()
    for name in names.split()
}
_RULES["div", 2, "rounding_mode"] = _divide
