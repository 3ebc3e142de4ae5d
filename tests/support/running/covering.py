"""Every pair of features in few cases: each case has several features, and so many pairs."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable, Sequence
from itertools import combinations
from typing import Any, TypeVar

#: At most so many features in a case, so that none hides what another does.
_FEATURES_OF_A_CASE = 4


_Case = TypeVar("_Case")


def combined_cases(
    base: _Case, names: Sequence[str], change: Callable[[_Case, str], _Case], compatible: Callable[[str, str], bool]
) -> dict[str, _Case]:
    """A case for each set of `covering`: the base with the change of every feature in the set."""
    return {"+".join(chosen): functools.reduce(change, chosen, base) for chosen in covering(names, compatible)}


def covering_choices(*questions: Iterable[Any]) -> list[tuple[Any, ...]]:
    """An answer to each of up to four questions, such that each two answers to different ones are in one choice.

    Args:
        questions: the answers to each.
    """
    answers = [list(question) for question in questions]
    named = {
        f"{question}:{number}": (question, answer)
        for question, of in enumerate(answers)
        for number, answer in enumerate(of)
    }
    found = []
    for chosen in covering(list(named), lambda first, second: first.partition(":")[0] != second.partition(":")[0]):
        choice = dict(named[name] for name in chosen)
        found.append(tuple(choice.get(question, of[0]) for question, of in enumerate(answers)))
    return found


def turns(many: Iterable[Any], few: Iterable[Any], times: int = 1) -> list[tuple[Any, Any]]:
    """Each of `many` with `times` of the `few`, which take turns: for tests that need not see each two together."""
    others = itertools.cycle(few)
    return [(one, next(others)) for one in many for _ in range(times)]


def covering(names: Sequence[str], compatible: Callable[[str, str], bool]) -> list[tuple[str, ...]]:
    """Sets of features, in the order of `names`, such that each two that go together are in one of them.

    Args:
        compatible: whether two features can be asked of one call.
    """
    left = {pair for pair in combinations(names, 2) if compatible(*pair)}

    def missing(feature: str, chosen: list[str]) -> int:
        return sum((feature, other) in left or (other, feature) in left for other in chosen)

    found = []
    while left:
        chosen = list(min(left))
        while len(chosen) < _FEATURES_OF_A_CASE:
            more = [name for name in names if all(name != other and compatible(name, other) for other in chosen)]
            best = max(more, key=lambda name: missing(name, chosen), default=None)
            if best is None or not missing(best, chosen):
                break
            chosen.append(best)
        chosen.sort(key=names.index)
        left -= set(combinations(chosen, 2))
        found.append(tuple(chosen))
    return found
