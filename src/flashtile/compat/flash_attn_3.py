"""FlashAttention-3's `flash_attn_interface` over flashtile: attention dense, packed and with a cache.

Shapes are those of flash_attn 2 (`flashtile.compat.flash_attn_2`); v may have another head_dim than q and k.
docs/migrating.md ("FlashAttention-3") says what the other arguments mean here. Among them:

- `qv`, in the shape of q with the columns of v: scores are those of `q kᵀ + qv vᵀ`, and softmax_scale is by default
  `1/sqrt(columns of q and qv)`.
- `q_descale`, `k_descale` and `v_descale`, float32 `[batch, heads_kv]`, belong to float8_e4m3fn inputs, whose result is
  bfloat16.
- `return_attn_probs`: also return lse, float32 `[batch, heads, seq_q]`, packed `[heads, total_q]`; no weights.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

import flashtile
from flashtile.compat.adapter import refuse_given
from flashtile.compat.attend import attend
from flashtile.compat.cache import Cache, attend_with_cache
from flashtile.compat.calls import Call, Output, split_options, taken_apart, written
from flashtile.compat.rows import locate_rows
from flashtile.compat.signatures import VERSION_3


def _with_factors(q: Tensor, call: Call, rest: dict[str, Any]) -> Call:
    """The options of a call with the factors of 8-bit inputs, taken out of the other arguments."""
    descales = {name: rest.pop(name) for name in ("q_descale", "k_descale", "v_descale")}
    if q.dtype is not torch.float8_e4m3fn:
        refuse_given("factors belong to float8_e4m3fn inputs, multiply others by them", **descales)
    return call._replace(descales=tuple(descales.values()))


def _attend(attention_chunk: int, return_attn_probs: bool, **given: Any) -> Output:
    """Attention of a dense batch: q `[batch, seq_q, heads, head_dim]`, k and v `[batch, seq_k, heads_kv, ...]`; or of
    packed sequences: q `[total_q, heads, head_dim]`, k and v `[total_k, heads_kv, ...]`.

    `seqused_q` and `seqused_k`, int32 `[batch]`, are how many rows of each sequence there are; default all. Rows of the
    result past seqused_q are 0, and their lse is -inf. With either, the rows are copied first.
    """
    q, k, v, layout, call, rest = taken_apart(given)
    call = _with_factors(q, call, rest)
    out, lse = attend(q, k, v, layout, call, used=rest.get("seqused_q"), chunk=attention_chunk, qv=rest.get("qv"))
    return (out, lse) if return_attn_probs else out


flash_attn_func = flash_attn_varlen_func = _attend


def flash_attn_qkvpacked_func(qkv: Tensor, num_heads_q: int | None, **given: Any) -> Output:
    """As `flash_attn_func`, with qkv `[batch, seq, 3, heads, head_dim]`, or with num_heads_q
    `[batch, seq, heads_q + 2 heads_kv, head_dim]`."""
    if qkv.dim() == 5:
        return _attend(qkv=qkv, **given)
    if num_heads_q is None or qkv.dim() != 4 or (rest := qkv.shape[2] - num_heads_q) < 2 or rest % 2:
        raise ValueError(
            "qkv: expected shape [batch, seq, 3, heads, head_dim], or [batch, seq, heads_q + 2 heads_kv, head_dim] "
            f"with num_heads_q, got {list(qkv.shape)} and {num_heads_q}; stack q, k and v along the heads"
        )
    q, k, v = qkv.split((num_heads_q, rest // 2, rest // 2), dim=2)
    return _attend(q=q, k=k, v=v, **given)


def flash_attn_with_kvcache(
    q: Tensor, qv: Tensor | None, cu_seqlens_q: Tensor | None, max_seqlen_q: int | None, attention_chunk: int,
    num_splits: int, return_softmax_lse: bool, rotary_interleaved: bool, **given: Any,
) -> Output:  # fmt: skip
    """One step of decoding: out, or (out, lse). Arguments as in flash_attn 2, where they are there.

    New rows are written to the caches in place, and nothing is recorded for a backward. By
    `flashtile.attention_with_kv_cache` where that has the arguments. Without k and v these include `qv` over caches
    that are neighbouring columns of one tensor, values first, as engines keep latent rows; and 8-bit caches that are
    dense, or whose factors are expanded from those of heads. Otherwise, and with `attention_chunk` and several queries
    of a sequence, the keys are gathered into a packed copy first, and `num_splits` is not used.

    Args:
        page_table: int32 `[batch, pages]`: the caches are pages `[pages, page_size, heads_kv, head_dim]` of any size.
            With cache_batch_idx it is int32 `[rows, pages]`, and sequence `b` has row `cache_batch_idx[b]`.
        rotary_cos, rotary_sin: beside float8_e4m3fn rows, tables of any floating dtype; the rotation is in float32.
        cu_seqlens_q: int32 `[batch + 1]`: q is packed, `[total_q, heads, head_dim]`, and so is the result; lse is then
            `[heads, total_q]`.
        cu_seqlens_k_new: int32 `[batch + 1]`: k and v are packed, `[total_new, heads_kv, head_dim]`.
        max_seqlen_q: the longest sequence of queries, beside cu_seqlens_q.
        rotary_seqlens: `[batch]`, the position of the first new row of each sequence; default cache_seqlens.
        attention_chunk: positions count from cache_leftpad on.
    """
    call, rest = split_options(given)
    call = _with_factors(q, call, rest)
    places = {name: rest[name] for name in Cache._fields if name in rest}
    out, lse = attend_with_cache(
        q, Cache(rotary_interleaved=bool(rotary_interleaved), **places), call, cu_seqlens_q=cu_seqlens_q,
        max_seqlen_q=max_seqlen_q, chunk=attention_chunk, qv=qv, num_splits=num_splits,
    )  # fmt: skip
    return (out, lse) if return_softmax_lse else out


def get_scheduler_metadata(cache_seqlens: Tensor, **given: Any) -> Tensor:
    """What `scheduler_metadata` takes: an empty tensor, because the kernels read the lengths by themselves."""
    return torch.empty(0, dtype=torch.int32, device=cache_seqlens.device)


def combine(
    out_partial: Tensor, lse_partial: Tensor, out: Tensor | None, out_dtype: torch.dtype | None,
    cu_seqlens: Tensor | None = None, seqused: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Puts together attention over disjoint keys, by `flashtile.logsumexp_merge`.

    Args:
        out_partial: float32 `[parts, batch, seq, heads, head_dim]`, packed `[parts, total, heads, head_dim]`.
        lse_partial: float32 `[parts, batch, seq, heads]`, packed `[parts, total, heads]`.
        out: a buffer for the result.
        out_dtype: of the result; default that of out_partial.
        cu_seqlens: `[batch + 1]` of packed rows; read only beside seqused.
        seqused: `[batch]`, how many rows of each sequence there are. Other rows are 0, or as they are in `out`, and
            their lse is -inf.

    Returns:
        out `[batch, seq, heads, head_dim]` and lse `[batch, seq, heads]`, packed `[total, ...]`.
    """
    merged, lse = flashtile.logsumexp_merge(out_partial.unbind(0), lse_partial.transpose(-1, -2).unbind(0))
    lse = lse.transpose(-1, -2)
    if out_dtype is None:
        out_dtype = out_partial.dtype if out is None else out.dtype
    merged = merged.to(out_dtype)
    if seqused is not None:
        if merged.dim() == 4:
            there = torch.arange(merged.shape[1], device=merged.device) < seqused[:, None]
        elif cu_seqlens is None:
            raise ValueError("cu_seqlens: expected [batch + 1] beside seqused of packed rows, got None; pass them")
        else:
            sequence, within, inside = locate_rows(cu_seqlens, merged.shape[0])
            there = inside & (within < seqused[sequence])
        lse = lse.masked_fill(~there[..., None], -math.inf)
        merged = torch.where(there[..., None, None], merged, 0 if out is None else out)
    return written("out", merged, out), lse


flash_attn_combine = combine

VERSION_3.serve(globals())
