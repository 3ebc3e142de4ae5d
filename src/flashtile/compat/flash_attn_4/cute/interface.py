"""FlashAttention-4's functions over flashtile: attention dense and packed, always with its log-sum-exp.

Shapes, softmax_scale, causal, softcap and deterministic mean what they mean in flash_attn 2. The other arguments:

- `window_size`: (left, right) number of keys visible on each side of the diagonal, None = unlimited.
- `learnable_sink`: `[heads]`, a logit beside those of the keys in each row's softmax. It is differentiable.
- `mask_block_cnt` and its kin, or `block_sparse_tensors`: the blocks of scores that are computed
  (`flash_attn.cute.block_sparsity`). The values are read on the host.
- `num_splits` and `pack_gqa` say how kernels share the work, and no result depends on them. `return_lse` changes
  nothing, because lse is always returned.
- `score_mod`, `mask_mod` and `aux_tensors` are not served: such functions are written in CuTe's own language.

Returned are out and lse, float32 `[batch, heads, seq_q]`, packed `[heads, total_q]`. Both are differentiable.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from flashtile.compat.shared.arguments import refuse_given
from flashtile.compat.shared.attend import attend
from flashtile.compat.shared.calls import Call, Packed, as_dense, equal_lengths
from flashtile.compat.shared.keys import check_pages, gathered_keys

from .block_sparsity import BlockSparseTensorsTorch, block_mask_of

_MASK = "say what is visible by flashtile.BlockMask.from_predicate, a function of PyTorch operations"
_SCORES = "pass a bias, ALiBi slopes or a soft cap to flashtile.attention"


def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int | None, int | None] = (None, None),
    learnable_sink: Tensor | None = None,
    softcap: float = 0.0,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    deterministic: bool = False,
    mask_mod: Callable[..., Any] | None = None,
    full_block_cnt: Tensor | None = None,
    full_block_idx: Tensor | None = None,
    mask_block_cnt: Tensor | None = None,
    mask_block_idx: Tensor | None = None,
    block_size: tuple[int, int] | None = None,
    return_lse: bool = False,
    score_mod: Callable[..., Any] | None = None,
    aux_tensors: list[Tensor] | None = None,
    block_sparse_tensors: BlockSparseTensorsTorch | None = None,
) -> tuple[Tensor, Tensor]:
    """Attention of a dense batch: q `[batch, seq_q, heads, head_dim]`, k and v `[batch, seq_k, heads_kv, ...]`."""
    refuse_given(_MASK, mask_mod=mask_mod)
    refuse_given(_SCORES, score_mod=score_mod, aux_tensors=aux_tensors)
    blocks = block_sparse_tensors
    if blocks is None and not (full_block_cnt is None and mask_block_cnt is None):
        blocks = BlockSparseTensorsTorch(mask_block_cnt, mask_block_idx, full_block_cnt, full_block_idx, block_size)
    block_mask = None if blocks is None else block_mask_of(blocks, q.shape[1], k.shape[1])
    call = _call(q, softmax_scale, causal, window_size, learnable_sink, softcap, deterministic)
    return attend(q, k, v, None, call, block_mask=block_mask)


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None,
    page_table: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int | None, int | None] = (None, None),
    learnable_sink: Tensor | None = None,
    softcap: float = 0.0,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    deterministic: bool = False,
    score_mod: Callable[..., Any] | None = None,
    aux_tensors: list[Tensor] | None = None,
    return_lse: bool = False,
) -> tuple[Tensor, Tensor]:
    """Attention of sequences of different lengths.

    Args:
        q: `[total_q, heads, head_dim]`; without cu_seqlens_q `[batch, seq_q, heads, head_dim]`, and the results are
            dense as well.
        k: `[total_k, heads_kv, head_dim]`; without cu_seqlens_k `[batch, seq_k, heads_kv, head_dim]`; with page_table
            pages `[pages, page_size, heads_kv, head_dim]`.
        v: likewise.
        cu_seqlens_q, cu_seqlens_k: int32 `[batch + 1]`.
        max_seqlen_q, max_seqlen_k: of the longest sequences. They help to choose tiles.
        seqused_q, seqused_k: int32 `[batch]`, how many rows of each sequence there are; default all. Rows of the result
            past seqused_q are 0, and their lse is -inf.
        page_table: int32 `[batch, pages of a sequence]`, beside seqused_k.
    """
    refuse_given(_SCORES, score_mod=score_mod, aux_tensors=aux_tensors)
    call = _call(q, softmax_scale, causal, window_size, learnable_sink, softcap, deterministic)
    dense = None
    if cu_seqlens_q is None:
        dense = q.shape[0], q.shape[1]
        cu_seqlens_q, max_seqlen_q, q = equal_lengths(q), q.shape[1], q.flatten(0, 1)
    if page_table is not None:
        check_pages(k, v, cu_seqlens_q, page_table)
        lengths = cu_seqlens_k.diff() if seqused_k is None and cu_seqlens_k is not None else seqused_k
        if lengths is None:
            lengths = torch.full_like(page_table[:, 0], page_table.shape[1] * k.shape[1])
        k, v, cu_seqlens_k = gathered_keys(k, v, cu_seqlens_q, max_seqlen_k, block_table=page_table, lengths=lengths)
        cu_seqlens_k, seqused_k = cu_seqlens_k.to(cu_seqlens_q.dtype), None
    elif cu_seqlens_k is None:
        cu_seqlens_k, max_seqlen_k = equal_lengths(k), k.shape[1]
        k, v = k.flatten(0, 1), v.flatten(0, 1)
    layout = Packed(cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, seqused_k=seqused_k)
    out, lse = attend(q, k, v, layout, call, used=seqused_q)
    return (out, lse) if dense is None else as_dense(out, lse, *dense)


def _call(
    q: Tensor,
    softmax_scale: float | None,
    causal: bool,
    window_size: tuple[int | None, int | None],
    learnable_sink: Tensor | None,
    softcap: float,
    deterministic: bool,
) -> Call:
    left, right = (-1 if side is None else side for side in window_size)
    if learnable_sink is not None:
        learnable_sink = learnable_sink.to(torch.promote_types(q.dtype, torch.float32))
    return Call(
        0.0, softmax_scale, causal, (left, right), softcap or 0.0, deterministic=deterministic, sinks=learnable_sink
    )
