"""One process of the benchmark: checks and times implementations with the others, and tells rank 0."""

from __future__ import annotations

import statistics
import time
import traceback
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import flashtile
from flashtile.bench.distributed.cases import OP, PHASES, ParallelCase
from flashtile.bench.distributed.implementations import BASELINE, IMPLEMENTATIONS, gradients_in_layout
from flashtile.bench.record import make_record, write_record
from flashtile.distributed import shard_sequence
from flashtile.testing import assert_close

_GRADIENTS = ("dq", "dk", "dv")


def run(
    rank: int, cases: Sequence[ParallelCase], names: Sequence[str], device: str, store: str, output: str,
    command: str, seconds: float, end: float,
) -> None:  # fmt: skip
    """One of as many processes as the cases have GPUs; rank 0 writes the record after each case."""
    gpus = cases[0].gpus
    if device == "cuda":
        torch.cuda.set_device(rank)
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if device == "cuda" else "gloo", init_method=f"file://{store}", rank=rank, world_size=gpus,
        timeout=timedelta(minutes=5),
    )  # fmt: skip
    try:
        mesh = init_device_mesh(device, (gpus,))
        where = torch.device(device, rank) if device == "cuda" else torch.device("cpu")
        record = make_record(where, command, [])
        checked: dict[tuple[str, bool], tuple[float, str | None]] = {}
        for case in cases:
            for row in _rows(case, names, mesh, where, checked, seconds, end):
                record["rows"].append(row)
                if not rank:
                    print(_line(row), flush=True)
                    write_record(record, Path(output))
    finally:
        dist.destroy_process_group()


def _rows(
    case: ParallelCase,
    names: Sequence[str],
    mesh: DeviceMesh,
    where: torch.device,
    checked: dict[tuple[str, bool], tuple[float, str | None]],
    seconds: float,
    end: float,
) -> list[dict[str, Any]]:
    """The rows of a case. All ranks come to the same decisions."""
    rows: list[dict[str, Any]] = []
    alone: dict[str, float] = {}
    for name in names:
        key = name, case.causal
        if key not in checked:
            checked[key] = _agreed(partial(_error, name, case.checked, mesh, where))
        error, why = checked[key]
        if why is None and not _all_agree(time.time() < end):
            why = "no time was left"
        times: dict[str, float] = {}
        facts: dict[str, Any] = {}
        if why is None:
            found, why = _agreed(partial(_measure, name, case, mesh, where, seconds))
            times, facts = found or ({}, {})
        if name == BASELINE:
            alone = times
        for phase in PHASES:
            ms = times.get(phase)
            rows.append(
                {
                    "op": OP, "phase": phase, "impl": name, "case": case.record(), "ms": ms,
                    "tflops": None if ms is None else case.flops(phase) / ms / 1e9, "gbps": None, "error": error,
                    "timer": "cuda-events" if where.type == "cuda" else "perf-counter",
                    "efficiency": _efficiency(name, case, ms, alone.get(phase)), **facts,
                }
                | ({} if why is None else {"why": why})
            )  # fmt: skip
    return rows


def _efficiency(name: str, case: ParallelCase, ms: float | None, alone: float | None) -> float | None:
    """One GPU's time for all of the work over all GPUs' time."""
    if ms is None or alone is None:
        return None
    return alone / (ms * (1 if name == BASELINE else case.gpus))


def _agreed(action: Callable[[], Any]) -> tuple[Any, str | None]:
    """What an action gave here, and why it failed on any rank."""
    found, why = None, None
    try:
        found = action()
    except Exception as error:
        why = f"{type(error).__name__}: {error}".splitlines()[0][:300]
        traceback.print_exc()
    reasons: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(reasons, why)
    why = next((reason for reason in reasons if reason is not None), None)
    return (None if why else found), why


def _all_agree(here: bool) -> bool:
    answer = torch.tensor(int(here))
    dist.all_reduce(answer, dist.ReduceOp.MIN)
    return bool(answer)


def _error(name: str, case: ParallelCase, mesh: DeviceMesh, where: torch.device) -> float:
    """The largest error of this rank's output and gradients, which must be within the policy."""
    whole = case.tensors(where)
    results = []
    for dtype in (torch.float64, whole[0].dtype):
        tensors = [t.detach().to(dtype).requires_grad_() for t in whole[:3]]
        out = flashtile.attention(*tensors, causal=case.causal, backend="reference")
        results.append((out.detach(), *torch.autograd.grad(out, tensors, whole[3].to(dtype))))
    with IMPLEMENTATIONS[name](case, mesh, tuple(t.detach().clone() for t in whole)) as problem:
        out = problem.forward()
        grads = torch.autograd.grad(out, problem.leaves, problem.dout)
        found = (out.detach(), *gradients_in_layout(name, case, grads))
        layout = problem.layout
    worst = 0.0
    for label, value, oracle, eager in zip(("out", *_GRADIENTS), found, *results):
        if name != BASELINE:
            oracle, eager = (shard_sequence(t, mesh, layout=layout) for t in (oracle, eager))
        assert_close(label, value, oracle, eager)
        worst = max(worst, (value.double() - oracle).abs().max().item())
    return worst


def _measure(
    name: str, case: ParallelCase, mesh: DeviceMesh, where: torch.device, seconds: float
) -> tuple[dict[str, float], dict[str, Any]]:
    """Milliseconds of each phase, those of the slowest rank, and the memory of the second."""
    times: dict[str, float] = {}
    facts: dict[str, Any] = {}
    if name == BASELINE and dist.get_rank():
        _slowest(0.0)
        _slowest(0.0)
        return times, facts
    with IMPLEMENTATIONS[name](case, mesh, case.tensors(where)) as problem:

        def both() -> tuple[Tensor, ...]:
            return torch.autograd.grad(problem.forward(), problem.leaves, problem.dout)

        def forward() -> Tensor:
            with torch.no_grad():
                return problem.forward()

        group = None if name == BASELINE else dist.group.WORLD
        if where.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
            held = torch.cuda.memory_allocated()
        for phase, function in zip(PHASES, (forward, both)):
            times[phase] = _slowest(_median(function, where, seconds, group))
        if where.type == "cuda":
            facts["peak_mib"] = (torch.cuda.max_memory_allocated() - held) / 2**20
            if name == "flashtile-ring":
                facts["hidden"] = hidden_share(both)
    return times, facts


def _slowest(ms: float) -> float:
    tensor = torch.tensor(ms, dtype=torch.float64)
    dist.all_reduce(tensor, dist.ReduceOp.MAX)
    return float(tensor)


def _median(function: Callable[[], Any], where: torch.device, seconds: float, group: dist.ProcessGroup | None) -> float:
    """Median milliseconds of some calls after a first one, as many as fit; all ranks make as many."""
    start = time.perf_counter()
    function()
    _wait(where)
    first = time.perf_counter() - start
    if first * 1e3 < 500:
        start = time.perf_counter()
        function()
        _wait(where)
        first = time.perf_counter() - start
    calls = torch.tensor(max(1, min(20, int(seconds / max(first, 1e-6)))))
    if group is not None:
        dist.all_reduce(calls, dist.ReduceOp.MIN)
        dist.barrier()
    if where.type == "cuda":
        # The host runs ahead, as in a training: its time, and how far ranks are apart, count once, not each time.
        marks = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(int(calls))]
        for begin, end in marks:
            begin.record()
            function()
            end.record()
        torch.cuda.synchronize()
        return statistics.median(begin.elapsed_time(end) for begin, end in marks)
    samples = []
    for _ in range(int(calls)):
        start = time.perf_counter()
        function()
        samples.append((time.perf_counter() - start) * 1e3)
    return statistics.median(samples)


def _wait(where: torch.device) -> None:
    if where.type == "cuda":
        torch.cuda.synchronize()


def hidden_share(function: Callable[[], Any]) -> float | None:
    """The share of the transfers' time during which this GPU computes; None where nothing travels.

    Of NCCL's kernels, which also wait for the other side: what is not hidden is an upper bound.
    """
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as trace:
        function()
        torch.cuda.synchronize()
    spans: dict[bool, list[tuple[float, float]]] = {True: [], False: []}
    for event in trace.events():
        if event.device_type == torch.autograd.DeviceType.CUDA:
            moves = "nccl" in event.name.lower()
            spans[moves].append((event.time_range.start, event.time_range.end))
    return covered(spans[True], spans[False])


def covered(spans: list[tuple[float, float]], by: list[tuple[float, float]]) -> float | None:
    """The share of the length of some spans that others cover."""
    total = sum(end - start for start, end in _union(spans))
    if not total:
        return None
    both = 0.0
    for start, end in _union(spans):
        both += sum(max(0.0, min(end, stop) - max(start, begin)) for begin, stop in _union(by))
    return both / total


def _union(spans: list[tuple[float, float]]) -> list[tuple[float, float]]:
    found: list[tuple[float, float]] = []
    for start, end in sorted(spans):
        if found and start <= found[-1][1]:
            found[-1] = found[-1][0], max(end, found[-1][1])
        else:
            found.append((start, end))
    return found


def _line(row: dict[str, Any]) -> str:
    case = row["case"]
    head = f"{case['S']:>8,} {'causal' if case['causal'] else 'full':6} {row['phase']:8} {row['impl']:22}"
    if row["ms"] is None:
        return f"{head} no speed: {row.get('why')}"
    share = "" if row["efficiency"] is None else f"  efficiency {row['efficiency']:.3f}"
    hidden = "" if row.get("hidden") is None else f"  hidden {row['hidden']:.2f}"
    return f"{head} {row['ms']:10.3f} ms {row['tflops']:8.1f} TFLOP/s{share}{hidden}"
