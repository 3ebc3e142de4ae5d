"""Runs a schedule on one rank, forward and backward, and the autograd.Function over it. Shapes as everywhere, packed
tensors as a batch of one::

    q [batch, rows, heads, head_dim]    k, v [batch, keys, heads_kv, head_dim]    lse [batch, heads, rows]
"""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, chain
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

import flashtile
from flashtile.distributed.exchange import Exchange, Message, Pending, arriving, settle
from flashtile.distributed.merge import Largest, RunningMerge, Sum
from flashtile.distributed.schedule import Schedule, Transfer, Work


@dataclass(frozen=True)
class Call:
    """A call as one rank sees it, without the tensors that have a gradient.

    Attributes:
        schedule: of all ranks.
        exchange: with the others.
        options: arguments of `flashtile.attention` that all parts share: scale, dropout_p, softcap, deterministic,
            backend.
        band: likewise causal, align, window; only parts of the sequence have them.
        key_lengths: `[batch]`, or one for each document, of the whole sequence.
        dropout_seed: the same on all ranks.
        mask: see `table`.
        head: number of the first query head here.
        heads: query heads of the whole call.
        row_sharded: bias and mask have the rows of this shard, in its order, instead of all rows.
        longest: the longest document that bias and mask of a packed call are made for; None without them.
        max_scores: whether the largest score of each row is wanted too.
        block_mask: of the whole call.
        score_mod: likewise; the tensors that it reads are those of this rank.
    """

    schedule: Schedule
    exchange: Exchange
    options: dict[str, Any]
    band: dict[str, Any]
    key_lengths: Tensor | None
    dropout_seed: Tensor | None
    mask: Tensor | None
    head: int
    heads: int
    row_sharded: bool
    longest: int | None
    max_scores: bool = False
    block_mask: flashtile.BlockMask | None = None
    score_mod: flashtile.ScoreFunction | None = None

    def reading(self, captured: tuple[Tensor, ...]) -> Call:
        """The same call, whose score function reads these tensors."""
        return self if self.score_mod is None else replace(self, score_mod=self.score_mod._replace(captured=captured))

    @property
    def packed(self) -> bool:
        return bool(self.schedule.problem.documents)

    @property
    def rows(self) -> int:
        """How many of the queries here are of the sequence, or of a document: the first ones. The rows behind the last
        document have no sink."""
        problem = self.schedule.problem
        end = problem.documents[-1] if problem.documents else problem.queries.length
        chunks = problem.queries.ring_chunks(self.exchange.rank)
        return sum(max(0, min(chunk.stop, end) - chunk.start) for chunk in chunks)

    def works(self, step: int) -> Sequence[Work]:
        return self.schedule.steps[step].work[self.exchange.rank]

    def table(self, tensor: Tensor | None, work: Work) -> Tensor | None:
        """The rectangle of a bias or mask `[batch | 1, heads | 1, rows | 1, keys | 1]` that a call reads."""
        if tensor is None or work.mode == "packed":
            return tensor
        rows = work.rows[1] - work.rows[0]
        if tensor.shape[-2] > 1:
            first = work.rows[0] if self.row_sharded else work.row
            tensor = tensor[..., first : first + rows, :]
        if tensor.shape[-1] > 1:
            tensor = tensor[..., work.column : work.column + work.keys[1] - work.keys[0]]
        return tensor

    def document_entries(self, tensor: Tensor | None, work: Work) -> Tensor | None:
        """The entries of a call's documents in a tensor that has one for each."""
        if tensor is None or not self.packed:
            return tensor
        return tensor[work.document : work.document + max(1, len(work.lengths))]

    def arguments(self, work: Work, bias: Tensor | None, slopes: Tensor | None, device: torch.device) -> dict[str, Any]:
        """The keyword arguments of a call of `flashtile.attention_part`."""
        part, band = place_and_band(work, self.band, self.schedule.problem.positional, self.head, self.heads)
        packed: dict[str, Any] = {}
        if work.mode == "packed":
            longest = max(work.lengths) if self.longest is None else self.longest
            packed = {"cu_seqlens": _cumulative(work.lengths, device), "max_seqlen": longest}
        if slopes is not None and slopes.dim() == 2:
            slopes = self.document_entries(slopes, work)
        return {
            **self.options,
            **band,
            **packed,
            "part": part,
            "dropout_seed": self.dropout_seed,
            "key_lengths": self.document_entries(self.key_lengths, work),
            "mask": self.table(self.mask, work),
            "bias": self.table(bias, work),
            "alibi_slopes": slopes,
            "block_mask": self.block_mask,
            "score_mod": self.score_mod,
        }


def place_and_band(
    work: Work, band: dict[str, Any], positional: bool, head: int, heads: int
) -> tuple[flashtile.AttentionPart, dict[str, Any]]:
    """The place of a call in the sequence or packed batch, and its arguments causal, align and window, from those of
    the whole sequence (`band`). `positional`: see `Problem`. `head`: of the call's first, among `heads` of the
    sequence."""
    if work.mode == "packed":
        return flashtile.AttentionPart(0, 0, 0, 0, head, heads, work.document), band
    if not positional and work.mode in ("all", "causal"):
        # A call of its own: rows and keys need not be neighbours in the sequence.
        rows, keys = work.rows[1] - work.rows[0], work.keys[1] - work.keys[0]
        own = {"causal": work.mode == "causal", "align": "top_left"}
        return flashtile.AttentionPart(0, 0, rows, keys, head, heads), own
    return flashtile.AttentionPart(work.row, work.column, work.seq_q, work.seq_k, head, heads, work.document), band


@functools.lru_cache(maxsize=512)
def _cumulative(lengths: tuple[int, ...], device: torch.device) -> Tensor:
    """Cumulative lengths on a device; nothing waits for it."""
    host = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, device="cpu")
    return host.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else host.to(device)


def forward(
    call: Call, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, slopes: Tensor | None, sinks: Tensor | None
) -> tuple[Tensor, ...]:
    """(out, lse), or (out, lse, max_scores), of this rank's queries over all keys."""
    largest = Largest(q) if call.max_scores else None
    parts = sum(len(call.works(step)) for step in range(len(call.schedule.steps)))
    merge = RunningMerge(q, v.shape[-1], parts + (sinks is not None))
    blocks = _Blocks(call, k, v, "forward")
    with arriving(blocks.coming):
        if blocks.overtaken:
            settle(q.device)
        for step in range(len(call.schedule.steps)):
            block = blocks.take()
            works = call.works(step)
            for number, work in enumerate(works, 1):
                tensors = _taken(work, q, *block)
                arguments = call.arguments(work, bias, slopes, q.device)
                results = flashtile.attention_part(*tensors, **arguments, return_max_scores=call.max_scores)
                if number == len(works):
                    # Before the merge: while that runs, the transfer finds its multiprocessors.
                    del tensors, block
                    blocks.used()
                out, lse, *of_part = (t[None] for t in results) if work.mode == "packed" else results
                merge.add(work.rows, out, lse)
                if largest is not None:
                    largest.add(work.rows, *of_part)
            if not works:
                del block
                blocks.used()
    finished = merge.finish(sinks, call.rows)
    return finished if largest is None else (*finished, largest.scores)


def _taken(work: Work, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    rows, keys = slice(*work.rows), slice(*work.keys)
    tensors = q[:, rows], k[:, keys], v[:, keys]
    return (tensors[0][0], tensors[1][0], tensors[2][0]) if work.mode == "packed" else tensors


class _Blocks:
    """The keys and values of the steps, in their order. Two steps' blocks are here or on their way (`coming`) at a
    time: the next ones begin to travel when a step has been computed, before what follows its largest kernel."""

    def __init__(self, call: Call, k: Tensor, v: Tensor, phase: str) -> None:
        self._call, self._own, self._phase = call, (k, v), phase
        self._taken = self._started = 0
        self.coming: deque[Pending] = deque()
        for _ in range(2):
            self._start_next([], [])

    @property
    def overtaken(self) -> bool:
        """Whether something travels while the first step is computed."""
        return bool(self.coming) and not self._travels(0)

    def take(self) -> tuple[Tensor, Tensor]:
        """The keys and values of the next step."""
        call, step = self._call, self._taken
        self._taken += 1
        if not self._travels(step):
            return self._own
        received = self.coming.popleft().wait()
        if call.schedule.gathers(step):
            return _apart(_in_order(call, received), *self._own)
        return (received[0], received[1]) if call.schedule.incoming(step, call.exchange.rank) else self._own

    def used(self, sends: Sequence[Message] = (), receives: Sequence[Message] = ()) -> _Beside:
        """The blocks that were taken last have been computed, and nothing refers to them. Other messages of now go with
        the next ones: of two transfers the second would begin when a kernel holds all multiprocessors."""
        return self._start_next(sends, receives)

    def _travels(self, step: int) -> bool:
        """Whether there are transfers in a step, on any rank."""
        steps = self._call.schedule.steps
        return step < len(steps) and (bool(steps[step].transfers) or self._call.schedule.gathers(step))

    def _start_next(self, sends: Sequence[Message], receives: Sequence[Message]) -> _Beside:
        call, step, rank = self._call, self._started, self._call.exchange.rank
        self._started += 1
        where = f"{self._phase}, step {min(step, len(call.schedule.steps) - 1)} of {len(call.schedule.steps)}, "
        where += "keys and values" + (" and gradients of earlier ones" if sends or receives else "")
        if step < len(call.schedule.steps) and call.schedule.gathers(step):
            self.coming.append(call.exchange.gather(_side_by_side(*self._own), where + " of all ranks"))
            return _Beside(call.exchange.start(sends, receives, where), 0)
        outgoing: list[Message] = []
        incoming: list[Message] = []
        if self._travels(step):
            for t in call.schedule.outgoing(step, rank):
                outgoing += [Message(t.target, of[:, slice(*t.keys)].contiguous()) for of in self._own]
            for t in call.schedule.incoming(step, rank):
                incoming += [Message(t.source, _empty(of, t)) for of in self._own]
        pending = call.exchange.start([*outgoing, *sends], [*incoming, *receives], where)
        if self._travels(step):
            self.coming.append(pending)
        return _Beside(pending, len(incoming))


class _Beside(NamedTuple):
    """The tensors received beside keys and values: of a transfer all but the first ones."""

    pending: Pending
    first: int

    def wait(self) -> Sequence[Tensor]:
        return self.pending.wait()[self.first :]


def _empty(like: Tensor, transfer: Transfer) -> Tensor:
    return like.new_empty(like.shape[0], transfer.keys[1] - transfer.keys[0], *like.shape[2:])


def _side_by_side(k: Tensor, v: Tensor) -> Tensor:
    """`[batch, rows, columns]`: one transfer instead of two."""
    return torch.cat((k.flatten(2), v.flatten(2)), dim=2)


def _apart(both: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Keys and values `[batch, keys, heads, columns]`, shaped as a rank's own, where they lie side by side; copies
    where the kernels could not read them so."""
    edge = k.shape[2] * k.shape[3]
    of_k, of_v = both[..., :edge].unflatten(2, k.shape[2:]), both[..., edge:].unflatten(2, v.shape[2:])
    if any(width * both.element_size() % 16 for width in (edge, k.shape[3], v.shape[3])):
        of_k, of_v = of_k.contiguous(), of_v.contiguous()
    return of_k.to(k.dtype), of_v.to(v.dtype)


def _in_order(call: Call, parts: Sequence[Tensor]) -> Tensor:
    """The shards of all ranks as one tensor in the order of the sequence."""
    layout = call.schedule.problem.keys
    runs = [(chunk.start, rank, chunk) for rank in range(layout.ring) for chunk in layout.ring_chunks(rank)]
    return torch.cat([parts[rank][:, c.local : c.local + c.length] for _, rank, c in sorted(runs)], dim=1)


class Given(NamedTuple):
    """The tensors of a backward: what the forward got and returned, and the gradients of its results."""

    dout: Tensor
    dlse: Tensor | None
    q: Tensor
    k: Tensor
    v: Tensor
    out: Tensor
    lse: Tensor
    bias: Tensor | None = None
    slopes: Tensor | None = None


@dataclass
class Results:
    """Sums of the gradients of one rank."""

    q: Sum
    k: Sum
    v: Sum
    bias: Tensor | None
    slopes: Tensor | None
    captured: list[Tensor | None]


def backward(call: Call, given: Given) -> Results:
    """The gradients of this rank's queries, keys and values from those of all ranks' results; bias, slopes and what the
    score function reads want theirs where they require one, and get this rank's part."""
    captured = () if call.score_mod is None else call.score_mod.captured
    of_bias, of_slopes, *of_captured = (
        None if t is None or not t.requires_grad else torch.zeros(t.shape, dtype=given.lse.dtype, device=t.device)
        for t in (given.bias, given.slopes, *captured)
    )
    results = Results(Sum(given.q), Sum(given.k), Sum(given.v), of_bias, of_slopes, of_captured)
    returning: deque[_Returning] = deque()
    blocks = _Blocks(call, given.k, given.v, "backward")
    with arriving(chain(blocks.coming, _pending(returning))):
        for step in range(len(call.schedule.steps)):
            block = blocks.take()
            of_block = Sum(block[0]), Sum(block[1])
            for work in call.works(step):
                _add_work(call, work, results, of_block, given._replace(k=block[0], v=block[1]))
            del block
            returning.append(_return(call, step, blocks, results, of_block, given))
            while len(returning) > 1:
                _take_returned(results, returning.popleft())
    while returning:
        _take_returned(results, returning.popleft())
    return results


def _add_work(call: Call, work: Work, results: Results, of_block: tuple[Sum, Sum], given: Given) -> None:
    """Adds the gradients of one call, those of its keys and values to `of_block`."""
    rows, (dout, dlse, q, k, v, out, lse, bias, slopes) = slice(*work.rows), given
    taken = _taken(work, q, k, v)
    of_rows = dout[:, rows], out[:, rows], lse[..., rows], None if dlse is None else dlse[..., rows]
    if work.mode == "packed":
        of_rows = tuple(t if t is None else t[0] for t in of_rows)  # type: ignore[assignment]
    arguments = call.arguments(work, bias, slopes, q.device)
    for name, sums in (("bias", results.bias), ("alibi_slopes", results.slopes)):
        if sums is not None:
            arguments[name] = arguments[name].detach().requires_grad_()
    grads = flashtile.attention_backward(of_rows[0], *taken, of_rows[1], of_rows[2], dlse=of_rows[3], **arguments)
    of_qkv = [t[None] if work.mode == "packed" else t for t in grads[:3]]
    for total, where, part in zip((results.q, *of_block), (work.rows, work.keys, work.keys), of_qkv):
        total.add(where, part)
    if results.bias is not None:
        target = call.table(results.bias, work)
        assert target is not None and grads.bias is not None
        target.add_(grads.bias)
    if results.slopes is not None:
        target = call.document_entries(results.slopes, work) if results.slopes.dim() == 2 else results.slopes
        assert target is not None and grads.alibi_slopes is not None
        target.add_(grads.alibi_slopes)
    for of_function, grad in zip(results.captured, grads.captured):
        if of_function is not None and grad is not None:
            of_function.add_(grad)


class _Returning(NamedTuple):
    """Gradients on their way to the owner of their keys: of k and v in turn, of each of some transfers."""

    transfers: tuple[Transfer, ...]
    beside: _Beside


def _pending(returning: deque[_Returning]) -> Iterator[Pending]:
    for each in returning:
        yield each.beside.pending


def _return(
    call: Call, step: int, blocks: _Blocks, results: Results, of_block: tuple[Sum, Sum], given: Given
) -> _Returning:
    """Starts the way back of the gradients of a step's keys and values; those of a rank's own keys are there."""
    rank, schedule = call.exchange.rank, call.schedule
    outgoing = tuple(t for t in schedule.outgoing(step, rank) if t.target != rank)
    incoming = schedule.incoming(step, rank)
    if not schedule.steps[step].transfers and call.works(step):
        incoming = (Transfer(rank, rank, (0, given.k.shape[1])),)
    grads = [total.finish() for total in of_block] if incoming else []
    sends = []
    for transfer in incoming:
        for total, grad in zip((results.k, results.v), grads):
            part = _shard_keys(call, transfer, grad) if schedule.gathers(step) else grad
            if transfer.source == rank:
                total.add(transfer.keys, part)
            else:
                sends.append(Message(transfer.source, part))
    receives = [Message(t.target, _empty(of, t)) for t in outgoing for of in (given.k, given.v)]
    return _Returning(outgoing, blocks.used(sends, receives))


def _shard_keys(call: Call, transfer: Transfer, grad: Tensor) -> Tensor:
    """The part for some keys of a shard, of a gradient that has all keys in the order of the sequence."""
    low, high = transfer.keys
    return torch.cat(
        [
            grad[:, max(low, c.local) - c.local + c.start : min(high, c.local + c.length) - c.local + c.start]
            for c in call.schedule.problem.keys.ring_chunks(transfer.source)
            if max(low, c.local) < min(high, c.local + c.length)
        ],
        dim=1,
    )


def _take_returned(results: Results, returning: _Returning) -> None:
    received = returning.beside.wait()
    for number, transfer in enumerate(returning.transfers):
        results.k.add(transfer.keys, received[2 * number])
        results.v.add(transfer.keys, received[2 * number + 1])


class ContextAttention(torch.autograd.Function):
    """A schedule recorded for the backward pass."""

    @staticmethod
    def forward(ctx, call, q, k, v, bias, slopes, sinks, *captured):
        results = forward(call.reading(captured), q, k, v, bias, slopes, sinks)
        out, lse, *max_scores = (t.detach() for t in results)  # no views, which autograd refuses to change in place
        ctx.save_for_backward(*(q, k, v, out, lse, bias, slopes, sinks), *captured)
        ctx.call = call
        ctx.mark_non_differentiable(*max_scores)
        ctx.set_materialize_grads(False)
        return out, lse, *max_scores

    @staticmethod
    @once_differentiable
    def backward(ctx, dout, dlse, *of_max_scores):
        q, k, v, out, lse, bias, slopes, sinks, *captured = ctx.saved_tensors
        if dout is None:
            dout = torch.zeros_like(out)
        given = Given(dout, dlse, *(q, k, v, out, lse), bias, slopes)
        return None, *gradients(ctx.call, given, sinks, captured, ctx.needs_input_grad[4:])


def gradients(
    call: Call, given: Given, sinks: Tensor | None, captured: Sequence[Tensor], wanted: Sequence[bool]
) -> tuple[Tensor | None, ...]:
    """Gradients of q, k, v, bias, slopes, sinks and captured tensors; `wanted`: which of those behind v."""
    tables = given.bias, given.slopes
    bias, slopes = (None if t is None else t.detach().requires_grad_(wants) for t, wants in zip(tables, wanted))
    call = call.reading(tuple(t.detach().requires_grad_(wants) for t, wants in zip(captured, wanted[3:])))
    results = backward(call, given._replace(bias=bias, slopes=slopes))
    of_bias, of_slopes, *of_captured = (
        None if total is None or of is None else total.to(of.dtype)
        for total, of in zip((results.bias, results.slopes, *results.captured), (bias, slopes, *captured))
    )
    dsinks = _sink_gradient(given, sinks) if sinks is not None and wanted[2] else None
    return results.q.finish(), results.k.finish(), results.v.finish(), of_bias, of_slopes, dsinks, *of_captured


def _sink_gradient(given: Given, sinks: Tensor) -> Tensor:
    """Minus the sum over rows of what a sink weighs times delta, `[heads]`."""
    lse, dlse = given.lse, given.dlse
    delta = (given.dout.to(lse.dtype) * given.out).sum(-1).transpose(-1, -2)  # [batch, heads, rows]
    if dlse is not None:
        delta = delta - dlse
    blind = lse == float("-inf")
    weight = (sinks.to(lse.dtype)[:, None] - lse.masked_fill(blind, 0)).exp().masked_fill(blind, 0)
    return -(weight * delta.masked_fill(blind, 0)).sum((0, 2)).to(sinks.dtype)
