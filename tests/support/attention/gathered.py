"""What `flashtile.ops.kv_cache.hopper.gather` is to gather, by PyTorch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from flashtile.ops.common.split_keys.plan import SplitCall
from flashtile.ops.kv_cache.hopper.gather import Gather
from flashtile.ops.kv_cache.spec import gathered


def gathered_rows(
    gather: Gather, call: SplitCall, least: int, caches: Sequence[Tensor], indices: Sequence[Any],
    factors: Sequence[Any], length: int,
) -> tuple[list[Tensor], tuple[Any, ...], list[Any]]:  # fmt: skip
    """`gather.run(caches, indices, factors, length)`, of a `call`. Rows of nobody are NaN, and those left of a window
    and of the left padding are gathered."""
    lengths, entries, left, table, starts, new_starts, tree = indices
    batch, seq_q, *_ = call.shape
    queries = [seq_q] * batch if starts is None else starts.diff().tolist()
    new = [call.seq_new] * batch if new_starts is None else new_starts.diff().tolist()
    before = [length] * batch if lengths is None else lengths.tolist()
    served = [sequence for sequence in range(batch) if starts is None or queries[sequence] >= least]
    later = [None if strides is None else of for of, strides in zip(factors, gather.call.descale_strides)]
    outputs = [gather.pipeline.outputs[name] for name in ("keys", "values")[: len(caches)]]
    made = [torch.full(of.shape, float("nan"), dtype=of.dtype) for of in outputs]
    places = torch.full((batch,), -1, dtype=torch.int32)
    for place, sequence in enumerate(served):
        places[sequence] = place
        row = torch.arange(max(0, min(min(before[sequence], call.capacity) + new[sequence], call.capacity)))
        outer = row.new_tensor(sequence if entries is None else int(entries[sequence])).expand_as(row)
        if table is not None:
            pages = table.clamp(max=caches[0].shape[0] - 1)  # of the left padding, which are not read
            outer, row = pages[sequence, row // call.page_size].long(), row % call.page_size
        for to, cache, of, after in zip(made, caches, factors, later):
            to[place, : len(row)] = gathered(cache, of if after is None else None, (outer, row), call.dtype)
    return made, (lengths, None if starts is None else places, left, None, starts, new_starts, tree), later
