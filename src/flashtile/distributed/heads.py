"""Sequence against heads: exchanges after which a rank has all tokens of some heads, and back, and attention between.

`[batch, rows, heads, head_dim]` with the rows of one rank becomes `[batch, sequence, heads / ranks, head_dim]`. All
tensors of one direction are one transfer, and its messages lie in memory as the calls on either side want them::

    out of q, k, v     [ranks, rows, batch, columns]     by rank, then by token: one copy
    into               [sequence, batch, columns]        each run of a rank in its place: q, k and v are views
    out of the result  [sequence, batch, columns]        the result itself, where the batch is one
    into               [ranks, rows, batch, columns]     one copy makes rows of it

Reference: Jacobs et al., "DeepSpeed Ulysses" (2023).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, groupby, pairwise
from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from flashtile.distributed.engine import Call, forward, gradients
from flashtile.distributed.exchange import GroupExchange, Message
from flashtile.distributed.layout import Layout

#: Bytes that a thread of PyTorch's copies moves at most.
_WIDEST = 16


@dataclass(frozen=True)
class Bundle:
    """Tensors that travel side by side, in columns.

    Attributes:
        layout: how ranks cut their tokens.
        shapes: (heads, head_dim) of each on a rank that has all tokens.
    """

    layout: Layout
    shapes: tuple[tuple[int, int], ...]

    @property
    def width(self) -> int:
        return sum(map(math.prod, self.shapes))

    def columns(self, buffer: Tensor) -> list[Tensor]:
        """The tensors in a buffer `[..., width]`, each `[..., heads, head_dim]`."""
        edges = pairwise(accumulate(map(math.prod, self.shapes), initial=0))
        return [buffer[..., low:high].unflatten(-1, shape) for (low, high), shape in zip(edges, self.shapes)]


class Paths(NamedTuple):
    """What crosses between a bundle's tokens in sequence and its shards by rank, either way.

    Attributes:
        whole: the other ranks' tokens, in sequence.
        shards: this rank's tokens, in the shard of each other rank.
        own: this rank's tokens in both, which stay here.
    """

    whole: list[Message]
    shards: list[Message]
    own: list[tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class HeadExchange:
    """What ranks exchange to have all tokens of some heads.

    Attributes:
        group: of the ranks.
        queries, keys: how they cut the tokens of q and out, and of k and v.
    """

    group: GroupExchange
    queries: Layout
    keys: Layout

    def scatter(self, tensors: Sequence[Tensor], layouts: Sequence[Layout], where: str) -> Callable[[], list[Tensor]]:
        """Starts the way of `[batch, rows, heads, head_dim]` to all tokens of `heads / ranks` heads. What is returned
        waits for it, and gives views `[batch, sequence, heads / ranks, head_dim]`."""
        ranks = self.group.size
        sends, receives, arriving = [], [], []
        for bundle, members in self._bundles(tensors, layouts, ranks):
            batch, rows = members[0].shape[:2]
            outgoing = members[0].new_empty(ranks, rows, batch, bundle.width)
            for target, tensor in zip(bundle.columns(outgoing), members):
                _move(target, tensor.unflatten(2, (ranks, -1)).permute(2, 1, 0, 3, 4))
            whole = outgoing.new_empty(bundle.layout.length, batch, bundle.width)
            paths = self._paths(bundle.layout, whole, outgoing)
            receives += paths.whole
            sends += paths.shards
            for target, source in paths.own:
                _move(target, source)
            arriving += [tensor.transpose(0, 1) for tensor in bundle.columns(whole)]
        pending = self.group.start(sends, receives, where)

        def finish() -> list[Tensor]:
            pending.wait()
            return arriving

        return finish

    def gather(self, tensors: Sequence[Tensor], layouts: Sequence[Layout], where: str) -> Callable[[], list[Tensor]]:
        """Starts the way back from `scatter`. What is returned waits, and gives contiguous tensors."""
        ranks = self.group.size
        sends, receives, arriving = [], [], []
        for bundle, members in self._bundles(tensors, layouts, 1):
            batch, sequence = members[0].shape[:2]
            if len(members) == 1:
                whole = members[0].transpose(0, 1).contiguous().flatten(2)
            else:
                whole = members[0].new_empty(sequence, batch, bundle.width)
                for target, tensor in zip(bundle.columns(whole), members):
                    _move(target, tensor.transpose(0, 1))
            incoming = whole.new_empty(ranks, sequence // ranks, batch, bundle.width)
            paths = self._paths(bundle.layout, whole, incoming)
            sends += paths.whole
            receives += paths.shards
            for source, target in paths.own:
                _move(target, source)
            arriving += bundle.columns(incoming)
        pending = self.group.start(sends, receives, where)

        def finish() -> list[Tensor]:
            pending.wait()
            return [_rows_of(tensor) for tensor in arriving]

        return finish

    def _paths(self, layout: Layout, whole: Tensor, shards: Tensor) -> Paths:
        """Of `whole`, `[sequence, batch, columns]`, and `shards`, `[ranks, rows, batch, columns]`."""
        mine, paths = self.group.rank, Paths([], [], [])
        for rank in range(self.group.size):
            theirs = [whole[chunk.start : chunk.stop] for chunk in layout.ring_chunks(rank)]
            ours = [shards[rank, chunk.local : chunk.local + chunk.length] for chunk in layout.ring_chunks(mine)]
            if rank == mine:
                paths.own.extend(zip(theirs, ours))
            else:
                paths.whole.extend(Message(rank, rows) for rows in theirs)
                paths.shards.extend(Message(rank, rows) for rows in ours)
        return paths

    @staticmethod
    def _bundles(
        tensors: Sequence[Tensor], layouts: Sequence[Layout], ranks: int
    ) -> Iterable[tuple[Bundle, list[Tensor]]]:
        """Neighbours that may travel side by side: of the same tokens and dtype, and so wide that all stay aligned."""

        def alike(entry: tuple[int, tuple[Tensor, Layout]]) -> tuple:
            number, (tensor, layout) = entry
            aligned = math.prod(tensor.shape[2:]) // ranks * tensor.element_size() % _WIDEST == 0
            return layout, tensor.dtype, -1 if aligned else number

        for (layout, *_), members in groupby(enumerate(zip(tensors, layouts)), alike):
            found = [tensor for _, (tensor, _) in members]
            yield Bundle(layout, tuple((t.shape[2] // ranks, t.shape[3]) for t in found)), found


def _rows_of(parts: Tensor) -> Tensor:
    """`[ranks, rows, batch, heads, head_dim]` to `[batch, rows, ranks · heads, head_dim]`."""
    ranks, rows, batch, heads, width = parts.shape
    rows_of_all = parts.new_empty(batch, rows, ranks, heads, width)
    _move(rows_of_all, parts.permute(2, 1, 0, 3, 4))
    return rows_of_all.flatten(2, 3)


def _move(target: Tensor, source: Tensor) -> None:
    """Copies a tensor; where it can, as elements of 16 bytes: between different strides PyTorch's kernel has a thread
    for each element, which with 2 bytes reaches a fraction of the memory's bandwidth."""
    if _in_widest(target) and _in_widest(source):
        target, source = target.view(torch.complex128), source.view(torch.complex128)
    target.copy_(source)


def _in_widest(tensor: Tensor) -> bool:
    size, strides = tensor.element_size(), tensor.stride()
    return (
        strides[-1] == 1
        and not (tensor.shape[-1] * size % _WIDEST or tensor.data_ptr() % _WIDEST)
        and not any(stride * size % _WIDEST for stride in strides[:-1])
    )


class AttentionByHeads(torch.autograd.Function):
    """Attention between the two exchanges of each direction; bias, slopes and sinks are of all heads."""

    @staticmethod
    def forward(ctx, exchange: HeadExchange, call: Call, wants_lse: bool, q, k, v, bias, slopes, sinks):
        call = replace(call, head=exchange.group.rank * q.shape[2] // exchange.group.size)
        layouts = (exchange.queries, exchange.keys, exchange.keys)
        q, k, v = exchange.scatter((q, k, v), layouts, "forward, all tokens of some heads")()
        own = _OwnHeads(call.head, q.shape[2])
        call = replace(call, mask=own.of(call.mask, 1))
        out, lse = forward(call, q, k, v, own.of(bias, 1), own.of(slopes, -1), own.of(sinks, 0))
        ctx.save_for_backward(q, k, v, out, lse, bias, slopes, sinks)
        ctx.exchange, ctx.call, ctx.own = exchange, call, own
        ctx.set_materialize_grads(False)
        results = (out, _as_columns(lse)) if wants_lse else (out,)
        returned = exchange.gather(results, (exchange.queries,) * len(results), "forward, all heads of some tokens")()
        return returned[0], _as_lse(returned[1]) if wants_lse else None

    @staticmethod
    @once_differentiable
    def backward(ctx, dout, dlse):
        q, k, v, out, lse, *learned = ctx.saved_tensors
        exchange, own = ctx.exchange, ctx.own
        if dout is None:
            dout = out.new_zeros(*_shard_of(out, exchange.group.size))
        given = [dout] if dlse is None else [dout, _as_columns(dlse)]
        layouts = (exchange.queries,) * len(given)
        dout, *of_lse = exchange.scatter(given, layouts, "backward, gradients of all tokens")()
        dlse = _as_lse(of_lse[0]) if of_lse else None
        wanted = ctx.needs_input_grad[6:]
        tables = [own.of(t, dim) for t, dim in zip(learned, (1, -1, 0))]
        dq, dk, dv, *of_tables = gradients(ctx.call, dout, dlse, q, k, v, out, lse, *tables, wanted)
        layouts = (exchange.queries, exchange.keys, exchange.keys)
        of_qkv = exchange.gather((dq, dk, dv), layouts, "backward, gradients of all heads")()
        whole = (own.back(grad, of, dim) for grad, of, dim in zip(of_tables, learned, (1, -1, 0)))
        return None, None, None, *of_qkv, *whole


@dataclass(frozen=True)
class _OwnHeads:
    """This rank's heads in tensors that have all heads, or one for all.

    Attributes:
        first: number of the first.
        count: how many.
    """

    first: int
    count: int

    def of(self, tensor: Tensor | None, dim: int) -> Tensor | None:
        return tensor if tensor is None or tensor.shape[dim] == 1 else tensor.narrow(dim, self.first, self.count)

    def back(self, grad: Tensor | None, of: Tensor | None, dim: int) -> Tensor | None:
        """The gradient of the tensor from that of this rank's part: 0 for the other heads."""
        if grad is None or of is None or grad.shape == of.shape:
            return grad
        whole = torch.zeros_like(of)
        whole.narrow(dim, self.first, self.count).copy_(grad)
        return whole


def _as_columns(lse: Tensor) -> Tensor:
    """`[batch, heads, rows]` as `[batch, rows, heads, 1]`."""
    return lse.transpose(1, 2).unsqueeze(-1)


def _as_lse(columns: Tensor) -> Tensor:
    return columns.squeeze(-1).transpose(1, 2)


def _shard_of(out: Tensor, ranks: int) -> tuple[int, int, int, int]:
    """The shape of a rank's rows of all heads."""
    batch, sequence, heads, width = out.shape
    return batch, sequence // ranks, heads * ranks, width


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
