"""Operations of flash_attn 1 beside attention."""
