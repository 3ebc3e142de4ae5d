"""Finds the fastest cut for a key: compiles candidates in several processes, checks and times them in this one."""

from __future__ import annotations

import importlib
import math
import multiprocessing
import re
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, ProcessPoolExecutor
from contextlib import contextmanager
from typing import Any, Literal

import torch
from torch import Tensor
from triton import knobs

from flashtile._backends import tuned
from flashtile._backends.devices import DeviceFacts, interpreting
from flashtile._backends.launch import KernelSource, compile_kernel, noting_kernels
from flashtile._backends.tuned import Lookup, Tuned, TunedRow, as_data
from flashtile.io_model import DEVICES, find_device
from flashtile.tuning import attention, companions
from flashtile.tuning.choice import Choice, Problem
from flashtile.tuning.predict import Compiled, is_modelled

#: All choices by name.
CHOICES: dict[str, Choice] = {**attention.CHOICES, **companions.CHOICES}

#: Seconds of timing of each candidate, and of each of the fastest in a round; rounds, and how many come into them.
_SECONDS, _ROUND_SECONDS, _ROUNDS, _FINALISTS = 0.02, 0.02, 6, 3
#: So many candidates are timed at least, if there are so many; of more, the half with the shorter predicted times
#: (`tests/tuning/test_predict.py`: the fastest is always in it).
_ENOUGH = 12
#: A cut serves instead of the shipped one if it takes less than so much of its time, in all rounds but one.
_WORTHWHILE = 0.985
#: How far results may be from those of the shipped cut: the norm of the difference over the norm, by bytes of a number.
_ALLOWED = {1: 0.05, 2: 0.01, 4: 1e-4}

Say = Callable[[str], None]


@contextmanager
def compilers(jobs: int) -> Iterator[Executor | None]:
    """Processes that compile; None in the interpreter, where nothing is compiled."""
    if interpreting():
        yield None
    else:
        with ProcessPoolExecutor(jobs, multiprocessing.get_context("spawn")) as pool:
            yield pool


def tune(lookup: Lookup, device: torch.device, tokens: int, pool: Executor | None, until: float, say: Say) -> TunedRow:
    """The row for a key: its cut is the fastest found up to a time of `time.monotonic`, perhaps the shipped one. Raises
    UntunableError if there is no problem for the key."""
    choice = CHOICES[lookup.choice]
    with tuned.using(None):
        problem = choice.problem(lookup.key, device, tokens)
        expected = [result.detach().clone() for result in problem()]
    candidates = list(choice.candidates(lookup.device, lookup.key, lookup.shipped))
    say(f"compiling {len(candidates)} cuts")
    candidates = _in_order(lookup, choice, _compiled(lookup, candidates, problem, pool), device)
    times: dict[Any, float] = {}
    for number, cut in enumerate(candidates, 1):
        if time.monotonic() > until:
            break
        say(f"timing {number} of {len(candidates)} cuts")
        times[cut] = _time(lookup, cut, problem, expected)
    fastest = [cut for cut in sorted(times, key=times.__getitem__)[:_FINALISTS] if times[cut] < math.inf]
    cut, ms, shipped_ms = _final(lookup, fastest, problem)
    return TunedRow(lookup.choice, as_data(lookup.key), as_data(cut), ms, shipped_ms)


def _in_order(lookup: Lookup, choice: Choice, compiled: dict[Any, Compiled | None], device: torch.device) -> list[Any]:
    """The cuts to time, in the order of their predicted times; without a model as they come. Of many, the half that is
    predicted to be slower is left out."""
    sheet = find_device(torch.cuda.get_device_name(device)) if device.type == "cuda" else None
    alike = (each for each in DEVICES.values() if each.arch == lookup.device.arch)
    sheet = sheet or next(alike, None)  # cuts compare alike on all GPUs of an architecture
    if sheet is None or not is_modelled(sheet) or choice.predict is None:
        return list(compiled)
    known = {cut: choice.predict(lookup.key, cut, said, sheet) for cut, said in compiled.items() if said}
    kept = sorted(known, key=known.__getitem__)[: max(_ENOUGH, len(known) // 2)]
    return [*kept, *(cut for cut in compiled if cut not in known)]


def _compiled(
    lookup: Lookup, candidates: list[Any], problem: Problem, pool: Executor | None
) -> dict[Any, Compiled | None]:
    """The candidates whose kernels compile, and are in Triton's cache then; what the compiler said of them, None where
    it says nothing, or a candidate changes no kernel or several."""
    if pool is None:
        return dict.fromkeys(candidates)
    facts = lookup.device._replace(tuned=None)
    shipped = _sources(lookup, lookup.shipped, problem)
    tasks = {}
    for cut in candidates:
        new = [source for source in _sources(lookup, cut, problem) if source not in shipped]
        tasks[cut] = [pool.submit(_compile, _by_name(source), facts) for source in new]
    found: dict[Any, Compiled | None] = {}
    for cut, of_cut in tasks.items():
        said = [task.result() for task in of_cut]
        if False not in said:
            found[cut] = said[0] or None if len(said) == 1 else None
    return found


def _sources(lookup: Lookup, cut: Any, problem: Problem) -> list[KernelSource]:
    """The kernels of a problem with a cut."""
    with _cutting(lookup, cut), noting_kernels() as found:
        problem()
    return found


def _by_name(source: KernelSource) -> KernelSource:
    """A source that can be sent to another process."""
    return source._replace(function=(source.function.__module__, source.function.__name__))


def _compile(source: KernelSource, facts: DeviceFacts) -> Compiled | Literal[False] | None:
    """What the compiler says of a kernel, None where it says nothing; False where it does not compile, or not fit.
    Fills Triton's cache."""
    module, name = source.function
    function = getattr(importlib.import_module(module), name)
    try:
        kernel = compile_kernel(source._replace(function=function), facts)
    except Exception:  # whatever Triton or ptxas raises: what does not compile is no candidate
        return False
    if kernel.metadata.shared > facts.shared_memory:
        return False
    if not facts.is_cuda:
        return None
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        command = [knobs.nvidia.cuobjdump.path, "-res-usage", file.name]
        said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    registers, stack = (int(re.findall(rf"{what}:(\d+)", said)[0]) for what in ("REG", "STACK"))
    return Compiled(registers, stack, kernel.metadata.shared)


@contextmanager
def _cutting(lookup: Lookup, cut: Any) -> Iterator[None]:
    """Within this context calls with the key are cut so, and all others by the shipped tables."""
    with tuned.using(Tuned([TunedRow(lookup.choice, as_data(lookup.key), as_data(cut), 0.0, 0.0)])):
        yield


def _time(lookup: Lookup, cut: Any, problem: Problem, expected: Sequence[Tensor]) -> float:
    """Milliseconds of a problem with a cut; infinite where its results are wrong, or there are none."""
    try:
        with _cutting(lookup, cut):
            return _milliseconds(problem, _SECONDS) if _is_right(problem(), expected) else math.inf
    except Exception:  # what cannot be launched is no candidate
        return math.inf


def _is_right(results: Sequence[Tensor], expected: Sequence[Tensor]) -> bool:
    for found, right in zip(results, expected, strict=True):
        difference = (found.float() - right.float()).norm() / right.float().norm().clamp(min=1e-20)
        if not difference.item() <= _ALLOWED[right.dtype.itemsize]:
            return False
    return True


def _final(lookup: Lookup, fastest: list[Any], problem: Problem) -> tuple[Any, float, float]:
    """The winner of some rounds, its time, and that of the shipped cut. Rounds go forwards and backwards in turns,
    because a GPU's clock falls while it works."""
    cuts = [lookup.shipped, *fastest]
    samples: dict[Any, list[float]] = {cut: [] for cut in cuts}
    for number in range(_ROUNDS):
        for cut in cuts if number % 2 else reversed(cuts):
            with _cutting(lookup, cut):
                samples[cut].append(_milliseconds(problem, _ROUND_SECONDS))
    medians = {cut: statistics.median(times) for cut, times in samples.items()}
    best, own = min(medians, key=medians.__getitem__), samples[lookup.shipped]
    won = sum(time < _WORTHWHILE * of_own for time, of_own in zip(samples[best], own))
    if won < _ROUNDS - 1:
        best = lookup.shipped
    return best, medians[best], medians[lookup.shipped]


def _milliseconds(problem: Problem, seconds: float) -> float:
    """Of a call, by a timer of the benchmarks."""
    from flashtile.bench.timing import make_timer

    problem()
    device = torch.device("cuda" if torch.cuda.is_available() and not interpreting() else "cpu")
    return statistics.median(make_timer(problem, device).sample(seconds))
