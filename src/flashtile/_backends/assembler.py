"""Which ptxas makes machine code of the PTX that Triton has compiled.

Triton's wheel has two, of CUDA 12 and of CUDA 13. From Triton 3.9 on it takes the newer one for sm_90 as well, which
keeps fewer values of the Hopper kernels in registers: forwards take up to twice as long
(`docs/engineering_log/compilers.md`). So the kernels of this package take the older one there, unless a user has said
which one to take.
"""

from __future__ import annotations

import contextlib
import functools
import os
import threading
from collections.abc import Iterator
from typing import Any

from triton import knobs

from flashtile._backends.devices import DeviceFacts, triton_version

#: What says which ptxas Triton calls for sm_90: its knob, and a user's variable.
_KNOB, _VARIABLE = "ptxas_blackwell", "TRITON_PTXAS_BLACKWELL_PATH"

#: The first Triton that takes the newer one for sm_90.
_FIRST = 3, 9

_lock = threading.Lock()
_compiling = 0


@contextlib.contextmanager
def assembler(device: DeviceFacts) -> Iterator[dict[str, Any]]:
    """While this lasts, Triton takes the ptxas for `device`. Returns what `triton.compile` is given beside source,
    target and options: a key for its disk cache, which tells the two apart."""
    global _compiling
    knob = vars(knobs.nvidia)
    path = _older() if device.arch == "sm_90" and _VARIABLE not in os.environ else None
    if path is None or knob.get(_KNOB, path) != path:
        yield {}
        return
    with _lock:  # threads compile at the same time
        _compiling += 1
        knob[_KNOB] = path
    try:
        from triton._C.libtriton import get_cache_invalidating_env_vars

        yield {"_env_vars": {**get_cache_invalidating_env_vars(), _KNOB: knobs.nvidia.ptxas_blackwell.version}}
    finally:
        with _lock:
            _compiling -= 1
            if not _compiling:
                del knob[_KNOB]


@functools.cache
def _older() -> str | None:
    """The path of Triton's ptxas of CUDA 12; None if Triton takes it for sm_90 by itself, or has none."""
    if triton_version() < _FIRST:
        return None
    try:
        tool = knobs.nvidia.ptxas
    except (AttributeError, RuntimeError):  # "keep it until legacy ptxas is removed", says Triton 3.9
        return None
    return tool.path if tool.version.startswith("12.") else None
