"""Host side of the Hopper kernels: the pipelines of the forward. The backend module that `select` names.

Strides, lengths, batch and heads do not decide machine code.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flashtile._backends.allocate import Layout, contiguous
from flashtile._backends.launch import Plan, named_constants, plan_cache, pointer, pointer_to
from flashtile._backends.pipeline import Kernel, Pipeline
from flashtile._backends.tma import TmaTensor, broadcast_layout, strided_layout
from flashtile.ops.attention.call import Call, TensorFacts, describe_call
from flashtile.ops.attention.gpu.parameters import aux_buffers, aux_tensors, positive_scale
from flashtile.ops.attention.gpu.reductions import lse_without_keys
from flashtile.ops.attention.gpu.score_functions import score_bounds
from flashtile.ops.attention.hopper.backward_kernels import row_layouts
from flashtile.ops.attention.hopper.backward_launch import backward, backward_plans, prepare_backward
from flashtile.ops.attention.hopper.cache import CachedRows, load_shares
from flashtile.ops.attention.hopper.configs import (
    CONSUMER_ROWS,
    PRODUCER_REGISTERS,
    SHORT,
    HopperConfig,
    column_chunks,
    forward_config,
    out_places,
    query_places,
    score_columns,
    value_chunks,
    value_parts,
)
from flashtile.ops.attention.hopper.convert import parts_kernel, parts_layout, widen_kernel
from flashtile.ops.attention.hopper.float32_forward import attention_float32_forward_kernel
from flashtile.ops.attention.hopper.forward import Problem, attention_forward_kernel
from flashtile.ops.attention.hopper.modifiers import gluon_function, gluon_reads
from flashtile.ops.attention.hopper.parameters import (
    bounded_layout,
    by_whole_rows,
    describe_side,
    ends_by_rows,
    is_covered,
    whole_sizes,
    with_aligned_lists,
)
from flashtile.ops.attention.hopper.separate_configs import (
    CHUNK,
    MAX_REGISTERS,
    REGISTERS,
    choose_float32_forward_config,
)
from flashtile.ops.attention.hopper.wide_backward import Problem as SeparateProblem
from flashtile.ops.attention.spec import FP8, AttentionSpec, Aux, SideInputs, out_dtype
from flashtile.ops.common.checks import check_programs

__all__ = ["backward", "backward_plans", "forward", "prepare_backward", "prepare_forward"]

#: From so many keys on programs take even tiles as they come too. A multiprocessor may be held by a kernel of another
#: stream, such as a transfer: the program that waits for it starts late, and nobody else would take its share.
_LONG_KEYS = 4096

#: Up to so many queries or keys they do too, because memory limits a call. Programs that take their shares in turn keep
#: step, and load at the same time. Then memory waits while they compute, and a line of 128 bytes that two heads have in
#: common is read twice. `_keep_keys_near` has the exception.
_SHORT_ROWS = 511

#: The buffers that a run is given, before those of the side inputs.
_GIVEN = ("q", "k", "v", "counter")


class ForwardPlan(NamedTuple):
    """The launches of a forward.

    Attributes:
        pipeline: its first outputs are out, lse and max_scores.
        results: how many of these a call returns.
        dynamic: programs take tiles as they come, and the launch needs counters.
    """

    pipeline: Pipeline
    results: int
    dynamic: bool = False

    @property
    def kernel(self) -> Plan:
        """The launch of the kernel that computes out."""
        return self.pipeline.plans["forward"]

    def runner(self) -> Callable[[Tensor, Tensor, Tensor, Aux], tuple[Tensor, ...]]:
        """The function that enqueues the kernels, and returns what `forward` does."""
        run_kernels, results, dynamic, device = self.pipeline.run, self.results, self.dynamic, self.kernel.device

        def run(q: Tensor, k: Tensor, v: Tensor, aux: Aux) -> tuple[Tensor, ...]:
            counter = tile_counter(device) if dynamic else None  # held while results are allocated: not their memory
            tensors = q.data_ptr(), k.data_ptr(), v.data_ptr(), pointer(counter)
            addresses = [tensor.data_ptr() for tensor in aux] if aux else ()
            return (*run_kernels(*tensors, *addresses)[:results],)

        return run


def forward(q: Tensor, k: Tensor, v: Tensor, side: SideInputs, spec: AttentionSpec) -> tuple[Tensor, ...]:
    """Runs the forward kernels. Shapes as in `flashtile.attention` and `attention_varlen`. Returns (out, lse), or (out,
    lse, max_scores)."""
    if spec.scale <= 0:
        q, spec, _ = positive_scale(q, spec)
    if not ends_by_rows(k, v, side):
        k, v = by_whole_rows(k), by_whole_rows(v)
    plan = plan_forward(describe_call("forward", (q, k, v), side, spec))
    side = with_aligned_lists(side)
    out, lse, *max_scores = plan.runner()(q, k, v, aux_tensors(side))
    if not plan.kernel.programs:
        nothing_seen = (scores.fill_(float("-inf")) for scores in max_scores)
        return out.zero_(), lse_without_keys(lse, side), *nothing_seen
    return out, lse, *max_scores


def prepare_forward(
    q: Tensor, k: Tensor, v: Tensor, side: SideInputs, spec: AttentionSpec
) -> Callable[[Tensor, Tensor, Tensor, Aux], tuple[Tensor, ...]] | None:
    """`forward` of all 16-bit calls that look like this one, from q, k, v and the tensors beside them; or None."""
    if q.dtype is torch.float32 or spec.scale <= 0 or not ends_by_rows(k, v, side):
        return None
    plan = plan_forward(describe_call("forward", (q, k, v), side, spec))
    return plan.runner() if plan.kernel.programs else None


def tile_counter(device: torch.device) -> Tensor:
    """Two int32 zeros, which the last program of a launch sets back to zero.

    Launches that may run at the same time must not share them. Launches of one stream run one after the other; but a
    graph that is being captured may later run on any stream, beside eager calls on this one, so it gets its own.
    """
    if torch._C._cuda_getDevice() != device.index:
        with torch.cuda.device(device):
            return tile_counter(device)
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
    return _plan_float32(call) if call.dtype is torch.float32 else _plan(call)


def _plan(call: Call) -> ForwardPlan:
    """A forward of 16 and 8 bits."""
    spec, aux, dtype = call.spec, call.aux, call.dtype
    config = forward_config(call)
    whole_rows, _ = whole_sizes(call)
    tiles, lines = call.tiles(whole_rows, config.block_m), value_parts(call.head_dims[1]) * call.lines
    check_programs("q", tiles * lines)
    has_work = 0 not in call.q.shape and call.rows_k
    programs = min(tiles * lines, config.resident * call.multiprocessors) if has_work else 0
    # If tiles are alike, each program takes its share in turn, which needs no atomics.
    uneven = call.bounded or spec.banded or aux.block_lists is not None or _same_for_all_rows(aux.mask)
    short = min(call.rows_q, call.rows_k) <= _SHORT_ROWS and not _keep_keys_near(config, call.rows_q)
    dynamic = (uneven or call.rows_k >= _LONG_KEYS or short) and tiles * lines > programs
    kernels = {"forward": forward_kernel(call, config, programs, tiles, lines, dynamic)}
    if dtype is FP8 and programs:
        kernels = {"widen": widen_kernel(call.v.shape, call.v.strides), **kernels}
    rows = contiguous(call.lse_shape, torch.float32)
    outputs = {
        "out": contiguous(call.out_shape, out_dtype(dtype)),
        "lse": rows,
        "max_scores": rows if spec.returns_max_scores else None,
        "wide_v": contiguous(call.v.shape, torch.bfloat16) if "widen" in kernels else None,
    }
    pipeline = Pipeline(call.device, kernels, (*_GIVEN, *aux_buffers(call)), outputs)
    return ForwardPlan(pipeline, 3 if spec.returns_max_scores else 2, dynamic and programs > 0)


def forward_kernel(
    call: Call,
    config: HopperConfig,
    programs: int,
    tiles: int,
    lines: int,
    dynamic: bool,
    cache: CachedRows | None = None,
) -> Kernel:
    """`tiles`, `lines`, `dynamic`, `cache`: as in `forward.Problem`."""
    spec, aux, dtype = call.spec, call.aux, call.dtype
    covered = is_covered(call, config.block_m, config.block_n)
    side = describe_side(call, covered=covered, by_column=False, group=call.group)
    bounds = score_bounds(call) if covered else None
    by_threads = cache is not None and cache.registers > 0
    parameters = {
        **_moved_tensors(call, config, cache),
        "lse_ptr": pointer_to(torch.float32),
        "max_scores_ptr": pointer_to(torch.float32 if spec.returns_max_scores else None),
        "counter_ptr": pointer_to(torch.int32, 16),
        "problem": Problem.from_call(call, side, tiles, lines, dynamic, cache),
        "constants": side.constants,
    }
    constants = {
        **named_constants(config),
        "PRODUCER_REGISTERS": PRODUCER_REGISTERS,
        "OUT_PLACES": out_places(config, *call.head_dims, dtype),
        "QUERY_PLACES": query_places(config, *call.head_dims, dtype),
        "PACKED": call.packed,
        "CACHED": cache is not None,
        "PAGE_SIZE": 0 if cache is None else cache.page_size,
        "SHARES": 1 if cache is None or config.stages == 1 else load_shares(cache.loads),
        "LOADER_REGISTERS": cache.registers if cache is not None else 0,
        "WIDENED": "" if cache is None else cache.widened,
        **dict(zip(("HEAD_DIM", "HEAD_DIM_V"), call.head_dims if by_threads else (0, 0))),
        "TOP_LEFT": spec.banded and spec.top_left,
        # What is larger than keys and values is read by those that run at the same time.
        "BATCH_FIRST": not call.packed and call.batch > 1 and any(map(_shared_by_batch, (aux.bias, aux.mask))),
        "SCORE_COLUMNS": min(score_columns(call.head_dims[0], dtype), 128 if by_threads else 256),
        "VALUE_PARTS": value_parts(call.head_dims[1]),
        "MASK_ENDS_KEYS": _same_for_all_rows(aux.mask),
        "SCORE_FUNCTION": None if spec.score_program is None else gluon_function(spec.score_program, bounds),
        "SCORE_READS": None if spec.score_program is None else gluon_reads(spec.score_program, bounds),
    }
    return Kernel(attention_forward_kernel, parameters, constants, programs, max_registers=config.max_registers)


def _moved_tensors(call: Call, config: HopperConfig, cache: CachedRows | None) -> dict[str, TmaTensor]:
    """The tensors that TMA moves, by the parameters of the kernel: each tensor once for either chunk of its columns."""
    dtype, (by_query, by_key), bias = call.dtype, row_layouts(call), call.aux.bias
    bounded, keys = call.bounded, config.block_n
    if cache is not None:
        bounded, by_key, keys = True, bounded_layout, config.block_n // cache.loads if cache.loads else 0
    head_dim, head_dim_v = call.head_dims
    chunks, chunks_v = column_chunks(head_dim, dtype), value_chunks(head_dim_v)
    if cache is not None and cache.registers:
        # A product of 256 columns is compiled with more registers than so many threads have at the start.
        chunks, chunks_v = ((128, 128) if widths == (256, 0) else widths for widths in (chunks, chunks_v))
    v_strides, out_strides = call.v.strides, contiguous(call.out_shape, dtype).strides
    if dtype is FP8:
        v_strides = contiguous(call.v.shape, dtype).strides
    moved = {}
    for name, buffer, of_type, ends, rows, widths, layout in (
        ("q", "q", dtype, call.packed, CONSUMER_ROWS, chunks, by_query(call.q.shape, call.q.strides)),
        ("k", "k", dtype, bounded, keys, chunks, by_key(call.k.shape, call.k.strides)),
        (
            "v", "wide_v" if dtype is FP8 else "v", out_dtype(dtype), bounded, keys, chunks_v,
            by_key(call.v.shape, v_strides),
        ),
        ("out", "out", out_dtype(dtype), call.packed, CONSUMER_ROWS, chunks_v, by_query(call.out_shape, out_strides)),
    ):  # fmt: skip
        for part, width in zip(("", "_tail"), widths):
            box = ((1, 1) if ends else (1,)) + (rows, 1, width) if width and rows else None
            moved[f"{name}{part}_desc"] = TmaTensor(buffer, of_type, box, layout)
    # Past the end of a bias NaN, so that too small a bias is seen; rows past those of q count for nothing.
    layout = None if bias is None else broadcast_layout(bias.shape, bias.strides, nan_outside=True)
    box = (1, 1, CONSUMER_ROWS, config.block_n) if config.bias_by_tma else None
    return {**moved, "bias_desc": TmaTensor("bias", dtype, box, layout)}


def _plan_float32(call: Call) -> ForwardPlan:
    """Products of the parts of q, k and v."""
    spec, config = call.spec, choose_float32_forward_config(*call.head_dims)
    tiles = -(-call.rows_q // CONSUMER_ROWS)
    programs = tiles * call.lines if call.rows_k else 0
    check_programs("q", programs)
    widths = {"q": CHUNK * config.chunks, "k": CHUNK * config.chunks, "v": CHUNK * config.value_chunks}
    kernels: dict[str, Kernel] = {}
    parts: dict[str, Layout] = {}
    parameters: dict[str, Any] = {}
    for name, of in {"q": call.q, "k": call.k, "v": call.v}.items():
        parts[f"{name}_parts"] = layout = parts_layout(of.shape, widths[name])
        moved = strided_layout(layout.shape, layout.strides)
        # A copy moves a part of so many rows and columns.
        box = 1, CONSUMER_ROWS, 1, CHUNK
        parameters[f"{name}_desc"] = TmaTensor(f"{name}_parts", torch.bfloat16, box, moved)
        if programs:
            kernels[f"parts_{name}"] = parts_kernel(name, f"{name}_parts", of.shape, of.strides, widths[name])
    side = describe_side(call, covered=False, by_column=False)
    parameters |= {
        **dict.fromkeys(("out_ptr", "lse_ptr"), pointer_to(torch.float32, 16)),
        "problem": SeparateProblem.from_call(call, side.pointers, own_tiles=tiles),
    }
    constants = {
        **named_constants(config),
        "HEAD_DIM_V": call.head_dims[1],
        "REGISTERS": REGISTERS,
        "PRODUCER_REGISTERS": PRODUCER_REGISTERS,
        "HAS_LEFT": spec.window_left is not None,
        "HAS_RIGHT": spec.window_right is not None,
        "TOP_LEFT": spec.banded and spec.top_left,
        "MASKS": spec.banded or call.rows_k % CONSUMER_ROWS != 0,
    }
    kernels["forward"] = Kernel(
        attention_float32_forward_kernel, parameters, constants, programs, max_registers=MAX_REGISTERS
    )
    outputs = {
        "out": contiguous(call.out_shape, torch.float32),
        "lse": contiguous(call.lse_shape, torch.float32),
        **(parts if programs else {}),
    }
    return ForwardPlan(Pipeline(call.device, kernels, (*_GIVEN, *aux_buffers(call)), outputs), 2)


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
