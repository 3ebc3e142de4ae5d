"""The eager reference: the definition of the semantics, written to be read, not to be fast.

New rows are rotated and stored. Then, one sequence after another, all rows are gathered, and the reference of
`flashtile.attention` attends to them. It reads the lengths on the host.
"""

from __future__ import annotations

from itertools import accumulate

import torch
from torch import Tensor

from flashtile.ops.kv_cache import spec as formulas
from flashtile.ops.kv_cache.rows import append, attend
from flashtile.ops.kv_cache.spec import CacheCall, CacheSpec


def forward(call: CacheCall, spec: CacheSpec) -> tuple[Tensor, Tensor]:
    """(out, lse); shapes as in `flashtile.attention_with_kv_cache`."""
    q = formulas.packed_rows(append(call, spec, "reference"), call.cu_seqlens_q)
    total_q, heads, _ = q.shape
    out = q.new_zeros(total_q, heads, call.v_cache.shape[-1])
    lse = q.new_full((heads, total_q), float("-inf"), dtype=formulas.lse_dtype(q.dtype))
    left = [0] * call.batch if call.cache_left_padding is None else call.cache_left_padding.tolist()
    before, new = formulas.lengths_before(call, spec).tolist(), formulas.new_counts(call)
    counts = formulas.query_counts(call)
    for sequence, (count, end) in enumerate(zip(counts, accumulate(counts))):
        queries, total = slice(end - count, end), before[sequence] + new[sequence]
        row = torch.arange(min(left[sequence], total), total, device=q.device)
        where = formulas.places(call, torch.full_like(row, sequence), row)
        tree = call.tree_mask
        if tree is not None:
            tree = tree[queries, :count][None] if call.cu_seqlens_q is not None else tree[sequence, None]
        keys = formulas.gathered(call.k_cache, call.descale_k, where, q.dtype)[None]
        values = formulas.gathered(call.v_cache, call.descale_v, where, q.dtype)[None]
        result, result_lse = attend(
            q[queries][None], keys, values, call, spec, sequences=slice(sequence, sequence + 1), tree=tree,
            backend="reference",
        )  # fmt: skip
        out[queries], lse[:, queries] = result[0], result_lse[0]
    return formulas.shaped_results(call, out, lse)
