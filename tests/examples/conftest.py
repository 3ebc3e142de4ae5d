"""A text that a small model learns something of."""

from __future__ import annotations

import random
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """About 30 kB: words in any order."""
    draw = random.Random(0)
    words = ["attention", "tile", "softmax", "query", "key", "value", "the", "of", "and", "a"]
    lines = (" ".join(draw.choices(words, k=8)) + ".\n" for _ in range(600))
    path = tmp_path_factory.mktemp("text") / "words.txt"
    path.write_text("".join(lines), "utf-8")
    return path
