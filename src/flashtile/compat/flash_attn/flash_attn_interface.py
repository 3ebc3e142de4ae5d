"""The attention functions of flash_attn 2.8.3, each a call of `flashtile.attention` or `attention_varlen`.

What the arguments mean, for all functions here:

- q `[batch, seq_q, heads, head_dim]`, k and v `[batch, seq_k, heads_kv, head_dim]`; packed `[total, heads, head_dim]`
  with `cu_seqlens_q` and `cu_seqlens_k`, int32 `[batch + 1]`. `heads_kv` divides `heads`. dtypes and head sizes are
  those of `flashtile.attention`.
- dropout_p: probability that an attention weight is dropped.
- softmax_scale: factor on the scores; default `1/sqrt(head_dim)`.
- causal: no key right of the diagonal is visible, which ends at the last key.
- window_size: (left, right) number of keys visible on each side of the diagonal, -1 = unlimited.
- softcap: scores become `softcap · tanh(score / softcap)`; 0 = none.
- alibi_slopes: float32 `[heads]` or `[batch, heads]`; scores lose `slope · |i + seq_k - seq_q - j|`.
- deterministic: gradients are the same in every run.
- return_attn_probs: also return lse, float32 `[batch, heads, seq_q]` (packed `[heads, total_q]`), and `S_dmask`: with
  dropout `[batch, heads, seq_q', seq_k']`, lengths rounded up to multiples of 128, of elements
  `exp(score - maximum of the row)`, negative where dropped; without dropout an empty tensor. That is a matrix of
  `seq_q × seq_k`, for tests.

A row that sees no key is 0, with an lse of -inf. Raised are the `TypeError` and `ValueError` of the public functions.
"""

from __future__ import annotations

import torch
from torch import Tensor

from flashtile.compat.shared import calls
from flashtile.compat.shared.arguments import unpacked
from flashtile.compat.shared.calls import Call, Packed
from flashtile.compat.shared.recorded import (
    FlashAttnFunc,
    FlashAttnKVPackedFunc,
    FlashAttnQKVPackedFunc,
    FlashAttnVarlenFunc,
    FlashAttnVarlenKVPackedFunc,
    FlashAttnVarlenQKVPackedFunc,
)

__all__ = [
    "FlashAttnFunc",
    "FlashAttnKVPackedFunc",
    "FlashAttnQKVPackedFunc",
    "FlashAttnVarlenFunc",
    "FlashAttnVarlenKVPackedFunc",
    "FlashAttnVarlenQKVPackedFunc",
    "flash_attn_func",
    "flash_attn_kvpacked_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_varlen_kvpacked_func",
    "flash_attn_varlen_qkvpacked_func",
    "flash_attn_with_kvcache",
]

Output = Tensor | tuple[Tensor, ...]


def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Output:
    """Attention of a dense batch: out, or (out, lse, S_dmask)."""
    call = Call(dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic)
    return calls.dense(q, k, v, call, return_attn_probs)


def flash_attn_kvpacked_func(
    q: Tensor,
    kv: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Output:
    """As `flash_attn_func`, with kv `[batch, seq_k, 2, heads_kv, head_dim]`."""
    k, v = unpacked("kv", kv, 2, "batch, seq_k")
    call = Call(dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic)
    return calls.dense(q, k, v, call, return_attn_probs)


def flash_attn_qkvpacked_func(
    qkv: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Output:
    """As `flash_attn_func`, with qkv `[batch, seq, 3, heads, head_dim]`."""
    q, k, v = unpacked("qkv", qkv, 3, "batch, seq")
    call = Call(dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic)
    return calls.dense(q, k, v, call, return_attn_probs)


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: Tensor | None = None,
) -> Output:
    """Attention of packed sequences: out, or (out, lse, S_dmask).

    With `block_table`, int32 `[batch, pages of a sequence]`, k and v are pages `[pages, page_size, heads_kv, head_dim]`
    and `cu_seqlens_k` tells the lengths. They are gathered into a packed copy first.
    """
    call = Call(dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic)
    layout = Packed(cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, block_table)
    return calls.packed(q, k, v, layout, call, return_attn_probs)


def flash_attn_varlen_kvpacked_func(
    q: Tensor,
    kv: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Output:
    """As `flash_attn_varlen_func`, with kv `[total_k, 2, heads_kv, head_dim]`."""
    k, v = unpacked("kv", kv, 2, "total_k")
    call = Call(dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic)
    layout = Packed(cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    return calls.packed(q, k, v, layout, call, return_attn_probs)


def flash_attn_varlen_qkvpacked_func(
    qkv: Tensor,
    cu_seqlens: Tensor,
    max_seqlen: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Output:
    """As `flash_attn_varlen_func`, with qkv `[total, 3, heads, head_dim]`."""
    q, k, v = unpacked("qkv", qkv, 3, "total")
    call = Call(dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic)
    layout = Packed(cu_seqlens, cu_seqlens, max_seqlen, max_seqlen)
    return calls.packed(q, k, v, layout, call, return_attn_probs)


def flash_attn_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None = None,
    v: Tensor | None = None,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    cache_seqlens: int | Tensor | None = None,
    cache_batch_idx: Tensor | None = None,
    cache_leftpad: Tensor | None = None,
    block_table: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    alibi_slopes: Tensor | None = None,
    num_splits: int = 0,
    return_softmax_lse: bool = False,
) -> Output:
    """One step of decoding, by `flashtile.attention_with_kv_cache`, where shapes and meanings are told.

    `k` and `v`, `[batch, seq_new, heads_kv, head_dim]`, are written to the caches in place from `cache_seqlens` on.
    Nothing is recorded for a backward.

    Args:
        cache_seqlens: `cache_lengths` there.
        cache_batch_idx: `cache_batch_indices`.
        cache_leftpad: `cache_left_padding`.
        block_table: int32 `[batch, pages]`; the caches are then pages of any multiple of 16 rows.
        num_splits: 0 chooses by the sizes.
        return_softmax_lse: also return lse, float32 `[batch, heads, seq_q]`.
    """
    call = Call(0.0, softmax_scale, causal, window_size, softcap, alibi_slopes)
    return calls.with_cache(
        q, k_cache, v_cache, k, v, call, return_softmax_lse, cache_lengths=cache_seqlens,
        cache_batch_indices=cache_batch_idx, cache_left_padding=cache_leftpad, block_table=block_table,
        rotary_cos=rotary_cos, rotary_sin=rotary_sin, rotary_interleaved=bool(rotary_interleaved),
        num_splits=num_splits or None,
    )  # fmt: skip


def _get_block_size_n(device: object, head_dim: int, is_dropout: bool, is_causal: bool) -> int:
    """Keys of a block of `S_dmask`: all of them, because its elements refer to the maximum of the whole row."""
    return 1 << 30


def _flash_attn_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float,
    softmax_scale: float,
    causal: bool,
    window_size_left: int,
    window_size_right: int,
    softcap: float,
    alibi_slopes: Tensor | None,
    return_softmax: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The forward by itself: out, lse, S_dmask and rng_state, int64 `[2]`, which the backward wants."""
    call = Call(dropout_p, softmax_scale, causal, (window_size_left, window_size_right), softcap, alibi_slopes)
    return calls.forward(q, k, v, None, call, return_softmax)


def _flash_attn_varlen_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float,
    softmax_scale: float,
    causal: bool,
    window_size_left: int = -1,
    window_size_right: int = -1,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    return_softmax: bool = False,
    block_table: Tensor | None = None,
    leftpad_k: Tensor | None = None,
    seqused_k: Tensor | None = None,
    zero_tensors: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The packed forward by itself, as `_flash_attn_forward`.

    `leftpad_k` and `seqused_k`, int32 `[batch]`, take keys away at the beginning and at the end of each sequence.
    `zero_tensors` changes nothing: rows that belong to no sequence are always 0.
    """
    call = Call(dropout_p, softmax_scale, causal, (window_size_left, window_size_right), softcap, alibi_slopes)
    layout = Packed(cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, block_table, leftpad_k, seqused_k)
    return calls.forward(q, k, v, layout, call, return_softmax)


def _flash_attn_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    softmax_lse: Tensor,
    dq: Tensor | None,
    dk: Tensor | None,
    dv: Tensor | None,
    dropout_p: float,
    softmax_scale: float,
    causal: bool,
    window_size_left: int,
    window_size_right: int,
    softcap: float,
    alibi_slopes: Tensor | None,
    deterministic: bool,
    rng_state: Tensor | None = None,
) -> Tensor:
    """The backward by itself, by `flashtile.attention_backward`: gradients are written to dq, dk and dv, where given.

    `out` and `softmax_lse` may be those of more keys than are here.

    Returns:
        `rowsum(dout · out)`, float32 `[batch, heads, seq_q rounded up to 128]`.
    """
    window = (window_size_left, window_size_right)
    call = Call(dropout_p, softmax_scale, causal, window, softcap, alibi_slopes, deterministic)
    with torch.no_grad():
        calls.write_gradients(calls.backward(dout, q, k, v, out, softmax_lse, None, call, rng_state), (dq, dk, dv))
        sums = calls.row_sums(dout, out)
        return torch.nn.functional.pad(sums, (0, -sums.shape[-1] % 128))


def _flash_attn_varlen_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    softmax_lse: Tensor,
    dq: Tensor | None,
    dk: Tensor | None,
    dv: Tensor | None,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float,
    softmax_scale: float,
    causal: bool,
    window_size_left: int,
    window_size_right: int,
    softcap: float,
    alibi_slopes: Tensor | None,
    deterministic: bool,
    rng_state: Tensor | None = None,
    zero_tensors: bool = False,
) -> Tensor:
    """The packed backward by itself, as `_flash_attn_backward`; `zero_tensors` as in `_flash_attn_varlen_forward`.

    Returns:
        `rowsum(dout · out)`, float32 `[heads, total_q + 128 · batch]`: those of sequence `b` begin at row
        `cu_seqlens_q[b] + 128 · b`, other elements are 0.
    """
    window = (window_size_left, window_size_right)
    call = Call(dropout_p, softmax_scale, causal, window, softcap, alibi_slopes, deterministic)
    layout = Packed(cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    with torch.no_grad():
        calls.write_gradients(calls.backward(dout, q, k, v, out, softmax_lse, layout, call, rng_state), (dq, dk, dv))
        sums = calls.row_sums(dout, out)
        batch = cu_seqlens_q.shape[0] - 1
        spread = sums.new_zeros(sums.shape[0], sums.shape[1] + 128 * batch)
        row = torch.arange(sums.shape[1], device=sums.device)
        sequence = torch.searchsorted(cu_seqlens_q.to(row.dtype), row, right=True) - 1
        inside = sequence < batch
        return spread.index_add_(1, row + 128 * sequence.clamp(max=max(batch - 1, 0)), sums * inside)
