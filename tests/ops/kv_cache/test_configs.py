"""The pure functions that cut the kernels: splits that fill a GPU, tiles that fit it."""

from __future__ import annotations

import itertools

import torch

from flashtile._backends.devices import KNOWN_DEVICES
from flashtile.ops.common.split_keys.configs import (
    MAX_SPLITS,
    TileKey,
    choose_splits,
    choose_tiles,
    combine_cut,
    resident_programs,
    shared_memory,
)
from flashtile.ops.kv_cache.triton.append import append_cut
from support.running.each_case import each_case

_SLOTS = 132 * 3


@each_case(
    "programs, key_tiles, splits",
    [
        (8, 512, 47),  # one sequence, 8 heads: a wave of 376 of 396 programs, with 11 tiles each
        (64, 512, 6),
        (8, 4, 4),  # a short cache: no split without a tile
        (8, 0, 1),
        (0, 512, 1),
        (396, 512, 1),  # a full wave already
        (10**6, 512, 1),
    ],
)
def test_splits_fill_the_slots(programs: int, key_tiles: int, splits: int) -> None:
    assert choose_splits(programs, key_tiles, _SLOTS) == splits


@each_case("programs", [1, 7, 8, 63, 256, 300, 397, 1024, 3000])
@each_case("key_tiles", [1, 5, 64, 2048])
def test_no_number_of_splits_would_be_much_better(programs: int, key_tiles: int) -> None:
    def time(splits: int) -> int:
        return -(-programs * splits // _SLOTS) * (1 - (-key_tiles // splits))

    chosen = choose_splits(programs, key_tiles, _SLOTS)
    assert 1 <= chosen <= min(MAX_SPLITS, key_tiles)
    if programs < 8 * _SLOTS:
        assert 0.95 * time(chosen) <= min(time(splits) for splits in range(1, min(MAX_SPLITS, key_tiles) + 1))


def test_splits_have_equal_shares_where_the_keys_are_few() -> None:
    """15 programs for each head would nearly fill 132 slots too, but two of them with three tiles of 32, not two."""
    assert choose_splits(8, 32, 132) == 16


@each_case("dtype", [torch.bfloat16, torch.float32])
@each_case("head_dim, head_dim_v", [(1, 1), (64, 64), (80, 96), (192, 128), (256, 256), (512, 512)])
def test_tiles_fit_every_device(head_dim: int, head_dim_v: int, dtype: torch.dtype) -> None:
    for device, rows in itertools.product(KNOWN_DEVICES.values(), (1, 4, 32, 1000)):
        tile_key = TileKey(dtype, head_dim, head_dim_v, rows)
        tiles = choose_tiles(device, tile_key)
        assert shared_memory(device, tiles, tile_key) <= device.shared_memory
        assert tiles.block_m >= 16 and tiles.block_n >= 16 and tiles.block_m <= max(16, 2 * rows)
        assert resident_programs(device, tiles, tile_key) >= 1


def test_cuts_of_the_other_kernels_are_sound() -> None:
    for arch in ("sm_90", "gfx942"):
        for head_dim, half in ((128, 64), (80, 16), (512, 0), (3, 1)):
            cut = append_cut(32, head_dim, 2 * head_dim, half, KNOWN_DEVICES[arch])
            assert cut.block_half >= half and cut.block_rest >= head_dim - 2 * half and cut.block_e >= 2 * head_dim
            assert 1 <= cut.block_h <= 32
        for splits in (2, 3, 33, 128):
            for rows, most in ((32, 16), (8192, 16), (12, 2), (8191, 4)):
                cut = combine_cut(splits, rows, most, 128, KNOWN_DEVICES[arch], slots=264)
                assert 2 <= cut.block_s <= 128 and most % cut.block_r == 0
                assert cut.block_r == 1 or rows // cut.block_r >= 264
