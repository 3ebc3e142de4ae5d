"""`flashtile doctor`: what is installed, and which backends really work here."""

from __future__ import annotations

import multiprocessing
import os
import shutil
import sysconfig
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from typing import Any

import torch
from rich.console import Console
from rich.progress import Progress

import flashtile
from flashtile import testing
from flashtile.bench.commands import default_device
from flashtile.bench.record import FACTS, machine, versions
from flashtile.bench.report import Table
from flashtile.bench.start import how_to_install, installed
from flashtile.cli.console import print_table, print_text
from flashtile.testing.kernel_checks import KernelCheck, kernel_checks

_CPU = torch.device("cpu")
#: A GPU that all Triton kernels but Hopper's have been compiled for.
_ANY_GPU = "a100"
#: Files that the drivers of NVIDIA's and AMD's GPUs make.
_GPU_DRIVERS = ("/dev/nvidiactl", "/dev/kfd")
#: A package that flashtile can do without -> what it is for, and how to get it.
_OPTIONAL = {
    "matplotlib": ("pictures of `report` and `examples/demo.py`", how_to_install("plots")),
    "transformers": ("flashtile.integrations.transformers, `bench train`", how_to_install("transformers")),
}


@dataclass(frozen=True)
class Diagnosis:
    """Whether a backend gave right results on a device, and if not, why."""

    backend: str
    device: torch.device
    problem: str | None


def examine(backend: str) -> Diagnosis:
    """Runs a small forward and backward, and compares them with the fp64 reference."""
    device = default_device()
    if _explained(backend, device).backend is None and _explained(backend, _CPU).backend is not None:
        device = _CPU
    explained = _explained(backend, device)
    if explained.backend is None:
        return Diagnosis(backend, device, explained.reason)
    case = testing.AttentionCase(
        seq_q=96, seq_k=96, head_dim=32, head_dim_v=32, dtype=_dtype(device), arguments={"causal": True}
    )
    try:
        testing.check(case, backend, device)
    except Exception as error:  # whatever is wrong is what the user wants to know
        lines = str(error).strip().splitlines() or [""]
        # Only what flashtile did not foresee needs the name of its exception.
        prefix = "" if isinstance(error, ValueError) else f"{type(error).__name__}: "
        return Diagnosis(backend, device, prefix + lines[0])
    return Diagnosis(backend, device, None)


def backends() -> tuple[tuple[str, ...], str]:
    """All of attention, in the order in which "auto" tries them, and the one that it takes for `examine`'s call."""
    explained = _explained("auto", default_device())
    return explained.backends, explained.backend or "none"


def _explained(backend: str, device: torch.device | str) -> flashtile.Explanation:
    """The answer of `flashtile.explain` for the call of `examine`."""
    dtype = torch.float16 if isinstance(device, str) else _dtype(device)
    q = torch.empty(1, 96, 1, 32, dtype=dtype, device="meta")
    return flashtile.explain(q, q, q, causal=True, backend=backend, device=device)


@dataclass(frozen=True)
class Missing:
    """A missing package or program, its purpose, and how to get it."""

    name: str
    purpose: str
    remedy: str


def missing() -> list[Missing]:
    """Packages and programs that flashtile could use on this machine and does not find."""
    found = []
    if default_device().type == "cpu" and any(map(os.path.exists, _GPU_DRIVERS)):
        remedy = "install the build of torch for it: https://pytorch.org/get-started/locally/"
        found.append(Missing("torch for the GPU", f"the GPU's driver is here, and torch {torch.__version__}", remedy))
    triton = _explained("triton", _ANY_GPU)
    if triton.backend is None:
        found.append(Missing("triton", "kernels on a GPU, and their interpreter", triton.reason))
    elif default_device().type == "cuda":
        if not (os.environ.get("CC") or any(map(shutil.which, ("gcc", "clang", "cc")))):
            found.append(Missing("a C compiler", "Triton's launch stubs", "on Debian: apt-get install gcc"))
        if not os.path.exists(os.path.join(sysconfig.get_path("include"), "Python.h")):
            found.append(Missing("Python.h", "Triton's launch stubs", "on Debian: apt-get install python3-dev"))
    for package, (purpose, remedy) in _OPTIONAL.items():
        if not installed(package):
            found.append(Missing(package, purpose, remedy))
    return found


def tables(diagnoses: list[Diagnosis], lacks: list[Missing]) -> Iterator[Table]:
    """Versions and facts of the device, what is missing, and the backends."""
    facts: dict[str, Any] = machine(default_device())
    lines = [[name, version or "not installed"] for name, version in versions().items() if version or name == "triton"]
    lines += [[label, str(facts[name])] for name, label in FACTS.items() if facts.get(name)]
    yield Table("This machine", ["", "here"], lines, words=True)
    if lacks:
        lines = [[lack.name, lack.purpose, lack.remedy] for lack in lacks]
        yield Table("Not here", ["", "for", "remedy"], lines, words=True)
    lines = [[d.backend, str(d.device), "works" if d.problem is None else d.problem] for d in diagnoses]
    title = "Backends, each tried with a small forward and backward"
    yield Table(title, ["backend", "tensors on", "result"], lines, words=True)


@dataclass(frozen=True)
class KernelResult:
    """The result of a check of `--check-kernels`: no problem, or the first line of what went wrong."""

    backend: str
    check: KernelCheck
    problem: str | None


#: Compilation takes most of the time, and each process has a context of its own in the GPU's memory.
_MOST_PROCESSES = 8


def backends_to_check() -> list[str]:
    """The backends with kernels of their own for the default device."""
    explained = {backend: _explained(backend, default_device()) for backend in backends()[0]}
    return [name for name, found in explained.items() if any(kernel.backend == name for kernel in found.kernels)]


def check_kernels(backends: list[str]) -> Iterator[KernelResult]:
    """Runs all checks of the backends, on a GPU in several processes. The results come in no fixed order."""
    device = default_device()
    jobs = [(backend, number) for backend in backends for number in range(len(kernel_checks(backend)))]
    if device.type == "cpu":
        for backend, number in jobs:
            yield KernelResult(backend, kernel_checks(backend)[number], _problem(backend, number, str(device)))
        return
    processes = min(_MOST_PROCESSES, os.cpu_count() or 1)
    with ProcessPoolExecutor(processes, multiprocessing.get_context("spawn")) as pool:
        tasks = {pool.submit(_problem, *job, str(device)): job for job in jobs}
        for task in as_completed(tasks):
            backend, number = tasks[task]
            # A process that ends, as after an illegal memory access, is an error of the task.
            error = task.exception()
            yield KernelResult(backend, kernel_checks(backend)[number], task.result() if error is None else str(error))


def _problem(backend: str, number: int, device: str) -> str | None:
    try:
        kernel_checks(backend)[number].run(torch.device(device))
    except Exception as error:
        return f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0]}"
    return None


def run_checks(console: Console, show: bool) -> list[KernelResult]:
    """Runs all checks of kernels, and where `show` is set prints what they found."""
    names = backends_to_check()
    results = []
    with Progress(console=console, transient=True, disable=not show) as progress:
        total = sum(len(kernel_checks(backend)) for backend in names)
        first = "" if default_device().type == "cpu" else ", which compiles their kernels first"
        if show:
            print_text(console, f"Checking {total} calls of {' and '.join(names)}{first}.")
        bar = progress.add_task("checking kernels", total=total)
        for result in check_kernels(names):
            results.append(result)
            progress.update(bar, advance=1, description=f"checked {result.check.operation}")
    if show:
        print_table(console, kernels_table(results))
        for result in results:
            if result.problem:
                print_text(console, f"{result.backend}: {result.check.operation} {result.check.name}: {result.problem}")
    return results


def as_data(
    diagnoses: list[Diagnosis], auto: Diagnosis, lacks: list[Missing], results: list[KernelResult]
) -> dict[str, Any]:
    """All that the command finds, for programs; a `problem` of None says that something works."""
    return {
        "versions": versions(),
        "machine": machine(default_device()),
        "missing": list(map(asdict, lacks)),
        "backends": [{"backend": d.backend, "device": str(d.device), "problem": d.problem} for d in diagnoses],
        "auto": auto.backend,
        "kernels": [
            {"backend": r.backend, "operation": r.check.operation, "call": r.check.name, "problem": r.problem}
            for r in results
        ],
    }


def kernels_table(results: list[KernelResult]) -> Table:
    """How many calls of each operation were right."""
    calls = Counter((result.backend, result.check.operation) for result in results)
    wrong = Counter((result.backend, result.check.operation) for result in results if result.problem)
    lines = [[*key, str(count), str(wrong[key])] for key, count in sorted(calls.items())]
    title = "Kernels, each call compared with the reference in float64"
    return Table(title, ["backend", "operation", "calls", "wrong"], lines, keys=2)


def _dtype(device: torch.device) -> torch.dtype:
    """One that every GPU has: bf16 came with compute capability 8."""
    return torch.float16 if device.type == "cuda" else torch.float32
