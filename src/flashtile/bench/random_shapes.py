"""Shapes that nobody chose: drawn at random, the same in every run.

A table of chosen shapes says little of the others, and a kernel can be tuned to it. Here lengths and numbers of tokens
are drawn evenly on a scale of logarithms, as users' are spread.
"""

from __future__ import annotations

import math
import random
from typing import Any

from flashtile.bench.cases import Case

#: FLOPs of a forward at most, so that a case takes some 10 ms.
_MOST_FLOPS = 6e12

#: Bytes of q at most, in 16 bits.
_MOST_BYTES = 2**29

#: Sequences of a batch at most, and of a packed one.
_MOST_SEQUENCES, _MOST_PACKED = 512, 200

#: Sizes of heads and their numbers; the commonest ones more than once.
_HEAD_DIMS = (32, 40, 48, 56, 64, 64, 64, 72, 80, 88, 96, 112, 120, 128, 128, 128, 144, 160, 176, 192, 208, 240, 256)
_HEADS = (4, 6, 8, 12, 16, 20, 24, 32, 40)
_COMMON_HEADS = (8, 12, 16, 32, 32)

#: Kinds of calls, by what they have beside q, k and v. More than half have nothing.
_KINDS = (*("plain",) * 6, "window", "cross", "packed", "dropout")


def common_cases(count: int = 40, seed: int = 5) -> list[Case]:
    """Heads of 64 and 128 in bfloat16, with and without a causal mask, grouped and not, of 128 to 32,768 tokens."""
    draw = random.Random(seed)
    cases: list[Case] = []
    while len(cases) < count:
        head_dim = draw.choice((64, 128))
        seq = _logarithmic(draw, 7, 15)
        if draw.random() < 0.4:
            seq = seq // 128 * 128
        batch = max(1, round(2 ** draw.uniform(11, 15) / seq))
        heads, group = draw.choice(_COMMON_HEADS), draw.choice((1, 1, 4, 8))
        if heads % group:
            continue
        causal = draw.random() < 0.6
        if _flops(batch, seq, seq, heads, head_dim) <= _MOST_FLOPS:
            cases.append(Case(batch, seq, heads, heads // group, head_dim, head_dim, causal=causal))
    return cases


def odd_cases(count: int = 60, seed: int = 1) -> list[Case]:
    """Heads of 32 to 256 in both 16-bit dtypes, of 64 to 23,000 tokens; some with a window, other keys than queries,
    packed sequences or dropout."""
    draw = random.Random(seed)
    cases: list[Case] = []
    while len(cases) < count:
        head_dim = draw.choice(_HEAD_DIMS)
        seq = _odd_length(draw)
        batch = max(1, round(2 ** draw.uniform(11, 15.5) / seq))
        if batch > _MOST_SEQUENCES:
            continue
        heads = draw.choice(_HEADS)
        if 2 * seq * batch * heads * head_dim > _MOST_BYTES:
            continue
        group = draw.choice((1, 1, 1, 2, 4, 8))
        if heads % group:
            continue
        causal = draw.random() < 0.55
        kind = draw.choice(_KINDS)
        more: dict[str, Any] = {"dtype": "bf16" if draw.random() < 0.75 else "fp16"}
        keys = seq
        if kind == "window":
            more["window"] = (_logarithmic(draw, 5, 11), 0)
        elif kind == "cross":
            more["Sk"] = keys = _logarithmic(draw, 4, 12)
        elif kind == "dropout":
            more["dropout_p"] = 0.1
        if kind == "packed":
            sequences = range(min(batch, _MOST_PACKED))
            more["lengths"] = tuple(max(8, int(seq * draw.uniform(0.2, 1))) for _ in sequences)
            batch, seq = len(sequences), max(more["lengths"])
        elif _flops(batch, seq, keys, heads, head_dim) > _MOST_FLOPS:
            continue
        more["causal"] = causal and kind not in ("window", "cross")
        cases.append(Case(batch, seq, heads, heads // group, head_dim, head_dim, **more))
    return cases


def _odd_length(draw: random.Random) -> int:
    """A length of which three in ten are powers of two, as many multiples of 8, and the others any."""
    seq = _logarithmic(draw, 6, 14.5)
    if draw.random() >= 0.6:
        return seq
    return max(64, 1 << round(math.log2(seq))) if draw.random() < 0.5 else seq // 8 * 8


def _logarithmic(draw: random.Random, least: float, most: float) -> int:
    """A number from 2**least to 2**most whose logarithm is drawn evenly."""
    return int(2 ** draw.uniform(least, most))


def _flops(batch: int, queries: int, keys: int, heads: int, head_dim: int) -> int:
    """FLOPs of a forward without a mask."""
    return 4 * batch * heads * queries * keys * head_dim
