"""The public cross-entropy functions, which check a call, and the operators of `cross_entropy`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import Tensor

from flashtile.ops.common import checks, dispatch, dtensor
from flashtile.ops.common.backends import standard_backends
from flashtile.ops.common.batch_invariance import MODE
from flashtile.ops.common.memory import check_own_numbers
from flashtile.ops.common.operators import Differentiable, OnBackend, operator
from flashtile.ops.common.other_names import refuse_other_names
from flashtile.ops.common.repeated import Launch, call_table
from flashtile.ops.common.rows import as_rows, compute_dtype
from flashtile.ops.cross_entropy import linear
from flashtile.ops.cross_entropy import spec as reference
from flashtile.ops.cross_entropy.spec import CrossEntropySpec, LossInputs, LossUpstream, Results

_BACKENDS = standard_backends("cross_entropy")
_CALLS = call_table()

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


def cross_entropy(
    logits: Tensor, labels: Tensor, *, label_smoothing: float = 0.0, logit_scale: float = 1.0,
    lse_square_scale: float = 0.0, ignore_index: int = -100, reduction: str = "mean", inplace_backward: bool = False,
    process_group: ProcessGroup | None = None, softcap: float | None = None, class_weights: Tensor | None = None,
    return_z_loss: bool = False, backend: str = "auto", **other_names: NoReturn,
) -> Tensor | tuple[Tensor, Tensor]:  # fmt: skip
    """Cross-entropy of logits against labels. Reads the logits once in the forward and once in the backward.

    With `s = logit_scale · logits` and `lse = ln Σ exp(s)` of a row, its label y, and class weights w, or 1::

        loss = (1 - label_smoothing) · w[y] · (lse - s[y]) + label_smoothing / vocabulary · Σ w · (lse - s)
             + lse_square_scale · lse²

    Differentiable in the logits. The arithmetic is float32 (float64 for float64). The only tensor of the size of the
    logits that is allocated is their gradient.

    Args:
        logits: `[..., vocabulary]`; float16, bfloat16, float32, or float64 (CPU and reference only). They are copied
            unless the last dimension is contiguous and all rows have the same distance from one another.
        labels: `[...]`, int64 or int32, from 0 to vocabulary - 1, or `ignore_index`. Any other number makes the loss
            and the gradient of its row NaN. With the environment variable `FLASHTILE_CHECK_VALUES=1`, read at import,
            it raises instead, which synchronises on a GPU; not in a compiled graph.
        label_smoothing: share of the target, from 0 to 1, that is spread evenly over the vocabulary.
        logit_scale: factor on the logits.
        lse_square_scale: factor on lse², which keeps the log-sum-exp near 0 ("z-loss").
        ignore_index: label of rows that do not count: their loss and gradient are 0.
        reduction: "mean" over the rows that count (NaN if there are none), "sum", or "none" for `[...]`. With class
            weights the mean is the sum over the sum of the weights of the labels that count, as PyTorch's.
        inplace_backward: the backward writes the gradient into the memory of the logits, and so destroys them. There
            can then be only one backward, and no second derivative. A compiled graph plans memory by itself.
        process_group: processes that each hold `[..., vocabulary / size]`, in the order of their ranks. The labels
            refer to the whole vocabulary and are the same everywhere. Each process gets the loss of whole rows, and the
            gradient of its own columns.
        softcap: bound of the scores: `s = softcap · tanh(logit_scale · logits / softcap)`, as Gemma 2 caps its final
            logits; None or 0 for no cap.
        class_weights: `[vocabulary]`, of the whole vocabulary also with process_group, in the logits' dtype or float32
            (float64 for float64): the `weight` of PyTorch's cross_entropy. No gradient flows to it.
        return_z_loss: also return the part of lse² in the loss, reduced in the same way. It is for monitoring and not
            differentiable.
        backend: "auto" chooses by device; "triton", "cpu" or "reference" run that backend or raise.

    Returns:
        The loss, float32 (float64 for float64), or (loss, z_loss).

    Raises:
        TypeError: a dtype or an argument's type is wrong.
        ValueError: a shape, a device or a value is wrong, or the named backend cannot serve the call.
        RuntimeError: with `inplace_backward`, a second backward or one with `create_graph`; with `process_group`, a
            backward with `create_graph`.

    Reference:
        Szegedy et al., "Rethinking the Inception Architecture for Computer Vision" (2016): label smoothing. Chowdhery
        et al., "PaLM: Scaling Language Modeling with Pathways" (2022): the loss of lse². Shoeybi et al., "Megatron-LM"
        (2019): the vocabulary divided over processes.
    """
    if other_names:
        refuse_other_names(cross_entropy, other_names)
    given = LossInputs(logits, labels, class_weights)
    options = (
        label_smoothing, logit_scale, lse_square_scale, ignore_index, reduction, process_group, softcap, return_z_loss
    )  # fmt: skip
    scalars = (*options, backend, MODE.enabled)
    repeated = None if inplace_backward is not False else _CALLS.run(given, scalars)
    if repeated is not None:
        return repeated
    _BACKENDS.check(backend)
    checks.check_input("logits", logits, "(..., vocabulary)", "unsqueeze them")
    linear.check_vocabulary("logits", "last dimension", logits.shape[-1])
    _check_labels(labels, logits.shape[:-1], logits.device, "logits")
    checks.raise_not_bool(inplace_backward=inplace_backward)
    spec = reference.make_spec(logits.shape[-1], logits.dtype, options)
    if dtensor.present(logits, labels, class_weights):
        tensors = {"logits": (logits, "*v"), "labels": (labels, "*"), "class_weights": (class_weights, ".")}
        return _run_sharded(partial(cross_entropy, inplace_backward=inplace_backward, backend=backend), tensors, spec)
    _check_label_values(labels, spec)
    if inplace_backward:
        _check_inplace(logits)
    weights = reference.resolve_class_weights(class_weights, logits.dtype, logits.device, spec.vocabulary)
    matrix = as_rows(logits)
    matrix = matrix if matrix.stride(1) == 1 else matrix.contiguous()
    apart = MODE.enabled and (matrix.device.type != "cpu" or backend == "triton") and not _begin_at_vectors(matrix)
    if apart:
        matrix = torch.nn.functional.pad(matrix, (0, -matrix.shape[1] % 16))[:, : matrix.shape[1]]
    inputs = LossInputs(matrix, labels.reshape(-1), weights)
    if dispatch.transformed():
        linear.refuse_transformed(spec, inplace_backward)
    elif not (apart or inplace_backward or checks.CHECK_VALUES) and (reduction != "none" or labels.dim() == 1):
        again = _loss.repeat(given, inputs, spec, backend)
        if again is not None:
            run = again if return_z_loss else lambda present: again(present)[0]
            if kept := _CALLS.keep_call(given, scalars, run):
                return run(kept)
    found = (_loss_inplace if inplace_backward else _loss)(inputs, spec, backend)
    return _shaped(found.loss, found.z_loss, labels, reduction)


def linear_cross_entropy(
    x: Tensor, weight: Tensor, labels: Tensor, bias: Tensor | None = None, *, label_smoothing: float = 0.0,
    logit_scale: float = 1.0, lse_square_scale: float = 0.0, ignore_index: int = -100, reduction: str = "mean",
    process_group: ProcessGroup | None = None, softcap: float | None = None, class_weights: Tensor | None = None,
    return_z_loss: bool = False, backend: str = "auto", **other_names: NoReturn,
) -> Tensor | tuple[Tensor, Tensor]:  # fmt: skip
    """`cross_entropy(x · weightᵀ + bias, labels)` without the full logits: computes those of some tokens at a time.

    Replaces the last linear layer and its loss, where the logits would be the largest tensor of a training step.
    Differentiable in x, weight and bias. With a reduced loss the forward also computes the gradients, and the backward
    multiplies them by the incoming gradient; if that is 1, a GPU skips this step. These are three matrix products in
    all. With `reduction="none"` the backward recomputes the logits. A second backward through the same graph does so
    too. A second derivative uses the reference, which holds all logits.

    Args:
        x: `[..., features]`; float16, bfloat16, float32, or float64 (CPU and reference only).
        weight: `[vocabulary, features]`, in x's dtype.
        labels: `[...]`, as in `cross_entropy`.
        bias: `[vocabulary]` in x's dtype, or None.
        process_group: processes that each hold `[vocabulary / size, features]` of the weight, in the order of their
            ranks, and the same x and labels. Each gets the gradients of its part of weight and bias, and the gradient
            of x summed over the processes. Therefore either all processes request gradients or none.
        backend: as in `cross_entropy`; the matrix products are PyTorch's.

    The other arguments are those of `cross_entropy`.

    Returns:
        The loss, float32 (float64 for float64), or (loss, z_loss). Under `torch.autocast` the operands are cast first.

    Raises:
        TypeError, ValueError: as `cross_entropy`.
        RuntimeError: a backward with `create_graph` of a call with `process_group`.

    Reference:
        As `cross_entropy`. In chunks of tokens: Hsu et al., "Liger Kernel: Efficient Triton Kernels for LLM Training"
        (2024).
    """
    if other_names:
        refuse_other_names(linear_cross_entropy, other_names)
    _BACKENDS.check(backend)
    checks.check_tensors(x=x, weight=weight)
    x, weight, bias = dispatch.autocast((x, weight, bias))
    linear.check_linear(x, weight, bias)
    _check_labels(labels, x.shape[:-1], x.device, "x")
    options = (
        label_smoothing, logit_scale, lse_square_scale, ignore_index, reduction, process_group, softcap, return_z_loss
    )  # fmt: skip
    spec = reference.make_spec(weight.shape[0], x.dtype, options)
    if dtensor.present(x, weight, labels, bias, class_weights):
        tensors = {
            "x": (x, "*."), "weight": (weight, "v."), "labels": (labels, "*"), "bias": (bias, "v"),
            "class_weights": (class_weights, "."),
        }  # fmt: skip
        return _run_sharded(partial(linear_cross_entropy, backend=backend), tensors, spec)
    _check_label_values(labels, spec)
    weights = reference.resolve_class_weights(class_weights, x.dtype, x.device, spec.vocabulary)
    operands = linear.LinearOperands(x.reshape(labels.numel(), x.shape[-1]), weight, bias, labels.reshape(-1), weights)
    loss, z_loss = linear.run_linear_cross_entropy(operands, spec, backend)
    return _shaped(loss, z_loss, labels, reduction)


def _begin_at_vectors(rows: Tensor) -> bool:
    """Whether all rows begin at multiples of 16 bytes. A kernel reads whole vectors, and where in one a row begins
    decides in which order its numbers are added."""
    stride = rows.stride(0) * rows.element_size()
    return stride % 16 == 0 and (not dispatch.unobserved(rows) or rows.data_ptr() % 16 == 0)


def _shaped(loss: Tensor, z_loss: Tensor | None, labels: Tensor, reduction: str) -> Tensor | tuple[Tensor, Tensor]:
    """The results, in the shape of the labels where there is one for each."""
    if reduction == "none" and labels.dim() != 1:
        loss, z_loss = loss.view(labels.shape), None if z_loss is None else z_loss.view(labels.shape)
    return loss if z_loss is None else (loss, z_loss)


def _run_sharded(
    function: Callable[..., Any], operands: Mapping[str, tuple[Any, str]], spec: CrossEntropySpec
) -> Tensor | tuple[Tensor, Tensor]:
    """A loss with DTensors. `function`: a public function, without the options that `spec` says."""
    if spec.group:
        raise ValueError("process_group: expected None with DTensors, whose placements say it, got one; leave it out")
    options = {
        "label_smoothing": spec.label_smoothing, "logit_scale": spec.logit_scale, "ignore_index": spec.ignore_index,
        "lse_square_scale": spec.lse_square_scale, "softcap": spec.softcap, "return_z_loss": spec.z_loss,
    }  # fmt: skip

    def call(division: dtensor.Division, *parts: Any) -> tuple[Any, ...]:
        given = dict(zip(operands, parts))
        # Rows of shards count differently many, so the mean is taken at the end.
        later = division.mesh is not None and spec.reduction == "mean"
        reduction = "sum" if later else spec.reduction
        found = function(**given, **options, reduction=reduction, process_group=division.group("v"))
        losses = found if isinstance(found, tuple) else (found,)
        if not later:
            return losses
        labels, dtype = given["labels"], losses[0].dtype
        weights = reference.resolve_class_weights(given["class_weights"], dtype, labels.device, spec.vocabulary)
        return *losses, reference.weight_sum(labels, weights, spec).to(dtype)

    of_rows = "*" if spec.reduction == "none" else ""
    losses = dtensor.call(call, operands, of_rows, ("weight", "bias", "class_weights"), complete="v")
    if spec.reduction == "mean" and dtensor.present(losses[0]):
        *losses, count = (dtensor.replicated(each) for each in losses)
        losses = [each / count for each in losses]
    return tuple(losses) if spec.z_loss else losses[0]


def _check_labels(labels: Tensor, shape: tuple[int, ...], device: torch.device, of: str) -> None:
    """Checks type, shape and device of the labels, not their values."""
    checks.check_tensors(labels=labels)
    if labels.dtype not in checks.INDEX_DTYPES:
        raise TypeError(f"labels: expected dtype int64 or int32, got {labels.dtype}; they are class numbers, cast them")
    checks.check_shape("labels", labels, shape, f"that of {of} without its last dimension")
    checks.check_device("labels", labels, device, of)


def _check_label_values(labels: Tensor, spec: CrossEntropySpec) -> None:
    """Checks that each label is one, if `FLASHTILE_CHECK_VALUES=1` asks for it. A compiled graph cannot."""
    if torch.compiler.is_compiling() or not checks.read_on_request(labels):
        return
    wrong = (labels != spec.ignore_index) & ((labels < 0) | (labels >= spec.vocabulary))
    if wrong.any():
        places = wrong.nonzero()
        first = tuple(places[0].tolist())
        raise ValueError(
            f"labels: expected numbers from 0 to {spec.vocabulary - 1}, or ignore_index={spec.ignore_index}, got "
            f"{labels[first].item()} at {first} and {len(places) - 1} more that are neither"
        )


def _check_inplace(logits: Tensor) -> None:
    """Checks that the gradient of logits `[..., vocabulary]` can be written to their memory."""
    check_own_numbers("logits", logits, "use inplace_backward=False")
    try:
        rows = logits.view(-1, logits.shape[-1])
    except RuntimeError:
        rows = None
    apart = rows is not None and (rows.shape[0] <= 1 or rows.stride(0) >= rows.shape[1])
    if not apart or logits.stride(-1) != 1:
        raise ValueError(
            "inplace_backward: expected logits whose rows lie at one distance, contiguous in themselves, got shape "
            f"{tuple(logits.shape)} with strides {logits.stride()}, which a call has to copy; pass contiguous logits "
            "(shift the labels instead of cutting off a position), or use inplace_backward=False"
        )


# --- operators and autograd ------------------------------------------------------------------------------------------


class _OnGroup(OnBackend):
    """The forward of rows whose columns may be spread over processes, which then communicate."""

    def __call__(self, inputs: LossInputs, spec: CrossEntropySpec, backend: str) -> Results:
        return reference.forward_on_group(self.module(inputs, spec, backend), _contiguous_labels(inputs), spec)

    def prepare(self, inputs: LossInputs, spec: CrossEntropySpec, backend: str) -> Launch | None:
        return None if spec.group else super().prepare(inputs, spec, backend)


def _contiguous_labels(given: Any) -> Any:
    """Kernels read labels as a vector without gaps."""
    return given if given.labels.is_contiguous() else given._replace(labels=given.labels.contiguous())


def _decomposed(inputs: LossInputs, spec: CrossEntropySpec) -> Results:
    if spec.group:
        raise ValueError("process_group: expected None in a graph of PyTorch's operations, got one; export without it")
    return reference.forward(inputs, spec)


def _save(inputs: LossInputs, results: Results, spec: CrossEntropySpec, ctx: Any) -> Any:
    ctx.spent = False
    return (results.scale, *inputs, results.normaliser), (spec,)


def _complete(given: LossUpstream, ctx: Any, spec: CrossEntropySpec, inplace: bool = False) -> LossUpstream:
    """Refuses what has no second derivative, and makes zeros of a gradient that is not there."""
    if torch.is_grad_enabled() and not torch.compiler.is_compiling():
        linear.refuse_second_order(spec, inplace)
    if given.dloss is None:
        shape = given.labels.shape if spec.reduction == "none" else ()
        given = given._replace(dloss=given.normaliser.new_zeros(shape))
    return given


def _check_unspent(ctx: Any) -> None:
    if ctx.spent:
        raise RuntimeError(
            "inplace_backward: expected one backward, got a second one: the first has written over the logits; "
            "use inplace_backward=False"
        )


def _spend(given: LossUpstream, ctx: Any, spec: CrossEntropySpec) -> LossUpstream:
    given = _complete(given, ctx, spec, True)
    ctx.spent = not torch.compiler.is_compiling() and not dispatch.batched(given.dloss)
    return given._replace(logits=given.logits.detach())


def _on_backend(**more: Any) -> OnBackend:
    """What runs the backward."""
    return OnBackend(
        _BACKENDS, "backward", dtype=lambda given, spec: given.logits.dtype, arrange=_contiguous_labels, **more
    )


_forward = operator(
    "cross_entropy_forward",
    LossInputs,
    (CrossEntropySpec,),
    Results,
    run=_OnGroup(_BACKENDS, "forward", arrange=_contiguous_labels),
    fake=lambda inputs, spec: [
        inputs.logits.new_empty(shape, dtype=compute_dtype(inputs.logits.dtype))
        for shape in reference.result_shapes(inputs.logits.shape[0], spec)
    ],
    present=lambda inputs, spec: reference.results_present(spec),
    decomposition=_decomposed,
)
_backward = operator(
    "cross_entropy_backward",
    LossUpstream,
    (CrossEntropySpec,),
    Tensor,
    run=_on_backend(),
    fake=lambda given, spec: reference.empty_gradient(given.logits),
)  # fmt: skip
_inplace_backward = operator(
    "cross_entropy_backward_",
    LossUpstream,
    (CrossEntropySpec,),
    None,
    run=_on_backend(written="logits"),
    writes="logits",
)
_formulas = SimpleNamespace(forward=reference.forward, backward=reference.differentiable_backward)
_loss = Differentiable(_forward, _backward, _formulas, _save, constants=1, complete=_complete)
_loss_inplace = Differentiable(
    _forward, _inplace_backward, _formulas, _save, constants=1, before=_check_unspent, complete=_spend
)
