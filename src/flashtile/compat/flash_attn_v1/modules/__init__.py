"""Modules of flash_attn 1."""
