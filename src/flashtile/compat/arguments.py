"""Arguments of flash_attn in the words of flashtile, and the error of those that are not served."""

from __future__ import annotations

import operator
from typing import Any, NoReturn

from torch import Tensor

Window = tuple[int | None, int | None]


def window(window_size: Any) -> Window:
    """(left, right) with None where a side is unlimited, which flash_attn writes as a negative number."""
    given = window_size
    if isinstance(given, Tensor):
        if given.device.type != "cpu":
            raise TypeError("window_size: expected two ints, got a tensor on a GPU; reading it would synchronise")
        given = given.tolist()
    if not isinstance(given, (tuple, list)) or len(given) != 2:
        raise TypeError(f"window_size: expected a pair (left, right), got {window_size!r}; -1 is an unlimited side")
    left, right = (_side(side, window_size) for side in given)
    return left, right


def _side(side: Any, window_size: Any) -> int | None:
    """One side, of any type that stands for an int."""
    if isinstance(side, Tensor) and side.device.type != "cpu":
        raise TypeError("window_size: expected two ints, got tensors on a GPU; reading them would synchronise")
    try:
        keys = operator.index(side)
    except TypeError:
        raise TypeError(f"window_size: expected two ints, got {window_size!r}; -1 is an unlimited side") from None
    return None if keys < 0 else keys


def longest(value: Any) -> Any:
    """A longest sequence as flashtile takes it: an int, or None for a number on a GPU, which is not waited for.

    It bounds the work and no result depends on it, so that all rows are as good a bound.
    """
    if isinstance(value, Tensor) and value.numel() == 1:
        return int(value) if value.device.type == "cpu" else None
    return value


def unpacked(name: str, packed: Tensor, parts: int, layout: str) -> tuple[Tensor, ...]:
    """Views of the parts of packed qkv or kv, which are the third dimension from the end."""
    names = layout.split(", ")
    if packed.dim() != len(names) + 3 or packed.shape[-3] != parts:
        raise ValueError(
            f"{name}: expected shape [{layout}, {parts}, heads, head_dim], got {list(packed.shape)}; stack its parts"
        )
    return packed.unbind(-3)


def refuse(name: str, expected: str, given: object, remedy: str) -> NoReturn:
    """Raises for an argument that is not served."""
    plain = given is None or isinstance(given, (bool, int, float, str))
    came = repr(given) if plain else "a tensor" if isinstance(given, Tensor) else f"a {type(given).__name__}"
    raise ValueError(f"{name}: expected {expected}, got {came}; {remedy}")


def refuse_given(remedy: str, **arguments: object) -> None:
    """Raises for the first of these arguments that is not None."""
    for name, given in arguments.items():
        if given is not None:
            refuse(name, "None", given, remedy)
