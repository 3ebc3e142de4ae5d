"""The backend "triton", the portable kernels: which calls it serves, and the kernels that it runs. No Triton here."""

from __future__ import annotations

import torch

from flashtile._backends.devices import DeviceFacts
from flashtile.ops.attention.call import Call, KernelChoice, summarise
from flashtile.ops.attention.gpu.score_source import unsupported_operation
from flashtile.ops.attention.triton.configs import (
    KernelName,
    Precision,
    TileKey,
    choose_tiles,
    dot_precision,
    shared_memory,
    tile_key_for,
    tile_widths,
    tiles_with_keys,
)
from flashtile.ops.attention.triton.tile_tables import TileConfig
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
    if call.phase == "forward":
        return (describe_kernel("forward", call),)
    key = tile_key_for(call)
    tiles = choose_tiles("dq", call.machine.facts, key)
    with_keys = tiles_with_keys(call, key, tiles)
    if with_keys is not None:
        return (_described("short_backward", with_keys, key),)
    return _described("dq", tiles, key), describe_kernel("dkdv", call), *describe_bias_gradient(call)


def invariant_tiles(
    dtype: torch.dtype, head_dim: int, head_dim_v: int, banded: bool, device: DeviceFacts, tf32: bool
) -> tuple[TileConfig, Precision, tuple[int, int]]:
    """Tiles of the forward in the batch-invariant mode, the precision of its products, and the columns of tiles."""
    key = TileKey(dtype, head_dim, head_dim_v, banded, "long", precision=dot_precision(dtype, device, tf32))
    return choose_tiles("forward", device, key), key.precision, tile_widths(key)


def describe_bias_gradient(call: Call) -> tuple[KernelChoice, ...]:
    """The kernel of a bias's gradient, where the bias requires grad. The Hopper backward runs it too."""
    return (describe_kernel("dbias", call),) if call.wanted.bias else ()


def describe_kernel(name: KernelName, call: Call) -> KernelChoice:
    """One kernel, with the tiles that it has for a call."""
    key = tile_key_for(call)
    return _described(name, choose_tiles(name, call.machine.facts, key), key)


def _described(name: KernelName, tiles: TileConfig, key: TileKey) -> KernelChoice:
    memory = shared_memory(name, tiles, key)
    chunk = f", {tiles.chunk} columns of the head at a time" if tiles.chunk else ""
    block, warps = (tiles.block_m, tiles.block_n), f"{tiles.num_warps} warps"
    summary = summarise(block, warps, tiles.num_stages, memory, more=chunk)
    return KernelChoice(name, tiles, memory, "triton", summary=summary)


BACKEND = Backend("triton", "flashtile.ops.attention.triton.launch", unsupported_reason, describe)
