"""Checks of user input at the public edge: each error names argument, expectation, what came and the remedy."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from flashtile.ops.common import checks as common
from flashtile.ops.common.eight_bits import EIGHT_BITS
from flashtile.ops.common.memory import check_own_numbers, check_writable, share_memory
from flashtile.ops.common.sizes import differ, exceeds
from flashtile.ops.common.split_keys.configs import MAX_SPLITS
from flashtile.ops.kv_cache.spec import (
    MAX_HEAD_DIM,
    MAX_HEAD_DIM_V,
    CacheCall,
    CacheSpec,
    are_columns,
    lengths_before,
    new_counts,
    numbered,
    places,
    query_counts,
)

_REMEDY = "make the cache once for all steps"


def check_caches(q: Tensor, k_cache: Tensor, v_cache: Tensor, paged: bool, packed: bool) -> None:
    """Checks ranks, dtypes, devices, heads and head dimensions of q and both caches."""
    common.check_tensors(q=q, k_cache=k_cache, v_cache=v_cache)
    common.check_float_dtype("q", q.dtype)
    if packed and q.dim() != 3:
        raise ValueError(
            "q: expected 3 dimensions [total_q, heads_q, head_dim] beside cu_seqlens_q, got shape "
            f"{tuple(q.shape)}; leave cu_seqlens_q out where all sequences have as many queries"
        )
    if not packed and q.dim() != 4:
        raise ValueError(
            f"q: expected 4 dimensions [batch, seq_q, heads_q, head_dim], got shape {tuple(q.shape)}; one new token of "
            "each sequence is seq_q = 1, and packed queries go with cu_seqlens_q"
        )
    first, second = ("pages", "page_size") if paged else ("batch", "capacity")
    for name, cache in (("k_cache", k_cache), ("v_cache", v_cache)):
        if cache.dim() != 4:
            raise ValueError(
                f"{name}: expected 4 dimensions [{first}, {second}, heads_kv, head_dim], got shape {tuple(cache.shape)}"
            )
        if cache.dtype not in EIGHT_BITS:
            common.check_like(name, cache, q)
        common.check_device(name, cache, q.device)
        if cache.shape[-1] > 1 and cache.stride(-1) != 1:
            raise ValueError(
                f"{name}: expected a last dimension that is contiguous, got strides {cache.stride()}; keep the cache "
                "as [..., heads_kv, head_dim], a copy at every call would cost more than the attention"
            )
    common.check_dtype("v_cache", v_cache, k_cache.dtype, "k_cache", "use one for both")
    if differ(k_cache.shape[:-1], v_cache.shape[:-1]):
        raise ValueError(
            f"v_cache: expected the {first}, {second}, heads_kv of k_cache, {tuple(k_cache.shape[:-1])}, got "
            f"{tuple(v_cache.shape[:-1])}"
        )
    heads_q, head_dim = q.shape[-2:]
    heads_kv, head_dim_v = v_cache.shape[2:]
    if k_cache.shape[-1] != head_dim:
        raise ValueError(f"k_cache: expected the head_dim of q, {head_dim}, got {k_cache.shape[-1]}")
    for name, found, most in (("q", head_dim, MAX_HEAD_DIM), ("v_cache", head_dim_v, MAX_HEAD_DIM_V)):
        if not 1 <= found <= most:
            raise ValueError(f"{name}: expected head_dim from 1 to {most}, got {found}; split the head into several")
    common.check_heads("k_cache, v_cache", heads_q, heads_kv)


def check_packed(
    q: Tensor, k: Tensor | None, cu_seqlens_q: Tensor, cu_seqlens_new: Tensor | None, max_seqlen_q: int | None
) -> int:
    """Checks where sequences begin in packed q and k; returns the number of sequences."""
    entries = common.check_cu_seqlens("cu_seqlens_q", cu_seqlens_q, q.device)
    if cu_seqlens_new is not None:
        if k is None:
            common.refuse("without new k and v", "pass k and v", cu_seqlens_new=cu_seqlens_new)
        common.check_cu_seqlens("cu_seqlens_new", cu_seqlens_new, q.device, entries, ", as many as for queries")
    common.check_max_seqlen("max_seqlen_q", max_seqlen_q)
    return entries - 1


def check_appended(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, k: Tensor | None, v: Tensor | None, packed: bool, as_q: bool
) -> None:
    """Checks the new keys and values against q and the caches, which they are written to. `as_q`: a packed call has as
    many new rows as queries."""
    if k is None:
        raise ValueError("k: expected a tensor beside v, got None; pass both new keys and new values")
    for name, tensor, cache in (("k", k, k_cache), ("v", v, v_cache)):
        if tensor is None:
            continue
        common.check_tensors(**{name: tensor})
        common.check_like(name, tensor, q)
        heads, head_dim = cache.shape[2:]
        same = () if packed and not as_q else q.shape[:1]
        if tensor.dim() != (3 if packed else 4) or differ(
            (*tensor.shape[: len(same)], *tensor.shape[-2:]), (*same, heads, head_dim)
        ):
            like = "rows of q, which cu_seqlens_new can change," if packed else "batch of q"
            rows = "total_new" if packed else "batch, seq_new"
            sizes = f"{q.shape[0]}" if as_q else rows.replace("batch", f"{q.shape[0]}")
            raise ValueError(
                f"{name}: expected shape [{rows}, heads_kv, head_dim] = [{sizes}, {heads}, {head_dim}], as the "
                f"{f'{like} and the ' if same else ''}heads of {name}_cache, got {tuple(tensor.shape)}"
            )
    for name, cache in (("k_cache", k_cache), ("v_cache", v_cache)):
        check_own_numbers(name, cache, _REMEDY)
    if k is not None and v is not None and differ(k.shape[:-2], v.shape[:-2]):
        raise ValueError(f"v: expected as many new rows as k has, {k.shape[-3]}, got {v.shape[-3]}")


def resolve_factors(
    descales: dict[str, Tensor | None], k_cache: Tensor, appended: bool
) -> tuple[list[Tensor | None], bool]:
    """Factors of an 8-bit cache as `[entries or pages, rows, heads_kv]`, and whether each row has its own. `appended`:
    those of rows are written."""
    outer, rows, heads, _ = k_cache.shape
    kinds = {0: (), 1: (heads,), 2: (outer, heads), 3: (outer, rows, heads)}
    expanded: list[Tensor | None] = []
    for name, descale in descales.items():
        if descale is None:
            expanded.append(None)
            continue
        common.check_tensors(**{name: descale})
        if k_cache.dtype not in EIGHT_BITS:
            remedy = "factors belong to caches of float8_e4m3fn, float8_e5m2 or int8"
            common.refuse(f"beside caches of {k_cache.dtype}", remedy, **{name: descale})
        if descale.dtype is not torch.float32:
            raise TypeError(f"{name}: expected dtype float32, got {descale.dtype}; cast it")
        common.check_device(name, descale, k_cache.device, "k_cache")
        if descale.dim() > 3 or differ(descale.shape, kinds[descale.dim()]):
            raise ValueError(
                f"{name}: expected shape [], [heads_kv], [entries or pages, heads_kv] or [entries or pages, rows, "
                f"heads_kv] with the sizes of k_cache, {(outer, rows, heads)}, got {tuple(descale.shape)}"
            )
        if appended and descale.dim() == 3:
            check_own_numbers(name, descale, _REMEDY)
        expanded.append(
            descale[:, None].expand(outer, rows, heads) if descale.dim() == 2 else descale.expand(outer, rows, heads)
        )
    of_rows = [descale is not None and descale.dim() == 3 for descale in descales.values()]
    if any(of_rows) and not all(of_rows):
        raise ValueError(
            "descale_k, descale_v: expected factors of rows for both caches or for none, got them for one; the call "
            "finds and writes those of new rows"
        )
    return expanded, any(of_rows)


def check_places(
    q: Tensor,
    batch: int,
    k_cache: Tensor,
    cache_batch_indices: Tensor | None,
    cache_left_padding: Tensor | None,
    block_table: Tensor | None,
) -> None:
    """Checks what says where the rows of a sequence lie."""
    if cache_batch_indices is not None:
        if block_table is not None:
            remedy = (
                "the rows of the table say where a sequence lies, so select those: block_table[cache_batch_indices]"
            )
            common.refuse("beside block_table", remedy, cache_batch_indices=cache_batch_indices)
        meaning = "an entry of the cache for each sequence of q"
        common.check_lengths("cache_batch_indices", cache_batch_indices, batch, q.device, meaning)
    if cache_left_padding is not None:
        common.check_lengths(
            "cache_left_padding", cache_left_padding, batch, q.device, "a first row for each sequence of q"
        )
    if block_table is not None:
        common.check_index("block_table", block_table)
        if block_table.dim() != 2 or differ(block_table.shape[:1], (batch,)):
            raise ValueError(
                f"block_table: expected shape [batch, max_pages] with the batch size of q, {batch}, got "
                f"{tuple(block_table.shape)}"
            )
        common.check_device("block_table", block_table, q.device)
        if not k_cache.shape[1]:
            raise ValueError(
                "k_cache: expected pages of at least one row beside block_table, [pages, page_size, heads_kv, "
                f"head_dim], got {tuple(k_cache.shape)}"
            )
    elif cache_batch_indices is None and differ(k_cache.shape[:1], (batch,)):
        raise ValueError(
            f"k_cache: expected the batch size of q, {batch}, got {k_cache.shape[0]}; cache_batch_indices says which "
            "entries of a larger cache belong to q, block_table which pages"
        )


def resolve_tree(
    tree_mask: Tensor, q: Tensor, batch: int, longest: int | None, causal: bool, refused: Mapping[str, object]
) -> Tensor:
    """A tree as `[batch, seq_q, seq_q]`. `longest`: of packed sequences, whose tree is `[total_q, ...]`; else None."""
    common.check_tensors(tree_mask=tree_mask)
    if tree_mask.dtype is not torch.bool:
        raise TypeError(
            f"tree_mask: expected dtype bool, got {tree_mask.dtype}; flashtile.tree_mask makes it from parents"
        )
    common.check_device("tree_mask", tree_mask, q.device)
    if not causal:
        raise ValueError("causal: expected True beside tree_mask, which stands for the causal mask, got False")
    common.refuse("beside tree_mask", "rows of a tree do not lie at the positions of their tokens", **refused)
    if longest is not None:
        if tree_mask.dim() != 2 or differ(tree_mask.shape[:1], q.shape[:1]) or exceeds(longest, tree_mask.shape[1]):
            raise ValueError(
                f"tree_mask: expected shape [total_q, at least max_seqlen_q] = [{q.shape[0]}, {longest} or more], got "
                f"{tuple(tree_mask.shape)}; pass max_seqlen_q"
            )
        return tree_mask
    seq_q = q.shape[1]
    if tree_mask.dim() not in (2, 3) or differ(tree_mask.shape, (batch, seq_q, seq_q)[-tree_mask.dim() :]):
        raise ValueError(
            f"tree_mask: expected shape [seq_q, seq_q] = [{seq_q}, {seq_q}], or one for each of the {batch} sequences, "
            f"got {tuple(tree_mask.shape)}"
        )
    return tree_mask.expand(batch, seq_q, seq_q)


def resolve_lengths(
    cache_lengths: int | Tensor | None, q: Tensor, batch: int, capacity: int, seq_new: int | None
) -> tuple[int, Tensor | None]:
    """The length of all sequences as a number, or one for each as a tensor. `seq_new`: rows to append, 0 where the
    host does not know how many; None = none."""
    if cache_lengths is None:
        if seq_new is not None:
            raise ValueError(
                "cache_lengths: expected an int or a tensor beside k and v, got None, which is a full cache; say how "
                "many rows are in it already"
            )
        return capacity, None
    if isinstance(cache_lengths, Tensor):
        common.check_lengths("cache_lengths", cache_lengths, batch, q.device, "a length for each sequence of q")
        if seq_new is not None and seq_new > capacity:
            _raise_too_long(seq_new, 0, capacity)
        return 0, cache_lengths
    if not common.is_integer(cache_lengths):
        raise TypeError(f"cache_lengths: expected an int or an int32 or int64 tensor, got {cache_lengths!r}")
    if cache_lengths < 0:
        raise ValueError(f"cache_lengths: expected at least 0, got {cache_lengths}; it is the number of rows in use")
    if cache_lengths + (seq_new or 0) > capacity:
        _raise_too_long(seq_new or 0, cache_lengths, capacity)
    return cache_lengths, None


def _raise_too_long(seq_new: int, length: int, capacity: int) -> None:
    room = f"room for {seq_new} new rows behind {length}" if seq_new else f"room for {length} rows"
    raise ValueError(
        f"cache_lengths: expected {room}, got a cache of {capacity} rows for a sequence; make the cache or the block "
        "table longer"
    )


def check_rotary(q: Tensor, cos: Tensor | None, sin: Tensor | None, k: Tensor | None, positions: int | None) -> None:
    """Checks the tables of the rotation. `positions`: how many are needed, where the host knows it."""
    if (cos is None) is not (sin is None):
        given, missing = ("rotary_cos", "rotary_sin") if sin is None else ("rotary_sin", "rotary_cos")
        raise ValueError(f"{missing}: expected a table beside {given}, got None; flashtile.rotary_tables makes both")
    if cos is None or sin is None:
        return
    if k is None:
        common.refuse("without new k and v", "rotate q with flashtile.apply_rotary", rotary_cos=cos)
    common.check_tables("rotary_cos", cos, "rotary_sin", sin, "q", q)
    if positions is not None:
        _check_table_length(cos, positions)


def _check_table_length(cos: Tensor, positions: int) -> None:
    if positions > cos.shape[0]:
        raise ValueError(
            f"rotary_cos: expected at least {positions} positions, the farthest that a row has, got {cos.shape[0]}; "
            "make the table longer"
        )


def resolve_splits(num_splits: int | None) -> int:
    """The number of splits, 0 where it is to be chosen."""
    if num_splits is None:
        return 0
    if isinstance(num_splits, bool) or not isinstance(num_splits, int):
        raise TypeError(f"num_splits: expected an int or None, got {num_splits!r}; None chooses it from the sizes")
    if not 1 <= num_splits <= MAX_SPLITS:
        raise ValueError(
            f"num_splits: expected from 1 to {MAX_SPLITS}, got {num_splits}; None chooses it from the sizes"
        )
    return num_splits


def check_destinations(call: CacheCall, spec: CacheSpec) -> None:
    """Checks that what is written to the caches has a place of its own, for each of their rows and for both of them."""
    k_cache, v_cache = call.k_cache, call.v_cache
    if call.v is None:
        if not are_columns(k_cache, v_cache):
            raise ValueError(
                "v: expected a tensor beside k, got None; pass both new keys and new values, or as v_cache a view of "
                "the first columns of k_cache, k_cache[..., :head_dim_v]"
            )
        check_writable("k_cache", k_cache, _REMEDY)
    written = {} if call.v is None else {"k_cache, v_cache": (k_cache, v_cache)}
    if spec.factors_of_rows and call.descale_k is not None and call.descale_v is not None:
        if call.v is not None:
            written["descale_k, descale_v"] = call.descale_k, call.descale_v
        elif not are_columns(call.descale_k, call.descale_v):
            raise ValueError(
                "descale_v: expected descale_k itself beside v=None, got another tensor; the factors of keys that the "
                "call finds are those of the values too"
            )
    for names, tensors in written.items():
        for name, tensor in zip(names.split(", "), tensors):
            check_writable(name, tensor, _REMEDY)
        if share_memory(*tensors):
            raise ValueError(
                f"{names}: expected memory of its own for each of them, because both are written, got tensors that "
                "share memory; make two, or write the new rows yourself and pass k=None, v=None"
            )


def check_values(call: CacheCall, spec: CacheSpec) -> None:
    """Checks lengths, indices and pages: always on a CPU, on a GPU with FLASHTILE_CHECK_VALUES=1."""
    if not common.readable(call.q) or not call.batch:
        return
    if call.cu_seqlens_q is not None:
        common.check_cu_seqlens_values("cu_seqlens_q", call.cu_seqlens_q, call.q.shape[0], spec.max_seqlen_q)
    if call.cu_seqlens_new is not None and call.k is not None:
        common.check_cu_seqlens_values("cu_seqlens_new", call.cu_seqlens_new, call.k.shape[0])
    before = [spec.length] * call.batch if call.cache_lengths is None else call.cache_lengths.tolist()
    new = new_counts(call)
    if min(before) < 0:
        raise ValueError(f"cache_lengths: expected lengths of at least 0, got {min(before)}")
    total, length = max((length + rows, length) for length, rows in zip(before, new))
    if total > call.capacity:
        _raise_too_long(total - length, length, call.capacity)
    if call.rotary_cos is not None:
        rotated = (
            max(rows, queries if spec.banded else min(1, queries)) for rows, queries in zip(new, query_counts(call))
        )
        ends = (length + rows if rows else 0 for length, rows in zip(before, rotated))
        _check_table_length(call.rotary_cos, max(ends))
    if call.cache_left_padding is not None and int(call.cache_left_padding.min()) < 0:
        raise ValueError(
            f"cache_left_padding: expected first rows of at least 0, got {int(call.cache_left_padding.min())}"
        )
    if call.cache_batch_indices is not None:
        _check_range("cache_batch_indices", "entries", call.cache_batch_indices, call.k_cache.shape[0])
    for name, descale in (("descale_k", call.descale_k), ("descale_v", call.descale_v)):
        # Those of pages and rows that nobody uses may be anything.
        if descale is not None and descale.stride(0) == 0 and not ((descale > 0) & descale.isfinite()).all():
            raise ValueError(
                f"{name}: expected positive finite factors, got {descale.min().item()} to {descale.max().item()}; "
                "signs belong into the cache"
            )
    if call.block_table is not None and total:
        used = torch.arange(call.block_table.shape[1], device=call.q.device) * call.k_cache.shape[1]
        totals = lengths_before(call, spec) + torch.tensor(new, device=call.q.device)
        pages = call.block_table[used < totals[:, None]]
        if pages.numel():
            _check_range("block_table", "pages", pages, call.k_cache.shape[0])
    if call.k is not None and call.batch > 1:
        _check_new_rows_apart(call, spec, new)


def _check_new_rows_apart(call: CacheCall, spec: CacheSpec, new: list[int]) -> None:
    """Sequences may share entries and pages, but not the places that they append to."""
    if call.block_table is None and call.cache_batch_indices is None:
        return
    sequence, number = numbered(new, call.q.device)
    entries, rows = places(call, sequence, lengths_before(call, spec)[sequence] + number)
    place, times = (entries * call.k_cache.shape[1] + rows).unique(return_counts=True)
    if place.numel() < rows.numel():
        name, what = ("cache_batch_indices", "entry") if call.block_table is None else ("block_table", "page")
        entry, row = divmod(int(place[times > 1][0]), call.k_cache.shape[1])
        raise ValueError(
            f"{name}: expected another place for each new row, got several for row {row} of {what} {entry}; give each "
            f"sequence that appends {'an entry' if call.block_table is None else 'a last page'} of its own"
        )


def _check_range(name: str, what: str, indices: Tensor, size: int) -> None:
    low, high = int(indices.min()), int(indices.max())
    if low < 0 or high >= size:
        raise ValueError(
            f"{name}: expected numbers of the {size} {what} of the cache, from 0 to {size - 1}, got "
            f"{low if low < 0 else high}"
        )


def resolve_shared_rows(shared_rows: int, capacity: int, refused: Mapping[str, object]) -> int:
    """The number of common rows. `refused`: arguments that a call with such rows does not take."""
    if isinstance(shared_rows, bool) or not isinstance(shared_rows, int):
        raise TypeError(f"shared_rows: expected an int or None, got {shared_rows!r}; it is the same for all sequences")
    if not 0 <= shared_rows <= capacity:
        raise ValueError(
            f"shared_rows: expected from 0 to {capacity}, the rows of a sequence, got {shared_rows}; it is how many "
            "first rows all sequences have in common"
        )
    remedy = "what depends on the position of a query is not the same for all sequences"
    common.refuse("beside shared_rows", remedy, **refused)
    return shared_rows


def check_behind_shared_rows(call: CacheCall, spec: CacheSpec) -> None:
    """Whether all queries stand behind the common rows, as checks of values are."""
    if torch.compiler.is_compiling() or not common.readable(call.q):
        return
    before = lengths_before(call, spec).tolist()
    firsts = [
        min(length, length + new - queries)
        for length, new, queries in zip(before, new_counts(call), query_counts(call))
        if new or queries
    ]
    if firsts and min(firsts) < spec.shared_rows:
        raise ValueError(
            f"shared_rows: expected at most {max(min(firsts), 0)}, the rows before the first new row and the first "
            f"query of each sequence, got {spec.shared_rows}; pass fewer"
        )
