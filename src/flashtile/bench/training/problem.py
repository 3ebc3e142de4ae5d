"""Training steps, as the runner asks for them: a model bound to an optimizer, judged by its first losses.

The losses of every token, before the first step and after some steps on the same batch, must be those of the plain
formula trained in float64, within the tolerance policy: before, they tell that the forward is right, after, that the
gradients and the optimizer's use of them are. Longer contexts are checked in the first tokens of each sequence,
because that formula holds all scores in float64; what is timed are steps on whole sequences.

With dropout this check is made without it. Then the weights are set back, and what training with dropout does is
compared with the plain formula in `flashtile.bench.training.dropout`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from flashtile import testing
from flashtile.bench.training import dropout
from flashtile.bench.training.cases import OP, PHASE, TrainCase, make_tokens, make_weights
from flashtile.bench.training.implementations import Implementation, Model, build_plain, token_losses
from flashtile.bench.training.steps import Steps
from flashtile.bench.verify import Verdict

#: Tokens of each sequence that are checked.
_CHECKED_TOKENS = 1024
#: Sequences that the oracle takes at once; it has the S×S matrices of attention in float64.
_ORACLE_BATCH = 2
_OPTIONS: dict[str, Any] = {"lr": 1e-4, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1, "fused": True}

#: Part of a GPU's name -> its dense bfloat16 products in TFLOP/s, by the data sheets of the vendor.
_PEAK_TFLOPS = {"H200": 989.4, "GH200": 989.4, "H100 PCIe": 756.0, "H100": 989.4, "A100": 312.0}


class Training(Steps[Tensor]):
    """Steps on tokens `[B, S + 1]`.

    Args:
        model: what is trained.
        tokens: the batch.
        autocast: products are bfloat16.
        batch: sequences whose gradients are made at once; None = all.
        drops: the model has dropout.
    """

    def __init__(
        self, model: Model, tokens: Tensor, autocast: bool, batch: int | None = None, drops: bool = False
    ) -> None:
        super().__init__(model.parameters, tokens, _OPTIONS, autocast, drops)
        self._model, self._size = model, batch or len(tokens)

    def results(self, phase: str) -> dict[str, Tensor]:
        """Takes the first steps: losses of tokens before and after `[B, S]`, those of the steps, and samples of what
        dropout does."""
        checked = checked_tokens(self._batch)
        found = self.first_losses(checked) | self.samples(checked)
        if checked.shape != self._batch.shape:
            self.step()  # what a whole sequence has no memory for fails here, where a reason is made of it
        return found

    def _parts(self, batch: Tensor) -> Sequence[Tensor]:
        return batch.split(self._size)

    def _share(self, part: Tensor, batch: Tensor) -> float:
        return len(part) / len(batch)

    def _loss(self, batch: Tensor) -> Tensor:
        return self._model.loss(batch)

    def _token_losses(self, batch: Tensor) -> Tensor:
        return token_losses(self._model.logits(batch[:, :-1]), batch)

    def _train(self, mode: bool) -> None:
        self._model.train(mode)


class TrainProblem:
    """A case on a device."""

    op = OP
    phases: tuple[str, ...] = (PHASE,)

    def __init__(self, case: TrainCase, device: torch.device) -> None:
        self._case, self._device = case, device
        self._tokens, self._autocast = make_tokens(case, device), case.dtype == "bf16"
        self._weights = trained_weights(case, device) if case.steps else make_weights(case, device)
        self._exact = self._trained(torch.float64)
        self._eager = self._trained(torch.float32)
        self._dropped = self._sampled() if case.dropout_p else None

    def offers(self, implementation: Implementation) -> bool:
        return True

    def unsupported(self, implementation: Implementation, phase: str) -> str | None:
        return implementation.missing()

    def bind(self, implementation: Implementation) -> Training:
        model = implementation.build(self._case, self._weights)
        found, expected = (sum(t.numel() for t in group) for group in (model.parameters, self._weights.values()))
        if found != expected:
            raise ValueError(f"{implementation.name} has {found} parameters, expected {expected}")
        return Training(model, self._tokens, self._autocast, drops=bool(self._case.dropout_p))

    def judge(self, bound: Training, phase: str, results: dict[str, Tensor]) -> Verdict:
        verdict = judge_losses(results, self._exact, self._eager, self._autocast)
        if self._dropped is None or verdict.why is not None:
            return verdict
        return replace(verdict, why=dropout.judge(results, self._dropped).why)

    def speed(self, phase: str, ms: float) -> dict[str, Any]:
        """Tokens each second, and where the GPU's peak is known, the share of it that the model's products reach."""
        tflops, peak = self._case.flops(phase) / ms / 1e9, peak_tflops(self._device)
        tokens_per_s = self._case.tokens / ms * 1e3
        return {"tflops": tflops, "gbps": None, "tokens_per_s": tokens_per_s, "mfu": peak and tflops / peak}

    def _trained(self, dtype: torch.dtype) -> dict[str, Tensor]:
        """The first losses of the plain formula without dropout; in float32 as autocast has it."""
        weights = {name: weight.to(dtype) for name, weight in self._weights.items()}
        model = build_plain(replace(self._case, dropout_p=0.0), weights)
        autocast = self._autocast and dtype is torch.float32
        checked = checked_tokens(self._tokens)  # alone: of a whole sequence it would hold all scores
        return Training(model, checked, autocast, _ORACLE_BATCH).results(PHASE)

    def _sampled(self) -> dict[str, Tensor]:
        """What dropout does in the plain formula."""
        checked = checked_tokens(self._tokens)

        def make() -> Training:
            model = build_plain(self._case, self._weights)
            return Training(model, checked, self._autocast, _ORACLE_BATCH, drops=True)

        return dropout.sample_reference(make, checked)


def checked_tokens(tokens: Tensor) -> Tensor:
    """Those inputs and labels of each sequence that are checked."""
    return tokens[:, : _CHECKED_TOKENS + 1]


def trained_weights(case: TrainCase, device: torch.device) -> dict[str, Tensor]:
    """The weights after the steps that a case has behind it, of the plain formula without dropout, a new batch in
    each."""
    weights = make_weights(case, device)
    model = build_plain(replace(case, dropout_p=0.0), weights)
    training = Training(model, make_tokens(case, device), case.dtype == "bf16")
    for step in range(case.steps):
        training.step(make_tokens(case, device, seed=1 + step))
    return {name: parameter.detach() for name, parameter in zip(weights, model.parameters, strict=True)}


def judge_losses(
    results: dict[str, Tensor], exact: dict[str, Tensor], eager: dict[str, Tensor], autocast: bool
) -> Verdict:
    """Whether losses of a training are those of the one in float64, as the eager one's are.

    Args:
        results: by name; "loss" are those of steps, the others those of tokens. Names that `eager` lacks are left out.
        exact: of the training in float64.
        eager: of the plain one, in the dtype of what is judged.
        autocast: products are bfloat16.
    """
    worst, wrong = 0.0, []
    for name, expected in eager.items():
        found = results[name]
        worst = max(worst, testing.error(found, exact[name]) if bool(found.isfinite().all()) else float("inf"))
        if name == "loss" and autocast:
            # A mean over thousands of tokens has lost most of their rounding, by chance more of it here than there.
            found, expected = found.bfloat16(), expected.bfloat16()
        try:
            testing.assert_close(name, found, exact[name], expected)
        except AssertionError as error:
            wrong.append(str(error))
    return Verdict(worst, "wrong result: " + "; ".join(wrong) if wrong else None)


def peak_tflops(device: torch.device) -> float | None:
    """Peak rate of bfloat16 products on a known GPU; None on another device."""
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    return next((peak for part, peak in _PEAK_TFLOPS.items() if part in name), None)
