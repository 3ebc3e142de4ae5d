"""The tiles of the CPU backend: as small as a test needs them, and in place of PyTorch's flash attention."""

from __future__ import annotations

import pytest
import torch

from flashtile.ops.attention import cpu
from flashtile.ops.attention.cpu import tiles


def use_only_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch's flash attention serves no call."""
    monkeypatch.setattr(cpu, "served_by_torch", lambda *_: (False, "flashtile tiles: the test wants them"))


def use_small_tiles(monkeypatch: pytest.MonkeyPatch, side: int) -> None:
    """Tiles of so many rows and keys, of which short sequences have many, and blocks of at most two matrices."""
    monkeypatch.setattr(tiles, "_TILE_ROWS", side)
    monkeypatch.setattr(tiles, "_TILE_KEYS", side)
    monkeypatch.setattr(tiles, "_TILE_ELEMENTS_PER_THREAD", 2 * side * side // torch.get_num_threads())
