"""Contents of the tensors of a case: other numbers than normal ones, and the activations of a trained model."""

from __future__ import annotations

import torch

from flashtile.bench.base import select_implementations
from flashtile.bench.cases import Case, make_inputs
from flashtile.bench.implementations import IMPLEMENTATIONS
from flashtile.bench.oracle import AttentionProblem
from flashtile.bench.runner import run_case
from flashtile.bench.values import BATCH, MADE, NORMAL, activations
from flashtile.models import GPTConfig
from flashtile.testing import assert_same
from support.running.each_case import each_case

CPU = torch.device("cpu")
_CASE = Case(1, 64, 2, 2, 16, 16, causal=True, dtype="fp32")
_SMALL = GPTConfig(context=32, layers=2, heads=2, width=16, positions="rotary", norm="rms", activation="swiglu")


def _of(values: str) -> tuple[torch.Tensor, ...]:
    inputs = make_inputs(Case(**{**_CASE.record(), "values": values}), CPU)
    return inputs.q, inputs.k, inputs.v


@each_case("values", MADE)
def test_made_values_differ_from_normal_ones_as_they_say(values: str) -> None:
    (q, k, v), (normal_q, normal_k, normal_v) = _of(values), _of(NORMAL)
    by_key = (k.square().sum((0, 2, 3)) / normal_k.square().sum((0, 2, 3))).sqrt()
    others = torch.ones(64, dtype=torch.bool)
    assert torch.equal(v, normal_v)
    if values.startswith("q-times-"):
        assert torch.equal(q, normal_q * int(values.removeprefix("q-times-")))
    elif values == "shifted":
        assert_same(q - normal_q, torch.full_like(q, 3.0))
        assert_same(k - normal_k, torch.full_like(k, 3.0))
        return
    elif values == "growing-keys":
        assert_same(by_key, torch.linspace(0.05, 20, 64))
        return
    elif values != NORMAL:
        place, factor = (0, 50.0) if values == "first-key-times-50" else (48, 100.0)
        assert_same(by_key[place], torch.tensor(factor))
        others[place] = False
    assert torch.equal(k[:, others], normal_k[:, others])


def test_a_case_with_other_values_is_measured_and_named() -> None:
    case = Case(**{**_CASE.record(), "values": "q-times-8"})
    rows = run_case(case, select_implementations(IMPLEMENTATIONS, ["flashtile-cpu"], CPU), CPU, AttentionProblem, 0.01)
    assert [(row["phase"], row["case"]["values"]) for row in rows] == [("fwd", "q-times-8")]
    assert rows[0]["ms"] is not None and "q-times-8" in case.name
    assert Case.from_record(rows[0]["case"]) == case


def test_activations_are_those_of_every_layer_after_training() -> None:
    before, after = (activations(CPU, steps, _SMALL) for steps in (1, 30))
    assert len(after) == 2 and all(t.shape == (BATCH, 32, 2, 8) for layer in after for t in layer)
    assert all(t.dtype is torch.float32 and t.isfinite().all() for layer in after for t in layer)
    assert (before[1][0] - after[1][0]).abs().max() > 0.05 * before[1][0].abs().max()
