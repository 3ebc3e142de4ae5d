"""Host side of the Hopper backward of heads wider than 256 columns: buffers, descriptors and launches."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flashtile._backends.alignment import used_strides
from flashtile._backends.allocate import allocator, contiguous_strides
from flashtile._backends.devices import multiprocessors
from flashtile._backends.launch import (
    Parameter,
    Plan,
    float32,
    int32,
    make_plan,
    plan_cache,
    plan_of,
    pointer_to,
)
from flashtile._backends.tma import chunks_maker, descriptor_parameter, joined, strided_layout
from flashtile.ops.attention.hopper.backward_configs import choose_backward_config, padded_strides
from flashtile.ops.attention.hopper.backward_source import backward_source
from flashtile.ops.attention.hopper.backward_variant import BackwardVariant
from flashtile.ops.attention.hopper.configs import CONSUMER_ROWS, PRODUCER_REGISTERS
from flashtile.ops.attention.hopper.parameters import LOG2_E
from flashtile.ops.attention.hopper.wide_backward import (
    Problem,
    attention_wide_dk_dq_kernel,
    attention_wide_dv_kernel,
)
from flashtile.ops.attention.hopper.wide_backward_configs import (
    CHUNK,
    MAX_REGISTERS,
    REGISTERS,
    STATISTIC_ROWS,
    choose_wide_backward_config,
)
from flashtile.ops.attention.plans import (
    PLAIN_SIDE,
    Layout,
    call_sizes,
    longest_walk,
    shares_of_heads,
    sum_of_shares,
)
from flashtile.ops.attention.side_parameters import window_parameters
from flashtile.ops.attention.spec import AttentionSpec
from flashtile.ops.common.checks import check_programs

#: The tensors that TMA moves.
_MOVED = ("q", "k", "v", "dout", "dq", "dk", "dv")

#: Keys of a program of dv, and rows of one of dk and dq.
_DV_KEYS, _ROWS = 2 * CONSUMER_ROWS, CONSUMER_ROWS


class WideBackwardPlan(NamedTuple):
    """The four launches: statistics, and a gradient each.

    Attributes:
        describe: makes the descriptors of `_MOVED`, from their addresses.
        allocate: makes dq, dk and dv (of these in parts, side by side like heads, where there are `shares` of the query
            heads), and the scratch: the statistics, where rows may see no key the dout without them, a counter that the
            first kernel writes, and beside sinks the parts of their gradient.
        masked_dout_at, counter_at, sink_sums_at: where in scratch those begin, in bytes.
        has_empty_rows: rows may see no key.
    """

    begin: Plan
    dv: Plan
    dk: Plan
    dq: Plan
    describe: Callable[..., tuple]
    allocate: Callable[[], list[Tensor]]
    shares: int
    masked_dout_at: int
    counter_at: int
    sink_sums_at: int
    has_empty_rows: bool


def launch_wide_backward(
    plan: WideBackwardPlan, dout: int, dlse: int, q: int, k: int, v: int, out: int, lse: int, sinks: int = 0
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Enqueues the kernels, from addresses; 0 stands for a tensor that is not there. Returns dq, dk, dv and the
    scratch."""
    dq, dk, dv, scratch = plan.allocate()
    statistics = scratch.data_ptr()
    masked_dout = statistics + plan.masked_dout_at if plan.has_empty_rows else None
    sink_sums = statistics + plan.sink_sums_at if sinks else None
    plan.begin.launch(
        out, dout, lse, dlse, statistics, None, None, statistics + plan.counter_at, masked_dout, sinks, sink_sums,
        None, None,
    )  # fmt: skip
    of_q, of_k, of_v, of_dout, of_dq, of_dk, of_dv = plan.describe(
        q, k, v, masked_dout or dout, dq.data_ptr(), dk.data_ptr(), dv.data_ptr()
    )
    plan.dv.launch(*of_k, *of_q, *of_dout, *of_dv, statistics)
    plan.dk.launch(*of_k, *of_v, *of_q, *of_dout, *of_dk, statistics)
    plan.dq.launch(*of_q, *of_dout, *of_k, *of_v, *of_dq, statistics)
    if plan.shares > 1:
        dk, dv = sum_of_shares(dk, plan.shares), sum_of_shares(dv, plan.shares)
    return dq, dk, dv, scratch


@plan_cache
def plan_wide_backward(
    dtype: torch.dtype,
    device: torch.device,
    shapes: tuple[torch.Size, ...],
    strides: tuple[tuple[int, ...], ...],
    sinks: bool,
    spec: AttentionSpec,
    has_dlse: bool,
    has_empty_rows: bool,
) -> WideBackwardPlan:
    """Everything that can be decided before the tensors' contents are known. `strides`: of q, k, v and dout."""
    q_shape, k_shape, v_shape = map(tuple, shapes)
    batch, rows_q, rows_k, heads, heads_kv, head_dim, head_dim_v = call_sizes(shapes, PLAIN_SIDE)
    dout_shape = (*q_shape[:-1], head_dim_v)
    config = choose_wide_backward_config(head_dim, head_dim_v)
    query_tiles, key_tiles = -(-rows_q // _ROWS), -(-rows_k // _ROWS)
    dv_tiles = -(-rows_k // _DV_KEYS)
    group = heads // heads_kv
    steps = longest_walk(query_tiles, spec, _ROWS, _DV_KEYS)
    shares = shares_of_heads(group, dv_tiles * batch * heads_kv, steps, spec.banded, multiprocessors(device))
    group //= shares
    lines_kv = batch * heads_kv * shares
    statistic_tiles = query_tiles * (_ROWS // STATISTIC_ROWS)
    of_dout = (0, *used_strides(dout_shape, strides[3]))[-4:-1]
    begins = BackwardVariant(
        dtype,
        head_dim,
        head_dim_v,
        choose_backward_config(64, 64)._replace(block_m=STATISTIC_ROWS, statistics_multiplied=False),
        packed=False,
        has_left=False,
        has_right=False,
        top_left=False,
        has_dlse=has_dlse,
        ordered=False,
        has_empty_rows=has_empty_rows,
        wide_strides=max(of_dout) >= 2**31,
        sinks=sinks,
        single_key_tile=True,  # dq is not summed
    )
    begin_values = {
        **dict(zip(("stride_dout_batch", "stride_dout_row", "stride_dout_head"), of_dout)),
        **{"batch": batch, "heads": heads, "rows_q": rows_q, "query_tiles": statistic_tiles, "lse_unit": None},
    }
    tiles = statistic_tiles * batch * heads
    written = (q_shape, *((*shape[:-2], heads_kv * shares, shape[-1]) for shape in (k_shape, v_shape)))
    gradients = tuple(Layout(shape, padded_strides(shape), dtype) for shape in written)
    statistics = 2 * STATISTIC_ROWS * tiles
    masked_dout = 0
    if has_empty_rows:
        # head_dim_v is a multiple of 8 (`backend.unsupported_reason`): TMA can read it, and what follows is aligned.
        masked_dout = math.prod(dout_shape) * dtype.itemsize // 4
        strides = (*strides[:3], contiguous_strides(dout_shape))
    problem = Problem(
        batch=int32(batch),
        heads=int32(heads),
        heads_kv=int32(heads_kv * shares),
        group=int32(group),
        shares=int32(shares),
        rows_q=int32(rows_q),
        rows_k=int32(rows_k),
        own_tiles=int32(dv_tiles),
        statistic_tiles=int32(statistic_tiles),
        window=window_parameters(spec),
        factor=float32(spec.scale * LOG2_E),
        scale=float32(spec.scale),
    )
    constants = {
        "CHUNKS": config.chunks,
        "VALUE_CHUNKS": config.value_chunks,
        "PARTS": config.parts,
        "PLACES": config.places,
        "SCORE_PLACES": config.score_places,
        "VALUE_PLACES": config.value_places,
        "REGISTERS": REGISTERS,
        "PRODUCER_REGISTERS": PRODUCER_REGISTERS,
        "HAS_LEFT": spec.window_left is not None,
        "HAS_RIGHT": spec.window_right is not None,
        "TOP_LEFT": spec.banded and spec.top_left,
        "MASKS": spec.banded,
    }
    tensor = descriptor_parameter(dtype, _BOX)
    statistics_ptr: dict[str, Parameter] = {"statistics_ptr": pointer_to(torch.float32, 16)}

    def plan(kernel: Any, names: tuple[str, ...], programs: int, own_tiles: int, **changes: bool) -> Plan:
        check_programs("q", programs)
        parameters = {
            **{f"{name}_desc": tensor for name in names},
            **statistics_ptr,
            "problem": problem._replace(own_tiles=int32(own_tiles)),
        }
        return make_plan(
            kernel, parameters, {**constants, **changes}, programs, device, num_warps=4, max_registers=MAX_REGISTERS
        )

    of_scores = ("own_scores", "own_values", "visited_scores", "visited_values", "gradient")
    cut_keys = spec.banded or rows_k % _ROWS != 0
    makers = [
        chunks_maker(dtype, (_BOX,), strided_layout(shape, stride))
        for shape, stride in (
            *zip((q_shape, k_shape, v_shape, dout_shape), strides),
            *((of.shape, of.strides) for of in gradients),
        )
    ]
    return WideBackwardPlan(
        plan_of(backward_source("begin", begins), begin_values, tiles, device),
        plan(
            attention_wide_dv_kernel, ("k", "q", "dout", "dv"), dv_tiles * lines_kv * config.parts, dv_tiles
        ),
        plan(attention_wide_dk_dq_kernel, of_scores, key_tiles * lines_kv, key_tiles, OF_KEYS=True),
        plan(
            attention_wide_dk_dq_kernel, of_scores, query_tiles * batch * heads, query_tiles,
            OF_KEYS=False, MASKS=cut_keys,
        ),
        lambda *addresses: tuple(make(address) for make, address in zip(makers, addresses, strict=True)),
        allocator((*gradients, Layout((statistics + masked_dout + 4 + (tiles if sinks else 0),), (1,), torch.float32)), device),
        shares,
        4 * statistics,
        4 * (statistics + masked_dout),
        4 * (statistics + masked_dout + 4),
        has_empty_rows,
    )  # fmt: skip


#: What a copy moves.
_BOX = (1, CONSUMER_ROWS, 1, CHUNK)
