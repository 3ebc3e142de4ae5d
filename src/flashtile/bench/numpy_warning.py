"""A warning of torch that commands of flashtile do not pass on."""

from __future__ import annotations

import os
import warnings

#: torch warns like this wherever NumPy is missing, which flashtile does not need.
_NO_NUMPY = "Failed to initialize NumPy"


def silence_numpy_warning() -> None:
    """In this process, and in those that it starts. Call it before torch is imported."""
    warnings.filterwarnings("ignore", _NO_NUMPY, UserWarning)
    others = os.environ.get("PYTHONWARNINGS")
    os.environ["PYTHONWARNINGS"] = ",".join([*([others] if others else []), f"ignore:{_NO_NUMPY}:UserWarning"])
