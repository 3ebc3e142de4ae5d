"""The public cross-entropy functions: what a user calls. They check, flatten to rows, build the spec, and hand on."""

from __future__ import annotations

import math
from functools import partial
from typing import TYPE_CHECKING, Literal, NoReturn, TypedDict, overload

import torch
from torch import Tensor

from flashtile.ops.common import dtensor
from flashtile.ops.common.backends import standard_backends
from flashtile.ops.common.other_names import refuse_other_names
from flashtile.ops.cross_entropy import checks
from flashtile.ops.cross_entropy.linear import LinearOperands
from flashtile.ops.cross_entropy.linear_operator import run_linear_cross_entropy
from flashtile.ops.cross_entropy.operator import run_cross_entropy
from flashtile.ops.cross_entropy.sharded import run_sharded

_BACKENDS = standard_backends("cross_entropy")

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from typing_extensions import Unpack

    class LossOptions(TypedDict, total=False):
        """The optional arguments of both functions, for type checkers: `return_z_loss` says what a call returns."""

        label_smoothing: float
        logit_scale: float
        lse_square_scale: float
        ignore_index: int
        reduction: str
        process_group: ProcessGroup | None
        softcap: float | None
        class_weights: Tensor | None
        backend: str

    class LogitsOptions(LossOptions, total=False):
        """Those of `cross_entropy`."""

        inplace_backward: bool


@overload
def cross_entropy(
    logits: Tensor, labels: Tensor, *, return_z_loss: Literal[False] = False, **options: Unpack[LogitsOptions]
) -> Tensor: ...


@overload
def cross_entropy(
    logits: Tensor, labels: Tensor, *, return_z_loss: Literal[True], **options: Unpack[LogitsOptions]
) -> tuple[Tensor, Tensor]: ...


@overload
def cross_entropy(
    logits: Tensor, labels: Tensor, *, return_z_loss: bool = False, **options: Unpack[LogitsOptions]
) -> Tensor | tuple[Tensor, Tensor]: ...


def cross_entropy(
    logits: Tensor,
    labels: Tensor,
    *,
    label_smoothing: float = 0.0,
    logit_scale: float = 1.0,
    lse_square_scale: float = 0.0,
    ignore_index: int = -100,
    reduction: str = "mean",
    inplace_backward: bool = False,
    process_group: ProcessGroup | None = None,
    softcap: float | None = None,
    class_weights: Tensor | None = None,
    return_z_loss: bool = False,
    backend: str = "auto",
    **other_names: NoReturn,
) -> Tensor | tuple[Tensor, Tensor]:
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

    References:
        Szegedy et al., "Rethinking the Inception Architecture for Computer Vision" (2016): label smoothing. Chowdhery
        et al., "PaLM: Scaling Language Modeling with Pathways" (2022): the loss of lse². Shoeybi et al., "Megatron-LM"
        (2019): the vocabulary divided over processes.
    """
    if other_names:
        refuse_other_names(cross_entropy, other_names)
    _BACKENDS.check(backend)
    checks.check_logits(logits)
    checks.check_labels(labels, logits.shape[:-1], logits.device, "logits")
    checks.raise_not_bool(inplace_backward=inplace_backward)
    columns = logits.shape[-1]
    spec = checks.make_spec(
        columns,
        logits.dtype,
        label_smoothing,
        logit_scale,
        lse_square_scale,
        ignore_index,
        reduction,
        return_z_loss,
        process_group,
        softcap,
    )
    if dtensor.present(logits, labels, class_weights):
        tensors = {"logits": (logits, "*v"), "labels": (labels, "*"), "class_weights": (class_weights, ".")}
        return run_sharded(partial(cross_entropy, inplace_backward=inplace_backward, backend=backend), tensors, spec)
    checks.check_label_values(labels, spec)
    if inplace_backward:
        checks.check_inplace(logits)
    weights = checks.resolve_class_weights(class_weights, logits.dtype, logits.device, spec.vocabulary)
    loss, z_loss = run_cross_entropy(_rows(logits), labels.reshape(-1), weights, spec, inplace_backward, backend)
    return _shaped(loss, z_loss, labels, reduction)


@overload
def linear_cross_entropy(
    x: Tensor,
    weight: Tensor,
    labels: Tensor,
    bias: Tensor | None = None,
    *,
    return_z_loss: Literal[False] = False,
    **options: Unpack[LossOptions],
) -> Tensor: ...


@overload
def linear_cross_entropy(
    x: Tensor,
    weight: Tensor,
    labels: Tensor,
    bias: Tensor | None = None,
    *,
    return_z_loss: Literal[True],
    **options: Unpack[LossOptions],
) -> tuple[Tensor, Tensor]: ...


@overload
def linear_cross_entropy(
    x: Tensor,
    weight: Tensor,
    labels: Tensor,
    bias: Tensor | None = None,
    *,
    return_z_loss: bool = False,
    **options: Unpack[LossOptions],
) -> Tensor | tuple[Tensor, Tensor]: ...


def linear_cross_entropy(
    x: Tensor,
    weight: Tensor,
    labels: Tensor,
    bias: Tensor | None = None,
    *,
    label_smoothing: float = 0.0,
    logit_scale: float = 1.0,
    lse_square_scale: float = 0.0,
    ignore_index: int = -100,
    reduction: str = "mean",
    process_group: ProcessGroup | None = None,
    softcap: float | None = None,
    class_weights: Tensor | None = None,
    return_z_loss: bool = False,
    backend: str = "auto",
    **other_names: NoReturn,
) -> Tensor | tuple[Tensor, Tensor]:
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
        label_smoothing: as in `cross_entropy`.
        logit_scale: as in `cross_entropy`.
        lse_square_scale: as in `cross_entropy`.
        ignore_index: as in `cross_entropy`.
        reduction: as in `cross_entropy`.
        process_group: processes that each hold `[vocabulary / size, features]` of the weight, in the order of their
            ranks, and the same x and labels. Each gets the gradients of its part of weight and bias, and the gradient
            of x summed over the processes. Therefore either all processes request gradients or none.
        softcap: as in `cross_entropy`.
        class_weights: as in `cross_entropy`.
        return_z_loss: as in `cross_entropy`.
        backend: as in `cross_entropy`; the matrix products are PyTorch's.

    Returns:
        The loss, float32 (float64 for float64), or (loss, z_loss). Under `torch.autocast` the operands are cast first.

    Raises:
        TypeError, ValueError: as `cross_entropy`.
        RuntimeError: a backward with `create_graph` of a call with `process_group`.
    """
    if other_names:
        refuse_other_names(linear_cross_entropy, other_names)
    _BACKENDS.check(backend)
    checks.check_tensors(x=x, weight=weight)
    x, weight, bias = _autocast(x, weight, bias)
    checks.check_linear(x, weight, bias)
    checks.check_labels(labels, x.shape[:-1], x.device, "x")
    spec = checks.make_spec(
        weight.shape[0],
        x.dtype,
        label_smoothing,
        logit_scale,
        lse_square_scale,
        ignore_index,
        reduction,
        return_z_loss,
        process_group,
        softcap,
    )
    if dtensor.present(x, weight, labels, bias, class_weights):
        tensors = {
            "x": (x, "*."), "weight": (weight, "v."), "labels": (labels, "*"), "bias": (bias, "v"),
            "class_weights": (class_weights, "."),
        }  # fmt: skip
        return run_sharded(partial(linear_cross_entropy, backend=backend), tensors, spec)
    checks.check_label_values(labels, spec)
    weights = checks.resolve_class_weights(class_weights, x.dtype, x.device, spec.vocabulary)
    operands = LinearOperands(x.reshape(labels.numel(), x.shape[-1]), weight, bias, labels.reshape(-1), weights)
    loss, z_loss = run_linear_cross_entropy(operands, spec, backend)
    return _shaped(loss, z_loss, labels, reduction)


def _autocast(x: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
    """The operands as `torch.autocast` gives them to a linear layer; it leaves float64 alone."""
    kind = x.device.type
    if kind not in ("cpu", "cuda") or not torch.is_autocast_enabled(kind) or x.dtype is torch.float64:
        return x, weight, bias
    dtype = torch.get_autocast_dtype(kind)
    return x.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype)


def _shaped(loss: Tensor, z_loss: Tensor | None, labels: Tensor, reduction: str) -> Tensor | tuple[Tensor, Tensor]:
    """The results, in the shape of the labels where there is one for each."""
    if reduction == "none" and labels.dim() != 1:
        loss, z_loss = loss.view(labels.shape), None if z_loss is None else z_loss.view(labels.shape)
    return loss if z_loss is None else (loss, z_loss)


def _rows(tensor: Tensor) -> Tensor:
    """`[..., columns]` as a matrix of contiguous rows."""
    matrix = tensor if tensor.dim() == 2 else tensor.reshape(math.prod(tensor.shape[:-1]), tensor.shape[-1])
    return matrix if matrix.stride(1) == 1 else matrix.contiguous()
