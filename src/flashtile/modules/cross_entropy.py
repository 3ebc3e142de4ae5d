"""Losses as modules: `CrossEntropyLoss` with PyTorch's names, and the one that has the last linear layer in it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

import flashtile

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


class _Loss(nn.Module):
    """The options that the losses share; no parameters."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self._options = options
        for name, value in options.items():
            if name in _WEIGHTS:
                self.register_buffer(name, value)
            else:
                setattr(self, name, value)

    def options(self) -> dict[str, Any]:
        """The options of a call, as they are now."""
        return {_WEIGHTS.get(name, name): getattr(self, name) for name in self._options}

    def extra_repr(self) -> str:
        given = ((name, value, getattr(self, name)) for name, value in _DEFAULTS.items() if name in self._options)
        return ", ".join(f"{name}={value!r}" for name, default, value in given if value != default)


_DEFAULTS: dict[str, Any] = {
    "ignore_index": -100,
    "reduction": "mean",
    "label_smoothing": 0.0,
    "logit_scale": 1.0,
    "lse_square_scale": 0.0,
    "inplace_backward": False,
    "softcap": None,
    "return_z_loss": False,
}
#: Buffers, and the arguments that they are.
_WEIGHTS = {"weight": "class_weights", "class_weights": "class_weights"}


class CrossEntropyLoss(_Loss):
    """`torch.nn.CrossEntropyLoss` by `flashtile.cross_entropy`: the same names, and more options.

    The classes are the last dimension of the input. (In PyTorch they are the second. For a matrix this is the same.)
    Targets are class indices, not probabilities.

    Args:
        weight: `[classes]`, a weight for each class, as in PyTorch a buffer; None for 1.
        ignore_index: target of rows that do not count.
        reduction: "mean", "sum" or "none".
        label_smoothing: share of the target that is spread over the classes.
        logit_scale: factor on the input.
        lse_square_scale: factor on lse² in the loss ("z-loss").
        softcap: bound of the scores, as in `flashtile.cross_entropy`; None for none.
        inplace_backward: the backward writes the gradient into the memory of the input, and so destroys the input.
        process_group: processes that each hold a part of the classes.
        return_z_loss: also return the part of lse².
    """

    def __init__(
        self, weight: Tensor | None = None, *, ignore_index: int = -100, reduction: str = "mean",
        label_smoothing: float = 0.0, logit_scale: float = 1.0, lse_square_scale: float = 0.0,
        softcap: float | None = None, inplace_backward: bool = False, process_group: ProcessGroup | None = None,
        return_z_loss: bool = False,
    ) -> None:  # fmt: skip
        super().__init__(
            weight=weight, ignore_index=ignore_index, reduction=reduction, label_smoothing=label_smoothing,
            logit_scale=logit_scale, lse_square_scale=lse_square_scale, softcap=softcap,
            inplace_backward=inplace_backward, process_group=process_group, return_z_loss=return_z_loss,
        )  # fmt: skip

    def forward(self, input: Tensor, target: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        """The loss of `input` `[..., classes]` against `target` `[...]`, or (loss, z_loss)."""
        return flashtile.cross_entropy(input, target, **self.options())


class LinearCrossEntropyLoss(_Loss):
    """The last linear layer and its loss by `flashtile.linear_cross_entropy`, which holds no logits.

    It has no parameters: the weight, which may be that of the embedding, comes with the call.

    Args:
        class_weights: `[vocabulary]`, a weight for each class, a buffer; None for 1.
        ignore_index: the target of rows that do not count.
        reduction: "mean", "sum" or "none".
        label_smoothing: share of the target that is spread over the vocabulary.
        logit_scale: factor on the logits.
        lse_square_scale: factor on lse² in the loss ("z-loss").
        softcap: bound of the scores, as in `flashtile.cross_entropy`; None for none.
        process_group: of processes that hold a part of the weight each.
        return_z_loss: also return the part of lse².
    """

    def __init__(
        self, *, class_weights: Tensor | None = None, ignore_index: int = -100, reduction: str = "mean",
        label_smoothing: float = 0.0, logit_scale: float = 1.0, lse_square_scale: float = 0.0,
        softcap: float | None = None, process_group: ProcessGroup | None = None, return_z_loss: bool = False,
    ) -> None:  # fmt: skip
        super().__init__(
            class_weights=class_weights, ignore_index=ignore_index, reduction=reduction,
            label_smoothing=label_smoothing, logit_scale=logit_scale, lse_square_scale=lse_square_scale,
            softcap=softcap, process_group=process_group, return_z_loss=return_z_loss,
        )  # fmt: skip

    def forward(
        self, input: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None = None
    ) -> Tensor | tuple[Tensor, Tensor]:
        """The loss of `input · weightᵀ + bias`, `[..., features]` and `[vocabulary, features]`, against `target`."""
        return flashtile.linear_cross_entropy(input, weight, target, bias, **self.options())
