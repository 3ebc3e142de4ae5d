"""Steps of a model and its optimizer, and the first losses, by which they are judged."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from flashtile.bench.memory import step_facts
from flashtile.bench.training import dropout
from flashtile.bench.training.cases import PHASE

_CHECKED_STEPS = 2

Batch = TypeVar("Batch")


class Steps(ABC, Generic[Batch]):
    """A model, its optimizer, and a batch.

    Args:
        parameters: what is trained.
        batch: of all steps that name no other.
        options: of the optimizer, AdamW.
        autocast: products are bfloat16.
        drops: the model has dropout.
    """

    def __init__(
        self, parameters: Sequence[Tensor], batch: Batch, options: dict[str, Any], autocast: bool, drops: bool
    ) -> None:
        self._parameters, self._batch, self._options = parameters, batch, options
        self._autocast_on, self._drops = autocast, drops
        self._device = parameters[0].device
        self._optimizer = torch.optim.AdamW(parameters, **options)

    @abstractmethod
    def _parts(self, batch: Batch) -> Sequence[Batch]:
        """The batch in parts whose gradients are made at once."""

    @abstractmethod
    def _share(self, part: Batch, batch: Batch) -> float | Tensor:
        """The share that a part has in the mean loss of a batch."""

    @abstractmethod
    def _loss(self, batch: Batch) -> Tensor:
        """The mean loss, by the function that is timed."""

    @abstractmethod
    def _token_losses(self, batch: Batch) -> Tensor:
        """The losses of tokens, by the model's logits."""

    @abstractmethod
    def _train(self, mode: bool) -> Any:
        """Switches dropout on or off."""

    @property
    def calls(self) -> Mapping[str, Callable[[], Any]]:
        """What is timed."""
        return {PHASE: self.step}

    def step(self, batch: Batch | None = None) -> Tensor:
        """Forward, backward and optimizer; the loss. Parts of the batch add their gradients up.

        Args:
            batch: in the place of its own.
        """
        loss = self._sum_of_parts(self._batch if batch is None else batch, Tensor.backward)
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        return loss

    def loss(self, batch: Batch) -> Tensor:
        """The mean loss, by the function that a step calls."""
        return self._sum_of_parts(batch)

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
        """Takes steps on one batch, without dropout: losses of tokens before and after, and those of the steps.

        With dropout the weights are then set back, and the optimizer begins again.
        """
        if not self._drops:
            return self._losses_of_steps(batch)
        start = [parameter.detach().clone() for parameter in self._parameters]
        with self.without_dropout():
            found = self._losses_of_steps(batch)
        self._restart(start)
        return found

    def samples(self, batch: Batch) -> dict[str, Tensor]:
        """What dropout does to a batch (`flashtile.bench.training.dropout`); nothing without dropout. Takes steps."""
        return dropout.sample(self, batch) if self._drops else {}

    def _losses_of_steps(self, batch: Batch) -> dict[str, Tensor]:
        before = self.token_losses(batch)
        losses = torch.stack([self.step(batch) for _ in range(_CHECKED_STEPS)])
        return {"token_loss": before, "token_loss_after": self.token_losses(batch), "loss": losses}

    @torch.no_grad()
    def _restart(self, start: Sequence[Tensor]) -> None:
        for parameter, value in zip(self._parameters, start, strict=True):
            parameter.copy_(value)
        self._optimizer = torch.optim.AdamW(self._parameters, **self._options)

    def _sum_of_parts(self, batch: Batch, use: Callable[[Tensor], Any] = lambda loss: None) -> Tensor:
        """The mean loss. `use` is called with what each part has in it."""
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
