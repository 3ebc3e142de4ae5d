"""FlashAttention-3's call with a cache: ragged queries and new rows, pages of any size, chunks, by their definition."""

import pytest
import torch

import flashtile
from flashtile.compat import cache as cache_module
from flashtile.testing import assert_close, assert_same
from support.attention.compat_cases import (
    Meaning,
    attention_by_definition,
    check_8_bits,
    cumulative,
    devices,
    normal,
    places,
    served,
)
from support.running.each_case import each_case

apply_rotary_emb_torch = served(2, "layers.rotary").apply_rotary_emb_torch
flash_attn_with_kvcache = served(3).flash_attn_with_kvcache

#: Rows in the cache, queries and new rows of each sequence, where these are ragged.
LENGTHS, QUERIES, NEW, CAPACITY = [5, 0, 17], [2, 5, 1], [3, 1, 2], 24
OPTIONS = {
    "plain": ({}, Meaning()),
    "causal": ({"causal": True, "softmax_scale": 0.3}, Meaning(scale=0.3, causal=True)),
    "window": ({"window_size": (4, 0), "softcap": 2.0}, Meaning(window=(4, 0), softcap=2.0)),
    "chunk": ({"attention_chunk": 4, "causal": True}, Meaning(chunk=4, causal=True)),
}
options_and_meaning = pytest.mark.parametrize(("options", "meaning"), OPTIONS.values(), ids=OPTIONS.keys())


def tables(dtype=torch.float64):
    angles = torch.outer(torch.arange(40.0), 0.3 ** torch.arange(4)).double()
    return angles.cos().to(dtype), angles.sin().to(dtype)


def turned(x, positions):
    cos, sin = (table.to(x) for table in tables())
    return apply_rotary_emb_torch(x, cos[positions], sin[positions], True)


def step(q, k, v, caches, meaning, rotary=None, first=(0, 0, 0)):
    """What a step means: q, k and v are lists of one sequence each; `rotary` are positions of first rows, or None.

    Returns:
        Outputs one after another, their lse `[heads, total]`, and the caches after the step, dense.
    """
    k_cache, v_cache = (cache.clone() for cache in caches)
    outs, lses = [], []
    for b, length in enumerate(LENGTHS):
        q_one, k_one = q[b], k[b]
        if rotary is not None:
            banded = meaning.causal or meaning.chunk or meaning.window != (-1, -1)
            q_one = turned(q_one[None], [rotary[b] + row * bool(banded) for row in range(q_one.shape[0])])[0]
            k_one = turned(k_one[None], [rotary[b] + row for row in range(k_one.shape[0])])[0]
        end = length + k_one.shape[0]
        k_cache[b, length:end], v_cache[b, length:end] = k_one, v[b]
        keys, values = (cache[b, first[b] : end] for cache in (k_cache, v_cache))
        out, lse = attention_by_definition(q_one[None], keys[None], values[None], meaning)
        outs.append(out[0])
        lses.append(lse[0])
    return torch.cat(outs), torch.cat(lses, 1), k_cache, v_cache


def inputs(dtype, queries=QUERIES, new=NEW):
    """q, k, v as lists of sequences, and the caches."""
    given = [
        [normal(rows, heads, 16, seed=seed + 10 * b).to(dtype) for b, rows in enumerate(counts)]
        for seed, (counts, heads) in enumerate(((queries, 4), (new, 2), (new, 2)))
    ]
    return *given, [normal(3, CAPACITY, 2, 16, seed=seed).to(dtype) for seed in (7, 8)]


def check(results, given, meaning, **definition):
    """Results of a call: out, lse and the caches."""

    def exact(dtype):
        return step(*([x.to(dtype) for x in parts] for parts in given), meaning, **definition)

    oracle, eager = exact(torch.float64), exact(given[0][0].dtype)
    for name, got, wanted, plain in zip(("out", "lse", "k_cache", "v_cache"), results, oracle, eager, strict=True):
        assert_close(name, got.cpu(), wanted, plain)


def paged(cache, page_size, device, pages=None):
    """A dense cache in pages in a mixed order, with some that nobody has, and its table."""
    per_sequence = CAPACITY // page_size
    table = torch.randperm(3 * per_sequence + 2, generator=torch.Generator().manual_seed(0))[: 3 * per_sequence]
    table = table.view(3, per_sequence)
    stored = torch.full((3 * per_sequence + 2, page_size, *cache.shape[2:]), 7.0, dtype=cache.dtype)
    stored[table.flatten()] = cache.view(3 * per_sequence, page_size, *cache.shape[2:])
    return stored.to(device), table.to(device, torch.int32)


def unpaged(stored, table):
    return stored[table.flatten().long()].view(3, CAPACITY, *stored.shape[2:])


def lengths_on(device, lengths=LENGTHS):
    return torch.tensor(lengths, dtype=torch.int32, device=device)


@places
@options_and_meaning
@each_case("page_size, rotary", [(None, None), (None, "given"), (1, "lengths"), (3, "given"), (8, None)])
def test_ragged_queries_and_new_rows(rotary, page_size, options, meaning, device, dtype):
    given = inputs(dtype)
    q, k, v, caches = given
    places = {"cu_seqlens_q": cumulative(QUERIES, device), "cu_seqlens_k_new": cumulative(NEW, device)}
    positions = None
    if rotary:
        positions = LENGTHS if rotary == "lengths" else [2, 0, 8]
        places["rotary_cos"], places["rotary_sin"] = (table.to(device) for table in tables(dtype))
        places["rotary_seqlens"] = lengths_on(device, positions) if rotary == "given" else None
    stored = [cache.to(device) for cache in caches]
    if page_size:
        stored, (table, _) = zip(*(paged(cache, page_size, device) for cache in caches))
        places["page_table"] = table
    out, lse = flash_attn_with_kvcache(
        torch.cat(q).to(device), *stored, torch.cat(k).to(device), torch.cat(v).to(device),
        cache_seqlens=lengths_on(device), max_seqlen_q=5, return_softmax_lse=True, **places, **options,
    )  # fmt: skip
    after = [unpaged(cache, table) for cache in stored] if page_size else stored
    check((out, lse, *after), given, meaning, rotary=positions)


@places
@pytest.mark.parametrize(("options", "meaning"), [OPTIONS["window"], OPTIONS["chunk"]], ids=["window", "chunk"])
@each_case("queries", [1, 3])
@each_case("way", ["entries", "padding", "pages", "rows of a table"])
def test_dense_queries(way, queries, options, meaning, device, dtype):
    """Every sequence has as many queries and new rows: entries in another order, padding of NaN, small pages."""
    given = inputs(dtype, [queries] * 3, [queries] * 3)
    q, k, v, caches = given
    first, places, stored = (0, 0, 0), {}, [cache.to(device) for cache in caches]
    if way == "entries":
        entries = torch.tensor([3, 0, 2], device=device)
        wide = [torch.full_like(cache[:1], 7.0).expand(5, -1, -1, -1).clone() for cache in stored]
        for cache, whole in zip(stored, wide):
            whole[entries] = cache
        stored, places = wide, {"cache_batch_idx": entries.int()}
    elif way == "padding":
        first = (2, 0, 9)
        places = {"cache_leftpad": lengths_on(device, first)}
        for cache in stored:
            for b, padding in enumerate(first):
                cache[b, :padding] = float("nan")
    else:
        stored, (table, _) = zip(*(paged(cache, 3, device) for cache in caches))
        places = {"page_table": table}
        if way != "pages":
            rows = torch.full((5, table.shape[1]), 99, dtype=torch.int32, device=device)
            rows[[3, 0, 2]] = table
            places = {"page_table": rows, "cache_batch_idx": torch.tensor([3, 0, 2], device=device).int()}
    out, lse = flash_attn_with_kvcache(
        torch.stack(q).to(device), *stored, torch.stack(k).to(device), torch.stack(v).to(device),
        cache_seqlens=lengths_on(device), return_softmax_lse=True, **places, **options,
    )  # fmt: skip
    after = stored
    if way == "entries":
        after = [cache[entries] for cache in stored]
        assert all((cache[[1, 4]] == 7.0).all() for cache in stored)
    elif way == "padding":
        after = [cache.clone() for cache in stored]
        for cache, plain in zip(after, caches):
            for b, padding in enumerate(first):
                cache[b, :padding] = plain[b, :padding].to(device)
    else:
        after = [unpaged(cache, table) for cache in stored]
    check(
        (out.flatten(0, 1), lse.transpose(0, 1).flatten(1), *after), given, meaning, first=first
    )  # fmt: skip


@places
@pytest.mark.parametrize("new", [0, 1])
def test_one_query_in_chunks_needs_no_copy(new, device, dtype, monkeypatch):
    """Decoding: the first key of the last query's chunk is a left padding."""
    monkeypatch.setattr(cache_module, "_appended_and_gathered", None)
    given = inputs(dtype, [1] * 3, [new] * 3)
    q, k, v, caches = given
    stored = [cache.to(device) for cache in caches]
    rows = (torch.stack(k).to(device), torch.stack(v).to(device)) if new else ()
    out, lse = flash_attn_with_kvcache(
        torch.stack(q).to(device), *stored, *rows, cache_seqlens=lengths_on(device), causal=True, attention_chunk=4,
        cache_leftpad=lengths_on(device, [1, 0, 3]), return_softmax_lse=True,
    )  # fmt: skip
    results = out.flatten(0, 1), lse.transpose(0, 1).flatten(1), *stored
    check(results, given, Meaning(causal=True, chunk=4), first=(1, 0, 3))


@devices
@pytest.mark.parametrize("ragged", [False, True])
@pytest.mark.parametrize("page_size", [None, 4])
def test_latent_rows_need_no_copy(page_size, ragged, device, monkeypatch):
    """Caches that are columns of the same rows, values first, as engines keep them."""
    rows = normal(3, CAPACITY, 1, 40, seed=3).float()
    q, qv = (normal(6, 4, width, seed=width).float().to(device) for width in (16, 24))
    stored, table = paged(rows, page_size, device) if page_size else (rows.to(device), None)
    values, keys = stored.split((24, 16), dim=-1)
    arguments = {"cache_seqlens": lengths_on(device), "page_table": table, "causal": True, "return_softmax_lse": True}
    if ragged:
        arguments |= {"cu_seqlens_q": cumulative([1, 3, 2], device), "max_seqlen_q": 3}
    else:
        q, qv = q.unflatten(0, (3, 2)), qv.unflatten(0, (3, 2))
    expected = flash_attn_with_kvcache(q, keys.clone(), values.clone(), qv=qv, **arguments)
    in_chunks = (
        flash_attn_with_kvcache(q, *caches, qv=qv, attention_chunk=5, **arguments)[0]
        for caches in ((keys, values), (keys.clone(), values.clone()))
    )
    assert_same(*in_chunks)
    monkeypatch.setattr(cache_module, "_appended_and_gathered", None)
    for found, wanted in zip(flash_attn_with_kvcache(q, keys, values, qv=qv, **arguments), expected):
        assert_same(found, wanted)


@devices
@pytest.mark.parametrize("page_size", [None, 4])
def test_8_bits_need_no_copy(page_size, device, monkeypatch):
    """Factors of heads, expanded, with pages; factors of sequences without."""
    q, *caches = (
        normal(3, rows, heads, 16, seed=rows).float() for rows, heads in ((1, 4), (CAPACITY, 2), (CAPACITY, 2))
    )
    one, keys, values = (x.to(torch.float8_e4m3fn).to(device) for x in (q, *caches))
    factors = [0.5 + normal(3, 2, seed=seed).abs().float().to(device) for seed in range(3)]
    places = {}
    stored = keys, values
    if page_size:
        factors = [factor[0].expand(3, 2) for factor in factors]
        (whole, table), (other, _) = (paged(cache.cpu().float(), page_size, device) for cache in stored)
        stored, places = [x.to(torch.float8_e4m3fn) for x in (whole, other)], {"page_table": table}
    monkeypatch.setattr(cache_module, "_appended_and_gathered", None)
    out = flash_attn_with_kvcache(
        one, *stored, cache_seqlens=lengths_on(device), causal=True, **places,
        **{f"{name}_descale": factor for name, factor in zip("qkv", factors)},
    )  # fmt: skip
    for b, length in enumerate(LENGTHS):
        rows = (cache[b : b + 1, :length] for cache in (keys, values))
        check_8_bits(out[b, None], one[b, None], *rows, [factor[b : b + 1] for factor in factors], Meaning(causal=True))


@devices
@each_case("ragged", [False, True])
@each_case("new", [None, torch.float32, torch.bfloat16])
def test_8_bits(new, ragged, device):
    """A cache in 8 bits is a packed call of 8-bit keys; new rows are rotated and rounded again."""
    counts = (QUERIES, NEW) if ragged else ([2] * 3, [2] * 3)
    q, k, v, caches = inputs(torch.float32, *counts)
    q, k, v = ([part.to(torch.float8_e4m3fn) for part in parts] for parts in (q, k, v))
    stored = [cache.to(device, torch.float8_e4m3fn) for cache in caches]
    factors = [0.5 + normal(3, 2, seed=seed).abs().float() for seed in range(3)]
    join = (lambda parts: _bytes(torch.cat, parts)) if ragged else (lambda parts: _bytes(torch.stack, parts))
    places = {"cu_seqlens_q": cumulative(QUERIES, device), "max_seqlen_q": 5} if ragged else {}
    rows, appended = (), [0] * 3
    if new:
        rows, appended = (join(k).to(device), join(v).to(device)), counts[1]
        places["rotary_cos"], places["rotary_sin"] = (table.to(device) for table in tables(new))
        if ragged:
            places["cu_seqlens_k_new"] = cumulative(NEW, device)
    out = flash_attn_with_kvcache(
        join(q).to(device), *stored, *rows, cache_seqlens=lengths_on(device), causal=True, **places,
        **{f"{name}_descale": factor.to(device) for name, factor in zip("qkv", factors)},
    )  # fmt: skip
    assert out.dtype is torch.bfloat16
    out = out if ragged else out.flatten(0, 1)
    first = 0
    for b, (length, count, more) in enumerate(zip(LENGTHS, counts[0], appended)):
        one = q[b][None].to(device)
        keys, values = (cache[b : b + 1, : length + more] for cache in stored)
        if new:
            one, row = (turned_8_bits(x[b][None].to(device), length, new) for x in (q, k))
            assert torch.equal(keys[:, length:].float(), row.float())
        of_this = [factor[b : b + 1] for factor in factors]
        check_8_bits(out[None, first : first + count], one, keys, values, of_this, Meaning(causal=True))
        first += count


def turned_8_bits(x, position, dtype):
    cos, sin = (table.to(x.device, torch.float32) for table in tables(dtype))
    return flashtile.apply_rotary(x.float(), cos, sin, True, seqlen_offsets=position).to(torch.float8_e4m3fn)


def _bytes(join, parts):
    return join([part.view(torch.uint8) for part in parts]).view(torch.float8_e4m3fn)


@devices
def test_what_is_not_there_is_not_written(device):
    """Rows of no sequence, and on a GPU rows past the last page, leave the caches as they are."""
    q, k, v, caches = inputs(torch.float32)
    stored = [cache.to(device) for cache in caches]
    ends = cumulative([2, 0, 1], device)
    flash_attn_with_kvcache(
        torch.cat(q).to(device), *stored, torch.cat(k).to(device), torch.cat(v).to(device),
        cache_seqlens=lengths_on(device), cu_seqlens_q=cumulative(QUERIES, device), cu_seqlens_k_new=ends,
        max_seqlen_q=5,
    )  # fmt: skip
    expected = caches[0].clone()
    expected[0, 5:7], expected[2, 17] = torch.cat(k)[:2], torch.cat(k)[2]
    assert torch.equal(stored[0].cpu(), expected)
    before = [cache.clone() for cache in stored]
    nothing = torch.zeros(4, dtype=torch.int32, device=device)
    arguments = {"cu_seqlens_q": cumulative(QUERIES, device), "max_seqlen_q": 5}
    rows = torch.cat(q).to(device), *stored, torch.cat(k).to(device), torch.cat(v).to(device)
    flash_attn_with_kvcache(*rows, cache_seqlens=lengths_on(device), cu_seqlens_k_new=nothing, **arguments)
    assert all(torch.equal(*pair) for pair in zip(before, stored))
    full = lengths_on(device, [CAPACITY] * 3)
    if device == "cuda":
        flash_attn_with_kvcache(*rows, cache_seqlens=full, cu_seqlens_k_new=cumulative(NEW, device), **arguments)
        assert all(torch.equal(*pair) for pair in zip(before, stored))


X = torch.randn(3, 2, 2, 8)
CACHE = torch.randn(3, 16, 2, 8)
ENDS = cumulative([2, 2, 2])


@each_case("arguments, message", [
        ({"cache_seqlens": lengths_on("cpu", [3, 4, 15])}, "cache_seqlens: expected from 0 to 16"),
        ({"cache_seqlens": lengths_on("cpu", [3, -4, 1])}, "cache_seqlens: expected from 0 to 16"),
        ({"cache_seqlens": lengths_on("cpu", [3, 4])}, r"cache_seqlens: expected integers \[batch, ...\]"),
        ({"cache_seqlens": None}, "cache_seqlens: expected an int or a tensor"),
        ({"rotary_seqlens": torch.randn(3)}, "rotary_seqlens: expected integers"),
        ({"cu_seqlens_k_new": cumulative([2, 4])}, r"cu_seqlens_k_new: expected integers \[batch \+ 1\]"),
        ({"cache_batch_idx": lengths_on("cpu", [0, 1, 3])}, "cache_batch_idx: expected numbers from 0 to 2"),
        ({"page_table": torch.tensor([[0], [1], [3]])}, "page_table: expected numbers from 0 to 2"),
        (
            {"page_table": torch.tensor([[0], [1], [2]]), "cache_batch_idx": lengths_on("cpu", [0, 1, 3])},
            "cache_batch_idx: expected rows of page_table, from 0 to 2",
        ),
        ({"v": None}, "k, v: expected both or neither"),
        ({"k": X.flatten(0, 1)[:, :1]}, "k: expected heads and columns of k_cache"),
        ({"v_cache": CACHE[:, :8]}, "k_cache, v_cache: expected"),
        ({"k": X.flatten(0, 1).double()}, "k: expected the dtype and device of q"),
        ({"k": None, "v": None, "rotary_cos": X, "rotary_sin": X}, "rotary_cos: expected None"),
    ])  # fmt: skip
def test_what_is_refused_before_anything_is_written(arguments, message):
    rows = {"k": X.flatten(0, 1), "v": X.flatten(0, 1), "cache_seqlens": 4, "cu_seqlens_k_new": ENDS}
    caches = {"k_cache": CACHE.clone(), "v_cache": CACHE.clone()}
    if arguments.get("k", X) is None:
        rows["cu_seqlens_k_new"] = None
    with pytest.raises(ValueError, match=message):
        flash_attn_with_kvcache(
            X.flatten(0, 1), cu_seqlens_q=ENDS, max_seqlen_q=2, **{**rows, **caches, **arguments}
        )  # fmt: skip
    assert torch.equal(caches["k_cache"], CACHE) and torch.equal(caches["v_cache"], CACHE)


def test_no_sequences():
    none = torch.zeros(0, dtype=torch.int32)
    out, lse = flash_attn_with_kvcache(
        X[:0].flatten(0, 1), CACHE[:0].clone(), CACHE[:0].clone(), cache_seqlens=none, cu_seqlens_q=cumulative([]),
        max_seqlen_q=0, attention_chunk=4, return_softmax_lse=True,
    )  # fmt: skip
    assert out.shape == (0, 2, 8) and lse.shape == (2, 0)
