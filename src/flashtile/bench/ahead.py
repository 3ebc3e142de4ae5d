"""Compiling before measuring, so that kernels are in the caches on disk of Triton, of `torch.compile` and of the peers
when the measuring process calls them: compilation takes most of the time of a first run otherwise.

And how long a user waits for the first call with a function that was never compiled: forward and backward, in a new
process. The processes compile into a folder for each case. It starts with the files of a call of another head_dim, such
as Triton's launcher. The measuring process goes on with the same folders, so that FlexAttention compiles a case once.
"""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, ProcessPoolExecutor, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import replace
from functools import partial
from itertools import zip_longest
from pathlib import Path
from typing import Any

import torch

import flashtile
from flashtile.bench.base import Implementation, select_implementations
from flashtile.bench.cases import Case, make_inputs
from flashtile.bench.oracle import AttentionProblem, Bound
from flashtile.bench.registry import BENCHMARKS
from flashtile.bench.runner import ProblemOf
from flashtile.bench.serving_cases import ServingCase

#: FA4 keeps what it compiles on disk if this is 1. It reads it when it is imported.
_FA4_CACHE = "FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED"

Pool = Callable[[int], Executor]


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
    pool: Pool = _processes,
) -> None:
    """Calls every implementation that compiles its kernels once in every case that it serves, in processes that compile
    one kernel at a time. Whatever fails there is left to the measuring process, which says why.

    Args:
        benchmark: its name in the registry.
        cases: what will be measured.
        implementations: in which ways.
        device: where.
        jobs: number of processes.
        pool: makes the pool of so many workers.
    """
    os.environ.setdefault(_FA4_CACHE, "1")
    calls = [
        (benchmark, case, each.name, device.type)
        for case in _alike_apart(cases)
        for each in implementations
        if each.compiles and each.reason(case, device) is None
    ]
    with contextlib.suppress(BrokenProcessPool), pool(jobs) as workers:
        for task in [workers.submit(call_once, *call) for call in calls]:
            task.result()


def call_once(benchmark: str, case: Any, name: str, device_type: str) -> None:
    """Runs each phase of a case in the named implementation."""
    found, device = BENCHMARKS[benchmark], torch.device(device_type)
    (implementation,) = (each for each in found.implementations if each.name == name)
    # Out of memory beside the other processes, or what the measuring process will meet again.
    with contextlib.suppress(Exception), implementation.context():
        problem = found.problem(case, device)
        if problem.offers(implementation):
            bound = problem.bind(implementation)
            for phase in problem.phases:
                if problem.unsupported(implementation, phase) is None:
                    bound.results(phase)
    if device.type == "cuda":
        torch.cuda.empty_cache()


def _alike_apart(cases: Sequence[Any]) -> list[Any]:
    """The cases with those far apart that may run the same kernels, so that the second finds those of the first."""
    alike: dict[tuple[Any, ...], list[Any]] = {}
    for case in cases:
        kind = (case.D, case.Dv, case.causal) if isinstance(case, Case) else ()
        if isinstance(case, ServingCase):
            kind = (str(replace(case, B=0, S=0, lengths=None)),)
        alike.setdefault((case.op, case.dtype, *kind), []).append(case)
    return [case for turn in zip_longest(*alike.values()) for case in turn if case is not None]


#: The first of these that serves a case is what users get: its first call is measured, and so are those of the others.
_OURS = ("flashtile-auto", "flashtile-hopper", "flashtile-triton", "flashtile-cpu")
_OTHERS = ("flashtile-builtin", "flex")
#: Another call, which compiles what calls of all functions share.
_BEFORE = Case(1, 256, 1, 1, 32, 32, causal=True, function="window")
_TIMEOUT = 300
_CACHES = ("TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR")


@contextlib.contextmanager
def first_calls(
    cases: Sequence[Case], implementations: Sequence[Implementation], device: torch.device, jobs: int
) -> Iterator[ProblemOf]:
    """Measures first calls of the cases with a function, then makes problems whose rows have them.

    Args:
        cases: all that will be measured.
        implementations: in which ways.
        device: where.
        jobs: processes at a time; 0 = none, and the problems have no first calls.
    """
    named = [case for case in cases if case.function is not None]
    tasks = [(case, each) for case in named for each in _measured(case, implementations, device)] if jobs else []
    if not tasks:
        yield AttentionProblem
        return
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder, _environment_kept():
        folders = {case: Path(folder) / str(number) for number, case in enumerate(named)}
        with ThreadPoolExecutor(jobs) as pool:
            before = Path(folder) / "before"
            list(pool.map(partial(_in_process, _BEFORE, device, before), {each.name for _, each in tasks}))
            for place in folders.values():
                shutil.copytree(before, place)
            found = list(pool.map(lambda task: _in_process(task[0], device, folders[task[0]], task[1].name), tasks))
        times: dict[Case, dict[str, float]] = {case: {} for case in named}
        for (case, each), seconds in zip(tasks, found):
            if seconds is not None:
                times[case][each.name] = seconds * 1e3

        def problem(case: Case, device: torch.device) -> AttentionProblem:
            if case in folders:
                os.environ.update(_caches(folders[case]))
            return AttentionProblem(case, device, times.get(case))

        yield problem


def _measured(case: Case, implementations: Sequence[Implementation], device: torch.device) -> list[Implementation]:
    """The implementation of ours that users get, and the others."""
    serving = {each.name: each for each in implementations if each.reason(case, device) is None}
    ours = [serving[name] for name in _OURS if name in serving][:1]
    return [*ours, *(each for name, each in serving.items() if name in _OTHERS)]


@contextlib.contextmanager
def _environment_kept() -> Iterator[None]:
    before = {name: os.environ.get(name) for name in _CACHES}
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def _caches(folder: Path) -> dict[str, str]:
    return {name: str(folder / name.lower()) for name in _CACHES}


def _in_process(case: Case, device: torch.device, folder: Path, implementation: str) -> float | None:
    """Seconds of the first call in a new process; None where it fails, for which the measuring process says why."""
    for place in _caches(folder).values():
        Path(place).mkdir(parents=True, exist_ok=True)
    # The processes share the cores: none starts compilers of its own.
    environment = {**os.environ, **_caches(folder), "TORCHINDUCTOR_COMPILE_THREADS": "1", "PYTHONPATH": _python_path()}
    arguments = [implementation, device.type, json.dumps(case.record())]
    command = [sys.executable, "-m", "flashtile.bench.ahead", *arguments]
    try:
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True, timeout=_TIMEOUT)
    except subprocess.SubprocessError:
        return None
    return float(done.stdout.split()[-1])


def _python_path() -> str:
    """The sources that this process runs, before what the environment says."""
    sources = str(Path(flashtile.__file__).parents[1])
    return os.pathsep.join(filter(None, (sources, os.environ.get("PYTHONPATH"))))


def first_call(name: str, device_type: str, record: str) -> float:
    """Seconds of the first forward and backward of this process, without importing torch and starting CUDA."""
    case, device = Case.from_record(json.loads(record)), torch.device(device_type)
    (implementation,) = select_implementations(BENCHMARKS["attention"].implementations, [name], device)
    inputs = make_inputs(case, device)
    synchronize = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    synchronize()
    begin = time.perf_counter()
    with implementation.context():
        Bound(implementation, case, inputs).backward()
    synchronize()
    return time.perf_counter() - begin


if __name__ == "__main__":
    print(first_call(*sys.argv[1:]))
