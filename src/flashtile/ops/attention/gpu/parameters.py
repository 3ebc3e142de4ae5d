"""Parameters that all GPU kernels have in common: the side inputs as kernels take them, and windows.

Kernels take the side inputs as three NamedTuples: `SidePointers` (addresses), `SideNumbers` (what a plan knows) and
`CallConstants`. A field that a call does not have is None in the kernel, and no instruction is left of it.
"""

from __future__ import annotations

import functools
from collections import namedtuple
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flashtile._backends.alignment import power_of_two_factor
from flashtile._backends.launch import ABSENT, Parameter, float32, int32, int64, pointer_to
from flashtile._backends.tma import row_strides
from flashtile.ops.attention.call import AuxFacts, Call, TensorFacts
from flashtile.ops.attention.philox import keep_threshold
from flashtile.ops.attention.spec import FP8, SINGLE, AttentionSpec, Aux, Origin, SideInputs, side_tensors
from flashtile.ops.attention.tile_lists import Grid, Places
from flashtile.ops.common.checks import MAX_POSITIONS

#: The end of a direction in which a table broadcasts.
_ENDLESS = 2**30


#: Addresses of the tensors of `spec.SideInputs`, in its order; those that a score function captures come apart.
SidePointers: Any = namedtuple("SidePointers", SINGLE)  # type: ignore[misc]


class TableNumbers(NamedTuple):
    """Strides and ends of a bias or a mask. `stride_batch`, `stride_head`, `stride_row`: in elements; 0 where it
    broadcasts. That of rows is None there, if the kernel reads such a row once. `rows`, `columns`: where it ends; None
    where no tile of the kernel ends past it."""

    stride_batch: Any
    stride_head: Any
    stride_row: Any
    rows: Any
    columns: Any


class BlockNumbers(NamedTuple):
    """A kernel's part of a block mask's lists: where lines, tiles, kinds, bits and the order of rows begin, and how far
    a batch entry and a head lead."""

    offsets: Any
    tiles: Any
    kinds: Any
    bits: Any
    stride_batch: Any
    stride_head: Any
    order: Any


class DescaleStrides(NamedTuple):
    """The factors of an 8-bit tensor: elements from one batch entry and head to the next."""

    batch: Any
    head: Any


class Descales(NamedTuple):
    """The strides of all three. `group`: query heads that share a key/value head, for kernels that ask for it here."""

    q: Any
    k: Any
    v: Any
    group: Any


class DropoutNumbers(NamedTuple):
    """`threshold`: of the random bits of weights that are kept. `scale`: 1 / (1 - dropout_p)."""

    threshold: Any
    scale: Any


class SideNumbers(NamedTuple):
    """Numbers of the side inputs that a plan knows.

    Attributes:
        dropout: `DropoutNumbers`.
        bias, mask: `TableNumbers`.
        stride_slopes_batch: from the slopes of one batch entry to the next.
        blocks: `BlockNumbers`.
        origin: `spec.Origin`, where the call lies in a larger one.
        descales: `Descales`.
    """

    dropout: Any
    bias: Any
    mask: Any
    stride_slopes_batch: Any
    blocks: Any
    origin: Any
    descales: Any


class CallConstants(NamedTuple):
    """Constants that kernels are compiled for. `HAS_LEFT`, `HAS_RIGHT`: whether the window has a left and a right side.
    `TILE_Q`, `TILE_K`: the stored tiles of the block mask; 0 without one. `BIAS_COLUMN`, `MASK_COLUMN`: strides of the
    tables' columns; 0 where they broadcast, or there is no table."""

    HAS_LEFT: Any
    HAS_RIGHT: Any
    TILE_Q: Any
    TILE_K: Any
    BIAS_COLUMN: Any
    MASK_COLUMN: Any


class SideParameters(NamedTuple):
    """The descriptions of all three."""

    pointers: Any
    numbers: SideNumbers
    constants: CallConstants

    def has(self, name: str) -> bool:
        """Whether there is a tensor of `SidePointers`."""
        parameter: Parameter = getattr(self.pointers, name)
        return parameter.type != "constexpr"


def aux_buffers(call: Call) -> tuple[str, ...]:
    """The names of the tensors beside q, k and v that there are, as buffers of a pipeline."""
    single = (name for name, of in zip(AuxFacts._fields, call.aux) if isinstance(of, TensorFacts))
    return *single, *(f"tensor{number}" for number in range(len(call.aux.captured)))


def aux_tensors(side: SideInputs) -> Aux:
    """The tensors of `aux_buffers`."""
    return () if side.plain else tuple(tensor for tensor in side_tensors(side) if tensor is not None)


def side_parameters(
    call: Call,
    *,
    covered: bool,
    by_column: bool,
    staged: bool = False,
    group: int | None = None,
) -> SideParameters:
    """Describes the side inputs of a call for a kernel.

    Args:
        call: without what the kernel does not take.
        covered: no tile of the kernel ends past a bias or a mask.
        by_column: the kernel walks along the columns of a block mask. It belongs to a backward, or sums columns, and
            has lse, which counts the logit without a key.
        staged: a producer reads ahead: the patterns of a block mask as bits among the lists, which lie at a multiple of
            16 bytes, in the order of the rows; and what all rows of a bias or a mask share, once.
        group: as in `Descales`.
    """
    spec, aux = call.spec, call.aux.without_row_logit() if by_column else call.aux
    patterns = None if aux.block_patterns is None or staged or not aux.block_patterns.shape[0] else torch.uint8
    pattern_factor = 1 if aux.block_patterns is None else power_of_two_factor(aux.block_patterns.misalignment)
    special = {
        "bias": _table_pointer(aux.bias),
        "mask": _table_pointer(aux.mask),
        "block_lists": pointer_to(None if aux.block_lists is None else torch.int32, 16 if staged else 1),
        "block_patterns": pointer_to(patterns, pattern_factor),
    }
    pointers = SidePointers._make(special.get(name) or _pointer(getattr(aux, name)) for name in SINGLE)
    descales = [DescaleStrides(*map(int64, (None, None) if of is None else of.strides)) for of in aux.descales]
    numbers = SideNumbers(
        dropout=dropout_numbers(None if aux.dropout_seed is None else spec.dropout_p),
        bias=_table_numbers(aux.bias, covered, staged),
        mask=_table_numbers(aux.mask, covered, staged),
        stride_slopes_batch=int32((None, 0, call.heads)[aux.slope_dims]),
        blocks=_block_numbers(call, by_column, staged),
        origin=Origin(*map(int32, spec.origin or (None,) * len(Origin._fields))),  # type: ignore[arg-type]
        descales=Descales._make((*descales, int32(None if aux.descales == (None, None, None) else group))),
    )
    tile_q, tile_k = call.block_tile
    constants = CallConstants(
        HAS_LEFT=spec.window_left is not None,
        HAS_RIGHT=spec.window_right is not None,
        TILE_Q=tile_q,
        TILE_K=tile_k,
        BIAS_COLUMN=_column_stride(aux.bias),
        MASK_COLUMN=_column_stride(aux.mask),
    )
    return SideParameters(pointers, numbers, constants)


def _pointer(tensor: TensorFacts | None) -> Parameter:
    return pointer_to(None if tensor is None else tensor.dtype)


def _column_stride(table: TensorFacts | None) -> int:
    return 0 if table is None or table.shape[-1] == 1 else table.strides[-1]


def dropout_numbers(dropout_p: float | None) -> DropoutNumbers:
    """None: there is no dropout."""
    if dropout_p is None:
        return DropoutNumbers(int32(None), float32(None))
    return DropoutNumbers(int32(keep_threshold(dropout_p)), float32(1 / (1 - dropout_p)))


def _table_pointer(table: TensorFacts | None) -> Parameter:
    if table is None:
        return pointer_to(None)
    return pointer_to(stored(table.dtype), power_of_two_factor(table.misalignment))


def _table_numbers(table: TensorFacts | None, covered: bool, staged: bool) -> TableNumbers:
    """The number of columns decides machine code as far as it is a multiple of a power of two: a bounds check that
    could fall between two neighbours would keep them from being read together."""
    if table is None:
        return TableNumbers(*(int32(None),) * 5)
    itemsize = table.dtype.itemsize
    used = [stride if size > 1 else 0 for size, stride in zip(table.shape, table.strides[:3])]
    multiple = max(1, power_of_two_factor(*(stride * itemsize for stride in used)) // itemsize)
    batch, head, row = (int64(stride, multiple) for stride in used)
    rows, columns = (size if size != 1 else None if staged else _ENDLESS for size in table.shape[2:])
    return TableNumbers(
        batch,
        head,
        int64(None) if staged and rows is None else row,
        int32(None if covered else rows),
        int32(None if covered else columns, power_of_two_factor(columns or 0)),
    )


def _block_numbers(call: Call, by_column: bool, staged: bool) -> BlockNumbers:
    lists, patterns = call.aux.block_lists, call.aux.block_patterns
    if call.spec.block_shape is None or lists is None or patterns is None:
        return BlockNumbers(*map(int32, (None,) * len(BlockNumbers._fields)))
    batch, heads, *tile = call.spec.block_shape
    # A mask has the lengths of a dense call, or the bounds of the lengths in a packed one.
    grid = Grid((batch, heads, *call.max_seqlens), (tile[0], tile[1]))
    places = Places.of(grid, lists.shape[0], patterns.shape[0])
    if by_column:
        own = places.column_offsets, places.rows, places.row_kinds, places.column_bits
        lines, order = grid.tiles_k, None  # columns come in their own order
    else:
        own = places.row_offsets, places.columns, places.kinds, places.row_bits
        lines, order = grid.tiles_q, places.row_order
    offsets, tiles, kinds, bits = own
    return BlockNumbers(
        int32(offsets),
        int32(tiles),
        int32(kinds),
        int32(bits if staged else None, 4),
        int32(heads * lines if batch > 1 else 0),
        int32(lines if heads > 1 else 0),
        int32(order if staged else None),
    )


def stored(dtype: torch.dtype) -> torch.dtype:
    """As kernels read it: a mask as bytes, and 8-bit q, k and v, whose type not every compiler knows, where they are
    not multiplied as they are."""
    return torch.uint8 if dtype in (torch.bool, FP8) else dtype


class Window(NamedTuple):
    """Keys visible on each side of the diagonal, as kernels take them."""

    left: Any
    right: Any


def window_parameters(spec: AttentionSpec) -> Window:
    """Both sides of the window, no wider than any sequence is long; 0 for one that is unlimited, which kernels do not
    read."""
    sides = spec.window_left, spec.window_right
    return Window(*(int32(max(-MAX_POSITIONS, min(side or 0, MAX_POSITIONS))) for side in sides))


def key_batch_strides(call: Call) -> dict[str, Parameter]:
    """For a dense call with key lengths, rows of k and v from one batch entry to the next, as kernels take them."""
    lengths = call.bounded and not call.packed
    rows = {"k_rows_apart": call.k, "v_rows_apart": call.v}
    return {name: int32(row_strides(of.shape, of.strides)[1] if lengths else None) for name, of in rows.items()}


def positive_scale(q: Tensor, spec: AttentionSpec) -> tuple[Tensor, AttentionSpec, int]:
    """Kernels take the maximum before they scale, so the scale must be positive: its sign, or 0, moves into q. Returns
    a contiguous copy of q, the spec, and the factor from the gradient of that q to the gradient of the given one."""
    if not spec.scale:
        return torch.zeros_like(q, memory_format=torch.contiguous_format), spec._replace(scale=1.0), 0
    negative = (q.view(torch.uint8) ^ 0x80).view(FP8) if q.dtype is FP8 else -q
    # The negative of an expanded q need not be contiguous: PyTorch may choose an order whose last dimension is not
    # innermost.
    return negative.contiguous(), spec._replace(scale=-spec.scale), -1


def contiguous_on_16_bytes(out: Tensor) -> Tensor:
    """An out that every kernel can read; on Hopper they are compiled for multiples of 16 bytes."""
    out = out.contiguous()
    return out.clone() if out.data_ptr() % 16 else out


def captured_parameters(
    captured: tuple[TensorFacts, ...], summed: tuple[bool, ...] = (), in_waves: bool = False
) -> dict[str, Any]:
    """Parameters of what a score function reads: NamedTuples `captured` of addresses, `captured_sizes`, and
    `captured_sums`, where gradients of the `summed` tensors are added up, with `in_waves` and the place of the wave."""
    tensors = {f"tensor{number}": pointer_to(stored(of.dtype)) for number, of in enumerate(captured)}
    sizes: dict[str, Parameter] = {
        f"size{number}_{dim}": (int64 if of.large else int32)(size)
        for number, of in enumerate(captured)
        for dim, size in enumerate(of.shape)
    }
    sums = {f"sum{number}": pointer_to(torch.float32 if wants else None) for number, wants in enumerate(summed)}
    if in_waves:
        sums["wave"] = pointer_to(torch.int32)
    return {
        "captured": _group("Captured", tensors) if tensors else ABSENT,
        "captured_sizes": _group("CapturedSizes", sizes) if sizes else int32(None),
        "captured_sums": _group("CapturedSums", sums) if sums else ABSENT,
    }


def _group(name: str, fields: dict[str, Parameter]) -> tuple[Parameter, ...]:
    return _group_class(name, tuple(fields))(*fields.values())


@functools.lru_cache(maxsize=1024)
def _group_class(name: str, fields: tuple[str, ...]) -> Any:
    return namedtuple(name, fields)
