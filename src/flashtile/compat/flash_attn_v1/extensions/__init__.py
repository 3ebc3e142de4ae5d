"""The compiled extensions of flash_attn 1, as modules of the same names over flashtile and PyTorch."""
