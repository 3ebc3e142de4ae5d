"""What integrations do alike: options kept for later calls, and other libraries' words in those of flashtile."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import flashtile


def check_options(backend: str, deterministic: bool) -> None:
    """Raises TypeError or ValueError for options that no call takes, as a call would."""
    q = torch.empty(1, 1, 1, 16, device="meta")
    flashtile.explain(q, q, q, backend=backend, deterministic=deterministic, device="cpu")


def token_window(tokens: int | None, causal: bool) -> tuple[int, int] | None:
    """The window of a layer that counts the token itself; None for none."""
    return None if tokens is None else (tokens - 1, 0 if causal else tokens - 1)


def widened(tensor: Tensor, query: Tensor) -> Tensor:
    """A tensor beside the scores, in a dtype that `flashtile.attention` takes; widening loses nothing."""
    wide = torch.float64 if query.dtype is torch.float64 else torch.float32
    narrower = (torch.float16, torch.bfloat16, torch.float32)[: 3 if wide is torch.float64 else 2]
    return tensor.to(wide) if tensor.dtype in narrower and tensor.dtype is not query.dtype else tensor


def cache_factors(k_scale: Tensor | None, v_scale: Tensor | None) -> dict[str, Any]:
    """The factors of a cache in 8 bits, each one number."""
    given = {"descale_k": k_scale, "descale_v": v_scale}
    return {name: None if factor is None else factor.reshape(()) for name, factor in given.items()}


def not_served(name: str, expected: str, got: Any) -> NotImplementedError:
    """The error of an attention backend."""
    return NotImplementedError(f"{name}: expected {expected}, got {got}; choose another attention backend")
