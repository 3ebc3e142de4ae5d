"""Gluon, Triton's lower-level language, under the same names for every version of Triton that flashtile takes.

Kernels import the language from here, and nothing of `triton.experimental` from elsewhere: it is experimental, and its
names move. Differences between versions are settled here.
"""

from __future__ import annotations

import math

import triton
from triton._C.libtriton import ir
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon._runtime import GluonASTSource
from triton.experimental.gluon.language._core import builtin
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_init,
    warpgroup_mma_wait,
)
from triton.language.core import _aggregate as aggregate

# Renamed in 3.8; 3.9 keeps the old names as deprecated ones.
tma_load = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
tma_store = getattr(tma, "async_store", None) or tma.async_copy_shared_to_global
tma_store_wait = tma.store_wait

# `barrier` since 3.7.
thread_barrier = getattr(gl, "thread_barrier", None) or gl.barrier

if hasattr(tma, "async_atomic_add"):
    tma_reduce_add = tma.async_atomic_add
else:

    @builtin
    def tma_reduce_add(tensor_desc, coord, src, _semantic=None):
        """Adds a tile in shared memory to device memory, as later versions' `tma.async_atomic_add`."""
        place = _semantic._convert_to_ir_values(coord, require_i64=False)
        kind = ir.DESCRIPTOR_REDUCE_KIND.ADD
        _semantic.builder.create_async_tma_reduce(kind, tensor_desc.handle, place, src.handle)


#: Whether products stay asynchronous where two loops, one behind the other, add to sums that fill most registers. With
#: Triton 3.9 ptxas makes them wait for one another.
SUMS_PASS_LOOPS = triton.__version__.startswith(("3.6.", "3.7.", "3.8."))


#: Whether what a tile in shared memory is taken for must have as many bytes.
_KEEPS_BYTES = triton.__version__.startswith("3.8.")


@builtin
def reinterpret(tile, dtype, shape, layout, _semantic=None):
    """The beginning of a tile in shared memory with another type, shape and layout; a public method since 3.9."""
    method = getattr(tile, "reinterpret", None) or tile._reinterpret
    if _KEEPS_BYTES:
        of_type, sizes = getattr(dtype, "value", dtype), [getattr(size, "value", size) for size in shape]
        bits = math.prod(tile.shape) * tile.dtype.primitive_bitwidth
        count = bits // (math.prod(sizes) * of_type.primitive_bitwidth)
        if count > 1:
            return method(dtype, [count, *sizes], layout, _semantic=_semantic).index(0, _semantic=_semantic)
    return method(dtype, shape, layout, _semantic=_semantic)


__all__ = [
    "SUMS_PASS_LOOPS",
    "GluonASTSource",
    "aggregate",
    "async_copy",
    "fence_async_shared",
    "gl",
    "gluon",
    "mbarrier",
    "reinterpret",
    "thread_barrier",
    "tma_load",
    "tma_reduce_add",
    "tma_store",
    "tma_store_wait",
    "warpgroup_mma",
    "warpgroup_mma_init",
    "warpgroup_mma_wait",
]
