"""Calls of attention over a cache that every backend must get right: features alone and in pairs, edges of sizes."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from itertools import accumulate, combinations
from typing import Any

import pytest
import torch
from torch import Tensor

import flashtile
from flashtile.ops.common.eight_bits import EIGHT_BITS
from flashtile.ops.kv_cache.spec import indexable, quantized
from flashtile.testing import Size, assert_close
from support.running.covering import combined_cases


@dataclass(frozen=True)
class CacheCase:
    """One call.

    `capacity` is that of a sequence, in a paged call rounded up to whole pages. `latent`: values are the first columns
    of the keys. `cache_dtype`: of 8-bit caches, whose `factors` are "one", or of "heads", "pages" (or entries) or
    "rows". `lengths`: rows in the cache before the call, an int for all sequences; None = the cache is full. `queries`:
    of each sequence, and last of none, in a packed call; `new`: likewise the new rows, where they are others.
    `arguments` are keyword arguments that are no tensors.
    """

    batch: int = 2
    seq_q: int = 3
    seq_new: int | None = None
    queries: tuple[int, ...] | None = None
    new: tuple[int, ...] | None = None
    capacity: int = 50
    lengths: int | tuple[int, ...] | None = (37, 21)
    heads: int = 2
    heads_kv: int = 2
    head_dim: int = 16
    head_dim_v: int = 16
    dtype: torch.dtype = torch.float32
    cache_dtype: torch.dtype | None = None
    factors: str | None = None
    length_dtype: torch.dtype = torch.int32
    page_size: int | None = None
    entries: tuple[int, ...] | None = None
    left: tuple[int, ...] | None = None
    rotary_dim: int | None = None
    alibi: bool = False
    sinks: bool = False
    tree: bool = False
    latent: bool = False
    arguments: dict[str, Any] = field(default_factory=dict)

    def queries_of(self, sequence: int) -> int:
        return self.seq_q if self.queries is None else self.queries[sequence]

    def new_of(self, sequence: int) -> int:
        """Rows that are appended to a sequence."""
        if self.seq_new is None or self.queries is None:
            return self.seq_new or 0
        return (self.new or self.queries)[sequence]


@dataclass
class CacheInputs:
    """Tensors of a case: positional arguments, and keyword arguments."""

    q: Tensor
    k_cache: Tensor
    v_cache: Tensor
    k: Tensor | None
    v: Tensor | None
    tensors: dict[str, Any]

    def cast(self, dtype: torch.dtype) -> CacheInputs:
        """Copies, in a dtype."""
        wide = torch.float64 if dtype is torch.float64 else None
        tensors = {
            name: value.to(wide) if wide and isinstance(value, Tensor) and value.is_floating_point() else value
            for name, value in self.tensors.items()
        }
        parts = [
            None if t is None else t.detach().clone().to(t.dtype if t.dtype in EIGHT_BITS else dtype)
            for t in (self.q, self.k_cache, self.v_cache, self.k, self.v)
        ]
        for name in ("descale_k", "descale_v"):
            if name in tensors:
                tensors[name] = self.tensors[name].clone()  # float32, and written
        if "descale_v" in tensors and self.tensors["descale_v"] is self.tensors["descale_k"]:
            tensors["descale_v"] = tensors["descale_k"]
        if self.k is not None and self.v is None:
            parts[2] = parts[1][..., : self.v_cache.shape[-1]]
        return CacheInputs(*parts, tensors)  # type: ignore[arg-type]

    def call(self, **arguments: Any) -> Any:
        parts = (self.q, self.k_cache, self.v_cache, self.k, self.v)
        return flashtile.attention_with_kv_cache(*parts, **self.tensors, **arguments)


def make_inputs(case: CacheCase, device: torch.device | str = "cpu", seed: int = 0) -> CacheInputs:
    """Random normal inputs. Rows that no query sees are NaN: past the length, in the left padding, left of all windows,
    shared rows of all sequences but the first, and those of no sequence."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int, dtype: torch.dtype = case.dtype) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)

    tensors: dict[str, Any] = {}
    if isinstance(case.lengths, tuple):
        tensors["cache_lengths"] = torch.tensor(case.lengths, dtype=case.length_dtype)
    elif case.lengths is not None:
        tensors["cache_lengths"] = case.lengths
    pages = -(-case.capacity // (case.page_size or 1))
    rows, outer = case.capacity, case.batch
    if case.page_size is not None:
        rows, outer = case.page_size, case.batch * pages + 2
        order = torch.randperm(outer, generator=generator)[: case.batch * pages]
        tensors["block_table"] = order.view(case.batch, pages).to(case.length_dtype)
    if case.entries is not None:
        outer = case.batch + 2
        tensors["cache_batch_indices"] = torch.tensor(case.entries, dtype=case.length_dtype)
    if case.left is not None:
        tensors["cache_left_padding"] = torch.tensor(case.left, dtype=case.length_dtype)
    if case.rotary_dim is not None:
        cos, sin = flashtile.rotary_tables(case.capacity + 64, case.rotary_dim)
        tensors |= {"rotary_cos": cos, "rotary_sin": sin}
    wide = torch.float64 if case.dtype is torch.float64 else torch.float32
    if case.alibi:
        tensors["alibi_slopes"] = normal(case.batch, case.heads, dtype=wide).abs() / 8
    if case.sinks:
        tensors["sinks"] = normal(case.heads, dtype=wide)
    k_cache = normal(outer, rows, case.heads_kv, case.head_dim)
    v_cache = normal(outer, rows, case.heads_kv, case.head_dim_v)
    factors: list[Tensor] = []
    if case.factors is not None:
        shape = {"one": 0, "heads": 1, "pages": 2, "rows": 3}[case.factors]
        sizes = ((), (case.heads_kv,), (outer, case.heads_kv), (outer, rows, case.heads_kv))[shape]
        largest = 4 / EIGHT_BITS[case.cache_dtype or torch.int8]
        factors = [(0.7 + torch.rand(sizes, generator=generator)) * largest for _ in range(2)]
    if case.cache_dtype is not None:
        k_cache, v_cache = (
            quantized(cache, factor, case.cache_dtype)
            for cache, factor in zip((k_cache, v_cache), _expanded(factors, k_cache))
        )
    _poison(case, tensors, k_cache, v_cache, factors)
    tensors |= dict(zip(("descale_k", "descale_v"), factors))
    rows_q, rows_new = (case.batch, case.seq_q), (case.batch, case.seq_new)
    if case.queries is not None:
        rows_q, rows_new = (sum(case.queries),), (sum(case.new or case.queries),)
        tensors["cu_seqlens_q"] = _starts(case.queries, case.length_dtype)
        tensors["max_seqlen_q"] = max(case.queries[:-1], default=0)
        if case.new is not None:
            tensors["cu_seqlens_new"] = _starts(case.new, case.length_dtype)
    if case.tree:
        tensors["tree_mask"] = _tree(case, tensors, generator)
    k = v = None
    if case.seq_new is not None:
        k = normal(*rows_new, case.heads_kv, case.head_dim)
        v = normal(*rows_new, case.heads_kv, case.head_dim_v)
    q = normal(*rows_q, case.heads, case.head_dim)
    if case.latent:
        v_cache, v = k_cache[..., : case.head_dim_v], None
    parts = [None if t is None else t.to(device) for t in (q, k_cache, v_cache, k, v)]
    if case.latent:
        parts[2] = parts[1][..., : case.head_dim_v]
    tensors = {name: t.to(device) if isinstance(t, Tensor) else t for name, t in tensors.items()}
    if case.latent and factors:
        tensors["descale_v"] = tensors["descale_k"]
    return CacheInputs(*parts, tensors)


def _tree(case: CacheCase, tensors: dict[str, Any], generator: torch.Generator) -> Tensor:
    """Each query continues an earlier one of its sequence, or begins again."""
    counts = (case.seq_q,) * case.batch if case.queries is None else case.queries
    parents = [torch.rand(count, generator=generator).mul(torch.arange(count) + 1).int() - 1 for count in counts]
    if case.queries is None:
        return flashtile.tree_mask(torch.stack(parents))
    return flashtile.tree_mask(torch.cat(parents), tensors["cu_seqlens_q"], max(case.queries))


def _starts(counts: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Where each sequence begins, from the rows of all sequences and, last, of none."""
    return torch.tensor([0, *accumulate(counts[:-1])], dtype=dtype)


def _expanded(factors: list[Tensor], cache: Tensor) -> list[Tensor | None]:
    """Factors of both caches for each of their rows."""
    if not factors:
        return [None, None]
    return [(f[:, None] if f.dim() == 2 else f).expand(cache.shape[:-1]) for f in factors]


def _poison(case: CacheCase, tensors: dict[str, Any], k_cache: Tensor, v_cache: Tensor, factors: list[Tensor]) -> None:
    """NaN in all rows that no query sees, and in factors of their own: int8 has no NaN."""
    caches = (k_cache, v_cache)
    window_left, _ = case.arguments.get("window") or (None, None)
    used = torch.zeros(caches[0].shape[:2], dtype=torch.bool)
    for sequence in range(case.batch):
        length = case.capacity if case.lengths is None else case.lengths
        length = length if isinstance(length, int) else length[sequence]
        first = 0 if case.left is None else case.left[sequence]
        if sequence:
            first = max(first, case.arguments.get("shared_rows", 0))
        if window_left is not None:
            first = max(first, length + case.new_of(sequence) - case.queries_of(sequence) - window_left)
        row = torch.arange(min(first, length), length)
        if case.page_size is not None:
            used[tensors["block_table"][sequence].long()[row // case.page_size], row % case.page_size] = True
        else:
            used[sequence if case.entries is None else case.entries[sequence], row] = True
    for factor in factors:
        if factor.dim() == 3:
            factor[~used] = float("nan")
    for cache in caches:
        if cache.dtype is not torch.int8:
            indexable(cache)[~used] = torch.tensor(float("nan")).to(cache.dtype).view(indexable(cache).dtype)


def run(case: CacheCase, inputs: CacheInputs, backend: str, dtype: torch.dtype | None = None) -> dict[str, Tensor]:
    """out, lse and both caches after a call on copies of the inputs."""
    mine = inputs.cast(dtype or case.dtype)
    out, lse = mine.call(**case.arguments, return_lse=True, backend=backend)
    written = {"k_cache": mine.k_cache, "v_cache": mine.v_cache}
    if case.factors == "rows":
        written |= {name: mine.tensors[name] for name in ("descale_k", "descale_v")}
    return {"out": out, "lse": lse} | written


def check(case: CacheCase, backend: str, device: torch.device | str = "cpu", seed: int = 0) -> dict[str, Tensor]:
    """Asserts that a backend agrees with the fp64 oracle, and that it wrote to no other rows. Returns its results."""
    inputs = make_inputs(case, device, seed)
    actual = run(case, inputs, backend)
    oracle = run(case, inputs, "reference", torch.float64)
    eager = run(case, inputs, "reference")
    for name, value in actual.items():
        if value.dtype in EIGHT_BITS:
            # Rounded once from the same numbers: the same bits.
            assert torch.equal(indexable(value), indexable(eager[name])), f"{case}: {name}"
            continue
        assert_close(f"{case}: {name}", value, oracle[name], eager[name], _cancelled(case) if name == "lse" else Size())
    for name in ("k_cache", "v_cache"):
        given, actual[name], eager[name] = map(indexable, (getattr(inputs, name), actual[name], eager[name]))
        kept = (eager[name] == given) | given.isnan() & eager[name].isnan()
        assert torch.equal(actual[name][kept].nan_to_num(), given[kept].nan_to_num()), f"{case}: {name} overwritten"
    return actual


def _cancelled(case: CacheCase) -> Size:
    """The numbers that cancel in lse: it is a sum of the largest score and a logarithm, each about 1. Rotated
    queries and keys are rounded to their own dtype, so the scores have a unit of its last place, whatever lse's own
    dtype is."""
    size = 1.0
    if case.rotary_dim:
        wide = torch.float64 if case.dtype is torch.float64 else torch.float32
        size += torch.finfo(case.dtype).eps / torch.finfo(wide).eps / 16
    return Size(size, size)


BASE = CacheCase()

_FEATURES: dict[str, dict[str, Any]] = {
    "append": {"seq_new": 3},
    "rotary halves": {"seq_new": 3, "rotary_dim": 16},
    "rotary interleaved": {"seq_new": 2, "rotary_dim": 10, "arguments": {"rotary_interleaved": True}},
    "place paged": {"page_size": 16},
    "place entries": {"entries": (3, 1)},
    "lengths int": {"lengths": 30, "length_dtype": torch.int64},
    "left": {"left": (9, 20)},
    "grouped": {"heads": 6, "length_dtype": torch.int64},
    "head_dims": {"head_dim": 24, "head_dim_v": 40},
    "band none": {"arguments": {"causal": False}},
    "band window": {"arguments": {"window": (11, 0)}},
    "band both": {"arguments": {"causal": False, "window": (5, 1)}},
    "softcap": {"arguments": {"softcap": 2.0}},
    "alibi": {"alibi": True},
    "sinks": {"sinks": True},
    "splits": {"arguments": {"num_splits": 3}},
    "scale": {"arguments": {"scale": -0.4}},
}


def changed(case: CacheCase, change: dict[str, Any]) -> CacheCase:
    """The case with other fields; arguments are added to those it has."""
    arguments = {**case.arguments, **change.get("arguments", {})}
    return replace(case, **{**change, "arguments": arguments})


def _compatible(first: str, second: str) -> bool:
    """Rotation is of rows that are appended."""
    kinds = {first.split()[0], second.split()[0]}
    return len(kinds) == 2 and kinds != {"append", "rotary"}


def _pairs() -> dict[str, CacheCase]:
    cases = {"plain": BASE} | {name: changed(BASE, change) for name, change in _FEATURES.items()}
    for (first, change), (second, other) in combinations(_FEATURES.items(), 2):
        if _compatible(first, second):
            cases[f"{first}+{second}"] = changed(changed(BASE, change), other)
    cases["everything"] = BASE
    for name in ("rotary interleaved", "place paged", "left", "grouped", "head_dims", "band window", "softcap"):
        cases["everything"] = changed(cases["everything"], _FEATURES[name])
    for name in ("alibi", "sinks", "splits", "scale"):
        cases["everything"] = changed(cases["everything"], _FEATURES[name])
    return cases


PAIRS = _pairs()


def _combined() -> dict[str, CacheCase]:
    """Every pair of features in fewer cases, for tests that take long; features alone, and many of them, too."""
    cases = {name: case for name, case in PAIRS.items() if "+" not in name}
    return cases | combined_cases(BASE, list(_FEATURES), lambda case, name: changed(case, _FEATURES[name]), _compatible)


COMBINED = _combined()

#: Shapes and lengths at the edges.
EDGES = {
    "one_query": replace(BASE, seq_q=1, seq_new=1, heads=8),
    "full_cache": replace(BASE, lengths=None, capacity=33),
    "full_after_appending": replace(BASE, lengths=(45, 48), seq_new=2, seq_q=2),
    "empty_cache": replace(BASE, lengths=(0, 0), seq_new=3),
    "empty_cache_of_one": replace(BASE, lengths=(0, 40), page_size=16),
    "nothing_visible": replace(BASE, lengths=0, sinks=True),
    "no_capacity": replace(BASE, lengths=None, capacity=0),
    "no_pages": replace(BASE, lengths=0, capacity=0, page_size=16),
    "no_queries": replace(BASE, seq_q=0, seq_new=2),
    "no_queries_rotated": replace(BASE, seq_q=0, seq_new=2, rotary_dim=8, arguments={"causal": False}),
    "no_new_rows": replace(BASE, seq_new=0, rotary_dim=8),
    "no_batch": replace(BASE, batch=0, lengths=()),
    "more_queries_than_rows": replace(BASE, seq_q=9, lengths=(4, 21)),
    "padding_past_the_end": replace(BASE, left=(37, 50)),
    "many_queries": replace(BASE, seq_q=23, seq_new=23, lengths=(5, 20), heads=6),
    "more_new_rows_than_queries": replace(BASE, seq_q=1, seq_new=9, rotary_dim=8),
    "fewer_new_rows_than_queries": replace(BASE, seq_q=9, seq_new=1, rotary_dim=8),
    "entry_named_twice": replace(BASE, entries=(2, 2), lengths=(37, 37)),
    "odd_pages": replace(BASE, page_size=48, capacity=100, lengths=(97, 1), seq_new=2),
    "large_pages": replace(BASE, page_size=128, capacity=300, lengths=(270, 129), seq_new=1, batch=2),
    "one_split": replace(BASE, capacity=400, lengths=(399, 130), arguments={"num_splits": 1}),
    "many_splits": replace(BASE, capacity=400, lengths=(399, 60), arguments={"num_splits": 128}),
    "many_tiles": replace(BASE, capacity=400, lengths=(399, 130), arguments={"window": (150, 0)}),
    "head_dim_1": replace(BASE, head_dim=1, head_dim_v=3),
    "head_dim_80": replace(BASE, head_dim=80, head_dim_v=80, seq_new=1, rotary_dim=32),
    "head_dim_300": replace(BASE, head_dim=300, head_dim_v=20, seq_new=2),
    "head_dim_v_300": replace(BASE, head_dim=20, head_dim_v=300, heads=4),
    "rotary_dim_0": replace(BASE, seq_new=2, rotary_dim=0),
    "no_softcap": replace(BASE, arguments={"softcap": 0.0}),
    "scale_0": replace(BASE, arguments={"scale": 0.0}),
    "pages_of_one": replace(BASE, page_size=1, seq_new=1),
    "pages_of_7": replace(BASE, page_size=7, seq_new=2),
    "packed": replace(BASE, queries=(5, 1, 0), page_size=16, seq_new=0),
    "packed_reading": replace(BASE, queries=(1, 9, 0), arguments={"window": (11, 0)}),
    "packed_everything": changed(PAIRS["everything"], {"queries": (4, 7, 2), "page_size": 5, "seq_new": 0}),
    "packed_other_new_rows": replace(BASE, queries=(3, 1, 0), new=(0, 6, 0), seq_new=0, rotary_dim=8, heads=4),
    "packed_at_one_position": replace(
        BASE, queries=(3, 2, 1), seq_new=0, rotary_dim=8, arguments={"causal": False}, length_dtype=torch.int64
    ),
    "packed_empty_sequences": replace(
        BASE, batch=5, queries=(0, 3, 0, 2, 0, 1), lengths=(9, 0, 0, 40, 3), seq_new=0, sinks=True
    ),
    "packed_entries": replace(BASE, queries=(2, 70, 0), entries=(3, 1), heads=6, heads_kv=2, left=(9, 20)),
    "packed_without_sequences": replace(BASE, batch=0, queries=(3,), lengths=(), sinks=True),
    "packed_without_queries": replace(BASE, queries=(0, 0, 0), new=(2, 1, 0), seq_new=0),
    "packed_splits": replace(BASE, queries=(1, 40, 0), capacity=400, lengths=(399, 130), arguments={"num_splits": 3}),
    "tree": replace(BASE, seq_q=9, seq_new=9, tree=True, heads=4),
    "tree_packed": replace(
        BASE, queries=(7, 1, 0), page_size=16, seq_new=0, tree=True, sinks=True, arguments={"softcap": 2.0}
    ),
    "tree_splits": replace(
        BASE, seq_q=40, seq_new=40, lengths=(350, 0), capacity=400, tree=True, arguments={"num_splits": 3}
    ),
    "tree_reading": replace(BASE, seq_q=5, lengths=(37, 3), left=(9, 0), entries=(3, 1), tree=True),
    "latent": replace(
        BASE, heads=8, heads_kv=1, head_dim=72, head_dim_v=64, latent=True, page_size=16, queries=(3, 1, 0), seq_new=0
    ),
    "latent_576": replace(
        BASE, heads=4, heads_kv=1, head_dim=576, head_dim_v=512, latent=True, seq_new=1, seq_q=2, dtype=torch.float16
    ),
    "latent_rotated_8_bits": replace(
        BASE,
        heads=4,
        heads_kv=1,
        head_dim=40,
        head_dim_v=32,
        latent=True,
        seq_new=3,
        rotary_dim=8,
        cache_dtype=torch.int8,
        factors="one",
    ),
    "int8": replace(BASE, dtype=torch.float16, cache_dtype=torch.int8, factors="one", seq_new=2, rotary_dim=8),
    "int8_heads": replace(
        BASE, cache_dtype=torch.int8, factors="heads", seq_new=3, heads=6, arguments={"softcap": 2.0}
    ),
    "int8_pages": replace(BASE, cache_dtype=torch.int8, factors="pages", page_size=8, seq_new=1),
    "int8_rows": replace(BASE, dtype=torch.float16, cache_dtype=torch.int8, factors="rows", seq_new=3, rotary_dim=16),
    "fp8": replace(BASE, dtype=torch.float16, cache_dtype=torch.float8_e4m3fn, seq_new=2),
    "fp8_entries": replace(BASE, cache_dtype=torch.float8_e5m2, factors="pages", entries=(3, 1), seq_new=2),
    "fp8_rows": replace(
        BASE,
        cache_dtype=torch.float8_e4m3fn,
        factors="rows",
        page_size=16,
        queries=(4, 1, 1),
        seq_new=0,
        heads=4,
        rotary_dim=10,
        arguments={"rotary_interleaved": True, "window": (11, 0), "num_splits": 3},
    ),
    "fp8_reading": replace(BASE, cache_dtype=torch.float8_e4m3fn, factors="rows", page_size=16, queries=(4, 1, 1)),
    "fp8_head_dim_300": replace(BASE, cache_dtype=torch.float8_e4m3fn, factors="rows", head_dim=300, head_dim_v=20),
    "fp16": replace(BASE, dtype=torch.float16, heads=4, seq_new=2, rotary_dim=16),
}


def parameters(cases: dict[str, CacheCase]) -> list:
    return [pytest.param(case, id=name.replace(" ", "_")) for name, case in cases.items()]
