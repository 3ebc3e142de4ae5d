"""Needed before torch is imported: the error of the benchmarks, and settings of the process."""

from __future__ import annotations

import importlib.util
import os
import warnings

#: torch warns like this wherever NumPy is missing, which flashtile does not need.
_NO_NUMPY = "Failed to initialize NumPy"


class UserError(ValueError):
    """A mistake or a lack that the user can mend; its message is all that he needs to see."""


def how_to_install(extra: str) -> str:
    """How an extra of flashtile is installed. It is on no package index: whoever takes the name there is another."""
    return f'in a checkout of flashtile, pip install ".[{extra}]"'


def installed(package: str) -> bool:
    """Whether an optional package, or a module of one, is there. Imports no more than what the module is in."""
    parts = package.split(".")
    return all(importlib.util.find_spec(".".join(parts[: count + 1])) for count in range(len(parts)))


def silence_numpy_warning() -> None:
    """Hides a warning of torch that says nothing to users of flashtile, here and in processes started from here."""
    warnings.filterwarnings("ignore", _NO_NUMPY, UserWarning)
    others = os.environ.get("PYTHONWARNINGS")
    os.environ["PYTHONWARNINGS"] = ",".join([*([others] if others else []), f"ignore:{_NO_NUMPY}:UserWarning"])


def wait_without_spinning() -> None:
    """Lets waiting threads sleep, unless the user has chosen: spinning ones slow down work of many small calls tenfold
    where other programs need the cores. The OpenMP runtime reads the choice when it starts."""
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
