"""`torch.nn.functional.scaled_dot_product_attention` served by flashtile, for code that cannot be changed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache

import torch
from torch import Tensor
from torch.nn import functional

import flashtile
from flashtile.integrations.shared import check_options
from flashtile.integrations.substitute import Substitute


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
    with _pytorchs_function.by(_route(backend, deterministic)):
        yield


@cache
def _route(backend: str, deterministic: bool) -> Callable[..., Tensor]:
    """One function for equal arguments: a new one in each context would have `torch.compile` compile each time."""

    def scaled_dot_product_attention(
        query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0,
        is_causal: bool = False, *, scale: float | None = None, enable_gqa: bool = False,
    ) -> Tensor:  # fmt: skip
        if torch.compiler.is_exporting():
            _note_call()  # now, because an exported program sets nothing
        else:
            _pytorchs_function.served = True
        return flashtile.scaled_dot_product_attention(
            *(query, key, value, attn_mask, dropout_p, is_causal), scale=scale, enable_gqa=enable_gqa, backend=backend,
            deterministic=deterministic,
        )  # fmt: skip

    return scaled_dot_product_attention


@torch.compiler.assume_constant_result
def _note_call() -> None:
    _pytorchs_function.served = True


def _begin() -> Callable[[], None]:
    """nn modules may pass the function by; meanwhile they may not."""
    function, fast = functional.scaled_dot_product_attention, torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)

    def restore() -> None:
        functional.scaled_dot_product_attention = function
        torch.backends.mha.set_fastpath_enabled(fast)

    return restore


def _put(route: Callable[..., Tensor]) -> None:
    functional.scaled_dot_product_attention = route


_pytorchs_function = Substitute(
    _begin,
    _put,
    "use_flashtile_sdpa: expected a call of torch.nn.functional.scaled_dot_product_attention in the context, got none; "
    "a name that was imported before (from torch.nn.functional import scaled_dot_product_attention) stays PyTorch's: "
    "import it inside the context, or call it by its module",
)
