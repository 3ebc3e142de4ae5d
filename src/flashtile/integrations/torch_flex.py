"""`torch.nn.attention.flex_attention.flex_attention` served by flashtile, for code that cannot be changed."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

from torch.nn.attention import flex_attention as torch_flex

import flashtile
from flashtile.integrations.options import check_options
from flashtile.integrations.substitute import Substitute

#: The module of transformers that has FlexAttention, and the function there through which its models call it.
_TRANSFORMERS, _ITS_FUNCTION = "transformers.integrations.flex_attention", "compile_friendly_flex_attention"

#: Modules and names whose functions stood there before the first context was opened, with these functions.
_before: list[tuple[Any, str, Callable[..., Any]]] = []


@contextmanager
def use_flashtile_flex(*, backend: str = "auto", deterministic: bool = False) -> Iterator[None]:
    """In this context `torch.nn.attention.flex_attention.flex_attention` is flashtile's function of this name.

    It affects all code that looks the function up there when it calls it, and the models of transformers with
    `attn_implementation="flex_attention"` if transformers' own integration is imported before the context is entered,
    as it is once a model has been made. It does not affect a name imported before
    (`from torch.nn.attention.flex_attention import flex_attention`), nor what `torch.compile(flex_attention)` returned
    before.

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
    _before.append((torch_flex, "flex_attention", torch_flex.flex_attention))
    if module := sys.modules.get(_TRANSFORMERS):
        _before.append((module, _ITS_FUNCTION, getattr(module, _ITS_FUNCTION)))
    return _restore


def _restore() -> None:
    for module, name, function in _before:
        setattr(module, name, function)
    _before.clear()


def _put(route: Callable[..., Any]) -> None:
    for module, name, _ in _before:
        setattr(module, name, _without_training(route) if name == _ITS_FUNCTION else route)


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
