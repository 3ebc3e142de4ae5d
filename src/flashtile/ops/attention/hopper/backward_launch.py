"""Host side of the Hopper backward: its pipeline, and the gradients of side inputs that follow from what it returns."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from flashtile._backends.alignment import aligned
from flashtile._backends.allocate import Layout, contiguous
from flashtile._backends.launch import Plan, plan_cache
from flashtile._backends.pipeline import Pipeline
from flashtile.ops.attention.call import Call, describe_backward
from flashtile.ops.attention.gpu.parameters import (
    aux_buffers,
    aux_tensors,
    contiguous_on_16_bytes,
    positive_scale,
)
from flashtile.ops.attention.gpu.reductions import (
    bias_sum_kernel,
    gradients_without_keys,
    learned_gradients,
    shares_kernel,
    sum_layouts,
    without_shares,
)
from flashtile.ops.attention.hopper.backward_configs import padded_strides, serves_bias_gradient
from flashtile.ops.attention.hopper.backward_kernels import (
    PassKernels,
    begin_kernel,
    bias_gradient_kernel,
    cut_bias_work,
    end_kernel,
    gradient_layouts,
    lse_unit,
    main_kernel,
    scratch_shapes,
)
from flashtile.ops.attention.hopper.configs import moves_by_tma
from flashtile.ops.attention.hopper.parameters import by_whole_rows, ends_by_rows, with_aligned_lists
from flashtile.ops.attention.hopper.schedule import BackwardSchedule
from flashtile.ops.attention.hopper.separate_configs import has_separate_kernels
from flashtile.ops.attention.hopper.separate_launch import separate_kernels
from flashtile.ops.attention.spec import AttentionSpec, Aux, AuxForm, BackwardInputs, Gradients, SideInputs, Wanted
from flashtile.ops.attention.triton.launch import backward_bias, plan_bias_gradient

#: The buffers that a run is given, before the side inputs.
_GIVEN = ("q", "k", "v", "out", "dout", "lse", "dlse")


class BackwardPlan(NamedTuple):
    """The launches of a backward.

    Attributes:
        pipeline: its first outputs are dq, dk and dv.
        more: its other outputs from which gradients of side inputs follow: "dbias", "row_statistics" and those of
            `sum_layouts`.
        portable_bias: the launches of the portable kernel that computes the gradient of a bias from row_statistics.
    """

    pipeline: Pipeline
    more: tuple[str, ...] = ()
    portable_bias: tuple[Plan, ...] = ()

    @property
    def launches(self) -> tuple[Plan, ...]:
        return self.pipeline.launches + self.portable_bias

    def runner(self, form: AuxForm, spec: AttentionSpec, wanted: Wanted) -> Callable[[BackwardInputs, Aux], Gradients]:
        """The function that enqueues the kernels. Gradients that are not wanted are None."""
        run_kernels, more, captured_gradients = self.pipeline.run, self.more, (None,) * len(wanted.captured)

        def run(inputs: BackwardInputs, aux: Aux) -> Gradients:
            dout, dlse, q, k, v, out, lse = inputs
            given = [tensor.data_ptr() for tensor in (q, k, v, out, dout, lse)]
            made = run_kernels(*given, 0 if dlse is None else dlse.data_ptr(), *[tensor.data_ptr() for tensor in aux])
            if not more:
                return Gradients(made[0], made[1], made[2], captured=captured_gradients)
            learned = self._side_gradients(made, inputs, form.side(aux), spec, wanted)
            return Gradients(made[0], made[1], made[2], **learned, captured=captured_gradients)

        return run

    def _side_gradients(
        self, made: list[Tensor], inputs: BackwardInputs, side: SideInputs, spec: AttentionSpec, wanted: Wanted
    ) -> dict[str, Tensor | None]:
        """The gradients of side inputs, by the fields of `Gradients`. `made`: as of `Pipeline.run`."""
        found = dict(zip(self.pipeline.outputs, made))
        if "row_statistics" in found:
            dout, masked = inputs.dout, self.pipeline.scratch_part(made, "masked_dout")
            read = dout if masked is None else masked.view(dout.dtype)[: dout.numel()].view(dout.shape)
            found["dbias"] = backward_bias(read, inputs, found["row_statistics"], side, spec)
        return learned_gradients(found, side, wanted, side.cu_seqlens_k)


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
    of dq, and where walks meet dk and dv, are added up in no fixed order unless `spec.deterministic`. They serve all of
    `wanted` but tensors of score functions (`backend.unsupported_reason`)."""
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
    plan = plan_backward(describe_backward(inputs, side, spec, wanted))
    grads = plan.runner(AuxForm.from_side(side), spec, wanted)(inputs, aux_tensors(side))
    return grads if sign == 1 else grads._replace(q=grads.q.mul_(sign))


def prepare_backward(
    inputs: BackwardInputs, side: SideInputs, spec: AttentionSpec, wanted: Wanted
) -> Callable[[BackwardInputs, Aux], Gradients] | None:
    """`backward` of all 16-bit calls that look like this one, from their tensors; or None. Whether it serves float32
    depends on PyTorch's TF32 mode, too."""
    dout, _, q, k, v, *_ = inputs
    if q.dtype is torch.float32 or spec.scale <= 0 or not (q.numel() and k.numel() and v.numel() and aligned(dout)):
        return None
    if not ends_by_rows(k, v, side):
        return None
    plan = plan_backward(describe_backward(inputs, side, spec, wanted))
    return plan.runner(AuxForm.from_side(side), spec, wanted)


def backward_plans(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, side: SideInputs, spec: AttentionSpec, wanted: Wanted
) -> tuple[Plan, ...]:
    """The launches of `backward` without dlse; `dout` needs no memory."""
    if spec.scale <= 0 or not (q.numel() and k.numel() and v.numel()):
        return ()
    inputs = BackwardInputs(dout, None, q, k, v, dout, dout)
    return plan_backward(describe_backward(inputs, side, spec, wanted)).launches


def _gradients_without_keys(
    dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, lse: Tensor, side: SideInputs, wanted: Wanted
) -> Gradients:
    """The gradients of a call without queries, keys or columns."""
    dq, dk, dv = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
    learned = gradients_without_keys(dlse, lse, side, wanted)
    return Gradients(dq, dk, dv, **learned, captured=(None,) * len(side.captured))


def _readable(tensor: Tensor) -> Tensor:
    """A gradient comes from whatever followed; where TMA cannot read it as it lies, a copy is read."""
    return tensor if aligned(tensor) else tensor.clone(memory_format=torch.contiguous_format)


@plan_cache
def plan_backward(call: Call) -> BackwardPlan:
    """Everything that can be decided before the tensors' contents are known. Wide heads, and float32, have a kernel for
    each gradient."""
    call.check_sizes()
    if has_separate_kernels(call.dtype, *call.head_dims):
        return _make_plan(call, separate_kernels(call))
    schedule = BackwardSchedule.from_call(call)
    config, bias, wanted = schedule.config, call.aux.bias, call.wanted.bias and call.aux.bias is not None
    sums_bias = wanted and serves_bias_gradient(config, moves_by_tma(bias, call.dtype))
    portable = wanted and not (sums_bias or config.bias_stored)
    gradients = gradient_layouts(call, schedule.shares)
    begin = begin_kernel(
        call, config.block_m, schedule.query_tiles,
        unit=lse_unit(call, schedule), schedule=schedule, row_statistics=portable,
    )  # fmt: skip
    kernels = {"begin": begin, "main": main_kernel(call, schedule)}
    if schedule.adds_up:
        kernels["end"] = end_kernel(call, schedule)
    dbias = parts = None
    if config.bias_stored and bias is not None:
        dbias = Layout(bias.shape, padded_strides(bias.shape), bias.dtype)
    elif sums_bias and bias is not None:
        work = cut_bias_work(call)
        kernels["bias"] = bias_gradient_kernel(call, schedule, work)
        dbias = contiguous(bias.shape, bias.dtype)
        if work.parts > 1:
            kernels["bias_sum"] = bias_sum_kernel(work.parts, bias)
            parts = contiguous((work.parts, *bias.shape), torch.float32)
    # The main kernel stores the gradients of the scores that it computes.
    all_stored = not (call.spec.banded or call.aux.key_lengths is not None or call.spec.block_shape is not None)
    zeroed = ("slope_sums",) if all_stored or not config.bias_stored else ("slope_sums", "dbias")
    sizes = {name: math.prod(shape) for name, shape in scratch_shapes(call, schedule).items()}
    if config.statistics_multiplied:
        sizes["statistics"] //= 2  # in 16 bits
    sizes |= {
        "counter": 1 + (call.lines if schedule.loops.SHARES_PROGRESS else 0),
        "semaphores": begin.programs if schedule.is_ordered(call) else 0,
        "order": 2 * call.batch + 3 if call.packed else 0,
    }
    row_statistics = contiguous((*call.lse_shape, 4), torch.float32) if portable else None
    described = PassKernels(
        kernels,
        gradients,
        schedule.shares,
        scratch=sizes,
        more={"bias_parts": parts},
        dbias=dbias,
        row_statistics=row_statistics,
        zeroed=zeroed,
    )
    plan = _make_plan(call, described)
    return plan._replace(portable_bias=plan_bias_gradient(call).launches if portable else ())


def _make_plan(call: Call, described: PassKernels) -> BackwardPlan:
    """The plan of some kernels, and of that which adds up the shares of dk and dv."""
    kernels, gradients, shares, scratch, more, dbias, row_statistics, zeroed = described
    outputs = dict(gradients)
    if shares > 1:
        kernels = {**kernels, "shares": shares_kernel(gradients["dk"], gradients["dv"], shares)}
        more = {**more, "dk_shares": gradients["dk"], "dv_shares": gradients["dv"]}
        outputs |= {name: without_shares(gradients[name], shares) for name in ("dk", "dv")}
    # head_dim_v is a multiple of 8 (`backend.unsupported_reason`): TMA can read the masked dout.
    masked_dout = math.prod(call.out_shape) * call.dtype.itemsize // 4 if call.may_hide_rows else 0
    from_sides = {
        "dbias": dbias,
        **sum_layouts(call, call.rows_k, kernels["begin"].programs),
        "row_statistics": row_statistics,
    }
    pipeline = Pipeline(
        call.device,
        kernels,
        (*_GIVEN, *aux_buffers(call)),
        {**outputs, **from_sides, **more},
        {"sums": 0, "statistics": 0, "masked_dout": masked_dout, "counter": 0, "semaphores": 0, "order": 0, **scratch},
        zeroed,
    )
    return BackwardPlan(pipeline, tuple(name for name, layout in from_sides.items() if layout is not None))
