"""One process of the benchmark: checks and times implementations with the others, and tells rank 0."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
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
from flashtile.bench.distributed.profile import line, profile
from flashtile.bench.record import make_record, write_record
from flashtile.distributed import shard_sequence
from flashtile.testing import assert_close

_GRADIENTS = ("dq", "dk", "dv")
#: A profile is of so many calls at most, and of about so many milliseconds; there is none of a call that takes longer.
_PROFILED_CALLS, _PROFILED_MS = 8, 200.0
#: A first call that takes so many seconds is a sample: what it has to prepare counts for nothing beside them. Kernels
#: are compiled by then, for so many tokens as take those of long sequences.
_LONG, _COMPILED = 0.5, 2**15


def run(
    rank: int, cases: Sequence[ParallelCase], names: Sequence[str], device: str, store: str, output: str,
    command: str, seconds: float, end: float, profiled: bool,
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
        _compile_a_share(cases, where)
        for case in cases:
            for row in _rows(case, names, mesh, where, checked, seconds, end, profiled):
                record["rows"].append(row)
                if not rank:
                    print(_line(row), flush=True)
                    write_record(record, Path(output))
        dist.barrier()  # nobody leaves while another one still waits for its messages
    finally:
        dist.destroy_process_group()


def _compile_a_share(cases: Sequence[ParallelCase], where: torch.device) -> None:
    """Each rank compiles kernels that others do not, and all find them in Triton's cache on disk."""
    kinds = sorted({case.causal for case in cases})
    if dist.get_rank() < len(kinds):
        case = next(case for case in cases if case.causal is kinds[dist.get_rank()])
        q, k, v, dout = replace(case, S=min(case.S, _COMPILED)).tensors(where)
        leaves = [t.requires_grad_() for t in (q, k, v)]
        torch.autograd.grad(flashtile.attention(q, k, v, causal=case.causal), leaves, dout)
    dist.barrier()


def _rows(
    case: ParallelCase,
    names: Sequence[str],
    mesh: DeviceMesh,
    where: torch.device,
    checked: dict[tuple[str, bool], tuple[float, str | None]],
    seconds: float,
    end: float,
    profiled: bool,
) -> list[dict[str, Any]]:
    """The rows of a case. All ranks come to the same decisions."""
    rows: list[dict[str, Any]] = []
    alone: dict[str, float] = {}
    for name in names:
        key = name, case.causal
        if key not in checked:
            checked[key] = _agreed(partial(_checked, name, case, mesh, where))
        error, why = checked[key]
        if why is None and not _all_agree(time.time() < end):
            why = "no time was left"
        times: dict[str, float] = {}
        facts: dict[str, dict[str, Any]] = {}
        if why is None:
            found, why = _agreed(partial(_measure, name, case, mesh, where, seconds, profiled))
            times, facts = found or ({}, {})
        if why is None and name == BASELINE:
            times, facts = _of_each(times, facts)
        if name == BASELINE:
            alone = times
        for phase in PHASES:
            ms = times.get(phase)
            rows.append(
                {
                    "op": OP, "phase": phase, "impl": name, "case": case.record(), "ms": ms,
                    "tflops": None if ms is None else case.flops(phase) / ms / 1e9, "gbps": None, "error": error,
                    "timer": "cuda-events" if where.type == "cuda" else "perf-counter",
                    "efficiency": _efficiency(name, case, ms, alone.get(phase)), **facts.get(phase, {}),
                }
                | ({} if why is None else {"why": why})
            )  # fmt: skip
    return rows


def _of_each(
    times: dict[str, float], facts: dict[str, dict[str, Any]]
) -> tuple[dict[str, float], dict[str, dict[str, Any]]]:
    """One GPU's time: the mean of what each takes for all of the work, at the same time as the others. GPUs of a kind
    differ by some percent, and which one is the first is chance."""
    mine = torch.tensor([times[phase] for phase in PHASES], dtype=torch.float64, device="cpu")
    of_phase = dict(zip(PHASES, torch.stack(_gathered(mine), 1).tolist()))
    facts = {phase: {**facts[phase], "ms_of_gpus": of_phase[phase]} for phase in PHASES}
    return {phase: statistics.fmean(each) for phase, each in of_phase.items()}, facts


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
    written = torch.zeros(1200, dtype=torch.uint8, device="cpu")  # 300 letters have at most so many bytes
    letters = (why or "").encode()
    written[: len(letters)] = torch.tensor(list(letters), dtype=torch.uint8, device="cpu")
    reasons = [bytes(each.tolist()).rstrip(b"\0").decode() for each in _gathered(written)]
    why = next(filter(None, reasons), None)
    return (None if why else found), why


def _gathered(tensor: Tensor) -> list[Tensor]:
    """The tensors of all ranks, by gloo. `all_gather_object` would need numpy."""
    found = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(found, tensor)
    return found


def _all_agree(here: bool) -> bool:
    answer = torch.tensor(int(here), device="cpu")
    dist.all_reduce(answer, dist.ReduceOp.MIN)
    return bool(answer)


def _checked(name: str, case: ParallelCase, mesh: DeviceMesh, where: torch.device) -> float:
    """The largest error over few tokens; then it runs once over as many as take the kernels that are measured."""
    worst = _error(name, case.checked, mesh, where)
    short = replace(case, S=min(case.S, _COMPILED))
    with IMPLEMENTATIONS[name](short, mesh, short.tensors(where)) as problem:
        torch.autograd.grad(problem.forward(), problem.leaves, problem.dout)
    return worst


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
    name: str, case: ParallelCase, mesh: DeviceMesh, where: torch.device, seconds: float, profiled: bool
) -> tuple[dict[str, float], dict[str, dict[str, Any]]]:
    """Milliseconds of each phase, those of the slowest rank, and what else is known of it on rank 0. All of the work on
    one GPU every rank does by itself, so that a failure there leaves nobody waiting."""
    times: dict[str, float] = {}
    facts: dict[str, dict[str, Any]] = {}
    with IMPLEMENTATIONS[name](case, mesh, case.tensors(where)) as problem:

        def both() -> tuple[Tensor, ...]:
            return torch.autograd.grad(problem.forward(), problem.leaves, problem.dout)

        def forward() -> Tensor:
            with torch.no_grad():
                return problem.forward()

        group = None if name == BASELINE else dist.group.WORLD
        for phase, function in zip(PHASES, (forward, both)):
            facts[phase] = {}
            if where.type == "cuda":
                torch.cuda.reset_peak_memory_stats()
                held = torch.cuda.memory_allocated()
            ms = _median(function, where, seconds, group)
            times[phase] = ms if group is None else _slowest(ms)
            if where.type == "cuda":
                facts[phase]["peak_mib"] = (torch.cuda.max_memory_allocated() - held) / 2**20
                calls = min(_PROFILED_CALLS, int(_PROFILED_MS / max(times[phase], 1e-3)))
                if profiled and calls and group is not None:
                    facts[phase]["profile"] = profile(function, calls)
    return times, facts


def _slowest(ms: float) -> float:
    tensor = torch.tensor(ms, dtype=torch.float64, device="cpu")
    dist.all_reduce(tensor, dist.ReduceOp.MAX)
    return float(tensor)


def _median(function: Callable[[], Any], where: torch.device, seconds: float, group: dist.ProcessGroup | None) -> float:
    """Median milliseconds of some calls, as many as fit; all ranks make as many. Kernels are compiled by now."""
    first = _samples(function, where, 1)[0]
    calls = torch.tensor(0 if first > _LONG * 1e3 else max(1, min(20, int(seconds * 1e3 / first))), device="cpu")
    if group is not None:
        dist.all_reduce(calls, dist.ReduceOp.MIN)
    if not calls:
        return first
    first = _samples(function, where, 1)[0]
    calls = torch.tensor(max(1, min(20, int(seconds * 1e3 / first))), device="cpu")
    if group is not None:
        dist.all_reduce(calls, dist.ReduceOp.MIN)
        dist.barrier()
    return statistics.median(_samples(function, where, int(calls)))


def _samples(function: Callable[[], Any], where: torch.device, calls: int) -> list[float]:
    """Milliseconds of some calls. On a GPU the host runs ahead, as in a training: its time, and how far ranks are
    apart, count once, not each time."""
    if where.type == "cuda":
        marks = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(calls)]
        for begin, end in marks:
            begin.record()
            function()
            end.record()
        torch.cuda.synchronize()
        return [begin.elapsed_time(end) for begin, end in marks]
    samples = []
    for _ in range(calls):
        start = time.perf_counter()
        function()
        samples.append((time.perf_counter() - start) * 1e3)
    return samples


def _line(row: dict[str, Any]) -> str:
    case = row["case"]
    head = f"{case['S']:>8,} {'causal' if case['causal'] else 'full':6} {row['phase']:8} {row['impl']:22}"
    if row["ms"] is None:
        return f"{head} no speed: {row.get('why')}"
    share = "" if row["efficiency"] is None else f"  efficiency {row['efficiency']:.3f}"
    shown = f"{head} {row['ms']:10.3f} ms {row['tflops']:8.1f} TFLOP/s{share}"
    return f"{shown}\n{'':17}{line(row['profile'])}" if row.get("profile") else shown
