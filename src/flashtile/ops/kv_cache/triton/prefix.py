"""A prefix that all sequences have in common: its rows are read once for all of them, by the forward of attention.

The queries of all sequences, and the query heads that share a key/value head, are the rows of that call. Its sequences
are segments of the prefix, as many as fill a GPU. The results join those of the rows behind the prefix
(`split_keys.attend.Prefix`).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from flashtile._backends.alignment import power_of_two_factor
from flashtile._backends.allocate import contiguous
from flashtile._backends.launch import int32, int64, pointer_to
from flashtile._backends.pipeline import Kernel, Pipeline
from flashtile.ops.common.split_keys.plan import Segments, SplitCall, attending, with_combining
from flashtile.ops.common.split_keys.rows import RowStrides
from flashtile.ops.common.tiles import power_of_two


def plan_behind_prefix(call: SplitCall, of_prefix: SplitCall, forward: Segments, device: torch.device) -> Pipeline:
    """As `split_pipeline`, of a call whose first rows, "left", follow from the prefix. Before the length it is given
    the counter of the forward.

    Args:
        call: that of the rows behind the prefix.
        of_prefix: that of the prefix (`hopper.backend.segment_call`).
        forward: of `cache_launch.plan_segments`.
    """
    segments = forward.number
    _, rows, heads_kv, _, head_dim, head_dim_v = of_prefix.shape
    left = {
        "rows": contiguous((segments, heads_kv, rows, head_dim), call.dtype),
        "left": contiguous((call.shape[0],), torch.int32),
        "prefix_lengths": contiguous((segments,), torch.int32),
        "prefix_out": contiguous((segments, heads_kv, rows, head_dim_v), call.dtype),
        "prefix_lse": contiguous((segments, heads_kv, rows), torch.float32),
    }
    of_call, attend, splits = attending(call, device, segments)
    *given, length = (name for name in of_call if name != "left")
    spread = _spread_kernel(call, rows, of_prefix.capacity, forward)
    kernels = {"spread": spread, "prefix": forward.kernel, "attend": attend}
    kernels, outputs = with_combining(call, kernels, splits, device)
    return Pipeline(device, kernels, (*given, "counter", length), {**outputs, **left})


def _spread_kernel(call: SplitCall, rows: int, shared: int, forward: Segments) -> Kernel:
    batch, seq_q, heads, heads_kv, head_dim, _ = call.shape
    group = heads // heads_kv
    multiple = power_of_two_factor(*call.strides[0])
    parameters = {
        "q_ptr": pointer_to(call.dtype, power_of_two_factor(call.misalignment)),
        "rows_ptr": pointer_to(call.dtype, 16),
        "left_ptr": pointer_to(torch.int32, 16),
        "prefix_lengths_ptr": pointer_to(torch.int32, 16),
        "q_strides": RowStrides(*(int64(stride, multiple) for stride in call.strides[0])),
        "queries": int32(rows // group),
        "seq_q": int32(call.total_q or seq_q),
        "batch": int32(batch),
        "heads_kv": int32(heads_kv),
        "shared": int32(shared),
        "segment": int32(forward.rows),
        "segments": int32(forward.number),
    }
    constants = {
        "GROUP": group,
        "HEAD_DIM": head_dim,
        "BLOCK_G": power_of_two(group),
        "BLOCK_D": power_of_two(head_dim),
    }
    return Kernel(spread_queries_kernel, parameters, constants, rows // group * heads_kv)


@triton.jit
def spread_queries_kernel(
    q_ptr, rows_ptr, left_ptr, prefix_lengths_ptr, q_strides, queries, seq_q, batch, heads_kv, shared, segment,
    segments,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_G: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Copies q to `[segments, heads_kv, queries · GROUP, head_dim]`, and writes what follows from the number of shared
    rows: the first row of each sequence that the prefix does not have, and the rows of each segment. A program has one
    query and the heads of a key/value head. `q_strides`: `RowStrides`."""
    query = tl.program_id(0) // heads_kv
    head_kv = tl.program_id(0) % heads_kv
    member = tl.arange(0, BLOCK_G)[:, None]
    column = tl.arange(0, BLOCK_D)[None, :]
    there = (member < GROUP) & (column < HEAD_DIM)
    of_query = q_ptr + (query // seq_q).to(tl.int64) * q_strides.batch + (query % seq_q).to(tl.int64) * q_strides.row
    of_heads = of_query + (head_kv * GROUP + member) * q_strides.head
    q_tile = tl.load(of_heads + column, mask=there, other=0.0)  # [GROUP, D]
    row = tl.cast(head_kv * queries + query, tl.int64) * GROUP + member
    for number in range(0, segments):
        first = rows_ptr + tl.cast(number, tl.int64) * queries * heads_kv * GROUP * HEAD_DIM
        tl.store(first + row * HEAD_DIM + column, q_tile, mask=there)
    if head_kv == 0:
        for sequence in range(query, batch, queries):
            tl.store(left_ptr + sequence, shared)
        for number in range(query, segments, queries):
            tl.store(prefix_lengths_ptr + number, tl.minimum(shared - number * segment, segment))
