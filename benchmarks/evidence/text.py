"""Real text that every machine with Python has: the sources and help texts of its standard library, as bytes."""

from __future__ import annotations

import hashlib
import sysconfig
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

#: More is not read; a few thousand steps see less.
_MOST_BYTES = 64 * 2**20
_ENDINGS = {".py", ".txt", ".md", ".rst"}


@dataclass(frozen=True)
class Text:
    """Bytes to learn from.

    Attributes:
        tokens: uint8, one dimension.
        name: what they are.
        sha256: of them.
        documents: where each file begins, and the end.
    """

    tokens: Tensor
    name: str
    sha256: str
    documents: list[int]


def load_text(data: Path | None = None) -> Text:
    """A file, all text files of a folder in the order of their names, or Python's standard library.

    Raises:
        ValueError: there is no text.
    """
    folder = Path(sysconfig.get_path("stdlib")) if data is None else data
    files = [folder] if folder.is_file() else sorted(_text_files(folder, others=data is not None))
    pieces, size = [], 0
    for file in files:
        if size >= _MOST_BYTES:
            break
        pieces.append(file.read_bytes()[: _MOST_BYTES - size])
        size += len(pieces[-1])
    if not size:
        raise ValueError(f"data: expected a file or a folder with text, got {folder}; name another with --data")
    whole = b"".join(pieces)
    starts = [0]
    for piece in pieces:
        starts.append(starts[-1] + len(piece))
    name = f"Python {sysconfig.get_python_version()}'s standard library" if data is None else data.name
    tokens = torch.frombuffer(bytearray(whole), dtype=torch.uint8)
    return Text(tokens, name, hashlib.sha256(whole).hexdigest(), starts)


def batch_of(text: Text, batch: int, length: int, seed: int) -> Tensor:
    """int64 `[batch, length]`: pieces of the text at places that depend on the seed alone.

    Raises:
        ValueError: the text is shorter than a piece.
    """
    if len(text.tokens) <= length:
        raise ValueError(f"data: expected more than {length} bytes, got {len(text.tokens)}; take a shorter context")
    generator = torch.Generator().manual_seed(seed)
    places = torch.randint(len(text.tokens) - length, (batch,), generator=generator)
    return torch.stack([text.tokens[place : place + length] for place in places.tolist()]).long()


def _text_files(folder: Path, others: bool) -> list[Path]:
    """Without what is installed beside the standard library, unless the folder was named by the user."""
    found = (path for path in folder.rglob("*") if path.suffix in _ENDINGS and path.is_file())
    left_out = set() if others else {"site-packages", "dist-packages", "__pycache__"}
    return [path for path in found if not left_out & set(path.parts)]
