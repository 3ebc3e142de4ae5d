"""Compact masks: what a model passes from where masks are made to where attention is computed.

transformers makes a mask once for a model call, by one function, and hands it through all layers to another, the
attention. Between them it is a tensor of four dimensions, which some models slice, copy or move. A mask of
`[batch, 1, seq_q, seq_k]` would hold what three numbers say: that it is causal, that it has a window, which keys are
padding. These facts travel in the dtype and the shape of a small tensor, `[B, 1 + flags, 1, n]`:

======  ==========================================================================================
dtype   what the last dimension holds
======  ==========================================================================================
int8    nothing (ones): n keys, none of them padding
uint8   for each of n keys whether it is visible, 1 or 0
int32   where each of n packed sequences ends, in a batch that is laid out as one row
int16   nothing (ones): n tokens of a prefix tree, which is a keyword argument of the model
======  ==========================================================================================

Masks of transformers itself are bool or floating point, and hold everything.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

_EVERYTHING, _KEYS, _ENDS, _TREE = torch.int8, torch.uint8, torch.int32, torch.int16


class Band(NamedTuple):
    """The keys that a query may see by its position; the last query lies at the last key."""

    causal: bool = False
    #: A sliding window, of the size that the model's configuration says.
    windowed: bool = False
    #: The keys past those in the mask are not in use: places of a cache of fixed size.
    prefix: bool = False


class CompactMask(NamedTuple):
    """A decoded mask. One of the last four is set."""

    band: Band
    #: Number of keys, all visible but for the band.
    keys: int | None = None
    #: bool `[B, 1, 1, n]`: visible keys.
    visible: Tensor | None = None
    #: int32 `[n]`: where each packed sequence ends.
    ends: Tensor | None = None
    #: Number of tokens of a prefix tree.
    tree: int | None = None


def all_keys(band: Band, keys: int, device: torch.device | str) -> Tensor:
    return _encode(band, torch.ones((), dtype=_EVERYTHING, device=device).expand(1, keys))


def from_visible_keys(band: Band, visible: Tensor) -> Tensor:
    """`visible`: bool `[B, n]`."""
    return _encode(band, visible.to(_KEYS))


def packed_sequences(band: Band, ends: Tensor) -> Tensor:
    """`ends`: `[n]`, cumulative lengths without the first, 0."""
    return _encode(band, ends.to(_ENDS)[None])


def tree_keys(tokens: int, device: torch.device | str) -> Tensor:
    return _encode(Band(), torch.ones((), dtype=_TREE, device=device).expand(1, tokens))


def _encode(band: Band, content: Tensor) -> Tensor:
    flags = band.causal + 2 * band.windowed + 4 * band.prefix
    return content[:, None, None, :].expand(-1, 1 + flags, -1, -1)


def decode(mask: Tensor) -> CompactMask | None:
    """The facts in a mask, where it is a compact one."""
    if mask.dtype not in (_EVERYTHING, _KEYS, _ENDS, _TREE) or mask.dim() != 4:
        return None
    flags = mask.shape[1] - 1
    if not 0 <= flags < 8 or mask.shape[2] != 1:
        raise ValueError(
            "attention_mask: expected one of flashtile's masks [batch, 1 to 8, 1, keys] as it was made, got "
            f"{list(mask.shape)} {mask.dtype}; a model that changes its masks needs attn_implementation='sdpa'"
        )
    band = Band(bool(flags & 1), bool(flags & 2), bool(flags & 4))
    content = mask[:, :1]
    if mask.dtype is _EVERYTHING:
        return CompactMask(band, keys=mask.shape[-1])
    if mask.dtype is _KEYS:
        return CompactMask(band, visible=content.bool())
    if mask.dtype is _TREE:
        return CompactMask(band, tree=mask.shape[-1])
    return CompactMask(band, ends=content.flatten())
