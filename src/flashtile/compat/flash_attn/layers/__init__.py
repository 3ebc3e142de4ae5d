"""Layers of flash_attn: rotary position embedding, patches of images."""
