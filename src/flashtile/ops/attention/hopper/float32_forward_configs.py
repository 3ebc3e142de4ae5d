"""How the Hopper forward of float32 is cut (`float32_forward`). Nothing here needs Triton."""

from __future__ import annotations

from typing import NamedTuple

import torch

from flashtile.ops.attention.hopper.configs import CONSUMER_ROWS, MAX_HEAD_DIM
from flashtile.ops.attention.hopper.float32_configs import SHARERS, cut_shared_rows, memory_of_shared_rows
from flashtile.ops.attention.hopper.wide_backward_configs import CHUNK

#: Heads of up to so many columns take the portable kernels: a chunk cannot be divided over the warpgroups.
NARROW = 64

#: Heads of up to so many columns take them too, unless there are `LONG_KEYS` keys or few tiles of queries
#: (`parts_pay`).
HALF_WIDE, LONG_KEYS = 128, 1024

#: So many keys for each tile of queries are enough: where there are few tiles, what counts is how long one takes.
#: Milliseconds on an H100, hopper and triton, 8 heads of 128, causal: 1 × 256 tokens 0.026 and 0.031, 1 × 512 0.040 and
#: 0.058, 1 × 1,000 0.070 and 0.116, 4 × 512 0.068 and 0.080, 16 × 512 0.265 and 0.260; full 8 × 256 0.064 and 0.045, 32
#: × 512 0.646 and 0.601. With 8 heads of 256, 8 × 256 tokens: 0.095 and 0.239.
_KEYS_OF_A_TILE = 2


class Float32ForwardConfig(NamedTuple):
    """How the kernel is cut.

    Attributes:
        chunks, value_chunks: of a row of q and k, at least one for each warpgroup, and of v.
        staying: chunks of queries of each warpgroup that stay on chip. The others are loaded again for each tile of
            keys.
        places: for the tiles that stream to each warpgroup.
    """

    chunks: int
    value_chunks: int
    staying: int
    places: int


def choose_float32_forward_config(head_dim: int, head_dim_v: int) -> Float32ForwardConfig:
    """The cut of a call."""
    chunks, value_chunks = max(-(-head_dim // CHUNK), SHARERS), -(-head_dim_v // CHUNK)
    return Float32ForwardConfig(chunks, value_chunks, *cut_shared_rows(chunks))


def float32_forward_shared_memory(config: Float32ForwardConfig) -> int:
    """An estimate of the shared memory of a program in bytes."""
    return memory_of_shared_rows(config.chunks, config.staying, config.places)


def serves_float32_forward(dtype: torch.dtype, head_dim: int, head_dim_v: int) -> bool:
    """Whether the kernel of `float32_forward` is for a forward."""
    return dtype is torch.float32 and NARROW < max(head_dim, head_dim_v) <= MAX_HEAD_DIM


def parts_pay(q_shape: tuple[int, ...], keys: int, widest: int) -> bool:
    """Whether products of parts are faster than those of the portable kernels, which cut a row into parts as they go.

    Args:
        q_shape: `[batch, rows, heads, head_dim]`.
        widest: columns of q and k, or of v.
    """
    batch, rows, heads, _ = q_shape
    tiles = batch * heads * -(-rows // CONSUMER_ROWS)
    return widest > HALF_WIDE or keys >= min(LONG_KEYS, _KEYS_OF_A_TILE * tiles)
