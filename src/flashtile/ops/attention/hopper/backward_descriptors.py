"""What TMA moves in the Hopper backward: the boxes of its copies, and its descriptors."""

from __future__ import annotations

from collections.abc import Callable

import torch

from flashtile._backends.allocate import Layout, contiguous_strides
from flashtile._backends.tma import (
    TensorLayout,
    broadcast_layout,
    chunks_maker,
    joined,
    packed_layout,
    strided_layout,
)
from flashtile.ops.attention.call import Call
from flashtile.ops.attention.hopper.backward_configs import (
    STATISTIC_COLUMNS,
    backward_chunks,
    padded_strides,
    tile_width,
)
from flashtile.ops.attention.hopper.backward_variant import BackwardVariant
from flashtile.ops.attention.hopper.configs import CONSUMER_ROWS
from flashtile.ops.attention.hopper.parameters import bounded_layout


def buffers(variant: BackwardVariant, tiles: int, summed: int) -> dict[str, tuple[int, int]]:
    """Shapes of the sums of `summed` tiles of queries, and of the statistics of `tiles` (`backward_ends`)."""
    block_m = variant.config.block_m
    rows = summed * block_m * tile_width(variant.head_dim) // CONSUMER_ROWS
    parts, numbers = _statistics_box(variant)
    return {"sums": (rows, CONSUMER_ROWS), "statistics": (tiles * parts, numbers)}


def _statistics_box(variant: BackwardVariant) -> tuple[int, int]:
    """Statistics of one tile of queries: lse, then delta, of each query a number, or an operand's row."""
    block_m = variant.config.block_m
    return (2 * block_m, STATISTIC_COLUMNS) if variant.config.statistics_multiplied else (2, block_m)


#: The tensors that TMA moves in the order of the main kernel's parameters. Those with rows of heads may have a second
#: chunk of columns, `<name>_tail`, whose descriptor follows.
MOVED = ("q", "k", "v", "dout", "statistics", "sums", "dq", "dk", "dv", "bias", "bias_gradient")

#: Of these, those that the kernel of the bias's gradient takes.
MOVED_FOR_BIAS = ("q", "k", "v", "dout", "statistics", "bias")


def boxes_of(variant: BackwardVariant) -> dict[str, tuple[int, ...] | None]:
    """What one copy moves, for each descriptor in the order of the main kernel's parameters; None where there is no
    second chunk of columns, or where TMA does not move it."""
    config = variant.config
    rows = {"q": config.block_m, "dout": config.block_m}
    boxes: dict[str, tuple[int, ...] | None] = {}
    for name in MOVED:
        if name == "statistics":
            boxes[name] = _statistics_box(variant)
        elif name == "sums":
            # Columns of dq that are added at once: those of the tail at most, so that one descriptor serves both.
            together = min(config.sum_columns, backward_chunks(variant.head_dim)[1] or config.sum_columns)
            summed = config.sums_by_tma and variant.adds_up
            boxes[name] = (together, CONSUMER_ROWS) if summed else None
        elif name == "bias_gradient":
            boxes[name] = (1, 1, CONSUMER_ROWS, CONSUMER_ROWS) if config.bias_stored else None
        elif name == "bias":
            boxes[name] = (1, 1, config.block_m, CONSUMER_ROWS) if config.bias_by_tma else None
        elif name == "dq" and variant.adds_up and not variant.lone_tiles:
            boxes.update({"dq": None, "dq_tail": None})
        else:
            head_dim = variant.head_dim if name in ("q", "k", "dq", "dk") else variant.head_dim_v
            whole, tail = backward_chunks(head_dim)
            if name == "dq":  # leaves as it is multiplied
                whole, tail = config.sum_columns, tail if tail < config.sum_columns else 0
            count = rows.get(name, CONSUMER_ROWS)
            ends = variant.packed if name in ("q", "dout", "dq") else variant.bounded
            outer = (1, 1) if ends else (1,)
            boxes[name] = (*outer, count, 1, whole)
            boxes[name + "_tail"] = (*outer, count, 1, tail) if tail else None
    return boxes


def read_layouts(call: Call, strides_dout: tuple[int, ...]) -> dict[str, tuple[tuple[int, ...], tuple[int, ...]]]:
    """Shapes and strides of what the kernels of a backward read. `strides_dout`: of the dout among it."""
    read = {"q": call.q, "k": call.k, "v": call.v}
    return {**{name: (of.shape, of.strides) for name, of in read.items()}, "dout": (call.out_shape, strides_dout)}


def describer(
    variant: BackwardVariant,
    call: Call,
    strides_dout: tuple[int, ...],
    gradients: tuple[Layout, Layout, Layout],
    tiles: int,
    summed: int,
    names: tuple[str, ...] = MOVED,
) -> Callable[..., tuple]:
    """What makes the descriptors of `names`, from their addresses. `strides_dout`: of the dout that the kernels read.
    `tiles`, `summed`: as of `buffers`."""
    dq, dk, dv = gradients
    describe = packed_layout if variant.packed else strided_layout
    describe_keys = bounded_layout if variant.bounded else strided_layout
    bias, read = call.aux.bias, read_layouts(call, strides_dout)
    layouts = {
        **{name: (describe_keys if name in ("k", "v") else describe)(*of) for name, of in read.items()},
        "dq": describe(dq.shape, dq.strides),
        "dk": describe_keys(dk.shape, dk.strides),
        "dv": describe_keys(dv.shape, dv.strides),
        "bias": None if bias is None else broadcast_layout(bias.shape, bias.strides),
        "bias_gradient": None if bias is None else strided_layout(bias.shape, padded_strides(bias.shape)),
        **{
            name: TensorLayout(shape, contiguous_strides(shape))
            for name, shape in buffers(variant, tiles, summed).items()
        },
    }
    boxes = boxes_of(variant)
    return joined([
        chunks_maker(
            dtype_of(name, variant),
            tuple(boxes[part] for part in (name, name + "_tail") if part in boxes),
            layouts[name],
            swizzled=is_operand(name, variant),
        )
        for name in names
    ])  # fmt: skip


def is_operand(name: str, variant: BackwardVariant) -> bool:
    """Whether a tensor is read as an operand of matrix products, whose rows are swizzled."""
    return variant.config.statistics_multiplied if name == "statistics" else name != "sums"


def dtype_of(name: str, variant: BackwardVariant) -> torch.dtype:
    if not is_operand(name, variant):
        return torch.float32
    return torch.bfloat16 if name == "statistics" else variant.dtype
