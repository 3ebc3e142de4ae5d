"""FlashAttention-4's functions over flashtile: attention dense and packed, always with its log-sum-exp.

Shapes, softmax_scale, causal, softcap and deterministic mean what they mean in flash_attn 2. The other arguments:

- `window_size`: (left, right) number of keys visible on each side of the diagonal, None = unlimited.
- `learnable_sink`: `[heads]`, a logit beside those of the keys in each row's softmax. It is differentiable.
- `block_sparse_tensors`: the blocks of scores that are computed (`flash_attn.cute.block_sparsity`);
  `block_sparse_tensors_bwd` the same by keys, which is compared. The values are read on the host.
- `score_mod`, `mask_mod`, `aux_tensors`, `aux_scalars`: functions with the arguments that they have there, in PyTorch
  operations (`flashtile.compat.functions`). Functions in CuTe raise. `score_mod_bwd` is compared with the
  derivative of score_mod, which flashtile computes itself.
- `num_splits`, `pack_gqa`, `min_seqlen_k`, `scheduler_metadata` and `disable_scheduler_metadata` say how kernels share
  the work, and no result depends on them. `return_lse` changes nothing, because lse is always returned.
- `qv`, `gather_kv_indices`, `gather_bwd_recompute_p`, `gather_bwd_token_chunk` and `seqlen_k_per_split` raise.

Returned are out and lse, float32 `[batch, heads, seq_q]`, packed `[heads, total_q]`. Both are differentiable.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from flashtile.compat.arguments import refuse, refuse_given
from flashtile.compat.attend import attend
from flashtile.compat.block_sparsity import BlockSparseTensorsTorch, block_mask_of
from flashtile.compat.calls import Call, Packed, as_dense, equal_lengths
from flashtile.compat.combine import combine
from flashtile.compat.functions import Problem, check_derivative, score_function
from flashtile.compat.rows import check_pages, gathered_keys

_NOT_SERVED = {
    "qv": "concatenate it with q, and v with k, for flashtile.attention, or call FlashAttention-3's function",
    "gather_kv_indices": "show each query its keys by a mask_mod, or gather them and call attention for each query",
    "gather_bwd_recompute_p": "it belongs to gather_kv_indices, which is not served; leave it out",
    "gather_bwd_token_chunk": "it belongs to gather_kv_indices, which is not served; leave it out",
    "seqlen_k_per_split": "flashtile chooses where keys are split; deterministic=True makes gradients repeatable",
}


def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    qv: Tensor | None = None,
    gather_kv_indices: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int | None, int | None] = (None, None),
    learnable_sink: Tensor | None = None,
    softcap: float = 0.0,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    deterministic: bool = False,
    score_mod: Callable[..., Any] | None = None,
    score_mod_bwd: Callable[..., Any] | None = None,
    mask_mod: Callable[..., Any] | None = None,
    aux_tensors: list[Tensor] | None = None,
    aux_scalars: tuple[Any, ...] | None = None,
    block_sparse_tensors: BlockSparseTensorsTorch | None = None,
    block_sparse_tensors_bwd: BlockSparseTensorsTorch | None = None,
    return_lse: bool = False,
    gather_bwd_recompute_p: bool = False,
    gather_bwd_token_chunk: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Attention of a dense batch: q `[batch, seq_q, heads, head_dim]`, k and v `[batch, seq_k, heads_kv, ...]`."""
    _refuse_not_served(
        qv=qv, gather_kv_indices=gather_kv_indices, gather_bwd_recompute_p=gather_bwd_recompute_p or None,
        gather_bwd_token_chunk=gather_bwd_token_chunk,
    )  # fmt: skip
    call = _call(q, softmax_scale, causal, window_size, learnable_sink, softcap, deterministic)
    given = score_mod, score_mod_bwd, mask_mod, block_sparse_tensors, block_sparse_tensors_bwd
    if _asks(given, aux_tensors, aux_scalars):
        lengths = q.shape[1], k.shape[1]
        problem = Problem(q.shape[0], q.shape[2], *lengths, *lengths, aux_tensors, aux_scalars, q.device)
        call = _with_functions(call, problem, *given)
    return attend(q, k, v, None, call)


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    qv: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    min_seqlen_k: int | None = None,
    seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None,
    gather_kv_indices: Tensor | None = None,
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
    score_mod_bwd: Callable[..., Any] | None = None,
    mask_mod: Callable[..., Any] | None = None,
    block_sparse_tensors: BlockSparseTensorsTorch | None = None,
    aux_tensors: list[Tensor] | None = None,
    aux_scalars: tuple[Any, ...] | None = None,
    return_lse: bool = False,
    scheduler_metadata: Any = None,
    seqlen_k_per_split: int | None = None,
    disable_scheduler_metadata: bool = False,
    gather_bwd_recompute_p: bool = False,
    gather_bwd_token_chunk: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Attention of sequences of different lengths.

    Args:
        q: `[total_q, heads, head_dim]`; without cu_seqlens_q `[batch, seq_q, heads, head_dim]`, and the results are
            dense as well.
        k: `[total_k, heads_kv, head_dim]`; without cu_seqlens_k `[batch, seq_k, heads_kv, head_dim]`; with page_table
            pages `[pages, page_size, heads_kv, head_dim]`.
        v: likewise.
        cu_seqlens_q, cu_seqlens_k: int32 `[batch + 1]`.
        max_seqlen_q, max_seqlen_k: of the longest sequences. They help to choose tiles. A mask_mod, a score_mod_bwd and
            blocks need them, because masks are built for these sizes; positions count from each sequence's start.
        seqused_q, seqused_k: int32 `[batch]`, how many rows of each sequence there are; default all. Rows of the result
            past seqused_q are 0, and their lse is -inf.
        page_table: int32 `[batch, pages of a sequence]`, beside seqused_k.
    """
    _refuse_not_served(
        qv=qv, gather_kv_indices=gather_kv_indices, seqlen_k_per_split=seqlen_k_per_split,
        gather_bwd_recompute_p=gather_bwd_recompute_p or None, gather_bwd_token_chunk=gather_bwd_token_chunk,
    )  # fmt: skip
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
        if max_seqlen_k is None:
            max_seqlen_k = page_table.shape[1] * k.shape[1]
        k, v, cu_seqlens_k = gathered_keys(k, v, cu_seqlens_q, max_seqlen_k, block_table=page_table, lengths=lengths)
        cu_seqlens_k, seqused_k = cu_seqlens_k.to(cu_seqlens_q.dtype), None
    elif cu_seqlens_k is None:
        cu_seqlens_k, max_seqlen_k = equal_lengths(k), k.shape[1]
        k, v = k.flatten(0, 1), v.flatten(0, 1)
    layout = Packed(cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, seqused_k=seqused_k)
    given = score_mod, score_mod_bwd, mask_mod, block_sparse_tensors, None
    if _asks(given, aux_tensors, aux_scalars):
        counts_q = cu_seqlens_q.diff() if seqused_q is None else seqused_q
        counts_k = cu_seqlens_k.diff() if seqused_k is None else seqused_k
        longest_q, longest_k = (_known_longest(name, getattr(layout, name), given[1:]) for name in layout._fields[2:4])
        problem = Problem(
            cu_seqlens_q.shape[0] - 1, q.shape[1], longest_q, longest_k, counts_q, counts_k, aux_tensors, aux_scalars,
            q.device,
        )  # fmt: skip
        call = _with_functions(call, problem, *given)
    out, lse = attend(q, k, v, layout, call, used=seqused_q)
    return (out, lse) if dense is None else as_dense(out, lse, *dense)


def flash_attn_combine(
    out_partial: Tensor,
    lse_partial: Tensor,
    out: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    cu_seqlens: Tensor | None = None,
    seqused: Tensor | None = None,
    virtual_batch_idx: Tensor | None = None,
    return_lse: bool = True,
) -> tuple[Tensor, Tensor | None]:
    """Attention over disjoint keys, put together (`flashtile.compat.combine.combine`); lse is None without
    return_lse."""
    refuse_given(
        "it says in which order a kernel takes the sequences; no result depends on it",
        virtual_batch_idx=virtual_batch_idx,
    )
    merged, lse = combine(out_partial, lse_partial, out, out_dtype, cu_seqlens, seqused)
    return merged, lse if return_lse else None


def get_scheduler_metadata(
    max_seqlen_q: int,
    max_seqlen_k: int,
    nheads: int,
    nheads_kv: int,
    headdim: int,
    num_splits: int,
    headdim_v: int | None = None,
    pack_gqa: bool | None = None,
    causal: bool = False,
    window_size_left: int | None = None,
    window_size_right: int | None = None,
    seqlen_k_new: int = 0,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    cu_seqlens_k_new: Tensor | None = None,
    seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None,
    leftpad_k: Tensor | None = None,
    seqlen_k_per_split: int | None = None,
) -> Tensor:
    """What `scheduler_metadata` takes: an empty tensor, because the kernels read the lengths by themselves."""
    _refuse_not_served(seqlen_k_per_split=seqlen_k_per_split)
    for lengths in (cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k):
        if lengths is not None:
            return torch.empty(0, dtype=torch.int32, device=lengths.device)
    raise ValueError(
        "cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k: expected at least one, got None; pass the lengths"
    )


def _refuse_not_served(**arguments: object) -> None:
    for name, given in arguments.items():
        refuse_given(_NOT_SERVED[name], **{name: given})


def _asks(given: tuple[object, ...], aux_tensors: object, aux_scalars: object) -> bool:
    """Whether there are functions or blocks. What only functions read is refused without one."""
    if given[0] is None and given[2] is None:
        refuse_given(
            "they are for score_mod and mask_mod; leave them out", aux_tensors=aux_tensors, aux_scalars=aux_scalars
        )
    return any(one is not None for one in given)


def _known_longest(name: str, longest: int | None, needed_by: tuple[object, ...]) -> int:
    """The longest sequence where sizes must be known; 0 where nothing asks."""
    if longest is not None:
        return int(longest)
    if any(one is not None for one in needed_by):
        raise ValueError(
            f"{name}: expected an int beside mask_mod, score_mod_bwd or blocks, got None; masks need sizes"
        )
    return 0


def _with_functions(
    call: Call,
    problem: Problem,
    score_mod: Callable[..., Any] | None,
    score_mod_bwd: Callable[..., Any] | None,
    mask_mod: Callable[..., Any] | None,
    blocks: BlockSparseTensorsTorch | None,
    blocks_bwd: BlockSparseTensorsTorch | None,
) -> Call:
    """The same call with functions and blocks as flashtile takes them."""
    function = None if score_mod is None else score_function(score_mod, problem)
    if score_mod_bwd is not None:
        if function is None:
            refuse("score_mod_bwd", "None without score_mod", score_mod_bwd, "pass score_mod, whose derivative it is")
        check_derivative(function, score_mod_bwd, problem)
    mask = block_mask_of(blocks, blocks_bwd, mask_mod, problem)
    return call._replace(score_mod=function, block_mask=mask)


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
