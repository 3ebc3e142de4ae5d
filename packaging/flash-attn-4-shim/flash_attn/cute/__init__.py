"""flash_attn.cute, served by flashtile: the modules below this one are files of `flashtile.compat`."""

from pathlib import Path

import flashtile.compat

__path__ = [str(Path(flashtile.compat.__file__).parent / "flash_attn_4" / "cute")]
__version__ = "4.0.0"

from flash_attn.cute.interface import (
    flash_attn_combine,
    flash_attn_func,
    flash_attn_varlen_func,
    get_scheduler_metadata,
)

__all__ = ["flash_attn_combine", "flash_attn_func", "flash_attn_varlen_func", "get_scheduler_metadata"]
