"""Shared rows by the Hopper forward, in segments: on the emulated machine, and on a GPU."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

import flashtile
from flashtile._backends import clear_plans
from flashtile._backends.allocate import contiguous
from flashtile._backends.launch import float32, int32, pointer, pointer_to, pointers
from flashtile._backends.pipeline import Kernel
from flashtile.ops.attention.hopper import cache_launch
from flashtile.ops.common.kernels import tanh
from flashtile.ops.common.split_keys import plan
from flashtile.ops.common.split_keys.plan import Segments, SplitCall
from flashtile.ops.kv_cache.hopper import backend
from flashtile.ops.kv_cache.triton import launch, prefix
from flashtile.testing import Size, assert_close
from gluon_emulator.hopper import EmulatedHopper
from support.attention.backend_calls import HOPPER
from support.attention.kv_cache_cases import CacheCase, check
from support.compilation.checked_code import check_code
from support.compilation.machine_code import Binary, check_barriers, check_fit, check_products

_STEPS = CacheCase(
    batch=40, seq_q=1, seq_new=1, capacity=560, lengths=tuple(range(431, 511, 2)), heads=4, heads_kv=2, head_dim=64,
    head_dim_v=64, dtype=torch.bfloat16, arguments={"causal": True, "shared_rows": 421},
)  # fmt: skip
_PAGES = replace(_STEPS, page_size=16, head_dim=128, head_dim_v=128)
_PACKED = replace(
    _PAGES, batch=4, queries=(70, 3, 0, 20, 2), lengths=(500, 437, 455, 521), seq_new=None, sinks=True,
    arguments={"causal": True, "softcap": 5.0, "shared_rows": 384},
)  # fmt: skip

CASES = {
    "dense": _STEPS,
    "pages": _PAGES,
    "pages of 48": replace(_PAGES, page_size=48, heads=6, dtype=torch.float16),
    "packed": _PACKED,
    "tree": replace(
        _PAGES, batch=3, seq_q=17, seq_new=17, lengths=(422, 431, 501), tree=True, arguments={"shared_rows": 421}
    ),
    "one row": replace(_PAGES, length_dtype=torch.int64, arguments={"shared_rows": 1}),
    "all rows": replace(_PAGES, lengths=(433,) * 40, seq_new=None, arguments={"causal": False, "shared_rows": 432}),
    "192": replace(_PAGES, head_dim=192, head_dim_v=128),
    "512": replace(_PAGES, head_dim=512, head_dim_v=512),
    "entries": replace(_STEPS, entries=tuple(range(39, -1, -1))),
    "8 bits": replace(_PAGES, cache_dtype=torch.int8, factors="heads"),
    "pages of 1": replace(_PAGES, page_size=1),
    "few": replace(_PAGES, batch=3, lengths=(422, 431, 501)),
}  # fmt: skip


def _segment_call(rows: int, shared: int, page_size: int, head_dim: int, head_dim_v: int, **others: Any) -> SplitCall:
    """The call of two key/value heads."""
    q = 2 * rows * head_dim, head_dim, rows * head_dim
    caches = [((page_size or shared + 9) * 2 * width, 2 * width, width) for width in (head_dim, head_dim_v)]
    indices = torch.int32, None, None, torch.int32 if page_size else None, None, None, None
    shape = 1, rows, 2, 2, head_dim, head_dim_v
    described = SplitCall(torch.bfloat16, shape, (q, *caches), 0, shared, head_dim**-0.5, False, indices, page_size)
    return described._replace(visible=shared, **others)


_SEGMENTS = {
    "dense": _segment_call(80, 421, 0, 64, 64),
    "one consumer": _segment_call(64, 300, 0, 128, 128),
    "few rows": _segment_call(3, 300, 16, 128, 128),
    "pages": _segment_call(131, 700, 16, 128, 128, softcap=3.0),
    "pages of 48": _segment_call(70, 1000, 48, 64, 64, dtype=torch.float16),
    "pages of 3": _segment_call(66, 300, 3, 128, 128),
    "few keys": _segment_call(66, 300, 16, 128, 128),
    "192": _segment_call(66, 300, 16, 192, 128),
    "512": _segment_call(66, 150, 0, 512, 512),
    "one row": _segment_call(66, 1, 16, 128, 128),
}


@pytest.mark.parametrize("name", _SEGMENTS)
def test_emulated(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The results of segments, put together. Rows behind the prefix are NaN."""
    call = _SEGMENTS[name]
    _, rows, heads, _, head_dim, head_dim_v = call.shape
    emulated = EmulatedHopper(3, seed=1)
    module = emulated.modules["cache_launch"]
    monkeypatch.setattr(module, "current_machine", lambda _: HOPPER._replace(multiprocessors=3))
    monkeypatch.setattr(module, "choose_splits", lambda *_: 3)
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(heads, rows, head_dim, generator=generator).to(call.dtype)
    k, v = (torch.randn(call.capacity, heads, width, generator=generator) for width in (head_dim, head_dim_v))
    k, v = (F.pad(x, (0, 0, 0, 0, 0, 9), value=float("nan")).to(call.dtype) for x in (k, v))
    given, outer, caches = ["rows", "k_cache", "v_cache", "prefix_lengths"], 1, [k[None], v[None]]
    table: list[Tensor] = []
    if size := call.page_size:
        given.insert(3, "table")
        outer = -(-len(k) // size)
        order = torch.randperm(outer, generator=generator)
        table = [order.int()]
        caches = []
        for x in (k, v):
            pages = F.pad(x, (0, 0, 0, 0, 0, outer * size - len(x)), value=float("nan")).unflatten(0, (outer, size))
            caches.append(pages[order.argsort()])

    def run(*tensors: Tensor) -> list[Tensor]:
        kernel, segments, segment, _ = module.plan_segments(call, outer, torch.device("cpu"))
        spread = q[None].repeat(segments, 1, 1, 1)
        lengths = (call.capacity - segment * torch.arange(segments)).clamp(max=segment).int()
        assert (lengths > 0).all()
        outputs = {
            "prefix_out": contiguous((segments, heads, rows, head_dim_v), call.dtype),
            "prefix_lse": contiguous((segments, heads, rows), torch.float32),
        }
        pipeline = module.Pipeline(torch.device("cpu"), {"prefix": kernel}, (*given, "counter", "length"), outputs)
        emulated._memory.know(spread, lengths)
        addresses = pointers((spread, *tensors, lengths))
        return pipeline.run(*addresses, pointer(module.tile_counter(q.device)), 0)

    outs, lses = emulated.call(run, *caches, *table)
    assert emulated.launched == ["attention_forward_kernel"]
    out, lse = flashtile.logsumexp_merge([x[None].transpose(1, 2) for x in outs], [x[None] for x in lses])
    given_rows = q.transpose(0, 1)[None], k[None, : call.capacity], v[None, : call.capacity]
    options = {"scale": call.scale, "softcap": call.softcap, "return_lse": True, "backend": "reference"}
    eager, eager_lse = flashtile.attention(*given_rows, **options)
    oracle, oracle_lse = flashtile.attention(*(x.double() for x in given_rows), **options)
    assert_close("out", out, oracle, eager)
    assert_close("lse", lse, oracle_lse, eager_lse, Size(1.0, 1.0))


@triton.jit
def _segments_kernel(
    rows_ptr, k_cache_ptr, v_cache_ptr, table_ptr, prefix_lengths_ptr, out_ptr, lse_ptr,
    heads, rows, segment, scale, softcap, PAGE_SIZE: tl.constexpr, HEAD_DIM: tl.constexpr,
):  # fmt: skip
    """In the place of the Hopper forward, which is in another language: one row of a segment."""
    program = tl.program_id(0)
    head, number = program // rows % heads, program // rows // heads
    column = tl.arange(0, HEAD_DIM)
    q = tl.load(rows_ptr + program * HEAD_DIM + column).to(tl.float32)
    row_max, row_sum, acc = -float("inf"), 0.0, tl.zeros((HEAD_DIM,), tl.float32)
    for key in range(0, tl.load(prefix_lengths_ptr + number)):
        place = number * segment + key
        if table_ptr is not None:
            place = tl.load(table_ptr + place // PAGE_SIZE) * PAGE_SIZE + place % PAGE_SIZE
        offsets = (place * heads + head) * HEAD_DIM + column
        score = tl.sum(q * tl.load(k_cache_ptr + offsets).to(tl.float32)) * scale
        if softcap is not None:
            score = tanh(score / softcap, True) * softcap
        new_max = tl.maximum(row_max, score)
        acc = acc * tl.exp(row_max - new_max) + tl.exp(score - new_max) * tl.load(v_cache_ptr + offsets)
        row_sum = row_sum * tl.exp(row_max - new_max) + tl.exp(score - new_max)
        row_max = new_max
    tl.store(out_ptr + program * HEAD_DIM + column, (acc / row_sum).to(out_ptr.dtype.element_ty))
    tl.store(lse_ptr + program, row_max + tl.log(row_sum))


def _plan_segments(call: SplitCall, outer: int, device: torch.device) -> Segments:
    """Segments of two pages, or of seven rows."""
    _, rows, heads, _, head_dim, _ = call.shape
    segment = 2 * call.page_size or 7
    segments = -(-call.capacity // segment)
    pointed = pointer_to(call.dtype, 16)
    parameters = {
        **dict.fromkeys(("rows_ptr", "k_cache_ptr", "v_cache_ptr", "out_ptr"), pointed),
        "table_ptr": pointer_to(call.index_dtypes[3]), "prefix_lengths_ptr": pointer_to(torch.int32),
        "lse_ptr": pointer_to(torch.float32), "heads": int32(heads), "rows": int32(rows), "segment": int32(segment),
        "scale": float32(call.scale), "softcap": float32(call.softcap or None),
    }  # fmt: skip
    constants = {"PAGE_SIZE": call.page_size, "HEAD_DIM": head_dim}
    buffers = {"out_ptr": "prefix_out", "lse_ptr": "prefix_lse"}
    kernel = Kernel(_segments_kernel, parameters, constants, segments * heads * rows, buffers)
    return Segments(kernel, segments, segment, False)


_FEW = CacheCase(
    batch=3,
    seq_q=2,
    seq_new=2,
    capacity=40,
    lengths=(17, 30, 21),
    heads=4,
    arguments={"shared_rows": 15, "causal": True},
)
_INTERPRETED = {
    "dense": _FEW,
    "pages": replace(_FEW, page_size=4, heads=6, length_dtype=torch.int64),
    "packed": replace(
        _FEW, queries=(4, 0, 1, 3), seq_new=None, page_size=4, sinks=True, dtype=torch.float16, lengths=(19, 15, 21),
        arguments={"shared_rows": 15, "softcap": 2.0},
    ),
    "tree": replace(_FEW, tree=True, arguments={"shared_rows": 14}),
    "all rows": replace(_FEW, seq_new=None, lengths=(17, 17, 17), arguments={"shared_rows": 15}),
}  # fmt: skip


@pytest.mark.interpreter
@pytest.mark.parametrize("name", _INTERPRETED)
def test_interpreted(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """All of the call but the forward of segments."""
    monkeypatch.setattr(cache_launch, "plan_segments", _plan_segments)
    monkeypatch.setattr(launch, "segments_unsupported_reason", lambda *_: None)
    clear_plans()
    check(_INTERPRETED[name], "triton")
    clear_plans()


@pytest.mark.parametrize("kernel", ["spread", "prefix", "attend"])
def test_machine_code(kernel: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache_launch, "current_machine", lambda _: HOPPER)
    monkeypatch.setattr(plan, "device_facts", lambda _: HOPPER.facts)
    monkeypatch.setattr(plan, "multiprocessors", lambda _: HOPPER.multiprocessors)
    cache, device = (16 * 8 * 128, 8 * 128, 128), torch.device("cpu")
    call = SplitCall(
        torch.bfloat16, (64, 1, 32, 8, 128, 128), ((32 * 128, 32 * 128, 128), cache, cache), 0, 33280, 128**-0.5, False,
        (torch.int32, None, torch.int32, torch.int32, None, None, None), 16, 2080, visible=512,
    )  # fmt: skip
    of_prefix = backend.segment_call(call, 32768)
    forward = cache_launch.plan_segments(of_prefix, 8192, device)
    assert (forward.number, forward.kernel.programs, forward.dynamic) == (8, 128, False)
    pipeline = prefix.plan_behind_prefix(call, of_prefix, forward, device)
    check_code(
        pipeline.plans[kernel].source,
        "sm_90",
        _check_segments if kernel == "prefix" else check_fit,
        HOPPER.facts.shared_memory,
    )


def _check_segments(binary: Binary, shared_memory: int) -> None:
    """The warps that load spill: they have 24 registers."""
    check_fit(binary, shared_memory, spilled=80)
    check_products(binary)
    check_barriers(binary)


@pytest.mark.hopper
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("segments", [None, 1, 3])
def test_gpu(name: str, segments: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    if segments is not None:
        monkeypatch.setattr(cache_launch, "choose_splits", lambda *_: segments)
    clear_plans()
    check(CASES[name], "triton", "cuda")
    clear_plans()
