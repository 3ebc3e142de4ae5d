"""The engine with ranks that are threads: up to 64, without processes; the merge; and what happens when one is gone."""

import queue
import threading
from collections import Counter, defaultdict
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

import flashtile
from flashtile.distributed.engine import Call, Given, backward, forward
from flashtile.distributed.exchange import Message, Pending
from flashtile.distributed.layout import Layout
from flashtile.distributed.merge import RunningMerge, Sum
from flashtile.distributed.schedule import Problem, gathered_schedule, ring_schedule
from flashtile.testing import AttentionCase, assert_close, assert_same, make_inputs, run
from flashtile.testing.cases import cancelled_sizes
from flashtile.testing.tolerance import Size, size
from support.running.each_case import each_case


class Boxes:
    """Letter boxes: one for each message between two ranks, by its number."""

    def __init__(self) -> None:
        self._lock, self._boxes = threading.Lock(), defaultdict(queue.Queue)

    def __getitem__(self, key: tuple[int, int, int]) -> queue.Queue:
        with self._lock:
            return self._boxes[key]


class Thread:
    """The exchange of a rank that is a thread. Messages between two ranks are matched in the order in which sending and
    receiving them was started, whenever they are waited for."""

    def __init__(self, rank: int, ranks: int, boxes: Boxes) -> None:
        self.rank, self.size, self._boxes = rank, ranks, boxes
        self._started: Counter[tuple[int, int]] = Counter()

    def _box(self, source: int, target: int) -> queue.Queue:
        self._started[source, target] += 1
        return self._boxes[source, target, self._started[source, target]]

    def start(self, sends: Sequence[Message], receives: Sequence[Message], where: str) -> Pending:
        for message in sends:
            self._box(self.rank, message.rank).put(message.tensor.clone())
        boxes = [self._box(message.rank, self.rank) for message in receives]

        def finish() -> None:
            for message, box in zip(receives, boxes):
                message.tensor.copy_(box.get(timeout=60))

        return Pending(finish, [message.tensor for message in receives])

    def gather(self, tensor: Tensor, where: str) -> Pending:
        others = [rank for rank in range(self.size) if rank != self.rank]
        parts = [torch.empty_like(tensor) for _ in range(self.size)]
        parts[self.rank].copy_(tensor)
        pending = self.start([Message(r, tensor) for r in others], [Message(r, parts[r]) for r in others], where)

        def finish() -> None:
            pending.wait()

        return Pending(finish, parts)


def simulate(case: AttentionCase, ranks: int, strategy: str) -> dict[str, Tensor]:
    """Forward and backward of a plain case over threads."""
    inputs = make_inputs(case)
    layout = Layout(case.seq_q, ranks)
    window = (None, 0) if case.arguments.get("causal") else (None, None)
    problem = Problem(layout, layout, window)
    schedule = ring_schedule(problem) if strategy == "ring" else gathered_schedule(problem)
    boxes = Boxes()
    results: dict[int, dict[str, Tensor]] = {}

    def shard(tensor: Tensor, rank: int, dim: int = 1) -> Tensor:
        return torch.cat([tensor.narrow(dim, c.start, c.length) for c in layout.ring_chunks(rank)], dim)

    def of_rank(rank: int) -> None:
        call = Call(schedule, Thread(rank, ranks, boxes), {"backend": "cpu"}, dict(case.arguments), None, None, None,
                    0, case.heads, False, None)  # fmt: skip
        with torch.no_grad():
            q, k, v, dout = (shard(t, rank) for t in (inputs.q, inputs.k, inputs.v, inputs.dout))
            out, lse = forward(call, q, k, v, None, None, None)
            found = backward(call, Given(dout, shard(inputs.dlse, rank, 2), q, k, v, out, lse))
        results[rank] = {
            "out": out, "lse": lse, "dq": found.q.finish(), "dk": found.k.finish(), "dv": found.v.finish(),
        }  # fmt: skip

    threads = [threading.Thread(target=of_rank, args=(rank,)) for rank in range(ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == ranks
    runs = sorted((chunk, rank) for rank in range(ranks) for chunk in layout.ring_chunks(rank))
    return {
        name: torch.cat(
            [results[r][name].narrow(2 if name == "lse" else 1, c.local, c.length) for c, r in runs],
            2 if name == "lse" else 1,
        )
        for name in results[0]
    }


@pytest.mark.slow
@pytest.mark.parametrize("strategy, dtype", [("ring", torch.bfloat16), ("all_gather", torch.float32)], ids=str)
def test_the_error_does_not_grow_with_the_number_of_ranks(strategy, dtype):
    case = AttentionCase(
        seq_q=256, seq_k=256, batch=1, heads=2, heads_kv=1, head_dim=16, head_dim_v=16, dtype=dtype,
        arguments={"causal": True},
    )  # fmt: skip
    inputs = make_inputs(case)
    oracle, eager = run(case, inputs, "reference", torch.float64), run(case, inputs, "reference")
    cancelled = cancelled_sizes(case, inputs, oracle)
    errors = {}
    for ranks in (2, 16):
        found = simulate(case, ranks, strategy)
        for name, value in found.items():
            assert_close(f"{ranks} ranks: {name}", value, oracle[name], eager[name], cancelled.get(name, Size()))
        errors[ranks] = {name: size(value.double() - oracle[name]).typical for name, value in found.items()}
    for name, few in errors[2].items():
        assert errors[16][name] <= 1.5 * few + size(oracle[name]).typical * torch.finfo(dtype).eps / 4, (name, errors)


def test_a_merge_of_one_result_is_that_result():
    q = torch.randn(1, 6, 2, 8)
    out, lse = flashtile.attention(q, q, q, return_lse=True)
    merge = RunningMerge(q, 8, 1)
    merge.add((0, 6), out, lse)
    assert merge.finish() == (out, lse)


@each_case("parts", [1, 2, 5])
def test_merging_is_exact_where_nothing_is_rounded(parts):
    """Results with the same lse, and rows that see nothing in some parts, or in all."""
    q = torch.zeros(1, 4, 1, 2)
    merge = RunningMerge(q, 2, parts)
    for part in range(parts):
        out, lse = torch.full((1, 4, 1, 2), float(part)), torch.zeros(1, 1, 4)
        lse[..., 3] = float("-inf")
        out[:, 3] = 0
        if part:
            lse[..., 2], out[:, 2] = float("-inf"), 0
        merge.add((0, 4), out, lse)
    out, lse = merge.finish()
    assert torch.equal(out[0, :2, 0, 0], torch.full((2,), (parts - 1) / 2))
    assert torch.equal(out[0, 2:, 0, 0], torch.zeros(2))
    assert_same(lse[0, 0, :2], torch.full((2,), parts).log())
    assert lse[0, 0, 2] == 0
    assert lse[0, 0, 3] == float("-inf")


def test_a_merge_of_nothing_is_blind():
    q = torch.zeros(2, 3, 1, 4)
    out, lse = RunningMerge(q, 5, 0).finish()
    assert out.shape == (2, 3, 1, 5)
    assert not out.any()
    assert lse.isneginf().all()
    out, lse = RunningMerge(q, 5, 1).finish(torch.tensor([0.5]))
    assert not out.any()
    assert (lse == 0.5).all()


def test_infinite_scores_stay_infinite():
    q = torch.zeros(1, 2, 1, 1)
    merge = RunningMerge(q, 1, 2)
    merge.add((0, 2), torch.full((1, 2, 1, 1), float("nan")), torch.tensor([[[float("inf"), 0.0]]]))
    merge.add((0, 2), torch.ones(1, 2, 1, 1), torch.zeros(1, 1, 2))
    out, lse = merge.finish()
    assert out[0, 0].isnan()
    assert lse[0, 0, 0] == float("inf")


def test_sums_start_where_their_parts_do():
    like = torch.zeros(1, 4, 1, 1, dtype=torch.bfloat16)
    total = Sum(like)
    total.add((1, 3), torch.ones(1, 2, 1, 1, dtype=torch.bfloat16))
    total.add((0, 4), torch.full((1, 4, 1, 1), 2**-8, dtype=torch.bfloat16))
    total.add((0, 4), torch.full((1, 4, 1, 1), 2**-8, dtype=torch.bfloat16))
    # In bfloat16 each of the small ones would be lost beside 1.
    assert total.finish()[0, :, 0, 0].tolist() == [2**-7, 1 + 2**-7, 1 + 2**-7, 2**-7]
    assert not Sum(like).finish().any()
