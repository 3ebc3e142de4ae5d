"""Host side of the portable kernels: their pipelines. The backend module that `select` names."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flashtile._backends.allocate import contiguous
from flashtile._backends.devices import interpreting
from flashtile._backends.launch import Plan, plan_cache, pointer, pointers
from flashtile._backends.pipeline import Kernel, Pipeline
from flashtile.ops.attention.call import Call, describe_backward, describe_call
from flashtile.ops.attention.gpu.parameters import (
    aux_buffers,
    aux_tensors,
    contiguous_on_16_bytes,
    positive_scale,
)
from flashtile.ops.attention.gpu.reductions import learned_gradients, sum_layouts
from flashtile.ops.attention.spec import (
    FP8,
    NOTHING_WANTED,
    AttentionSpec,
    Aux,
    AuxForm,
    BackwardInputs,
    Gradients,
    SideInputs,
    Wanted,
)
from flashtile.ops.attention.triton.plan import AttentionKernel, kernel_for
from flashtile.ops.attention.triton.scores import wave_starts

#: The buffers that a forward and a backward are given, before those of the side inputs.
_GIVEN_FORWARD = ("q", "k", "v")
_GIVEN_BACKWARD = ("q", "k", "v", "out", "dout", "lse", "dlse")


def forward(q: Tensor, k: Tensor, v: Tensor, side: SideInputs, spec: AttentionSpec) -> tuple[Tensor, ...]:
    """Runs the forward kernel. Shapes as in `flashtile.attention` and `attention_varlen`. Returns (out, lse), or (out,
    lse, max_scores)."""
    if spec.scale <= 0:
        q, spec, _ = positive_scale(q, spec)
    pipeline = _plan_forward(describe_call("forward", (q, k, v), side, spec))
    return _run_forward(pipeline, q, k, v, aux_tensors(side))


def prepare_forward(
    q: Tensor, k: Tensor, v: Tensor, side: SideInputs, spec: AttentionSpec
) -> Callable[[Tensor, Tensor, Tensor, Aux], tuple[Tensor, ...]] | None:
    """`forward` of all 16-bit calls that look like this one, from q, k, v and the tensors beside them; or None."""
    if not _preparable(q, spec):
        return None
    pipeline = _plan_forward(describe_call("forward", (q, k, v), side, spec))
    if not pipeline.launches:
        return None
    run_kernels = pipeline.run

    def run(q: Tensor, k: Tensor, v: Tensor, aux: Aux) -> tuple[Tensor, ...]:
        addresses = [tensor.data_ptr() for tensor in aux] if aux else ()
        return (*run_kernels(q.data_ptr(), k.data_ptr(), v.data_ptr(), *addresses),)

    return run


def _run_forward(pipeline: Pipeline, q: Tensor, k: Tensor, v: Tensor, aux: Aux) -> tuple[Tensor, ...]:
    """Enqueues the kernel."""
    if q.dtype is FP8:
        q, k, v = q.view(torch.uint8), k.view(torch.uint8), v.view(torch.uint8)
    return (*pipeline.run(*pointers((q, k, v, *aux))),)


@plan_cache
def _plan_forward(call: Call) -> Pipeline:
    planned = kernel_for("forward", call)
    return Pipeline(call.device, {"forward": planned.kernel}, (*_GIVEN_FORWARD, *aux_buffers(call)), planned.outputs)


def backward(inputs: BackwardInputs, side: SideInputs, spec: AttentionSpec, wanted: Wanted) -> Gradients:
    """Runs the dq kernel, the dk/dv kernel, and that of the bias where its gradient is wanted; or, for short sequences,
    one for all. Deterministic."""
    dout, dlse, q, k, v, out, lse = inputs
    sign = 1
    if spec.scale <= 0:
        q, spec, sign = positive_scale(q, spec)
    out, lse, dlse = contiguous_on_16_bytes(out), lse.contiguous(), None if dlse is None else dlse.contiguous()
    inputs = BackwardInputs(dout, dlse, q, k, v, out, lse)
    plan = plan_backward(describe_backward(inputs, side, spec, wanted))
    grads = plan.run(inputs, aux_tensors(side), AuxForm.from_side(side), wanted)
    return grads if sign == 1 else grads._replace(q=grads.q.mul_(sign))


def prepare_backward(
    inputs: BackwardInputs, side: SideInputs, spec: AttentionSpec, wanted: Wanted
) -> Callable[[BackwardInputs, Aux], Gradients] | None:
    """`backward` of all 16-bit calls that look like this one, from their tensors; or None."""
    if not _preparable(inputs.q, spec):
        return None
    run, form = plan_backward(describe_backward(inputs, side, spec, wanted)).run, AuxForm.from_side(side)
    return lambda inputs, aux: run(inputs, aux, form, wanted)


def backward_plans(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, side: SideInputs, spec: AttentionSpec, wanted: Wanted
) -> tuple[Plan, ...]:
    """The launches of `backward` without dlse; `dout` needs no memory."""
    if spec.scale <= 0:
        return ()
    inputs = BackwardInputs(dout, None, q, k, v, dout, dout)
    return plan_backward(describe_backward(inputs, side, spec, wanted)).pipeline.launches


def _preparable(q: Tensor, spec: AttentionSpec) -> bool:
    """Whether plans depend on no more than how tensors lie (those of float32 do on PyTorch's TF32 mode), kernels read q
    itself, and launches take addresses."""
    return q.dtype.itemsize == 2 and spec.scale > 0 and not interpreting()


class BackwardPlan(NamedTuple):
    """The launches of a backward.

    Attributes:
        pipeline: its first outputs are dq, dk and dv.
        own_delta: as in `learned_gradients`.
        waves: launches of the dq kernel, as (thread blocks of each, of all); None if there is one launch.
    """

    pipeline: Pipeline
    own_delta: bool
    waves: tuple[int, int] | None

    def run(self, inputs: BackwardInputs, aux: Aux, form: AuxForm, wanted: Wanted) -> Gradients:
        """Enqueues the kernels. Gradients that are not wanted are None."""
        dout, dlse, q, k, v, out, lse = inputs
        given = *pointers((q, k, v, out, dout, lse)), pointer(dlse), *pointers(aux)
        if self.waves is not None:
            starts = wave_starts(*self.waves, q.device)
            given = *given, [pointer(start) for start in starts]
        made = self.pipeline.run(*given)
        if aux:
            return self._with_sides(made, form.side(aux), wanted)
        dq, dk, dv, *_ = made
        return Gradients(dq, dk, dv)

    def _with_sides(self, made: list[Tensor], side: SideInputs, wanted: Wanted) -> Gradients:
        """With the gradients of side inputs. `made`: as of `Pipeline.run`."""
        found = dict(zip(self.pipeline.outputs, made))
        learned = learned_gradients(found, side, wanted, side.cu_seqlens_q, self.own_delta)
        captured = tuple(self._captured_gradient(found, number, of) for number, of in enumerate(side.captured))
        dq, dk, dv, *_ = made
        return Gradients(dq, dk, dv, **learned, captured=captured)

    def _captured_gradient(self, found: dict[str, Tensor], number: int, of: Tensor) -> Tensor | None:
        total = found.get(f"sum{number}")
        if total is None:
            return None
        return (total if self.waves is None else total.sum(0)).to(of.dtype)


@plan_cache
def plan_backward(call: Call) -> BackwardPlan:
    """Everything that can be decided before the tensors' contents are known."""
    queries = kernel_for("dq", call)
    planned = {"dq": queries}
    if not queries.all_gradients:
        planned["dkdv"] = kernel_for("dkdv", call)
        if call.wanted.bias:
            planned["dbias"] = kernel_for("dbias", call)
    outputs: dict[str, Any] = {**sum_layouts(call, call.rows_q)}
    for number, (of, wants) in enumerate(zip(call.aux.captured, call.wanted.captured)):
        if wants:
            slots = (queries.kernel.programs,) if queries.waves else ()
            outputs[f"sum{number}"] = contiguous((*slots, *of.shape), torch.float32)
    given = (*_GIVEN_BACKWARD, *aux_buffers(call))
    zeroed = {*outputs, *(["dbias"] if call.wanted.bias and _computes_nothing(planned) else [])}
    repeated = {"dq": "wave"} if queries.waves else {}
    pipeline = _pipeline(call, planned, (*given, *repeated.values()), outputs, zeroed, repeated)
    waves = (queries.kernel.programs, queries.waves) if queries.waves else None
    return BackwardPlan(pipeline, call.may_hide_rows and call.has_dlse, waves)


def _computes_nothing(planned: dict[str, AttentionKernel]) -> bool:
    """Whether the kernel of the gradient of a bias has no thread blocks."""
    return not (planned["dbias"] if "dbias" in planned else planned["dq"]).kernel.programs


def _pipeline(
    call: Call,
    planned: dict[str, AttentionKernel],
    given: tuple[str, ...],
    more: dict[str, Any] | None = None,
    zeroed: set[str] | None = None,
    repeated: dict[str, str] | None = None,
) -> Pipeline:
    """The pipeline of some kernels of a backward. `more`: buffers beside those that they write."""
    kernels: dict[str, Kernel] = {}
    outputs: dict[str, Any] = {}
    for name, of in planned.items():
        kernels |= {name: of.kernel, **of.following}
        outputs |= of.outputs
    outputs = {**{name: outputs[name] for name in ("dq", "dk", "dv", *outputs) if name in outputs}, **(more or {})}
    return Pipeline(call.device, kernels, given, outputs, zeroed=zeroed or (), repeated=repeated or {})


@plan_cache
def plan_bias_gradient(call: Call) -> Pipeline:
    """The kernel of a bias's gradient alone, and what adds up its parts. It is given the dout that is read."""
    planned = kernel_for("dbias", call)
    kernel = planned.kernel._replace(buffers={**planned.kernel.buffers, "dout_ptr": "dout"})
    zeroed = set() if kernel.programs else set(planned.outputs)
    given = ("q", "k", "v", "dout", *aux_buffers(call), "statistics")
    return _pipeline(call, {"dbias": planned._replace(kernel=kernel)}, given, zeroed=zeroed)


def backward_bias(
    dout: Tensor, inputs: BackwardInputs, statistics: Tensor, side: SideInputs, spec: AttentionSpec
) -> Tensor:
    """Runs the kernel of the bias's gradient on the dout and the statistics of a dq kernel. Returns it in the bias's
    shape."""
    pipeline = plan_bias_gradient(describe_backward(inputs._replace(dout=dout), side, spec, NOTHING_WANTED))
    given = inputs.q, inputs.k, inputs.v, dout, *aux_tensors(side), statistics
    dbias: Tensor = pipeline.run(*pointers(given))[0]
    return dbias


def column_sums(q: Tensor, k: Tensor, lse: Tensor, side: SideInputs, spec: AttentionSpec) -> Tensor:
    """Runs the kernel of column sums. Returns `[batch, heads_q, seq_k]`, packed `[heads_q, total_k]`, float32."""
    if spec.scale <= 0:
        q, spec, _ = positive_scale(q, spec)
    pipeline = _plan_column_sums(describe_call("column_sums", (q, k, k), side, spec))
    sums: Tensor = pipeline.run(*pointers((q, k, k, *aux_tensors(side), lse)))[0]
    return sums


@plan_cache
def _plan_column_sums(call: Call) -> Pipeline:
    planned = kernel_for("column_sums", call)
    given = (*_GIVEN_FORWARD, *aux_buffers(call), "lse")
    return Pipeline(call.device, {"column_sums": planned.kernel}, given, planned.outputs)
