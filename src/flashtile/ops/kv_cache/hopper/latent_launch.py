"""Host side of latent attention on Hopper: its launches."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from flashtile._backends.devices import multiprocessors
from flashtile._backends.launch import GIVEN, Parameter, Plan, float32, int32, int64, pointer, pointer_to, pointers
from flashtile._backends.pipeline import Kernel, Pipeline
from flashtile._backends.tma import TmaTensor, packed_layout, strided_layout
from flashtile.ops.common.checks import MAX_POSITIONS, check_programs, check_rows
from flashtile.ops.common.split_keys.configs import choose_splits
from flashtile.ops.common.split_keys.plan import SplitCall, combine_plan, row_tiles, shaped_results
from flashtile.ops.common.split_keys.rows import Sequences
from flashtile.ops.common.tiles import box_rows
from flashtile.ops.kv_cache.hopper.latent import CHUNK, M, N, Problem, Tree, latent_attention_kernel

#: Registers of a thread that sums values and of the one that loads; those of scores have the rest of 128 on average.
_VALUE_REGISTERS, _PRODUCER_REGISTERS, _REGISTERS = 176, 24, 128
#: Chunks of values whose products are deferred where several tiles of rows read the same keys: the tensor cores are
#: the limit, not the memory. µs of 64 sequences of 16,384 rows on an H100, 128 heads: 512, without 536; in pages of 16
#: 498 and 509, of 64 482 and 483. With 16 heads 417 and 412, for places of the cache become free later.
_DEFERRED = 2

#: The buffers that a run is given: addresses, and last the length of all sequences.
_GIVEN = ("q", "cache", "lengths", "entries", "left", "table", "starts", "new_starts", "tree", "length")


class LatentPlan(NamedTuple):
    """The launches of a call. `attend` writes out and lse, or parts of them, which `combine` puts together."""

    attend: Pipeline
    combine: Plan | None

    def run(self, q: Tensor, cache: Tensor, indices: tuple[Tensor | None, ...], length: int) -> tuple[Tensor, Tensor]:
        """(out, lse), as `SplitPlan.run`. `indices`: those of `rows.Sequences`."""
        out, lse = written = self.attend.run(*map(pointer, (q, cache, *indices)), length)
        if self.combine is not None:
            out, lse = self.combine.allocate()
            self.combine.launch(*pointers((*written, out, lse)))
        return out, lse


def plan_latent(call: SplitCall, device: torch.device) -> LatentPlan:
    """Everything that can be decided before the tensors' contents are known."""
    batch, seq_q, heads, _, head_dim, _ = call.shape
    total_q = batch * seq_q if call.total_q is None else call.total_q
    check_rows("q", seq_q, MAX_POSITIONS)
    check_rows("q with all heads", total_q * heads)
    with_rows, launched = row_tiles(call, int(M))
    most = max(-(-call.visible // int(N)), 1)
    splits = min(call.num_splits, most) or choose_splits(with_rows, most, multiprocessors(device))
    programs = launched * splits if total_q else 0
    check_programs("q", programs)
    outer, row, _ = call.strides[1]
    box = box_rows(call.page_size, int(N))
    packed = call.total_q is not None
    # A single query at the last row sees all of them.
    causal = call.window_right == 0 and (packed or seq_q > 1)
    rows = total_q * heads, head_dim
    tree = call.tree or (None, None, None)
    parameters = {
        "q_desc": TmaTensor("q", call.dtype, (int(M), int(CHUNK)), strided_layout(rows, (head_dim, 1))),
        "cache_desc": TmaTensor(
            "cache", call.dtype, (1, 1, box, 1, int(CHUNK)), packed_layout((0, 1, head_dim), (row, row, 1))
        ),
        "out_ptr": pointer_to(torch.float32 if splits > 1 else call.dtype, 16),
        "lse_ptr": pointer_to(torch.float32),
        "sequences": Sequences(*map(pointer_to, call.index_dtypes)),
        "length": Parameter("i32", 1, GIVEN),
        "problem": Problem(
            batch=int32(batch),
            heads=int32(heads),
            splits=int32(splits),
            capacity=int32(call.capacity),
            seq_q=int32(None if packed else seq_q),
            total_q=int32(total_q),
            seq_new=int32(call.seq_new if call.index_dtypes[5] is None else None),
            rows_apart=int32(outer // row),
            stride_table=int64(call.stride_table),
            scale_log2=float32(call.scale / math.log(2)),
            tree=Tree(int64(tree[0]), int64(tree[1]), int32(tree[2])),
        ),
    }
    constants = {
        "CAUSAL": causal,
        "PAGE_SIZE": call.page_size,
        "PARTIAL": splits > 1,
        "DEFERRED": _DEFERRED if heads * seq_q > int(M) else 0,
        "VALUE_REGISTERS": _VALUE_REGISTERS,
        "PRODUCER_REGISTERS": _PRODUCER_REGISTERS,
    }
    kernel = Kernel(latent_attention_kernel, parameters, constants, programs, max_registers=_REGISTERS)
    results = shaped_results(call, (splits,), torch.float32) if splits > 1 else shaped_results(call)
    attend = Pipeline(device, {"attend": kernel}, _GIVEN, dict(zip(("out", "lse"), results)))
    return LatentPlan(attend, combine_plan(call, splits, device) if splits > 1 else None)
