"""`flashtile tune`: measures how kernels are cut best on the GPU of this machine. Opt-in, never part of a call."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from flashtile._backends import tuned
from flashtile._backends.devices import triton_missing
from flashtile._backends.tuned import TunedRow


def unavailable_reason() -> str | None:
    """Why nothing can be tuned here; None where something can. The modules of this package need Triton."""
    if not torch.cuda.is_available():
        return "there is no GPU here, so there is nothing to tune; the CPU backend measures nothing"
    missing = triton_missing()
    return None if missing is None else f"there is nothing to tune without Triton: {missing}"


def rows_in_use(device: torch.device) -> Sequence[TunedRow]:
    """The rows of the table that calls on a device read."""
    table = tuned.table_for(torch.cuda.get_device_name(device)) if device.type == "cuda" else None
    return table.rows if table else ()
