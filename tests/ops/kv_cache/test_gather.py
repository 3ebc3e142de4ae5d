"""Gathering the rows of a cache: in Triton's interpreter, and on a GPU."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch

from flashtile.ops.common.split_keys.plan import SplitCall
from flashtile.ops.kv_cache.hopper import backend, gather
from flashtile.testing import assert_same
from support.attention.gathered import gathered_rows
from support.running.places import of_kernels

_FP8, _E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
_QUERIES, _LENGTHS, _LEAST = (40, 5, 0, 45), (100, 37, 50, 64), 20


class Case(NamedTuple):
    """A call of four sequences. `factors`: "rows", "pages" (or entries) or "heads". `latent`: values are columns of
    keys. `left`: rows before are padding."""

    page_size: int = 0
    cache_dtype: torch.dtype | None = None
    factors: str | None = None
    packed: bool = False
    window: int | None = None
    head_dims: tuple[int, int] = (64, 64)
    places: int = 4
    new: int | None = None
    latent: bool = False
    left: tuple[int, ...] | None = None


CASES = {
    "pages of 1": Case(1, packed=True, head_dims=(64, 40), new=3),
    "dense": Case(window=10),
    "int8": Case(7, torch.int8, "rows", packed=True, window=10, head_dims=(72, 64), places=2),
    "pages": Case(16, _FP8, "pages", head_dims=(256, 64)),
    "heads": Case(3, _E5M2, "heads", packed=True, new=0),
    "latent": Case(16, torch.int8, "rows", packed=True, head_dims=(576, 512), latent=True, left=(33, 0, 60, 70)),
    "latent, pages of 1": Case(1, head_dims=(520, 512), latent=True),
}


def _moved(tensor: torch.Tensor, device: str) -> torch.Tensor:
    """A tensor on a device with the strides it has. `to` makes what is expanded contiguous."""
    moved = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)
    whole = tuple(slice(None) if stride else slice(1) for stride in tensor.stride())
    moved[whole].copy_(tensor[whole])
    return moved


@of_kernels
@pytest.mark.parametrize("name", CASES)
def test_gathers_the_rows_that_count(name: str, device: str) -> None:
    """The others, NaN in the cache too, are left alone."""
    case = CASES[name]
    generator = torch.Generator().manual_seed(0)
    page_size, dtype = case.page_size, torch.float16
    capacity = -(-100 // page_size) * page_size if page_size else 100
    outer, inner = (4 * capacity // page_size + 3, page_size) if page_size else (5, capacity)
    table = torch.randperm(outer, generator=generator).int()[:-3].view(4, -1) if page_size else None
    entries = None if page_size else torch.tensor([4, 0, 2, 1])
    numbers = [torch.randn(outer, inner, 2, columns, generator=generator) for columns in case.head_dims]
    caches = [(40 * of).round().clamp(-127, 127) if case.cache_dtype is torch.int8 else of for of in numbers]
    caches = [of.to(case.cache_dtype or dtype) for of in caches]
    factors: list[Any] = [None, None]
    if case.factors is not None:
        shape = {"rows": (outer, inner, 2), "pages": (outer, 1, 2), "heads": (1, 1, 2)}[case.factors]
        factors = [(torch.rand(shape, generator=generator) + 0.5).expand(outer, inner, 2) for _ in caches]
    starts = torch.tensor([0, *_QUERIES]).cumsum(0) if case.packed else None
    new_starts = None if case.new is None else torch.arange(5, dtype=torch.int32) * case.new
    lengths = torch.tensor(_LENGTHS) - (case.new or 0)
    left = None if case.left is None else torch.tensor(case.left)
    if left is not None and table is not None:
        for sequence, first in enumerate(left.tolist()):
            table[sequence, : first // page_size] = 2**30  # not read
    if case.latent:
        caches, factors[1] = caches[:1], factors[0]
    indices = lengths, entries, left, table, starts, new_starts, None
    dtypes = (of if of is None else of.dtype for of in indices)
    strides = (0, 4, 1), *(of.stride()[:3] for of in (caches[0], caches[-1]))
    call = SplitCall(
        dtype, (4, 45, 4, 2, *case.head_dims), strides, 0, capacity, 0.1,
        False, tuple(dtypes), page_size, 0 if table is None else table.stride(0), total_q=90 if case.packed else None,
        window_left=case.window, cache_dtype=case.cache_dtype,
        descale_strides=tuple(of if of is None else of.stride() for of in factors),
    )  # fmt: skip
    on = torch.device(device, 0 if device == "cuda" else None)
    found = gather.plan_gather(call, _LEAST, case.places, on, keys_alone=case.latent)
    tensors = [[None if of is None else _moved(of, device) for of in those] for those in (caches, indices, factors)]
    rows, behind, later = found.run(*tensors, 0)
    wanted_rows, wanted, wanted_later = gathered_rows(found, call, _LEAST, caches, indices, factors, 0)
    for some, others in ((behind, wanted), (later, wanted_later)):
        assert [of is None for of in some] == [of is None for of in others]
    assert len(rows) == len(caches) and behind[3] is None
    places = torch.arange(4) if wanted[1] is None else wanted[1]
    assert behind[1] is None or behind[1].tolist() == places.tolist()
    for sequence, place in enumerate(places.tolist()):
        queries = _QUERIES[sequence] if case.packed else 45
        first = 0 if case.window is None else max(_LENGTHS[sequence] - queries - case.window, 0)
        first = first if left is None else max(first, case.left[sequence])
        counted = slice(first, _LENGTHS[sequence])
        for got, of in zip(rows, wanted_rows):
            assert place < 0 or assert_same(got[place, counted].cpu(), of[place, counted]) is None


def test_what_is_gathered_has_a_limit() -> None:
    """Packed sequences with few queries need no memory."""
    cache = 8 * 128, 8 * 128, 128
    call = SplitCall(
        torch.bfloat16, (6, 512, 32, 8, 128, 128), ((512 * 32 * 128, 32 * 128, 128), cache, cache), 0, 65536, 0.1,
        False, (torch.int32, None, None, torch.int32, None, None, None), 1, 65536,
    )  # fmt: skip
    packed = call._replace(shape=(128, 512, *call.shape[2:]), total_q=5 * 64 + 63)
    assert [backend.gathered_sequences(of, 64) for of in (call, packed)] == [6, 5]
    assert not backend.is_gathered(call) and backend.is_gathered(call._replace(capacity=32768))
    assert not backend.is_gathered(packed._replace(total_q=63, capacity=32768))
    assert not backend.is_gathered(call._replace(shape=(6, 256, *call.shape[2:]), capacity=32768))
    wide = call._replace(cache_dtype=torch.int8)
    assert backend.is_gathered(wide) and "1024 MiB" in (backend.unreadable_by_forward(wide, gathered=True) or "")
    few = packed._replace(cache_dtype=torch.int8, total_q=63, capacity=32768)
    assert "enough queries" in (backend.unreadable_by_forward(few, gathered=True) or "")
