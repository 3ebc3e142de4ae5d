"""FlashAttention-4's `flash_attn.cute` over flashtile: attention dense and packed.

docs/migrating.md ("FlashAttention-4") says what arguments mean here. `window_size` has None for an unlimited side,
`learnable_sink` is `[heads]`, and functions and blocks are those of `flashtile.compat.functions`; values of blocks are
read on the host. `qv` is as in `flashtile.compat.flash_attn_3`.

Returned are out and lse, float32 `[batch, heads, seq_q]`, packed `[heads, total_q]`. Both are differentiable.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from flashtile.compat.adapter import refuse, refuse_given
from flashtile.compat.attend import attend
from flashtile.compat.calls import Call, Packed, as_dense, equal_lengths, split_options
from flashtile.compat.flash_attn_3 import combine
from flashtile.compat.functions import Problem, block_mask_of, check_derivative, score_function
from flashtile.compat.signatures import VERSION_4


def flash_attn_func(q: Tensor, k: Tensor, v: Tensor, **given: Any) -> tuple[Tensor, Tensor]:
    """Attention of a dense batch: q `[batch, seq_q, heads, head_dim]`, k and v `[batch, seq_k, heads_kv, ...]`."""
    call, rest = _split_options(q, given)
    if _asks(rest):
        lengths = q.shape[1], k.shape[1]
        call = _with_functions(call, rest, (q.shape[0], q.shape[2], *lengths, *lengths), q.device)
    return attend(q, k, v, None, call, qv=rest["qv"])


def flash_attn_varlen_func(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor | None, cu_seqlens_k: Tensor | None,
    max_seqlen_q: int | None, max_seqlen_k: int | None, seqused_q: Tensor | None, seqused_k: Tensor | None,
    page_table: Tensor | None, **given: Any,
) -> tuple[Tensor, Tensor]:  # fmt: skip
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
    call, rest = _split_options(q, given)
    dense, qv = None, rest["qv"]
    if cu_seqlens_q is None:
        dense, qv = q.shape[:2], None if qv is None else qv.flatten(0, 1)
        cu_seqlens_q, max_seqlen_q, q = equal_lengths(q), q.shape[1], q.flatten(0, 1)
    if page_table is not None:
        if seqused_k is None:
            most = torch.full_like(page_table[:, 0], page_table.shape[1] * k.shape[1])
            seqused_k = most if cu_seqlens_k is None else cu_seqlens_k.diff()
        cu_seqlens_k = cu_seqlens_q
        max_seqlen_k = page_table.shape[1] * k.shape[1] if max_seqlen_k is None else max_seqlen_k
    elif cu_seqlens_k is None:
        cu_seqlens_k, max_seqlen_k = equal_lengths(k), k.shape[1]
        k, v = k.flatten(0, 1), v.flatten(0, 1)
    if _asks(rest):
        counts = [
            ends.diff() if used is None else used
            for ends, used in ((cu_seqlens_q, seqused_q), (cu_seqlens_k, seqused_k))
        ]
        longest = [
            _known_longest(name, most, rest)
            for name, most in (("max_seqlen_q", max_seqlen_q), ("max_seqlen_k", max_seqlen_k))
        ]
        call = _with_functions(call, rest, (cu_seqlens_q.shape[0] - 1, q.shape[1], *longest, *counts), q.device)
    layout = Packed(cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, page_table, None, seqused_k)
    out, lse = attend(q, k, v, layout, call, used=seqused_q, qv=qv)
    return (out, lse) if dense is None else as_dense(out, lse, *dense)


def flash_attn_combine(return_lse: bool, **given: Any) -> tuple[Tensor, Any]:
    """Attention over disjoint keys, put together (`flash_attn_3.combine`); lse is None without return_lse."""
    merged, lse = combine(**given)
    return merged, lse if return_lse else None


def get_scheduler_metadata(**given: Any) -> Tensor:
    """What `scheduler_metadata` takes: an empty tensor, because the kernels read the lengths by themselves."""
    names = "cu_seqlens_q", "cu_seqlens_k", "seqused_q", "seqused_k"
    for lengths in (given[name] for name in names):
        if lengths is not None:
            return torch.empty(0, dtype=torch.int32, device=lengths.device)
    raise ValueError(f"{', '.join(names)}: expected at least one, got None; pass the lengths")


def _split_options(q: Tensor, given: dict[str, Any]) -> tuple[Call, dict[str, Any]]:
    """The options among arguments, and the other arguments."""
    given["window_size"] = tuple(-1 if side is None else side for side in given["window_size"])
    given["softcap"] = given["softcap"] or 0.0
    sinks, score_mod = given.pop("learnable_sink"), given.pop("score_mod")
    call, rest = split_options(given)
    if sinks is not None:
        sinks = sinks.to(torch.promote_types(q.dtype, torch.float32))
    return call._replace(sinks=sinks), rest | {"score_mod": score_mod}


def _asks(rest: dict[str, Any]) -> bool:
    """Whether there are functions or blocks. Refuses what only functions read where there is none."""
    if rest["score_mod"] is None and rest["mask_mod"] is None:
        of_functions = {name: rest[name] for name in ("aux_tensors", "aux_scalars")}
        refuse_given("they are for score_mod and mask_mod; leave them out", **of_functions)
    return rest["score_mod"] is not None or _masks(rest)


def _masks(rest: dict[str, Any]) -> bool:
    """Whether there is what needs to know sizes."""
    names = "score_mod_bwd", "mask_mod", "block_sparse_tensors", "block_sparse_tensors_bwd"
    return any(rest.get(name) is not None for name in names)


def _known_longest(name: str, longest: int | None, rest: dict[str, Any]) -> int:
    """The longest sequence where sizes must be known; 0 where nothing asks."""
    if longest is None and _masks(rest):
        refuse(name, "an int beside mask_mod, score_mod_bwd or blocks", None, "masks need sizes")
    return 0 if longest is None else int(longest)


def _with_functions(call: Call, rest: dict[str, Any], sizes: Any, device: torch.device) -> Call:
    """The same call with functions and blocks as flashtile takes them; `sizes` are the first fields of a `Problem`."""
    problem = Problem._make((*sizes, rest["aux_tensors"], rest["aux_scalars"], device))
    score_mod, backward = rest["score_mod"], rest["score_mod_bwd"]
    function = None if score_mod is None else score_function(score_mod, problem)
    if backward is not None:
        if function is None:
            refuse("score_mod_bwd", "None without score_mod", backward, "pass score_mod, whose derivative it is")
        check_derivative(function, backward, problem)
    blocks, blocks_bwd = rest["block_sparse_tensors"], rest.get("block_sparse_tensors_bwd")
    return call._replace(score_mod=function, block_mask=block_mask_of(blocks, blocks_bwd, rest["mask_mod"], problem))


VERSION_4.serve(globals())
