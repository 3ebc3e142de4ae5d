"""Cases of the companion operations: names, records, work counted by hand, formulas beside flashtile's reference."""

import pytest
import torch

from flashtile.bench import companions
from flashtile.bench.base import select_cases, select_implementations
from flashtile.bench.companion_cases import (
    OPERATIONS,
    CausalSoftmax,
    Copy,
    CrossEntropy,
    DropoutAddLayerNorm,
    DropoutAddRMSNorm,
    FusedDense,
    FusedMLP,
    LayerNorm,
    LinearCrossEntropy,
    MaskedSoftmax,
    RMSNorm,
    Rotary,
)
from flashtile.bench.companions import IMPLEMENTATIONS, Random, evaluate
from flashtile.bench.registry import BENCHMARKS
from flashtile.bench.start import UserError
from flashtile.testing import assert_same
from support.running.each_case import each_case

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


def cases_named(device, op=(), quick=False):
    return BENCHMARKS["companions"].cases({"op": op, "quick": quick}, device)


ALL = [*cases_named(CPU), *cases_named(CUDA)]


@each_case(
    "case, forward, backward",
    [
        (Copy("bf16", 3), 2 * 3 * 1024, None),
        (LayerNorm("bf16", 5, 7), 2 * (2 * 35 + 14), 2 * (3 * 35 + 7 + 14)),
        (RMSNorm("fp32", 5, 7), 4 * (2 * 35 + 7), 4 * (3 * 35 + 7 + 7)),
        (DropoutAddLayerNorm("bf16", 5, 7, 0.5), 2 * (4 * 35 + 14), 2 * (5 * 35 + 7 + 14)),
        (DropoutAddRMSNorm("bf16", 5, 7), 2 * (4 * 35 + 7), 2 * (4 * 35 + 7 + 7)),
        (Rotary("bf16", 2, 3, 5, 8), 2 * (2 * 240 + 2 * 3 * 4), 2 * (2 * 240 + 2 * 3 * 4)),
        (CausalSoftmax("bf16", 2, 3, 4), 2 * 6 * (10 + 16), 2 * 6 * (20 + 16)),
        (MaskedSoftmax("bf16", 2, 3, 4), 2 * 6 * 32 + 2 * 16, 2 * 6 * 48),
        (CrossEntropy("bf16", 3, 11), 2 * 33, 2 * 66),
    ],
)
def test_bytes_count_each_input_and_output_once(case, forward, backward):
    assert case.bytes("fwd") == forward
    if backward is not None:
        assert case.bytes("bwd") == backward


def test_work_of_forward_and_backward_together():
    assert CrossEntropy("bf16", 3, 11).bytes("fwd+bwd") == 2 * 66
    plain, gated = FusedMLP("bf16", 2, 3, 5, "gelu_tanh"), FusedMLP("bf16", 2, 3, 5, "silu", gated=True)
    assert plain.bytes("fwd") == 2 * (6 + 6 + 15 + 15 + 5 + 3)
    assert plain.bytes("fwd+bwd") == 2 * (4 * 6 + 2 * (15 + 15 + 5 + 3))
    assert gated.bytes("fwd") == 2 * (6 + 6 + 30 + 15)
    assert plain.flops("fwd") == 2 * 2 * (3 * 5 + 5 * 3) and plain.flops("fwd+bwd") == 3 * plain.flops("fwd")
    linear = LinearCrossEntropy("bf16", 3, 5, 7)
    assert linear.bytes("fwd+bwd") == 2 * 2 * (15 + 35) and linear.flops("fwd+bwd") == 3 * 2 * 3 * 5 * 7
    dense = FusedDense("bf16", 3, 5, 7)
    assert dense.bytes("fwd") == 2 * (15 + 21 + 35 + 7) and dense.bytes("fwd+bwd") == 2 * dense.bytes("fwd")
    assert dense.flops("fwd") == 2 * 3 * 5 * 7 and dense.flops("fwd+bwd") == 3 * dense.flops("fwd")
    assert gated.flops("fwd") == 2 * 2 * (3 * 10 + 5 * 3)


def test_what_memory_bounds_has_no_flops():
    products = {case.op for case in ALL if case.flops(case.phases[0]) is not None}
    assert products == {"fused_dense", "fused_mlp", "linear_cross_entropy"}


def test_names_tell_cases_apart():
    assert LayerNorm("bf16", 16384, 4096).name == "layer_norm-16384x4096-bf16"
    assert Copy("bf16", 2048 * 1024).name == "copy-2048mib-bf16"


def test_every_operation_has_cases_everywhere():
    for device in (CPU, CUDA):
        assert {case.op for case in cases_named(device)} == set(OPERATIONS)


def test_choosing():
    assert {case.op for case in cases_named(CPU, ["rotary", "copy"])} == {"rotary", "copy"}
    assert [case.name for case in select_cases(cases_named(CUDA), ["rms_norm-*4096*"])] == ["rms_norm-16384x4096-bf16"]
    with pytest.raises(UserError, match="--op: no attention on cpu; there are: copy, layer_norm"):
        cases_named(CPU, ["attention"])
    with pytest.raises(UserError, match="--impl: no liger on cpu; there are: flashtile-cpu, eager, compile"):
        select_implementations(IMPLEMENTATIONS, ["liger"], CPU)
    assert [i.name for i in select_implementations(IMPLEMENTATIONS, [], CUDA)][-2:] == ["liger", "quack"]


def test_inputs_are_reproducible():
    case = MaskedSoftmax("fp32", 1, 2, 8)
    first, second = (case.make_inputs(Random(CPU, torch.float32)) for _ in range(2))
    assert torch.equal(first.leaves["x"], second.leaves["x"]) and torch.equal(
        first.others["mask"], second.others["mask"]
    )
    assert not first.others["mask"].all(dim=-1).any()


@pytest.mark.parametrize("case", cases_named(CPU), ids=lambda case: case.name)
def test_formula_is_the_same_by_rows(case, monkeypatch):
    inputs = case.make_inputs(Random(CPU, case.torch_dtype))
    whole = evaluate(case, inputs, inputs.others, torch.float64)
    rows = next(t.shape[0] for name, t in inputs.leaves.items() if name in case.rowwise)
    monkeypatch.setitem(companions._ELEMENTS, "cpu", case.width() * max(1, rows // 3))
    parts = evaluate(case, inputs, inputs.others, torch.float64)
    assert whole.keys() == parts.keys() >= set(case.outputs)
    for name, expected in whole.items():
        assert_same(parts[name], expected, name)


def test_quick_is_the_first_case_of_each_operation():
    few = cases_named(CUDA, quick=True)
    assert [case.op for case in few] == list(OPERATIONS) and few[0] == cases_named(CUDA)[0]
    assert cases_named(CUDA, ["cross_entropy"], quick=True) == cases_named(CUDA, ["cross_entropy"])[:1]
