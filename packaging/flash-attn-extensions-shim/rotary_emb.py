"""rotary_emb of flash_attn 1, served by flashtile."""

from flashtile.compat.flash_attn_v1.extensions.rotary_emb import (
    apply_rotary,
)

__all__ = [
    "apply_rotary",
]
