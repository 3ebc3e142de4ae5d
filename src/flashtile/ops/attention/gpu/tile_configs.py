"""Tiles of the portable kernels, as a pure function of the device and the call. The rows are in `tile_tables`."""

from __future__ import annotations

import math
from typing import Literal, NamedTuple

import torch

from flashtile._backends.devices import DeviceFacts
from flashtile.ops.attention.call import Call, KernelChoice, summarise
from flashtile.ops.attention.gpu import tile_tables
from flashtile.ops.attention.gpu.schedule import SHORT, Length, length_class
from flashtile.ops.attention.gpu.score_source import tile_values
from flashtile.ops.attention.gpu.tile_tables import TileConfig, first_row
from flashtile.ops.attention.spec import out_dtype
from flashtile.ops.common.tiles import tile_width

KernelName = Literal["forward", "dq", "dkdv", "short_backward", "dbias", "column_sums"]

#: How products are computed, in Triton's words: of operands as they are, of float32 rounded to TF32, or of float32 as
#: six products of bfloat16.
Precision = Literal["ieee", "tf32", "bf16x6"]

#: Bytes of an operand's element in shared memory: of float32 in three bfloat16 numbers, which add up to it.
_SPLIT_BYTES = 6

#: Kernels whose programs own keys and walk over queries; the others own queries and walk over keys.
OWN_KEYS = ("dkdv", "column_sums")


class TileKey(NamedTuple):
    """The facts that the choice of tiles looks at, beside the kernel and the device.

    Attributes:
        dtype: of q, k and v as they are multiplied.
        head_dim: of q and k.
        head_dim_v: of v.
        banded: a causal mask or a window: small tiles waste less at its edges.
        length: of its longest sequences.
        table_bytes: bytes of bias and mask for each score, whose tiles come from memory as well; 0 without, 1 for a
            mask alone.
        block_tile: (queries, keys) of a block mask's tiles; None without one.
        precision: of the products.
    """

    dtype: torch.dtype
    head_dim: int
    head_dim_v: int
    banded: bool
    length: Length
    table_bytes: int = 0
    block_tile: tuple[int, int] | None = None
    precision: Precision = "ieee"


def tile_key_for(call: Call) -> TileKey:
    """The key of a call.

    With a score function no call is short: in tiles of 64 × 64, and in one kernel for dq, dk and dv, ptxas 12.8 reads
    uniform registers that nothing has set where a table of the function learns (`tests/**/control_flow.py`).
    """
    call = call.cut_by
    spec, length = call.spec, length_class(*call.max_seqlens)
    if length == "short" and spec.score_program is not None:
        length = "medium"
    block_tile = None if spec.block_shape is None else spec.block_shape[2:]
    dtypes = [table.dtype for table in (call.aux.bias, call.aux.mask) if table is not None]
    table_bytes = sum(dtype.itemsize for dtype in (*dtypes, *tile_values(spec.score_program)))
    precision = dot_precision(call.dtype, call.machine.facts, call.tf32)
    return TileKey(out_dtype(call.dtype), *call.head_dims, spec.banded, length, table_bytes, block_tile, precision)


def choose_tiles(kernel: KernelName, device: DeviceFacts, key: TileKey) -> TileConfig:
    """The first row of the kernel's table that holds the head, shrunk to fit the device. With a block mask, each tile
    lies in one of the mask: both are multiples of a power of two that a kernel can take."""
    if device.is_cuda and device.capability < 80:
        # Triton has no tensor-core products there: it widens 16-bit operands and multiplies as it does float32.
        key = key._replace(dtype=torch.float32)
    width = _width(key)
    if key.precision == "bf16x6":
        table = tile_tables.FLOAT32_SPLIT[device.arch]
    elif key.dtype is torch.float32:
        table = tile_tables.FLOAT32
    elif kernel == "dbias":
        table = tile_tables.HOPPER_BIAS if device.arch == "sm_90" and width <= 128 else tile_tables.BIAS_GRADIENT
    elif kernel == "column_sums" and not device.arch.startswith("gfx1"):
        table = tile_tables.COLUMN_SUMS
    elif device.arch == "sm_90" and key.block_tile and width <= 128:
        table = tile_tables.HOPPER_BLOCKS
    elif device.arch == "sm_90" and key.length == "short" and kernel in tile_tables.HOPPER_SHORT and width <= 64:
        table = tile_tables.HOPPER_SHORT
    elif device.arch == "sm_90" and key.table_bytes and width <= 128:
        table = tile_tables.HOPPER_MASK if key.table_bytes == 1 else tile_tables.HOPPER_BIAS
    elif device.arch == "sm_90":
        table = {
            (False, False): tile_tables.HOPPER_FULL,
            (False, True): tile_tables.HOPPER_FULL,
            (True, False): tile_tables.HOPPER_BANDED_SHORT,
            (True, True): tile_tables.HOPPER_BANDED,
        }[key.banded, key.length == "long"]
    elif device.is_cuda:
        table = tile_tables.TENSOR_CORES
    elif device.arch.startswith("gfx1"):
        table = tile_tables.RDNA
    else:
        table = tile_tables.AMD
    preferred = first_row(table[kernel], width, width)
    tiles = _fit(kernel, preferred, key, device.shared_memory)
    if key.block_tile:
        queries, keys = key.block_tile
        tiles = tiles._replace(block_m=math.gcd(tiles.block_m, queries), block_n=math.gcd(tiles.block_n, keys))
    return tiles


def kernel_tiles(kernel: KernelName, call: Call) -> tuple[KernelName, TileConfig]:
    """A kernel of a call, and its tiles. In the place of "dq" it is "short_backward", which computes all gradients, if
    one tile holds all queries of a sequence and one all keys.

    Packed sequences may have keys and no queries; then nobody would write dk and dv. Past 128 columns the tiles of dk
    and dv do not fit beside those of dq (sm_90, 256 columns: 335,872 bytes of on-chip memory).
    """
    key, device = tile_key_for(call), call.machine.facts
    tiles = choose_tiles(kernel, device, key)
    one_tile = call.rows_q <= tiles.block_m and call.rows_k <= tiles.block_n and _width(key) <= 128
    short = kernel == "dq" and key.length == "short" and not call.packed
    has_work = call.lines and call.rows_q and call.rows_k
    if not (has_work and one_tile and short and key.dtype.itemsize == 2 and key.block_tile is None):
        return kernel, tiles
    tiles = tiles._replace(block_m=min(tiles.block_m, SHORT), num_stages=1)
    # With places for two sequences the next one is fetched ahead: 0.36 ms instead of 0.49 (4,096 × 49 tokens, 6 heads
    # of 32, a bias that learns). If copies go through registers these have no room for it.
    ahead = tiles._replace(num_stages=2)
    copies = device.is_cuda and device.capability >= 80
    fits = shared_memory("short_backward", ahead, key) <= device.shared_memory
    return "short_backward", ahead if copies and fits else tiles


def phase_kernels(call: Call) -> dict[KernelName, TileConfig]:
    """A phase's kernels with their tiles: of a backward one for all, or dq, dkdv, and dbias if wanted."""
    if call.phase != "backward":
        return dict([kernel_tiles(call.phase, call)])
    name, tiles = kernel_tiles("dq", call)
    others: tuple[KernelName, ...] = ("dkdv", "dbias") if call.wanted.bias else ("dkdv",)
    return dict([(name, tiles), *(kernel_tiles(other, call) for other in others if name == "dq")])


def describe_kernel(name: KernelName, tiles: TileConfig, call: Call) -> KernelChoice:
    """One kernel of a call."""
    memory = shared_memory(name, tiles, tile_key_for(call))
    chunk = f", {tiles.chunk} columns of the head at a time" if tiles.chunk else ""
    block, warps = (tiles.block_m, tiles.block_n), f"{tiles.num_warps} warps"
    summary = summarise(block, warps, tiles.num_stages, memory, more=chunk)
    return KernelChoice(name, tiles, memory, "triton", summary=summary)


def drops_bounds(kernel: KernelName, key: TileKey) -> bool:
    """Whether tiles that divide their sequence are loaded without a bounds check. Measured 1-6 % faster, but for
    dk/dv of 256 columns, where the compiler then spills (3.97 ms against 3.61)."""
    return kernel != "dkdv" or _width(key) <= 128


def drops_masks(key: TileKey) -> bool:
    """Whether the branch for masks is left out where no tile needs one. Measured up to 13 % faster for heads up to
    128 columns (dk/dv 1.74 ms against 1.99), and 8 % slower past them (forward 1.12 against 1.01)."""
    return _width(key) <= 128


def dot_precision(dtype: torch.dtype, device: DeviceFacts, allow_tf32: bool) -> Precision:
    """How products are computed.

    float32 is multiplied as TF32 where PyTorch's own setting allows that. Otherwise products have the error of float32:
    on tensor cores as six products of bfloat16, where those are faster, and on the ordinary units elsewhere.
    """
    if dtype is not torch.float32 or not device.is_cuda:
        return "ieee"
    if allow_tf32:
        return "tf32"
    return "bf16x6" if device.arch in tile_tables.FLOAT32_SPLIT else "ieee"


def tile_widths(key: TileKey) -> tuple[int, int]:
    """Columns of tiles of q and k, and of v. The parts of split operands take turns in one place, where two swizzles
    make ptxas 12.8 compute wrong addresses (`swizzles_differ`), so the narrower tile is made wider."""
    width, width_v = tile_width(key.head_dim), tile_width(key.head_dim_v)
    least = min(max(width, width_v), 64) if key.precision == "bf16x6" else 0
    return max(width, least), max(width_v, least)


def _width(key: TileKey) -> int:
    return max(tile_widths(key))


def shared_memory(kernel: KernelName, tiles: TileConfig, key: TileKey) -> int:
    """Estimate of the shared memory of a program, in bytes; tests compile every row and hold it to the limit."""
    width, width_v = tile_widths(key) if kernel != "column_sums" else (tile_widths(key)[0], 0)
    scores = tiles.block_m * tiles.block_n
    moving, resident = (tiles.block_m, tiles.block_n) if kernel in OWN_KEYS else (tiles.block_n, tiles.block_m)
    # A tile is split when its turn comes, and those that move take turns in one place. Ahead of that they are whole.
    split = key.precision == "bf16x6"
    itemsize = key.dtype.itemsize
    operand_bytes, multiplied = (_SPLIT_BYTES, max(width, width_v)) if split else (itemsize, width + width_v)
    if tiles.chunk:
        tile_bytes = operand_bytes * (tiles.chunk * (moving + resident) + moving * max(width, width_v))
    elif kernel == "short_backward":
        # Everything moves: queries, dout and out, keys and values.
        elements = resident * (width + 2 * width_v) + moving * (width + width_v)
        tile_bytes = elements * itemsize * tiles.num_stages
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
    tables = scores * (key.table_bytes + (key.block_tile is not None))
    transposed = tables if kernel in ("dkdv", "dbias") else 0
    if kernel in ("dbias", "short_backward"):  # read them once
        return tile_bytes + max(exchange, transposed)
    return tile_bytes + max(exchange, transposed) + (tiles.num_stages - 1) * tables


def _fit(kernel: KernelName, tiles: TileConfig, key: TileKey, limit: int) -> TileConfig:
    """Fewer stages first, then narrower tiles on the side that moves, then on the side that stays, then chunks."""
    while shared_memory(kernel, tiles, key) > limit and not tiles.chunk:
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
