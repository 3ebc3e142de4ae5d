"""The schedule and the kernels of a context-parallel call, without processes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import flashtile
from flashtile.distributed.checks import TENSORS, check_parts, check_tensors, check_whole
from flashtile.distributed.context_parallel import Align, Strategy, Window, make_problem, make_schedule, traced
from flashtile.distributed.engine import place_and_band
from flashtile.distributed.heads import check_heads, local_head_runs
from flashtile.distributed.layout import LayoutKind
from flashtile.distributed.places import STRATEGIES
from flashtile.distributed.schedule import Schedule, Work


@dataclass(frozen=True)
class ContextParallelExplanation:
    """The answer of `explain_context_parallel`.

    Attributes:
        schedule: for each step, which rank sends which keys to which rank, and what each computes. The ranks are those
            of the ring. "all_to_all" has one step of one rank, with some of the heads.
        heads: number of query heads that a rank computes at a time.
        heads_kv: number of key/value heads that it computes at a time.
        runs: number of such runs, one after another. The heads of one run are exchanged while another is computed.
        received: bytes that the busiest rank receives in the forward, for keys and values and for exchanges of heads.
        kernels: the kernels of the largest call.
    """

    schedule: Schedule
    heads: int
    heads_kv: int
    runs: int
    received: int
    kernels: flashtile.Explanation

    def __str__(self) -> str:
        often = "" if self.runs == 1 else f", {self.runs} times"
        return (
            f"{self.schedule}\n{self.heads} query heads and {self.heads_kv} key/value heads at a time{often}; the "
            f"busiest rank receives {self.received / 2**20:.2f} MiB in the forward\nthe largest call:\n{self.kernels}"
        )


def explain_context_parallel(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    ranks: int | tuple[int, int],
    strategy: Strategy = "ring",
    layout: LayoutKind = "zigzag",
    cu_seqlens: Sequence[int] | Tensor | None = None,
    causal: bool = False,
    align: Align = "bottom_right",
    window: Window | None = None,
    device: torch.device | str | None = None,
    **options: Any,
) -> ContextParallelExplanation:
    """Says what `context_parallel_attention` would do. Runs nothing and needs no process group.

    Args:
        q: a rank's shard, which may be on the meta device. The same holds for k and v.
        ranks: number of ranks; for "ring_all_to_all" the pair (ring, heads).
        strategy, layout, cu_seqlens, causal, align, window: as in the call.
        device: the device to ask about, as in `flashtile.explain`, such as "h100".
        options: other arguments of the call that `flashtile.explain` has too.

    Raises:
        TypeError, ValueError: as the call itself.
    """
    if strategy not in STRATEGIES:
        raise ValueError(f"strategy: expected one of {', '.join(STRATEGIES)}, got {strategy!r}")
    two = strategy == "ring_all_to_all"
    numbers = ranks if isinstance(ranks, tuple) else (ranks,)
    if len(numbers) != 1 + two or any(type(number) is not int or number < 1 for number in numbers):
        expected = "a pair of numbers" if two else "a number"
        raise ValueError(f"ranks: expected {expected} of at least 1 for strategy={strategy!r}, got {ranks!r}")
    band = {"causal": causal, "align": align, "window": window}
    given = {name: options.get(name) for name in TENSORS}
    check_tensors({"q": q, "k": k, "v": v} | given, cu_seqlens is not None)
    tensors, documents, row_sharded = check_parts(
        {"q": q, "k": k, "v": v} | given, strategy, math.prod(numbers), cu_seqlens
    )
    settings = {name: options[name] for name in options.keys() - given - {"block_mask", "score_mod"}}
    check_whole(math.prod(numbers), tensors, band | settings, documents, row_sharded, options.get("block_mask"))
    ring, exchanging = ranks if isinstance(ranks, tuple) else ((1, ranks) if strategy == "all_to_all" else (ranks, 1))
    check_heads(q.shape[-2], k.shape[-2], exchanging)
    of_rank = max(1, k.shape[-2] // exchanging)
    total = ring * exchanging
    lengths = q.shape[-3] * total, k.shape[-3] * total
    names = ("bias", "mask", "alibi_slopes", "key_lengths", "block_mask", "score_mod")
    positional = bool(options.get("dropout_p")) or any(options.get(name) is not None for name in names)
    schedule = make_schedule(strategy, make_problem(lengths, ring, layout, band, documents, positional))
    works = [work for step in schedule.steps for of_rank in step.work for work in of_rank]
    largest = max(works, key=lambda work: work.pairs, default=None)
    runs = local_head_runs(schedule, q if q.dim() == 4 else q[None], of_rank * exchanging, exchanging)
    heads, heads_kv = (high - low for low, high in runs[0])
    shapes = [(heads, q.shape[-1]), (heads_kv, k.shape[-1]), (heads_kv, v.shape[-1])]
    kernels = _kernels(largest, positional, q, shapes, band, device, options)
    received = _received(schedule, q, k, v, of_rank, exchanging)
    return ContextParallelExplanation(schedule, heads, heads_kv, len(runs), received, kernels)


def _kernels(
    work: Work | None, positional: bool, q: Tensor, shapes: list[tuple[int, int]], band: dict[str, Any],
    device: torch.device | str | None, options: dict[str, Any],
) -> flashtile.Explanation:  # fmt: skip
    """The kernels of a call; documents count as one sequence."""
    batch = q.shape[0] if q.dim() == 4 else 1
    rows, keys = (0, 0) if work is None else (work.rows[1] - work.rows[0], work.keys[1] - work.keys[0])
    of_q, of_k, of_v = (
        torch.empty(batch, count, *shape, dtype=q.dtype, device="meta")
        for count, shape in zip((rows, keys, keys), shapes)
    )
    heads = shapes[0][0]
    part = flashtile.AttentionPart(0, 0, rows, keys)
    if work is not None and work.mode != "packed":
        part, band = place_and_band(work, band, positional, 0, heads)
    named = ("scale", "dropout_p", "dropout_seed", "softcap", "deterministic", "backend")
    given = {name: options[name] for name in named if name in options}
    sizes = {"alibi_slopes": (heads,), "bias": (rows, keys), "mask": (rows, keys), "key_lengths": (batch,)}
    for name, size in sizes.items():
        whole = options.get(name)
        if whole is not None:
            given[name] = torch.empty(size, dtype=whole.dtype, device="meta", requires_grad=whole.requires_grad)
    if (block_mask := options.get("block_mask")) is not None:
        given["block_mask"] = flashtile.patterns.sliding_window(rows, keys, tile=block_mask.tile).to("meta")
    if (function := traced(options.get("score_mod"), q)) is not None:
        captured = (t.detach().to("meta").requires_grad_(t.requires_grad) for t in function.captured)
        given["score_mod"] = function._replace(captured=tuple(captured))
    where = q.device if device is None else device
    return flashtile.explain(of_q, of_k, of_v, **band, **given, device=where, part=part)


def _received(schedule: Schedule, q: Tensor, k: Tensor, v: Tensor, heads_kv: int, exchanging: int) -> int:
    """Bytes that the busiest rank receives in the forward."""
    item = q.element_size()
    batch = q.shape[0] if q.dim() == 4 else 1
    of_key = batch * heads_kv * (k.shape[-1] + v.shape[-1]) * item
    if schedule.gathered:
        keys = schedule.problem.keys.share * (schedule.ranks - 1)
    else:
        keys = max(
            sum(t.keys[1] - t.keys[0] for step in schedule.steps for t in step.transfers if t.target == rank)
            for rank in range(schedule.ranks)
        )
    heads = q.shape[-2] // exchanging
    rows = batch * q.shape[-3] * (exchanging - 1)
    of_heads = rows * (heads * (q.shape[-1] + v.shape[-1]) * item + heads_kv * (k.shape[-1] + v.shape[-1]) * item)
    return keys * of_key + (of_heads if exchanging > 1 else 0)
