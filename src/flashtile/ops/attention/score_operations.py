"""The operations of PyTorch that may be steps of a score program, and the check of a step that was read from text.

The text of a program is an argument of the operators. It travels in exported programs, so it may come from anywhere:
what it names is looked up here and nowhere else.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Container, Sequence
from typing import Any

import torch

#: Names of elementwise operations. PyTorch's tag `pointwise` has more, such as random numbers.
_LIST = """
    __lshift__ __rshift__ __xor__ abs acos acosh add addcdiv addcmul angle asin asinh atan atan2 atanh bitwise_and
    bitwise_left_shift bitwise_not bitwise_or bitwise_right_shift bitwise_xor ceil celu clamp clamp_max clamp_min
    conj_physical copysign cos cosh deg2rad digamma div elu eq erf erfc erfinv exp exp2 expm1 float_power floor
    floor_divide fmax fmin fmod frac gcd ge gelu gelu_backward gt hardshrink hardsigmoid hardswish hardtanh
    heaviside hypot i0 igamma igammac isfinite isinf isnan isneginf isposinf lcm ldexp le leaky_relu lerp lgamma log
    log10 log1p log2 logaddexp logaddexp2 logical_and logical_not logical_or logical_xor logit logit_backward lt
    masked_fill maximum minimum mish mul mvlgamma nan_to_num ne neg nextafter polygamma pow rad2deg reciprocal relu
    relu6 remainder round rsqrt rsub selu sgn sigmoid sigmoid_backward sign signbit silu silu_backward sin sinc sinh
    softplus softshrink special_airy_ai special_bessel_j0 special_bessel_j1 special_bessel_y0 special_bessel_y1
    special_entr special_erfcx special_i0e special_i1 special_i1e special_log_ndtr special_modified_bessel_i0
    special_modified_bessel_i1 special_modified_bessel_k0 special_modified_bessel_k1 special_ndtri
    special_scaled_modified_bessel_k0 special_scaled_modified_bessel_k1 special_spherical_bessel_j0 special_xlog1py
    special_zeta sqrt square sub tan tanh tanh_backward threshold threshold_backward true_divide trunc where xlogy
"""
_NAMES = frozenset(_LIST.split())
_aten = torch.ops.aten
#: Elementwise forms that PyTorch does not tag as such.
_UNTAGGED = {_aten.floor_divide.default, _aten.floor_divide.Scalar, _aten.hardswish.default}

#: The options in words that these operations have.
_WORDS = {"floor", "trunc", "none", "tanh"}
_NUMBERS = {"number": (bool, int, float), "float": (bool, int, float), "int": (bool, int), "bool": (bool,)}
_LARGEST_INTEGER = 2**63 - 1
#: Of orders and digits, `int` in a signature: the memory that `mvlgamma` takes grows with its order.
_LARGEST_ORDER = 64


def is_elementwise(func: Any) -> bool:
    """Whether an overload of PyTorch may be a step: one result, element by element, and nothing changed."""
    return (
        isinstance(func, torch._ops.OpOverload)
        and func.namespace == "aten"
        and func._schema.name.removeprefix("aten::") in _NAMES
        and (torch.Tag.pointwise in func.tags or func in _UNTAGGED)
        and not func._schema.is_mutable
    )


@functools.lru_cache(maxsize=1024)
def operator(name: str) -> Callable[..., Any]:
    """The overload that a step names, such as "aten.mul.Tensor".

    Raises:
        ValueError: no step may be that.
    """
    library, _, rest = name.partition(".")
    operation, _, overload = rest.partition(".")
    if library == "aten" and operation in _NAMES:
        packet = getattr(_aten, operation)
        found = getattr(packet, overload) if overload in packet.overloads() else None
        if is_elementwise(found):
            return found  # type: ignore[return-value]
    raise ValueError(f"expected an elementwise operation of PyTorch that score functions may use, got {name[:80]!r}")


def check_operands(
    name: str, arguments: Sequence[Any], keywords: Sequence[tuple[str, Any]], values: Container[str]
) -> None:
    """Refuses arguments that do not fit the signature of an operation.

    Args:
        name: of the overload.
        values: the names of the values that are known before this step.

    Raises:
        ValueError: some do not fit, or there are too few or too many.
    """
    signature = operator(name)._schema.arguments  # type: ignore[attr-defined]
    positional = [argument for argument in signature if not argument.kwarg_only]
    given = {argument.name: value for argument, value in zip(positional, arguments)}
    named = dict(keywords)
    expected = {argument.name for argument in signature}
    if (
        len(arguments) > len(positional)
        or len(named) != len(keywords)
        or given.keys() & named
        or named.keys() - expected
    ):
        raise ValueError(f"expected the arguments of {name}, got others, more, or one twice")
    given |= named
    for argument in signature:
        if argument.name in given:
            _check_operand(f"{argument.name} of {name}", str(argument.type), given[argument.name], values)
        elif not argument.has_default_value():
            raise ValueError(f"expected {argument.name} of {name}, got none")


def _check_operand(what: str, kind: str, given: Any, values: Container[str]) -> None:
    if kind.startswith("Optional["):
        if given is None:
            return
        kind = kind.removeprefix("Optional[").removesuffix("]")
    if kind == "str":
        fits = isinstance(given, str) and given in _WORDS
    elif kind == "Tensor":  # PyTorch takes numbers there too
        fits = given in values if isinstance(given, str) else is_number(given)
    else:
        fits = kind in _NUMBERS and is_number(given) and isinstance(given, _NUMBERS[kind])
        fits = fits and (kind != "int" or abs(given) <= _LARGEST_ORDER)
    if not fits:
        raise ValueError(f"expected {kind} as {what}, got {str(given)[:80]!r}")


def is_number(given: Any) -> bool:
    """Whether an argument is a number that PyTorch can hold."""
    return isinstance(given, float) or (isinstance(given, int) and abs(given) <= _LARGEST_INTEGER)
