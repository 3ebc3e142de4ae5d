"""How the Hopper forward of float32 is cut (`float32_forward`). Nothing here needs Triton."""

from __future__ import annotations

from typing import NamedTuple

import torch

from flashtile.ops.attention.hopper.configs import CONSUMER_ROWS, MAX_HEAD_DIM, SHARED_MEMORY
from flashtile.ops.attention.hopper.float32_backward_configs import PARTS
from flashtile.ops.attention.hopper.wide_backward_configs import CHUNK

#: Bytes of the parts of a chunk of 64 rows.
_CHUNK_BYTES = PARTS * 2 * CHUNK * CONSUMER_ROWS

#: Warpgroups among which chunks are divided.
_SHARERS = 2

#: Bytes of the partial scores that they exchange; of barriers, and what Triton passes to its partitions.
_EXCHANGE_BYTES, _OVERHEAD = _SHARERS * 4 * CONSUMER_ROWS**2, 2048

#: Chunks that each warpgroup visits, at least: one is multiplied while the next is loaded.
_STAGES = 2

#: Heads of up to so many columns take the portable kernels: a chunk cannot be divided over the warpgroups.
NARROW = 64

#: Heads of up to so many columns take them where there are fewer keys than `LONG_KEYS`: parts cost more than they gain.
#: Milliseconds, here and there, causal, 8 heads of 128: 16 × 512 tokens 0.265 and 0.260, 4 × 2,048 0.575 and 0.734. 8
#: heads of 256, 8 × 256 tokens: 0.112 and 0.269.
HALF_WIDE, LONG_KEYS = 128, 1024


class Float32ForwardConfig(NamedTuple):
    """How the kernel is cut.

    Attributes:
        chunks, value_chunks: of a row of q and k, at least one for each warpgroup, and of v.
        queries_stay: on chip, instead of being loaded again for each tile of keys.
        stages: chunks on chip that each warpgroup visits.
    """

    chunks: int
    value_chunks: int
    queries_stay: bool
    stages: int


def choose_float32_forward_config(head_dim: int, head_dim_v: int) -> Float32ForwardConfig:
    """The queries stay if that leaves each warpgroup two chunks that it visits."""
    chunks, value_chunks = max(-(-head_dim // CHUNK), _SHARERS), -(-head_dim_v // CHUNK)
    room = (SHARED_MEMORY - _EXCHANGE_BYTES - _OVERHEAD) // _CHUNK_BYTES
    beside_queries = (room - chunks) // _SHARERS
    queries_stay = beside_queries >= _STAGES
    return Float32ForwardConfig(
        chunks, value_chunks, queries_stay, beside_queries if queries_stay else room // _SHARERS
    )


def float32_forward_shared_memory(config: Float32ForwardConfig) -> int:
    """An estimate of the shared memory of a program in bytes."""
    chunks = _SHARERS * config.stages + (config.chunks if config.queries_stay else 0)
    return chunks * _CHUNK_BYTES + _EXCHANGE_BYTES + _OVERHEAD


def serves_float32_forward(dtype: torch.dtype, head_dim: int, head_dim_v: int) -> bool:
    """Whether the kernel of `float32_forward` is for a forward."""
    return dtype is torch.float32 and NARROW < max(head_dim, head_dim_v) <= MAX_HEAD_DIM
