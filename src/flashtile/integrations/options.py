"""Checks of the options that an integration keeps for later calls."""

from __future__ import annotations

import torch

import flashtile


def check_options(backend: str, deterministic: bool) -> None:
    """Raises for options that no call takes, as a call would.

    Raises:
        TypeError: `deterministic` is not a bool.
        ValueError: there is no backend of this name.
    """
    q = torch.empty(1, 1, 1, 16, device="meta")
    flashtile.explain(q, q, q, backend=backend, deterministic=deterministic, device="cpu")
