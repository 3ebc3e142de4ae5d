"""xentropy_cuda_lib of flash_attn 1, served by flashtile."""

from flashtile.compat.flash_attn_v1.extensions.xentropy_cuda_lib import (
    backward,
    forward,
)

__all__ = [
    "backward",
    "forward",
]
