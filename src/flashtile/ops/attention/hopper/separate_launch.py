"""Host side of the Hopper backwards in which dv, dk and dq have a kernel each: wide heads and float32."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flashtile._backends.alignment import batch_row_head
from flashtile._backends.allocate import Layout, Scratch, allocator, contiguous, contiguous_strides
from flashtile._backends.launch import Parameter, Plan, constants_of, int32, make_plan, pointer, pointer_to
from flashtile._backends.tma import chunks_maker, descriptor_parameter, joined, strided_layout
from flashtile.ops.attention.arguments import Aux, Scalars
from flashtile.ops.attention.call import Call
from flashtile.ops.attention.gpu.parameters import SideParameters, SidePointers, aux_pointers
from flashtile.ops.attention.gpu.reductions import plan_of_shares, sum_of_shares
from flashtile.ops.attention.gpu.schedule import longest_walk, shares_of_heads
from flashtile.ops.attention.hopper.backward_configs import choose_backward_config, padded_strides
from flashtile.ops.attention.hopper.backward_descriptors import read_layouts
from flashtile.ops.attention.hopper.backward_source import backward_plan
from flashtile.ops.attention.hopper.backward_variant import BackwardVariant
from flashtile.ops.attention.hopper.configs import CONSUMER_ROWS, PRODUCER_REGISTERS
from flashtile.ops.attention.hopper.convert import parts_layout, plan_parts
from flashtile.ops.attention.hopper.float32_backward import attention_float32_dk_dq_kernel, attention_float32_dv_kernel
from flashtile.ops.attention.hopper.float32_wide_backward import (
    attention_float32_wide_dk_dq_kernel,
    attention_float32_wide_dv_kernel,
)
from flashtile.ops.attention.hopper.parameters import bounded_layout, side_of_call
from flashtile.ops.attention.hopper.separate_configs import (
    CHUNK,
    MAX_REGISTERS,
    REGISTERS,
    STATISTIC_ROWS,
    WIDTH,
    choose_float32_wide_config,
    choose_wide_backward_config,
    is_wide_float32,
)
from flashtile.ops.attention.hopper.wide_backward import Problem, attention_wide_dk_dq_kernel, attention_wide_dv_kernel
from flashtile.ops.attention.spec import BackwardInputs, Gradients
from flashtile.ops.common.checks import check_programs

#: Rows of a program of dk or dq.
_ROWS = CONSUMER_ROWS

#: Tiles of statistics that a product reads at once.
_STATISTICS_TOGETHER = CONSUMER_ROWS // STATISTIC_ROWS

#: What makes the descriptors of a tensor from its address.
Maker = Callable[[int], tuple]


class GradientKernel(NamedTuple):
    """The launch of one gradient.

    Attributes:
        describe: makes the descriptors, from the addresses of `moved`.
        moved: the tensors that TMA moves, in the order of the kernel's parameters.
        pointers: the tensors whose addresses follow these. The side inputs come last.
    """

    plan: Plan
    describe: Callable[..., tuple]
    moved: tuple[str, ...]
    pointers: tuple[str, ...]

    def launch(self, addresses: Mapping[str, int], side: SidePointers) -> None:
        descriptors = self.describe(*(addresses[name] for name in self.moved))
        self.plan.launch(*descriptors, *(addresses[name] for name in self.pointers), *side)


class ApartPlan(NamedTuple):
    """The launches: statistics, perhaps the parts of q, k, v and dout, and a gradient each.

    Attributes:
        splits: write the parts of q, k, v and dout, if the kernels read these instead.
        allocate: makes dq, dk and dv (of these in parts, side by side like heads, where query heads have shares), the
            buffer of `scratch`, and what `splits` write.
        scratch: statistics: of each query. masked_dout: the dout without rows that may see no key. counter: what the
            first kernel writes.
        sum_of_shares: of dk and dv in such parts; else None.
    """

    begin: Plan
    splits: tuple[Plan, ...]
    dv: GradientKernel
    dk: GradientKernel
    dq: GradientKernel
    allocate: Callable[[], list[Tensor]]
    scratch: Scratch
    sum_of_shares: Plan | None

    @property
    def launches(self) -> tuple[Plan, ...]:
        of_shares = () if self.sum_of_shares is None else (self.sum_of_shares,)
        return self.begin, *self.splits, self.dv.plan, self.dk.plan, self.dq.plan, *of_shares

    def run(self, inputs: BackwardInputs, aux: Aux, scalars: Scalars) -> Gradients:
        """Enqueues the kernels."""
        dout, dlse, q, k, v, out, lse = inputs
        wanted = scalars[2]
        pointers, _ = aux_pointers(aux)
        dq, dk, dv, buffer, sink_sums, *parts = self.allocate()
        scratch = self.scratch.addresses(buffer.data_ptr())
        statistics, masked_dout = scratch.statistics, scratch.masked_dout
        self.begin.launch(
            out.data_ptr(), dout.data_ptr(), lse.data_ptr(), pointer(dlse), statistics, None, None, scratch.counter,
            masked_dout, pointers.sinks, pointer(sink_sums), pointers.cu_seqlens_q, None, *pointers,
        )  # fmt: skip
        addresses = {
            "q": q.data_ptr(),
            "k": k.data_ptr(),
            "v": v.data_ptr(),
            "dout": masked_dout or dout.data_ptr(),
        }
        for name, split, part in zip(list(addresses), self.splits, parts):
            split.launch(addresses[name], part.data_ptr())
            addresses[name] = part.data_ptr()
        addresses |= {"dq": dq.data_ptr(), "dk": dk.data_ptr(), "dv": dv.data_ptr(), "statistics": statistics}
        for kernel in (self.dv, self.dk, self.dq):
            kernel.launch(addresses, pointers)
        dk, dv = sum_of_shares(self.sum_of_shares, dk, dv)
        dsinks = sink_gradient(sink_sums) if wanted.sinks else None
        return Gradients(dq, dk, dv, sinks=dsinks, captured=(None,) * len(wanted.captured))


def sink_sums_layout(call: Call, tiles: int) -> Layout | None:
    """The parts of the sinks' gradient, `[batch, heads, tiles]`, of a packed call `[heads, tiles]`. `tiles`: of all
    heads."""
    if call.aux.sinks is None:
        return None
    heads = (call.heads,) if call.packed else (call.batch, call.heads)
    return contiguous((*heads, tiles // math.prod(heads)), torch.float32)


def sink_gradient(sums: Tensor) -> Tensor:
    """The gradient of the sinks, from its parts."""
    return sums.sum((0, -1) if sums.dim() == 3 else -1).neg_()


class Frame(NamedTuple):
    """The decisions that the plans of wide heads and of float32 share.

    Attributes:
        read: (shape, strides) of q, k, v and of the dout that the kernels read.
        written: shapes of dq, dk and dv, of these with `shares` of the query heads.
        tiles: of the own rows of each gradient, on each of `lines`: of a head of a sequence, or (slots) of a packed
            call.
        masks: whether a kernel has a visited tile that a band or the end of the keys cuts.
        problem: but for its `own_tiles`. `constants`: of all three kernels.
        scratch: as of `ApartPlan`. `sink_sums`: the parts of the sinks' gradient.
    """

    call: Call
    read: dict[str, tuple[tuple[int, ...], tuple[int, ...]]]
    written: dict[str, tuple[int, ...]]
    tiles: dict[str, int]
    lines: dict[str, int]
    masks: dict[str, bool]
    shares: int
    begin: Plan
    problem: Problem
    constants: dict[str, Any]
    scratch: Scratch
    sink_sums: Layout | None

    def ends_rows(self, tensor: str) -> bool:
        """Whether TMA ends the rows of a tensor or of a gradient where their sequence or its key length does."""
        return self.call.packed if tensor in ("q", "dout", "dq") else self.call.bounded


def gradient_kernel(
    frame: Frame,
    name: str,
    kernel: Any,
    moved: Mapping[str, str],
    descriptors: Mapping[str, Parameter],
    makers: Mapping[str, Maker],
    constants: Mapping[str, Any],
    gradient_ptr: str | None = None,
    parts: int = 1,
) -> GradientKernel:
    """The kernel of a gradient, "dv", "dk" or "dq".

    Args:
        moved: the names of its first parameters, which are descriptors, and the tensor that each is of.
        descriptors: describe each tensor to the compiler.
        makers: what makes the descriptors of each tensor.
        constants: beside those of the frame.
        gradient_ptr: the name of the parameter that follows, the gradient's address, unless TMA stores the gradient.
        parts: thread blocks among which a tile is divided.
    """
    programs = frame.tiles[name] * frame.lines[name] * parts
    check_programs("q", programs)
    stored = {} if gradient_ptr is None else {gradient_ptr: pointer_to(torch.float32, 16)}
    parameters = {
        **{parameter: descriptors[tensor] for parameter, tensor in moved.items()},
        **stored,
        "statistics_ptr": pointer_to(torch.float32, 16),
        "problem": frame.problem._replace(own_tiles=int32(frame.tiles[name])),
    }
    plan = make_plan(
        kernel, parameters, {**frame.constants, **constants, "MASKS": frame.masks[name]}, programs, frame.call.device,
        num_warps=4, max_registers=MAX_REGISTERS,
    )  # fmt: skip
    tensors = tuple(moved.values())
    pointers = ("statistics",) if gradient_ptr is None else (name, "statistics")
    return GradientKernel(plan, joined([makers[tensor] for tensor in tensors]), tensors, pointers)


def apart_plan(
    frame: Frame,
    gradients: Mapping[str, Layout],
    dv: GradientKernel,
    dk: GradientKernel,
    dq: GradientKernel,
    splits: tuple[Plan, ...] = (),
    parts: Sequence[Layout] = (),
) -> ApartPlan:
    """`gradients`: dq, dk and dv. `parts`: what `splits` write."""
    return ApartPlan(
        begin=frame.begin,
        splits=splits,
        dv=dv,
        dk=dk,
        dq=dq,
        allocate=allocator((*gradients.values(), frame.scratch.layout, frame.sink_sums, *parts), frame.call.device),
        scratch=frame.scratch,
        sum_of_shares=plan_of_shares(gradients["dk"], gradients["dv"], frame.shares, frame.call.device),
    )


def plan_apart(plan_kernels: Callable[[Frame], ApartPlan], keys_of_dv: int, call: Call) -> ApartPlan:
    """Everything that can be decided before the tensors' contents are known. `plan_kernels`: plans the kernels that
    serve the call. `keys_of_dv`: of a program of dv."""
    call.check_sizes()
    assert call.dout is not None
    spec, lengths, has_empty_rows = call.spec, call.aux.key_lengths is not None, call.may_hide_rows
    own_rows = {"dv": (call.rows_k, keys_of_dv), "dk": (call.rows_k, _ROWS), "dq": (call.rows_q, _ROWS)}
    tiles = {name: call.tiles(*rows) for name, rows in own_rows.items()}
    steps = longest_walk(tiles["dq"], spec, _ROWS, keys_of_dv)
    of_a_head = 1 if call.packed else call.batch
    walks = tiles["dv"] * of_a_head * call.heads_kv
    shares = shares_of_heads(call.group, walks, steps, spec.banded or call.bounded, call.multiprocessors)
    lines, lines_kv = of_a_head * call.heads, of_a_head * call.heads_kv * shares
    statistic_tiles = tiles["dq"] * _STATISTICS_TOGETHER
    described = side_of_call(call, covered=False, by_column=True)
    dk_shape, dv_shape = ((*of.shape[:-2], call.heads_kv * shares, of.shape[-1]) for of in (call.k, call.v))
    strides_dout = contiguous_strides(call.out_shape) if has_empty_rows else call.dout.strides
    frame = Frame(
        call=call,
        read=read_layouts(call, strides_dout),
        written={"dq": call.q.shape, "dk": dk_shape, "dv": dv_shape},
        tiles=tiles,
        lines={"dv": lines_kv, "dk": lines_kv, "dq": lines},
        masks={
            **dict.fromkeys(("dv", "dk"), spec.banded or lengths),
            "dq": spec.banded or call.bounded or call.rows_k % _ROWS != 0,
        },
        shares=shares,
        begin=_plan_begin(call, described, statistic_tiles, lines),
        problem=Problem.from_call(call, described.pointers, shares, statistic_tiles=statistic_tiles),
        constants={
            "REGISTERS": REGISTERS,
            "PRODUCER_REGISTERS": PRODUCER_REGISTERS,
            "HAS_LEFT": spec.window_left is not None,
            "HAS_RIGHT": spec.window_right is not None,
            "TOP_LEFT": spec.banded and spec.top_left,
        },
        scratch=Scratch(
            statistics=2 * STATISTIC_ROWS * statistic_tiles * lines,
            # head_dim_v is a multiple of 8 (`backend.unsupported_reason`): TMA can read it.
            masked_dout=math.prod(call.out_shape) * call.dtype.itemsize // 4 if has_empty_rows else 0,
            counter=1,
        ),
        sink_sums=sink_sums_layout(call, statistic_tiles * lines),
    )
    return plan_kernels(frame)


def _plan_begin(call: Call, side: SideParameters, statistic_tiles: int, lines: int) -> Plan:
    """The kernel of statistics (`backward_ends`), with tiles of `STATISTIC_ROWS` queries, of which every 64 are
    whole."""
    assert call.dout is not None
    apart = batch_row_head(call.out_shape, call.dout.strides)
    variant = BackwardVariant(
        call.dtype,
        *call.head_dims,
        choose_backward_config(64, 64)._replace(block_m=STATISTIC_ROWS, statistics_multiplied=False),
        packed=call.packed,
        has_left=False,
        has_right=False,
        top_left=False,
        has_dlse=call.has_dlse,
        ordered=False,
        side=side,
        has_empty_rows=call.may_hide_rows,
        wide_strides=max(apart) >= 2**31,
        sinks=call.aux.sinks is not None,
        single_key_tile=True,  # dq is not summed
        statistics_together=_STATISTICS_TOGETHER if call.packed else 1,
    )
    numbers = {
        **dict(zip(("stride_dout_batch", "stride_dout_row", "stride_dout_head"), apart)),
        "batch": call.batch,
        "heads": call.heads,
        "rows_q": call.rows_q,
        "query_tiles": statistic_tiles,
        "lone_tiles": 0,
    }
    return backward_plan("begin", variant, numbers, statistic_tiles * lines, call.device)


#: A copy moves so many rows and columns of a dense tensor, and of one whose rows TMA ends where their sequence does.
_BOX, _ENDED_BOX = (1, CONSUMER_ROWS, 1, CHUNK), (1, 1, CONSUMER_ROWS, 1, CHUNK)

#: The descriptors that each kernel takes, in order, and the tensors that they are of.
_MOVED_FOR_DV = {"k_desc": "k", "q_desc": "q", "dout_desc": "dout", "dv_desc": "dv"}
_MOVED_FOR_DK = {
    "own_scores_desc": "k",
    "own_values_desc": "v",
    "visited_scores_desc": "q",
    "visited_values_desc": "dout",
    "gradient_desc": "dk",
}

_MOVED_FOR_DQ = {
    "own_scores_desc": "q",
    "own_values_desc": "dout",
    "visited_scores_desc": "k",
    "visited_values_desc": "v",
    "gradient_desc": "dq",
}


def plan_wide_backward(frame: Frame) -> ApartPlan:
    """The plan of a call whose heads are wider than 256 columns."""
    config = choose_wide_backward_config(frame.written["dk"][-1], frame.written["dv"][-1])
    gradients = {name: Layout(shape, padded_strides(shape), frame.call.dtype) for name, shape in frame.written.items()}
    layouts = {**frame.read, **{name: (of.shape, of.strides) for name, of in gradients.items()}}
    descriptors, makers = {}, {}
    for name, layout in layouts.items():
        box, described = (_ENDED_BOX, bounded_layout) if frame.ends_rows(name) else (_BOX, strided_layout)
        descriptors[name] = descriptor_parameter(frame.call.dtype, box)
        makers[name] = chunks_maker(frame.call.dtype, (box,), described(*layout))

    def kernel(name: str, function: Any, moved: dict[str, str], parts: int = 1, **more: bool) -> GradientKernel:
        constants = {**constants_of(config), **more}
        return gradient_kernel(frame, name, function, moved, descriptors, makers, constants, parts=parts)

    return apart_plan(
        frame,
        gradients,
        dv=kernel("dv", attention_wide_dv_kernel, _MOVED_FOR_DV, config.parts),
        dk=kernel("dk", attention_wide_dk_dq_kernel, _MOVED_FOR_DK, OF_KEYS=True),
        dq=kernel("dq", attention_wide_dk_dq_kernel, _MOVED_FOR_DQ, OF_KEYS=False),
    )


#: The descriptors that each kernel takes, in order, and the tensors whose parts they are of.
_PARTS_FOR_DV = {"k_desc": "k", "q_desc": "q", "dout_desc": "dout"}

_PARTS_FOR_DK = {
    "own_scores_desc": "k",
    "own_values_desc": "v",
    "visited_scores_desc": "q",
    "visited_values_desc": "dout",
}

_PARTS_FOR_DQ = {
    "own_scores_desc": "q",
    "own_values_desc": "dout",
    "visited_scores_desc": "k",
    "visited_values_desc": "v",
}


class _Kernels(NamedTuple):
    """The kernels that serve a call.

    Attributes:
        columns: of a tile.
        widths: columns of a part of q and k, and of dout and v.
        of_dv, of_dk_dq: constants of either kernel, of its own.
    """

    dv: Any
    dk_dq: Any
    columns: int
    widths: dict[str, int]
    of_dv: dict[str, Any]
    of_dk_dq: dict[str, Any]


def plan_float32_backward(frame: Frame) -> ApartPlan:
    """The plan of a call in float32."""
    head_dim, head_dim_v = frame.written["dk"][-1], frame.written["dv"][-1]
    kernels = _kernels_for(head_dim, head_dim_v)
    box = (1, CONSUMER_ROWS, 1, kernels.columns)
    descriptor = descriptor_parameter(torch.bfloat16, box)
    parts = {name: parts_layout(shape, kernels.widths[name]) for name, (shape, _) in frame.read.items()}
    makers = {
        name: chunks_maker(torch.bfloat16, (box,), strided_layout(of.shape, of.strides)) for name, of in parts.items()
    }

    def kernel(name: str, function: Any, moved: dict[str, str], gradient_ptr: str, **constants: int) -> GradientKernel:
        descriptors = dict.fromkeys(moved.values(), descriptor)
        return gradient_kernel(frame, name, function, moved, descriptors, makers, constants, gradient_ptr)

    of_dk_dq = {"HEAD_DIM": head_dim, **kernels.of_dk_dq}
    return apart_plan(
        frame,
        {name: contiguous(shape, frame.call.dtype) for name, shape in frame.written.items()},
        dv=kernel("dv", kernels.dv, _PARTS_FOR_DV, "dv_ptr", HEAD_DIM_V=head_dim_v, **kernels.of_dv),
        dk=kernel("dk", kernels.dk_dq, _PARTS_FOR_DK, "gradient_ptr", OF_KEYS=True, **of_dk_dq),
        dq=kernel("dq", kernels.dk_dq, _PARTS_FOR_DQ, "gradient_ptr", OF_KEYS=False, **of_dk_dq),
        splits=tuple(
            plan_parts(shape, apart, kernels.widths[name], frame.call.device)
            for name, (shape, apart) in frame.read.items()
        ),
        parts=tuple(parts.values()),
    )


def _kernels_for(head_dim: int, head_dim_v: int) -> _Kernels:
    if not is_wide_float32(head_dim, head_dim_v):
        widths = dict.fromkeys(("q", "k", "v", "dout"), WIDTH)
        return _Kernels(attention_float32_dv_kernel, attention_float32_dk_dq_kernel, WIDTH, widths, {}, {})
    config = choose_float32_wide_config(head_dim, head_dim_v)
    width, value_width = config.chunks * CHUNK, config.value_chunks * CHUNK
    chunks = {"CHUNKS": config.chunks, "VALUE_CHUNKS": config.value_chunks}
    return _Kernels(
        attention_float32_wide_dv_kernel,
        attention_float32_wide_dk_dq_kernel,
        CHUNK,
        {"q": width, "k": width, "v": value_width, "dout": value_width},
        of_dv={**chunks, "STAYING": config.staying, "PLACES": config.places},
        of_dk_dq={
            **chunks,
            "STAYING_SCORES": config.staying_scores,
            "STAYING_VALUES": config.staying_values,
            "WEIGHT_PLACES": config.weight_places,
            "GRADIENT_PLACES": config.gradient_places,
        },
    )
