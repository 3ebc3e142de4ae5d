"""flash_attn.ops.fused_dense: the same in versions 1 and 2."""

from flashtile.compat.flash_attn.ops.fused_dense import FusedDense, FusedMLP, fused_dense_func, fused_mlp_func

__all__ = ["FusedDense", "FusedMLP", "fused_dense_func", "fused_mlp_func"]
