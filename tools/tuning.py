"""What the tuners share: a choice in the place of a table's, and the time of a call whose results are right."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from flashtile._backends import clear_plans
from flashtile.bench.timing import make_timer

DEVICE = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")


@contextmanager
def choosing(module: ModuleType, name: str, choose: Callable[..., Any]) -> Iterator[None]:
    """Calls choose by this function in the place of the module's own."""
    own = getattr(module, name)
    setattr(module, name, choose)
    clear_plans()
    try:
        yield
    finally:
        setattr(module, name, own)
        clear_plans()


def milliseconds(call: Callable[[], Any], seconds: float) -> float:
    call()
    return statistics.median(make_timer(call, DEVICE).sample(seconds))


def time_right(
    call: Callable[[], Sequence[Tensor | None]], expected: Sequence[Tensor | None], seconds: float, allowed: float
) -> dict[str, Any]:
    """Milliseconds (`ms`) of a call whose results are `expected`, and their `error`; else `ms` is None, and `why`."""
    try:
        pairs = [(a.float(), b.float()) for a, b in zip(call(), expected, strict=True) if a is not None]
        error = max(((a - b).norm() / b.norm().clamp(min=1e-20)).item() for a, b in pairs)
        if error < allowed:
            return {"ms": milliseconds(call, seconds), "error": error}
        return {"ms": None, "error": error, "why": f"differs from the results of the table's by {error:.1e}"}
    except Exception as error:  # reported: what does not compile, launch or fit is no candidate
        return {"ms": None, "why": f"{type(error).__name__}: {str(error)[:200]}"}
