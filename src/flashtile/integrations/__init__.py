"""flashtile inside other libraries: PyTorch's own attention function, transformers, exported models.

`flashtile.integrations.transformers` and `flashtile.integrations.diffusers` need those packages, and are imported by
their own names.
"""

from flashtile.integrations import export
from flashtile.integrations.torch_flash import use_flashtile_as_flash_attention
from flashtile.integrations.torch_functions import use_flashtile_flex, use_flashtile_sdpa

__all__ = ["export", "use_flashtile_as_flash_attention", "use_flashtile_flex", "use_flashtile_sdpa"]
