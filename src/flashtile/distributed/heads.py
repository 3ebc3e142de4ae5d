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
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, groupby, pairwise, zip_longest
from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from flashtile.distributed.engine import Call, Given, forward, gradients
from flashtile.distributed.exchange import GroupExchange, Message, Pending, arriving
from flashtile.distributed.layout import Layout
from flashtile.distributed.merge import wide_dtype
from flashtile.distributed.schedule import HeadRun, Schedule, head_runs

#: Bytes that a thread of PyTorch's copies moves at most.
_WIDEST = 16


@dataclass(frozen=True)
class Bundle:
    """Tensors that travel side by side, in columns. `layout`: of the tokens. `shapes`: (heads, head_dim) of each on a
    rank that has all tokens."""

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
    """The transfers between a bundle's tokens in sequence and its shards by rank, either way. `whole`: the other ranks'
    tokens, in sequence. `shards`: this rank's tokens, in the shard of each other rank. `own`: this rank's tokens in
    both, which stay here."""

    whole: list[Message]
    shards: list[Message]
    own: list[tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class HeadExchange:
    """The exchange by which a group's ranks get all tokens of some heads. `queries`, `keys`: how they cut those of q
    and out, and of k and v."""

    group: GroupExchange
    queries: Layout
    keys: Layout

    def run_views(self, run: HeadRun, of_queries: Sequence[Tensor], of_keys: Sequence[Tensor] = ()) -> list[Tensor]:
        """Each rank's heads of the run: views `[batch, rows, ranks, heads, head_dim]`."""
        ranks = self.group.size
        pairs = [(t, run.heads) for t in of_queries] + [(t, run.heads_kv) for t in of_keys]
        return [tensor.unflatten(2, (ranks, -1))[:, :, :, low:high] for tensor, (low, high) in pairs]

    def scatter(self, tensors: Sequence[Tensor], layouts: Sequence[Layout], where: str) -> Pending:
        """Starts the way of `[batch, rows, ranks, heads, head_dim]`, heads by the rank that gets them, to all tokens of
        this rank's. The results are views `[batch, sequence, heads, head_dim]`."""
        ranks = self.group.size
        sends, receives, received = [], [], []
        own: list[tuple[Tensor, Tensor]] = []
        shapes = [(t.shape[3], t.shape[4]) for t in tensors]
        for bundle, members in _bundles(tensors, layouts, shapes):
            batch, rows = members[0].shape[:2]
            outgoing = members[0].new_empty(ranks, rows, batch, bundle.width)
            for target, tensor in zip(bundle.columns(outgoing), members):
                _move(target, tensor.permute(2, 1, 0, 3, 4))
            whole = outgoing.new_empty(bundle.layout.length, batch, bundle.width)
            paths = self._paths(bundle.layout, whole, outgoing)
            receives += paths.whole
            sends += paths.shards
            own += paths.own
            received += [tensor.transpose(0, 1) for tensor in bundle.columns(whole)]
        pending = self.group.start(sends, receives, where)

        def finish() -> None:
            pending.wait()
            # Now, not before: while that runs, a transfer behind this one finds its multiprocessors.
            for target, source in own:
                _move(target, source)

        return Pending(finish, received)

    def gather(
        self, tensors: Sequence[Tensor], layouts: Sequence[Layout], places: Sequence[Tensor], where: str
    ) -> Pending:
        """Starts the way back from `scatter`, to `places`, `[batch, rows, ranks, heads, head_dim]`."""
        ranks = self.group.size
        sends, receives, arrived = [], [], []
        own: list[tuple[Tensor, Tensor]] = []
        shapes = [(t.shape[2], t.shape[3]) for t in tensors]
        for bundle, members in _bundles(tensors, layouts, shapes):
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
            own += paths.own
            arrived += [tensor.permute(2, 1, 0, 3, 4) for tensor in bundle.columns(incoming)]
        pending = self.group.start(sends, receives, where)
        for source, target in own:
            _move(target, source)

        def finish() -> None:
            pending.wait()
            for target, source in zip(places, arrived):
                _move(target, source)

        return Pending(finish, places)

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


def _bundles(
    tensors: Sequence[Tensor], layouts: Sequence[Layout], shapes: Sequence[tuple[int, int]]
) -> Iterator[tuple[Bundle, list[Tensor]]]:
    """Neighbours that may travel side by side: of the same tokens and dtype, and so wide that all stay aligned.
    `shapes`: (heads, head_dim) that a rank gets of each."""

    def alike(number: int) -> tuple:
        tensor = tensors[number]
        aligned = math.prod(shapes[number]) * tensor.element_size() % _WIDEST == 0
        return layouts[number], tensor.dtype, -1 if aligned else number

    for (layout, *_), members in groupby(range(len(tensors)), alike):
        numbers = list(members)
        yield Bundle(layout, tuple(shapes[n] for n in numbers)), [tensors[n] for n in numbers]


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
    """Attention between the two exchanges of each direction; bias, slopes and sinks are of all heads. In `runs`: heads
    of the next run arrive, and results of the one before leave, while one is computed."""

    @staticmethod
    def forward(
        ctx, exchange: HeadExchange, call: Call, runs: Sequence[HeadRun], wants_lse: bool, q, k, v, bias, slopes, sinks,
        *captured,
    ):  # fmt: skip
        first = exchange.group.rank * q.shape[2] // exchange.group.size
        wide = wide_dtype(q.dtype)
        out = q.new_empty(*q.shape[:3], v.shape[3])
        lse, max_scores = (
            q.new_empty(*q.shape[:3], 1, dtype=wide) if wanted else None for wanted in (wants_lse, call.max_scores)
        )
        results = [t for t in (out, lse, max_scores) if t is not None]
        layouts = (exchange.queries, exchange.keys, exchange.keys)
        moving = [
            exchange.scatter(
                exchange.run_views(run, (q,), (k, v)), layouts, f"forward, all tokens of heads {run.heads}"
            )
            for run in runs
        ]
        ctx.calls, kept = [], []
        with arriving(moving):
            for run, here in zip(runs, tuple(moving)):
                heads = first + run.heads[0], first + run.heads[1]
                run_views = replace(call, head=heads[0], mask=_head_range(call.mask, 1, heads))
                tables = [_head_range(t, dim, heads) for t, dim in zip((bias, slopes, sinks), _DIMS)]
                tensors = here.wait()
                found = forward(run_views.reading(captured), *tensors, *tables)
                ctx.calls.append((run, run_views, heads))
                kept += [*tensors, *found[:2]]
                leaving = (found[0], *map(_as_columns, found[1:] if wants_lse else found[2:]))
                where = f"forward, all heads of some tokens, from heads {run.heads}"
                of_rows = (exchange.queries,) * len(leaving)
                moving.append(exchange.gather(leaving, of_rows, exchange.run_views(run, results), where))
            for each in moving:
                each.wait()
        ctx.save_for_backward(bias, slopes, sinks, *captured, *kept)
        ctx.exchange, ctx.shapes, ctx.tables = exchange, (q.shape, k.shape, v.shape), 3 + len(captured)
        ctx.set_materialize_grads(False)
        # Detached, because autograd refuses to change a view in place that a Function returned.
        largest = () if max_scores is None else (_as_lse(max_scores).detach(),)
        ctx.mark_non_differentiable(*largest)
        return out, None if lse is None else _as_lse(lse).detach(), *largest

    @staticmethod
    @once_differentiable
    def backward(ctx, dout, dlse, *of_max_scores):
        exchange, saved = ctx.exchange, ctx.saved_tensors  # once: activation checkpointing computes them anew
        tables = [_Table(t, dim) for t, dim in zip_longest(saved[: ctx.tables], _DIMS)]
        captured, kept = saved[3 : ctx.tables], saved[ctx.tables :]
        dq, dk, dv = (kept[0].new_empty(shape) for shape in ctx.shapes)
        if dout is None:
            dout = dq.new_zeros(*dq.shape[:3], dv.shape[3])
        given = [dout] if dlse is None else [dout, _as_columns(dlse)]
        of_rows = (exchange.queries,) * len(given)
        moving = [
            exchange.scatter(exchange.run_views(run, given), of_rows, f"backward, gradients of heads {run.heads}")
            for run, *_ in ctx.calls
        ]
        layouts = (exchange.queries, exchange.keys, exchange.keys)
        with arriving(moving):
            for number, ((run, call, heads), here) in enumerate(zip(ctx.calls, tuple(moving))):
                of_out, *of_lse = here.wait()
                bias, slopes, sinks = (table.of(heads) for table in tables[:3])
                of_lse = _as_lse(of_lse[0]) if of_lse else None
                run_kept = kept[5 * number : 5 * number + 5]
                run_given = Given(of_out, of_lse, *run_kept, bias, slopes)
                grads = gradients(call, run_given, sinks, captured, ctx.needs_input_grad[7:])
                where = f"backward, gradients of some tokens, from heads {run.heads}"
                places = exchange.run_views(run, (dq,), (dk, dv))
                moving.append(exchange.gather(grads[:3], layouts, places, where))
                for table, grad in zip(tables, grads[3:]):
                    table.add(heads, grad)
            for each in moving:
                each.wait()
        return None, None, None, None, dq, dk, dv, *(table.grad for table in tables)


#: The dimensions in which bias, slopes and sinks have their heads. A score function's tensors are whole (None).
_DIMS = (1, -1, 0)


def _head_range(tensor: Tensor | None, dim: int | None, heads: tuple[int, int]) -> Tensor | None:
    """The part for some heads, (first, past the last), of a tensor that has all heads, or one for all."""
    if tensor is None or dim is None or tensor.shape[dim] == 1:
        return tensor
    return tensor.narrow(dim, heads[0], heads[1] - heads[0])


class _Table:
    """A tensor of all heads, or one for all, and its gradient, which comes for some heads at a time."""

    def __init__(self, whole: Tensor | None, dim: int | None) -> None:
        self._whole, self._dim = whole, dim
        self._sum: Tensor | None = None

    def of(self, heads: tuple[int, int]) -> Tensor | None:
        return _head_range(self._whole, self._dim, heads)

    def add(self, heads: tuple[int, int], grad: Tensor | None) -> None:
        """Takes in the gradient of `of(heads)`."""
        if grad is None or self._whole is None:
            return
        if self._sum is None:
            wide = wide_dtype(grad.dtype)
            self._sum = torch.zeros_like(self._whole, dtype=wide)
        target = _head_range(self._sum, self._dim, heads)
        assert target is not None
        target.add_(grad)

    @property
    def grad(self) -> Tensor | None:
        return None if self._sum is None or self._whole is None else self._sum.to(self._whole.dtype)


def _as_columns(lse: Tensor) -> Tensor:
    """`[batch, heads, rows]` as `[batch, rows, heads, 1]`."""
    return lse.transpose(1, 2).unsqueeze(-1)


def _as_lse(columns: Tensor) -> Tensor:
    return columns.squeeze(-1).transpose(1, 2)


def local_head_runs(schedule: Schedule, q: Tensor, heads_kv: int, ranks: int) -> tuple[HeadRun, ...]:
    """How a rank's heads follow one another; one run beside a ring, whose transfers would be between those of the
    heads. `q`: a shard. `heads_kv`: of all ranks, at least one for each."""
    batch, _, heads, width = q.shape
    flops = 0.0
    if ranks > 1 and not any(step.transfers for step in schedule.steps):
        flops = 4.0 * sum(map(sum, schedule.pairs())) * batch * (heads // ranks) * width
    return head_runs(heads // ranks, heads_kv // ranks, flops)


def shared_out(tensor: Tensor, ranks: int) -> Tensor:
    """Keys or values whose heads are fewer than the ranks, each repeated for the ranks that read it."""
    heads = tensor.shape[2]
    return tensor if heads % ranks == 0 else tensor.repeat_interleave(ranks // heads, dim=2)


def check_heads(heads: int, heads_kv: int, ranks: int) -> None:
    """Raises ValueError unless the ranks divide the heads."""
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
