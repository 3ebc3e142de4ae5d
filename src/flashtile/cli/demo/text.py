"""The bytes that the demo's model learns."""

from __future__ import annotations

from pathlib import Path

from flashtile.bench.start import UserError
from flashtile.bench.values import help_texts

#: More than this much text changes nothing in a few hundred steps.
_MAX_BYTES = 32 * 2**20


def load_text(path: Path | None, context: int) -> tuple[bytes, str]:
    """Reads a file, or the help texts that every Python brings along.

    Args:
        path: any file, text or not; None for Python's own `pydoc_data/topics.py`.
        context: bytes that the model sees at once; the file must hold at least twice as many.

    Returns:
        The bytes, and a name for them.

    Raises:
        UserError: there is no such file, or it is too short.
    """
    path, name = (help_texts(), "Python's help topics") if path is None else (path, path.name)
    try:
        with path.open("rb") as file:
            text = file.read(_MAX_BYTES)
    except IsADirectoryError:
        raise UserError(f"{path} is a folder; give a file") from None
    except FileNotFoundError:
        raise UserError(f"there is no file {path}") from None
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from None
    if len(text) < 2 * context:
        raise UserError(
            f"{path} holds {len(text)} bytes; the model sees {context} at once and needs at least {2 * context}"
        )
    return text, name
