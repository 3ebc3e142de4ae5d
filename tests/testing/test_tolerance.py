"""The tolerance helper must fail on wrong results: one that passes everything would make every other test empty."""

import functools
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from flashtile import testing
from flashtile.testing import (
    AttentionCase,
    Inputs,
    Size,
    allowed_error,
    assert_close,
    assert_same,
    check,
    error,
    make_inputs,
    run,
    size,
)
from support.running.each_case import each_case

CASE = AttentionCase(seq_q=150, seq_k=150, heads=2, heads_kv=1, arguments={"causal": True})
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)

per_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype)[6:])


@functools.cache
def honest(dtype: torch.dtype, backend: str, *as_dtype: torch.dtype) -> dict[str, Tensor]:
    case = replace(CASE, dtype=dtype)
    return run(case, make_inputs(case), backend, *as_dtype)


@pytest.fixture
def tampered(monkeypatch):
    """Checks CASE against the oracle with one result of the backend under test changed."""

    def check_tampered(dtype: torch.dtype, name: str, change: Callable[[Tensor], Tensor]) -> None:
        def run_and_tamper(case: AttentionCase, inputs: Inputs, backend: str, *as_dtype: torch.dtype) -> dict:
            probing = inputs.v.shape[-1] == 1
            results = dict(run(case, inputs, backend, *as_dtype) if probing else honest(dtype, backend, *as_dtype))
            if backend == "cpu":
                results[name] = change(results[name].clone())
            return results

        monkeypatch.setattr(testing.cases, "run", run_and_tamper)
        check(replace(CASE, dtype=dtype), "cpu")

    return check_tampered


def one_element(value: float) -> Callable[[Tensor], Tensor]:
    def change(tensor: Tensor) -> Tensor:
        tensor.view(-1)[37] = value
        return tensor

    return change


def last_rows_too_large(tensor: Tensor) -> Tensor:
    tensor[:, -32:] *= 1.12
    return tensor


def row_shifted(tensor: Tensor) -> Tensor:
    return tensor.roll(1, dims=1)


@per_dtype
@each_case("name", ["out", "lse", "dq", "dk", "dv"])
def test_honest_results_pass(dtype, name, tampered):
    tampered(dtype, name, lambda tensor: tensor)


@per_dtype
@each_case("name", ["out", "lse", "dq", "dk", "dv"])
@each_case(
    "change", [lambda t: 3 * t, lambda t: -t, torch.zeros_like, lambda t: 1.05 * t, row_shifted, one_element(100.0)]
)
def test_wrong_results_fail(dtype, name, change, tampered):
    with pytest.raises(AssertionError, match=f"{name}: .*error"):
        tampered(dtype, name, change)


@each_case("dtype", [torch.float32, torch.float16, torch.float64])
@each_case("name", ["out", "dq", "dk", "dv"])
def test_one_percent_is_seen(dtype, name, tampered):
    # Not in bfloat16, where the eager computation is itself about half a percent off.
    with pytest.raises(AssertionError, match=f"{name}: .*error"):
        tampered(dtype, name, lambda tensor: 1.01 * tensor)


@each_case("name", ["out", "dq"])
def test_small_late_rows_are_seen(name, tampered):
    # In bfloat16 the late rows of a causal call are smaller than the rounding of the first.
    with pytest.raises(AssertionError, match=f"{name}: typical error"):
        tampered(torch.bfloat16, name, last_rows_too_large)


@per_dtype
@each_case("value", [float("nan"), float("inf"), -float("inf")])
@each_case("name", ["out", "lse", "dk"])
def test_one_bad_number_fails_and_is_located(dtype, value, name, tampered):
    with pytest.raises(AssertionError, match=rf"{name}: .* at \(0, "):
        tampered(dtype, name, one_element(value))


@each_case(
    "change, message",
    [
        (lambda t: t.double(), "dtype torch.float64, expected torch.float32"),
        (lambda t: t[:, :-1], r"shape \(2, 149, 2, 32\), expected \(2, 150, 2, 32\)"),
        (lambda t: t.flatten(2), "shape"),
        (lambda t: t[:1], "shape"),
    ],
)
def test_wrong_form_fails(change, message, tampered):
    with pytest.raises(AssertionError, match=message):
        tampered(torch.float32, "out", change)


EXACT = torch.tensor([1.0, -2.0, 3.0, float("inf"), -float("inf"), float("nan")], dtype=torch.float64)


def test_same_infinities_and_nan_pass():
    assert_close("x", EXACT.float(), EXACT, EXACT.float())


@each_case(
    "index, value",
    [(3, -float("inf")), (3, 7.0), (3, float("nan")), (4, 0.0), (5, 0.0), (5, float("inf")), (0, float("inf"))],
)
def test_different_infinities_and_nan_fail(index, value):
    actual = EXACT.float()
    actual[index] = value
    with pytest.raises(AssertionError, match=rf"x: .* at \({index},\)"):
        assert_close("x", actual, EXACT, EXACT.float())


@each_case("value", [float("inf"), float("nan")])
def test_eager_overflow_does_not_allow_everything(value):
    oracle = torch.ones(3, dtype=torch.float64)
    eager = torch.tensor([1.0, value, 1.0], dtype=torch.float16)
    with pytest.raises(AssertionError, match="eager computation overflows"):
        assert_close("x", torch.full((3,), 5.0, dtype=torch.float16), oracle, eager)


def test_band_around_an_exact_eager_result():
    oracle = torch.ones(1000, dtype=torch.float64)
    step = torch.finfo(torch.bfloat16).eps
    one_off, all_off, far_off = oracle.clone(), oracle + 2 * step, oracle.clone()
    one_off[5] += 3 * step
    far_off[5] += 6 * step
    assert_close("x", one_off.bfloat16(), oracle, oracle.bfloat16())
    for wrong, norm in ((all_off, "typical"), (far_off, "largest")):
        with pytest.raises(AssertionError, match=norm):
            assert_close("x", wrong.bfloat16(), oracle, oracle.bfloat16())


def test_twice_the_eager_error_is_allowed_and_not_three_times():
    oracle = torch.linspace(-1, 1, 100, dtype=torch.float64)
    wrong = torch.full_like(oracle, 1e-3)
    assert_close("x", (oracle + 1.9 * wrong).float(), oracle, (oracle - wrong).float())
    with pytest.raises(AssertionError, match=r"allowed 2\.0"):
        assert_close("x", (oracle + 3 * wrong).float(), oracle, (oracle - wrong).float())


def test_numbers_that_cancelled_widen_the_band():
    oracle = torch.zeros(4, dtype=torch.float64)
    rounding = torch.full((4,), 1e-6)
    assert_close("x", rounding, oracle, oracle.float(), cancelled=Size(1, 1))
    with pytest.raises(AssertionError, match="error"):
        assert_close("x", rounding, oracle, oracle.float())


@each_case("dtype, ulps", [(torch.float64, 64), (torch.float32, 16), (torch.bfloat16, 4)])
def test_two_computations_may_differ_by_the_band(dtype, ulps):
    expected = torch.ones(1000, dtype=dtype)
    step = ulps * torch.finfo(dtype).eps
    near, far = expected.clone(), expected.clone()
    near[5] += step
    far[5] += 2 * step
    assert_same({"x": (near, None)}, {"x": (expected, None)})
    with pytest.raises(AssertionError, match=r"y\['x'\]\[0\]: largest error"):
        assert_same({"x": (far, None)}, {"x": (expected, None)}, "y")
    assert_same(far, expected, cancelled=Size(1, 1))


@each_case(
    "actual, expected, message",
    [
        (torch.ones(2), torch.ones(2, dtype=torch.float64), "dtype torch.float32, expected torch.float64"),
        (torch.ones(2), torch.ones(3), "shape"),
        (torch.ones(2), torch.ones(1), "shape"),
        (torch.tensor([1, 2]), torch.tensor([1, 3]), "expected tensor"),
        (torch.tensor([1, 2]), torch.tensor([1, 2], dtype=torch.int32), "dtype"),
        (torch.ones(2), None, "expected None"),
        ((torch.ones(2),), (), "1 items, expected 0"),
        ({"a": 1}, {"b": 1}, "keys"),
        (torch.tensor([1.0, torch.nan]), torch.ones(2), "NaN at"),
        (torch.tensor([1.0, torch.inf]), torch.ones(2), "inf at"),
    ],
)
def test_what_is_not_the_same(actual, expected, message):
    with pytest.raises(AssertionError, match=message):
        assert_same(actual, expected)


def test_error_and_allowed_error_by_hand():
    oracle = torch.tensor([4.0, float("inf"), -2.0], dtype=torch.float64)
    eager = torch.tensor([4.5, float("inf"), -2.0])
    assert error(eager, oracle) == 0.5
    assert allowed_error(eager, oracle, torch.float16) == 2 * 0.5 + 4 * 2**-10 * 4.0


@each_case("shape", [(0,), (2, 0, 3)])
def test_empty_tensors(shape):
    empty = torch.empty(shape)
    assert size(empty) == (0, 0)
    assert_close("x", empty, empty.double(), empty)


def test_size():
    assert size(torch.tensor([3.0, -4.0, float("nan"), float("inf")])) == (4.0, 12.5**0.5)


def test_inputs_are_the_same_for_a_case_and_seed():
    first, again, other = make_inputs(CASE), make_inputs(CASE), make_inputs(CASE, seed=1)
    assert torch.equal(first.q, again.q)
    assert torch.equal(first.dlse, again.dlse)
    assert not torch.equal(first.q, other.q)


def test_inputs_of_another_dtype_are_the_same_numbers_rounded():
    narrow = make_inputs(replace(CASE, dtype=torch.bfloat16))
    assert torch.equal(narrow.q, make_inputs(replace(CASE, dtype=torch.float64)).q.bfloat16())


def test_cases_have_names_that_tell_them_apart():
    packed = replace(CASE, lengths_q=(1, 2), lengths_k=(3, 4))
    cases = (CASE, replace(CASE, dtype=torch.float16), packed, replace(CASE, key_lengths=(1, 2)), AttentionCase())
    assert len({str(case) for case in cases}) == len(cases)
    assert str(packed).startswith("varlen[1, 2]x[3, 4]-h2:1-d32:32-float32-causalTrue")
