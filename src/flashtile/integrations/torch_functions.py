"""PyTorch's `scaled_dot_product_attention` and `flex_attention` served by flashtile, where code cannot be changed."""

from __future__ import annotations

import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.attention import flex_attention as torch_flex

import flashtile
from flashtile.integrations.shared import check_options
from flashtile.ops.common.sizes import exporting

#: A function that stands in the place of another library's.
Route = Callable[..., Any]


class Substitute:
    """The contexts that put functions in one place. They nest, also in several threads; the latest one applies.

    Args:
        begin: called when the first context is opened. Returns what restores the place as it was before.
        put: puts a function in the place.
        unserved: what to warn of when the last context ends and no function has set `served`; None = nothing.
    """

    def __init__(
        self, begin: Callable[[], Callable[[], None]], put: Callable[[Route], None], unserved: str | None = None
    ) -> None:
        self._begin, self._put, self._unserved = begin, put, unserved
        self.served = False
        self._lock = threading.Lock()
        #: The functions of the contexts that are open, the latest last.
        self._active: list[Route] = []
        self._restore: Callable[[], None] | None = None

    @contextmanager
    def by(self, route: Route) -> Iterator[None]:
        """In this context `route` stands in the place."""
        with self._lock:
            if self._restore is None:
                self._restore, self.served = self._begin(), False
            self._active.append(route)
            self._put(route)
        try:
            yield
        finally:
            with self._lock:
                del self._active[len(self._active) - 1 - self._active[::-1].index(route)]
                if self._active:
                    self._put(self._active[-1])
                elif self._restore is not None:
                    self._restore()
                    self._restore = None
        if self._unserved and not (self._active or self.served):
            warnings.warn(self._unserved, stacklevel=5)


# scaled_dot_product_attention


@contextmanager
def use_flashtile_sdpa(*, backend: str = "auto", deterministic: bool = False) -> Iterator[None]:
    """In this context `torch.nn.functional.scaled_dot_product_attention` is flashtile's function of this name.

    It affects all code that looks the function up there when it calls it: models of transformers with
    `attn_implementation="sdpa"`, timm, diffusers, torchvision, and `nn.MultiheadAttention`, `nn.TransformerEncoder` and
    `nn.TransformerDecoder`. The fused inference path of these modules, which has its own attention, is switched off
    meanwhile. It does not affect a name imported before
    (`from torch.nn.functional import scaled_dot_product_attention`), nor `nn.MultiheadAttention` called with
    `need_weights=True`, which computes the weights without the function. A context in which no call came warns of that
    when it ends.

    Calls that flashtile does not serve raise; none falls back to PyTorch. Contexts nest, and the innermost one applies.
    They hold for the whole process, not for one thread, because autograd recomputes checkpointed layers in threads of
    its own. Put a backward with recomputation inside the context. Functions compiled by `torch.compile` use the
    attention that is active when they are called, and compile again if it has changed. Enter the context outside them.

    Args:
        backend: as in `flashtile.attention`.
        deterministic: as in `flashtile.attention`.

    Raises:
        TypeError: `deterministic` is no bool.
        ValueError: there is no backend of that name.
    """
    check_options(backend, deterministic)
    with _sdpa.by(_route_sdpa(backend, deterministic)):
        yield


@cache
def _route_sdpa(backend: str, deterministic: bool) -> Callable[..., Tensor]:
    """One function for equal arguments: a new one in each context would have `torch.compile` compile each time."""

    def scaled_dot_product_attention(
        query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0,
        is_causal: bool = False, *, scale: float | None = None, enable_gqa: bool = False,
    ) -> Tensor:  # fmt: skip
        if exporting():
            _note_call()  # now, because an exported program sets nothing
        else:
            _sdpa.served = True
        return flashtile.scaled_dot_product_attention(
            *(query, key, value, attn_mask, dropout_p, is_causal), scale=scale, enable_gqa=enable_gqa, backend=backend,
            deterministic=deterministic,
        )  # fmt: skip

    return scaled_dot_product_attention


@torch.compiler.assume_constant_result
def _note_call() -> None:
    _sdpa.served = True


def _begin_sdpa() -> Callable[[], None]:
    """nn modules may pass the function by; meanwhile they may not."""
    function, fast = functional.scaled_dot_product_attention, torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)

    def restore() -> None:
        functional.scaled_dot_product_attention = function
        torch.backends.mha.set_fastpath_enabled(fast)

    return restore


def _put_sdpa(route: Callable[..., Tensor]) -> None:
    functional.scaled_dot_product_attention = route


_sdpa = Substitute(
    _begin_sdpa,
    _put_sdpa,
    "use_flashtile_sdpa: expected a call of torch.nn.functional.scaled_dot_product_attention in the context, got none; "
    "a name that was imported before (from torch.nn.functional import scaled_dot_product_attention) stays PyTorch's: "
    "import it inside the context, or call it by its module",
)


# flex_attention

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
    with _flex_attention.by(_route_flex(backend, deterministic)):
        yield


def _begin_flex() -> Callable[[], None]:
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


def _put_flex(route: Callable[..., Any]) -> None:
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
    from flashtile.integrations import torch_functions

    return torch_functions._route_now(
        query, key, value, score_mod, block_mask, scale=scale, enable_gqa=enable_gqa, return_lse=return_lse,
        kernel_options=kernel_options, return_aux=return_aux,
    )  # fmt: skip


_flex_attention = Substitute(_begin_flex, _put_flex)


@cache
def _without_training(route: Callable[..., Any]) -> Callable[..., Any]:
    """The function of transformers also takes whether the model trains, by which it compiles."""

    def compile_friendly_flex_attention(*arguments: Any, training: bool = False, **options: Any) -> Any:
        return route(*arguments, **options)

    return compile_friendly_flex_attention


@cache
def _route_flex(backend: str, deterministic: bool) -> Callable[..., Any]:
    """One function for equal arguments, as `_route_sdpa`."""

    def flex_attention(*arguments: Any, **options: Any) -> Any:
        return flashtile.flex_attention(*arguments, **options, backend=backend, deterministic=deterministic)

    return flex_attention
