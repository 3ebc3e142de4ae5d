"""Serving: work and bytes counted by hand, wrong results found, in pages, behind new rows, in 8 bits and mixed too."""

import json
from dataclasses import replace

import pytest
import torch

import flashtile
from flashtile.bench import runner
from flashtile.bench.base import Implementation
from flashtile.bench.record import ratios_to_best, ratios_to_peer
from flashtile.bench.registry import BENCHMARKS, case_name, find_case
from flashtile.bench.report import mean_tables, speed_tables
from flashtile.bench.serving import IMPLEMENTATIONS, ServingProblem, gather_rows, make_inputs
from flashtile.bench.serving_cases import ServingCase, tables
from support.running.command_line import invoke
from support.running.each_case import each_case

pytestmark = pytest.mark.usefixtures("short_measuring")

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
CASE = ServingCase(3, 48, 4, 2, 16, 24, dtype="fp32")
CASES = {
    "plain": CASE,
    "paged": replace(CASE, page=16),
    "append": replace(CASE, append=True),
    "queries": replace(CASE, Sq=3, append=True, page=16),
    "bf16": replace(CASE, dtype="bf16"),
    "mixed": replace(CASE, Sq=7, page=16, queries=(7, 1, 3), lengths=(9, 48, 20)),
    "factors-head": replace(CASE, page=16, factors="head"),
    "factors-page": replace(CASE, page=16, factors="page", Sq=4),
    "shared": replace(CASE, page=16, shared_rows=32),
    "tree": replace(CASE, Sq=6, tree=True),
    "latent": replace(CASE, H=8, Hkv=1, D=24, Dv=16, latent=True, page=16),
}
BY_NAME = {each.name: each for each in IMPLEMENTATIONS}
needs_no_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="measures what a machine without a GPU would")


def run(case, *chosen):
    return runner.run_case(case, chosen, CPU, ServingProblem)


def test_bytes_are_those_of_the_cache_and_work_that_of_visible_pairs():
    assert CASE.bytes("fwd") == 3 * 48 * 2 * (16 + 24) * 4
    assert ServingCase(8, 32768).bytes("fwd") == 2**30
    assert CASES["shared"].bytes("fwd") == (32 + 3 * 16) * 2 * (16 + 24) * 4
    assert CASES["latent"].bytes("fwd") == 3 * 48 * 24 * 4 and CASES["factors-head"].bytes("fwd") == 3 * 48 * 2 * 40
    pairs = sum(range(3, 10)) + 48 + (18 + 19 + 20)
    assert CASES["mixed"].flops("fwd") == 2 * 4 * pairs * (16 + 24)
    assert ServingCase(8, 4096).unit("fwd") == "GB/s" and ServingCase(4, 4096, Sq=512).unit("fwd") == "TFLOP/s"


def test_names_and_records_tell_cases_apart():
    assert CASES["queries"].name == "q3-b3-s48-h4:2-d16:24-page16-append-fp32"
    assert CASES["mixed"].name == "mixed11-b3-s48-h4:2-d16:24-page16-fp32"
    assert set(CASE.record()) == {"B", "S", "H", "Hkv", "D", "Dv", "Sq", "page", "append", "dtype"}
    for case in CASES.values():
        assert find_case({"op": "serving", "case": json.loads(json.dumps(case.record()))}) == case
    assert find_case({"op": "decode", "case": CASE.record()}) == CASE, "records of before"


@each_case("device", [CPU, CUDA])
def test_cases_differ_and_fit(device):
    cases = BENCHMARKS["serving"].cases({}, device)
    assert len({case.name for case in cases}) == len(cases) == sum(map(len, tables(device).values()))
    assert all(case.bytes("fwd") <= 40e9 for case in cases)
    assert {case.name for case in BENCHMARKS["serving"].cases({"quick": True}, device)} == {
        of[0].name for of in tables(device).values()
    }


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_right_results_get_a_speed(case):
    special = case.append or case.tree or case.shared_rows or case.latent
    one_query = not (special or case.queries or case.factors) and case.Sq == 1
    case = replace(case, Dv=case.D) if one_query else case  # as sdpa's kernel takes them
    rows = {row["impl"]: row for row in run(case, *(each for each in IMPLEMENTATIONS if "cpu" in each.devices))}
    row = rows["flashtile-cpu"]
    assert all(row["ms"] is not None for row in rows.values()), rows
    assert (row["op"], row["phase"], row["case"]) == ("serving", "fwd", case.record())
    assert row["gbps"] == pytest.approx(case.bytes("fwd") / row["ms"] / 1e6)
    assert row["tflops"] == pytest.approx(case.flops("fwd") / row["ms"] / 1e9)
    assert case_name(row) == case.name
    expected = {
        "flashtile-unshared": case.shared_rows, "dense": not special, "sdpa-flash": one_query and case.page is None,
        "matmul": one_query and case.page is None, "sdpa-gathered": one_query and case.page is not None,
    }  # fmt: skip
    assert rows.keys() == {"flashtile-cpu", "copy", *(name for name, there in expected.items() if there)}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_a_result_of_other_rows_gets_no_speed(case):
    def shorter(case, inputs):
        tensors = inputs.q, inputs.k_cache, inputs.v_cache, inputs.k, inputs.v
        lengths = inputs.lengths - 1
        return lambda: flashtile.attention_with_kv_cache(*tensors, cache_lengths=lengths, **inputs.options)

    (row,) = run(case, Implementation("changed", ("cpu",), shorter))
    assert row["ms"] is None and row["why"].startswith("wrong result: out: ")


def test_a_wrong_last_head_is_found():
    def spoiled(case, inputs):
        factors = torch.ones(case.H, 1)
        factors[-1] = 1.1
        tensors = inputs.q, inputs.k_cache, inputs.v_cache
        return lambda: factors * flashtile.attention_with_kv_cache(*tensors, cache_lengths=inputs.lengths)

    (row,) = run(CASE, Implementation("changed", ("cpu",), spoiled))
    assert row["ms"] is None and "wrong result" in row["why"]


def test_rows_are_gathered_from_pages_in_no_order():
    inputs = make_inputs(CASES["paged"], CPU)
    table = inputs.block_table
    assert table.unique().numel() == 9 and not torch.equal(table, table.sort()[0])
    k, v = gather_rows(CASES["paged"], inputs, 1, slice(1, 2), torch.float64)
    assert k.shape == (48, 1, 16) and v.shape == (48, 1, 24)
    assert torch.equal(k[20, 0], inputs.k_cache[table[1, 1], 4, 1].double())
    shared = make_inputs(CASES["shared"], CPU).block_table
    assert torch.equal(shared[0, :2], shared[2, :2]) and shared.unique().numel() == 2 + 3


@needs_no_gpu
def test_a_record_has_yardsticks_that_are_no_peers(tmp_path):
    output = tmp_path / "record.json"
    result = invoke("bench", "serving", "--table", "chunks", "decode", "--quick", "--seconds", 0.001, "-o", output)
    assert result.exit_code == 0, result.output
    rows = json.loads(output.read_text())["rows"]
    assert {row["impl"] for row in rows} >= {"copy", "dense", "sdpa-flash"}
    assert len(ratios_to_peer(rows, "copy")) == 2 and {one["peer"] for one in ratios_to_best(rows)} & {"copy"} == set()
    assert {table.title for table in speed_tables(rows)} == {"Serving fwd: GB/s"}
    assert [table.title for table in mean_tables(rows)] == [
        f"Our speed over the peers': serving: {kind}" for kind in ("chunks of prompts", "decoding")
    ]


@pytest.mark.gpu
@pytest.mark.parametrize("case", [each[0] for each in tables(CUDA).values()], ids=list(tables(CUDA)))
def test_gpu_results_are_right(case):
    with runner.side_stream(CUDA):
        rows = runner.run_case(case, [BY_NAME["flashtile-auto"], BY_NAME["dense"]], CUDA, ServingProblem, 0.01)
    assert all(row["ms"] is not None for row in rows), rows
