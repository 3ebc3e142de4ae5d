"""Modules of flash_attn."""
