"""Those that flash_attn has in Triton."""
