"""Tile sizes of the attention kernels: frozen tables per architecture, and the pure function that reads them.

Nothing is tuned on a user's machine. Rows of the Hopper tables were measured (`tools/tune_attention.py`, H200, bf16,
4 sequences of 4,096 tokens unless said otherwise, heads · head_dim = 2048); the reason stands beside each. Rows of
the others follow from registers and shared memory. A row that does not fit a device's shared memory is shrunk until
it does.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Literal, NamedTuple

import torch

from flashtile._backends.devices import DeviceFacts
from flashtile.ops.attention.spec import AttentionSpec, out_dtype
from flashtile.ops.common.tiles import tile_width

Kernel = Literal["forward", "dq", "dkdv", "dbias", "column_sums"]

#: How products are computed, in Triton's words: of operands as they are, of float32 rounded to TF32, or of float32 as
#: six products of bfloat16.
Precision = Literal["ieee", "tf32", "bf16x6"]

#: Bytes of an operand's element in shared memory: of float32 in three bfloat16 numbers, which add up to it.
_SPLIT_BYTES = 6

#: Those whose programs own keys and walk over queries; the others own queries and walk over keys.
OWN_KEYS = ("dkdv", "column_sums")

#: Sequences from this length on fill a device with large tiles too.
LONG = 2048


class TileConfig(NamedTuple):
    """How a kernel is cut.

    Attributes:
        block_m: query rows of a tile.
        block_n: key columns of a tile.
        num_warps: warps per program.
        num_stages: tiles in flight from device memory.
        chunk: columns of the head that are multiplied at a time; 0 = all of them.
        max_registers: of a thread, so that more programs fit a multiprocessor; None = as many as it takes.
    """

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    chunk: int = 0
    max_registers: int | None = None


class Situation(NamedTuple):
    """What the choice of tiles looks at, beside the kernel and the device.

    Attributes:
        dtype: of q, k and v as they are multiplied.
        head_dim: of q and k.
        head_dim_v: of v.
        banded: a causal mask or a window: small tiles waste less at its edges.
        long: at least `LONG` queries and keys.
        table_bytes: bytes of bias and mask for each score, whose tiles come from memory as well; 0 without, 1 for a
            mask alone.
        block_tile: (queries, keys) of a block mask's tiles; None without one.
        precision: of the products.
    """

    dtype: torch.dtype
    head_dim: int
    head_dim_v: int
    banded: bool
    long: bool
    table_bytes: int = 0
    block_tile: tuple[int, int] | None = None
    precision: Precision = "ieee"


def situation_of(
    dtype: torch.dtype,
    head_dims: tuple[int, int],
    spec: AttentionSpec,
    long: bool,
    tables: Iterable[torch.dtype],
    precision: Precision,
) -> Situation:
    """The situation of a call. `tables`: the dtypes of its bias and its mask."""
    block_tile = None if spec.block_shape is None else spec.block_shape[2:]
    table_bytes = sum(table.itemsize for table in tables)
    return Situation(out_dtype(dtype), *head_dims, spec.banded, long, table_bytes, block_tile, precision)


def is_long(max_seqlen_q: int, max_seqlen_k: int) -> bool:
    return max_seqlen_q >= LONG and max_seqlen_k >= LONG


def choose_tiles(kernel: Kernel, device: DeviceFacts, situation: Situation) -> TileConfig:
    """The tiles of a kernel on a device: the first row of its table that holds the head, shrunk to fit.

    With a block mask, each lies in one tile of the mask: both are multiples of a power of two that a kernel can take.
    """
    if device.is_cuda and device.capability < 80:
        # Triton has no tensor-core products there: it widens 16-bit operands and multiplies as it does float32.
        situation = situation._replace(dtype=torch.float32)
    width = _width(situation)
    if situation.precision == "bf16x6":
        table = _FLOAT32_SPLIT[device.arch]
    elif situation.dtype is torch.float32:
        table = _FLOAT32
    elif kernel == "dbias":
        table = _HOPPER_BIAS if device.arch == "sm_90" and width <= 128 else _BIAS_GRADIENT
    elif kernel == "column_sums" and not device.arch.startswith("gfx1"):
        table = _COLUMN_SUMS
    elif device.arch == "sm_90" and situation.block_tile and width <= 128:
        table = _HOPPER_BLOCKS
    elif device.arch == "sm_90" and situation.table_bytes and width <= 128:
        table = _HOPPER_MASK if situation.table_bytes == 1 else _HOPPER_BIAS
    elif device.arch == "sm_90":
        table = {
            (False, False): _HOPPER_FULL,
            (False, True): _HOPPER_FULL,
            (True, False): _HOPPER_BANDED_SHORT,
            (True, True): _HOPPER_BANDED,
        }[situation.banded, situation.long]
    elif device.is_cuda:
        table = _TENSOR_CORES
    elif device.arch.startswith("gfx1"):
        table = _RDNA
    else:
        table = _AMD
    preferred = next(tiles for widest, tiles in table[kernel] if width <= widest)
    tiles = _fit(kernel, preferred, situation, device.shared_memory)
    if situation.block_tile:
        queries, keys = situation.block_tile
        tiles = tiles._replace(block_m=math.gcd(tiles.block_m, queries), block_n=math.gcd(tiles.block_n, keys))
    return tiles


def drops_bounds(kernel: Kernel, situation: Situation) -> bool:
    """Whether tiles that divide their sequence are loaded without a bounds check. Measured 1-6 % faster, but for
    dk/dv of 256 columns, where the compiler then spills (3.97 ms against 3.61)."""
    return kernel != "dkdv" or _width(situation) <= 128


def drops_masks(situation: Situation) -> bool:
    """Whether the branch for masks is left out where no tile needs one. Measured up to 13 % faster for heads up to
    128 columns (dk/dv 1.74 ms against 1.99), and 8 % slower past them (forward 1.12 against 1.01)."""
    return _width(situation) <= 128


def dot_precision(dtype: torch.dtype, device: DeviceFacts, allow_tf32: bool) -> Precision:
    """How products are computed.

    float32 is multiplied as TF32 where PyTorch's own setting allows that. Otherwise products have the error of float32:
    on tensor cores as six products of bfloat16, where those are faster, and on the ordinary units elsewhere.
    """
    if dtype is not torch.float32 or not device.is_cuda:
        return "ieee"
    if allow_tf32:
        return "tf32"
    return "bf16x6" if device.arch in _FLOAT32_SPLIT else "ieee"


def tile_widths(situation: Situation) -> tuple[int, int]:
    """Columns of tiles of q and k, and of v. The parts of split operands take turns in one place, where two swizzles
    make ptxas 12.8 compute wrong addresses (`swizzles_differ`), so the narrower tile is made wider."""
    width, width_v = tile_width(situation.head_dim), tile_width(situation.head_dim_v)
    least = min(max(width, width_v), 64) if situation.precision == "bf16x6" else 0
    return max(width, least), max(width_v, least)


def _width(situation: Situation) -> int:
    return max(tile_widths(situation))


def shared_memory(kernel: Kernel, tiles: TileConfig, situation: Situation) -> int:
    """Estimate of the shared memory of a program, in bytes; tests compile every row and hold it to the limit."""
    width, width_v = tile_widths(situation) if kernel != "column_sums" else (tile_widths(situation)[0], 0)
    scores = tiles.block_m * tiles.block_n
    moving, resident = (tiles.block_m, tiles.block_n) if kernel in OWN_KEYS else (tiles.block_n, tiles.block_m)
    # A tile is split when its turn comes, and those that move take turns in one place. Ahead of that they are whole.
    split = situation.precision == "bf16x6"
    itemsize = situation.dtype.itemsize
    operand_bytes, multiplied = (_SPLIT_BYTES, max(width, width_v)) if split else (itemsize, width + width_v)
    if tiles.chunk:
        tile_bytes = operand_bytes * (tiles.chunk * (moving + resident) + moving * max(width, width_v))
    elif kernel == "dbias":
        elements = (moving + resident) * max(width, width_v)
        tile_bytes = elements * (operand_bytes + itemsize * (tiles.num_stages - 1))
    else:
        resident_width = width if kernel == "forward" else width + width_v
        tile_bytes = operand_bytes * (resident * resident_width + moving * multiplied)
        tile_bytes += itemsize * moving * (width + width_v) * (tiles.num_stages - 1)
    # Beside the tiles: scores that change their layout on the way to the next product, and reductions.
    exchange = max(scores * (_SPLIT_BYTES if split else itemsize), 2048)
    # Tiles of bias and mask go through registers, so one stage fewer of them lies in shared memory; where they are
    # transposed, they change their layout too.
    tables = scores * (situation.table_bytes + (situation.block_tile is not None))
    transposed = tables if kernel in ("dkdv", "dbias") else 0
    if kernel == "dbias":  # reads them once
        return tile_bytes + max(exchange, transposed)
    return tile_bytes + max(exchange, transposed) + (tiles.num_stages - 1) * tables


def _fit(kernel: Kernel, tiles: TileConfig, situation: Situation, limit: int) -> TileConfig:
    """Fewer stages first, then narrower tiles on the side that moves, then on the side that stays, then chunks."""
    while shared_memory(kernel, tiles, situation) > limit and not tiles.chunk:
        moving, resident = (tiles.block_m, tiles.block_n) if kernel in OWN_KEYS else (tiles.block_n, tiles.block_m)
        stages, chunk = tiles.num_stages, 0
        if stages > 2 or (stages > 1 and moving <= 32):
            stages -= 1
        elif moving > 16:
            moving //= 2
        elif resident > 16:
            resident //= 2
        else:
            chunk = 32
        block_m, block_n = (moving, resident) if kernel in OWN_KEYS else (resident, moving)
        tiles = tiles._replace(block_m=block_m, block_n=block_n, num_stages=stages, chunk=chunk)
    return tiles


_Table = dict[str, tuple[tuple[int, TileConfig], ...]]

#: sm_90, no mask. Two programs or two warpgroups per multiprocessor, so that one multiplies while another
#: exponentiates. In brackets: milliseconds of the row, and of the next best.
_HOPPER_FULL: _Table = {
    "forward": (
        # (1.22; 64 × 64 on 4 warps 1.22, slower at 8,192 tokens)
        (64, TileConfig(block_m=128, block_n=64, num_warps=8, num_stages=3)),
        # 491 TFLOP/s at 8,192 tokens; 256 × 64 on 16 warps 488, 128 × 128 on 8 457
        (128, TileConfig(block_m=64, block_n=64, num_warps=4, num_stages=3)),
        (256, TileConfig(block_m=128, block_n=64, num_warps=8, num_stages=2)),  # (1.01; 32 keys in 3 stages 1.19)
        (512, TileConfig(block_m=64, block_n=32, num_warps=8, num_stages=1, chunk=64)),
    ),
    "dq": (
        # (1.28; 4 warps 1.33, 64 rows on 4 warps 1.35)
        (64, TileConfig(block_m=128, block_n=64, num_warps=8, num_stages=3)),
        (128, TileConfig(block_m=128, block_n=64, num_warps=8, num_stages=3)),  # (1.37; 32 keys on 4 warps 1.43)
        (256, TileConfig(block_m=128, block_n=32, num_warps=8, num_stages=3)),  # (1.40; 64 keys in 1 stage 1.81)
        (512, TileConfig(block_m=64, block_n=16, num_warps=8, num_stages=1, chunk=64)),
    ),
    "dkdv": (
        # (1.97; 32 queries 1.97, slower at 8,192 tokens)
        (64, TileConfig(block_m=64, block_n=64, num_warps=4, num_stages=3)),
        # (1.74; 64 keys × 32 queries on 4 warps 1.88)
        (128, TileConfig(block_m=64, block_n=128, num_warps=8, num_stages=3)),
        (256, TileConfig(block_m=64, block_n=64, num_warps=8, num_stages=2)),  # (3.61; 32 queries in 3 stages 4.35)
        (512, TileConfig(block_m=32, block_n=32, num_warps=8, num_stages=1, chunk=64)),
    ),
}

#: sm_90, a causal mask or a window, long sequences.
_HOPPER_BANDED: _Table = {
    "forward": (
        (64, TileConfig(block_m=128, block_n=64, num_warps=8, num_stages=3)),  # (0.71; 64 × 64 on 4 warps 0.73)
        (128, TileConfig(block_m=64, block_n=64, num_warps=4, num_stages=3)),  # (0.65; 128 × 128 on 8 warps 0.67)
        *_HOPPER_FULL["forward"][2:],
    ),
    "dq": (
        (64, TileConfig(block_m=64, block_n=64, num_warps=4, num_stages=3)),  # (0.76; 128 rows 0.77)
        (128, TileConfig(block_m=128, block_n=64, num_warps=8, num_stages=3)),  # (0.79; 64 × 64 on 4 warps 0.85)
        *_HOPPER_FULL["dq"][2:],
    ),
    "dkdv": _HOPPER_FULL["dkdv"],  # (1.10, 1.97 at 8,192 tokens, 1.92; 64 keys × 32 queries 1.10, 2.13)
}

#: sm_90, a causal mask or a window, short sequences: small tiles waste less at the diagonal.
_HOPPER_BANDED_SHORT: _Table = {
    "forward": (
        # (1,024 tokens: 0.23 and 0.21; 128 rows 0.24 and 0.23)
        (128, TileConfig(block_m=64, block_n=64, num_warps=4, num_stages=3)),
        *_HOPPER_FULL["forward"][2:],
    ),
    "dq": _HOPPER_BANDED["dq"],
    "dkdv": (
        # (1,024 tokens: 0.35 and 0.34; the long rows 0.37 and 0.36)
        (128, TileConfig(block_m=32, block_n=64, num_warps=4, num_stages=3)),
        *_HOPPER_FULL["dkdv"][2:],
    ),
}

#: Other NVIDIA architectures, 16-bit.
_TENSOR_CORES: _Table = {
    "forward": (
        (64, TileConfig(block_m=128, block_n=64, num_warps=4, num_stages=3)),
        (128, TileConfig(block_m=128, block_n=64, num_warps=8, num_stages=3)),
        (256, TileConfig(block_m=64, block_n=32, num_warps=4, num_stages=2)),
        (512, TileConfig(block_m=32, block_n=32, num_warps=8, num_stages=1, chunk=64)),
    ),
    "dq": (
        (64, TileConfig(block_m=64, block_n=64, num_warps=4, num_stages=3)),
        (128, TileConfig(block_m=64, block_n=64, num_warps=8, num_stages=2)),
        (256, TileConfig(block_m=64, block_n=32, num_warps=8, num_stages=2)),
        (512, TileConfig(block_m=32, block_n=16, num_warps=8, num_stages=1, chunk=64)),
    ),
    "dkdv": (
        # 64 queries spill under a causal mask (sm_80 2,680 bytes a thread, sm_86 312)
        (64, TileConfig(block_m=32, block_n=64, num_warps=4, num_stages=3)),
        (128, TileConfig(block_m=64, block_n=64, num_warps=8, num_stages=2)),
        (256, TileConfig(block_m=32, block_n=32, num_warps=8, num_stages=1)),
        (512, TileConfig(block_m=16, block_n=16, num_warps=8, num_stages=1, chunk=64)),
    ),
}

#: AMD CDNA, 16-bit. Loads go through registers there, so more stages cost registers, not shared memory.
_AMD: _Table = {
    "forward": (
        (64, TileConfig(block_m=128, block_n=64, num_warps=4, num_stages=2)),
        (128, TileConfig(block_m=128, block_n=32, num_warps=4, num_stages=2)),
        (256, TileConfig(block_m=64, block_n=32, num_warps=4, num_stages=1)),
        (512, TileConfig(block_m=32, block_n=16, num_warps=4, num_stages=1, chunk=64)),
    ),
    "dq": (
        (64, TileConfig(block_m=64, block_n=64, num_warps=4, num_stages=2)),
        (128, TileConfig(block_m=64, block_n=32, num_warps=4, num_stages=1)),
        (256, TileConfig(block_m=32, block_n=32, num_warps=4, num_stages=1)),
        (512, TileConfig(block_m=16, block_n=16, num_warps=4, num_stages=1, chunk=64)),
    ),
    "dkdv": (
        (64, TileConfig(block_m=64, block_n=64, num_warps=4, num_stages=2)),
        (128, TileConfig(block_m=32, block_n=64, num_warps=4, num_stages=1)),
        (256, TileConfig(block_m=32, block_n=32, num_warps=4, num_stages=1)),
        (512, TileConfig(block_m=16, block_n=16, num_warps=4, num_stages=1, chunk=64)),
    ),
}

#: AMD RDNA, 16-bit. A program of as many warps has half the threads of CDNA, and a thread half the registers: these
#: are the largest tiles that compile without spills, or (dq and dk/dv of 128 and 256 columns) with the fewest.
_RDNA: _Table = {
    "forward": (
        (64, TileConfig(block_m=128, block_n=32, num_warps=8, num_stages=1)),
        (128, TileConfig(block_m=64, block_n=32, num_warps=8, num_stages=1)),
        (256, TileConfig(block_m=32, block_n=16, num_warps=8, num_stages=1)),
        (512, TileConfig(block_m=16, block_n=16, num_warps=8, num_stages=1, chunk=32)),
    ),
    "dq": (
        (64, TileConfig(block_m=64, block_n=32, num_warps=8, num_stages=1)),
        (128, TileConfig(block_m=32, block_n=16, num_warps=8, num_stages=1)),
        (256, TileConfig(block_m=32, block_n=16, num_warps=8, num_stages=1)),
        (512, TileConfig(block_m=16, block_n=16, num_warps=8, num_stages=1, chunk=32)),
    ),
    "column_sums": (
        (64, TileConfig(block_m=64, block_n=32, num_warps=8, num_stages=1)),
        (256, TileConfig(block_m=32, block_n=32, num_warps=8, num_stages=1)),
        (512, TileConfig(block_m=16, block_n=16, num_warps=8, num_stages=1, chunk=32)),
    ),
    "dkdv": (
        (64, TileConfig(block_m=16, block_n=128, num_warps=8, num_stages=1)),
        (128, TileConfig(block_m=16, block_n=32, num_warps=8, num_stages=1)),
        (256, TileConfig(block_m=16, block_n=32, num_warps=8, num_stages=1)),
        (512, TileConfig(block_m=16, block_n=16, num_warps=8, num_stages=1, chunk=32)),
    ),
}

#: sm_90, scores with a mask and no bias, heads up to 128 columns. Measured with a bias, as the rows of `_HOPPER_BIAS`
#: were before they changed; a mask alone was not.
_HOPPER_MASK: _Table = {
    "forward": (
        (64, TileConfig(block_m=128, block_n=64, num_warps=4, num_stages=3)),
        (128, TileConfig(block_m=128, block_n=64, num_warps=8, num_stages=3)),
    ),
    "dq": (
        (64, TileConfig(block_m=64, block_n=32, num_warps=4, num_stages=3)),
        (128, TileConfig(block_m=128, block_n=64, num_warps=8, num_stages=3)),
    ),
    "dkdv": ((128, TileConfig(block_m=32, block_n=64, num_warps=4, num_stages=2)),),
}

#: sm_90, scores with a bias, heads up to 128 columns (4 sequences of 4,096 tokens, 16 heads, a bias shared by the
#: sequences).
_HOPPER_BIAS: _Table = {
    "forward": (
        # (0.785; 64 × 64 on 4 warps 0.804, 128 × 64 on 4 0.850)
        (64, TileConfig(block_m=128, block_n=64, num_warps=8, num_stages=3)),
        # (1.37; 64 × 64 on 4 warps in 2 stages 1.60, 128 × 128 on 8 1.65)
        (128, TileConfig(block_m=128, block_n=64, num_warps=8, num_stages=3)),
    ),
    "dq": (
        # (1.03; 128 × 32 on 8 warps 1.05, 64 keys 1.13)
        (64, TileConfig(block_m=64, block_n=32, num_warps=4, num_stages=3)),
        # (1.55; 64 × 64 on 4 warps in 2 stages 1.80)
        (128, TileConfig(block_m=128, block_n=64, num_warps=8, num_stages=3)),
    ),
    "dkdv": (
        # (1.37; 64 × 128 on 8 warps 1.45, 32 × 64 1.63)
        (64, TileConfig(block_m=64, block_n=64, num_warps=4, num_stages=3)),
        # (2.31; 32 × 128 on 8 warps 2.49, 2 stages 2.77)
        (128, TileConfig(block_m=32, block_n=64, num_warps=4, num_stages=3)),
    ),
    "dbias": (
        # (2.05; 3 stages 2.06, 128 × 64 on 8 warps of 128 registers 2.18)
        (64, TileConfig(block_m=64, block_n=64, num_warps=4, num_stages=2)),
        # Two programs on each multiprocessor (2.26; 64 × 64 on 4 warps 2.43, without the limit 3.34).
        (128, TileConfig(block_m=128, block_n=64, num_warps=8, num_stages=2, max_registers=128)),
    ),
}

#: sm_90, a block mask, heads up to 128 columns (4 sequences of 4,096 tokens, a quarter of the tiles, all partial).
_HOPPER_BLOCKS: _Table = {
    "forward": (
        # (0.30 and 0.48; 128 queries on 8 warps 0.32 and 0.55)
        (128, TileConfig(block_m=64, block_n=64, num_warps=4, num_stages=3)),
    ),
    "dq": (
        (64, TileConfig(block_m=64, block_n=64, num_warps=4, num_stages=3)),  # (0.26; 128 queries on 8 warps 0.36)
        (128, TileConfig(block_m=64, block_n=32, num_warps=4, num_stages=3)),  # (0.51; 128 × 64 on 8 warps 0.57)
    ),
    "dkdv": _HOPPER_FULL["dkdv"],  # (0.31 and 0.55; 32 queries 0.37 and 0.58)
}

#: The gradient of the bias, 16-bit, everywhere else: as many accumulators as dk/dv, and nothing resident.
_BIAS_GRADIENT: _Table = {
    "dbias": (
        (64, TileConfig(block_m=64, block_n=64, num_warps=4, num_stages=2)),
        (128, TileConfig(block_m=128, block_n=64, num_warps=8, num_stages=2)),
        (256, TileConfig(block_m=64, block_n=32, num_warps=4, num_stages=1)),
        (512, TileConfig(block_m=32, block_n=32, num_warps=4, num_stages=1, chunk=64)),
    ),
}

#: Column sums, 16-bit, everywhere but on RDNA; not measured. 64 rows of the product, the fewest that Hopper's take.
_COLUMN_SUMS: _Table = {
    "column_sums": (
        (128, TileConfig(block_m=64, block_n=64, num_warps=4, num_stages=3)),
        (256, TileConfig(block_m=64, block_n=64, num_warps=8, num_stages=2)),
        (512, TileConfig(block_m=64, block_n=32, num_warps=8, num_stages=1, chunk=64)),
    ),
}

#: float32 in IEEE products, which run on the ordinary units, out of registers. TF32 takes the same rows.
_FLOAT32: _Table = {
    "forward": (
        (64, TileConfig(block_m=64, block_n=32, num_warps=4, num_stages=2)),
        (128, TileConfig(block_m=64, block_n=32, num_warps=8, num_stages=2)),
        (256, TileConfig(block_m=32, block_n=16, num_warps=8, num_stages=2)),
        (512, TileConfig(block_m=16, block_n=16, num_warps=8, num_stages=1, chunk=64)),
    ),
    "dq": (
        (64, TileConfig(block_m=64, block_n=32, num_warps=8, num_stages=2)),
        (128, TileConfig(block_m=32, block_n=32, num_warps=8, num_stages=2)),
        (256, TileConfig(block_m=32, block_n=16, num_warps=8, num_stages=1)),
        (512, TileConfig(block_m=16, block_n=16, num_warps=8, num_stages=1, chunk=64)),
    ),
    "dkdv": (
        (64, TileConfig(block_m=32, block_n=64, num_warps=8, num_stages=2)),
        (128, TileConfig(block_m=32, block_n=32, num_warps=8, num_stages=2)),
        (256, TileConfig(block_m=16, block_n=32, num_warps=8, num_stages=1)),
        (512, TileConfig(block_m=16, block_n=16, num_warps=8, num_stages=1, chunk=64)),
    ),
    "column_sums": (
        (64, TileConfig(block_m=32, block_n=64, num_warps=8, num_stages=2)),
        (128, TileConfig(block_m=32, block_n=32, num_warps=8, num_stages=2)),
        (256, TileConfig(block_m=16, block_n=32, num_warps=8, num_stages=1)),
        (512, TileConfig(block_m=16, block_n=16, num_warps=4, num_stages=1, chunk=32)),
    ),
    "dbias": (
        (128, TileConfig(block_m=32, block_n=32, num_warps=4, num_stages=1)),
        (512, TileConfig(block_m=16, block_n=16, num_warps=4, num_stages=1, chunk=64)),
    ),
}

#: float32 as six products of bfloat16, on the architectures where that was measured to be faster than IEEE products:
#: 4 to 6 times. Milliseconds for 4 sequences of 2,048 tokens and 16 heads on an H100, full / causal, beside the next
#: best tiles. Past 128 columns: the tiles with the fewest spills, because operands are split in registers.
_FLOAT32_SPLIT: dict[str, _Table] = {
    "sm_90": {
        "forward": (
            # 1.23 / 0.71; a second stage 1.27 / 0.73
            (64, TileConfig(block_m=64, block_n=64, num_warps=4, num_stages=1)),
            # 2.10 / 1.22; twice the queries 2.15 / 1.32
            (128, TileConfig(block_m=64, block_n=64, num_warps=4, num_stages=1)),
            (256, TileConfig(block_m=64, block_n=32, num_warps=8, num_stages=1, chunk=64)),
            (512, TileConfig(block_m=16, block_n=16, num_warps=8, num_stages=1, chunk=64)),
        ),
        "dq": (
            # 1.49 / 0.88; twice the queries 1.59 / 0.96
            (64, TileConfig(block_m=64, block_n=64, num_warps=4, num_stages=1)),
            (128, TileConfig(block_m=128, block_n=32, num_warps=8, num_stages=1)),  # 3.45 / 2.01; 64 × 16 4.98 / 2.79
            (256, TileConfig(block_m=32, block_n=32, num_warps=8, num_stages=1, chunk=64)),
            (512, TileConfig(block_m=16, block_n=16, num_warps=8, num_stages=1, chunk=64)),
        ),
        "dkdv": (
            (64, TileConfig(block_m=64, block_n=64, num_warps=4, num_stages=1)),  # 2.31 / 1.31; twice the keys the same
            # 6.68 / 4.16; twice the keys 7.09 / 4.71
            (128, TileConfig(block_m=16, block_n=64, num_warps=4, num_stages=1)),
            (256, TileConfig(block_m=32, block_n=32, num_warps=8, num_stages=1, chunk=64)),
            (512, TileConfig(block_m=16, block_n=16, num_warps=8, num_stages=1, chunk=64)),
        ),
        "column_sums": _FLOAT32["column_sums"],
        "dbias": (
            (64, TileConfig(block_m=32, block_n=32, num_warps=4, num_stages=1)),
            (128, TileConfig(block_m=64, block_n=32, num_warps=8, num_stages=1, chunk=64)),
            (512, TileConfig(block_m=16, block_n=16, num_warps=4, num_stages=1, chunk=64)),
        ),
    },
}
