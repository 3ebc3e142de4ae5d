"""The benchmarks on a GPU: kernels, graphs, memory; what is not installed says so, and nothing is wrong."""

import pytest
import torch

from flashtile.bench import companion_cases as ops
from flashtile.bench import implementations as attention
from flashtile.bench import runner
from flashtile.bench.base import half_dtype
from flashtile.bench.card import MACHINE, public
from flashtile.bench.cases import Case
from flashtile.bench.commands import measure
from flashtile.bench.companions import IMPLEMENTATIONS, CompanionProblem, Random, evaluate
from flashtile.bench.oracle import AttentionProblem
from flashtile.bench.report import verdict_table
from flashtile.bench.tables import card_cases
from flashtile.bench.training import IMPLEMENTATIONS as TRAININGS
from flashtile.bench.training import TrainCase, TrainProblem
from flashtile.testing import assert_same

pytestmark = [pytest.mark.gpu, pytest.mark.unpoisoned]

CUDA = torch.device("cuda")
CASES = [
    ops.Copy("bf16", 1024),
    ops.LayerNorm("bf16", 512, 1024),
    ops.RMSNorm("bf16", 512, 1024),
    ops.DropoutAddLayerNorm("bf16", 512, 1024, 0.1),
    ops.DropoutAddRMSNorm("bf16", 512, 1024),
    ops.Rotary("bf16", 2, 128, 8, 128),
    ops.CausalSoftmax("bf16", 2, 2, 512),
    ops.MaskedSoftmax("bf16", 2, 2, 512),
    ops.CrossEntropy("bf16", 256, 2048),
    ops.LinearCrossEntropy("bf16", 512, 256, 2048),
    ops.FusedDense("bf16", 512, 256, 1024),
    ops.FusedMLP("bf16", 512, 256, 1024, "gelu_tanh"),
    ops.FusedMLP("bf16", 512, 256, 1024, "silu", gated=True),
]

MASKED = [
    Case(2, 1024, 4, 2, 64, 64, mask="tiles128:0.3"),
    Case(1, 1024, 2, 2, 128, 128, causal=True, mask="documents200"),
    Case(1, 2048, 2, 2, 64, 64, causal=True, window=(127, 0)),
    Case(2, 512, 2, 2, 64, 64, causal=True, softcap=30.0),
    Case(2, 512, 4, 4, 64, 64, bias="1HSS"),
]


def run(case, implementations, problem):
    with runner.side_stream(CUDA):
        return runner.run_case(case, implementations, CUDA, problem, 0.01)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_ours_and_pytorchs_are_right(case):
    rows = run(case, [each for each in IMPLEMENTATIONS if each.name in ("flashtile-triton", "eager")], CompanionProblem)
    assert rows and all(row["ms"] is not None for row in rows), rows
    for row in rows:
        assert row["timer"] == "cuda-graph" or row["phase"] == "fwd+bwd"
        assert ("peak_mib" in row) == (row["phase"] == "fwd+bwd")


@pytest.mark.parametrize("case", [CASES[1], CASES[3], CASES[-1]], ids=lambda case: case.name)
def test_compiled_formulas_are_right(case):
    rows = run(case, [each for each in IMPLEMENTATIONS if each.name == "compile"], CompanionProblem)
    assert all(row["ms"] is not None for row in rows), rows


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_peers_are_right_or_say_why_not(case):
    """A peer may be missing, or fail with the versions of this machine; a wrong result is ours to look into."""
    for row in run(case, [each for each in IMPLEMENTATIONS if each.package is not None], CompanionProblem):
        assert row["ms"] is not None or (row["why"] and not row["why"].startswith("wrong result")), row


def test_peak_memory_holds_neither_inputs_nor_gradients():
    """Eager cross-entropy keeps the log-softmax, of the logits' size, and makes its gradient from nothing else."""
    case = ops.CrossEntropy("bf16", 4096, 8192)
    rows = run(case, [each for each in IMPLEMENTATIONS if each.name == "eager"], CompanionProblem)
    (peak,) = [row["peak_mib"] for row in rows if "peak_mib" in row]
    assert 64 <= peak < 2.5 * 64


def test_formula_is_that_of_a_cpu():
    case = ops.LayerNorm("fp32", 64, 128)
    inputs = case.make_inputs(Random(CUDA, torch.float32))
    found = evaluate(case, inputs, inputs.others, torch.float64)
    inputs.leaves = {name: leaf.cpu() for name, leaf in inputs.leaves.items()}
    inputs.upstream = [d.cpu() for d in inputs.upstream]
    for name, expected in evaluate(case, inputs, inputs.others, torch.float64).items():
        assert_same(found[name].cpu(), expected, name)


def attention_rows(case, *names):
    return run(case, [each for each in attention.IMPLEMENTATIONS if each.name in names], AttentionProblem)


@pytest.mark.parametrize("case", MASKED, ids=lambda case: case.name)
def test_masks_and_biases_are_right(case):
    rows = attention_rows(case, "flashtile-triton")
    assert len(rows) == 2 and all(row["ms"] is not None for row in rows), rows


@pytest.mark.parametrize("case", MASKED, ids=lambda case: case.name)
def test_flex_is_compiled_for_masks_and_biases(case):
    """A gradient of a bias that it sums in bfloat16 may be found wrong; nothing may fail."""
    forward, backward = attention_rows(case, "flex")
    assert forward["ms"] is not None, forward
    assert backward["ms"] is not None or "dbias: " in backward["why"], backward


def test_efficient_kernel_has_a_gradient_of_a_bias():
    rows = attention_rows(MASKED[-1], "sdpa-efficient")
    assert len(rows) == 2 and all(row["ms"] is not None or "dbias: " in row["why"] for row in rows), rows


@pytest.mark.hopper
@pytest.mark.parametrize("case", MASKED, ids=lambda case: case.name)
def test_hopper_serves_masks_and_biases(case):
    for row in attention_rows(case, "flashtile-hopper"):
        assert row["ms"] is not None, row


@pytest.mark.parametrize(
    "name", ["flashtile", "flashtile-fused-loss", "flashtile-compile", "transformers-sdpa", "plain"]
)
def test_training_is_right(name):
    chosen = [each for each in TRAININGS if each.name == name]
    for row in run(TrainCase("gpt2-tiny", 4, 256, "bf16"), chosen, TrainProblem):
        assert row["ms"] is not None or row["why"] == "transformers is not installed", row


def test_two_calls_of_the_card_table_are_measured():
    """Ours is right in both, and the record to hand in has what it must and nothing else."""
    names = [case.name for case in card_cases(half_dtype(CUDA))[:9:8]]
    options = {"table": ["card"], "cases": names, "seconds": 0.01, "impl": ["flashtile-auto", "sdpa-flash"]}
    record = public(measure("attention", options), [], [])
    ours = [row for row in record["rows"] if row["impl"] == "flashtile-auto"]
    assert len(ours) == 4 and all(row["ms"] for row in ours), ours
    assert set(record["machine"]) == set(MACHINE) and record["machine"]["gpu_memory_gib"] > 0
    assert len(verdict_table(record["rows"]).lines) == 4
