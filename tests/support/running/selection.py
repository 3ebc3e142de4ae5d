"""The two parts of the tests: the quick one, which `make test` runs, and the rest, which only `make test-all` adds.

The quick part has the first case of every test, and one case for each value of a parameter `kernel` or `group`; of
cases that run in Triton's interpreter or on a GPU it has the first too. So every test function is in it, except those
with the mark `slow`. What follows from that is asserted: each public name is used in it (`names_used`) and each kernel
compiles in it (`kernels`).

A test with three parametrisations or more runs enough cases, in both parts together, for each two of their values to
meet in one (`in_pairs`). `--all-combinations` runs all of them.
"""

from __future__ import annotations

import importlib
import inspect
import pkgutil
from collections import defaultdict
from collections.abc import Iterable, Iterator
from itertools import combinations
from types import CodeType, FunctionType, ModuleType
from typing import Any

import pytest


def parts(items: list[pytest.Item]) -> dict[str, list[pytest.Item]]:
    """The tests of each part, in their order."""
    found: dict[str, list[pytest.Item]] = {"quick": [], "rest": []}
    seen = set()
    for item in items:
        parameters = item.callspec.params if hasattr(item, "callspec") else {}
        place = tuple(mark for mark in ("gpu", "hopper", "interpreter") if item.get_closest_marker(mark))
        case = item.nodeid.partition("[")[0], str(parameters.get("kernel", parameters.get("group"))), place
        quick = case not in seen and item.get_closest_marker("slow") is None
        if quick:
            seen.add(case)
        found["quick" if quick else "rest"].append(item)
    return found


def in_pairs(items: list[pytest.Item]) -> list[pytest.Item]:
    """The items without those whose values of parametrisations are all, two by two, in others of the same test. Cases
    with other marks are apart, because one that is skipped has no pair. The first case of each test stays."""
    cases: dict[tuple[str, frozenset[str]], list[pytest.Item]] = defaultdict(list)
    for item in items:
        cases[item.nodeid.partition("[")[0], frozenset(mark.name for mark in item.iter_markers())].append(item)
    kept: set[pytest.Item] = set()
    for of_a_test in cases.values():
        kept.update(_covering(of_a_test) if hasattr(of_a_test[0], "callspec") else of_a_test)
    return [item for item in items if item in kept]


def _covering(items: list[pytest.Item]) -> list[pytest.Item]:
    """As few cases of a test as `in_pairs` needs: next is the first of those with the most pairs that no other had."""
    together = [mark.args[0] for mark in items[0].iter_markers("parametrize") if mark.args]
    axes = [names.replace(" ", "").split(",") if isinstance(names, str) else list(names) for names in together]
    axes += [[name] for name in items[0].callspec.params if all(name not in axis for axis in axes)]
    if len(axes) < 3:
        return items
    pairs = {item: _pairs(item.callspec.params, axes) for item in items}
    chosen = [items[0]]
    missing = set().union(*pairs.values()) - pairs[items[0]]
    while missing:
        chosen.append(max(pairs, key=lambda item: len(pairs[item] & missing)))
        missing -= pairs[chosen[-1]]
    return chosen


def _pairs(values: dict[str, Any], axes: list[list[str]]) -> set[tuple]:
    """Each two of the values of a case. One value is one object in all cases of a test."""
    return set(combinations([(axis[0], *(id(values[name]) for name in axis)) for axis in axes], 2))


def names_used(items: Iterable[Any]) -> set[str]:
    """Names in the code of tests, of their fixtures, and of whatever else in their modules these use."""
    waiting = [inspect.unwrap(item.function) for item in items]  # each_case wraps a test
    for item in items:
        fixtures = item._fixtureinfo.name2fixturedefs.values()
        waiting += [definition.func for definitions in fixtures for definition in definitions]
    names: set[str] = set()
    seen = set()
    while waiting:
        function = waiting.pop()
        if not isinstance(function, FunctionType) or function in seen:
            continue
        seen.add(function)
        mine = set(_names(function.__code__))
        names |= mine
        # Functions that it calls, of its own module and of the modules of cases beside the tests.
        waiting += [function.__globals__[name] for name in mine & function.__globals__.keys()]
    return names


def _names(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names(constant)


def kernels(package: ModuleType) -> set[str]:
    """Full names of the kernels in a package: functions of Triton or Gluon called `*_kernel`."""
    from triton.runtime.jit import JITFunction

    found = set()
    for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
        # Integrations need the packages that they serve, and have no kernels.
        if not module.name.endswith("__main__") and ".integrations." not in module.name:
            values = vars(importlib.import_module(module.name)).values()
            found |= {full_name(value) for value in values if isinstance(value, JITFunction)}
    return {name for name in found if name.endswith("_kernel")}


def full_name(kernel: Any) -> str:
    return f"{kernel.fn.__module__}.{kernel.fn.__name__}"
