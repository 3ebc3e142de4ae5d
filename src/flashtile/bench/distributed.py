"""The benchmark of context-parallel attention: our strategies and PyTorch's own, beside one GPU, in one run. A process
for each GPU checks and times implementations; rank 0 writes the record."""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Literal, NamedTuple

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import flashtile
from flashtile.bench.base import AnyCase, judge, select_named
from flashtile.bench.commands import check_seconds
from flashtile.bench.record import Recorder, Row, command_line, make_row, require_writable
from flashtile.bench.runner import describe
from flashtile.bench.start import UserError
from flashtile.bench.timing import describe_profile, profile_calls, time_calls
from flashtile.distributed import context_parallel_attention, shard_sequence

PHASES = ("fwd", "fwd+bwd")
#: Multiples of what any layout cuts, small enough for a float64 oracle.
_CHECKED = 512


@dataclass(frozen=True)
class ParallelCase(AnyCase):
    """Attention over S tokens on `gpus` GPUs."""

    B: int
    S: int
    H: int
    Hkv: int
    D: int
    causal: bool
    dtype: str
    gpus: int

    op: ClassVar[str] = "context-parallel"

    @property
    def name(self) -> str:
        return f"s{self.S}-{'causal' if self.causal else 'full'}-h{self.H}:{self.Hkv}-d{self.D}-{self.gpus}gpus"

    def flops(self, phase: str) -> float:
        """The operations of all GPUs together."""
        forward = 4.0 * self.B * self.H * self.S**2 * self.D / (2 if self.causal else 1)
        return forward * (1 if phase == "fwd" else 3.5)

    def cut(self, tokens: int) -> ParallelCase:
        """The same over so many tokens at most."""
        return replace(self, S=min(self.S, tokens))

    def tensors(self, device: torch.device) -> tuple[Tensor, ...]:
        """q, k, v and dout of the whole sequence, the same on every rank."""
        options: dict[str, Any] = {"device": device, "dtype": self.torch_dtype}
        options["generator"] = torch.Generator(device).manual_seed(0)
        heads = (self.H, self.Hkv, self.Hkv, self.H)
        return tuple(torch.randn(self.B, self.S, count, self.D, **options) for count in heads)


def cases_named(device: str, gpus: int, quick: bool = False) -> list[ParallelCase]:
    """32 query and 8 key/value heads of 128 columns, causal and full, 32k to 512k tokens in all."""
    if device == "cpu":
        return [ParallelCase(1, 64 * gpus, 4, 2, 16, causal=True, dtype="fp32", gpus=gpus)]
    lengths = (2**15, 2**17) if quick else (2**15, 2**17, 2**18, 2**19)
    # The longest without a mask would take most of the time that the others take together.
    chosen = [(length, causal) for length in lengths for causal in (True, False) if causal or length < 2**19]
    return [ParallelCase(1, length, 32, 8, 128, causal=causal, dtype="bf16", gpus=gpus) for length, causal in chosen]


LayoutKind = Literal["zigzag", "contiguous"]
Strategy = Literal["ring", "all_to_all", "all_gather", "ring_all_to_all"]


class Share(NamedTuple):
    """What an implementation has on one rank: `leaves` (q, k, v), the function of them, `dout`, and how the sequence is
    cut."""

    leaves: tuple[Tensor, ...]
    dout: Tensor
    forward: Callable[[], Tensor]
    layout: LayoutKind


@contextmanager
def one_gpu(case: ParallelCase, mesh: DeviceMesh, whole: tuple[Tensor, ...]) -> Iterator[Share]:
    """All of the work on this GPU alone."""
    q, k, v = (t.requires_grad_() for t in whole[:3])
    yield Share((q, k, v), whole[3], lambda: flashtile.attention(q, k, v, causal=case.causal), "contiguous")


@contextmanager
def ours(strategy: Strategy, case: ParallelCase, mesh: DeviceMesh, whole: tuple[Tensor, ...]) -> Iterator[Share]:
    *qkv, dout = (shard_sequence(t, mesh) for t in whole)
    leaves = tuple(t.requires_grad_() for t in qkv)
    options: dict[str, Any] = {"mesh": mesh, "strategy": strategy, "causal": case.causal}
    yield Share(leaves, dout, lambda: context_parallel_attention(*leaves, **options), "zigzag")


@contextmanager
def torch_context_parallel(
    rotation: str, case: ParallelCase, mesh: DeviceMesh, whole: tuple[Tensor, ...]
) -> Iterator[Share]:
    """`torch.distributed.tensor.experimental.context_parallel` around `scaled_dot_product_attention`, which it makes a
    ring. It is balanced like ours under a causal mask, and cuts runs without one."""
    from torch.distributed.tensor.experimental import _attention as experimental
    from torch.distributed.tensor.experimental import context_parallel

    experimental.set_rotate_method(rotation)
    experimental._cp_options.enable_load_balance = case.causal
    layout: LayoutKind = "zigzag" if case.causal else "contiguous"
    dout = shard_sequence(whole[3], mesh, layout=layout)
    # It shards its buffers in place, in PyTorch's layout.
    q, k, v = (t.transpose(1, 2).contiguous() for t in whole[:3])
    repeats = case.H // case.Hkv
    if repeats > 1:  # its ring does not know grouped heads
        k, v = (t.repeat_interleave(repeats, dim=1) for t in (k, v))
    buffers = [q, k, v]
    with context_parallel(mesh, buffers=buffers, buffer_seq_dims=[2, 2, 2], no_restore_buffers=set(buffers)):
        for tensor in buffers:
            tensor.requires_grad_()
        attend = partial(F.scaled_dot_product_attention, q, k, v, is_causal=case.causal)
        yield Share((q, k, v), dout, lambda: attend().transpose(1, 2), layout)


#: How each makes the share of a case on a mesh, from the tensors of the whole sequence, and holds it open; in the order
#: in which they are measured. The first is what efficiencies refer to.
IMPLEMENTATIONS: dict[str, Callable[[ParallelCase, DeviceMesh, tuple[Tensor, ...]], Any]] = {
    "flashtile-one-gpu": one_gpu,
    "flashtile-ring": partial(ours, "ring"),
    "flashtile-all_to_all": partial(ours, "all_to_all"),
    "flashtile-all_gather": partial(ours, "all_gather"),
    "torch-cp-allgather": partial(torch_context_parallel, "allgather"),
    "torch-cp-alltoall": partial(torch_context_parallel, "alltoall"),
}
BASELINE = "flashtile-one-gpu"


def gradients_in_layout(name: str, case: ParallelCase, grads: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Gradients of q, k and v as of flashtile's tensors."""
    if not name.startswith("torch-"):
        return grads
    dq, dk, dv = (g.transpose(1, 2) for g in grads)
    groups = (case.Hkv, case.H // case.Hkv)
    return dq, *(g.unflatten(2, groups).float().sum(3).to(g.dtype) for g in (dk, dv))


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
    """Measures context parallelism, by the options of the command line; the baseline, one GPU alone, always. Rank 0
    prints a line for each row and writes the record after each case. Raises UserError if there are not as many GPUs, an
    option matches nothing, or `output` cannot be written."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda" and gpus is not None and gpus > torch.cuda.device_count():
        raise UserError(f"--gpus: expected at most {torch.cuda.device_count()}, the GPUs of this machine, got {gpus}")
    check_seconds(seconds)
    count = gpus or (torch.cuda.device_count() if device == "cuda" else 2)
    cases = cases_named(device, count, quick)
    (causal,) = select_named("--mask", [mask], MASKS, "this benchmark")
    known = {str(case.S): case.S for case in cases}
    chosen = select_named("--lengths", map(str, lengths), known, "this benchmark") or known.values()
    cases = [case for case in cases if case.causal in causal and case.S in chosen]
    select_named("--impl", impl, IMPLEMENTATIONS, device)
    names = list(dict.fromkeys([BASELINE, *(impl or IMPLEMENTATIONS)]))
    require_writable(output)
    if device == "cpu":
        print(f"no GPU is here: one case of {cases[0].S} tokens tries the code, and its speeds say nothing of GPUs")
    with tempfile.TemporaryDirectory() as folder:
        end, store = time.time() + limit, f"{folder}/store"
        run = _Run(cases, names, store, output, command_line(), seconds=seconds, end=end, profiled=profile)
        mp.spawn(run, nprocs=count)


#: A profile is of so many calls at most, and of about so many milliseconds; there is none of a call that takes longer.
_PROFILED_CALLS, _PROFILED_MS = 8, 200.0
#: A first call that takes so many seconds is a sample: what it has to prepare counts for nothing beside them. Kernels
#: are compiled by then, for so many tokens as take those of long sequences.
_LONG, _COMPILED = 0.5, 2**15


#: `ms` of each phase of an implementation, and what else is known of it.
Found = dict[str, dict[str, Any]]


@dataclass
class _Run:
    """The run, called with its rank in a process for each GPU; all ranks come to the same decisions. `store`: a file by
    which they meet. `seconds`: for the samples of a phase. `end`: the time from which on nothing new is started."""

    cases: Sequence[ParallelCase]
    names: Sequence[str]
    store: str
    output: Path
    command: str
    seconds: float
    end: float
    profiled: bool

    def __call__(self, rank: int) -> None:
        """Rank 0 writes the record after each case."""
        gpus, on_gpu = self.cases[0].gpus, torch.cuda.is_available()
        self._where = torch.device("cuda", rank) if on_gpu else torch.device("cpu")
        if on_gpu:
            torch.cuda.set_device(rank)
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if on_gpu else "gloo", init_method=f"file://{self.store}", rank=rank, world_size=gpus,
            timeout=timedelta(minutes=5),
        )  # fmt: skip
        try:
            recorder = Recorder(self._where, self.command, None if rank else self.output)
            self._mesh = init_device_mesh(self._where.type, (gpus,))
            #: By implementation and mask, the largest error, and what is wrong.
            self._checked: dict[tuple[str, bool], tuple[float, str | None]] = {}
            self._compile_a_share()
            for case in self.cases:
                for row in self._rows(case):
                    recorder.add([row])
                    if not rank:
                        print(_line(row), flush=True)
            dist.barrier()  # nobody leaves while another one still waits for its messages
        finally:
            dist.destroy_process_group()

    def _compile_a_share(self) -> None:
        """Each rank compiles kernels that others do not, and all find them in Triton's cache on disk."""
        kinds = [*{case.causal: case for case in self.cases}.values()]
        if dist.get_rank() < len(kinds):
            case = kinds[dist.get_rank()]
            q, k, v, dout = case.cut(_COMPILED).tensors(self._where)
            leaves = [t.requires_grad_() for t in (q, k, v)]
            torch.autograd.grad(flashtile.attention(q, k, v, causal=case.causal), leaves, dout)
        dist.barrier()

    def _rows(self, case: ParallelCase) -> list[Row]:
        rows: list[Row] = []
        alone: Found = {}
        timer = "cuda-events" if self._where.type == "cuda" else "perf-counter"
        for name in self.names:
            error, why, found = self._judged(name, case)
            if name == BASELINE:
                alone = found = _mean_time(found) if found else {}
            gpus = 1 if name == BASELINE else case.gpus
            for phase in PHASES:
                facts: dict[str, Any] = {"efficiency": None} | ({} if why is None else {"why": why})
                if found:
                    ms = found[phase]["ms"]
                    facts |= {"tflops": case.flops(phase) / ms / 1e9, **found[phase]}
                    if alone:  # one GPU's time for all of the work over all GPUs' time
                        facts["efficiency"] = alone[phase]["ms"] / (ms * gpus)
                rows.append(make_row(case.op, phase, name, case.record(), error=error, timer=timer, **facts))
        return rows

    def _judged(self, name: str, case: ParallelCase) -> tuple[float, str | None, Found | None]:
        """An implementation's error, why it has no time, and its times if it has some."""
        key = name, case.causal
        if key not in self._checked:
            self._checked[key] = _agreed(partial(self._check, name, case))
        error, why = self._checked[key]
        if why is None and not _agree(time.time() < self.end):
            why = "no time was left"
        if why is not None:
            return error, why, None
        found, why = _agreed(partial(self._measure, name, case))
        return error, why, found

    def _check(self, name: str, case: ParallelCase) -> float:
        """The largest error of this rank's output and gradients over few tokens, which must be within the policy. Then
        it runs once over as many as take the kernels that are measured."""
        few, short = case.cut(_CHECKED * case.gpus), case.cut(_COMPILED)
        whole = few.tensors(self._where)
        results: list[Sequence[Tensor]] = []
        for dtype in (torch.float64, whole[0].dtype):
            tensors = [t.detach().to(dtype).requires_grad_() for t in whole[:3]]
            out = flashtile.attention(*tensors, causal=case.causal, backend="reference")
            results.append((out.detach(), *torch.autograd.grad(out, tensors, whole[3].to(dtype))))
        with IMPLEMENTATIONS[name](few, self._mesh, tuple(t.detach().clone() for t in whole)) as share:
            out = share.forward()
            grads = torch.autograd.grad(out, share.leaves, share.dout)
            found = (out.detach(), *gradients_in_layout(name, case, grads))
        if name != BASELINE:
            results = [[shard_sequence(t, self._mesh, layout=share.layout) for t in each] for each in results]
        verdict = judge(zip(("out", "dq", "dk", "dv"), found, *results))
        if verdict.why is not None:
            raise AssertionError(verdict.why)
        with IMPLEMENTATIONS[name](short, self._mesh, short.tensors(self._where)) as share:
            torch.autograd.grad(share.forward(), share.leaves, share.dout)
        return verdict.error

    def _measure(self, name: str, case: ParallelCase) -> Found:
        """The times of the slowest rank, and what else is known on rank 0. All of the work on one GPU every rank does
        by itself, so that a failure there leaves nobody waiting."""
        found: Found = {}
        on_gpu, alone = self._where.type == "cuda", name == BASELINE
        with IMPLEMENTATIONS[name](case, self._mesh, case.tensors(self._where)) as share:

            def both() -> tuple[Tensor, ...]:
                return torch.autograd.grad(share.forward(), share.leaves, share.dout)

            for phase, function in zip(PHASES, (torch.no_grad()(share.forward), both)):
                if on_gpu:
                    torch.cuda.reset_peak_memory_stats()
                    held = torch.cuda.memory_allocated()
                ms = self._median(function, alone)
                found[phase] = {"ms": ms if alone else _agree(ms, dist.ReduceOp.MAX)}
                if on_gpu:
                    found[phase]["peak_mib"] = (torch.cuda.max_memory_allocated() - held) / 2**20
                    calls = min(_PROFILED_CALLS, int(_PROFILED_MS / max(found[phase]["ms"], 1e-3)))
                    if self.profiled and calls and not alone:
                        found[phase]["profile"] = profile_calls(function, calls)
        return found

    def _median(self, function: Callable[[], Any], alone: bool) -> float:
        """Median milliseconds of some calls, as many as fit; all ranks make as many. Kernels are compiled by now. On a
        GPU the host runs ahead, as in a training: its time, and how far ranks are apart, count once, not each time."""
        (first,) = time_calls(function, 1, self._where)
        short = first <= _LONG * 1e3
        if not (short if alone else _agree(short)):
            return first
        (first,) = time_calls(function, 1, self._where)
        calls = max(1, min(20, int(self.seconds * 1e3 / first)))
        if not alone:
            calls = int(_agree(calls))
            dist.barrier()
        return statistics.median(time_calls(function, calls, self._where))


def _mean_time(found: Found) -> Found:
    """One GPU's time: the mean of what each takes for all of the work, at the same time as the others. GPUs of a kind
    differ by some percent, and which one is the first is chance."""
    mine = torch.tensor([found[phase]["ms"] for phase in PHASES], dtype=torch.float64, device="cpu")
    of_phase = dict(zip(PHASES, torch.stack(_gathered(mine), 1).tolist()))
    return {phase: {**found[phase], "ms": statistics.fmean(ms), "ms_of_gpus": ms} for phase, ms in of_phase.items()}


def _agreed(action: Callable[[], Any]) -> tuple[Any, str | None]:
    """The result of an action here, and why it failed on any rank."""
    found, why = None, None
    try:
        found = action()
    except Exception as error:
        why = describe(error)
    written = torch.zeros(1200, dtype=torch.uint8, device="cpu")  # 200 letters and a name have at most so many bytes
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


def _agree(value: float, reduction: Any = dist.ReduceOp.MIN) -> float:
    """The least number of all ranks, or what another reduction makes of them."""
    number = torch.tensor(value, dtype=torch.float64, device="cpu")
    dist.all_reduce(number, reduction)
    return float(number)


def _line(row: Row) -> str:
    case = row["case"]
    head = f"{case['S']:>8,} {'causal' if case['causal'] else 'full':6} {row['phase']:8} {row['impl']:22}"
    if row["ms"] is None:
        return f"{head} no speed: {row.get('why')}"
    share = "" if row["efficiency"] is None else f"  efficiency {row['efficiency']:.3f}"
    shown = f"{head} {row['ms']:10.3f} ms {row['tflops']:8.1f} TFLOP/s{share}"
    return f"{shown}\n{'':17}{describe_profile(row['profile'])}" if row.get("profile") else shown
