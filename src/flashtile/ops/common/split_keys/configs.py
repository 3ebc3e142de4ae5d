"""How the kernels that split keys are cut: frozen tables per architecture, and the pure functions that read them.

No call measures anything; `flashtile tune` does, on demand. The rows follow from registers, shared memory, and from how
much must be in flight for a GPU to read at its full bandwidth (some 40 KiB for each multiprocessor of an H200). A row
that does not fit a device's shared memory is shrunk until it does.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from flashtile._backends.devices import DeviceFacts
from flashtile._backends.tuned import choose, cut_from
from flashtile.ops.common.tiles import power_of_two, tile_width

#: The most parts into which the keys of a sequence are split.
MAX_SPLITS = 128
#: Share of the best speed that is good enough, if it takes fewer splits.
_GOOD_ENOUGH = 0.95
#: Rows of a tile, at least and at most.
_LEAST_ROWS, _MOST_ROWS = 16, 64
#: What a program costs beside its tiles of keys, in such tiles.
_PROGRAM = 1
#: Elements of a part that a program of the combining kernel has in flight.
_COMBINED, _COMBINED_ROWS = 4096, 8192
#: Programs of that kernel for each multiprocessor at least, where a program has several rows. µs of 8,192 rows of 128,
#: 2, 4 and 8 parts, an H200: 3.0, 4.2 and 7.5; with one row 13, 27 and 47.
COMBINING = 2


class AttendTiles(NamedTuple):
    """How the attending kernel is cut.

    Attributes:
        block_m: rows of a tile, at most: queries times the query heads of a key/value head.
        block_n: keys of a tile.
        num_warps: warps per program.
        num_stages: tiles in flight from device memory.
        chunk: columns of the head that are multiplied at a time; 0 = all of them.
    """

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    chunk: int = 0


class TileKey(NamedTuple):
    """What the choice of tiles looks at, beside the device.

    Attributes:
        dtype: of all tensors.
        head_dim: of q and k.
        head_dim_v: of v.
        rows: queries of a sequence times the query heads of a key/value head.
        page_size: rows of a page; 0 without pages.
        whole_words: rows begin at multiples of 4 bytes, so that they can be copied past the registers.
        eight_bits: k and v have 8 bits, and are widened on the way to products.
        many: each multiprocessor has programs without a split of keys.
    """

    dtype: torch.dtype
    head_dim: int
    head_dim_v: int
    rows: int
    page_size: int = 0
    whole_words: bool = True
    eight_bits: bool = False
    many: bool = False


class CombineCut(NamedTuple):
    """How the combining kernel is cut: splits and rows of a tile, and warps."""

    block_s: int
    block_r: int
    num_warps: int


_Table = tuple[tuple[int, AttendTiles], ...]

#: NVIDIA from sm_80 on, 16-bit: for heads up to so many columns.
_TENSOR_CORES: _Table = (
    (64, AttendTiles(block_m=64, block_n=128, num_warps=4, num_stages=3)),
    (128, AttendTiles(block_m=64, block_n=64, num_warps=4, num_stages=3)),
    (256, AttendTiles(block_m=32, block_n=32, num_warps=4, num_stages=3)),
    (512, AttendTiles(block_m=16, block_n=32, num_warps=4, num_stages=2)),
)

#: sm_90, 16-bit, more than 16 rows.
_HOPPER: _Table = (
    _TENSOR_CORES[0],
    # µs for 8 sequences of 4,096 keys, 1 of 131,072 and 32 of 32,768, with few rows: 36.2, 124.9 and 938; the row of
    # other GPUs 37.9, 132.3 and 944.
    (128, AttendTiles(block_m=64, block_n=128, num_warps=8, num_stages=3)),
    *_TENSOR_CORES[2:],
)

#: sm_90, 16-bit, 17 to 32 rows.
_HOPPER_SOME_ROWS: _Table = (
    _TENSOR_CORES[0],
    # µs on an H200 for 5 queries of each of 8 sequences of 16,384 keys, 32 query and 8 key/value heads, in pages of 16,
    # of 64 and without pages: 131, 128 and 127; 8 warps 148, 142 and 127; 64 keys in 4 stages 135, 136 and 135.
    (128, AttendTiles(block_m=32, block_n=128, num_warps=4, num_stages=3)),
    *_TENSOR_CORES[2:],
)

#: sm_90, 16-bit, up to 16 rows. Measured on an H200: 32 query and 8 key/value heads, bfloat16, one query.
_HOPPER_FEW_ROWS: _Table = (
    _TENSOR_CORES[0],
    # µs for 1 sequence of 4,096 keys in 16 splits, 1 of 32,768 in 16, 8 of 4,096, 1 of 131,072, 32 of 32,768: 8.35,
    # 36.4, 35.3, 125 and 942; 8 warps 8.99, 36.9, 35.5, 124 and 938; 64 keys in 4 stages 8.95, 37.8, 37.8, 132 and 945.
    (128, AttendTiles(block_m=16, block_n=128, num_warps=4, num_stages=3)),
    # µs for 16 sequences of 8,192 and 16 / 1 heads: 39.4; 32 keys 44.9, 128 keys on 8 warps in 2 stages 40.7.
    (256, AttendTiles(block_m=16, block_n=64, num_warps=4, num_stages=3)),
    *_TENSOR_CORES[3:],
)

#: The same where a tile of 128 keys would lie in several pages.
_HOPPER_SMALL_PAGES: _Table = (
    _TENSOR_CORES[0],
    # µs for 8 sequences of 4,096 keys, 1 of 131,072, 8 of 32,768 and 32 of 32,768 in pages of 16, while a lookup still
    # stood right before its loads: 42.1, 137, 252 and 956; 128 keys on 8 warps 41.3, 150, 277 and 1,172, on 4 warps
    # 43.9, 159, 289 and 1,139.
    (128, AttendTiles(block_m=16, block_n=64, num_warps=4, num_stages=4)),
    *_TENSOR_CORES[2:],
)

#: The same with many programs, whatever the pages, heads up to 128 columns: several on a multiprocessor begin and end
#: beside one another. µs for 64 sequences of 1,024 keys, 8 key/value heads of 64, without pages, in pages of 16 and of
#: 64: 64.3, 65.8 and 65.1; 128 keys on 4 warps in 3 stages 67.3, 69.8 and 70.6. Of 128: 63.9 without pages, 65.2 in
#: pages of 16; 128 keys 68.7, and 64 keys on 4 warps 65.7.
_HOPPER_MANY: _Table = (
    (64, AttendTiles(block_m=16, block_n=64, num_warps=2, num_stages=2)),
    (128, AttendTiles(block_m=16, block_n=64, num_warps=2, num_stages=2)),
)

#: Keys up to which that serves heads of more than 64 columns without pages. µs for 128 sequences of 4,096 keys and 32
#: of 32,768: 484 and 997; 128 keys 474 and 945 (two runs).
MANY_KEYS = 2048

#: AMD CDNA, 16-bit. Loads go through registers there, so more stages cost registers, not shared memory.
_CDNA: _Table = (
    (64, AttendTiles(block_m=64, block_n=64, num_warps=4, num_stages=2)),
    (128, AttendTiles(block_m=32, block_n=64, num_warps=4, num_stages=1)),
    (256, AttendTiles(block_m=16, block_n=32, num_warps=4, num_stages=1)),
    (512, AttendTiles(block_m=16, block_n=16, num_warps=4, num_stages=1)),
)

#: AMD RDNA, 16-bit: half as many threads in a warp, and half as many registers in a thread, as CDNA.
_RDNA: _Table = (
    (64, AttendTiles(block_m=32, block_n=32, num_warps=8, num_stages=1)),
    (128, AttendTiles(block_m=32, block_n=32, num_warps=8, num_stages=1)),
    (256, AttendTiles(block_m=16, block_n=16, num_warps=8, num_stages=1)),
    (512, AttendTiles(block_m=16, block_n=16, num_warps=8, num_stages=1, chunk=32)),
)

#: float32 everywhere: IEEE products run on the ordinary units, out of registers.
_FLOAT32: _Table = (
    (64, AttendTiles(block_m=32, block_n=32, num_warps=4, num_stages=2)),
    (128, AttendTiles(block_m=16, block_n=32, num_warps=4, num_stages=2)),
    (256, AttendTiles(block_m=16, block_n=16, num_warps=4, num_stages=2)),
    (512, AttendTiles(block_m=16, block_n=16, num_warps=8, num_stages=1, chunk=64)),
)


def choose_tiles(device: DeviceFacts, tile_key: TileKey) -> AttendTiles:
    """What a user's table has for such calls, else the first row of the device's table that holds the head."""
    return choose("decoding", device, _tuned_key(tile_key), _shipped_tiles(device, tile_key))


def tiles_from(device: DeviceFacts, tile_key: TileKey) -> str:
    """`KernelChoice.tiles_from`."""
    return cut_from("decoding", device, _tuned_key(tile_key))


def _tuned_key(tile_key: TileKey) -> TileKey:
    """The key of a user's row: heads and rows of a tile's size."""
    return tile_key._replace(
        head_dim=tile_width(tile_key.head_dim),
        head_dim_v=tile_width(tile_key.head_dim_v),
        rows=min(_MOST_ROWS, max(_LEAST_ROWS, power_of_two(tile_key.rows))),
    )


def _shipped_tiles(device: DeviceFacts, tile_key: TileKey) -> AttendTiles:
    """The first row of the device's table that holds the head, shrunk to the rows and to fit."""
    widest = max(tile_width(tile_key.head_dim), tile_width(tile_key.head_dim_v))
    if tile_key.dtype is torch.float32 or (device.is_cuda and device.capability < 80):
        # Triton has no tensor-core products on sm_75: it multiplies 16-bit operands as it does float32.
        table = _FLOAT32
    elif device.arch.startswith("gfx1"):
        table = _RDNA
    elif device.arch.startswith("gfx"):
        table = _CDNA
    else:
        table = _hopper_table(tile_key) if device.arch == "sm_90" else _TENSOR_CORES
    tiles = next((tiles for columns, tiles in table if widest <= columns), table[-1][1])
    if widest > table[-1][0]:
        # Latent attention: keys wider than any row, read in chunks.
        tiles = tiles._replace(num_stages=1, chunk=tiles.chunk or 64)
    if table is _FLOAT32 and device.arch.startswith("gfx1"):
        tiles = tiles._replace(block_n=16, num_warps=8)  # half the registers of CDNA
    if tile_key.page_size and not tile_key.whole_words:
        # A load for each element, and its page in a register: more keys would spill.
        tiles = tiles._replace(block_n=min(tiles.block_n, 32))
    tiles = tiles._replace(block_m=min(tiles.block_m, max(_LEAST_ROWS, power_of_two(tile_key.rows))))
    return _fit(device, tiles, tile_key)


def _hopper_table(tile_key: TileKey) -> _Table:
    if tile_key.rows > 16:
        return _HOPPER_SOME_ROWS if tile_key.rows <= 32 and not tile_key.eight_bits else _HOPPER
    # Tiles of 64 and 128 keys of 8 bits, µs for 8 sequences of 16,384 rows and of 65,536 in pages of 16: 85 and 308, 72
    # and 280, since a tile has a fixed cost; for 64 of 4,096 in pages of 64, where a tile has one page: 147 and 167.
    wide = tile_key.page_size % 128 == 0 or (tile_key.eight_bits and tile_key.page_size % 64)
    if tile_key.many and not tile_key.eight_bits and max(tile_key.head_dim, tile_key.head_dim_v) <= 128:
        return _HOPPER_MANY
    return _HOPPER_FEW_ROWS if wide else _HOPPER_SMALL_PAGES


def shared_memory(device: DeviceFacts, tiles: AttendTiles, tile_key: TileKey) -> int:
    """Estimate of the shared memory of a program, in bytes; tests compile the rows and hold it to the limit."""
    width, width_v = tile_width(tile_key.head_dim), tile_width(tile_key.head_dim_v)
    itemsize = tile_key.dtype.itemsize
    of_cache = 1 if tile_key.eight_bits else itemsize
    if tiles.chunk:
        queries, keys = tiles.chunk * tiles.block_m, tiles.block_n * (tiles.chunk + width_v)
    else:
        # From 64 rows on Hopper and sm_100 multiply asynchronously, and hold the tiles of one more stage.
        asynchronous = tiles.block_m >= 64 and 90 <= device.capability < 120
        buffers = max(1, tiles.num_stages - (not asynchronous))
        queries, keys = tiles.block_m * width, tiles.block_n * (width + width_v) * buffers
    # Beside the tiles: scores on their way to the next product, and reductions.
    return itemsize * queries + of_cache * keys + max(4 * tiles.block_m * tiles.block_n, 2048)


def fewer_stages(device: DeviceFacts, tiles: AttendTiles, tile_key: TileKey) -> AttendTiles:
    """Tiles of a given size in as many stages as fit, which change no bits."""
    while tiles.num_stages > 1 and shared_memory(device, tiles, tile_key) > device.shared_memory:
        tiles = tiles._replace(num_stages=tiles.num_stages - 1)
    return tiles


def _fit(device: DeviceFacts, tiles: AttendTiles, tile_key: TileKey) -> AttendTiles:
    """Fewer stages first, then fewer keys, then fewer rows, then chunks of the head."""
    while shared_memory(device, tiles, tile_key) > device.shared_memory and not tiles.chunk:
        if tiles.num_stages > 2 or (tiles.num_stages > 1 and tiles.block_n <= 16):
            tiles = tiles._replace(num_stages=tiles.num_stages - 1)
        elif tiles.block_n > 16:
            tiles = tiles._replace(block_n=tiles.block_n // 2)
        elif tiles.block_m > 16:
            tiles = tiles._replace(block_m=tiles.block_m // 2)
        else:
            tiles = tiles._replace(num_stages=1, chunk=32)
    return tiles


def resident_programs(device: DeviceFacts, tiles: AttendTiles, tile_key: TileKey) -> int:
    """Programs of a multiprocessor at once, by shared memory and warps; widening 8 bits also takes registers."""
    by_memory = device.shared_memory // shared_memory(device, tiles, tile_key)
    return max(1, min(by_memory, (12 if tile_key.eight_bits else 16) // tiles.num_warps))


def half_tiles_lose(seq_q: int, *head_dims: int) -> bool:
    """Whether the Hopper forward, whose tiles of 64 queries are half empty, takes longer with its keys split than these
    kernels, in which the query heads of a group share a tile. 64 / 8 heads of 64, 65,536 keys, an H200, these and the
    forward: 32 queries 149 µs and 174, 64 queries 286 and 175."""
    return seq_q <= 32 and max(head_dims) <= 64


def choose_splits(programs: int, key_tiles: int, slots: int) -> int:
    """Into how many parts the keys of a sequence are split, so that `programs` (without a split) fill a GPU's `slots`:
    the fewest with nearly the best time by a simple model. Programs run in waves, a wave takes as long as the largest
    share of the tiles in it, and then some, so empty slots of a last wave cost, and so does one tile more. `key_tiles`:
    of the longest sequence."""
    most = min(MAX_SPLITS, max(key_tiles, 1))
    if not programs or programs >= 8 * slots:
        return 1

    def time(splits: int) -> int:
        waves, share = -(-programs * splits // slots), -(-key_tiles // splits)
        return waves * (share + _PROGRAM)

    best = min(time(splits) for splits in range(1, most + 1))
    return next(splits for splits in range(1, most + 1) if _GOOD_ENOUGH * time(splits) <= best)


def choose_split_count(
    tiles: AttendTiles,
    tile_key: TileKey,
    programs: int,
    visible: int,
    device: DeviceFacts,
    multiprocessors: int,
    num_splits: int = 0,
) -> int:
    """Into how many parts the keys of each sequence are split. `programs`: without a split. `visible`: keys of a
    sequence that its queries see at most. `num_splits`: asked for; 0 = chosen here."""
    key_tiles = -(-visible // tiles.block_n)
    if num_splits:
        return min(num_splits, max(key_tiles, 1))
    return choose_splits(programs, key_tiles, multiprocessors * resident_programs(device, tiles, tile_key))


def combine_cut(splits: int, rows: int, most_r: int, head_dim_v: int, device: DeviceFacts, slots: int) -> CombineCut:
    """`rows`: of out, of which a program may have `most_r`, a power of two; it has several if they are many."""
    width = tile_width(head_dim_v)
    block_s = max(2, min(power_of_two(splits), _COMBINED // width))
    block_r = min(most_r, max(1, _COMBINED_ROWS // (block_s * width)))
    while block_r > 1 and rows // block_r < slots:
        block_r //= 2
    return CombineCut(block_s, block_r, 128 // device.warp_size)
