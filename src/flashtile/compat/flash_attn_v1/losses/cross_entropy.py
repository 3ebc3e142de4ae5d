"""flash_attn.losses.cross_entropy of version 1 over `flashtile.cross_entropy`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from flashtile import modules

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


class CrossEntropyLoss(modules.CrossEntropyLoss):
    """`flashtile.modules.CrossEntropyLoss` with the arguments of flash_attn 1.

    Args:
        ignore_index: the target of rows that do not count.
        reduction: "mean" or "none".
        label_smoothing: share of the target that is spread over the classes.
        inplace_backward: the backward writes the gradient to the memory of the input, which is lost.
        process_group: of processes that hold a part of the classes each.
    """

    def __init__(
        self,
        ignore_index: int = -100,
        reduction: str = "mean",
        label_smoothing: float = 0.0,
        inplace_backward: bool = False,
        process_group: ProcessGroup | None = None,
    ) -> None:
        if reduction not in ("mean", "none"):
            raise ValueError(f"reduction: expected 'mean' or 'none', got {reduction!r}; sum the losses of 'none'")
        super().__init__(
            ignore_index=ignore_index,
            reduction=reduction,
            label_smoothing=label_smoothing,
            inplace_backward=inplace_backward,
            process_group=process_group,
        )

    def forward(self, input: Tensor, target: Tensor) -> Tensor:
        """The loss of `input` `[rows, classes]` against `target` `[rows]`."""
        loss = super().forward(input, target)
        assert isinstance(loss, Tensor)
        return loss


CrossEntropyLossApex = CrossEntropyLoss
