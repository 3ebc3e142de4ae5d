"""flash_attn.losses.cross_entropy_apex, the name that the loss had in the versions 0.2."""

from .cross_entropy import CrossEntropyLoss, CrossEntropyLossApex

__all__ = ["CrossEntropyLoss", "CrossEntropyLossApex"]
