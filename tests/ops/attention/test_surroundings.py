"""What counts as read by a Python function, and when that cannot be told."""

import functools
import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.nn.attention.flex_attention import and_masks

from flashtile.ops.attention.score_tracing import Surroundings

FIRST, SECOND = torch.zeros(3), torch.ones(3)
SETTINGS = SimpleNamespace(window=3)


def above(number: Any) -> Callable[..., Any]:
    def function(x: Any) -> Any:
        return math.sqrt(x) > number

    return function


def of_two(x: Any, first: Any = 1, *, second: Any = 2) -> Any:
    return [FIRST[x + offset] for offset in (first, second)]


def imports_a_library() -> Any:
    import torch

    return torch.pi


def imports() -> Any:
    import tests

    return tests


def calls_itself(n: int) -> int:
    return n and calls_itself(n - 1)


def described(function: Callable[..., Any]) -> Surroundings:
    found = Surroundings.of(function)
    assert found is not None
    return found


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (above(1), above(2)),
        (above(1), above(1.0)),
        (above(0.0), above(-0.0)),
        (above([1, 2]), above([1, 3])),
        (above({"a": 1}), above({"b": 1})),
        (above(above(1)), above(above(2))),
        (above(torch.zeros(2)), above(torch.zeros(3))),
        (functools.partial(of_two, first=1), functools.partial(of_two, second=1)),
        (and_masks(above(1)), and_masks(above(2))),
        (above(torch.sin), above(torch.cos)),
    ],
)
def test_functions_that_differ(first, second):
    assert described(first).key != described(second).key


@pytest.mark.parametrize(
    "make", [lambda: above(2.5), lambda: and_masks(above((1, "a")), above(None)), lambda: functools.partial(of_two, 3)]
)
def test_functions_that_are_made_alike(make):
    assert described(make()).key == described(make()).key


def test_tensors_are_those_in_reach():
    assert [id(tensor) for tensor in described(above([SECOND, of_two])).tensors] == [id(SECOND), id(FIRST)]
    assert described(calls_itself).tensors == described(imports_a_library).tensors == ()


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x > SETTINGS.window, above(SETTINGS), above({1: 2}), above(torch.nn.Linear(1, 1)),
        torch.nn.Linear(1, 1).forward, FIRST.item, imports,
    ],
)  # fmt: skip
def test_what_may_change_unseen(function):
    assert Surroundings.of(function) is None


def test_a_variable_without_a_value():
    def function() -> Any:
        return later

    assert Surroundings.of(function) is None
    later = 1
    assert described(function).key
