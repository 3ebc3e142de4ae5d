"""Steps of decoding: bytes counted by hand, wrong results found, in pages and behind new rows too."""

import json
from dataclasses import replace

import pytest
import torch

import flashtile
from command_line import invoke
from flashtile.bench import runner
from flashtile.bench.base import Implementation, select_implementations
from flashtile.bench.commands import as_arguments, measure, ours
from flashtile.bench.companion_cases import Copy
from flashtile.bench.decode import (
    IMPLEMENTATIONS,
    DecodeCase,
    DecodeProblem,
    decode_cases,
    make_inputs,
    problem_of,
    quick_cases,
)
from flashtile.bench.registry import case_name
from flashtile.bench.report import mean_tables, reasons, speed_tables
from flashtile.bench.start import ChoiceError

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
CASE = DecodeCase(3, 48, 4, 2, 16, 24, dtype="fp32")
CASES = {
    "plain": CASE,
    "paged": replace(CASE, page=16),
    "append": replace(CASE, append=True),
    "queries": replace(CASE, Sq=3, append=True, page=16),
    "bf16": replace(CASE, dtype="bf16"),
}
BY_NAME = {each.name: each for each in IMPLEMENTATIONS}
needs_no_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="measures what a machine without a GPU would")


@pytest.fixture(autouse=True)
def short_measuring(monkeypatch):
    monkeypatch.setitem(runner._SECONDS, "cpu", 0.0)
    monkeypatch.setattr(runner, "_LEAST_SAMPLES", 1)


def run(case, *chosen):
    return runner.run_case(case, chosen, CPU, problem_of)


def test_bytes_are_those_of_the_cache():
    assert CASE.bytes("fwd") == 3 * 48 * 2 * (16 + 24) * 4
    assert DecodeCase(8, 32768).bytes("fwd") == 2**30 and CASE.flops("fwd") is None


def test_names_tell_cases_apart():
    assert replace(CASE, page=16, append=True).name == "decode-b3-s48-h4:2-d16-v24-page16-append-fp32"


def test_cases_fit_and_have_whole_pages():
    cases = [case for case in decode_cases(CUDA) if isinstance(case, DecodeCase)]
    assert all(case.bytes("fwd") <= 60e9 and case.S % (case.page or 1) == 0 for case in cases)
    assert {case.B for case in cases} == {1, 8, 32, 128} and max(case.S for case in cases) == 131072
    assert {case.page for case in cases} == {None, 16, 64, 256}
    quick = quick_cases(decode_cases(CUDA))
    assert len(quick) == 4 and isinstance(quick[0], Copy) and quick[2].page and quick[3].append


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_right_results_get_a_speed(case):
    (row,) = run(case, BY_NAME["flashtile-cpu"])
    assert row["ms"] is not None, row
    assert (row["op"], row["phase"], row["case"]) == ("decode", "fwd", case.record())
    assert row["gbps"] == pytest.approx(case.bytes("fwd") / row["ms"] / 1e6) and row["tflops"] is None
    assert case_name(row) == case.name


def test_pytorchs_own_is_right_and_measured_on_a_cache_in_one_piece():
    case = replace(CASE, Dv=16)
    (row,) = run(case, BY_NAME["sdpa-flash"])
    assert row["ms"] is not None, row
    for other in (replace(case, page=16), replace(case, append=True), replace(case, Sq=2)):
        (row,) = run(other, BY_NAME["sdpa-flash"])
        assert row["ms"] is None and row["why"].startswith("measured ")


def changed(change):
    def build(case, inputs):
        return lambda: change(inputs)

    return Implementation("changed", ("cpu",), build)


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_a_result_of_other_rows_gets_no_speed(case):
    def shorter(inputs):
        appended = {"k": inputs.k, "v": inputs.v, "rotary_cos": inputs.cos, "rotary_sin": inputs.sin}
        return flashtile.attention_with_kv_cache(
            inputs.q, inputs.k_cache, inputs.v_cache, cache_lengths=inputs.lengths - 4, block_table=inputs.block_table,
            **appended,
        )  # fmt: skip

    (row,) = run(case, changed(shorter))
    assert row["ms"] is None and row["why"].startswith("wrong result: out: ")


def test_a_wrong_head_is_found():
    def swapped(inputs):
        out = flashtile.attention_with_kv_cache(inputs.q, inputs.k_cache, inputs.v_cache, cache_lengths=inputs.lengths)
        return out.flip(2)

    (row,) = run(CASE, changed(swapped))
    assert row["ms"] is None and "wrong result" in row["why"]


def test_pages_hold_what_the_reference_gathers():
    problem = DecodeProblem(CASES["paged"], CPU)
    inputs = make_inputs(CASES["paged"], CPU)
    assert inputs.block_table.unique().numel() == 9 and not torch.equal(
        inputs.block_table, inputs.block_table.sort()[0]
    )
    gathered = problem._rows_of_pairs(inputs.k_cache)
    assert gathered.shape == (6, 48, 1, 16)
    assert torch.equal(gathered[3, 20, 0], inputs.k_cache[inputs.block_table[1, 1], 4, 1])


@needs_no_gpu
def test_record_has_copies_beside_it(tmp_path):
    output = tmp_path / "record.json"
    result = invoke("bench", "decode", "--quick", "--seconds", 0.01, "--output", output)
    assert result.exit_code == 0, result.output
    rows = json.loads(output.read_text())["rows"]
    assert {row["op"] for row in rows} == {"copy", "decode"} and {row["impl"] for row in rows} >= {
        "eager",
        "sdpa-flash",
    }
    titles = {table.title: table for table in speed_tables(rows)}
    assert "flashtile-cpu / copy" in titles["Decoding fwd: GB/s"].headings
    assert [table.title for table in mean_tables(rows)] == ["Our speed over the peers': decode"]
    why = "measured on a cache in one piece", "measured on pages"
    assert all(any(words in line for words in why) for line in reasons(rows))


@pytest.mark.parametrize(
    "impl, case", [("matmul", replace(CASE, Dv=16)), ("sdpa-gathered", replace(CASES["paged"], Dv=16))]
)
def test_peers_on_a_cpu_are_right(impl, case):
    (row,) = run(case, BY_NAME[impl])
    assert row["ms"] is not None, row


@needs_no_gpu
def test_choices_are_checked():
    with pytest.raises(ChoiceError, match="--impl: no fast on cpu"):
        measure("decode", {"impl": ["fast"]})
    with pytest.raises(ChoiceError):
        measure("decode", {"cases": ["decode-b999*"]})


def test_arguments_and_our_implementations():
    assert ours("decode", CPU) == ["flashtile-cpu"] and ours("decode", CUDA) == ["flashtile-triton"]
    assert as_arguments("decode", {"impl": [], "quick": True}, CPU) == ["decode", "--impl", "flashtile-cpu", "--quick"]
    assert [each.name for each in select_implementations(IMPLEMENTATIONS, [], CUDA)][-1] == "fa4"


@pytest.mark.gpu
@pytest.mark.parametrize("change", [{}, {"page": 16}, {"append": True}], ids=str)
def test_gpu_results_are_right(change):
    case = DecodeCase(2, 4096, **change)
    chosen = [each for each in IMPLEMENTATIONS if each.name in ("flashtile-triton", "sdpa-flash")]
    with runner.side_stream(CUDA):
        rows = runner.run_case(case, chosen, CUDA, problem_of, 0.01)
    assert rows[0]["ms"] is not None, rows[0]
    assert rows[0]["timer"] == "cuda-graph"
