"""The names of flash_attn 1.0.9 over flashtile: what `flashtile.compat.install("flash_attn", version=1)` serves."""

__version__ = "1.0.9"
