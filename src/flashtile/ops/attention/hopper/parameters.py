"""Parameters that forward and backward have in common: those of the scores, of a block mask and of lengths."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from flashtile._backends.launch import Parameter, optional, pointer_to
from flashtile.ops.attention.plans import BlockPlaces
from flashtile.ops.attention.spec import AttentionSpec, SideInputs

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


def alibi_dimensions(side: SideInputs) -> int:
    """Of the slopes, `[heads]` or `[batch, heads]`; 0 without."""
    return 0 if side.alibi_slopes is None else side.alibi_slopes.dim()


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
    """So many rows, up to the end of the last tile of the block mask; `tile` is None without one."""
    return rows if tile is None else -(-rows // tile) * tile


def length_parameters(index_dtypes: tuple[torch.dtype, torch.dtype] | None) -> dict[str, Parameter]:
    """Offsets of packed sequences; None in a dense call."""
    names = ("cu_seqlens_q_ptr", "cu_seqlens_k_ptr")
    return {name: pointer_to(dtype) for name, dtype in zip(names, index_dtypes or (None, None))}
