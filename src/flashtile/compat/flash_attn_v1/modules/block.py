"""flash_attn.modules.block of version 1: the blocks of version 2 around the mixers of version 1."""

from __future__ import annotations

from flashtile.compat.flash_attn.modules import block

from .mha import MHA
from .mlp import Mlp

__all__ = ["MHA", "Block", "Mlp", "ParallelBlock"]


def _default_mixer(dim: int) -> MHA:
    return MHA(dim, num_heads=dim // 64)


class Block(block.Block):
    """`Block` of version 2; the default mixer is the `MHA` of version 1."""

    mixer_of = staticmethod(_default_mixer)


class ParallelBlock(block.ParallelBlock):
    """`ParallelBlock` of version 2; the default mixer is the `MHA` of version 1."""

    mixer_of = staticmethod(_default_mixer)
