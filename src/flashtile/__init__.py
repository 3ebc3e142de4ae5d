"""flashtile: exact attention in tiles that stay in fast on-chip memory."""

from flashtile.ops.attention.api import attention, attention_varlen
from flashtile.ops.attention.explain import Explanation, explain
from flashtile.ops.attention.philox import draw_dropout_seed, dropout_mask

__version__ = "0.1.0"
__all__ = [
    "Explanation",
    "__version__",
    "attention",
    "attention_varlen",
    "draw_dropout_seed",
    "dropout_mask",
    "explain",
]
