"""flash_attn.flash_attn_triton: attention with a bias, over `flashtile.attention`."""

from flashtile.compat.shared.padding import (
    _flash_attn_forward,
    flash_attn_func,
    flash_attn_kvpacked_func,
    flash_attn_qkvpacked_func,
)

__all__ = ["_flash_attn_forward", "flash_attn_func", "flash_attn_kvpacked_func", "flash_attn_qkvpacked_func"]
