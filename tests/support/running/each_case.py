"""A table of quick cases in one test, which checks them all and names those that fail."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable
from typing import Any

import pytest


def each_case(names: str, cases: Iterable[Any]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Like `pytest.mark.parametrize`, but all cases are one test: thousands of tests of a millisecond take longer to
    collect than to run. They share the fixtures of the test, so these must not be changed.

    Args:
        names: of the arguments, with commas between them.
        cases: the value of the argument in each case, or a tuple of the values of several.
    """
    arguments, table = [name.strip() for name in names.split(",")], list(cases)
    assert table, "a table without cases checks nothing"
    assert not any(isinstance(case, type(pytest.param())) for case in table), "marks are those of the test"

    def decorate(check: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(check)
        def check_all(**fixtures: Any) -> None:
            failed: dict[str, BaseException] = {}
            for number, case in enumerate(table):
                values = (case,) if len(arguments) == 1 else case
                try:
                    check(**dict(zip(arguments, values, strict=True)), **fixtures)
                except (Exception, pytest.fail.Exception) as error:
                    failed[f"case {number}, {case!r:.200}: {type(error).__name__}: {error}"] = error
            if failed:
                lines = "\n".join(failed)
                raise AssertionError(f"{len(failed)} of {len(table)} cases fail\n{lines}") from next(
                    iter(failed.values())
                )

        left = [value for name, value in inspect.signature(check).parameters.items() if name not in arguments]
        check_all.__signature__ = inspect.Signature(left)  # type: ignore[attr-defined]
        return check_all

    return decorate
