"""flashtile as an attention implementation of Hugging Face transformers: `attn_implementation="flashtile"`."""

try:
    from flashtile.integrations.transformers.context_parallel import context_parallel
    from flashtile.integrations.transformers.registration import register, unregister
    from flashtile.integrations.transformers.trees import prefix_tree_inputs
except ImportError as error:
    if not (error.name or "").startswith("transformers"):
        raise
    raise ImportError(
        'flashtile.integrations.transformers needs transformers 5.17 or newer: pip install "transformers>=5.17"',
        name=error.name,
        path=error.path,
    ) from error

__all__ = ["context_parallel", "prefix_tree_inputs", "register", "unregister"]
