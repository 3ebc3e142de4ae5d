"""Parameters that forward and backward have in common: the units of scores, and the side inputs as both read them."""

from __future__ import annotations

from torch import Tensor

from flashtile._backends.launch import Parameter, float32, int32
from flashtile._backends.tma import TensorLayout, packed_layout
from flashtile.ops.attention.call import Call
from flashtile.ops.attention.gpu.parameters import SideParameters, side_parameters
from flashtile.ops.attention.hopper.modifiers import ScoreUnits
from flashtile.ops.attention.spec import AttentionSpec, SideInputs

LOG2_E = 1.4426950408889634


def score_units(spec: AttentionSpec) -> ScoreUnits:
    """Describes the units for a kernel, which have no number that the call does not have."""
    capped, changed = spec.softcap > 0, spec.score_program is not None
    scale = spec.softcap if capped else spec.scale
    return ScoreUnits(
        scale_log2=float32(LOG2_E if changed else scale * LOG2_E),
        cap_scale=float32(spec.scale / spec.softcap if capped else None),
        function_scale=float32(scale if changed else None),
    )


def describe_side(call: Call, *, covered: bool, by_column: bool, group: int | None = None) -> SideParameters:
    """The side inputs as `side_parameters` describes them for these kernels. Kernels of the backward go by column."""
    if by_column:
        call = call._replace(aux=call.aux.without_row_logit())
    return side_parameters(
        call, covered=covered, by_column=by_column, reads_bits=True, reads_rows_once=True, group=group
    )


def with_aligned_lists(side: SideInputs) -> SideInputs:
    """With the lists of the block mask at a multiple of 16 bytes: a copy of those that are not. Who passes on its
    addresses keeps it until the launch, or what is allocated meanwhile takes the place of the copy."""
    lists = side.block_lists
    return side if lists is None or lists.data_ptr() % 16 == 0 else side._replace(block_lists=lists.clone())


def whole_sizes(call: Call) -> tuple[int, int]:
    """How many queries and keys are walked through: in a dense call with a block mask, whole tiles of the mask."""
    if call.packed or call.spec.block_shape is None:
        return call.rows_q, call.rows_k
    tile_q, tile_k = call.block_tile
    return -(-call.rows_q // tile_q) * tile_q, -(-call.rows_k // tile_k) * tile_k


def is_covered(call: Call, block_m: int, block_n: int) -> bool:
    """Whether tiles divide the call, so that none ends past a bias or a mask."""
    rows = call.rows_q, call.rows_k
    divided = call.rows_q % block_m == 0 and call.rows_k % block_n == 0
    return not call.packed and divided and whole_sizes(call) == rows


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


def key_rows_apart(call: Call) -> dict[str, Parameter]:
    """For a dense call with key lengths, rows of k and v from one batch entry to the next, as kernels take them."""
    lengths = call.bounded and not call.packed
    rows = {"k_rows_apart": call.k, "v_rows_apart": call.v}
    return {name: int32(row_strides(of.shape, of.strides)[1] if lengths else None) for name, of in rows.items()}


def bounded_layout(shape: tuple[int, ...], strides: tuple[int, ...]) -> TensorLayout:
    """k or v as a packed tensor whose sequences end where the host need not know."""
    if len(shape) == 3:
        return packed_layout(shape, strides)
    batch, rows, *others = shape
    return packed_layout((batch * rows, *others), (row_strides(shape, strides)[0], *strides[2:]))
