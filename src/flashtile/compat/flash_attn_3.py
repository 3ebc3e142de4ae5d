"""FlashAttention-3's `flash_attn_interface` over flashtile: attention dense, packed and with a cache.

Shapes, softmax_scale, causal, window_size, softcap and deterministic mean what they mean in flash_attn 2
(`flashtile.compat.flash_attn.flash_attn_interface`). v may have another head_dim than q and k. The other arguments:

- `qv`, in the shape of q with the columns of v: scores are those of `q kᵀ + qv vᵀ`, and softmax_scale is by default
  `1/sqrt(columns of q and qv)`. It is differentiable. flashtile's kernels compute up to 512 columns together. With
  more, PyTorch operations compute a few rows at a time.
- `q_descale`, `k_descale` and `v_descale`, float32 `[batch, heads_kv]`, belong to float8_e4m3fn inputs, whose result is
  bfloat16. Such inputs may require grad; a backward raises.
- `attention_chunk`: position `i + seq_k - seq_q` of a query and position `j` of a key are cut into chunks of so many
  positions, and a query sees the keys of its own chunk. 0 is no chunks. What is not seen is not computed.
- `num_splits`, `pack_gqa`, `sm_margin` and `scheduler_metadata` say how kernels share the work. No result depends on
  them. flashtile decides for itself and does not use them, except num_splits of a call with a cache.
- `return_attn_probs`: also return lse, float32 `[batch, heads, seq_q]`, packed `[heads, total_q]`; differentiable. No
  weights are returned, as there.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from flashtile.compat.arguments import refuse_given, unpacked
from flashtile.compat.attend import attend
from flashtile.compat.cache import Cache, attend_with_cache
from flashtile.compat.calls import Call, Packed
from flashtile.compat.combine import combine

Output = Tensor | tuple[Tensor, Tensor]


def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    softmax_scale: float | None = None,
    causal: bool = False,
    qv: Tensor | None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    window_size: tuple[int, int] = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    deterministic: bool = False,
    sm_margin: int = 0,
    return_attn_probs: bool = False,
) -> Output:
    """Attention of a dense batch: q `[batch, seq_q, heads, head_dim]`, k and v `[batch, seq_k, heads_kv, ...]`."""
    descales = _factors(q, q_descale=q_descale, k_descale=k_descale, v_descale=v_descale)
    call = _call(softmax_scale, causal, window_size, softcap, deterministic, descales)
    out, lse = attend(q, k, v, None, call, chunk=attention_chunk, qv=qv)
    return (out, lse) if return_attn_probs else out


def flash_attn_qkvpacked_func(
    qkv: Tensor,
    softmax_scale: float | None = None,
    causal: bool = False,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    window_size: tuple[int, int] = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    deterministic: bool = False,
    num_heads_q: int | None = None,
    sm_margin: int = 0,
    return_attn_probs: bool = False,
) -> Output:
    """As `flash_attn_func`, with qkv `[batch, seq, 3, heads, head_dim]`, or with num_heads_q
    `[batch, seq, heads_q + 2 heads_kv, head_dim]`."""
    descales = _factors(qkv, q_descale=q_descale, k_descale=k_descale, v_descale=v_descale)
    if qkv.dim() == 5:
        q, k, v = unpacked("qkv", qkv, 3, "batch, seq")
    else:
        if num_heads_q is None or qkv.dim() != 4 or (rest := qkv.shape[2] - num_heads_q) < 2 or rest % 2:
            raise ValueError(
                "qkv: expected shape [batch, seq, 3, heads, head_dim], or [batch, seq, heads_q + 2 heads_kv, head_dim] "
                f"with num_heads_q, got {list(qkv.shape)} and {num_heads_q}; stack q, k and v along the heads"
            )
        q, k, v = qkv.split((num_heads_q, rest // 2, rest // 2), dim=2)
    call = _call(softmax_scale, causal, window_size, softcap, deterministic, descales)
    out, lse = attend(q, k, v, None, call, chunk=attention_chunk)
    return (out, lse) if return_attn_probs else out


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    qv: Tensor | None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    window_size: tuple[int, int] = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    deterministic: bool = False,
    sm_margin: int = 0,
    return_attn_probs: bool = False,
) -> Output:
    """Attention of packed sequences: q `[total_q, heads, head_dim]`, k and v `[total_k, heads_kv, ...]`.

    `seqused_q` and `seqused_k`, int32 `[batch]`, are how many rows of each sequence there are; default all. Rows of the
    result past seqused_q are 0, and their lse is -inf. With either, the rows are copied first.
    """
    descales = _factors(q, q_descale=q_descale, k_descale=k_descale, v_descale=v_descale)
    call = _call(softmax_scale, causal, window_size, softcap, deterministic, descales)
    layout = Packed(cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, seqused_k=seqused_k)
    out, lse = attend(q, k, v, layout, call, used=seqused_q, chunk=attention_chunk, qv=qv)
    return (out, lse) if return_attn_probs else out


def flash_attn_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None = None,
    v: Tensor | None = None,
    qv: Tensor | None = None,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    cache_seqlens: int | Tensor | None = None,
    cache_batch_idx: Tensor | None = None,
    cache_leftpad: Tensor | None = None,
    page_table: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k_new: Tensor | None = None,
    max_seqlen_q: int | None = None,
    rotary_seqlens: Tensor | None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    scheduler_metadata: Any = None,
    num_splits: int = 0,
    pack_gqa: bool | None = None,
    sm_margin: int = 0,
    return_softmax_lse: bool = False,
) -> Output:
    """One step of decoding: out, or (out, lse). Arguments as in flash_attn 2, where they are there.

    New rows are written to the caches in place, and nothing is recorded for a backward. By
    `flashtile.attention_with_kv_cache` where that has the arguments. With `cu_seqlens_q`, `cu_seqlens_k_new`,
    `rotary_seqlens`, `qv`, 8-bit caches, pages of no multiple of 16 rows, or `attention_chunk` and several queries of a
    sequence, the keys are gathered into a packed copy first, and `num_splits` is not used.

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
    cache = Cache(
        k_cache, v_cache, k, v, rotary_cos, rotary_sin, bool(rotary_interleaved), cache_seqlens, rotary_seqlens,
        cache_batch_idx, cache_leftpad, page_table, cu_seqlens_k_new,
    )  # fmt: skip
    descales = _factors(q, q_descale=q_descale, k_descale=k_descale, v_descale=v_descale)
    call = _call(softmax_scale, causal, window_size, softcap, False, descales)
    out, lse = attend_with_cache(
        q, cache, call, cu_seqlens_q=cu_seqlens_q, max_seqlen_q=max_seqlen_q, chunk=attention_chunk, qv=qv,
        num_splits=num_splits,
    )  # fmt: skip
    return (out, lse) if return_softmax_lse else out


def flash_attn_combine(
    out_partial: Tensor, lse_partial: Tensor, out: Tensor | None = None, out_dtype: torch.dtype | None = None
) -> tuple[Tensor, Tensor]:
    """Attention over disjoint keys, put together: `flashtile.compat.combine.combine`."""
    return combine(out_partial, lse_partial, out, out_dtype)


def get_scheduler_metadata(
    batch_size: int,
    max_seqlen_q: int,
    max_seqlen_k: int,
    num_heads_q: int,
    num_heads_kv: int,
    headdim: int,
    cache_seqlens: Tensor,
    qkv_dtype: torch.dtype = torch.bfloat16,
    headdim_v: int | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k_new: Tensor | None = None,
    cache_leftpad: Tensor | None = None,
    page_size: int | None = None,
    max_seqlen_k_new: int = 0,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    attention_chunk: int = 0,
    has_softcap: bool = False,
    num_splits: int = 0,
    pack_gqa: bool | None = None,
    sm_margin: int = 0,
) -> Tensor:
    """What `scheduler_metadata` takes: an empty tensor, because the kernels read the lengths by themselves."""
    return torch.empty(0, dtype=torch.int32, device=cache_seqlens.device)


def _call(
    softmax_scale: float | None,
    causal: bool,
    window_size: tuple[int, int],
    softcap: float,
    deterministic: bool,
    descales: tuple[Tensor | None, ...] = (None, None, None),
) -> Call:
    return Call(0.0, softmax_scale, causal, window_size, softcap, None, deterministic, descales)


def _factors(q: Tensor, **descales: Tensor | None) -> tuple[Tensor | None, ...]:
    if q.dtype is not torch.float8_e4m3fn:
        refuse_given("factors belong to float8_e4m3fn inputs, multiply others by them", **descales)
    return tuple(descales.values())
