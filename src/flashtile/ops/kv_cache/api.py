"""The public functions: what a user calls. They check, build the spec, and hand on to the operator."""

from __future__ import annotations

from typing import NoReturn

import torch
from torch import Tensor

from flashtile.ops.common import checks as common
from flashtile.ops.common.backends import standard_backends
from flashtile.ops.common.batch_invariance import MODE, check_cache
from flashtile.ops.common.other_names import refuse_other_names
from flashtile.ops.common.sizes import known
from flashtile.ops.kv_cache import checks, repeated
from flashtile.ops.kv_cache.operator import remember, run_with_cache
from flashtile.ops.kv_cache.spec import CacheCall, CacheSpec

_BACKENDS = standard_backends("kv_cache")

Window = tuple[int | None, int | None]


def attention_with_kv_cache(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, k: Tensor | None = None, v: Tensor | None = None, *,
    cache_lengths: int | Tensor | None = None, cache_batch_indices: Tensor | None = None,
    cache_left_padding: Tensor | None = None, block_table: Tensor | None = None, rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None, rotary_interleaved: bool = False, scale: float | None = None, causal: bool = True,
    window: Window | None = None, softcap: float | None = None, alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None, cu_seqlens_q: Tensor | None = None, cu_seqlens_new: Tensor | None = None,
    max_seqlen_q: int | None = None, descale_k: Tensor | None = None, descale_v: Tensor | None = None,
    tree_mask: Tensor | None = None, shared_rows: int | None = None, num_splits: int | None = None,
    return_lse: bool = False, batch_invariant: bool = False, backend: str = "auto", **other_names: NoReturn,
) -> Tensor | tuple[Tensor, Tensor]:  # fmt: skip
    """One step of generation: appends new keys and values to a cache in place, and attends to everything in it.

    For inference only: nothing is recorded for a backward. Under `torch.autocast` nothing is cast: all tensors must
    have the dtype of q, the caches too unless they have 8 bits. Lengths and tables may stay on the GPU, because nothing
    waits for them, so a call can be captured in a CUDA graph and replayed with other lengths. A sequence has the rows
    from `cache_left_padding` to `cache_lengths + seq_new` of its part of the cache, and its last query lies at its last
    row.

    With `cu_seqlens_q` each sequence has a number of queries of its own: q, k and v are packed, one sequence after
    another, so chunks of prompts, single tokens and steps with several tokens share one call.

    Args:
        q: `[batch, seq_q, heads_q, head_dim]`, with cu_seqlens_q `[total_q, heads_q, head_dim]`; float16, bfloat16,
            float32, or float64 (CPU and reference only).
        k_cache: `[batch, capacity, heads_kv, head_dim]` in q's dtype, or in 8 bits as float8_e4m3fn, float8_e5m2 or
            int8; contiguous in the last dimension. With block_table, pages `[pages, page_size, heads_kv, head_dim]` of
            any size. `heads_q % heads_kv == 0`.
        v_cache: the same with head_dim_v. head_dim is 1 to 576, head_dim_v 1 to 512. Where rows are appended, both
            caches have memory of their own: neither is expanded, and they do not overlap.
        k: `[batch, seq_new, heads_kv, head_dim]`, written to the rows of k_cache from cache_lengths on. seq_new may
            differ from seq_q. With cu_seqlens_q, `[total_new, heads_kv, head_dim]`. None appends nothing.
        v: the same with head_dim_v, written to v_cache. None if v_cache is a view of the first columns of k_cache,
            `k_cache[..., :head_dim_v]`, whose rows are then stored once, as in multi-head latent attention.
        cache_lengths: rows already in the cache: an int for all sequences, or `[batch]` int32 or int64 on q's device.
            The call does not change it. None (without k and v): the whole cache.
        cache_batch_indices: `[batch]` int32 or int64: sequence `b` uses entry `cache_batch_indices[b]` of the cache
            instead of entry `b`. Sequences may share an entry, but each new row needs a place of its own: of two rows
            at one place either may remain.
        cache_left_padding: `[batch]` int32 or int64: rows before this one are not visible, whatever they contain.
            Lengths and positions count them.
        block_table: `[batch, max_pages]` int32 or int64: the pages of each sequence, in order. Entries past its length
            are not read. Sequences may share pages, but not the places of new rows.
        rotary_cos: `[positions, rotary_dim / 2]`, from `flashtile.rotary_tables`. Row `i` of k is rotated by position
            `cache_lengths + i` before it is stored, and so is row `i` of q. Without causal and window, all of q is
            rotated by position cache_lengths. Elements from rotary_dim on stay as they are.
        rotary_sin: the same.
        rotary_interleaved: pairs are `(x[2i], x[2i + 1])`, else `(x[i], x[i + rotary_dim / 2])`.
        scale: factor on the scores; default `1/sqrt(head_dim)`.
        causal: query `i` sees no row past `i + total - seq_q`, where total is the length after appending.
        window: `(left, right)` number of rows visible on each side of that diagonal, None = unlimited.
        softcap: bound of the scores, as in `flashtile.attention`; None or 0 for no cap.
        alibi_slopes: `[heads_q]` or `[batch, heads_q]`, float32 or q's dtype (float64 with float64 q). Each score is
            reduced by `slope · |i + total - seq_q - j|`.
        sinks: `[heads_q]`, dtypes as for the slopes: an extra logit in each row's softmax.
        cu_seqlens_q: `[batch + 1]` int32 or int64, cumulative numbers of queries that start at 0: sequence `b` has the
            rows of q from `cu_seqlens_q[b]` to `cu_seqlens_q[b + 1]`; none at all is fine. Rows past the last one
            belong to no sequence: `out = 0` and `lse = -inf`.
        cu_seqlens_new: the same for k and v; default `cu_seqlens_q`.
        max_seqlen_q: upper bound of the queries of a sequence. Optional; it helps to choose tiles.
        descale_k: float32 factors of an 8-bit k_cache; a value is the stored number times its factor. `[]` is one for
            all, `[heads_kv]` one for each head, `[entries or pages, heads_kv]` also for each entry or page, `[entries
            or pages, rows, heads_kv]` also for each row. New rows are divided by their factor, clamped to the largest
            number of the dtype, and rounded. With factors of rows the call chooses those of new rows, and writes them.
            None is 1.
        descale_v: the same for v_cache.
        tree_mask: bool, which of the last seq_q rows of its sequence a query sees, as the new tokens of a tree that are
            verified together: `[seq_q, seq_q]` or `[batch, seq_q, seq_q]`; with cu_seqlens_q `[total_q, m]`, where m is
            at least max_seqlen_q. All rows before those are visible. In place of the causal mask: without window and
            alibi_slopes, and q and k are rotated before the call. `flashtile.tree_mask` makes it from the
            parents of the tokens.
        shared_rows: so many first rows are the same for all sequences, as a common prompt in the same pages. They are
            read once, where sequence 0 has them, and the results are merged by their lse. All new rows and all queries
            come after them. Without window, alibi_slopes and left padding; q and k are rotated before the call.
        num_splits: into how many parts, up to 128, a GPU splits the rows of a sequence, to compute them in parallel.
            None chooses it from the sizes. It changes only the rounding of the result. The CPU does not use it.
        return_lse: also return the log-sum-exp of each row's scores.
        batch_invariant: as in `flashtile.attention`: a token has the bits that it has in the prompt at once, whatever
            the chunks, the other sequences, the pages and the capacity. Not with 8-bit caches, cache_left_padding,
            shared_rows and splits.
        backend: "auto" chooses by device; "triton", "cpu" or "reference" run that backend or raise.

    Returns:
        out `[batch, seq_q, heads_q, head_dim_v]` in q's dtype; with `return_lse`, also lse `[batch, heads_q, seq_q]`
        float32 (float64 for float64 inputs), natural logarithm. With cu_seqlens_q, out is `[total_q, heads_q,
        head_dim_v]` and lse `[heads_q, total_q]`. A query that sees no row has `out = 0` and `lse = -inf` (or the
        sink).

    Raises:
        TypeError: a dtype or an argument's type is wrong.
        ValueError: a shape, a device or a value is wrong, an input requires a gradient, or the named backend cannot
            serve the call. Values in tensors (lengths, indices, pages, and that new rows have places of their own) are
            always checked on a CPU, and on a GPU only with the environment variable `FLASHTILE_CHECK_VALUES=1`. On a
            GPU, rows past the capacity are neither written nor read.

    Reference:
        Dao, "FlashAttention-2" (2023), section 3; Dao et al., "Flash-Decoding for long-context inference" (2023).
        Pages: Kwon et al., "Efficient Memory Management for Large Language Model Serving with PagedAttention" (2023),
        section 4. Latent attention: DeepSeek-AI, "DeepSeek-V2" (2024), section 2.1. Rotation: Su et al., "RoFormer"
        (2021).
    """
    if other_names:
        refuse_other_names(attention_with_kv_cache, other_names)
    invariant = batch_invariant or MODE.enabled
    given = (
        q, k_cache, v_cache, k, v, cache_lengths, cache_batch_indices, cache_left_padding, block_table, rotary_cos,
        rotary_sin, alibi_slopes, sinks, cu_seqlens_q, cu_seqlens_new, descale_k, descale_v, tree_mask,
    )  # fmt: skip
    options = (
        scale, causal, softcap, rotary_interleaved, shared_rows, num_splits, return_lse, batch_invariant, invariant,
        backend,
    )  # fmt: skip
    key = repeated.call_key(given, options, window, max_seqlen_q)
    if key is not None and (results := repeated.served(key, given)) is not None:
        return results if return_lse else results[0]
    _BACKENDS.check(backend)
    common.raise_not_bool(
        causal=causal, rotary_interleaved=rotary_interleaved, return_lse=return_lse, batch_invariant=batch_invariant
    )
    packed = cu_seqlens_q is not None
    checks.check_caches(q, k_cache, v_cache, block_table is not None, packed)
    batch, heads, head_dim = q.shape[0], *q.shape[-2:]
    if cu_seqlens_q is not None:
        batch = checks.check_packed(q, k, cu_seqlens_q, cu_seqlens_new, max_seqlen_q)
    elif cu_seqlens_new is not None or max_seqlen_q is not None:
        given_packed = {"cu_seqlens_new": cu_seqlens_new, "max_seqlen_q": max_seqlen_q}
        common.refuse("without cu_seqlens_q", "it is for packed queries", **given_packed)
    if invariant:
        check_cache(k_cache.dtype, num_splits, shared_rows=shared_rows, cache_left_padding=cache_left_padding)
    if k is not None or v is not None:
        checks.check_appended(q, k_cache, v_cache, k, v, packed, packed and cu_seqlens_new is None)
    checks.check_places(q, batch, k_cache, cache_batch_indices, cache_left_padding, block_table)
    if torch.is_grad_enabled():
        remedy = "call it under torch.no_grad(), or train with flashtile.attention: a cache is for inference"
        for name, tensor in zip(CacheCall._fields, given):
            if isinstance(tensor, Tensor):
                common.check_wants_no_gradient(name, tensor, remedy=remedy)
    capacity = k_cache.shape[1] if block_table is None else block_table.shape[1] * k_cache.shape[1]
    # How many rows each sequence of a packed call has, the host does not know.
    seq_new = None if k is None else 0 if packed else k.shape[1]
    length, lengths = checks.resolve_lengths(cache_lengths, q, batch, capacity, seq_new)
    left, right = common.resolve_window(causal, window)
    longest = 0 if not packed else q.shape[0] if max_seqlen_q is None else max_seqlen_q
    if tree_mask is not None:
        refused = {"window": window, "alibi_slopes": alibi_slopes, "rotary_cos": rotary_cos}
        tree_mask = checks.resolve_tree(tree_mask, q, batch, longest if packed else None, causal, refused)
        right = None
    factors, of_rows = checks.resolve_factors({"descale_k": descale_k, "descale_v": descale_v}, k_cache, k is not None)
    positions = None
    if lengths is None and rotary_cos is not None and not (packed or known(batch == 0)):
        positions = length + max(seq_new or 0, q.shape[1] if (left, right) != (None, None) else min(1, q.shape[1]))
    checks.check_rotary(q, rotary_cos, rotary_sin, k, positions)
    scale = common.resolve_scale(scale, head_dim, q.dtype)
    shared = 0
    if shared_rows is not None:
        refused = {
            "window": window, "alibi_slopes": alibi_slopes, "rotary_cos": rotary_cos,
            "cache_left_padding": cache_left_padding,
        }  # fmt: skip
        shared = checks.resolve_shared_rows(shared_rows, capacity, refused)
    spec = CacheSpec(
        length, scale, left, right, softcap=common.resolve_softcap(softcap, scale, q.dtype),
        interleaved=rotary_interleaved, num_splits=checks.resolve_splits(num_splits), max_seqlen_q=longest,
        factors_of_rows=of_rows, batch_invariant=invariant, shared_rows=shared,
    )  # fmt: skip
    call = CacheCall(*given)._replace(  # type: ignore[arg-type]
        cache_lengths=lengths,
        alibi_slopes=None if alibi_slopes is None else common.resolve_alibi_slopes(alibi_slopes, batch, heads, q),
        sinks=None if sinks is None else common.resolve_sinks(sinks, heads, q),
        cu_seqlens_new=cu_seqlens_q if cu_seqlens_new is None and k is not None else cu_seqlens_new,
        descale_k=factors[0],
        descale_v=factors[1],
        tree_mask=tree_mask,
    )
    out, lse = run_with_cache(call, spec, backend)
    if key is not None:
        remember(key, given, call, spec, backend)
    return (out, lse) if return_lse else out


def tree_mask(parents: Tensor, cu_seqlens: Tensor | None = None, max_seqlen: int | None = None) -> Tensor:
    """Which tokens of a tree each of its tokens sees: itself and those above it, up to the root.

    It is the `tree_mask` of `flashtile.attention_with_kv_cache`. Nothing waits for a GPU.

    Args:
        parents: int32 or int64 `[seq]` or `[batch, seq]`: for each token the number of the one that it continues, or -1
            if it continues the sequence itself. A token stands after its parent.
        cu_seqlens: `[batch + 1]`: parents are packed, `[total]`, and count from the start of their sequence.
            Those past the last sequence may be anything.
        max_seqlen: tokens of a packed sequence at most; default `total`. Only beside cu_seqlens.

    Returns:
        bool `[seq, seq]`, `[batch, seq, seq]`, or packed `[total, max_seqlen]`.

    Raises:
        TypeError, ValueError: a dtype or shape is wrong; on a CPU also if a token does not stand after its parent, or
            if cu_seqlens or max_seqlen does not fit.
    """
    common.check_index("parents", parents)
    packed, device = cu_seqlens is not None, parents.device
    if parents.dim() not in ((1,) if packed else (1, 2)):
        raise ValueError(
            f"parents: expected {'[total] beside cu_seqlens' if packed else '[seq] or [batch, seq]'}, got shape "
            f"{tuple(parents.shape)}"
        )
    values = common.readable(parents) and not torch.compiler.is_compiling()
    tokens, above = torch.arange(parents.numel(), device=device), parents.flatten().long()
    if cu_seqlens is not None:
        common.check_cu_seqlens("cu_seqlens", cu_seqlens, device)
        common.check_max_seqlen("max_seqlen", max_seqlen)
        if values:
            common.check_cu_seqlens_values("cu_seqlens", cu_seqlens, parents.numel(), max_seqlen)
        above = above.where(tokens < cu_seqlens[-1], -1)
        width = parents.numel() if max_seqlen is None else max_seqlen
        sequence = torch.searchsorted(cu_seqlens, tokens, right=True) - 1
        first = cu_seqlens.long()[sequence]
    else:
        common.refuse("without cu_seqlens", "it is for packed parents", max_seqlen=max_seqlen)
        width = parents.shape[-1]
        first = tokens - tokens % max(width, 1)
    number = tokens - first
    if values and bool(((above >= number) | (above < -1)).any()):
        raise ValueError("parents: expected the number of an earlier token, or -1, got another one; sort the tokens")
    # By doubling: what a token sees in so many steps, it and what its ancestor sees; a token behind all sees nothing.
    shown = torch.zeros(tokens.shape[0] + 1, width, dtype=torch.bool, device=device)
    shown[:-1] = number[:, None] == torch.arange(width, device=device)
    ancestor = torch.cat([torch.where(above < 0, tokens.shape[0], first + above), tokens.new_tensor([tokens.shape[0]])])
    for _ in range(max(width - 1, 0).bit_length()):
        shown, ancestor = shown | shown[ancestor], ancestor[ancestor]
    return shown[:-1] if packed else shown[:-1].view(*parents.shape, width)
