"""Host side of the Hopper backward: outputs, buffers, descriptors and the three launches, like `launch`."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from flashtile._backends.alignment import aligned, batch_row_head
from flashtile._backends.allocate import Layout, Scratch, allocator, contiguous_strides, empty
from flashtile._backends.launch import Plan, plan_cache, pointer
from flashtile.ops.attention.arguments import Aux, Scalars, saved_side, side_tensors
from flashtile.ops.attention.call import Call, describe_backward
from flashtile.ops.attention.gpu.parameters import aux_pointers, clipped_window, contiguous_on_16_bytes, positive_scale
from flashtile.ops.attention.gpu.reductions import plan_of_shares, slope_gradient, sum_of_shares
from flashtile.ops.attention.gpu.schedule import longest_walk, parts_of_walks, shares_of_heads
from flashtile.ops.attention.hopper.backward_configs import (
    backward_config_of,
    ends_of_dq,
    padded_strides,
    serves_bias_gradient,
)
from flashtile.ops.attention.hopper.backward_descriptors import buffers, describer, dtype_of
from flashtile.ops.attention.hopper.backward_source import backward_plan
from flashtile.ops.attention.hopper.backward_variant import (
    BackwardVariant,
    function_of_call,
    lone_query_tiles,
    may_divide_queries,
    shares_in_cache,
    with_loops,
)
from flashtile.ops.attention.hopper.bias_gradient_launch import (
    BiasGradientPlan,
    plan_bias_gradient,
    run_bias_gradient,
)
from flashtile.ops.attention.hopper.configs import moves_by_tma
from flashtile.ops.attention.hopper.parameters import (
    LOG2_E,
    by_whole_rows,
    ends_by_rows,
    is_covered,
    row_strides,
    score_units,
    side_of_call,
    whole_sizes,
    with_aligned_lists,
)
from flashtile.ops.attention.hopper.separate_configs import KEYS_OF_DV, float32_keys_of_dv, is_wide, serves_float32
from flashtile.ops.attention.hopper.separate_launch import (
    ApartPlan,
    plan_apart,
    plan_float32_backward,
    plan_wide_backward,
    sink_gradient,
    sink_sums_layout,
)
from flashtile.ops.attention.hopper.turns import tiles_done_before_last
from flashtile.ops.attention.spec import AttentionSpec, BackwardInputs, Gradients, SideInputs, Wanted
from flashtile.ops.attention.triton.launch import backward_bias
from flashtile.ops.attention.triton.plan import plan_for


class BackwardPlan(NamedTuple):
    """The three launches, and that of the gradient of a bias.

    Attributes:
        end: None unless thread blocks add dq up together.
        describe: makes all descriptors of the main kernel, from the addresses of `backward_descriptors.MOVED`.
        outputs: dq, dk, dv; of these in parts, side by side like heads, where query heads or their queries have shares.
        allocate: makes them, the buffer of `scratch`, and beside sinks the parts of their gradient.
        scratch: sums: of dq, unless a sequence has a single key tile. statistics: of each query. masked_dout: the dout
            without rows that may see no key. counter: of tiles that were taken, and where walks meet. semaphores: where
            dq is added up in order.
        sum_of_shares: of dk and dv in parts; else None.
        bias: of the gradient of a bias that scores share; None where nobody wants that, or the portable kernel computes
            it.
        stored_bias: the main kernel stores the gradient of a bias, in this layout; else None. `fills_bias`: all of it.
    """

    begin: Plan
    main: Plan
    end: Plan | None
    describe: Callable[..., tuple]
    outputs: tuple[Layout, Layout, Layout]
    allocate: Callable[[], list[Tensor]]
    scratch: Scratch
    sum_of_shares: Plan | None
    bias: BiasGradientPlan | None
    stored_bias: Layout | None
    fills_bias: bool

    def run(self, inputs: BackwardInputs, aux: Aux, scalars: Scalars) -> Gradients:
        """Enqueues the kernels. Gradients that are not wanted are None."""
        dout, dlse, q, k, v, out, lse = inputs
        max_seqlens, spec, wanted = scalars
        pointers, captured = aux_pointers(aux)
        row_statistics = slope_sums = dbias = dslopes = dsinks = None
        if wanted.bias:
            if self.stored_bias is not None:
                dbias = empty(*self.stored_bias, q.device)
                if not self.fills_bias:
                    dbias.zero_()
            elif self.bias is None:
                row_statistics = torch.empty(*lse.shape, 4, dtype=torch.float32, device=lse.device)
        if wanted.alibi_slopes:
            slope_sums = torch.zeros(*lse.shape[:-1], k.shape[-3], dtype=torch.float32, device=k.device)
        dq, dk, dv, buffer, sink_sums = self.allocate()
        scratch = self.scratch.addresses(buffer.data_ptr())
        statistics, sums, counter = scratch.statistics, scratch.sums, scratch.counter
        masked_dout, semaphores = scratch.masked_dout, scratch.semaphores
        self.begin.launch(
            out.data_ptr(), dout.data_ptr(), lse.data_ptr(), pointer(dlse), statistics,
            None if self.end is None else sums, semaphores, counter, masked_dout, pointers.sinks,
            pointer(sink_sums), pointers.cu_seqlens_q, pointer(row_statistics),
            *pointers,
        )  # fmt: skip
        descriptors = self.describe(
            q.data_ptr(), k.data_ptr(), v.data_ptr(), masked_dout or dout.data_ptr(), statistics, sums or statistics,
            dq.data_ptr(), dk.data_ptr(), dv.data_ptr(), pointers.bias, pointer(dbias),
        )  # fmt: skip
        self.main.launch(*descriptors, sums, semaphores, counter, *pointers, pointer(slope_sums), *captured)
        if self.end is not None:
            self.end.launch(sums, dq.data_ptr(), pointers.cu_seqlens_q)
        dk, dv = sum_of_shares(self.sum_of_shares, dk, dv)
        if wanted.bias and self.bias is not None:
            dbias = run_bias_gradient(
                self.bias, (q.data_ptr(), k.data_ptr(), v.data_ptr(), masked_dout or dout.data_ptr(), statistics),
                pointers, captured,
            )  # fmt: skip
        elif row_statistics is not None:
            read = dout if masked_dout is None else self._masked_dout(buffer, dout)
            dbias = backward_bias(read, inputs, row_statistics, saved_side(aux, max_seqlens), spec)
        if slope_sums is not None:
            side = saved_side(aux, max_seqlens)
            dslopes = slope_gradient(slope_sums, side, side.cu_seqlens_k)
        if wanted.sinks:
            dsinks = sink_gradient(sink_sums)
        return Gradients(dq, dk, dv, dbias, dslopes, dsinks, (None,) * len(wanted.captured))

    def _masked_dout(self, buffer: Tensor, dout: Tensor) -> Tensor:
        return self.scratch.part(buffer, "masked_dout").view(dout.dtype)[: dout.numel()].view(dout.shape)


def backward(
    dout: Tensor,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    side: SideInputs,
    spec: AttentionSpec,
    wanted: Wanted,
) -> Gradients:
    """Runs the kernels. The portable one computes the gradient of a bias that the Hopper one does not serve. The sums
    of dq, and where walks meet dk and dv, are added up in no fixed order unless `spec.deterministic`. Of `wanted` they
    serve all but tensors of score functions (`backend.unsupported_reason`)."""
    if not q.numel() or not k.numel() or not v.numel():
        return _gradients_without_keys(dlse, q, k, v, lse, side, wanted)
    sign = 1
    if spec.scale <= 0:
        q, spec, sign = positive_scale(q, spec)
    if not ends_by_rows(k, v, side):
        k, v = by_whole_rows(k), by_whole_rows(v)
    out, dout = contiguous_on_16_bytes(out), _readable(dout)
    lse, dlse = lse.contiguous(), None if dlse is None else dlse.contiguous()
    side = with_aligned_lists(side)
    inputs = BackwardInputs(dout, dlse, q, k, v, out, lse)
    scalars = (side.max_seqlen_q, side.max_seqlen_k), spec, wanted
    grads = _plan_for(inputs, side, spec, wanted).run(inputs, side_tensors(side), scalars)
    return grads if sign == 1 else grads._replace(q=grads.q.mul_(sign))


def prepare_backward(
    inputs: BackwardInputs, side: SideInputs, spec: AttentionSpec, wanted: Wanted
) -> Callable[[BackwardInputs, tuple], Gradients] | None:
    """`backward` of all 16-bit calls that look like this one, from their tensors; or None. Whether it serves float32
    depends on PyTorch's TF32 mode, too."""
    dout, _, q, k, v, *_ = inputs
    if q.dtype is torch.float32 or spec.scale <= 0 or not (q.numel() and k.numel() and v.numel() and aligned(dout)):
        return None
    if not ends_by_rows(k, v, side):
        return None
    scalars = (side.max_seqlen_q, side.max_seqlen_k), spec, wanted
    run = _plan_for(inputs, side, spec, wanted).run
    return lambda inputs, aux: run(inputs, aux, scalars)


def backward_plans(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, side: SideInputs, spec: AttentionSpec, wanted: Wanted
) -> tuple[Plan, ...]:
    """The launches of `backward` without dlse; `dout` needs no memory."""
    if spec.scale <= 0 or not (q.numel() and k.numel() and v.numel()):
        return ()
    inputs = BackwardInputs(dout, None, q, k, v, dout, dout)
    plan = _plan_for(inputs, side, spec, wanted)
    if isinstance(plan, ApartPlan):
        return plan.launches
    of_bias: tuple[Plan, ...] = ()
    if wanted.bias and plan.stored_bias is None:
        call = describe_backward(inputs, side, spec, wanted)
        of_bias = (plan.bias or plan_for("dbias", call)).launches
    return tuple(each for each in (plan.main, plan.begin, plan.end, plan.sum_of_shares, *of_bias) if each is not None)


def _plan_for(
    inputs: BackwardInputs, side: SideInputs, spec: AttentionSpec, wanted: Wanted
) -> BackwardPlan | ApartPlan:
    return plan_backward(describe_backward(inputs, side, spec, wanted))


@plan_cache
def plan_backward(call: Call) -> BackwardPlan | ApartPlan:
    """The plan of a call. Wide heads, and float32, have a kernel for each gradient."""
    if call.dtype is not torch.float32 and is_wide(*call.head_dims):
        return plan_apart(plan_wide_backward, KEYS_OF_DV, call)
    if serves_float32(call.dtype, *call.head_dims):
        return plan_apart(plan_float32_backward, float32_keys_of_dv(*call.head_dims), call)
    return _plan(call)


def _gradients_without_keys(
    dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, lse: Tensor, side: SideInputs, wanted: Wanted
) -> Gradients:
    """The gradients of a call without queries, keys or columns."""
    dsinks = _sink_gradient_without_keys(dlse, lse, side.sinks) if wanted.sinks else None
    dbias = torch.zeros_like(side.bias) if wanted.bias and side.bias is not None else None
    dslopes = torch.zeros_like(side.alibi_slopes) if wanted.alibi_slopes and side.alibi_slopes is not None else None
    dq, dk, dv = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
    return Gradients(dq, dk, dv, dbias, dslopes, dsinks, (None,) * len(side.captured))


def _sink_gradient_without_keys(dlse: Tensor | None, lse: Tensor, sinks: Tensor | None) -> Tensor | None:
    """What comes through lse to rows that see a sink is all the sink's."""
    if sinks is None or dlse is None:
        return None if sinks is None else torch.zeros_like(sinks)
    by_head = torch.where(lse.isneginf(), 0.0, dlse).sum(-1)
    return by_head.sum(0) if by_head.dim() == 2 else by_head


def _readable(tensor: Tensor) -> Tensor:
    """A gradient comes from whatever followed; where TMA cannot read it as it lies, a copy is read."""
    return tensor if aligned(tensor) else tensor.clone(memory_format=torch.contiguous_format)


def _plan(call: Call) -> BackwardPlan:
    """Everything that can be decided before the tensors' contents are known."""
    call.check_sizes()
    spec, aux, dtype, packed = call.spec, call.aux, call.dtype, call.packed
    head_dim, head_dim_v = call.head_dims
    batch, rows_q, rows_k, heads, heads_kv = call.batch, call.rows_q, call.rows_k, call.heads, call.heads_kv
    wanted, programs, has_empty_rows = call.wanted, call.multiprocessors, call.may_hide_rows
    config, single, whole = ends_of_dq(backward_config_of(call), call)
    whole_rows, whole_keys = whole_sizes(call)
    covered = is_covered(call, config.block_m, config.block_n)
    group = call.group
    query_tiles, key_tiles = call.tiles(whole_rows, config.block_m), call.tiles(whole_keys, config.block_n)
    lines, lines_kv = (heads, heads_kv) if packed else (batch * heads, batch * heads_kv)
    ordered = spec.deterministic and not (single or whole)
    lone = 0 if single or whole else lone_query_tiles(call, config)
    variant = BackwardVariant(
        dtype,
        head_dim,
        head_dim_v,
        config,
        packed,
        spec.window_left is not None,
        spec.window_right is not None,
        spec.banded and spec.top_left,
        call.has_dlse,
        ordered,
        side_of_call(call, covered=covered, by_column=True),
        spec.softcap > 0,
        single_key_tile=single,
        whole_lines=whole,
        lone_tiles=lone > 0,
        slope_sums=wanted.alibi_slopes,
        function=function_of_call(call, covered),
    )
    tiles = query_tiles * lines
    blocks = spec.block_shape is not None
    uneven = variant.bounded or blocks or (variant.has_right and not variant.has_left)
    steps = longest_walk(query_tiles, spec, config.block_m, config.block_n)

    def walks_done(shares: int) -> float:
        # Here nobody knows the lengths of packed sequences, and with a block mask lines are in another order.
        listed = packed or blocks
        return 0 if listed else tiles_done_before_last(key_tiles, lines_kv * shares, group // shares, programs)

    shares = shares_of_heads(group, key_tiles * lines_kv, steps, uneven, programs, walks_done)
    shares = shares_in_cache(variant, group, shares, key_tiles, lines_kv, steps, programs)
    group //= shares
    parts = 1
    if may_divide_queries(call, group):
        parts = parts_of_walks(key_tiles * lines_kv * shares, query_tiles, group, programs)
    shares *= parts
    assert call.dout is not None
    strides_dout = batch_row_head(call.out_shape, call.dout.strides)
    wide = max(strides_dout) >= 2**31
    looping = with_loops(variant, group, rows_q, rows_k)._replace(divides_queries=parts > 1)
    sums_bias = wanted.bias and serves_bias_gradient(config, moves_by_tma(aux.bias, dtype))
    begins = variant._replace(
        has_empty_rows=has_empty_rows, wide_strides=wide, sinks=aux.sinks is not None,
        shares_progress=looping.shares_progress,
        row_statistics=wanted.bias and not (sums_bias or config.bias_stored),
    )  # fmt: skip
    window_left, window_right = clipped_window(spec)
    numbers = {
        "batch": batch,
        "heads": heads,
        "heads_kv": heads_kv * shares,
        "group": group,
        "shares": shares,
        "parts": parts,
        "rows_q": rows_q,
        "rows_k": rows_k,
        "query_tiles": query_tiles,
        "lone_tiles": lone,
        "key_tiles": key_tiles,
        "window_left": window_left,
        "window_right": window_right,
        "scale": spec.scale,
        "lse_unit": -1 / (spec.scale * LOG2_E),
        **score_units(spec)._asdict(),
        **dict(zip(("stride_dout_batch", "stride_dout_row", "stride_dout_head"), strides_dout)),
        "k_rows_apart": None if packed else row_strides(call.k.shape, call.k.strides)[1],
        "v_rows_apart": None if packed else row_strides(call.v.shape, call.v.strides)[1],
    }
    all_tiles = key_tiles * lines_kv * shares
    main_programs = min(lines_kv * shares if whole else all_tiles, programs) if config.producer else all_tiles
    summed = tiles if variant.adds_up else main_programs * group * query_tiles if whole else 0
    begin = backward_plan("begin", begins, numbers, tiles, call.device)
    main = backward_plan("main", looping, numbers, main_programs, call.device)
    end = backward_plan("end", variant, numbers, tiles, call.device) if variant.adds_up else None
    written = (call.q.shape, *((*of.shape[:-2], heads_kv * shares, of.shape[-1]) for of in (call.k, call.v)))
    dq, dk, dv = (Layout(tuple(shape), padded_strides(shape), dtype) for shape in written)
    sums, statistics = (
        math.prod(shape) * dtype_of(name, variant).itemsize // 4
        for name, shape in buffers(variant, tiles, summed).items()
    )
    masked_dout, strides_read = 0, call.dout.strides
    if has_empty_rows:
        # head_dim_v is a multiple of 8 (`backend.unsupported_reason`): TMA can read it.
        masked_dout = math.prod(call.out_shape) * dtype.itemsize // 4
        strides_read = contiguous_strides(call.out_shape)
    stored_bias = None
    if config.bias_stored and aux.bias is not None:
        stored_bias = Layout(aux.bias.shape, padded_strides(aux.bias.shape), aux.bias.dtype)
    bias = None
    if sums_bias:
        bias = plan_bias_gradient(call, variant, numbers, strides_read, (dq, dk, dv), tiles)
    scratch = Scratch(
        sums=sums,
        statistics=statistics,
        masked_dout=masked_dout,
        counter=1 + (lines if looping.shares_progress else 0),
        semaphores=tiles if ordered else 0,
    )
    return BackwardPlan(
        begin=begin,
        main=main,
        end=end,
        describe=describer(variant, call, strides_read, (dq, dk, dv), tiles, summed),
        outputs=(dq, dk, dv),
        allocate=allocator((dq, dk, dv, scratch.layout, sink_sums_layout(call, tiles)), call.device),
        scratch=scratch,
        sum_of_shares=plan_of_shares(dk, dv, shares, call.device),
        bias=bias,
        stored_bias=stored_bias,
        fills_bias=not (spec.banded or aux.key_lengths is not None or spec.block_shape is not None),
    )
