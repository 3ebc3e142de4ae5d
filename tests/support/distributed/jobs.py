"""What processes do in tests of errors and helpers; each gets a mesh of all of them."""

from __future__ import annotations

import os
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

import flashtile
from flashtile import patterns
from flashtile.distributed import (
    context_parallel_attention,
    mean_over_shards,
    sequence_positions,
    shard_sequence,
    unshard_sequence,
)
from flashtile.distributed.exchange import GroupExchange
from support.distributed.processes import refusal


def error(mesh: DeviceMesh, shape: tuple[int, ...] = (1, 8, 2, 4), **arguments: Any) -> str:
    q = torch.randn(shape)
    return refusal(lambda: context_parallel_attention(q, q, q, mesh=mesh, **arguments))


def shapes(mesh: DeviceMesh) -> str:
    return error(mesh, (1, 8 + 2 * dist.get_rank(), 2, 4))


def settings(mesh: DeviceMesh) -> str:
    return error(mesh, causal=dist.get_rank() == 0, scale=0.5 if dist.get_rank() else 0.25)


def bias_on_one(mesh: DeviceMesh) -> str:
    return error(mesh, bias=torch.zeros(16, 16) if dist.get_rank() else None)


def values(mesh: DeviceMesh) -> str:
    """Looked at only where asked for."""
    os.environ["FLASHTILE_CHECK_VALUES"] = "yes"
    try:
        return error(mesh, dropout_p=0.1, dropout_seed=torch.tensor([dist.get_rank(), 0]))
    finally:
        del os.environ["FLASHTILE_CHECK_VALUES"]


def values_of_earlier_calls(mesh: DeviceMesh) -> list[str]:
    """Each is one that the ranks have agreed on before, or one of them is."""
    os.environ["FLASHTILE_CHECK_VALUES"] = "1"
    try:
        seeds = torch.tensor([1, 0]), torch.tensor([2, 0])
        agreed = [error(mesh, dropout_p=0.1, dropout_seed=seed) for seed in seeds]
        found = [error(mesh, dropout_p=0.1, dropout_seed=seeds[dist.get_rank()])]
        agreed.append(error(mesh, key_lengths=torch.tensor([3])))
        found.append(error(mesh, key_lengths=torch.tensor([5 if dist.get_rank() else 3])))
        assert agreed == ["nothing"] * 3
        return found
    finally:
        del os.environ["FLASHTILE_CHECK_VALUES"]


def agreed_once(mesh: DeviceMesh) -> list[int]:
    """How many exchanges of facts three equal calls take, and one of another kind."""
    counts, calls = [], []
    exchange = GroupExchange.objects
    with mock.patch.object(GroupExchange, "objects", lambda *given: (calls.append(1), exchange(*given))[1]):
        for shape in ((1, 4, 1, 4),) * 3 + ((1, 6, 1, 4),):
            assert error(mesh, shape) == "nothing"
            counts.append(len(calls))
    return counts


def seed(mesh: DeviceMesh) -> list[torch.Tensor]:
    """Left out, it is drawn on the first rank, whatever the others' generators are at."""
    torch.manual_seed(7 + dist.get_rank())
    q = shard_sequence(torch.randn(1, 32, 2, 8, generator=torch.Generator().manual_seed(0)), mesh)
    out = unshard_sequence(context_parallel_attention(q, q, q, mesh=mesh, dropout_p=0.5), mesh)
    torch.manual_seed(7)
    whole = unshard_sequence(q, mesh)
    return [out, flashtile.attention(whole, whole, whole, dropout_p=0.5)]


def lost(mesh: DeviceMesh) -> str:
    """One rank makes a call, the other has gone on to something else."""
    group = dist.new_group(timeout=timedelta(seconds=2))
    own = DeviceMesh.from_group(group, mesh.device_type)
    assert error(own) == "nothing"
    if dist.get_rank():
        return "gone"
    try:
        error(own)
    except RuntimeError as raised:
        return str(raised)
    return "nothing"


#: Arguments of helpers that are refused, and how the message goes.
REFUSED_BY_HELPERS: dict[str, tuple[Callable[[DeviceMesh], Any], str]] = {
    "no document at 0": (
        lambda mesh: sequence_positions(8, mesh, cu_seqlens=(2, 5)),
        "cu_seqlens: expected cumulative lengths from 0 that never decrease, got (2, 5)",
    ),
    "falling": (lambda mesh: sequence_positions(8, mesh, cu_seqlens=(0, 5, 3)), "that never decrease, got (0, 5, 3)"),
    "fractions": (lambda mesh: sequence_positions(8, mesh, cu_seqlens=(0, 3.5, 8)), "cu_seqlens: expected integers"),
    "too long": (lambda mesh: sequence_positions(8, mesh, cu_seqlens=(0, 30)), "cu_seqlens: expected at most the 8"),
    "length": (lambda mesh: sequence_positions(8.0, mesh), "length: expected an int, got 8.0"),
    "negative": (lambda mesh: sequence_positions(-8, mesh), "length: expected at least 0, got -8"),
    "integers": (lambda mesh: mean_over_shards(torch.tensor(3), 4, mesh), "total: expected a tensor of floating-point"),
    "number": (lambda mesh: mean_over_shards(3.0, 4, mesh), "total: expected a tensor of floating-point"),
    "vector": (lambda mesh: mean_over_shards(torch.ones(2), 4, mesh), "total: expected a scalar, got shape (2,)"),
    "counts": (lambda mesh: mean_over_shards(torch.ones(()), torch.ones(1), mesh), "count: expected a scalar, got"),
    "dim": (
        lambda mesh: shard_sequence(torch.arange(8), mesh),
        "dim: expected a dimension of the tensor, of shape (8,)",
    ),
    "dim of shard": (lambda mesh: unshard_sequence(torch.arange(8), mesh), "dim: expected a dimension of the tensor"),
    "gradient": (
        lambda mesh: unshard_sequence(torch.ones(2, 2, requires_grad=True), mesh),
        "tensor: expected one without a gradient",
    ),
    "list": (lambda mesh: shard_sequence([1, 2], mesh), "tensor: expected a torch.Tensor, got list"),
}


def refused_by_helpers(mesh: DeviceMesh) -> dict[str, str]:
    return {name: refusal(partial(call, mesh)) for name, (call, _) in REFUSED_BY_HELPERS.items()}


def helpers(mesh: DeviceMesh) -> dict[str, torch.Tensor]:
    rank = dist.get_rank()
    total = torch.tensor([2.0, 6.0][rank], requires_grad=True)
    mean = mean_over_shards(total, [1, 3][rank], mesh)
    (grad,) = torch.autograd.grad(mean, total)
    return {
        "positions": sequence_positions(8, mesh),
        "contiguous": sequence_positions(8, mesh, layout="contiguous"),
        "documents": sequence_positions(8, mesh, cu_seqlens=(0, 3, 3, 7)),
        "mean": mean.detach(),
        "grad": grad,
        "round": unshard_sequence(shard_sequence(torch.arange(16).view(2, 8), mesh), mesh),
    }


#: Arguments that are refused, and how the message goes.
REFUSED = {
    "flag": ({"return_lse": "no"}, "return_lse: expected True or False, got 'no'"),
    "strategy": ({"strategy": "rings"}, "strategy: expected one of ring, all_to_all"),
    "mesh": ({"strategy": "ring_all_to_all"}, "mesh: expected 2 dimensions for strategy='ring_all_to_all', got 1"),
    "heads": ({"strategy": "all_to_all", "shape": (1, 8, 3, 4)}, "expected a number of query heads that 2 ranks"),
    "uneven": ({"shape": (1, 7, 2, 4)}, "sequence: expected a length that 4 divides (zigzag over 2 ranks), got 14"),
    "layout": ({"layout": "striped"}, "layout: expected one of zigzag, contiguous, got 'striped'"),
    "rows": ({"bias": torch.zeros(5, 16)}, "bias: expected the 16 rows of the whole sequence, or the 8 of this shard"),
    "row-sharded": (
        {"bias": torch.zeros(8, 16), "strategy": "all_to_all"},
        "bias: expected the 16 rows of the whole sequence with strategy='all_to_all', got 8",
    ),
    "dimensions": ({"cu_seqlens": (0, 8)}, "q: expected 3 dimensions [tokens, heads, head_dim]"),
    "documents": ({"cu_seqlens": (0, 20), "shape": (8, 2, 4)}, "cu_seqlens: expected at most the 16 tokens"),
    "decreasing": ({"cu_seqlens": (0, 9, 8), "shape": (8, 2, 4)}, "cu_seqlens: expected cumulative lengths from 0"),
    "fractions": ({"cu_seqlens": (0, 8.5), "shape": (8, 2, 4)}, "cu_seqlens: expected integers"),
    "block mask": ({"block_mask": patterns.causal(8)}, "block_mask: it was built for seq_q 8, the call has 16"),
    "no block mask": ({"block_mask": 3}, "block_mask: expected a flashtile.BlockMask, got builtins.int"),
    "score function": ({"score_mod": lambda score, *_: torch.zeros(3)}, "score_mod: expected it to return a scalar"),
    # What the calls for the parts do not see, or see as something else.
    "window": ({"window": (-1, 0)}, "window: expected left from 0 to 2**31 - 1, got -1"),
    "window of three": ({"window": (1, 2, 3)}, "window: expected a pair (left, right), got (1, 2, 3)"),
    "align": ({"align": "middle", "causal": True}, "align: expected one of 'bottom_right', 'top_left', got 'middle'"),
    "causal": ({"causal": "no"}, "causal: expected True or False, got 'no'"),
    "list": ({"alibi_slopes": [0.5, 0.25]}, "alibi_slopes: expected a torch.Tensor, got list"),
    "columns": (
        {"bias": torch.zeros(16, 21)},
        "bias: expected a shape that broadcasts to [batch, heads_q, seq_q, seq_k]",
    ),
    "bias of shard": ({"bias": torch.zeros(8, 21)}, "[1, 2, 16, 16]"),
    "mask": ({"mask": torch.ones(16, 21, dtype=torch.bool)}, "mask: expected a shape that broadcasts to [batch"),
    "heads of slopes": (
        {"alibi_slopes": torch.ones(4), "strategy": "all_to_all"},
        "alibi_slopes: expected shape [heads_q] = [2] or [batch, heads_q] = [1, 2], got [4]",
    ),
    "dtype of slopes": (
        {"alibi_slopes": torch.ones(2, dtype=torch.int64)},
        "alibi_slopes: expected dtype torch.float32",
    ),
    "heads of sinks": ({"sinks": torch.ones(1)}, "sinks: expected shape [heads_q] = [2]"),
    "dtype of sinks": ({"sinks": torch.ones(2, dtype=torch.int64)}, "sinks: expected dtype torch.float32"),
    "key lengths of documents": (
        {"cu_seqlens": (0, 9, 16), "key_lengths": torch.tensor([9, 7, 5]), "shape": (8, 2, 4)},
        "key_lengths: expected shape (2,), one length for each sequence, got (3,)",
    ),
    "bias of documents": (
        {"cu_seqlens": (0, 9, 16), "bias": torch.zeros(8, 8), "shape": (8, 2, 4)},
        "bias, mask: expected rows and columns up to the longest document, 9, got 8",
    ),
    "backend": ({"backend": "hopper"}, "backend: 'hopper' cannot serve this call"),
}


def refused(mesh: DeviceMesh) -> dict[str, str]:
    """Twice: what was refused once is not taken for a call that the ranks have agreed on."""
    first, second = ({name: error(mesh, **arguments) for name, (arguments, _) in REFUSED.items()} for _ in range(2))
    assert first == second
    return second


#: Jobs by name; the last leaves its group broken.
JOBS = {
    "refused": refused,
    "shapes": shapes,
    "settings": settings,
    "bias": bias_on_one,
    "values": values,
    "values of earlier calls": values_of_earlier_calls,
    "agreed": agreed_once,
    "seed": seed,
    "helpers": helpers,
    "refused by helpers": refused_by_helpers,
    "lost": lost,
}
