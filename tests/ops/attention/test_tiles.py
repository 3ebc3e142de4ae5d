"""The choice of tiles: pure, total, and within every device's on-chip memory."""

from itertools import pairwise, product
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from flashtile._backends.devices import INTERPRETER, KNOWN_DEVICES, DeviceFacts
from flashtile.ops.attention.gpu import tile_tables
from flashtile.ops.attention.gpu.tile_configs import (
    TileKey,
    choose_tiles,
    dot_precision,
    longest_lengths,
    shared_memory,
)
from flashtile.ops.attention.gpu.tile_tables import TileConfig
from flashtile.ops.common.tiles import tile_width

_LENGTHS = ("short", "medium", "long")
_KERNELS = ("forward", "dq", "dkdv")
_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
_WIDTHS = (16, 32, 64, 128, 256, 512)
_DEVICES = {**KNOWN_DEVICES, "interpreter": INTERPRETER, "unknown_cuda": DeviceFacts("sm_999", 48 * 1024)}


def _situations() -> list[TileKey]:
    flags = (False, True)
    plain = [TileKey(*values) for values in product(_DTYPES, _WIDTHS, _WIDTHS, flags, _LENGTHS)]
    changes = product(_DTYPES, _WIDTHS, (0, 2, 5), (None, (128, 128)))
    return plain + [
        TileKey(dtype, width, width, True, length, table_bytes, block_tile)
        for length in _LENGTHS
        for dtype, width, table_bytes, block_tile in changes
        if table_bytes or block_tile
    ]


def _is_tile_size(size: int) -> bool:
    return size >= 16 and size & (size - 1) == 0


def _is_sane(tiles: TileConfig) -> bool:
    sizes = _is_tile_size(tiles.block_m) and _is_tile_size(tiles.block_n)
    return sizes and tiles.num_warps in (4, 8) and tiles.num_stages in (1, 2, 3) and tiles.chunk in (0, 32, 64)


@pytest.mark.parametrize("kernel", _KERNELS)
@pytest.mark.parametrize("device", _DEVICES.values(), ids=_DEVICES)
def test_every_situation_has_tiles_that_fit(kernel, device):
    """Also where float32 is multiplied as bfloat16."""
    for key in _situations():
        precision = dot_precision(key.dtype, device, allow_tf32=False)
        for situation in {key, key._replace(precision=precision)}:
            tiles = choose_tiles(kernel, device, situation)
            assert _is_sane(tiles), (situation, tiles)
            fits = shared_memory(kernel, tiles, situation, device) <= device.shared_memory
            assert tiles.chunk or fits, (situation, tiles)


@given(
    kernel=st.sampled_from(_KERNELS),
    device=st.sampled_from(list(_DEVICES.values())),
    dtype=st.sampled_from(_DTYPES),
    head_dims=st.tuples(st.integers(1, 512), st.integers(1, 512)),
    banded=st.booleans(),
    length=st.sampled_from(_LENGTHS),
)
def test_heads_of_one_tile_width_take_the_same_tiles(kernel, device, dtype, head_dims, banded, length):
    key = TileKey(dtype, *head_dims, banded, length)
    whole = TileKey(dtype, *map(tile_width, head_dims), banded, length)
    assert choose_tiles(kernel, device, key) == choose_tiles(kernel, device, whole)


@pytest.mark.parametrize("kernel", _KERNELS)
@pytest.mark.parametrize("device", _DEVICES.values(), ids=_DEVICES)
def test_bfloat16_takes_the_tiles_of_float16(kernel, device):
    for key in _situations():
        if key.dtype is torch.float16:
            other = key._replace(dtype=torch.bfloat16)
            assert choose_tiles(kernel, device, key) == choose_tiles(kernel, device, other)


@pytest.mark.parametrize("kernel", _KERNELS)
def test_without_tensor_core_products_16_bit_takes_the_tiles_of_float32(kernel):
    device = KNOWN_DEVICES["sm_75"]
    for key in _situations():
        wide = key._replace(dtype=torch.float32)
        assert choose_tiles(kernel, device, key) == choose_tiles(kernel, device, wide)


@pytest.mark.parametrize(
    "arch, kernel, kib, expected",
    [
        pytest.param("sm_100", "forward", 144, TileConfig(128, 64, 8, 3), id="as_the_row_says"),
        pytest.param("sm_100", "forward", 128, TileConfig(128, 64, 8, 2), id="fewer_stages_first"),
        pytest.param("sm_100", "forward", 99, TileConfig(128, 32, 8, 2), id="then_fewer_keys"),
        pytest.param("sm_100", "forward", 56, TileConfig(128, 32, 8, 1), id="then_one_stage"),
        pytest.param("sm_100", "forward", 32, TileConfig(64, 16, 8, 1), id="then_fewer_queries"),
        pytest.param("sm_100", "forward", 16, TileConfig(16, 16, 8, 1), id="down_to_the_smallest"),
        pytest.param("sm_100", "forward", 8, TileConfig(16, 16, 8, 1, 32), id="then_the_head_in_chunks"),
        pytest.param("sm_100", "dkdv", 99, TileConfig(32, 64, 8, 2), id="dkdv_moves_the_queries"),
        pytest.param("sm_100", "dkdv", 40, TileConfig(16, 32, 8, 1), id="dkdv_keeps_the_keys"),
        # Where warps multiply, the next tile goes where this one was.
        pytest.param("sm_86", "forward", 114, TileConfig(128, 64, 8, 2), id="two_stages_in_the_memory_of_one"),
        pytest.param("sm_86", "forward", 32, TileConfig(64, 16, 8, 2), id="one_stage_saves_nothing"),
        pytest.param("sm_86", "dkdv", 99, TileConfig(64, 32, 8, 3), id="a_row_of_its_own"),
    ],
)
def test_a_row_shrinks_in_this_order(arch, kernel, kib, expected):
    key = TileKey(torch.float16, 128, 128, banded=True, length="long")
    assert choose_tiles(kernel, DeviceFacts(arch, kib * 1024), key) == expected


@pytest.mark.parametrize("kernel", _KERNELS)
def test_less_memory_never_means_larger_tiles(kernel):
    key = TileKey(torch.bfloat16, 256, 128, banded=False, length="long")
    tiles = [choose_tiles(kernel, DeviceFacts("sm_90", kib * 1024), key) for kib in range(228, 0, -1)]
    for larger, smaller in pairwise(tiles):
        assert smaller.block_m <= larger.block_m
        assert smaller.block_n <= larger.block_n
        assert smaller.num_stages <= larger.num_stages


def test_tiles_divide_those_of_the_block_mask():
    key = TileKey(torch.bfloat16, 64, 64, banded=False, length="long", block_tile=(48, 96))
    tiles = choose_tiles("forward", KNOWN_DEVICES["sm_90"], key)
    assert (tiles.block_m, tiles.block_n) == (16, 32)


@pytest.mark.parametrize("kernel", ["forward", "dq"])
def test_a_bias_in_flight_takes_a_stage(kernel):
    """Two tiles of 128 × 64 float32 and of a mask need 80 KiB beside those of k and v."""
    key = TileKey(torch.bfloat16, 128, 128, banded=False, length="long", table_bytes=2)
    assert choose_tiles(kernel, KNOWN_DEVICES["sm_90"], key).num_stages == 3
    assert choose_tiles("dq", KNOWN_DEVICES["sm_90"], key._replace(table_bytes=5)).num_stages == 2


def test_rows_for_hopper_say_what_was_measured():
    tables = {name: table for name, table in vars(tile_tables).items() if name.startswith("HOPPER")}
    rows = [(name, kernel, row) for name, table in tables.items() for kernel in table for row in table[kernel]]
    without = {(name, kernel) for name, kernel, row in rows if not row.measured}
    masks = {("HOPPER_MASK", kernel) for kernel in _KERNELS}  # as rows for a bias were
    assert without == masks | {("HOPPER_SHORT", "dkdv")}  # another kernel computes dk and dv there


@pytest.mark.parametrize(
    "rows, batch, bounds, longest",
    [
        ((43000, 43000), 200, (43000, 43000), (430, 430)),
        ((43000, 5001), 200, (400, 5001), (400, 51)),
        ((100, 90), 1, (100, 90), (100, 90)),
        ((0, 0), 0, (0, 0), (0, 0)),
    ],
)
def test_the_longest_of_packed_sequences_without_bounds_has_twice_the_mean(rows, batch, bounds, longest):
    call = SimpleNamespace(packed=True, batch=batch, max_seqlens=bounds, rows_q=rows[0], rows_k=rows[1])
    assert longest_lengths(call) == longest
    call.packed = False
    assert longest_lengths(call) == bounds
