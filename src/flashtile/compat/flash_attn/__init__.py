"""The names of flash_attn 2 that have files of their own."""
