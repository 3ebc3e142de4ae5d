"""What commands of flashtile set before torch is imported, for this process and for those that it starts."""

from __future__ import annotations

import os
import warnings

#: torch warns like this wherever NumPy is missing, which flashtile does not need.
_NO_NUMPY = "Failed to initialize NumPy"


def silence_numpy_warning() -> None:
    """Hides a warning of torch that says nothing to users of flashtile."""
    warnings.filterwarnings("ignore", _NO_NUMPY, UserWarning)
    others = os.environ.get("PYTHONWARNINGS")
    os.environ["PYTHONWARNINGS"] = ",".join([*([others] if others else []), f"ignore:{_NO_NUMPY}:UserWarning"])


def wait_without_spinning() -> None:
    """Lets threads that wait for one another sleep, unless the user has chosen.

    Threads that spin slow down work of many small calls tenfold where other programs need the cores. The OpenMP
    runtime reads the choice when it starts.
    """
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
