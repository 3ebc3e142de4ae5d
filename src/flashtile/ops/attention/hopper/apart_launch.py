"""Host side of the Hopper backwards in which dv, dk and dq have a kernel each: what those of wide heads and of float32
have in common."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flashtile._backends.alignment import batch_row_head
from flashtile._backends.allocate import Layout, Scratch, allocator, contiguous_strides
from flashtile._backends.devices import multiprocessors
from flashtile._backends.launch import Parameter, Plan, float32, int32, make_plan, plan_cache, pointer, pointer_to
from flashtile._backends.tma import joined
from flashtile.ops.attention.arguments import Aux, Scalars
from flashtile.ops.attention.hopper.backward_configs import choose_backward_config
from flashtile.ops.attention.hopper.backward_source import backward_plan
from flashtile.ops.attention.hopper.backward_variant import BackwardVariant
from flashtile.ops.attention.hopper.bounds import row_strides
from flashtile.ops.attention.hopper.configs import CONSUMER_ROWS, PRODUCER_REGISTERS
from flashtile.ops.attention.hopper.parameters import score_units, side_of_call
from flashtile.ops.attention.hopper.scores import ScoreUnits
from flashtile.ops.attention.hopper.wide_backward import Problem
from flashtile.ops.attention.hopper.wide_backward_configs import MAX_REGISTERS, REGISTERS, STATISTIC_ROWS
from flashtile.ops.attention.plans import SideShape, call_sizes, tiles_of
from flashtile.ops.attention.side_parameters import SideParameters, SidePointers, aux_pointers, window_parameters
from flashtile.ops.attention.spec import AttentionSpec, BackwardInputs, Gradients
from flashtile.ops.attention.triton.shares_launch import plan_of_shares, sum_of_shares
from flashtile.ops.attention.walks import longest_walk, shares_of_heads
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
            first kernel writes. sink_sums: the parts of the sinks' gradient.
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
        dq, dk, dv, buffer, *parts = self.allocate()
        scratch = self.scratch.addresses(buffer.data_ptr())
        statistics, masked_dout = scratch.statistics, scratch.masked_dout
        self.begin.launch(
            out.data_ptr(), dout.data_ptr(), lse.data_ptr(), pointer(dlse), statistics, None, None, scratch.counter,
            masked_dout, pointers.sinks, scratch.sink_sums, pointers.cu_seqlens_q, None,
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
        dsinks = sink_gradient(self.scratch.part(buffer, "sink_sums"), lse) if wanted.sinks else None
        return Gradients(dq, dk, dv, sinks=dsinks, captured=(None,) * len(wanted.captured))


def sink_gradient(sums: Tensor, lse: Tensor) -> Tensor:
    """The gradient of the sinks, from its parts."""
    by_tile = sums.view(*lse.shape[:-1], -1)  # [batch or none, heads, tiles]
    return by_tile.sum((0, -1) if by_tile.dim() == 3 else -1).neg_()


class Frame(NamedTuple):
    """The decisions that the plans of wide heads and of float32 share.

    Attributes:
        read: (shape, strides) of q, k, v and of the dout that the kernels read.
        written: shapes of dq, dk and dv, of these with `shares` of the query heads.
        packed, bounded: whether queries, and whether keys, end where their sequence or its key length does.
        tiles: of the own rows of each gradient, on each of `lines`: of a head of a sequence, or (slots) of a packed
            call.
        masks: whether a kernel has a visited tile that a band or the end of the keys cuts.
        problem: but for its `own_tiles`. `constants`: of all three kernels.
        scratch: as of `ApartPlan`.
    """

    dtype: torch.dtype
    device: torch.device
    read: dict[str, tuple[tuple[int, ...], tuple[int, ...]]]
    written: dict[str, tuple[int, ...]]
    packed: bool
    bounded: bool
    tiles: dict[str, int]
    lines: dict[str, int]
    masks: dict[str, bool]
    shares: int
    begin: Plan
    problem: Problem
    constants: dict[str, Any]
    scratch: Scratch

    def ends_rows(self, tensor: str) -> bool:
        """Whether TMA ends the rows of a tensor or of a gradient where their sequence or its key length does."""
        return self.packed if tensor in ("q", "dout", "dq") else self.bounded


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
        kernel, parameters, {**frame.constants, **constants, "MASKS": frame.masks[name]}, programs, frame.device,
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
        allocate=allocator((*gradients.values(), frame.scratch.layout, *parts), frame.device),
        scratch=frame.scratch,
        sum_of_shares=plan_of_shares(gradients["dk"], gradients["dv"], frame.shares, frame.device),
    )


@plan_cache
def plan_apart(
    plan_kernels: Callable[[Frame], ApartPlan],
    keys_of_dv: int,
    dtype: torch.dtype,
    device: torch.device,
    shapes: tuple[torch.Size, ...],
    strides: tuple[tuple[int, ...], ...],
    side: SideShape,
    spec: AttentionSpec,
    has_dlse: bool,
    has_empty_rows: bool,
) -> ApartPlan:
    """Everything that can be decided before the tensors' contents are known. `plan_kernels`: plans the kernels that
    serve the call. `keys_of_dv`: of a program of dv. `strides`: of q, k, v and dout."""
    q_shape, k_shape, v_shape = map(tuple, shapes)
    batch, rows_q, rows_k, heads, heads_kv, _, head_dim_v = call_sizes(shapes, side)
    packed, lengths = side.sequences is not None, side.key_lengths_dtype is not None
    bounded = packed or lengths
    dout_shape = (*q_shape[:-1], head_dim_v)
    own_rows = {"dv": (rows_k, keys_of_dv), "dk": (rows_k, _ROWS), "dq": (rows_q, _ROWS)}
    tiles = {name: tiles_of(*rows, batch, packed) for name, rows in own_rows.items()}
    steps = longest_walk(tiles["dq"], spec, _ROWS, keys_of_dv)
    of_a_head = 1 if packed else batch
    walks = tiles["dv"] * of_a_head * heads_kv
    shares = shares_of_heads(heads // heads_kv, walks, steps, spec.banded or bounded, multiprocessors(device))
    lines, lines_kv = of_a_head * heads, of_a_head * heads_kv * shares
    statistic_tiles = tiles["dq"] * _STATISTICS_TOGETHER
    described = side_of_call(side, spec, heads, covered=False, by_column=True)
    dout_strides = contiguous_strides(dout_shape) if has_empty_rows else strides[3]
    wholes = dict(zip(("q", "k", "v", "dout"), (q_shape, k_shape, v_shape, dout_shape)))
    dk_shape, dv_shape = ((*shape[:-2], heads_kv * shares, shape[-1]) for shape in (k_shape, v_shape))
    frame = Frame(
        dtype=dtype,
        device=device,
        read={name: (wholes[name], apart) for name, apart in zip(wholes, (*strides[:3], dout_strides))},
        written={"dq": q_shape, "dk": dk_shape, "dv": dv_shape},
        packed=packed,
        bounded=bounded,
        tiles=tiles,
        lines={"dv": lines_kv, "dk": lines_kv, "dq": lines},
        masks={
            **dict.fromkeys(("dv", "dk"), spec.banded or lengths),
            "dq": spec.banded or bounded or rows_k % _ROWS != 0,
        },
        shares=shares,
        begin=_plan_begin(
            dtype,
            device,
            q_shape,
            dout_shape,
            strides[3],
            batch,
            statistic_tiles,
            lines,
            side.sinks,
            described,
            has_dlse,
            has_empty_rows,
        ),
        problem=Problem(
            side=described.pointers,
            batch=int32(batch),
            heads=int32(heads),
            heads_kv=int32(heads_kv * shares),
            group=int32(heads // heads_kv // shares),
            shares=int32(shares),
            rows_q=int32(rows_q),
            rows_k=int32(rows_k),
            own_tiles=int32(0),
            statistic_tiles=int32(statistic_tiles),
            window=window_parameters(spec),
            units=ScoreUnits(*map(float32, score_units(spec))),
            scale=float32(spec.scale),
            k_rows_apart=int32(row_strides(k_shape, strides[1])[1] if bounded and not packed else None),
            v_rows_apart=int32(row_strides(v_shape, strides[2])[1] if bounded and not packed else None),
        ),
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
            masked_dout=math.prod(dout_shape) * dtype.itemsize // 4 if has_empty_rows else 0,
            counter=1,
            sink_sums=statistic_tiles * lines if side.sinks else 0,
        ),
    )
    return plan_kernels(frame)


def _plan_begin(
    dtype: torch.dtype, device: torch.device, q_shape: tuple[int, ...], dout_shape: tuple[int, ...],
    dout_strides: tuple[int, ...], batch: int, statistic_tiles: int, lines: int, sinks: bool, side: SideParameters,
    has_dlse: bool, has_empty_rows: bool,
) -> Plan:  # fmt: skip
    """The kernel of statistics (`backward_ends`), with tiles of `STATISTIC_ROWS` queries, of which every 64 are
    whole."""
    rows_q, heads, head_dim = q_shape[-3:]
    apart = batch_row_head(dout_shape, dout_strides)
    packed = side.has("cu_seqlens_q")
    variant = BackwardVariant(
        dtype,
        head_dim,
        dout_shape[-1],
        choose_backward_config(64, 64)._replace(block_m=STATISTIC_ROWS, statistics_multiplied=False),
        packed=packed,
        has_left=False,
        has_right=False,
        top_left=False,
        has_dlse=has_dlse,
        ordered=False,
        side=side,
        has_empty_rows=has_empty_rows,
        wide_strides=max(apart) >= 2**31,
        sinks=sinks,
        single_key_tile=True,  # dq is not summed
        statistics_together=_STATISTICS_TOGETHER if packed else 1,
    )
    numbers = {
        **dict(zip(("stride_dout_batch", "stride_dout_row", "stride_dout_head"), apart)),
        "batch": batch,
        "heads": heads,
        "rows_q": rows_q,
        "query_tiles": statistic_tiles,
        "lone_tiles": 0,
    }
    return backward_plan("begin", variant, numbers, statistic_tiles * lines, device)
