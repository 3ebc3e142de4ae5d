"""flashtile as an attention implementation of Hugging Face transformers: `attn_implementation="flashtile"`."""

from flashtile.integrations.transformers.context_parallel import context_parallel
from flashtile.integrations.transformers.registration import register, unregister

__all__ = ["context_parallel", "register", "unregister"]
