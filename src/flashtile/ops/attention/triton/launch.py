"""Host side of the portable kernels: outputs and launches. The backend module that `select` names."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from flashtile._backends.allocate import allocator
from flashtile._backends.devices import interpreting
from flashtile._backends.launch import Plan, pointer
from flashtile.ops.attention.plans import contiguous_on_16_bytes, may_hide_rows, positive_scale
from flashtile.ops.attention.side_parameters import NO_SIDE, side_pointers
from flashtile.ops.attention.spec import FP8, AttentionSpec, Gradients, SideInputs, Wanted
from flashtile.ops.attention.triton.bias_parts import sum_of_parts
from flashtile.ops.attention.triton.configs import Kernel
from flashtile.ops.attention.triton.ordered_sums import Waves
from flashtile.ops.attention.triton.plan import AttentionPlan, plan_for
from flashtile.ops.attention.triton.shares_launch import sum_of_shares

_LOG2_E = math.log2(math.e)
#: What a launch is given for captured tensors where there are none.
NO_CAPTURED = (pointer(None),)


class QueryResults(NamedTuple):
    """What the dq kernel, or in its place that of short sequences, has computed.

    Attributes:
        statistics: `[*lse.shape, 4]`, which other kernels and the gradient of sinks read; None where nobody does.
        slope_sums: what each row adds to the gradient of its slope, in the shape of lse; None where nobody wants that.
        dout: what the other kernels read: where rows may see no key a contiguous copy with zeros in these.
        keys: (dk, dv), and `dbias`: the gradient of the bias; None where these are another kernel's task.
    """

    dq: Tensor
    statistics: Tensor | None
    slope_sums: Tensor | None
    dout: Tensor
    keys: tuple[Tensor, Tensor] | None
    dbias: Tensor | None


def forward(q: Tensor, k: Tensor, v: Tensor, side: SideInputs, spec: AttentionSpec) -> tuple[Tensor, ...]:
    """Runs the forward kernel. Shapes as in `flashtile.attention` and `attention_varlen`. Returns (out, lse), or (out,
    lse, max_scores)."""
    if spec.scale <= 0:
        q, spec, _ = positive_scale(q, spec)
    plan = plan_for("forward", q, k, v, None, side, spec)
    results = tuple(plan.kernel.allocate())
    if plan.kernel.programs:
        if q.dtype is FP8:
            q, k, v = q.view(torch.uint8), k.view(torch.uint8), v.view(torch.uint8)
        max_scores = results[2] if spec.returns_max_scores else None
        tensors = map(pointer, (q, k, v, *results[:2], max_scores))
        plan.kernel.launch(*tensors, *side_pointers(side), *captured_pointers(side))
    return results


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
    """Runs the dq kernel, the dk/dv kernel, and that of the bias where its gradient is wanted; or, for short sequences,
    one for all. Deterministic."""
    sign = 1
    hides_rows = may_hide_rows(q, k, side, spec)
    if spec.scale <= 0:
        q, spec, sign = positive_scale(q, spec)
    sums = _captured_sums(side, wanted)
    dq, statistics, slope_sums, dout, keys, dbias = backward_queries(
        dout, dlse, q, k, v, out, lse, side, spec, wanted.alibi_slopes, hides_rows, sums, wanted.bias
    )
    if keys is not None:
        dk, dv = keys
    else:
        assert statistics is not None
        dk, dv = backward_keys(dout, q, k, v, statistics, side, spec)
        dbias = backward_bias(dout, q, k, v, statistics, side, spec) if wanted.bias else None
    dalibi_slopes = None if slope_sums is None else slope_gradient(slope_sums, side, side.cu_seqlens_q)
    dsinks = None
    if wanted.sinks and side.sinks is not None and statistics is not None:
        dsinks = _sink_gradient(statistics, side.sinks, hides_rows and dlse is not None)
    captured = tuple(None if total is None else total.to(of.dtype) for total, of in zip(sums, side.captured))
    return Gradients(dq if sign == 1 else dq.mul_(sign), dk, dv, dbias, dalibi_slopes, dsinks, captured)


def prepare_forward(
    q: Tensor, k: Tensor, v: Tensor, side: SideInputs, spec: AttentionSpec
) -> Callable[[int, int, int], tuple[Tensor, Tensor]] | None:
    """`forward` of all 16-bit calls that look like this one, from the addresses of q, k and v; or None."""
    if not _preparable(q, spec):
        return None
    kernel = plan_for("forward", q, k, v, None, side, spec).kernel
    allocate = kernel.allocate

    def run(q: int, k: int, v: int) -> tuple[Tensor, Tensor]:
        out, lse = allocate()
        kernel.launch(q, k, v, out.data_ptr(), lse.data_ptr(), 0, *NO_SIDE, 0)
        return out, lse

    return run if kernel.programs else None


def prepare_backward(
    dout: Tensor, has_dlse: bool, q: Tensor, k: Tensor, v: Tensor, side: SideInputs, spec: AttentionSpec
) -> Callable[..., tuple[Tensor, Tensor, Tensor]] | None:
    """`backward` of all 16-bit calls that look like this one and whose rows see a key each, from the addresses of dout,
    dlse (0 for None), q, k, v, out and lse; or None."""
    if not _preparable(q, spec) or may_hide_rows(q, k, side, spec):
        return None
    queries = plan_for("dq", q, k, v, dout, side, spec, has_dlse)
    if queries.all_gradients:
        return _prepare_short_backward(queries)
    keys = plan_for("dkdv", q, k, v, dout, side, spec)
    allocate = allocator((*queries.kernel.outputs, *keys.kernel.outputs), q.device)

    def run(dout: int, dlse: int, q: int, k: int, v: int, out: int, lse: int) -> tuple[Tensor, Tensor, Tensor]:
        dq, statistics, dk, dv = allocate()
        of_statistics = statistics.data_ptr()
        queries.kernel.launch(q, k, v, out, dout, lse, dlse, of_statistics, 0, 0, dq.data_ptr(), *NO_SIDE, 0, 0)
        keys.kernel.launch(q, k, v, dout, of_statistics, dk.data_ptr(), dv.data_ptr(), *NO_SIDE, 0)
        return dq, *sum_of_shares(keys.sum_of_shares, dk, dv)

    return run if queries.kernel.programs and keys.kernel.programs else None


def _prepare_short_backward(plan: AttentionPlan) -> Callable[..., tuple[Tensor, Tensor, Tensor]]:
    """`prepare_backward` where one kernel computes all."""
    allocate = plan.kernel.allocate

    def run(dout: int, dlse: int, q: int, k: int, v: int, out: int, lse: int) -> tuple[Tensor, Tensor, Tensor]:
        dq, dk, dv = allocate()
        gradients = dq.data_ptr(), dk.data_ptr(), dv.data_ptr()
        plan.kernel.launch(q, k, v, out, dout, lse, dlse, 0, 0, 0, *gradients, 0, *NO_SIDE)
        return dq, *sum_of_shares(plan.sum_of_shares, dk, dv)

    return run


def backward_plans(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, side: SideInputs, spec: AttentionSpec, wanted: Wanted
) -> tuple[Plan, ...]:
    """The launches of `backward` without dlse; `dout` needs no memory."""
    if spec.scale <= 0:
        return ()
    hides_rows = may_hide_rows(q, k, side, spec)
    summed = wanted.captured if any(wanted.captured) else ()
    queries = plan_for("dq", q, k, v, dout, side, spec, False, wanted.alibi_slopes, hides_rows, summed, wanted.bias)
    others: list[Kernel] = [] if queries.all_gradients else ["dkdv", "dbias"] if wanted.bias else ["dkdv"]
    plans = queries, *(plan_for(kernel, q, k, v, dout, side, spec) for kernel in others)
    return tuple(launch for plan in plans for launch in plan.launches)


def _preparable(q: Tensor, spec: AttentionSpec) -> bool:
    """Whether plans depend on no more than how tensors lie (those of float32 do on PyTorch's TF32 mode), kernels read q
    itself, and launches take addresses."""
    return q.dtype.itemsize == 2 and spec.scale > 0 and not interpreting()


def column_sums(q: Tensor, k: Tensor, lse: Tensor, side: SideInputs, spec: AttentionSpec) -> Tensor:
    """Runs the kernel of column sums. Returns `[batch, heads_q, seq_k]`, packed `[heads_q, total_k]`, float32."""
    if spec.scale <= 0:
        q, spec, _ = positive_scale(q, spec)
    plan = plan_for("column_sums", q, k, k, None, side, spec)
    (sums,) = plan.kernel.allocate()
    if plan.kernel.programs:
        plan.kernel.launch(*map(pointer, (q, k, lse, sums)), *side_pointers(side))
    return sums


def backward_queries(
    dout: Tensor,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    side: SideInputs,
    spec: AttentionSpec,
    sums_slopes: bool = False,
    hides_rows: bool = False,
    captured_sums: Sequence[Tensor | None] = (),
    learned_bias: bool = False,
) -> QueryResults:
    """Runs the dq kernel, or that of short sequences. `sums_slopes`, `learned_bias`: these gradients are wanted.
    `hides_rows`: rows may see no key."""
    out, lse, dlse = contiguous_on_16_bytes(out), lse.contiguous(), None if dlse is None else dlse.contiguous()
    summed = tuple(total is not None for total in captured_sums)
    plan = plan_for("dq", q, k, v, dout, side, spec, dlse is not None, sums_slopes, hides_rows, summed, learned_bias)
    slope_sums = torch.zeros_like(lse) if sums_slopes else None
    if plan.all_gradients:
        return _short_backward(plan, dout, dlse, q, k, v, out, lse, side, slope_sums, learned_bias)
    dq, statistics, *copies = plan.kernel.allocate()
    quiet = copies[0] if hides_rows else None
    if plan.kernel.programs:
        tensors = (q, k, v, out, dout, lse, dlse, statistics, slope_sums, quiet, dq)
        pointers = (*map(pointer, tensors), *side_pointers(side), *captured_pointers(side))
        if plan.waves:
            waves = Waves.of(captured_sums, plan.kernel.programs, plan.waves)
            for start in waves.starts:
                plan.kernel.launch(*pointers, *map(pointer, waves.sums), pointer(start))
            waves.finish(captured_sums)
        else:
            plan.kernel.launch(*pointers, *map(pointer, captured_sums or (None,)))
    return QueryResults(dq, statistics, slope_sums, dout if quiet is None else quiet, None, None)


def _short_backward(
    plan: AttentionPlan,
    dout: Tensor,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    side: SideInputs,
    slope_sums: Tensor | None,
    learned_bias: bool,
) -> QueryResults:
    """Runs the kernel of short sequences."""
    dq, dk, dv, *more = plan.kernel.allocate()
    statistics = None if side.sinks is None else more[0]
    bias_parts = more[-1] if learned_bias else None
    tensors = (q, k, v, out, dout, lse, dlse, statistics, slope_sums, None, dq, dk, dv, bias_parts)
    plan.kernel.launch(*map(pointer, tensors), *side_pointers(side))
    dbias = None
    if bias_parts is not None:
        dbias = sum_of_parts(plan.sum_of_parts, bias_parts)
    return QueryResults(dq, statistics, slope_sums, dout, sum_of_shares(plan.sum_of_shares, dk, dv), dbias)


def backward_keys(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    statistics: Tensor,
    side: SideInputs,
    spec: AttentionSpec,
) -> tuple[Tensor, Tensor]:
    """Runs the dk/dv kernel on the statistics of the dq kernel. Returns (dk, dv)."""
    plan = plan_for("dkdv", q, k, v, dout, side, spec)
    dk, dv = plan.kernel.allocate()
    if plan.kernel.programs:
        tensors = (q, k, v, dout, statistics, dk, dv)
        plan.kernel.launch(*map(pointer, tensors), *side_pointers(side), *captured_pointers(side))
    return sum_of_shares(plan.sum_of_shares, dk, dv)


def backward_bias(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    statistics: Tensor,
    side: SideInputs,
    spec: AttentionSpec,
) -> Tensor:
    """Runs the kernel of the bias's gradient on the statistics of the dq kernel. Returns it in the bias's shape."""
    assert side.bias is not None
    plan = plan_for("dbias", q, k, v, dout, side, spec)
    if not plan.kernel.programs:
        return torch.zeros(side.bias.shape, dtype=side.bias.dtype, device=q.device)
    (sums,) = plan.kernel.allocate()
    tensors = (q, k, v, dout, statistics, sums)
    plan.kernel.launch(*map(pointer, tensors), *side_pointers(side), *captured_pointers(side))
    return sum_of_parts(plan.sum_of_parts, sums)


def slope_gradient(slope_sums: Tensor, side: SideInputs, cu_seqlens: Tensor | None) -> Tensor:
    """The gradient of ALiBi's slopes, from minus what each row or each key adds to it: `[batch, heads_q, rows]`, packed
    `[heads_q, rows]`, where `cu_seqlens` has the offsets of the sequences among these rows."""
    assert side.alibi_slopes is not None
    if cu_seqlens is None:
        by_sequence = slope_sums.sum(-1)
    elif side.alibi_slopes.dim() == 1:
        by_sequence = slope_sums.sum(-1)[None]
    else:
        offsets = cu_seqlens.long()
        by_sequence = torch.segment_reduce(slope_sums.t().contiguous(), "sum", offsets=offsets, initial=0, unsafe=True)
    return -(by_sequence if side.alibi_slopes.dim() == 2 else by_sequence.sum(0))


def _sink_gradient(statistics: Tensor, sinks: Tensor, own_delta: bool) -> Tensor:
    """The gradient of the sinks: minus the sum over rows of what the sink weighs times delta. `own_delta`: the
    statistics have one that is theirs, beside that of the keys."""
    lse, delta = statistics[..., 0], statistics[..., 1 + own_delta]  # [batch, heads, seq_q], packed [heads, total_q]
    weights = torch.exp2((sinks * _LOG2_E)[:, None] - lse)
    # Rows past the last sequence have no sink, whatever their delta is.
    by_head = torch.where(weights == 0, 0.0, weights * delta).sum(-1)
    return -(by_head if by_head.dim() == 1 else by_head.sum(0))


def _captured_sums(side: SideInputs, wanted: Wanted) -> list[Tensor | None]:
    """Zeros for the gradients of captured tensors, which the dq kernel adds up; empty where none is wanted."""
    if not any(wanted.captured):
        return []
    return [
        torch.zeros(tensor.shape, dtype=torch.float32, device=tensor.device) if wants else None
        for tensor, wants in zip(side.captured, wanted.captured)
    ]


def captured_pointers(side: SideInputs) -> tuple:
    """Of the tensors that the score function reads; something in their place where there are none."""
    if not side.captured:
        return NO_CAPTURED
    return tuple(
        pointer(tensor.view(torch.uint8) if tensor.dtype is torch.bool else tensor) for tensor in side.captured
    )
