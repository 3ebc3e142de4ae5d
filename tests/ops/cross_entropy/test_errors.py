"""Bad input: an error names argument, expectation, what came and the remedy."""

import re

import pytest
import torch

import flashtile
from flashtile.ops.common import checks
from support.running.each_case import each_case

_LOGITS, _LABELS = torch.randn(2, 3, 5), torch.zeros(2, 3, dtype=torch.int64)


@each_case(
    "changes, error, message",
    [
        ({"logits": [1]}, TypeError, "logits: expected a torch.Tensor, got list"),
        ({"logits": _LOGITS.int()}, TypeError, "logits: expected dtype float16"),
        ({"logits": torch.ones(())}, ValueError, "logits: expected shape (..., vocabulary), got ()"),
        ({"logits": torch.ones(2, 3, 0)}, ValueError, "logits: expected a last dimension from 1 to"),
        ({"labels": [1]}, TypeError, "labels: expected a torch.Tensor, got list"),
        ({"labels": _LABELS.float()}, TypeError, "labels: expected dtype int64 or int32, got torch.float32"),
        (
            {"labels": _LABELS[0]},
            ValueError,
            "labels: expected shape (2, 3), that of logits without its last dimension",
        ),
        ({"labels": _LABELS.to("meta")}, ValueError, "labels: expected the device of logits, cpu, got meta"),
        ({"label_smoothing": 1.5}, ValueError, "label_smoothing: expected a share from 0 to 1, got 1.5"),
        ({"label_smoothing": "1"}, TypeError, "label_smoothing: expected a float, got '1'"),
        ({"logit_scale": torch.ones(())}, TypeError, "logit_scale: expected a float, got a Tensor; reading it would"),
        ({"logit_scale": float("inf")}, ValueError, "logit_scale: expected a finite number, got inf"),
        ({"logit_scale": 1e39}, ValueError, "logit_scale: expected a magnitude of at most 2.3e+38"),
        ({"lse_square_scale": float("nan")}, ValueError, "lse_square_scale: expected a finite number, got nan"),
        ({"ignore_index": 1.0}, TypeError, "ignore_index: expected an int, got 1.0"),
        ({"ignore_index": 2**70}, ValueError, "ignore_index: expected an integer of 64 bits, as labels are, got 11805"),
        ({"label_smoothing": 10**400}, ValueError, "label_smoothing: expected a number that a float holds"),
        ({"softcap": -1.0}, ValueError, "softcap: expected a finite number of at least 0, got -1.0"),
        ({"class_weights": [1.0]}, TypeError, "class_weights: expected a torch.Tensor, got list"),
        (
            {"class_weights": torch.ones(4)},
            ValueError,
            "class_weights: expected shape (5,), a weight for each class of",
        ),
        ({"class_weights": torch.ones(5).int()}, TypeError, "class_weights: expected dtype torch.float32 or torch.fl"),
        ({"class_weights": torch.ones(5).to("meta")}, ValueError, "class_weights: expected the device of the logits"),
        (
            {"class_weights": torch.ones(5, requires_grad=True)},
            ValueError,
            "class_weights: expected a tensor that want",
        ),
        ({"weight": torch.ones(5)}, TypeError, "has no argument weight; it is called class_weights (a weight for each"),
        ({"reduction": "max"}, ValueError, "reduction: expected one of 'none', 'mean', 'sum', got 'max'"),
        ({"return_z_loss": 1}, TypeError, "return_z_loss: expected True or False, got 1"),
        ({"inplace_backward": 1}, TypeError, "inplace_backward: expected True or False, got 1"),
        (
            {"inplace_backward": True, "logits": torch._neg_view(_LOGITS)},
            ValueError,
            "logits: expected a tensor that holds its own numbers",
        ),
        ({"process_group": "world"}, TypeError, "process_group: expected a torch.distributed.ProcessGroup, got str"),
        ({"backend": "x"}, ValueError, "backend: expected one of"),
        ({"backend": "triton", "logits": _LOGITS.double()}, ValueError, "backend: 'triton' cannot serve this call"),
    ],
)
def test_bad_input(changes, error, message):
    with pytest.raises(error, match=re.escape(message)):
        flashtile.cross_entropy(**{"logits": _LOGITS, "labels": _LABELS, **changes})


@each_case("logits", [_LOGITS[:1].expand(2, 3, 5), torch.randn(2, 4, 5)[:, :3], torch.randn(2, 5, 3).transpose(1, 2)])
def test_inplace_backward_needs_rows_of_its_own(logits):
    with pytest.raises(ValueError, match="inplace_backward: expected logits whose rows lie at one distance"):
        flashtile.cross_entropy(logits, _LABELS, inplace_backward=True)


def test_labels_are_checked_on_request(monkeypatch):
    labels = torch.tensor([[0, 5, -100], [-1, 1, 2]])
    assert flashtile.cross_entropy(_LOGITS, labels, reduction="none").isnan().sum() == 2
    monkeypatch.setattr(checks, "CHECK_VALUES", True)
    message = "labels: expected numbers from 0 to 4, or ignore_index=-100, got 5 at (0, 1) and 1 more that are neither"
    with pytest.raises(ValueError, match=re.escape(message)):
        flashtile.cross_entropy(_LOGITS, labels)
    assert flashtile.cross_entropy(_LOGITS, labels.clamp(0, 4)).isfinite()
