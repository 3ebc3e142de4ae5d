"""Losses of flash_attn."""
