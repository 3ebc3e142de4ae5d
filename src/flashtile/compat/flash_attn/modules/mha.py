"""flash_attn.modules.mha: attention modules with and without projections, computed by flashtile."""

from flashtile.compat.inner_attention import (
    CrossAttention,
    FlashCrossAttention,
    FlashSelfAttention,
    SelfAttention,
)
from flashtile.compat.mha import MHA, get_alibi_slopes

__all__ = ["MHA", "CrossAttention", "FlashCrossAttention", "FlashSelfAttention", "SelfAttention", "get_alibi_slopes"]
