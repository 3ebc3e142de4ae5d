"""Chunks of queries over a cache by the Hopper forward: on the emulated machine, and on a GPU."""

from __future__ import annotations

import functools
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from flashtile._backends import clear_plans
from flashtile._backends.launch import pointers
from flashtile._backends.pipeline import Pipeline
from flashtile.ops.attention.hopper import cache_launch
from flashtile.ops.common.split_keys import plan
from flashtile.ops.common.split_keys.configs import AttendTiles
from flashtile.ops.common.split_keys.plan import Cut, SplitCall
from flashtile.ops.kv_cache import operator, reference
from flashtile.ops.kv_cache.hopper import backend, gather
from flashtile.ops.kv_cache.spec import CacheCall, CacheSpec
from flashtile.ops.kv_cache.triton import launch
from flashtile.testing import assert_close
from gluon_emulator.hopper import EmulatedHopper
from support.attention.backend_calls import HOPPER
from support.attention.gathered import gathered_rows
from support.attention.kv_cache_cases import CacheCase, check
from support.compilation.checked_code import check_code
from support.compilation.machine_code import Binary, check_barriers, check_fit, check_products

_PACKED = CacheCase(
    batch=4, queries=(70, 3, 0, 200, 2), lengths=(100, 37, 5, 200), capacity=320, heads=4, heads_kv=2, head_dim=64,
    head_dim_v=64, dtype=torch.bfloat16, arguments={"causal": True},
)  # fmt: skip
_UNIFORM = replace(_PACKED, queries=None, seq_q=150, lengths=(150, 201, 320, 90))

CASES = {
    "packed": _PACKED,
    "packed_pages": replace(_PACKED, page_size=16),
    "wide_pages": replace(_PACKED, page_size=256, head_dim=128, head_dim_v=128),
    "pages_of_48": replace(_PACKED, page_size=48, head_dim=128, head_dim_v=128),
    "pages_of_8": replace(_UNIFORM, page_size=8, head_dim=96, head_dim_v=96),
    "uniform": _UNIFORM,
    "entries": replace(_UNIFORM, entries=(5, 0, 3, 1)),
    "full": replace(_PACKED, page_size=16, arguments={}),
    "float16": replace(_PACKED, page_size=32, dtype=torch.float16),
    "long_indices": replace(_PACKED, page_size=16, length_dtype=torch.int64),
    "one_length": replace(_UNIFORM, lengths=201, page_size=64),
    "192": replace(_UNIFORM, page_size=16, head_dim=192, head_dim_v=128),
    "256": replace(_UNIFORM, page_size=16, head_dim=256, head_dim_v=256, batch=2, lengths=(150, 201)),
    "512": replace(_UNIFORM, page_size=16, head_dim=512, head_dim_v=512, batch=2, lengths=(150, 201)),
    "modifiers": replace(_PACKED, page_size=16, alibi=True, sinks=True, arguments={"causal": True, "softcap": 5.0}),
    "window": replace(_PACKED, page_size=16, arguments={"window": (100, 0)}),
    "window_short": replace(_UNIFORM, head_dim=96, head_dim_v=96, page_size=8, arguments={"window": (20, 0)}),
    "window_both": replace(_UNIFORM, head_dim=128, head_dim_v=128, arguments={"window": (90, 10), "causal": False}),
    "window_512": replace(
        _UNIFORM, page_size=16, head_dim=512, head_dim_v=512, batch=2, lengths=(150, 201), arguments={"window": (30, 0)}
    ),
    "pages_of_1": replace(_PACKED, page_size=1, head_dim=128, head_dim_v=128),
    "pages_of_7": replace(_UNIFORM, page_size=7, head_dim=96, head_dim_v=64, dtype=torch.float16),
    "pages_of_4_window": replace(_PACKED, page_size=4, arguments={"window": (100, 0)}, length_dtype=torch.int64),
    "pages_of_12": replace(_UNIFORM, page_size=12, head_dim=72, head_dim_v=40),
    "pages_of_1_window": replace(_UNIFORM, page_size=1, head_dim=192, head_dim_v=128, arguments={"window": (90, 10)}),
    "pages_of_3_512": replace(_UNIFORM, page_size=3, head_dim=512, head_dim_v=512, batch=2, lengths=(150, 201)),
    "fp8": replace(_UNIFORM, cache_dtype=torch.float8_e4m3fn, factors="heads", entries=(5, 0, 3, 1)),
    "fp8_rows": replace(
        _PACKED, cache_dtype=torch.float8_e4m3fn, factors="rows", page_size=16, head_dim=256, head_dim_v=256
    ),
    "fp8_e5m2": replace(
        _PACKED, cache_dtype=torch.float8_e5m2, factors="pages", page_size=2, arguments={"window": (100, 0)}
    ),
    "int8": replace(
        _PACKED,
        cache_dtype=torch.int8,
        factors="one",
        page_size=16,
        head_dim=128,
        head_dim_v=128,
        arguments={"causal": True, "softcap": 5.0},
        alibi=True,
        sinks=True,
    ),
    "fp8_128": replace(
        _PACKED, cache_dtype=torch.float8_e4m3fn, factors="heads", page_size=16, head_dim=128, head_dim_v=128
    ),
    "fp8_192_rows": replace(
        _UNIFORM, cache_dtype=torch.float8_e4m3fn, factors="rows", page_size=1, head_dim=192, head_dim_v=128
    ),
    "fp8_72_float16": replace(
        _PACKED, cache_dtype=torch.float8_e4m3fn, factors="heads", head_dim=72, head_dim_v=72, dtype=torch.float16
    ),
    "tree": replace(_UNIFORM, page_size=16, tree=True, head_dim=128, head_dim_v=128),
    "trees": replace(_PACKED, page_size=16, tree=True, arguments={"causal": True, "softcap": 5.0}, sinks=True),
    "trees_int8": replace(_PACKED, tree=True, cache_dtype=torch.int8, factors="heads", page_size=1),
    "right": replace(_PACKED, page_size=16, arguments={"window": (None, 40)}),
}


@pytest.fixture
def any_size(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Calls of any size are served, also those that leave most of a GPU idle."""
    monkeypatch.setattr(backend, "_LEAST_SHARE", 0)
    monkeypatch.setattr(backend, "_GATHERED_LEAST", 1)
    clear_plans()
    yield monkeypatch
    clear_plans()


#: Cases whose keys are in splits, one for each mechanism; some of the splits have no keys.
_SPLIT = (
    "packed", "pages_of_48", "float16", "256", "512", "modifiers", "window", "window_both", "pages_of_7", "trees",
)  # fmt: skip


def test_emulated_gathering(any_size: pytest.MonkeyPatch) -> None:
    """Rows of 16 bits, for many queries."""
    any_size.setattr(backend, "_GATHERED_LONGEST", 1)
    planned = []
    any_size.setattr(gather, "plan_gather", lambda *given, of=gather.plan_gather: planned.append(given) or of(*given))
    assert _emulated(CASES["pages_of_1"], any_size, 1) == ["attention_forward_kernel"]
    assert len(planned) == 1


@pytest.mark.parametrize("name", CASES)
def test_emulated(name: str, any_size: pytest.MonkeyPatch) -> None:
    splits = 4 if name in _SPLIT else 1
    combining = ["combine_kernel"] * (splits > 1)
    assert _emulated(CASES[name], any_size, splits) == ["attention_forward_kernel", *combining]


def _emulated(case: CacheCase, any_size: pytest.MonkeyPatch, splits: int) -> list[str]:
    """Checks a case, and returns the kernels that were launched. The portable kernel, which is left the sequences with
    few queries, is not there: the reference has its rows."""
    emulated = EmulatedHopper(3, seed=1)
    results: list[tuple[Tensor, Tensor]] = []

    def forward(call: CacheCall, spec: CacheSpec) -> tuple[Tensor, Tensor]:
        results.append(reference.forward(call, spec))
        return emulated.call(launch.forward, call, spec)

    def implementation(requested: str, *facts: Any) -> Any:
        return SimpleNamespace(forward=forward) if requested == "triton" else reference

    machine = HOPPER._replace(multiprocessors=3)
    any_size.setattr(emulated.modules["cache_launch"], "current_machine", lambda _: machine)
    any_size.setattr(emulated.modules["cache_launch"], "count_splits", lambda *_: splits)
    any_size.setattr(cache_launch, "plan_chunks", emulated.modules["cache_launch"].plan_chunks)
    any_size.setattr(launch, "device_facts", lambda _: HOPPER.facts)
    any_size.setattr(gather, "plan_gather", functools.partial(_gathered, gather.plan_gather))
    portable = SimpleNamespace(run=lambda *_: _few_queries(case, *results[-1]))
    any_size.setattr(launch, "split_pipeline", lambda *_: portable)
    any_size.setattr(operator._BACKENDS, "implementation", implementation)
    check(case, "triton")
    return emulated.launched


def _gathered(plan_gather: Any, call: SplitCall, least: int, *others: Any) -> Any:
    """The portable kernel that gathers is not there either."""
    planned = plan_gather(call, least, *others)
    run = functools.partial(gathered_rows, planned, call, least)
    return SimpleNamespace(call=planned.call, run=run)


@pytest.mark.interpreter
@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.parametrize("name", ["packed", "modifiers", "trees"])
def test_interpreted_few_queries(name: str, splits: int, any_size: pytest.MonkeyPatch) -> None:
    """Of a packed call the portable kernel has the sequences with few queries, with splits of their keys too. The
    others are left alone: what they had there stays."""
    case = replace(CASES[name], dtype=torch.float16, page_size=16)
    results: list[tuple[Tensor, Tensor]] = []

    def forward(call: CacheCall, spec: CacheSpec) -> tuple[Tensor, Tensor]:
        results.append(reference.forward(call, spec))
        return launch.forward(call, spec)

    def chunks(call: SplitCall, outer: int, most: int, device: torch.device) -> Any:
        return SimpleNamespace(run=lambda tensors, made, others, length: _completed(case, results[-1], made))

    any_size.setattr(launch, "chunks_unsupported_reason", lambda *_: None)
    any_size.setattr(cache_launch, "plan_chunks", chunks)
    any_size.setattr(plan, "choose_split_count", lambda *_: splits)
    backends = {"triton": SimpleNamespace(forward=forward)}
    any_size.setattr(operator._BACKENDS, "implementation", lambda requested, *_: backends.get(requested, reference))
    check(case, "triton")


def _completed(case: CacheCase, expected: tuple[Tensor, Tensor], made: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """What the portable kernel made, with the rows of others."""
    few = _few_queries(case, *expected)
    return tuple(torch.where(own.isnan(), all_, of) for own, all_, of in zip(few, expected, made))  # type: ignore[return-value]


@pytest.mark.interpreter
@pytest.mark.parametrize("queries", [None, (3, 0, 5, 2, 4)])
def test_interpreted_results_of_splits(queries: tuple[int, ...] | None) -> None:
    """Results of the forward for each split are put together; those of packed sequences with few queries are not."""
    heads, columns, splits, most = 12, 40, 3, 2
    places = (2, 5) if queries is None else (sum(queries),)
    parts = torch.randn(splits, *places, heads, columns).half()
    lse = torch.randn(splits, *places[:-1], heads, places[-1])
    lse[1, ..., 0] = lse[:, ..., 1] = float("-inf")
    parts[1, ..., 0, :, :] = float("nan")  # of no key, so nobody wrote it
    starts, results = None, plan.Combined(torch.float16, parts.shape[1:])
    if queries is not None:
        starts = torch.tensor([0, *queries]).cumsum(0)[:-1]
        results = results._replace(starts=starts.dtype, batch=len(queries) - 1, most=most)
    kernel = plan.combining(results, splits, HOPPER.facts, HOPPER.multiprocessors, of_forward=True)
    given = ("parts", "parts_lse", "starts", "out", "lse") if queries else ("parts", "parts_lse", "out", "lse")
    pipeline = Pipeline(torch.device("cpu"), {"combine": kernel}, given, {})
    out, found = torch.full(parts.shape[1:], 7.0).half(), torch.full(lse.shape[1:], 7.0)
    pipeline.run(*pointers([each for each in (parts, lse, starts, out, found) if each is not None]))
    served = torch.ones(places[-1], dtype=torch.bool)
    if queries is not None:
        of_token = torch.tensor(queries).repeat_interleave(torch.tensor(queries))
        served = (of_token > most) | (torch.arange(places[-1]) >= sum(queries[:-1]))
    sums = lse.double().logsumexp(0).masked_fill(~served, 7.0)
    exact, eager = (_put_together(parts.to(of), lse.to(of)).masked_fill(~served[:, None, None], 7.0) for of in _TYPES)
    assert_close("out", out, exact, eager)
    assert_close("lse", found, sums, sums.float())


_TYPES = torch.float64, torch.float16


def _put_together(parts: Tensor, lse: Tensor) -> Tensor:
    """out of splits, in the dtype of `parts`."""
    weights = (lse - lse.logsumexp(0).clamp(min=-1e4)).exp().movedim(-1, -2)[..., None]
    return (parts.nan_to_num() * weights).sum(0)


_CALL = SplitCall(
    torch.bfloat16,
    (8, 512, 32, 8, 128, 128),
    ((0, 32 * 128, 128), (16 * 8 * 128, 8 * 128, 128), (16 * 8 * 128, 8 * 128, 128)),
    0,
    16384,
    128**-0.5,
    False,
    (torch.int32, None, None, torch.int32, torch.int32, None, None),
    16,
    1024,
    4096,
    window_right=0,
    visible=16384,
)


def _wide(head_dim: int, **others: Any) -> SplitCall:
    """The call with heads of so many columns."""
    cache = 16 * 8 * head_dim, 8 * head_dim, head_dim
    strides = (0, 32 * head_dim, head_dim), cache, cache
    return _CALL._replace(shape=(8, 512, 32, 8, head_dim, head_dim), strides=strides, **others)


#: A step in the batch-invariant mode, in which the heads of a group are rows of a tile.
_STEP = _CALL._replace(
    shape=(8, 1, *_CALL.shape[2:]), total_q=None, index_dtypes=(torch.int32, None, None, torch.int32, None, None, None),
    cut=Cut(AttendTiles(128, 128, 8, 2), "ieee", (128, 128)),
)  # fmt: skip


@pytest.mark.parametrize(
    "call",
    [
        _wide(64),
        _CALL._replace(window_left=4095),
        _wide(512),
        _CALL._replace(shape=_STEP.shape, cut=_STEP.cut),
        _wide(128, cache_dtype=torch.float8_e4m3fn, descale_strides=((0, 0, 1),) * 2),
        _wide(128, page_size=1)._replace(shape=(8, 256, 32, 8, 128, 128)),
        _CALL._replace(window_right=None, tree=(0, 64, 64), index_dtypes=(*_CALL.index_dtypes[:6], torch.uint8)),
        _CALL._replace(total_q=64, row_logits=True),
    ],
    ids=["64", "128, window", "512", "invariant tokens", "gathered", "copied", "tree", "splits"],
)
def test_machine_code(call: SplitCall, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache_launch, "current_machine", lambda _: HOPPER)
    cpu = torch.device("cpu")
    gathered = backend.is_gathered(call)
    if gathered:
        call = gather.plan_gather(call, 17, 8, cpu).call
    planned = cache_launch.plan_chunks(call, 8192, 16, cpu, some=gathered)
    for name, check_form in (("forward", _check_chunks), ("combine", check_fit)):
        if name in planned.pipeline.plans:
            check_code(planned.pipeline.plans[name].source, "sm_90", check_form, HOPPER.facts.shared_memory)


@pytest.mark.parametrize("eight_bits", [False, True])
def test_machine_code_of_gathering(eight_bits: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gather, "multiprocessors", lambda _: HOPPER.multiprocessors)
    call = _wide(128, page_size=1, total_q=4096)
    if eight_bits:
        call = call._replace(page_size=16, cache_dtype=torch.float8_e4m3fn, descale_strides=((128, 8, 1),) * 2)
    planned = gather.plan_gather(call, 64, 8, torch.device("cpu"))
    check_code(planned.pipeline.plans["gather"].source, "sm_90", check_fit, HOPPER.facts.shared_memory)


@pytest.mark.parametrize(
    ("batch", "rows", "stages", "programs", "splits"),
    [(8, 16384, 2, 256, 1), (4, 16384, 2, 256, 2), (4, 2048, 6, 128, 1), (1, 65536, 2, 256, 8), (1, 128, 6, 32, 1)],
)
def test_few_tiles(
    batch: int, rows: int, stages: int, programs: int, splits: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They get more stages, or the keys are split, if these are many."""
    monkeypatch.setattr(cache_launch, "current_machine", lambda _: HOPPER)
    indices = (torch.int32, None, None, torch.int32, None, None, None)
    shape = batch, 64, *_CALL.shape[2:]
    call = _CALL._replace(shape=shape, total_q=None, index_dtypes=indices, capacity=rows, visible=rows)
    plans = cache_launch.plan_chunks(call, 8192, 16, torch.device("cpu")).pipeline.plans
    assert plans["forward"].source.constants["STAGES"] == stages
    assert plans["forward"].programs == programs
    assert ("combine" in plans and splits in plans["combine"].scalars) == (splits > 1)


@pytest.mark.parametrize(
    ("batch", "total_q", "seq_q", "few"),
    [(20, 4 * 64 + 16, 64, 16), (2, 65, 64, 1), (128, 8 * 512 + 120, 512, 120), (3, 3, 1, 3), (2, 128, 64, 1)],
)
def test_sequences_of_few_queries_are_estimated(batch: int, total_q: int, seq_q: int, few: int) -> None:
    call = _CALL._replace(shape=(batch, seq_q, *_CALL.shape[2:]), total_q=total_q)
    assert call.few_sequences == few


@pytest.mark.parametrize("page_size", [16, 0])
def test_machine_code_of_step_values(page_size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    test_machine_code_of_steps(page_size, "values", monkeypatch)


@pytest.mark.parametrize("part", ["weights", "forward"])
@pytest.mark.parametrize("page_size", [16, 0])
def test_machine_code_of_steps(page_size: int, part: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache_launch, "current_machine", lambda _: HOPPER)
    monkeypatch.setattr(cache_launch, "multiprocessors", lambda _: 132)
    call = _STEP if page_size else _STEP._replace(index_dtypes=(torch.int32, *(None,) * 6), page_size=0, stride_table=0)
    plan = cache_launch.plan_steps(call, 8192, torch.device("cpu"))
    source = {**plan.pipeline.plans, **plan.again.pipeline.plans}[part].source
    check = _check_chunks if part == "forward" else _check_steps
    check_code(source, "sm_90", check, HOPPER.facts.shared_memory)


def _check_steps(binary: Binary, shared_memory: int) -> None:
    check_fit(binary, shared_memory)
    check_products(binary)
    check_barriers(binary)


def _check_chunks(binary: Binary, shared_memory: int) -> None:
    """The warps that load spill: they have 24 registers."""
    check_fit(binary, shared_memory, spilled=80)
    check_products(binary)
    check_barriers(binary)


def _few_queries(case: CacheCase, out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
    """Results with NaN in the rows of sequences with many queries, and of nobody."""
    assert case.queries is not None
    out, lse = out.clone(), lse.clone()
    *counts, _ = case.queries
    begin = 0
    for count in counts:
        if count * case.heads // case.heads_kv > 64:
            out[begin : begin + count] = lse[:, begin : begin + count] = float("nan")
        begin += count
    out[begin:] = lse[:, begin:] = float("nan")
    return out, lse


@pytest.mark.hopper
@pytest.mark.parametrize("name", CASES)
def test_gpu(name: str, any_size: pytest.MonkeyPatch) -> None:
    for seed in range(3):  # the later calls mostly have their tensors where those before were
        check(CASES[name], "triton", "cuda", seed)


@pytest.mark.hopper
@pytest.mark.parametrize("name", _SPLIT)
def test_gpu_in_splits(name: str, any_size: pytest.MonkeyPatch) -> None:
    any_size.setattr(cache_launch, "count_splits", lambda *_: 4)
    check(CASES[name], "triton", "cuda")
