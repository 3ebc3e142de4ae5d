"""flash_attn.ops.rms_norm: the same in versions 1 and 2."""

from flashtile.compat.flash_attn.ops.rms_norm import (
    DropoutAddRMSNorm,
    RMSNorm,
    dropout_add_rms_norm,
    dropout_add_rms_norm_parallel_residual,
    dropout_add_rms_norm_subset,
    rms_norm,
)

__all__ = [
    "DropoutAddRMSNorm",
    "RMSNorm",
    "dropout_add_rms_norm",
    "dropout_add_rms_norm_parallel_residual",
    "dropout_add_rms_norm_subset",
    "rms_norm",
]
