"""Compiling before processes meet: every job of every rank runs once in one of many processes that exchange nothing.

What they compile goes to Triton's cache on disk. Otherwise each rank would compile all kernels, one after another,
while the others wait for it in an exchange.
"""

from __future__ import annotations

import contextlib
import importlib
import os
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from support.distributed.processes import Parallel, forking, run

#: Each takes some hundred megabytes of a GPU, and a core.
_MOST_PROCESSES = 16


def compile_ahead(jobs: dict[str, Parallel], ranks: int, device: str) -> None:
    """Whatever fails here is left to the processes that meet, which say why."""
    workers = min(_MOST_PROCESSES, os.cpu_count() or 1)
    # Jobs of one feature, which share kernels, lie apart.
    tasks = [(job, rank, ranks, device) for rank in range(ranks) for job in jobs.values()]
    with ProcessPoolExecutor(workers, forking()) as pool:
        for number, task in enumerate(tasks):
            pool.submit(_run_once, number % max(1, torch.cuda.device_count()), *task)


def _run_once(gpu: int, job: Parallel, rank: int, ranks: int, device: str) -> None:
    """A job as a rank of a group whose transfers bring nothing."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    torch.set_num_threads(1)
    if device == "cuda":
        torch.cuda.set_device(gpu)
    calls: Any = importlib.import_module("flashtile.distributed.context_parallel")
    calls.agree = lambda *facts: None  # there is nobody to agree with
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=ranks)
    try:
        shape = (2, ranks // 2) if job.strategy == "ring_all_to_all" else (ranks,)
        with contextlib.suppress(Exception):
            run(job, init_device_mesh(device, shape))
    finally:
        dist.destroy_process_group()
