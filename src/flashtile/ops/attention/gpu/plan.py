"""Portable kernels as a pipeline launches them: tiles, sizes, strides and outputs, from the description of a call.

Row strides decide machine code: addresses become constants, and inner loops take up to 9 % less time.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch

from flashtile._backends.alignment import batch_row_head, power_of_two_factor
from flashtile._backends.allocate import Layout, contiguous, contiguous_strides
from flashtile._backends.launch import float32, int32, int64, pointer_to
from flashtile._backends.pipeline import Kernel
from flashtile.ops.attention.call import Call, TensorFacts
from flashtile.ops.attention.gpu.bias_gradient import attention_dbias_kernel
from flashtile.ops.attention.gpu.parameters import (
    captured_parameters,
    dropout_numbers,
    side_parameters,
    stored,
    window_parameters,
)
from flashtile.ops.attention.gpu.reductions import (
    BiasWork,
    bias_sum_kernel,
    cut_matrices,
    cut_work,
    shares_kernel,
    without_shares,
)
from flashtile.ops.attention.gpu.score_writer import score_bounds
from flashtile.ops.attention.gpu.scores import slots_for, triton_derivative, triton_function
from flashtile.ops.attention.gpu.tile_configs import (
    OWN_KEYS,
    KernelName,
    TileKey,
    drops_bounds,
    drops_masks,
    kernel_tiles,
    key_tile_shares,
    tile_key_for,
    tile_widths,
)
from flashtile.ops.attention.gpu.tile_tables import TileConfig
from flashtile.ops.attention.gpu.tiles import RowTensors, Strides, TileShape
from flashtile.ops.attention.spec import FP8, NOTHING_WANTED, out_dtype
from flashtile.ops.common.checks import check_programs
from flashtile.ops.common.tiles import tile_width


class PortableKernel(NamedTuple):
    """A kernel of a call.

    Attributes:
        name: "short_backward" in the place of "dq" where one kernel computes all gradients.
        kernel: as a pipeline launches it.
        outputs: layouts of the buffers that it writes, and those that follow it.
        following: kernels that add up what it stores in parts, by name.
        waves: thread blocks of all launches together, where each launch has only some (`scores`); 0 = there is
            one launch.
    """

    name: KernelName
    kernel: Kernel
    outputs: dict[str, Layout]
    following: dict[str, Kernel]
    waves: int = 0

    @property
    def kernels(self) -> dict[str, Kernel]:
        """It and those that follow it, by name."""
        return {self.name: self.kernel, **self.following}


class _Planned(NamedTuple):
    """Facts that follow from a kernel and a call.

    Attributes:
        key: what tiles are chosen by.
        work: how the gradient of a bias is cut.
        shares: dk and dv are in so many parts.
        covered: tiles divide the call, so that none ends past a bias or a mask.
        whole: the tiles that move divide their sequence, whose length is known.
    """

    kernel: KernelName
    call: Call
    key: TileKey
    tiles: TileConfig
    work: BiasWork
    shares: int
    covered: bool
    whole: bool

    @property
    def written_heads(self) -> int:
        """Heads of dk and dv as they are written: the query heads if one program owns all keys of one."""
        call = self.call
        return call.heads if self.kernel == "short_backward" else call.heads_kv * self.shares

    @property
    def stored_shares(self) -> int:
        """Parts in which dk and dv are stored."""
        stores = self.kernel in ("dkdv", "short_backward") and self.call.heads_kv
        return self.written_heads // self.call.heads_kv if stores else 1

    @property
    def summed(self) -> tuple[bool, ...]:
        """For which captured tensors the kernel adds up gradients."""
        return self.call.wanted.captured if any(self.call.wanted.captured) else ()

    @property
    def in_waves(self) -> bool:
        return self.call.spec.deterministic and bool(self.summed)

    @property
    def hides_rows(self) -> bool:
        """Whether the kernel is told that rows may see no key."""
        return self.call.phase == "backward" and self.kernel in ("dq", "short_backward") and self.call.may_hide_rows


def plan_bias_gradient(call: Call, **buffers: str) -> PortableKernel:
    """The kernel of the gradient of a bias. It serves Hopper calls too, whose `buffers` have other names."""
    found = plan_kernel(attention_dbias_kernel, *kernel_tiles("dbias", call), call)
    return found._replace(kernel=found.kernel._replace(buffers={**found.kernel.buffers, **buffers}))


def plan_kernel(function: Any, kernel: KernelName, tiles: TileConfig, call: Call) -> PortableKernel:
    """A kernel of a call. In a backward, dkdv and dbias read what the first kernel has made of dout and lse."""
    call.check_sizes()
    if kernel in ("dkdv", "dbias"):
        dout = call.dout
        if call.may_hide_rows and dout is not None:  # a copy, which is contiguous
            dout = TensorFacts(call.v.dtype, call.out_shape, contiguous_strides(call.out_shape))
        call = call._replace(dout=dout, has_dlse=False, wanted=NOTHING_WANTED)
    spec, side, key = call.spec, call.aux, tile_key_for(call)
    work = _cut(kernel, call, tiles)
    programs = _programs(kernel, call, tiles, work)
    shares = 1
    if kernel == "dkdv" and programs:
        causal = spec.window_right is not None and spec.window_left is None
        uneven = call.cut_by.packed or spec.block_shape is not None or causal
        shares = key_tile_shares(call, tiles.block_m, tiles.block_n, uneven)
    # With a block mask whole tiles of the mask are walked through, even past the end of the sequence.
    divides_q = call.rows_q % (call.block_tile[0] or tiles.block_m) == 0
    divides_k = call.rows_k % (call.block_tile[1] or tiles.block_n) == 0
    # Whether the tiles that move divide their sequence; in the gradient of the bias both tiles move.
    divides = divides_q and divides_k if kernel == "dbias" else divides_q if kernel in OWN_KEYS else divides_k
    whole = not call.bounded and drops_bounds(kernel, key) and divides
    covered = not call.packed and divides_q and divides_k
    planned = _Planned(kernel, call, key, tiles, work, shares, covered, whole=whole)
    in_waves = planned.in_waves
    parameters: dict[str, Any] = {
        **captured_parameters(side.captured, planned.summed, in_waves),
        **_tensors(planned),
        **_strides(planned, function),
        **_numbers(planned),
        **_side(planned),
    }
    constants = {
        **_constants(planned),
        **_score_functions(planned),
        "IN_WAVES": in_waves,
        "HIDES_ROWS": planned.hides_rows,
    }
    waves = programs if in_waves else 0
    if in_waves:
        programs = slots_for(_entries(planned), programs)
    check_programs("q", programs * shares)
    described = Kernel(
        function,
        parameters,
        constants,
        programs=programs * shares,
        buffers=_buffers(planned),
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
        max_registers=tiles.max_registers,
    )
    outputs, following = _outputs(planned), {}
    if "dk_shares" in outputs:
        following["shares"] = shares_kernel(outputs["dk_shares"], outputs["dv_shares"], planned.stored_shares)
    if "bias_parts" in outputs and side.bias is not None:
        following["bias_sum"] = bias_sum_kernel(work.parts, side.bias)
    return PortableKernel(kernel, described, outputs, following if programs else {}, waves)


def uses_fp8_products(call: Call) -> bool:
    """Whether `q kᵀ` is a product of 8-bit numbers. Instructions for these take 32 columns at a time."""
    return call.dtype is FP8 and call.machine.facts.has_fp8_products and tile_width(call.head_dims[0]) >= 32


def _buffers(planned: _Planned) -> dict[str, str]:
    """The buffers of parameters whose names do not tell."""
    of_bias = "bias_parts" if planned.work.parts > 1 else "dbias"
    buffers = {"sums_ptr": "sums" if planned.kernel == "column_sums" else of_bias}
    if planned.kernel in ("dkdv", "dbias") and planned.call.may_hide_rows:
        buffers["dout_ptr"] = "quiet"
    if planned.stored_shares > 1:
        buffers |= {"dk_ptr": "dk_shares", "dv_ptr": "dv_shares"}
    return buffers


def _tensors(planned: _Planned) -> dict[str, Any]:
    """The pointers, except for those of side inputs."""
    call, kernel = planned.call, planned.kernel
    dtype, pointers = call.dtype, power_of_two_factor(call.misalignment)
    tensor, statistics = pointer_to(stored(dtype), pointers), pointer_to(torch.float32)
    scored = pointer_to(dtype, pointers) if uses_fp8_products(call) else tensor
    out = pointer_to(stored(out_dtype(dtype)), pointers)
    dlse = pointer_to(torch.float32 if call.has_dlse else None)
    # The kernel stores statistics only for the gradient of a logit without a key, and the gradient of a wanted bias.
    short = kernel == "short_backward"
    sums = None
    if call.aux.bias is not None and (kernel == "dbias" or (short and call.wanted.bias)):
        sums = call.aux.bias.dtype if planned.work.parts == 1 else torch.float32
    return {
        **dict.fromkeys(("q_ptr", "k_ptr"), scored),
        **dict.fromkeys((f"{name}_ptr" for name in ("v", "dout", "dq", "dk", "dv")), tensor),
        "out_ptr": out,
        "lse_ptr": statistics,
        "rows": RowTensors(
            out=out,
            dout=tensor,
            lse=statistics,
            dlse=dlse,
            statistics=pointer_to(torch.float32 if not short or call.aux.has_row_logit else None, 16),
            slope_sums=pointer_to(torch.float32 if call.wanted.slopes else None),
            quiet=pointer_to(dtype if planned.hides_rows and not short else None, 16),
        ),
        "max_scores_ptr": pointer_to(torch.float32 if call.spec.returns_max_scores else None),
        "statistics_ptr": pointer_to(torch.float32, 16),
        "sums_ptr": pointer_to(torch.float32 if kernel == "column_sums" else sums, 16),
    }


def _side(planned: _Planned) -> dict[str, Any]:
    """The side inputs that the kernel reads. Most of the backward has lse, which counts the logit without a key."""
    call, kernel = planned.call, planned.kernel
    aux, spec = call.aux, call.spec
    if kernel != "forward" and not planned.hides_rows:
        aux = aux.without_row_logit()
    if kernel == "column_sums":
        aux, spec = aux._replace(dropout_seed=None), spec._replace(origin=None)
    call = call._replace(aux=aux, spec=spec)
    described = side_parameters(call, covered=planned.covered, by_column=kernel in OWN_KEYS)
    # The factor of dropout in any case: that of the bias's gradient is in its loop.
    numbers = described.numbers._replace(dropout=dropout_numbers(spec.dropout_p))
    return {"side": described.pointers, "numbers": numbers, "constants": described.constants}


def _strides(planned: _Planned, function: Any) -> dict[str, Strides]:
    """(batch, row, head) strides of the tensors whose strides a kernel takes, used ones; outputs are contiguous."""
    call = planned.call
    dk_shape, dv_shape = _written_shapes(planned)
    written = {"out": call.out_shape, "dq": call.q.shape, "dk": dk_shape, "dv": dv_shape}
    of_each = {name: batch_row_head(shape, contiguous_strides(shape)) for name, shape in written.items()}
    given = {"q": call.q, "k": call.k, "v": call.v, "dout": call.dout}
    of_each |= {name: batch_row_head(of.shape, of.strides) for name, of in given.items() if of is not None}
    taken = {f"{name}_strides": of for name, of in of_each.items() if f"{name}_strides" in function.arg_names}
    multiple = power_of_two_factor(*(stride for triple in taken.values() for stride in triple))
    return {
        name: Strides(int64(batch, multiple), int64(head, multiple), row) for name, (batch, row, head) in taken.items()
    }


def _written_shapes(planned: _Planned) -> list[tuple[int, ...]]:
    """Shapes of dk and dv as they are written."""
    return [(*of.shape[:-2], planned.written_heads, of.shape[-1]) for of in (planned.call.k, planned.call.v)]


def _numbers(planned: _Planned) -> dict[str, Any]:
    call, tiles = planned.call, planned.tiles
    head_dim, head_dim_v = call.head_dims
    width, width_v = tile_widths(planned.key)
    return {
        "batch": int32(call.batch),
        "heads": int32(call.heads),
        "group": int32(call.group // planned.shares),
        "shares": int32(planned.shares),
        "rows_q": int32(call.rows_q),
        "rows_k": int32(call.rows_k),
        "window": window_parameters(call.spec),
        "scale": float32(call.spec.scale),
        "softcap": float32(call.spec.softcap or None),
        "work": planned.work.numbers(_shared_shape(planned)),
        "shape": TileShape(
            HEAD_DIM=head_dim,
            HEAD_DIM_V=head_dim_v,
            BLOCK_D=width,
            BLOCK_E=width_v,
            BLOCK_M=tiles.block_m,
            BLOCK_N=tiles.block_n,
            CHUNK=tiles.chunk,
        ),
    }


def _constants(planned: _Planned) -> dict[str, Any]:
    call, spec = planned.call, planned.call.spec
    bias = None if call.aux.bias is None else call.aux.bias.shape
    # If a bias is the same for all batch entries, tiles that read the same of it follow one another.
    shared_batch, shared_rows, shared_columns = (bias is not None and bias[at] == 1 for at in (0, 2, 3))
    return {
        "PACKED": call.packed,
        "TOP_LEFT": spec.top_left,
        "WHOLE": planned.whole,
        "ALL_VISIBLE": planned.whole and not spec.banded and drops_masks(planned.key),
        "ALIGNED": spec.origin is None or (spec.origin.row | spec.origin.column) % 16 == 0,
        "PRECISION": planned.key.precision,
        "MODIFIED": spec.softcap > 0 or call.aux.modifies_scores or spec.score_program is not None,
        "BATCH_FIRST": shared_batch and not shared_rows,
        "SHARED_ROWS": shared_rows,
        "SHARED_COLUMNS": shared_columns,
    }


def _score_functions(planned: _Planned) -> dict[str, Any]:
    """The user's function and its derivative."""
    text = planned.call.spec.score_program
    if text is None:
        return {"SCORE_FUNCTION": None, "SCORE_DERIVATIVE": None}
    bounds = score_bounds(planned.call) if planned.covered else None
    derivative = None
    if planned.kernel in ("dq", "dkdv"):
        derivative = triton_derivative(text, planned.summed, planned.in_waves, bounds)
    return {"SCORE_FUNCTION": triton_function(text, bounds), "SCORE_DERIVATIVE": derivative}


def _entries(planned: _Planned) -> int:
    """The number of gradients of captured tensors that are added up."""
    return sum(math.prod(of.shape) for of, wants in zip(planned.call.aux.captured, planned.summed) if wants)


def _outputs(planned: _Planned) -> dict[str, Layout]:
    """Outputs of the kernel and of the kernels that follow it."""
    call, kernel, dtype = planned.call, planned.kernel, planned.call.dtype
    statistics = contiguous((*call.lse_shape, 4), torch.float32)
    if kernel == "forward":
        rows = contiguous(call.lse_shape, torch.float32)
        results = {"out": contiguous(call.out_shape, out_dtype(dtype)), "lse": rows}
        return {**results, "max_scores": rows} if call.spec.returns_max_scores else results
    if kernel == "column_sums":
        return {"sums": contiguous((*call.lse_shape[:-1], call.rows_k), torch.float32)}
    if kernel == "dbias":
        return _bias_outputs(planned)
    dq, outputs = contiguous(call.q.shape, dtype), {}
    if kernel in ("dkdv", "short_backward"):
        stored = {f"d{name}": contiguous(shape, dtype) for name, shape in zip("kv", _written_shapes(planned))}
        shares = planned.stored_shares
        outputs = {name: without_shares(of, shares) for name, of in stored.items()}
        if shares > 1:
            outputs |= {f"{name}_shares": of for name, of in stored.items()}
    if kernel == "dkdv":
        return outputs
    outputs = {"dq": dq, **outputs}
    if kernel == "dq" or call.aux.has_row_logit:
        outputs["statistics"] = statistics
    if kernel == "dq" and planned.hides_rows:
        outputs["quiet"] = contiguous(call.out_shape, dtype)
    if kernel == "short_backward" and call.wanted.bias:
        outputs |= _bias_outputs(planned)
    return outputs


def _bias_outputs(planned: _Planned) -> dict[str, Layout]:
    bias, parts = planned.call.aux.bias, planned.work.parts
    assert bias is not None
    dbias = {"dbias": contiguous(bias.shape, bias.dtype)}
    return {**dbias, "bias_parts": contiguous((parts, *bias.shape), torch.float32)} if parts > 1 else dbias


def _cut(kernel: KernelName, call: Call, tiles: TileConfig) -> BiasWork:
    """How the gradient of a bias is cut, or, where one kernel computes all, the call."""
    bias = call.aux.bias
    if kernel == "dbias" and bias is not None:
        return cut_work(bias, call, (tiles.block_m, tiles.block_n))
    if kernel == "short_backward":
        return cut_matrices((1, call.heads) if bias is None else bias.shape[:2], call.batch * call.heads)
    return BiasWork()


def _shared_shape(planned: _Planned) -> tuple[int, ...] | None:
    """The shape of the bias; where one kernel computes all and there is none, one that all sequences would share."""
    call = planned.call
    if planned.kernel == "short_backward" and call.aux.bias is None:
        return 1, call.heads, call.rows_q, call.rows_k
    return None if call.aux.bias is None else call.aux.bias.shape


def _programs(kernel: KernelName, call: Call, tiles: TileConfig, work: BiasWork) -> int:
    """Number of programs: one for each tile, or for each slot of a packed call (see `tiles.find_sequence`)."""
    if kernel == "short_backward":
        return work.own * work.parts
    if kernel == "dbias":
        nothing = 0 in call.q.shape or 0 in call.k.shape or not call.batch
        return 0 if nothing else work.own * work.parts
    own, block = (call.k, tiles.block_n) if kernel in OWN_KEYS else (call.q, tiles.block_m)
    heads = (call.heads_kv if kernel == "dkdv" else call.heads) * (1 if call.packed else call.batch)
    return 0 if 0 in own.shape else call.tiles(own.shape[-3], block) * heads
