"""`nn.Module`s over the public functions of flashtile, with PyTorch's argument names and state-dict keys."""

from flashtile.modules.norm import DropoutAddLayerNorm, DropoutAddRMSNorm, LayerNorm, RMSNorm
from flashtile.modules.rotary import RotaryEmbedding

__all__ = ["DropoutAddLayerNorm", "DropoutAddRMSNorm", "LayerNorm", "RMSNorm", "RotaryEmbedding"]
