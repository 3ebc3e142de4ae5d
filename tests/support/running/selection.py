"""The two parts of the tests: the quick one, which `make test` runs, and the rest, which only `make test-all` adds.

The quick part has the first case of every test, and one case for each kernel of a test whose parameter is `kernel`. So
every test function is in it, except those with the mark `slow`. What follows from that is asserted: each public name is
used in it (`names_used`) and each kernel compiles in it (`kernels`).
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Iterable, Iterator
from types import CodeType, FunctionType, ModuleType
from typing import Any

import pytest


def parts(items: list[pytest.Item]) -> dict[str, list[pytest.Item]]:
    """The tests of each part, in their order."""
    found: dict[str, list[pytest.Item]] = {"quick": [], "rest": []}
    seen = set()
    for item in items:
        parameters = item.callspec.params if hasattr(item, "callspec") else {}
        case = item.nodeid.partition("[")[0], str(parameters.get("kernel"))
        quick = case not in seen and item.get_closest_marker("slow") is None
        if quick:
            seen.add(case)
        found["quick" if quick else "rest"].append(item)
    return found


def names_used(items: Iterable[Any]) -> set[str]:
    """Names in the code of tests, of their fixtures, and of whatever else in their modules these use."""
    waiting = [item.function for item in items]
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
