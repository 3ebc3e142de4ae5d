"""How long a portable attention kernel takes with some tiles, relative to other tiles.

The model is for ordering candidates, and for cards on which nobody has measured. Its time is that of a score, in
seconds, up to a factor that the tiles of one kernel and one call share. A program owns a tile of rows (queries, or keys
for dk and dv) and goes through the other side in steps. One step takes, in cycles of a multiprocessor::

    products  the larger of: operations / tensor cores' rate; operands' bytes / 128 from shared memory
    scores    exponentials / 16, or the other instructions for each score / the float32 units
    spills    bytes that are spilled, each written and read, to and from the L1 cache, at 128 a cycle
    loads     bytes of the tiles that move / 64 from the L2 cache
    waiting   for the chain of instructions within a step, and for memory with fewer than three stages

The busiest unit takes its own time; all else on the way of one program is divided among the programs that share a
multiprocessor: `max(loads, busiest + rest / programs)`.

Checked against 223 measurements on an H200 (`tests/tuning/test_predict.py`): for each kernel and head size the rank
correlation is 0.87 to 0.98, and the best prediction takes at most 1.19 times the least time. Four numbers were chosen
by these, marked so below. With any of them halved or doubled the correlations stay above 0.80, or 0.75 with half the
`_SPILLS`.

Not modelled: AMD's GPUs and sm_75; the beginning and end of a program, and the last, partial wave of programs; misses
of the L2 cache; conflicts in shared memory; products that ptxas makes wait for one another; splitting float32 operands;
dropout and score functions. Other cards than sm_90 follow from data sheets and from the layouts that Triton 3.6 gives
to products; nothing was measured there.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

from flashtile.io_model.devices import Device
from flashtile.ops.attention.gpu.tile_configs import OWN_KEYS, KernelName, TileKey, tile_widths
from flashtile.ops.attention.gpu.tile_tables import TileConfig


class Compiled(NamedTuple):
    """What the compiler said: registers and spilled bytes of a thread, bytes of shared memory of a program."""

    registers: int
    spilled: int
    shared_memory: int


#: Bytes per cycle of shared memory and the L1 cache, and of a multiprocessor's port to the L2 cache (Jia et al.,
#: "Dissecting the NVIDIA Volta GPU architecture via microbenchmarking", 2018, sections 3.2 and 3.3; unchanged since).
_SHARED, _PORT = 128, 64
#: 32-bit registers of a multiprocessor, and bytes of shared memory that each program costs (CUDA programming guide).
_REGISTERS, _OVERHEAD = 65536, 1024
#: Exponentials per cycle of a multiprocessor, as in `io_model.devices`.
_EXPONENTIALS = 16
#: Chosen by the measurements. Instructions for each score: scale, maximum or difference, sum, conversion, addresses.
_INSTRUCTIONS = 10
#: Chosen by the measurements. Cycles of a step in which nothing of a program runs: barriers, waits for products,
#: reductions. And of a load from the L2 cache with what surrounds it.
_CHAIN, _LOAD = 600, 500
#: Chosen by the measurements. How often a spilled byte passes in a step: static code has several reads for each.
_SPILLS = 4

#: Warps that a multiprocessor holds (CUDA programming guide), and rows of an instruction for products: mma of a warp
#: has 16, wgmma of four warps 64, tcgen05 of a program 128 (PTX manual).
_WARPS = {"sm_80": 64, "sm_86": 48, "sm_89": 48, "sm_90": 64, "sm_100": 64, "sm_120": 48}
_ROWS = {"sm_90": 64, "sm_100": 128}
#: Products of the tensor cores' 16-bit rate for each product (TF32 has half of that rate on all data sheets).
_PRODUCTS = {"tf32": 2, "bf16x6": 6}
#: Tokens of the longest sequence of each class, for what tiles waste at the edge of a band.
_TOKENS = {"short": 64, "medium": 1024, "long": 4096}


def is_modelled(device: Device) -> bool:
    """Whether there is a prediction for a device."""
    return device.arch in _WARPS


def relative_time(kernel: KernelName, tiles: TileConfig, key: TileKey, compiled: Compiled, device: Device) -> float:
    """Seconds of the device for a score, up to a factor. `kernel`: "forward", "dq", "dkdv" or "dbias"."""
    assert is_modelled(device), f"{device.arch}: not modelled"
    clocks = device.exponentials / _EXPONENTIALS  # of all multiprocessors in a second
    owned, moving = (tiles.block_n, tiles.block_m) if kernel in OWN_KEYS else (tiles.block_m, tiles.block_n)
    width, width_v = tile_widths(key)
    itemsize = 6 if key.precision == "bf16x6" else key.dtype.itemsize
    operations, elements, copies = _products(kernel, owned, moving, width, width_v, tiles.num_warps, device.arch)
    single = key.dtype is torch.float32
    rate = device.flops[torch.float32 if single and key.precision == "ieee" else torch.bfloat16] / clocks
    rate *= min(1, owned / _ROWS.get(device.arch, 16)) / _PRODUCTS.get(key.precision, 1)
    products = max(operations / rate, elements * itemsize / _SHARED)

    lanes = device.flops[torch.float32] / clocks / 2
    scores = copies * owned * moving * max(1 / _EXPONENTIALS, _INSTRUCTIONS / lanes)
    if kernel == "forward":
        scores += owned * width_v / lanes  # the sum so far is scaled anew
    spills = _SPILLS * compiled.spilled * 32 * tiles.num_warps / _SHARED

    rows = moving + (owned if tiles.chunk or kernel == "dbias" else 0)
    loads = (rows * (width + width_v) * key.dtype.itemsize + owned * moving * key.table_bytes) / _PORT
    pieces = 2 * math.ceil(width / tiles.chunk) if tiles.chunk else 2
    stages = 1 if tiles.chunk else tiles.num_stages  # each product waits for its chunks
    waiting = _CHAIN + {1: pieces * _LOAD + loads, 2: _LOAD}.get(stages, 0)

    busiest = max(products, scores) + spills
    rest = min(products, scores) + waiting
    cycles = max(loads, busiest + rest / _programs(tiles, compiled, device))
    edges = (owned + moving) / _TOKENS[key.length] if key.banded else 0
    return cycles * (1 + edges) / (owned * moving * clocks)


def _programs(tiles: TileConfig, compiled: Compiled, device: Device) -> int:
    """Programs that a multiprocessor holds; registers are given out in eights."""
    registers = -(-compiled.registers // 8) * 8 * 32 * tiles.num_warps
    memory = device.shared_memory // (compiled.shared_memory + _OVERHEAD)
    return max(1, min(_REGISTERS // registers, memory, _WARPS[device.arch] // tiles.num_warps))


def _products(
    kernel: KernelName, owned: int, moving: int, width: int, width_v: int, warps: int, arch: str
) -> tuple[float, float, float]:
    """Floating-point operations of a step, elements that they read from shared memory, and how many warps compute each
    score, because a layout has more rows than the tile.

    Triton lays the warps of products that follow one another along rows: for wgmma those of the scores, for mma
    whichever side is longer (`warpsPerTileV3`, `warpsPerTileV2` in its AccelerateMatmul.cpp).
    """
    rows = _ROWS.get(arch, 16) if owned >= 64 else 16

    def along(columns: int, of_scores: bool) -> int:
        if rows == 16:
            return warps if owned >= columns else 1
        return warps if of_scores else min(warps, owned // 16)

    depths = (width,) if kernel == "forward" else (width, width_v)
    outputs = {"forward": (width_v,), "dq": (width,), "dkdv": (width, width_v)}.get(kernel, ())
    of_scores = along(moving, True)
    copies = max(1.0, 16 * of_scores / owned, 8 * warps / of_scores / moving) if rows < 128 else 1.0
    operations = elements = 0.0
    for depth in depths:
        operations += 2 * copies * owned * moving * depth
        elements += moving * depth * (of_scores if rows == 16 else copies * max(1, owned / rows))
        if rows > 16:  # mma keeps what the program owns in registers
            elements += copies * owned * depth
    for columns in outputs:
        operations += 2 * owned * columns * moving
        elements += columns * moving * (along(columns, False) if rows == 16 else max(1, owned / rows))
        if rows == 128 or along(columns, False) != of_scores:  # the weights change their layout
            elements += owned * moving * (1 + warps / along(columns, False))
    return operations, elements, copies
