"""flashtile as an attention backend of Hugging Face diffusers: `model.set_attention_backend("flashtile")`.

Shape letters: B batch, Q queries, K keys, H heads, D head_dim.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

import flashtile
from flashtile.integrations.shared import check_options

try:
    from diffusers.models import attention_dispatch
    from diffusers.models.attention_dispatch import AttentionBackendName
except ImportError as error:
    if not (error.name or "").startswith("diffusers"):
        raise
    raise ImportError(
        'flashtile.integrations.diffusers needs diffusers: pip install "diffusers>=0.42"',
        name=error.name,
        path=error.path,
    ) from error

__all__ = ["register"]

_Registry: Any = attention_dispatch._AttentionBackendRegistry
_registered: set[str] = set()


def register(name: str = "flashtile", *, backend: str = "auto", deterministic: bool = False) -> None:
    """Registers flashtile with diffusers as an attention backend, for all models that use its attention dispatcher.

    Select it by diffusers' own means: `model.set_attention_backend(name)`, or within `attention_backend(name)`. Ring,
    Ulysses and both together (`enable_parallelism`) are served through diffusers' own exchange of tensors. A second
    call with the same name replaces the first.

    Args:
        name: name of the backend, in lower case; diffusers' own names cannot be replaced.
        backend: as in `flashtile.attention`.
        deterministic: as in `flashtile.attention`.

    Raises:
        TypeError: the name is no string, or `deterministic` is no bool.
        ValueError: the name is one of diffusers' own or not in lower case, or there is no backend of that name.
    """
    if not isinstance(name, str):
        raise TypeError(f"name: expected a str, got {type(name).__name__}; 'flashtile' is the usual one")
    check_options(backend, deterministic)
    known = {member.value for member in AttentionBackendName} - _registered
    if name != name.lower() or not name.isidentifier() or name in known:
        raise ValueError(f"name: expected one in lower case that diffusers does not use itself, got {name!r}")

    def attention(
        query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0,
        is_causal: bool = False, scale: float | None = None, enable_gqa: bool = False, return_lse: bool = False,
        _parallel_config: Any = None, **others: Any,
    ) -> Any:  # fmt: skip
        for other, value_of_other in others.items():
            if value_of_other is not None:
                raise ValueError(f"{other}: expected None with the attention backend {name!r}, got a value")
        _check_heads(query, key, enable_gqa)
        attn_mask = _four_dimensions(attn_mask, query, key)
        options: dict[str, Any] = {"scale": scale, "backend": backend, "deterministic": deterministic}
        if _parallel_config is not None:
            refused = {"dropout_p": dropout_p, "is_causal": is_causal}
            return _parallel((query, key, value), attn_mask, refused, return_lse, _parallel_config, options)
        options |= {"dropout_p": dropout_p, **_visible(attn_mask, is_causal, query)}
        if not return_lse:
            return flashtile.attention(query, key, value, **options)
        out, lse = flashtile.attention(query, key, value, return_lse=True, **options)
        return out, lse.transpose(1, 2)

    member = _member(name)
    _Registry.register(member, supports_context_parallel=True)(attention)
    _Registry._supported_arg_names[member] = _AnyName(_Registry._supported_arg_names[member])
    _registered.add(name)


class _AnyName:
    """Names of arguments that the dispatcher hands on: all. It would drop the others, so that none could raise."""

    def __init__(self, names: set[str]) -> None:
        self._names = names

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __contains__(self, name: object) -> bool:
        return True


def _member(name: str) -> Any:
    """The member of diffusers' closed Enum for a name."""
    kind: Any = AttentionBackendName
    if name in kind._value2member_map_:
        return kind(name)
    member = str.__new__(kind, name)
    member._name_, member._value_, member._sort_order_ = name.upper(), name, len(kind._member_names_)
    kind._member_names_.append(member._name_)
    kind._member_map_[member._name_] = kind._value2member_map_[name] = member
    type.__setattr__(kind, member._name_, member)
    return member


def _check_heads(query: Tensor, key: Tensor, enable_gqa: bool) -> None:
    if not enable_gqa and query.shape[2] != key.shape[2]:
        raise ValueError(
            f"enable_gqa: expected True for {query.shape[2]} query heads and {key.shape[2]} key heads, got False"
        )


def _four_dimensions(mask: Tensor | None, query: Tensor, key: Tensor) -> Tensor | None:
    """A mask as diffusers' native backend reads it: `[B, K]` tells of keys, all others broadcast to `[B, H, Q, K]`."""
    if mask is None:
        return None
    if mask.dim() == 2 and mask.shape == (query.shape[0], key.shape[1]):
        return mask[:, None, None]
    return mask[(None,) * (4 - mask.dim())]


def _visible(mask: Tensor | None, is_causal: bool, query: Tensor) -> dict[str, Any]:
    """A mask and is_causal as arguments of `flashtile.attention`."""
    options: dict[str, Any] = {"causal": is_causal, "align": "top_left"} if is_causal else {}
    if mask is not None and mask.dtype is torch.bool:
        options["mask"] = mask
    elif mask is not None:
        options["bias"] = mask.to(query.dtype)
    return options


def _parallel(
    inputs: tuple[Tensor, ...], mask: Tensor | None, refused: dict[str, Any], return_lse: bool, parallel_config: Any,
    options: dict[str, Any],
) -> Any:  # fmt: skip
    """Attention over sequences that are cut over ranks; diffusers exchanges keys, values and heads. `inputs`: q, k and
    v. `refused`: arguments that must not be given."""
    in_ring = parallel_config.context_parallel_config.ring_degree > 1
    if mask is not None:
        refused |= {"attn_mask": in_ring, "attn_mask that learns": mask.requires_grad}
    for name, given in refused.items():
        if given:
            raise ValueError(f"{name}: expected none over sequences that are cut over ranks, got one")
    device = inputs[0].device.type
    if torch.is_autocast_enabled(device):
        inputs = (*(t.to(torch.get_autocast_dtype(device)) for t in inputs),)

    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, *_: Any, **how: Any) -> Any:
        ctx.visible = _visible(mask, False, q)
        out, lse = flashtile.attention(q, k, v, return_lse=True, **ctx.visible, **options)
        lse = lse.transpose(1, 2)
        if how["_save_ctx"]:
            ctx.save_for_backward(q, k, v, out, lse)
        return (out, lse) if in_ring or return_lse else out

    def backward(ctx: Any, grad_out: Tensor, **of_step: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        names = ("query", "key", "value", "out", "lse")
        q, k, v, out, lse = (of_step.get(name, saved) for name, saved in zip(names, ctx.saved_tensors, strict=True))
        grads = flashtile.attention_backward(grad_out, q, k, v, out, lse.transpose(1, 2), **ctx.visible, **options)
        return grads.q, grads.k, grads.v

    return attention_dispatch._templated_context_parallel_attention(
        *inputs, mask, scale=options["scale"], enable_gqa=False, return_lse=return_lse,
        forward_op=forward, backward_op=backward, _parallel_config=parallel_config,
    )  # fmt: skip
