"""Score functions as kernels take them: sources compiled, and the parameters of the tensors that they read."""

from __future__ import annotations

import functools
import hashlib
import linecache
from collections import namedtuple
from collections.abc import Callable, Mapping
from typing import Any

import torch

from flashtile._backends.launch import ABSENT, Parameter, int32, int64, pointer_to
from flashtile.ops.attention.call import Call, TensorFacts
from flashtile.ops.attention.gpu.score_writer import ScoreBounds


def compiled(source: str, jit: Callable[..., Any], names: Mapping[str, Any]) -> Any:
    """A function of a name of its own, because Triton tells functions that are constants apart by their names. `names`:
    what its source uses, such as the language."""
    source = source.strip()
    name = f"{source[4 : source.index('(')]}_{hashlib.sha256(source.encode()).hexdigest()[:12]}"
    source = f"@jit\ndef {name}{source[source.index('(') :]}"
    filename = f"<flashtile {name}>"
    # Triton and tracebacks read it there; without a time of change it stays.
    linecache.cache[filename] = (len(source), None, source.splitlines(keepends=True), filename)
    namespace = {**names, "jit": jit, "__name__": __name__}
    exec(compile(source, filename, "exec"), namespace)
    return namespace[name]


def score_bounds(call: Call) -> ScoreBounds:
    """The bounds of a dense call whose tiles divide it."""
    captured = tuple(of.shape for of in call.aux.captured)
    return ScoreBounds(call.batch, call.heads, call.rows_q, call.rows_k, captured)


def captured_parameters(
    captured: tuple[TensorFacts, ...], summed: tuple[bool, ...] = (), in_waves: bool = False
) -> dict[str, Any]:
    """The kernels' parameters for what a score function reads: NamedTuples `captured` of addresses, `captured_sizes`,
    and `captured_sums` of the addresses where gradients are added up, and with `in_waves` of the place of the wave.
    `summed`: for which tensors."""
    tensors = {f"tensor{number}": pointer_to(_stored(of.dtype)) for number, of in enumerate(captured)}
    sizes: dict[str, Parameter] = {
        f"size{number}_{dim}": (int64 if of.large else int32)(size)
        for number, of in enumerate(captured)
        for dim, size in enumerate(of.shape)
    }
    sums = {f"sum{number}": pointer_to(torch.float32 if wants else None) for number, wants in enumerate(summed)}
    if in_waves:
        sums["wave"] = pointer_to(torch.int32)
    return {
        "captured": _group("Captured", tensors) if tensors else ABSENT,
        "captured_sizes": _group("CapturedSizes", sizes) if sizes else int32(None),
        "captured_sums": _group("CapturedSums", sums) if sums else ABSENT,
    }


def _stored(dtype: torch.dtype) -> torch.dtype:
    return torch.uint8 if dtype is torch.bool else dtype


def _group(name: str, fields: dict[str, Parameter]) -> tuple[Parameter, ...]:
    return _group_class(name, tuple(fields))(*fields.values())


@functools.lru_cache(maxsize=1024)
def _group_class(name: str, fields: tuple[str, ...]) -> Any:
    return namedtuple(name, fields)
