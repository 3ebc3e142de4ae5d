"""Shapes that nobody chose: drawn at random, the same in every run.

A table of chosen shapes says little of the others, and a kernel can be tuned to it. These are drawn as users' shapes
are spread: lengths and numbers of tokens evenly on a scale of logarithms, a third of the lengths whole multiples of
128.
"""

from __future__ import annotations

import random
from typing import Any

from flashtile.bench.cases import Case

#: Multiply-adds of a forward's products at most, so that a case takes a few milliseconds.
_MOST_WORK = 3e12

#: Elements of q at most: tensors of a case take some 2 GiB with their gradients.
_MOST_ELEMENTS = 2**28

_HEADS = (4, 6, 8, 12, 16, 20, 24, 32, 40)

#: Sizes of heads, the commonest ones more than once.
_HEAD_DIMS = (32, 40, 48, 56, 64, 64, 64, 72, 80, 88, 96, 112, 120, 128, 128, 128, 144, 160, 176, 192, 208, 240, 256)

#: What a call has beside q, k and v; more than half have nothing.
_KINDS = (*("plain",) * 6, "window", "cross", "packed", "dropout")


def common_cases(count: int = 40, seed: int = 2026) -> list[Case]:
    """Heads of 64 and 128, with and without a causal mask, grouped and not, of 128 to 32,768 tokens."""
    draw = random.Random(seed)
    cases: list[Case] = []
    while len(cases) < count:
        head_dim, group = draw.choice((64, 128)), draw.choice((1, 1, 4, 8))
        batch, seq, heads = _size(draw, 7, 15)
        causal = draw.random() < 0.6
        if heads % group == 0 and _fits(batch, seq, seq, heads, head_dim):
            cases.append(Case(batch, seq, heads, heads // group, head_dim, head_dim, causal=causal))
    return cases


def odd_cases(count: int = 60, seed: int = 2026) -> list[Case]:
    """Heads of 32 to 256, both 16-bit dtypes, 64 to 23,000 tokens; some with a window, other keys than queries, packed
    sequences or dropout."""
    draw = random.Random(seed)
    cases: list[Case] = []
    while len(cases) < count:
        head_dim, group, kind = draw.choice(_HEAD_DIMS), draw.choice((1, 1, 1, 2, 4, 8)), draw.choice(_KINDS)
        batch, seq, heads = _size(draw, 6, 14.5)
        keys = _power_of_two(draw, 4, 12) if kind == "cross" else seq
        if heads % group or not _fits(batch, seq, keys, heads, head_dim):
            continue
        more: dict[str, Any] = {"dtype": draw.choice(("bf16", "bf16", "bf16", "fp16"))}
        more["causal"] = kind not in ("window", "cross") and draw.random() < 0.6
        if kind == "window":
            more["window"] = (_power_of_two(draw, 5, 11), 0)
        elif kind == "cross":
            more["Sk"] = keys
        elif kind == "dropout":
            more["dropout_p"] = 0.1
        elif kind == "packed":
            more["lengths"] = tuple(max(8, int(seq * draw.uniform(0.2, 1))) for _ in range(batch))
            seq = max(more["lengths"])
        cases.append(Case(batch, seq, heads, heads // group, head_dim, head_dim, **more))
    return cases


def _size(draw: random.Random, least: float, most: float) -> tuple[int, int, int]:
    """(batch, seq, heads): 2,048 to 32,768 tokens in sequences of 2**least to 2**most."""
    seq = _power_of_two(draw, least, most)
    if draw.random() < 1 / 3:
        seq = max(1, seq // 128) * 128
    return max(1, round(2 ** draw.uniform(11, 15) / seq)), seq, draw.choice(_HEADS)


def _power_of_two(draw: random.Random, least: float, most: float) -> int:
    """A number whose logarithm is drawn evenly."""
    return int(2 ** draw.uniform(least, most))


def _fits(batch: int, queries: int, keys: int, heads: int, head_dim: int) -> bool:
    """Whether a case is small enough for a benchmark of many."""
    rows = batch * heads * queries
    return rows * keys * head_dim <= _MOST_WORK / 2 and rows * head_dim <= _MOST_ELEMENTS
