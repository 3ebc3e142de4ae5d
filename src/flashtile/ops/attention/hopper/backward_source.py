"""The specialisations of the kernels of the Hopper backward: their parameters and constants."""

from __future__ import annotations

from typing import Any

import torch

from flashtile._backends.launch import KernelSource, Parameter, optional, pointer_to, specialise
from flashtile._backends.tma import descriptor_parameter
from flashtile.ops.attention.hopper.backward import attention_backward_kernel
from flashtile.ops.attention.hopper.backward_configs import BIAS_QUERIES, bias_gradient_config, tile_width
from flashtile.ops.attention.hopper.backward_descriptors import boxes_of, dtype_of, is_operand
from flashtile.ops.attention.hopper.backward_ends import attention_begin_kernel, attention_end_kernel
from flashtile.ops.attention.hopper.backward_tiles import Loops, Problem
from flashtile.ops.attention.hopper.backward_variant import BackwardVariant
from flashtile.ops.attention.hopper.bias_gradient import attention_bias_gradient_kernel
from flashtile.ops.attention.hopper.configs import PRODUCER_REGISTERS
from flashtile.ops.attention.hopper.parameters import FLOAT32, INT32
from flashtile.ops.attention.hopper.scores import ScoreUnits
from flashtile.ops.attention.plans import Window
from flashtile.ops.attention.triton.bias_work import WorkNumbers


def backward_source(kernel: str, variant: BackwardVariant) -> KernelSource:
    """The specialisation of a kernel ("begin", "main", "end" or "bias") for a variant."""
    if kernel == "bias":
        return _bias_gradient_source(variant)
    config = variant.config
    function = {
        "begin": attention_begin_kernel,
        "main": attention_backward_kernel,
        "end": attention_end_kernel,
    }[kernel]
    constants = {
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
    limit = config.max_registers if kernel == "main" else None
    return specialise(function, parameters_of(variant), constants, num_warps=4, max_registers=limit)


def _bias_gradient_source(variant: BackwardVariant) -> KernelSource:
    cut = bias_gradient_config(variant.head_dim, variant.head_dim_v, variant.hides_or_drops, variant.by_position)
    constants = {
        "KEYS": cut.keys,
        "M": BIAS_QUERIES,
        "QUERY_TILES": cut.query_tiles,
        "STAGES": cut.stages,
        "KEY_STAGES": cut.key_stages,
        "REGISTERS": cut.registers,
        "PRODUCER_REGISTERS": PRODUCER_REGISTERS,
        "TOP_LEFT": variant.top_left,
        "SHARED_BY_HEADS": variant.bias_shared_by_heads,
    }
    parameters, limit = parameters_of(variant), cut.max_registers
    return specialise(attention_bias_gradient_kernel, parameters, constants, num_warps=4, max_registers=limit)


def slope_sums_parameter(variant: BackwardVariant) -> Parameter:
    return optional(variant.slope_sums, pointer_to(torch.float32))


def parameters_of(variant: BackwardVariant) -> dict[str, Any]:
    """The parameters of the kernels."""
    tensor, statistics = pointer_to(variant.dtype, 16), pointer_to(torch.float32)
    apart = Parameter("i64" if variant.wide_strides else "i32", 8)
    rows_apart = optional(variant.bounded and not variant.packed, INT32)
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
        **dict.fromkeys((f"stride_dout_{dimension}" for dimension in ("batch", "row", "head")), apart),
        **dict.fromkeys(("batch", "heads", "rows_q", "query_tiles"), INT32),
        "scale": FLOAT32,
        "lse_unit": optional(variant.config.statistics_multiplied, FLOAT32),
        "problem": Problem(
            variant.side.pointers,
            slope_sums_parameter(variant),
            variant.score_change,
            *(INT32,) * 8,
            window=Window(INT32, INT32),
            scale=FLOAT32,
            units=ScoreUnits(FLOAT32, optional(variant.softcap, FLOAT32), optional(variant.has_function, FLOAT32)),
            numbers=variant.side.numbers,
            k_rows_apart=rows_apart,
            v_rows_apart=rows_apart,
        ),
        "constants": variant.side.constants._replace(HAS_LEFT=variant.has_left, HAS_RIGHT=variant.has_right),
        "gradient_ptr": pointer_to(torch.float32 if variant.bias_in_parts else variant.dtype, 16),
        "work": WorkNumbers(*(INT32,) * len(WorkNumbers._fields)),
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
