"""Contents of records in words: cases, operations, phases and implementations.

A case is told by facets, such as `{"D": "head_dim 64", "mask": "causal"}`. If several cases stand together, each is
named by the facets in which they differ, and common facets are said once.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from flashtile.bench.serving_cases import ServingCase

Case = Mapping[str, Any]
Facets = dict[str, str]


def _length(value: Any, case: Case) -> str:
    lengths = case.get("lengths")
    if lengths:
        return f"{len(lengths)} sequences, {sum(lengths):,} tokens"
    return f"cache of {value:,} tokens" if "Sq" in case else f"{value:,} tokens"


def _heads(value: Any, case: Case) -> str:
    shared = case.get("Hkv", value)
    return f"{value} heads" if shared == value else f"{value} query heads, {shared} key/value heads"


def _head_dim(value: Any, case: Case) -> str:
    of_v = case.get("Dv", value)
    return f"head_dim {value}" if of_v == value else f"head_dim {value} (v: {of_v})"


def _window(value: Any, case: Case) -> str:
    left, right = value
    if case.get("causal") and left is not None:
        return f"window of {left + 1:,} keys"
    sides = ("all" if side is None else f"{side:,}" for side in (left, right))
    return "window of {} keys to the left, {} to the right".format(*sides)


#: Patterns of names -> what they mean, filled with the groups of the pattern; the last fits everything.
_MASKS = {
    r"tiles(\d+):([\d.]+)": "{1:.0%} of the tiles of {0:.0f}", r"random([\d.]+)": "mask of {:.0%} of the pairs",
    "padding": "mask of padded keys", r"documents(\d+)": "documents of {:.0f} tokens (median)", "(.*)": "mask {}",
}  # fmt: skip
_BIASES = {"1HSS": "bias for each head", "BHSS": "bias for each sequence and head", "(.*)": "bias {}"}
_FUNCTIONS = {
    "relative": "function: relative position", "alibi": "function: ALiBi", "softcap": "function: soft cap",
    "waves": "function with torch.sin and two tables", "prefix-lm": "mask function: prefix-LM",
    "dilated": "mask function: dilated window", "neighborhood": "mask function: 2-D neighbourhood",
    "(documents|window|tree)": "mask function: {}", "(.*)": "function {}",
}  # fmt: skip
_VALUES = {
    "shifted": "q + 3 and k + 3", "growing-keys": "keys that grow", r"trained-(\d+)": "a trained model's layer {:.0f}",
    r"q-times-(\d+)": "q × {:.0f}", r"first-key-times-(\d+)": "first key × {:.0f}",
    r"late-key-times-(\d+)": "a late key × {:.0f}", "(.*)": "{} values",
}  # fmt: skip
_ACTIVATIONS = {"gelu_tanh": "GELU (tanh)", "gelu": "GELU", "silu": "SiLU", "relu": "ReLU", "(.*)": "{}"}
_DTYPES = {"fp8": "float8", r"fp(\d+)": "float{:.0f}", "bf16": "bfloat16", "(.*)": "{}"}


#: A key of `case` -> its value in words, in the order in which they are said: a format, patterns, or a function of the
#: value and the case. None is part of another's.
_WORDS: dict[str, str | Mapping[str, str] | Callable[[Any, Case], str] | None] = {
    "model": "{}", "task": "{}", "D": _head_dim, "Dv": None,
    "causal": lambda value, case: "causal" if value else "full",
    "window": _window, "mask": _MASKS, "softcap": "soft cap {:g}", "bias": _BIASES, "function": _FUNCTIONS,
    "dropout_p": "dropout {:g}", "rows": "{:,} rows", "columns": "{:,} columns",
    "kib": lambda value, case: f"{value / 1024:,g} MiB",
    "tokens": "{:,} tokens", "hidden": "hidden size {:,}", "inner": "inner size {:,}",
    "features": "{:,} features", "vocabulary": "vocabulary {:,}", "activation": _ACTIVATIONS,
    "gated": "gated", "prompt": "a prompt of {:,} tokens", "completions": "{:,} completions",
    "requests": "{:,} requests", "new_tokens": "{:,} new tokens",
    "S": _length, "Sk": "{:,} keys", "lengths": None,
    "Sq": lambda value, case: "one query" if value == 1 else f"{value:,} queries",
    "page": "pages of {}", "append": "a row appended", "queries": "mixed",
    "factors": "float8_e4m3fn with factors of each {}", "shared_rows": "{:,} shared rows",
    "tree": "a tree", "latent": "latent rows", "gpus": "{:,} GPUs",
    "block_q": "tiles of {} queries", "block_k": "{:,} keys in a tile",
    "cache": {"cold": "nothing compiled before", "cached": "kernels on disk", "(.*)": "{}"},
    "B": "batch {:,}", "H": _heads, "Hkv": None, "dtype": _DTYPES, "values": _VALUES, "steps": "{:,} steps",
    "layers": "{:,} layers", "width": "width {:,}", "heads": "{:,} heads", "examples": "{:,} examples",
    "held_out": "{:,} held out", "learning_rate": "learning rate {:g}", "text": "{}", "text_sha256": None,
    "made": None, "seed": "seed {:,}", "step": "{}",
}  # fmt: skip
#: Facets without which most cases are told apart as well: they are said only where it needs them.
_DETAILS = (
    "values", "B", "H", "Sq", "layers", "width", "heads", "examples", "held_out", "learning_rate", "steps", "text",
    "block_k", "seed",
)  # fmt: skip
#: Options that 0 switches off.
_ZERO_IS_ABSENT = ("dropout_p", "softcap")
#: The name of a case that has none of the facets of others.
NOTHING = "plain"

#: Names in records -> what they are called. Of implementations the longest beginning that fits counts.
OPERATIONS, PHASES, IMPLEMENTATIONS = json.loads(Path(__file__).with_name("words.json").read_text("utf-8")).values()
#: Keys of a case of attention -> what kind of call one that has it is; the first counts.
_KINDS = {
    "function": "score and mask functions", "lengths": "packed sequences", "bias": "bias", "mask": "mask",
    "softcap": "soft cap", "dropout_p": "dropout", "window": "window", "Sk": "other keys than queries",
}  # fmt: skip


def listed(words: Sequence[str]) -> str:
    """Some words as a list in a sentence."""
    return " and ".join(filter(None, (", ".join(words[:-1]), *words[-1:])))


def phase_name(phase: str) -> str:
    return PHASES.get(phase, phase)


def operation_name(op: str) -> str:
    return OPERATIONS.get(op) or (op[:1].upper() + op[1:]).replace("_", " ")


def implementation_name(name: str) -> str | None:
    """The full name of an implementation, that of another commit with it; None of one that is not known."""
    plain, _, commit = name.partition("@")
    found = [known for known in IMPLEMENTATIONS if plain == known or plain.startswith(f"{known}-")]
    if not found:
        return None
    best = max(found, key=len)
    return IMPLEMENTATIONS[best] + plain.removeprefix(best).replace("-", ", ", 1) + (f" at {commit}" if commit else "")


def full_name(name: str) -> str:
    """The full name of an implementation, or the name as it stands."""
    return implementation_name(name) or name


def describe_kind(op: str, case: Case, on_gpu: bool) -> str:
    """The kind of call that a row measured, in words: of attention by what it has, else the operation."""
    if op in ("serving", "decode"):
        with contextlib.suppress(TypeError):  # keys of another version
            return ServingCase.from_record(case).kind.capitalize()
    if op != "attention":
        return operation_name(op)
    kind = next((words for key, words in _KINDS.items() if case.get(key)), None)
    if kind is None and case.get("Hkv") != case.get("H"):
        kind = "fewer key/value heads"
    if kind is None and on_gpu and case.get("dtype") == "fp32":
        kind = "float32"
    return f"Attention: {kind or 'plain'}"


def _say(words: str | Mapping[str, str] | Callable[[Any, Case], str], value: Any, case: Case) -> str:
    """A value of a case, as one of `_WORDS` says it."""
    if callable(words):
        return words(value, case)
    if isinstance(words, str):  # a record may have words where numbers are usual
        return (words.replace(":,", "") if isinstance(value, str) else words).format(value)
    found = ((re.fullmatch(pattern, str(value)), text) for pattern, text in words.items())
    return next(text.format(*map(_number, match.groups())) for match, text in found if match)


def _number(text: str) -> float | str:
    try:
        return float(text)
    except ValueError:
        return text


def unknown_keys(case: Case) -> list[str]:
    """The keys of a case that have no words here."""
    return [key for key in case if key not in _WORDS]


def case_facets(case: Case) -> Facets:
    """A case by the keys that say something. Unknown keys are said as they are."""
    found = {}
    for key, words in _WORDS.items():
        value = case.get(key)
        absent = value is None or value is False or (value == 0 and key in _ZERO_IS_ABSENT)
        if words is not None and (not absent or (key == "causal" and key in case)):
            found[key] = _say(words, value, case)
    for key in unknown_keys(case):
        if case[key] not in (None, False):
            text = str(case[key])
            found[key] = f"{key.replace('_', ' ')} {text if len(text) <= 24 else text[:23] + '…'}"
    return found


def common_facets(cases: Iterable[Case]) -> Facets:
    """The facets that all cases have, without details."""
    first, *others = [case_facets(case) for case in cases] or [{}]
    return {
        key: words
        for key, words in first.items()
        if key not in _DETAILS and all(other.get(key) == words for other in others)
    }


def case_labels(cases: Sequence[Case], said: Facets | None = None) -> list[str]:
    """Names that tell cases apart by as few facets as possible; if all are one, its facets but details. `said`: what
    the reader knows; what else all cases have is part of their names. None: he is told elsewhere."""
    keys_of = [json.dumps(case, sort_keys=True, default=str) for case in cases]
    different = dict(zip(keys_of, cases))
    more = common_facets(cases)
    if said is not None:
        more = {key: words for key, words in more.items() if said.get(key) != words}
    if len(different) <= 1:
        return [", ".join(more.values())] * len(cases)
    labels = _different_labels(list(different.values()), () if said is None else tuple(more))
    names = dict(zip(different, labels, strict=True))
    return [names[key] for key in keys_of]


def _different_labels(cases: Sequence[Case], more: Sequence[str]) -> list[str]:
    all_facets = [case_facets(case) for case in cases]
    there_are = dict.fromkeys(key for facets in all_facets for key in facets)
    order = [*(key for key in _WORDS if key in there_are), *(key for key in there_are if key not in _WORDS)]
    keys = [key for key in order if key in more or len({f.get(key) for f in all_facets}) > 1]

    def labels(kept: Sequence[str]) -> list[str]:
        return [", ".join(facets[key] for key in kept if key in facets) or NOTHING for facets in all_facets]

    count = len(set(labels(keys)))
    for key in [*reversed(_DETAILS)]:
        without = [kept for kept in keys if kept != key]
        if without and len(set(labels(without))) == count:
            keys = without
    # Cases that words do not tell apart, such as those of two seeds of a text, get a number.
    found = labels(keys)
    counts = [found[: place + 1].count(label) for place, label in enumerate(found)]
    return [label if count == 1 else f"{label} ({count})" for label, count in zip(found, counts)]
