"""Where a check of a backend runs: a test with `places` has a case for each, with the marks that say when it can."""

from __future__ import annotations

import pytest
import torch

_ON_GPUS = [torch.float32, torch.bfloat16]
#: Backend, device, dtypes and mark of a place.
_PLACES: dict[str, tuple[str, str, list[torch.dtype], list[pytest.MarkDecorator]]] = {
    "reference": ("reference", "cpu", [torch.float32], []),
    "cpu": ("cpu", "cpu", [torch.float32], []),
    "interpreted": ("triton", "cpu", [torch.float32], [pytest.mark.interpreter]),
    "gpu": ("triton", "cuda", _ON_GPUS, [pytest.mark.gpu]),
    "hopper": ("hopper", "cuda", _ON_GPUS[1:], [pytest.mark.hopper]),
}


#: Where the portable kernels run: in Triton's interpreter, and on a GPU.
of_kernels = pytest.mark.parametrize(
    "device", [pytest.param("cpu", marks=pytest.mark.interpreter), pytest.param("cuda", marks=pytest.mark.gpu)]
)


def places(*names: str, dtypes: bool = False) -> pytest.MarkDecorator:
    """Parametrises a test by `backend` and `device`, and with `dtypes` by `dtype`: float32 on a CPU, bfloat16 on the
    Hopper kernels, and both on the portable ones of a GPU.

    Args:
        names: of `_PLACES`.
    """
    cases = []
    for name in names:
        backend, device, each, marks = _PLACES[name]
        for dtype in each if dtypes else each[:1]:
            given = (backend, device, dtype) if dtypes else (backend, device)
            cases.append(
                pytest.param(
                    *given,
                    marks=marks,
                    id=f"{name}-{dtype}".replace("torch.", "") if len(each) > 1 and dtypes else name,
                )
            )
    return pytest.mark.parametrize(("backend", "device", "dtype") if dtypes else ("backend", "device"), cases)
