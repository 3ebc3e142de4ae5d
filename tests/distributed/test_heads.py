"""Exchanging heads for tokens, without processes: what travels, in how many transfers, and copies of 16 bytes."""

from collections.abc import Sequence

import torch

from flashtile.distributed.exchange import Message, Pending
from flashtile.distributed.heads import HeadExchange, _in_widest, _move, local_head_runs
from flashtile.distributed.layout import Layout
from flashtile.distributed.schedule import HeadRun, Problem, ring_schedule
from support.running.each_case import each_case


class Recorder:
    """The group of a rank that notes what it would send; what it would receive stays as it is."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size
        self.transfers: list[tuple[list[Message], list[Message]]] = []

    def start(self, sends: Sequence[Message], receives: Sequence[Message], where: str) -> Pending:
        self.transfers.append((list(sends), list(receives)))
        return Pending(lambda: None, ())


def exchanges(ranks: int, rows: int, kind: str = "zigzag") -> list[HeadExchange]:
    layout = Layout(ranks * rows, ranks, kind)
    return [HeadExchange(Recorder(rank, ranks), layout, layout) for rank in range(ranks)]


def deliver(groups: Sequence[Recorder]) -> None:
    """What each has noted last arrives at the others, in the order of the messages between two ranks."""
    for source in groups:
        for target in groups:
            sent = [m.tensor for m in source.transfers[-1][0] if m.rank == target.rank]
            expected = [m.tensor for m in target.transfers[-1][1] if m.rank == source.rank]
            for message, place in zip(sent, expected, strict=True):
                assert message.is_contiguous()
                place.copy_(message)


@each_case("kind", ["zigzag", "contiguous"])
@each_case("batch", [1, 2])
@each_case("ranks", [2, 4])
def test_tokens_go_to_heads_and_back_in_a_transfer_each_way(ranks, batch, kind):
    """Tokens of q, k and v, and of out and lse. Each rank sees its heads of the whole sequence, in its order."""
    heads, heads_kv, length, dim = 8, 4, 48, 4
    ends = exchanges(ranks, length // ranks, kind)
    layout = ends[0].queries
    widths = [(heads, dim), (heads_kv, dim), (heads_kv, 2 * dim)]
    whole = [torch.randn(batch, length, count, width) for count, width in widths]

    def shard(tensor, rank):
        return torch.cat([tensor[:, c.start : c.stop] for c in layout.ring_chunks(rank)], dim=1)

    run = HeadRun((0, heads // ranks), (0, heads_kv // ranks))
    waits = [
        end.scatter(end.run_views(run, shards[:1], shards[1:]), (layout,) * 3, "there")
        for end, shards in ((end, [shard(t, rank) for t in whole]) for rank, end in enumerate(ends))
    ]
    deliver([end.group for end in ends])
    found = [pending.wait() for pending in waits]
    for rank, tensors in enumerate(found):
        for tensor, of in zip(tensors, whole):
            count = of.shape[2] // ranks
            assert torch.equal(tensor, of[:, :, rank * count : (rank + 1) * count])
    lse = torch.randn(batch, length, heads, 1, dtype=torch.float64)
    of_rank = [lse[:, :, rank * (heads // ranks) : (rank + 1) * (heads // ranks)] for rank in range(ranks)]
    back = [[torch.empty_like(shard(of, rank)) for of in [*whole, lse]] for rank in range(ranks)]
    waits = []
    for rank, end in enumerate(ends):
        q, k, v, of_lse = back[rank]
        places = [*end.run_views(run, (q,), (k, v)), *end.run_views(run, (of_lse,))]
        waits.append(end.gather([*found[rank], of_rank[rank]], (layout,) * 4, places, "back"))
    deliver([end.group for end in ends])
    for rank, pending in enumerate(waits):
        pending.wait()
        for tensor, of in zip(back[rank], [*whole, lse]):
            assert torch.equal(tensor, shard(of, rank))
    assert all(len(end.group.transfers) == 2 for end in ends)


def test_heads_of_a_rank_follow_one_another():
    """In runs of whole groups of heads, beside no other transfers, and where there is enough to do meanwhile."""
    layout, few = Layout(32768, 1), Layout(16384, 1)
    alone, short = ring_schedule(Problem(layout, layout)), ring_schedule(Problem(few, few))
    ring = ring_schedule(Problem(*(Layout(32768, 2),) * 2))
    long = torch.empty(1, 8192, 32, 128, dtype=torch.bfloat16, device="meta")
    assert local_head_runs(alone, long, 8, 4) == (HeadRun((0, 4), (0, 1)), HeadRun((4, 8), (1, 2)))
    assert local_head_runs(alone, long, 12, 4) == (HeadRun((0, 8), (0, 3)),)
    for schedule, q, heads_kv, ranks in ((alone, long, 4, 4), (short, long[:, ::2], 8, 4), (ring, long, 8, 4),
                                         (alone, long, 8, 1)):  # fmt: skip
        assert len(local_head_runs(schedule, q, heads_kv, ranks)) == 1


def test_one_result_leaves_from_where_it_was_written():
    (end, _) = exchanges(2, 8)
    out = torch.randn(1, 16, 2, 4)
    end.gather([out], (end.queries,), [torch.empty(1, 8, 2, 2, 4)], "back")
    (sends, _), *_ = end.group.transfers
    assert all(m.tensor.untyped_storage().data_ptr() == out.untyped_storage().data_ptr() for m in sends)


@each_case("dtype", [torch.bfloat16, torch.float32, torch.float64])
@each_case("offset", [0, 1])
@each_case("width", [8, 12, 3])
def test_copies_keep_every_bit(dtype, offset, width):
    source = torch.randn(3, 5, width + offset).to(dtype)[..., offset:]
    source[0, 0, 0], source[0, 1, 0] = float("nan"), -0.0
    target = torch.zeros(5, 3, width, dtype=dtype)
    _move(target.transpose(0, 1), source)
    expected = source.transpose(0, 1).contiguous()
    assert torch.equal(target.view(torch.uint8), expected.view(torch.uint8))


def test_rows_of_16_bytes_are_copied_as_such():
    rows = torch.zeros(4, 6, 8, dtype=torch.bfloat16)
    assert _in_widest(rows) and _in_widest(rows.permute(1, 0, 2)) and _in_widest(rows[1:, 2:])
    assert not _in_widest(rows[..., 1:])
    assert not _in_widest(rows[..., :4])
    assert not _in_widest(rows.transpose(1, 2))
