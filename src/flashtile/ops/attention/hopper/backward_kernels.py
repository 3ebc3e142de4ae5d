"""The kernels of the Hopper backward as its pipeline launches them: parameters, tensors that TMA moves, constants.

They follow from a call and from how its work is divided (`schedule.BackwardSchedule`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch

from flashtile._backends.alignment import batch_row_head
from flashtile._backends.allocate import Layout, contiguous_strides
from flashtile._backends.launch import ABSENT, Parameter, float32, int32, named_constants, optional, pointer_to
from flashtile._backends.pipeline import Kernel
from flashtile._backends.tma import TensorLayout, TmaTensor, broadcast_layout, packed_layout, strided_layout
from flashtile.ops.attention.call import Call, TensorFacts
from flashtile.ops.attention.gpu.parameters import SidePointers
from flashtile.ops.attention.gpu.reductions import BiasWork
from flashtile.ops.attention.gpu.score_functions import captured_parameters, score_bounds
from flashtile.ops.attention.hopper.backward import attention_backward_kernel
from flashtile.ops.attention.hopper.backward_configs import (
    BIAS_QUERIES,
    STATISTIC_COLUMNS,
    backward_chunks,
    bias_config,
    bias_programs_together,
    has_function_derivative,
    padded_strides,
    separates_derivatives,
    tile_width,
)
from flashtile.ops.attention.hopper.backward_dq import attention_begin_kernel, attention_end_kernel
from flashtile.ops.attention.hopper.backward_tiles import Problem, ScoreChange
from flashtile.ops.attention.hopper.bias_gradient import attention_bias_gradient_kernel
from flashtile.ops.attention.hopper.configs import CONSUMER_ROWS, PRODUCER_REGISTERS
from flashtile.ops.attention.hopper.modifiers import gluon_derivative, gluon_reads
from flashtile.ops.attention.hopper.parameters import LOG2_E, bounded_layout, describe_side, is_covered
from flashtile.ops.attention.hopper.schedule import NO_LOOPS, BackwardSchedule, SequenceOrder
from flashtile.ops.attention.spec import NOTHING_WANTED

#: The tensors that TMA moves in the order of the main kernel's parameters. Tensors with rows of heads may have a second
#: chunk of columns, `<name>_tail`.
_MOVED = ("q", "k", "v", "dout", "statistics", "sums", "dq", "dk", "dv", "bias", "bias_gradient")

#: The buffers of parameters whose names say what a kernel does with them, or of whom they are.
_BUFFERS = {"cleared_ptr": "sums", "turns_ptr": "semaphores", "row_logits_ptr": "sinks"}

#: Parts of a bias at most: each costs a write and a read of the whole bias in float32.
_MOST_PARTS = 8

#: The share of the time for which multiprocessors shall be busy.
_BUSY = 7 / 8


def begin_kernel(
    call: Call,
    tile: int,
    query_tiles: int,
    *,
    unit: float | None = None,
    schedule: BackwardSchedule | None = None,
    row_statistics: bool = False,
    together: int = 1,
) -> Kernel:
    """The kernel of statistics.

    Args:
        tile: queries of a program.
        query_tiles: of a head; of a packed call the slots.
        unit: minus one unit of log2 in units of scores, where statistics are operands.
        schedule: of the kernel that sums dq; None: each gradient has a kernel.
        row_statistics: the portable kernel of a bias's gradient reads them too.
        together: TOGETHER.
    """
    assert call.dout is not None
    strides = batch_row_head(call.out_shape, call.dout.strides)
    statistics, tensor = pointer_to(torch.float32), pointer_to(call.dtype, 16)
    adds_up, ordered = (False, False) if schedule is None else (schedule.adds_up, schedule.is_ordered(call))
    # Multiples of 16 bytes.
    stride_type, multiple = "i64" if max(strides) >= 2**31 else "i32", 16 // call.dtype.itemsize
    parameters = {
        **dict.fromkeys(("out_ptr", "dout_ptr"), tensor),
        "lse_ptr": statistics,
        "dlse_ptr": optional(call.has_dlse, statistics),
        "statistics_ptr": pointer_to(torch.float32 if unit is None else torch.bfloat16, 16),
        "cleared_ptr": optional(adds_up, pointer_to(torch.float32, 16)),
        "turns_ptr": optional(ordered, pointer_to(torch.int32)),
        "counter_ptr": pointer_to(torch.int32),
        "masked_dout_ptr": optional(call.may_hide_rows, tensor),
        **dict.fromkeys(("row_logits_ptr", "logit_sums_ptr"), optional(call.aux.has_row_logit, statistics)),
        "cu_seqlens_q_ptr": _offsets(call.aux.cu_seqlens_q),
        "row_statistics_ptr": optional(row_statistics, statistics),
        **_near_keys(call, covered=schedule is not None and schedule.is_covered(call)),
        "order": _sequence_order(call, schedule),
        **{
            f"stride_dout_{dimension}": Parameter(stride_type, multiple, stride)
            for dimension, stride in zip(("batch", "row", "head"), strides)
        },
        "batch": int32(call.batch),
        "heads": int32(call.heads),
        "rows_q": int32(call.rows_q),
        "query_tiles": int32(query_tiles),
        "lone_tiles": int32(0 if schedule is None else schedule.lone_tiles),
        "lse_unit": float32(unit),
    }
    head_dim, head_dim_v = call.head_dims
    constants = {
        "HEAD_DIM_V": head_dim_v,
        "E": tile_width(head_dim_v),
        "D": tile_width(head_dim),
        "M": tile,
        "PACKED": call.packed,
        "HAS_DLSE": call.has_dlse,
        "ORDERED": ordered,
        "SHARES_PROGRESS": schedule is not None and schedule.loops.SHARES_PROGRESS,
        "TOGETHER": together,
    }
    return Kernel(attention_begin_kernel, parameters, constants, query_tiles * call.lines, _BUFFERS)


def _near_keys(call: Call, covered: bool) -> dict[str, Any]:
    """The side inputs as the kernel of statistics takes them, which reads those alone that ALiBi needs."""
    side, present = describe_side(call, covered=covered, by_column=True), call.aux.by_distance
    return {
        "side": SidePointers._make(optional(present, each) for each in side.pointers),
        "side_numbers": side.numbers if present else None,
        "near_rows_k": int32(call.rows_k if present else None),
    }


def _sequence_order(call: Call, schedule: BackwardSchedule | None) -> SequenceOrder | None:
    """The order in which the main kernel takes the sequences of a packed call."""
    if schedule is None or not call.packed:
        return None
    return SequenceOrder(
        pointer_to(torch.int32), _offsets(call.aux.cu_seqlens_k), int32(call.rows_k), int32(schedule.config.block_n)
    )


def end_kernel(call: Call, schedule: BackwardSchedule) -> Kernel:
    """The kernel that rounds the sums of dq."""
    parameters = {
        "sums_ptr": pointer_to(torch.float32, 16),
        "dq_ptr": pointer_to(call.dtype, 16),
        "cu_seqlens_q_ptr": _offsets(call.aux.cu_seqlens_q),
        "batch": int32(call.batch),
        "heads": int32(call.heads),
        "rows_q": int32(call.rows_q),
        "query_tiles": int32(schedule.query_tiles),
        "lone_tiles": int32(schedule.lone_tiles),
        "scale": float32(call.spec.scale),
    }
    head_dim, _ = call.head_dims
    constants = {
        "HEAD_DIM": head_dim,
        "D": tile_width(head_dim),
        "M": schedule.config.block_m,
        "PACKED": call.packed,
    }
    return Kernel(attention_end_kernel, parameters, constants, schedule.query_tiles * call.lines)


def main_kernel(call: Call, schedule: BackwardSchedule) -> Kernel:
    """The kernel of dq, dk and dv."""
    config, covered = schedule.config, schedule.is_covered(call)
    side = describe_side(call, covered=covered, by_column=True)
    sums = not schedule.loops.SINGLE_KEY_TILE
    parameters = {
        **moved_tensors(call, schedule),
        "sums_ptr": optional(sums, pointer_to(torch.float32, 16)),
        "turns_ptr": optional(schedule.is_ordered(call), pointer_to(torch.int32)),
        "counter_ptr": pointer_to(torch.int32),
        "problem": Problem.from_call(call, schedule, side, score_change(call, covered)),
        "constants": side.constants,
        "loops": schedule.loops,
    }
    constants = {
        **named_constants(config),
        "KEYS": config.block_n,
        "M": config.block_m,
        "ORDERED": schedule.is_ordered(call),
        "PRODUCER_REGISTERS": PRODUCER_REGISTERS,
        "PACKED": call.packed,
        "TOP_LEFT": call.spec.banded and call.spec.top_left,
    }
    programs = schedule.programs(call)
    return Kernel(
        attention_backward_kernel, parameters, constants, programs, _BUFFERS, max_registers=config.max_registers
    )


def bias_gradient_kernel(call: Call, schedule: BackwardSchedule, work: BiasWork) -> Kernel:
    """The kernel of the gradient of a bias that scores share. It reads the statistics of the main kernel."""
    bias = call.aux.bias
    assert bias is not None
    cut = bias_config(call)
    covered = is_covered(call, *_bias_block(call))
    side = describe_side(call, covered=covered, by_column=True)
    in_parts = work.parts > 1
    change = score_change(call._replace(wanted=NOTHING_WANTED), covered)
    moved = moved_tensors(call, schedule._replace(config=schedule.config._replace(bias_by_tma=True)))
    problem = Problem.from_call(call, schedule, side, change)
    parameters = {
        **moved,
        "gradient_ptr": pointer_to(torch.float32 if in_parts else call.dtype, 16),
        "problem": problem._replace(order_ptr=ABSENT, slope_sums_ptr=ABSENT),
        "constants": side.constants,
        "loops": NO_LOOPS._replace(MASKS=call.spec.banded or call.bounded),
        "work": work.numbers(bias.shape),
    }
    constants = {
        **named_constants(cut),
        "KEYS": cut.keys,
        "M": BIAS_QUERIES,
        "REGISTERS": cut.registers,
        "PRODUCER_REGISTERS": PRODUCER_REGISTERS,
        "PACKED": call.packed,
        "TOP_LEFT": call.spec.banded and call.spec.top_left,
        "SHARED_BY_HEADS": bias.shape[1] < call.heads,
    }
    buffers = {**_BUFFERS, "gradient_ptr": "bias_parts" if in_parts else "dbias"}
    return Kernel(
        attention_bias_gradient_kernel, parameters, constants, work.own * work.parts, buffers,
        max_registers=cut.max_registers,
    )  # fmt: skip


def cut_bias_work(call: Call) -> BiasWork:
    """The work for the gradient of a bias: so many parts that multiprocessors are busy."""
    bias = call.aux.bias
    assert bias is not None
    at_once = call.multiprocessors * bias_programs_together(bias_config(call), *call.head_dims)
    planes = bias.shape[0] * bias.shape[1]
    own = planes * math.prod(-(-size // along) for size, along in zip(bias.shape[2:], _bias_block(call)))
    sharing = call.batch * call.heads // planes
    candidates = range(1, min(sharing, _MOST_PARTS) + 1)
    parts = next((parts for parts in candidates if _busy(own * parts, at_once) >= _BUSY), candidates[-1])
    return BiasWork(own, sharing, parts)


def _bias_block(call: Call) -> tuple[int, int]:
    """Queries and keys of a program of the gradient of a bias."""
    cut = bias_config(call)
    return BIAS_QUERIES * cut.query_tiles, cut.keys


def _busy(tiles: int, programs: int) -> float:
    """The share of the time for which so many multiprocessors compute so many equal tiles."""
    return tiles / (-(-tiles // programs) * programs)


def lse_unit(call: Call, schedule: BackwardSchedule) -> float | None:
    """Minus one unit of log2 in units of scores, where statistics are operands."""
    return -1 / (call.spec.scale * LOG2_E) if schedule.config.statistics_multiplied else None


def score_change(call: Call, covered: bool) -> ScoreChange:
    """The score function, and whether it or the soft cap has derivatives. `covered`: tiles divide the queries and keys,
    so its indices are known to be theirs."""
    program, softcap = call.spec.score_program, call.spec.softcap > 0
    apart = separates_derivatives(call)
    if program is None:
        return ScoreChange(
            captured=ABSENT,
            sizes=int32(None),
            SCORE_FUNCTION=None,
            SCORE_READS=None,
            FUNCTION_DERIVATIVE=False,
            DERIVATIVES=softcap,
            DERIVATIVES_APART=apart,
        )
    bounds = score_bounds(call) if covered else None
    read = captured_parameters(call.aux.captured)
    has_derivative = has_function_derivative(program)
    return ScoreChange(
        captured=read["captured"],
        sizes=read["captured_sizes"],
        SCORE_FUNCTION=gluon_derivative(program, bounds),
        SCORE_READS=gluon_reads(program, bounds, with_derivative=True),
        FUNCTION_DERIVATIVE=has_derivative,
        DERIVATIVES=softcap or has_derivative,
        DERIVATIVES_APART=apart,
    )


def _offsets(facts: TensorFacts | None) -> Parameter:
    return pointer_to(None if facts is None else facts.dtype)


def gradient_layouts(call: Call, shares: int) -> dict[str, Layout]:
    """dq, and dk and dv of so many shares, side by side like heads, whose rows TMA can write."""
    shapes = {
        "dq": call.q.shape,
        **{f"d{name}": shared_shape(of, shares) for name, of in (("k", call.k), ("v", call.v))},
    }
    return {name: Layout(tuple(shape), padded_strides(tuple(shape)), call.dtype) for name, shape in shapes.items()}


def shared_shape(of: TensorFacts, shares: int) -> tuple[int, ...]:
    """The shape of dk or dv in shares."""
    return *of.shape[:-2], of.shape[-2] * shares, of.shape[-1]


def statistics_box(schedule: BackwardSchedule) -> tuple[int, int]:
    """Statistics of one tile of queries: lse, then delta, of each query a number, or an operand's row."""
    block_m = schedule.config.block_m
    return (2 * block_m, STATISTIC_COLUMNS) if schedule.config.statistics_multiplied else (2, block_m)


def scratch_shapes(call: Call, schedule: BackwardSchedule) -> dict[str, tuple[int, int]]:
    """Shapes of the sums of dq, and of the statistics (`backward_dq`)."""
    rows = schedule.summed_tiles(call) * schedule.config.block_m * tile_width(call.head_dims[0]) // CONSUMER_ROWS
    parts, numbers = statistics_box(schedule)
    return {
        "sums": (rows, CONSUMER_ROWS),
        "statistics": (schedule.query_tiles * call.lines * parts, numbers),
    }


def moved_tensors(call: Call, schedule: BackwardSchedule) -> dict[str, TmaTensor]:
    """The tensors that TMA moves, by the parameters of the main kernel."""
    layouts, statistics = _layouts(call, schedule), torch.float32
    if schedule.config.statistics_multiplied:
        statistics = torch.bfloat16
    dtypes = {"sums": torch.float32, "statistics": statistics}
    swizzled = {"sums": False, "statistics": schedule.config.statistics_multiplied}
    buffers = {"dout": "masked_dout" if call.may_hide_rows else "dout", "bias_gradient": "dbias"}
    if schedule.shares > 1:
        buffers |= {"dk": "dk_shares", "dv": "dv_shares"}
    return {
        f"{name}{part}_desc": TmaTensor(
            buffers.get(name, name), dtypes.get(name, call.dtype), box, layouts[name], swizzled.get(name, True)
        )
        for name, boxes in _boxes(call, schedule).items()
        for part, box in zip(("", "_tail"), boxes)
    }


def _layouts(call: Call, schedule: BackwardSchedule) -> dict[str, TensorLayout | None]:
    assert call.dout is not None
    dout_strides = contiguous_strides(call.out_shape) if call.may_hide_rows else call.dout.strides
    gradients, bias = gradient_layouts(call, schedule.shares), call.aux.bias
    by_query, by_key = row_layouts(call)
    return {
        "q": by_query(call.q.shape, call.q.strides),
        "k": by_key(call.k.shape, call.k.strides),
        "v": by_key(call.v.shape, call.v.strides),
        "dout": by_query(call.out_shape, dout_strides),
        "dq": by_query(*gradients["dq"][:2]),
        "dk": by_key(*gradients["dk"][:2]),
        "dv": by_key(*gradients["dv"][:2]),
        "bias": None if bias is None else broadcast_layout(bias.shape, bias.strides),
        "bias_gradient": None if bias is None else strided_layout(bias.shape, padded_strides(bias.shape)),
        **{
            name: TensorLayout(shape, contiguous_strides(shape))
            for name, shape in scratch_shapes(call, schedule).items()
        },
    }


def row_layouts(call: Call) -> tuple[Any, Any]:
    """The functions that make the layout of a tensor with rows of queries, and of keys: TMA ends the rows of a sequence
    where its length does."""
    return packed_layout if call.packed else strided_layout, bounded_layout if call.bounded else strided_layout


def _boxes(call: Call, schedule: BackwardSchedule) -> Mapping[str, tuple[tuple[int, ...] | None, ...]]:
    """The box that one copy moves, for each tensor of `_MOVED` and chunk of its columns; None if TMA does not."""
    config = schedule.config
    head_dim, head_dim_v = call.head_dims
    boxes: dict[str, tuple[tuple[int, ...] | None, ...]] = {}
    for name in _MOVED:
        if name == "statistics":
            boxes[name] = (statistics_box(schedule),)
        elif name == "sums":
            # Columns of dq that are added at once: those of the tail at most, so that one descriptor serves both.
            together = min(config.sum_columns, backward_chunks(head_dim)[1] or config.sum_columns)
            boxes[name] = ((together, CONSUMER_ROWS) if config.sums_by_tma and schedule.adds_up else None,)
        elif name == "bias_gradient":
            boxes[name] = ((1, 1, CONSUMER_ROWS, CONSUMER_ROWS) if config.bias_stored else None,)
        elif name == "bias":
            boxes[name] = ((1, 1, config.block_m, CONSUMER_ROWS) if config.bias_by_tma else None,)
        elif name == "dq" and schedule.adds_up and not schedule.lone_tiles:
            boxes[name] = (None, None)
        else:
            whole, tail = backward_chunks(head_dim if name in ("q", "k", "dq", "dk") else head_dim_v)
            if name == "dq":  # leaves as it is multiplied
                whole, tail = config.sum_columns, tail if tail < config.sum_columns else 0
            rows = config.block_m if name in ("q", "dout") else CONSUMER_ROWS
            ends = call.packed if name in ("q", "dout", "dq") else call.bounded
            outer = (1, 1) if ends else (1,)
            boxes[name] = (*outer, rows, 1, whole), (*outer, rows, 1, tail) if tail else None
    return boxes


class PassKernels(NamedTuple):
    """The kernels of a backward, and the buffers that they share.

    Attributes:
        gradients: layouts of dq, and of dk and dv in `shares`.
        scratch: sizes of parts in numbers of 32 bits, without masked_dout.
        more: what kernels leave for one another beside these.
        dbias, row_statistics: of a bias that learns: its gradient, or what the portable kernel computes that from.
        zeroed: outputs that are zeros at the start.
    """

    kernels: dict[str, Kernel]
    gradients: dict[str, Layout]
    shares: int
    scratch: dict[str, int]
    more: dict[str, Layout | None]
    dbias: Layout | None = None
    row_statistics: Layout | None = None
    zeroed: tuple[str, ...] = ()
