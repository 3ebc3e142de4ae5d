"""Compiling companion operations before they are measured, as `bench/ahead.py` says."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

import torch

from flashtile.bench.ahead import Pool, run_in_processes
from flashtile.bench.companions.bound import Bound
from flashtile.bench.companions.case import Case, Random
from flashtile.bench.companions.implementations import IMPLEMENTATIONS, Implementation


def compile_ahead(
    cases: Sequence[Case],
    implementations: Sequence[Implementation],
    device: torch.device,
    jobs: int,
    pool: Pool | None = None,
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
    run_in_processes(call_once, [(case, names, device.type) for case in cases], jobs, pool)


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
