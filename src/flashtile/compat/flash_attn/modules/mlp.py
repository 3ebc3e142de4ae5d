"""flash_attn.modules.mlp: the perceptrons of flashtile.modules."""

from flashtile.modules import GatedMlp, Mlp

from ..ops.fused_dense import FusedMLP

__all__ = ["FusedMLP", "GatedMlp", "Mlp"]
