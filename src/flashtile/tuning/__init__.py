"""`flashtile tune`: measures how kernels are cut best on the GPU of this machine. Opt-in, never part of a call."""

from __future__ import annotations

import torch

from flashtile._backends.devices import triton_missing


def unavailable_reason() -> str | None:
    """Why nothing can be tuned here; None where something can. The other modules of this package need Triton."""
    if not torch.cuda.is_available():
        return "there is no GPU here, so there is nothing to tune; the CPU backend measures nothing"
    missing = triton_missing()
    return None if missing is None else f"there is nothing to tune without Triton: {missing}"
