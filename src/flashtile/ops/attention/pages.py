"""`attention_varlen` whose keys and values lie in pages: attention over a cache to which nothing is appended."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from flashtile.ops.common.checks import check_lengths, check_tensors, readable
from flashtile.ops.common.packed import check_cu_seqlens, check_max_seqlen
from flashtile.ops.kv_cache.api import attention_with_kv_cache


def attention_over_pages(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor | None,
    key_lengths: Tensor | None,
    max_seqlen_k: int | None,
    unserved: dict[str, Any],
    **options: Any,
) -> Tensor | tuple[Tensor, ...]:
    """Shapes as in `flashtile.attention_varlen`. `unserved`: arguments that only calls without pages have, which must
    be None or false."""
    for name, value in unserved.items():
        if value is not None and value is not False and (isinstance(value, Tensor) or value):
            raise ValueError(
                f"{name}: expected its default beside block_table, got another value; attention over pages is for "
                "inference, without dropout, bias, masks, score functions and 8-bit inputs"
            )
    if (key_lengths is None) is (cu_seqlens_k is None):
        raise ValueError(
            "key_lengths: expected the number of keys of each sequence beside block_table, either as key_lengths or by "
            f"cu_seqlens_k, got {'neither' if key_lengths is None else 'both'}; pass key_lengths"
        )
    check_max_seqlen("max_seqlen_k", max_seqlen_k)
    check_tensors(q=q)
    entries = check_cu_seqlens("cu_seqlens_q", cu_seqlens_q, q.device)
    if cu_seqlens_k is not None:
        check_cu_seqlens("cu_seqlens_k", cu_seqlens_k, q.device, entries, ", as many as for queries")
        key_lengths = cu_seqlens_k.diff()
    elif key_lengths is not None:
        check_lengths("key_lengths", key_lengths, entries - 1, q.device, "one length for each sequence")
    if max_seqlen_k is not None and key_lengths is not None and key_lengths.numel() and readable(key_lengths):
        longest = int(key_lengths.max())
        if longest > max_seqlen_k:
            raise ValueError(
                f"max_seqlen_k: expected an upper bound of the sequence lengths, got {max_seqlen_k} for a sequence of "
                f"{longest}; leave it out if it is not known"
            )
    return attention_with_kv_cache(q, k, v, cache_lengths=key_lengths, cu_seqlens_q=cu_seqlens_q, **options)
