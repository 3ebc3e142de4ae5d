"""Layers of flash_attn 1: rotary position embedding, patches of images."""
