"""How long a user waits for the first call with a function that was never compiled: forward and backward, each in a new
process.

The processes compile into a folder for each case. It starts with the files of a call of another head_dim, such as
Triton's launcher. The measuring process goes on with the same folders, so that FlexAttention compiles a case once.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import torch

import flashtile
from flashtile.bench.bound import Bound
from flashtile.bench.cases import Case, make_inputs
from flashtile.bench.implementations import IMPLEMENTATIONS, Implementation
from flashtile.bench.problem import AttentionProblem

#: The first of these that serves a case is what users get: its first call is measured, and so are those of the others.
_OURS = ("flashtile-auto", "flashtile-hopper", "flashtile-triton", "flashtile-cpu")
_OTHERS = ("flashtile-builtin", "flex")
#: Another call, which compiles what calls of all functions share.
_BEFORE = Case(1, 256, 1, 1, 32, 32, causal=True, function="window")
_TIMEOUT = 300
_CACHES = ("TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR")

ProblemOf = Callable[[Case, torch.device], AttentionProblem]


@contextlib.contextmanager
def first_calls(
    cases: Sequence[Case], implementations: Sequence[Implementation], device: torch.device, jobs: int
) -> Iterator[ProblemOf]:
    """Measures first calls of the cases with a function, then makes problems whose rows have them.

    Args:
        cases: all that will be measured.
        implementations: in which ways.
        device: where.
        jobs: processes at a time; 0 = none, and the problems have no first calls.
    """
    named = [case for case in cases if case.function is not None]
    tasks = [(case, each) for case in named for each in _measured(case, implementations, device)] if jobs else []
    if not tasks:
        yield AttentionProblem
        return
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder, _environment_kept():
        folders = {case: Path(folder) / str(number) for number, case in enumerate(named)}
        with ThreadPoolExecutor(jobs) as pool:
            before = Path(folder) / "before"
            list(pool.map(partial(_in_process, _BEFORE, device, before), {each.name for _, each in tasks}))
            for place in folders.values():
                shutil.copytree(before, place)
            found = list(pool.map(lambda task: _in_process(task[0], device, folders[task[0]], task[1].name), tasks))
        times: dict[Case, dict[str, float]] = {case: {} for case in named}
        for (case, each), seconds in zip(tasks, found):
            if seconds is not None:
                times[case][each.name] = seconds * 1e3

        def problem(case: Case, device: torch.device) -> AttentionProblem:
            if case in folders:
                os.environ.update(_caches(folders[case]))
            return AttentionProblem(case, device, times.get(case))

        yield problem


def _measured(case: Case, implementations: Sequence[Implementation], device: torch.device) -> list[Implementation]:
    """The implementation of ours that users get, and the others."""
    serving = {each.name: each for each in implementations if each.unsupported(case, device) is None}
    ours = [serving[name] for name in _OURS if name in serving][:1]
    return [*ours, *(each for name, each in serving.items() if name in _OTHERS)]


@contextlib.contextmanager
def _environment_kept() -> Iterator[None]:
    before = {name: os.environ.get(name) for name in _CACHES}
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def _caches(folder: Path) -> dict[str, str]:
    return {name: str(folder / name.lower()) for name in _CACHES}


def _in_process(case: Case, device: torch.device, folder: Path, implementation: str) -> float | None:
    """Seconds of the first call in a new process; None where it fails, for which the measuring process says why."""
    for place in _caches(folder).values():
        Path(place).mkdir(parents=True, exist_ok=True)
    # The processes share the cores: none starts compilers of its own.
    environment = {**os.environ, **_caches(folder), "TORCHINDUCTOR_COMPILE_THREADS": "1", "PYTHONPATH": _python_path()}
    arguments = [implementation, device.type, json.dumps(case.record())]
    command = [sys.executable, "-m", "flashtile.bench.first_call", *arguments]
    try:
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True, timeout=_TIMEOUT)
    except subprocess.SubprocessError:
        return None
    return float(done.stdout.split()[-1])


def _python_path() -> str:
    """The sources that this process runs, before what the environment says."""
    sources = str(Path(flashtile.__file__).parents[1])
    return os.pathsep.join(filter(None, (sources, os.environ.get("PYTHONPATH"))))


def main(name: str, device_type: str, record: str) -> float:
    """Seconds of the first forward and backward of this process, without importing torch and starting CUDA."""
    case, device = Case.from_record(json.loads(record)), torch.device(device_type)
    (implementation,) = (each for each in IMPLEMENTATIONS if each.name == name)
    inputs = make_inputs(case, device)
    synchronize = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    synchronize()
    begin = time.perf_counter()
    with implementation.context():
        Bound(implementation, case, inputs).backward()
    synchronize()
    return time.perf_counter() - begin


if __name__ == "__main__":
    print(main(*sys.argv[1:]))
