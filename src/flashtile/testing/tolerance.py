"""The one tolerance policy of the project.

A result is right when its error against an fp64 oracle is at most twice the error of the plain eager computation in
the same dtype, plus a rounding band: a few units in the last place of the output dtype at the oracle's magnitude,
for the cases where the eager computation happens to be exact.
"""

from __future__ import annotations

import torch
from torch import Tensor

_EAGER_FACTOR = 2.0
_BAND_ULPS = 4.0
# The oracle is itself computed in float64: a float64 result may differ from it by the rounding of both.
_BAND_ULPS_FLOAT64 = 64.0


def error(actual: Tensor, oracle: Tensor) -> float:
    """Largest absolute difference over finite oracle elements, in float64."""
    finite = oracle.isfinite()
    if not finite.any():
        return 0.0
    return (actual.double() - oracle)[finite].abs().max().item()


def allowed_error(eager: Tensor, oracle: Tensor, dtype: torch.dtype) -> float:
    """The policy: `2 · error(eager) + 4 ulp(dtype) · max |oracle|` (64 ulp in float64)."""
    finite = oracle[oracle.isfinite()]
    magnitude = finite.abs().max().item() if finite.numel() else 0.0
    ulps = _BAND_ULPS_FLOAT64 if dtype is torch.float64 else _BAND_ULPS
    return _EAGER_FACTOR * error(eager, oracle) + ulps * torch.finfo(dtype).eps * magnitude


def assert_close(name: str, actual: Tensor, oracle: Tensor, eager: Tensor) -> None:
    """Asserts shape, dtype, the same infinities, no NaN that the oracle lacks, and the error policy.

    Args:
        name: what is compared, for the message.
        actual: the result under test.
        oracle: the same computed in float64.
        eager: the same computed by the eager reference in the dtype of the inputs.
    """
    assert actual.shape == oracle.shape, f"{name}: shape {tuple(actual.shape)}, expected {tuple(oracle.shape)}"
    assert actual.dtype is eager.dtype, f"{name}: dtype {actual.dtype}, expected {eager.dtype}"
    oracle = oracle.to(actual.device)
    eager = eager.to(actual.device)
    assert torch.equal(actual.isnan(), oracle.isnan()), f"{name}: NaN at {_first(actual.isnan() ^ oracle.isnan())}"
    infinite = oracle.isinf()
    assert torch.equal(actual.double()[infinite], oracle[infinite]), f"{name}: infinities differ"
    found, allowed = error(actual, oracle), allowed_error(eager, oracle, actual.dtype)
    assert found <= allowed, (
        f"{name}: error {found:.3e} against fp64, allowed {allowed:.3e} (eager {error(eager, oracle):.3e}); "
        f"worst at {_first((actual.double() - oracle).nan_to_num(0, 0, 0).abs() >= found)}"
    )


def _first(mask: Tensor) -> tuple[int, ...]:
    return tuple(mask.nonzero()[0].tolist())
