"""Host side of the portable kernels: outputs, tile choice, and the launch. The backend module that `select` names.

What a launch needs beyond its arguments (the compiled kernel and its tiles) depends only on a `Variant`; it is
looked up under it, so that a call after the first costs no decision and no compilation.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from flashtile._backends.devices import DeviceFacts, device_facts
from flashtile._backends.launch import ELEMENT_TYPES, KernelSource, make_launcher, pointer
from flashtile.ops.attention.philox import keep_threshold
from flashtile.ops.attention.spec import AttentionSpec, SideInputs
from flashtile.ops.attention.triton.backward import attention_dkdv_kernel, attention_dq_kernel
from flashtile.ops.attention.triton.configs import LONG, Kernel, Situation, TileConfig, choose_tiles, tile_width
from flashtile.ops.attention.triton.forward import attention_forward_kernel

_KERNELS = {"forward": attention_forward_kernel, "dq": attention_dq_kernel, "dkdv": attention_dkdv_kernel}

#: Row strides below this are 32-bit in the kernels: the widest tile, 128 rows, then stays below 2³¹ elements.
_NARROW_STRIDE = 2**23
#: Windows are clipped to this, far above any sequence and far below overflow.
_WIDEST_WINDOW = 2**29


class Variant(NamedTuple):
    """All that decides a kernel's machine code on one device."""

    dtype: torch.dtype
    head_dim: int
    head_dim_v: int
    packed: bool
    has_left: bool
    has_right: bool
    top_left: bool
    dropout: bool
    has_dlse: bool
    index_dtype: torch.dtype | None
    key_lengths_dtype: torch.dtype | None
    precision: str
    pointer_multiple: int
    stride_multiple: int
    wide_rows: bool
    tiles: TileConfig


class _Call(NamedTuple):
    """A call as the kernels see it: sizes, the scalars all three share, and whether it is packed."""

    packed: bool
    batch: int
    heads: int
    heads_kv: int
    rows_q: int
    rows_k: int
    scalars: tuple[int, ...]

    def programs(self, rows: int, heads: int, block: int) -> int:
        if self.packed:
            return (rows // block + self.batch + 1) * heads
        return -(-rows // block) * self.batch * heads


def forward(q: Tensor, k: Tensor, v: Tensor, side: SideInputs, spec: AttentionSpec) -> tuple[Tensor, Tensor]:
    """Runs the forward kernel. Shapes as in `flashtile.attention` and `attention_varlen`. Returns (out, lse)."""
    call = _describe(q, k, side, spec)
    out = torch.empty((*q.shape[:-1], v.shape[-1]), dtype=q.dtype, device=q.device)
    lse_shape = (call.heads, call.rows_q) if call.packed else (call.batch, call.heads, call.rows_q)
    lse = torch.empty(lse_shape, dtype=torch.float32, device=q.device)
    if out.numel() == 0:
        return out, lse
    q, scale = _positive_scale(q, spec.scale)
    kernel, tiles = _prepare("forward", (q, k, v, out), side, spec)
    kernel(
        call.programs(call.rows_q, call.heads, tiles.block_m),
        *map(pointer, (q, k, v, out, lse, *_side_tensors(side))),
        *_strides((q, k, v, out), call.packed),
        *call.scalars,
        scale,
        1 / (1 - spec.dropout_p),
    )
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
    """Runs the dq kernel (which also writes delta), then the dk/dv kernel. Deterministic. Returns (dq, dk, dv)."""
    statistics = torch.empty((*lse.shape, 4), dtype=torch.float32, device=lse.device)
    dq = backward_queries(dout, dlse, q, k, v, out, lse, statistics, side, spec)
    dk, dv = backward_keys(dout, q, k, v, statistics, side, spec)
    return dq, dk, dv


def backward_queries(
    dout: Tensor,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    statistics: Tensor,
    side: SideInputs,
    spec: AttentionSpec,
) -> Tensor:
    """Runs the dq kernel, which fills `statistics` `[*lse.shape, 4]` for the dk/dv kernel. Returns dq."""
    call = _describe(q, k, side, spec)
    dq = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    if out.numel() == 0:
        return dq
    q, scale = _positive_scale(q, spec.scale)
    dlse = None if dlse is None else dlse.contiguous()
    tensors = (q, k, v, out, dout, dq)
    kernel, tiles = _prepare("dq", tensors, side, spec, dlse is not None)
    kernel(
        call.programs(call.rows_q, call.heads, tiles.block_m),
        *map(pointer, (q, k, v, out, dout, lse, dlse, statistics, dq, *_side_tensors(side))),
        *_strides(tensors, call.packed),
        *call.scalars,
        scale,
        spec.scale,
        1 / (1 - spec.dropout_p),
    )
    return dq


def backward_keys(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    statistics: Tensor,
    side: SideInputs,
    spec: AttentionSpec,
) -> tuple[Tensor, Tensor]:
    """Runs the dk/dv kernel, after the dq kernel has filled `statistics`. Returns (dk, dv)."""
    call = _describe(q, k, side, spec)
    dk, dv = (torch.empty(t.shape, dtype=t.dtype, device=t.device) for t in (k, v))
    if dk.numel() == 0:
        return dk, dv
    q, scale = _positive_scale(q, spec.scale)
    tensors = (q, k, v, dout, dk, dv)
    kernel, tiles = _prepare("dkdv", tensors, side, spec)
    kernel(
        call.programs(call.rows_k, call.heads_kv, tiles.block_n),
        *map(pointer, (q, k, v, dout, statistics, dk, dv, *_side_tensors(side))),
        *_strides(tensors, call.packed),
        *call.scalars,
        scale,
        1 / (1 - spec.dropout_p),
    )
    return dk, dv


def _describe(q: Tensor, k: Tensor, side: SideInputs, spec: AttentionSpec) -> _Call:
    packed = side.cu_seqlens_q is not None
    if packed:
        (rows_q, heads, _), (rows_k, heads_kv, _) = q.shape, k.shape
        batch = side.cu_seqlens_q.shape[0] - 1
    else:
        (batch, rows_q, heads, _), (_, rows_k, heads_kv, _) = q.shape, k.shape
    left = 0 if spec.window_left is None else min(spec.window_left, _WIDEST_WINDOW)
    right = 0 if spec.window_right is None else min(spec.window_right, _WIDEST_WINDOW)
    threshold = keep_threshold(spec.dropout_p)
    scalars = (batch, heads, heads // heads_kv, rows_q, rows_k, left, right, threshold)
    return _Call(packed, batch, heads, heads_kv, rows_q, rows_k, scalars)


def _positive_scale(q: Tensor, scale: float) -> tuple[Tensor, float]:
    """The kernels take the maximum before they scale, so the scale must be positive: its sign, or 0, moves into q."""
    if scale > 0:
        return q, scale
    return (-q, -scale) if scale < 0 else (torch.zeros_like(q), 1.0)


def _side_tensors(side: SideInputs) -> tuple[Tensor | None, ...]:
    return side.cu_seqlens_q, side.cu_seqlens_k, side.key_lengths, side.dropout_seed


def _strides(tensors: tuple[Tensor, ...], packed: bool) -> list[int]:
    """(batch, row, head) strides of each tensor, flat."""
    flat: list[int] = []
    for tensor in tensors:
        if packed:
            flat.append(0)
        flat.extend(tensor.stride()[:-1])
    return flat


def _prepare(
    kernel: Kernel, tensors: tuple[Tensor, ...], side: SideInputs, spec: AttentionSpec, has_dlse: bool = False
) -> tuple[Callable[..., None], TileConfig]:
    """The compiled kernel and its tiles. `tensors` are those with strides; q and v are the first and third."""
    q, v = tensors[0], tensors[2]
    stride_bits = address_bits = widest_row = 0
    row_dim = q.dim() - 3
    for tensor in tensors:
        strides = tensor.stride()
        for stride in strides[:-1]:
            stride_bits |= stride
        widest_row = max(widest_row, strides[row_dim])
        address_bits |= tensor.data_ptr()
    facts = device_facts(q.device)
    long = side.max_seqlen_q >= LONG and side.max_seqlen_k >= LONG
    tiles = choose_tiles(kernel, facts, Situation(q.dtype, q.shape[-1], v.shape[-1], spec.banded, long))
    variant = Variant(
        q.dtype,
        q.shape[-1],
        v.shape[-1],
        side.cu_seqlens_q is not None,
        spec.window_left is not None,
        spec.window_right is not None,
        spec.top_left,
        side.dropout_seed is not None,
        has_dlse,
        None if side.cu_seqlens_q is None else side.cu_seqlens_q.dtype,
        None if side.key_lengths is None else side.key_lengths.dtype,
        _dot_precision(q.dtype, facts),
        _power_of_two_factor(address_bits),
        _power_of_two_factor(stride_bits),
        widest_row >= _NARROW_STRIDE,
        tiles,
    )
    return _launcher(kernel, variant, q.device), tiles


def _power_of_two_factor(bits: int) -> int:
    """The largest power of two up to 16 that divides every number that was or-ed into `bits`."""
    return (bits & -bits) & 15 or 16


def _dot_precision(dtype: torch.dtype, facts: DeviceFacts) -> str:
    """fp32 products are IEEE unless PyTorch's own setting allows TF32."""
    if dtype is torch.float32 and facts.is_cuda and torch._C._get_cublas_allow_tf32():
        return "tf32"
    return "ieee"


@functools.cache
def _launcher(kernel: Kernel, variant: Variant, device: torch.device) -> Callable[..., None]:
    return make_launcher(kernel_source(kernel, variant), device, device_facts(device))


def kernel_source(kernel: Kernel, variant: Variant) -> KernelSource:
    """The specialisation of a kernel for a variant, as the launcher and ahead-of-time compilation take it."""
    function = _KERNELS[kernel]
    constants = {
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
    if name == "statistics_ptr":
        return "*fp32", 16
    index_dtypes = {
        "cu_seqlens_q_ptr": variant.index_dtype or torch.int32,
        "cu_seqlens_k_ptr": variant.index_dtype or torch.int32,
        "key_lengths_ptr": variant.key_lengths_dtype or torch.int32,
        "dropout_seed_ptr": torch.int64,
    }
    if name in index_dtypes:
        return "*" + ELEMENT_TYPES[index_dtypes[name]], 1
    if name in ("lse_ptr", "dlse_ptr"):
        return "*fp32", 1
    if name.endswith("_ptr"):
        return "*" + ELEMENT_TYPES[variant.dtype], variant.pointer_multiple
    if name.startswith("stride_"):
        # Batches and heads are located once per program, in 64 bits; rows inside the loops.
        narrow = name.endswith("_row") and not variant.wide_rows
        return "i32" if narrow else "i64", variant.stride_multiple
    return ("fp32" if name.endswith("scale") else "i32"), 1
