"""What a choice needs so that it can be tuned: cuts that may be faster, and a call whose time they decide."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flashtile._backends.devices import DeviceFacts
from flashtile.io_model.devices import Device
from flashtile.tuning.predict import Compiled

#: A call of flashtile's public functions, without arguments. Two of them give the same results.
Problem = Callable[[], Sequence[Tensor]]


class UntunableError(ValueError):
    """There is no problem for a key; the message says for which calls."""


class Choice(NamedTuple):
    """A choice, as `_backends/tuned.py` has it.

    Attributes:
        candidates: from a device, a key and the shipped cut, cuts that fit the device.
        problem: from a key, a device and a number of tokens, a call whose kernel is cut so. The size is a common one,
            of about so many tokens, where the key does not say it. Raises `UntunableError`.
        predict: from a key, a cut, what the compiler said and a data sheet, a time to compare cuts by; None where
            there is no model.
    """

    candidates: Callable[[DeviceFacts, Any, Any], Iterable[Any]]
    problem: Callable[[Any, torch.device, int], Problem]
    predict: Callable[[Any, Any, Compiled, Device], float] | None = None


def normal(device: torch.device, dtype: torch.dtype, *shape: int) -> Tensor:
    """A tensor of standard-normal numbers."""
    return torch.randn(shape, device=device).to(dtype)
