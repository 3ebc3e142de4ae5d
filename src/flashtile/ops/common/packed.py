"""Checks of packed sequences: where each begins, and how long the longest is."""

from __future__ import annotations

import torch
from torch import Tensor

from flashtile.ops.common.checks import LARGEST_COUNT, check_lengths, check_tensors
from flashtile.ops.common.sizes import known


def check_cu_seqlens(
    name: str, cu_seqlens: Tensor, device: torch.device, entries: int | None = None, meaning: str = "", of: str = "q"
) -> int:
    """Checks cumulative lengths, not their values; returns how many there are. `entries`: how many there must be. `of`:
    the tensor whose device it is."""
    check_tensors(**{name: cu_seqlens})
    if entries is None:
        if cu_seqlens.dim() != 1 or cu_seqlens.shape[0] < 1:
            raise ValueError(
                f"{name}: expected shape (batch + 1,), got {tuple(cu_seqlens.shape)}; an empty batch is "
                "torch.zeros(1, dtype=torch.int32)"
            )
        entries = cu_seqlens.shape[0]
    check_lengths(name, cu_seqlens, entries, device, f"batch + 1 cumulative lengths{meaning}", of)
    return entries


def check_max_seqlen(name: str, max_seqlen: int | None) -> None:
    if max_seqlen is None:
        return
    if isinstance(max_seqlen, Tensor):
        raise TypeError(f"{name}: expected an int, got a Tensor; reading it would synchronise, leave it out instead")
    if isinstance(max_seqlen, bool) or not isinstance(max_seqlen, (int, torch.SymInt)):
        raise TypeError(f"{name}: expected an int, got {max_seqlen!r}; leave it out if it is not known")
    if known(max_seqlen < 0):
        raise ValueError(
            f"{name}: expected an upper bound of the sequence lengths, at least 0, got {max_seqlen}; leave it out"
        )
    if known(max_seqlen >= LARGEST_COUNT):
        raise ValueError(f"{name}: expected an upper bound below 2**62, got {max_seqlen}; leave it out")


def check_cu_seqlens_values(name: str, cu_seqlens: Tensor, total: int, max_seqlen: int | None = None) -> None:
    """Checks the values of cumulative lengths against the number of packed rows and the longest sequence."""
    first, last = int(cu_seqlens[0]), int(cu_seqlens[-1])
    if first != 0:
        raise ValueError(f"{name}: expected to start at 0, got {first}; prepend 0 to the cumulative lengths")
    lengths = cu_seqlens.diff()
    if (lengths < 0).any():
        where = int((lengths < 0).nonzero()[0])
        raise ValueError(
            f"{name}: expected cumulative lengths that never decrease, got {int(cu_seqlens[where])} then "
            f"{int(cu_seqlens[where + 1])} at index {where + 1}; pass lengths.cumsum(0) behind a 0"
        )
    if last > total:
        raise ValueError(
            f"{name}: expected its last value to be at most the packed total, {total}, got {last}; pass all of the rows"
        )
    if max_seqlen is not None and lengths.numel() and int(lengths.max()) > max_seqlen:
        raise ValueError(
            f"max_seqlen{name.removeprefix('cu_seqlens')}: expected an upper bound of the sequence lengths, got "
            f"{max_seqlen} for a sequence of {int(lengths.max())}; leave it out if it is not known"
        )
