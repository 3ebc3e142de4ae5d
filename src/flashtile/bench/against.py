"""This tree beside another commit: the same cases in processes of either, in turns.

Two runs at different times differ by several percent. Here each round runs both trees, one after the other, and the
next round in the other order; what counts is the median over the rounds.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import flashtile
from flashtile.bench import commands
from flashtile.bench.record import Key, Record, Row, key_of, require_writable, write_record
from flashtile.bench.report import Report, Table, comparison_tables, reasons
from flashtile.bench.start import ChoiceError

ROUNDS = 3

#: Called with what is about to run, and the number of runs before it.
OnRun = Callable[[str, int], None]


def compare_with_commit(
    command: str,
    options: Mapping[str, Any],
    ref: str,
    output: Path | None,
    on_run: Callable[[str, int, int], None],
) -> Report:
    """Runs a command in this tree and in that of a commit, in turns.

    Args:
        command: as in `commands.measure`.
        options: likewise.
        ref: the commit.
        output: file for a record of both; the names of the commit's implementations end in `@` and its number.
        on_run: called with the tree, the number of runs before, and that of all.

    Raises:
        ChoiceError: `output` cannot be written, or as `measure_against`.
    """
    if options.get("plot") is not None:
        raise ChoiceError("--plot and --against: expected one of them, got both; plot this tree in a run of its own")
    require_writable(output)
    arguments = commands.as_arguments(command, options, commands.default_device())
    total = 2 * ROUNDS
    here, there = measure_against(ref, arguments, lambda tree, runs: on_run(tree, runs, total))
    if output is not None:
        write_record(join(here, there), output)
    tables = comparison_tables(here["rows"], there["rows"], f"This tree beside {ref} ({there['commit']})")
    notes = [f"no speed: {line}" for line in reasons(here["rows"])]
    notes += [f"no speed in {ref}: {line}" for line in reasons(there["rows"])]
    return Report([*tables, spread_table(here, there)], notes)


def measure_against(ref: str, arguments: Sequence[str], on_run: OnRun, rounds: int = ROUNDS) -> tuple[Record, Record]:
    """Records of this tree and of a commit: times are medians over the rounds, which `round_ms` of a row lists.

    Args:
        ref: a commit, branch or tag of the repository that flashtile runs from.
        arguments: of `flashtile bench`, without `--output`; both trees get the same.
        on_run: called before each process.
        rounds: how often each tree runs.

    Raises:
        ChoiceError: flashtile runs from no checkout, there is no such commit, or a tree cannot run the arguments.
    """
    root = checkout()
    commit = _git(root, "rev-parse", "--verify", "--short=12", f"{ref}^{{commit}}")
    with (
        tempfile.TemporaryDirectory(prefix="flashtile-against-") as folder,
        worktree(root, commit, Path(folder)) as old,
    ):
        found: dict[str, list[Record]] = {"here": [], ref: []}
        for turn in range(rounds):
            trees = [("here", root), (ref, old)]
            for name, tree in trees if turn % 2 else trees[::-1]:
                on_run(name, sum(map(len, found.values())))
                found[name].append(_run(tree, arguments, Path(folder) / "record.json"))
    there = merge(found[ref])
    if not str(there["commit"]).startswith(commit):
        raise ChoiceError(
            f"--against: expected to measure commit {commit}, measured {there['commit']}; flashtile is "
            "imported from another place than PYTHONPATH"
        )
    return merge(found["here"]), there


def checkout() -> Path:
    """The repository that flashtile runs from.

    Raises:
        ChoiceError: it runs from no checkout.
    """
    package = Path(flashtile.__file__).parent
    try:
        root = Path(_git(package, "rev-parse", "--show-toplevel"))
        _git(root, "ls-files", "--error-unmatch", str(package / "__init__.py"))
    except ChoiceError:
        raise ChoiceError(f"--against: expected flashtile to run from a git checkout, it runs from {package}") from None
    return root


@contextmanager
def worktree(root: Path, commit: str, folder: Path) -> Iterator[Path]:
    """The tree of a commit in a folder of its own, while the context lasts."""
    tree = folder / "tree"
    _git(root, "worktree", "add", "--quiet", "--detach", str(tree), commit)
    try:
        yield tree
    finally:
        _git(root, "worktree", "remove", "--force", str(tree))


def merge(records: Sequence[Record]) -> Record:
    """One record of several runs of the same: each row with the median of its times, and all of them.

    A row that has no time in some run has none.
    """
    by_key: dict[Key, list[Row]] = {}
    for record in records:
        for row in record["rows"]:
            by_key.setdefault(key_of(row), []).append(row)
    return {**records[0], "rows": [_median_row(rows) for rows in by_key.values()]}


def join(here: Record, there: Record) -> Record:
    """One record of both trees: implementations of the commit are named `name@commit`."""
    commit = there["commit"]
    other = [{**row, "impl": f"{row['impl']}@{commit}"} for row in there["rows"]]
    return {**here, "against": commit, "command": commands.command_line(), "rows": [*here["rows"], *other]}


def spread_table(here: Record, there: Record) -> Table:
    """How far the rounds of each row lie apart: a ratio of speeds within that says nothing."""
    lines = []
    for name, record in (("here", here), ("there", there)):
        spreads = [max(row["round_ms"]) / min(row["round_ms"]) - 1 for row in record["rows"] if row.get("round_ms")]
        if spreads:
            lines.append([name, f"{statistics.median(spreads):.1%}", f"{max(spreads):.1%}", str(len(spreads))])
    return Table("Slowest over fastest round", ["tree", "median", "largest", "rows"], lines)


def _median_row(rows: list[Row]) -> Row:
    missing = next((row for row in rows if row["ms"] is None), None)
    if missing is not None:
        return missing
    times = [row["ms"] for row in rows]
    median = statistics.median(times)
    # Speeds are work by time: they follow the time of the first run to the median.
    scale = rows[0]["ms"] / median
    speeds = {
        key: rows[0][key] * scale for key in ("tflops", "gbps", "tokens_per_s", "mfu") if rows[0].get(key) is not None
    }
    return {**rows[0], **speeds, "ms": median, "round_ms": times}


def _run(tree: Path, arguments: Sequence[str], output: Path) -> Record:
    environment = {key: value for key, value in os.environ.items() if key != "FLASHTILE_COMMIT"}
    others = [environment["PYTHONPATH"]] if environment.get("PYTHONPATH") else []
    environment["PYTHONPATH"] = os.pathsep.join([str(tree / "src"), *others])
    command = [sys.executable, "-m", "flashtile.bench", *arguments, "--output", str(output)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=tree)
    if done.returncode:
        ending = "\n".join((done.stderr or done.stdout).strip().splitlines()[-4:])
        raise ChoiceError(f"--against: {' '.join(arguments)} ended with {done.returncode} in {tree.name}:\n{ending}")
    record: Record = json.loads(output.read_text("utf-8"))
    return record


def _git(folder: Path, *arguments: str) -> str:
    try:
        done = subprocess.run(["git", "-C", str(folder), *arguments], capture_output=True, text=True, check=True)
    except FileNotFoundError:
        raise ChoiceError("--against: needs git, which is not installed") from None
    except subprocess.CalledProcessError as error:
        raise ChoiceError(f"--against: git {' '.join(arguments)}: {error.stderr.strip()}") from None
    return done.stdout.strip()
