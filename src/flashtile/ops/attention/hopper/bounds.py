"""How k, v and their gradients are described to TMA in dense calls with key lengths: as packed tensors.

So the keys of each sequence end where its length says, in the hardware's bounds check (`pieces.coordinates`).
"""

from __future__ import annotations

from torch import Tensor

from flashtile._backends.tma import TensorLayout, packed_layout
from flashtile.ops.attention.spec import SideInputs


def by_whole_rows(tensor: Tensor) -> Tensor:
    """k or v whose batch entries lie whole rows apart, so that TMA can tell where the keys of each end."""
    batch_stride, row_stride, *_ = tensor.stride()
    one = tensor.shape[0] == 1 or tensor.shape[1] == 1 or not tensor.numel()
    return tensor if one or (row_stride and batch_stride % row_stride == 0) else tensor.contiguous()


def ends_by_rows(k: Tensor, v: Tensor, side: SideInputs) -> bool:
    """Whether TMA can tell where the keys of each batch entry end, as k and v lie; so it is without key lengths."""
    bounded = side.key_lengths is not None and side.cu_seqlens_k is None
    return not bounded or (by_whole_rows(k) is k and by_whole_rows(v) is v)


def row_strides(shape: tuple[int, ...], strides: tuple[int, ...]) -> tuple[int, int]:
    """For k or v of a dense call: elements from one row to the next, and rows from one batch entry to the next."""
    if shape[1] == 1:
        return strides[0], 1
    return strides[1], strides[0] // strides[1] if shape[0] > 1 and strides[1] else 0


def bounded_layout(shape: tuple[int, ...], strides: tuple[int, ...]) -> TensorLayout:
    """k or v as a packed tensor whose sequences end where the host need not know."""
    if len(shape) == 3:
        return packed_layout(shape, strides)
    batch, rows, *others = shape
    return packed_layout((batch * rows, *others), (row_strides(shape, strides)[0], *strides[2:]))
