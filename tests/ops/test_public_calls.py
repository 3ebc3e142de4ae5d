"""What holds for every public function (tests/public_calls.py): another default device, sizes that depend on data,
results that are changed in place, and the arithmetic that PyTorch's counter sees."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

import flashtile
from flashtile.testing import assert_same
from public_calls import CALLS, ROWS, PublicCall

#: Public names that are no functions of tensors, or whose functions are attributes of them.
NO_CALLS = {
    "AttentionOptions", "AttentionPart", "BlockMask", "Explanation", "OnlineSoftmax", "RotaryScaling", "ScoreFunction",
    "decompositions", "explain", "finish_attention", "patterns",
}  # fmt: skip


def test_every_public_function_is_called() -> None:
    called = {name.partition(":")[0] for name in CALLS}
    of_patterns = {name.removeprefix("patterns.") for name in called if name.startswith("patterns.")}
    assert called >= set(flashtile.__all__) - NO_CALLS
    assert of_patterns == set(flashtile.patterns.__all__)


@pytest.fixture
def another_default_device() -> Iterator[None]:
    torch.set_default_device("meta")
    yield
    torch.set_default_device(None)


def results_and_gradients(call: PublicCall, leaves: list[Tensor]) -> list[Tensor]:
    """What a call returns, and the gradients of its leaves."""
    leaves = [leaf.clone().requires_grad_() for leaf in leaves]
    results = call.results(*leaves)
    recorded = [out.square().sum() for out in results if out.requires_grad]
    if recorded:
        results += [g for g in torch.autograd.grad(sum(recorded), leaves, allow_unused=True) if g is not None]
    return [result.detach() for result in results]


@pytest.mark.parametrize("name", CALLS)
def test_another_default_device(name: str, another_default_device: None) -> None:
    call = CALLS[name]
    found = results_and_gradients(call, call.leaves(ROWS))
    torch.set_default_device(None)
    assert_same(found, results_and_gradients(call, call.leaves(ROWS)))
