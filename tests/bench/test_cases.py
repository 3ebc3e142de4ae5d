"""The benchmark's cases: the tables, their names, and their work."""

import pytest
import torch

from flashtile.bench.cases import Case, cpu_cases, cuda_cases, default_cases, make_inputs, select_cases

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


def test_cuda_table_holds_16384_tokens_of_width_2048():
    cases = cuda_cases()
    assert all(case.B * case.S == 16384 and case.H * case.D == 2048 and case.dtype == "bf16" for case in cases)
    rows = {(case.D, case.causal, case.S) for case in cases}
    expected = {(d, c, s) for d in (64, 128) for c in (False, True) for s in (512, 1024, 2048, 4096, 8192, 16384)}
    expected |= {(256, c, s) for c in (False, True) for s in (2048, 8192)}
    assert rows == expected and len(cases) == len(expected)


def test_cpu_table_has_both_dtypes_a_window_and_dropout():
    cases = cpu_cases()
    assert {case.dtype for case in cases} == {"fp32", "bf16"}
    assert any(case.window for case in cases) and any(case.dropout_p for case in cases)


@pytest.mark.parametrize("device", [CPU, CUDA], ids=str)
def test_quick_is_a_part_of_the_table(device):
    assert 0 < len(default_cases(device, quick=True)) < len(default_cases(device))
    assert set(default_cases(device, quick=True)) <= set(default_cases(device))


@pytest.mark.parametrize("device", [CPU, CUDA], ids=str)
def test_names_tell_cases_apart(device):
    names = [case.name for case in default_cases(device)]
    assert len(set(names)) == len(names)


def test_flops_follow_the_convention():
    full = Case(2, 512, 4, 4, 64, 64)
    causal = Case(2, 512, 4, 4, 64, 64, causal=True)
    assert full.flops("fwd") == 4 * 2 * 4 * 512**2 * 64
    assert causal.flops("fwd") == full.flops("fwd") / 2
    assert full.flops("bwd") == 2.5 * full.flops("fwd")
    assert Case(2, 512, 4, 4, 192, 128).flops("fwd") == 2 * 2 * 4 * 512**2 * (192 + 128)


@pytest.mark.parametrize("window", [(3, 0), (2, 5), (None, 1), (4, None)], ids=str)
@pytest.mark.parametrize("causal", [False, True])
def test_window_work_counts_visible_pairs(window, causal):
    case = Case(1, 16, 1, 1, 8, 8, causal=causal, window=window)
    left, right = window
    seen = sum(
        (left is None or j >= i - left) and (right is None or j <= i + right) and not (causal and j > i)
        for i in range(16)
        for j in range(16)
    )
    assert case.visible_pairs() == seen


def test_bytes_count_each_tensor_once():
    case = Case(2, 16, 4, 2, 8, 4, dtype="bf16")
    q, k, v, out = 2 * 16 * 4 * 8, 2 * 16 * 2 * 8, 2 * 16 * 2 * 4, 2 * 16 * 4 * 4
    assert case.bytes("fwd") == 2 * (q + k + v + out)
    assert case.bytes("bwd") == 2 * case.bytes("fwd")


def test_select_cases_by_pattern_and_by_word():
    cases = cuda_cases()
    assert all(case.name.startswith("d64-causal") for case in select_cases(cases, ["d64-causal-*"]))
    assert {case.S for case in select_cases(cases, ["s2048"])} == {2048}
    assert select_cases(cases, []) == cases


def test_select_cases_names_what_there_is():
    with pytest.raises(ValueError, match="'d65' matches no case; there are: d64-full-s512-bf16"):
        select_cases(cuda_cases(), ["d65"])


def test_inputs_have_the_shapes_and_are_reproducible():
    case = Case(2, 16, 4, 2, 8, 4, dropout_p=0.1, dtype="fp32")
    first, second = make_inputs(case, CPU), make_inputs(case, CPU)
    assert first.q.shape == (2, 16, 4, 8) and first.k.shape == (2, 16, 2, 8)
    assert first.v.shape == (2, 16, 2, 4) and first.dout.shape == (2, 16, 4, 4)
    assert torch.equal(first.q, second.q) and first.dropout_seed is not None
