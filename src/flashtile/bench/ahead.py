"""Compiling before measuring: every call runs once in one of several processes.

The kernels go to the caches on disk of Triton, of `torch.compile` and of the peers, where the measuring process
finds it. Compilation takes most of the time of a first run otherwise.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Executor, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from itertools import zip_longest
from typing import Any

import torch

from flashtile.bench.bound import Bound
from flashtile.bench.cases import Case, make_inputs
from flashtile.bench.implementations import IMPLEMENTATIONS, Implementation

#: FA4 keeps what it compiles on disk if this is 1. It reads it when it is imported.
_FA4_CACHE = "FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED"

Pool = Callable[[int], Executor]


def compile_ahead(
    cases: Sequence[Case],
    implementations: Sequence[Implementation],
    device: torch.device,
    jobs: int,
    pool: Pool | None = None,
) -> None:
    """Calls every implementation that compiles its kernels once in every case of attention that it serves.

    Whatever fails there is left to the measuring process, which says why.

    Args:
        cases: what will be measured.
        implementations: in which ways.
        device: where.
        jobs: number of processes.
        pool: makes the pool of so many workers; by default of new processes.
    """
    os.environ.setdefault(_FA4_CACHE, "1")
    calls = [
        (case, implementation.name, device.type)
        for case in _alike_apart(cases)
        for implementation in implementations
        if implementation.compiles and implementation.unsupported(case, device) is None
    ]
    run_in_processes(call_once, calls, jobs, pool)


def run_in_processes(
    function: Callable[..., None], calls: Iterable[tuple[Any, ...]], jobs: int, pool: Pool | None = None
) -> None:
    """Calls a function with each of the arguments, in processes that compile one kernel at a time."""
    with contextlib.suppress(BrokenProcessPool), (pool or _processes)(jobs) as workers:
        for task in [workers.submit(function, *call) for call in calls]:
            task.result()


def call_once(case: Case, name: str, device: str) -> None:
    """Runs each phase of a case in the named implementation."""
    (implementation,) = (each for each in IMPLEMENTATIONS if each.name == name)
    # Out of memory beside the other processes, or what the measuring process will meet again.
    with contextlib.suppress(Exception), implementation.context():
        bound = Bound(implementation, case, make_inputs(case, torch.device(device)))
        for phase in ("fwd", "bwd"):
            bound.results(phase)
    if device == "cuda":
        torch.cuda.empty_cache()


def _alike_apart(cases: Sequence[Case]) -> list[Case]:
    """The cases with those far apart that may run the same kernels, so that the second finds those of the first."""
    alike: dict[tuple[Any, ...], list[Case]] = {}
    for case in cases:
        alike.setdefault((case.D, case.Dv, case.causal, case.dtype), []).append(case)
    return [case for turn in zip_longest(*alike.values()) for case in turn if case is not None]


def _processes(jobs: int) -> Executor:
    return ProcessPoolExecutor(jobs, multiprocessing.get_context("spawn"), _share_cores)


def _share_cores() -> None:
    """The processes are as many as the cores bear: none starts compilers of its own."""
    import torch._inductor.config

    torch._inductor.config.compile_threads = 1
