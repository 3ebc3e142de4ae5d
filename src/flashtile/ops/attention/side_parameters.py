"""The inputs beside q, k and v as GPU kernels take them: three NamedTuples, which kernels pass on whole.

`SidePointers` are the addresses, of which each launch is given its own. `SideNumbers` is what a plan knows of them:
strides, ends and places. `CallConstants` are constants. What a call does not have is None in the kernel, and no
instruction is left of it. A new side input of `spec.SideInputs` is a field here, and what applies it a function of each
backend.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from flashtile._backends.alignment import power_of_two_factor
from flashtile._backends.devices import interpreting
from flashtile._backends.launch import Parameter, float32, int32, int64, pointer, pointer_to, pointers
from flashtile.ops.attention.arguments import side_tensors
from flashtile.ops.attention.philox import keep_threshold
from flashtile.ops.attention.plans import BlockSizes, SideShape, Window, block_places, clipped_window
from flashtile.ops.attention.spec import FP8, AttentionSpec, Origin, SideInputs, Table, plain_side

#: Where a direction in which a table broadcasts ends.
_ENDLESS = 2**30


class SidePointers(NamedTuple):
    """Addresses of the tensors of `spec.SideInputs`, in its order; those that a score function captures come apart."""

    cu_seqlens_q: Any
    cu_seqlens_k: Any
    key_lengths: Any
    dropout_seed: Any
    bias: Any
    mask: Any
    alibi_slopes: Any
    sinks: Any
    block_lists: Any
    block_patterns: Any
    descale_q: Any
    descale_k: Any
    descale_v: Any


class TableNumbers(NamedTuple):
    """Where a bias or a mask has its elements.

    Attributes:
        stride_batch, stride_head, stride_row: in elements; 0 where it broadcasts. That of rows is None there, if the
            kernel reads such a row once.
        rows, columns: where it ends; None where no tile of the kernel ends past it.
    """

    stride_batch: Any
    stride_head: Any
    stride_row: Any
    rows: Any
    columns: Any


class BlockNumbers(NamedTuple):
    """Where a kernel's part of a block mask's lists is (`plans.BlockPlaces`)."""

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
    """Those of all three. `group`: query heads that share a key/value head, for kernels that ask for it here."""

    q: Any
    k: Any
    v: Any
    group: Any


class DropoutNumbers(NamedTuple):
    """`threshold`: of the random bits of weights that are kept. `scale`: 1 / (1 - dropout_p)."""

    threshold: Any
    scale: Any


class SideNumbers(NamedTuple):
    """What a plan knows of the side inputs.

    Attributes:
        dropout: `DropoutNumbers`.
        bias, mask: `TableNumbers`.
        stride_alibi_batch: from the slopes of one batch entry to the next.
        blocks: `BlockNumbers`.
        origin: `spec.Origin`, where the call lies in a larger one.
        descales: `Descales`.
    """

    dropout: Any
    bias: Any
    mask: Any
    stride_alibi_batch: Any
    blocks: Any
    origin: Any
    descales: Any


class CallConstants(NamedTuple):
    """What kernels are compiled for.

    Attributes:
        HAS_LEFT, HAS_RIGHT: whether the window has a left and a right side.
        TILE_Q, TILE_K: the stored tiles of the block mask; 0 without one.
        BIAS_COLUMN, MASK_COLUMN: strides of the tables' columns; 0 where they broadcast, or there is no table.
    """

    HAS_LEFT: Any
    HAS_RIGHT: Any
    TILE_Q: Any
    TILE_K: Any
    BIAS_COLUMN: Any
    MASK_COLUMN: Any


class SideParameters(NamedTuple):
    """The descriptions of all three."""

    pointers: SidePointers
    numbers: SideNumbers
    constants: CallConstants

    def has(self, name: str) -> bool:
        """Whether there is a tensor of `SidePointers`."""
        parameter: Parameter = getattr(self.pointers, name)
        return parameter.type != "constexpr"


#: What a launch is given for `SidePointers` where there are none: the commonest call.
NO_SIDE = SidePointers(*(pointer(None),) * len(SidePointers._fields))
#: What it is given in the place of the tensors that a score function reads.
NO_CAPTURED = (0,)

_INTERPRETING = interpreting()


def aux_pointers(aux: tuple[Any, ...]) -> tuple[SidePointers, tuple[Any, ...]]:
    """What a launch is given for `SidePointers`, and for the tensors that a score function reads. `aux`: as of
    `arguments.side_tensors`; empty where there is none."""
    if not aux:
        return NO_SIDE, NO_CAPTURED
    addresses = pointers(*(map(_as_bytes, aux) if _INTERPRETING else aux))
    count = len(NO_SIDE)
    return SidePointers._make(addresses[:count]), (*addresses[count:],) or NO_CAPTURED


def side_pointers(side: SideInputs) -> tuple[SidePointers, tuple[Any, ...]]:
    """The same of side inputs."""
    return aux_pointers(() if plain_side(side) else side_tensors(side))


def _as_bytes(tensor: Tensor | None) -> Tensor | None:
    """A mask as kernels read it. The interpreter takes the dtype from the tensor."""
    return tensor.view(torch.uint8) if tensor is not None and tensor.dtype is torch.bool else tensor


def side_parameters(
    side: SideShape,
    spec: AttentionSpec,
    heads: int,
    *,
    covered: bool,
    by_column: bool,
    reads_bits: bool = False,
    reads_rows_once: bool = False,
    group: int | None = None,
) -> SideParameters:
    """Describes them for a kernel.

    Args:
        side: without what the kernel does not take.
        heads: query heads.
        covered: no tile of the kernel ends past a bias or a mask.
        by_column: the kernel walks along the columns of a block mask.
        reads_bits: it reads the patterns of a block mask as bits among the lists, which lie at a multiple of 16 bytes,
            and takes rows in their order.
        reads_rows_once: it reads what all rows of a bias or a mask share once.
        group: as in `Descales`.
    """
    index_q, index_k = side.index_dtypes or (None, None)
    patterns = side.blocks is not None and side.blocks.patterns > 0 and not reads_bits
    descales = side.descales
    pointers = SidePointers(
        cu_seqlens_q=pointer_to(index_q),
        cu_seqlens_k=pointer_to(index_k),
        key_lengths=pointer_to(side.key_lengths_dtype),
        dropout_seed=pointer_to(torch.int64 if side.dropout else None),
        bias=_table_pointer(side.bias),
        mask=_table_pointer(side.mask),
        alibi_slopes=pointer_to(torch.float32 if side.alibi else None),
        sinks=pointer_to(torch.float32 if side.sinks else None),
        block_lists=pointer_to(torch.int32 if side.blocks else None, 16 if reads_bits else 1),
        block_patterns=pointer_to(torch.uint8 if patterns else None, power_of_two_factor(side.pattern_misalignment)),
        descale_q=pointer_to(None if descales[0] is None else torch.float32),
        descale_k=pointer_to(None if descales[1] is None else torch.float32),
        descale_v=pointer_to(None if descales[2] is None else torch.float32),
    )
    q, k, v = (DescaleStrides(*map(int64, strides or (None, None))) for strides in descales)
    numbers = SideNumbers(
        dropout=dropout_numbers(spec.dropout_p if side.dropout else None),
        bias=_table_numbers(side.bias, covered, reads_rows_once),
        mask=_table_numbers(side.mask, covered, reads_rows_once),
        stride_alibi_batch=int32(None if not side.alibi else heads if side.alibi == 2 else 0),
        blocks=_block_numbers(spec, side.blocks, by_column, reads_bits),
        origin=Origin(*map(int32, spec.origin or (None,) * len(Origin._fields))),  # type: ignore[arg-type]
        descales=Descales(q, k, v, int32(None if descales == (None, None, None) else group)),
    )
    tile_q, tile_k = (0, 0) if spec.block_shape is None else spec.block_shape[2:]
    constants = CallConstants(
        HAS_LEFT=spec.window_left is not None,
        HAS_RIGHT=spec.window_right is not None,
        TILE_Q=tile_q,
        TILE_K=tile_k,
        BIAS_COLUMN=_column_stride(side.bias),
        MASK_COLUMN=_column_stride(side.mask),
    )
    return SideParameters(pointers, numbers, constants)


def _column_stride(table: Table | None) -> int:
    return 0 if table is None or table.shape[-1] == 1 else table.strides[-1]


def dropout_numbers(dropout_p: float | None) -> DropoutNumbers:
    """None: there is no dropout."""
    if dropout_p is None:
        return DropoutNumbers(int32(None), float32(None))
    return DropoutNumbers(int32(keep_threshold(dropout_p)), float32(1 / (1 - dropout_p)))


def _table_pointer(table: Table | None) -> Parameter:
    if table is None:
        return pointer_to(None)
    return pointer_to(stored(table.dtype), power_of_two_factor(table.misalignment))


def _table_numbers(table: Table | None, covered: bool, reads_rows_once: bool) -> TableNumbers:
    """The number of columns decides machine code as far as it is a multiple of a power of two: a bounds check that
    could fall between two neighbours would keep them from being read together."""
    if table is None:
        return TableNumbers(*(int32(None),) * 5)
    itemsize = table.dtype.itemsize
    used = [stride if size > 1 else 0 for size, stride in zip(table.shape, table.strides[:3])]
    multiple = max(1, power_of_two_factor(*(stride * itemsize for stride in used)) // itemsize)
    batch, head, row = (int64(stride, multiple) for stride in used)
    rows, columns = (size if size != 1 else None if reads_rows_once else _ENDLESS for size in table.shape[2:])
    return TableNumbers(
        batch,
        head,
        int64(None) if reads_rows_once and rows is None else row,
        int32(None if covered else rows),
        int32(None if covered else columns, power_of_two_factor(columns or 0)),
    )


def _block_numbers(spec: AttentionSpec, sizes: BlockSizes | None, by_column: bool, reads_bits: bool) -> BlockNumbers:
    places = block_places(spec, sizes, by_column)
    return BlockNumbers(
        int32(places.offsets),
        int32(places.tiles),
        int32(places.kinds),
        int32(places.bits if reads_bits else None, 4),
        int32(places.stride_batch),
        int32(places.stride_head),
        int32(places.order if reads_bits else None),
    )


def stored(dtype: torch.dtype) -> torch.dtype:
    """As kernels read it: a mask as bytes, and 8-bit q, k and v, whose type not every compiler knows."""
    return torch.uint8 if dtype in (torch.bool, FP8) else dtype


def window_parameters(spec: AttentionSpec) -> Window:
    left, right = clipped_window(spec)
    return Window(int32(left), int32(right))
