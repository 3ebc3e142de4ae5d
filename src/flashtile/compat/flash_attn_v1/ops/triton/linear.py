"""flash_attn.ops.triton.linear: the same in versions 1 and 2."""

from flashtile.compat.flash_attn.ops.triton.linear import triton_dgrad_act, triton_linear_act

__all__ = ["triton_dgrad_act", "triton_linear_act"]
