"""FlashAttention-4's `flash_attn.cute` over flashtile: what `flashtile.compat.install("flash_attn.cute")` serves."""

from .interface import flash_attn_combine, flash_attn_func, flash_attn_varlen_func, get_scheduler_metadata

__version__ = "4.0.0"
__all__ = ["flash_attn_combine", "flash_attn_func", "flash_attn_varlen_func", "get_scheduler_metadata"]
