"""FlashAttention-3's call with a cache, of B sequences and N new rows of all of them.

`flashtile.attention_with_kv_cache` computes it where it has the arguments: with qv where the rows of both caches are
those of one latent cache, with 8-bit caches where their factors are those of heads or of entries, both without new
rows. Otherwise, and with chunks and several queries of a sequence, the new rows are written to the cache, the keys of
all sequences are gathered into a packed copy, and attention runs over that. Nothing waits for a GPU.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

import flashtile
from flashtile.compat import calls
from flashtile.compat.attend import attend, chunk_begins
from flashtile.compat.calls import Call, Packed, as_dense, equal_lengths, longest, window
from flashtile.compat.rows import check_page_numbers, gathered_keys, locate_rows

#: Columns of a row of latent attention at most.
_WIDEST_LATENT_ROW = 576


class Cache(NamedTuple):
    """The caches of a call, what is appended to them, and where: arguments of `flash_attn_with_kvcache`, by name."""

    k_cache: Tensor
    v_cache: Tensor
    k: Tensor | None
    v: Tensor | None
    rotary_cos: Tensor | None
    rotary_sin: Tensor | None
    rotary_interleaved: bool
    cache_seqlens: int | Tensor | None
    rotary_seqlens: Tensor | None
    cache_batch_idx: Tensor | None
    cache_leftpad: Tensor | None
    page_table: Tensor | None
    cu_seqlens_k_new: Tensor | None

    @property
    def capacity(self) -> int:
        """Rows that a sequence can have."""
        pages = 1 if self.page_table is None else self.page_table.shape[1]
        return pages * self.k_cache.shape[1]


@torch.no_grad()
def attend_with_cache(
    q: Tensor, cache: Cache, call: Call, *, cu_seqlens_q: Tensor | None, max_seqlen_q: int | None, chunk: int,
    qv: Tensor | None, num_splits: int,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """out and lse of one step: q `[B, seq_q, heads, head_dim]`, with cu_seqlens_q packed. Not recorded by autograd."""
    batch = q.shape[0] if cu_seqlens_q is None else cu_seqlens_q.shape[0] - 1
    cache = _with_selected_pages(cache, batch)
    dense, dtype = cu_seqlens_q is None, q.dtype
    chunks = chunk != 0 and not (dense and q.shape[1] == 1)
    if cache.k is None and not chunks:
        if dtype is torch.float8_e4m3fn:
            q, call = _widened(q, batch, cache, call)
        elif qv is not None:
            q, qv, cache = _over_latent_rows(q, qv, cache)
    copied = chunks or qv is not None or q.dtype is torch.float8_e4m3fn
    ragged = not dense or cache.cu_seqlens_k_new is not None or cache.rotary_seqlens is not None
    if not (copied or ragged):
        left_padding = cache.cache_leftpad
        if chunk:
            new = 0 if cache.k is None else cache.k.shape[1]
            left_padding = chunk_begins(_lengths_before(cache, batch, q.device) + new, left_padding, chunk)
        return _without_copies(q, cache._replace(cache_leftpad=left_padding), call, num_splits)
    rows = q.shape[1]
    if cu_seqlens_q is None:
        cu_seqlens_q, max_seqlen_q = equal_lengths(q), rows
        q, qv = q.flatten(0, 1), None if qv is None else qv.flatten(0, 1)
    if cache.k is not None and cache.v is not None and cache.cu_seqlens_k_new is None:
        ends = equal_lengths(cache.k)
        cache = cache._replace(k=cache.k.flatten(0, 1), v=cache.v.flatten(0, 1), cu_seqlens_k_new=ends)
    before, after = _checked(q, dtype, batch, cache)
    if cache.k is not None and cache.rotary_cos is not None and (copied or cache.rotary_seqlens is not None):
        banded = bool(call.causal) or chunk > 0 or window(call.window_size) != (None, None)
        positions = before if cache.rotary_seqlens is None else cache.rotary_seqlens
        q = _turned(q, cu_seqlens_q, positions, banded, cache)
        rotated = _turned(cache.k, cache.cu_seqlens_k_new, positions, True, cache)
        cache = cache._replace(k=rotated, rotary_cos=None, rotary_sin=None)
    if copied:
        k, v, ends_k = _appended_and_gathered(cache, cu_seqlens_q, before, after)
        layout = Packed(cu_seqlens_q, ends_k.to(cu_seqlens_q.dtype), max_seqlen_q, cache.capacity)
        out, lse = attend(q, k, v, layout, call, chunk=chunk, qv=qv)
    else:
        places = {"cu_seqlens_new": cache.cu_seqlens_k_new, "max_seqlen_q": longest(max_seqlen_q)}
        out, lse = _without_copies(q, cache, call, num_splits, cu_seqlens_q=cu_seqlens_q, **places)
    return as_dense(out, lse, batch, rows) if dense else (out, lse)


def _without_copies(q: Tensor, cache: Cache, call: Call, num_splits: int, **ragged: Any) -> Any:
    return calls.with_cache(
        q, *cache[:4], call, True, cache_lengths=cache.cache_seqlens, cache_batch_indices=cache.cache_batch_idx,
        cache_left_padding=cache.cache_leftpad, block_table=cache.page_table, rotary_cos=cache.rotary_cos,
        rotary_sin=cache.rotary_sin, rotary_interleaved=cache.rotary_interleaved, num_splits=num_splits or None,
        **ragged,
    )  # fmt: skip


def _widened(q: Tensor, batch: int, cache: Cache, call: Call) -> tuple[Tensor, Call]:
    """8-bit queries in 16 bits, which changes none of their numbers, and factors as 8-bit caches have them; unchanged
    where those belong to the sequences of pages or of chosen entries."""
    heads, factors = cache.k_cache.shape[2], []
    by_entry = cache.page_table is None and cache.cache_batch_idx is None
    for factor in call.descales:
        if factor is not None and factor.shape == (batch, heads) and (batch == 1 or factor.stride(0) == 0):
            factor = factor[0]
        elif factor is not None and (factor.shape != (batch, heads) or not by_entry):
            return q, call
        factors.append(factor)
    of_q, of_k, of_v = factors
    if of_q is not None:  # scores are products of both
        of_k = of_q if of_k is None else of_q * of_k
    return q.to(torch.bfloat16), call._replace(descales=(None, of_k, of_v))


def _over_latent_rows(q: Tensor, qv: Tensor, cache: Cache) -> tuple[Tensor, Tensor | None, Cache]:
    """Queries of both products, and latent rows `[values | keys]`, where the caches are neighbouring columns of such
    rows; otherwise all unchanged."""
    keys, values = cache.k_cache, cache.v_cache
    columns, width = values.shape[-1], values.shape[-1] + keys.shape[-1]
    neighbours = (
        keys.dim() == values.dim() == 4 and keys.dtype is values.dtype and keys.stride() == values.stride()
        and keys.shape[:-1] == values.shape[:-1] and keys.shape[2] == 1 and keys.stride(-1) == 1
        and keys.untyped_storage().data_ptr() == values.untyped_storage().data_ptr()
        and keys.storage_offset() == values.storage_offset() + columns
        and width <= _WIDEST_LATENT_ROW and qv.shape == (*q.shape[:-1], columns) and qv.dtype is q.dtype
    )  # fmt: skip
    if not neighbours:
        return q, qv, cache
    rows = values.as_strided((*values.shape[:-1], width), values.stride())
    return torch.cat((qv, q), -1), None, cache._replace(k_cache=rows, v_cache=rows[..., :columns])


def _pages(cache: Cache, batch: int) -> Tensor:
    """`[B, pages of a sequence]`, where an entry of the cache is a page if there are no others."""
    if cache.page_table is not None:
        return cache.page_table
    entries = cache.cache_batch_idx
    return (torch.arange(batch, device=cache.k_cache.device) if entries is None else entries)[:, None]


def _appended_and_gathered(
    cache: Cache, cu_seqlens: Tensor, before: Tensor, after: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Writes packed new rows behind the `before[b]` rows of each sequence, and returns its keys and values one sequence
    after another, with their cu_seqlens. Rows of no sequence, and past the last page of one, are not written."""
    table, page_size = _pages(cache, before.shape[0]), cache.k_cache.shape[1]
    if cache.k is not None and cache.v is not None and cache.k.shape[0] and table.numel():
        assert cache.cu_seqlens_k_new is not None
        sequence, within, there = locate_rows(cache.cu_seqlens_k_new, cache.k.shape[0])
        position = before[sequence] + within
        there = there & (position < table.shape[1] * page_size)
        page = table[sequence, (position // page_size).clamp(max=table.shape[1] - 1)].long()
        # The others write once more what one of these writes; where there is none of these, what is in the cache.
        source = torch.where(there, torch.arange(cache.k.shape[0], device=page.device), there.int().argmax())
        page, row, any_there = page[source], (position % page_size)[source], there.any()
        page = page.clamp(min=0, max=cache.k_cache.shape[0] - 1)
        for stored, rows in ((cache.k_cache, cache.k), (cache.v_cache, cache.v)):
            stored, rows = (x.view(torch.uint8) if x.dtype is torch.float8_e4m3fn else x for x in (stored, rows))
            stored[page, row] = torch.where(any_there, rows[source], stored[page, row])
    lengths = after.clamp(max=cache.capacity)
    return gathered_keys(
        cache.k_cache, cache.v_cache, cu_seqlens, cache.capacity, block_table=table, lengths=lengths,
        left_padding=cache.cache_leftpad,
    )  # fmt: skip


def _turned(x: Tensor, cu_seqlens: Tensor | None, positions: Tensor, one_by_one: bool, cache: Cache) -> Tensor:
    """Packed rows `[N, heads, head_dim]`, rotated by positions that begin at `positions[b]`, `[B]`: rows of a sequence
    have one position after another with one_by_one, else all the first."""
    cos, sin = cache.rotary_cos, cache.rotary_sin
    assert cos is not None and sin is not None and cu_seqlens is not None
    if not positions.shape[0]:
        return x
    sequence, within, there = locate_rows(cu_seqlens, x.shape[0])
    rows = (positions[sequence] + within * one_by_one) * there
    if x.dtype is not torch.float8_e4m3fn:
        return flashtile.apply_rotary(x, cos, sin, cache.rotary_interleaved, position_ids=rows)
    # Tables are in the dtype that the rows had before they were rounded.
    turned = flashtile.apply_rotary(x.float(), cos.float(), sin.float(), cache.rotary_interleaved, position_ids=rows)
    limit = torch.finfo(x.dtype).max
    return turned.clamp(-limit, limit).to(x.dtype)  # what lies past it would be NaN


def _with_selected_pages(cache: Cache, batch: int) -> Cache:
    """The same with the row of each sequence in its place of the page table, where cache_batch_idx selects rows."""
    table, entries = cache.page_table, cache.cache_batch_idx
    if table is None or entries is None:
        return cache
    if entries.shape != (batch,) or entries.is_floating_point() or entries.device != table.device:
        raise ValueError(
            f"cache_batch_idx: expected integers [batch] with the batch of q, {batch}, on {table.device}, got "
            f"{entries.dtype} {list(entries.shape)} on {entries.device}"
        )
    entries, rows = entries.long(), table.shape[0]
    if table.device.type == "cpu" and batch and not 0 <= int(entries.min()) <= int(entries.max()) < rows:
        raise ValueError(
            f"cache_batch_idx: expected rows of page_table, from 0 to {rows - 1}, got {int(entries.min())} to "
            f"{int(entries.max())}"
        )
    return cache._replace(page_table=table.index_select(0, entries), cache_batch_idx=None)


def _lengths_before(cache: Cache, batch: int, device: torch.device) -> Tensor:
    """Rows of each sequence before anything is appended, `[B]` int64."""
    if isinstance(cache.cache_seqlens, Tensor):
        return cache.cache_seqlens.long()
    return torch.full((batch,), cache.capacity if cache.cache_seqlens is None else cache.cache_seqlens, device=device)


def _checked(q: Tensor, dtype: torch.dtype, batch: int, cache: Cache) -> tuple[Tensor, Tensor]:
    """Rows of each sequence before and after new ones are appended, `[B]`, once all fits; k and v are packed. Lengths
    and pages are read on a CPU only. `dtype`: that of q as it was given."""
    for name, tensor in zip(("k_cache", "v_cache", "k", "v"), cache[:4]):
        if tensor is not None and (tensor.dtype is not dtype or tensor.device != q.device):
            raise ValueError(
                f"{name}: expected the dtype and device of q, {dtype} on {q.device}, got {tensor.dtype} on "
                f"{tensor.device}; cast or move one of them"
            )
    if cache.k_cache.dim() != 4 or cache.v_cache.shape[:-1] != cache.k_cache.shape[:-1]:
        raise ValueError(
            "k_cache, v_cache: expected [batch or pages, rows, heads_kv, head_dim], alike but for head_dim, got "
            f"{list(cache.k_cache.shape)} and {list(cache.v_cache.shape)}"
        )
    if (cache.k is None) is not (cache.v is None):
        raise ValueError("k, v: expected both or neither, got one; append keys and values together")
    for name, rows, of in (("k", cache.k, cache.k_cache), ("v", cache.v, cache.v_cache)):
        if rows is not None and (rows.dim() != 3 or rows.shape[1:] != of.shape[2:]):
            raise ValueError(
                f"{name}: expected heads and columns of {name}_cache, {list(of.shape[2:])}, got {list(rows.shape[1:])}"
            )
    if cache.k is not None and cache.cache_seqlens is None:
        raise ValueError("cache_seqlens: expected an int or a tensor beside k and v, got None, which is a full cache")
    if cache.k is None and cache.rotary_cos is not None:
        raise ValueError("rotary_cos: expected None without new k and v, got a table; rotate q before the call")
    for name in Cache._fields[7:]:
        given, more = getattr(cache, name), name == "cu_seqlens_k_new"
        if isinstance(given, Tensor) and (given.shape[:1] != (batch + more,) or given.is_floating_point()):
            raise ValueError(
                f"{name}: expected integers {'[batch + 1]' if more else '[batch, ...]'} with the batch of q, {batch}, "
                f"got {given.dtype} {list(given.shape)}"
            )
    before, ends = _lengths_before(cache, batch, q.device), cache.cu_seqlens_k_new
    after = before if ends is None else before + ends.diff().long()
    if q.device.type != "cpu" or not batch:
        return before, after
    if int(before.min()) < 0 or int(after.max()) > cache.capacity:
        raise ValueError(
            f"cache_seqlens: expected from 0 to {cache.capacity} rows with the new ones, got {int(before.min())} to "
            f"{int(after.max())}; make the cache or the page table longer"
        )
    name = "cache_batch_idx" if cache.page_table is None else "page_table"
    check_page_numbers(cache.k_cache.shape[0], cache.k_cache.shape[1], _pages(cache, batch), after, name)
    return before, after
