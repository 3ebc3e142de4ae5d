"""Fewer cases have every pair of features that more cases have."""

from collections.abc import Iterable
from itertools import combinations, product

from support.attention import attention_cases, kv_cache_cases
from support.companions import norm_cases, rotary_cases
from support.running.covering import covering, covering_choices
from support.running.each_case import each_case


def _pairs(names: Iterable[str]) -> set[tuple[str, ...]]:
    return {pair for name in names for pair in combinations(name.split("+"), 2)}


@each_case("cases", [attention_cases, kv_cache_cases, norm_cases, rotary_cases])
def test_combined_cases_have_every_pair(cases):
    assert _pairs(cases.COMBINED) == _pairs(cases.PAIRS)
    assert {name for name in cases.PAIRS if "+" not in name} <= cases.COMBINED.keys()
    assert len(cases.COMBINED) < len(cases.PAIRS) / 2


def test_combined_score_functions_meet_every_feature():
    assert _pairs(attention_cases.SCORE_MOD_PAIRS) <= _pairs(attention_cases.score_mod_combined())


def test_what_is_not_compatible_is_in_no_set():
    sets = covering("abcdef", lambda first, second: {first, second} != {"a", "b"})
    assert not any({"a", "b"} <= set(each) for each in sets)
    assert _pairs("+".join(each) for each in sets) == set(combinations("abcdef", 2)) - {("a", "b")}


def test_choices_have_every_pair_of_answers():
    questions = ("abcd", (1, 2, 3), (True, None), "xyz")
    choices = covering_choices(*questions)
    for first, second in combinations(range(4), 2):
        pairs = {(choice[first], choice[second]) for choice in choices}
        assert pairs == set(product(questions[first], questions[second]))
    assert len(choices) < 4 * 3 * 2
