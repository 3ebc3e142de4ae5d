"""Runs one measured piece of work by itself, so that its peak memory is its own.

On a CPU each piece gets a fresh process, and its memory is the growth of that process's peak resident size: what the
operating system had to provide, PyTorch's allocator and every library's scratch included. On a GPU it is the growth
of the peak that PyTorch's allocator counts, and pieces run one after another in this process.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import sys
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import torch

from flashtile.bench.start import UserError

Report = Callable[..., None]


class PieceFailedError(UserError):
    """A measured piece ended with an error, or its process was killed."""


class PeakMemory:
    """Growth of peak memory since construction, in bytes."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        if device.type == "cuda":
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats(device)
        self._start = self._now()

    def growth(self) -> int:
        return self._now() - self._start

    def _now(self) -> int:
        if self._device.type == "cuda":
            return torch.cuda.max_memory_allocated(self._device)
        import resource  # POSIX only, as the measured processes are

        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak if sys.platform == "darwin" else peak * 1024


def run_piece(
    function: Callable[..., Any],
    *arguments: Any,
    device: torch.device,
    on_report: Report = lambda *report: None,
    seconds: float | None = None,
) -> Any:
    """Calls `function(*arguments, report)`, importable and picklable, by itself and returns its result: on a CPU in a
    process, which is killed after `seconds`. `on_report` receives its reports. Raises PieceFailedError if the function
    raised, its process was killed, or its time was over."""
    if device.type == "cuda":
        gc.collect()
        torch.cuda.empty_cache()
        try:
            return function(*arguments, on_report)
        except torch.OutOfMemoryError as error:
            raise PieceFailedError("out of GPU memory") from error
    return _in_process(function, arguments, on_report, seconds)


def _in_process(function: Callable[..., Any], arguments: tuple, on_report: Report, seconds: float | None) -> Any:
    if "forkserver" not in multiprocessing.get_all_start_methods():
        raise PieceFailedError("measuring memory on a CPU needs forked processes, which this system does not have")
    # Threads that spin while they wait for one another slow everything down tenfold where other programs run too. The
    # server reads this when it starts; a user's own setting stays.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    # Forked from a server that has imported torch but computed nothing: quick to start, and its memory is still small.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["flashtile.models"])
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_child, args=(sender, torch.get_num_threads(), function, arguments), daemon=True)
    process.start()
    sender.close()
    try:
        return _receive(receiver, on_report, seconds)
    except EOFError:
        process.join()
        raise PieceFailedError(f"its process ended with code {process.exitcode}, perhaps for lack of memory") from None
    finally:
        process.kill()
        process.join()


def _receive(receiver: Connection, on_report: Report, seconds: float | None) -> Any:
    """The result of a piece, after its reports."""
    end = None if seconds is None else time.perf_counter() + seconds
    while True:
        if end is not None and not receiver.poll(max(0.0, end - time.perf_counter())):
            raise PieceFailedError(f"not done after {seconds:.0f} s")
        kind, value = receiver.recv()
        if kind == "result":
            return value
        if kind == "error":
            raise PieceFailedError(value)
        on_report(*value)


def _child(sender: Connection, threads: int, function: Callable[..., Any], arguments: tuple) -> None:
    torch.set_num_threads(threads)
    try:
        result = function(*arguments, lambda *report: sender.send(("report", report)))
        sender.send(("result", result))
    except Exception:  # handed on whole: the parent shows it
        sender.send(("error", traceback.format_exc(limit=-3)))
