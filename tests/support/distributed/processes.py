"""Processes that meet over gloo, or NCCL, run many calls once, and leave what each got in a file.

A test file starts them once; its tests look at the results, so that a case costs milliseconds and not a start.
"""

from __future__ import annotations

import multiprocessing
import multiprocessing.context
import multiprocessing.forkserver
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from flashtile.distributed import context_parallel_attention, schedule, shard_sequence
from flashtile.testing import AttentionCase, Inputs, Size, assert_close, assert_same, make_inputs
from flashtile.testing import run as run_alone
from flashtile.testing.cases import LEARNED, RelativeScore, cancelled_sizes

if TYPE_CHECKING:
    import pytest

Job = Callable[[DeviceMesh], Any]


@dataclass(frozen=True)
class Parallel:
    """A case, and how ranks compute it.

    Attributes:
        strategy, layout: as of `context_parallel_attention`.
        row_sharded: bias and mask are given with the rows of the shard.
        rest: the last sequence of a packed case belongs to no document.
        in_runs: heads that are exchanged come in runs, however few bytes they have.
    """

    case: AttentionCase
    strategy: str = "ring"
    layout: str = "zigzag"
    row_sharded: bool = False
    rest: bool = False
    in_runs: bool = False
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def inputs(self) -> Inputs:
        made = _inputs.get(str(self.case)) or _inputs.setdefault(str(self.case), make_inputs(self.case))
        inputs = replace(made, tensors=dict(made.tensors))
        if self.rest:
            for name in ("cu_seqlens_q", "cu_seqlens_k"):
                inputs.tensors[name] = inputs.tensors[name][:-1]
        return inputs


#: Inputs of cases, which several strategies share.
_inputs: dict[str, Inputs] = {}


class _Error(str):
    """The traceback of a job."""


class _Results(dict[str, Any]):
    """What each job of a rank gave. Asking for that of a job which failed raises AssertionError with its traceback."""

    def __getitem__(self, job: str) -> Any:
        found = super().__getitem__(job)
        assert not isinstance(found, _Error), found
        return found


def start(
    jobs: dict[str, Any], ranks: int, folder: Path, device: str = "cpu", method: str = "forkserver"
) -> list[_Results]:
    """Runs jobs on so many processes. Returns for each rank what each job gave. `method`: of `multiprocessing`."""
    forking()
    mp.start_processes(_process, (ranks, str(folder), device, jobs), nprocs=ranks, start_method=method)
    return _read(ranks, folder)


def start_once(jobs: dict[str, Any], ranks: int, factory: pytest.TempPathFactory, name: str) -> list[_Results]:
    """`start` for the tests of a file, whichever of the processes that share the tests they run in. `name`: of it."""
    from support.running.once import once  # ranks need no pytest

    return _read(ranks, once(factory, name, lambda folder: start(jobs, ranks, folder)))


def _read(ranks: int, folder: Path) -> list[_Results]:
    return [_Results(torch.load(folder / f"rank{rank}.pt", weights_only=False)) for rank in range(ranks)]


#: Oracle, eager results and sizes of a case in one process, computed once.
_expected: dict[tuple[str, bool], Any] = {}


def check_ranks(job: Parallel, name: str, results: list[_Results], device: str = "cpu") -> None:
    """Holds what ranks computed together to the tolerance policy. One process computes on `device`."""
    key = str(job.case), job.rest
    if key not in _expected:
        inputs = job.inputs if device == "cpu" else make_inputs(job.case, device)
        oracle, eager = (run_alone(job.case, inputs, "reference", of) for of in (torch.float64, job.case.dtype))
        cancelled = cancelled_sizes(job.case, inputs, oracle)
        _expected[key] = *({of: t.cpu() for of, t in results.items()} for results in (oracle, eager)), cancelled
    oracle, eager, cancelled = _expected[key]
    for of, value in together(job, [of_rank[name] for of_rank in results]).items():
        assert_close(f"{job.case}: {of}", value, oracle[of], eager[of], cancelled.get(of, Size()))


def check_pairs(job: str, results: list[_Results]) -> None:
    """Each rank found what was expected: a job gave pairs of both, by name."""
    for of_rank in results:
        for name, (found, expected) in of_rank[job].items():
            assert_same(found, expected, name)


def refusal(call: Callable[[], Any]) -> str:
    """What a call says when it refuses, or "nothing"."""
    try:
        call()
    except (NotImplementedError, TypeError, ValueError) as error:
        return str(error)
    return "nothing"


def forking(afresh: bool = False) -> multiprocessing.context.ForkServerContext:
    """Processes that are forked from one which has imported what all need: that takes longer than most jobs do.
    `afresh`: from a new one, because what they print goes where the one that forks them was begun."""
    if afresh:
        multiprocessing.forkserver._forkserver._stop()
    context = multiprocessing.get_context("forkserver")
    of_torch = ["torch._dynamo", "torch.distributed.checkpoint.state_dict", "torch.distributed.fsdp"]
    context.set_forkserver_preload(
        [*of_torch, "torch.distributed.tensor.parallel", "triton", "flashtile.distributed", "flashtile.testing"]
    )
    return context


def _process(rank: int, ranks: int, folder: str, device: str, jobs: dict[str, Any]) -> None:
    torch.set_num_threads(1)
    if device == "cuda":
        torch.cuda.set_device(rank)
    dist.init_process_group(
        "nccl" if device == "cuda" else "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=ranks,
        timeout=timedelta(seconds=120 if device == "cuda" else 60),
    )  # fmt: skip
    results = {}
    try:
        line = init_device_mesh(device, (ranks,))
        square = init_device_mesh(device, (2, ranks // 2)) if ranks % 2 == 0 else None
        for name, job in jobs.items():
            two = isinstance(job, Parallel) and job.strategy == "ring_all_to_all"
            mesh = square if two else line
            assert mesh is not None
            try:
                results[name] = run(job, mesh) if isinstance(job, Parallel) else job(mesh)
            except Exception:
                results[name] = _Error(traceback.format_exc())
        torch.save(results, Path(folder) / f"rank{rank}.pt")
    finally:
        dist.destroy_process_group()


def run(job: Parallel, mesh: DeviceMesh) -> dict[str, Tensor]:
    """This rank's shard of the results of a case, forward and backward, on the CPU."""
    case, inputs = job.case, job.inputs
    dim = 0 if case.packed else 1

    def shard(tensor: Tensor, along: int = dim) -> Tensor:
        return shard_sequence(tensor.to(mesh.device_type), mesh, dim=along, layout=job.layout)

    leaves = {name: shard(getattr(inputs, name)).requires_grad_() for name in ("q", "k", "v")}
    tensors: dict[str, Any] = {name: t for name, t in inputs.tensors.items() if not name.startswith("cu_")}
    given = tensors.pop("score_mod", None)
    tensors = {name: t.to(mesh.device_type) for name, t in tensors.items()}
    for name in ("bias", "mask"):
        if job.row_sharded and name in tensors:
            tensors[name] = shard(tensors[name], -2)
    for name in LEARNED:
        if name in tensors:
            leaves[name] = tensors[name] = tensors[name].requires_grad_()
    if given is not None:
        leaves["score_mod"] = given.table.to(mesh.device_type, copy=True).requires_grad_()
        tensors["score_mod"] = RelativeScore(leaves["score_mod"])
    packed = {"cu_seqlens": inputs.tensors["cu_seqlens_q"]} if case.packed else {}
    with mock.patch.object(schedule, "_WORTH_RUNS", 0 if job.in_runs else schedule._WORTH_RUNS):
        call = partial(
            context_parallel_attention, leaves["q"], leaves["k"], leaves["v"], mesh=mesh, strategy=job.strategy,
            layout=job.layout, **packed, **tensors, **case.arguments, **job.options,
        )  # fmt: skip
        out, lse, *max_scores = call(return_lse=True)
        if max_scores:
            assert torch.equal(call()[1], max_scores[0])
    upstream = shard(inputs.dout), shard(inputs.dlse, -1)
    grads = torch.autograd.grad((out, lse), list(leaves.values()), upstream)
    results = {"out": out.detach().clone(), "lse": lse.detach().clone(), **dict(zip(("max_scores",), max_scores))}
    results |= {f"d{name}": grad for name, grad in zip(leaves, grads)}
    for result in (out, lse):
        result.add_(1)  # autograd allows it, as of any result
    return {name: result.cpu() for name, result in results.items()}


def together(job: Parallel, parts: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """The results of the whole sequence from those of all ranks; what all ranks must have alike, is looked at."""
    from flashtile.distributed.layout import Layout

    ranks, dim = len(parts), 0 if job.case.packed else 1
    ring, inner = (2, ranks // 2) if job.strategy == "ring_all_to_all" else (ranks, 1)
    whole: dict[str, Tensor] = {}
    for name in parts[0]:
        tensors = [part[name] for part in parts]
        along = -1 if name in ("lse", "max_scores") else dim
        if name in ("dbias",) and job.row_sharded:
            along = -2
        elif name[1:] in LEARNED:
            for rank, tensor in enumerate(tensors):
                assert torch.equal(tensor, tensors[0]), f"{name} of rank {rank} is not that of rank 0"
            whole[name] = tensors[0]
            continue
        layout = Layout(tensors[0].shape[along] * ranks, ring, job.layout, inner)
        runs = sorted((chunk, rank) for rank in range(ranks) for chunk in layout.chunks(rank))
        whole[name] = torch.cat([tensors[r].narrow(along, c.local, c.length) for c, r in runs], dim=along)
    return whole
