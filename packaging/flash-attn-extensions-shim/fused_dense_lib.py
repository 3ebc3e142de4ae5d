"""fused_dense_lib of flash_attn 1, served by flashtile."""

from flashtile.compat.flash_attn_v1.extensions.fused_dense_lib import (
    bias_act_linear_dgrad_bgrad,
    linear_act_forward,
    linear_bias_backward,
    linear_bias_forward,
    linear_bias_residual_backward,
    linear_bias_wgrad,
    linear_gelu_forward,
    linear_gelu_linear_backward,
    linear_residual_gelu_linear_backward,
)

__all__ = [
    "bias_act_linear_dgrad_bgrad",
    "linear_act_forward",
    "linear_bias_backward",
    "linear_bias_forward",
    "linear_bias_residual_backward",
    "linear_bias_wgrad",
    "linear_gelu_forward",
    "linear_gelu_linear_backward",
    "linear_residual_gelu_linear_backward",
]
