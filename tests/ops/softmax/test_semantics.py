"""What the softmax means: against PyTorch's own, on the reference and on the CPU; merging; bad input."""

import re
from typing import Any

import numpy as np
import pytest
import torch

import flashtile
from flashtile.testing import assert_same
from support.running.autograd import normal
from support.running.each_case import each_case

both_backends = pytest.mark.parametrize("backend", ["reference", "cpu"])


@both_backends
def test_masked_is_that_of_pytorch(backend):
    x, mask = normal(2, 3, 4, 9), normal(2, 1, 4, 9, seed=1) > 0.5
    out = flashtile.scaled_masked_softmax(x, mask, 0.3, backend=backend)
    assert_same(out, torch.softmax((0.3 * x).masked_fill(mask, float("-inf")), -1))
    assert torch.equal(flashtile.scaled_masked_softmax(x, mask.to(torch.uint8), 0.3, backend=backend), out)
    assert_same(flashtile.scaled_masked_softmax(x, None, backend=backend), torch.softmax(x, -1))


@both_backends
@each_case("seq_q, seq_k", [(6, 6), (4, 9), (9, 4)])
def test_causal_ends_at_the_last_key(seq_q, seq_k, backend):
    x = normal(2, seq_q, seq_k)
    out = flashtile.scaled_causal_softmax(x, 2.0, backend=backend)
    for row in range(seq_q):
        visible = max(row + 1 + seq_k - seq_q, 0)
        assert_same(out[:, row, :visible], torch.softmax(2 * x[:, row, :visible], -1))
        assert not out[:, row, visible:].any()


@both_backends
def test_rows_without_anything_are_zero(backend):
    x = normal(1, 1, 3, 5)
    x[0, 0, 1] = float("-inf")
    mask = torch.zeros(1, 1, 3, 5, dtype=torch.bool)
    mask[0, 0, 2] = True
    x = x.requires_grad_()
    out = flashtile.scaled_masked_softmax(x, mask, backend=backend)
    (dx,) = torch.autograd.grad(out, x, torch.full_like(out, float("inf")).where(out == 0, 1.0))
    assert not out[0, 0, 1:].any() and not dx[0, 0, 1:].any()


@both_backends
def test_what_is_masked_out_has_no_effect(backend):
    x, mask = normal(1, 2, 3, 8), normal(1, 1, 3, 8, seed=1) > 0
    broken = x.masked_fill(mask, float("nan"))
    call = lambda x: flashtile.scaled_masked_softmax(x, mask, backend=backend)  # noqa: E731
    assert_same(call(broken), call(x))
    x[0, 1, 2][~mask[0, 0, 2]] = float("nan")
    assert call(x).isnan().any(-1).sum() == 1, "a visible NaN stays in its row"


# --- merging --------------------------------------------------------------------------------------------------------


@each_case("packed", [False, True])
def test_merged_attention_is_that_over_all_keys(packed):
    q, k, v = normal(2, 5, 3, 4), normal(2, 9, 3, 4, seed=1), normal(2, 9, 3, 4, seed=2)
    parts = [slice(0, 2), slice(2, 3), slice(3, 9)]
    out, lse = flashtile.attention(q, k, v, return_lse=True)
    outs, lses = zip(*(flashtile.attention(q, k[:, part], v[:, part], return_lse=True) for part in parts))
    assert_same(flashtile.logsumexp_merge(torch.stack(outs), torch.stack(lses)), (out, lse))
    if packed:
        out, lse, outs, lses = out[0], lse[0], [t[0] for t in outs], [t[0] for t in lses]
    merged, merged_lse = flashtile.logsumexp_merge(outs, lses)
    assert_same((merged, merged_lse), (out, lse))


def test_merging_nothing_visible():
    blind, lse = torch.zeros(1, 2, 1, 4), torch.full((1, 1, 2), float("-inf"))
    seen, seen_lse = torch.randn(1, 2, 1, 4), torch.randn(1, 1, 2)
    out, merged = flashtile.logsumexp_merge([blind, seen], [lse, seen_lse])
    assert torch.equal(out, seen) and torch.equal(merged, seen_lse)
    out, merged = flashtile.logsumexp_merge([blind, blind], [lse, lse])
    assert not out.any() and torch.equal(merged, lse)


def test_a_row_that_no_part_has_seen_has_gradients_of_0():
    """As in the sinks of a merge: -inf is none, and bottom-right causal rows may see no key."""
    outs = [torch.randn(1, 2, 1, 3, requires_grad=True) for _ in range(2)]
    lses = [torch.tensor([[[float("-inf"), 1.0]]], requires_grad=True) for _ in range(2)]
    out, lse = flashtile.logsumexp_merge(outs, lses)
    grads = torch.autograd.grad(out.sin().sum() + lse[..., 1].sum(), (*outs, *lses))
    assert all(grad.isfinite().all() for grad in grads)
    assert not any(grad[:, 0].any() for grad in grads[:2]) and not any(grad[..., 0].any() for grad in grads[2:])


def test_online_softmax_in_steps():
    scores, values = normal(2, 4, 10), normal(2, 10, 3, seed=1)
    scores[0, 1, :7] = float("-inf")
    scores[1, 2] = float("-inf")
    state = None
    for part in (slice(0, 4), slice(4, 4), slice(4, 10)):
        state = flashtile.online_softmax(scores[..., part], values[..., part, :], state)
        assert isinstance(state, flashtile.OnlineSoftmax)
    out, lse = state.finish()
    expected = torch.softmax(scores, -1).nan_to_num(0) @ values
    assert_same(out, expected)
    assert_same(lse, torch.logsumexp(scores, -1))


# --- bad input ------------------------------------------------------------------------------------------------------

_X = torch.randn(2, 3, 4, 5)


@each_case(
    "changes, error, message",
    [
        ({"x": [1]}, TypeError, "x: expected a torch.Tensor, got list"),
        ({"x": _X.int()}, TypeError, "x: expected dtype float16"),
        ({"x": _X[0]}, ValueError, "x: expected shape (batch, heads, seq_q, seq_k), got (3, 4, 5)"),
        ({"mask": 1}, TypeError, "mask: expected a torch.Tensor, got int"),
        ({"mask": torch.zeros(4, 5)}, TypeError, "mask: expected dtype bool or uint8, got torch.float32"),
        ({"mask": torch.zeros(2, 5, dtype=torch.bool)}, ValueError, "mask: expected a shape that broadcasts"),
        (
            {"mask": torch.zeros(1, 2, 3, 4, 5, dtype=torch.bool)},
            ValueError,
            "such as (2, 1, 4, 5), got (1, 2, 3, 4, 5)",
        ),
        ({"mask": torch.zeros(5, dtype=torch.bool, device="meta")}, ValueError, "mask: expected the device of x"),
        ({"scale": "1"}, TypeError, "scale: expected a float, got '1'"),
        ({"scale": torch.ones(())}, TypeError, "scale: expected a float, got a Tensor; reading it would synchronise"),
        ({"scale": float("inf")}, ValueError, "scale: expected a finite number, got inf"),
        ({"scale": 3e38}, ValueError, "scale: expected a magnitude of at most 2.3e+38"),
        ({"backend": "x"}, ValueError, "backend: expected one of"),
        ({"backend": np.array("cpu")}, ValueError, "backend: expected one of"),
        ({"backend": np.array(["cpu", "auto"])}, ValueError, "backend: expected one of"),
    ],
)
def test_bad_input(changes, error, message):
    with pytest.raises(error, match=re.escape(message)):
        flashtile.scaled_masked_softmax(**{"x": _X, "mask": None, **changes})


def _after(before: torch.Tensor, columns: int = 4) -> Any:
    """A step after one for other rows, or other columns."""
    return flashtile.online_softmax(_X, _X.mT, flashtile.online_softmax(before, before.mT[..., :columns]))


def _finish(dtype: Any) -> Any:
    row = torch.zeros(1, 2, 3)
    return flashtile.finish_attention(torch.zeros(1, 3, 2, 4), row, row, dtype)


@each_case(
    "call, message",
    [
        (lambda: flashtile.scaled_causal_softmax(torch.randn(5)), "x: expected shape (..., seq_q, seq_k), got (5,)"),
        (lambda: flashtile.logsumexp_merge([], []), "lses: expected as many as outs, and at least one"),
        (lambda: flashtile.logsumexp_merge(None, [_X]), "outs: expected a sequence of tensors, got NoneType"),
        (lambda: flashtile.logsumexp_merge([_X], None), "lses: expected a sequence of tensors, got NoneType"),
        (lambda: flashtile.logsumexp_merge([_X], [_X]), "outs[0], lses[0]: expected shapes"),
        (lambda: flashtile.online_softmax(_X, _X), "values: expected 5 rows, one for each key of scores"),
        (lambda: flashtile.online_softmax(_X, _X[0, 0, 0]), "values: expected shape (..., keys, columns), got (5,)"),
        (lambda: flashtile.online_softmax(_X.int(), _X.mT), "scores: expected dtype float16"),
        (lambda: flashtile.online_softmax(_X, _X.mT.double()), "values: expected float64 exactly where scores are"),
        (
            lambda: _after(_X[..., :1, :]),
            "state.row_max: expected shape (2, 3, 4), that of these scores and values, got",
        ),
        (lambda: _after(_X, columns=2), "state.acc: expected shape (2, 3, 4, 4), that of these scores and values, got"),
        (lambda: _after(_X.double()), "state.row_max: expected torch.float32, in which torch.float32 is computed, got"),
        (lambda: _after(_X.to("meta")), "state.row_max: expected the device of scores, cpu, got meta"),
        (lambda: _finish(torch.int32), "dtype: expected dtype float16, bfloat16, float32 or float64, got torch.int32"),
        (lambda: _finish("float16"), "dtype: expected dtype float16, bfloat16, float32 or float64, got float16"),
        (lambda: flashtile.online_softmax(_X, _X.mT, (1, 2, 3)), "state: expected an OnlineSoftmax or None, got tuple"),
        (lambda: flashtile.logsumexp_merge([_X.int()], [_X]), "outs: expected dtype float16"),
        (lambda: flashtile.logsumexp_merge([_X[0, 0]], [_X]), "outs[0]: expected [batch, seq, heads"),
    ],
)
def test_more_bad_input(call, message):
    with pytest.raises((TypeError, ValueError), match=re.escape(message)):
        call()
