"""The tables of cases and choosing from them."""

import pytest
import torch

from flashtile.bench.cases import Case
from flashtile.bench.tables import cases_of, cpu_cases, cuda_cases, select_cases, table_of, tables

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
    assert 0 < len(cases_of(device, ["all"], quick=True)) < len(cases_of(device, ["all"]))
    assert set(cases_of(device, ["all"], quick=True)) <= set(cases_of(device, ["all"]))


@pytest.mark.parametrize("device", [CPU, CUDA], ids=str)
def test_names_tell_cases_apart(device):
    names = [case.name for case in cases_of(device, ["all"])]
    assert len(set(names)) == len(names)


def test_grouped_table():
    cases = tables(CUDA)["grouped"]
    assert all((case.B, case.H, case.Hkv, case.D, case.Dv) == (2, 64, 8, 128, 128) for case in cases)
    assert {(c.causal, c.S) for c in cases} == {(c, 1024 * 2**n) for c in (False, True) for n in (1, 2, 3, 4, 5)}
    assert len(cases) == 10


def test_tables_of_one_length():
    mla, window = tables(CUDA)["mla"], tables(CUDA)["window"]
    assert {(c.B, c.S, c.H, c.Hkv, c.D, c.Dv, c.causal) for c in mla} == {
        (1, 8192, 128, 128, 192, 128, causal) for causal in (False, True)
    }
    assert window == [Case(1, 8192, 128, 128, 64, 64, causal=True, window=(127, 0))]
    assert window[0].visible_pairs() == 8192 * 128 - 127 * 128 / 2


def test_varlen_table_is_one_long_tailed_batch():
    cases = tables(CUDA)["varlen"]
    assert {(c.H, c.D, c.causal) for c in cases} == {(h, d, c) for h, d in ((32, 64), (16, 128)) for c in (False, True)}
    (lengths,) = {case.lengths for case in cases}
    assert sum(lengths) == 65536 and all(16 <= length <= 16384 for length in lengths)
    median = sorted(lengths)[len(lengths) // 2]
    assert max(lengths) > 8 * median > 4 * sum(lengths) / len(lengths)
    assert cases == tables(CUDA)["varlen"]


def test_table_of_a_case():
    assert all(table_of(case) == name for name, cases in tables(CUDA).items() for case in cases)
    assert table_of(cpu_cases()[-1]) == "default"


def test_tables_are_chosen_by_name():
    known = tables(CUDA)
    assert cases_of(CUDA) == known["default"] and cases_of(CPU, ["all"]) == cpu_cases()
    assert cases_of(CUDA, ["mla", "window", "mla"]) == known["mla"] + known["window"]
    assert len(cases_of(CUDA, ["all"])) == sum(map(len, known.values()))
    with pytest.raises(ValueError, match="--table: no grouped on cpu; there are: default, all"):
        cases_of(CPU, ["grouped"])


def test_select_cases_by_pattern_and_by_word():
    cases = cuda_cases()
    assert all(case.name.startswith("d64-causal") for case in select_cases(cases, ["d64-causal-*"]))
    assert {case.S for case in select_cases(cases, ["s2048"])} == {2048}
    assert select_cases(cases, []) == cases


def test_select_cases_names_what_there_is():
    with pytest.raises(ValueError, match="'d65' matches no case; there are: d64-full-s512-bf16"):
        select_cases(cuda_cases(), ["d65"])
