"""Latent attention on Hopper: the kernel's own source on an emulated machine, its machine code, and which calls it
serves, all without a GPU."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any, NamedTuple

import pytest
import torch

from support.compilation import needs_triton  # noqa: F401

# isort: split
import flashtile
from flashtile._backends import clear_plans, devices
from flashtile._backends.allocate import contiguous_strides
from flashtile._backends.launch import Plan
from flashtile.ops.common.eight_bits import EIGHT_BITS
from flashtile.ops.common.split_keys import plan as split_keys
from flashtile.ops.common.split_keys.plan import SplitCall
from flashtile.ops.kv_cache import reference
from flashtile.ops.kv_cache.hopper import backend, gather, latent
from flashtile.ops.kv_cache.hopper.backend import latent_unsupported_reason
from flashtile.ops.kv_cache.spec import CacheCall, CacheSpec, quantized
from flashtile.ops.kv_cache.triton import launch
from flashtile.testing import assert_close, assert_same
from gluon_emulator import EmulatedHopper
from support.attention.gathered import gathered_rows
from support.attention.kv_cache_cases import CacheCase, check
from support.compilation.checked_code import check_code
from support.compilation.machine_code import Binary, check_barriers, check_fit, check_products
from support.running.covering import turns
from support.running.each_case import each_case

_SM_90 = devices.KNOWN_DEVICES["sm_90"]


class Case(NamedTuple):
    """A call over a latent cache; `lengths` are those of its sequences, and `queries` make it a packed one."""

    heads: int = 16
    seq_q: int = 1
    queries: tuple[int, ...] | None = None
    lengths: tuple[int, ...] = (200, 75)
    page_size: int = 0
    capacity: int = 256
    head_dim: int = 576
    dtype: torch.dtype = torch.bfloat16
    causal: bool = True
    splits: int = 1
    spread: float = 1.0  # of the queries
    left: tuple[int, ...] | None = None
    tree: bool = False
    cache_dtype: torch.dtype | None = None  # of 8 bits
    factors: str | None = None  # of "rows", "pages" or "heads", those of values others


_CASES = {
    "decode": Case(),
    "decode in splits": Case(lengths=(200, 40, 0), splits=3),
    "heads of two tiles": Case(heads=128, lengths=(130, 1), page_size=64),
    "tokens, not causal": Case(seq_q=3, heads=24, causal=False, lengths=(70, 128), dtype=torch.float16),
    "tokens": Case(seq_q=9, heads=16, lengths=(70, 9, 5), page_size=16, head_dim=520),
    "packed": Case(queries=(5, 0, 1, 20), heads=7, lengths=(100, 33, 64, 20), page_size=16, splits=2),
    "packed, pages of 24": Case(queries=(1, 9), heads=32, lengths=(90, 9), page_size=24, dtype=torch.float16),
    "left padding": Case(seq_q=2, lengths=(200, 75, 10), left=(70, 75, 9), splits=2),
    "left padding, pages": Case(lengths=(200, 75, 30, 77), left=(67, 75, 17, 64), page_size=16, heads=20),
    "left padding, packed": Case(queries=(5, 9), lengths=(140, 37), left=(130, 33), page_size=64, dtype=torch.float16),
    "tree": Case(seq_q=7, lengths=(70, 200), causal=False, tree=True, splits=2),
    "tree, packed": Case(queries=(5, 1, 9), lengths=(130, 33, 66), page_size=64, heads=24, causal=False, tree=True),
    "int8": Case(cache_dtype=torch.int8, factors="heads", lengths=(200, 75, 0), splits=2, dtype=torch.float16),
    "fp8, packed": Case(
        cache_dtype=torch.float8_e4m3fn, factors="rows", queries=(5, 0, 1), lengths=(100, 33, 64), page_size=16
    ),
    "e5m2, left padding": Case(
        cache_dtype=torch.float8_e5m2, factors="pages", seq_q=2, lengths=(200, 75), left=(67, 75), page_size=24
    ),
    "fp8 rows, gathered": Case(
        cache_dtype=torch.float8_e4m3fn, factors="rows", head_dim=520, lengths=(100, 33), page_size=7
    ),
    "int8, tree": Case(
        cache_dtype=torch.int8,
        factors="rows",
        queries=(5, 1, 9),
        lengths=(130, 33, 66),
        page_size=1,
        heads=24,
        causal=False,
        tree=True,
    ),
    "pages of 1": Case(lengths=(130, 70), page_size=1, heads=64, seq_q=3),
    "pages of 12": Case(queries=(5, 0, 9), lengths=(100, 33, 64), page_size=12, dtype=torch.float16),
    "rising scores": Case(lengths=(256, 190), spread=30.0, dtype=torch.float16),
    "rising scores in bfloat16": Case(lengths=(256, 190), spread=30.0),
}


def _inputs(case: Case) -> tuple[CacheCall, CacheSpec]:
    """Rows that no query sees are NaN."""
    generator = torch.Generator().manual_seed(0)
    batch, width = len(case.lengths), case.head_dim
    rows = (batch, case.seq_q) if case.queries is None else (sum(case.queries) + 2,)
    q = (torch.randn(*rows, case.heads, width, generator=generator) * case.spread).to(case.dtype)
    size, pages = case.page_size or case.capacity, -(-case.capacity // (case.page_size or case.capacity))
    cache = torch.full((batch * pages + 1, size, 1, width), float("nan"), dtype=case.dtype)
    table = torch.randperm(batch * pages + 1, generator=generator)[: batch * pages].view(batch, pages).int()
    if not case.page_size:
        table = torch.arange(batch)[:, None]
    for sequence, length in enumerate(case.lengths):
        for row in range(0 if case.left is None else case.left[sequence], length):
            where = table[sequence, row // size], row % size, 0
            # Scores grow along the rows where they are to rise.
            grown = 1 + row / 50 if case.spread > 1 else 1
            cache[where] = (torch.randn(width, generator=generator) * grown).to(case.dtype)
    factors: list[torch.Tensor | None] = [None, None]
    if case.cache_dtype is not None:
        shape = {"rows": cache.shape[:-1], "pages": (len(cache), 1, 1), "heads": (1, 1, 1)}[case.factors or "heads"]
        largest = 4 / EIGHT_BITS[case.cache_dtype]
        first, second = (
            ((torch.rand(shape, generator=generator) + 0.7) * largest).expand(cache.shape[:-1]) for _ in range(2)
        )
        factors = [first, second if case.factors == "heads" else first]
        cache = quantized(cache, first, case.cache_dtype)
    starts = None
    if case.queries is not None:
        starts = torch.tensor([0, *case.queries]).cumsum(0).int()
    if case.page_size:
        for sequence, length in enumerate(case.lengths):
            table[sequence, -(-length // size) :] = 2**30  # not read
            if case.left is not None:
                table[sequence, : case.left[sequence] // size] = 2**30
    left = None if case.left is None else torch.tensor(case.left)
    tree = None
    if case.tree:  # one column more than queries, if packed
        columns = case.seq_q if case.queries is None else max(case.queries) + 1
        tree = torch.rand(*rows, columns, generator=generator) < 0.5
    call = CacheCall(
        q, cache, cache[..., :512], cache_lengths=torch.tensor(case.lengths), cache_left_padding=left,
        block_table=table if case.page_size else None, cu_seqlens_q=starts, descale_k=factors[0],
        descale_v=factors[1], tree_mask=tree,
    )  # fmt: skip
    return call, CacheSpec(0, width**-0.5, None, 0 if case.causal else None, num_splits=case.splits)


def _call(
    q: tuple[int, ...], cache: tuple[int, ...], dtype: torch.dtype, table: tuple[int, ...] | None,
    sequences: int | None, length_dtype: torch.dtype | None = torch.int32, window_right: int | None = 0, **others: Any,
) -> SplitCall:  # fmt: skip
    """The description of a call on contiguous tensors of these shapes; `sequences`: of a packed one."""
    packed = sequences is not None
    batch, seq_q, heads, width = (sequences, *q) if packed else q
    capacity = cache[1] * (1 if table is None else table[1])
    outer, row, _, _ = contiguous_strides(cache)
    q_strides = contiguous_strides((1, *q) if packed else q)[:3]
    of_starts, of_table = (torch.int32 if there else None for there in (packed, table is not None))
    described = SplitCall(
        dtype,
        (batch, seq_q, heads, 1, width, 512),
        (q_strides, (outer, row, 0), (outer, row, 0)),
        0,
        capacity,
        width**-0.5,
        False,
        (length_dtype, None, None, of_table, of_starts, None, None),
        0 if table is None else cache[1],
        0 if table is None else table[1],
        seq_q if packed else None,
        window_right=window_right,
        visible=capacity,
        cache_dtype=dtype,
        values_in_keys=True,
    )
    return described._replace(**others)


@pytest.mark.parametrize("name, seed", turns(_CASES, range(2)))
def test_results_on_the_emulated_machine(name: str, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The portable kernel that gathers is not there."""
    monkeypatch.setattr(backend, "_GATHERED_BYTES", math.inf)
    monkeypatch.setattr(backend, "_WIDENED_TILES", 3)
    call, spec = _inputs(_CASES[name])
    emulated = EmulatedHopper(multiprocessors=3, seed=seed)
    indices = (
        call.cache_lengths,
        None,
        call.cache_left_padding,
        call.block_table,
        call.cu_seqlens_q,
        None,
        call.tree_mask,
    )
    described = _call(
        call.q.shape, call.k_cache.shape, call.q.dtype, None if call.block_table is None else call.block_table.shape,
        None if call.cu_seqlens_q is None else call.batch, torch.int64, spec.window_right, num_splits=spec.num_splits,
    )  # fmt: skip
    if call.cache_left_padding is not None:
        described = described._replace(
            index_dtypes=(*described.index_dtypes[:2], torch.int64, *described.index_dtypes[3:])
        )
    if call.tree_mask is not None:
        form = (*(0, *call.tree_mask.stride())[-3:-1], call.tree_mask.shape[-1])
        described = described._replace(tree=form, index_dtypes=(*described.index_dtypes[:6], torch.uint8))
    factors = [call.descale_k, call.descale_v]
    described = described._replace(
        cache_dtype=call.k_cache.dtype, one_factor=call.descale_k is call.descale_v,
        descale_strides=tuple(of if of is None else of.stride() for of in factors),
    )  # fmt: skip
    assert latent_unsupported_reason(described, _SM_90) is None
    rows = [call.k_cache]
    if backend.gathers_latent(described):
        sequences = backend.gathered_sequences(described, 1)
        planned = gather.plan_gather(described, 1, sequences, torch.device("cpu"), keys_alone=True)
        rows, indices, factors = gathered_rows(planned, described, 1, rows, indices, factors, 0)
        described = planned.call
    found = emulated.latent(described, call.q, *rows, indices, factors, 0)
    cast = [t.double() if isinstance(t, torch.Tensor) and t.is_floating_point() else t for t in call]
    if call.block_table is not None:
        cast[8] = call.block_table.clamp(max=call.k_cache.shape[0] - 1)
    oracle = reference.forward(CacheCall(*cast), spec)
    cast = [t if isinstance(t, torch.Tensor) and t.is_floating_point() else c for t, c in zip(call, cast)]
    eager = reference.forward(CacheCall(*cast), spec)
    for what, *three in zip(("out", "lse"), found, oracle, eager):
        assert_close(what, *three)


def test_bits_depend_on_the_rows_that_a_query_sees_alone() -> None:
    """In one split: not on other sequences, on pages, on where they lie in a tile of rows, nor on other queries."""
    rows, q = torch.randn(150, 1, 576).half(), torch.randn(5, 16, 576).half() * 20
    emulated = EmulatedHopper(multiprocessors=3, seed=0)
    together = _call((1, 5, 16, 576), (1, 192, 1, 576), torch.float16, None, None)
    cache = torch.cat((rows, torch.full((42, 1, 576), float("nan")).half()))[None]
    out, lse = emulated.latent(
        together._replace(num_splits=1), q[None], cache, (torch.tensor([150], dtype=torch.int32), *[None] * 6), (), 0
    )
    # The last three queries, behind those of another sequence, in pages of 16.
    pages, table = torch.randn(20, 16, 1, 576).half(), torch.randperm(20)[:20].view(2, 10).int()
    for page in range(10):
        part = rows[16 * page : 16 * page + 16]
        pages[table[1, page], : len(part)] = part
    packed = torch.cat((torch.randn(4, 16, 576).half(), q[2:]))
    lengths, starts = (torch.tensor(numbers, dtype=torch.int32) for numbers in ((99, 150), (0, 4, 7)))
    described = _call(packed.shape, pages.shape, torch.float16, (2, 10), 2, num_splits=1)
    out_packed, lse_packed = emulated.latent(
        described, packed, pages, (lengths, None, None, table, starts, None, None), (), 0
    )
    assert_same(out_packed[4:], out[0, 2:])
    assert_same(lse_packed[:, 4:], lse[0, :, 2:])


# Which calls are served

_DECODE = _call((64, 1, 16, 576), (64, 4096, 1, 576), torch.bfloat16, None, None)
_PAGED = _call((64, 1, 128, 576), (4096, 64, 1, 576), torch.float16, (64, 64), None)
_CHUNKS = _call((2048, 128, 576), (4096, 16, 1, 576), torch.bfloat16, (8, 512), 8)
_TREE = _CHUNKS._replace(
    index_dtypes=(torch.int32, None, None, torch.int32, torch.int32, None, torch.uint8), tree=(0, 16, 16), num_splits=2,
    window_right=None,
)  # fmt: skip
_PADDED = _CHUNKS._replace(index_dtypes=(None, None, torch.int32, torch.int32, torch.int32, None, None), num_splits=2)


#: Many heads, for which rows are gathered, and rows of 8 bits with factors of their own.
_MANY: dict[str, Any] = {
    "shape": (64, 1, 128, 1, 576, 512), "strides": ((128 * 576, 128 * 576, 576), *_DECODE.strides[1:]),
}  # fmt: skip
_FP8_ROWS: dict[str, Any] = {"cache_dtype": torch.float8_e4m3fn, "descale_strides": ((4096, 1, 1),) * 2}


@each_case(
    "call",
    [_DECODE, _PAGED, _CHUNKS, _DECODE._replace(window_right=None), _DECODE._replace(**_MANY, **_FP8_ROWS),
     _PAGED._replace(page_size=1, capacity=8192), _CHUNKS._replace(page_size=12, cache_dtype=torch.int8)],
)  # fmt: skip
def test_served(call: SplitCall) -> None:
    assert latent_unsupported_reason(call, _SM_90) is None


@each_case(
    "change, reason",
    [
        ({"values_in_keys": False}, "one key head whose first columns are the values"),
        ({"shape": (64, 1, 16, 1, 512, 512)}, "520 to 576 columns with 512 of values, not 512 with 512"),
        ({"shape": (64, 1, 16, 1, 576, 256)}, "not 576 with 256"),
        ({"dtype": torch.float32}, "16-bit"),
        ({"page_size": 1, "capacity": 16384}, "up to 1024 MiB"),
        ({**_MANY, **_FP8_ROWS, "one_factor": False}, "factors of rows are those of keys and values"),
        ({**_MANY, **_FP8_ROWS, "dtype": torch.float16}, "may leave the range of float16"),
        ({"window_left": 5}, "no window"),
        ({"window_right": 5}, "no window"),
        ({"softcap": 2.0}, "no soft cap"),
        ({"row_logits": True}, "sinks"),
        ({"scale": -1.0}, "positive scale"),
        ({"misalignment": 8}, "multiples of 16 bytes"),
        ({"strides": ((16 * 600, 16 * 600, 600), *_DECODE.strides[1:])}, "contiguous"),
        ({"strides": (_DECODE.strides[0], *[(4096 * 576 + 8, 576, 0)] * 2)}, "multiples of a row"),
        (
            {"strides": (_DECODE.strides[0], *[(4096 * 584, 584, 0)] * 2), "cache_dtype": torch.int8},
            "the portable kernel reads fewer bytes",
        ),
    ],
)
def test_not_served(change: dict[str, Any], reason: str) -> None:
    assert reason in str(latent_unsupported_reason(_DECODE._replace(**change), _SM_90))


def test_other_gpus_are_not_served() -> None:
    assert "sm_90, not on sm_100" in str(latent_unsupported_reason(_DECODE, devices.KNOWN_DEVICES["sm_100"]))


# Launches


def _plans(call: SplitCall, monkeypatch: pytest.MonkeyPatch) -> dict[str, Plan]:
    monkeypatch.setattr(latent, "multiprocessors", lambda device: 132)
    monkeypatch.setattr(split_keys, "device_facts", lambda device: _SM_90)
    monkeypatch.setattr(split_keys, "multiprocessors", lambda device: 132)
    return latent.latent_pipeline(call, torch.device("cuda", 0)).plans


@pytest.mark.parametrize(
    ("call", "programs", "splits"),
    [
        (_DECODE, 128, 2),
        (_DECODE._replace(num_splits=5), 320, 5),
        (_DECODE._replace(num_splits=128, visible=100), 128, 2),  # two tiles of keys
        (_PAGED, 128, None),
        (_CHUNKS, 4096 + 8 + 1, None),
        (_CHUNKS._replace(shape=(8, 0, 128, 1, 576, 512), total_q=0), 0, None),
    ],
    ids=str,
)
def test_programs(call: SplitCall, programs: int, splits: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    plans = _plans(call, monkeypatch)
    combine = plans.get("combine")
    assert (plans["attend"].programs, combine and combine.scalars[-1]) == (programs, splits)


#: Of 8 bits, with one factor or those of rows.
_INT8, _FP8, _E5M2 = (
    call._replace(cache_dtype=dtype, descale_strides=(strides,) * 2)
    for call, dtype, strides in (
        (_CHUNKS, torch.int8, (0, 0, 0)),
        (_DECODE, torch.float8_e4m3fn, (4096, 1, 1)),
        (_TREE, torch.float8_e5m2, (0, 0, 0)),
    )
)


@pytest.mark.parametrize(
    "call", [_DECODE, _PAGED, _CHUNKS, _PADDED, _TREE, _INT8, _FP8, _E5M2],
    ids=["decode", "paged", "chunks", "padded", "tree", "int8, gathered", "fp8", "e5m2"],
)  # fmt: skip
def test_machine_code(call: SplitCall, monkeypatch: pytest.MonkeyPatch) -> None:
    if backend.gathers_latent(call):
        monkeypatch.setattr(gather, "multiprocessors", lambda _: 132)
        planned = gather.plan_gather(call, 1, 64, torch.device("cpu"), keys_alone=True)
        check_code(planned.pipeline.plans["gather"].source, "sm_90", check_fit, _SM_90.shared_memory)
        call = planned.call
    source = _plans(call, monkeypatch)["attend"].source
    check_code(source, "sm_90", _check_latent, _SM_90.shared_memory)


def _check_latent(binary: Binary, shared_memory: int) -> None:
    check_fit(binary, shared_memory)
    check_products(binary)
    check_barriers(binary)


# On a GPU

_GPU = CacheCase(
    batch=3, seq_q=1, seq_new=1, capacity=1100, lengths=(1003, 0, 517), heads=16, heads_kv=1, head_dim=576,
    head_dim_v=512, latent=True, dtype=torch.bfloat16,
)  # fmt: skip


@pytest.fixture
def latent_plans(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Whether the kernel served each call of a test."""
    served: list[bool] = []

    def note(call: CacheCall, spec: CacheSpec) -> launch.CachePlan:
        made = _plan_for(call, spec)
        served.append(made.latent is not None)
        return made

    _plan_for = launch.plan_for
    monkeypatch.setattr(launch, "plan_for", note)
    return served


@pytest.mark.hopper
@pytest.mark.parametrize("page_size", [None, 8, 16, 24, 64, 256], ids=str)
@pytest.mark.parametrize("queries", [None, (1, 1, 1, 0), (100, 1, 0, 3), (5, 300, 1, 0)], ids=str)
@pytest.mark.parametrize("heads", [16, 128])
def test_gpu(heads: int, queries: tuple[int, ...] | None, page_size: int | None, latent_plans: list[bool]) -> None:
    case = replace(_GPU, heads=heads, queries=queries, page_size=page_size, capacity=1400)
    check(case, "triton", "cuda")
    assert set(latent_plans) == {True}


@pytest.mark.hopper
@pytest.mark.parametrize(
    "change",
    [{"seq_q": 5, "arguments": {"causal": False}}, {"arguments": {"num_splits": 1}}, {"arguments": {"num_splits": 9}},
     {"rotary_dim": 64, "seq_q": 70, "seq_new": 9}, {"entries": (4, 0, 1), "heads": 1}, {"head_dim": 520},
     {"left": (900, 0, 77)}, {"left": (901, 0, 77), "page_size": 16, "seq_q": 9}, {"seq_q": 40, "seq_new": 40},
     {"seq_q": 9, "seq_new": 9, "tree": True}, {"queries": (7, 1, 30, 0), "page_size": 16, "tree": True},
     {"heads": 7}],
    ids=str,
)  # fmt: skip
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_gpu_changes(change: dict[str, Any], dtype: torch.dtype, latent_plans: list[bool]) -> None:
    check(replace(_GPU, dtype=dtype, **change), "triton", "cuda")
    assert set(latent_plans) == {True}


@pytest.mark.hopper
@pytest.mark.parametrize("page_size", [None, 1, 12, 64], ids=str)
@pytest.mark.parametrize("widened_tiles", [0, 10**6], ids=["gathered", "widened"])
@pytest.mark.parametrize(
    "change",
    [{"cache_dtype": torch.float8_e4m3fn, "factors": "rows", "heads": 128},
     {"cache_dtype": torch.float8_e4m3fn, "factors": "one", "dtype": torch.float16},
     {"cache_dtype": torch.float8_e5m2, "factors": "pages", "queries": (100, 1, 0, 3), "capacity": 1400},
     {"cache_dtype": torch.int8, "factors": "heads", "heads": 128, "left": (901, 0, 77), "seq_q": 9, "seq_new": 9},
     {"heads": 128, "queries": (5, 300, 1, 0)}],
    ids=["fp8", "float16", "e5m2", "int8", "16 bits"],
)  # fmt: skip
def test_gpu_of_8_bits_and_small_pages(
    change: dict[str, Any], widened_tiles: int, page_size: int | None, latent_plans: list[bool],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(backend, "_GATHERED_BYTES", math.inf)
    monkeypatch.setattr(backend, "_WIDENED_TILES", widened_tiles)
    clear_plans()
    check(replace(_GPU, page_size=page_size, **change), "triton", "cuda")
    assert set(latent_plans) == {True}
    clear_plans()


@pytest.mark.hopper
def test_gpu_graph_reads_lengths_when_it_is_replayed() -> None:
    cache = torch.randn(3, 900, 1, 576, device="cuda", dtype=torch.bfloat16)
    q = torch.randn(3, 2, 16, 576, device="cuda", dtype=torch.bfloat16)
    lengths = torch.tensor([900, 5, 64], device="cuda")

    def call() -> torch.Tensor:
        return flashtile.attention_with_kv_cache(q, cache, cache[..., :512], cache_lengths=lengths)

    call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = call()
    lengths.copy_(torch.tensor([2, 700, 333]))
    graph.replay()
    assert torch.equal(out, call())
