"""`torch.nn.attention.flex_attention.flex_attention` served by flashtile, for code that cannot be changed."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

from torch.nn.attention import flex_attention as torch_flex

import flashtile
from flashtile.integrations.shared import check_options
from flashtile.integrations.substitute import Substitute

#: The module of transformers that has FlexAttention, and the function there through which its models call it.
_TRANSFORMERS, _ITS_FUNCTION = "transformers.integrations.flex_attention", "compile_friendly_flex_attention"

#: The attributes that say what a function does and which arguments it has.
_PARTS = ("__code__", "__defaults__", "__kwdefaults__")

#: The function that serves PyTorch's while a context is open.
_route_now: Callable[..., Any]


@contextmanager
def use_flashtile_flex(*, backend: str = "auto", deterministic: bool = False) -> Iterator[None]:
    """In this context `torch.nn.attention.flex_attention.flex_attention` calls flashtile's function of this name.

    It affects all that calls the function, also by a name that was imported before
    (`from torch.nn.attention.flex_attention import flex_attention`) and through `torch.compile`, and the models of
    transformers with `attn_implementation="flex_attention"` if transformers' own integration is imported before the
    context is entered, as it is once a model has been made.

    Calls that flashtile does not serve raise; none falls back to PyTorch. Contexts nest, and the innermost one applies.
    They hold for the whole process, not for one thread.

    Args:
        backend: as in `flashtile.attention`.
        deterministic: as in `flashtile.attention`.

    Raises:
        TypeError: `deterministic` is no bool.
        ValueError: there is no backend of that name.
    """
    check_options(backend, deterministic)
    with _pytorchs_function.by(_route(backend, deterministic)):
        yield


def _begin() -> Callable[[], None]:
    """The function stays the same object, which others may have by a name of their own; it gets another code."""
    function: Any = torch_flex.flex_attention
    own = {name: getattr(function, name) for name in _PARTS}
    module = sys.modules.get(_TRANSFORMERS)
    of_transformers = getattr(module, _ITS_FUNCTION, None)
    for name in _PARTS:
        setattr(function, name, getattr(_call_route, name))

    def restore() -> None:
        for name, value in own.items():
            setattr(function, name, value)
        if of_transformers is not None:
            setattr(module, _ITS_FUNCTION, of_transformers)

    return restore


def _put(route: Callable[..., Any]) -> None:
    global _route_now
    _route_now = route
    module = sys.modules.get(_TRANSFORMERS)
    if module is not None and hasattr(module, _ITS_FUNCTION):
        setattr(module, _ITS_FUNCTION, _without_training(route))


def _call_route(
    query: Any, key: Any, value: Any, score_mod: Any = None, block_mask: Any = None, scale: Any = None,
    enable_gqa: Any = False, return_lse: Any = False, kernel_options: Any = None, *, return_aux: Any = None,
) -> Any:  # fmt: skip
    """What PyTorch's function does in a context. It sees the names of PyTorch's module, so it imports this one; and it
    has PyTorch's parameters, because `torch.compile` remembers those of a function."""
    from flashtile.integrations import torch_flex

    return torch_flex._route_now(
        query, key, value, score_mod, block_mask, scale=scale, enable_gqa=enable_gqa, return_lse=return_lse,
        kernel_options=kernel_options, return_aux=return_aux,
    )  # fmt: skip


_pytorchs_function = Substitute(_begin, _put)


@cache
def _without_training(route: Callable[..., Any]) -> Callable[..., Any]:
    """The function of transformers also takes whether the model trains, by which it compiles."""

    def compile_friendly_flex_attention(*arguments: Any, training: bool = False, **options: Any) -> Any:
        return route(*arguments, **options)

    return compile_friendly_flex_attention


@cache
def _route(backend: str, deterministic: bool) -> Callable[..., Any]:
    """One function for equal arguments: a new one in each context would have `torch.compile` compile each time."""

    def flex_attention(*arguments: Any, **options: Any) -> Any:
        return flashtile.flex_attention(*arguments, **options, backend=backend, deterministic=deterministic)

    return flex_attention
