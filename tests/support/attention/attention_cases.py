"""Attention calls for the tests of kernels: every feature alone, every pair of features, and shapes at the edges."""

from __future__ import annotations

import functools
from dataclasses import replace
from itertools import combinations
from typing import Any

import pytest
import torch
from torch import Tensor

import flashtile
from flashtile.testing import AttentionCase, Size, assert_close, check, make_inputs, run, with_arguments
from support.running.covering import combined_cases

BASE = AttentionCase(seq_q=37, seq_k=53, batch=2, heads=2, heads_kv=2, head_dim=16, head_dim_v=16)


def _grouped(case: AttentionCase) -> AttentionCase:
    return replace(case, heads=4)


def _uneven_heads(case: AttentionCase) -> AttentionCase:
    return replace(case, head_dim=24, head_dim_v=40)


def _packed(case: AttentionCase) -> AttentionCase:
    return replace(case, batch=3, lengths_q=(5, 0, 37), lengths_k=(33, 4, 20))


def _key_lengths(case: AttentionCase) -> AttentionCase:
    return replace(case, key_lengths=(53, 17, 0)[: case.batch])


def _block_mask(case: AttentionCase) -> AttentionCase:
    if case.packed:
        return replace(case, lengths_q=(70, 0, 37), lengths_k=(33, 4, 140), block_mask=(64, 64))
    return replace(case, seq_q=70, seq_k=140, block_mask=(64, 64))


#: What can be asked of one call. Each changes a case; those that exclude each other share the first word.
_FEATURES = {
    "packed": _packed,
    "grouped": _grouped,
    "head_dims": _uneven_heads,
    "key_lengths": _key_lengths,
    "band causal": lambda case: with_arguments(case, causal=True),
    "band top_left": lambda case: with_arguments(case, causal=True, align="top_left"),
    "band window": lambda case: with_arguments(case, window=(9, 4)),
    "band left": lambda case: with_arguments(case, window=(3, None), align="top_left"),
    "softcap": lambda case: with_arguments(case, softcap=2.0),
    "bias full": lambda case: replace(case, bias="1hqk" if case.packed else "bhqk"),
    "bias shared": lambda case: replace(case, bias="1hqk"),
    "bias keys": lambda case: replace(case, bias="111k" if case.packed else "b11k"),
    "bias queries": lambda case: replace(case, bias="11q1", bias_dtype=torch.float32),
    "mask": lambda case: replace(case, mask="11qk" if case.packed else "b1qk"),
    "alibi": lambda case: replace(case, alibi_slopes="bh"),
    "sinks": lambda case: replace(case, sinks=True),
    "block_mask": _block_mask,
    "dropout": lambda case: with_arguments(case, dropout_p=0.3),
    "scale": lambda case: with_arguments(case, scale=-0.4),
}


#: Shapes of a bias that differ in how it is read and summed alone: they are not paired, "bias shared" is.
_UNPAIRED = ("bias full", "bias keys", "bias queries")


def _pairs() -> dict[str, AttentionCase]:
    cases = {"plain": BASE}
    cases.update({name: change(BASE) for name, change in _FEATURES.items()})
    paired = {name: change for name, change in _FEATURES.items() if name not in _UNPAIRED}
    for (first, change), (second, other) in combinations(paired.items(), 2):
        if first.split()[0] != second.split()[0]:
            cases[f"{first}+{second}"] = other(change(BASE))
    packed_blocks = _block_mask(_packed(BASE))
    cases["packed block_mask, bias of queries"] = replace(packed_blocks, bias="11q1", sinks=True, alibi_slopes="bh")
    cases["packed block_mask, bias of keys"] = with_arguments(replace(packed_blocks, bias="1h1k"), causal=True)
    together = (
        "packed",
        "grouped",
        "head_dims",
        "key_lengths",
        "band window",
        "softcap",
        "bias shared",
        "mask",
        "alibi",
    )
    names = (*together, "sinks", "dropout", "scale")
    cases["everything"] = functools.reduce(lambda case, name: _FEATURES[name](case), names, BASE)
    return cases


PAIRS = _pairs()


def combined(*without: str) -> dict[str, AttentionCase]:
    """Every pair of features in fewer cases than `PAIRS` (`covering`), for tests that take long. Features alone, and
    what `PAIRS` has besides pairs, are here too.

    Args:
        without: features that the tests have no use for.
    """

    def compatible(first: str, second: str) -> bool:
        return first.split()[0] != second.split()[0]

    cases = {name: case for name, case in PAIRS.items() if "+" not in name}
    names = [name for name in _FEATURES if name not in (*_UNPAIRED, *without)]
    return cases | combined_cases(BASE, names, lambda case, name: _FEATURES[name](case), compatible)


COMBINED = combined()


def _score_mod_pairs() -> dict[str, AttentionCase]:
    """A score function alone, and with every other feature."""
    changes = {name: change for name, change in _FEATURES.items() if name not in _UNPAIRED}
    pairs = {f"score_mod+{name}": replace(change(BASE), score_mod=True) for name, change in changes.items()}
    everything = replace(PAIRS["everything"], score_mod=True)
    return {"score_mod": replace(BASE, score_mod=True), **pairs, "score_mod+everything": everything}


SCORE_MOD_PAIRS = _score_mod_pairs()


def score_mod_combined() -> dict[str, AttentionCase]:
    """A score function with every other feature, three of them at once: as `combined`, for tests that take long."""
    groups: list[list[str]] = []
    for name in (name for name in _FEATURES if name not in _UNPAIRED):
        for group in groups:
            if len(group) < 3 and all(name.split()[0] != other.split()[0] for other in group):
                group.append(name)
                break
        else:
            groups.append([name])
    base = replace(BASE, score_mod=True)
    found = {
        "+".join(["score_mod", *group]): functools.reduce(lambda case, name: _FEATURES[name](case), group, base)
        for group in groups
    }
    return found | {name: SCORE_MOD_PAIRS[name] for name in ("score_mod", "score_mod+everything")}


#: Shapes at the edges of what tiles hold.
EDGES = {
    "one_query": replace(BASE, seq_q=1, seq_k=40),
    "one_key": replace(BASE, seq_q=40, seq_k=1),
    "head_dim_1": replace(BASE, head_dim=1, head_dim_v=3, seq_q=20, seq_k=18),
    "head_dim_80": replace(BASE, batch=1, head_dim=80, head_dim_v=80, seq_q=20, seq_k=18),
    "no_queries": replace(BASE, seq_q=0),
    "no_keys": replace(BASE, seq_k=0),
    "no_keys_but_sinks": replace(BASE, seq_k=0, sinks=True),
    "no_packed_keys_but_sinks": replace(BASE, lengths_q=(5, 7), lengths_k=(0, 0), sinks=True),
    "no_batch": replace(BASE, batch=0),
    "empty_sequences": replace(BASE, lengths_q=(0, 0), lengths_k=(0, 3)),
    "more_queries_than_keys": with_arguments(replace(BASE, seq_q=53, seq_k=20), causal=True),
    "head_dim_300": with_arguments(replace(BASE, batch=1, head_dim=300, head_dim_v=20, heads=4), causal=True),
    "head_dim_v_300": replace(BASE, batch=1, head_dim=20, head_dim_v=300, lengths_q=(20, 9), lengths_k=(3, 30)),
    "scale_0": with_arguments(BASE, scale=0.0, causal=True),
    "fp16": with_arguments(replace(BASE, dtype=torch.float16), causal=True, dropout_p=0.1),
}


def changed(base: AttentionCase, head_dim: int = 0, head_dim_v: int = 0, **changes: Any) -> AttentionCase:
    """`base` with heads of other widths (one number: of both), other fields, and other arguments of the call, which is
    what is no field."""
    of_case = {name: value for name, value in changes.items() if name in AttentionCase.__dataclass_fields__}
    if head_dim:
        of_case |= {"head_dim": head_dim, "head_dim_v": head_dim_v or head_dim}
    arguments = {name: value for name, value in changes.items() if name not in of_case}
    return with_arguments(replace(base, **of_case), **arguments)


def parameters(cases: dict[str, AttentionCase]) -> list:
    return [pytest.param(case, id=name.replace(" ", "_")) for name, case in cases.items()]


def check_again(case: AttentionCase, backend: str, runs: int = 1, names: tuple[str, ...] = ()) -> None:
    """`check` on a GPU, and that other runs have the same bits, in the results of these names or in all."""
    inputs = make_inputs(case, "cuda")
    first = check(case, backend, "cuda", inputs=inputs)
    for _ in range(runs):
        again = run(case, inputs, backend)
        assert all(torch.equal(first[name], again[name]) for name in names or first)


def check_forward(q: Tensor, k: Tensor, v: Tensor, backend: str, **arguments: Any) -> tuple[Tensor, Tensor]:
    """Holds out and lse of a call, which it returns, to the tolerance policy, beside the reference in float64 and its
    dtype. Tensors among the arguments are cast with q; the call is packed if `cu_seqlens_q` is among them."""
    function: Any = flashtile.attention_varlen if "cu_seqlens_q" in arguments else flashtile.attention

    def results(dtype: torch.dtype, backend: str) -> tuple[Tensor, Tensor]:
        wide = torch.promote_types(dtype, torch.float32)
        given = {
            name: of.to(wide) if isinstance(of, Tensor) and of.is_floating_point() else of
            for name, of in arguments.items()
        }
        return function(*(t.to(dtype) for t in (q, k, v)), **given, return_lse=True, backend=backend)

    found = results(q.dtype, backend)
    others = results(torch.float64, "reference"), results(q.dtype, "reference")
    for name, size, *values in zip(("out", "lse"), (Size(), Size(1, 1)), found, *others):
        assert_close(name, *values, size)
    return found
