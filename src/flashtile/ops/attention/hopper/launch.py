"""Host side of the Hopper kernels: outputs, descriptors and the launch. The backend module that `select` names.

As in the portable backend, all that a launch needs beside its pointers is a `Plan`, looked up under what the call looks
like from outside. Descriptors belong to an address as well: a plan holds their makers, which remember.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from flashtile._backends.allocate import contiguous_strides, empty
from flashtile._backends.devices import device_facts, multiprocessors
from flashtile._backends.launch import ELEMENT_TYPES, KernelSource, make_launcher, pointer
from flashtile._backends.tma import chunks_maker, descriptor_type, packed_layout, strided_layout
from flashtile.ops.attention.hopper.backward_launch import backward
from flashtile.ops.attention.hopper.block_parameters import (
    BLOCK_MULTIPLES,
    block_constants,
    block_lists,
    block_parameter_types,
    whole_tiles,
)
from flashtile.ops.attention.hopper.configs import (
    CONSUMER_ROWS,
    PRODUCER_REGISTERS,
    HopperConfig,
    choose_config,
    column_chunks,
    out_places,
    query_places,
)
from flashtile.ops.attention.hopper.forward import attention_forward_kernel
from flashtile.ops.attention.hopper.score_parameters import (
    ScoreVariant,
    alibi_dimensions,
    parameter_types,
    score_scalars,
)
from flashtile.ops.attention.hopper.widening import Widening, make_widening, widen
from flashtile.ops.attention.plans import (
    Layout,
    block_places,
    block_sizes,
    clipped_window,
    descale_scalars,
    descale_strides,
    descale_types,
    packing,
    positive_scale,
    tiles_of,
)
from flashtile.ops.attention.spec import FP8, AttentionSpec, SideInputs, out_dtype
from flashtile.ops.common.checks import MAX_POSITIONS, check_programs, check_rows

__all__ = ["backward", "forward", "kernel_source"]

_NO_DESCALES = (None, None, None)

#: From so many keys on programs take even tiles as they come too. A multiprocessor may be held by a kernel of another
#: stream, such as a transfer: the program that waits for it starts late, and nobody else would take its share.
_LONG_KEYS = 4096

#: The tensors that TMA moves, in the order of the kernel's parameters: each once for either chunk of its columns.
_MOVED = ("q", "k", "v", "out")


class Variant(NamedTuple):
    """All that decides the machine code of the forward kernel. Strides, lengths, batch and heads are no part of it."""

    dtype: torch.dtype
    chunks: tuple[int, int]
    chunks_v: tuple[int, int]
    config: HopperConfig
    out_places: int
    query_places: int
    packed: bool
    has_left: bool
    has_right: bool
    top_left: bool
    index_dtypes: tuple[torch.dtype, torch.dtype] | None
    scores: ScoreVariant
    block_tile: tuple[int, int] | None = None
    descales: tuple[bool, ...] = (False, False, False)


class Plan(NamedTuple):
    """A launch without its pointers: `launch(programs, *descriptors, *pointers, *scalars)`.

    Attributes:
        programs: 0 where there is nothing to launch; outputs are then filled.
        dynamic: programs take tiles as they come, and the launch needs counters.
        makers: for each of `_MOVED`, what makes its descriptors from its address: of either chunk of columns, None in
            the place of a second one that there is not.
        widening: of 8-bit values, which the kernel reads in 16 bits; else None.
    """

    launch: Callable[..., None]
    programs: int
    dynamic: bool
    makers: tuple[Callable[[int], tuple], ...]
    scalars: tuple[int | float | None, ...]
    outputs: tuple[Layout, Layout]
    widening: Widening | None = None


def forward(q: Tensor, k: Tensor, v: Tensor, side: SideInputs, spec: AttentionSpec) -> tuple[Tensor, Tensor]:
    """Runs the forward kernel. Shapes as in `flashtile.attention` and `attention_varlen`. Returns (out, lse)."""
    if spec.scale <= 0:
        q, spec, _ = positive_scale(q, spec)
    cu_seqlens_q, cu_seqlens_k, max_seqlen_q = side[:3]
    plan = _plan(
        q.dtype,
        q.device,
        (q.shape, k.shape, v.shape),
        (q.stride(), k.stride(), v.stride()),
        *packing(side),
        max_seqlen_q,
        spec,
        alibi_dimensions(side),
        side.sinks is not None,
        block_sizes(side),
        _NO_DESCALES if q.dtype is not FP8 else descale_strides(side),
    )
    out_layout, lse_layout = plan.outputs
    out, lse = empty(*out_layout, q.device), empty(*lse_layout, q.device)
    if not plan.programs:
        return out.zero_(), _lse_without_keys(lse, side)
    if plan.widening is not None:
        v = widen(v, plan.widening)
    of_q, of_k, of_v, of_out = plan.makers
    plan.launch(
        plan.programs,
        *of_q(q.data_ptr()),
        *of_k(k.data_ptr()),
        *of_v(v.data_ptr()),
        *of_out(out.data_ptr()),
        lse.data_ptr(),
        _counter(q.device).data_ptr() if plan.dynamic else None,
        *map(
            pointer,
            (cu_seqlens_q, cu_seqlens_k, side.alibi_slopes, side.sinks, block_lists(side), *side.descales),
        ),
        *plan.scalars,
    )
    return out, lse


def _lse_without_keys(lse: Tensor, side: SideInputs) -> Tensor:
    """That of rows which see nothing but their sink, where there is one; past the last sequence there is none."""
    if side.sinks is None:
        return lse.fill_(float("-inf"))
    lse.copy_(side.sinks[:, None].expand_as(lse))
    if side.cu_seqlens_q is not None:
        row = torch.arange(lse.shape[-1], device=lse.device)
        lse.masked_fill_(row >= side.cu_seqlens_q[-1], float("-inf"))
    return lse


def _counter(device: torch.device) -> Tensor:
    """Two int32 zeros, which the last program of a launch sets back to zero.

    Launches that may run at the same time must not share them. Those of one stream run one after the other; but a
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


@functools.lru_cache(maxsize=4096)
def _plan(
    dtype: torch.dtype,
    device: torch.device,
    shapes: tuple[torch.Size, ...],
    strides: tuple[tuple[int, ...], ...],
    sequences: int | None,
    index_dtypes: tuple[torch.dtype, torch.dtype] | None,
    max_seqlen_q: int,
    spec: AttentionSpec,
    alibi: int = 0,
    sinks: bool = False,
    blocks: tuple[int, int] | None = None,
    descales: tuple[tuple[int, ...] | None, ...] = _NO_DESCALES,
) -> Plan:
    """Everything that can be decided before the tensors' contents are known. `blocks`: as `plans.block_sizes`."""
    q_shape, _, v_shape = shapes
    (rows_q, heads, head_dim), (rows_k, heads_kv, head_dim_v) = q_shape[-3:], v_shape[-3:]
    packed = sequences is not None
    batch = q_shape[0] if sequences is None else sequences
    check_rows("q", rows_q, MAX_POSITIONS)
    check_rows("k", rows_k, MAX_POSITIONS)
    left, right = spec.window_left is not None, spec.window_right is not None
    config = choose_config(head_dim, head_dim_v, max_seqlen_q, left, right, blocks is not None, dtype)
    block_tile = None if spec.block_shape is None else spec.block_shape[2:]
    # With a block mask whole tiles of the mask, even past the end of the sequence.
    tiles = tiles_of(whole_tiles(rows_q, block_tile[0] if block_tile else None), config.block_m, batch, packed)
    lines = heads if packed else batch * heads
    check_programs("q", tiles * lines)
    programs = min(tiles * lines, multiprocessors(device)) if q_shape.numel() and rows_k else 0
    # Where tiles are alike and short, each program takes its share in turn, which needs no atomics.
    uneven = packed or spec.banded or blocks is not None
    dynamic = (uneven or rows_k >= _LONG_KEYS) and tiles * lines > programs
    variant = Variant(
        dtype,
        column_chunks(head_dim, dtype),
        column_chunks(head_dim_v),
        config,
        out_places(config, head_dim, head_dim_v, dtype),
        query_places(config, head_dim, head_dim_v, dtype),
        packed,
        left,
        right,
        spec.banded and spec.top_left,
        index_dtypes,
        ScoreVariant(spec.softcap > 0, alibi > 0, sinks),
        block_tile,
        tuple(strides is not None for strides in descales),
    )
    out_shape = (*q_shape[:-1], head_dim_v)
    lse_shape = (*q_shape[:-3], heads, rows_q)
    outputs = (
        Layout(out_shape, contiguous_strides(out_shape), out_dtype(dtype)),
        Layout(lse_shape, contiguous_strides(lse_shape), torch.float32),
    )
    if not programs:
        return Plan(_launch_nothing, 0, False, (), (), outputs)
    scalars = (
        *(batch, heads, heads // heads_kv, rows_q, rows_k, tiles, lines, int(dynamic)),
        *clipped_window(spec),
        *score_scalars(spec, heads, alibi),
        *block_places(spec, rows_q, rows_k, blocks, by_column=False),
        *descale_scalars(descales).values(),
        None if descales == _NO_DESCALES else heads // heads_kv,
    )
    widening = make_widening(v_shape, strides[2], device) if dtype is FP8 else None
    strides_v = strides[2] if widening is None else widening.output.strides
    layouts = [
        (packed_layout if packed else strided_layout)(tuple(shape), tuple(stride))
        for shape, stride in zip((*shapes, out_shape), (*strides[:2], strides_v, outputs[0].strides))
    ]
    makers = tuple(
        chunks_maker(_dtype_of(name, variant), boxes, layout)
        for name, boxes, layout in zip(_MOVED, _boxes(variant), layouts)
    )
    return Plan(_launcher(variant, device), programs, dynamic, makers, scalars, outputs, widening)


def _launch_nothing(programs: int, *arguments: object) -> None:
    raise AssertionError("a plan without programs is not launched")


def _boxes(variant: Variant) -> list[tuple[tuple[int, ...] | None, ...]]:
    """What one copy moves, for each of `_MOVED` and either chunk of columns; None where there is no second one."""
    rows = {"q": CONSUMER_ROWS, "k": variant.config.block_n, "v": variant.config.block_n, "out": CONSUMER_ROWS}
    outer = (1, 1) if variant.packed else (1,)

    def box(name: str, width: int) -> tuple[int, ...] | None:
        if not width:
            return None
        return (*outer, rows[name], 1, width)

    widths = {"q": variant.chunks, "k": variant.chunks, "v": variant.chunks_v, "out": variant.chunks_v}
    return [tuple(box(name, width) for width in widths[name]) for name in _MOVED]


def _dtype_of(name: str, variant: Variant) -> torch.dtype:
    return out_dtype(variant.dtype) if name in ("v", "out") else variant.dtype


@functools.cache
def _launcher(variant: Variant, device: torch.device) -> Callable[..., None]:
    return make_launcher(kernel_source(variant), device, device_facts(device))


def kernel_source(variant: Variant) -> KernelSource:
    """The specialisation of the forward kernel for a variant, as the launcher and ahead-of-time compilation take it."""
    config = variant.config
    names = attention_forward_kernel.arg_names
    moved = [(_dtype_of(name, variant), box) for name, boxes in zip(_MOVED, _boxes(variant)) for box in boxes]
    types = {
        name: "constexpr" if box is None else descriptor_type(dtype, box) for name, (dtype, box) in zip(names, moved)
    }
    cu_seqlens = variant.index_dtypes or (None, None)
    types |= {"lse_ptr": "*fp32", "counter_ptr": "*i32"}
    types |= parameter_types(variant.scores)
    types |= block_parameter_types(variant.block_tile is not None)
    types |= {
        f"cu_seqlens_{of}_ptr": "constexpr" if dtype is None else "*" + ELEMENT_TYPES[dtype]
        for of, dtype in zip("qk", cu_seqlens)
    }
    types |= descale_types(variant.descales)
    types["descale_group"] = "i32" if any(variant.descales) else "constexpr"
    constants = {
        "CONSUMERS": config.consumers,
        "STAGES": config.stages,
        "REGISTERS": config.registers,
        "PRODUCER_REGISTERS": PRODUCER_REGISTERS,
        "Q_IN_REGISTERS": config.q_in_registers,
        "AHEAD": config.ahead,
        "IN_TURN": config.in_turn,
        "OUT_PLACES": variant.out_places,
        "QUERY_PLACES": variant.query_places,
        "PACKED": variant.packed,
        "HAS_LEFT": variant.has_left,
        "HAS_RIGHT": variant.has_right,
        "TOP_LEFT": variant.top_left,
        **block_constants(variant.block_tile),
    }
    run_time = [name for name in names if name not in constants]
    types |= {name: "i32" for name in run_time if name not in types}
    absent = dict.fromkeys(name for name in run_time if types[name] == "constexpr")
    multiples = tuple({"counter_ptr": 16, **BLOCK_MULTIPLES}.get(name, 1) for name in run_time)
    return KernelSource(
        attention_forward_kernel,
        tuple(types[name] for name in run_time),
        multiples,
        constants | absent,
        num_warps=4,
        num_stages=1,
        max_registers=config.max_registers,
    )
