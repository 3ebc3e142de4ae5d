"""The kernels of the Hopper backward as launches describe them: parameters and constants, by name.

One description serves a call, whose numbers it has, and compilation ahead of time, for which there are none.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from flashtile._backends.allocate import Layout
from flashtile._backends.launch import (
    GIVEN,
    KernelSource,
    Parameter,
    Plan,
    float32,
    int32,
    make_plan,
    optional,
    pointer_to,
    specialise,
)
from flashtile._backends.tma import descriptor_parameter
from flashtile.ops.attention.hopper.backward import attention_backward_kernel
from flashtile.ops.attention.hopper.backward_configs import (
    BIAS_KEYS,
    BIAS_QUERIES,
    bias_gradient_config,
    tile_width,
)
from flashtile.ops.attention.hopper.backward_descriptors import boxes_of, dtype_of, is_operand
from flashtile.ops.attention.hopper.backward_ends import attention_begin_kernel, attention_end_kernel
from flashtile.ops.attention.hopper.backward_tiles import Loops, Problem
from flashtile.ops.attention.hopper.backward_variant import BackwardVariant
from flashtile.ops.attention.hopper.bias_gradient import attention_bias_gradient_kernel
from flashtile.ops.attention.hopper.configs import PRODUCER_REGISTERS
from flashtile.ops.attention.hopper.scores import ScoreUnits
from flashtile.ops.attention.plans import Window
from flashtile.ops.attention.triton.bias_work import WorkNumbers

#: Registers of a thread that computes the gradient of a bias, and of any thread at the start, as in a forward with two
#: consumers.
_BIAS_REGISTERS, _BIAS_MAX_REGISTERS = 240, 168


class BackwardNumbers(NamedTuple):
    """The numbers of a call, which decide no machine code. Without a call they are not known (`GIVEN`).

    Attributes:
        heads: query heads.
        heads_kv: counts each key/value head `shares` times, once for each share of its query heads, `group` of them.
        query_tiles, key_tiles: (packed: slots) of a head.
        window: `plans.clipped_window`.
        lse_unit: that of lse, if statistics are multiplied.
        units: `parameters.score_units`.
        strides_dout: of batch, row and head.
        k_rows_apart, v_rows_apart: from one batch entry to the next, if key lengths bound a dense call.
        work: of the gradient of a bias.
    """

    batch: Any = GIVEN
    heads: Any = GIVEN
    heads_kv: Any = GIVEN
    group: Any = GIVEN
    shares: Any = GIVEN
    rows_q: Any = GIVEN
    rows_k: Any = GIVEN
    query_tiles: Any = GIVEN
    key_tiles: Any = GIVEN
    window: tuple[Any, Any] = (GIVEN, GIVEN)
    scale: Any = GIVEN
    lse_unit: Any = GIVEN
    units: ScoreUnits = ScoreUnits(GIVEN, GIVEN, GIVEN)
    strides_dout: tuple[Any, ...] = (GIVEN,) * 3
    k_rows_apart: Any = GIVEN
    v_rows_apart: Any = GIVEN
    work: WorkNumbers = WorkNumbers(*(Parameter("i32"),) * len(WorkNumbers._fields))


def backward_source(kernel: str, variant: BackwardVariant) -> KernelSource:
    """The specialisation of a kernel ("begin", "main", "end" or "bias") for a variant."""
    function, constants, limit = _kernel(kernel, variant)
    return specialise(function, _parameters(variant, BackwardNumbers()), constants, num_warps=4, max_registers=limit)


def backward_plan(
    kernel: str,
    variant: BackwardVariant,
    numbers: BackwardNumbers,
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
        return attention_bias_gradient_kernel, _bias_gradient_constants(variant), _BIAS_MAX_REGISTERS
    if kernel == "main":
        return attention_backward_kernel, _constants(variant), variant.config.max_registers
    return attention_begin_kernel if kernel == "begin" else attention_end_kernel, _constants(variant), None


def _constants(variant: BackwardVariant) -> dict[str, Any]:
    config = variant.config
    return {
        "KEYS": config.block_n,
        "M": config.block_m,
        "PARTS": config.parts,
        "STAGES": config.stages,
        "KEY_STAGES": config.key_stages,
        "SUM_COLUMNS": config.sum_columns,
        "DSCORE_STAGES": config.dscore_stages,
        "SPLIT_ROLES": config.split_roles,
        "PRODUCER": config.producer,
        "REGISTERS": config.registers,
        "PRODUCER_REGISTERS": PRODUCER_REGISTERS,
        "HEAD_DIM": variant.head_dim,
        "HEAD_DIM_V": variant.head_dim_v,
        "D": tile_width(variant.head_dim),
        "E": tile_width(variant.head_dim_v),
        "PACKED": variant.packed,
        "TOP_LEFT": variant.top_left,
        "SHARES_PROGRESS": variant.shares_progress,
        "STATISTICS_MULTIPLIED": config.statistics_multiplied,
        "SUMS_BY_TMA": config.sums_by_tma,
        "HAS_DLSE": variant.has_dlse,
        "ORDERED": variant.ordered,
    }


def _bias_gradient_constants(variant: BackwardVariant) -> dict[str, Any]:
    cut = bias_gradient_config(variant.head_dim, variant.head_dim_v, variant.hides_or_drops)
    return {
        "KEYS": BIAS_KEYS,
        "M": BIAS_QUERIES,
        "QUERY_TILES": cut.query_tiles,
        "STAGES": cut.stages,
        "KEY_STAGES": cut.key_stages,
        "REGISTERS": _BIAS_REGISTERS,
        "PRODUCER_REGISTERS": PRODUCER_REGISTERS,
        "TOP_LEFT": variant.top_left,
        "SHARED_BY_HEADS": variant.bias_shared_by_heads,
    }


def _parameters(variant: BackwardVariant, numbers: BackwardNumbers) -> dict[str, Any]:
    """The parameters of all kernels."""
    tensor, statistics = pointer_to(variant.dtype, 16), pointer_to(torch.float32)
    of_stride = "i64" if variant.wide_strides else "i32"
    strides_dout = zip(("batch", "row", "head"), numbers.strides_dout)
    sizes = {name: int32(getattr(numbers, name)) for name in ("batch", "rows_q", "query_tiles")}
    units, scale = numbers.units, float32(numbers.scale)
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
        "counter_ptr": pointer_to(torch.int32),
        "turns_ptr": optional(variant.ordered, pointer_to(torch.int32)),
        **dict.fromkeys(("sink_logits_ptr", "sink_sums_ptr"), optional(variant.sinks, statistics)),
        "cu_seqlens_q_ptr": variant.side.pointers.cu_seqlens_q,
        **{f"stride_dout_{dimension}": Parameter(of_stride, 8, stride) for dimension, stride in strides_dout},
        **sizes,
        "heads": int32(numbers.heads),
        "scale": scale,
        "lse_unit": float32(numbers.lse_unit if variant.config.statistics_multiplied else None),
        "problem": Problem(
            side=variant.side.pointers,
            slope_sums_ptr=optional(variant.slope_sums, pointer_to(torch.float32)),
            score_change=variant.score_change,
            **sizes,
            heads_kv=int32(numbers.heads_kv),
            group=int32(numbers.group),
            shares=int32(numbers.shares),
            rows_k=int32(numbers.rows_k),
            key_tiles=int32(numbers.key_tiles),
            window=Window(*map(int32, numbers.window)),
            scale=scale,
            units=ScoreUnits(
                scale_log2=float32(units.scale_log2),
                cap_scale=float32(units.cap_scale if variant.softcap else None),
                function_scale=float32(units.function_scale if variant.has_function else None),
            ),
            numbers=variant.side.numbers,
            k_rows_apart=int32(numbers.k_rows_apart if apart else None),
            v_rows_apart=int32(numbers.v_rows_apart if apart else None),
        ),
        "constants": variant.side.constants._replace(HAS_LEFT=variant.has_left, HAS_RIGHT=variant.has_right),
        "gradient_ptr": pointer_to(torch.float32 if variant.bias_in_parts else variant.dtype, 16),
        "work": numbers.work,
        "row_statistics_ptr": optional(variant.row_statistics, statistics),
        "loops": Loops(
            MASKS=variant.masks,
            MASKS_LAST=variant.masks_last,
            REVERSES_WALKS=variant.reverses_walks,
            REVERSES_LINES=variant.reverses_lines,
            SHARES_PROGRESS=variant.shares_progress,
            ROTATES_WALKS=variant.rotates_walks,
            SINGLE_KEY_TILE=variant.single_key_tile,
        ),
    }
