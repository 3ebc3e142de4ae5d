"""How the Hopper backward of heads wider than 256 columns is cut (`wide_backward`). Nothing here needs Triton."""

from __future__ import annotations

from typing import NamedTuple

from flashtile.ops.attention.hopper.configs import CONSUMER_ROWS, SHARED_MEMORY

#: Rows and columns of a chunk, and the bytes of one of 16-bit numbers.
CHUNK = 64
_CHUNK_BYTES = 2 * CHUNK * CHUNK

#: Barriers of up to 32 chunks, and what Triton passes to its partitions.
_OVERHEAD = 2048

#: Chunks of dv of 64 keys in a warpgroup at most: 160 registers of a thread. With six, ptxas makes all products wait
#: for one another. D 320: 0.55 ms, with two thread blocks of three chunks 0.90 (4 × 4,096 tokens, 4 heads, on an H100).
_MAX_SUM_CHUNKS = 5

#: Registers of a thread that computes, and of any thread at the start, as in a forward with two consumers.
REGISTERS, MAX_REGISTERS = 240, 168

#: Keys of a program of dv, 64 of each of two warpgroups.
KEYS_OF_DV = 2 * CONSUMER_ROWS

#: Queries whose statistics lie side by side: a kernel of `backward_ends` holds that many rows of 512 columns.
STATISTIC_ROWS = 16


#: Chunks of q and k, and of dout and v, that kernels are compiled for: a call takes the first that holds it, and the
#: columns that it does not have are zeros. For many others, such as 6 and 5 or 7 and 7, ptxas 12.8 computes descriptors
#: in a way that the search for wrong machine code cannot follow to the PTX (`tests/control_flow.py`).
_CUTS = ((2, 5), (5, 5), (2, 8), (8, 2), (8, 8))


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
    needed, needed_of_values = -(-head_dim // CHUNK), -(-head_dim_v // CHUNK)
    chunks, value_chunks = next(cut for cut in _CUTS if needed <= cut[0] and needed_of_values <= cut[1])
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


def wide_shared_memory(config: WideBackwardConfig) -> tuple[int, int]:
    """Estimates of the shared memory of a program in bytes: of the kernel of dv, and of that of dk and dq."""
    of_values = 2 * max(config.chunks, -(-config.value_chunks // config.parts)) + config.places
    of_scores = config.chunks + config.value_chunks + config.score_places + config.value_places + 1
    return of_values * _CHUNK_BYTES + _OVERHEAD, of_scores * _CHUNK_BYTES + _OVERHEAD


def is_wide(head_dim: int, head_dim_v: int) -> bool:
    """Whether the kernels of `wide_backward` serve a backward."""
    return max(head_dim, head_dim_v) > 4 * CONSUMER_ROWS
