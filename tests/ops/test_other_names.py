"""Arguments that a public function does not have: the error says what they are called here."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch

import flashtile
from flashtile.ops.common.other_names import OTHER_NAMES
from flashtile.testing import assert_same

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
    wanted = [p.name for p in parameters if p.default is p.empty and p.kind is not p.VAR_KEYWORD]
    return function(**dict.fromkeys(wanted), **options)


@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda function: function.__name__)
def test_every_function_refuses_names_that_it_does_not_have(function: Callable[..., Any]) -> None:
    if function.__name__ in OURS_ALONE:
        return
    expected = (
        f"no_such_name: expected the name of an argument of flashtile.{function.__name__}, got another; there are"
    )
    with pytest.raises(TypeError, match=expected):
        call(function, no_such_name=1)


@pytest.mark.parametrize(
    ("function", "name", "remedy"),
    [
        (
            "attention",
            "attn_mask",
            r"here it is mask \(bool, True = visible\) or bias \(numbers to add to the scores\)",
        ),
        ("attention", "is_causal", "here it is causal$"),
        ("attention", "softmax_scale", "here it is scale$"),
        ("attention", "window_size", r"here it is window \(\(left, right\), None = unlimited\)"),
        ("attention", "enable_gqa", "leave it out, k and v may have fewer heads than q"),
        ("attention", "return_attn_probs", "flashtile.attention_probs computes"),
        ("attention", "dropuot_p", r"did you mean dropout_p\?"),
        ("attention", "query", "here it is q$"),
        ("attention", "cu_seqlens_q", "flashtile.attention_varlen takes packed sequences"),
        ("attention_varlen", "s_aux", "here it is sinks$"),
        ("attention_varlen", "page_table", "there are q, k, v, cu_seqlens_q, "),
        ("attention_with_kv_cache", "cache_seqlens", "here it is cache_lengths$"),
        ("attention_with_kv_cache", "attn_mask", "there are q, k_cache, "),
        ("explain", "attention_mask", "here it is mask"),
        ("scaled_dot_product_attention", "causal", "here it is is_causal$"),
        ("cross_entropy", "ignored_index", "here it is ignore_index$"),
        ("layer_norm", "normalized_shape", "leave it out, the last dimension is normalized"),
        ("dropout_add_layer_norm", "eps", "here it is epsilon$"),
        ("apply_rotary", "rotary_interleaved", "here it is interleaved$"),
    ],
)
def test_a_name_of_another_library_leads_to_ours(function: str, name: str, remedy: str) -> None:
    with pytest.raises(TypeError, match=f"^{name}: .*; {remedy}"):
        call(getattr(flashtile, function), **{name: None})


def test_all_wrong_names_are_told_at_once() -> None:
    with pytest.raises(TypeError, match=r"is_causal: .*; here it is causal; attn_mask: .*; here it is mask"):
        call(flashtile.attention, is_causal=True, attn_mask=None)


def test_the_table_names_arguments_that_there_are() -> None:
    there_are = {name for function in FUNCTIONS for name in inspect.signature(function).parameters}
    remedies = [remedy for remedy in OTHER_NAMES.values() if isinstance(remedy, dict)]
    assert {name for remedy in remedies for name in remedy} <= there_are


def test_compiled_functions_stay_whole() -> None:
    q = torch.randn(1, 5, 2, 8)
    compiled = torch.compile(lambda q: flashtile.attention(q, q, q, causal=True), backend="eager", fullgraph=True)
    assert_same(compiled(q), flashtile.attention(q, q, q, causal=True))
