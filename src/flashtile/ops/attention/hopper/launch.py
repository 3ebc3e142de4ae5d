"""Host side of the Hopper kernels: outputs, descriptors and the launch. The backend module that `select` names.

Descriptors belong to an address as well as to what a call looks like from outside: a plan holds their makers, which
remember. Strides, lengths, batch and heads do not decide machine code.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flashtile._backends.allocate import allocator, contiguous
from flashtile._backends.launch import Plan, constants_of, float32, int32, make_plan, plan_cache, pointer_to
from flashtile._backends.tma import (
    broadcast_layout,
    chunks_maker,
    descriptor_parameter,
    joined,
    packed_layout,
    strided_layout,
)
from flashtile.ops.attention.arguments import side_tensors
from flashtile.ops.attention.call import AuxFacts, Call, TensorFacts, describe_call
from flashtile.ops.attention.gpu.parameters import NO_SIDE, aux_pointers, positive_scale, window_parameters
from flashtile.ops.attention.gpu.score_functions import captured_parameters, score_bounds
from flashtile.ops.attention.hopper.backward_launch import backward, backward_plans, prepare_backward
from flashtile.ops.attention.hopper.configs import (
    CONSUMER_ROWS,
    PRODUCER_REGISTERS,
    SHORT,
    HopperConfig,
    column_chunks,
    config_of,
    heads_of_all,
    out_places,
    query_places,
    score_columns,
    value_chunks,
    value_parts,
)
from flashtile.ops.attention.hopper.convert import make_widening, parts_layout, plan_parts, widen
from flashtile.ops.attention.hopper.float32_forward import attention_float32_forward_kernel
from flashtile.ops.attention.hopper.forward import Problem, attention_forward_kernel
from flashtile.ops.attention.hopper.parameters import (
    bounded_layout,
    by_whole_rows,
    ends_by_rows,
    is_covered,
    row_strides,
    score_units,
    side_of_call,
    whole_sizes,
    with_aligned_lists,
)
from flashtile.ops.attention.hopper.score_functions import function_of, reads_of
from flashtile.ops.attention.hopper.scores import ScoreUnits
from flashtile.ops.attention.hopper.separate_configs import (
    CHUNK,
    MAX_REGISTERS,
    REGISTERS,
    choose_float32_forward_config,
)
from flashtile.ops.attention.hopper.wide_backward import Problem as SeparateProblem
from flashtile.ops.attention.spec import FP8, AttentionSpec, SideInputs, out_dtype
from flashtile.ops.common.checks import check_programs

__all__ = ["backward", "backward_plans", "forward", "prepare_backward", "prepare_forward"]

#: From so many keys on programs take even tiles as they come too. A multiprocessor may be held by a kernel of another
#: stream, such as a transfer: the program that waits for it starts late, and nobody else would take its share.
_LONG_KEYS = 4096

#: Up to so many queries or keys they do too, because memory limits a call. Programs that take their shares in turn keep
#: step, and load at the same time. Then memory waits while they compute, and a line of 128 bytes that two heads have in
#: common is read twice. `_keep_keys_near` has the exception.
_SHORT_ROWS = 511

#: The tensors that TMA moves, in the order of the kernel's parameters: each once for either chunk of its columns; a
#: bias once, if at all.
_MOVED = ("q", "k", "v", "out", "bias")


class ForwardPlan(NamedTuple):
    """The launch of the kernel, and what it needs.

    Attributes:
        kernel: no programs: there is nothing to launch, and outputs are filled.
        dynamic: programs take tiles as they come, and the launch needs counters.
        makers: for each of `_MOVED`, what makes its descriptors from its address: of either chunk of columns, None in
            the place of a second one that there is not.
        describe: the same of all of them, from their addresses.
        widening: of 8-bit values, which the kernel reads in 16 bits; else None.
    """

    kernel: Plan
    dynamic: bool
    makers: tuple[Callable[[int], tuple], ...]
    describe: Callable[..., tuple]
    widening: Plan | None = None


def forward(q: Tensor, k: Tensor, v: Tensor, side: SideInputs, spec: AttentionSpec) -> tuple[Tensor, ...]:
    """Runs the forward kernel. Shapes as in `flashtile.attention` and `attention_varlen`. Returns (out, lse), or (out,
    lse, max_scores)."""
    if spec.scale <= 0:
        q, spec, _ = positive_scale(q, spec)
    if q.dtype is torch.float32:
        out, lse = forward_float32(q, k, v, side, spec)
        return (out, lse) if q.numel() and k.numel() else (out.zero_(), _lse_without_keys(lse, side))
    if not ends_by_rows(k, v, side):
        k, v = by_whole_rows(k), by_whole_rows(v)
    plan = plan_forward(describe_call("forward", (q, k, v), side, spec))
    if not plan.kernel.programs:
        out, lse, *max_scores = plan.kernel.allocate()
        nothing_seen = (scores.fill_(float("-inf")) for scores in max_scores)
        return out.zero_(), _lse_without_keys(lse, side), *nothing_seen
    return _launch(plan, q, k, v, side_tensors(with_aligned_lists(side)))


def prepare_forward(
    q: Tensor, k: Tensor, v: Tensor, side: SideInputs, spec: AttentionSpec
) -> Callable[[Tensor, Tensor, Tensor, tuple], tuple[Tensor, ...]] | None:
    """`forward` of all 16-bit calls that look like this one, from q, k, v and the tensors beside them; or None."""
    if q.dtype is torch.float32 or spec.scale <= 0 or not ends_by_rows(k, v, side):
        return None
    plan = plan_forward(describe_call("forward", (q, k, v), side, spec))
    return functools.partial(_launch, plan) if plan.kernel.programs else None


def _launch(plan: ForwardPlan, q: Tensor, k: Tensor, v: Tensor, aux: tuple) -> tuple[Tensor, ...]:
    """Enqueues the kernel. `aux`: as of `arguments.side_tensors`. Returns what `forward` does."""
    kernel = plan.kernel
    if plan.widening is not None:
        v = widen(v, plan.widening)
    results = kernel.allocate()
    out, lse, *max_scores = results
    counter = _counter(kernel.device).data_ptr() if plan.dynamic else 0
    side, captured = aux_pointers(aux)
    descriptors = plan.describe(q.data_ptr(), k.data_ptr(), v.data_ptr(), out.data_ptr(), side.bias)
    of_max_scores = max_scores[0].data_ptr() if max_scores else 0
    kernel.launch(*descriptors, lse.data_ptr(), of_max_scores, counter, *side, *captured)
    return tuple(results)


def _lse_without_keys(lse: Tensor, side: SideInputs) -> Tensor:
    """The lse of rows that see no key: their sink if there is one, else -inf. Past the last sequence it is -inf."""
    if side.sinks is None:
        return lse.fill_(float("-inf"))
    lse.copy_(side.sinks[:, None].expand_as(lse))
    if side.cu_seqlens_q is not None:
        row = torch.arange(lse.shape[-1], device=lse.device)
        lse.masked_fill_(row >= side.cu_seqlens_q[-1], float("-inf"))
    return lse


def _counter(device: torch.device) -> Tensor:
    """Two int32 zeros, which the last program of a launch sets back to zero.

    Launches that may run at the same time must not share them. Launches of one stream run one after the other; but a
    graph that is being captured may later run on any stream, beside eager calls on this one, so it gets its own.
    """
    if torch._C._cuda_getDevice() != device.index:
        with torch.cuda.device(device):
            return _counter(device)
    if torch._C._cuda_isCurrentStreamCapturing():
        return torch.zeros(2, dtype=torch.int32, device=device)
    return _stream_counter(device, torch._C._cuda_getCurrentRawStream(device.index))


@functools.cache
def _stream_counter(device: torch.device, stream: int) -> Tensor:
    return torch.zeros(2, dtype=torch.int32, device=device)


@plan_cache
def plan_forward(call: Call) -> ForwardPlan:
    """Everything that can be decided before the tensors' contents are known."""
    call.check_sizes()
    spec, aux, dtype, packed, bounded = call.spec, call.aux, call.dtype, call.packed, call.bounded
    head_dim, head_dim_v = call.head_dims
    rows_q, rows_k = call.rows_q, call.rows_k
    config = config_of(call)
    whole_rows, _ = whole_sizes(call)
    tiles = call.tiles(whole_rows, config.block_m)
    parts = value_parts(head_dim_v)
    lines = parts * heads_of_all(call)
    check_programs("q", tiles * lines)
    has_work = 0 not in call.q.shape and rows_k
    programs = min(tiles * lines, config.resident * call.multiprocessors) if has_work else 0
    # Where tiles are alike, each program takes its share in turn, which needs no atomics.
    uneven = bounded or spec.banded or aux.block_lists is not None or _same_for_all_rows(aux.mask)
    short = min(rows_q, rows_k) <= _SHORT_ROWS and not _keep_keys_near(config, rows_q)
    as_they_come = uneven or rows_k >= _LONG_KEYS or short
    dynamic = as_they_come and tiles * lines > programs
    of_rows = contiguous(call.lse_shape, torch.float32)
    outputs = [contiguous(call.out_shape, out_dtype(dtype)), of_rows]
    if spec.returns_max_scores:
        outputs.append(of_rows)
    boxes = _boxes(config, column_chunks(head_dim, dtype), value_chunks(head_dim_v), packed, bounded)
    covered = is_covered(call, config.block_m, config.block_n)
    described = side_of_call(call, covered=covered, by_column=False, group=call.group)
    read = captured_parameters(aux.captured)
    bounds = score_bounds(call) if covered else None
    dtypes = dict(zip(_MOVED, (dtype, dtype, out_dtype(dtype), out_dtype(dtype), dtype)))
    parameters = {
        **{
            f"{name}{part}_desc": descriptor_parameter(dtypes[name], box)
            for name in _MOVED
            for part, box in zip(("", "_tail"), boxes[name])
        },
        "lse_ptr": pointer_to(torch.float32),
        "max_scores_ptr": pointer_to(torch.float32 if spec.returns_max_scores else None),
        "counter_ptr": pointer_to(torch.int32, 16),
        "problem": Problem(
            side=described.pointers,
            captured=read["captured"],
            batch=int32(call.batch),
            heads=int32(call.heads),
            group=int32(call.group),
            rows_q=int32(rows_q),
            rows_k=int32(rows_k),
            tiles=int32(tiles),
            lines=int32(lines),
            dynamic=int32(int(dynamic)),
            window=window_parameters(spec),
            units=ScoreUnits(*map(float32, score_units(spec))),
            numbers=described.numbers,
            k_rows_apart=int32(None if packed or not bounded else row_strides(call.k.shape, call.k.strides)[1]),
            v_rows_apart=int32(None if packed or not bounded else row_strides(call.v.shape, call.v.strides)[1]),
            captured_sizes=read["captured_sizes"],
        ),
        "constants": described.constants,
    }
    constants = {
        **constants_of(config),
        "PRODUCER_REGISTERS": PRODUCER_REGISTERS,
        "OUT_PLACES": out_places(config, head_dim, head_dim_v, dtype),
        "QUERY_PLACES": query_places(config, head_dim, head_dim_v, dtype),
        "PACKED": packed,
        "TOP_LEFT": spec.banded and spec.top_left,
        # What is larger than keys and values is read by those that run at the same time.
        "BATCH_FIRST": not packed and call.batch > 1 and any(map(_shared_by_batch, (aux.bias, aux.mask))),
        "SCORE_COLUMNS": score_columns(head_dim, dtype),
        "VALUE_PARTS": parts,
        "MASK_ENDS_KEYS": _same_for_all_rows(aux.mask),
        "SCORE_FUNCTION": None if spec.score_program is None else function_of(spec.score_program, bounds),
        "SCORE_READS": None if spec.score_program is None else reads_of(spec.score_program, bounds),
    }
    kernel = make_plan(
        attention_forward_kernel, parameters, constants, programs, call.device, num_warps=4,
        max_registers=config.max_registers, outputs=outputs,
    )  # fmt: skip
    if not programs:
        return ForwardPlan(kernel, False, (), joined(()))
    widening = make_widening(call.v.shape, call.v.strides, call.device) if dtype is FP8 else None
    strides_v = call.v.strides if widening is None else contiguous(call.v.shape, dtype).strides
    describe = packed_layout if packed else strided_layout
    describe_keys = bounded_layout if bounded else strided_layout
    layouts = [
        describe(call.q.shape, call.q.strides),
        describe_keys(call.k.shape, call.k.strides),
        describe_keys(call.v.shape, strides_v),
        describe(call.out_shape, outputs[0].strides),
    ]
    if aux.bias is not None:
        # Past the end of a bias NaN, so that too small a bias is seen; rows past those of q count for nothing.
        layouts.append(broadcast_layout(aux.bias.shape, aux.bias.strides, nan_outside=True))
    makers = tuple(
        chunks_maker(dtypes[name], boxes[name], layout) for name, layout in itertools.zip_longest(_MOVED, layouts)
    )
    return ForwardPlan(kernel, dynamic, makers, joined(makers), widening)


def _keep_keys_near(config: HopperConfig, rows_q: int) -> bool:
    """Whether the tiles of a short sequence are full ones of a single consumer. If programs take them in turn, those of
    a head run on neighbouring multiprocessors. These are on the same side of the L2 cache, which keys reach once. Time
    of tiles as they come over that, on an H200 and an H100: 128 × 128 tokens, 32 heads of 64, 1.09 and 0.97; 64 × 128,
    12 heads, 1.11 and 1.00; 128 × 256, 16 heads, 1.02 and 1.04. But 416 × 96, whose second tiles are half full, 0.97
    and 0.91."""
    return config.resident > 1 and rows_q <= SHORT and rows_q % config.block_m == 0


def _same_for_all_rows(mask: TensorFacts | None) -> bool:
    """Whether a mask is one of keys, as padding is."""
    return mask is not None and mask.shape[2] == 1 and mask.shape[3] > 1


def _shared_by_batch(table: TensorFacts | None) -> bool:
    """Whether all batch entries read one matrix of queries × keys for each head."""
    return table is not None and table.shape[0] == 1 and table.has_each_score


def _boxes(
    config: HopperConfig, chunks: tuple[int, int], chunks_v: tuple[int, int], packed: bool, bounded: bool
) -> dict[str, tuple[tuple[int, ...] | None, ...]]:
    """What one copy moves, for each of `_MOVED` and either chunk of columns; None where there is no second one.
    `bounded`: the keys of each sequence end where its length says."""
    rows = {"q": CONSUMER_ROWS, "k": config.block_n, "v": config.block_n, "out": CONSUMER_ROWS}
    widths = {"q": chunks, "k": chunks, "v": chunks_v, "out": chunks_v}
    ends = {"q": packed, "k": bounded, "v": bounded, "out": packed}
    boxes: dict[str, tuple[tuple[int, ...] | None, ...]] = {
        name: tuple(((1, 1) if ends[name] else (1,)) + (rows[name], 1, width) if width else None for width in both)
        for name, both in widths.items()
    }
    return {**boxes, "bias": ((1, 1, CONSUMER_ROWS, config.block_n) if config.bias_by_tma else None,)}


#: A copy moves a part of so many rows and columns.
_BOX = (1, CONSUMER_ROWS, 1, CHUNK)


class Float32ForwardPlan(NamedTuple):
    """The launches: the parts of q, k and v, and the kernel.

    Attributes:
        allocate: makes out, lse, and what `splits` write.
        describe: makes the descriptors of the parts from their addresses.
    """

    splits: tuple[Plan, ...]
    kernel: Plan
    allocate: Callable[[], list[Tensor]]
    describe: Callable[..., tuple]

    def launch(self, q: int, k: int, v: int, sinks: int) -> tuple[Tensor, Tensor]:
        """Enqueues the kernels, from addresses; 0 stands for sinks that are not there. Returns out and lse."""
        out, lse, *parts = self.allocate()
        if not self.kernel.programs:
            return out, lse
        for split, numbers, part in zip(self.splits, (q, k, v), parts):
            split.launch(numbers, part.data_ptr())
        descriptors = self.describe(*(part.data_ptr() for part in parts))
        self.kernel.launch(*descriptors, out.data_ptr(), lse.data_ptr(), sinks, *NO_SIDE)
        return out, lse


def forward_float32(q: Tensor, k: Tensor, v: Tensor, side: SideInputs, spec: AttentionSpec) -> tuple[Tensor, Tensor]:
    """Runs the kernels, for a scale that is positive. Shapes as in `flashtile.attention`. Returns out and lse, which
    are not written where there are no queries or no keys."""
    plan = plan_float32_forward(describe_call("forward", (q, k, v), side, spec))
    sinks = 0 if side.sinks is None else side.sinks.data_ptr()
    return plan.launch(q.data_ptr(), k.data_ptr(), v.data_ptr(), sinks)


@plan_cache
def plan_float32_forward(call: Call) -> Float32ForwardPlan:
    """Everything that can be decided before the tensors' contents are known."""
    call.check_sizes()
    spec, rows_q, rows_k = call.spec, call.rows_q, call.rows_k
    head_dim, head_dim_v = call.head_dims
    config = choose_float32_forward_config(head_dim, head_dim_v)
    widths = (CHUNK * config.chunks, CHUNK * config.chunks, CHUNK * config.value_chunks)
    parts = [parts_layout(of.shape, width) for of, width in zip((call.q, call.k, call.v), widths)]
    tiles = -(-rows_q // CONSUMER_ROWS)
    programs = tiles * call.batch * call.heads if rows_k else 0
    check_programs("q", programs)
    descriptor = descriptor_parameter(torch.bfloat16, _BOX)
    without_side = side_of_call(call._replace(aux=AuxFacts()), covered=False, by_column=False)
    parameters: dict[str, Any] = {
        **dict.fromkeys(("q_desc", "k_desc", "v_desc"), descriptor),
        "out_ptr": pointer_to(torch.float32, 16),
        "lse_ptr": pointer_to(torch.float32, 16),
        "sinks_ptr": pointer_to(torch.float32 if call.aux.sinks else None),
        "problem": SeparateProblem.from_call(call, without_side.pointers, own_tiles=tiles),
    }
    constants = {
        **constants_of(config),
        "HEAD_DIM_V": head_dim_v,
        "REGISTERS": REGISTERS,
        "PRODUCER_REGISTERS": PRODUCER_REGISTERS,
        "HAS_LEFT": spec.window_left is not None,
        "HAS_RIGHT": spec.window_right is not None,
        "TOP_LEFT": spec.banded and spec.top_left,
        "MASKS": spec.banded or rows_k % CONSUMER_ROWS != 0,
    }
    kernel = make_plan(
        attention_float32_forward_kernel, parameters, constants, programs, call.device,
        num_warps=4, max_registers=MAX_REGISTERS,
    )  # fmt: skip
    outputs = (
        contiguous(call.out_shape, torch.float32),
        contiguous(call.lse_shape, torch.float32),
    )
    if not programs:
        return Float32ForwardPlan((), kernel, allocator(outputs, call.device), joined(()))
    makers = [chunks_maker(torch.bfloat16, (_BOX,), strided_layout(of.shape, of.strides)) for of in parts]
    return Float32ForwardPlan(
        splits=tuple(
            plan_parts(of.shape, of.strides, width, call.device) for of, width in zip((call.q, call.k, call.v), widths)
        ),
        kernel=kernel,
        allocate=allocator((*outputs, *parts), call.device),
        describe=joined(makers),
    )
