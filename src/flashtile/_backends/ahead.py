"""Compiling kernels in other processes, while this one compiles another.

Triton's compiler keeps Python's lock: the three kernels of a score function took 4.6 s one after another, and 7.5 s in
three threads. Forked processes leave what they compile in Triton's cache on disk. They use no GPU, and as few locks as
the workers of a DataLoader. One that does not come to an end is given up, and the kernel is compiled here.
"""

from __future__ import annotations

import gc
import os
import signal
import time
import warnings
from collections.abc import Callable, Hashable

#: Seconds after which a process is given up.
PATIENCE = 30.0
_POLL = 0.002

#: Processes that compile, by what.
_running: dict[Hashable, int] = {}


def start(what: Hashable, compile_it: Callable[[], object]) -> None:
    """Starts a process that calls `compile_it`, where there is none for `what`."""
    if what in _running or not hasattr(os, "fork"):
        return
    with warnings.catch_warnings():
        # Python warns of a fork beside other threads.
        warnings.simplefilter("ignore", DeprecationWarning)
        process = os.fork()
    if process:
        _running[what] = process
        return
    try:
        gc.disable()  # tensors of the other process are not this one's to free
        silent = os.open(os.devnull, os.O_WRONLY)
        os.dup2(silent, 1)
        os.dup2(silent, 2)
        compile_it()
    finally:
        os._exit(0)  # whatever was raised: the other process will find out


def wait(what: Hashable) -> None:
    """Waits for the process that compiles something, if there is one."""
    process = _running.pop(what, None)
    if process is None:
        return
    end = time.monotonic() + PATIENCE
    while not _has_ended(process):
        if time.monotonic() > end:
            os.kill(process, signal.SIGKILL)
            os.waitpid(process, 0)
            return
        time.sleep(_POLL)


def _has_ended(process: int) -> bool:
    try:
        return os.waitpid(process, os.WNOHANG)[0] == process
    except ChildProcessError:  # somebody else has waited for it
        return True
