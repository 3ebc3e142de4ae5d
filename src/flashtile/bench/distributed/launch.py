"""Starts the processes of the benchmark of context parallelism, one for each GPU."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.multiprocessing as mp

from flashtile.bench.cases import select_named
from flashtile.bench.commands import check_seconds, command_line
from flashtile.bench.distributed import worker
from flashtile.bench.distributed.cases import ParallelCase, cases_of
from flashtile.bench.distributed.implementations import BASELINE, IMPLEMENTATIONS
from flashtile.bench.errors import ChoiceError
from flashtile.bench.record import require_writable

#: Values of `mask` -> whether a case of it is causal.
MASKS: dict[str, tuple[bool, ...]] = {"both": (True, False), "causal": (True,), "full": (False,)}


def bench_distributed(
    output: Path,
    *,
    gpus: int | None = None,
    quick: bool = False,
    lengths: Sequence[int] = (),
    mask: str = "both",
    impl: Sequence[str] = (),
    seconds: float = 0.25,
    profile: bool = False,
    limit: float = 240.0,
) -> None:
    """Measures context parallelism; rank 0 prints a line for each row and writes the record after each case.

    Args:
        output: file for the record.
        gpus: number of processes, one for each GPU; None for all GPUs, or two processes on a CPU.
        quick: only the shorter of the table's lengths.
        lengths: the lengths to measure; all of the table when empty.
        mask: "both", "causal" or "full".
        impl: names of implementations; all when empty. The baseline, one GPU alone, is always measured.
        seconds: time for the samples of each phase.
        profile: adds where the time of each implementation goes.
        limit: seconds after which nothing new is started.

    Raises:
        ChoiceError: there are not as many GPUs, an option matches nothing, or `output` cannot be written.
    """
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda" and gpus is not None and gpus > torch.cuda.device_count():
        raise ChoiceError(f"--gpus: expected at most {torch.cuda.device_count()}, the GPUs of this machine, got {gpus}")
    check_seconds(seconds)
    count = gpus or (torch.cuda.device_count() if device == "cuda" else 2)
    cases = _chosen(cases_of(device, count, quick), lengths, mask)
    select_named("--impl", impl, IMPLEMENTATIONS, device)
    names = list(dict.fromkeys([BASELINE, *(impl or IMPLEMENTATIONS)]))
    require_writable(output)
    if device == "cpu":
        print(f"no GPU is here: one case of {cases[0].S} tokens tries the code, and its speeds say nothing of GPUs")
    end = time.time() + limit
    with tempfile.TemporaryDirectory() as folder:
        shared = (cases, names, device, f"{folder}/store", str(output), command_line(), seconds, end, profile)
        mp.spawn(worker.run, shared, nprocs=count)


def _chosen(cases: Sequence[ParallelCase], lengths: Sequence[int], mask: str) -> list[ParallelCase]:
    """The cases of some lengths and masks."""
    (causal,) = select_named("--mask", [mask], MASKS, "this benchmark")
    known = sorted({case.S for case in cases})
    unknown = sorted(set(lengths) - set(known))
    if unknown:
        raise ChoiceError(
            f"--lengths: expected some of the table's, {', '.join(map(str, known))}, got {', '.join(map(str, unknown))}"
        )
    return [case for case in cases if case.causal in causal and (not lengths or case.S in lengths)]
