"""The benchmark commands without their rendering: in this tree, and in turns with the tree of another commit. Before
measuring, processes may compile: they fill the caches on disk of Triton, `torch.compile` and the peers."""

from __future__ import annotations

import contextlib
import math
import multiprocessing
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from itertools import zip_longest
from pathlib import Path
from typing import Any

import torch

import flashtile
from flashtile.bench.base import AnyCase, Implementation, select_cases, select_implementations
from flashtile.bench.record import (
    SPEEDS,
    Record,
    Recorder,
    Row,
    command_line,
    grouped,
    read_record,
    require_writable,
    row_key,
    write_record,
)
from flashtile.bench.registry import BENCHMARKS, Options
from flashtile.bench.report import Report, Table, comparison_tables, reasons
from flashtile.bench.runner import Announce, ProblemOf, announced, run_case, say_nothing, side_stream
from flashtile.bench.start import UserError

#: Called with index, number of cases and case: before a case is measured with None, and afterwards with its rows.
OnCase = Callable[[int, int, Any, list[Row] | None], None]

#: FA4 keeps what it compiles on disk if this is 1. It reads it when it is imported.
_FA4_CACHE = "FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED"

#: How often a call is tried that finds no memory beside those of other processes, and seconds in between.
_ATTEMPTS, _PAUSE = 4, 1.0


def default_device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def measure(
    command: str,
    options: Options,
    output: Path | None = None,
    on_case: OnCase = lambda *case: None,
    announce: Announce = say_nothing,
) -> Record:
    """Runs a command on this machine's device. Raises UserError if `output` cannot be written, a value does not fit, a
    pattern or a name matches nothing, or a package that is needed is not installed. `options`: by the names of the
    command line; lists are names, each perhaps several with commas. `output`: file for the record, rewritten after
    every case. `announce`: called before each step of a case."""
    require_writable(output)
    check_seconds(options.get("seconds"))
    given = {name: value for name, value in options.items() if value is not None and value != []}
    given |= {name: _split(given[name]) for name in _LISTS if name in given}
    device = default_device()
    cases = select_cases(BENCHMARKS[command].cases(given, device), given.get("cases", ()))
    chosen = choose_implementations(command, given.get("impl", ()), device, given.get("quick", False))
    recorder = Recorder(device, command_line(), output)
    times = {"jobs": given.get("jobs", 0), "seconds": given.get("seconds")}
    measure_cases(command, cases, chosen, recorder, **times, on_case=on_case, announce=announce)
    return recorder.record


def measure_cases(
    command: str,
    cases: Sequence[AnyCase],
    implementations: Sequence[Implementation],
    recorder: Recorder,
    *,
    jobs: int = 0,
    seconds: float | None = None,
    on_case: OnCase,
    announce: Announce,
) -> None:
    """Measures some cases of a command, and adds their rows to a record. `jobs`: processes that compile before."""
    device, benchmark = default_device(), BENCHMARKS[command]
    if jobs:
        with announced(announce, f"compiling in {jobs} processes"):
            compile_ahead(command, cases, implementations, device, jobs)
    with side_stream(device):
        for index, case in enumerate(cases):
            on_case(index, len(cases), case, None)
            rows = run_case(case, [*benchmark.always, *implementations], device, benchmark.problem, seconds, announce)
            recorder.add(rows)
            on_case(index, len(cases), case, rows)


def _processes(jobs: int) -> Executor:
    return ProcessPoolExecutor(jobs, multiprocessing.get_context("spawn"), _share_cores)


def _share_cores() -> None:
    """The processes are as many as the cores bear: none starts compilers of its own."""
    import torch._inductor.config

    torch._inductor.config.compile_threads = 1


def compile_ahead(
    benchmark: str,
    cases: Sequence[Any],
    implementations: Sequence[Implementation],
    device: torch.device,
    jobs: int,
    pool: Callable[[int], Executor] = _processes,
) -> None:
    """Calls every implementation that compiles its kernels once in every case that it serves, in `jobs` processes that
    compile one kernel at a time. Whatever fails there is left to the measuring process, which says why."""
    os.environ.setdefault(_FA4_CACHE, "1")
    calls = [
        (benchmark, case, each.name, device.type)
        for case in _interleaved(cases)
        for each in implementations
        if each.compiles and each.reason(case, device) is None
    ]
    with contextlib.suppress(BrokenProcessPool), pool(jobs) as workers:
        for task in [workers.submit(call_once, *call) for call in calls]:
            task.result()


def call_once(benchmark: str, case: Any, name: str, device_type: str) -> None:
    """Runs each phase of a case in the named implementation; again where other processes left it no memory."""
    found, device = BENCHMARKS[benchmark], torch.device(device_type)
    (implementation,) = (each for each in found.implementations if each.name == name)
    for _ in range(_ATTEMPTS):
        had_memory = _run_phases(found.problem, case, implementation, device)
        if device.type == "cuda":
            torch.cuda.empty_cache()
        if had_memory:
            break
        time.sleep(_PAUSE)


def _run_phases(make_problem: ProblemOf, case: Any, implementation: Implementation, device: torch.device) -> bool:
    """Whether there was memory. The measuring process meets other failures again."""
    with contextlib.suppress(Exception), implementation.context():
        try:
            problem = make_problem(case, device)
            if phases := problem.measured_phases(implementation):
                bound = problem.bind(implementation)
                for phase in phases:
                    if problem.unsupported(implementation, phase) is None:
                        bound.results(phase)
        except torch.OutOfMemoryError:
            return False
    return True


def _interleaved(cases: Sequence[Any]) -> list[Any]:
    """The cases with those far apart that may run the same kernels, so that the second finds those of the first."""
    sizes = ("B", "S", "lengths")
    alike = grouped(cases, lambda case: str((case.op, [kv for kv in case.record().items() if kv[0] not in sizes])))
    return [case for turn in zip_longest(*alike.values()) for case in turn if case is not None]


_LISTS = ("impl", "cases", "table", "op", "model")


def choose_implementations(
    command: str, names: Sequence[str], device: torch.device, quick: bool = False
) -> list[Implementation]:
    """The named implementations, or the defaults. Raises UserError if one is unknown or not installed."""
    benchmark = BENCHMARKS[command]
    known = benchmark.implementations
    if command == "companions" and quick and device.type == "cpu" and not names:
        known = tuple(each for each in known if each.name != "compile")  # it takes longer than all measurements
    chosen = select_implementations(known, names, device)
    missing = {each.name: why for each in chosen if (why := each.missing())}
    if missing and (benchmark.needs == "all" or (benchmark.needs == "named" and names)):
        there = [each.name for each in chosen if each.name not in missing]
        raise UserError(
            f"--impl: expected implementations that can run here, got {', '.join(missing)}: "
            f"{', '.join(dict.fromkeys(missing.values()))}; install it"
            + (f", or measure the others: --impl {' '.join(there)}" if there else "")
        )
    return chosen


def _split(values: Sequence[str]) -> list[str]:
    return [part for value in values for part in value.split(",") if part]


def describe(command: str, device: torch.device) -> str:
    """Names of the cases and of the implementations of a benchmark on a device, for reading."""
    benchmark = BENCHMARKS[command]
    lists = {f"cases of {name}": [case.name for case in cases] for name, cases in benchmark.tables(device).items()}
    lists["implementations"] = [each.name for each in benchmark.implementations if device.type in each.devices]
    return "\n".join("\n  ".join([f"{heading}:", *names]) for heading, names in lists.items())


def check_seconds(seconds: float | None) -> None:
    """Refuses what is no time for samples: below zero, without an end, or NaN. Zero is for one sample."""
    if seconds is not None and not 0 <= seconds < math.inf:
        raise UserError(f"--seconds: expected a time of at least 0, got {seconds}; 0.1 is a tenth of a second")


def as_arguments(command: str, options: Options, device: torch.device) -> list[str]:
    """The same as arguments of `flashtile bench`; without `impl`, ours alone."""
    arguments = [command]
    for name, value in {**options, "impl": options.get("impl") or ours(command, device)}.items():
        if value is None or value is False or value == []:
            continue
        arguments.append(f"--{name.replace('_', '-')}")
        if value is not True:
            arguments += _split(list(map(str, value if isinstance(value, list) else [value])))
    return arguments


def ours(command: str, device: torch.device) -> list[str]:
    """Names of our implementations that a command measures on a device when none is named."""
    known = BENCHMARKS[command].implementations
    return [each.name for each in select_implementations(known, [], device) if each.ours]


def describe_progress(index: int, total: int, case: AnyCase, rows: list[Row], seconds: float) -> str:
    """A line about a case that was measured."""
    speeds = ", ".join(f"{row['impl']} {row['phase']} {_speed(row):.4g}" for row in rows if row["ms"] is not None)
    return f"[{index + 1}/{total}, {seconds:.0f} s] {case.name}: {speeds or 'no speed'}"


def _speed(row: Row) -> float:
    return next(row[key] for key in (*SPEEDS.values(), "ms") if row.get(key) is not None)


#: How often each tree runs.
ROUNDS = 3


def compare_with_commit(
    command: str, options: Options, ref: str, output: Path | None, on_run: Callable[[str, int, int], None]
) -> Report:
    """Runs a command in this tree and in that of a commit (`ref`), in turns: two runs at different times differ by
    several percent. Arguments and errors as of `measure`; `output` has both, the commit's implementations with `@` and
    its number. `on_run`: called with the tree, the number of runs before, and that of all."""
    require_writable(output)
    arguments = as_arguments(command, options, default_device())
    here, there = measure_against(ref, arguments, lambda tree, runs: on_run(tree, runs, 2 * ROUNDS))
    if output is not None:
        other = [{**row, "impl": f"{row['impl']}@{there['commit']}"} for row in there["rows"]]
        both = {**here, "against": there["commit"], "command": command_line(), "rows": [*here["rows"], *other]}
        write_record(both, output)
    tables = comparison_tables(here["rows"], there["rows"], f"This tree beside {ref} ({there['commit']})")
    notes = [f"no speed: {line}" for line in reasons(here["rows"])]
    notes += [f"no speed in {ref}: {line}" for line in reasons(there["rows"])]
    return Report([*tables, _spread_table(here, there)], notes)


def measure_against(
    ref: str, arguments: Sequence[str], on_run: Callable[[str, int], None], rounds: int = ROUNDS
) -> tuple[Record, Record]:
    """Records of this tree and of commit `ref`: times are medians over the rounds (`round_ms` of a row). `arguments`:
    of `flashtile bench`, without `--output`. `on_run`: called before each process. Raises UserError without a checkout
    or such a commit, or if a tree cannot run the arguments."""
    root = checkout()
    commit = _git(root, "rev-parse", "--verify", "--short=12", f"{ref}^{{commit}}")
    with tempfile.TemporaryDirectory(prefix="flashtile-against-") as folder, _worktree(root, commit, folder) as old:
        found: dict[str, list[Record]] = {"here": [], ref: []}
        for turn in range(rounds):
            trees = [("here", root), (ref, old)]
            for name, tree in trees if turn % 2 else trees[::-1]:
                on_run(name, sum(map(len, found.values())))
                found[name].append(_run(tree, arguments, Path(folder) / "record.json"))
    here, there = merge(found["here"]), merge(found[ref])
    if not str(there["commit"]).startswith(commit):
        raise UserError(
            f"--against: expected to measure commit {commit}, measured {there['commit']}; flashtile is "
            "imported from another place than PYTHONPATH"
        )
    return here, there


def checkout() -> Path:
    """The repository that flashtile runs from; UserError if there is none."""
    package = Path(flashtile.__file__).parent
    try:
        root = Path(_git(package, "rev-parse", "--show-toplevel"))
        _git(root, "ls-files", "--error-unmatch", str(package / "__init__.py"))
    except UserError:
        raise UserError(f"--against: expected flashtile to run from a git checkout, it runs from {package}") from None
    return root


@contextmanager
def _worktree(root: Path, commit: str, folder: str) -> Iterator[Path]:
    """The tree of a commit in a folder of its own, while the context lasts."""
    tree = Path(folder) / "tree"
    _git(root, "worktree", "add", "--quiet", "--detach", str(tree), commit)
    try:
        yield tree
    finally:
        _git(root, "worktree", "remove", "--force", str(tree))


def merge(records: Sequence[Record]) -> Record:
    """One record of several runs: each row with the median of its times, and all; none if some run lacks one."""
    by_key = grouped((row for record in records for row in record["rows"]), row_key)
    return {**records[0], "rows": [_median_row(rows) for rows in by_key.values()]}


def _spread_table(here: Record, there: Record) -> Table:
    """How far the rounds of each row lie apart: a ratio of speeds within that says nothing."""
    lines = []
    for name, record in (("here", here), ("there", there)):
        spreads = [max(row["round_ms"]) / min(row["round_ms"]) - 1 for row in record["rows"] if row.get("round_ms")]
        if spreads:
            lines.append([name, f"{statistics.median(spreads):.1%}", f"{max(spreads):.1%}", str(len(spreads))])
    return Table("Slowest over fastest round", ["tree", "median", "largest", "rows"], lines)


def _median_row(rows: list[Row]) -> Row:
    first, times = rows[0], [row["ms"] for row in rows]
    if None in times:
        return rows[times.index(None)]
    median = statistics.median(times)
    # Speeds are work by time: they follow the time of the first run to the median.
    keys = (key for key in (*SPEEDS.values(), "mfu") if first.get(key) is not None)
    speeds = {key: first[key] * first["ms"] / median for key in keys}
    return {**first, **speeds, "ms": median, "round_ms": times}


def _run(tree: Path, arguments: Sequence[str], output: Path) -> Record:
    environment = {key: value for key, value in os.environ.items() if key != "FLASHTILE_COMMIT"}
    paths = (str(tree / "src"), environment.get("PYTHONPATH", ""))
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    command = [sys.executable, "-m", "flashtile.bench", *arguments, "--output", str(output)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=tree)
    if done.returncode:
        ending = "\n".join((done.stderr or done.stdout).strip().splitlines()[-4:])
        raise UserError(f"--against: {' '.join(arguments)} ended with {done.returncode} in {tree.name}:\n{ending}")
    return read_record(output)


def _git(folder: Path, *arguments: str) -> str:
    try:
        done = subprocess.run(["git", "-C", str(folder), *arguments], capture_output=True, text=True, check=True)
    except FileNotFoundError:
        raise UserError("--against: needs git, which is not installed") from None
    except subprocess.CalledProcessError as error:
        raise UserError(f"--against: git {' '.join(arguments)}: {error.stderr.strip()}") from None
    return done.stdout.strip()
