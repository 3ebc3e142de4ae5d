"""The batch-invariant mode: whether calls that do not say so themselves are batch-invariant, and what these refuse."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from flashtile.ops.common.checks import raise_not_bool, refuse


class _Mode:
    """`enabled`: all calls of the program are batch-invariant. The environment variable is read at import."""

    enabled = os.environ.get("FLASHTILE_BATCH_INVARIANT", "0") not in ("", "0")


MODE = _Mode()


@contextmanager
def batch_invariant_mode(enabled: bool = True) -> Iterator[None]:
    """Within it, and in a function that it decorates, calls of attention are made with `batch_invariant=True`.

    It holds in all threads, as `torch.use_deterministic_algorithms` does. The backward of a call is in the mode that
    its forward was in. The environment variable `FLASHTILE_BATCH_INVARIANT=1`, read at import, does the same for a
    whole program.

    Args:
        enabled: False leaves the mode. It does not change what `batch_invariant=True` says in a call.

    Raises:
        TypeError: `enabled` is no bool.
    """
    raise_not_bool(enabled=enabled)
    before, MODE.enabled = MODE.enabled, enabled
    try:
        yield
    finally:
        MODE.enabled = before


def check_attention(dtype: torch.dtype, dropout_p: float) -> None:
    """Refuses what a batch-invariant call cannot have."""
    if dtype.itemsize == 1:
        raise ValueError(
            f"batch_invariant: expected inputs of 16 bits or more, got {dtype}, whose kernels differ with the layout "
            "of a call; multiply by the factors and cast to bfloat16, or leave the mode"
        )
    if dropout_p:
        raise ValueError(
            f"batch_invariant: expected dropout_p = 0, got {dropout_p}: which weights are dropped depends on the "
            "number of a sequence in its batch; turn dropout off, or leave the mode"
        )


def check_cache(dtype: torch.dtype, num_splits: int | None, **refused: object) -> None:
    """Refuses what a batch-invariant call over a cache cannot have. `dtype`: of the cache, `refused`: arguments that
    say where the sums of a sequence are cut."""
    if dtype.itemsize == 1:
        raise ValueError(
            f"batch_invariant: expected caches in q's dtype, got {dtype}: a tile of 8-bit rows has one unit, which "
            "depends on all of them; keep the caches in 16 bits, or leave the mode"
        )
    remedy = "it says where the sums of a sequence are cut; leave it out, or leave the mode"
    refuse("in the batch-invariant mode", remedy, **refused)
    if num_splits not in (None, 1):
        raise ValueError(
            f"num_splits: expected None or 1 in the batch-invariant mode, got {num_splits}: splits end where the "
            "lengths say; leave num_splits out, or leave the mode"
        )
