"""flash_attn.ops.triton.mlp: the same in versions 1 and 2."""

from flashtile.compat.flash_attn.ops.triton.mlp import FusedDenseSqreluDense, fused_dense_sqrelu_dense_function

__all__ = ["FusedDenseSqreluDense", "fused_dense_sqrelu_dense_function"]
