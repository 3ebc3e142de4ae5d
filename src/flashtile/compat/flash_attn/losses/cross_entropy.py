"""flash_attn.losses.cross_entropy over `flashtile.cross_entropy`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from flashtile import modules

from ..ops.triton.cross_entropy import cross_entropy_loss

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


class CrossEntropyLoss(modules.CrossEntropyLoss):
    """`flashtile.modules.CrossEntropyLoss` with flash_attn's order of arguments, and `precomputed_lse` in a call."""

    def __init__(
        self,
        ignore_index: int = -100,
        reduction: str = "mean",
        label_smoothing: float = 0.0,
        logit_scale: float = 1.0,
        lse_square_scale: float = 0.0,
        inplace_backward: bool = False,
        process_group: ProcessGroup | None = None,
        return_z_loss: bool = False,
    ) -> None:
        if reduction not in ("mean", "sum", "none"):
            raise ValueError(f"reduction: expected 'mean', 'sum' or 'none', got {reduction!r}")
        super().__init__(
            ignore_index=ignore_index,
            reduction=reduction,
            label_smoothing=label_smoothing,
            logit_scale=logit_scale,
            lse_square_scale=lse_square_scale,
            inplace_backward=inplace_backward,
            process_group=process_group,
            return_z_loss=return_z_loss,
        )

    def forward(
        self, input: Tensor, target: Tensor, precomputed_lse: Tensor | None = None
    ) -> Tensor | tuple[Tensor, Tensor]:
        """The loss of `input` `[rows, classes]` against `target` `[rows]`, or (loss, z_loss)."""
        if precomputed_lse is None:
            return super().forward(input, target)
        options = self.options()
        del options["class_weights"], options["softcap"]  # flash_attn has none
        reduction, return_z_loss = options.pop("reduction"), options.pop("return_z_loss")
        results = cross_entropy_loss(input, target, precomputed_lse, **options)
        if reduction != "none":
            results = results[0].sum(), results[1].sum()
        if reduction == "mean":
            counted = (target != options["ignore_index"]).sum()
            results = results[0] / counted, results[1] / counted
        return results if return_z_loss else results[0]
