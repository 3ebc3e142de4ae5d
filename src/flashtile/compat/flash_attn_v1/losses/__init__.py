"""Losses of flash_attn 1."""
