"""What a launch of the portable kernels needs beside its pointers: the compiled kernel, its tiles, sizes and strides.

A `Plan` is looked up under what the call looks like from outside. A call like an earlier one costs no decision and no
compilation.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from flashtile._backends.alignment import power_of_two_factor, used_strides
from flashtile._backends.allocate import contiguous_strides
from flashtile._backends.devices import device_facts, multiprocessors
from flashtile._backends.launch import ELEMENT_TYPES, KernelSource, make_launcher
from flashtile.ops.attention.philox import keep_threshold
from flashtile.ops.attention.plans import (
    Layout,
    SideShape,
    Table,
    clipped_window,
    descale_scalars,
    descale_types,
    longest_walk,
    shares_of_heads,
    side_shape,
    tiles_of,
)
from flashtile.ops.attention.spec import FP8, AttentionSpec, Origin, SideInputs, out_dtype
from flashtile.ops.attention.triton.backward import attention_dkdv_kernel, attention_dq_kernel
from flashtile.ops.attention.triton.bias_gradient import attention_dbias_kernel
from flashtile.ops.attention.triton.bias_work import BiasWork, cut_work
from flashtile.ops.attention.triton.blocks import BLOCK_SCALARS, block_scalars
from flashtile.ops.attention.triton.column_sums import attention_column_sums_kernel
from flashtile.ops.attention.triton.configs import (
    OWN_KEYS,
    Kernel,
    TileConfig,
    choose_tiles,
    dot_precision,
    drops_bounds,
    drops_masks,
    is_long,
    situation_of,
    tile_width,
)
from flashtile.ops.attention.triton.forward import attention_forward_kernel
from flashtile.ops.common.checks import MAX_POSITIONS, check_programs, check_rows

_KERNELS = {
    "forward": attention_forward_kernel,
    "dq": attention_dq_kernel,
    "dkdv": attention_dkdv_kernel,
    "dbias": attention_dbias_kernel,
    "column_sums": attention_column_sums_kernel,
}

#: The tensors of each kernel that have strides, in the order of its parameters.
_STRIDED = {
    "forward": ("q", "k", "v", "out"),
    "dq": ("q", "k", "v", "out", "dout", "dq"),
    "dkdv": ("q", "k", "v", "dout", "dk", "dv"),
    "dbias": ("q", "k", "v", "dout"),
    "column_sums": ("q", "k"),
}

#: Element types as the kernels read them: a mask as bytes, and 8-bit q, k and v, whose type not every compiler knows.
_STORED_TYPES = {**ELEMENT_TYPES, torch.bool: "u8", FP8: "u8"}
#: Where a bias or a mask that broadcasts ends.
_ENDLESS = 2**30
#: Where the call lies in a larger one.
_ORIGIN_SCALARS = tuple(f"origin_{name}" for name in Origin._fields)


class TableVariant(NamedTuple):
    """What decides machine code of a bias or a mask: how it is read, and the directions in which it broadcasts.

    The number of columns counts as far as it is a multiple of 16: a bounds check that could fall within 16 bytes would
    keep them from being read together. `covered`: no tile of the kernel ends past it, so that there is no such check.
    """

    dtype: torch.dtype
    column_stride: int
    pointer_multiple: int
    stride_multiple: int
    columns_multiple: int
    shared_batch: bool
    shared_rows: bool
    shared_columns: bool
    covered: bool


class Variant(NamedTuple):
    """All that decides a kernel's machine code on one device.

    Row strides are part of it: with them known, the compiler needs up to 9 % less time in the inner loops (addresses
    become constants), and a model has few of them. Lengths, batches and numbers of heads are not part of it.
    """

    dtype: torch.dtype
    head_dim: int
    head_dim_v: int
    row_strides: tuple[int, ...]
    packed: bool
    has_left: bool
    has_right: bool
    top_left: bool
    whole: bool
    all_visible: bool
    dropout: bool
    has_dlse: bool
    index_dtypes: tuple[torch.dtype, torch.dtype] | None
    key_lengths_dtype: torch.dtype | None
    softcap: bool
    bias: TableVariant | None
    mask: TableVariant | None
    alibi: bool
    block_tile: tuple[int, int]
    patterns: bool
    placed: bool
    aligned: bool
    pattern_multiple: int
    sinks: bool
    descales: tuple[bool, ...]
    sums_slopes: bool
    hides_rows: bool
    sums_dtype: torch.dtype
    sums_many: bool
    precision: str
    pointer_multiple: int
    stride_multiple: int
    tiles: TileConfig


class Plan(NamedTuple):
    """A launch without its pointers: `launch(programs, *pointers, *scalars)`. No programs: nothing to launch. `shares`:
    dk and dv are in so many parts."""

    launch: Callable[..., None]
    programs: int
    scalars: tuple[int | float, ...]
    outputs: tuple[Layout, ...]
    shares: int = 1


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
) -> Plan:
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
        is_long(side.max_seqlen_q, side.max_seqlen_k),
        side_shape(side),
        spec,
        has_dlse,
        sums_slopes,
        hides_rows,
        torch._C._get_cublas_allow_tf32(),
    )


@functools.lru_cache(maxsize=4096)
def _plan(
    kernel: Kernel,
    dtype: torch.dtype,
    device: torch.device,
    shapes: tuple[tuple[int, ...], ...],
    strides: tuple[tuple[int, ...] | None, ...],
    misalignment: int,
    long: bool,
    side: SideShape,
    spec: AttentionSpec,
    has_dlse: bool,
    sums_slopes: bool,
    hides_rows: bool,
    allow_tf32: bool,
) -> Plan:
    """Everything that can be decided before the tensors' contents are known."""
    q_shape, _, v_shape = shapes
    (rows_q, heads, head_dim), (rows_k, heads_kv, head_dim_v) = q_shape[-3:], v_shape[-3:]
    packed = side.sequences is not None
    batch = side.sequences if packed else q_shape[0]
    check_rows("q", rows_q, MAX_POSITIONS)
    check_rows("k", rows_k, MAX_POSITIONS)
    facts = device_facts(device)
    tables = [table.dtype for table in (side.bias, side.mask) if table is not None]
    situation = situation_of(dtype, (head_dim, head_dim_v), spec, long, tables)
    tiles = choose_tiles(kernel, facts, situation)
    work = cut_work(side.bias, shapes, batch, tiles) if kernel == "dbias" and side.bias else BiasWork()
    block_tile = (0, 0) if spec.block_shape is None else spec.block_shape[2:]
    programs = _programs(kernel, shapes, batch, packed, tiles, work)
    shares = 1
    if kernel == "dkdv" and programs:
        uneven = packed or spec.block_shape is not None or (spec.window_right is not None and spec.window_left is None)
        steps = longest_walk(tiles_of(rows_q, tiles.block_m, batch, packed), spec, tiles.block_m, tiles.block_n)
        shares = shares_of_heads(heads // heads_kv, programs, steps, uneven, multiprocessors(device))
    parts = [(*shape[:-2], heads_kv * shares, shape[-1]) for shape in shapes[1:]]
    triples = _stride_triples(kernel, shapes, parts, strides)
    bounded = packed or side.key_lengths_dtype is not None or not drops_bounds(kernel, situation)
    # With a block mask whole tiles of the mask are walked through, even past the end of the sequence.
    divides_q = rows_q % (block_tile[0] or tiles.block_m) == 0
    divides_k = rows_k % (block_tile[1] or tiles.block_n) == 0
    # That of the tiles that move; in the gradient of the bias both do.
    divides = divides_q and divides_k if kernel == "dbias" else divides_q if kernel in OWN_KEYS else divides_k
    whole = not bounded and divides
    covered = not packed and divides_q and divides_k
    outputs = _output_layouts(kernel, dtype, (q_shape, *parts), side.bias, work.parts, hides_rows)
    variant = Variant(
        dtype,
        head_dim,
        head_dim_v,
        tuple(row for _, row, _ in triples),
        packed,
        spec.window_left is not None,
        spec.window_right is not None,
        spec.top_left,
        whole,
        whole and not spec.banded and drops_masks(situation),
        side.dropout,
        has_dlse,
        side.index_dtypes,
        side.key_lengths_dtype,
        spec.softcap > 0,
        _table_variant(side.bias, covered),
        _table_variant(side.mask, covered),
        side.alibi > 0,
        block_tile,
        side.blocks is not None and side.blocks[1] > 0,
        spec.origin is not None,
        spec.origin is None or (spec.origin.row | spec.origin.column) % 16 == 0,
        power_of_two_factor(side.pattern_misalignment),
        side.sinks and (kernel == "forward" or hides_rows),
        tuple(strides is not None for strides in side.descales),
        sums_slopes,
        hides_rows,
        outputs[0].dtype if kernel == "dbias" else torch.float32,
        work.many,
        dot_precision(dtype, facts, allow_tf32),
        power_of_two_factor(misalignment),
        power_of_two_factor(*(stride for triple in triples for stride in triple)),
        tiles,
    )
    scalars = {
        **{
            f"stride_{name}_{of}": stride
            for name, (batch_stride, _, head_stride) in zip(_STRIDED[kernel], triples)
            for of, stride in (("batch", batch_stride), ("head", head_stride))
        },
        **{"batch": batch, "heads": heads, "group": heads // heads_kv // shares, "shares": shares},
        **{"rows_q": rows_q, "rows_k": rows_k},
        **dict(zip(("window_left", "window_right"), clipped_window(spec))),
        "keep_threshold": keep_threshold(spec.dropout_p),
        "scale": spec.scale,
        "keep_scale": 1 / (1 - spec.dropout_p),
        "softcap": spec.softcap or None,
        **_table_scalars("bias", side.bias),
        **_table_scalars("mask", side.mask),
        "stride_alibi_batch": heads if side.alibi == 2 else 0,
        **block_scalars(kernel, spec, rows_q, rows_k, side.blocks),
        **dict(zip(_ORIGIN_SCALARS, spec.origin or (None,) * len(_ORIGIN_SCALARS))),
        **descale_scalars(side.descales),
        **(work.scalars(side.bias) if kernel == "dbias" and side.bias else {}),
    }
    check_programs("q", programs * shares)
    run_time = [name for name in _KERNELS[kernel].arg_names if name in scalars]
    launch = _launcher(kernel, variant, device)
    return Plan(launch, programs * shares, tuple(scalars[name] for name in run_time), outputs, shares)


def _table_variant(table: Table | None, covered: bool) -> TableVariant | None:
    if table is None:
        return None
    itemsize = table.dtype.itemsize
    strides = [stride for size, stride in zip(table.shape[:-1], table.strides) if size > 1]
    shared_rows, shared_columns = table.shape[-2] == 1, table.shape[-1] == 1
    column_stride = 0 if shared_columns else table.strides[-1]
    multiples = power_of_two_factor(table.misalignment), power_of_two_factor(*(stride * itemsize for stride in strides))
    return TableVariant(
        table.dtype,
        column_stride,
        multiples[0],
        max(1, multiples[1] // itemsize),
        16 if shared_columns else power_of_two_factor(table.shape[-1]),
        table.shape[0] == 1,
        shared_rows,
        shared_columns,
        covered,
    )


def _table_scalars(name: str, table: Table | None) -> dict[str, int | None]:
    """Strides (0 where it broadcasts) and ends of a bias or a mask, as the kernels' parameters; None without."""
    if table is None:
        return dict.fromkeys((f"stride_{name}_batch", f"stride_{name}_head", f"stride_{name}_row")) | dict.fromkeys(
            (f"{name}_rows", f"{name}_columns")
        )
    batch, head, row = (stride if size > 1 else 0 for size, stride in zip(table.shape, table.strides[:3]))
    rows, columns = (size if size != 1 else _ENDLESS for size in table.shape[2:])
    return {
        **{f"stride_{name}_batch": batch, f"stride_{name}_head": head, f"stride_{name}_row": row},
        **{f"{name}_rows": rows, f"{name}_columns": columns},
    }


def _output_layouts(
    kernel: Kernel, dtype: torch.dtype, shapes: tuple[tuple[int, ...], ...], bias: Table | None, parts: int,
    hides_rows: bool,
) -> tuple[Layout, ...]:  # fmt: skip
    """What the kernel writes: (out, lse), (dq, statistics), with `hides_rows` (dq, statistics, dout for the others),
    (dk, dv), in the shapes of k and v that are given, or the parts of the bias's gradient."""
    q_shape, k_shape, v_shape = shapes
    *sequences, rows, heads, _ = q_shape
    out_shape, lse_shape = (*q_shape[:-1], v_shape[-1]), (*sequences, heads, rows)
    outputs = {
        "forward": ((out_shape, out_dtype(dtype)), (lse_shape, torch.float32)),
        "dq": ((q_shape, dtype), ((*lse_shape, 4), torch.float32), *(((out_shape, dtype),) if hides_rows else ())),
        "dkdv": ((k_shape, dtype), (v_shape, dtype)),
        "column_sums": (((*sequences, heads, k_shape[-3]), torch.float32),),
        "dbias": (((parts, *(bias.shape if bias else ())), bias.dtype if bias and parts == 1 else torch.float32),),
    }
    return tuple(Layout(tuple(shape), contiguous_strides(shape), of) for shape, of in outputs[kernel])


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
) -> list[tuple[int, int, int]]:
    """(batch, row, head) strides of the kernel's tensors, used ones; outputs are contiguous. `parts`: shapes of dk and
    dv."""
    out_shape = (*shapes[0][:-1], shapes[2][-1])
    written = dict(zip(("out", "dq", "dk", "dv"), (out_shape, shapes[0], *parts)))
    of_each = {name: used_strides(shape, contiguous_strides(shape)) for name, shape in written.items()}
    given = zip(("q", "k", "v", "dout"), (*shapes, out_shape), strides)
    of_each |= {name: used_strides(shape, stride) for name, shape, stride in given if stride is not None}
    return [_stride_triple(of_each[name]) for name in _STRIDED[kernel]]


def _stride_triple(strides: tuple[int, ...]) -> tuple[int, int, int]:
    return (strides[0], strides[1], strides[2]) if len(strides) == 4 else (0, strides[0], strides[1])


@functools.cache
def _launcher(kernel: Kernel, variant: Variant, device: torch.device) -> Callable[..., None]:
    return make_launcher(kernel_source(kernel, variant), device, device_facts(device))


def kernel_source(kernel: Kernel, variant: Variant) -> KernelSource:
    """The specialisation of a kernel for a variant, as the launcher and ahead-of-time compilation take it."""
    function = _KERNELS[kernel]
    constants = {
        **{
            f"STRIDE_{name.upper()}_ROW": stride
            for name, stride in zip(_STRIDED[kernel], variant.row_strides, strict=True)
        },
        "HEAD_DIM": variant.head_dim,
        "HEAD_DIM_V": variant.head_dim_v,
        "BLOCK_D": tile_width(variant.head_dim),
        "BLOCK_E": tile_width(variant.head_dim_v),
        "BLOCK_M": variant.tiles.block_m,
        "BLOCK_N": variant.tiles.block_n,
        "CHUNK": variant.tiles.chunk,
        "PACKED": variant.packed,
        "HAS_LEFT": variant.has_left,
        "HAS_RIGHT": variant.has_right,
        "TOP_LEFT": variant.top_left,
        "WHOLE": variant.whole,
        "ALL_VISIBLE": variant.all_visible,
        "HAS_KEY_LENGTHS": variant.key_lengths_dtype is not None,
        "DROPOUT": variant.dropout,
        "ALIGNED": variant.aligned,
        "HAS_DLSE": variant.has_dlse,
        "PRECISION": variant.precision,
        "MODIFIED": variant.softcap or variant.alibi or variant.bias is not None or variant.mask is not None,
        "STRIDE_BIAS_COLUMN": variant.bias.column_stride if variant.bias else 0,
        "STRIDE_MASK_COLUMN": variant.mask.column_stride if variant.mask else 0,
        "TILE_Q": variant.block_tile[0],
        "TILE_K": variant.block_tile[1],
        "PATTERNS": variant.patterns,
        "BATCH_FIRST": variant.bias is not None and variant.bias.shared_batch and not variant.bias.shared_rows,
        "SHARED_ROWS": variant.bias is not None and variant.bias.shared_rows,
        "SHARED_COLUMNS": variant.bias is not None and variant.bias.shared_columns,
    }
    names = function.arg_names
    constants = {name: value for name, value in constants.items() if name in names}
    parameters = {name: _parameter(name, variant) for name in names if name not in constants}
    constants |= {name: None for name, (of, _) in parameters.items() if of == "constexpr"}
    types, multiples = zip(*parameters.values())
    tiles = variant.tiles
    return KernelSource(function, types, multiples, constants, tiles.num_warps, tiles.num_stages, tiles.max_registers)


def _parameter(name: str, variant: Variant) -> tuple[str, int]:
    """Type of a run-time parameter, and a power of two that divides it."""
    cu_seqlens_q_dtype, cu_seqlens_k_dtype = variant.index_dtypes or (torch.int32, torch.int32)
    index_dtypes = {
        "cu_seqlens_q_ptr": cu_seqlens_q_dtype,
        "cu_seqlens_k_ptr": cu_seqlens_k_dtype,
        "key_lengths_ptr": variant.key_lengths_dtype or torch.int32,
        "dropout_seed_ptr": torch.int64,
    }
    if name in index_dtypes:
        return "*" + ELEMENT_TYPES[index_dtypes[name]], 1
    absent = "constexpr", 1
    for of, table in (("bias", variant.bias), ("mask", variant.mask)):
        if name == f"{of}_ptr":
            return ("*" + _STORED_TYPES[table.dtype], table.pointer_multiple) if table else absent
        if name.startswith(f"stride_{of}_"):
            return ("i64", table.stride_multiple) if table else absent
        if name in (f"{of}_rows", f"{of}_columns"):
            multiple = table.columns_multiple if table and name.endswith("columns") else 1
            return ("i32", multiple) if table and not table.covered else absent
    of_descales = descale_types(variant.descales)
    if name in of_descales:
        return of_descales[name], 1
    if name == "block_patterns_ptr":
        return ("*u8", variant.pattern_multiple) if variant.patterns else absent
    optional = {
        "alibi_slopes_ptr": ("*fp32", variant.alibi),
        "block_lists_ptr": ("*i32", any(variant.block_tile)),
        **dict.fromkeys(BLOCK_SCALARS, ("i32", any(variant.block_tile))),
        **dict.fromkeys(_ORIGIN_SCALARS, ("i32", variant.placed)),
        "stride_alibi_batch": ("i32", variant.alibi),
        "sinks_ptr": ("*fp32", variant.sinks),
        "slope_sums_ptr": ("*fp32", variant.sums_slopes),
        "softcap": ("fp32", variant.softcap),
    }
    if name in optional:
        of, present = optional[name]
        return (of, 1) if present else absent
    if name == "quiet_ptr":
        return ("*" + ELEMENT_TYPES[variant.dtype], 16) if variant.hides_rows else absent
    if name == "sums_ptr":
        return "*" + ELEMENT_TYPES[variant.sums_dtype], 16
    if name == "sharing":
        return ("i64" if variant.sums_many else "i32"), 1
    if name in ("statistics_ptr", "lse_ptr", "dlse_ptr"):
        return "*fp32", 16 if name == "statistics_ptr" else 1
    if name.endswith("_ptr"):
        dtype = out_dtype(variant.dtype) if name == "out_ptr" else variant.dtype
        return "*" + _STORED_TYPES[dtype], variant.pointer_multiple
    if name.startswith("stride_"):
        return "i64", variant.stride_multiple
    return ("fp32" if name.endswith("scale") else "i32"), 1
