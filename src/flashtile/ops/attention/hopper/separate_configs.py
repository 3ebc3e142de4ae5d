"""How the kernels with one gradient each are cut (wide heads, float32), and the forward of float32. No Triton here."""

from __future__ import annotations

from typing import NamedTuple

import torch

from flashtile.ops.attention.call import Call
from flashtile.ops.attention.gpu.tile_tables import Row, first_row
from flashtile.ops.attention.hopper.configs import CONSUMER_ROWS, MAX_HEAD_DIM, SHARED_MEMORY

#: Rows and columns of a chunk, and the bytes of one of 16-bit numbers.
CHUNK = 64
_CHUNK_BYTES = 2 * CHUNK * CHUNK

#: Bytes of the place of scores, weights or gradients of scores in float32.
_EXCHANGE_BYTES = 4 * CHUNK**2

#: Barriers of up to 32 chunks, and what Triton passes to its partitions.
_OVERHEAD = 2048

#: Chunks of dv of 64 keys in a warpgroup at most: 160 registers of a thread. With six, ptxas makes all products wait
#: for one another. D 320: 0.55 ms, with two thread blocks of three chunks 0.90 (4 × 4,096 tokens, 4 heads, on an H100).
_MAX_SUM_CHUNKS = 5

#: Registers of a thread that computes, and of any thread at the start, as in a forward with two consumers.
REGISTERS, MAX_REGISTERS = 240, 168

#: Keys of a program of dv, 64 of each of two warpgroups.
KEYS_OF_DV = 2 * CONSUMER_ROWS

#: Queries whose statistics lie side by side: a kernel of `backward_dq` holds that many rows of 512 columns.
STATISTIC_ROWS = 16


#: Chunks of q and k, and of dout and v, that kernels are compiled for: a call takes the first that holds it, and the
#: columns that it does not have are zeros. For many others, such as 6 and 5 or 7 and 7, ptxas 12.8 computes descriptors
#: in a way that the search for wrong machine code cannot follow to the PTX (`tests/**/control_flow.py`).
_CUTS = tuple(Row(CHUNK * q, CHUNK * v, (q, v)) for q, v in ((2, 5), (5, 5), (2, 8), (8, 2), (8, 8)))


class WideBackwardConfig(NamedTuple):
    """How the kernels of dv, and of dk and dq, are cut.

    Attributes:
        chunks, value_chunks: of a row of q and k, and of dout and v.
        parts: thread blocks among which the columns of dv are divided.
        places: for visited chunks of the kernel of dv.
        score_places, value_places: for visited chunks of q or k, and of dout or v, of the kernel of dk and dq. Chunks
            of q or k stay until the last product of their step.
    """

    chunks: int
    value_chunks: int
    parts: int
    places: int
    score_places: int
    value_places: int


def choose_wide_backward_config(head_dim: int, head_dim_v: int) -> WideBackwardConfig:
    """The cut of a call: own rows take what they need, and visited ones what is left, up to two steps of them."""
    chunks, value_chunks = first_row(_CUTS, head_dim, head_dim_v)
    parts = -(-value_chunks // _MAX_SUM_CHUNKS)
    room = (SHARED_MEMORY - _OVERHEAD) // _CHUNK_BYTES
    sum_chunks = -(-value_chunks // parts)
    own_keys = 2 * max(chunks, sum_chunks)
    left = room - chunks - value_chunks - 1  # one place for the exchange
    # What two steps of q or k leave, or a step of values, but no more than one step of q or k leaves.
    value_places = min(2 * value_chunks, max(left - 2 * chunks, min(value_chunks, left - chunks)))
    return WideBackwardConfig(
        chunks=chunks,
        value_chunks=value_chunks,
        parts=parts,
        places=min(room - own_keys, 2 * (chunks + sum_chunks)),
        score_places=min(2 * chunks, left - value_places),
        value_places=value_places,
    )


def is_wide(head_dim: int, head_dim_v: int) -> bool:
    """Whether the kernels of `wide_backward` serve a backward."""
    return max(head_dim, head_dim_v) > 4 * CONSUMER_ROWS


#: Parts of a number, and warpgroups that share rows (`float32_forward`).
PARTS, SHARERS = 3, 2

#: Places that each stream of a program has at least: for the chunk that is multiplied and for the next one, which may
#: be of own rows.
STREAM_PLACES = 2 * PARTS


def cut_shared_rows(chunks: int) -> tuple[int, int]:
    """How many of `chunks` of own rows stay for each of two warpgroups, and the places of each's stream."""
    room = (SHARED_MEMORY - SHARERS * _EXCHANGE_BYTES - _OVERHEAD) // _CHUNK_BYTES
    staying = -(-chunks // SHARERS)
    while (places := (room - _staying_tiles(chunks, staying)) // SHARERS) < STREAM_PLACES:
        staying -= 1
    return staying, places


def shared_rows_memory(config: Float32ForwardConfig | Float32WideConfig) -> int:
    """An estimate of the shared memory of a program whose warpgroups share rows, in bytes: of the forward, or of dv."""
    tiles = SHARERS * config.places + _staying_tiles(config.chunks, config.staying)
    return tiles * _CHUNK_BYTES + SHARERS * _EXCHANGE_BYTES + _OVERHEAD


def _staying_tiles(chunks: int, staying: int) -> int:
    return PARTS * min(SHARERS * staying, chunks)


#: Heads of up to so many columns take the portable kernels: a chunk cannot be divided over the warpgroups.
NARROW = 64

#: Heads of up to so many columns take them too, unless there are `LONG_KEYS` keys or few tiles of queries
#: (`parts_pay`).
HALF_WIDE, LONG_KEYS = 128, 1024

#: This many keys for each tile of queries are enough: where there are few tiles, what counts is how long one takes.
#: Milliseconds on an H100, hopper and triton, 8 heads of 128, causal: 1 × 256 tokens 0.026 and 0.031, 1 × 512 0.040 and
#: 0.058, 1 × 1,000 0.070 and 0.116, 4 × 512 0.068 and 0.080, 16 × 512 0.265 and 0.260; full 8 × 256 0.064 and 0.045, 32
#: × 512 0.646 and 0.601. With 8 heads of 256, 8 × 256 tokens: 0.095 and 0.239.
_KEYS_OF_A_TILE = 2


class Float32ForwardConfig(NamedTuple):
    """How the kernel is cut. `chunks`, `value_chunks`: of a row of q and k, at least one for each warpgroup, and of v.
    `staying`: chunks of queries of each warpgroup that stay on chip. The others are loaded again for each tile of keys.
    `places`: for the tiles that stream to each warpgroup."""

    chunks: int
    value_chunks: int
    staying: int
    places: int


def choose_float32_forward_config(head_dim: int, head_dim_v: int) -> Float32ForwardConfig:
    """The cut of a call."""
    chunks, value_chunks = max(-(-head_dim // CHUNK), SHARERS), -(-head_dim_v // CHUNK)
    return Float32ForwardConfig(chunks, value_chunks, *cut_shared_rows(chunks))


def parts_pay(call: Call) -> bool:
    """Whether products of parts are faster than the portable kernels, which cut a row into parts as they go."""
    tiles = call.batch * call.heads * -(-call.rows_q // CONSUMER_ROWS)
    return max(call.head_dims) > HALF_WIDE or call.rows_k >= min(LONG_KEYS, _KEYS_OF_A_TILE * tiles)


#: Columns of each part in a row of `float32_backward`, whatever head_dim is.
WIDTH = 128

#: Queries and keys of up to so many columns take the portable kernels, unless v is wider than `WIDTH`: half of the sums
#: of dk and dq would be empty.
NARROW_BACKWARD = 64

#: Tiles on chip of the visited rows of a step, of q and dout or of k and v. The own rows have as many.
_VISITED_TILES = 2 * PARTS

#: All own chunks of dk and dq stay on chip if that leaves so many places for what streams. Else so many chunks stay.
_PLACES_BESIDE_ALL, _STAYING = 8, 4


class Float32WideConfig(NamedTuple):
    """How the kernels of `float32_wide_backward` are cut.

    Attributes:
        chunks, value_chunks: of a row of q and k, and of dout and v.
        staying, places: chunks of keys of each warpgroup of dv that stay on chip, and places for the tiles that stream
            to each.
        staying_scores, staying_values: own chunks of dk and dq that stay on chip, of scores and of values. The others
            are loaded again for each tile of visited rows.
        weight_places, gradient_places: for the tiles that stream to `weigh` and to `differentiate`.
    """

    chunks: int
    value_chunks: int
    staying: int
    places: int
    staying_scores: int
    staying_values: int
    weight_places: int
    gradient_places: int


def choose_float32_wide_config(head_dim: int, head_dim_v: int) -> Float32WideConfig:
    """The cut of a call. Two streams have places by how many tiles of a step come through them."""
    chunks, value_chunks = -(-head_dim // CHUNK), -(-head_dim_v // CHUNK)
    staying, places = cut_shared_rows(chunks)
    room = (SHARED_MEMORY - _OVERHEAD - _EXCHANGE_BYTES) // _CHUNK_BYTES
    staying_scores, staying_values = chunks, value_chunks
    all_stay = room - PARTS * (chunks + value_chunks) >= _PLACES_BESIDE_ALL
    if not all_stay:
        staying_scores = min(chunks, max(_STAYING // 2, _STAYING - value_chunks))
        staying_values = min(value_chunks, _STAYING - staying_scores)
    left = room - PARTS * (staying_scores + staying_values)
    to_weigh = 2 * chunks - staying_scores + (chunks + 1) // 2
    to_differentiate = 2 * value_chunks - staying_values + chunks // 2
    share = left * to_weigh // (to_weigh + to_differentiate)
    least = PARTS if all_stay else STREAM_PLACES
    weight_places = min(max(share, least), left - least)
    return Float32WideConfig(
        chunks=chunks,
        value_chunks=value_chunks,
        staying=staying,
        places=places,
        staying_scores=staying_scores,
        staying_values=staying_values,
        weight_places=weight_places,
        gradient_places=left - weight_places,
    )


class SeparateCut(NamedTuple):
    """How the kernels of dv, dk and dq of a call are cut.

    Attributes:
        config: None if it depends on nothing: of float32 with heads of up to `WIDTH` columns.
        keys_of_dv: of a program. Each of two warpgroups has 64, or both share them.
        stages, memory: of the kernel of dv, and of that of dk and dq: tiles on chip of visited rows, and an estimate of
            the shared memory of a program in bytes.
    """

    config: WideBackwardConfig | Float32WideConfig | None
    keys_of_dv: int
    stages: tuple[int, int]
    memory: tuple[int, int]


def separate_cut(head_dim: int, head_dim_v: int, dtype: torch.dtype) -> SeparateCut:
    """The cut of a call of wide heads, or of float32."""
    if dtype is not torch.float32:
        wide = choose_wide_backward_config(head_dim, head_dim_v)
        visited = wide.score_places + wide.value_places
        of_values = 2 * max(wide.chunks, -(-wide.value_chunks // wide.parts)) + wide.places
        of_scores = wide.chunks + wide.value_chunks + visited + 1
        memory = of_values * _CHUNK_BYTES + _OVERHEAD, of_scores * _CHUNK_BYTES + _OVERHEAD
        return SeparateCut(wide, KEYS_OF_DV, (wide.places, visited), memory)
    if not is_wide_float32(head_dim, head_dim_v):
        of_values = 2 * _VISITED_TILES * 2 * WIDTH * CONSUMER_ROWS + _OVERHEAD
        return SeparateCut(None, KEYS_OF_DV, (_VISITED_TILES, _VISITED_TILES), (of_values, of_values + _EXCHANGE_BYTES))
    streamed = choose_float32_wide_config(head_dim, head_dim_v)
    visited = streamed.weight_places + streamed.gradient_places
    tiles = PARTS * (streamed.staying_scores + streamed.staying_values) + visited
    memory = shared_rows_memory(streamed), tiles * _CHUNK_BYTES + _EXCHANGE_BYTES + _OVERHEAD
    return SeparateCut(streamed, CONSUMER_ROWS, (streamed.places, visited), memory)


def serves_float32(call: Call) -> bool:
    """Whether `float32_forward`, or `float32_backward` and `float32_wide_backward`, have heads like these."""
    head_dim, head_dim_v = call.head_dims
    if call.phase == "forward":
        return NARROW < max(head_dim, head_dim_v) <= MAX_HEAD_DIM
    return NARROW_BACKWARD < head_dim <= MAX_HEAD_DIM and head_dim_v <= MAX_HEAD_DIM


def is_wide_float32(head_dim: int, head_dim_v: int) -> bool:
    """Whether it is those of `float32_wide_backward`."""
    return max(head_dim, head_dim_v) > WIDTH
