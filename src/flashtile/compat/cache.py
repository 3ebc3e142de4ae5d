"""FlashAttention-3's call with a cache.

`flashtile.attention_with_kv_cache` computes it where it has the arguments. Otherwise the new rows are written to the
cache, the keys of all sequences are gathered into a packed copy, and attention runs over that. Nothing waits for a GPU.

    B sequences
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from flashtile.compat import calls
from flashtile.compat.arguments import window
from flashtile.compat.attend import attend
from flashtile.compat.calls import Call, Packed, as_dense, equal_lengths
from flashtile.compat.chunks import chunk_begins
from flashtile.compat.rows import append, check_page_numbers, gathered_keys, rotated

#: Rows of a page that flashtile's kernels read are a multiple of it.
_PAGE_MULTIPLE = 16


class Cache(NamedTuple):
    """The caches of a call, what is appended to them, and where.

    Attributes:
        k_cache, v_cache: `[entries, capacity, heads_kv, ...]`, or pages of a size.
        k, v: new rows `[B, seq_new, heads_kv, ...]`, packed `[total_new, heads_kv, ...]`, or None.
        rotary_cos, rotary_sin: tables by which q and k are rotated, or None.
        interleaved: which elements are a pair there.
        lengths: rows before anything is appended: of all sequences, or `[B]`; None for all of the cache.
        rotary_lengths: `[B]`, position of the first new row of each sequence; None for `lengths`.
        entries: `[B]`, the entry of each sequence, or with page_table its row there; None for its own number.
        left_padding: `[B]`, rows at the beginning of each sequence that do not count, or None.
        page_table: `[B, pages of a sequence]`, with entries `[rows, pages of a sequence]`, or None.
        cu_seqlens_new: `[B + 1]`, where k and v are packed, or None.
    """

    k_cache: Tensor
    v_cache: Tensor
    k: Tensor | None
    v: Tensor | None
    rotary_cos: Tensor | None
    rotary_sin: Tensor | None
    interleaved: bool
    lengths: int | Tensor | None
    rotary_lengths: Tensor | None
    entries: Tensor | None
    left_padding: Tensor | None
    page_table: Tensor | None
    cu_seqlens_new: Tensor | None

    @property
    def capacity(self) -> int:
        """Rows that a sequence can have."""
        pages = 1 if self.page_table is None else self.page_table.shape[1]
        return pages * self.k_cache.shape[1]


@torch.no_grad()
def attend_with_cache(
    q: Tensor,
    cache: Cache,
    call: Call,
    *,
    cu_seqlens_q: Tensor | None,
    max_seqlen_q: int | None,
    chunk: int,
    qv: Tensor | None,
    num_splits: int,
) -> tuple[Tensor, Tensor]:
    """out and lse of one step: q `[B, seq_q, heads, head_dim]`, with cu_seqlens_q packed. Not recorded by autograd."""
    batch = q.shape[0] if cu_seqlens_q is None else cu_seqlens_q.shape[0] - 1
    cache = _with_selected_pages(cache, batch)
    paged = cache.page_table is not None and cache.k_cache.shape[1] % _PAGE_MULTIPLE
    ragged = cu_seqlens_q is not None or cache.cu_seqlens_new is not None or cache.rotary_lengths is not None
    eight_bits = q.dtype is torch.float8_e4m3fn
    if not (paged or ragged or eight_bits or qv is not None or (chunk and q.shape[1] != 1)):
        left_padding = cache.left_padding
        if chunk:
            new = 0 if cache.k is None else cache.k.shape[1]
            left_padding = chunk_begins(_lengths_before(cache, batch, q.device) + new, left_padding, chunk)
        return calls.with_cache(
            q, cache.k_cache, cache.v_cache, cache.k, cache.v, call, True, cache_lengths=cache.lengths,
            cache_batch_indices=cache.entries, cache_left_padding=left_padding, block_table=cache.page_table,
            rotary_cos=cache.rotary_cos, rotary_sin=cache.rotary_sin, rotary_interleaved=cache.interleaved,
            num_splits=num_splits or None,
        )  # type: ignore[return-value]  # fmt: skip
    rows = None if cu_seqlens_q is not None else q.shape[1]
    if cu_seqlens_q is None:
        cu_seqlens_q, max_seqlen_q = equal_lengths(q), q.shape[1]
        q, qv = q.flatten(0, 1), None if qv is None else qv.flatten(0, 1)
    out, lse = _attend_to_copies(q, cu_seqlens_q, max_seqlen_q, cache, call, chunk, qv)
    return (out, lse) if rows is None else as_dense(out, lse, batch, rows)


def _attend_to_copies(
    q: Tensor,
    cu_seqlens_q: Tensor,
    max_seqlen_q: int | None,
    cache: Cache,
    call: Call,
    chunk: int,
    qv: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """The same with packed q `[total_q, heads, head_dim]`: out as it is, lse `[heads, total_q]`."""
    batch = cu_seqlens_q.shape[0] - 1
    cu_seqlens_new = cache.cu_seqlens_new
    if cache.k is not None and cache.v is not None and cu_seqlens_new is None:
        cu_seqlens_new = equal_lengths(cache.k)
        cache = cache._replace(k=cache.k.flatten(0, 1), v=cache.v.flatten(0, 1))
    _check(q, batch, cache, cu_seqlens_new)
    before = _lengths_before(cache, batch, q.device)
    new = torch.zeros_like(before) if cu_seqlens_new is None else cu_seqlens_new.diff().long()
    table = cache.page_table
    if table is None:  # an entry of the cache is a page
        table = (torch.arange(batch, device=q.device) if cache.entries is None else cache.entries)[:, None]
    if q.device.type == "cpu":
        _check_values(cache, table, before, before + new)
    if cache.k is not None and cache.v is not None and cu_seqlens_new is not None:
        rows = cache.k
        if cache.rotary_cos is not None and cache.rotary_sin is not None:
            tables = cache.rotary_cos, cache.rotary_sin, cache.interleaved
            positions = before if cache.rotary_lengths is None else cache.rotary_lengths
            banded = bool(call.causal) or chunk > 0 or window(call.window_size) != (None, None)
            rows = rotated(rows, cu_seqlens_new, positions, True, tables)
            q = rotated(q, cu_seqlens_q, positions, banded, tables)
        append((cache.k_cache, cache.v_cache), (rows, cache.v), table, cu_seqlens_new, before)
    lengths = (before + new).clamp(max=cache.capacity)
    k, v, cu_seqlens_k = gathered_keys(
        cache.k_cache, cache.v_cache, cu_seqlens_q, cache.capacity, block_table=table, lengths=lengths,
        left_padding=cache.left_padding,
    )  # fmt: skip
    layout = Packed(cu_seqlens_q, cu_seqlens_k.to(cu_seqlens_q.dtype), max_seqlen_q, cache.capacity)
    return attend(q, k, v, layout, call, chunk=chunk, qv=qv)


def _with_selected_pages(cache: Cache, batch: int) -> Cache:
    """The same with the row of each sequence in its place of the page table, where `entries` selects rows."""
    table, entries = cache.page_table, cache.entries
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
    return cache._replace(page_table=table.index_select(0, entries), entries=None)


def _lengths_before(cache: Cache, batch: int, device: torch.device) -> Tensor:
    """Rows of each sequence before anything is appended, `[B]` int64."""
    if isinstance(cache.lengths, Tensor):
        return cache.lengths.long()
    return torch.full((batch,), cache.capacity if cache.lengths is None else cache.lengths, device=device)


def _check(q: Tensor, batch: int, cache: Cache, cu_seqlens_new: Tensor | None) -> None:
    """What must fit before anything is written; k and v are packed."""
    for name, tensor in (("k_cache", cache.k_cache), ("v_cache", cache.v_cache), ("k", cache.k), ("v", cache.v)):
        if tensor is not None and (tensor.dtype is not q.dtype or tensor.device != q.device):
            raise ValueError(
                f"{name}: expected the dtype and device of q, {q.dtype} on {q.device}, got {tensor.dtype} on "
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
    if cache.k is not None and cache.lengths is None:
        raise ValueError("cache_seqlens: expected an int or a tensor beside k and v, got None, which is a full cache")
    if cache.k is None and cache.rotary_cos is not None:
        raise ValueError("rotary_cos: expected None without new k and v, got a table; rotate q before the call")
    places: dict[str, tuple[object, int]] = {
        "cache_seqlens": (cache.lengths, 0), "rotary_seqlens": (cache.rotary_lengths, 0),
        "cache_batch_idx": (cache.entries, 0), "cache_leftpad": (cache.left_padding, 0),
        "page_table": (cache.page_table, 0), "cu_seqlens_k_new": (cu_seqlens_new, 1),
    }  # fmt: skip
    for name, (given, more) in places.items():
        if isinstance(given, Tensor) and (given.shape[:1] != (batch + more,) or given.is_floating_point()):
            raise ValueError(
                f"{name}: expected integers {'[batch + 1]' if more else '[batch, ...]'} with the batch of q, {batch}, "
                f"got {given.dtype} {list(given.shape)}"
            )


def _check_values(cache: Cache, table: Tensor, before: Tensor, after: Tensor) -> None:
    """Lengths and pages, on a CPU."""
    if not before.numel():
        return
    if int(before.min()) < 0 or int(after.max()) > cache.capacity:
        raise ValueError(
            f"cache_seqlens: expected from 0 to {cache.capacity} rows with the new ones, got {int(before.min())} to "
            f"{int(after.max())}; make the cache or the page table longer"
        )
    name = "cache_batch_idx" if cache.page_table is None else "page_table"
    check_page_numbers(cache.k_cache.shape[0], cache.k_cache.shape[1], table, after, name)
