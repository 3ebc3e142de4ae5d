"""flash_attn.layers.patch_embed: the same in versions 1 and 2."""

from flashtile.compat.flash_attn.layers.patch_embed import PatchEmbed

__all__ = ["PatchEmbed"]
