"""The memory beside inputs and results."""

import pytest
import torch

from flashtile.bench.cases import Case, make_inputs
from flashtile.bench.implementations import IMPLEMENTATIONS
from flashtile.bench.oracle import Bound
from flashtile.bench.timing import peak_facts

CASE = Case(1, 1024, 4, 4, 64, 64, dtype="fp16")


def facts(impl, device, phase):
    implementation = next(each for each in IMPLEMENTATIONS if each.name == impl)
    with implementation.context():
        return Bound(implementation, CASE, make_inputs(CASE, torch.device(device))).facts(phase)


def test_nothing_is_told_of_a_cpu():
    assert peak_facts(lambda: [torch.ones(3)], [torch.ones(3)]) == {}
    assert facts("flashtile-cpu", "cpu", "bwd") == {}


@pytest.mark.gpu
def test_what_is_neither_input_nor_result_counts():
    mib = 2**20
    kept = torch.zeros(mib, device="cuda", dtype=torch.uint8)

    def call():
        scratch = torch.empty(8 * mib, device="cuda", dtype=torch.uint8)
        result = torch.empty(2 * mib, device="cuda", dtype=torch.uint8)
        return [result, kept.view(2, -1), scratch[:0].clone()]

    assert peak_facts(call, [kept]) == {"peak_mib": 8.0}


@pytest.mark.gpu
def test_attention_takes_less_than_its_matrix_of_scores():
    matrix = 4 * 1024 * 1024 * 2 / 2**20
    ours = facts("flashtile-triton", "cuda", "bwd")["peak_mib"]
    plain = facts("sdpa-math", "cuda", "bwd")["peak_mib"]
    assert ours < matrix < plain
    assert facts("flashtile-triton", "cuda", "fwd") == {}
