"""Host side of the portable kernels: outputs, tile choice, and the launch. The backend module that `select` names.

All that a launch needs beside its pointers (the compiled kernel, its tiles, sizes and strides) is a `Plan`, looked up
under what the call looks like from outside. A call like an earlier one costs no decision and no compilation.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from flashtile._backends.alignment import power_of_two_factor
from flashtile._backends.allocate import contiguous_strides, empty
from flashtile._backends.devices import DeviceFacts, device_facts
from flashtile._backends.launch import ELEMENT_TYPES, KernelSource, make_launcher, pointer
from flashtile.ops.attention.philox import keep_threshold
from flashtile.ops.attention.plans import Layout, SideShape, clipped_window, positive_scale, tiles_of
from flashtile.ops.attention.spec import AttentionSpec, SideInputs
from flashtile.ops.attention.triton.backward import attention_dkdv_kernel, attention_dq_kernel
from flashtile.ops.attention.triton.configs import (
    Kernel,
    Situation,
    TileConfig,
    choose_tiles,
    drops_bounds,
    drops_masks,
    is_long,
    tile_width,
)
from flashtile.ops.attention.triton.forward import attention_forward_kernel

_KERNELS = {"forward": attention_forward_kernel, "dq": attention_dq_kernel, "dkdv": attention_dkdv_kernel}

#: The tensors of each kernel that have strides, in the order of its parameters.
_STRIDED = {
    "forward": ("q", "k", "v", "out"),
    "dq": ("q", "k", "v", "out", "dout", "dq"),
    "dkdv": ("q", "k", "v", "dout", "dk", "dv"),
}


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
    precision: str
    pointer_multiple: int
    stride_multiple: int
    tiles: TileConfig


class Plan(NamedTuple):
    """A launch without its pointers: `launch(programs, *pointers, *scalars)`. No programs: nothing to launch."""

    launch: Callable[..., None]
    programs: int
    scalars: tuple[int | float, ...]
    outputs: tuple[Layout, ...]


_PLAIN_SIDE = SideShape(None, None, None, False)
_NO_POINTERS = (pointer(None),) * 4


def forward(q: Tensor, k: Tensor, v: Tensor, side: SideInputs, spec: AttentionSpec) -> tuple[Tensor, Tensor]:
    """Runs the forward kernel. Shapes as in `flashtile.attention` and `attention_varlen`. Returns (out, lse)."""
    if spec.scale <= 0:
        q, spec, _ = positive_scale(q, spec)
    plan = _plan_for("forward", q, k, v, None, side, spec)
    out, lse = _outputs(plan, q.device)
    if plan.programs:
        plan.launch(plan.programs, *map(pointer, (q, k, v, out, lse)), *_side_pointers(side), *plan.scalars)
    return out, lse


def backward(
    dout: Tensor,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    side: SideInputs,
    spec: AttentionSpec,
) -> tuple[Tensor, Tensor, Tensor]:
    """Runs the dq kernel, then the dk/dv kernel. Deterministic. Returns (dq, dk, dv)."""
    sign = 1
    if spec.scale <= 0:
        q, spec, sign = positive_scale(q, spec)
    dq, statistics = backward_queries(dout, dlse, q, k, v, out, lse, side, spec)
    dk, dv = backward_keys(dout, q, k, v, statistics, side, spec)
    return dq if sign == 1 else dq.mul_(sign), dk, dv


def backward_queries(
    dout: Tensor,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    side: SideInputs,
    spec: AttentionSpec,
) -> tuple[Tensor, Tensor]:
    """Runs the dq kernel. Returns dq, and the statistics `[*lse.shape, 4]` that the dk/dv kernel reads."""
    out, lse, dlse = out.contiguous(), lse.contiguous(), None if dlse is None else dlse.contiguous()
    plan = _plan_for("dq", q, k, v, dout, side, spec, dlse is not None)
    dq, statistics = _outputs(plan, q.device)
    if plan.programs:
        tensors = (q, k, v, out, dout, lse, dlse, statistics, dq)
        plan.launch(plan.programs, *map(pointer, tensors), *_side_pointers(side), *plan.scalars)
    return dq, statistics


def backward_keys(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    statistics: Tensor,
    side: SideInputs,
    spec: AttentionSpec,
) -> tuple[Tensor, Tensor]:
    """Runs the dk/dv kernel on the statistics of the dq kernel. Returns (dk, dv)."""
    plan = _plan_for("dkdv", q, k, v, dout, side, spec)
    dk, dv = _outputs(plan, q.device)
    if plan.programs:
        tensors = (q, k, v, dout, statistics, dk, dv)
        plan.launch(plan.programs, *map(pointer, tensors), *_side_pointers(side), *plan.scalars)
    return dk, dv


def _outputs(plan: Plan, device: torch.device) -> tuple[Tensor, Tensor]:
    first, second = plan.outputs
    return empty(*first, device), empty(*second, device)


def _side_pointers(side: SideInputs) -> tuple:
    cu_seqlens_q, cu_seqlens_k, _, _, key_lengths, dropout_seed = side
    if cu_seqlens_q is None and key_lengths is None and dropout_seed is None:
        return _NO_POINTERS
    return pointer(cu_seqlens_q), pointer(cu_seqlens_k), pointer(key_lengths), pointer(dropout_seed)


def _plan_for(
    kernel: Kernel,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dout: Tensor | None,
    side: SideInputs,
    spec: AttentionSpec,
    has_dlse: bool = False,
) -> Plan:
    cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, key_lengths, dropout_seed = side
    if cu_seqlens_q is None and key_lengths is None and dropout_seed is None:
        side_shape = _PLAIN_SIDE
    else:
        side_shape = SideShape(
            None if cu_seqlens_q is None else cu_seqlens_q.shape[0] - 1,
            None if cu_seqlens_q is None else (cu_seqlens_q.dtype, cu_seqlens_k.dtype),
            None if key_lengths is None else key_lengths.dtype,
            dropout_seed is not None,
        )
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
        is_long(max_seqlen_q, max_seqlen_k),
        side_shape,
        spec,
        has_dlse,
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
    allow_tf32: bool,
) -> Plan:
    """Everything that can be decided before the tensors' contents are known."""
    q_shape, k_shape, v_shape = shapes
    (rows_q, heads, head_dim), (rows_k, heads_kv, head_dim_v) = q_shape[-3:], v_shape[-3:]
    packed = side.sequences is not None
    batch = side.sequences if packed else q_shape[0]
    facts = device_facts(device)
    situation = Situation(dtype, head_dim, head_dim_v, spec.banded, long)
    tiles = choose_tiles(kernel, facts, situation)
    triples = _stride_triples(kernel, shapes, strides)
    moving_rows, moving_block = (rows_q, tiles.block_m) if kernel == "dkdv" else (rows_k, tiles.block_n)
    bounded = packed or side.key_lengths_dtype is not None or not drops_bounds(kernel, situation)
    whole = not bounded and moving_rows % moving_block == 0
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
        _dot_precision(dtype, facts, allow_tf32),
        power_of_two_factor(misalignment),
        power_of_two_factor(*(stride for triple in triples for stride in triple)),
        tiles,
    )
    if kernel == "dkdv":
        programs = _programs(packed, batch, heads_kv, rows_k, tiles.block_n)
        nothing = k_shape.numel() == 0
    else:
        programs = _programs(packed, batch, heads, rows_q, tiles.block_m)
        nothing = q_shape.numel() == 0
    scalars = (
        *(stride for batch_stride, _, head_stride in triples for stride in (batch_stride, head_stride)),
        *(batch, heads, heads // heads_kv, rows_q, rows_k),
        *clipped_window(spec),
        keep_threshold(spec.dropout_p),
        spec.scale,
        1 / (1 - spec.dropout_p),
    )
    outputs = _output_layouts(kernel, dtype, shapes)
    return Plan(_launcher(kernel, variant, device), 0 if nothing else programs, scalars, outputs)


def _output_layouts(kernel: Kernel, dtype: torch.dtype, shapes: tuple[tuple[int, ...], ...]) -> tuple[Layout, ...]:
    """What the kernel writes: (out, lse), (dq, statistics) or (dk, dv)."""
    q_shape, k_shape, v_shape = shapes
    *sequences, rows, heads, _ = q_shape
    lse_shape = (*sequences, heads, rows)
    outputs = {
        "forward": (((*q_shape[:-1], v_shape[-1]), dtype), (lse_shape, torch.float32)),
        "dq": ((q_shape, dtype), ((*lse_shape, 4), torch.float32)),
        "dkdv": ((k_shape, dtype), (v_shape, dtype)),
    }
    return tuple(Layout(tuple(shape), contiguous_strides(shape), of) for shape, of in outputs[kernel])


def _programs(packed: bool, batch: int, heads: int, rows: int, block: int) -> int:
    """Number of programs: one for each tile, or for each slot of a packed call (see `tiles.find_sequence`)."""
    return tiles_of(rows, block, batch, packed) * heads * (1 if packed else batch)


def _stride_triples(
    kernel: Kernel, shapes: tuple[tuple[int, ...], ...], strides: tuple[tuple[int, ...] | None, ...]
) -> list[tuple[int, int, int]]:
    """(batch, row, head) strides of the kernel's tensors; outputs are contiguous."""
    q_shape, k_shape, v_shape = shapes
    out_shape = (*q_shape[:-1], v_shape[-1])
    contiguous = {"out": out_shape, "dq": q_shape, "dk": k_shape, "dv": v_shape}
    given = dict(zip(("q", "k", "v", "dout"), strides))
    return [
        _stride_triple(given[name]) if name in given else _contiguous_triple(contiguous[name])
        for name in _STRIDED[kernel]
    ]


def _stride_triple(strides: tuple[int, ...]) -> tuple[int, int, int]:
    return (strides[0], strides[1], strides[2]) if len(strides) == 4 else (0, strides[0], strides[1])


def _contiguous_triple(shape: tuple[int, ...]) -> tuple[int, int, int]:
    rows, heads, head_dim = shape[-3:]
    return (rows * heads * head_dim if len(shape) == 4 else 0, heads * head_dim, head_dim)


def _dot_precision(dtype: torch.dtype, facts: DeviceFacts, allow_tf32: bool) -> str:
    """fp32 products are IEEE unless PyTorch's own setting allows TF32."""
    return "tf32" if dtype is torch.float32 and facts.is_cuda and allow_tf32 else "ieee"


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
        "HAS_DLSE": variant.has_dlse,
        "PRECISION": variant.precision,
    }
    names = function.arg_names
    constants = {name: value for name, value in constants.items() if name in names}
    run_time = [_parameter(name, variant) for name in names if name not in constants]
    types, multiples = zip(*run_time)
    return KernelSource(function, types, multiples, constants, variant.tiles.num_warps, variant.tiles.num_stages)


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
    if name == "statistics_ptr":
        return "*fp32", 16
    if name in ("lse_ptr", "dlse_ptr"):
        return "*fp32", 1
    if name.endswith("_ptr"):
        return "*" + ELEMENT_TYPES[variant.dtype], variant.pointer_multiple
    if name.startswith("stride_"):
        return "i64", variant.stride_multiple
    return ("fp32" if name.endswith("scale") else "i32"), 1
