"""Trees of tokens that speculative decoding proposes."""

from __future__ import annotations

import torch
from torch import Tensor

from flashtile.ops.common.checks import (
    INDEX_DTYPES,
    check_cu_seqlens,
    check_cu_seqlens_values,
    check_max_seqlen,
    check_tensors,
    readable,
)


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
    check_tensors(parents=parents)
    if parents.dtype not in INDEX_DTYPES:
        raise TypeError(f"parents: expected dtype int32 or int64, got {parents.dtype}; cast it")
    packed, device = cu_seqlens is not None, parents.device
    if parents.dim() not in ((1,) if packed else (1, 2)):
        raise ValueError(
            f"parents: expected {'[total] beside cu_seqlens' if packed else '[seq] or [batch, seq]'}, got shape "
            f"{tuple(parents.shape)}"
        )
    checks = readable(parents) and not torch.compiler.is_compiling()
    tokens, above = torch.arange(parents.numel(), device=device), parents.flatten().long()
    if cu_seqlens is not None:
        check_cu_seqlens("cu_seqlens", cu_seqlens, device)
        check_max_seqlen("max_seqlen", max_seqlen)
        if checks:
            check_cu_seqlens_values("cu_seqlens", cu_seqlens, parents.numel(), max_seqlen)
        above = above.where(tokens < cu_seqlens[-1], -1)
        width = parents.numel() if max_seqlen is None else max_seqlen
        sequence = torch.searchsorted(cu_seqlens, tokens, right=True) - 1
        first = cu_seqlens.long()[sequence]
    elif max_seqlen is not None:
        raise ValueError(f"max_seqlen: expected None without cu_seqlens, got {max_seqlen!r}; it is for packed parents")
    else:
        width = parents.shape[-1]
        first = tokens - tokens % max(width, 1)
    number = tokens - first
    if checks and bool(((above >= number) | (above < -1)).any()):
        raise ValueError("parents: expected the number of an earlier token, or -1, got another one; sort the tokens")
    # By doubling: what a token sees in so many steps, it and what its ancestor sees; a token behind all sees nothing.
    shown = torch.zeros(tokens.shape[0] + 1, width, dtype=torch.bool, device=device)
    shown[:-1] = number[:, None] == torch.arange(width, device=device)
    ancestor = torch.cat([torch.where(above < 0, tokens.shape[0], first + above), tokens.new_tensor([tokens.shape[0]])])
    for _ in range(max(width - 1, 0).bit_length()):
        shown, ancestor = shown | shown[ancestor], ancestor[ancestor]
    return shown[:-1] if packed else shown[:-1].view(*parents.shape, width)
