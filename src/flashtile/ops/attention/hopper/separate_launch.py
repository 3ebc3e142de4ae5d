"""The kernels of the Hopper backwards in which dv, dk and dq have one each: wide heads, and float32."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch

from flashtile._backends.allocate import Layout, contiguous, contiguous_strides
from flashtile._backends.launch import named_constants, pointer_to
from flashtile._backends.pipeline import Kernel
from flashtile._backends.tma import TmaTensor, strided_layout
from flashtile.ops.attention.call import Call
from flashtile.ops.attention.gpu.schedule import choose_shares, longest_walk
from flashtile.ops.attention.hopper.backward_kernels import PassKernels, begin_kernel, gradient_layouts, row_layouts
from flashtile.ops.attention.hopper.configs import CONSUMER_ROWS, PRODUCER_REGISTERS
from flashtile.ops.attention.hopper.convert import parts_kernel, parts_layout
from flashtile.ops.attention.hopper.float32_backward import attention_float32_dk_dq_kernel, attention_float32_dv_kernel
from flashtile.ops.attention.hopper.float32_wide_backward import (
    attention_float32_wide_dk_dq_kernel,
    attention_float32_wide_dv_kernel,
)
from flashtile.ops.attention.hopper.parameters import describe_side
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
    dv_parts: int
    moved: dict[str, TmaTensor]
    gradients: dict[str, Layout]
    splits: dict[str, Kernel]
    parts: dict[str, Layout | None]


def separate_kernels(call: Call) -> PassKernels:
    """The kernels of a call."""
    spec, packed = call.spec, call.packed
    float32 = call.dtype is torch.float32
    keys_of_dv = float32_dv_keys(*call.head_dims) if float32 else KEYS_OF_DV
    own_rows = {"dv": (call.rows_k, keys_of_dv), "dk": (call.rows_k, _ROWS), "dq": (call.rows_q, _ROWS)}
    tiles = {name: call.tiles(*rows) for name, rows in own_rows.items()}
    cut_by = call.cut_by
    steps = longest_walk(cut_by.tiles(cut_by.rows_q, _ROWS), spec, _ROWS, keys_of_dv)
    walks = cut_by.tiles(cut_by.rows_k, keys_of_dv) * cut_by.lines_kv
    uneven = spec.banded or cut_by.bounded
    shares = choose_shares(call.group, walks, steps, uneven, call.multiprocessors)
    family = _float32_family(call, shares) if float32 else _wide_family(call, shares)
    statistic_tiles = tiles["dq"] * _STATISTICS_TOGETHER
    together = _STATISTICS_TOGETHER if packed else 1
    # Tiles of `STATISTIC_ROWS` queries, of which every 64 are whole.
    kernels = {"begin": begin_kernel(call, STATISTIC_ROWS, statistic_tiles, together=together), **family.splits}
    side = describe_side(call, covered=False, by_column=True)
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
    return PassKernels(kernels, family.gradients, shares, scratch, family.parts)


def _read(call: Call) -> dict[str, tuple[str, tuple[int, ...], tuple[int, ...]]]:
    """Buffers, shapes and strides of the rows that kernels read, by name."""
    assert call.dout is not None
    dout = "dout", call.out_shape, call.dout.strides
    if call.may_hide_rows:
        dout = "masked_dout", call.out_shape, contiguous_strides(call.out_shape)
    given = {"q": call.q, "k": call.k, "v": call.v}
    return {**{name: (name, of.shape, of.strides) for name, of in given.items()}, "dout": dout}


def _wide_family(call: Call, shares: int) -> _Family:
    """Heads wider than 256 columns."""
    config = choose_wide_backward_config(*call.head_dims)
    gradients = gradient_layouts(call, shares)
    stored = {
        name: (name if name == "dq" or shares == 1 else f"{name}_shares", of.shape, of.strides)
        for name, of in gradients.items()
    }
    moved, (by_query, by_key) = {}, row_layouts(call)
    for name, (buffer, shape, strides) in {**_read(call), **stored}.items():
        of_queries = name in ("q", "dout", "dq")
        outer = (1, 1) if (call.packed if of_queries else call.bounded) else (1,)
        layout = (by_query if of_queries else by_key)(shape, strides)
        moved[name] = TmaTensor(buffer, call.dtype, (*outer, CONSUMER_ROWS, 1, CHUNK), layout)
    constants = named_constants(config)
    return _Family(
        attention_wide_dv_kernel, attention_wide_dk_dq_kernel, constants, constants, config.parts, moved, gradients,
        splits={}, parts={},
    )  # fmt: skip


def _float32_family(call: Call, shares: int) -> _Family:
    """Products of parts in bfloat16."""
    head_dim, head_dim_v = call.head_dims
    of_dv: Mapping[str, Any] = {"HEAD_DIM_V": head_dim_v}
    of_dk_dq: Mapping[str, Any] = {"HEAD_DIM": head_dim}
    dv, dk_dq, columns = attention_float32_dv_kernel, attention_float32_dk_dq_kernel, WIDTH
    width = value_width = WIDTH
    if is_wide_float32(head_dim, head_dim_v):
        dv, dk_dq, columns = attention_float32_wide_dv_kernel, attention_float32_wide_dk_dq_kernel, CHUNK
        config = choose_float32_wide_config(head_dim, head_dim_v)
        width, value_width = config.chunks * CHUNK, config.value_chunks * CHUNK
        of_dv, of_dk_dq = {**of_dv, **named_constants(config)}, {**of_dk_dq, **named_constants(config)}
    widths = {"q": width, "k": width, "v": value_width, "dout": value_width}
    splits, parts, moved, read = {}, {}, {}, _read(call)
    for name, (buffer, shape, strides) in read.items():
        parts[f"{name}_parts"] = layout = parts_layout(shape, widths[name])
        splits[f"parts_{name}"] = parts_kernel(buffer, f"{name}_parts", shape, strides, widths[name])
        moved[name] = TmaTensor(
            f"{name}_parts",
            torch.bfloat16,
            (1, CONSUMER_ROWS, 1, columns),
            strided_layout(layout.shape, layout.strides),
        )
    gradients = {name: contiguous(of.shape, call.dtype) for name, of in gradient_layouts(call, shares).items()}
    return _Family(
        dv,
        dk_dq,
        dict(of_dv),
        of_dk_dq=dict(of_dk_dq),
        dv_parts=1,
        moved=moved,
        gradients=gradients,
        splits=splits,
        parts=dict(parts),
    )
