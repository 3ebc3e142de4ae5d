"""Several gradients in one backward, as `torch.autograd.functional.jacobian(vectorize=True)` asks for them."""

import pytest
import torch

import flashtile
from flashtile.testing import assert_same
from support.running.each_case import each_case
from support.running.public_calls import CALLS, ROWS


@pytest.mark.filterwarnings("ignore:There is a performance drop")
@each_case("call", [call for call in CALLS.values() if call.shapes])
def test_several_gradients_are_those_of_one_after_another(call):
    leaves = [leaf.requires_grad_() for leaf in call.leaves(ROWS)]
    call.results(*leaves)  # The next one is a call like an earlier one.
    results = [result for result in call.results(*leaves) if result.requires_grad]
    generator = torch.Generator().manual_seed(0)
    upstream = [torch.randn(3, *result.shape, generator=generator) for result in results]
    options = {"retain_graph": True, "allow_unused": True}
    if not results:
        return
    together = torch.autograd.grad(results, leaves, upstream, is_grads_batched=True, **options)
    for place in range(3):
        alone = torch.autograd.grad(results, leaves, [u[place] for u in upstream], **options)
        for several, one in zip(together, alone, strict=True):
            assert_same(None if several is None else several[place], one)


def test_a_sum_in_place_takes_one_gradient():
    weight = torch.randn(3, 5, requires_grad=True)
    out = flashtile.fused_dense(torch.randn(4, 5), weight, main_grad=torch.zeros(3, 5))
    with pytest.raises(ValueError, match="main_grad: expected None under is_grads_batched=True"):
        torch.autograd.grad(out, weight, torch.randn(2, 4, 3), is_grads_batched=True)
