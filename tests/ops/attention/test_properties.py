"""Random calls: the CPU backend agrees with the fp64 oracle."""

from dataclasses import replace
from typing import Any

import hypothesis
import torch
from hypothesis import strategies as st

from flashtile.testing import AttentionCase, check, with_arguments

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)

sides = st.none() | st.integers(0, 40)
# Sizes around the edges of tiles, and anything between.
sizes = st.integers(0, 70) | st.sampled_from([1, 63, 64, 65, 127, 128, 129])
seeds = st.integers(0, 2**20)


@st.composite
def arguments(draw: st.DrawFn) -> dict[str, Any]:
    """Options of a call that are not tensors."""
    given: dict[str, Any] = {}
    if draw(st.booleans()):
        given["causal"] = True
    if draw(st.booleans()):
        given["window"] = (draw(sides), draw(sides))
    if draw(st.booleans()):
        given["align"] = draw(st.sampled_from(["bottom_right", "top_left"]))
    if draw(st.integers(0, 3)) == 0:
        given["scale"] = draw(st.sampled_from([0.0, 0.3, -0.2, 1]))
    if draw(st.integers(0, 2)) == 0:
        given["dropout_p"] = draw(st.sampled_from([0.1, 0.5, 0.9]))
    return given


@st.composite
def cases(draw: st.DrawFn) -> AttentionCase:
    """Any call: dense or packed, every option, odd sizes."""
    heads_kv = draw(st.integers(1, 3))
    case = AttentionCase(
        seq_q=draw(sizes),
        seq_k=draw(sizes),
        batch=draw(st.integers(0, 3)),
        heads=heads_kv * draw(st.integers(1, 3)),
        heads_kv=heads_kv,
        head_dim=draw(st.integers(1, 40)),
        head_dim_v=draw(st.integers(1, 40)),
        dtype=draw(st.sampled_from(DTYPES)),
        arguments=draw(arguments()),
    )
    if draw(st.booleans()):
        lengths = st.tuples(sizes, sizes)
        pairs = draw(st.lists(lengths, max_size=4))
        case = replace(
            case,
            batch=len(pairs),
            lengths_q=tuple(pair[0] for pair in pairs),
            lengths_k=tuple(pair[1] for pair in pairs),
        )
    if draw(st.booleans()):
        lengths = st.lists(st.integers(0, 90), min_size=case.batch, max_size=case.batch)
        case = replace(case, key_lengths=tuple(draw(lengths)))
    return case


@st.composite
def score_cases(draw: st.DrawFn) -> AttentionCase:
    """Any call with soft cap, bias, mask, ALiBi and sinks, each or none."""
    case = draw(cases())
    tables = st.tuples(*(st.sampled_from(("1", name)) for name in ("1" if case.packed else "b", "h", "q", "k")))
    if draw(st.booleans()):
        case = with_arguments(case, softcap=draw(st.sampled_from([0.5, 2.0, 30])))
    if draw(st.booleans()):
        dtype = draw(st.sampled_from([None, torch.float32])) if case.dtype is not torch.float64 else None
        case = replace(case, bias="".join(draw(tables)), bias_dtype=dtype)
    if draw(st.booleans()):
        case = replace(case, mask="".join(draw(tables)))
    return replace(case, alibi_slopes=draw(st.sampled_from([None, "h", "bh"])), sinks=draw(st.booleans()))


#: Each of them has many sizes and options: half of the usual number is enough.
@hypothesis.settings(max_examples=hypothesis.settings.default.max_examples // 2)
@hypothesis.given(score_cases(), seeds)
def test_cpu_agrees_with_the_oracle(case, seed):
    check(case, "cpu", seed=seed)
