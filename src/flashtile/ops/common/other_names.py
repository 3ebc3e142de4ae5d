"""Arguments that a function does not have, or has by name only: an error says what they are called here.

A public function collects them in `**other_names: NoReturn` and `*by_position: NoReturn`, so that type checkers refuse
them too, and hands them to the functions here. People see signatures without both: `_public.pyi`, `hide_collected`.
"""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor

#: How names of arguments begin that say where packed sequences lie.
_OF_PACKED = ("cu_seq", "max_seqlen", "max_length_")
_MASK = {"mask": "bool, True = visible", "bias": "numbers to add to the scores"}
_BLOCK_MASK = {"block_mask": "flashtile.BlockMask.from_predicate makes one"}

#: An argument of flashtile -> what PyTorch, flash-attn, xFormers, transformers, JAX and FlashInfer call it.
_OURS = {
    "q": "query",
    "k": "key",
    "v": "value",
    "causal": "is_causal",
    "is_causal": "causal",
    "scale": "softmax_scale sm_scale scaling",
    "dropout_p": "dropout p dropout_rate attention_dropout",
    "softcap": "soft_cap logits_soft_cap final_logit_softcapping logit_softcapping",
    "sinks": "s_aux learnable_sink",
    "descale_q": "q_descale",
    "descale_k": "k_descale",
    "descale_v": "v_descale",
    "return_lse": "return_softmax_lse",
    "cu_seqlens_q": "cu_seqlens cu_seq_lens_q",
    "cu_seqlens_k": "cu_seq_lens_k",
    "max_seqlen_q": "max_seqlen max_length_q",
    "max_seqlen_k": "max_length_k",
    "key_lengths": "seqused_k key_value_seq_lengths",
    "cache_lengths": "seqused_k key_value_seq_lengths cache_seqlens",
    "cache_batch_indices": "cache_batch_idx",
    "cache_left_padding": "leftpad_k cache_leftpad",
    "block_table": "page_table block_tables",
    "ignore_index": "ignored_index",
    "reduction": "size_average",
    "eps": "epsilon",
    "epsilon": "eps",
    "interleaved": "rotary_interleaved",
}

#: Names in other libraries -> the arguments that mean the same, with what they take, or what to do if there is none.
_OTHERS: dict[str, dict[str, str] | str] = {
    "attn_mask attention_mask": _MASK,
    "attn_bias": {"bias": _MASK["bias"], "mask": _MASK["mask"]},
    "key_padding_mask": {"key_lengths": "how many keys of each sequence are there", "mask": _MASK["mask"]},
    "window_size sliding_window local_window_size window_left": {"window": "(left, right), None = unlimited"},
    "score_mod": {"bias": _MASK["bias"], **_BLOCK_MASK},
    "mask_mod": _BLOCK_MASK,
    "weight ce_weight": {"class_weights": "a weight for each class"},
    "cu_seqlens_q": {"cu_seqlens": "flashtile.attention_varlen takes packed sequences of other lengths of keys"},
    "enable_gqa": "leave it out, k and v may have fewer heads than q",
    "return_lse": "this function does not return the log-sum-exp, flashtile.attention does",
    "return_attn_probs return_softmax need_weights output_attentions": (
        "flashtile.attention_probs computes the weights of chosen rows"
    ),
    "normalized_shape": "leave it out, the last dimension is normalized",
    "is_rms_norm": "flashtile.rms_norm and flashtile.dropout_add_rms_norm are functions of their own",
}

#: By the name in another library.
OTHER_NAMES: dict[str, dict[str, str] | str] = {
    **{
        other: {ours: "" for ours, others in _OURS.items() if other in others.split()}
        for other in " ".join(_OURS.values()).split()
    },
    **{other: meaning for others, meaning in _OTHERS.items() for other in others.split()},
}

_OF_FLASH_ATTN = ("dropout_p", "scale", "causal", "window", "softcap", "alibi_slopes", "deterministic")

#: A function -> what other libraries take by position behind the arguments that it takes so, in their orders.
_ORDERS: dict[str, tuple[tuple[str, ...], ...]] = {
    "attention": (
        ("mask", "dropout_p", "causal"),  # PyTorch
        ("bias", "dropout_p", "causal"),
        _OF_FLASH_ATTN,
        ("scale", "causal"),  # FlashAttention-3
    ),
    "attention_varlen": (("max_seqlen_q", "max_seqlen_k", *_OF_FLASH_ATTN),),
}


def hide_collected(function: Any) -> None:
    """Leaves out of a public function's signature, which `help` and notebooks show, what it collects to refuse it."""
    signature = inspect.signature(function)
    shown = [each for each in signature.parameters.values() if each.annotation not in ("NoReturn", NoReturn)]
    if len(shown) < len(signature.parameters):
        function.__signature__ = signature.replace(parameters=shown)


def refuse_other_names(function: Callable[..., Any], given: Iterable[str]) -> NoReturn:
    """Raises TypeError for the arguments that a public function was given and does not have."""
    raise TypeError(". ".join(_explained(function, name) for name in given))


def refuse_by_position(function: Callable[..., Any], given: Sequence[Any]) -> NoReturn:
    """Raises TypeError for the arguments that a public function was given by position, and takes by name only."""
    parameters = inspect.signature(function).parameters.values()
    leading = [parameter.name for parameter in parameters if parameter.kind is parameter.POSITIONAL_OR_KEYWORD]
    raise TypeError(
        f"flashtile.{function.__name__} takes {len(leading)} arguments by position, {', '.join(leading)}, got "
        f"{len(leading) + len(given)}; {_by_name(function, given)}"
    )


def _by_name(function: Callable[..., Any], given: Sequence[Any]) -> str:
    """The words to write instead of arguments by position."""
    if function.__name__ == "attention" and any(_kind(value) == "integers" for value in given):
        return "flashtile.attention_varlen takes packed sequences"
    for order in _ORDERS[function.__name__]:
        named = list(zip(order, given))
        if len(given) <= len(order) and all(value is None or _kind(value) == _KINDS[name] for name, value in named):
            written = [_written(name, value) for name, value in named if value is not None]
            return f"write the others by name: {', '.join(written)}" if written else "leave the others out"
    return "write the others by name, as in causal=True"


#: The kinds of the arguments that other libraries take by position.
_KINDS = {
    "mask": "booleans", "bias": "numbers", "alibi_slopes": "numbers", "window": "pair", "causal": "bool",
    "deterministic": "bool", "dropout_p": "number", "scale": "number", "softcap": "number", "max_seqlen_q": "number",
    "max_seqlen_k": "number",
}  # fmt: skip


def _kind(value: Any) -> str:
    """The kind of an argument's value, as `_KINDS` names it; for others the name of its type."""
    if isinstance(value, Tensor):
        return "booleans" if value.dtype is torch.bool else "numbers" if value.is_floating_point() else "integers"
    if isinstance(value, (int, float)):
        return "bool" if isinstance(value, bool) else "number"
    return "pair" if isinstance(value, (tuple, list)) and len(value) == 2 else type(value).__name__


def _written(name: str, value: Any) -> str:
    """An argument as it is to be written; -1 is flash-attn's word for an unlimited side of a window."""
    if isinstance(value, Tensor):
        what = _MASK.get(name)
        return f"{name}=... ({what})" if what else f"{name}=..."
    return f"{name}={tuple(None if side == -1 else side for side in value) if name == 'window' else value!r}"


def _explained(function: Callable[..., Any], name: str) -> str:
    parameters = inspect.signature(function).parameters.values()
    collected = {inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL}
    ours = [parameter.name for parameter in parameters if parameter.kind not in collected]
    known = OTHER_NAMES.get(name, {})
    if isinstance(known, str):
        remedy = known
    elif names := [f"{our} ({what})" if what else our for our, what in known.items() if our in ours]:
        remedy = f"it is called {' or '.join(names)}"
    elif name.startswith(_OF_PACKED) and function.__name__ == "attention":
        remedy = "flashtile.attention_varlen takes packed sequences"
    elif close := difflib.get_close_matches(name, ours, 1):
        remedy = f"did you mean {close[0]}?"
    else:
        remedy = f"it has {', '.join(ours)}"
    return f"flashtile.{function.__name__} has no argument {name}; {remedy}"
