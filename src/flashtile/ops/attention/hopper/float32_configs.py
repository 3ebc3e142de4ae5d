"""How the Hopper kernels of float32 lay out shared memory: what forward and backward have in common. Nothing here needs
Triton."""

from __future__ import annotations

from flashtile.ops.attention.hopper.configs import CONSUMER_ROWS, SHARED_MEMORY
from flashtile.ops.attention.hopper.wide_backward_configs import CHUNK

#: Parts of a number, and warpgroups that share rows (`float32_shares`).
PARTS, SHARERS = 3, 2

#: Bytes of a tile (`float32_streams`), and of the place of scores, weights or gradients of scores.
TILE_BYTES, EXCHANGE_BYTES = 2 * CHUNK * CONSUMER_ROWS, 4 * CONSUMER_ROWS**2

#: Barriers of up to 28 tiles, and what Triton passes to its partitions.
OVERHEAD = 2048

#: Places that each stream of a program has at least: for the chunk that is multiplied and for the next one, which may
#: be of own rows.
STREAM_PLACES = 2 * PARTS


def cut_shared_rows(chunks: int) -> tuple[int, int]:
    """How many own chunks of each warpgroup stay on chip, of `chunks` that two warpgroups share, and the places of the
    stream of each."""
    room = (SHARED_MEMORY - SHARERS * EXCHANGE_BYTES - OVERHEAD) // TILE_BYTES
    staying = -(-chunks // SHARERS)
    while (places := (room - _staying_tiles(chunks, staying)) // SHARERS) < STREAM_PLACES:
        staying -= 1
    return staying, places


def memory_of_shared_rows(chunks: int, staying: int, places: int) -> int:
    """An estimate of the shared memory of a program in bytes."""
    tiles = SHARERS * places + _staying_tiles(chunks, staying)
    return tiles * TILE_BYTES + SHARERS * EXCHANGE_BYTES + OVERHEAD


def _staying_tiles(chunks: int, staying: int) -> int:
    return PARTS * min(SHARERS * staying, chunks)
