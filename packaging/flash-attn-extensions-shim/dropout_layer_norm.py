"""dropout_layer_norm of flash_attn 1, served by flashtile."""

from flashtile.compat.flash_attn_v1.extensions.dropout_layer_norm import (
    dropout_add_ln_bwd,
    dropout_add_ln_fwd,
    dropout_add_ln_parallel_residual_bwd,
    dropout_add_ln_parallel_residual_fwd,
)

__all__ = [
    "dropout_add_ln_bwd",
    "dropout_add_ln_fwd",
    "dropout_add_ln_parallel_residual_bwd",
    "dropout_add_ln_parallel_residual_fwd",
]
