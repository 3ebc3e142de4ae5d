"""The names of flash_attn 1.0.9, served by flashtile: the modules below this one are files of `flashtile.compat`."""

from pathlib import Path

import flashtile.compat

__path__ = [str(Path(flashtile.compat.__file__).parent / "flash_attn_v1")]
__version__ = "1.0.9"
