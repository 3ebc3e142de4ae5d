"""Errors that end a command with their message alone."""

from __future__ import annotations

import importlib.util

from flashtile.bench.start import how_to_install


class CommandError(Exception):
    """The command cannot go on; its message is all that the user needs to see."""


class UserError(CommandError):
    """A mistake or a lack that the user can mend."""


def installed(package: str) -> bool:
    """Whether an optional package is there, without importing it."""
    return importlib.util.find_spec(package) is not None


def require(package: str, extra: str, purpose: str) -> None:
    """Raises a UserError that says how to install it when an optional package is missing."""
    if not installed(package):
        raise UserError(f"{purpose} needs {package}: {how_to_install(extra)}")
