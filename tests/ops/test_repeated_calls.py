"""Calls like an earlier one (`ops/common/repeated.py`): what they give, and what makes a call another one."""

import contextlib
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import flashtile
from flashtile.ops.common import repeated
from flashtile.ops.common.backends import Backends
from flashtile.testing import assert_same

_SEED = torch.tensor([5, 6])


class Case:
    """A function with its tensors by name, made anew for each call, and options. `others`: what one of its options may
    be in its place, by name; each value makes another call."""

    def __init__(
        self, function: Callable[..., Any], shapes: dict[str, tuple[int, ...]], others: dict[str, Any], **options: Any
    ) -> None:
        self.function, self.shapes, self.options, self.others = function, shapes, options, others

    def tensors(self, dtype: torch.dtype = torch.float32, batch: int = 2) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(0)
        found = {}
        for name, (first, *rest) in self.shapes.items():
            if name == "labels":
                found[name] = torch.randint(8, (batch, *rest), generator=generator)
            elif name == "mask":
                found[name] = torch.rand(batch, *rest, generator=generator) < 0.3
            else:
                size = batch if first == 2 else first
                found[name] = torch.randn(size, *rest, generator=generator).to(dtype)
        return found


_NORM_OPTIONS = {"eps": 0.5, "zero_centered_weight": True}
_DROPPED = {"dropout_p": 0.25, "epsilon": 0.5, "prenorm": False, "rowscale_const": 0.5, "dropout_seed": None}
CASES = {
    "layer_norm": Case(flashtile.layer_norm, {"x": (2, 3, 8), "weight": (8,), "bias": (8,)}, _NORM_OPTIONS),
    "rms_norm": Case(flashtile.rms_norm, {"x": (2, 8), "weight": (8,)}, _NORM_OPTIONS, eps=1e-5),
    "dropout_add": Case(
        flashtile.dropout_add_layer_norm, {"x0": (2, 3, 8), "residual": (2, 3, 8), "weight": (8,), "bias": (8,)},
        _DROPPED, dropout_p=0.5, dropout_seed=_SEED, prenorm=True,
    ),
    "rotary": Case(
        flashtile.apply_rotary, {"x": (2, 3, 2, 8), "cos": (5, 4), "sin": (5, 4)},
        {"interleaved": True, "conjugate": True, "seqlen_offsets": 1, "max_seqlen": 9, "inplace": True},
        seqlen_offsets=2,
    ),
    "rotary_qkv": Case(
        flashtile.apply_rotary_qkv, {"qkv": (2, 3, 3, 2, 8), "cos": (3, 4), "sin": (3, 4)}, {"interleaved": True}
    ),
    "cross_entropy": Case(
        flashtile.cross_entropy, {"logits": (2, 3, 9), "labels": (2, 3)},
        {
            "label_smoothing": 0.1, "logit_scale": 0.5, "lse_square_scale": 0.1, "ignore_index": 3, "reduction": "sum",
            "softcap": 2.0, "return_z_loss": True, "inplace_backward": True,
        },
    ),
    "masked_softmax": Case(
        flashtile.scaled_masked_softmax, {"x": (2, 2, 3, 8), "mask": (2, 1, 3, 8)}, {"scale": 0.5}, scale=1.0
    ),
    "causal_softmax": Case(flashtile.scaled_causal_softmax, {"x": (2, 3, 8)}, {"scale": 0.5}),
    "dense": Case(flashtile.fused_dense, {"x": (2, 3, 8), "weight": (4, 8), "bias": (4,)}, {"return_residual": True}),
    "mlp": Case(
        flashtile.fused_mlp,
        {"x": (2, 3, 8), "weight1": (6, 8), "bias1": (6,), "weight2": (4, 6), "bias2": (4,)},
        {"activation": "relu", "checkpoint_level": 1},
    ),
}  # fmt: skip
_TABLES = ("cos", "sin", "labels", "mask")


def _outcome(
    case: Case,
    backend: str,
    change: Callable[[str, Tensor], Tensor] = lambda name, tensor: tensor,
    context: Callable[[], Any] = contextlib.nullcontext,
    grads: bool = True,
    sizes: dict[str, Any] | None = None,
    **options: Any,
) -> Any:
    """Results and gradients, or the error."""
    tensors = {name: change(name, t) for name, t in case.tensors(**(sizes or {})).items()}
    learned = [t.requires_grad_() for name, t in tensors.items() if grads and name not in _TABLES]
    # An operation in between, so that what is written in place is no leaf.
    given = {name: t * 1 if grads and options.get("inplace") and name == "x" else t for name, t in tensors.items()}
    torch.manual_seed(3)
    try:
        with context():
            found = case.function(**given, **{**case.options, **options}, backend=backend)
            results = list(found) if isinstance(found, tuple) else [found]
            wanted = [t for t in results if t.requires_grad]
            upstream = [torch.linspace(-1, 1, t.numel(), dtype=t.dtype).view_as(t) for t in wanted]
            return results + (list(torch.autograd.grad(wanted, learned, upstream)) if wanted else [])
    except (TypeError, ValueError, RuntimeError) as error:
        return [type(error), str(error)]


def _misaligned(name: str, tensor: Tensor) -> Tensor:
    memory = tensor.new_empty(tensor.numel() + 1)
    return memory[1:].view(tensor.shape).copy_(tensor)


def _strided(name: str, tensor: Tensor) -> Tensor:
    """The first dimensions of a tensor of activations in another order in memory."""
    if name in _TABLES or tensor.dim() < 3:
        return tensor
    return tensor.transpose(0, 1).contiguous().transpose(0, 1)


_WAYS: dict[str, dict[str, Any]] = {
    "float64": {"sizes": {"dtype": torch.float64}},
    "bfloat16": {"sizes": {"dtype": torch.bfloat16}},
    "batch": {"sizes": {"batch": 4}},
    "misaligned": {"change": _misaligned},
    "strided": {"change": _strided},
    "without gradients": {"grads": False},
    "no_grad": {"context": torch.no_grad},
    "inference": {"context": torch.inference_mode},
    "autocast": {"context": lambda: torch.autocast("cpu", torch.bfloat16)},
    "twice": {"change": lambda name, tensor: tensor + 0 if name != "sin" else tensor.neg()},
    "negated": {"change": lambda name, t: torch._neg_view(t.neg()) if name in ("x", "x0", "logits", "qkv") else t},
    "dtype of the weight": {"change": lambda name, t: t.bfloat16() if name in ("weight", "residual") else t},
    "backend": {"backend": "reference"},
}  # fmt: skip


def _same(found: list[Any], expected: list[Any]) -> None:
    assert len(found) == len(expected), (found, expected)
    for one, other in zip(found, expected):
        if isinstance(one, Tensor) and isinstance(other, Tensor):
            assert one.stride() == other.stride() and one.requires_grad == other.requires_grad
            assert_same(one.detach(), other.detach())
        else:
            assert one == other


def _check_alternating(case: Case, calls: list[dict[str, Any]]) -> None:
    """Calls in turns give what each gives alone."""
    expected = []
    for call in calls:
        repeated.forget_calls()
        expected.append(_outcome(case, **call))
    repeated.forget_calls()
    for _ in range(2):
        for call, alone in zip(calls, expected):
            _same(_outcome(case, **call), alone)


def _check_ways(name: str, backend: str, ways: dict[str, dict[str, Any]]) -> None:
    base = {"backend": backend}
    _check_alternating(CASES[name], [base, *({**base, **way} for way in ways.values())])


def _check_options(name: str, backend: str) -> None:
    case, base = CASES[name], {"backend": backend}
    _check_alternating(case, [base, *({**base, option: value} for option, value in case.others.items())])


@pytest.mark.parametrize("name", CASES)
def test_calls_that_differ(name):
    _check_ways(name, "cpu", _WAYS)
    _check_options(name, "cpu")


@pytest.mark.interpreter
@pytest.mark.parametrize("name", CASES)
def test_interpreted_calls_that_differ(name):
    _check_ways(name, "triton", {way: _WAYS[way] for way in ("batch", "misaligned")})


@pytest.mark.gpu
@pytest.mark.parametrize("name", CASES)
def test_calls_that_differ_on_gpu(name, monkeypatch):
    case = CASES[name]
    on_cpu = Case.tensors
    monkeypatch.setattr(
        Case, "tensors", lambda self, **sizes: {key: t.cuda() for key, t in on_cpu(self, **sizes).items()}
    )
    monkeypatch.setattr(case, "options", {**case.options, **({"dropout_seed": None} if name == "dropout_add" else {})})
    monkeypatch.setattr(torch, "linspace", lambda *a, linspace=torch.linspace, **k: linspace(*a, **k, device="cuda"))
    ways = {way: each for way, each in _WAYS.items() if way not in ("float64", "autocast", "backend", "inference")}
    _check_ways(name, "triton", ways)
    _check_options(name, "triton")


@pytest.mark.parametrize("name", [name for name in CASES if name not in ("dense", "mlp")])
def test_a_repeated_call_checks_nothing(name, monkeypatch):
    checked: list[str] = []
    monkeypatch.setattr(Backends, "check", lambda self, requested: checked.append(requested))
    for _ in range(3):
        _outcome(CASES[name], "cpu")
    assert checked == ["cpu"]


def test_equal_scalars_of_other_types_are_others():
    x = torch.randn(2, 8)
    for eps in (1, 1.0):
        flashtile.rms_norm(x, eps=eps)
    with pytest.raises(TypeError, match=r"^eps: expected a float, got True"):
        flashtile.rms_norm(x, eps=True)
    flashtile.apply_rotary(x.view(1, 2, 1, 8), *flashtile.rotary_tables(4, 8), seqlen_offsets=1)
    with pytest.raises(TypeError, match=r"^seqlen_offsets: expected an int"):
        flashtile.apply_rotary(x.view(1, 2, 1, 8), *flashtile.rotary_tables(4, 8), seqlen_offsets=True)
    with pytest.raises(TypeError, match=r"^eps: expected a float"):
        flashtile.rms_norm(x, eps=[1e-5])  # type: ignore[arg-type]


def test_repeated_calls_draw_seeds():
    x = torch.randn(4, 64)
    first, second = (flashtile.dropout_add_rms_norm(x, None, None, dropout_p=0.5) for _ in range(2))
    assert not torch.equal(first, second)
    for _ in range(2):
        torch.manual_seed(7)
        third = flashtile.dropout_add_rms_norm(x, None, None, dropout_p=0.5)
    torch.manual_seed(7)
    repeated.forget_calls()
    assert torch.equal(third, flashtile.dropout_add_rms_norm(x, None, None, dropout_p=0.5))


def test_some_gradients_of_repeated_calls():
    """A result that nobody differentiates, a second backward, and a backward of the backward."""
    x, residual = (torch.randn(2, 3, 8, dtype=torch.float64, requires_grad=True) for _ in range(2))

    def run() -> tuple[Tensor, ...]:
        return flashtile.dropout_add_layer_norm(x, residual, None, None, prenorm=True, rowscale_const=0.5)

    def gradients() -> list[Tensor]:
        found = []
        for through in ((0,), (1,), (0, 1)):
            results = run()
            wanted = [results[place].square().sum() for place in through]
            found += torch.autograd.grad(wanted, (x, residual), retain_graph=True)
            found += torch.autograd.grad(wanted, (x, residual), retain_graph=True)
            once = torch.autograd.grad(wanted, (x, residual), create_graph=True)
            found += torch.autograd.grad(once[0].square().sum(), (x, residual))
        return found

    expected = gradients()
    for _ in range(2):
        assert_same(gradients(), expected)


def test_saved_tensors_may_come_back_as_others():
    x, weight = torch.randn(4, 8, requires_grad=True), torch.randn(8, requires_grad=True)
    expected = torch.autograd.grad(flashtile.rms_norm(x, weight).square().sum(), (x, weight))
    for _ in range(3):
        with torch.autograd.graph.saved_tensors_hooks(lambda t: t.double(), lambda t: t.float()):
            out = flashtile.rms_norm(x, weight)
        assert_same(list(torch.autograd.grad(out.square().sum(), (x, weight))), list(expected))


@pytest.mark.interpreter
def test_interpreted_who_saved_what_a_repeated_call_writes_hears_of_it():
    cos, sin = flashtile.rotary_tables(3, 8)
    for _ in range(3):
        x = torch.randn(2, 3, 2, 8)
        saved = (x * torch.ones((), requires_grad=True)).sum()
        flashtile.apply_rotary(x, cos, sin, inplace=True, backend="triton")
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            saved.backward()


def test_a_call_that_only_recording_refuses():
    x, weight, main_grad = torch.randn(3, 8), torch.randn(4, 8), torch.zeros(4, 8)
    for _ in range(2):
        with torch.no_grad():
            flashtile.fused_dense(x, weight, main_grad=main_grad)
        with pytest.raises(ValueError, match=r"^main_grad: expected None for a weight that wants no gradient"):
            flashtile.fused_dense(x, weight, main_grad=main_grad)


@pytest.mark.parametrize("rows", [(6,), (2, 3)], ids=str)
def test_a_first_call_keeps_for_its_backward_what_later_ones_do(rows):
    """Activation checkpointing runs a forward again, and compares what it keeps."""
    x, other = (torch.randn(*rows, 64, requires_grad=True) for _ in range(2))
    weight, bias, wide, narrow = (
        torch.randn(*shape, requires_grad=True) for shape in ((64,), (64,), (32, 64), (64, 32))
    )
    labels, cos, sin = torch.zeros(rows, dtype=torch.int64), torch.randn(8, 8), torch.randn(8, 8)
    heads = torch.randn(2, 8, 2, 16, requires_grad=True)
    calls: dict[str, Callable[[], Any]] = {
        "layer_norm": lambda: flashtile.layer_norm(x * 1, weight, bias),
        "rms_norm": lambda: flashtile.rms_norm(x * 1, weight),
        "dropout_add_layer_norm": lambda: flashtile.dropout_add_layer_norm(x * 1, other, weight, bias, dropout_p=0.1),
        "dropout_add_rms_norm": lambda: flashtile.dropout_add_rms_norm(x * 1, other, weight, prenorm=True),
        "apply_rotary": lambda: flashtile.apply_rotary(heads * 1, cos, sin),
        "apply_rotary in place": lambda: flashtile.apply_rotary(heads * 1, cos, sin, inplace=True),
        "cross_entropy": lambda: flashtile.cross_entropy(x * 1, labels),
        "linear_cross_entropy": lambda: flashtile.linear_cross_entropy(x * 1, wide, labels),
        "fused_dense": lambda: flashtile.fused_dense(x * 1, wide, None, return_residual=True),
        "fused_mlp": lambda: flashtile.fused_mlp(x * 1, wide, None, narrow, bias),
        "scaled_causal_softmax": lambda: flashtile.scaled_causal_softmax(heads.mT @ heads * 1),
        "scaled_causal_softmax of matrices": lambda: flashtile.scaled_causal_softmax((heads.mT @ heads)[0] * 1),
    }
    for name, call in calls.items():
        kept = [_kept_shapes(call) for _ in range(3)]
        assert kept[0] == kept[1] == kept[2], name
        results = checkpoint(call, use_reentrant=False)
        (results if isinstance(results, Tensor) else results[0]).sum().backward()


def _kept_shapes(call: Callable[[], Any]) -> list[torch.Size]:
    found: list[torch.Size] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: (found.append(t.shape), t)[1], lambda t: t):
        call()
    return found


_OF_THREADS: dict[str, Callable[..., Any]] = {
    "hopper": lambda q, k, v: flashtile.attention(q, k, v),  # or what else serves the GPU
    "triton": lambda q, k, v: flashtile.attention(q, k, v, backend="triton"),
    "gradients": lambda q, k, v: torch.stack(torch.autograd.grad(flashtile.attention(q, k, v), (q, k, v), v)),
    "kv_cache": lambda q, k, v: flashtile.attention_with_kv_cache(q.detach(), k.detach(), v.detach(), cache_lengths=64),
    "layer_norm": lambda q, k, v: flashtile.layer_norm(q, k[0, 0, 0], v[0, 0, 0]),
}


@pytest.mark.gpu
@pytest.mark.parametrize("name", _OF_THREADS)
def test_a_repeated_call_may_be_the_first_that_a_thread_asks_of_a_gpu(name):
    call = _OF_THREADS[name]
    known, new = torch.randn(2, 3, 2, 64, 4, 64, device="cuda", dtype=torch.bfloat16)
    call(*known.requires_grad_())
    given = [*new.requires_grad_()]  # at other addresses, of which no descriptor was made
    found: list[Tensor] = []
    thread = threading.Thread(target=lambda: found.append(call(*given)))
    thread.start()
    thread.join()
    assert_same(found, [call(*given)])
