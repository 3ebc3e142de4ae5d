"""What a call means: decoding step by step is attention over the whole sequence; what is written where; bad input."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import Tensor

import flashtile
from flashtile.ops.common.eight_bits import EIGHT_BITS
from flashtile.testing import assert_same
from support.running.each_case import each_case

both_backends = pytest.mark.parametrize("backend", ["reference", "cpu"])


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def qkv(batch: int = 2, seq: int = 12, heads: int = 4, heads_kv: int = 2, head_dim: int = 8) -> tuple[Tensor, ...]:
    return (
        normal(batch, seq, heads, head_dim, seed=1),
        normal(batch, seq, heads_kv, head_dim, seed=2),
        normal(batch, seq, heads_kv, head_dim, seed=3),
    )


_OPTIONS: dict[str, dict[str, Any]] = {
    "causal": {},
    "window": {"window": (3, None)},
    "softcap": {"softcap": 1.5},
    "alibi": {"alibi_slopes": torch.tensor([0.5, 0.25, 0.1, 0.0], dtype=torch.float64)},
    "sinks": {"sinks": torch.tensor([0.5, -1.0, 0.0, 2.0], dtype=torch.float64)},
    "scale": {"scale": 0.7},
}


@both_backends
@each_case("steps", [(1,) * 12, (5, 1, 1, 5), (12,)])
@each_case("option", _OPTIONS)
def test_decoding_in_steps_is_attention_over_all(option: str, steps: tuple[int, ...], backend: str) -> None:
    q, k, v = qkv()
    expected, expected_lse = flashtile.attention(
        q, k, v, causal=True, return_lse=True, backend="reference", **_OPTIONS[option]
    )
    k_cache, v_cache = (torch.full((2, 15, 2, 8), float("nan"), dtype=torch.float64) for _ in range(2))
    first = 0
    for rows in steps:
        part = slice(first, first + rows)
        out, lse = flashtile.attention_with_kv_cache(
            q[:, part], k_cache, v_cache, k[:, part], v[:, part], cache_lengths=first, return_lse=True, backend=backend,
            **_OPTIONS[option],
        )  # fmt: skip
        assert_same(out, expected[:, part])
        assert_same(lse, expected_lse[:, :, part])
        first += rows
    assert_same(k_cache[:, :12], k)
    assert_same(v_cache[:, :12], v)
    assert k_cache[:, 12:].isnan().all() and v_cache[:, 12:].isnan().all()


@both_backends
@each_case("interleaved", [False, True])
def test_rotation_is_by_the_row_of_the_cache(interleaved: bool, backend: str) -> None:
    q, k, v = qkv()
    cos, sin = flashtile.rotary_tables(20, 6, dtype=torch.float64)
    turned = [flashtile.apply_rotary(t, cos, sin, interleaved, backend="reference") for t in (q, k)]
    expected = flashtile.attention(*turned, v, causal=True, backend="reference")
    k_cache, v_cache = torch.zeros(2, 12, 2, 8, dtype=torch.float64), torch.zeros(2, 12, 2, 8, dtype=torch.float64)
    for first in range(0, 12, 3):
        part = slice(first, first + 3)
        out = flashtile.attention_with_kv_cache(
            q[:, part], k_cache, v_cache, k[:, part], v[:, part], cache_lengths=torch.tensor([first, first]),
            rotary_cos=cos, rotary_sin=sin, rotary_interleaved=interleaved, backend=backend,
        )  # fmt: skip
        assert_same(out, expected[:, part])
    assert_same(k_cache, turned[1])


@both_backends
def test_without_a_band_all_queries_are_rotated_by_the_length_before(backend: str) -> None:
    q, k, v = qkv()
    cos, sin = flashtile.rotary_tables(20, 8, dtype=torch.float64)
    k_cache, v_cache = k.clone(), v.clone()
    call = {"cache_lengths": 9, "rotary_cos": cos, "rotary_sin": sin, "causal": False, "backend": backend}
    out = flashtile.attention_with_kv_cache(q[:, 9:], k_cache, v_cache, k[:, 9:], v[:, 9:], **call)
    at_nine = torch.cat(
        [flashtile.apply_rotary(q[:, i : i + 1], cos, sin, seqlen_offsets=9, backend="reference") for i in (9, 10, 11)],
        dim=1,
    )
    assert_same(out, flashtile.attention(at_nine, k_cache, v, backend="reference"))


@both_backends
def test_each_sequence_has_its_own_length_padding_and_entry(backend: str) -> None:
    q, k, v = normal(3, 2, 4, 8), normal(5, 20, 2, 8, seed=2), normal(5, 20, 2, 8, seed=3)
    lengths, left, entries = [7, 20, 3], [2, 0, 3], [4, 0, 1]
    out, lse = flashtile.attention_with_kv_cache(
        q, k, v, cache_lengths=torch.tensor(lengths), cache_left_padding=torch.tensor(left),
        cache_batch_indices=torch.tensor(entries), return_lse=True, backend=backend,
    )  # fmt: skip
    for b in range(3):
        rows = entries[b], slice(left[b], lengths[b])
        alone = flashtile.attention(
            q[b, None], k[rows][None], v[rows][None], causal=True, return_lse=True, backend="reference"
        )
        assert_same(out[b], alone[0][0])
        assert_same(lse[b], alone[1][0])
    assert (out[2] == 0).all() and (lse[2] == float("-inf")).all(), "sequence 2 has no rows"


@both_backends
@each_case("page_size", [1, 12, 32])
def test_pages_are_the_rows_of_a_cache(page_size: int, backend: str) -> None:
    """In any order; those of nobody stay as they are, and table entries past the length are not read."""
    q, k, v = normal(2, 1, 4, 8), normal(2, 96, 2, 8, seed=2), normal(2, 96, 2, 8, seed=3)
    new_k, new_v = normal(2, 1, 2, 8, seed=4), normal(2, 1, 2, 8, seed=5)
    lengths = torch.tensor([60, 15], dtype=torch.int32)
    pages = 96 // page_size
    order = torch.randperm(2 * pages + 1, generator=torch.Generator().manual_seed(0))
    table = order[:-1].view(2, pages).int()
    caches = []
    for cache in (k, v):
        paged = torch.full((2 * pages + 1, page_size, 2, 8), float("nan"), dtype=torch.float64)
        paged[table.flatten().long()] = cache.reshape(2 * pages, page_size, 2, 8)
        caches.append(paged)
    table[1, (16 + page_size - 1) // page_size :] = 10**9
    expected = flashtile.attention_with_kv_cache(q, k, v, new_k, new_v, cache_lengths=lengths, backend="reference")
    out = flashtile.attention_with_kv_cache(
        q, *caches, new_k, new_v, cache_lengths=lengths, block_table=table, backend=backend
    )
    assert_same(out, expected)
    for cache, new in zip(caches, (new_k, new_v), strict=True):
        for b, length in enumerate(lengths.tolist()):
            assert_same(cache[table[b, length // page_size], length % page_size], new[b, 0])
        assert cache[order[-1]].isnan().all()


@both_backends
@each_case("option", _OPTIONS)
def test_packed_sequences_are_calls_of_their_own(option: str, backend: str) -> None:
    """A chunk of a prompt, a token, a sequence without queries and a first chunk, whose lengths come from a table."""
    counts, lengths = [4, 1, 0, 5], [3, 9, 6, 0]
    starts = torch.tensor([0, 4, 5, 5, 10])
    q, k, v = (normal(11, heads, 8, seed=seed) for seed, heads in enumerate((4, 2, 2)))
    pages = [normal(20, 3, 2, 8, seed=seed) for seed in (7, 8)]
    table = torch.randperm(20, generator=torch.Generator().manual_seed(0)).view(4, 5)
    kept = [cache.clone() for cache in pages]
    out, lse = flashtile.attention_with_kv_cache(
        q, *pages, k, v, cache_lengths=torch.tensor(lengths), block_table=table, cu_seqlens_q=starts, return_lse=True,
        backend=backend, **_OPTIONS[option],
    )  # fmt: skip
    for b, count in enumerate(counts):
        rows = slice(starts[b], starts[b + 1])
        alone, lse_alone = flashtile.attention_with_kv_cache(
            q[None, rows], *kept, k[None, rows], v[None, rows], cache_lengths=lengths[b], block_table=table[b, None],
            return_lse=True, backend="reference", **_OPTIONS[option],
        )  # fmt: skip
        assert alone.shape[1] == count
        assert_same(out[rows], alone[0])
        assert_same(lse[:, rows], lse_alone[0])
    assert all(map(torch.equal, pages, kept))
    assert not out[10].any() and (lse[:, 10] == float("-inf")).all(), "a row of no sequence"


@both_backends
def test_packed_attention_reads_keys_from_pages(backend: str) -> None:
    q, k, v = normal(6, 4, 8), normal(14, 2, 8, seed=1), normal(14, 2, 8, seed=2)
    starts_q, starts_k = torch.tensor([0, 4, 6]), torch.tensor([0, 5, 14])
    table = torch.tensor([[3, 0, -7], [4, 1, 2]])
    pages = [torch.full((5, 3, 2, 8), float("nan"), dtype=torch.float64) for _ in range(2)]
    for page, rows in zip(pages, (k, v), strict=True):
        page[[3, 0, 4, 1, 2]] = torch.cat([rows[:5], rows[:1] * float("nan"), rows[5:]]).view(5, 3, 2, 8)
    options = {"causal": True, "window": (3, 0), "return_lse": True, "backend": backend}
    expected = flashtile.attention_varlen(q, k, v, starts_q, starts_k, **options)
    for lengths in ({"cu_seqlens_k": starts_k}, {"key_lengths": starts_k.diff()}):
        found = flashtile.attention_varlen(
            q, *pages, starts_q, block_table=table, max_seqlen_q=4, max_seqlen_k=9, **lengths, **options
        )
        assert_same(found[0], expected[0])
        assert_same(found[1], expected[1])
    with pytest.raises(ValueError, match=r"key_lengths: expected the number of keys of each .* got neither"):
        flashtile.attention_varlen(q, *pages, starts_q, block_table=table)
    with pytest.raises(TypeError, match="key_lengths: expected an int32 or int64 tensor, got int"):
        flashtile.attention_varlen(q, *pages, starts_q, block_table=table, key_lengths=5)
    with pytest.raises(ValueError, match=r"cu_seqlens_k: expected shape \(3,\)"):
        flashtile.attention_varlen(q, *pages, starts_q, starts_k[:2], block_table=table)
    for longest, error in ((8, ValueError), (-1, ValueError), (9.0, TypeError)):
        with pytest.raises(error, match="max_seqlen_k: expected an "):
            flashtile.attention_varlen(q, *pages, starts_q, starts_k, block_table=table, max_seqlen_k=longest)
    with pytest.raises(ValueError, match="bias: expected its default beside block_table"):
        flashtile.attention_varlen(q, *pages, starts_q, starts_k, block_table=table, bias=q)
    with pytest.raises(ValueError, match="q: expected a tensor that wants no gradient"):
        flashtile.attention_varlen(q.requires_grad_(), *pages, starts_q, starts_k, block_table=table)


@both_backends
def test_a_tree_is_verified_in_one_call(backend: str) -> None:
    """Each token gets what it gets at the end of its own path from the root, alone."""
    parents = torch.tensor([-1, 0, 0, 1, 2, 2, -1])
    q, k, v = (normal(1, 20, heads, 8, seed=seed) for seed, heads in enumerate((4, 2, 2)))
    out = flashtile.attention_with_kv_cache(
        q[:, 13:], k.clone(), v.clone(), k[:, 13:], v[:, 13:], cache_lengths=13,
        tree_mask=flashtile.tree_mask(parents), backend=backend,
    )  # fmt: skip
    for token in range(7):
        path = [token]
        while parents[path[0]] >= 0:
            path.insert(0, int(parents[path[0]]))
        rows = [*range(13), *(13 + number for number in path)]
        alone = flashtile.attention(q[:, 13 + token, None], k[:, rows], v[:, rows], backend="reference")
        assert_same(out[:, token, None], alone)


def test_packed_trees_stand_behind_one_another() -> None:
    parents, starts = torch.tensor([-1, 0, 0, -1, 0, 7]), torch.tensor([0, 3, 5])
    shown = flashtile.tree_mask(parents, starts, 3)
    assert torch.equal(shown[:3], flashtile.tree_mask(parents[:3]))
    assert torch.equal(shown[3:5, :2], flashtile.tree_mask(parents[3:5])) and not shown[3:5, 2].any()
    for arguments, message in (
        ((parents, starts, 2), "max_seqlen: expected an upper bound of the sequence lengths, got 2"),
        ((parents, starts + 1), "cu_seqlens: expected to start at 0"),
        ((parents, starts * 2), "cu_seqlens: expected its last value to be at most the packed total, 6, got 10"),
        ((parents[:5], None, 3), "max_seqlen: expected None without cu_seqlens, got 3"),
        ((parents, torch.tensor([0, 6])), "parents: expected the number of an earlier token, or -1"),
    ):
        with pytest.raises(ValueError, match=message):
            flashtile.tree_mask(*arguments)


@both_backends
@each_case("layout", ["dense", "entries", "pages", "packed", "int8", "tree"])
def test_shared_rows_are_read_once(layout: str, backend: str) -> None:
    """The result is that of a call without them; of the other sequences' first rows nothing is read."""
    q, k, v = normal(3, 2, 4, 8), normal(3, 24, 2, 8, seed=1), normal(3, 24, 2, 8, seed=2)
    new = normal(2, 3, 2, 2, 8, seed=3)
    k[1:, :9], v[1:, :9] = k[:1, :9], v[:1, :9]
    options: dict[str, Any] = {"cache_lengths": torch.tensor([9, 20, 14]), "backend": backend, "return_lse": True}
    if layout == "entries":
        options["cache_batch_indices"] = torch.tensor([2, 0, 1])
    if layout == "pages":
        k, v = k.view(24, 3, 2, 8), v.view(24, 3, 2, 8)
        options["block_table"] = torch.arange(24).view(3, 8)
    if layout == "packed":
        q, new = normal(7, 4, 8), normal(2, 7, 2, 8, seed=3)
        options |= {"cu_seqlens_q": torch.tensor([0, 1, 1, 6]), "sinks": normal(4)}
    if layout == "int8":
        k, v = (k * 40).to(torch.int8), (v * 40).to(torch.int8)
        options |= {"descale_k": torch.full((3, 2), 0.025), "descale_v": torch.full((3, 2), 0.025)}
    if layout == "tree":
        options["tree_mask"] = torch.eye(2, dtype=torch.bool)
    expected = flashtile.attention_with_kv_cache(q, k.clone(), v.clone(), *new, **options)
    if layout in ("dense", "tree", "packed"):
        k[1:, :9], v[1:, :9] = float("nan"), float("nan")
    if layout == "pages":
        options["block_table"][1:, :3] = 0  # of sequence 0
    out, lse = flashtile.attention_with_kv_cache(q, k, v, *new, shared_rows=9, **options)
    assert_same(out, expected[0])
    assert_same(lse, expected[1])
    with pytest.raises(ValueError, match="shared_rows: expected at most 9, the rows before the first new row"):
        flashtile.attention_with_kv_cache(q, k, v, *new, shared_rows=10, **options)


_FACTORS = {"one": (), "heads": (2,), "entries": (2, 2), "rows": (2, 20, 2)}


@both_backends
@each_case("kind", _FACTORS)
@each_case("dtype", [torch.float8_e4m3fn, torch.float8_e5m2, torch.int8])
def test_caches_of_8_bits_stand_for_themselves_times_factors(dtype: torch.dtype, kind: str, backend: str) -> None:
    """The new rows are rounded to them, and attention is that over the widened cache."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, 3, heads, 16, generator=generator) for heads in (4, 2, 2))
    caches = [(torch.randn(2, 20, 2, 16, generator=generator) * 20).to(dtype) for _ in range(2)]
    factors = [(0.5 + torch.rand(_FACTORS[kind], generator=generator)) / 20 for _ in range(2)]
    out = flashtile.attention_with_kv_cache(
        q, *caches, k, v, cache_lengths=torch.tensor([7, 4]), descale_k=factors[0], descale_v=factors[1],
        backend=backend,
    )  # fmt: skip
    wide = []
    for cache, factor, new in zip(caches, factors, (k, v), strict=True):
        each = (factor[:, None] if factor.dim() == 2 else factor).expand(2, 20, 2)[..., None]
        wide.append(cache.float() * each)
        rows = torch.stack([wide[-1][0, 7:10], wide[-1][1, 4:7]])
        step = torch.stack([each[0, 7:10], each[1, 4:7]])
        largest = step * EIGHT_BITS[dtype]
        if kind == "rows":
            assert_same(largest[..., 0], new.abs().amax(-1))
        if dtype is not torch.int8:
            step = new.abs() * torch.finfo(dtype).eps
        wrong = rows - new.clamp(-largest, largest)
        assert (wrong.abs() <= 0.501 * step + 1e-5).all(), "rounded to the nearest"
    for b, total in enumerate((10, 7)):
        alone = flashtile.attention(q[b, None], *(w[b, None, :total] for w in wide), causal=True, backend="reference")
        assert_same(out[b], alone[0])


@both_backends
def test_8_bits_cut_off_what_is_too_large(backend: str) -> None:
    k = torch.tensor([1e6, -1e6, 0.3, 0.0]).expand(1, 1, 1, 4)
    for dtype, largest in EIGHT_BITS.items():
        caches = torch.zeros(2, 1, 4, 1, 4).to(dtype).unbind()
        flashtile.attention_with_kv_cache(k, *caches, k, k, cache_lengths=0, backend=backend)
        assert caches[0][0, 0, 0, :2].float().tolist() == [largest, -largest]
        factors = torch.full((2, 1, 4, 1), float("nan")).unbind()
        flashtile.attention_with_kv_cache(
            k, *caches, k, 0 * k, cache_lengths=0, descale_k=factors[0], descale_v=factors[1], backend=backend
        )
        assert factors[1][0, 0, 0] == 1, "zeros are zeros with any factor"
        assert (factors[0][0, 0, 0] - 1e6 / largest).abs() < 1e-6 * 1e6 / largest and factors[0][0, 1:].isnan().all()


@both_backends
def test_new_rows_go_to_their_places_and_nowhere_else(backend: str) -> None:
    k_cache, v_cache = normal(3, 20, 2, 8), normal(3, 20, 2, 8, seed=1)
    before = k_cache.clone(), v_cache.clone()
    k, v = normal(2, 3, 2, 8, seed=2), normal(2, 3, 2, 8, seed=3)
    flashtile.attention_with_kv_cache(
        normal(2, 1, 2, 8), k_cache, v_cache, k, v, cache_lengths=torch.tensor([0, 17]),
        cache_batch_indices=torch.tensor([2, 0]), backend=backend,
    )  # fmt: skip
    for cache, old, new in zip((k_cache, v_cache), before, (k, v), strict=True):
        old[2, 0:3], old[0, 17:20] = new[0], new[1]
        assert torch.equal(cache, old)


@both_backends
def test_a_view_of_a_larger_cache_is_written_in_place(backend: str) -> None:
    """One layer of keys and values of all layers, heads before rows."""
    storage = torch.zeros(2, 2, 2, 16, 8, dtype=torch.float64)  # [k and v, batch, heads, rows, head_dim]
    k_cache, v_cache = storage[0].transpose(1, 2), storage[1].transpose(1, 2)
    k, v = normal(2, 1, 2, 8, seed=2), normal(2, 1, 2, 8, seed=3)
    out = flashtile.attention_with_kv_cache(
        normal(2, 1, 2, 8), k_cache, v_cache, k, v, cache_lengths=4, backend=backend
    )
    assert torch.equal(storage[0, :, :, 4], k[:, 0]) and torch.equal(storage[1, :, :, 4], v[:, 0])
    assert out.isfinite().all()


@both_backends
@each_case("dim", range(4))
def test_caches_may_lie_in_turns_in_one_tensor(dim: int, backend: str) -> None:
    k_cache, v_cache = torch.zeros(2, 2, 16, 2, 8, dtype=torch.float64).movedim(0, dim).contiguous().unbind(dim)
    k, v = normal(2, 1, 2, 8, seed=2), normal(2, 1, 2, 8, seed=3)
    flashtile.attention_with_kv_cache(normal(2, 1, 2, 8), k_cache, v_cache, k, v, cache_lengths=4, backend=backend)
    assert torch.equal(k_cache[:, 4:5], k) and torch.equal(v_cache[:, 4:5], v)


@both_backends
def test_what_is_only_read_may_share_memory(backend: str) -> None:
    one = normal(1, 16, 2, 8).expand(2, -1, -1, -1)
    found = flashtile.attention_with_kv_cache(normal(2, 1, 2, 8), one, one, cache_lengths=4, backend=backend)
    own = one.clone(), one.clone()
    assert_same(found, flashtile.attention_with_kv_cache(normal(2, 1, 2, 8), *own, cache_lengths=4, backend=backend))


@both_backends
def test_sequences_may_share_an_entry_and_append_to_other_rows(backend: str) -> None:
    k_cache, v_cache = torch.zeros(2, 2, 16, 2, 8, dtype=torch.float64)
    k, v = normal(2, 1, 2, 8, seed=2), normal(2, 1, 2, 8, seed=3)
    out = flashtile.attention_with_kv_cache(
        normal(2, 1, 2, 8), k_cache, v_cache, k, v, cache_lengths=torch.tensor([0, 1]),
        cache_batch_indices=torch.tensor([1, 1]), backend=backend,
    )  # fmt: skip
    assert torch.equal(v_cache[1, :2], v[:, 0])
    assert_same(out[0], v[0])


@both_backends
def test_a_cache_of_single_columns_is_written_in_place_whatever_their_stride(backend: str) -> None:
    """They are contiguous, wherever the next one would be."""
    q, k, v = qkv(seq=1, head_dim=1)
    storage = torch.zeros(2, 2, 3, 2, 6, dtype=torch.float64)
    k_cache, v_cache = (part[..., ::2].permute(0, 3, 2, 1)[..., :1] for part in storage)
    assert k_cache.stride(-1) != 1 and not k_cache.is_contiguous()
    flashtile.attention_with_kv_cache(q, k_cache, v_cache, k, v, cache_lengths=2, backend=backend)
    assert torch.equal(k_cache[:, 2:], k) and torch.equal(v_cache[:, 2:], v)


def test_default_is_the_whole_cache() -> None:
    q, k, v = qkv()
    out = flashtile.attention_with_kv_cache(q[:, -1:], k, v)
    assert_same(out, flashtile.attention(q, k, v, causal=True, backend="reference")[:, -1:])


def test_autocast_casts_nothing() -> None:
    """The cache is written where it is, so the step runs in its dtype, whatever autocast says."""
    q, k, v = qkv()
    with torch.autocast("cpu", torch.bfloat16):
        assert flashtile.attention_with_kv_cache(q, k, v).dtype is torch.float64
        single = [t.to(torch.float32) for t in (q, k, v)]
        found = flashtile.attention_with_kv_cache(*single)
    assert found.dtype is torch.float32
    assert_same(found, flashtile.attention_with_kv_cache(*single))
    with torch.autocast("cpu", torch.bfloat16), pytest.raises(TypeError, match="k_cache: expected the dtype of q"):
        flashtile.attention_with_kv_cache(q.float(), k.bfloat16(), v.bfloat16())


# --- bad input ------------------------------------------------------------------------------------------------------

_Q, _CACHE, _NEW = torch.randn(2, 1, 4, 8), torch.randn(2, 20, 2, 8), torch.randn(2, 1, 2, 8)
_TABLE = {"block_table": torch.zeros(2, 3, dtype=torch.int32), "k_cache": torch.randn(4, 16, 2, 8)}
_TABLE["v_cache"] = _TABLE["k_cache"]
_APPEND = {"k": _NEW, "v": _NEW, "cache_lengths": 3}
_WIDE = torch.randn(2, 20, 2, 15)
_CACHES = dict(zip(("k_cache", "v_cache"), torch.randn(2, 2, 20, 2, 8)))
_PAGES = dict(zip(("k_cache", "v_cache"), torch.randn(2, 4, 16, 2, 8)))
_LINE = torch.randn(1000)
_OTHER_STRIDES = _LINE[312:].as_strided((2, 20, 2, 8), (320, 8, 160, 1))
_COS, _SIN = flashtile.rotary_tables(24, 8)
_ROTARY = {**_APPEND, "rotary_cos": _COS, "rotary_sin": _SIN}
_FULL = torch.tensor([3, 20])
_TRUE = torch.ones(5, 3, dtype=torch.bool)
_INT8 = {"k_cache": _CACHE.to(torch.int8), "v_cache": _CACHE.to(torch.int8)}
_EIGHT_BIT_CACHES = {name: cache.to(torch.int8) for name, cache in _CACHES.items()}
_FACTORS_OF_ROWS = torch.ones(2, 20, 2)
_STARTS = torch.tensor([0, 3, 4])
_PACKED = {"q": torch.randn(5, 4, 8), "cu_seqlens_q": _STARTS}
_NEW_ROWS = {"k": torch.randn(5, 2, 8), "v": torch.randn(5, 2, 8), "cache_lengths": 3, **_CACHES}

_WRONG_TYPES: dict[str, tuple[dict[str, Any], str]] = {
    "q-type": ({"q": [1.0]}, "q: expected a torch.Tensor, got list"),
    "q-dtype": ({"q": _Q.int()}, "q: expected dtype float16"),
    "q-sparse": ({"q": _Q.to_sparse()}, "q: expected a dense tensor, got layout torch.sparse_coo"),
    "cache-sparse": ({"v_cache": _CACHE.to_sparse()}, "v_cache: expected a dense tensor, got layout torch."),
    "cache-dtype": ({"v_cache": _CACHE.half()}, "v_cache: expected the dtype of q, torch.float32"),
    "k-dtype": ({**_APPEND, "k": _NEW.double()}, "k: expected the dtype of q"),
    "lengths-type": ({"cache_lengths": 2.0}, "cache_lengths: expected an int or an int32 or int64 tensor"),
    "lengths-dtype": ({"cache_lengths": _FULL.float()}, "cache_lengths: expected dtype int32 or int64"),
    "table-type": ({**_TABLE, "block_table": [[0]]}, "block_table: expected an int32 or int64 tensor, got"),
    "table-dtype": ({**_TABLE, "block_table": torch.zeros(2, 3)}, "block_table: expected dtype int32 or i"),
    "factors-dtype": ({**_INT8, "descale_k": torch.ones(()).half()}, "descale_k: expected dtype float32, got"),
    "caches-of-two-dtypes": (
        {**_INT8, "v_cache": _CACHE},
        "v_cache: expected the dtype of k_cache, torch.int8, got torch.float32",
    ),
    "tree-dtype": ({"tree_mask": torch.ones(1, 1)}, "tree_mask: expected dtype bool, got torch.float32; fl"),
    "shared-type": ({"shared_rows": 2.0}, "shared_rows: expected an int or None, got 2.0"),
    "rotary-dtype": ({**_ROTARY, "rotary_sin": _SIN.half()}, "rotary_sin: expected the dtype of rotary_c"),
    "window": ({"window": 3}, "window: expected a pair (left, right), got 3"),
    "splits-type": ({"num_splits": 2.0}, "num_splits: expected an int or None, got 2.0"),
    "causal": ({"causal": 1}, "causal: expected True or False, got 1"),
}
_WRONG_VALUES: dict[str, tuple[dict[str, Any], str]] = {
    "q-rank": ({"q": _Q[0]}, "q: expected 4 dimensions [batch, seq_q, heads_q, head_dim], got shape"),
    "cache-rank": ({"k_cache": _CACHE[0]}, "k_cache: expected 4 dimensions [batch, capacity"),
    "cache-device": ({"k_cache": _CACHE.to("meta")}, "k_cache: expected the device of q, cpu, got meta"),
    "cache-strides": ({"k_cache": _CACHE.mT.contiguous().mT}, "k_cache: expected a last dimension that is"),
    "cache-shapes": ({"v_cache": _CACHE[:, 1:]}, "v_cache: expected the batch, capacity, heads_kv of"),
    "cache-expanded": (
        {**_APPEND, "v_cache": _CACHE[:1].expand(2, -1, -1, -1)},
        "v_cache: expected memory of its own for each element, because it is written in place, got shape",
    ),
    "cache-overlaps-itself": (
        {**_APPEND, **_CACHES, "k_cache": torch.randn(400).as_strided((2, 20, 2, 8), (160, 8, 8, 1))},
        "k_cache: expected memory of its own for each element, because it is written in place, got shape",
    ),
    "cache-other-strides": (
        {**_APPEND, "k_cache": _LINE.as_strided((2, 20, 2, 8), (320, 16, 8, 1)), "v_cache": _OTHER_STRIDES},
        "k_cache, v_cache: expected memory of its own for each of them",
    ),
    "cache-negated": (
        {**_APPEND, **_CACHES, "v_cache": torch._neg_view(_CACHES["v_cache"])},
        "v_cache: expected a tensor that holds its own numbers, because it is written in place",
    ),
    "cache-shared": (_APPEND, "k_cache, v_cache: expected memory of its own for each of them"),
    "cache-overlapping": (
        {**_APPEND, "k_cache": _WIDE[..., :8], "v_cache": _WIDE[..., 7:15]},
        "k_cache, v_cache: expected memory of its own for each of them",
    ),
    "head-dim": ({"k_cache": _CACHE[..., :4]}, "k_cache: expected the head_dim of q, 8, got 4"),
    "head-dim-v": ({"v_cache": torch.randn(2, 20, 2, 513)}, "v_cache: expected head_dim from 1 to 512"),
    "head-dim-k": (
        {"q": torch.randn(2, 1, 4, 577), "k_cache": torch.randn(2, 20, 2, 577)},
        "q: expected head_dim from 1 to 576",
    ),
    "heads": ({"q": torch.randn(2, 1, 3, 8)}, "expected a number of heads that divides the 3 of q, got 2"),
    "batch": ({"q": torch.randn(3, 1, 4, 8)}, "k_cache: expected the batch size of q, 3, got 2; cache_bat"),
    "v-missing": ({**_CACHES, "k": _NEW, "cache_lengths": 0}, "v: expected a tensor beside k, got None; pass both"),
    "k-shape": ({**_APPEND, "k": _Q}, "k: expected shape [batch, seq_new, heads_kv, head_dim] = [2, seq_n"),
    "v-rows": ({**_APPEND, "v": torch.randn(2, 2, 2, 8)}, "v: expected as many new rows as k has, 1, got"),
    "lengths-missing": ({"k": _NEW, "v": _NEW}, "cache_lengths: expected an int or a tensor beside k and"),
    "lengths-negative": ({"cache_lengths": -1}, "cache_lengths: expected at least 0, got -1"),
    "lengths-long": ({"cache_lengths": 21}, "cache_lengths: expected room for 21 rows, got a"),
    "lengths-no-room": ({**_APPEND, "cache_lengths": 20}, "room for 1 new rows behind 20, got a cache of"),
    "lengths-values": ({**_APPEND, "cache_lengths": _FULL}, "room for 1 new rows behind 20, got a cache"),
    "lengths-below": ({"cache_lengths": torch.tensor([3, -2])}, "lengths of at least 0, got -2"),
    "lengths-shape": ({"cache_lengths": _FULL[:1]}, "cache_lengths: expected shape (2,)"),
    "new-rows": (
        {**_APPEND, "k": torch.randn(2, 21, 2, 8), "v": torch.randn(2, 21, 2, 8), "cache_lengths": _FULL * 0},
        "cache_lengths: expected room for 21 new rows behind 0",
    ),
    "entries-range": ({"cache_batch_indices": torch.tensor([0, 2])}, "numbers of the 2 entries of the cac"),
    "entries-twice": (
        {**_APPEND, **_CACHES, "cache_batch_indices": torch.tensor([1, 1])},
        "cache_batch_indices: expected another place for each new row, got several for row 3 of entry 1",
    ),
    "entries-shape": ({"cache_batch_indices": torch.tensor([0])}, "cache_batch_indices: expected shape (2"),
    "entries-pages": (
        {**_TABLE, "cache_batch_indices": torch.tensor([0, 1])},
        "cache_batch_indices: expected None beside block_table",
    ),
    "left-negative": ({"cache_left_padding": torch.tensor([0, -1])}, "first rows of at least 0, got -1"),
    "table-shape": ({**_TABLE, "block_table": torch.zeros(3, 3).int()}, "block_table: expected shape [bat"),
    "table-range": ({**_TABLE, "block_table": torch.full((2, 3), 4)}, "numbers of the 4 pages of the cac"),
    "pages-shared": (
        {**_APPEND, **_PAGES, "block_table": torch.tensor([[2], [2]])},
        "block_table: expected another place for each new row, got several for row 3 of page 2",
    ),
    "page-size": (
        {**_TABLE, "k_cache": torch.randn(4, 0, 2, 8), "v_cache": torch.randn(4, 0, 2, 8)},
        "k_cache: expected pages of at least one row beside block_table",
    ),
    "packed-rank": ({"cu_seqlens_q": _STARTS}, "q: expected 3 dimensions [total_q, heads_q, head_dim] besi"),
    "packed-rank-k": (
        {**_PACKED, "k": _NEW, "v": _NEW, "cache_lengths": 0},
        "k: expected shape [total_new, heads_kv, head_dim] = [5, 2, 8], as the rows of q, which cu_seqlens_new can",
    ),
    "packed-new-without-k": ({**_PACKED, "cu_seqlens_new": _STARTS}, "cu_seqlens_new: expected None witho"),
    "packed-entries": (
        {**_PACKED, **_NEW_ROWS, "cu_seqlens_new": _STARTS[:2]},
        "cu_seqlens_new: expected shape (3,), batch + 1 cumulative lengths, as many as for queries",
    ),
    "packed-batch": ({**_PACKED, "cu_seqlens_q": _STARTS[:2]}, "k_cache: expected the batch size of q, 1,"),
    "packed-values": ({**_PACKED, "cu_seqlens_q": _STARTS + 1}, "cu_seqlens_q: expected to start at 0"),
    "packed-longest": ({**_PACKED, "max_seqlen_q": 2}, "max_seqlen_q: expected an upper bound of the sequ"),
    "packed-room": ({**_PACKED, **_NEW_ROWS, "cache_lengths": 18}, "expected room for 3 new rows behind 18"),
    "packed-new-total": (
        {**_PACKED, **_NEW_ROWS, "cu_seqlens_new": _STARTS * 2},
        "cu_seqlens_new: expected its last value to be at most the packed total, 5, got 8",
    ),
    "factors-16-bits": ({"descale_k": torch.ones(())}, "descale_k: expected None beside caches of torch.flo"),
    "factors-shape": (
        {**_INT8, "descale_v": torch.ones(4)},
        "descale_v: expected shape [], [heads_kv], [entries or pages, heads_kv] or [entries or pages, rows, heads_kv]",
    ),
    "factors-of-rows": (
        {**_INT8, "descale_v": torch.ones(2, 20, 2)},
        "descale_k, descale_v: expected factors of rows for both caches or for none, got them for one",
    ),
    "factors-shared": (
        {**_APPEND, **_EIGHT_BIT_CACHES, "descale_k": _FACTORS_OF_ROWS, "descale_v": _FACTORS_OF_ROWS},
        "descale_k, descale_v: expected memory of its own for each of them",
    ),
    "factors-of-columns": (
        {
            "k": _NEW,
            "cache_lengths": 3,
            "k_cache": _EIGHT_BIT_CACHES["k_cache"],
            "v_cache": _EIGHT_BIT_CACHES["k_cache"],
            "descale_k": _FACTORS_OF_ROWS,
            "descale_v": _FACTORS_OF_ROWS + 1,
        },
        "descale_v: expected descale_k itself beside v=None, got another tensor",
    ),
    "factors-zero": ({**_INT8, "descale_k": torch.zeros(2)}, "descale_k: expected positive finite factors"),
    "factors-nan": ({**_INT8, "descale_v": torch.tensor(float("nan"))}, "descale_v: expected positive fini"),
    "tree-shape": ({"tree_mask": _TRUE[:2, :2]}, "tree_mask: expected shape [seq_q, seq_q] = [1, 1], or on"),
    "tree-packed": (
        {**_PACKED, "tree_mask": _TRUE},
        "tree_mask: expected shape [total_q, at least max_seqlen_q] = [5, 5 or more], got (5, 3); pass max_seqlen_q",
    ),
    "tree-window": ({"tree_mask": _TRUE[:1, :1], "window": (3, 0)}, "window: expected None beside tree_ma"),
    "tree-causal": ({"tree_mask": _TRUE[:1, :1], "causal": False}, "causal: expected True beside tree_mas"),
    "shared-many": ({"shared_rows": 21}, "shared_rows: expected from 0 to 20, the rows of a sequence, got"),
    "shared-window": ({"shared_rows": 2, "window": (3, 0)}, "window: expected None beside shared_rows, got"),
    "not-packed": ({"max_seqlen_q": 2}, "max_seqlen_q: expected None without cu_seqlens_q, got 2"),
    "sin-missing": ({**_APPEND, "rotary_cos": _COS}, "rotary_sin: expected a table beside rotary_cos"),
    "rotary-alone": ({"rotary_cos": _COS, "rotary_sin": _SIN}, "rotary_cos: expected None without new k"),
    "rotary-wide": (
        {**_ROTARY, "rotary_cos": torch.ones(24, 5), "rotary_sin": torch.ones(24, 5)},
        "rotary_cos: expected shape (positions, rotary_dim / 2)",
    ),
    "rotary-shape": ({**_ROTARY, "rotary_sin": _SIN[1:]}, "rotary_sin: expected shape (24, 4), that of rotary_cos"),
    "rotary-short": (
        {**_ROTARY, "rotary_cos": _COS[:3], "rotary_sin": _SIN[:3]},
        "rotary_cos: expected at least 4 positions, the farthest that a row has, got 3",
    ),
    "rotary-values": (
        {**_ROTARY, "rotary_cos": _COS[:9], "rotary_sin": _SIN[:9], "cache_lengths": torch.tensor([3, 9])},
        "rotary_cos: expected at least 10 positions",
    ),
    "slopes": ({"alibi_slopes": torch.ones(3)}, "alibi_slopes: expected shape [heads_q] = [4]"),
    "sinks": ({"sinks": torch.ones(3)}, "sinks: expected shape [heads_q] = [4]"),
    "softcap": ({"softcap": -1.0}, "softcap: expected a finite number of at least 0, got -1.0"),
    "scale": ({"scale": float("inf")}, "scale: expected a finite number, got inf"),
    "scale-large": ({"scale": 1e39}, "scale: expected a magnitude of at most 2.3e+38"),
    "splits": ({"num_splits": 0}, "num_splits: expected from 1 to 128, got 0"),
    "splits-many": ({"num_splits": 129}, "num_splits: expected from 1 to 128, got 129"),
    "backend": ({"backend": "fast"}, "backend: expected one of 'auto'"),
    "gradient": ({"q": _Q.clone().requires_grad_()}, "q: expected a tensor that wants no gradient, got o"),
    "gradient-sinks": ({"sinks": torch.ones(4, requires_grad=True)}, "sinks: expected a tensor that want"),
}


@each_case("error, name", [(TypeError, name) for name in _WRONG_TYPES] + [(ValueError, name) for name in _WRONG_VALUES])
def test_bad_input(error: type[Exception], name: str) -> None:
    changes, message = (_WRONG_TYPES | _WRONG_VALUES)[name]
    with pytest.raises(error, match=re.escape(message)):
        flashtile.attention_with_kv_cache(**{"q": _Q, "k_cache": _CACHE, "v_cache": _CACHE, **changes})


@pytest.mark.skipif("flashtile._backends.devices.interpreting()", reason="the interpreter runs the kernels")
def test_backend_asked_for_by_name_does_not_fall_back() -> None:
    with pytest.raises(ValueError, match=r"backend: 'triton' cannot serve this call: .*GPU"):
        flashtile.attention_with_kv_cache(_Q, _CACHE, _CACHE, backend="triton")


def test_inputs_that_want_gradients_are_fine_where_nothing_is_recorded() -> None:
    q = _Q.clone().requires_grad_()
    with torch.no_grad():
        assert not flashtile.attention_with_kv_cache(q, _CACHE, _CACHE).requires_grad
    with torch.inference_mode():
        flashtile.attention_with_kv_cache(q, _CACHE.clone(), _CACHE.clone(), _NEW, _NEW, cache_lengths=3)
