"""Parameters that forward and backward have in common: those of the scores, of a block mask and of lengths."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from flashtile._backends.alignment import power_of_two_factor
from flashtile._backends.launch import Parameter, float32, int32, optional, pointer_to, strides_of
from flashtile.ops.attention.philox import keep_threshold
from flashtile.ops.attention.plans import PLAIN_SIDE, BlockPlaces, SideShape, Table
from flashtile.ops.attention.spec import AttentionSpec, Origin, SideInputs

LOG2_E = 1.4426950408889634

INT32, FLOAT32 = Parameter("i32"), Parameter("fp32")


class ScoreVariant(NamedTuple):
    """What of the scores decides machine code."""

    softcap: bool = False
    alibi: bool = False
    sinks: bool = False


def score_parameters(variant: ScoreVariant) -> dict[str, Parameter]:
    """Soft cap, ALiBi and sinks."""
    return {
        "scale_log2": FLOAT32,
        "cap_scale": optional(variant.softcap, FLOAT32),
        "alibi_slopes_ptr": optional(variant.alibi, pointer_to(torch.float32)),
        "stride_alibi_batch": optional(variant.alibi, INT32),
        "sinks_ptr": optional(variant.sinks, pointer_to(torch.float32)),
    }


def score_values(spec: AttentionSpec, heads: int, alibi: int) -> dict[str, Any]:
    """`alibi`: dimensions of the slopes."""
    capped = spec.softcap > 0
    return {
        "scale_log2": (spec.softcap if capped else spec.scale) * LOG2_E,
        "cap_scale": spec.scale / spec.softcap if capped else None,
        "stride_alibi_batch": heads if alibi == 2 else 0,
    }


def block_parameters(listed: bool) -> dict[str, Parameter]:
    """Where a block mask's lists are. The bits of patterns lie at multiples of 16 bytes."""
    places = dict.fromkeys(BlockPlaces._fields, INT32) | {"block_bits": Parameter("i32", 4)}
    parameters = {"block_lists_ptr": pointer_to(torch.int32, 16), **places}
    return {name: optional(listed, parameter) for name, parameter in parameters.items()}


def block_lists(side: SideInputs) -> Tensor | None:
    """The lists of the block mask, at a multiple of 16 bytes: a copy of those that are not."""
    lists = side.block_lists
    return lists if lists is None or lists.data_ptr() % 16 == 0 else lists.clone()


def block_constants(block_tile: tuple[int, int] | None) -> dict[str, int]:
    """TILE_Q and TILE_K of the kernels; 0 without a block mask."""
    return dict(zip(("TILE_Q", "TILE_K"), block_tile or (0, 0)))


def whole_tiles(rows: int, tile: int | None) -> int:
    """`rows` rounded up to the end of the last tile of the block mask; `tile` is None without one."""
    return rows if tile is None else -(-rows // tile) * tile


def length_parameters(index_dtypes: tuple[torch.dtype, torch.dtype] | None) -> dict[str, Parameter]:
    """Offsets of packed sequences; None in a dense call."""
    names = ("cu_seqlens_q_ptr", "cu_seqlens_k_ptr")
    return {name: pointer_to(dtype) for name, dtype in zip(names, index_dtypes or (None, None))}


def table_parameters(name: str, table: Table | None, covered: bool) -> dict[str, Parameter]:
    """The parameters of a bias or a mask (`tables.Table`): a pointer, strides and ends.

    The number of columns decides machine code as far as it is a multiple of a power of two: a bounds check that could
    fall between two neighbours would keep them from being read together. `covered`: no tile of the kernel ends past the
    table, so that there is no such check.
    """
    if table is None:
        absent = {f"{name}_{of}": int32(None) for of in ("rows", "columns")}
        return {f"{name}_ptr": pointer_to(None), **strides_of(name, dict.fromkeys(("batch", "head", "row"))), **absent}
    itemsize = table.dtype.itemsize
    batch, head, row = (stride if size > 1 else 0 for size, stride in zip(table.shape, table.strides[:3]))
    _, _, rows, columns = table.shape
    multiple = max(1, power_of_two_factor(*(stride * itemsize for stride in (batch, head, row))) // itemsize)
    strides = {"batch": batch, "head": head, "row": row if rows > 1 else None}
    stored = torch.uint8 if table.dtype is torch.bool else table.dtype
    return {
        f"{name}_ptr": pointer_to(stored, power_of_two_factor(table.misalignment)),
        **strides_of(name, strides, multiple),
        f"{name}_rows": int32(None if covered or rows == 1 else rows),
        f"{name}_columns": int32(None if covered or columns == 1 else columns, power_of_two_factor(columns)),
    }


def column_stride(table: Table | None) -> int:
    """A constant of the kernels; 0 where the table has one column, or there is none."""
    return 0 if table is None or table.shape[-1] == 1 else table.strides[-1]


class ModifierVariant(NamedTuple):
    """What of key lengths, tables and dropout decides machine code of the backward: `parameters` are theirs by name,
    with their values."""

    key_lengths_dtype: torch.dtype | None
    strides_column: tuple[int, int]
    parameters: tuple[tuple[str, Parameter], ...]

    @property
    def drops(self) -> bool:
        """Whether there is dropout."""
        return dict(self.parameters)["dropout_seed_ptr"].type != "constexpr"

    @property
    def changes_weights(self) -> bool:
        """Whether there are tables or dropout."""
        return self.drops or any(dict(self.parameters)[of].type != "constexpr" for of in ("bias_ptr", "mask_ptr"))

    @property
    def values(self) -> dict[str, Any]:
        """Values of the parameters that are the same for all launches."""
        return {name: parameter.value for name, parameter in self.parameters if not name.endswith("_ptr")}


def modifier_variant(side: SideShape, spec: AttentionSpec, covered: bool) -> ModifierVariant:
    """`covered`: as `table_parameters` has it."""
    parameters = {
        **table_parameters("bias", side.bias, covered),
        **table_parameters("mask", side.mask, covered),
        **dropout_parameters(spec),
    }
    strides = column_stride(side.bias), column_stride(side.mask)
    return ModifierVariant(side.key_lengths_dtype, strides, tuple(parameters.items()))


def dropout_parameters(spec: AttentionSpec) -> dict[str, Parameter]:
    """Parameters of dropout (`dropout.Dropout`), and of the place in a larger call, as far as the features need it."""
    drops = spec.dropout_p > 0
    origin = spec.origin or (None,) * len(Origin._fields)
    return {
        "dropout_seed_ptr": pointer_to(torch.int64 if drops else None),
        "keep_threshold": int32(keep_threshold(spec.dropout_p) if drops else None),
        "keep_scale": float32(1 / (1 - spec.dropout_p) if drops else None),
        **{f"origin_{name}": int32(value) for name, value in zip(Origin._fields, origin)},
    }


#: The modifiers of a call that has none.
PLAIN_MODIFIERS = modifier_variant(PLAIN_SIDE, AttentionSpec(1.0), covered=False)
