"""Sequence against heads: all-to-all exchanges after which a rank has all tokens of some heads, and back.

`[batch, rows, heads, head_dim]` with the rows of one rank becomes `[batch, ranks · rows, heads / ranks, head_dim]`, the
rows in the order of the ranks. Reference: Jacobs et al., "DeepSpeed Ulysses" (2023).
"""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor

from flashtile.distributed.exchange import GroupExchange
from flashtile.distributed.layout import Layout


class _ScatterHeads(torch.autograd.Function):
    @staticmethod
    def forward(ctx, exchange: GroupExchange, tensor: Tensor) -> Tensor:
        ctx.exchange = exchange
        return _scatter(exchange, tensor, "forward, all tokens of some heads")

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[None, Tensor]:
        return None, _gather(ctx.exchange, grad, "backward, gradients of all heads")


class _GatherHeads(torch.autograd.Function):
    @staticmethod
    def forward(ctx, exchange: GroupExchange, tensor: Tensor) -> Tensor:
        ctx.exchange = exchange
        return _gather(exchange, tensor, "forward, all heads of some tokens")

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[None, Tensor]:
        return None, _scatter(ctx.exchange, grad, "backward, gradients of all tokens")


def _scatter(exchange: GroupExchange, tensor: Tensor, where: str) -> Tensor:
    ranks = exchange.size
    parts = tensor.unflatten(2, (ranks, -1)).permute(2, 0, 1, 3, 4).contiguous()  # [ranks, B, S, H / ranks, D]
    return exchange.all_to_all(parts, where).transpose(0, 1).flatten(1, 2)


def _gather(exchange: GroupExchange, tensor: Tensor, where: str) -> Tensor:
    ranks = exchange.size
    parts = tensor.unflatten(1, (ranks, -1)).transpose(0, 1).contiguous()
    return exchange.all_to_all(parts, where).permute(1, 2, 0, 3, 4).flatten(2, 3)


def scatter_heads(exchange: GroupExchange, tensor: Tensor, layout: Layout | None) -> Tensor:
    """`[batch, rows, heads, head_dim]` of a rank to all tokens of `heads / ranks` heads, differentiably.

    Args:
        exchange: with the ranks that have the other tokens.
        tensor: whose heads the number of ranks divides.
        layout: how these ranks cut the sequence, to put it in order; None leaves the tokens in the order of the ranks.
    """
    whole = _ScatterHeads.apply(exchange, tensor)
    return whole if layout is None else _picked(whole, _runs_in_order(layout))


def gather_heads(exchange: GroupExchange, tensor: Tensor, layout: Layout | None) -> Tensor:
    """The way back from `scatter_heads`."""
    if layout is not None:
        runs = [(c.start, c.stop) for rank in range(layout.ring) for c in layout.ring_chunks(rank)]
        tensor = _picked(tensor, runs)
    return _GatherHeads.apply(exchange, tensor)


def _runs_in_order(layout: Layout) -> list[tuple[int, int]]:
    """Where in the shards, one after another, the runs of the sequence lie, in its order."""
    runs = [(chunk, rank * layout.share) for rank in range(layout.ring) for chunk in layout.ring_chunks(rank)]
    return [(c.local + first, c.local + first + c.length) for c, first in sorted(runs)]


def _picked(tensor: Tensor, runs: list[tuple[int, int]]) -> Tensor:
    """Runs of rows, one after another."""
    if all(left[1] == right[0] for left, right in pairwise(runs)):
        return tensor
    return torch.cat([tensor[:, begin:end] for begin, end in runs], dim=1)


def shared_out(tensor: Tensor, ranks: int) -> Tensor:
    """Keys or values whose heads are fewer than the ranks, each repeated for the ranks that read it."""
    heads = tensor.shape[2]
    return tensor if heads % ranks == 0 else tensor.repeat_interleave(ranks // heads, dim=2)


def check_heads(heads: int, heads_kv: int, ranks: int) -> None:
    """Whether heads can be shared out.

    Raises:
        ValueError: the ranks do not divide them.
    """
    if heads % ranks:
        raise ValueError(
            f"strategy: expected a number of query heads that {ranks} ranks divide, to exchange heads for tokens, got "
            f"{heads}; take strategy='ring', or 'ring_all_to_all' with fewer ranks in its second dimension"
        )
    if heads_kv % ranks and ranks % heads_kv:
        raise ValueError(
            f"strategy: expected key/value heads that {ranks} ranks divide, or that divide {ranks}, got {heads_kv}; "
            "take strategy='ring'"
        )
