"""The names of flash_attn 2.8.3, served by flashtile: the modules below this one are files of `flashtile.compat`."""

from pathlib import Path

import flashtile.compat

# The folder of this file stays in the path, because flash_attn.cute of another distribution may lie in it.
__path__ = [str(Path(flashtile.compat.__file__).parent / "flash_attn"), *__path__]
__version__ = "2.8.3"

from flash_attn.flash_attn_interface import (
    flash_attn_func,
    flash_attn_kvpacked_func,
    flash_attn_qkvpacked_func,
    flash_attn_varlen_func,
    flash_attn_varlen_kvpacked_func,
    flash_attn_varlen_qkvpacked_func,
    flash_attn_with_kvcache,
)

__all__ = [
    "flash_attn_func",
    "flash_attn_kvpacked_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_varlen_kvpacked_func",
    "flash_attn_varlen_qkvpacked_func",
    "flash_attn_with_kvcache",
]
