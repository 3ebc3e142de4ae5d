"""Host side of the portable kernels: outputs and launches. The backend module that `select` names."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from flashtile._backends.devices import interpreting
from flashtile._backends.launch import Plan, pointer, pointers
from flashtile.ops.attention.arguments import SINGLE, Aux, Scalars, saved_side, side_tensors
from flashtile.ops.attention.call import describe_backward, describe_call
from flashtile.ops.attention.gpu.parameters import aux_pointers, contiguous_on_16_bytes, positive_scale, side_pointers
from flashtile.ops.attention.gpu.reductions import slope_gradient
from flashtile.ops.attention.spec import (
    FP8,
    NOTHING_WANTED,
    AttentionSpec,
    BackwardInputs,
    Gradients,
    SideInputs,
    Wanted,
)
from flashtile.ops.attention.triton.plan import AttentionPlan, plan_for
from flashtile.ops.attention.triton.score_functions import Waves

_LOG2_E = math.log2(math.e)

#: Where the tensors of a call beside q, k and v have these.
_SINKS, _BIAS = SINGLE.index("sinks"), SINGLE.index("bias")


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
    plan = plan_for("forward", describe_call("forward", (q, k, v), side, spec))
    return _run_forward(plan.kernel, q, k, v, side_tensors(side))


def _run_forward(kernel: Plan, q: Tensor, k: Tensor, v: Tensor, aux: tuple) -> tuple[Tensor, ...]:
    """Enqueues the kernel. `aux`: as of `arguments.side_tensors`."""
    results = out, lse, *max_scores = tuple(kernel.allocate())
    if kernel.programs:
        if q.dtype is FP8:
            q, k, v = q.view(torch.uint8), k.view(torch.uint8), v.view(torch.uint8)
        side, captured = aux_pointers(aux)
        tensors = pointers(q, k, v, out, lse, max_scores[0] if max_scores else None)
        kernel.launch(*tensors, *side, *captured)
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
    if spec.scale <= 0:
        q, spec, sign = positive_scale(q, spec)
    out, lse, dlse = contiguous_on_16_bytes(out), lse.contiguous(), None if dlse is None else dlse.contiguous()
    inputs = BackwardInputs(dout, dlse, q, k, v, out, lse)
    scalars = (side.max_seqlen_q, side.max_seqlen_k), spec, wanted
    grads = plan_backward(inputs, side, spec, wanted).run(inputs, side_tensors(side), scalars)
    return grads if sign == 1 else grads._replace(q=grads.q.mul_(sign))


class BackwardPlans(NamedTuple):
    """The launches of a backward: of dq (or all gradients, in short sequences), of dk and dv, and of the bias's
    gradient. `hides_rows`: rows may see no key."""

    queries: AttentionPlan
    keys: AttentionPlan | None
    bias: AttentionPlan | None
    hides_rows: bool

    def run(self, inputs: BackwardInputs, aux: Aux, scalars: Scalars) -> Gradients:
        """Enqueues the kernels. Gradients that are not wanted are None."""
        wanted = scalars[2]
        sums = _captured_sums(aux, wanted)
        dq, statistics, slope_sums, dout, keys, dbias = run_queries(
            self.queries, inputs, aux, wanted, self.hides_rows, sums
        )
        if keys is None:
            assert statistics is not None and self.keys is not None
            keys = run_keys(self.keys, dout, inputs, statistics, aux)
            dbias = None if self.bias is None else _run_bias(self.bias, dout, inputs, statistics, aux)
        if not aux:
            return Gradients(dq, *keys)
        side, dslopes, dsinks = saved_side(aux, scalars[0]), None, None
        if slope_sums is not None:
            dslopes = slope_gradient(slope_sums, side, side.cu_seqlens_q)
        if wanted.sinks and side.sinks is not None and statistics is not None:
            dsinks = _sink_gradient(statistics, side.sinks, self.hides_rows and inputs.dlse is not None)
        captured: tuple[Tensor | None, ...] = (None,) * len(side.captured)
        if sums:
            captured = tuple(None if total is None else total.to(of.dtype) for total, of in zip(sums, side.captured))
        return Gradients(dq, *keys, dbias, dslopes, dsinks, captured)


def plan_backward(inputs: BackwardInputs, side: SideInputs, spec: AttentionSpec, wanted: Wanted) -> BackwardPlans:
    """The launches of a call."""
    call = describe_backward(inputs, side, spec, wanted)
    queries = plan_for("dq", call)
    if queries.all_gradients:
        return BackwardPlans(queries, None, None, call.may_hide_rows)
    bias = plan_for("dbias", call) if wanted.bias else None
    return BackwardPlans(queries, plan_for("dkdv", call), bias, call.may_hide_rows)


def prepare_forward(
    q: Tensor, k: Tensor, v: Tensor, side: SideInputs, spec: AttentionSpec
) -> Callable[[Tensor, Tensor, Tensor, tuple], tuple[Tensor, ...]] | None:
    """`forward` of all 16-bit calls that look like this one, from q, k, v and the tensors beside them; or None."""
    if not _preparable(q, spec):
        return None
    kernel = plan_for("forward", describe_call("forward", (q, k, v), side, spec)).kernel
    return functools.partial(_run_forward, kernel) if kernel.programs else None


def prepare_backward(
    inputs: BackwardInputs, side: SideInputs, spec: AttentionSpec, wanted: Wanted
) -> Callable[[BackwardInputs, tuple], Gradients] | None:
    """`backward` of all 16-bit calls that look like this one, from their tensors; or None."""
    if not _preparable(inputs.q, spec):
        return None
    run = plan_backward(inputs, side, spec, wanted).run
    scalars = (side.max_seqlen_q, side.max_seqlen_k), spec, wanted
    return lambda inputs, aux: run(inputs, aux, scalars)


def backward_plans(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, side: SideInputs, spec: AttentionSpec, wanted: Wanted
) -> tuple[Plan, ...]:
    """The launches of `backward` without dlse; `dout` needs no memory."""
    if spec.scale <= 0:
        return ()
    queries, keys, bias, _ = plan_backward(BackwardInputs(dout, None, q, k, v, dout, dout), side, spec, wanted)
    return tuple(launch for plan in (queries, keys, bias) if plan is not None for launch in plan.launches)


def _preparable(q: Tensor, spec: AttentionSpec) -> bool:
    """Whether plans depend on no more than how tensors lie (those of float32 do on PyTorch's TF32 mode), kernels read q
    itself, and launches take addresses."""
    return q.dtype.itemsize == 2 and spec.scale > 0 and not interpreting()


def column_sums(q: Tensor, k: Tensor, lse: Tensor, side: SideInputs, spec: AttentionSpec) -> Tensor:
    """Runs the kernel of column sums. Returns `[batch, heads_q, seq_k]`, packed `[heads_q, total_k]`, float32."""
    if spec.scale <= 0:
        q, spec, _ = positive_scale(q, spec)
    plan = plan_for("column_sums", describe_call("column_sums", (q, k, k), side, spec))
    (sums,) = plan.kernel.allocate()
    if plan.kernel.programs:
        plan.kernel.launch(*pointers(q, k, lse, sums), *side_pointers(side)[0])
    return sums


def run_queries(
    plan: AttentionPlan,
    inputs: BackwardInputs,
    aux: Aux,
    wanted: Wanted,
    hides_rows: bool,
    captured_sums: Sequence[Tensor | None],
) -> QueryResults:
    """Enqueues the dq kernel, or that of short sequences."""
    dout, dlse, q, k, v, out, lse = inputs
    slope_sums = torch.zeros_like(lse) if wanted.alibi_slopes else None
    side_addresses, captured = aux_pointers(aux)
    if plan.all_gradients:
        dq, dk, dv, *more = plan.kernel.allocate()
        statistics = more[0] if aux and aux[_SINKS] is not None else None
        bias_parts = more[-1] if wanted.bias else None
        everything = (q, k, v, out, dout, lse, dlse, statistics, slope_sums, None, dq, dk, dv, bias_parts)
        plan.kernel.launch(*pointers(*everything), *side_addresses)
        dbias = None if bias_parts is None else sum_of_parts(plan.sum_of_parts, bias_parts)
        return QueryResults(dq, statistics, slope_sums, dout, sum_of_shares(plan.sum_of_shares, dk, dv), dbias)
    dq, statistics, *copies = plan.kernel.allocate()
    quiet = copies[0] if hides_rows else None
    if plan.kernel.programs:
        tensors = (q, k, v, out, dout, lse, dlse, statistics, slope_sums, quiet, dq)
        given = (*pointers(*tensors), *side_addresses, *captured)
        if plan.waves:
            waves = Waves.of(captured_sums, plan.kernel.programs, plan.waves)
            for start in waves.starts:
                plan.kernel.launch(*given, *pointers(*waves.sums), pointer(start))
            waves.finish(captured_sums)
        else:
            plan.kernel.launch(*given, *pointers(*captured_sums or (None,)))
    return QueryResults(dq, statistics, slope_sums, dout if quiet is None else quiet, None, None)


def run_keys(
    plan: AttentionPlan, dout: Tensor, inputs: BackwardInputs, statistics: Tensor, aux: Aux
) -> tuple[Tensor, Tensor]:
    """Enqueues the dk/dv kernel on the dout and the statistics of the dq kernel. Returns (dk, dv)."""
    dk, dv = plan.kernel.allocate()
    if plan.kernel.programs:
        side, captured = aux_pointers(aux)
        tensors = inputs.q, inputs.k, inputs.v, dout, statistics, dk, dv
        plan.kernel.launch(*pointers(*tensors), *side, *captured)
    return sum_of_shares(plan.sum_of_shares, dk, dv)


def backward_bias(
    dout: Tensor, inputs: BackwardInputs, statistics: Tensor, side: SideInputs, spec: AttentionSpec
) -> Tensor:
    """Runs the kernel of the bias's gradient on the dout and the statistics of a dq kernel. Returns it in the bias's
    shape."""
    plan = plan_for("dbias", describe_backward(inputs._replace(dout=dout), side, spec, NOTHING_WANTED))
    return _run_bias(plan, dout, inputs, statistics, side_tensors(side))


def _run_bias(plan: AttentionPlan, dout: Tensor, inputs: BackwardInputs, statistics: Tensor, aux: Aux) -> Tensor:
    if not plan.kernel.programs:
        bias = aux[_BIAS]
        return torch.zeros(bias.shape, dtype=bias.dtype, device=bias.device)
    (sums,) = plan.kernel.allocate()
    side, captured = aux_pointers(aux)
    tensors = inputs.q, inputs.k, inputs.v, dout, statistics, sums
    plan.kernel.launch(*pointers(*tensors), *side, *captured)
    return sum_of_parts(plan.sum_of_parts, sums)


def sum_of_shares(plan: Plan | None, dk: Tensor, dv: Tensor) -> tuple[Tensor, Tensor]:
    """dk and dv `[..., heads_kv, head_dim]`, from their shares."""
    if plan is None:
        return dk, dv
    total, total_v = plan.allocate()
    plan.launch(*pointers(dk, dv, total, total_v))
    return total, total_v


def sum_of_parts(plan: Plan | None, parts: Tensor) -> Tensor:
    """The gradient of a bias, from its parts `[parts, *shape]`. A single one has the bias's dtype already."""
    if plan is None:
        return parts.squeeze(0)
    total: Tensor
    (total,) = plan.allocate()
    plan.launch(*pointers(parts, total))
    return total


def _sink_gradient(statistics: Tensor, sinks: Tensor, own_delta: bool) -> Tensor:
    """The gradient of the sinks: minus the sum over rows of what the sink weighs times delta. `own_delta`: the
    statistics have one that is theirs, beside that of the keys."""
    lse, delta = statistics[..., 0], statistics[..., 1 + own_delta]  # [batch, heads, seq_q], packed [heads, total_q]
    weights = torch.exp2((sinks * _LOG2_E)[:, None] - lse)
    # Rows past the last sequence have no sink, whatever their delta is.
    by_head = torch.where(weights == 0, 0.0, weights * delta).sum(-1)
    return -(by_head if by_head.dim() == 1 else by_head.sum(0))


def _captured_sums(aux: Aux, wanted: Wanted) -> list[Tensor | None]:
    """Zeros for the gradients of captured tensors, which the dq kernel adds up; empty where none is wanted."""
    if not any(wanted.captured):
        return []
    return [
        torch.zeros(tensor.shape, dtype=torch.float32, device=tensor.device) if wants else None
        for tensor, wants in zip(aux[len(SINGLE) :], wanted.captured)
    ]
