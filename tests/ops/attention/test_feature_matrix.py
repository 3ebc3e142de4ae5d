"""Which backend serves which feature: the table of the document is that of the code, pairs of features are served
where each of them is, and what is claimed for a backend agrees with the oracle on it."""

import functools
import importlib.util
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from types import ModuleType

import pytest
import torch

from flashtile._backends import devices
from flashtile.testing import AttentionCase, check
from support.attention.attention_cases import parameters

ROOT = Path(__file__).parents[3]


def _tool() -> ModuleType:
    spec = importlib.util.spec_from_file_location("feature_matrix", ROOT / "tools" / "feature_matrix.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


matrix = _tool()

#: The choice is that of an installation with Triton, which is not interpreting.
asks_for_gpus = pytest.mark.skipif(
    bool(devices.triton_missing()) or devices.interpreting(), reason="asks about GPUs: needs Triton, not interpreting"
)


@asks_for_gpus
def test_the_document_has_the_table_of_the_code():
    text = matrix.DOCUMENT.read_text("utf-8")
    assert matrix.written(text) == text, "run: python tools/feature_matrix.py --write"


@asks_for_gpus
def test_a_pair_is_served_where_both_are(monkeypatch):
    """Whatever the numbers are: drawing them would take most of the time."""
    monkeypatch.setattr(torch, "randn", lambda *shape, generator, **kind: torch.ones(*shape, **kind))
    labels = {feature.label for feature in matrix.FEATURES}
    assert all(labels.issuperset(feature.apart) for feature in matrix.FEATURES)
    alone = [(matrix.served(change(matrix.BASE)), change, f) for f in matrix.FEATURES for change in f.changes]
    pairs = 0
    for (first, change, one), (second, other, another) in combinations(alone, 2):
        both = other(change(matrix.BASE))
        undone = change(both) != both or other(both) != both  # the two set the same thing
        if one is another or undone or another.label in one.apart or one.label in another.apart:
            continue
        pairs += 1
        expected = {backend: min(first[backend], second[backend], key=matrix.ORDER.index) for backend in first}
        assert matrix.served(both) == expected, (one.label, another.label)
    assert pairs > 300


@functools.cache
def _calls() -> list[tuple[str, AttentionCase, dict[str, str]]]:
    """Each call of the table, and what each backend does of it."""
    return [
        (f"{feature.label}-{number}", case, matrix.served(case))
        for feature in matrix.FEATURES
        for number, case in enumerate(change(matrix.BASE) for change in feature.changes)
    ]


def _claimed(backend: str) -> list[pytest.param]:
    """Each call of the table that a backend serves, at least forwards."""
    if backend != "cpu" and devices.triton_missing():
        return []
    return parameters({name: case for name, case, served in _calls() if served[backend] != matrix.NOTHING})


@pytest.mark.parametrize("case", _claimed("cpu"))
def test_what_is_claimed_for_the_cpu(case):
    check(case, "cpu")


@pytest.mark.gpu
@pytest.mark.parametrize("case", [] if devices.interpreting() else _claimed("triton"))
def test_what_is_claimed_for_triton(case):
    check(replace(case, seq_q=200, seq_k=300), "triton", "cuda")


@pytest.mark.hopper
@pytest.mark.parametrize("case", [] if devices.interpreting() else _claimed("hopper"))
def test_what_is_claimed_for_hopper(case):
    check(replace(case, seq_q=200, seq_k=300), "hopper", "cuda")
