"""Losses with DTensors: rows are sharded, or the vocabulary over the ranks of one mesh dimension."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from flashtile.ops.common import dtensor
from flashtile.ops.cross_entropy import checks
from flashtile.ops.cross_entropy.losses import weight_sum
from flashtile.ops.cross_entropy.spec import CrossEntropySpec


def run_sharded(
    function: Callable[..., Any], operands: Mapping[str, tuple[Any, str]], spec: CrossEntropySpec
) -> Tensor | tuple[Tensor, Tensor]:
    """A loss with DTensors. `function`: a public function, without the options that `spec` says."""
    if spec.group:
        raise ValueError(
            "process_group: expected None with DTensors, whose placements say it, got a group; leave it out"
        )
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
        weights = checks.resolve_class_weights(given["class_weights"], dtype, labels.device, spec.vocabulary)
        return *losses, weight_sum(labels, weights, spec).to(dtype)

    of_rows = "*" if spec.reduction == "none" else ""
    losses = dtensor.call(call, operands, of_rows, ("weight", "bias", "class_weights"), complete="v")
    if spec.reduction == "mean" and dtensor.present(losses[0]):
        *losses, count = (dtensor.replicated(each) for each in losses)
        losses = [each / count for each in losses]
    return tuple(losses) if spec.z_loss else losses[0]
