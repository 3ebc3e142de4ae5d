"""Host side of the Hopper backward of float32: parts, descriptors and launches."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flashtile._backends.alignment import batch_row_head
from flashtile._backends.allocate import allocator, contiguous, contiguous_strides
from flashtile._backends.devices import multiprocessors
from flashtile._backends.launch import Plan, float32, int32, make_plan, plan_cache, pointer_to, strides_of
from flashtile._backends.tma import chunks_maker, descriptor_parameter, joined, strided_layout
from flashtile.ops.attention.hopper.configs import CONSUMER_ROWS, PRODUCER_REGISTERS
from flashtile.ops.attention.hopper.float32_backward import (
    attention_float32_dk_dq_kernel,
    attention_float32_dv_kernel,
    attention_split_kernel,
)
from flashtile.ops.attention.hopper.float32_backward_configs import PARTS, WIDTH
from flashtile.ops.attention.hopper.parameters import LOG2_E
from flashtile.ops.attention.hopper.wide_backward import Problem
from flashtile.ops.attention.hopper.wide_backward_configs import MAX_REGISTERS, REGISTERS, STATISTIC_ROWS
from flashtile.ops.attention.hopper.wide_backward_launch import plan_begin
from flashtile.ops.attention.plans import PLAIN_SIDE, call_sizes, longest_walk, shares_of_heads, sum_of_shares
from flashtile.ops.attention.side_parameters import window_parameters
from flashtile.ops.attention.spec import AttentionSpec
from flashtile.ops.common.checks import check_programs

#: Rows of a program of dk or dq, keys of one of dv, and rows that one splits.
_ROWS, _DV_KEYS, _SPLIT_ROWS = CONSUMER_ROWS, 2 * CONSUMER_ROWS, 64

#: What a copy moves.
_BOX = (1, CONSUMER_ROWS, 1, WIDTH)

#: The tensors that are split, in this order, and those of which each kernel moves the parts, in that of its parameters.
_SPLIT = ("q", "k", "v", "dout")
_MOVED = {"dv": ("k", "q", "dout"), "dk": ("k", "v", "q", "dout"), "dq": ("q", "dout", "k", "v")}
_DV_PARAMETERS = ("k_desc", "q_desc", "dout_desc")
_DK_DQ_PARAMETERS = ("own_scores_desc", "own_values_desc", "visited_scores_desc", "visited_values_desc")


class GradientKernel(NamedTuple):
    """The launch of one gradient, what makes its descriptors, and the tensors whose parts these describe."""

    plan: Plan
    describe: Callable[..., tuple]
    moved: tuple[str, ...]

    def launch(self, parts: dict[str, int], gradient: int, statistics: int) -> None:
        """From addresses."""
        self.plan.launch(*self.describe(*(parts[name] for name in self.moved)), gradient, statistics)


class Float32BackwardPlan(NamedTuple):
    """The launches: statistics, the parts of each of `_SPLIT`, and a gradient each.

    Attributes:
        allocate: makes dq, dk and dv (of these in parts, side by side like heads, where there are `shares` of the query
            heads), the scratch as `WideBackwardPlan` has it, and the parts of each of `_SPLIT`.
        masked_dout_at, counter_at, sink_sums_at: where in scratch those begin, in bytes.
        has_empty_rows: rows may see no key.
    """

    begin: Plan
    splits: tuple[Plan, ...]
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
        return self.begin, *self.splits, self.dv.plan, self.dk.plan, self.dq.plan

    def launch(
        self, dout: int, dlse: int, q: int, k: int, v: int, out: int, lse: int, sinks: int = 0
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Enqueues the kernels, from addresses; 0 stands for a tensor that is not there. Returns dq, dk, dv and the
        scratch."""
        dq, dk, dv, scratch, *parts = self.allocate()
        statistics = scratch.data_ptr()
        masked_dout = statistics + self.masked_dout_at if self.has_empty_rows else None
        sink_sums = statistics + self.sink_sums_at if sinks else None
        self.begin.launch(
            out, dout, lse, dlse, statistics, None, None, statistics + self.counter_at, masked_dout, sinks, sink_sums,
            None, None,
        )  # fmt: skip
        addresses = [part.data_ptr() for part in parts]
        for split, whole, place in zip(self.splits, (q, k, v, masked_dout or dout), addresses):
            split.launch(whole, place)
        of = dict(zip(_SPLIT, addresses))
        for kernel, gradient in ((self.dv, dv), (self.dk, dk), (self.dq, dq)):
            kernel.launch(of, gradient.data_ptr(), statistics)
        if self.shares > 1:
            dk, dv = sum_of_shares(dk, self.shares), sum_of_shares(dv, self.shares)
        return dq, dk, dv, scratch


@plan_cache
def plan_float32_backward(
    dtype: torch.dtype,
    device: torch.device,
    shapes: tuple[torch.Size, ...],
    strides: tuple[tuple[int, ...], ...],
    sinks: bool,
    spec: AttentionSpec,
    has_dlse: bool,
    has_empty_rows: bool,
) -> Float32BackwardPlan:
    """Everything that can be decided before the tensors' contents are known. `strides`: of q, k, v and dout."""
    q_shape, k_shape, v_shape = map(tuple, shapes)
    batch, rows_q, rows_k, heads, heads_kv, head_dim, head_dim_v = call_sizes(shapes, PLAIN_SIDE)
    dout_shape = (*q_shape[:-1], head_dim_v)
    query_tiles, key_tiles, dv_tiles = -(-rows_q // _ROWS), -(-rows_k // _ROWS), -(-rows_k // _DV_KEYS)
    steps = longest_walk(query_tiles, spec, _ROWS, _DV_KEYS)
    walks = dv_tiles * batch * heads_kv
    shares = shares_of_heads(heads // heads_kv, walks, steps, spec.banded, multiprocessors(device))
    lines, lines_kv = batch * heads, batch * heads_kv * shares
    statistic_tiles = query_tiles * (_ROWS // STATISTIC_ROWS)
    begin = plan_begin(dtype, device, q_shape, dout_shape, strides[3], statistic_tiles, sinks, has_dlse, has_empty_rows)
    read_strides = (*strides[:3], contiguous_strides(dout_shape)) if has_empty_rows else strides
    wholes = (q_shape, k_shape, v_shape, dout_shape)
    splits = tuple(_plan_split(shape, apart, device) for shape, apart in zip(wholes, read_strides))
    parts = [contiguous((*shape[:-1], PARTS * WIDTH), torch.bfloat16) for shape in wholes]
    makers = {
        name: chunks_maker(torch.bfloat16, (_BOX,), strided_layout(of.shape, of.strides))
        for name, of in zip(_SPLIT, parts)
    }
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
        "HEAD_DIM": head_dim,
        "HEAD_DIM_V": head_dim_v,
        "REGISTERS": REGISTERS,
        "PRODUCER_REGISTERS": PRODUCER_REGISTERS,
        "HAS_LEFT": spec.window_left is not None,
        "HAS_RIGHT": spec.window_right is not None,
        "TOP_LEFT": spec.banded and spec.top_left,
    }

    def gradient(
        name: str, kernel: Any, descriptors: tuple[str, ...], pointer: str, own_tiles: int, lines: int, **more: bool
    ) -> GradientKernel:
        check_programs("q", own_tiles * lines)
        parameters = {
            **dict.fromkeys(descriptors, descriptor_parameter(torch.bfloat16, _BOX)),
            pointer: pointer_to(torch.float32, 16),
            "statistics_ptr": pointer_to(torch.float32, 16),
            "problem": problem._replace(own_tiles=int32(own_tiles)),
        }
        plan = make_plan(
            kernel, parameters, {**constants, **more}, own_tiles * lines, device, num_warps=4,
            max_registers=MAX_REGISTERS,
        )  # fmt: skip
        return GradientKernel(plan, joined([makers[moved] for moved in _MOVED[name]]), _MOVED[name])

    banded, cut = spec.banded, spec.banded or rows_k % _ROWS != 0
    dk_shape, dv_shape = ((*shape[:-2], heads_kv * shares, shape[-1]) for shape in (k_shape, v_shape))
    statistics = 2 * STATISTIC_ROWS * statistic_tiles * lines
    masked_dout = math.prod(dout_shape) if has_empty_rows else 0
    counter = 4
    scratch = statistics + masked_dout + counter + (statistic_tiles * lines if sinks else 0)
    outputs = (*(contiguous(shape, dtype) for shape in (q_shape, dk_shape, dv_shape, (scratch,))), *parts)
    return Float32BackwardPlan(
        begin,
        splits,
        gradient("dv", attention_float32_dv_kernel, _DV_PARAMETERS, "dv_ptr", dv_tiles, lines_kv, MASKS=banded),
        gradient("dk", attention_float32_dk_dq_kernel, _DK_DQ_PARAMETERS, "gradient_ptr", key_tiles, lines_kv,
                 OF_KEYS=True, MASKS=banded),
        gradient("dq", attention_float32_dk_dq_kernel, _DK_DQ_PARAMETERS, "gradient_ptr", query_tiles, lines,
                 OF_KEYS=False, MASKS=cut),
        allocator(outputs, device),
        shares,
        4 * statistics,
        4 * (statistics + masked_dout),
        4 * (statistics + masked_dout + counter),
        has_empty_rows,
    )  # fmt: skip


def _plan_split(shape: tuple[int, ...], strides: tuple[int, ...], device: torch.device) -> Plan:
    """The launch that writes the parts of a tensor `[batch, rows, heads, head_dim]`, side by side."""
    batch, rows, heads, head_dim = shape
    apart = dict(zip(("batch", "row", "head"), batch_row_head(shape, strides)))
    tiles = -(-rows // _SPLIT_ROWS)
    programs = batch * tiles * heads
    check_programs("q", programs)
    parameters = {
        "numbers_ptr": pointer_to(torch.float32, 16),
        "parts_ptr": pointer_to(torch.bfloat16, 16),
        **strides_of("numbers", apart, 4),  # multiples of 16 bytes
        "heads": int32(heads),
        "rows": int32(rows),
        "tiles": int32(tiles),
    }
    constants = {"HEAD_DIM": head_dim, "ROWS": _SPLIT_ROWS}
    return make_plan(attention_split_kernel, parameters, constants, programs, device, num_warps=4)
