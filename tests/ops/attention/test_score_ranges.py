"""Reads of score functions that stay within their tensors: found without running anything, and their addresses."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import flashtile
from flashtile.ops.attention.gpu.score_source import function_source, reads_source
from flashtile.ops.attention.gpu.score_writer import ScoreBounds, ranges
from flashtile.ops.attention.score_program import parse

_Q, _K = 6, 10


def _range(expression: Callable[[Tensor, Tensor, Tensor], Tensor]) -> tuple[int, int] | None:
    """That of an expression of head, q_index and k_index, which a function reads a table by."""
    table = torch.zeros(9)
    text = flashtile.trace_score_mod(lambda s, b, h, q, k: s + table[expression(h, q, k)]).program
    program = parse(text)
    ((_, load),) = program.loads
    return ranges(program, ScoreBounds(2, 3, _Q, _K, ((9,),))).get(load.arguments[1])


@pytest.mark.parametrize(
    "expression, expected",
    [
        (lambda h, q, k: q - k + 9, (0, 14)),
        (lambda h, q, k: 9 - q, (4, 9)),
        (lambda h, q, k: torch.clamp(q - k, -2, 2) + 2, (0, 4)),
        (lambda h, q, k: torch.clamp(q - k, 3, 4), (3, 4)),
        (lambda h, q, k: torch.abs(q - k), (0, 9)),
        (lambda h, q, k: torch.minimum(q, k) * 3 + h, (0, 17)),
        (lambda h, q, k: torch.maximum(q, k), (0, 9)),
        (lambda h, q, k: (q - k) % 4, (0, 3)),
        (lambda h, q, k: (q - k) // 4, (-3, 1)),
        (lambda h, q, k: torch.where(q > k, q - k, -k), (-9, 5)),
        (lambda h, q, k: (q - k).to(torch.int64) ** 2, None),
        (lambda h, q, k: (q - k).to(torch.int8).to(torch.int32), None),
        (lambda h, q, k: q * 2**30 * 8, None),
        (lambda h, q, k: torch.clamp(q, max=k), (0, 5)),
    ],
)
def test_ranges_of_integers(expression, expected):
    """They have what every score has, and where something is known no more than its extremes."""
    assert _range(expression) == expected
    if expected is not None:
        indices = (torch.arange(count, dtype=torch.int32) for count in (3, _Q, _K))
        values = expression(*torch.meshgrid(*indices, indexing="ij"))
        assert expected[0] <= values.min() and values.max() <= expected[1]


def _source(table: Tensor, index: Callable[..., Any], bounds: ScoreBounds | None) -> str:
    text = flashtile.trace_score_mod(lambda s, b, h, q, k: s + table[index(h, q, k)]).program
    return function_source(text, bounds)


def test_what_stays_within_is_read_without_checks():
    """By addresses in parts of rows and of columns, where the index is a sum of such parts."""
    table = torch.zeros(3, 16)
    bounds = ScoreBounds(2, 3, _Q, _K, ((3, 16),))

    def near(h: Tensor, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        return h, q - k + 9

    source = _source(table, near, bounds)
    assert "mask=" not in source and "nan" not in source
    assert "tl.cast(q_index - first_q, tl.int64)" in source and "- tl.cast(k_index - first_k, tl.int64)" in source
    assert "mask=" in _source(table, near, None)
    for other in (bounds._replace(rows_q=8), bounds._replace(heads=4), bounds._replace(shapes=((3, 14),))):
        assert "mask=" in _source(table, near, other)
    clamped = _source(table, lambda h, q, k: (h, torch.clamp(q - k, -3, 3) + 3), bounds)
    assert "mask=" not in clamped


def test_tiles_of_any_place_read_the_same():
    """The source as Python: what it reads, with and without what is known of the indices."""
    table = torch.arange(48.0)
    names: dict[str, Any] = {"tl": _Language}

    def score(first_q: int, first_k: int, bounds: ScoreBounds | None) -> Tensor:
        text = flashtile.trace_score_mod(
            lambda s, b, h, q, k: s + table.view(3, 16)[h, 9 + q - k] + table.view(3, 16)[h, k]
        ).program
        exec(function_source(text, bounds), names)
        q = first_q + torch.arange(3)[:, None]
        k = first_k + torch.arange(5)[None, :]
        reads = _Captured(*[table.view(3, 16)] * 2)
        return names["score_function"](torch.zeros(3, 5), 0, 2, q, k, first_q, first_k, reads, _SIZES)

    for first_q, first_k in ((0, 0), (3, 5), (3, 0)):
        known = score(first_q, first_k, ScoreBounds(1, 3, _Q, _K, ((3, 16),) * 2))
        q = first_q + torch.arange(3)[:, None]
        k = first_k + torch.arange(5)[None, :]
        rows = table.view(3, 16)[2]
        assert torch.equal(known, rows[9 + q - k] + rows[k])


def test_what_does_not_depend_on_the_score_may_be_read_before():
    """And the function then reads the rest alone."""
    table = torch.zeros(9)

    def mixed(score: Tensor, batch: Tensor, head: Tensor, q_index: Tensor, k_index: Tensor) -> Tensor:
        return score * table[k_index] + table[score.to(torch.int32) + head]

    program = flashtile.trace_score_mod(mixed).program
    before, after = reads_source(program), function_source(program, reads_before=True)
    assert before is not None and before.count("tl.load") == 1 and "score" not in before.partition(":")[2]
    assert after.count("tl.load") == 1 and "reads[0]" in after
    assert function_source(program).count("tl.load") == 2
    assert reads_source(flashtile.trace_score_mod(lambda s, b, h, q, k: s * q).program) is None


class _Address:
    """An address in a table, which numbers are added to."""

    def __init__(self, table: Tensor, offset: Any = 0) -> None:
        self.table, self.offset = table, offset

    def __add__(self, more: Any) -> _Address:
        return _Address(self.table, self.offset + more)


class _Captured:
    def __init__(self, *tables: Tensor) -> None:
        for number, table in enumerate(tables):
            setattr(self, f"tensor{number}", _Address(table))


class _Sizes:
    size0_0, size0_1, size1_0, size1_1 = 3, 16, 3, 16


_SIZES = _Sizes()


class _Language:
    int64 = torch.int64

    @staticmethod
    def cast(value: Any, dtype: torch.dtype) -> Any:
        return value.to(dtype) if isinstance(value, Tensor) else value

    @staticmethod
    def load(address: _Address) -> Tensor:
        return address.table.flatten()[address.offset]
