"""Layouts and schedules: every visible pair is computed once, by a rank that has both ends."""

from itertools import accumulate, pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from flashtile.distributed.layout import Layout
from flashtile.distributed.schedule import Band, Problem, Schedule, Work, gathered_schedule, ring_schedule
from support.running.each_case import each_case


def _globals(layout: Layout, rank: int) -> torch.Tensor:
    """Which token each place of a rank's shard holds."""
    return torch.cat([torch.arange(chunk.start, chunk.stop) for chunk in layout.ring_chunks(rank)])


def _expected(problem: Problem) -> torch.Tensor:
    """bool `[queries, keys]`: which pairs are visible."""
    rows = torch.arange(problem.queries.length)[:, None]
    columns = torch.arange(problem.keys.length)[None, :]
    lowest, highest = problem.band
    visible = torch.ones(problem.queries.length, problem.keys.length, dtype=torch.bool)
    if lowest is not None:
        visible &= columns - rows >= lowest
    if highest is not None:
        visible &= columns - rows <= highest
    if problem.documents:
        edges = torch.tensor(problem.documents[1:])
        visible &= torch.searchsorted(edges, rows, right=True) == torch.searchsorted(edges, columns, right=True)
        visible &= (rows < problem.documents[-1]) & (columns < problem.documents[-1])
    return visible


def _computed(schedule: Schedule) -> torch.Tensor:
    """int `[queries, keys]`: how often each pair is computed, by what the calls themselves mean."""
    problem = schedule.problem
    count = torch.zeros(problem.queries.length, problem.keys.length, dtype=torch.int64)
    for number, step in enumerate(schedule.steps):
        for rank, works in enumerate(step.work):
            queries = _globals(problem.queries, rank)
            incoming = schedule.incoming(number, rank)
            if schedule.gathers(number):
                keys = torch.arange(problem.keys.length)
                there = {key for t in incoming for key in _globals(problem.keys, t.source)[slice(*t.keys)].tolist()}
                assert there.issuperset(key for work in works for key in keys[slice(*work.keys)].tolist())
            elif incoming:
                (block,) = incoming
                keys = _globals(problem.keys, block.source)[slice(*block.keys)]
            else:
                keys = _globals(problem.keys, rank)
            for work in works:
                rows, columns = queries[slice(*work.rows)], keys[slice(*work.keys)]
                seen = _seen(problem, work)
                assert int(seen.sum()) == work.pairs
                count[rows[:, None], columns[None, :]] += seen
    return count


def _seen(problem: Problem, work: Work) -> torch.Tensor:
    """bool: what a call computes of its own rows and keys."""
    rows, columns = work.rows[1] - work.rows[0], work.keys[1] - work.keys[0]
    distance = torch.arange(columns)[None, :] - torch.arange(rows)[:, None]
    if work.mode == "all":
        return torch.ones(rows, columns, dtype=torch.bool)
    if work.mode == "causal":
        assert rows == columns
        return distance <= 0
    left, right = problem.window
    if work.mode == "packed":
        seen = torch.zeros(rows, columns, dtype=torch.bool)
        for begin, end in pairwise([0, *accumulate(work.lengths)]):
            seen[begin:end, begin:end] = True
        diagonal = 0
    else:
        seen = torch.ones(rows, columns, dtype=torch.bool)
        diagonal = work.row - work.column + (0 if problem.top_left else work.seq_k - work.seq_q)
    if left is not None:
        seen &= distance >= diagonal - left
    if right is not None:
        seen &= distance <= diagonal + right
    return seen


@given(
    ring=st.integers(1, 5),
    kind=st.sampled_from(["zigzag", "contiguous"]),
    sizes=st.tuples(st.integers(0, 6), st.integers(0, 6)),
    window=st.tuples(st.none() | st.integers(0, 60), st.none() | st.integers(0, 60)),
    top_left=st.booleans(),
    positional=st.booleans(),
    lengths=st.none() | st.lists(st.integers(0, 40), min_size=1, max_size=6),
)
def test_every_visible_pair_is_computed_once(ring, kind, sizes, window, top_left, positional, lengths):
    divisor = Layout(0, ring, kind).divisor
    documents: tuple[int, ...] = ()
    if lengths is not None:
        documents = (0, *accumulate(lengths))
        total = -(-documents[-1] // divisor) * divisor  # the last rows may belong to no document
        queries = keys = Layout(total, ring, kind)
    else:
        queries, keys = (Layout(divisor * 5 * size, ring, kind) for size in sizes)
    problem = Problem(queries, keys, window, top_left, documents, positional)
    expected = _expected(problem).long()
    for schedule in (ring_schedule(problem), gathered_schedule(problem)):
        assert torch.equal(_computed(schedule), expected), str(schedule)


@given(
    st.none() | st.integers(-20, 20), st.none() | st.integers(-20, 20),
    st.integers(0, 15), st.integers(0, 15), st.integers(0, 15), st.integers(0, 15),
)  # fmt: skip
def test_pairs_of_a_band(lowest, highest, row, rows, column, columns):
    if lowest is not None and highest is not None and lowest > highest:
        lowest, highest = highest, lowest
    band, queries, keys = Band(lowest, highest), range(row, row + rows), range(column, column + columns)
    seen = [
        (lowest is None or j - i >= lowest) and (highest is None or j - i <= highest) for i in queries for j in keys
    ]
    assert band.pairs(queries, keys) == sum(seen)
    assert band.covers(queries, keys) == all(seen) or not seen


@each_case("ranks", [2, 4, 8, 64])
def test_zigzag_gives_every_rank_the_same_work_in_every_step(ranks):
    """And calls as plain as can be: causal among themselves, then all visible."""
    layout = Layout(2 * ranks * 32, ranks, "zigzag")
    schedule = ring_schedule(Problem(layout, layout, (None, 0)))
    for number, pairs in enumerate(schedule.pairs()):
        assert len(set(pairs)) == 1, number
    for number, step in enumerate(schedule.steps):
        for works in step.work:
            assert [work.mode for work in works] == ["all" if number else "causal"]
    assert schedule.efficiency == 1.0
    contiguous = Layout(layout.length, ranks, "contiguous")
    assert ring_schedule(Problem(contiguous, contiguous, (None, 0))).efficiency < 0.76


def test_a_causal_ring_sends_half_of_a_shard_to_later_ranks():
    layout = Layout(4 * 2 * 64, 4, "zigzag")
    schedule = ring_schedule(Problem(layout, layout, (None, 0)))
    sent = {(t.source, t.target): t.keys for step in schedule.steps for t in step.transfers}
    assert sent[0, 1] == (0, 64)  # of an earlier rank only the early chunk
    assert sent[1, 0] == (0, 128)  # of a later one both, for the late chunk of queries
    assert len(sent) == 12


def test_causal_gathering_computes_its_own_keys_first():
    """While the others are on their way; then calls in which all is visible, and as many pairs on every rank."""
    layout = Layout(4 * 2 * 64, 4, "zigzag")
    schedule = gathered_schedule(Problem(layout, layout, (None, 0)))
    own, others = schedule.steps
    assert [[work.mode for work in works] for works in own.work] == [["causal"]] * 4
    assert [{work.mode for work in works} for works in others.work] == [{"all"}] * 4
    assert [len(works) for works in others.work] == [1, 2, 2, 1]
    assert schedule.efficiency == 1.0
    # What comes back is what a ring sends, and nothing of a rank's own keys.
    ring = ring_schedule(Problem(layout, layout, (None, 0)))
    assert set(others.transfers) == {t for step in ring.steps for t in step.transfers}


@each_case("kind", ["zigzag", "contiguous"])
def test_a_window_sends_only_what_is_seen(kind):
    layout = Layout(8 * 2 * 128, 8, kind)
    schedule = ring_schedule(Problem(layout, layout, (100, 0)))
    boundaries = 7 if kind == "contiguous" else 14  # between chunks of different ranks
    assert schedule.keys_sent() <= boundaries * (100 + 16)
    assert len(schedule.steps) <= 3


def test_documents_that_end_where_shards_end_are_not_sent():
    layout = Layout(4 * 64, 4, "contiguous")
    schedule = ring_schedule(Problem(layout, layout, (None, 0), documents=(0, 64, 100, 128, 192, 256)))
    assert len(schedule.steps) == 1
    assert not schedule.keys_sent()


def test_the_schedule_can_be_read():
    layout = Layout(2 * 2 * 32, 2, "zigzag")
    text = str(ring_schedule(Problem(layout, layout, (None, 0))))
    assert "ring over 2 ranks: 128 queries × 128 keys, zigzag; balance 1.00" in text
    assert "rank 0: its own keys; queries 0:64 × keys 0:64 (causal)" in text
    assert "rank 1: keys 0:32 of rank 0; queries 0:64 × keys 0:32 (all visible); 2,048 pairs" in text


def test_layouts_cut_in_two_dimensions():
    """Ranks of a row cut the share of a place in the ring into runs; all together hold every token once."""
    layout = Layout(96, 2, "zigzag", 3)
    runs = [[(c.start, c.stop, c.local) for c in layout.chunks(rank)] for rank in range(6)]
    assert runs[0] == [(0, 16, 0)]
    assert runs[1] == [(16, 24, 0), (72, 80, 8)]
    assert sorted(token for rank in runs for a, b, _ in rank for token in range(a, b)) == list(range(96))


def test_a_length_that_cannot_be_cut_is_refused():
    with pytest.raises(ValueError, match="expected a length that 8 divides"):
        Layout(36, 4, "zigzag")
    with pytest.raises(ValueError, match="layout: expected one of zigzag, contiguous, got 'ziczac'"):
        Layout(36, 4, "ziczac")
