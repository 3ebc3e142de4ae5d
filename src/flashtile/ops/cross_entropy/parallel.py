"""Rows whose columns are spread over processes: what they tell one another, through `torch.distributed`."""

from __future__ import annotations

from types import ModuleType
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor

from flashtile.ops.cross_entropy.losses import losses, merge
from flashtile.ops.cross_entropy.spec import CrossEntropySpec, Results, Statistics


def forward(
    module: ModuleType, logits: Tensor, labels: Tensor, spec: CrossEntropySpec, weights: Tensor | None
) -> Results:
    """The losses of whole rows, by a backend's module, from the columns `[rows, columns]` that are here.
    `weights`: `[vocabulary + 1]`, the class weights and their sum, or None."""
    if not spec.group:
        return module.forward(logits, labels, spec, weights)
    group = _group(spec)
    found = module.read(logits, labels, spec, weights)
    here = torch.column_stack(found)
    everywhere = here.new_empty(group.size() * len(here), here.shape[1])
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # its name before PyTorch 2.13
    gather(everywhere, here, group=group)
    of_processes = everywhere.view(group.size(), *here.shape)
    parts = Statistics(of_processes[..., :2], of_processes[..., 2], of_processes[..., 3])
    return losses(merge(parts, spec, weights), labels, spec, weights)


def add_up(tensor: Tensor | None, spec: CrossEntropySpec) -> None:
    """Adds a tensor over processes, in place; each then has the sum."""
    if tensor is not None and spec.group:
        dist.all_reduce(tensor, group=_group(spec))


def _group(spec: CrossEntropySpec) -> Any:
    return dist.distributed_c10d._resolve_process_group(cast(Any, spec.group))
