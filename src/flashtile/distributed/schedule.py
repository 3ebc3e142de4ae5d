"""Who sends what to whom, and who computes what, step by step: pure data, made and tested without processes.

In a ring of `N` ranks, at step `t` rank `r` has the keys of rank `r - t`, straight from their owner: every rank sends
one block and receives one at each step. Only keys are sent that some query of the receiver sees. Gradients go straight
back to the owner, who adds them up in the order of the steps.

Numbers of rows and keys here are those of the shards; `row`, `column` count within the sequence or packed document.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from flashtile.distributed.layout import Chunk, Layout

#: Rectangles begin and end at multiples of this where they can: dropout's bits and kernels' tiles come in groups.
_GRAIN = 16

#: A rank's heads travel and are computed in so many runs, where its forward has as many FLOPs, 4 ms on an H200: of
#: fewer the host has not yet started all transfers when they are done (two runs: 4.2 ms instead of 3.8 with 2.2e12).
#: Two runs already hide half of what travels, and calls stay large.
_RUNS, _WORTH_RUNS = 2, 3e12


class Band(NamedTuple):
    """Key `j` is visible to query `i` where `lowest <= j - i <= highest`, both counted in the whole sequence."""

    lowest: int | None = None
    highest: int | None = None

    def pairs(self, rows: range, keys: range) -> int:
        """How many pairs of a rectangle are visible."""
        return _pairs_below(self.highest, rows, keys) - (
            0 if self.lowest is None else _pairs_below(self.lowest - 1, rows, keys)
        )

    def covers(self, rows: range, keys: range) -> bool:
        """Whether all of a rectangle is visible."""
        return (self.lowest is None or keys.start - (rows.stop - 1) >= self.lowest) and (
            self.highest is None or keys.stop - 1 - rows.start <= self.highest
        )


def _pairs_below(highest: int | None, rows: range, keys: range) -> int:
    """Pairs of a rectangle with `j - i <= highest`."""
    if highest is None:
        return len(rows) * len(keys)
    # Row i sees the keys up to i + highest: none, then one more for each row, then all.
    first, last = rows.start + highest + 1 - keys.start, rows.stop + highest - keys.start
    rising = range(max(first, 0), min(last, len(keys)) + 1)
    full = max(0, min(len(rows), last - len(keys)))
    return (rising.start + rising.stop - 1) * len(rising) // 2 + full * len(keys)


class Work(NamedTuple):
    """One call: queries `rows` of the shard to keys `keys` of the block that is there.

    Attributes:
        rows: (first, past the last) query of the shard.
        keys: likewise of the keys at hand.
        mode: "part" = a rectangle of the sequence's scores at (row, column); "all" and "causal" = a call of its own
            that means the same; "packed" = documents that lie wholly inside.
        row, column: of the first query and key, in the sequence or document.
        seq_q, seq_k: of the whole sequence or document.
        document: number of the first document; 0 where there are none.
        lengths: of the documents of a packed call.
        pairs: how many (query, key) pairs are visible.
    """

    rows: tuple[int, int]
    keys: tuple[int, int]
    mode: str
    row: int
    column: int
    seq_q: int
    seq_k: int
    document: int = 0
    lengths: tuple[int, ...] = ()
    pairs: int = 0


class Transfer(NamedTuple):
    """Keys `keys` of the shard of `source`, and the values beside them, go to `target`."""

    source: int
    target: int
    keys: tuple[int, int]


class Step(NamedTuple):
    """The transfers and work of one time. `transfers`: of keys and values, before the work; of their gradients the
    other way, after it. If keys are gathered: the ones that the work reads, among them a rank's own. `work`: of each
    rank, with the keys that it got in this step, or its own where it got none."""

    transfers: tuple[Transfer, ...]
    work: tuple[tuple[Work, ...], ...]


class HeadRun(NamedTuple):
    """Query and key/value heads that a rank computes at a time: (first, past the last) within its own."""

    heads: tuple[int, int]
    heads_kv: tuple[int, int]


@dataclass(frozen=True)
class Problem:
    """The call to be computed, as far as a schedule needs to know it.

    Attributes:
        queries, keys: how both sequences are cut.
        window: (left, right) of the call, right 0 where it is causal.
        top_left: the diagonal starts at the first key.
        documents: cumulative lengths of packed documents, the same for queries and keys; empty for a dense call.
        positional: something depends on positions beside the band (dropout, ALiBi, bias, mask, key lengths): calls may
            then not be put together.
    """

    queries: Layout
    keys: Layout
    window: tuple[int | None, int | None] = (None, None)
    top_left: bool = False
    documents: tuple[int, ...] = ()
    positional: bool = False

    @property
    def band(self) -> Band:
        left, right = self.window
        diagonal = 0 if self.top_left or self.documents else self.keys.length - self.queries.length
        return Band(None if left is None else diagonal - left, None if right is None else diagonal + right)


@dataclass(frozen=True)
class Schedule:
    """Steps of all ranks. `strategy`: its name. `problem`: what is computed. `steps`: in order. `gathered`: keys of the
    last step are those of all ranks, gathered in the order of the sequence."""

    strategy: str
    problem: Problem
    steps: tuple[Step, ...]
    gathered: bool = False

    @property
    def ranks(self) -> int:
        return self.problem.queries.ring

    def incoming(self, step: int, rank: int) -> tuple[Transfer, ...]:
        """The transfers that a rank receives in a step: of a ring at most one block."""
        return tuple(t for t in self.steps[step].transfers if t.target == rank)

    def outgoing(self, step: int, rank: int) -> tuple[Transfer, ...]:
        return tuple(t for t in self.steps[step].transfers if t.source == rank)

    def gathers(self, step: int) -> bool:
        """Whether the keys of a step are those of all ranks."""
        return self.gathered and step == len(self.steps) - 1

    def pairs(self) -> list[list[int]]:
        """Visible pairs of each rank in each step: `[step][rank]`."""
        return [[sum(work.pairs for work in works) for works in step.work] for step in self.steps]

    def keys_sent(self) -> int:
        """Keys that travel, of all ranks together."""
        if self.gathered:
            return self.problem.keys.length * (self.ranks - 1)
        return sum(t.keys[1] - t.keys[0] for step in self.steps for t in step.transfers)

    @property
    def efficiency(self) -> float:
        """Share of the time in which ranks compute, were every pair equally long and transfers free."""
        pairs = self.pairs()
        slowest = sum(max(of_step, default=0) for of_step in pairs)
        return sum(map(sum, pairs)) / (slowest * self.ranks) if slowest else 1.0

    def __str__(self) -> str:
        problem = self.problem
        lines = [
            f"{self.strategy} over {self.ranks} ranks: {problem.queries.length:,} queries × {problem.keys.length:,} "
            f"keys, {problem.queries.kind}; balance {self.efficiency:.2f}, {self.keys_sent():,} keys sent"
        ]
        if self.gathered:
            lines.append("  all ranks gather all keys, in the order of the sequence, for the last step")
        for number, step in enumerate(self.steps):
            lines.append(f"  step {number}")
            for rank, works in enumerate(step.work):
                lines.append(f"    rank {rank}: {self._described(number, rank, works)}")
        return "\n".join(lines)

    def _described(self, step: int, rank: int, works: Sequence[Work]) -> str:
        if not works:
            return "nothing to do"
        source, shift = "gathered keys" if self.gathers(step) else "its own keys", 0
        if not self.gathers(step):
            for block in self.incoming(step, rank):
                source, shift = f"keys {block.keys[0]}:{block.keys[1]} of rank {block.source}", block.keys[0]
        calls = ", ".join(
            f"queries {w.rows[0]}:{w.rows[1]} × keys {w.keys[0] + shift}:{w.keys[1] + shift} {_named(w)}" for w in works
        )
        return f"{source}; {calls}; {sum(w.pairs for w in works):,} pairs"


def _named(work: Work) -> str:
    if work.mode == "packed":
        return f"({len(work.lengths)} documents)"
    return {"all": "(all visible)", "causal": "(causal)"}.get(work.mode, f"(at {work.row}, {work.column})")


def ring_schedule(problem: Problem, strategy: str = "ring") -> Schedule:
    """At step `t` rank `r` computes with the keys of rank `r - t`."""
    ranks = problem.queries.ring
    shards_q = [problem.queries.ring_chunks(rank) for rank in range(ranks)]
    shards_k = [problem.keys.ring_chunks(rank) for rank in range(ranks)]
    steps = []
    for distance in range(ranks):
        transfers, work = [], []
        for rank in range(ranks):
            source = (rank - distance) % ranks
            calls = _calls(problem, shards_q[rank], shards_k[source], own=not distance)
            if calls and distance:
                first, last = min(w.keys[0] for w in calls), max(w.keys[1] for w in calls)
                transfers.append(Transfer(source, rank, (first, last)))
                calls = tuple(w._replace(keys=(w.keys[0] - first, w.keys[1] - first)) for w in calls)
            work.append(calls)
        if any(work):
            steps.append(Step(tuple(transfers), tuple(work)))
    return Schedule(strategy, problem, tuple(steps))


def gathered_schedule(problem: Problem) -> Schedule:
    """Every rank has all keys, in the order of the sequence. Under a plain causal mask it first computes its own, which
    is a causal call, while the others are on their way: of those all is visible."""
    ranks = range(problem.queries.ring)
    shards_q = [problem.queries.ring_chunks(rank) for rank in ranks]
    shards_k = [problem.keys.ring_chunks(rank) for rank in ranks]
    steps = []
    own_first = len(ranks) > 1 and _plainly_causal(problem, problem.queries == problem.keys)
    if own_first:
        steps.append(Step((), tuple(_calls(problem, q, k, own=True) for q, k in zip(shards_q, shards_k))))
    left = [_without(shard if own_first else (), problem.keys.length) for shard in shards_k]
    work = tuple(_calls(problem, shard, runs, own=False) for shard, runs in zip(shards_q, left))
    read = ((source, rank, _read(shards_k[source], work[rank])) for rank in ranks for source in ranks)
    steps.append(Step(tuple(Transfer(source, rank, keys) for source, rank, keys in read if keys is not None), work))
    return Schedule("all_gather", problem, tuple(steps), gathered=True)


def _without(shard: Sequence[Chunk], length: int) -> list[Chunk]:
    """The runs of a whole sequence that are not in a shard."""
    edges = [0, *(edge for chunk in shard for edge in (chunk.start, chunk.stop)), length]
    return [Chunk(low, high, low) for low, high in zip(edges[::2], edges[1::2]) if low < high]


def _read(shard: Sequence[Chunk], works: Sequence[Work]) -> tuple[int, int] | None:
    """The run of a shard's keys that calls read which count keys in the sequence; None for nothing."""
    found = [
        (max(low, chunk.start) - chunk.start + chunk.local, min(high, chunk.stop) - chunk.start + chunk.local)
        for chunk in shard
        for low, high in (work.keys for work in works)
        if max(low, chunk.start) < min(high, chunk.stop)
    ]
    return (min(low for low, _ in found), max(high for _, high in found)) if found else None


def head_runs(heads: int, heads_kv: int, flops: float) -> tuple[HeadRun, ...]:
    """How the heads of a rank, with a forward of so many `flops`, follow one another, to hide transfers."""
    count = max(n for n in range(1, _RUNS + 1) if heads_kv % n == 0) if flops >= _WORTH_RUNS else 1
    q, kv = heads // count, heads_kv // count
    return tuple(HeadRun((n * q, (n + 1) * q), (n * kv, (n + 1) * kv)) for n in range(count))


def _calls(problem: Problem, shard_q: Sequence[Chunk], shard_k: Sequence[Chunk], own: bool) -> tuple[Work, ...]:
    """The calls of some chunks of queries with some chunks of keys."""
    band = problem.band
    if own and _plainly_causal(problem, shard_q == shard_k):
        return (_whole_shard_causal(problem, shard_q, band),)
    calls = [work for rows in shard_q for keys in shard_k for work in _rectangles(problem, band, rows, keys)]
    return tuple(calls if problem.positional else _joined(calls))


def _plainly_causal(problem: Problem, same_tokens: bool) -> bool:
    """Whether queries see the keys up to their own, and nothing else matters."""
    return same_tokens and not problem.positional and not problem.documents and problem.band == Band(None, 0)


def _whole_shard_causal(problem: Problem, shard: Sequence[Chunk], band: Band) -> Work:
    """Chunks in the order of the sequence: causal among themselves is causal in the whole."""
    rows = sum(chunk.length for chunk in shard)
    pairs = sum(
        band.pairs(range(a.start, a.stop), range(b.start, b.stop)) for a in shard for b in shard
    )  # fmt: skip
    return Work((0, rows), (0, rows), "causal", 0, 0, rows, rows, pairs=pairs)


def _rectangles(problem: Problem, band: Band, queries: Chunk, keys: Chunk) -> Iterator[Work]:
    """The part of a chunk of keys that a chunk of queries sees, in one rectangle, or one for each document."""
    if not problem.documents:
        rows, columns = range(queries.start, queries.stop), range(keys.start, keys.stop)
        frame = 0, problem.queries.length, problem.keys.length, 0
        work = _rectangle(band, queries, keys, rows, columns, frame)
        if work is not None:
            yield work
        return
    inside: list[tuple[int, int, int]] = []
    low, high = max(queries.start, keys.start), min(queries.stop, keys.stop)
    reaching = range(
        max(0, bisect_left(problem.documents, low) - 1),
        min(bisect_right(problem.documents, high), len(problem.documents) - 1),
    )
    for document in reaching:
        begin, end = problem.documents[document : document + 2]
        rows = range(max(begin, queries.start), min(end, queries.stop))
        columns = range(max(begin, keys.start), min(end, keys.stop))
        if low <= begin <= end <= high:
            inside.append((document, begin, end))
        elif rows and columns:
            work = _rectangle(band, queries, keys, rows, columns, (begin, end - begin, end - begin, document))
            if work is not None:
                yield work
    if any(begin < end for _, begin, end in inside):  # low < high then, so that they follow one another
        yield _packed(band, queries, keys, inside)


def _packed(band: Band, queries: Chunk, keys: Chunk, inside: list[tuple[int, int, int]]) -> Work:
    """Documents that lie wholly in both chunks; their numbers follow one another."""
    first, begin, _ = inside[0]
    end = inside[-1][2]
    lengths = tuple(stop - start for _, start, stop in inside)
    return Work(
        (begin - queries.start + queries.local, end - queries.start + queries.local),
        (begin - keys.start + keys.local, end - keys.start + keys.local),
        "packed", 0, 0, max(lengths), max(lengths), document=first, lengths=lengths,
        pairs=sum(band.pairs(range(length), range(length)) for length in lengths),
    )  # fmt: skip


def _rectangle(
    band: Band, queries: Chunk, keys: Chunk, rows: range, columns: range, frame: tuple[int, int, int, int]
) -> Work | None:
    """The part of a rectangle in which anything is visible. `frame`: where positions count from, the lengths of queries
    and keys from there, and the number of the document."""
    (lowest, highest), (begin, seq_q, seq_k, document) = band, frame
    # The diagonals of a band are the same counted from the start of a document, of which both have the same.
    if highest is not None:  # row i sees up to i + highest
        columns = range(columns.start, _up(min(columns.stop, rows.stop - 1 + highest + 1), columns))
        rows = range(_down(max(rows.start, columns.start - highest), rows), rows.stop)
    if lowest is not None:  # and from i + lowest
        columns = range(_down(max(columns.start, rows.start + lowest), columns), columns.stop)
        rows = range(rows.start, _up(min(rows.stop, columns.stop - 1 - lowest + 1), rows))
    if not rows or not columns or not (pairs := band.pairs(rows, columns)):
        return None
    first_q, first_k = queries.local - queries.start, keys.local - keys.start
    mode = "all" if band.covers(rows, columns) else "part"
    return Work(
        (rows.start + first_q, rows.stop + first_q),
        (columns.start + first_k, columns.stop + first_k),
        mode, rows.start - begin, columns.start - begin, seq_q, seq_k, document=document, pairs=pairs,
    )  # fmt: skip


def _down(value: int, within: range) -> int:
    """A beginning, moved back to a multiple of `_GRAIN` from where `within` begins."""
    return within.start + (value - within.start) // _GRAIN * _GRAIN


def _up(value: int, within: range) -> int:
    """An end, moved on likewise, but not past the end of `within`."""
    return min(within.stop, within.start - (within.start - value) // _GRAIN * _GRAIN)


def _joined(calls: Sequence[Work]) -> list[Work]:
    """Calls in which all is visible, put together where they make up a larger rectangle."""
    found: list[Work] = []
    for call in calls:
        for place, other in enumerate(found):
            if (joined := _join(other, call)) is not None:
                found = _joined([*found[:place], *found[place + 1 :], joined])
                break
        else:
            found.append(call)
    return found


def _join(a: Work, b: Work) -> Work | None:
    if not a.mode == b.mode == "all":
        return None
    a, b = (a, b) if (a.rows, a.keys) <= (b.rows, b.keys) else (b, a)
    pairs = a.pairs + b.pairs
    if a.rows == b.rows and a.keys[1] == b.keys[0]:
        return a._replace(keys=(a.keys[0], b.keys[1]), pairs=pairs)
    if a.keys == b.keys and a.rows[1] == b.rows[0]:
        return a._replace(rows=(a.rows[0], b.rows[1]), pairs=pairs)
    return None
