"""The names of FlashAttention-3: `flash_attn_interface`, which is a module of its own."""
