"""The names of FlashAttention-4: `flash_attn.cute`, a package that lies beside those of flash_attn."""
