"""flash_attn_cuda of flash_attn 1, served by flashtile."""

from flashtile.compat.flash_attn_v1.extensions.flash_attn_cuda import (
    bwd,
    bwd_block,
    fwd,
    fwd_block,
)

__all__ = [
    "bwd",
    "bwd_block",
    "fwd",
    "fwd_block",
]
