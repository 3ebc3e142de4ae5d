"""The one tolerance policy of the project.

A result is right if its error against an fp64 oracle is at most twice the error of the plain eager computation in the
same dtype, plus a rounding band for the cases where the eager computation happens to be exact. This must hold for the
largest error, which shows a single wrong element, and for the root mean square, which shows small errors in many
elements (in a causal call the late rows are far smaller than the first).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

_EAGER_FACTOR = 2.0


class Size(NamedTuple):
    """The size of the elements of a tensor: the largest, and their root mean square."""

    largest: float = 0.0
    typical: float = 0.0


#: Width of the rounding band in units of the last place. Narrow types round once, at the end; in float32 and float64
#: the sums themselves are rounded, in another order than the eager ones, and the float64 oracle's like the result's.
_BAND_ULPS = {
    torch.float16: Size(4, 1),
    torch.bfloat16: Size(4, 1),
    torch.float32: Size(16, 16),
    torch.float64: Size(64, 64),
}


def size(tensor: Tensor) -> Size:
    """The size of the finite elements."""
    finite = _select_elements(tensor, tensor.isfinite()).double()
    if not finite.numel():
        return Size()
    return Size(finite.abs().max().item(), finite.square().mean().sqrt().item())


def size_in_finer_band(rounded: Size, coarse: torch.dtype, fine: torch.dtype) -> Size:
    """The size that has the band in `fine` that `rounded` has in `coarse`."""
    of_coarse, of_fine = _BAND_ULPS[coarse], _BAND_ULPS[fine]
    ratio = torch.finfo(coarse).eps / torch.finfo(fine).eps
    return Size(*(ratio * part * wide / narrow for part, wide, narrow in zip(rounded, of_coarse, of_fine)))


def error(actual: Tensor, oracle: Tensor) -> float:
    """Largest absolute difference over finite oracle elements, in float64."""
    return _error(actual, oracle).largest


def allowed_error(eager: Tensor, oracle: Tensor, dtype: torch.dtype) -> float:
    """The policy for the largest error: `2 · error(eager) + band(dtype) · max |oracle|`."""
    return _allowed(eager, oracle, dtype, Size()).largest


def assert_close(name: str, actual: Tensor, oracle: Tensor, eager: Tensor, cancelled: Size = Size()) -> None:  # noqa: B008
    """Asserts shape, dtype, infinities and NaN as in the oracle, and the error policy.

    Args:
        name: name of the result, for the message.
        actual: the result under test.
        oracle: the same result computed in float64.
        eager: the same result computed by the eager reference in the dtype of the inputs.
        cancelled: size of the numbers that cancel within the result, if they are larger than the result.
    """
    assert actual.shape == oracle.shape, f"{name}: shape {tuple(actual.shape)}, expected {tuple(oracle.shape)}"
    assert actual.dtype is eager.dtype, f"{name}: dtype {actual.dtype}, expected {eager.dtype}"
    oracle = oracle.to(actual.device)
    eager = eager.to(actual.device)
    assert torch.equal(actual.isnan(), oracle.isnan()), f"{name}: NaN at {_first(actual.isnan() ^ oracle.isnan())}"
    infinite = actual.isinf() | oracle.isinf()
    differ = infinite & (actual.double() != oracle)
    assert not differ.any(), f"{name}: {actual[differ][0]} at {_first(differ)}, expected {oracle[differ][0]}"
    meant = _select_elements(eager, oracle.isfinite())
    assert meant.isfinite().all(), f"{name}: the eager computation overflows, and allows anything"
    bounds = zip(Size._fields, _error(actual, oracle), _allowed(eager, oracle, actual.dtype, cancelled))
    for norm, found, allowed in bounds:
        assert found <= allowed, (
            f"{name}: {norm} error {found:.3e} against fp64, allowed {allowed:.3e} "
            f"(eager {getattr(_error(eager, oracle), norm):.3e}); worst at {_worst(actual, oracle)}"
        )


def assert_same(actual: Any, expected: Any, name: str = "result", cancelled: Size = Size()) -> None:  # noqa: B008
    """Asserts that two computations of one result agree to the rounding band of the policy.

    This is for identities, where both sides are computed in the same dtype and neither is an oracle: a packed call and
    its sequences one by one, a compiled function and the function itself. Nothing is known of the eager error, so the
    band has to do: computations whose own rounding is larger than that need an oracle and `assert_close`.

    Args:
        actual: a tensor, or a tuple, list or mapping of such; None equals None.
        expected: the same structure. Tensors of integers must be equal.
        name: what is compared, for the message.
        cancelled: as for `assert_close`.
    """
    if isinstance(expected, Mapping):
        assert actual.keys() == expected.keys(), f"{name}: keys {list(actual)}, expected {list(expected)}"
        for key, value in expected.items():
            assert_same(actual[key], value, f"{name}[{key!r}]", cancelled)
    elif isinstance(expected, tuple | list):
        assert len(actual) == len(expected), f"{name}: {len(actual)} items, expected {len(expected)}"
        for place, value in enumerate(expected):
            assert_same(actual[place], value, f"{name}[{place}]", cancelled)
    elif expected is None:
        assert actual is None, f"{name}: expected None, got {actual}"
    elif expected.is_floating_point():
        assert_close(name, actual, expected.double(), expected, cancelled)
    else:
        assert actual.dtype is expected.dtype, f"{name}: dtype {actual.dtype}, expected {expected.dtype}"
        assert torch.equal(actual, expected), f"{name}: expected {expected}, got {actual}"


def _error(actual: Tensor, oracle: Tensor) -> Size:
    finite = oracle.isfinite()
    return size(_select_elements(actual.double(), finite) - _select_elements(oracle, finite))


def _allowed(eager: Tensor, oracle: Tensor, dtype: torch.dtype, cancelled: Size) -> Size:
    epsilon = torch.finfo(dtype).eps
    bounds = zip(_error(eager, oracle), size(oracle), cancelled, _BAND_ULPS[dtype])
    return Size(*(_EAGER_FACTOR * eager + ulps * epsilon * (left + lost) for eager, left, lost, ulps in bounds))


def _select_elements(tensor: Tensor, those: Tensor) -> Tensor:
    """Elements of a tensor. If these are all, it is the tensor itself, because picking them takes long."""
    return tensor if those.all() else tensor[those]


def _worst(actual: Tensor, oracle: Tensor) -> tuple[int, ...]:
    difference = (actual.double() - oracle).nan_to_num(0, 0, 0).abs()
    return _first(difference == difference.max())


def _first(mask: Tensor) -> tuple[int, ...]:
    return tuple(mask.nonzero()[0].tolist())
