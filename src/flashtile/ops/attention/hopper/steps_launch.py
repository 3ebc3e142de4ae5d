"""Host side of steps of a few sequences on Hopper in the batch-invariant mode: the launches of `steps`."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from flashtile._backends.allocate import contiguous
from flashtile._backends.devices import multiprocessors
from flashtile._backends.launch import int32, pointer_to, pointers
from flashtile._backends.pipeline import Kernel, Pipeline
from flashtile._backends.tma import TmaTensor, row_layout, strided_layout
from flashtile.ops.attention.hopper.cache_launch import CacheForward, describe_over_cache, describe_rows, plan_chunks
from flashtile.ops.attention.hopper.configs import column_chunks, forward_config, score_columns
from flashtile.ops.attention.hopper.modifiers import ScoreUnits
from flashtile.ops.attention.hopper.steps import M, StepProblem, step_values_kernel, step_weights_kernel
from flashtile.ops.common.checks import check_programs
from flashtile.ops.common.split_keys.plan import SplitCall, shaped_results
from flashtile.ops.common.tiles import tile_width

#: Tiles of keys, and of weights and values, on chip.
_KEY_STAGES, _VALUE_STAGES = 4, 6
#: Columns of the values that a thread block sums at least.
_LEAST_COLUMNS = 32
#: Registers of a thread that loads, of one that sums weights, and of all threads on average.
_PRODUCER_REGISTERS, _SUM_REGISTERS, _REGISTERS = 24, 96, 128


class StepsPlan(NamedTuple):
    """The launches of a call.

    Attributes:
        pipeline: weights, and sums of values.
        again: the forward, of the sequences that need it.
    """

    pipeline: Pipeline
    again: CacheForward

    def run(
        self, tensors: tuple[Tensor, Tensor, Tensor], others: tuple[Tensor | None, ...], length: int
    ) -> tuple[Tensor, Tensor]:
        """(out, lse). `tensors`, `others`, `length`: as in `CacheForward.run`."""
        starts, _, _, *rows = others
        given = pointers((*tensors, starts, *rows))
        out, lse, flags, *_ = self.pipeline.run(*given, length)
        return self.again.run(tensors, (out, lse), (*others, flags), length)


def plan_steps(call: SplitCall, outer: int, device: torch.device) -> StepsPlan:
    """Everything that can be decided before the tensors' contents are known. `outer`: entries or pages of the
    caches."""
    batch, _, heads, heads_kv, head_dim, head_dim_v = call.shape
    described = describe_over_cache(call, outer, device)
    config = forward_config(described)
    rows = describe_rows(call, config.block_n, 0)
    tokens, group = call.total_q or batch, heads // heads_kv
    pairs, tiles = tokens * heads_kv, -(-call.capacity // config.block_n)
    blocks = multiprocessors(device)
    splits = min(max(blocks // pairs, 1), tiles)
    width_v = tile_width(head_dim_v)
    columns = width_v
    while columns > _LEAST_COLUMNS and 2 * pairs * (width_v // columns) <= blocks:
        columns //= 2
    parts = -(-head_dim_v // columns)
    check_programs("q", pairs * max(splits, parts))
    packed = call.total_q is not None
    batch_stride, row_stride, head_stride = call.strides[0]
    token_stride = row_stride if packed else batch_stride
    units = ScoreUnits.from_spec(described.spec)
    box = 1, 1, config.block_n // rows.loads, 1
    k, v = described.k, described.v
    padded = tiles * config.block_n
    of_queries = strided_layout(
        (tokens, group, heads_kv, head_dim), (token_stride, head_stride, group * head_stride, 1)
    )
    of_keys = row_layout(k.shape, k.strides, bounded=True)
    chunks = dict(zip(("", "_tail"), column_chunks(head_dim)))
    parameters = {
        **{
            f"q{part}_desc": TmaTensor("q", call.dtype, (1, int(M), 1, width) if width else None, of_queries)
            for part, width in chunks.items()
        },
        **{
            f"k{part}_desc": TmaTensor("k", call.dtype, (*box, width) if width else None, of_keys)
            for part, width in chunks.items()
        },
        "v_desc": TmaTensor("v", call.dtype, (*box, columns), row_layout(v.shape, v.strides, bounded=True)),
        "weights_desc": TmaTensor(
            "weights", call.dtype, (1, int(M), config.block_n),
            strided_layout((pairs, group, padded), (group * padded, padded, 1)),
        ),
        "weights_ptr": pointer_to(call.dtype, 16),
        **dict.fromkeys(("sums_ptr", "references_ptr", "lse_ptr"), pointer_to(torch.float32)),
        "raised_ptr": pointer_to(torch.int32),
        "out_ptr": pointer_to(call.dtype, 16),
        "starts": pointer_to(call.index_dtypes[4]),
        "cache": rows.addresses,
        "numbers": rows.numbers,
        "problem": StepProblem(
            batch=int32(batch),
            heads_kv=int32(heads_kv),
            tokens=int32(tokens),
            splits=int32(splits),
            tiles=int32(tiles),
            scale_log2=units.scale_log2,
            cap_scale=units.cap_scale,
            lse_token=int32(1 if packed else heads),
            lse_head=int32(tokens if packed else 1),
        ),
    }  # fmt: skip
    constants = {
        "GROUP": group,
        "AHEAD": config.ahead,
        "PAGE_SIZE": rows.page_size,
        "SCORE_COLUMNS": score_columns(head_dim),
        "KEY_LOADS": rows.loads,
        "VALUE_COLUMNS": head_dim_v,
        "PRODUCER_REGISTERS": _PRODUCER_REGISTERS,
        "SUM_REGISTERS": _SUM_REGISTERS,
    }
    kernels = {
        "weights": Kernel(
            step_weights_kernel, parameters, {**constants, "STAGES": _KEY_STAGES}, pairs * splits,
            buffers={"raised_ptr": "flags"}, max_registers=_REGISTERS,
        ),
        "values": Kernel(
            step_values_kernel, parameters, {**constants, "STAGES": _VALUE_STAGES}, pairs * parts,
            max_registers=_REGISTERS,
        ),
    }  # fmt: skip
    lengths, entries, _, table, starts, new_starts, _ = call.index_dtypes
    optional = {"starts": starts, "lengths": lengths, "entries": entries, "table": table, "new_starts": new_starts}
    given = "q", "k", "v", *(name for name, there in optional.items() if there), "length"
    out, lse = shaped_results(call)
    outputs = {"out": out, "lse": lse, "flags": contiguous((tokens, heads_kv * splits), torch.int32)}
    scratch = {
        "weights": pairs * group * padded // 2,
        "sums": pairs * tiles * group * 8,
        "references": pairs * group,
    }
    return StepsPlan(
        Pipeline(device, kernels, given, outputs, scratch), plan_chunks(call, outer, 0, device, heads_kv * splits)
    )
