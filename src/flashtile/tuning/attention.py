"""Choices of attention: the portable kernels, and those for Hopper."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

import flashtile
from flashtile._backends.devices import DeviceFacts
from flashtile.io_model.devices import Device
from flashtile.ops.attention.gpu.tile_configs import OWN_KEYS, KernelName, TileKey, shared_memory
from flashtile.ops.attention.gpu.tile_tables import TileConfig
from flashtile.ops.attention.hopper import tuned_rows
from flashtile.ops.attention.hopper.tuned_rows import HopperKey
from flashtile.ops.common.tiles import tile_width
from flashtile.tuning.choice import Choice, Problem, UntunableError, normal
from flashtile.tuning.predict import Compiled, relative_time

#: Queries and keys of a sequence of each length, and what heads · head_dim is.
_LENGTHS, _HIDDEN = {"short": 64, "medium": 1024, "long": 4096}, 2048
#: Registers of a thread for scores and accumulators: fewer leave the tensor cores idle, more spill. On AMD CDNA a warp
#: has twice the threads.
_REGISTERS, _REGISTERS_CDNA = range(48, 211), range(24, 211)
#: Shared memory with which one stage is common.
_LITTLE_MEMORY = 64 * 1024
#: Rows that stay with a program, rows that it walks over, and stages of these.
_SIZES = (32, 64, 128, 256), (32, 64, 128), (2, 3)
#: Scores of a tile at most, in float32 on the ordinary units, whose operands go through registers.
_FLOAT32_SCORES = 4096


def _portable(kernel: KernelName) -> Choice:
    def candidates(device: DeviceFacts, key: TileKey, shipped: TileConfig) -> Iterator[TileConfig]:
        width = max(tile_width(key.head_dim), tile_width(key.head_dim_v))
        queries, keys = key.block_tile or (256, 256)
        accumulators, scores = (2 if kernel == "dkdv" else 1), (1 if kernel == "forward" else 2)
        allowed = _REGISTERS if device.warp_size == 32 else _REGISTERS_CDNA
        small = width >= 256 or key.dtype is torch.float32 or device.shared_memory <= _LITTLE_MEMORY
        residents, movings, stages = ((16, 32, 64, 128), (16, 32, 64), (1, 2, 3)) if small else _SIZES
        for resident, moving, num_warps, num_stages in itertools.product(residents, movings, (4, 8, 16), stages):
            block_m, block_n = (moving, resident) if kernel in OWN_KEYS else (resident, moving)
            tiles = TileConfig(block_m, block_n, num_warps, num_stages, shipped.chunk)
            threads = num_warps * device.warp_size
            registers = resident * (accumulators * width + scores * moving) // threads
            large = key.dtype is torch.float32 and resident * moving > _FLOAT32_SCORES
            divides = queries % block_m == keys % block_n == 0
            if tiles == shipped or large or not divides or registers not in allowed or threads > 1024:
                continue
            if shared_memory(kernel, tiles, key, device) <= device.shared_memory:
                yield tiles

    def problem(key: TileKey, device: torch.device, tokens: int) -> Problem:
        seq, widest = min(_LENGTHS[key.length], tokens), max(key.head_dim, key.head_dim_v)
        batch, heads = tokens // seq, max(1, min(_HIDDEN, tokens) // widest)
        if key.block_tile is not None:
            raise UntunableError("calls with a block mask")
        bias, mask = _tables(key, (heads, seq), device)
        if bias is not None and kernel == "dbias":
            bias.requires_grad_()
        options = {"causal": key.banded, "bias": bias, "mask": mask, "backend": "triton"}
        widths = key.head_dim, key.head_dim, key.head_dim_v
        leaves = [normal(device, key.dtype, batch, seq, heads, width) for width in widths]
        return _attend(leaves, options, kernel != "forward", key.precision == "tf32")

    def predict(key: TileKey, tiles: TileConfig, compiled: Compiled, sheet: Device) -> float:
        return relative_time(kernel, tiles, key, compiled, sheet)

    return Choice(candidates, problem, predict)


def _tables(key: TileKey, sizes: tuple[int, int], device: torch.device) -> tuple[Tensor | None, Tensor | None]:
    """The bias and the mask of a call whose scores have so many bytes of tables."""
    (heads, seq), bias, left = sizes, None, key.table_bytes
    for dtype in (torch.float32, key.dtype):
        if left in (dtype.itemsize, dtype.itemsize + 1):
            bias, left = normal(device, dtype, 1, heads, seq, seq), left - dtype.itemsize
    if left > 1:
        raise UntunableError(f"calls with {key.table_bytes} bytes of tables for each score")
    return bias, normal(device, torch.float32, 1, 1, seq, seq) > -1 if left else None


def _hopper(backward: bool) -> Choice:
    def candidates(device: DeviceFacts, key: HopperKey, shipped: Any) -> Sequence[Any]:
        find = tuned_rows.backward_candidates if backward else tuned_rows.forward_candidates
        return find(key, shipped)

    def problem(key: HopperKey, device: torch.device, tokens: int) -> Problem:
        heads = min(key.heads, 16)
        sizes = (key.rows_q, key.head_dim), (key.rows_k, key.head_dim), (key.rows_k, key.head_dim_v)
        leaves = [normal(device, key.dtype, key.heads // heads, rows, heads, width) for rows, width in sizes]
        options = {
            "causal": key.right,
            "window": None if key.window is None else (key.window, 0 if key.right else None),
            "dropout_p": 0.1 if key.dropout else 0.0,
            "dropout_seed": torch.tensor([1, 2], device=device) if key.dropout else None,
            "softcap": 30.0 if key.softcap else None,
            "deterministic": key.deterministic,
            "backend": "hopper",
        }
        return _attend(leaves, options, backward, tf32=False)

    return Choice(candidates, problem)


def _attend(leaves: list[Tensor], options: dict[str, Any], backward: bool, tf32: bool) -> Problem:
    """A forward, or the backward of one that has run."""

    def forward() -> Any:
        with _products(tf32):
            return flashtile.attention(*leaves, **options)

    if not backward:
        return lambda: [forward()]
    wanted = [leaf.requires_grad_() for leaf in leaves]
    bias = options.get("bias")
    if bias is not None and bias.requires_grad:
        wanted.append(bias)
    out = forward()
    dout = torch.randn_like(out)

    def gradients() -> Sequence[Tensor]:
        with _products(tf32):
            return torch.autograd.grad(out, wanted, dout, retain_graph=True)

    return gradients


@contextmanager
def _products(tf32: bool) -> Iterator[None]:
    """Within this context products of float32 are of TF32, or not."""
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = tf32
    try:
        yield
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before


_KERNELS: tuple[KernelName, ...] = ("forward", "dq", "dkdv", "dbias")
CHOICES: dict[str, Choice] = {
    **{f"attention.{kernel}": _portable(kernel) for kernel in _KERNELS},
    "attention.hopper.forward": _hopper(backward=False),
    "attention.hopper.backward": _hopper(backward=True),
}
