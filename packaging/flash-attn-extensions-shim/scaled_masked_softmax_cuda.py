"""scaled_masked_softmax_cuda of flash_attn 1, served by flashtile."""

from flashtile.compat.flash_attn_v1.extensions.scaled_masked_softmax_cuda import (
    backward,
    forward,
    get_batch_per_block,
)

__all__ = [
    "backward",
    "forward",
    "get_batch_per_block",
]
