"""Telling transformers of the attention implementation."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial, wraps
from typing import Any

import transformers
from torch import nn
from transformers import masking_utils
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, AttentionMaskInterface
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS, AttentionInterface, PreTrainedModel

from flashtile.integrations.shared import check_options
from flashtile.integrations.transformers.attention import attend
from flashtile.integrations.transformers.masks import make_mask
from flashtile.integrations.transformers.paged import PREFIX, attend_paged, no_mask, serve_batches

#: The place where transformers checks the name of an implementation before a model is built.
_CHECK = "_check_and_adjust_attn_implementation"
_registered: set[str] = set()
_OLDEST = (5, 17)
#: Since then its batches of requests are those of `paged`.
_OLDEST_WITH_BATCHES = (5, 20)


def register(name: str = "flashtile", *, backend: str = "auto", deterministic: bool = False) -> None:
    """Registers flashtile with transformers as `attn_implementation=name`, for all models that look up their attention.

    Select it by transformers' own means: `from_pretrained(..., attn_implementation=name)`,
    `AutoModel.from_config(config, attn_implementation=name)`, `model.set_attn_implementation(name)`. A second call with
    the same name replaces the first.

    Args:
        name: name of the implementation; transformers' own names cannot be replaced.
        backend: as in `flashtile.attention`.
        deterministic: as in `flashtile.attention`.

    Raises:
        ImportError: transformers is older than 5.17.
        TypeError: the name is no string, or `deterministic` is no bool.
        ValueError: the name is one of transformers' own, or there is no backend of that name.
    """
    if not isinstance(name, str):
        raise TypeError(f"name: expected a str, got {type(name).__name__}; 'flashtile' is the usual one")
    check_options(backend, deterministic)
    taken = name == "eager" or name in ALL_ATTENTION_FUNCTIONS.valid_keys()
    if name not in _registered and (taken or "|" in name or "/" in name):
        raise ValueError(f"name: expected one that transformers does not use itself, got {name!r}; use 'flashtile'")

    def with_options(function: Callable[..., Any]) -> Callable[..., Any]:
        def attention(module: Any, *arguments: Any, **options: Any) -> Any:
            options["deterministic"] = deterministic or options.get("deterministic")
            return function(module, *arguments, **options, backend=backend)

        return attention

    add_implementation(name, with_options(attend), make_mask)
    if _version() >= _OLDEST_WITH_BATCHES:
        add_implementation(PREFIX + name, with_options(attend_paged), no_mask)
        serve_batches(_registered)


def add_implementation(name: str, attention: Callable[..., Any], mask: Callable[..., Any]) -> None:
    """Tells transformers what a name stands for: a function for attention, and one that makes its masks."""
    _check_version()
    AttentionInterface.register(name, attention)
    AttentionMaskInterface.register(name, mask)
    _registered.add(name)
    _let_names_through()
    _let_chunks_through()


def is_registered(name: Any) -> bool:
    """Whether a name of an attention implementation is one of flashtile's."""
    return name in _registered


def _check_version() -> None:
    """Older ones take the functions, and call them with other arguments."""
    if _version() < _OLDEST:
        oldest = ".".join(map(str, _OLDEST))
        raise ImportError(
            f"flashtile.integrations.transformers needs transformers {oldest} or newer, got "
            f"{transformers.__version__}: pip install 'transformers>={oldest}'"
        )


def _version() -> tuple[int, ...]:
    return tuple(int(part) for part in transformers.__version__.split(".")[:2])


def unregister(name: str = "flashtile") -> None:
    """Removes what `register(name)` registered. Models that use the implementation fail in their next call.

    Raises:
        ValueError: the name is not registered.
    """
    if name not in _registered:
        raise ValueError(f"name: expected one of {sorted(_registered)}, got {name!r}; register it first")
    for each in {name, PREFIX + name} & _registered:
        _registered.remove(each)
        del type(ALL_ATTENTION_FUNCTIONS)._global_mapping[each]
        del type(ALL_MASK_ATTENTION_FUNCTIONS)._global_mapping[each]


def _let_names_through() -> None:
    """Has transformers check registered names by its registry: its own check takes every name with "flash" in it for a
    build of flash_attn, which it would try to download, or replace by another in its place."""
    check = getattr(PreTrainedModel, _CHECK, None)
    if check is None:
        raise RuntimeError(f"transformers: expected PreTrainedModel.{_CHECK}, which 5.17 to 5.23 have; install one")
    if getattr(check, "knows_flashtile", False):
        return

    @wraps(check)
    def checked(self: PreTrainedModel, attn_implementation: str | None, *arguments: Any, **options: Any) -> str:
        if attn_implementation not in _registered:
            adjusted: str = check(self, attn_implementation, *arguments, **options)
            return adjusted
        if not self._can_set_attn_implementation():
            raise ValueError(
                f"attn_implementation: expected 'eager' or 'sdpa' for {type(self).__name__}, whose attention is "
                f"written into the model, got {attn_implementation!r}; it cannot be exchanged"
            )
        _name_in_tables(self, attn_implementation)
        return attn_implementation

    checked.knows_flashtile = True  # type: ignore[attr-defined]
    setattr(PreTrainedModel, _CHECK, checked)


def _let_chunks_through() -> None:
    """Has transformers make masks of chunks (Llama 4), which it would refuse for every name with "flash" in it."""
    requested: Any = masking_utils.is_flash_attention_requested
    if getattr(requested, "knows_flashtile", False):
        return

    @wraps(requested)
    def requested_here(config: Any = None, *arguments: Any, **options: Any) -> bool:
        if config is not None and config._attn_implementation in _registered:
            return config._attn_implementation.startswith(PREFIX)
        found: bool = requested(config, *arguments, **options)
        return found

    requested_here.knows_flashtile = True  # type: ignore[attr-defined]
    masking_utils.is_flash_attention_requested = requested_here


def _name_in_tables(model: PreTrainedModel, name: str) -> None:
    """Enters a name in the tables of classes by which parts of some models (SAM's images, GIT's text) choose their own
    attention when they are built: what it stands for says that there is none of this name."""
    modules = {kind.__module__ for kind in type(model).__mro__ if issubclass(kind, PreTrainedModel)}
    for module in modules & sys.modules.keys():
        for table in list(vars(sys.modules[module]).values()):
            own = table.get("eager") if isinstance(table, dict) else None
            if isinstance(own, type) and issubclass(own, nn.Module):
                table.setdefault(name, partial(_refuse_own, name, own.__name__))


def _refuse_own(name: str, own: str, *arguments: Any, **options: Any) -> None:
    raise ValueError(
        f"attn_implementation: expected 'eager' or 'sdpa' for {own}, which is written into the model, got {name!r}; "
        f"build the model with one of them, then model.set_attn_implementation({name!r}) exchanges the rest"
    )
