"""Checks of user input at the public edge: each error names argument, expectation, what came and the remedy."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from flashtile.ops.common.checks import (
    INDEX_DTYPES,
    as_float,
    check_choice,
    check_device,
    check_float_dtype,
    check_tensors,
    finite_float,
    raise_not_bool,
    read_on_request,
)
from flashtile.ops.common.memory import check_own_numbers
from flashtile.ops.common.score_checks import resolve_softcap
from flashtile.ops.common.sizes import differ
from flashtile.ops.cross_entropy.spec import MAX_COLUMNS, REDUCTIONS, CrossEntropySpec, compute_dtype

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

__all__ = [
    "check_choice",
    "check_inplace",
    "check_label_values",
    "check_labels",
    "check_linear",
    "check_logits",
    "check_tensors",
    "make_spec",
    "raise_not_bool",
    "resolve_class_weights",
]


def check_logits(logits: Tensor) -> None:
    check_tensors(logits=logits)
    check_float_dtype("logits", logits.dtype)
    if logits.dim() < 1:
        raise ValueError(f"logits: expected shape (..., vocabulary), got {tuple(logits.shape)}; unsqueeze them")
    _check_vocabulary("logits", "last dimension", logits.shape[-1])


def _check_vocabulary(name: str, dimension: str, size: int) -> None:
    if not 1 <= size <= MAX_COLUMNS:
        raise ValueError(
            f"{name}: expected a {dimension} from 1 to {MAX_COLUMNS}, got {size}; it is what labels choose from"
        )


def check_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    """Checks the operands of the linear layer."""
    check_tensors(x=x, weight=weight)
    check_float_dtype("x", x.dtype)
    if x.dim() < 1:
        raise ValueError(f"x: expected shape (..., features), got {tuple(x.shape)}; unsqueeze it")
    if weight.dim() != 2 or weight.shape[1] != x.shape[-1]:
        raise ValueError(
            f"weight: expected shape (vocabulary, {x.shape[-1]}), with the last dimension of x, got "
            f"{tuple(weight.shape)}; as that of torch.nn.Linear"
        )
    _check_vocabulary("weight", "first dimension", weight.shape[0])
    if bias is not None:
        check_tensors(bias=bias)
        if bias.shape != weight.shape[:1]:
            raise ValueError(
                f"bias: expected shape ({weight.shape[0]},), the first dimension of weight, got {tuple(bias.shape)}"
            )
    for name, tensor in (("weight", weight), ("bias", bias)):
        if tensor is None:
            continue
        check_device(name, tensor, x.device, "x")
        if tensor.dtype != x.dtype:
            raise TypeError(
                f"{name}: expected the dtype of x, {x.dtype}, got {tensor.dtype}; cast one, or use torch.autocast"
            )


def check_labels(labels: Tensor, shape: tuple[int, ...], device: torch.device, of: str) -> None:
    """Checks type, shape and device of the labels, not their values."""
    check_tensors(labels=labels)
    if labels.dtype not in INDEX_DTYPES:
        raise TypeError(f"labels: expected dtype int64 or int32, got {labels.dtype}; they are class numbers, cast them")
    if differ(labels.shape, shape):
        raise ValueError(
            f"labels: expected the shape of {of} without its last dimension, {tuple(shape)}, got {tuple(labels.shape)}"
        )
    check_device("labels", labels, device, of)


def check_label_values(labels: Tensor, spec: CrossEntropySpec) -> None:
    """Where `FLASHTILE_CHECK_VALUES=1` asks for it, checks that each label is one. A compiled graph cannot."""
    if torch.compiler.is_compiling() or not read_on_request(labels):
        return
    wrong = (labels != spec.ignore_index) & ((labels < 0) | (labels >= spec.vocabulary))
    if wrong.any():
        places = wrong.nonzero()
        first = tuple(places[0].tolist())
        raise ValueError(
            f"labels: expected numbers from 0 to {spec.vocabulary - 1}, or ignore_index={spec.ignore_index}, got "
            f"{labels[first].item()} at {first} and {len(places) - 1} more that are neither"
        )


def make_spec(
    columns: int,
    dtype: torch.dtype,
    label_smoothing: float,
    logit_scale: float,
    lse_square_scale: float,
    ignore_index: int,
    reduction: str,
    return_z_loss: bool,
    process_group: ProcessGroup | None,
    softcap: float | None,
) -> CrossEntropySpec:
    """Checks the scalars of a call; `columns` are those of this process, `dtype` that of its logits."""
    label_smoothing = as_float("label_smoothing", label_smoothing)
    if not 0.0 <= label_smoothing <= 1.0:
        raise ValueError(
            f"label_smoothing: expected a share from 0 to 1, got {label_smoothing}; 0.1 spreads a tenth of the target"
        )
    undefined = "the loss is not defined with it"
    why_not_tensor = "reading it would synchronise, multiply the logits by it instead"
    logit_scale = finite_float("logit_scale", logit_scale, undefined, why_not_tensor, dtype)
    lse_square_scale = finite_float("lse_square_scale", lse_square_scale, undefined, dtype=dtype)
    if isinstance(ignore_index, bool) or not isinstance(ignore_index, int):
        raise TypeError(f"ignore_index: expected an int, got {ignore_index!r}; use int(...)")
    if not -(2**63) <= ignore_index < 2**63:
        raise ValueError(f"ignore_index: expected an integer of 64 bits, as labels are, got {ignore_index}; pass -100")
    check_choice("reduction", reduction, REDUCTIONS)
    raise_not_bool(return_z_loss=return_z_loss)
    first, vocabulary, group = 0, columns, ""
    if process_group is not None:
        first, vocabulary, group = _share(process_group, columns)
    return CrossEntropySpec(
        label_smoothing,
        logit_scale,
        lse_square_scale,
        ignore_index,
        reduction,
        return_z_loss,
        first,
        vocabulary,
        group,
        resolve_softcap(softcap, logit_scale, dtype),
    )


def resolve_class_weights(
    class_weights: Tensor | None, dtype: torch.dtype, device: torch.device, vocabulary: int
) -> Tensor | None:
    """Class weights of the vocabulary of all processes and their sum, `[vocabulary + 1]`, in the dtype that computes;
    None for none. `dtype` and `device` of the logits."""
    if class_weights is None:
        return None
    check_tensors(class_weights=class_weights)
    wide = compute_dtype(dtype)
    if class_weights.dtype not in (dtype, wide):
        raise TypeError(f"class_weights: expected dtype {wide} or {dtype}, got {class_weights.dtype}; cast it")
    check_device("class_weights", class_weights, device, "the logits")
    if differ(tuple(class_weights.shape), (vocabulary,)):
        raise ValueError(
            f"class_weights: expected shape ({vocabulary},), a weight for each class of the whole vocabulary, got "
            f"{tuple(class_weights.shape)}"
        )
    if class_weights.requires_grad and torch.is_grad_enabled():
        raise ValueError(
            "class_weights: expected a tensor that wants no gradient, got one with requires_grad=True; detach it"
        )
    class_weights = class_weights.to(wide)
    return torch.cat((class_weights, class_weights.sum(dim=0, keepdim=True)))


def _share(process_group: ProcessGroup, columns: int) -> tuple[int, int, str]:
    """First column of this process, columns of all, and the name of a group of processes."""
    if not (torch.distributed.is_available() and isinstance(process_group, torch.distributed.ProcessGroup)):
        raise TypeError(
            f"process_group: expected a torch.distributed.ProcessGroup, got {type(process_group).__name__}; "
            "use torch.distributed.new_group(...), or group.WORLD"
        )
    return process_group.rank() * columns, process_group.size() * columns, process_group.group_name


def check_inplace(logits: Tensor) -> None:
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
