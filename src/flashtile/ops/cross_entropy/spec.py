"""The meaning of a cross-entropy call: its scalars and tensors, the formulas from what was read of rows to losses and
gradients, and the eager reference, written to be read and not to be fast.

For a row of logits `[vocabulary]` and its label y, in float32 (float64 for float64)::

    s    = logit_scale · logits, or with a soft cap softcap · tanh(logit_scale · logits / softcap)
    lse  = ln Σ exp(s)
    z    = lse_square_scale · lse²
    loss = a · w[y] · (lse - s[y]) + b · Σ w · (lse - s) + z
    a    = 1 - label_smoothing,   b = label_smoothing / vocabulary

with class weights w, which are 1 if there are none, and with the gradient g of the loss from above::

    dlogits = g · logit_scale · (exp(s - lse) · (a · w[y] + b · Σ w + 2 · lse_square_scale · lse)
                                 - b · w - a · w[y] · [column = y]),   with a soft cap times 1 - (s / softcap)²

Of a row, lse is not kept but two numbers, its normaliser. A rounded lse is as wrong as an offset that all logits share
is large, and softmax and loss with it::

    pivot   = the logit of the largest s
    exp_sum = Σ exp(logit_scale · (logits - pivot))               lse = logit_scale · pivot + ln exp_sum

Losses and gradients are made of differences from the pivot, in which the offset is gone. With a soft cap, pivots and
differences are those of s, whose size the cap bounds, and the factor on them is 1. If the label is `ignore_index`,
loss and gradient are 0, whatever the row holds. If it lies outside of the vocabulary, they are NaN. The mean is the
sum over the rows that are not ignored, over their number, or over the sum of their w[y].
"""

from __future__ import annotations

import math
from types import ModuleType
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist
from torch import Tensor

from flashtile.ops.common import checks
from flashtile.ops.common.rows import compute_dtype

#: Longest row that any backend takes.
MAX_COLUMNS = 2**30
REDUCTIONS = ("none", "mean", "sum")


class CrossEntropySpec(NamedTuple):
    """The meaning of a call: scalars only, hashable.

    Attributes:
        label_smoothing: share of the target that is spread over the vocabulary.
        logit_scale: factor on the logits.
        lse_square_scale: factor on lse² in the loss.
        ignore_index: the label of rows that do not count.
        reduction: of the losses: "none", "mean" or "sum".
        z_loss: whether the part of lse² is also a result of its own.
        first: the label of the first column, where the vocabulary is spread over processes.
        vocabulary: columns of all processes together.
        group: name of the group of those processes; empty where there is only this one.
        softcap: bound of the scores; 0 = none.
    """

    label_smoothing: float
    logit_scale: float
    lse_square_scale: float
    ignore_index: int
    reduction: str
    z_loss: bool
    first: int
    vocabulary: int
    group: str
    softcap: float = 0.0

    @property
    def factor(self) -> float:
        """On the differences that losses and gradients are made of: logits, or scores under a soft cap."""
        return 1.0 if self.softcap else self.logit_scale


class LossInputs(NamedTuple):
    """Logits `[rows, columns]`, labels `[rows]`, and None or class weights and their sum `[vocabulary + 1]`."""

    logits: Tensor
    labels: Tensor
    class_weights: Tensor | None


class LossUpstream(NamedTuple):
    """A backward's tensors: the loss's gradient, a factor on it or None, the call's, and the forward's."""

    dloss: Tensor
    scale: Tensor | None
    logits: Tensor
    labels: Tensor
    class_weights: Tensor | None
    normaliser: Tensor


class Results(NamedTuple):
    """The results of a forward pass.

    Attributes:
        loss: `[rows]`, or a scalar where it is reduced.
        z_loss: of the same shape; None where it is not asked for.
        normaliser: `[rows, 2]`, pivot and exp_sum; of ignored rows it means nothing.
        scale: scalar, 1 / the number of rows that count, or the sum of their class weights; only of a mean.
    """

    loss: Tensor
    z_loss: Tensor | None
    normaliser: Tensor
    scale: Tensor | None


def results_present(spec: CrossEntropySpec) -> tuple[bool, ...]:
    """True for each field of `Results` that there is."""
    return True, spec.z_loss, True, spec.reduction == "mean"


def result_shapes(rows: int, spec: CrossEntropySpec) -> tuple[tuple[int, ...], ...]:
    """The shapes of `Results`."""
    of_losses = (rows,) if spec.reduction == "none" else ()
    return of_losses, of_losses, (rows, 2), ()


class Statistics(NamedTuple):
    """Statistics of rows over the columns of this process; those of ignored rows mean nothing.

    Attributes:
        normaliser: `[rows, 2]`, pivot and exp_sum.
        target: `[rows]`, the logit of the label; 0 where the label has no column here.
        total: `[rows]`, `Σ w · (logits - pivot)`; 0 without smoothing.

    Under a soft cap, scores take the place of logits.
    """

    normaliser: Tensor
    target: Tensor
    total: Tensor


def make_spec(columns: int, dtype: torch.dtype, options: tuple[Any, ...]) -> CrossEntropySpec:
    """Checks the scalars of a call. `columns`: of this process. `options`: label_smoothing, logit_scale,
    lse_square_scale, ignore_index, reduction, process_group, softcap, return_z_loss."""
    label_smoothing, logit_scale, lse_square_scale, ignore_index, reduction, process_group, softcap, z_loss = options
    label_smoothing = checks.as_float("label_smoothing", label_smoothing)
    if not 0.0 <= label_smoothing <= 1.0:
        raise ValueError(
            f"label_smoothing: expected a share from 0 to 1, got {label_smoothing}; 0.1 spreads a tenth of the target"
        )
    undefined = "the loss is not defined with it"
    why_not_tensor = "reading it would synchronise, multiply the logits by it instead"
    logit_scale = checks.finite_float("logit_scale", logit_scale, undefined, why_not_tensor, dtype)
    lse_square_scale = checks.finite_float("lse_square_scale", lse_square_scale, undefined, dtype=dtype)
    if isinstance(ignore_index, bool) or not isinstance(ignore_index, int):
        raise TypeError(f"ignore_index: expected an int, got {ignore_index!r}; use int(...)")
    if not -(2**63) <= ignore_index < 2**63:
        raise ValueError(f"ignore_index: expected an integer of 64 bits, as labels are, got {ignore_index}; pass -100")
    checks.check_choice("reduction", reduction, REDUCTIONS)
    checks.raise_not_bool(return_z_loss=z_loss)
    first, vocabulary, group = 0, columns, ""
    if process_group is not None:
        if not (dist.is_available() and isinstance(process_group, dist.ProcessGroup)):
            raise TypeError(
                f"process_group: expected a torch.distributed.ProcessGroup, got {type(process_group).__name__}; "
                "use torch.distributed.new_group(...), or group.WORLD"
            )
        first, vocabulary = process_group.rank() * columns, process_group.size() * columns
        group = process_group.group_name
    softcap = checks.resolve_softcap(softcap, logit_scale, dtype)
    return CrossEntropySpec(
        label_smoothing=label_smoothing,
        logit_scale=logit_scale,
        lse_square_scale=lse_square_scale,
        ignore_index=ignore_index,
        reduction=reduction,
        z_loss=z_loss,
        first=first,
        vocabulary=vocabulary,
        group=group,
        softcap=softcap,
    )


def resolve_class_weights(
    class_weights: Tensor | None, dtype: torch.dtype, device: torch.device, vocabulary: int
) -> Tensor | None:
    """Class weights of the vocabulary of all processes and their sum, `[vocabulary + 1]`, in the dtype that computes;
    None for none. `dtype` and `device` of the logits."""
    if class_weights is None:
        return None
    checks.check_tensors(class_weights=class_weights)
    wide = compute_dtype(dtype)
    if class_weights.dtype not in (dtype, wide):
        raise TypeError(f"class_weights: expected dtype {wide} or {dtype}, got {class_weights.dtype}; cast it")
    checks.check_device("class_weights", class_weights, device, "the logits")
    checks.check_shape("class_weights", class_weights, (vocabulary,), "a weight for each class of the whole vocabulary")
    if torch.is_grad_enabled():
        checks.check_wants_no_gradient("class_weights", class_weights)
    class_weights = class_weights.to(wide)
    return torch.cat((class_weights, class_weights.sum(dim=0, keepdim=True)))


def gradient_strides(columns: int, row_stride: int, itemsize: int) -> tuple[int, int]:
    """Strides of the gradient of logits `[rows, columns]`: each row begins where, within 16 bytes, that of the logits
    does, so that both can be read and written in whole vectors."""
    return columns + (row_stride - columns) % (16 // itemsize), 1


def empty_gradient(logits: Tensor) -> Tensor:
    """Memory for the gradient of logits."""
    strides = gradient_strides(logits.shape[1], logits.stride(0), logits.element_size())
    return logits.new_empty_strided(logits.shape, strides)


# --- from what was read of rows to losses and gradients, in PyTorch operations ---------------------------------------


def capped(logits: Tensor, spec: CrossEntropySpec) -> Tensor:
    """The scores under a soft cap; without one, the logits as they are."""
    return spec.softcap * (logits * (spec.logit_scale / spec.softcap)).tanh() if spec.softcap else logits


def cap_slope(scores: Tensor, spec: CrossEntropySpec) -> Tensor:
    """The derivative of the soft cap, by the scores under it."""
    return 1 - (scores / spec.softcap).square()


def weights_here(weights: Tensor, columns: int, spec: CrossEntropySpec) -> Tensor:
    """The class weights of the columns that are here."""
    return weights[spec.first : spec.first + columns]


def label_weights(labels: Tensor, weights: Tensor, spec: CrossEntropySpec) -> Tensor:
    """The class weight of each label, `[rows]`; 0 where it does not count, or is outside of the vocabulary."""
    there = (labels >= 0) & (labels < spec.vocabulary) & (labels != spec.ignore_index)
    return weights[labels.where(there, 0).long()].where(there, 0)


def shares(labels: Tensor, weights: Tensor | None, spec: CrossEntropySpec) -> tuple[Any, Any]:
    """The factors that the loss of a row has on the score of its label, and on lse."""
    if weights is None:
        return 1 - spec.label_smoothing, 1.0
    of_label = (1 - spec.label_smoothing) * label_weights(labels, weights, spec)
    return of_label, of_label + spec.label_smoothing / spec.vocabulary * weights[-1]


def statistics(logits: Tensor, labels: Tensor, spec: CrossEntropySpec, weights: Tensor | None = None) -> Statistics:
    """Statistics of rows of logits `[rows, columns]`, in the dtype that computes; differentiable.

    `weights`, here and below: `[vocabulary + 1]`, the class weights and their sum; None for none.
    """
    logits = capped(logits, spec)
    pivot, zero = choose_pivot(logits.detach(), spec, 1)
    differences = logits - zero[:, None]
    exp_sum = (differences * spec.factor).exp().sum(dim=1)
    column = labels.to(torch.int64) - spec.first
    here = (column >= 0) & (column < logits.shape[1])
    target = logits.gather(1, column.where(here, 0)[:, None])[:, 0].where(here, 0)
    total = torch.zeros_like(target)
    if spec.label_smoothing:
        weighted = differences if weights is None else differences * weights_here(weights, logits.shape[1], spec)
        total = weighted.sum(dim=1)
    counts = labels != spec.ignore_index
    normaliser = torch.stack((pivot.where(counts, 0), exp_sum.where(counts, 1)), 1)
    return Statistics(normaliser, target.where(counts, 0), total.where(counts, 0))


def choose_pivot(logits: Tensor, spec: CrossEntropySpec, dim: int) -> tuple[Tensor, Tensor]:
    """The logits of the largest scores, and the number to subtract: the same, or 0 where all are -inf."""
    pivot, lowest = (logits.amax(dim), -math.inf) if spec.factor >= 0 else (logits.amin(dim), math.inf)
    return pivot, pivot.masked_fill(pivot == lowest, 0)


def merge(parts: Statistics, spec: CrossEntropySpec, weights: Tensor | None = None) -> Statistics:
    """Puts together the statistics of disjoint columns, equally many in each part: `[parts, ...]` in each field."""
    pivots, exp_sums = parts.normaliser.unbind(-1)
    pivot, zero = choose_pivot(pivots, spec, 0)
    differences = pivots - zero
    exp_sum = (exp_sums * (differences * spec.factor).exp()).sum(dim=0)
    columns: Any = spec.vocabulary // len(pivots)
    if weights is not None:
        columns = weights[:-1].view(len(pivots), columns).sum(dim=1, keepdim=True)
    total = (parts.total + columns * differences).sum(dim=0)
    return Statistics(torch.stack((pivot, exp_sum), 1), parts.target.sum(dim=0), total)


def losses(found: Statistics, labels: Tensor, spec: CrossEntropySpec, weights: Tensor | None = None) -> Results:
    """The losses of rows, reduced as the spec says."""
    counts = labels != spec.ignore_index
    pivot, exp_sum = found.normaliser.unbind(1)
    log_sum = exp_sum.log()
    lse = pivot * spec.factor + log_sum
    of_label, of_lse = shares(labels, weights, spec)
    z_loss = spec.lse_square_scale * lse * lse  # in this order: a square may be infinite, and 0 · inf NaN
    loss = of_lse * log_sum - of_label * spec.factor * (found.target - pivot) + z_loss
    if spec.label_smoothing:
        loss = loss - spec.label_smoothing * spec.factor / spec.vocabulary * found.total
    sound = _sound(labels, spec, loss.dtype)
    loss, z_loss = ((t * sound).where(counts, 0) for t in (loss, z_loss))
    scale = None
    if spec.reduction != "none":
        loss, z_loss = loss.sum(), z_loss.sum()
    if spec.reduction == "mean":
        scale = weight_sum(labels, weights, spec).to(loss.dtype).reciprocal()
        loss, z_loss = loss * scale, z_loss * scale
    return Results(loss, z_loss if spec.z_loss else None, found.normaliser, scale)


def _sound(labels: Tensor, spec: CrossEntropySpec, dtype: torch.dtype) -> Tensor:
    """A factor `[rows]`: NaN where the label is outside of the vocabulary and counts, else 1."""
    outside = ((labels < 0) | (labels >= spec.vocabulary)) & (labels != spec.ignore_index)
    return torch.ones_like(labels, dtype=dtype).masked_fill(outside, float("nan"))


def weight_sum(labels: Tensor, weights: Tensor | None, spec: CrossEntropySpec) -> Tensor:
    """The number of rows that count, or the sum of their class weights, a scalar on the device."""
    counts = labels != spec.ignore_index if weights is None else label_weights(labels, weights, spec)
    return counts.sum()


def factors(given: LossUpstream, spec: CrossEntropySpec) -> Tensor:
    """A factor of the gradient of each row, `[rows]`."""
    g = (given.dloss if given.scale is None else given.dloss * given.scale).expand_as(given.labels)
    return g * spec.logit_scale * _sound(given.labels, spec, given.normaliser.dtype)


def exponential_factors(
    normaliser: Tensor, labels: Tensor, spec: CrossEntropySpec, weights: Tensor | None = None
) -> Tensor:
    """A factor that the gradient has on the exponentials of each row's differences, `[rows]`."""
    pivot, exp_sum = normaliser.unbind(1)
    lse = pivot * spec.factor + exp_sum.log()
    _, of_lse = shares(labels, weights, spec)
    return (of_lse + 2 * spec.lse_square_scale * lse) / exp_sum


def gradient(given: LossUpstream, spec: CrossEntropySpec) -> Tensor:
    """The gradient of rows of logits, in the dtype that computes; differentiable."""
    _, _, logits, labels, weights, normaliser = given
    logits = logits.to(compute_dtype(logits.dtype))
    counts = (labels != spec.ignore_index)[:, None]
    g = factors(given, spec)[:, None]
    scores, columns = capped(logits, spec), logits.shape[1]
    exponentials = ((scores - normaliser[:, :1]) * spec.factor).exp()
    of_all = spec.label_smoothing / spec.vocabulary * (1 if weights is None else weights_here(weights, columns, spec))
    wanted = exponentials * exponential_factors(normaliser, labels, spec, weights)[:, None] - of_all
    is_label = torch.arange(spec.first, spec.first + columns, device=logits.device) == labels[:, None]
    of_label, _ = shares(labels, weights, spec)
    wanted = wanted - (of_label if weights is None else of_label[:, None]) * is_label.to(wanted.dtype)
    wanted = wanted * cap_slope(scores, spec) if spec.softcap else wanted
    return (g * wanted).where(counts, 0)


# --- the reference ---------------------------------------------------------------------------------------------------


def forward(inputs: LossInputs, spec: CrossEntropySpec) -> Results:
    """The losses; differentiable."""
    return losses(read(inputs, spec), inputs.labels, spec, inputs.class_weights)


def read(inputs: LossInputs, spec: CrossEntropySpec) -> Statistics:
    """The statistics of the columns that are here."""
    logits, labels, weights = inputs
    logits = _counted(logits, labels, spec)
    return statistics(logits.to(compute_dtype(logits.dtype)), labels, spec, weights)


def backward(given: LossUpstream, spec: CrossEntropySpec, inplace: bool = False) -> Tensor:
    """The gradient of the logits, in their dtype; in their memory where asked for."""
    return (given.logits if inplace else empty_gradient(given.logits)).copy_(gradient(given, spec))


def multiply(gradient: Tensor, factor: Tensor) -> None:
    """Multiplies a gradient by a scalar, in place."""
    gradient.copy_(gradient.to(compute_dtype(gradient.dtype)) * factor)


def differentiable_backward(given: LossUpstream, spec: CrossEntropySpec) -> Tensor:
    """The gradient of the logits as a function of `dloss` and of the logits alone, for the second derivative."""
    logits = _counted(given.logits, given.labels, spec)
    found = forward(LossInputs(logits, given.labels, given.class_weights), spec)
    given = given._replace(scale=found.scale, logits=logits, normaliser=found.normaliser)
    return gradient(given, spec).to(logits.dtype)


def linear(operands: Any, spec: CrossEntropySpec) -> Results:
    """The losses of the logits `x · weightᵀ + bias` of `LinearOperands`, which are held as a whole; differentiable."""
    x, weight, bias, labels, class_weights = operands
    logits = torch.nn.functional.linear(_counted(x, labels, spec), weight, bias)
    return forward(LossInputs(logits, labels, class_weights), spec)


def _counted(rows: Tensor, labels: Tensor, spec: CrossEntropySpec) -> Tensor:
    """Rows with 0 for those that are ignored: what these hold, be it NaN, reaches no derivative."""
    return rows.masked_fill((labels == spec.ignore_index)[:, None], 0)


# --- rows whose columns are spread over processes ---------------------------------------------------------------------


def forward_on_group(module: ModuleType, inputs: LossInputs, spec: CrossEntropySpec) -> Results:
    """The losses of whole rows, by a backend's module, from the columns that are here."""
    if not spec.group:
        return module.forward(inputs, spec)
    _, labels, weights = inputs
    group = _group(spec)
    found = module.read(inputs, spec)
    here = torch.column_stack(found)
    everywhere = here.new_empty(group.size() * len(here), here.shape[1])
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # its name before PyTorch 2.13
    gather(everywhere, here, group=group)
    of_processes = everywhere.view(group.size(), *here.shape)
    parts = Statistics(of_processes[..., :2], of_processes[..., 2], of_processes[..., 3])
    return losses(merge(parts, spec, weights), labels, spec, weights)


def add_up(tensor: Tensor | None, spec: CrossEntropySpec) -> None:
    """Adds a tensor over processes, in place; each then has the sum."""
    if tensor is not None and spec.group:
        dist.all_reduce(tensor, group=_group(spec))


def _group(spec: CrossEntropySpec) -> Any:
    return dist.distributed_c10d._resolve_process_group(cast(Any, spec.group))
