"""`return_max_scores`: the largest score of each row, on every backend, with every other argument, and without."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

import flashtile
from flashtile.testing import assert_same
from support.attention.attention_cases import BASE, COMBINED, EDGES, parameters
from support.attention.max_scores import check
from support.running.covering import turns
from support.running.places import places

#: Every feature alone: it is written where lse is, from a row's scores, which the tests of pairs hold.
ALONE = {name: case for name, case in (COMBINED | EDGES).items() if "+" not in name and "300" not in name}


@places("cpu", "interpreted", "gpu")
@pytest.mark.parametrize("case", parameters(ALONE))
def test_agrees_with_the_oracle(case, backend, device):
    check(replace(case, head_dim=64, head_dim_v=64) if device == "cuda" else case, backend, device)


@pytest.mark.hopper
@pytest.mark.parametrize(
    "name, kind", turns(ALONE, [(64, torch.float16), (128, torch.bfloat16), (256, torch.bfloat16)]), ids=str
)
def test_on_hopper(name, kind):
    case, (head_dim, dtype) = ALONE[name], kind
    check(replace(case, head_dim=head_dim, head_dim_v=head_dim, dtype=dtype), "hopper", "cuda")


def test_the_reference_is_what_the_docstring_says():
    q, k, v = (torch.randn(2, size, 2, 16, dtype=torch.float64) for size in (5, 7, 7))
    bias, sinks = torch.randn(2, 1, 5, 7, dtype=torch.float64), torch.full((2,), 100.0, dtype=torch.float64)
    out, found = flashtile.attention(
        q, k, v, causal=True, softcap=2.0, bias=bias, sinks=sinks, key_lengths=torch.tensor([7, 0]),
        return_max_scores=True, backend="reference",
    )  # fmt: skip
    scores = 2.0 * torch.tanh(torch.einsum("bqhd,bkhd->bhqk", q, k) / 4 / 2.0) + bias
    scores = scores.masked_fill(torch.ones(5, 7).triu(3).bool(), float("-inf"))
    expected = scores.amax(-1)
    expected[1] = float("-inf")
    assert out.shape == q.shape and torch.equal(found[1], expected[1])
    assert_same(found[0], expected[0])


def test_gradients_of_the_others_stay_and_it_has_none():
    def gradients(**returned: bool) -> tuple[Tensor, ...]:
        leaves = [t.clone().requires_grad_() for t in (q, k, v)]
        results = flashtile.attention(*leaves, causal=True, return_lse=True, **returned)
        assert all(not more.requires_grad for more in results[2:])
        return torch.autograd.grad(results[0].sum() + results[1].sum(), leaves, create_graph=True)

    q, k, v = (torch.randn(1, 40, 2, 16) for _ in range(3))
    assert_same(gradients(return_max_scores=True), gradients())
    _, found = flashtile.attention(q.requires_grad_(), k, v, return_max_scores=True)
    with pytest.raises(RuntimeError, match="does not require grad"):
        found.sum().backward()


def test_every_backend_with_a_backward_has_them():
    q = torch.randn(1, 128, 2, 64, dtype=torch.bfloat16, device="meta", requires_grad=True)
    asked = flashtile.explain(q, q, q, device="sm_90", return_max_scores=True)
    assert asked.kernels == flashtile.explain(q, q, q, device="sm_90").kernels and asked.backend == "hopper"
    one = torch.randn(1, 1, 2, 64, dtype=torch.bfloat16, device="meta")
    keys = torch.randn(1, 4096, 2, 64, dtype=torch.bfloat16, device="meta")
    assert flashtile.explain(one, keys, keys, device="sm_90").backend == "split"
    assert (
        "largest score" in flashtile.explain(one, keys, keys, device="sm_90", return_max_scores=True).rejected["split"]
    )
    assert flashtile.explain(BASE_Q, BASE_Q, BASE_Q, return_max_scores=True).backend in ("cpu", "triton")


BASE_Q = torch.randn(1, BASE.seq_q, 2, 16)
