"""Checks of machine code that have passed before, whose kernels need not be compiled again.

`checked_machine_code.txt` is a table of them. An entry is the hash of all that decides whether a check passes: a
kernel's source with all that it uses, its specialisation and its compiler, and the check's source with what the kernel
is compared with (`checked_code.check_key`). So an entry says one thing: this content has passed this check. Where any
of it has changed, the kernel is compiled and checked.

Two kinds of tests compile in spite of the table: the first case of each test, which is in the quick part, and a
fiftieth of the others, drawn anew each day. `--compile-all` makes all tests compile. `--remember` renews the table.

The functions called `pytest_…` are hooks: `conftest` registers this module.
"""

from __future__ import annotations

import datetime
import random
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from support.running import selection

TABLE = Path(__file__).parents[2] / "checked_machine_code.txt"

_HEAD = """\
# Checks of machine code that have passed (tests/support/compilation/remembered_checks.py). `make remember` renews them.
# Compiler: {compiler}
"""

#: How many of the tests that could rely on the table compile.
_SHARE = 0.02

#: The function that tests call for a check.
_CHECK = "check_code"


@dataclass
class Memory:
    """What one process knows of checks that have passed.

    Attributes:
        compiler: what compiled the kernels of the table (`checked_code.COMPILER`).
        table: each key, and the test whose check has passed.
        records: whether the table will be written.
        test: the test that runs.
        trusts_table: whether that test relies on the table.
        passed: the checks that have passed in this run, as in `table`.
    """

    compiler: str
    table: dict[str, str]
    records: bool = False
    test: str = ""
    trusts_table: bool = False
    passed: dict[str, str] = field(default_factory=dict)

    def serves(self, compiler: str) -> bool:
        """Whether checks of what that compiler makes are remembered."""
        return self.records or compiler == self.compiler

    def knows(self, key: str) -> bool:
        """Whether the test that runs need not do that check."""
        return self.trusts_table and key in self.table

    def add(self, key: str) -> None:
        """A check has passed, now or before. Of tests that share one, the first in the alphabet has it."""
        self.passed[key] = min(self.test, self.passed.get(key, self.test))


def read_table(path: Path) -> tuple[str, dict[str, str]]:
    """The compiler of a table, and its entries."""
    lines = path.read_text("utf-8").splitlines() if path.exists() else []
    compilers = [line.partition(": ")[2] for line in lines if line.startswith("# Compiler: ")]
    entries = (line.rpartition(" ") for line in lines if not line.startswith("#"))
    return "".join(compilers), {key: test for test, _, key in entries}


def write_table(path: Path, compiler: str, entries: dict[str, str]) -> None:
    lines = sorted(f"{test} {key}\n" for key, test in entries.items())
    path.write_text(_HEAD.format(compiler=compiler) + "".join(lines), "utf-8")


def renewed(table: dict[str, str], passed: dict[str, str], whole_files: bool) -> dict[str, str]:
    """The table after a run, with what `passed` in it instead of the earlier entries of these tests, or of all tests of
    their files."""

    def part(test: str) -> str:
        return _file(test) if whole_files else test

    ran = {part(test) for test in passed.values()}
    return {key: test for key, test in table.items() if part(test) not in ran} | passed


def drawn(test: str, day: datetime.date) -> bool:
    """Whether a test is in the fiftieth of that day."""
    return random.Random(f"{day} {test}").random() < _SHARE


def _file(test: str) -> str:
    return test.partition("::")[0]


#: What this process knows.
MEMORY = Memory(*read_table(TABLE))

#: Tests that compile in spite of the table.
_COMPILING: set[str] = set()

#: What processes of pytest-xdist have reported.
_PASSED_IN_WORKERS: dict[str, str] = {}


def pytest_configure(config: pytest.Config) -> None:
    MEMORY.records = config.option.remember


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """A run that renews the table reads only the files that have such tests."""
    without = config.option.remember and collection_path.suffix == ".py" and _CHECK not in collection_path.read_text()
    return True if without else None


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Decides which tests compile; a run that renews the table has no others than such tests."""
    if config.option.remember:
        others = [item for item in items if _CHECK not in selection.names_used([item])]
        config.hook.pytest_deselected(items=others)
        items[:] = [item for item in items if item not in others]
    names = [item.nodeid for item in items]
    if config.option.compile_all:
        _COMPILING.update(names)
    elif not config.option.remember:
        _COMPILING.update(item.nodeid for item in selection.parts(items)["quick"])
        _COMPILING.update(name for name in names if drawn(name, datetime.date.today()))


def pytest_runtest_setup(item: pytest.Item) -> None:
    MEMORY.test, MEMORY.trusts_table = item.nodeid, item.nodeid not in _COMPILING


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """A worker has ended."""
    for key, test in getattr(node, "workeroutput", {}).get("passed checks", {}).items():
        _PASSED_IN_WORKERS[key] = min(test, _PASSED_IN_WORKERS.get(key, test))


def pytest_sessionfinish(session: pytest.Session) -> None:
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["passed checks"] = MEMORY.passed
    elif MEMORY.records:
        from support.compilation.checked_code import COMPILER

        passed = MEMORY.passed | _PASSED_IN_WORKERS
        table = MEMORY.table if MEMORY.compiler == COMPILER else {}
        chosen = session.config.option.keyword or any("::" in name for name in session.config.args)
        write_table(TABLE, COMPILER, renewed(table, passed, whole_files=not chosen))


def pytest_terminal_summary(terminalreporter: Any) -> None:
    new = (MEMORY.passed.keys() | _PASSED_IN_WORKERS.keys()) - MEMORY.table.keys()
    if new and MEMORY.records:
        terminalreporter.write_line(f"{len(new)} checks of machine code are new in {TABLE.name}")
    elif new:
        terminalreporter.write_line(f"{len(new)} checks of machine code are new; `make remember` records them")
