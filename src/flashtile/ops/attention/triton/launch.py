"""Host side of the portable kernels: their pipelines. The backend module that `select` names."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from flashtile._backends.devices import interpreting
from flashtile._backends.launch import plan_cache
from flashtile._backends.pipeline import ADDRESS, Pipeline
from flashtile.ops.attention.call import Call, describe_backward, describe_call
from flashtile.ops.attention.gpu.bias_gradient import attention_dbias_kernel
from flashtile.ops.attention.gpu.parameters import (
    aux_buffers,
    aux_tensors,
    contiguous_on_16_bytes,
    positive_scale,
)
from flashtile.ops.attention.gpu.plan import PortableKernel, plan_kernel, uses_fp8_products
from flashtile.ops.attention.gpu.reductions import BackwardPlan, captured_sums, sum_layouts
from flashtile.ops.attention.gpu.tile_configs import KernelName, phase_kernels
from flashtile.ops.attention.spec import (
    FP8,
    AttentionSpec,
    Aux,
    AuxForm,
    BackwardInputs,
    Gradients,
    RunBackward,
    SideInputs,
    Wanted,
)
from flashtile.ops.attention.triton.backward import (
    attention_dkdv_kernel,
    attention_dq_kernel,
    attention_short_backward_kernel,
)
from flashtile.ops.attention.triton.forward import attention_column_sums_kernel, attention_forward_kernel

#: The portable kernels.
KERNELS: dict[KernelName, Any] = {
    "forward": attention_forward_kernel,
    "dq": attention_dq_kernel,
    "short_backward": attention_short_backward_kernel,
    "dkdv": attention_dkdv_kernel,
    "dbias": attention_dbias_kernel,
    "column_sums": attention_column_sums_kernel,
}


def forward(q: Tensor, k: Tensor, v: Tensor, side: SideInputs, spec: AttentionSpec) -> tuple[Tensor, ...]:
    """Runs the forward kernel: (out, lse), or (out, lse, max_scores)."""
    if spec.scale <= 0:
        q, spec, _ = positive_scale(q, spec)
    call = describe_call("forward", (q, k, v), side, spec)
    pipeline = _plan_forward(call)
    if q.dtype is FP8:
        v = v.view(torch.uint8)
        if not uses_fp8_products(call):
            q, k = q.view(torch.uint8), k.view(torch.uint8)
    return _forward_runner(pipeline)(q, k, v, aux_tensors(side))


def prepare_forward(
    q: Tensor, k: Tensor, v: Tensor, side: SideInputs, spec: AttentionSpec
) -> Callable[[Tensor, Tensor, Tensor, Aux], tuple[Tensor, ...]] | None:
    """`forward` of all 16-bit calls that look like this one, from q, k, v and the tensors beside them; or None."""
    if not _preparable(q, spec):
        return None
    pipeline = _plan_forward(describe_call("forward", (q, k, v), side, spec))
    if not pipeline.launches:
        return None
    return _forward_runner(pipeline)


def _forward_runner(pipeline: Pipeline) -> Callable[[Tensor, Tensor, Tensor, Aux], tuple[Tensor, ...]]:
    """The function that enqueues the kernel."""
    run_kernels = pipeline.run

    def run(q: Tensor, k: Tensor, v: Tensor, aux: Aux) -> tuple[Tensor, ...]:
        return (*run_kernels(ADDRESS(q), ADDRESS(k), ADDRESS(v), *map(ADDRESS, aux)),)

    return run


def _planned(call: Call) -> dict[KernelName, PortableKernel]:
    """The kernels of a phase, by name."""
    return {name: plan_kernel(KERNELS[name], name, tiles, call) for name, tiles in phase_kernels(call).items()}


@plan_cache
def _plan_forward(call: Call) -> Pipeline:
    """The pipeline of a forward, or of column sums, which read lse too."""
    (planned,) = _planned(call).values()
    given = "q", "k", "v", *aux_buffers(call), *(("lse",) if call.phase == "column_sums" else ())
    return Pipeline(call.device, planned.kernels, given, planned.outputs)


def backward(inputs: BackwardInputs, side: SideInputs, spec: AttentionSpec, wanted: Wanted) -> Gradients:
    """Runs the dq and dk/dv kernels, or one for all, and that of a bias whose gradient is wanted. Deterministic."""
    dout, dlse, q, k, v, out, lse = inputs
    sign = 1
    if spec.scale <= 0:
        q, spec, sign = positive_scale(q, spec)
    out, lse, dlse = contiguous_on_16_bytes(out), lse.contiguous(), None if dlse is None else dlse.contiguous()
    plan = plan_backward(describe_backward(BackwardInputs(dout, dlse, q, k, v, out, lse), side, spec, wanted))
    grads = plan.runner(AuxForm.from_side(side), wanted)(dout, dlse, (q, k, v, out, lse, *aux_tensors(side)))
    return grads if sign == 1 else grads._replace(q=grads.q.mul_(sign))


def prepare_backward(
    inputs: BackwardInputs, side: SideInputs, spec: AttentionSpec, wanted: Wanted
) -> RunBackward | None:
    """`backward` of all 16-bit calls that look like this one; or None."""
    if not _preparable(inputs.q, spec):
        return None
    return plan_backward(describe_backward(inputs, side, spec, wanted)).runner(AuxForm.from_side(side), wanted)


def _preparable(q: Tensor, spec: AttentionSpec) -> bool:
    """Whether plans depend on how tensors lie alone, kernels read q itself, and launches take addresses."""
    return q.dtype.itemsize == 2 and spec.scale > 0 and not interpreting()


@plan_cache
def plan_backward(call: Call) -> BackwardPlan:
    """Everything that can be decided before the tensors' contents are known."""
    planned = _planned(call)
    queries = next(iter(planned.values()))
    kernels = {name: of for each in planned.values() for name, of in each.kernels.items()}
    written = {name: of for each in planned.values() for name, of in each.outputs.items()}
    slots = (queries.kernel.programs,) if queries.waves else ()
    outputs: dict[str, Any] = {**sum_layouts(call, call.rows_q), **captured_sums(call, slots)}
    given = ("q", "k", "v", "out", "lse", *aux_buffers(call), "dout", "dlse")
    zeroed = {*outputs, *(name for of in planned.values() if not of.kernel.programs for name in of.outputs)}
    repeated = {"dq": "wave"} if queries.waves else {}
    outputs = {name: written[name] for name in ("dq", "dk", "dv")} | written | outputs
    pipeline = Pipeline(call.device, kernels, (*given, *repeated.values()), outputs, zeroed=zeroed, repeated=repeated)
    waves = (queries.kernel.programs, queries.waves) if queries.waves else None
    return BackwardPlan(pipeline, own_delta=call.may_hide_rows and call.has_dlse, waves=waves)


def column_sums(q: Tensor, k: Tensor, lse: Tensor, side: SideInputs, spec: AttentionSpec) -> Tensor:
    """Runs the kernel of column sums. Returns `[batch, heads_q, seq_k]`, packed `[heads_q, total_k]`, float32."""
    if spec.scale <= 0:
        q, spec, _ = positive_scale(q, spec)
    pipeline = _plan_forward(describe_call("column_sums", (q, k, k), side, spec))
    return pipeline.on((q, k, k, *aux_tensors(side), lse))[0]
