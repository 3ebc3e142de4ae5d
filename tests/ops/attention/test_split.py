"""Attention of a few queries to many keys: when keys are split, and the kernels that do so against the fp64 oracle."""

from __future__ import annotations

import pytest

from attention_cases import EDGES, PAIRS, parameters
from flashtile.testing import AttentionCase, check


def _served(case: AttentionCase) -> bool:
    tables = case.bias or case.mask or case.block_mask
    return not (case.packed or tables or case.arguments.get("dropout_p"))


_CASES = {name: case for name, case in (PAIRS | EDGES).items() if _served(case)}


@pytest.fixture(params=[1, 3], ids=["one_split", "three_splits"])
def splits(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    from flashtile.ops.attention.split import launch
    from flashtile.ops.common.split_keys import configs

    monkeypatch.setattr(configs, "choose_splits", lambda *_: request.param)
    launch._plan.cache_clear()
    yield
    launch._plan.cache_clear()


@pytest.mark.interpreter
@pytest.mark.parametrize("case", parameters(_CASES))
def test_interpreted(case: AttentionCase, splits: None) -> None:
    check(case, "split")
