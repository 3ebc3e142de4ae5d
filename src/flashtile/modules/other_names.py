"""Arguments of `torch.nn.MultiheadAttention` or flash-attn's modules that ours do not have: a module collects them in
`**other_names: NoReturn`, and hands them to `refuse_other_names`."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Iterable
from typing import Any, NoReturn

_MASK = (
    "key_padding_mask=, True = keep, hides padded keys; causal=True belongs to the module; flashtile.attention takes "
    "other masks"
)
_WEIGHTS = "leave it out, the weights are never in memory; flashtile.attention_probs computes those of chosen rows"
_NOT_NEEDED = "leave it out, flashtile has one way to compute it"
_NO_SUCH = "leave it out, there are no such parameters"

#: An argument of another library -> those of the modules that mean the same; or what to do where there is none.
OTHER_NAMES: dict[str, tuple[str, ...] | str] = {
    "d_model": ("embed_dim",),
    "nheads": ("num_heads",),
    "num_kv_heads": ("num_heads_kv",),
    "bias": ("qkv_proj_bias", "out_proj_bias"),
    "dropout": ("attention_dropout",),
    "dropout_p": ("dropout", "attention_dropout"),
    "attention_dropout": ("dropout",),
    "scale": ("softmax_scale",),
    "window": ("window_size",),
    "batch_first": "leave it out, dense inputs are [batch, seq, ...]",
    "add_bias_kv": _NO_SUCH,
    "add_zero_attn": _NO_SUCH,
    "kdim": "leave it out, keys and values are as wide as the queries",
    "vdim": "leave it out, keys and values are as wide as the queries",
    "use_flash_attn": _NOT_NEEDED,
    "fused_bias_fc": _NOT_NEEDED,
    "checkpointing": "leave it out, torch.utils.checkpoint.checkpoint around the module does this",
    "key": ("x_kv", "kv"),
    "value": ("x_kv", "kv"),
    "mask": _MASK,
    "attn_mask": _MASK,
    "attention_mask": _MASK,
    "is_causal": ("causal",),
    "need_weights": _WEIGHTS,
    "average_attn_weights": _WEIGHTS,
    "output_attentions": _WEIGHTS,
    "cu_seqlens_q": ("cu_seqlens",),
    "max_seqlen_q": ("max_seqlen",),
    "max_s": ("max_seqlen",),
    "inference_params": ("cache",),
    "past_key_value": ("cache",),
}


def refuse_other_names(module: object, method: Callable[..., Any], given: Iterable[str]) -> NoReturn:
    """Raises TypeError for the arguments that a module, or a call of it (`method`), was given and does not have."""
    of = type(module).__name__ if method.__name__ == "__init__" else f"a call of {type(module).__name__}"
    parameters = inspect.signature(method).parameters.values()
    ours = [parameter.name for parameter in parameters if parameter.kind is not parameter.VAR_KEYWORD][1:]
    raise TypeError(". ".join(f"{of} has no argument {name}; {_remedy(name, ours)}" for name in given))


def _remedy(name: str, ours: list[str]) -> str:
    known = OTHER_NAMES.get(name, ())
    if isinstance(known, str):
        return known
    if names := [our for our in known if our in ours]:
        return f"it is called {' and '.join(names) if name == 'bias' else names[0]}"
    if name == "is_causal":
        return "pass causal=True when you make the module"
    close = difflib.get_close_matches(name, ours, 1)
    return f"did you mean {close[0]}?" if close else f"it has {', '.join(ours)}"
