"""Steps of a model and its optimizer, the first losses, by which they are judged, and what dropout does to them.

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
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from flashtile import io_model
from flashtile.bench import base
from flashtile.bench.base import Verdict, judge
from flashtile.bench.start import UserError
from flashtile.bench.timing import step_facts

PHASE = "fwd+bwd+step"
_CHECKED_STEPS = 2
#: Steps with dropout.
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

Batch = TypeVar("Batch")


class Steps(Generic[Batch]):
    """A model, its optimizer AdamW (`options`), and a batch, that of all steps that name no other.

    Args that are functions: `loss`, the mean loss of a batch, as it is timed; `token_losses`, by the model's logits;
    `train`, which switches dropout on or off; `parts` of a batch whose gradients are made at once, and the `share` of a
    part in the mean loss. `autocast`: products are bfloat16. `drops`: the model has dropout.
    """

    def __init__(
        self, parameters: Sequence[Tensor], batch: Batch, options: dict[str, Any], autocast: bool, drops: bool,
        *, loss: Callable[[Batch], Tensor], token_losses: Callable[[Batch], Tensor], train: Callable[[bool], Any],
        parts: Callable[[Batch], Sequence[Batch]], share: Callable[[Batch, Batch], float | Tensor],
    ) -> None:  # fmt: skip
        self._parameters, self._batch, self._options = parameters, batch, options
        self._autocast_on, self._drops = autocast, drops
        self._loss, self._token_losses, self._train, self._parts, self._share = loss, token_losses, train, parts, share
        self._device = parameters[0].device
        self._optimizer = torch.optim.AdamW(parameters, **options)

    @property
    def calls(self) -> Mapping[str, Callable[[], Any]]:
        return {PHASE: self.step}

    def step(self, batch: Batch | None = None) -> Tensor:
        """Forward, backward and optimizer of a batch, by default its own; the loss. Parts of the batch add their
        gradients up."""
        loss = self.loss(self._batch if batch is None else batch, Tensor.backward)
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        return loss

    @torch.no_grad()
    def token_losses(self, batch: Batch) -> Tensor:
        """The losses of tokens."""
        found = []
        for part in self._parts(batch):
            with self._autocast():
                found.append(self._token_losses(part))
        return torch.cat(found)

    def facts(self, phase: str) -> dict[str, Any]:
        """`peak_mib`: the largest memory that a step takes beside weights and moments; on a GPU."""
        return step_facts(self.step, self._device)

    @contextmanager
    def without_dropout(self) -> Iterator[None]:
        """Within it nothing is dropped, and what is compiled runs eagerly: it is compiled for what is timed alone."""
        self._train(False)
        try:
            with torch.compiler.set_stance("force_eager"):
                yield
        finally:
            self._train(True)

    def first_losses(self, batch: Batch) -> dict[str, Tensor]:
        """Takes steps on one batch, without dropout: losses of tokens before and after, and those of the steps. With
        dropout the weights are then set back, and the optimizer begins again."""
        if not self._drops:
            return self._step_losses(batch)
        start = [parameter.detach().clone() for parameter in self._parameters]
        with self.without_dropout():
            found = self._step_losses(batch)
        with torch.no_grad():
            for parameter, value in zip(self._parameters, start, strict=True):
                parameter.copy_(value)
        self._optimizer = torch.optim.AdamW(self._parameters, **self._options)
        return found

    def samples(self, batch: Batch) -> dict[str, Tensor]:
        """Samples of the effect of dropout on a batch (see above); nothing without dropout. Takes steps."""
        return sample(self, batch) if self._drops else {}

    def _step_losses(self, batch: Batch) -> dict[str, Tensor]:
        before = self.token_losses(batch)
        losses = torch.stack([self.step(batch) for _ in range(_CHECKED_STEPS)])
        return {"token_loss": before, "token_loss_after": self.token_losses(batch), "loss": losses}

    def loss(self, batch: Batch, use: Callable[[Tensor], Any] = lambda loss: None) -> Tensor:
        """The mean loss, by the function that is timed. `use` is called with what each part has in it."""
        parts, losses = self._parts(batch), []
        for part in parts:
            with self._autocast():
                loss = self._loss(part)
            if len(parts) > 1:
                loss = loss * self._share(part, batch)
            use(loss)
            losses.append(loss.detach())
        return torch.stack(losses).sum()

    def _autocast(self) -> AbstractContextManager[Any]:
        return torch.autocast(self._device.type, torch.bfloat16, enabled=self._autocast_on)


def check_dropout(dropout_p: float) -> None:
    """Refuses what is no probability below 1."""
    if not 0 <= dropout_p < 1:
        raise UserError(f"--dropout: expected a probability in [0, 1), got {dropout_p}; 0.1 is GPT-2's and BERT's")


def sample(
    training: Steps[Batch], batch: Batch, seed: int = 0, samples: tuple[int, int] = _SAMPLES
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


def sample_reference(make: Callable[[], Steps[Batch]], batch: Batch) -> dict[str, Tensor]:
    """The samples of several trainings, each from what `make` makes."""
    found = [sample(make(), batch, seed, _REFERENCE_SAMPLES) for seed in range(1, 1 + _REFERENCES)]
    return {name: torch.cat([each[name] for each in found]) for name in found[0]}


def judge_dropout(results: dict[str, Tensor], reference: dict[str, Tensor]) -> Verdict:
    """Whether samples by name are like those of the reference: the largest difference of two means, and what is
    wrong."""
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


class StepsProblem(base.Problem):
    """Training steps of a case on a device. `exact`, `eager`: losses by name of the training in float64, and of the
    eager one. `dropped`: samples of the effect of dropout; None without."""

    phases = (PHASE,)
    exact: dict[str, Tensor]
    eager: dict[str, Tensor]
    dropped: dict[str, Tensor] | None = None

    def __init__(self, case: Any, device: torch.device) -> None:
        super().__init__(case, device)
        self.autocast = case.dtype == "bf16"

    def eager_results(self, bound: Any) -> dict[str, Tensor]:
        """The eager losses that say what rounding may do to those of an implementation."""
        return self.eager

    def judge(self, bound: Any, phase: str, results: dict[str, Tensor]) -> Verdict:
        verdict = judge_losses(results, self.exact, self.eager_results(bound), self.autocast)
        if self.dropped is None or verdict.why is not None:
            return verdict
        return verdict._replace(why=judge_dropout(results, self.dropped).why)

    def speed(self, phase: str, ms: float) -> dict[str, Any]:
        """Tokens each second, and where the GPU's peak is known, the share of it that the model's products reach."""
        tflops, peak = self.case.flops(phase) / ms / 1e9, peak_tflops(self.device)
        tokens_per_s = self.case.tokens / ms * 1e3
        return {"tflops": tflops, "gbps": None, "tokens_per_s": tokens_per_s, "mfu": peak and tflops / peak}


def judge_losses(
    results: dict[str, Tensor], exact: dict[str, Tensor], eager: dict[str, Tensor], autocast: bool
) -> Verdict:
    """Whether losses by name ("loss": of steps, else of tokens) are those of the training in float64, as the `eager`
    ones are, which may have fewer names. `autocast`: products are bfloat16."""
    parts = [(name, results[name], exact[name], expected) for name, expected in eager.items()]
    verdict = judge(parts)
    if not autocast:
        return verdict
    # A mean over thousands of tokens has lost most of their rounding, by chance more of it here than there.
    rounded = [(n, f.bfloat16(), x, e.bfloat16()) if n == "loss" else (n, f, x, e) for n, f, x, e in parts]
    return verdict._replace(why=judge(rounded).why)


def peak_tflops(device: torch.device) -> float | None:
    """Peak rate of bfloat16 products on a GPU that the IO model knows; None on another device."""
    known = io_model.find_device(torch.cuda.get_device_name(device)) if device.type == "cuda" else None
    return None if known is None else known.flops[torch.bfloat16] / 1e12
