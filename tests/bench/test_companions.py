"""Companion operations: names, work counted by hand and formulas of cases, then measuring them on a CPU: what is right
gets a speed, what is wrong, missing or failing a reason."""

import functools
import sys
import types
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from flashtile.bench import companion_cases as ops
from flashtile.bench import companions, runner
from flashtile.bench.base import Bound, Implementation, Way, select_implementations
from flashtile.bench.companions import IMPLEMENTATIONS, CompanionProblem, Random, evaluate
from flashtile.bench.registry import BENCHMARKS
from flashtile.bench.start import UserError
from flashtile.testing import assert_same
from support.running.each_case import each_case

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
BY_NAME = {implementation.name: implementation for implementation in IMPLEMENTATIONS}
TINY = [
    ops.Copy("fp32", 4),
    ops.LayerNorm("bf16", 7, 33),
    ops.RMSNorm("fp32", 7, 33),
    ops.DropoutAddLayerNorm("fp32", 40, 65, 0.3),
    ops.DropoutAddRMSNorm("bf16", 7, 33),
    ops.Rotary("bf16", 2, 5, 3, 8),
    ops.CausalSoftmax("fp32", 2, 2, 9),
    ops.MaskedSoftmax("fp32", 2, 2, 9),
    ops.CrossEntropy("bf16", 8, 37),
    ops.LinearCrossEntropy("fp32", 8, 5, 37),
    ops.FusedDense("bf16", 8, 16, 24),
    ops.FusedMLP("fp32", 8, 16, 24, "gelu_tanh"),
    ops.FusedMLP("fp32", 8, 16, 24, "silu", gated=True),
]


@pytest.fixture(autouse=True)
def short_measuring(monkeypatch):
    monkeypatch.setitem(runner._SECONDS, "cpu", 0.0)
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="eager"))


def cases_named(device, op=(), quick=False):
    return BENCHMARKS["companions"].cases({"op": op, "quick": quick}, device)


ALL = [*cases_named(CPU), *cases_named(CUDA)]


@each_case(
    "case, forward, backward",
    [
        (ops.Copy("bf16", 3), 2 * 3 * 1024, None),
        (ops.LayerNorm("bf16", 5, 7), 2 * (2 * 35 + 14), 2 * (3 * 35 + 7 + 14)),
        (ops.RMSNorm("fp32", 5, 7), 4 * (2 * 35 + 7), 4 * (3 * 35 + 7 + 7)),
        (ops.DropoutAddLayerNorm("bf16", 5, 7, 0.5), 2 * (4 * 35 + 14), 2 * (5 * 35 + 7 + 14)),
        (ops.DropoutAddRMSNorm("bf16", 5, 7), 2 * (4 * 35 + 7), 2 * (4 * 35 + 7 + 7)),
        (ops.Rotary("bf16", 2, 3, 5, 8), 2 * (2 * 240 + 2 * 3 * 4), 2 * (2 * 240 + 2 * 3 * 4)),
        (ops.CausalSoftmax("bf16", 2, 3, 4), 2 * 6 * (10 + 16), 2 * 6 * (20 + 16)),
        (ops.MaskedSoftmax("bf16", 2, 3, 4), 2 * 6 * 32 + 2 * 16, 2 * 6 * 48),
        (ops.CrossEntropy("bf16", 3, 11), 2 * 33, 2 * 66),
    ],
)
def test_bytes_count_each_input_and_output_once(case, forward, backward):
    assert case.bytes("fwd") == forward
    if backward is not None:
        assert case.bytes("bwd") == backward


def test_work_of_forward_and_backward_together():
    assert ops.CrossEntropy("bf16", 3, 11).bytes("fwd+bwd") == 2 * 66
    plain, gated = ops.FusedMLP("bf16", 2, 3, 5, "gelu_tanh"), ops.FusedMLP("bf16", 2, 3, 5, "silu", gated=True)
    assert plain.bytes("fwd") == 2 * (6 + 6 + 15 + 15 + 5 + 3)
    assert plain.bytes("fwd+bwd") == 2 * (4 * 6 + 2 * (15 + 15 + 5 + 3))
    assert gated.bytes("fwd") == 2 * (6 + 6 + 30 + 15)
    assert plain.flops("fwd") == 2 * 2 * (3 * 5 + 5 * 3) and plain.flops("fwd+bwd") == 3 * plain.flops("fwd")
    linear = ops.LinearCrossEntropy("bf16", 3, 5, 7)
    assert linear.bytes("fwd+bwd") == 2 * 2 * (15 + 35) and linear.flops("fwd+bwd") == 3 * 2 * 3 * 5 * 7
    dense = ops.FusedDense("bf16", 3, 5, 7)
    assert dense.bytes("fwd") == 2 * (15 + 21 + 35 + 7) and dense.bytes("fwd+bwd") == 2 * dense.bytes("fwd")
    assert dense.flops("fwd") == 2 * 3 * 5 * 7 and dense.flops("fwd+bwd") == 3 * dense.flops("fwd")
    assert gated.flops("fwd") == 2 * 2 * (3 * 10 + 5 * 3)


def test_what_memory_bounds_has_no_flops():
    products = {case.op for case in ALL if case.flops(case.phases[0]) is not None}
    assert products == {"fused_dense", "fused_mlp", "linear_cross_entropy"}


def test_names_tell_cases_apart():
    assert ops.LayerNorm("bf16", 16384, 4096).name == "layer_norm-16384x4096-bf16"
    assert ops.Copy("bf16", 2048 * 1024).name == "copy-2048mib-bf16"


def test_choosing():
    for device in (CPU, CUDA):
        assert [case.op for case in cases_named(device, quick=True)] == list(ops.OPERATIONS)
        assert set(cases_named(device, quick=True)) <= set(cases_named(device))
    assert {case.op for case in cases_named(CPU, ["rotary", "copy"])} == {"rotary", "copy"}
    with pytest.raises(UserError, match="--op: no attention on cpu; there are: copy, layer_norm"):
        cases_named(CPU, ["attention"])
    with pytest.raises(UserError, match="--impl: no liger on cpu; there are: flashtile-cpu, eager, compile"):
        select_implementations(IMPLEMENTATIONS, ["liger"], CPU)
    assert [i.name for i in select_implementations(IMPLEMENTATIONS, [], CUDA)][-2:] == ["liger", "quack"]


def test_inputs_are_reproducible():
    case = ops.MaskedSoftmax("fp32", 1, 2, 8)
    first, second = (case.make_inputs(Random(CPU, torch.float32)) for _ in range(2))
    assert torch.equal(first.leaves["x"], second.leaves["x"]) and torch.equal(
        first.others["mask"], second.others["mask"]
    )
    assert not first.others["mask"].all(dim=-1).any()


@pytest.mark.parametrize("case", TINY, ids=lambda case: case.name)
def test_formula_is_the_same_by_rows(case, monkeypatch):
    inputs = case.make_inputs(Random(CPU, case.torch_dtype))
    whole = evaluate(case, inputs, inputs.others, torch.float64)
    rows = next(t.shape[0] for name, t in inputs.leaves.items() if name in case.rowwise)
    monkeypatch.setitem(companions._ELEMENTS, "cpu", case.width() * max(1, rows // 3))
    parts = evaluate(case, inputs, inputs.others, torch.float64)
    assert whole.keys() == parts.keys() >= set(case.outputs)
    for name, expected in whole.items():
        assert_same(parts[name], expected, name)


def run(case, *names):
    return runner.run_case(case, [BY_NAME[name] for name in names], CPU, CompanionProblem)


def run_with(case, way, monkeypatch):
    """The rows of one implementation, `eager`, that computes a case in another way."""
    monkeypatch.setattr(type(case), "eager", lambda self, others: way(self, others))
    return run(case, "eager")


@pytest.mark.parametrize("case", TINY, ids=lambda case: case.name)
def test_right_results_get_a_speed(case):
    names = [*([] if case.op == "copy" else ["flashtile-cpu"]), "eager", "compile"]
    rows = run(case, *names)
    assert [(row["impl"], row["phase"]) for row in rows] == [(name, phase) for name in names for phase in case.phases]
    for row in rows:
        assert row["op"] == case.op and row["case"] == case.record()
        assert row["ms"] is not None and row["ms"] > 0, row
        assert row["gbps"] == pytest.approx(case.bytes(row["phase"]) / row["ms"] / 1e6)
        flops = case.flops(row["phase"])
        assert row["tflops"] == (None if flops is None else pytest.approx(flops / row["ms"] / 1e9))
        assert row["timer"] in ("perf-counter", "thread-time")


def test_a_wrong_shape_is_told(monkeypatch):
    rows = run_with(
        ops.RMSNorm("fp32", 7, 33), lambda case, others: Way(lambda x, w: case.formula(x, w)[:3]), monkeypatch
    )
    assert rows[0]["why"].startswith("wrong result: out: shape") and rows[1]["ms"] is None


@pytest.mark.parametrize("kind", [ops.DropoutAddLayerNorm, ops.DropoutAddRMSNorm])
def test_dropout_bits_are_read_off_where_gradients_cancel(kind):
    """In 16 bits the gradients of the two outputs add up to exactly 0 for some elements that were kept."""
    case = kind("bf16", 256, 512, 0.1)
    inputs = case.make_inputs(Random(CPU, torch.bfloat16))
    bound = Bound(case.eager(inputs.others), inputs, tuple(case.outputs), peak="")
    results = bound.results("bwd")
    found = case.with_bits(results, inputs)["keep"]
    assert (found & (results["dx"] == 0)).any() and not found.all()
    assert CompanionProblem(case, CPU).judge(bound, "bwd", results).why is None


@pytest.mark.parametrize("dropped", [0.0, 0.6])
def test_dropout_with_another_probability_is_found(dropped, monkeypatch):
    eager = ops.DropoutAddLayerNorm.eager

    def other(case, others):
        return replace(eager(replace(case, dropout_p=dropped), others), own_bits=True)

    rows = run_with(ops.DropoutAddLayerNorm("fp32", 40, 65, 0.3), other, monkeypatch)
    assert all(row["ms"] is None and "of the elements, expected 0.7" in row["why"] for row in rows)


def test_dropout_that_does_not_scale_is_found(monkeypatch):
    def unscaled(case, others):
        def function(x, residual, *parameters):
            kept = torch.rand_like(x) >= case.dropout_p
            total = x * kept + residual
            return case.normalise(total, *parameters), total

        return Way(function, own_bits=True)

    rows = run_with(ops.DropoutAddLayerNorm("fp32", 40, 65, 0.3), unscaled, monkeypatch)
    assert all(row["ms"] is None and row["why"].startswith("wrong result: out") for row in rows)


@pytest.mark.parametrize("name", ["out", "dx", "dweight"])
def test_one_wrong_element_is_found_where_the_check_goes_by_pieces(name, monkeypatch):
    monkeypatch.setitem(companions._ELEMENTS, "cpu", 33 * 2)
    case = ops.RMSNorm("bf16", 7, 33)
    inputs = case.make_inputs(Random(CPU, torch.bfloat16))
    problem, bound = CompanionProblem(case, CPU), Bound(case.eager({}), inputs, tuple(case.outputs), peak="")
    results = evaluate(case, inputs, inputs.others)
    assert problem.judge(bound, "bwd", results).why is None
    results[name][(-1,) * results[name].dim()] *= 1.5
    verdict = problem.judge(bound, "bwd", results)
    assert verdict.why is not None and verdict.why.startswith(f"wrong result: {name}: largest error")


def test_own_layouts_are_changed_back(monkeypatch):
    """As a peer that rotates two halves of the heads, heads first and in place."""

    def halves(case, others):
        def function(*parts):
            for part in parts:
                with torch.no_grad():
                    part.copy_(case.formula(part, **others))
            return [_Rotated.apply(part, case, others).transpose(1, 2) for part in parts]

        return Way(
            function,
            own_leaves=lambda tensors: list(tensors[0].chunk(2, dim=2)),
            own_upstream=lambda tensors: [t.transpose(1, 2) for t in tensors[0].chunk(2, dim=2)],
            outputs=lambda tensors: [torch.cat([t.transpose(1, 2) for t in tensors], dim=2)],
            gradients=lambda tensors: [torch.cat(tensors, dim=2)],
        )

    rows = run_with(ops.Rotary("fp32", 2, 5, 4, 8), halves, monkeypatch)
    assert all(row["ms"] is not None for row in rows), rows


class _Rotated(torch.autograd.Function):
    """The gradient of a rotation that is already there."""

    @staticmethod
    def forward(ctx, x, case, others):
        ctx.turn = functools.partial(case.formula, **{**others, "sin": -others["sin"]})
        return x.clone()

    @staticmethod
    def backward(ctx, dout):
        return ctx.turn(dout), None, None


def test_missing_packages_and_failures_are_reasons(monkeypatch):
    case = ops.LayerNorm("fp32", 7, 33)
    missing = Implementation("liger", ("cpu",), package=("no_such_package", "no-such-package"))
    failing = Implementation("quack", ("cpu",))
    monkeypatch.setattr(ops.LayerNorm, "packages", {"liger": _unreachable, "quack": _unreachable})
    rows = runner.run_case(case, [missing, failing], CPU, CompanionProblem)
    assert [row["why"] for row in rows] == ["no-such-package is not installed"] * 2 + ["RuntimeError: unreachable"] * 2


def _unreachable(others):
    raise RuntimeError("unreachable\nand more")


def test_results_are_those_of_fresh_inputs():
    """A peer that writes over its input is judged by its first call, not by what it made of the input since."""
    case = ops.RMSNorm("fp32", 3, 8)
    inputs = case.make_inputs(Random(CPU, torch.float32))

    def overwrite(x, weight):
        out = case.formula(x, weight)
        x.data.zero_()
        return out

    bound = Bound(Way(overwrite), inputs, tuple(case.outputs), peak="")
    expected = case.formula(*inputs.leaves.values())
    for phase in ("fwd", "bwd", "fwd"):
        assert torch.equal(bound.results(phase)["out"], expected)


def test_liger_is_called_by_its_signatures(monkeypatch):
    """The signatures of version 0.8.5, over plain PyTorch."""

    def rope(q, k, cos, sin, position_ids=None, unsqueeze_dim=1, rotary_dim=None):
        return tuple(x * cos[:, None] + _rotate_half(x) * sin[:, None] for x in (q, k))

    def linear_loss(input, weight, target, bias=None, ce_weight=None, ignore_index=-100, accum_dtype=None):
        return F.cross_entropy(F.linear(input, weight), target)

    def add_rms(X, R, W, eps, offset=0.0, casting_mode="llama", in_place=True):
        return F.rms_norm(X + R, X.shape[-1:], W, eps), X + R

    _install(
        monkeypatch,
        "liger_kernel.transformers.functional",
        liger_layer_norm=lambda X, W, B, eps: F.layer_norm(X, X.shape[-1:], W, B, eps),
        liger_rms_norm=lambda X, W, eps, offset=0.0, casting_mode="llama", in_place=True: F.rms_norm(
            X, X.shape[-1:], W, eps
        ),
        liger_fused_add_rms_norm=add_rms,
        liger_rope=rope,
        liger_swiglu=lambda a, b: F.silu(a) * b,
        liger_cross_entropy=lambda input, target: _InForward.apply(input, target),
        liger_fused_linear_cross_entropy=linear_loss,
    )
    rows = _right_rows("liger", operations=7)
    forward, backward, both = (row for row in rows if row["op"] == "cross_entropy")
    assert backward["why"] == "computes its gradient in the forward"
    assert forward["ms"] is not None and both["ms"] is not None


def test_quack_is_called_by_its_signatures(monkeypatch):
    """The signatures of version 0.6.5, over plain PyTorch."""

    def rmsnorm(x, weight=None, bias=None, residual=None, out_dtype=None, residual_dtype=None, eps=1e-6, prenorm=False):
        total = x if residual is None else x + residual
        out = F.rms_norm(total, x.shape[-1:], weight, eps)
        return (out, total) if prenorm else out

    def layernorm_fwd(x, weight, bias=None, eps=1e-6, return_rstd=False, return_mean=False):
        assert weight.dtype is bias.dtype is torch.float32 and return_rstd and return_mean
        out, mean, rstd = torch.native_layer_norm(x, x.shape[-1:], weight, bias, eps)
        return out, rstd, mean

    def layernorm_bwd(x, weight, dout, rstd, mean, has_bias=True):
        bias = torch.empty_like(weight)
        given = (dout, x, x.shape[-1:], mean, rstd, weight, bias, [True] * 3)
        return torch.ops.aten.native_layer_norm_backward(*given)

    def rotary(x, cos, sin, interleaved=False, inplace=False, seqlen_offsets=None, cu_seqlens=None, max_seqlen=None):
        cos, sin = (torch.cat([table] * 2, dim=-1)[:, None] for table in (cos, sin))
        return x * cos + _rotate_half(x) * sin

    _install(monkeypatch, "quack.rmsnorm", rmsnorm=rmsnorm, layernorm_fwd=layernorm_fwd, layernorm_bwd=layernorm_bwd)

    def cross_entropy(x, target, lse_partial=None, weight=None, ignore_index=-100, reduction="mean"):
        return F.cross_entropy(x, target, reduction=reduction).float()

    def mlp_func(x, weight1, weight2, activation, bias1=None, bias2=None, fuse_grad_accum=False, tuned=True):
        inner = F.linear(x, weight1, bias1)
        hidden = F.gelu(inner, approximate="tanh")
        if activation == "swiglu":
            gate, up = inner[..., ::2], inner[..., 1::2]
            hidden = F.silu(gate) * up
        return F.linear(hidden, weight2, bias2)

    _install(monkeypatch, "quack.rotary", apply_rotary_emb=rotary)
    _install(monkeypatch, "quack.cross_entropy", cross_entropy=cross_entropy)

    def linear_loss(x, weight, target, chunk_size=4096, ignore_index=-100, reduction="mean", tuned=True):
        return F.cross_entropy(F.linear(x, weight), target, reduction=reduction)

    def linear_func(x, weight, bias=None, fuse_grad_accum=False, tuned=True):
        return F.linear(x, weight, bias)

    _install(monkeypatch, "quack.linear", linear_func=linear_func)
    _install(monkeypatch, "quack.mlp", mlp_func=mlp_func)
    _install(monkeypatch, "quack.linear_cross_entropy", chunked_linear_cross_entropy=linear_loss)
    _right_rows("quack", operations=8)


class _InForward(torch.autograd.Function):
    """The gradient is made in the forward, in the place of the logits, where they want one."""

    @staticmethod
    def forward(ctx, logits, labels):
        loss = F.cross_entropy(logits, labels)
        if logits.requires_grad:
            softmax = logits.double().softmax(-1)
            softmax[torch.arange(len(labels)), labels] -= 1
            logits.data.copy_(softmax / len(labels))
            ctx.save_for_backward(logits.detach())
        return loss

    @staticmethod
    def backward(ctx, dloss):
        return ctx.saved_tensors[0] * dloss, None


def _install(monkeypatch, module, **functions):
    parts = module.split(".")
    for end in range(1, len(parts) + 1):
        name = ".".join(parts[:end])
        monkeypatch.setitem(sys.modules, name, sys.modules.get(name, types.ModuleType(name)))
    for name, function in functions.items():
        monkeypatch.setattr(sys.modules[module], name, function, raising=False)


def _right_rows(peer, operations):
    """The rows of a peer in all cases of the operations that it has, and how many these must be."""
    rows = []
    for case in TINY:
        case = replace(case, dtype="fp32", **({"H": 4} if isinstance(case, ops.Rotary) else {}))
        rows += runner.run_case(case, [Implementation(peer, ("cpu",))], CPU, CompanionProblem)
    wrong = [row for row in rows if row["ms"] is None and row["why"] != "computes its gradient in the forward"]
    assert len({row["op"] for row in rows}) == operations and not wrong, wrong
    return rows


def _rotate_half(x):
    first, second = x.chunk(2, dim=-1)
    return torch.cat([-second, first], dim=-1)
