"""A sequence in different company: drawn sequences, ways to compute them, and the search for bits that differ."""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

import flashtile

#: What a way to compute a sequence returns, by name: out and lse, and dq, dk and dv where it has gradients.
Results = dict[str, Tensor]


class Sequence(NamedTuple):
    """A drawn sequence: q, k, v and dout `[rows, heads, head_dim]`, and the arguments of its calls."""

    q: Tensor
    k: Tensor
    v: Tensor
    dout: Tensor
    arguments: dict[str, Any]

    @property
    def rows(self) -> int:
        return self.q.shape[0]

    def like(self, rows: int, draw: random.Random) -> Sequence:
        """Another sequence for calls with the same arguments, whose numbers are larger."""
        return _sequence(draw, rows, self.q.dtype, self.q.device, _shape(self), self.arguments, scale=3.0)


def _shape(sequence: Sequence) -> tuple[int, int, int, int]:
    return sequence.q.shape[1], sequence.k.shape[1], sequence.q.shape[2], sequence.v.shape[2]


def _sequence(
    draw: random.Random, rows: int, dtype: torch.dtype, device: torch.device, shape: tuple[int, int, int, int],
    arguments: dict[str, Any], scale: float = 1.0,
) -> Sequence:  # fmt: skip
    generator = torch.Generator().manual_seed(draw.randrange(2**31))
    heads, heads_kv, head_dim, head_dim_v = shape
    sizes = (heads, head_dim), (heads_kv, head_dim), (heads_kv, head_dim_v), (heads, head_dim_v)
    tensors = (torch.randn(rows, *size, generator=generator) * scale for size in sizes)
    return Sequence(*(tensor.to(device, dtype) for tensor in tensors), arguments)


def _draw_rows(draw: random.Random, longest: int) -> int:
    """Half of them near tiles' edges."""
    edges = [rows + off for rows in (16, 64, 128, 192, 256) for off in (-1, 0, 1) if rows + off <= longest]
    return draw.choice(edges) if edges and draw.random() < 0.5 else draw.randint(1, longest)


def draw_sequence(
    draw: random.Random, device: str, dtypes: tuple[torch.dtype, ...], longest: int, widths: tuple[int, ...]
) -> Sequence:
    """A sequence of 1 to `longest` rows."""
    rows = _draw_rows(draw, longest)
    heads_kv, group = draw.choice((1, 1, 2)), draw.choice((1, 1, 2, 4))
    heads, head_dim = heads_kv * group, draw.choice(widths)
    arguments: dict[str, Any] = {"causal": draw.random() < 0.7}
    if draw.random() < 0.3:
        arguments["window"] = draw.choice(((7, 0), (70, None), (150, 0), (30, 40), (None, 20)))
    if draw.random() < 0.25:
        arguments["softcap"] = 5.0
    if draw.random() < 0.25:
        arguments["sinks"] = torch.linspace(-2, 4, heads, device=device)
    if draw.random() < 0.25:
        arguments["alibi_slopes"] = torch.logspace(-6, 0, heads, base=2.0, device=device)
    if draw.random() < 0.2:
        arguments["scale"] = draw.choice((0.3, 1.0, -0.2))
    shape = heads, heads_kv, head_dim, draw.choice((head_dim, head_dim, 64))
    return _sequence(draw, rows, draw.choice(dtypes), torch.device(device), shape, arguments, draw.choice((1.0, 4.0)))


def _with_gradients(leaves: list[Tensor], call: Callable[..., tuple[Tensor, Tensor]], dout: Tensor) -> list[Tensor]:
    leaves = [leaf.detach().requires_grad_() for leaf in leaves]
    out, lse = call(*leaves)
    return [out.detach(), lse.detach(), *torch.autograd.grad(out, leaves, dout)]


_NAMES = "out", "lse", "dq", "dk", "dv"


def in_batch(
    sequence: Sequence, others: list[Sequence], place: int, padded: int, options: dict[str, Any]
) -> Results:  # fmt: skip
    """In a dense batch, padded with NaN keys to `padded` rows where that is more than it has."""
    batch = [*others[:place], sequence, *others[place:]]
    width = max(padded, *(each.rows for each in batch))
    lengths = torch.tensor([each.rows for each in batch], dtype=torch.int32, device=sequence.q.device)

    def stacked(name: str, filling: float) -> Tensor:
        tensors = [getattr(each, name) for each in batch]
        return torch.stack(
            [torch.nn.functional.pad(of, (0, 0, 0, 0, 0, width - of.shape[0]), value=filling) for of in tensors]
        )

    arguments = {**sequence.arguments, **options}
    if lengths.lt(width).any():
        arguments["key_lengths"] = lengths
    leaves = [stacked("q", 1.0), stacked("k", math.nan), stacked("v", math.nan)]
    found = _with_gradients(
        leaves, lambda q, k, v: flashtile.attention(q, k, v, return_lse=True, **arguments), stacked("dout", 0.0)
    )
    found = [found[0], found[1].transpose(1, 2), *found[2:]]
    return {name: tensor[place, : sequence.rows] for name, tensor in zip(_NAMES, found)}


def packed(
    sequence: Sequence, others: list[Sequence], place: int, bounded: bool, options: dict[str, Any]
) -> Results:  # fmt: skip
    """Packed with others. `bounded`: the call is told the longest length."""
    batch = [*others[:place], sequence, *others[place:]]
    lengths = [each.rows for each in batch]
    ends = [0]
    for length in lengths:
        ends.append(ends[-1] + length)
    starts = torch.tensor(ends, dtype=torch.int32, device=sequence.q.device)
    arguments = {**sequence.arguments, **options}
    if bounded:
        arguments |= {"max_seqlen_q": max(lengths), "max_seqlen_k": max(lengths)}
    joined = [torch.cat([getattr(each, name) for each in batch]) for name in ("q", "k", "v", "dout")]
    found = _with_gradients(
        joined[:3], lambda q, k, v: flashtile.attention_varlen(q, k, v, starts, return_lse=True, **arguments), joined[3]
    )
    found = [found[0], found[1].transpose(0, 1), *found[2:]]
    own = slice(ends[place], ends[place + 1])
    return {name: tensor[own] for name, tensor in zip(_NAMES, found)}


def in_chunks(sequence: Sequence, cuts: list[int], options: dict[str, Any]) -> Results:
    """Chunks of its queries that end at `cuts`, each with the keys up to its own last."""
    outs, lses = [], []
    for begin, end in zip([0, *cuts], cuts):
        chunk = sequence.q[None, begin:end], sequence.k[None, :end], sequence.v[None, :end]
        out, lse = flashtile.attention(*chunk, return_lse=True, **sequence.arguments, **options)
        outs.append(out[0])
        lses.append(lse[0].transpose(0, 1))
    return {"out": torch.cat(outs), "lse": torch.cat(lses)}


def over_cache(
    sequence: Sequence, others: list[Sequence], place: int, cuts: list[int], page: int, options: dict[str, Any]
) -> Results:  # fmt: skip
    """In chunks that end at `cuts`, over a cache whose other sequences are whole already and take a step of one query.
    `page`: rows of a page, or 0 for a cache without pages."""
    batch = [*others[:place], sequence, *others[place:]]
    device, dtype = sequence.q.device, sequence.q.dtype
    capacity = max(each.rows for each in batch) + (3 if not page else -max(each.rows for each in batch) % page)
    _, heads_kv, head_dim, head_dim_v = _shape(sequence)
    entries = len(batch)
    table, of_entry = None, capacity
    if page:
        table = torch.randperm(entries * (capacity // page), generator=torch.Generator().manual_seed(1))
        table = table.view(entries, -1).to(device, torch.int32)
        of_entry = page
    outer = entries if table is None else table.numel()
    k_cache = torch.full((outer, of_entry, heads_kv, head_dim), math.nan, dtype=dtype, device=device)
    v_cache = torch.full((outer, of_entry, heads_kv, head_dim_v), math.nan, dtype=dtype, device=device)
    arguments = {**sequence.arguments, **options, "block_table": table}
    by_hand = options["backend"] == "hopper"  # the emulator, which has no kernel that appends
    if by_hand:
        arguments["backend"] = "triton"
    outs, lses = [], []
    for step, (begin, end) in enumerate(zip([0, *cuts], cuts)):
        parts, before = [], []
        for number, each in enumerate(batch):
            first, last = (
                (begin, end) if number == place else (0, each.rows) if not step else (each.rows - 1, each.rows)
            )
            parts.append((each, first, last))
            before.append(first)
        starts = torch.tensor([0, *(last - first for _, first, last in parts)], device=device).cumsum(0).int()
        joined = [
            torch.cat([getattr(each, name)[first:last] for each, first, last in parts]) for name in ("q", "k", "v")
        ]
        lengths = torch.tensor(before, dtype=torch.int32, device=device)
        if by_hand:
            lengths += starts.diff()
            for entry, (each, _, last) in enumerate(parts):
                row = torch.arange(last)
                where = (torch.full_like(row, entry), row) if table is None else (table[entry, row // page], row % page)
                k_cache[where], v_cache[where] = each.k[:last], each.v[:last]
        out, lse = flashtile.attention_with_kv_cache(
            joined[0], k_cache, v_cache, *((None, None) if by_hand else joined[1:]), cu_seqlens_q=starts,
            return_lse=True, cache_lengths=lengths, max_seqlen_q=int(starts.diff().max()), **arguments,
        )  # fmt: skip
        own = slice(int(starts[place]), int(starts[place + 1]))
        outs.append(out[own])
        lses.append(lse[:, own].transpose(0, 1))
    return {"out": torch.cat(outs), "lse": torch.cat(lses)}


def by_steps(sequence: Sequence, others: list[Sequence], place: int, steps: int, options: dict[str, Any]) -> Results:
    """The last rows, one after another, in a dense call over a cache that has all rows."""
    batch = [*others[:place], sequence, *others[place:]]
    longest = max(each.rows for each in batch)

    def stacked(name: str) -> Tensor:
        tensors = [getattr(each, name) for each in batch]
        return torch.stack([torch.nn.functional.pad(of, (0, 0, 0, 0, 0, longest - of.shape[0])) for of in tensors])

    arguments = {**sequence.arguments, **options}
    if arguments["backend"] == "hopper":  # the emulator
        arguments["backend"] = "triton"
    caches, outs, lses = (stacked("k"), stacked("v")), [], []
    for row in range(sequence.rows - steps, sequence.rows):
        rows = [min(row, each.rows - 1) for each in batch]
        lengths = torch.tensor(rows, dtype=torch.int32, device=sequence.q.device) + 1
        q = torch.stack([each.q[last] for each, last in zip(batch, rows)])[:, None]
        out, lse = flashtile.attention_with_kv_cache(q, *caches, cache_lengths=lengths, return_lse=True, **arguments)
        outs.append(out[place])
        lses.append(lse[place].transpose(0, 1))
    return {"out": torch.cat(outs), "lse": torch.cat(lses)}


def ways(
    sequence: Sequence, draw: random.Random, longest: int, options: dict[str, Any]
) -> Iterator[tuple[str, Callable[[], Results]]]:  # fmt: skip
    """Some ways to compute a sequence, the first alone."""
    yield "alone", lambda: in_batch(sequence, [], 0, 0, options)
    others = [sequence.like(draw.randint(1, longest), draw) for _ in range(draw.randint(1, 3))]
    alike = [sequence.like(sequence.rows, draw) for _ in others]
    place = draw.randint(0, len(others))
    yield "batch", lambda: in_batch(sequence, alike, place, 0, options)
    yield "padded", lambda: in_batch(sequence, others, place, draw.randint(1, 2 * longest), options)
    yield "packed", lambda: packed(sequence, others, place, draw.random() < 0.5, options)
    # What a query sees must be there when its chunk is computed.
    if sequence.arguments["causal"] or sequence.arguments.get("window", (None, None))[1] == 0:
        ends = sorted({draw.randint(1, sequence.rows) for _ in range(draw.randint(0, 3))} | {sequence.rows})
        by_token = sorted({*ends, *range(max(sequence.rows - 2, 1), sequence.rows)})
        cuts = draw.choice((ends, by_token))
        yield "chunks", lambda: in_chunks(sequence, cuts, options)
        yield "cache", lambda: over_cache(sequence, others, place, cuts, 0, options)
        yield "pages", lambda: over_cache(sequence, others, place, cuts, draw.choice((16, 48, 256)), options)
        yield "steps", lambda: by_steps(sequence, others, place, min(2, sequence.rows), options)


def differences(results: list[tuple[str, Results]]) -> list[str]:
    """Which results differ from those of the first way, or from its last rows, in words."""
    (_, first), *others = results
    found = []
    for way, result in others:
        for name, tensor in result.items():
            expected = first[name][-tensor.shape[0] :]
            if not torch.equal(tensor, expected):
                apart = (tensor.double() - expected.double()).abs().max()
                found.append(f"{way}: {name} by {float(apart):.1e}")
    return found


def search(
    draws: Iterable[int], seed: int, device: str, dtypes: tuple[torch.dtype, ...], longest: int,
    widths: tuple[int, ...], backend: str = "auto", invariant: bool = True, alike: int = 1,
) -> tuple[Counter[str], list[str]]:  # fmt: skip
    """How often each way was compared, and what differed. `draws`: their numbers. `alike`: so many sequences in turn
    have the same arguments, heads and dtypes, and so the same kernels, which a GPU compiles once."""
    compared: Counter[str] = Counter()
    found: list[str] = []
    for number in draws:
        draw = random.Random(f"{seed} {number}")
        sequence = draw_sequence(random.Random(f"{seed} {number // alike}"), device, dtypes, longest, widths)
        if alike > 1:
            sequence = sequence.like(_draw_rows(draw, longest), draw)
        options = {"backend": backend, "batch_invariant": invariant}
        results = [(way, compute()) for way, compute in ways(sequence, draw, longest, options)]
        compared.update(way for way, _ in results)
        described = f"{number}: {sequence.rows} rows, {_shape(sequence)}, {sequence.q.dtype}, {sequence.arguments}"
        found += [f"{described}: {difference}" for difference in differences(results)]
    return compared, found
