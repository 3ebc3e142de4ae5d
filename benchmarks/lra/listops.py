"""ListOps: nested list operations on digits, of which a model has to name the result. Made by the published definition.

An expression is a digit or an operator with 2 to `max_args` expressions, written as `[MAX 2 9 [MIN 4 7 ] 0 ]`. At each
place an operator stands with probability 1/4, as long as fewer than `max_depth` lie around it. Long Range Arena keeps
those of 500 to 2,000 tokens.

Reference: Nangia and Bowman, "ListOps: A Diagnostic Dataset for Latent Tree Learning" (2018); Tay et al., "Long Range
Arena" (2021), section 2.2.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

from torch import Tensor

from benchmarks.lra.examples import Examples, in_parts, padded

_OPERATOR_PROBABILITY = 0.25

DIGITS = 10
OPERATORS = ("MIN", "MAX", "MED", "SM")
#: Tokens: 0 is padding, then the digits, the operators with their bracket, and the closing bracket.
FIRST_DIGIT, FIRST_OPERATOR = 1, 1 + DIGITS
CLOSE = FIRST_OPERATOR + len(OPERATORS)
VOCABULARY = CLOSE + 1


@dataclass(frozen=True)
class Limits:
    """Limits of expressions: how deep, how wide, how long in tokens."""

    max_depth: int = 10
    max_args: int = 10
    min_length: int = 500
    max_length: int = 2000

    def __post_init__(self) -> None:
        if self.max_args < 2 or not 1 <= self.min_length <= self.max_length:
            raise ValueError(
                f"limits: expected max_args >= 2 and 1 <= min_length <= max_length, got {self}; shorter ones are kept "
                "with a smaller min_length"
            )


class _TooLongError(Exception):
    pass


def make_listops(count: int, seed: int, limits: Limits = Limits(), workers: int = 1) -> Examples:
    """Examples with their values, the same for a seed however many processes make them."""
    return in_parts(_part, count, seed, limits, workers)


def evaluate(tokens: list[int]) -> int:
    """The value of an expression, from its tokens alone."""
    stack: list[list[int]] = [[]]
    for token in tokens:
        if token == CLOSE:
            operator, *values = stack.pop()
            stack[-1].append(_apply(operator, values))
        elif token >= FIRST_OPERATOR:
            stack.append([token - FIRST_OPERATOR])
        else:
            stack[-1].append(token - FIRST_DIGIT)
    (value,) = stack[0]
    return value


def _part(count: int, seed: int, limits: Limits) -> tuple[Tensor, Tensor, Tensor]:
    random_numbers = random.Random(seed)
    found: list[list[int]] = []
    while len(found) < count:
        tokens: list[int] = []
        try:
            _write(tokens, random_numbers, limits, 1)
        except _TooLongError:
            continue
        if len(tokens) >= limits.min_length:
            found.append(tokens)
    return padded(found, [evaluate(tokens) for tokens in found])


def _write(tokens: list[int], random_numbers: random.Random, limits: Limits, depth: int) -> None:
    """Appends an expression."""
    if len(tokens) >= limits.max_length:
        raise _TooLongError
    if depth >= limits.max_depth or random_numbers.random() > _OPERATOR_PROBABILITY:
        tokens.append(FIRST_DIGIT + random_numbers.randrange(DIGITS))
        return
    tokens.append(FIRST_OPERATOR + random_numbers.randrange(len(OPERATORS)))
    for _ in range(random_numbers.randint(2, limits.max_args)):
        _write(tokens, random_numbers, limits, depth + 1)
    if len(tokens) >= limits.max_length:
        raise _TooLongError
    tokens.append(CLOSE)


def _apply(operator: int, values: list[int]) -> int:
    ordered, middle = sorted(values), len(values) // 2
    # An even number of values has the mean of the two in the middle, rounded down.
    median = ordered[middle] if len(values) % 2 else (ordered[middle - 1] + ordered[middle]) // 2
    return (ordered[0], ordered[-1], median, sum(values) % DIGITS)[operator]
