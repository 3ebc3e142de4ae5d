"""Steps like an earlier one, which are neither checked nor decided anew: the same results, and the same errors."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

import flashtile
from flashtile.ops.kv_cache import calls, operator
from flashtile.testing import assert_same
from support.attention.kv_cache_cases import CacheCase, check

STEP = CacheCase(seq_q=1, capacity=300, lengths=260, heads=4, head_dim=16)


@pytest.fixture
def general(monkeypatch: pytest.MonkeyPatch) -> Callable[[], int]:
    """How many steps were served with all checks."""
    served: list[object] = []
    forward = operator._forward

    def counted(call, spec, backend):
        served.append(call)
        return forward(call, spec, backend)

    monkeypatch.setattr(operator, "_forward", counted)
    return lambda: len(served)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("heads_kv", [4, 2, 1])
@pytest.mark.parametrize("lengths", [None, 1, 7, 260, (260, 260)], ids=str)
@pytest.mark.parametrize("causal", [True, False])
def test_repeated_steps(lengths, heads_kv: int, dtype: torch.dtype, causal: bool, general) -> None:
    case = replace(STEP, lengths=lengths, heads_kv=heads_kv, dtype=dtype, arguments={"causal": causal})
    check(case, "cpu")
    before = general()
    check(case, "cpu")
    # The check also runs the reference, twice. Fewer keys than a vector holds may need a second look.
    assert general() == before + 2


def _step(rows: int = 40, **options):
    torch.manual_seed(0)
    q, *caches = torch.randn(2, 1, 4, 16), torch.randn(2, rows, 2, 16), torch.randn(2, rows, 2, 16)
    return lambda **more: flashtile.attention_with_kv_cache(q, *caches, **options, **more)


def test_each_step_has_its_own_length(general) -> None:
    step = _step(300)
    lengths = torch.tensor([200, 200])
    for length in (200, 201, 300, 129):
        lengths.fill_(length)
        actual = step(cache_lengths=lengths, return_lse=True)
        assert all(map(torch.equal, actual, step(cache_lengths=length, return_lse=True)))
        calls.forget_steps()
        assert all(map(torch.equal, actual, step(cache_lengths=length, return_lse=True)))
    assert general() == 5


@pytest.mark.parametrize("wrong, error", [
    ({"cache_lengths": 41}, ValueError),
    ({"cache_lengths": -1}, ValueError),
    ({"cache_lengths": True}, TypeError),
    ({"cache_lengths": torch.tensor([40, 41])}, ValueError),
    ({"cache_lengths": torch.tensor([41, 41])}, ValueError),
    ({"cache_lengths": torch.tensor([-1, -1])}, ValueError),
    ({"cache_lengths": torch.tensor([40])}, ValueError),
    ({"cache_lengths": torch.tensor([40.0, 40.0])}, TypeError),
    ({"causal": 1}, TypeError),
    ({"return_lse": 0}, TypeError),
    ({"rotary_interleaved": 0}, TypeError),
    ({"scale": float("nan")}, ValueError),
    ({"scale": "1"}, TypeError),
    ({"backend": "cuda"}, ValueError),
    ({"num_splits": 0}, ValueError),
    ({"max_seqlen_q": 1}, ValueError),
    ({"cu_seqlens_new": torch.tensor([0, 1, 2])}, ValueError),
], ids=str)  # fmt: skip
def test_a_wrong_argument_is_refused_in_a_later_step_too(wrong: dict, error: type[Exception]) -> None:
    step = _step()
    step(cache_lengths=40)
    with pytest.raises(error):
        step(**{"cache_lengths": 40, **wrong})


def test_sequences_of_different_lengths_and_empty_ones_are_looked_at(general) -> None:
    step = _step()
    step()
    for lengths in (torch.tensor([40, 3]), torch.tensor([0, 0]), 0):
        out, lse = step(cache_lengths=lengths, return_lse=True)
        expected, expected_lse = step(cache_lengths=lengths, return_lse=True, backend="reference")
        assert_same(out, expected)
        assert_same(lse, expected_lse)
    assert general() == 7


def test_other_layouts_are_looked_at(general) -> None:
    q, cache = torch.randn(2, 1, 4, 16), torch.randn(2, 300, 2, 16)
    wider = torch.randn(2, 300, 2, 32)[..., :16].copy_(cache)
    actual = [flashtile.attention_with_kv_cache(q, keys, keys + 0) for keys in (cache, cache, wider, cache)]
    assert general() == 3
    assert torch.equal(actual[0], actual[1])
    assert_same(actual[0], actual[2])
    assert torch.equal(actual[0], actual[3])
    with pytest.raises(ValueError, match="requires_grad"):
        flashtile.attention_with_kv_cache(q.requires_grad_(), cache, cache)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_nan_and_inf(value: float, dtype: torch.dtype) -> None:
    q, k_cache = torch.randn(1, 1, 2, 16, dtype=dtype), torch.randn(1, 30, 2, 16, dtype=dtype)
    v_cache = k_cache.clone()
    flashtile.attention_with_kv_cache(q, k_cache, v_cache)
    k_cache[0, 4, 1, 3] = value
    actual = flashtile.attention_with_kv_cache(q, k_cache, v_cache)
    expected = flashtile.attention_with_kv_cache(q, k_cache, v_cache, backend="reference")
    assert torch.equal(actual.isfinite(), expected.isfinite())
