"""flashtile inside other libraries: PyTorch's own attention function, transformers, exported models.

`flashtile.integrations.transformers` needs transformers, and is imported by its own name.
"""

from flashtile.integrations import export
from flashtile.integrations.torch_flash import use_flashtile_as_flash_attention
from flashtile.integrations.torch_flex import use_flashtile_flex
from flashtile.integrations.torch_sdpa import use_flashtile_sdpa

__all__ = ["export", "use_flashtile_as_flash_attention", "use_flashtile_flex", "use_flashtile_sdpa"]
