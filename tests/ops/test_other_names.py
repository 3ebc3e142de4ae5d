"""Arguments that a public function does not have, or has by name only: the error says what to write."""

import inspect
import operator
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch

import flashtile
from flashtile.ops.common.other_names import OTHER_NAMES
from flashtile.testing import assert_same
from support.running.each_case import each_case

#: No library has these under other names.
OURS_ALONE = {"finish_attention", "linear_bias_wgrad", "merge_attention_"}
FUNCTIONS = [
    value
    for name in sorted({*flashtile.__all__} - OURS_ALONE)
    if inspect.isfunction(value := getattr(flashtile, name)) and "backend" in inspect.signature(value).parameters
]


def call(function: Callable[..., Any], **options: Any) -> Any:
    """A call whose other arguments are not looked at."""
    parameters = inspect.signature(function).parameters.values()
    wanted = [p.name for p in parameters if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    return function(**dict.fromkeys(wanted), **options)


@each_case("function", FUNCTIONS)
def test_every_function_refuses_names_that_it_does_not_have(function):
    if function.__name__ in OURS_ALONE:
        return
    expected = f"flashtile.{function.__name__} has no argument no_such_name; it has "
    with pytest.raises(TypeError, match=expected):
        call(function, no_such_name=1)


@each_case(
    "function, name, remedy",
    [
        (
            "attention",
            "attn_mask",
            r"it is called mask \(bool, True = visible\) or bias \(numbers to add to the scores\)",
        ),
        ("attention", "is_causal", "it is called causal$"),
        ("attention", "softmax_scale", "it is called scale$"),
        ("attention", "window_size", r"it is called window \(\(left, right\), None = unlimited\)"),
        ("attention", "enable_gqa", "leave it out, k and v may have fewer heads than q"),
        ("attention", "return_attn_probs", "flashtile.attention_probs computes"),
        ("attention", "dropuot_p", r"did you mean dropout_p\?"),
        ("attention", "query", "it is called q$"),
        ("attention", "cu_seqlens_q", "flashtile.attention_varlen takes packed sequences"),
        ("attention_varlen", "s_aux", "it is called sinks$"),
        ("attention_varlen", "page_table", "it is called block_table$"),
        ("attention_with_kv_cache", "cache_seqlens", "it is called cache_lengths$"),
        ("attention_with_kv_cache", "bias", "it has q, k_cache, "),
        ("explain", "attention_mask", "it is called mask"),
        ("scaled_dot_product_attention", "causal", "it is called is_causal$"),
        ("cross_entropy", "ignored_index", "it is called ignore_index$"),
        ("layer_norm", "normalized_shape", "leave it out, the last dimension is normalized"),
        ("dropout_add_layer_norm", "eps", "it is called epsilon$"),
        ("apply_rotary", "rotary_interleaved", "it is called interleaved$"),
    ],
)
def test_a_name_of_another_library_leads_to_ours(function, name, remedy):
    with pytest.raises(TypeError, match=f"^flashtile.{function} has no argument {name}; {remedy}"):
        call(getattr(flashtile, function), **{name: None})


def test_all_wrong_names_are_told_at_once():
    with pytest.raises(TypeError, match=r"is_causal; it is called causal. .* attn_mask; it is called mask"):
        call(flashtile.attention, is_causal=True, attn_mask=None)


_MASK = torch.ones(1, 1, 5, 5, dtype=torch.bool)
_ENDS = torch.tensor([0, 5], dtype=torch.int32)


@each_case(
    "function, given, remedy",
    [
        ("attention", [_MASK], r"got 4; write the others by name: mask=... \(bool, True = visible\)$"),
        ("attention", [_MASK.float()], r"got 4; write the others by name: bias=... \(numbers to add to the scores\)$"),
        ("attention", [None, 0.1, True], "got 6; write the others by name: dropout_p=0.1, causal=True$"),
        (
            "attention",
            [0.0, 0.125, True, (7, -1)],
            r"got 7; write the others by name: dropout_p=0.0, scale=0.125, causal=True, window=\(7, None\)$",
        ),
        ("attention", [0.125, True], "got 5; write the others by name: scale=0.125, causal=True$"),
        ("attention", [None], "got 4; leave the others out$"),
        ("attention", [True, "auto"], "got 5; write the others by name, as in causal=True$"),
        ("attention", [_ENDS, _ENDS, 5, 5], "got 7; flashtile.attention_varlen takes packed sequences$"),
        (
            "attention_varlen",
            [_ENDS, _ENDS, 5, 4],
            "cu_seqlens_q, cu_seqlens_k, got 7; write the others by name: max_seqlen_q=5, max_seqlen_k=4$",
        ),
        (
            "attention_varlen",
            [_ENDS, _ENDS, 5, 4, 0.0, None, True],
            "got 10; .*: max_seqlen_q=5, max_seqlen_k=4, dropout_p=0.0, causal=True$",
        ),
    ],
)
def test_arguments_by_position_are_refused_with_their_names(function, given, remedy):
    with pytest.raises(TypeError, match=rf"^flashtile.{function} takes . arguments by position, q, k, v, .*{remedy}"):
        getattr(flashtile, function)(None, None, None, *given)


def test_the_table_names_arguments_that_there_are():
    there_are = {name for function in FUNCTIONS for name in inspect.signature(function).parameters}
    remedies = [remedy for remedy in OTHER_NAMES.values() if isinstance(remedy, dict)]
    assert {name for remedy in remedies for name in remedy} <= there_are


def test_compiled_functions_stay_whole():
    q = torch.randn(1, 5, 2, 8)
    compiled = torch.compile(lambda q: flashtile.attention(q, q, q, causal=True), backend="eager", fullgraph=True)
    assert_same(compiled(q), flashtile.attention(q, q, q, causal=True))


@pytest.mark.parametrize("name, here", flashtile._ELSEWHERE.items())
def test_names_of_other_libraries_say_what_to_use(name, here):
    assert callable(operator.attrgetter(here)(flashtile))
    with pytest.raises(
        AttributeError, match=rf"no attribute '{name}'; use flashtile\.{re.escape(here)} \(docs/migrating"
    ):
        getattr(flashtile, name)


def test_the_package_lists_names_that_users_reach():
    listed = {name for name in dir(flashtile) if not name.startswith("_")}
    assert {*flashtile.__all__, "modules", "compat"} <= listed and not {"os", "sys", "Any", "TYPE_CHECKING"} & listed
