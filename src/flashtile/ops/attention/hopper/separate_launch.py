"""The kernels of the Hopper backwards in which dv, dk and dq have one each: wide heads, and float32."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch

from flashtile._backends.allocate import Layout, contiguous, contiguous_strides
from flashtile._backends.launch import named_constants, pointer_to
from flashtile._backends.pipeline import Kernel, Pipeline
from flashtile._backends.tma import TmaTensor, row_layout
from flashtile.ops.attention.call import Call
from flashtile.ops.attention.gpu.parameters import side_parameters
from flashtile.ops.attention.gpu.schedule import key_tile_shares
from flashtile.ops.attention.hopper.backward_dq import begin_kernel
from flashtile.ops.attention.hopper.backward_loads import backward_pipeline, gradient_layouts
from flashtile.ops.attention.hopper.configs import CONSUMER_ROWS, PRODUCER_REGISTERS
from flashtile.ops.attention.hopper.convert import Operand, split_operands
from flashtile.ops.attention.hopper.float32_backward import attention_float32_dk_dq_kernel, attention_float32_dv_kernel
from flashtile.ops.attention.hopper.float32_wide_backward import (
    attention_float32_wide_dk_dq_kernel,
    attention_float32_wide_dv_kernel,
)
from flashtile.ops.attention.hopper.separate_configs import (
    CHUNK,
    KEYS_OF_DV,
    MAX_REGISTERS,
    REGISTERS,
    STATISTIC_ROWS,
    WIDTH,
    choose_float32_wide_config,
    choose_wide_backward_config,
    float32_dv_keys,
    is_wide_float32,
)
from flashtile.ops.attention.hopper.wide_backward import Problem, attention_wide_dk_dq_kernel, attention_wide_dv_kernel
from flashtile.ops.common.checks import check_programs

#: Rows of a program of dk or dq.
_ROWS = CONSUMER_ROWS

#: Tiles of statistics that a product reads at once.
_STATISTICS_TOGETHER = CONSUMER_ROWS // STATISTIC_ROWS

#: The descriptors that each kernel takes, and the tensors that they are of.
_MOVED = {
    "dv": {"k_desc": "k", "q_desc": "q", "dout_desc": "dout", "dv_desc": "dv"},
    "dk": {
        "own_scores_desc": "k",
        "own_values_desc": "v",
        "visited_scores_desc": "q",
        "visited_values_desc": "dout",
        "gradient_desc": "dk",
    },
    "dq": {
        "own_scores_desc": "q",
        "own_values_desc": "dout",
        "visited_scores_desc": "k",
        "visited_values_desc": "v",
        "gradient_desc": "dq",
    },
}


class _Family(NamedTuple):
    """The kernels that serve a call.

    Attributes:
        of_dv, of_dk_dq: constants of either kernel, of its own.
        dv_parts: thread blocks among which a tile of dv is divided.
        moved: what TMA moves, by name; dq, dk and dv too if it stores them.
        gradients: layouts of dq, dk and dv, of these in shares.
        splits: kernels that write the parts of the operands, and `parts`: the layouts of these.
    """

    dv: Any
    dk_dq: Any
    of_dv: dict[str, Any]
    of_dk_dq: dict[str, Any]
    moved: dict[str, TmaTensor]
    gradients: dict[str, Layout]
    dv_parts: int = 1
    splits: Mapping[str, Kernel] = {}
    parts: Mapping[str, Layout | None] = {}


def separate_pipeline(call: Call) -> Pipeline:
    """The pipeline of a backward."""
    spec, packed = call.spec, call.packed
    float32 = call.dtype is torch.float32
    keys_of_dv = float32_dv_keys(*call.head_dims) if float32 else KEYS_OF_DV
    own_rows = {"dv": (call.rows_k, keys_of_dv), "dk": (call.rows_k, _ROWS), "dq": (call.rows_q, _ROWS)}
    tiles = {name: call.tiles(*rows) for name, rows in own_rows.items()}
    shares = key_tile_shares(call, _ROWS, keys_of_dv, uneven=spec.banded or call.cut_by.bounded)
    family = _float32_family(call, shares) if float32 else _wide_family(call, shares)
    statistic_tiles = tiles["dq"] * _STATISTICS_TOGETHER
    together = _STATISTICS_TOGETHER if packed else 1
    # Tiles of `STATISTIC_ROWS` queries, of which every 64 are whole.
    kernels = {"begin": begin_kernel(call, STATISTIC_ROWS, statistic_tiles, together=together), **family.splits}
    side = side_parameters(call, covered=False, by_column=True, staged=True)
    lengths = call.aux.key_lengths is not None
    masks = {
        **dict.fromkeys(("dv", "dk"), spec.banded or lengths),
        "dq": spec.banded or call.bounded or call.rows_k % _ROWS != 0,
    }
    for name, moved in _MOVED.items():
        lines = call.lines if name == "dq" else call.lines_kv * shares
        programs = tiles[name] * lines * (family.dv_parts if name == "dv" else 1)
        check_programs("q", programs)
        stored = name if name == "dq" or shares == 1 else f"{name}_shares"
        parameters = {
            **{parameter: family.moved[of] for parameter, of in moved.items() if of in family.moved},
            **dict.fromkeys(("dv_ptr", "gradient_ptr"), pointer_to(torch.float32, 16)),
            "statistics_ptr": pointer_to(torch.float32, 16),
            "problem": Problem.from_call(call, side.pointers, shares, tiles[name], statistic_tiles),
        }
        constants = {
            "REGISTERS": REGISTERS,
            "PRODUCER_REGISTERS": PRODUCER_REGISTERS,
            "HAS_LEFT": spec.window_left is not None,
            "HAS_RIGHT": spec.window_right is not None,
            "TOP_LEFT": spec.banded and spec.top_left,
            "MASKS": masks[name],
            "OF_KEYS": name == "dk",
            **(family.of_dv if name == "dv" else family.of_dk_dq),
        }
        function = family.dv if name == "dv" else family.dk_dq
        buffers = {"dv_ptr": stored, "gradient_ptr": stored}
        kernels[name] = Kernel(function, parameters, constants, programs, buffers, max_registers=MAX_REGISTERS)
    scratch = {"statistics": 2 * STATISTIC_ROWS * statistic_tiles * call.lines, "counter": 1}
    return backward_pipeline(call, kernels, family.gradients, shares, scratch, family.parts)


def _read(call: Call) -> dict[str, tuple[str, tuple[int, ...], tuple[int, ...]]]:
    """Buffers, shapes and strides of the rows that kernels read, by name."""
    assert call.dout is not None
    given = {"q": call.q, "k": call.k, "v": call.v, "dout": call.dout._replace(shape=call.out_shape)}
    read = {name: (name, of.shape, of.strides) for name, of in given.items()}
    if call.may_hide_rows:
        read["dout"] = "masked_dout", call.out_shape, contiguous_strides(call.out_shape)
    return read


def _wide_family(call: Call, shares: int) -> _Family:
    """Heads wider than 256 columns."""
    config = choose_wide_backward_config(*call.head_dims)
    gradients = gradient_layouts(call, shares)
    stored = {
        name: (name if name == "dq" or shares == 1 else f"{name}_shares", of.shape, of.strides)
        for name, of in gradients.items()
    }
    moved = {}
    for name, (buffer, shape, strides) in {**_read(call), **stored}.items():
        ends = call.packed if name in ("q", "dout", "dq") else call.bounded
        box = (1,) * (1 + ends) + (CONSUMER_ROWS, 1, CHUNK)
        moved[name] = TmaTensor(buffer, call.dtype, box, row_layout(shape, strides, ends))
    constants = named_constants(config)
    dv, dk_dq = attention_wide_dv_kernel, attention_wide_dk_dq_kernel
    return _Family(dv, dk_dq, constants, constants, moved, gradients, config.parts)


def _float32_family(call: Call, shares: int) -> _Family:
    """Products of parts in bfloat16."""
    head_dim, head_dim_v = call.head_dims
    dv, dk_dq, columns = attention_float32_dv_kernel, attention_float32_dk_dq_kernel, WIDTH
    width, value_width, cut = WIDTH, WIDTH, {}
    if is_wide_float32(head_dim, head_dim_v):
        dv, dk_dq, columns = attention_float32_wide_dv_kernel, attention_float32_wide_dk_dq_kernel, CHUNK
        config = choose_float32_wide_config(head_dim, head_dim_v)
        width, value_width, cut = config.chunks * CHUNK, config.value_chunks * CHUNK, named_constants(config)
    widths = {"q": width, "k": width, "v": value_width, "dout": value_width}
    operands = {name: Operand(*read, widths[name]) for name, read in _read(call).items()}
    kernels, parts, moved = split_operands(operands, CONSUMER_ROWS, columns)
    gradients = {name: contiguous(of.shape, call.dtype) for name, of in gradient_layouts(call, shares).items()}
    of_dv, of_dk_dq = {"HEAD_DIM_V": head_dim_v, **cut}, {"HEAD_DIM": head_dim, **cut}
    return _Family(dv, dk_dq, of_dv, of_dk_dq, moved, gradients, splits=kernels, parts=parts)
