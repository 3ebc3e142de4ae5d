"""How operators present themselves to PyTorch's compiler."""

import pytest
import torch
from torch._subclasses import FakeTensorMode
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.utils._pytree import tree_leaves, tree_structure

import flashtile
from flashtile.ops.common import dispatch
from flashtile.testing import assert_same


@pytest.mark.parametrize("writes_graphs_out", [False, True])
def test_inductor_makes_lowerings_without_writing_the_graph_out(writes_graphs_out, monkeypatch):
    """A named operator gets a lowering without the log that takes exponential time in deep models."""
    from torch._inductor import lowering  # which takes a second

    monkeypatch.setattr(lowering, "FALLBACK_ALLOW_LIST", type(lowering.FALLBACK_ALLOW_LIST)())
    monkeypatch.setattr(dispatch, "_WRITES_GRAPHS_OUT", writes_graphs_out)
    with FakeTensorMode():
        q = torch.empty(1, 8, 2, 16)
        flashtile.attention(q, q, q)
        flashtile.layer_norm(torch.empty(4, 8), torch.empty(8), torch.empty(8))
    named = {"flashtile::attention_forward", "flashtile::layer_norm_forward"} if writes_graphs_out else set()
    assert set(lowering.FALLBACK_ALLOW_LIST) == named


def _negative_view(x: torch.Tensor) -> torch.Tensor:
    """The same numbers, of which memory holds the negatives."""
    view = torch.complex(torch.zeros_like(x), -x).conj().imag
    assert view.is_neg() and torch.equal(view, x)
    return view


@pytest.mark.interpreter
def test_interpreted_views_that_negate_stand_for_their_numbers():
    q, bias = torch.randn(1, 20, 2, 1), torch.randn(20, 20)

    def run(q: torch.Tensor, dout: torch.Tensor, bias: torch.Tensor) -> list[torch.Tensor]:
        out = flashtile.attention(q, q, q, bias=bias, backend="triton")
        return [out, *torch.autograd.grad(out, (q, bias), dout)]

    expected = run(q.requires_grad_(), q.detach() + 1, bias.requires_grad_())
    views = (_negative_view(t.detach()).requires_grad_() for t in (q, q + 1, bias))
    for actual, wanted in zip(run(*views), expected, strict=True):
        assert_same(actual, wanted)


@pytest.mark.interpreter
def test_interpreted_backward_from_results_that_a_collective_is_bringing():
    q = torch.randn(1, 20, 2, 16)
    out, lse = flashtile.attention(q, q, q, return_lse=True, backend="triton")
    expected = flashtile.attention_backward(q, q, q, q, out, lse, backend="triton")
    coming = map(AsyncCollectiveTensor, (out, lse))
    actual = flashtile.attention_backward(q, q, q, q, *coming, backend="triton")
    assert tree_structure(actual) == tree_structure(expected)
    assert all(map(torch.equal, tree_leaves(actual)[:3], tree_leaves(expected)[:3]))
