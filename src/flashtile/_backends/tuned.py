"""Cuts of kernels that `flashtile tune` measured on this machine's GPU, which serve instead of the shipped rows.

A choice has a name, such as "attention.forward". The facts that it looks at are its key, a NamedTuple. What it chooses
is a cut, another one. `choose` is where every choice asks; a table is a file of JSON for one kind of GPU, read once.
"""

from __future__ import annotations

import json
import os
import re
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch

from flashtile._backends import clear_plans

_Cut = TypeVar("_Cut", bound=tuple)

#: A file to read instead of the user's, or 0 to read none.
VARIABLE = "FLASHTILE_TUNED"


class TunedRow(NamedTuple):
    """A row of a table.

    Attributes:
        choice: its name.
        key: the fields of its key, as JSON has them.
        cut: the fields of its cut.
        ms: milliseconds of the call with this cut.
        shipped_ms: of the call with the shipped cut, in the same run.
    """

    choice: str
    key: dict[str, Any]
    cut: dict[str, Any]
    ms: float
    shipped_ms: float


class Tuned:
    """The rows of one table. Two tables are equal only if they are one, so that they may be parts of keys."""

    def __init__(self, rows: Sequence[TunedRow], source: str = "") -> None:
        self.rows, self.source = rows, source
        self._cuts = {(row.choice, _text(row.key)): row.cut for row in self.rows}

    def find(self, choice: str, key: tuple) -> dict[str, Any] | None:
        """The fields of a cut; None where there is no row."""
        return self._cuts.get((choice, _text(as_data(key))))


class Lookup(NamedTuple):
    """A question that a choice asked.

    Attributes:
        choice: its name.
        device: `DeviceFacts`.
        key: what it looks at.
        shipped: the cut of the shipped tables.
    """

    choice: str
    device: Any
    key: Any
    shipped: Any


_watchers: list[Callable[[Lookup], None]] = []


def choose(choice: str, device: Any, key: tuple, shipped: _Cut) -> _Cut:
    """The cut of the table of the device, else the shipped one."""
    for watch in _watchers:
        watch(Lookup(choice, device, key, shipped))
    found = device.tuned and device.tuned.find(choice, key)
    return shipped._replace(**found) if found else shipped  # type: ignore[attr-defined]


def cut_from(choice: str, device: Any, key: tuple | None) -> str:
    """The source of a cut, as `KernelChoice.tiles_from` has it. `key`: None for a call that no table is asked about."""
    if key is not None and device.tuned and device.tuned.find(choice, key):
        return "tuned"
    return "measured" if device.arch == "sm_90" else "predicted"


@contextmanager
def watching() -> Iterator[list[Lookup]]:
    """The questions that choices ask within this context, each once. Calls that have a plan ask none."""
    seen: dict[tuple[str, Any], Lookup] = {}
    found: list[Lookup] = []

    def watch(lookup: Lookup) -> None:
        if seen.setdefault((lookup.choice, lookup.key), lookup) is lookup:
            found.append(lookup)

    _watchers.append(watch)
    try:
        yield found
    finally:
        _watchers.remove(watch)


def as_data(key: Any) -> dict[str, Any]:
    """The fields of a key or a cut, as JSON has them."""
    return {name: _plain(value) for name, value in key._asdict().items()}


def _plain(value: Any) -> Any:
    if isinstance(value, torch.dtype):
        return str(value).removeprefix("torch.")
    return [_plain(each) for each in value] if isinstance(value, tuple) else value


def _text(data: Mapping[str, Any]) -> str:
    return json.dumps(data, sort_keys=True)


# Files


def folder() -> Path:
    """The user's folder of tables: of `XDG_CACHE_HOME`, or the system's place for caches."""
    home = os.environ.get("XDG_CACHE_HOME")
    if home:
        return Path(home) / "flashtile"
    if sys.platform == "win32":
        return Path(os.environ.get("LOCALAPPDATA", Path.home())) / "flashtile"
    return Path.home() / (Path("Library", "Caches") if sys.platform == "darwin" else Path(".cache")) / "flashtile"


def path_for(gpu: str) -> Path:
    """The user's table for a kind of GPU."""
    return folder() / f"tuned-{re.sub('[^a-z0-9]+', '-', gpu.lower()).strip('-')}.json"


def versions() -> dict[str, str]:
    """The versions that a table is for: others compile other kernels."""
    import triton

    own_package = sys.modules[__name__.partition(".")[0]]
    return {"flashtile": own_package.__version__, "triton": triton.__version__}


def read(path: Path, gpu: str) -> Tuned:
    """The table of a file.

    Raises:
        ValueError: it is no table for this GPU and these versions; the message says why.
    """
    try:
        data = json.loads(path.read_text())
        rows = [TunedRow(**row) for row in data["rows"]]
        found = {name: data[name] for name in ("gpu", *versions())}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"it cannot be read ({type(error).__name__}: {error})") from None
    expected = {"gpu": gpu, **versions()}
    if found != expected:
        differing = [f"{name} {found[name]}, and here is {own}" for name, own in expected.items() if found[name] != own]
        raise ValueError(f"it is for {'; '.join(differing)}")
    if not all(type(row.choice) is str and type(row.key) is dict and _is_cut(row.cut) for row in rows):
        raise ValueError("it has a row that is none")
    return Tuned(rows, str(path))


def _is_cut(cut: Any) -> bool:
    return type(cut) is dict and all(value is None or type(value) in (int, bool) for value in cut.values())


def write(path: Path, gpu: str, rows: list[TunedRow]) -> None:
    """Writes a table, whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_suffix(f".{os.getpid()}")
    data = {"gpu": gpu, **versions(), "rows": [row._asdict() for row in rows]}
    unfinished.write_text(json.dumps(data, indent=1) + "\n")
    unfinished.replace(path)


_forced: list[Tuned | None] = []


@contextmanager
def using(table: Tuned | None) -> Iterator[None]:
    """Within this context a table, or None, is that of every device that is present."""
    _forced.append(table)
    clear_plans()
    try:
        yield
    finally:
        _forced.pop()
        clear_plans()


def table_for(gpu: str | None) -> Tuned | None:
    """The table that serves on a kind of GPU, or in Triton's interpreter (None); None where there is none, or none that
    fits."""
    if _forced or gpu is None:
        return _forced[-1] if _forced else None
    named = os.environ.get(VARIABLE, "")
    path = Path(named) if named else path_for(gpu)
    if named == "0" or not (named or path.exists()):
        return None
    try:
        return read(path, gpu)
    except ValueError as error:
        remedy = f"unset {VARIABLE}" if named else "run `flashtile tune` again, or `flashtile tune --reset`"
        warnings.warn(f"flashtile does not use the tuned table {path}: {error}; {remedy}", stacklevel=2)
        return None
