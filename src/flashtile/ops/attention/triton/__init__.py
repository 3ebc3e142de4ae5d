"""The backend "triton", the portable kernels: which calls it serves, and the kernels that it runs. No Triton here."""

from __future__ import annotations

import torch

from flashtile._backends.devices import DeviceFacts
from flashtile.ops.attention.call import Call, KernelChoice
from flashtile.ops.attention.gpu.score_source import unsupported_operation
from flashtile.ops.attention.gpu.tile_configs import (
    Precision,
    TileKey,
    choose_tiles,
    describe_kernel,
    dot_precision,
    phase_kernels,
    tile_widths,
)
from flashtile.ops.attention.gpu.tile_tables import TileConfig
from flashtile.ops.common.backends import Backend, triton_unsupported_reason


def unsupported_reason(call: Call) -> str | None:
    """Why the portable kernels do not serve a call; None where they do."""
    if call.interpreting and call.dtype is torch.bfloat16 and not call.triton_missing:
        return "Triton's interpreter multiplies bfloat16 wrongly; use float16 or float32 there"
    if call.spec.score_program is not None:
        operation = unsupported_operation(call.spec.score_program, call.phase == "backward")
        if operation is not None:
            return f"its kernels have no {operation}, which score_mod uses; write it with other operations"
    return triton_unsupported_reason(call)


def describe(call: Call) -> tuple[KernelChoice, ...]:
    """The kernels of a phase, with their tiles."""
    return tuple(describe_kernel(name, tiles, call) for name, tiles in phase_kernels(call).items())


def invariant_tiles(
    dtype: torch.dtype, head_dim: int, head_dim_v: int, banded: bool, device: DeviceFacts, tf32: bool
) -> tuple[TileConfig, Precision, tuple[int, int]]:
    """Tiles of the forward in the batch-invariant mode, the precision of its products, and the columns of tiles."""
    key = TileKey(dtype, head_dim, head_dim_v, banded, "long", precision=dot_precision(dtype, device, tf32))
    return choose_tiles("forward", device._replace(tuned=None), key), key.precision, tile_widths(key)


BACKEND = Backend("triton", "flashtile.ops.attention.triton.launch", unsupported_reason, describe)
