"""scaled_upper_triang_masked_softmax_cuda of flash_attn 1, served by flashtile."""

from flashtile.compat.flash_attn_v1.extensions.scaled_upper_triang_masked_softmax_cuda import (
    backward,
    forward,
)

__all__ = [
    "backward",
    "forward",
]
