"""Compiling before measuring, in processes that fill the caches on disk of Triton, `torch.compile` and the peers."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from itertools import zip_longest
from typing import Any

import torch

from flashtile.bench.base import Implementation
from flashtile.bench.record import grouped
from flashtile.bench.registry import BENCHMARKS
from flashtile.bench.runner import ProblemOf

#: FA4 keeps what it compiles on disk if this is 1. It reads it when it is imported.
_FA4_CACHE = "FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED"

Pool = Callable[[int], Executor]
#: How often a call is tried that finds no memory beside those of other processes, and seconds in between.
_ATTEMPTS, _PAUSE = 4, 1.0


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
    """Calls every implementation that compiles its kernels once in every case that it serves, in `jobs` processes that
    compile one kernel at a time. Whatever fails there is left to the measuring process, which says why."""
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
            if problem.offers(implementation):
                bound = problem.bind(implementation)
                for phase in problem.phases:
                    if problem.unsupported(implementation, phase) is None:
                        bound.results(phase)
        except torch.OutOfMemoryError:
            return False
    return True


def _alike_apart(cases: Sequence[Any]) -> list[Any]:
    """The cases with those far apart that may run the same kernels, so that the second finds those of the first."""
    sizes = ("B", "S", "lengths")
    alike = grouped(cases, lambda case: str((case.op, [kv for kv in case.record().items() if kv[0] not in sizes])))
    return [case for turn in zip_longest(*alike.values()) for case in turn if case is not None]
