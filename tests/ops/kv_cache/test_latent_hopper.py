"""Latent attention on Hopper: the kernel's own source on an emulated machine, its machine code, and which calls it
serves, all without a GPU."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch

from flashtile._backends import devices

if devices.triton_missing():
    pytest.skip(devices.triton_missing(), allow_module_level=True)
if devices.interpreting():
    pytest.skip("runs and compiles Gluon kernels: needs TRITON_INTERPRET unset", allow_module_level=True)

from flashtile.ops.common.split_keys.plan import SplitCall
from flashtile.ops.kv_cache import reference
from flashtile.ops.kv_cache.spec import CacheCall, CacheSpec
from flashtile.testing import assert_close
from gluon_emulator import EmulatedHopper


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


_CASES = {
    "decode": Case(),
    "decode in splits": Case(lengths=(200, 40, 0), splits=3),
    "heads of two tiles": Case(heads=128, lengths=(130, 1), page_size=64),
    "tokens, not causal": Case(seq_q=3, heads=24, causal=False, lengths=(70, 128), dtype=torch.float16),
    "tokens": Case(seq_q=9, heads=16, lengths=(70, 9, 5), page_size=16, head_dim=520),
    "packed": Case(queries=(5, 0, 1, 20), heads=7, lengths=(100, 33, 64, 20), page_size=16, splits=2),
    "packed, pages of 24": Case(queries=(1, 9), heads=32, lengths=(90, 9), page_size=24, dtype=torch.float16),
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
        for row in range(length):
            where = table[sequence, row // size], row % size, 0
            # Scores grow along the rows where they are to rise.
            grown = 1 + row / 50 if case.spread > 1 else 1
            cache[where] = (torch.randn(width, generator=generator) * grown).to(case.dtype)
    starts = None
    if case.queries is not None:
        starts = torch.tensor([0, *case.queries]).cumsum(0).int()
    if case.page_size:
        for sequence, length in enumerate(case.lengths):
            table[sequence, -(-length // size) :] = 2**30  # not read
    call = CacheCall(
        q, cache, cache[..., :512], cache_lengths=torch.tensor(case.lengths, dtype=torch.int64),
        block_table=table if case.page_size else None, cu_seqlens_q=starts,
    )  # fmt: skip
    return call, CacheSpec(0, width**-0.5, None, 0 if case.causal else None, num_splits=case.splits)


def _split_call(call: CacheCall, spec: CacheSpec) -> SplitCall:
    """As `kv_cache.triton.plan` describes it."""
    q, cache, table = call.q, call.k_cache, call.block_table
    packed = call.cu_seqlens_q is not None
    batch, (heads, width) = call.batch, q.shape[-2:]
    seq_q = q.shape[0] if packed else q.shape[1]
    q_strides = (0, *q.stride()[:2]) if packed else q.stride()[:3]
    strides = cache.stride()[0], cache.stride()[1], 0
    return SplitCall(
        q.dtype,
        (batch, seq_q, heads, 1, width, 512),
        (q_strides, strides, strides),
        0,
        call.capacity,
        spec.scale,
        False,
        (torch.int64, None, None, *(None if t is None else torch.int32 for t in (table, call.cu_seqlens_q)), None, None),
        0 if table is None else cache.shape[1],
        0 if table is None else table.stride(0),
        q.shape[0] if packed else None,
        window_right=spec.window_right,
        visible=call.capacity,
        num_splits=spec.num_splits,
        cache_dtype=cache.dtype,
        values_in_keys=True,
    )


@pytest.mark.parametrize("name", _CASES)
@pytest.mark.parametrize("seed", range(2))
def test_results_on_the_emulated_machine(name: str, seed: int) -> None:
    call, spec = _inputs(_CASES[name])
    emulated = EmulatedHopper(multiprocessors=3, seed=seed)
    indices = call.cache_lengths, None, None, call.block_table, call.cu_seqlens_q, None, None
    found = emulated.latent(_split_call(call, spec), call.q, call.k_cache, indices, 0)
    cast = [t.double() if isinstance(t, torch.Tensor) and t.is_floating_point() else t for t in call]
    if call.block_table is not None:
        cast[8] = call.block_table.clamp(max=call.k_cache.shape[0] - 1)
    oracle = reference.forward(CacheCall(*cast), spec)
    cast = [t if isinstance(t, torch.Tensor) and t.is_floating_point() else c for t, c in zip(call, cast)]
    eager = reference.forward(CacheCall(*cast), spec)
    for what, *three in zip(("out", "lse"), found, oracle, eager):
        assert_close(what, *three)
