"""What the cross-entropy means: against PyTorch's own, on the reference and on the CPU; and how it meets PyTorch."""

from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn import functional as F

import flashtile
from flashtile.testing import Size, assert_close, assert_same, size
from support.running.autograd import normal
from support.running.each_case import each_case
from support.running.places import places

# PyTorch's own forward mode still uses it.
pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit.script:DeprecationWarning")
both_backends = pytest.mark.parametrize("backend", ["reference", "cpu"])
_LABELS = torch.tensor([2, -100, 0, 4, 1])


@both_backends
@each_case("reduction", ["none", "mean", "sum"])
@each_case("smoothing", [0.0, 0.125])
def test_is_that_of_pytorch(smoothing, reduction, backend):
    logits, labels = normal(2, 5, 6).requires_grad_(), torch.stack((_LABELS, _LABELS.flip(0)))
    options: dict[str, Any] = {"label_smoothing": smoothing, "reduction": reduction}
    loss = flashtile.cross_entropy(logits, labels, backend=backend, **options)
    expected = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), **options).view(loss.shape)
    assert loss.shape == ((2, 5) if reduction == "none" else ())
    assert_same(loss, expected)
    dloss = normal(*loss.shape, seed=1)
    grads = (torch.autograd.grad(out, logits, dloss)[0] for out in (loss, expected))
    assert_same(*grads)


@both_backends
@each_case("reduction", ["none", "mean", "sum"])
@each_case("smoothing", [0.0, 0.125])
def test_class_weights_and_soft_cap_are_those_of_pytorch(smoothing, reduction, backend):
    logits, weights = (3 * normal(5, 6)).requires_grad_(), torch.tensor([0.5, 1.0, 2.0, 0.0, 0.25, 3.0]).double()
    options: dict[str, Any] = {"label_smoothing": smoothing, "reduction": reduction}
    for cap in (None, 2.5):
        loss = flashtile.cross_entropy(
            logits, _LABELS, class_weights=weights, softcap=cap, logit_scale=0.7, backend=backend, **options
        )
        scores = 0.7 * logits if cap is None else cap * torch.tanh(0.7 * logits / cap)
        expected = F.cross_entropy(scores, _LABELS, weights, **options)
        assert_same(loss, expected)
        dloss = normal(*loss.shape, seed=1)
        assert_same(*(torch.autograd.grad(out, logits, dloss)[0] for out in (loss, expected)))


@both_backends
def test_labels_whose_classes_weigh_nothing_have_no_mean(backend):
    weights = torch.tensor([1.0, 0.0])
    options: dict[str, Any] = {"class_weights": weights, "backend": backend}
    assert flashtile.cross_entropy(torch.zeros(2, 2), torch.tensor([1, 1]), **options).isnan()
    outside = flashtile.cross_entropy(torch.zeros(2, 2), torch.tensor([1, 2]), reduction="none", **options)
    assert outside.isnan().tolist() == [False, True]


@both_backends
def test_scale_and_z_loss(backend):
    logits = normal(5, 6).requires_grad_()
    options: dict[str, Any] = {"logit_scale": 0.3, "reduction": "none", "backend": backend}
    plain = flashtile.cross_entropy(logits, _LABELS, **options)
    assert_same(plain, F.cross_entropy(0.3 * logits, _LABELS, reduction="none"))
    loss, z_loss = flashtile.cross_entropy(logits, _LABELS, lse_square_scale=0.2, return_z_loss=True, **options)
    expected = (0.2 * torch.logsumexp(0.3 * logits, -1) ** 2).masked_fill(_LABELS == -100, 0)
    assert_same((z_loss, loss), (expected, plain + expected))
    options["reduction"] = "mean"
    loss, z_loss = flashtile.cross_entropy(logits, _LABELS, lse_square_scale=0.2, return_z_loss=True, **options)
    assert_same((z_loss, loss), (expected.sum() / 4, (plain + expected).sum() / 4))
    assert loss.requires_grad and not z_loss.requires_grad


def check_nothing_counts(backend: str, device: str = "cpu") -> None:
    logits = torch.randn(2, 5, device=device, requires_grad=True)
    labels = torch.full((2,), -100, device=device)
    loss = flashtile.cross_entropy(logits, labels, backend=backend)
    (dlogits,) = torch.autograd.grad(loss, logits)
    assert loss.isnan() and not dlogits.any()
    assert flashtile.cross_entropy(logits, labels, reduction="sum", backend=backend) == 0


def check_labels_outside(backend: str, device: str = "cpu") -> None:
    """Their rows are NaN, and nothing else is."""
    logits = torch.randn(5, 11, device=device, requires_grad=True)
    labels = torch.tensor([3, 11, -1, 2**40, 10], device=device)
    losses = flashtile.cross_entropy(logits, labels, reduction="none", label_smoothing=0.1, backend=backend)
    assert losses.isnan().tolist() == [False, True, True, True, False]
    (dlogits,) = torch.autograd.grad(losses, logits, torch.ones_like(losses))
    assert torch.equal(dlogits.isnan().all(dim=1), losses.isnan())
    assert torch.equal(dlogits.isnan().any(dim=1), losses.isnan())


def check_ignored_rows(backend: str, device: str = "cpu") -> None:
    """What they hold has no effect, be it NaN."""
    logits = torch.randn(3, 11, device=device)
    logits[1] = float("nan")
    logits.requires_grad_()
    labels = torch.tensor([3, 12, 0], device=device)
    loss = flashtile.cross_entropy(logits, labels, ignore_index=12, lse_square_scale=0.1, backend=backend)
    (dlogits,) = torch.autograd.grad(loss, logits, torch.full_like(loss, 2.0))
    assert loss.isfinite() and dlogits.isfinite().all() and not dlogits[1].any()
    if backend != "triton":
        function = lambda x: flashtile.cross_entropy(x, labels, ignore_index=12, lse_square_scale=0.1)  # noqa: E731
        assert_same(2 * torch.func.grad(function)(logits.detach()), dlogits)
        (grad,) = torch.autograd.grad(function(logits), logits, create_graph=True)
        assert torch.autograd.grad(grad.square().sum(), logits)[0].isfinite().all()


def check_nan_and_inf(backend: str, device: str = "cpu") -> None:
    """They reach the loss of their row alone, as in PyTorch's own."""
    logits = torch.randn(6, 5000, device=device)
    logits[0, 4999], logits[1, 7], logits[2] = float("nan"), float("inf"), float("-inf")
    logits[3, :4990] = float("-inf")
    labels = torch.tensor([1, 1, 1, 4995, 3, 4], device=device)
    losses = flashtile.cross_entropy(logits, labels, reduction="none", backend=backend)
    assert_same(losses, F.cross_entropy(logits, labels, reduction="none"))
    assert losses.isnan().tolist() == [True, True, True, False, False, False]


def check_large_logits(backend: str, device: str = "cpu") -> None:
    """A logit whose square is infinite has a loss, where no z-loss is asked for."""
    logits = torch.tensor([[1e30, -2e30, 3e29], [0.0, -1e25, 1e22]], device=device)
    labels = torch.tensor([1, 2], device=device)
    losses, z_losses = flashtile.cross_entropy(logits, labels, reduction="none", return_z_loss=True, backend=backend)
    assert_same(losses, F.cross_entropy(logits, labels, reduction="none"))
    assert not z_losses.any()


def check_shared_offset(backend: str, device: str = "cpu") -> None:
    """What all logits of a row share costs no more accuracy than in PyTorch's own."""
    generator = torch.Generator().manual_seed(0)
    labels = torch.randint(0, 300, (16,), generator=generator).to(device)
    for offset, smoothing in ((100.0, 0.0), (1e4, 0.0), (1e4, 0.1), (-1e4, 0.1)):
        logits = (torch.randn(16, 300, generator=generator) + offset).to(device)
        options: dict[str, Any] = {"reduction": "none", "label_smoothing": smoothing}
        found = []
        for function, dtype in (
            (partial(flashtile.cross_entropy, backend=backend), torch.float32),
            (F.cross_entropy, torch.float64),
            (F.cross_entropy, torch.float32),
        ):
            leaf = logits.to(dtype).requires_grad_()
            losses = function(leaf, labels, **options)
            found.append((losses.detach(), *torch.autograd.grad(losses.sum(), leaf)))
        for name, *values in zip(("losses", "dlogits"), *found):
            assert_close(f"{name} of logits about {offset}", *values)


CHECKS = [
    check_nothing_counts,
    check_labels_outside,
    check_ignored_rows,
    check_nan_and_inf,
    check_large_logits,
    check_shared_offset,
]


@pytest.mark.parametrize("check", CHECKS)
@places("reference", "cpu", "interpreted", "gpu")
def test_edges(backend, device, check):
    check(backend, device)


@given(st.data())
def test_adding_a_constant_changes_nothing(data):
    """Without z-loss, the loss depends on differences of logits alone, and the gradient of a row sums to 0."""
    rows, columns = data.draw(st.integers(1, 5)), data.draw(st.integers(1, 9))
    logits = normal(rows, columns, seed=data.draw(st.integers(0, 99)))
    labels = torch.tensor(data.draw(st.lists(st.integers(-1, columns - 1), min_size=rows, max_size=rows)))
    options: dict[str, Any] = {
        "label_smoothing": data.draw(st.floats(0, 1, width=32)),
        "logit_scale": data.draw(st.floats(-3, 3, width=32)),
        "ignore_index": -1,
        "reduction": "sum",
    }
    moved = (logits + data.draw(st.floats(-50, 50))).requires_grad_()
    loss = flashtile.cross_entropy(moved, labels, **options)
    # In each row the constant comes off the logit of the label again, and its weights add up to those of the labels, 1.
    scale = abs(options["logit_scale"])
    cancelled = Size(*(rows * scale * norm for norm in size(moved.detach())))
    assert_same(loss, flashtile.cross_entropy(logits, labels, **options), cancelled=cancelled)
    (dlogits,) = torch.autograd.grad(loss, moved)
    assert_same(dlogits.sum(dim=-1), torch.zeros(rows, dtype=torch.float64), cancelled=Size(scale, scale))


# --- in place -------------------------------------------------------------------------------------------------------


@both_backends
def test_inplace_backward(backend):
    logits = normal(5, 6).requires_grad_()
    (expected,) = torch.autograd.grad(flashtile.cross_entropy(logits, _LABELS, backend=backend), logits)
    given = (logits * 1).detach().requires_grad_()
    loss = flashtile.cross_entropy(given, _LABELS, inplace_backward=True, backend=backend)
    (dlogits,) = torch.autograd.grad(loss, given, retain_graph=True)
    assert_same(dlogits, expected)
    assert dlogits.data_ptr() == given.data_ptr()
    with pytest.raises(RuntimeError, match="inplace_backward: expected one backward, got a second one"):
        torch.autograd.grad(loss, given)


def test_inplace_backward_has_no_second_derivative():
    logits = normal(5, 6).requires_grad_()
    loss = flashtile.cross_entropy(logits * 1, _LABELS, inplace_backward=True)
    with pytest.raises(RuntimeError, match="inplace_backward: expected a backward without create_graph"):
        torch.autograd.grad(loss, logits, create_graph=True)


def test_others_who_saved_the_logits_hear_of_it():
    x = normal(5, 6).requires_grad_()
    loss = flashtile.cross_entropy(x.tanh(), _LABELS, inplace_backward=True)  # tanh keeps its result
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_inplace_backward_is_refused_under_transforms():
    with pytest.raises(ValueError, match="inplace_backward: expected False under"):
        torch.func.grad(lambda x: flashtile.cross_entropy(x, _LABELS, inplace_backward=True))(normal(5, 6))
