"""The last linear layer with its cross-entropy, in chunks: against the fp64 oracle, and how it meets PyTorch."""

import re
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import gradcheck, gradgradcheck
from torch.nn import functional as F

import flashtile
from flashtile.ops.cross_entropy import linear
from flashtile.testing import assert_close, assert_same
from support.running.each_case import each_case


@dataclass(frozen=True)
class LinearCase:
    """One call of `tokens` tokens, cut into chunks of `chunk` of them."""

    tokens: tuple[int, ...] = (3, 11)
    features: int = 24
    columns: int = 131
    chunk: int = 8
    dtype: torch.dtype = torch.float32
    bias: bool = True
    label_smoothing: float = 0.0
    logit_scale: float = 1.0
    lse_square_scale: float = 0.0
    reduction: str = "mean"
    softcap: float | None = None
    weighted: bool = False

    def options(self, dtype: torch.dtype, device: str) -> dict[str, Any]:
        names = ("label_smoothing", "logit_scale", "lse_square_scale", "reduction", "softcap")
        weights = torch.rand(self.columns, generator=torch.Generator().manual_seed(3)).to(device)
        weights = weights.double() if dtype is torch.float64 else weights
        return {name: getattr(self, name) for name in names} | {"class_weights": weights if self.weighted else None}


_BASE = LinearCase()
CASES = {
    "mean": _BASE,
    "sum": replace(_BASE, reduction="sum", bias=False),
    "none": replace(_BASE, reduction="none"),
    "one_chunk": replace(_BASE, chunk=64),
    "everything": replace(_BASE, label_smoothing=0.1, logit_scale=0.7, lse_square_scale=0.01),
    "everything_none": replace(
        _BASE, label_smoothing=0.1, logit_scale=0.7, lse_square_scale=0.01, reduction="none", bias=False
    ),
    "capped": replace(_BASE, softcap=2.0, logit_scale=0.7),
    "weighted": replace(_BASE, weighted=True, label_smoothing=0.1),
    "weighted_capped_none": replace(_BASE, weighted=True, softcap=2.0, label_smoothing=0.1, reduction="none"),
    "weighted_fp16": replace(_BASE, weighted=True, softcap=2.0, dtype=torch.float16),
    "fp16": replace(_BASE, dtype=torch.float16),
    "fp16_sum": replace(_BASE, dtype=torch.float16, reduction="sum"),
    "fp16_none": replace(_BASE, dtype=torch.float16, reduction="none"),
    "no_tokens": replace(_BASE, tokens=(0,), reduction="sum"),
    "no_tokens_fp16": replace(_BASE, tokens=(0,), reduction="sum", dtype=torch.float16),
    "one_token": replace(_BASE, tokens=(1,)),
}
BF16_CASES = {
    "bf16": replace(_BASE, dtype=torch.bfloat16),
    "bf16_eight_chunks": replace(_BASE, dtype=torch.bfloat16, tokens=(1024,), chunk=128),
    "bf16_many_chunks": replace(_BASE, dtype=torch.bfloat16, tokens=(1500,), chunk=128),
    "bf16_none": replace(_BASE, dtype=torch.bfloat16, reduction="none", tokens=(300,), chunk=128),
}


def make_operands(case: LinearCase, dtype: torch.dtype, device: str) -> tuple[list[Tensor], Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = [(*case.tokens, case.features), (case.columns, case.features), *([(case.columns,)] if case.bias else [])]
    tensors = [
        torch.randn(shape, generator=generator, dtype=torch.float64).to(case.dtype).to(dtype).to(device)
        for shape in shapes
    ]
    labels = torch.randint(case.columns, case.tokens, generator=generator)
    labels.view(-1)[2::5] = -100
    return [t.requires_grad_() for t in tensors], labels.to(device)


def run(case: LinearCase, backend: str, dtype: torch.dtype | None, device: str) -> dict[str, Tensor]:
    (x, weight, *bias), labels = make_operands(case, dtype or case.dtype, device)
    loss, z_loss = flashtile.linear_cross_entropy(
        x, weight, labels, *bias, **case.options(x.dtype, device), return_z_loss=True, backend=backend
    )
    assert not z_loss.requires_grad
    dloss = torch.randn(loss.shape, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    grads = torch.autograd.grad(loss, (x, weight, *bias), dloss.to(loss.dtype).to(device))
    return {"loss": loss.detach(), "z_loss": z_loss} | dict(zip(("dx", "dweight", "dbias"), grads))


def check(case: LinearCase, backend: str, monkeypatch: pytest.MonkeyPatch, device: str = "cpu") -> None:
    """Asserts that a backend's forward and backward of a case agree with the fp64 oracle."""
    padded = -(-case.columns // 64) * 64
    monkeypatch.setitem(linear.CHUNK_BYTES, device, case.chunk * padded * case.dtype.itemsize)
    actual = run(case, backend, None, device)
    oracle = run(case, "reference", torch.float64, device)
    eager = run(case, "reference", None, device)
    for name, value in actual.items():
        assert_close(f"{case}: {name}", value, oracle[name], eager[name])


def parameters(cases: dict[str, LinearCase]) -> list:
    return [pytest.param(case, id=name) for name, case in cases.items()]


@pytest.mark.parametrize("case", parameters(CASES | BF16_CASES))
def test_cpu(case, monkeypatch):
    check(case, "cpu", monkeypatch)


@pytest.mark.interpreter
@pytest.mark.parametrize("case", parameters(CASES))
def test_interpreted(case, monkeypatch):
    check(case, "triton", monkeypatch)


_LARGE = LinearCase((4000,), 512, 50257, 1024)


@pytest.mark.gpu
@pytest.mark.parametrize("case", parameters(CASES | BF16_CASES))
def test_gpu(case, monkeypatch):
    check(case, "triton", monkeypatch, "cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_gpu_large(dtype, reduction, monkeypatch):
    check(replace(_LARGE, dtype=dtype, reduction=reduction), "triton", monkeypatch, "cuda")


@pytest.mark.gpu
@pytest.mark.unpoisoned
def test_gpu_memory():
    """Above operands and gradients: one chunk of logits, of at most 2³⁰ bytes, and little else."""
    options: dict[str, Any] = {"dtype": torch.bfloat16, "device": "cuda"}
    x = torch.randn(16384, 4096, **options).requires_grad_()
    weight = (torch.randn(128256, 4096, **options) * 0.01).requires_grad_()
    labels = torch.randint(128256, (16384,), device="cuda")
    gradients = 2 * (x.numel() + weight.numel())
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    flashtile.linear_cross_entropy(x, weight, labels).backward()
    assert torch.cuda.max_memory_allocated() - before - gradients < 1.5e9


@pytest.mark.gpu
def test_gpu_does_not_synchronise():
    (x, weight, bias), labels = make_operands(_LARGE, torch.float32, "cuda")
    flashtile.linear_cross_entropy(x, weight, labels, bias).backward()
    torch.cuda.set_sync_debug_mode("error")
    try:
        flashtile.linear_cross_entropy(x, weight, labels, bias).backward()
        flashtile.linear_cross_entropy(x, weight, labels, bias, reduction="none").sum().backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")


# --- PyTorch --------------------------------------------------------------------------------------------------------

_REDUCTIONS = ("mean", "sum", "none")


def small(dtype: torch.dtype = torch.float64) -> tuple[list[Tensor], Tensor]:
    return make_operands(replace(_BASE, tokens=(5,), features=3, columns=6), dtype, "cpu")


@pytest.mark.parametrize("backend", ["reference", "cpu"])
@pytest.mark.parametrize("reduction", _REDUCTIONS)
def test_gradients(reduction, backend):
    operands, labels = small()
    options: dict[str, Any] = {"reduction": reduction, "label_smoothing": 0.1, "lse_square_scale": 0.2}
    options |= {"softcap": 2.0, "class_weights": torch.tensor([0.5, 1, 2, 0, 0.25, 3], dtype=torch.float64)}

    def function(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return flashtile.linear_cross_entropy(x, weight, labels, bias, backend=backend, **options)

    assert gradcheck(function, operands) and gradgradcheck(function, operands)


@pytest.mark.parametrize("wanted", [(0,), (1,), (2,), (0, 2)], ids=str)
def test_only_what_is_asked_for(wanted, monkeypatch):
    operands, labels = small()
    expected = torch.autograd.grad(flashtile.linear_cross_entropy(*operands[:2], labels, operands[2]), operands)
    made: list[Any] = []
    run = linear.forward
    monkeypatch.setattr(linear, "forward", lambda *arguments: made.append(run(*arguments)) or made[-1])
    asked = [t if place in wanted else t.detach() for place, t in enumerate(operands)]
    loss = flashtile.linear_cross_entropy(asked[0], asked[1], labels, asked[2])
    assert [place for place, gradient in enumerate(made[0].gradients) if gradient is not None] == list(wanted)
    grads = torch.autograd.grad(loss, [asked[place] for place in wanted])
    assert_same(grads, tuple(expected[place] for place in wanted))
    with torch.no_grad():
        flashtile.linear_cross_entropy(operands[0], operands[1], labels)
    assert made[1].gradients == (None, None, None)


@each_case("reduction", _REDUCTIONS)
def test_gradients_of_operands_made_from_one_another(reduction):
    """Under create_graph too each gradient counts once: of an embedding that is the last layer's weight too, of x."""
    operands, labels = small()
    embedding = operands[1].detach().requires_grad_()

    def gradients(loss_of: Any) -> tuple[Tensor, ...]:
        x = embedding[labels.clamp(min=0)].tanh()
        loss = loss_of(x, embedding, x.sum() * embedding[:, 0])
        weights = torch.arange(1.0, loss.numel() + 1, dtype=loss.dtype).view(loss.shape)
        (first,) = torch.autograd.grad(loss, embedding, weights, create_graph=True)
        return first, *torch.autograd.grad(first.square().sum(), embedding)

    ours = gradients(lambda x, w, b: flashtile.linear_cross_entropy(x, w, labels, b, reduction=reduction))
    plain = gradients(lambda x, w, b: F.cross_entropy(F.linear(x, w, b), labels, reduction=reduction))
    assert_same(ours, plain)


def test_a_second_backward_is_right_too():
    operands, labels = small()
    loss = flashtile.linear_cross_entropy(operands[0], operands[1], labels, operands[2])
    first = torch.autograd.grad(loss, operands, torch.tensor(2.0, dtype=torch.float64), retain_graph=True)
    second = torch.autograd.grad(loss, operands, torch.tensor(3.0, dtype=torch.float64))
    assert_same(second, tuple(1.5 * t for t in first))


@each_case("dtype", [torch.float32, torch.float16])
def test_nothing_counts(dtype):
    operands, labels = small(dtype)
    ignored = torch.full_like(labels, -100)
    loss = flashtile.linear_cross_entropy(operands[0], operands[1], ignored, operands[2])
    grads = torch.autograd.grad(loss, operands, retain_graph=True)
    assert loss.isnan() and not any(gradient.any() for gradient in grads)
    assert not any(gradient.any() for gradient in torch.autograd.grad(loss, operands))


def test_gradients_are_given_away():
    """Where nothing else holds them, those that the forward made become those of the leaves, not copies of them."""
    operands, labels = small(torch.float32)
    loss = flashtile.linear_cross_entropy(operands[0], operands[1], labels, operands[2])
    assert loss.grad_fn is not None
    made = [t.data_ptr() for t in loss.grad_fn.gradients]
    loss.backward()
    assert [t.grad.data_ptr() for t in operands if t.grad is not None] == made


@each_case("backend", ["cpu", "reference"])
@each_case("reduction", _REDUCTIONS)
def test_ignored_rows_have_no_effect(reduction, backend):
    """Be they NaN, also in second derivatives and under transforms."""
    (x, weight, bias), labels = small()
    labels[1] = -100
    broken = x.detach().clone()
    broken[1] = float("nan")
    broken.requires_grad_()

    def results(x: Tensor) -> tuple[Tensor, ...]:
        loss = flashtile.linear_cross_entropy(x, weight, labels, bias, reduction=reduction, backend=backend)
        grads = torch.autograd.grad(loss.sum(), (x, weight, bias), create_graph=True)
        second = torch.autograd.grad(sum(grad.square().sum() for grad in grads), (x, weight, bias))
        first = torch.autograd.grad(
            flashtile.linear_cross_entropy(x, weight, labels, bias, reduction=reduction, backend=backend).sum(),
            (x, weight, bias),
        )
        return loss, *grads, *first, *second

    assert_same(results(broken), results(x))


def test_autocast():
    (x, weight, bias), labels = small(torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        loss = flashtile.linear_cross_entropy(x, weight, labels, bias)
    expected = flashtile.linear_cross_entropy(x.bfloat16(), weight.bfloat16(), labels, bias.bfloat16())
    assert torch.equal(loss, expected) and loss.dtype is torch.float32
    grads = [torch.autograd.grad(out, (x, weight, bias)) for out in (loss, expected)]
    assert all(map(torch.equal, *grads))


@each_case("device", ["cuda", "cpu"])
@each_case("rows", [1, 100, 4096, 16384, 16385, 100000])
def test_chunks(rows, device):
    for columns in (64, 50304, 128256, 2**30):
        step = linear.chunk_rows(rows, columns, 2, device)
        assert step >= 1 and (step == 1 or step * columns * 2 <= linear.CHUNK_BYTES[device])
    assert linear.chunk_rows(16384, 128256, 2, "cuda") == 4096
    assert linear.chunk_rows(0, 64, 2, device) == 1


_X, _WEIGHT, _LABELS = torch.randn(2, 3, 4), torch.randn(7, 4), torch.zeros(2, 3, dtype=torch.int64)


@each_case(
    "changes, error, message",
    [
        ({"x": [1]}, TypeError, "x: expected a torch.Tensor, got list"),
        ({"x": _X.int()}, TypeError, "x: expected dtype float16"),
        ({"x": torch.ones(())}, ValueError, "x: expected shape (..., features), got ()"),
        ({"weight": torch.ones(7, 5)}, ValueError, "weight: expected shape (vocabulary, 4), with the last"),
        ({"weight": torch.ones(0, 4)}, ValueError, "weight: expected a first dimension from 1 to"),
        ({"weight": _WEIGHT.double()}, TypeError, "weight: expected the dtype of x, torch.float32, got torch.float64"),
        ({"weight": _WEIGHT.to("meta")}, ValueError, "weight: expected the device of x, cpu, got meta"),
        ({"bias": torch.ones(6)}, ValueError, "bias: expected shape (7,), the first dimension of weight, got (6,)"),
        ({"bias": torch.ones(7).half()}, TypeError, "bias: expected the dtype of x, torch.float32, got torch.float16"),
        ({"labels": _LABELS[0]}, ValueError, "labels: expected shape (2, 3), that of x without its last dimension"),
        ({"reduction": "max"}, ValueError, "reduction: expected one of 'none', 'mean', 'sum', got 'max'"),
        ({"backend": "x"}, ValueError, "backend: expected one of"),
    ],
)
def test_bad_input(changes, error, message):
    with pytest.raises(error, match=re.escape(message)):
        flashtile.linear_cross_entropy(**{"x": _X, "weight": _WEIGHT, "labels": _LABELS, **changes})
