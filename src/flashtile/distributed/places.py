"""This rank among the others: groups and layout of a DeviceMesh, and the check that all ranks mean the same call."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from flashtile.distributed.exchange import GroupExchange
from flashtile.distributed.layout import Layout, LayoutKind
from flashtile.distributed.merge import wide_dtype

STRATEGIES = ("ring", "all_to_all", "all_gather", "ring_all_to_all")

#: Calls that the ranks of a group have agreed on.
_agreed: set[tuple[Any, ...]] = set()


@dataclass(frozen=True)
class Places:
    """The ranks of a mesh: `groups`, the exchange in each of its one or two dimensions, the ring's first."""

    groups: tuple[GroupExchange, ...]

    @property
    def rank(self) -> int:
        """This rank's number in the layout."""
        return self.groups[0].rank * self.inner + (self.groups[1].rank if len(self.groups) > 1 else 0)

    @property
    def ranks(self) -> int:
        return self.groups[0].size * self.inner

    @property
    def inner(self) -> int:
        return self.groups[1].size if len(self.groups) > 1 else 1

    def layout(self, length: int, kind: LayoutKind) -> Layout:
        return Layout(length, self.groups[0].size, kind, self.inner)

    def add_up(self, tensor: Tensor, where: str) -> None:
        """The sum over all ranks, in place."""
        for group in self.groups:
            group.add_up(tensor, where)

    def from_first(self, tensor: Tensor, where: str) -> None:
        """The tensor of the first rank of all, in place."""
        for group in self.groups:
            group.from_first(tensor, where)


def mesh_places(mesh: DeviceMesh) -> Places:
    """The ranks of a mesh of one or two dimensions; TypeError, ValueError if it is no such mesh."""
    if not isinstance(mesh, DeviceMesh):
        raise TypeError(
            f"mesh: expected a torch.distributed DeviceMesh, got {type(mesh).__name__}; make one with "
            "init_device_mesh(device_type, (ranks,)), or DeviceMesh.from_group of a process group"
        )
    if mesh.ndim not in (1, 2):
        raise ValueError(
            f"mesh: expected one dimension, or two for 'ring_all_to_all', got {mesh.ndim}; take a part of it, such as "
            "mesh['cp']"
        )
    groups = [mesh.get_group(dim) for dim in range(mesh.ndim)]
    return Places(tuple(GroupExchange(group, mesh.device_type) for group in groups))


class _Replicated(torch.autograd.Function):
    """The same tensor on all ranks: its gradient is the sum of theirs."""

    @staticmethod
    def forward(ctx, places: Places, name: str, tensor: Tensor) -> Tensor:
        ctx.places, ctx.name = places, name
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[None, None, Tensor]:
        wide = grad.to(wide_dtype(grad.dtype), copy=True).contiguous()
        ctx.places.add_up(wide, f"backward, the sum of {ctx.name}'s gradient")
        return None, None, wide.to(grad.dtype)


def replicated(places: Places, name: str, tensor: Tensor | None, adds_up: bool) -> Tensor | None:
    """A tensor that all ranks have; with `adds_up` its gradient is that of all ranks together."""
    return tensor if tensor is None or not adds_up else _Replicated.apply(places, name, tensor)


def agree(places: Places, facts: dict[str, Any], values: dict[str, Any]) -> None:
    """Raises ValueError on every rank unless all came with the same call; asked once for each kind of call. `facts`:
    what all must have in common, by name; hashable. `values`: likewise, but tensors, whose values are looked at, in
    every call, with FLASHTILE_CHECK_VALUES=1 only."""
    of_values = os.environ.get("FLASHTILE_CHECK_VALUES", "0") not in ("", "0")  # as `ops.common.checks`
    if of_values:
        facts = facts | {name: repr(t.tolist() if isinstance(t, Tensor) else t) for name, t in values.items()}
    signature = tuple(facts.items())
    for group in places.groups:
        key = (*group.identity, signature)
        if key in _agreed and not of_values:
            continue
        for place, theirs in enumerate(group.objects(facts, "the check that all ranks make the same call")):
            _compare(facts, theirs, group, place)
        _agreed.add(key)


def _compare(mine: dict[str, Any], theirs: dict[str, Any], group: GroupExchange, place: int) -> None:
    differing = [name for name in mine if mine[name] != theirs.get(name)]
    if differing:
        name = differing[0]
        raise ValueError(
            f"{name}: expected the same on all ranks, got {mine[name]} on rank {dist.get_rank()} and "
            f"{theirs.get(name)} on rank {group.global_rank(place)}"
            + (f" (and others differ: {', '.join(differing[1:])})" if differing[1:] else "")
            + "; every rank must pass its own shard of one and the same call"
        )
