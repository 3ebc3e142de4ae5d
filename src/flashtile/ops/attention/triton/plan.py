"""What a launch of the portable kernels needs beside its pointers: tiles, sizes and strides.

Row strides decide machine code: with them known, the compiler needs up to 9 % less time in the inner loops (addresses
become constants), and a model has few of them. Lengths, batches and numbers of heads do not.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flashtile._backends.alignment import batch_row_head, power_of_two_factor
from flashtile._backends.allocate import Layout, contiguous, contiguous_strides
from flashtile._backends.devices import device_facts, multiprocessors
from flashtile._backends.launch import Plan, float32, int32, int64, make_plan, plan_cache, pointer_to
from flashtile.ops.attention.plans import (
    CapturedShape,
    SideShape,
    call_sizes,
    side_shape,
    tiles_of,
)
from flashtile.ops.attention.side_parameters import dropout_numbers, side_parameters, stored, window_parameters
from flashtile.ops.attention.spec import AttentionSpec, SideInputs, Table, out_dtype
from flashtile.ops.attention.triton.backward import RowTensors, attention_dkdv_kernel, attention_dq_kernel
from flashtile.ops.attention.triton.bias_gradient import attention_dbias_kernel
from flashtile.ops.attention.triton.bias_parts import plan_of_sum
from flashtile.ops.attention.triton.bias_work import BiasWork, cut_matrices, cut_work
from flashtile.ops.attention.triton.column_sums import attention_column_sums_kernel
from flashtile.ops.attention.triton.configs import (
    OWN_KEYS,
    Kernel,
    Length,
    Situation,
    TileConfig,
    choose_tiles,
    dot_precision,
    drops_bounds,
    drops_masks,
    length_of,
    situation_of,
    tile_widths,
    tiles_with_keys,
)
from flashtile.ops.attention.triton.forward import attention_forward_kernel
from flashtile.ops.attention.triton.ordered_sums import slots_for
from flashtile.ops.attention.triton.score_functions import captured_parameters, derivative_of, function_of, score_bounds
from flashtile.ops.attention.triton.shares_launch import plan_of_shares
from flashtile.ops.attention.triton.short_backward import attention_short_backward_kernel
from flashtile.ops.attention.triton.tiles import Strides, TileShape
from flashtile.ops.attention.walks import longest_walk, shares_of_heads
from flashtile.ops.common.checks import check_programs

_KERNELS = {
    "forward": attention_forward_kernel,
    "dq": attention_dq_kernel,
    "short_backward": attention_short_backward_kernel,
    "dkdv": attention_dkdv_kernel,
    "dbias": attention_dbias_kernel,
    "column_sums": attention_column_sums_kernel,
}

#: The tensors of each kernel that have strides, in the order of its parameters.
_STRIDED = {
    "forward": ("q", "k", "v", "out"),
    "dq": ("q", "k", "v", "out", "dout", "dq"),
    "short_backward": ("q", "k", "v", "out", "dout", "dq", "dk", "dv"),
    "dkdv": ("q", "k", "v", "dout", "dk", "dv"),
    "dbias": ("q", "k", "v", "dout"),
    "column_sums": ("q", "k"),
}


class AttentionPlan(NamedTuple):
    """The launch of a kernel, and what the host does with its results.

    Attributes:
        all_gradients: it is the kernel that computes dk, dv and the gradient of the bias too.
        waves: thread blocks of all launches together, where each launch has only some (`ordered_sums`); 0 = there is
            one launch.
        sum_of_parts: of the bias's gradient, where the kernel stores several.
        sum_of_shares: of dk and dv, where the kernel stores parts of them, side by side like heads.
    """

    kernel: Plan
    all_gradients: bool = False
    waves: int = 0
    sum_of_parts: Plan | None = None
    sum_of_shares: Plan | None = None

    @property
    def launches(self) -> tuple[Plan, ...]:
        plans = self.kernel, self.sum_of_parts, self.sum_of_shares
        return tuple(plan for plan in plans if plan is not None)


class _Facts(NamedTuple):
    """What a plan is made from, beside the strides, and what follows from it.

    Attributes:
        shapes: of q, k and v.
        situation, facts: what tiles are chosen by.
        work: how the gradient of a bias is cut.
        learns: that gradient is wanted.
        shares: dk and dv are in so many parts.
        covered: tiles divide the call, so that none ends past a bias or a mask.
        whole: the tiles that move divide their sequence, whose length is known.
    """

    kernel: Kernel
    dtype: torch.dtype
    shapes: tuple[tuple[int, ...], ...]
    batch: int
    side: SideShape
    spec: AttentionSpec
    situation: Situation
    tiles: TileConfig
    work: BiasWork
    learns: bool
    shares: int
    covered: bool
    whole: bool


def plan_for(
    kernel: Kernel,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dout: Tensor | None,
    side: SideInputs,
    spec: AttentionSpec,
    has_dlse: bool = False,
    sums_slopes: bool = False,
    hides_rows: bool = False,
    summed: tuple[bool, ...] = (),
    learns: bool = False,
) -> AttentionPlan:
    """The plan of a kernel. That of "dq" is of "short_backward" where this serves the call. `learns`: the gradient of
    the bias is wanted."""
    addresses = q.data_ptr() | k.data_ptr() | v.data_ptr()
    dout_stride = None
    if dout is not None:
        addresses |= dout.data_ptr()
        dout_stride = dout.stride()
    return _plan(
        kernel,
        q.dtype,
        q.device,
        (q.shape, k.shape, v.shape),
        (q.stride(), k.stride(), v.stride(), dout_stride),
        addresses & 15,
        length_of(side.max_seqlen_q, side.max_seqlen_k),
        side_shape(side),
        spec,
        has_dlse,
        sums_slopes,
        hides_rows,
        torch._C._get_cublas_allow_tf32(),
        summed,
        learns,
    )


@plan_cache
def _plan(
    kernel: Kernel,
    dtype: torch.dtype,
    device: torch.device,
    shapes: tuple[tuple[int, ...], ...],
    strides: tuple[tuple[int, ...] | None, ...],
    misalignment: int,
    length: Length,
    side: SideShape,
    spec: AttentionSpec,
    has_dlse: bool,
    sums_slopes: bool,
    hides_rows: bool,
    allow_tf32: bool,
    summed: tuple[bool, ...] = (),
    learns: bool = False,
) -> AttentionPlan:
    """Everything that can be decided before the tensors' contents are known."""
    q_shape, packed = shapes[0], side.sequences is not None
    batch, rows_q, rows_k, heads, heads_kv, head_dim, head_dim_v = call_sizes(shapes, side)
    facts = device_facts(device)
    precision = dot_precision(dtype, facts, allow_tf32)
    situation = situation_of(dtype, (head_dim, head_dim_v), spec, length, (side.bias, side.mask), precision)
    tiles = choose_tiles(kernel, facts, situation)
    whole_tiles = tiles_with_keys(situation, rows_q, rows_k, tiles, packed, facts) if kernel == "dq" else None
    if whole_tiles is not None and batch * rows_q * rows_k * heads:
        kernel, tiles = "short_backward", whole_tiles
    work = _cut(kernel, shapes, batch, side.bias, tiles)
    block_tile = (0, 0) if spec.block_shape is None else spec.block_shape[2:]
    programs = _programs(kernel, shapes, batch, packed, tiles, work)
    shares = 1
    if kernel == "dkdv" and programs:
        uneven = packed or spec.block_shape is not None or (spec.window_right is not None and spec.window_left is None)
        steps = longest_walk(tiles_of(rows_q, tiles.block_m, batch, packed), spec, tiles.block_m, tiles.block_n)
        shares = shares_of_heads(heads // heads_kv, programs, steps, uneven, multiprocessors(device))
    # Where one program owns all keys of a query head, it writes dk and dv for that head.
    written_heads = heads if kernel == "short_backward" else heads_kv * shares
    parts = [(*shape[:-2], written_heads, shape[-1]) for shape in shapes[1:]]
    triples = _stride_triples(kernel, shapes, parts, strides)
    bounded = packed or side.key_lengths_dtype is not None or not drops_bounds(kernel, situation)
    # With a block mask whole tiles of the mask are walked through, even past the end of the sequence.
    divides_q = rows_q % (block_tile[0] or tiles.block_m) == 0
    divides_k = rows_k % (block_tile[1] or tiles.block_n) == 0
    # Whether the tiles that move divide their sequence; in the gradient of the bias both tiles move.
    divides = divides_q and divides_k if kernel == "dbias" else divides_q if kernel in OWN_KEYS else divides_k
    whole = not bounded and divides
    covered = not packed and divides_q and divides_k
    outputs = _output_layouts(
        kernel, dtype, (q_shape, *parts), side, work.parts, learns, hides_rows, spec.returns_max_scores
    )
    call = _Facts(kernel, dtype, shapes, batch, side, spec, situation, tiles, work, learns, shares, covered, whole)
    in_waves = spec.deterministic and any(summed)
    parameters: dict[str, Any] = {
        **captured_parameters(side.captured, summed, in_waves),
        **_tensors(call, misalignment, outputs, has_dlse, sums_slopes, hides_rows),
        **_strides(kernel, triples),
        **_numbers(call),
        **_side(call, hides_rows),
    }
    constants = {
        **_constants(call),
        **_score_functions(call, summed, in_waves),
        "IN_WAVES": in_waves,
        "HIDES_ROWS": hides_rows,
    }
    waves = programs if in_waves else 0
    if in_waves:
        programs = slots_for(_entries(side.captured, summed), programs)
    check_programs("q", programs * shares)
    cut = tiles.num_warps, tiles.num_stages, tiles.max_registers
    plan = make_plan(_KERNELS[kernel], parameters, constants, programs * shares, device, *cut, outputs)
    short = kernel == "short_backward"
    learned = side.bias if programs and (kernel == "dbias" or (short and learns)) else None
    sum_of_parts = None if learned is None else plan_of_sum(work.parts, learned, device)
    of_shares = None
    if programs and (short or kernel == "dkdv"):
        dk, dv = outputs[1:3] if short else outputs
        of_shares = plan_of_shares(dk, dv, written_heads // heads_kv, device)
    return AttentionPlan(plan, short, waves, sum_of_parts, of_shares)


def _tensors(
    call: _Facts,
    misalignment: int,
    outputs: tuple[Layout, ...],
    has_dlse: bool,
    sums_slopes: bool,
    hides_rows: bool,
) -> dict[str, Any]:
    """The pointers, except for those of side inputs."""
    dtype, pointers = call.dtype, power_of_two_factor(misalignment)
    tensor, statistics = pointer_to(stored(dtype), pointers), pointer_to(torch.float32)
    out = pointer_to(stored(out_dtype(dtype)), pointers)
    dlse = pointer_to(torch.float32 if has_dlse else None)
    # Of all gradients, the kernel stores statistics for that of the sinks alone, and that of a bias if it is wanted.
    short = call.kernel == "short_backward"
    sums = outputs[-1].dtype if call.kernel == "dbias" or (short and call.learns) else None
    return {
        **dict.fromkeys((f"{name}_ptr" for name in ("q", "k", "v", "dout", "dq", "dk", "dv")), tensor),
        "out_ptr": out,
        "lse_ptr": statistics,
        "rows": RowTensors(
            out=out,
            dout=tensor,
            lse=statistics,
            dlse=dlse,
            statistics=pointer_to(torch.float32 if not short or call.side.sinks else None, 16),
            slope_sums=pointer_to(torch.float32 if sums_slopes else None),
            quiet=pointer_to(dtype if hides_rows and not short else None, 16),
        ),
        "max_scores_ptr": pointer_to(torch.float32 if call.spec.returns_max_scores else None),
        "statistics_ptr": pointer_to(torch.float32, 16),
        "sums_ptr": pointer_to(torch.float32 if call.kernel == "column_sums" else sums, 16),
    }


def _side(call: _Facts, hides_rows: bool) -> dict[str, Any]:
    """The side inputs that the kernel reads. Most of the backward has lse, which counts the sinks."""
    side = call.side._replace(
        sinks=call.side.sinks and (call.kernel == "forward" or hides_rows),
        dropout=call.side.dropout and call.kernel != "column_sums",
    )
    spec = call.spec._replace(origin=None) if call.kernel == "column_sums" else call.spec
    heads, by_column = call.shapes[0][-2], call.kernel in OWN_KEYS
    described = side_parameters(side, spec, heads, covered=call.covered, by_column=by_column)
    # The factor of dropout in any case: that of the bias's gradient is in its loop.
    numbers = described.numbers._replace(dropout=dropout_numbers(call.spec.dropout_p))
    return {"side": described.pointers, "numbers": numbers, "constants": described.constants}


def _strides(kernel: Kernel, triples: list[tuple[int, ...]]) -> dict[str, Strides]:
    multiple = power_of_two_factor(*(stride for triple in triples for stride in triple))
    return {
        f"{of}_strides": Strides(int64(batch, multiple), int64(head, multiple), row)
        for of, (batch, row, head) in zip(_STRIDED[kernel], triples)
    }


def _numbers(call: _Facts) -> dict[str, Any]:
    (rows_q, heads, head_dim), (rows_k, heads_kv, head_dim_v) = call.shapes[0][-3:], call.shapes[2][-3:]
    tiles = call.tiles
    width, width_v = tile_widths(call.situation)
    return {
        "batch": int32(call.batch),
        "heads": int32(heads),
        "group": int32(heads // heads_kv // call.shares),
        "shares": int32(call.shares),
        "rows_q": int32(rows_q),
        "rows_k": int32(rows_k),
        "window": window_parameters(call.spec),
        "scale": float32(call.spec.scale),
        "softcap": float32(call.spec.softcap or None),
        "work": call.work.numbers(_shared_shape(call)),
        "shape": TileShape(
            HEAD_DIM=head_dim,
            HEAD_DIM_V=head_dim_v,
            BLOCK_D=width,
            BLOCK_E=width_v,
            BLOCK_M=tiles.block_m,
            BLOCK_N=tiles.block_n,
            CHUNK=tiles.chunk,
        ),
    }


def _constants(call: _Facts) -> dict[str, Any]:
    spec, side = call.spec, call.side
    bias = None if side.bias is None else side.bias.shape
    # Where a bias is the same for all batch entries, tiles that read the same of it follow one another.
    shared_batch, shared_rows, shared_columns = (bias is not None and bias[at] == 1 for at in (0, 2, 3))
    return {
        "PACKED": side.sequences is not None,
        "TOP_LEFT": spec.top_left,
        "WHOLE": call.whole,
        "ALL_VISIBLE": call.whole and not spec.banded and drops_masks(call.situation),
        "ALIGNED": spec.origin is None or (spec.origin.row | spec.origin.column) % 16 == 0,
        "PRECISION": call.situation.precision,
        "MODIFIED": spec.softcap > 0 or side.modified or spec.score_program is not None,
        "BATCH_FIRST": shared_batch and not shared_rows,
        "SHARED_ROWS": shared_rows,
        "SHARED_COLUMNS": shared_columns,
    }


def _score_functions(call: _Facts, summed: tuple[bool, ...], in_order: bool) -> dict[str, Any]:
    """The user's function and its derivative. `summed`: the captured tensors whose gradients the kernel adds up."""
    text = call.spec.score_program
    if text is None:
        return {"SCORE_FUNCTION": None, "SCORE_DERIVATIVE": None}
    bounds = score_bounds(call.batch, call.shapes, call.side) if call.covered else None
    differentiates = call.kernel in ("dq", "dkdv")
    return {
        "SCORE_FUNCTION": function_of(text, bounds),
        "SCORE_DERIVATIVE": derivative_of(text, summed, in_order, bounds) if differentiates else None,
    }


def _entries(captured: tuple[CapturedShape, ...], summed: tuple[bool, ...]) -> int:
    """The number of gradients that are added up."""
    return sum(math.prod(of.shape) for of, wants in zip(captured, summed) if wants)


def _output_layouts(
    kernel: Kernel, dtype: torch.dtype, shapes: tuple[tuple[int, ...], ...], side: SideShape, parts: int, learns: bool,
    hides_rows: bool, max_scores: bool,
) -> tuple[Layout, ...]:  # fmt: skip
    """What the kernel writes: (out, lse), with `max_scores` also those; (dq, statistics), with `hides_rows` also dout
    for the others; (dk, dv), in the shapes of k and v that are given; the parts of the bias's gradient; or all
    gradients: (dq, dk, dv), with sinks the statistics, and where the bias learns the parts of its gradient."""
    q_shape, k_shape, v_shape = shapes
    *sequences, rows, heads, _ = q_shape
    out_shape, lse_shape = (*q_shape[:-1], v_shape[-1]), (*sequences, heads, rows)
    statistics = ((*lse_shape, 4), torch.float32)
    bias = side.bias
    bias_parts = ((parts, *(bias.shape if bias else ())), bias.dtype if bias and parts == 1 else torch.float32)
    outputs = {
        "forward": ((out_shape, out_dtype(dtype)), *((lse_shape, torch.float32),) * (2 if max_scores else 1)),
        "dq": ((q_shape, dtype), statistics, *(((out_shape, dtype),) if hides_rows else ())),
        "dkdv": ((k_shape, dtype), (v_shape, dtype)),
        "column_sums": (((*sequences, heads, k_shape[-3]), torch.float32),),
        "dbias": (bias_parts,),
        "short_backward": (
            *((shape, dtype) for shape in shapes),
            *((statistics,) if side.sinks else ()),
            *((bias_parts,) if learns else ()),
        ),
    }
    return tuple(contiguous(shape, of) for shape, of in outputs[kernel])


def _cut(
    kernel: Kernel, shapes: tuple[tuple[int, ...], ...], batch: int, bias: Table | None, tiles: TileConfig
) -> BiasWork:
    """How the gradient of a bias is cut, or, where one kernel computes all, the call."""
    if kernel == "dbias" and bias is not None:
        return cut_work(bias, shapes, batch, tiles)
    if kernel == "short_backward":
        heads = shapes[0][-2]
        return cut_matrices((1, heads) if bias is None else bias.shape[:2], batch * heads)
    return BiasWork()


def _shared_shape(call: _Facts) -> tuple[int, ...] | None:
    """The shape of the bias; where one kernel computes all and there is none, one that all sequences would share."""
    if call.kernel == "short_backward" and call.side.bias is None:
        (rows_q, heads, _), (rows_k, *_) = call.shapes[0][-3:], call.shapes[1][-3:]
        return 1, heads, rows_q, rows_k
    return None if call.side.bias is None else call.side.bias.shape


def _programs(
    kernel: Kernel,
    shapes: tuple[tuple[int, ...], ...],
    batch: int,
    packed: bool,
    tiles: TileConfig,
    work: BiasWork,
) -> int:
    """Number of programs: one for each tile, or for each slot of a packed call (see `tiles.find_sequence`)."""
    q_shape, k_shape, _ = shapes
    if kernel == "short_backward":
        return work.own * work.parts
    if kernel == "dbias":
        nothing = 0 in q_shape or 0 in k_shape or not batch
        return 0 if nothing else work.own * work.parts
    own, block = (k_shape, tiles.block_n) if kernel in OWN_KEYS else (q_shape, tiles.block_m)
    heads = (k_shape if kernel == "dkdv" else q_shape)[-2] * (1 if packed else batch)
    return 0 if 0 in own else tiles_of(own[-3], block, batch, packed) * heads


def _stride_triples(
    kernel: Kernel,
    shapes: tuple[tuple[int, ...], ...],
    parts: list[tuple[int, ...]],
    strides: tuple[tuple[int, ...] | None, ...],
) -> list[tuple[int, ...]]:
    """(batch, row, head) strides of the kernel's tensors, used ones; outputs are contiguous. `parts`: shapes of dk and
    dv."""
    out_shape = (*shapes[0][:-1], shapes[2][-1])
    written = dict(zip(("out", "dq", "dk", "dv"), (out_shape, shapes[0], *parts)))
    of_each = {name: batch_row_head(shape, contiguous_strides(shape)) for name, shape in written.items()}
    given = zip(("q", "k", "v", "dout"), (*shapes, out_shape), strides)
    of_each |= {name: batch_row_head(shape, stride) for name, shape, stride in given if stride is not None}
    return [of_each[name] for name in _STRIDED[kernel]]
