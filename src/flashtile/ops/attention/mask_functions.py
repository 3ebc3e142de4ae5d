"""Mask functions of single indices, and their values for all pairs of some tiles, by `torch.vmap`.

A mask function is plain Python on four scalars. FlexAttention (PyTorch) has functions of the same signature:
`mask_mod`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from flashtile.ops.attention.tile_lists import Elements, Grid, Tiles

#: `predicate(batch, head, q_index, k_index)`: bool, of four int64 scalars.
Predicate = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]

#: Functions that read a scalar on the host.
READING = {"__bool__", "__int__", "__index__", "__float__", "__complex__", "item", "tolist", "numpy"}


def mapped(predicate: Predicate, grid: Grid) -> Elements:
    """The elements of tiles by a function of single indices; those past the ends are asked for as the last."""

    def of_pair(batch: Tensor, head: Tensor, q_index: Tensor, k_index: Tensor) -> Tensor:
        return _checked(predicate(batch, head, q_index, k_index))

    of_keys = torch.vmap(of_pair, (None, None, None, 0))
    of_pairs = torch.vmap(of_keys, (None, None, 0, None))
    of_tiles = torch.vmap(of_pairs)

    def elements(tiles: Tiles) -> Tensor:
        within_q, within_k = (torch.arange(size, device=tiles.batch.device) for size in grid.tile)
        q_index = (tiles.first_q[:, None] + within_q).clamp(max=grid.shape[2] - 1)
        k_index = (tiles.first_k[:, None] + within_k).clamp(max=grid.shape[3] - 1)
        with _LookUpByScalars():
            return of_tiles(tiles.batch, tiles.head, q_index, k_index)

    return elements


def _checked(visible: Tensor) -> Tensor:
    if not isinstance(visible, Tensor) or visible.dtype is not torch.bool:
        got = visible.dtype if isinstance(visible, Tensor) else type(visible).__name__
        raise TypeError(f"predicate: expected a bool tensor, True = visible, got {got}; compare, as q_index >= k_index")
    if visible.dim():
        raise ValueError(
            f"predicate: expected one bool for one pair of indices, got shape {tuple(visible.shape)}; look captured "
            "tensors up by index, as ids[batch, q_index]"
        )
    return visible


class _LookUpByScalars(TorchFunctionMode):
    """Makes `table[i, j]` by integer tensors a gather. Python's indexing would read a scalar on the host. What else
    would read one raises."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        name = getattr(func, "__name__", "")
        if name in READING and torch._C._functorch.is_batchedtensor(args[0]):
            raise TypeError(
                f"predicate: expected operations on tensors alone, got {name}, which needs the value of an index or of "
                "something computed from it; combine conditions by &, | and ~, and choose by torch.where"
            )
        if func is Tensor.__getitem__ and isinstance(args[0], Tensor):
            index = args[1] if isinstance(args[1], tuple) else (args[1],)
            scalars = any(isinstance(entry, Tensor) for entry in index)
            if scalars and all(_is_index(entry) for entry in index):
                return torch.ops.aten.index(args[0], [on_device(entry, args[0].device) for entry in index])
        return func(*args, **(kwargs or {}))


def on_device(number: Any, device: torch.device) -> Tensor:
    """A number as a tensor, without a copy from the host; a tensor as it is."""
    return number if isinstance(number, Tensor) else torch.full((), number, device=device)


def _is_index(entry: object) -> bool:
    if isinstance(entry, Tensor):
        return entry.dim() == 0 and not entry.is_floating_point() and entry.dtype is not torch.bool
    return isinstance(entry, int) and not isinstance(entry, bool)
