"""Other libraries' names over flashtile: `install("flash_attn")` makes `import flash_attn` resolve to it.

What is served, by which modules of this folder, and as which distribution in `importlib.metadata`::

    flash_attn              version 2    flash_attn_2, mha, block, norms, rotary, …    flash_attn 2.8.3
    flash_attn              version 1    flash_attn_1, and those of 2                  flash_attn 1.0.9
    flash_attn_interface    version 3    flash_attn_3                                  flash_attn_3 3.0.0b1
    flash_attn.cute         version 4    flash_attn_4                                  flash_attn_4 4.0.0

and by their own names the compiled extensions of version 1, by `extensions_1`. `signatures` has the tables: the modules
of each version, their names, the arguments of these, as they were read, and which are not served or have no effect;
`adapter` gives functions the arguments that a table says, and `finder` makes modules of the tables.

Nothing is served before `install`; `python -m flashtile.compat script.py` and the pytest plugin
`flashtile.compat.pytest_plugin` call it for a program that is not to be changed.
"""

from flashtile.compat.finder import install, installed, uninstall

__all__ = ["install", "installed", "uninstall"]
