"""Operations of flash_attn beside attention."""
