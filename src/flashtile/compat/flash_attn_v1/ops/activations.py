"""flash_attn.ops.activations: the same in versions 1 and 2."""

from flashtile.compat.flash_attn.ops.activations import (
    FastGeLUFunction,
    GeLUFunction,
    bias_gelu,
    bias_gelu_back,
    bias_gelu_impl,
    fast_gelu_impl,
    gelu_bwd,
    gelu_fwd,
    relu_bwd,
    sqrelu_bwd,
    sqrelu_fwd,
)

__all__ = [
    "FastGeLUFunction",
    "GeLUFunction",
    "bias_gelu",
    "bias_gelu_back",
    "bias_gelu_impl",
    "fast_gelu_impl",
    "gelu_bwd",
    "gelu_fwd",
    "relu_bwd",
    "sqrelu_bwd",
    "sqrelu_fwd",
]
