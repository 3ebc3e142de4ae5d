"""The kernels of the Hopper backward as launches describe them: parameters and constants, by name.

One description serves a call, whose numbers it has, and compilation ahead of time, for which there are none.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from typing import Any

import torch

from flashtile._backends.allocate import Layout
from flashtile._backends.launch import (
    GIVEN,
    KernelSource,
    Parameter,
    Plan,
    constants_of,
    float32,
    int32,
    make_plan,
    optional,
    pointer_to,
    specialise,
)
from flashtile._backends.tma import descriptor_parameter
from flashtile.ops.attention.gpu.parameters import SidePointers, Window
from flashtile.ops.attention.gpu.reductions import WorkNumbers
from flashtile.ops.attention.hopper.backward import attention_backward_kernel
from flashtile.ops.attention.hopper.backward_configs import BIAS_QUERIES, BiasGradientConfig, tile_width
from flashtile.ops.attention.hopper.backward_descriptors import boxes_of, dtype_of, is_operand
from flashtile.ops.attention.hopper.backward_ends import attention_begin_kernel, attention_end_kernel
from flashtile.ops.attention.hopper.backward_tiles import Loops, Problem
from flashtile.ops.attention.hopper.backward_variant import BackwardVariant
from flashtile.ops.attention.hopper.bias_gradient import attention_bias_gradient_kernel
from flashtile.ops.attention.hopper.configs import PRODUCER_REGISTERS
from flashtile.ops.attention.hopper.scores import ScoreUnits

#: The numbers of a call by the names of parameters (`backward_tiles.Problem` has most of them), of `ScoreUnits`, and
#: "window_left" and "window_right". They decide no machine code.
Numbers = Mapping[str, Any]

#: Those that are 32-bit integers.
_INTEGERS = (
    "batch",
    "heads",
    "heads_kv",
    "group",
    "shares",
    "rows_q",
    "rows_k",
    "query_tiles",
    "key_tiles",
    "lone_tiles",
)


def backward_source(kernel: str, variant: BackwardVariant) -> KernelSource:
    """The specialisation of a kernel ("begin", "main", "end" or "bias") for a variant."""
    function, constants, limit = _kernel(kernel, variant)
    return specialise(function, _parameters(variant, {}), constants, num_warps=4, max_registers=limit)


def backward_plan(
    kernel: str,
    variant: BackwardVariant,
    numbers: Numbers,
    programs: int,
    device: torch.device,
    outputs: tuple[Layout, ...] = (),
) -> Plan:
    """The launch of a kernel."""
    function, constants, limit = _kernel(kernel, variant)
    parameters = _parameters(variant, numbers)
    return make_plan(
        function, parameters, constants, programs, device, num_warps=4, max_registers=limit, outputs=outputs
    )


def _kernel(kernel: str, variant: BackwardVariant) -> tuple[Any, dict[str, Any], int | None]:
    """The function, its constants, and registers of a thread at the start."""
    if kernel == "bias":
        cut = variant.bias_gradient_cut
        return attention_bias_gradient_kernel, _bias_gradient_constants(variant, cut), cut.max_registers
    if kernel == "main":
        return attention_backward_kernel, _constants(variant), variant.config.max_registers
    return attention_begin_kernel if kernel == "begin" else attention_end_kernel, _constants(variant), None


def _constants(variant: BackwardVariant) -> dict[str, Any]:
    config = variant.config
    return {
        **constants_of(config),
        "KEYS": config.block_n,
        "M": config.block_m,
        "PRODUCER_REGISTERS": PRODUCER_REGISTERS,
        "HEAD_DIM": variant.head_dim,
        "HEAD_DIM_V": variant.head_dim_v,
        "D": tile_width(variant.head_dim),
        "E": tile_width(variant.head_dim_v),
        "PACKED": variant.packed,
        "TOP_LEFT": variant.top_left,
        "TOGETHER": variant.statistics_together,
        "SHARES_PROGRESS": variant.shares_progress,
        "HAS_DLSE": variant.has_dlse,
        "ORDERED": variant.ordered,
    }


def _of_near_keys(variant: BackwardVariant, rows_k: Any) -> dict[str, Any]:
    """The side inputs as the kernel of statistics takes them, which reads those alone that ALiBi needs."""
    present = variant.side.has("alibi_slopes")
    return {
        "side": SidePointers._make(optional(present, each) for each in variant.side.pointers),
        "side_numbers": variant.side.numbers if present else None,
        "near_rows_k": int32(rows_k if present else None),
    }


def _bias_gradient_constants(variant: BackwardVariant, cut: BiasGradientConfig) -> dict[str, Any]:
    return {
        **constants_of(cut),
        "KEYS": cut.keys,
        "M": BIAS_QUERIES,
        "REGISTERS": cut.registers,
        "PRODUCER_REGISTERS": PRODUCER_REGISTERS,
        "PACKED": variant.packed,
        "TOP_LEFT": variant.top_left,
        "SHARED_BY_HEADS": variant.bias_shared_by_heads,
    }


def _parameters(variant: BackwardVariant, numbers: Numbers) -> dict[str, Any]:
    """The parameters of all kernels. Without a call its numbers are not known."""
    number = defaultdict(lambda: GIVEN, numbers)
    tensor, statistics = pointer_to(variant.dtype, 16), pointer_to(torch.float32)
    of_stride = "i64" if variant.wide_strides else "i32"
    strides_dout = (f"stride_dout_{dimension}" for dimension in ("batch", "row", "head"))
    integers, scale = {name: int32(number[name]) for name in _INTEGERS}, float32(number["scale"])
    apart = variant.bounded and not variant.packed
    return {
        **{
            f"{of}_desc": descriptor_parameter(dtype_of(of, variant), box, swizzled=is_operand(of, variant))
            for of, box in boxes_of(variant).items()
        },
        **dict.fromkeys(("out_ptr", "dout_ptr", "dq_ptr"), tensor),
        "masked_dout_ptr": optional(variant.has_empty_rows, tensor),
        "lse_ptr": statistics,
        "dlse_ptr": optional(variant.has_dlse, statistics),
        "statistics_ptr": pointer_to(dtype_of("statistics", variant), 16),
        "sums_ptr": optional(not variant.single_key_tile, pointer_to(torch.float32, 16)),
        "cleared_ptr": optional(variant.adds_up, pointer_to(torch.float32, 16)),
        "counter_ptr": pointer_to(torch.int32),
        "turns_ptr": optional(variant.ordered, pointer_to(torch.int32)),
        **dict.fromkeys(("sink_logits_ptr", "sink_sums_ptr"), optional(variant.sinks, statistics)),
        "cu_seqlens_q_ptr": variant.side.pointers.cu_seqlens_q,
        # Multiples of 16 bytes.
        **{name: Parameter(of_stride, 16 // variant.dtype.itemsize, number[name]) for name in strides_dout},
        **integers,
        "scale": scale,
        "lse_unit": float32(number["lse_unit"] if variant.config.statistics_multiplied else None),
        "problem": Problem(
            side=variant.side.pointers,
            slope_sums_ptr=optional(variant.slope_sums, pointer_to(torch.float32)),
            score_change=variant.score_change,
            **{name: integer for name, integer in integers.items() if name not in ("heads", "lone_tiles")},
            lone_tiles=int32(number["lone_tiles"] if variant.lone_tiles else None),
            parts=int32(number["parts"] if variant.divides_queries else None),
            window=Window(int32(number["window_left"]), int32(number["window_right"])),
            scale=scale,
            units=ScoreUnits(
                scale_log2=float32(number["scale_log2"]),
                cap_scale=float32(number["cap_scale"] if variant.softcap else None),
                function_scale=float32(number["function_scale"] if variant.has_function else None),
            ),
            numbers=variant.side.numbers,
            k_rows_apart=int32(number["k_rows_apart"] if apart else None),
            v_rows_apart=int32(number["v_rows_apart"] if apart else None),
        ),
        "constants": variant.side.constants._replace(HAS_LEFT=variant.has_left, HAS_RIGHT=variant.has_right),
        "gradient_ptr": pointer_to(torch.float32 if variant.bias_in_parts else variant.dtype, 16),
        "work": WorkNumbers(*(int32(number[f"work.{name}"]) for name in WorkNumbers._fields)),
        "row_statistics_ptr": optional(variant.row_statistics, statistics),
        **_of_near_keys(variant, number["rows_k"]),
        "loops": Loops(
            MASKS=variant.masks,
            MASKS_LAST=variant.masks_last,
            REVERSES_WALKS=variant.reverses_walks,
            REVERSES_LINES=variant.reverses_lines,
            SHARES_PROGRESS=variant.shares_progress,
            ROTATES_WALKS=variant.rotates_walks,
            SINGLE_KEY_TILE=variant.single_key_tile,
            WHOLE_LINES=variant.whole_lines,
        ),
    }
