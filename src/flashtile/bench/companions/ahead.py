"""Compiling before measuring: every case is called once in one of several processes.

What they compile goes to the caches on disk of Triton, of `torch.compile` and of the peers, where the measuring process
finds it. Compilation takes most of the time of a first run otherwise.
"""

from __future__ import annotations

import contextlib
import multiprocessing
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool

import torch

from flashtile.bench.companions.bound import Bound
from flashtile.bench.companions.case import Case, Random
from flashtile.bench.companions.implementations import IMPLEMENTATIONS, Implementation


def compile_ahead(
    cases: Sequence[Case],
    implementations: Sequence[Implementation],
    device: torch.device,
    jobs: int,
    pool: Callable[[int], Executor] | None = None,
) -> None:
    """Calls every implementation of every case once.

    Whatever fails there is left to the measuring process, which says why.

    Args:
        cases: what will be measured.
        implementations: in which ways.
        device: where.
        jobs: number of processes.
        pool: makes the pool of so many workers; by default of new processes.
    """
    names = [each.name for each in implementations]
    with contextlib.suppress(BrokenProcessPool), (pool or _processes)(jobs) as workers:
        for task in [workers.submit(call_once, case, names, device.type) for case in cases]:
            task.result()


def call_once(case: Case, names: Sequence[str], device: str) -> None:
    """Runs each phase of a case in each of the named implementations."""
    inputs = case.make_inputs(Random(torch.device(device), case.torch_dtype))
    ways = case.ways()
    for implementation in IMPLEMENTATIONS:
        if implementation.name not in names or implementation.name not in ways or implementation.missing():
            continue
        # Out of memory beside the other processes, or what the measuring process will meet again.
        with contextlib.suppress(Exception), implementation.context():
            bound = Bound(ways[implementation.name](inputs.others), case, inputs)
            for phase in case.phases:
                if case.lacks(implementation.name, phase) is None:
                    bound.results(phase)


def _processes(jobs: int) -> Executor:
    return ProcessPoolExecutor(jobs, multiprocessing.get_context("spawn"), _share_cores)


def _share_cores() -> None:
    """The processes are as many as the cores bear: none starts compilers of its own."""
    import torch._inductor.config

    torch._inductor.config.compile_threads = 1
