"""Host side of the Hopper backward of heads wider than 256 columns: buffers, descriptors and launches."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flashtile._backends.alignment import batch_row_head
from flashtile._backends.allocate import Layout, allocator, contiguous, contiguous_strides
from flashtile._backends.devices import multiprocessors
from flashtile._backends.launch import Plan, constants_of, float32, int32, make_plan, plan_cache, pointer_to
from flashtile._backends.tma import chunks_maker, descriptor_parameter, joined, strided_layout
from flashtile.ops.attention.hopper.backward_configs import choose_backward_config, padded_strides
from flashtile.ops.attention.hopper.backward_source import backward_plan
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
    call_sizes,
    longest_walk,
    shares_of_heads,
    sum_of_shares,
)
from flashtile.ops.attention.side_parameters import window_parameters
from flashtile.ops.attention.spec import AttentionSpec
from flashtile.ops.common.checks import check_programs

#: Rows of a program of dk or dq, and keys of one of dv.
_ROWS, _DV_KEYS = CONSUMER_ROWS, 2 * CONSUMER_ROWS

#: What a copy moves.
_BOX = (1, CONSUMER_ROWS, 1, CHUNK)

#: The tensors that each kernel moves, in the order of its parameters.
_MOVED = {
    "dv": ("k", "q", "dout", "dv"),
    "dk": ("k", "v", "q", "dout", "dk"),
    "dq": ("q", "dout", "k", "v", "dq"),
}
_DV_PARAMETERS = ("k_desc", "q_desc", "dout_desc", "dv_desc")
_DK_DQ_PARAMETERS = (
    "own_scores_desc", "own_values_desc", "visited_scores_desc", "visited_values_desc", "gradient_desc",
)  # fmt: skip


class GradientKernel(NamedTuple):
    """The launch of one gradient, and what makes its descriptors from the addresses of `_MOVED`."""

    plan: Plan
    describe: Callable[..., tuple]

    def launch(self, statistics: int, *moved: int) -> None:
        self.plan.launch(*self.describe(*moved), statistics)


class WideBackwardPlan(NamedTuple):
    """The four launches: statistics, and a gradient each.

    Attributes:
        allocate: makes dq, dk and dv (of these in parts, side by side like heads, where there are `shares` of the query
            heads), and the scratch: the statistics, where rows may see no key the dout without them, a counter that the
            first kernel writes, and beside sinks the parts of their gradient.
        masked_dout_at, counter_at, sink_sums_at: where in scratch those begin, in bytes.
        has_empty_rows: rows may see no key.
    """

    begin: Plan
    dv: GradientKernel
    dk: GradientKernel
    dq: GradientKernel
    allocate: Callable[[], list[Tensor]]
    shares: int
    masked_dout_at: int
    counter_at: int
    sink_sums_at: int
    has_empty_rows: bool

    @property
    def launches(self) -> tuple[Plan, ...]:
        return self.begin, self.dv.plan, self.dk.plan, self.dq.plan

    def launch(
        self, dout: int, dlse: int, q: int, k: int, v: int, out: int, lse: int, sinks: int = 0
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Enqueues the kernels, from addresses; 0 stands for a tensor that is not there. Returns dq, dk, dv and the
        scratch."""
        dq, dk, dv, scratch = self.allocate()
        statistics = scratch.data_ptr()
        masked_dout = statistics + self.masked_dout_at if self.has_empty_rows else None
        sink_sums = statistics + self.sink_sums_at if sinks else None
        self.begin.launch(
            out, dout, lse, dlse, statistics, None, None, statistics + self.counter_at, masked_dout, sinks, sink_sums,
            None, None,
        )  # fmt: skip
        dout = masked_dout or dout
        self.dv.launch(statistics, k, q, dout, dv.data_ptr())
        self.dk.launch(statistics, k, v, q, dout, dk.data_ptr())
        self.dq.launch(statistics, q, dout, k, v, dq.data_ptr())
        if self.shares > 1:
            dk, dv = sum_of_shares(dk, self.shares), sum_of_shares(dv, self.shares)
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
    query_tiles, key_tiles, dv_tiles = -(-rows_q // _ROWS), -(-rows_k // _ROWS), -(-rows_k // _DV_KEYS)
    steps = longest_walk(query_tiles, spec, _ROWS, _DV_KEYS)
    walks = dv_tiles * batch * heads_kv
    shares = shares_of_heads(heads // heads_kv, walks, steps, spec.banded, multiprocessors(device))
    lines, lines_kv = batch * heads, batch * heads_kv * shares
    statistic_tiles = query_tiles * (_ROWS // STATISTIC_ROWS)
    begin = plan_begin(dtype, device, q_shape, dout_shape, strides[3], statistic_tiles, sinks, has_dlse, has_empty_rows)
    problem = Problem(
        batch=int32(batch),
        heads=int32(heads),
        heads_kv=int32(heads_kv * shares),
        group=int32(heads // heads_kv // shares),
        shares=int32(shares),
        rows_q=int32(rows_q),
        rows_k=int32(rows_k),
        own_tiles=int32(0),
        statistic_tiles=int32(statistic_tiles),
        window=window_parameters(spec),
        factor=float32(spec.scale * LOG2_E),
        scale=float32(spec.scale),
    )
    constants = {
        **constants_of(config),
        "REGISTERS": REGISTERS,
        "PRODUCER_REGISTERS": PRODUCER_REGISTERS,
        "HAS_LEFT": spec.window_left is not None,
        "HAS_RIGHT": spec.window_right is not None,
        "TOP_LEFT": spec.banded and spec.top_left,
    }
    dk_shape, dv_shape = ((*shape[:-2], heads_kv * shares, shape[-1]) for shape in (k_shape, v_shape))
    written = {"dq": q_shape, "dk": dk_shape, "dv": dv_shape}
    gradients = {name: Layout(shape, padded_strides(shape), dtype) for name, shape in written.items()}
    read_strides = strides
    if has_empty_rows:
        read_strides = (*strides[:3], contiguous_strides(dout_shape))
    layouts = {
        **dict(zip(("q", "k", "v", "dout"), zip((q_shape, k_shape, v_shape, dout_shape), read_strides))),
        **{name: (of.shape, of.strides) for name, of in gradients.items()},
    }
    makers = {name: chunks_maker(dtype, (_BOX,), strided_layout(*layout)) for name, layout in layouts.items()}

    def gradient(
        name: str, kernel: Any, descriptors: tuple[str, ...], own_tiles: int, programs: int, **more: bool
    ) -> GradientKernel:
        check_programs("q", programs)
        parameters = {
            **dict.fromkeys(descriptors, descriptor_parameter(dtype, _BOX)),
            "statistics_ptr": pointer_to(torch.float32, 16),
            "problem": problem._replace(own_tiles=int32(own_tiles)),
        }
        plan = make_plan(
            kernel, parameters, {**constants, **more}, programs, device, num_warps=4, max_registers=MAX_REGISTERS
        )
        return GradientKernel(plan, joined([makers[moved] for moved in _MOVED[name]]))

    banded, cut = spec.banded, spec.banded or rows_k % _ROWS != 0
    statistics = 2 * STATISTIC_ROWS * statistic_tiles * lines
    # head_dim_v is a multiple of 8 (`backend.unsupported_reason`): TMA can read it, and what follows is aligned.
    masked_dout = math.prod(dout_shape) * dtype.itemsize // 4 if has_empty_rows else 0
    counter = 4
    scratch = statistics + masked_dout + counter + (statistic_tiles * lines if sinks else 0)
    return WideBackwardPlan(
        begin,
        gradient("dv", attention_wide_dv_kernel, _DV_PARAMETERS, dv_tiles, dv_tiles * lines_kv * config.parts,
                 MASKS=banded),
        gradient("dk", attention_wide_dk_dq_kernel, _DK_DQ_PARAMETERS, key_tiles, key_tiles * lines_kv,
                 OF_KEYS=True, MASKS=banded),
        gradient("dq", attention_wide_dk_dq_kernel, _DK_DQ_PARAMETERS, query_tiles, query_tiles * lines,
                 OF_KEYS=False, MASKS=cut),
        allocator((*gradients.values(), contiguous((scratch,), torch.float32)), device),
        shares,
        4 * statistics,
        4 * (statistics + masked_dout),
        4 * (statistics + masked_dout + counter),
        has_empty_rows,
    )  # fmt: skip


def plan_begin(
    dtype: torch.dtype, device: torch.device, q_shape: tuple[int, ...], dout_shape: tuple[int, ...],
    dout_strides: tuple[int, ...], statistic_tiles: int, sinks: bool, has_dlse: bool, has_empty_rows: bool,
) -> Plan:  # fmt: skip
    """The kernel of statistics (`backward_ends`), with tiles of `STATISTIC_ROWS` queries, of which every 64 are
    whole."""
    batch, rows_q, heads, head_dim = q_shape
    apart = batch_row_head(dout_shape, dout_strides)
    variant = BackwardVariant(
        dtype,
        head_dim,
        dout_shape[-1],
        choose_backward_config(64, 64)._replace(block_m=STATISTIC_ROWS, statistics_multiplied=False),
        packed=False,
        has_left=False,
        has_right=False,
        top_left=False,
        has_dlse=has_dlse,
        ordered=False,
        has_empty_rows=has_empty_rows,
        wide_strides=max(apart) >= 2**31,
        sinks=sinks,
        single_key_tile=True,  # dq is not summed
    )
    numbers = {
        **dict(zip(("stride_dout_batch", "stride_dout_row", "stride_dout_head"), apart)),
        "batch": batch,
        "heads": heads,
        "rows_q": rows_q,
        "query_tiles": statistic_tiles,
    }
    return backward_plan("begin", variant, numbers, statistic_tiles * batch * heads, device)
