"""The arguments that functions of attention share: one name, one type and one default everywhere."""

import inspect
from collections.abc import Callable
from typing import Any

import pytest

import flashtile
from flashtile.distributed import context_parallel_attention
from flashtile.ops.attention import options
from flashtile.ops.attention.options import Taken

#: Function -> the class of its options.
FUNCTIONS: dict[Callable[..., Any], type] = {
    flashtile.attention: options.Options,
    flashtile.attention_varlen: options.PackedOptions,
    flashtile.explain: options.ExplainOptions,
    flashtile.attention_probs: options.ProbsOptions,
    flashtile.attention_column_sums: options.ColumnSumsOptions,
    flashtile.attention_part: options.PartOptions,
    flashtile.attention_backward: flashtile.AttentionOptions,
}


@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda function: function.__name__)
def test_a_signature_has_its_options(function):
    """Also those of the two functions that name each argument themselves, which have the types and defaults twice."""
    parameters = inspect.signature(function).parameters
    kinds = FUNCTIONS[function].__annotations__
    for name, kind in kinds.items():
        parameter = parameters[name]
        assert parameter.kind is parameter.KEYWORD_ONLY
        assert parameter.default == Taken._field_defaults[name], name
        assert parameter.annotation == kind.__forward_arg__, name
    own = {name for name, parameter in parameters.items() if parameter.kind is parameter.KEYWORD_ONLY} - kinds.keys()
    expected = {
        "attention": {"return_lse", "return_max_scores"},
        "attention_varlen": {"block_table", "return_lse", "return_max_scores"},
        "explain": {"device", "part"},
        "attention_probs": {"rows", "heads"}, "attention_column_sums": set(),
        "attention_part": {"cu_seqlens", "max_seqlen", "return_max_scores"},
        "attention_backward": {"dlse", "cu_seqlens", "max_seqlen", "cu_seqlens_k", "max_seqlen_k"},
    }  # fmt: skip
    assert own == expected[function.__name__]


def test_every_option_has_a_type_and_a_default():
    everything = {name for kinds in FUNCTIONS.values() for name in kinds.__annotations__}
    assert everything == set(Taken._fields) == Taken._field_defaults.keys()


def test_context_parallelism_has_the_same_types_and_defaults():
    parameters = inspect.signature(context_parallel_attention).parameters
    kinds = {**flashtile.AttentionOptions.__annotations__, "return_lse": bool, "return_max_scores": bool}
    assert parameters.keys() & set(Taken._fields) == kinds.keys()
    for name, kind in kinds.items():
        assert parameters[name].default == Taken._field_defaults[name], name
        written = parameters[name].annotation.replace("flashtile.", "")
        assert written == getattr(kind, "__forward_arg__", "bool"), name


def test_options_are_taken_or_refused():
    names = options.option_names(options.PartOptions)
    assert options.take(flashtile.attention_part, {"causal": True, "scale": 2.0}, names) == Taken(True, scale=2.0)
    with pytest.raises(TypeError, match=r"flashtile.attention_part has no argument sinks"):
        options.take(flashtile.attention_part, {"sinks": None}, names)
