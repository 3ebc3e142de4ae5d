"""Steps with dropout, judged by what does not depend on the random bits.

Implementations draw different bits, so no two have the same losses. Three quantities are the same up to their scatter
over the bits:

- `dropout_spread`: half the mean square by which the losses of tokens differ between two forwards. It tells how much is
  dropped.
- `dropout_rise`: how much higher the mean loss is than without dropout, by the function that is timed.
- `dropout_fall`: how much lower the losses without dropout are after some steps with it. It tells that gradients are
  those of what was dropped, and that the optimizer used them.

The scatter of each is measured on a reference, whose training is repeated with other bits.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from flashtile.bench.verify import Verdict

_STEPS = 2
#: Trainings of the reference.
_REFERENCES = 8
#: Pairs of forwards and single losses of what is judged, and of each of these trainings.
_SAMPLES, _REFERENCE_SAMPLES = (4, 12), (1, 2)
#: Standard errors by which means may differ. The errors come from eight samples or more: by chance alone, one mean in
#: ten thousand is further away.
_STANDARD_ERRORS = 8.0
#: Factor by which the scatter of the timed function's losses may differ. For twelve of them and sixteen of the
#: reference chance exceeds it in one of a hundred thousand.
_SCATTER = 4.0

Batch = TypeVar("Batch", contravariant=True)


class Trained(Protocol[Batch]):
    """A model in training, and its optimizer."""

    def loss(self, batch: Batch) -> Tensor:
        """The mean loss, by the function that is timed."""

    def token_losses(self, batch: Batch) -> Tensor:
        """The losses of tokens."""

    def step(self, batch: Batch) -> Any:
        """Forward, backward and optimizer."""

    def without_dropout(self) -> AbstractContextManager[Any]:
        """Within it nothing is dropped."""


def sample(
    training: Trained[Batch], batch: Batch, seed: int = 0, samples: tuple[int, int] = _SAMPLES
) -> dict[str, Tensor]:
    """Samples `[n]` of each quantity. Takes steps, and seeds torch's generators."""
    torch.manual_seed(seed)
    pairs, losses = samples
    with training.without_dropout():
        before, still = training.token_losses(batch), training.loss(batch)
    differences = (training.token_losses(batch) - training.token_losses(batch) for _ in range(pairs))
    spread = torch.stack([difference.square().mean() / 2 for difference in differences])
    rise = torch.stack([training.loss(batch) for _ in range(losses)]) - still
    for _ in range(_STEPS):
        training.step(batch)
    with training.without_dropout():
        fall = (before - training.token_losses(batch)).mean()
    return {"dropout_spread": spread, "dropout_rise": rise, "dropout_fall": fall[None]}


def sample_reference(make: Callable[[], Trained[Batch]], batch: Batch) -> dict[str, Tensor]:
    """The samples of several trainings, each from what `make` makes."""
    found = [sample(make(), batch, seed, _REFERENCE_SAMPLES) for seed in range(1, 1 + _REFERENCES)]
    return {name: torch.cat([each[name] for each in found]) for name in found[0]}


def judge(results: dict[str, Tensor], reference: dict[str, Tensor]) -> Verdict:
    """Whether samples are like those of the reference.

    Args:
        results: samples by name, and possibly other results.
        reference: samples by name.

    Returns:
        The largest difference of two means, and what is wrong.
    """
    worst, wrong = 0.0, []
    for name, expected in reference.items():
        found = results[name]
        scatter = float(expected.std())
        difference = abs(float(found.mean()) - float(expected.mean()))
        allowed = _STANDARD_ERRORS * scatter * math.sqrt(1 / len(found) + 1 / len(expected))
        worst = max(worst, difference if math.isfinite(difference) else math.inf)
        if not difference <= allowed:
            wrong.append(
                f"{name}: mean {float(found.mean()):.3e}, expected {float(expected.mean()):.3e} with at most "
                f"{allowed:.1e} between them"
            )
    # A function that drops nothing has losses without scatter, whose mean may be right by chance.
    scatter, expected_scatter = (float(each["dropout_rise"].std()) for each in (results, reference))
    if not expected_scatter / _SCATTER <= scatter <= expected_scatter * _SCATTER:
        wrong.append(
            f"dropout_rise: standard deviation {scatter:.3e}, expected {expected_scatter:.3e} within a factor of "
            f"{_SCATTER:g}"
        )
    return Verdict(worst, "wrong dropout: " + "; ".join(wrong) if wrong else None)
