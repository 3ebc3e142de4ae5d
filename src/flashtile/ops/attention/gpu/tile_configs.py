"""How calls are cut, as pure functions of the device and the call: tiles of the portable kernels, whose rows are in
`tile_tables`; and shares and parts of the work for dk and dv, for all GPU kernels.

A thread block of dk and dv visits the query tiles of all heads that share a key tile, one step each. To keep all
multiprocessors busy until the end, the heads may be divided into shares, and the queries into parts.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Literal, NamedTuple

import torch

from flashtile._backends.devices import DeviceFacts
from flashtile._backends.tuned import choose, cut_from
from flashtile.ops.attention.call import Call, KernelChoice, summarise
from flashtile.ops.attention.gpu import tile_tables
from flashtile.ops.attention.gpu.score_source import tile_values
from flashtile.ops.attention.gpu.tile_tables import TileConfig, first_row
from flashtile.ops.attention.spec import AttentionSpec, out_dtype
from flashtile.ops.common.tiles import tile_width

#: How long the sequences of a call are: they all fit a tile of `SHORT` queries and keys; from `LONG` of both on they
#: fill a device with large tiles too.
Length = Literal["short", "medium", "long"]

SHORT, LONG = 64, 2048

KernelName = Literal["forward", "dq", "dkdv", "short_backward", "dbias", "column_sums"]

#: How products are computed, in Triton's words: of operands as they are, of float32 rounded to TF32, or of float32 as
#: six products of bfloat16.
Precision = Literal["ieee", "tf32", "bf16x6"]

#: Bytes of an operand's element in shared memory: of float32 in three bfloat16 numbers, which add up to it.
_SPLIT_BYTES = 6

#: Kernels whose programs own keys and walk over queries; the others own queries and walk over keys.
OWN_KEYS = ("dkdv", "column_sums")


def length_class(max_seqlen_q: int, max_seqlen_k: int) -> Length:
    if max(max_seqlen_q, max_seqlen_k) <= SHORT:
        return "short"
    return "long" if min(max_seqlen_q, max_seqlen_k) >= LONG else "medium"


def longest_lengths(call: Call) -> tuple[int, int]:
    """Queries and keys of the longest sequence, by which tiles are chosen. A packed call without bounds, which are its
    totals then, counts as one with sequences of up to twice the mean."""

    def likely(bound: int, total: int) -> int:
        return min(bound, -(-2 * total // max(call.batch, 1))) if bound >= total else bound

    queries, keys = call.max_seqlens
    return (likely(queries, call.rows_q), likely(keys, call.rows_k)) if call.packed else (queries, keys)


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
    spec, length = call.spec, length_class(*longest_lengths(call))
    if length == "short" and spec.score_program is not None:
        length = "medium"
    block_tile = None if spec.block_shape is None else spec.block_shape[2:]
    dtypes = [table.dtype for table in (call.aux.bias, call.aux.mask) if table is not None]
    table_bytes = sum(dtype.itemsize for dtype in (*dtypes, *tile_values(spec.score_program)))
    precision = dot_precision(call.dtype, call.machine.facts, call.tf32)
    return TileKey(out_dtype(call.dtype), *call.head_dims, spec.banded, length, table_bytes, block_tile, precision)


def choose_tiles(kernel: KernelName, device: DeviceFacts, key: TileKey) -> TileConfig:
    """What a user's table has for such calls, else the first row of the kernel's table that holds the head."""
    return choose(f"attention.{kernel}", device, _tuned_key(key), _shipped_tiles(kernel, device, key))


def _tuned_key(key: TileKey) -> TileKey:
    """The key of a user's row: heads of a tile's width."""
    return key._replace(head_dim=tile_width(key.head_dim), head_dim_v=tile_width(key.head_dim_v))


def _shipped_tiles(kernel: KernelName, device: DeviceFacts, key: TileKey) -> TileConfig:
    """The first row of the kernel's table that holds the head, shrunk to fit the device. With a block mask, each tile
    lies in one of the mask: both are multiples of a power of two that a kernel can take."""
    if device.is_cuda and device.capability < 80:
        # Triton has no tensor-core products there: it widens 16-bit operands and multiplies as it does float32.
        key = key._replace(dtype=torch.float32)
    width = _width(key)
    if key.precision == "bf16x6":
        table = tile_tables.FLOAT32_SPLIT[device.arch]
    elif key.dtype is torch.float32 and device.is_cuda and device.arch != "sm_90":
        table = tile_tables.FLOAT32_CUDA if device.capability >= 80 else tile_tables.FLOAT32_SM_75
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
    elif device.is_cuda and not _has_warp_mma(device):
        table = tile_tables.SM_100
    elif device.is_cuda:
        table = tile_tables.SM_86 if device.shared_memory < 128 * 1024 else tile_tables.SM_80
    elif device.arch.startswith("gfx1"):
        table = tile_tables.RDNA
    else:
        table = tile_tables.AMD
    preferred = first_row(table[kernel], width, width)
    tiles = _fit(kernel, preferred, key, device)
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
    key, device = tile_key_for(call), call.cut_by.machine.facts
    tiles = choose_tiles(kernel, device, key)
    # On sm_80 a thread spills 600 to 2,144 bytes of 128 columns, and ptxas 12.8 reads back wrong halves of some.
    widest = 64 if _has_warp_mma(device) else 128
    one_tile = call.rows_q <= tiles.block_m and call.rows_k <= tiles.block_n and _width(key) <= widest
    short = kernel == "dq" and key.length == "short" and not call.packed
    has_work = call.lines and call.rows_q and call.rows_k
    if not (has_work and one_tile and short and key.dtype.itemsize == 2 and key.block_tile is None):
        return kernel, tiles
    tiles = tiles._replace(block_m=min(tiles.block_m, SHORT), num_stages=1)
    # With places for two sequences the next one is fetched ahead: 0.36 ms instead of 0.49 (4,096 × 49 tokens, 6 heads
    # of 32, a bias that learns). If copies go through registers these have no room for it.
    ahead = tiles._replace(num_stages=2)
    copies = device.is_cuda and device.capability >= 80
    fits = shared_memory("short_backward", ahead, key, device) <= device.shared_memory
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
    key, device = tile_key_for(call), call.cut_by.machine.facts
    memory = shared_memory(name, tiles, key, device)
    choice = "attention.dq" if name == "short_backward" else f"attention.{name}"
    tiles_from = cut_from(choice, device, _tuned_key(key))
    chunk = f", {tiles.chunk} columns of the head at a time" if tiles.chunk else ""
    block, warps = (tiles.block_m, tiles.block_n), f"{tiles.num_warps} warps"
    summary = summarise(block, warps, tiles.num_stages, memory, more=chunk)
    return KernelChoice(name, tiles, memory, "triton", summary=summary, tiles_from=tiles_from)


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


def shared_memory(kernel: KernelName, tiles: TileConfig, key: TileKey, device: DeviceFacts) -> int:
    """Estimate of the shared memory of a program, in bytes; tests compile every row and hold it to the limit."""
    width, width_v = tile_widths(key) if kernel != "column_sums" else (tile_widths(key)[0], 0)
    scores = tiles.block_m * tiles.block_n
    moving, resident = (tiles.block_m, tiles.block_n) if kernel in OWN_KEYS else (tiles.block_n, tiles.block_m)
    # A tile is split when its turn comes, and those that move take turns in one place. Ahead of that they are whole.
    split = key.precision == "bf16x6"
    itemsize = key.dtype.itemsize
    by_warps, by_programs = _has_warp_mma(device) and not split, device.capability // 10 == 10
    ahead = max(tiles.num_stages - 1 - by_warps, 0)
    operand_bytes, multiplied = (_SPLIT_BYTES, max(width, width_v)) if split else (itemsize, width + width_v)
    if tiles.chunk:
        tile_bytes = operand_bytes * (tiles.chunk * (moving + resident) + moving * max(width, width_v))
    elif kernel == "short_backward":
        # Everything moves: queries, dout and out, keys and values.
        elements = resident * (width + 2 * width_v) + moving * (width + width_v)
        tile_bytes = elements * itemsize * (1 + ahead)
    elif kernel == "dbias":
        elements = (moving + resident) * max(width, width_v)
        tile_bytes = elements * (operand_bytes + itemsize * ahead)
    else:
        resident_width = width if kernel == "forward" else width + width_v
        tile_bytes = operand_bytes * (resident * resident_width + moving * multiplied)
        tile_bytes += itemsize * moving * (width + width_v) * ahead
    # Beside the tiles: scores that change their layout on the way to the next product, and reductions.
    exchange = max(scores * (_SPLIT_BYTES if split else itemsize), 2048)
    if itemsize == 2 and (by_programs or by_warps):
        from_registers = kernel == "dkdv" and by_warps and tiles.num_stages > 1
        exchange *= {"dq": 2, "dkdv": 1 if from_registers else 4, "short_backward": 4}.get(kernel, 1)
    if by_warps:
        exchange *= 2 if kernel == "dkdv" and key.table_bytes else 1
        exchange += 16 * max(tiles.block_m, tiles.block_n) * (1 + ahead)  # statistics of rows
    # Tiles of bias and mask go through registers, so one stage fewer of them lies in shared memory; where they are
    # transposed, they change their layout too.
    tables = scores * (key.table_bytes + (key.block_tile is not None))
    transposed = tables if kernel in ("dkdv", "dbias") else 0
    if kernel in ("dbias", "short_backward"):  # read them once
        return tile_bytes + max(exchange, transposed)
    return tile_bytes + max(exchange, transposed) + (tiles.num_stages - 1) * tables


def _has_warp_mma(device: DeviceFacts) -> bool:
    """Whether each warp multiplies out of its registers, where it has a tile when the next one is asked for: a second
    stage then takes no memory. wgmma (sm_90) and tcgen05 (sm_100) read tiles in shared memory while others arrive."""
    return device.capability // 10 in (8, 12)


def _fit(kernel: KernelName, tiles: TileConfig, key: TileKey, device: DeviceFacts) -> TileConfig:
    """Fewer stages first, then narrower tiles on the side that moves, then on the side that stays, then chunks."""
    while shared_memory(kernel, tiles, key, device) > device.shared_memory and not tiles.chunk:
        moving, resident = (tiles.block_m, tiles.block_n) if kernel in OWN_KEYS else (tiles.block_n, tiles.block_m)
        stages, chunk = tiles.num_stages, 0
        if stages > 2 or (stages > 1 and moving <= 32 and not _has_warp_mma(device)):
            stages -= 1
        elif moving > 16:
            moving //= 2
        elif resident > 16:
            resident //= 2
        else:
            stages, chunk = 1, 32
        block_m, block_n = (moving, resident) if kernel in OWN_KEYS else (resident, moving)
        tiles = tiles._replace(block_m=block_m, block_n=block_n, num_stages=stages, chunk=chunk)
    return tiles


# Shares and parts of the work for dk and dv

#: Work that takes as long as so many steps: the beginning and the end of a walk; storing and adding its part of dk
#: and dv; adding up all parts. Microseconds of a backward in parts, and whole: 4 × 4,096 queries on 77 keys, 10 heads
#: of 64, 59.6 (3 parts) and 94.9; one sequence of these 26.7 (8) and 80.2; 8,192 queries on 256 keys, 8 heads of 128,
#: 92.5 (8) and 271; 12 × 253 tokens, 8 and 1 heads of 64, 31 (8 shares) and 50.
_STEPS_OF_A_WALK, _STEPS_OF_A_PART, _STEPS_OF_A_SUM = 2, 2, 5
#: The last two where each part has a multiprocessor for itself, and memory is not busy. Microseconds in a CUDA graph on
#: an H200, with 1, 2 and 4 shares: 179 tokens, 12 and 3 heads of 128, 32, 24, 20; 320, 12 and 3 of 64, 35, 25, 20;
#: 4 × 128, 32 and 8 of 128, 27, 22, 20; 64, 32 and 4 of 128, 25, 19, 16.
_STEPS_OF_A_LONE_PART, _STEPS_OF_A_SMALL_SUM = 1, 2

#: The walks may take so many times as long as with the best division if they have fewer shares, or fewer parts of
#: queries, because parts of dk and dv take memory. Parts of queries have been timed where there are fewer walks than
#: multiprocessors, and not where there are more.
_NEARLY_BEST_SHARES, _NEARLY_BEST_PARTS = 1.02, 1.05

#: A walk has at most so many parts, unless each part of all walks has a multiprocessor for itself.
_MOST_PARTS = 4


def longest_walk(query_tiles: int, spec: AttentionSpec, block_m: int, block_n: int) -> int:
    """How many query tiles of a head see some of a key tile, at most."""
    if spec.window_left is None or spec.window_right is None:
        return query_tiles
    return min(query_tiles, (spec.window_left + spec.window_right + block_n) // block_m + 2)


def choose_shares(
    group: int,
    walks: int,
    query_tiles: int,
    uneven: bool,
    multiprocessors: int,
    walks_done: Callable[[int], float] = lambda shares: 0,
) -> int:
    """Into how many shares the query heads of a key/value head are divided in the kernel of dk and dv, so that there is
    work for all multiprocessors until the end. dk and dv are then sums of as many parts.

    Args:
        group: query heads of a key/value head.
        walks: key tiles of all key/value heads, each a walk over the query tiles of its group.
        query_tiles: of one head that a walk visits at most (`longest_walk`).
        uneven: walks may be of different lengths.
        walks_done: of so many shares, about how many walks are done when the longest one of the last lines begins.
    """

    def time(shares: int) -> float:
        """In steps, about. Uneven walks are half as long as the longest in the mean. The longest come first, so all end
        together, or the longest one of the last lines ends after the others."""
        longest, beside, summing = query_tiles * group / shares, *_steps_beside(shares, walks, multiprocessors)
        if not uneven:
            return -(-walks * shares // multiprocessors) * (longest + beside) + summing
        a_walk = (longest / 2 + beside) / multiprocessors
        return max(walks * shares * a_walk, walks_done(shares) * a_walk + longest + beside) + summing

    return _fewest([shares for shares in range(1, group + 1) if group % shares == 0], time, _NEARLY_BEST_SHARES)


def key_tile_shares(call: Call, block_m: int, block_n: int, uneven: bool) -> int:
    """`choose_shares` of a call, in tiles of so many queries and keys."""
    cut_by = call.cut_by
    steps = longest_walk(cut_by.tiles(cut_by.rows_q, block_m), call.spec, block_m, block_n)
    walks = cut_by.tiles(cut_by.rows_k, block_n) * cut_by.lines_kv
    return choose_shares(call.group, walks, steps, uneven, call.multiprocessors)


def choose_parts(walks: int, query_tiles: int, group: int, multiprocessors: int) -> int:
    """Into how many parts the queries of each walk are divided, if walks are few, or the last round of them is small.
    dk and dv are then sums of as many parts. Arguments as in `choose_shares`; `walks` may be of shares."""

    def time(parts: int) -> int:
        """In steps, about."""
        longest, beside, summing = -(-query_tiles // parts) * group, *_steps_beside(parts, walks, multiprocessors)
        return -(-walks * parts // multiprocessors) * (longest + beside) + summing

    most = max(multiprocessors // walks, min(_MOST_PARTS, query_tiles))
    return _fewest(range(1, most + 1), time, _NEARLY_BEST_PARTS)


def _fewest(choices: Iterable[int], time: Callable[[int], float], nearly_best: float) -> int:
    """The first choice that takes no longer than `nearly_best` times as long as the best one."""
    times = {choice: time(choice) for choice in choices}
    most = nearly_best * min(times.values())
    return next(choice for choice, taken in times.items() if taken <= most)


def _steps_beside(parts: int, walks: int, multiprocessors: int) -> tuple[int, int]:
    """Other work in steps, if dk and dv are sums of so many parts: with each walk, and once."""
    if parts == 1:
        return _STEPS_OF_A_WALK, 0
    if walks * parts <= multiprocessors:
        return _STEPS_OF_A_WALK + _STEPS_OF_A_LONE_PART, _STEPS_OF_A_SMALL_SUM
    return _STEPS_OF_A_WALK + _STEPS_OF_A_PART, _STEPS_OF_A_SUM
