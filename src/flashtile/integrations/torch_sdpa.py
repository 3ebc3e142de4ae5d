"""`torch.nn.functional.scaled_dot_product_attention` served by flashtile, for code that cannot be changed."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache

import torch
from torch import Tensor
from torch.nn import functional

import flashtile
from flashtile.integrations.options import check_options

_lock = threading.Lock()
#: The functions of the contexts that are open, the latest last.
_active: list[Callable[..., Tensor]] = []
#: What stood in their place before the first of them: PyTorch's function, and whether nn modules may pass it by.
_before: tuple[Callable[..., Tensor], bool] | None = None


@contextmanager
def use_flashtile_sdpa(*, backend: str = "auto", deterministic: bool = False) -> Iterator[None]:
    """In this context `torch.nn.functional.scaled_dot_product_attention` is flashtile's function of this name.

    It affects all code that looks the function up there when it calls it: models of transformers with
    `attn_implementation="sdpa"`, timm, diffusers, torchvision, and `nn.MultiheadAttention`, `nn.TransformerEncoder` and
    `nn.TransformerDecoder`. The fused inference path of these modules, which has its own attention, is switched off
    meanwhile. It does not affect a name imported before
    (`from torch.nn.functional import scaled_dot_product_attention`), nor `nn.MultiheadAttention` called with
    `need_weights=True`, which computes the weights without the function.

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
    route = _route(backend, deterministic)
    _open(route)
    try:
        yield
    finally:
        _close(route)


@cache
def _route(backend: str, deterministic: bool) -> Callable[..., Tensor]:
    """One function for equal arguments: a new one in each context would have `torch.compile` compile each time."""

    def scaled_dot_product_attention(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        *,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        return flashtile.scaled_dot_product_attention(
            *(query, key, value, attn_mask, dropout_p, is_causal),
            scale=scale,
            enable_gqa=enable_gqa,
            backend=backend,
            deterministic=deterministic,
        )

    return scaled_dot_product_attention


def _open(route: Callable[..., Tensor]) -> None:
    global _before
    with _lock:
        if _before is None:
            _before = functional.scaled_dot_product_attention, torch.backends.mha.get_fastpath_enabled()
            torch.backends.mha.set_fastpath_enabled(False)
        _active.append(route)
        functional.scaled_dot_product_attention = route


def _close(route: Callable[..., Tensor]) -> None:
    global _before
    with _lock:
        del _active[len(_active) - 1 - _active[::-1].index(route)]
        if _active:
            functional.scaled_dot_product_attention = _active[-1]
        elif _before is not None:
            functional.scaled_dot_product_attention, fast = _before
            torch.backends.mha.set_fastpath_enabled(fast)
            _before = None
