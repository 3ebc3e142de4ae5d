"""The textbook version of the algorithm: as exact as the library, for every shape, and as short as it says."""

from pathlib import Path

import pytest
import torch

from flashtile import learn
from flashtile.testing import AttentionCase, Size, assert_close, make_inputs, run, size
from support.running.each_case import each_case

SHAPES = [(1, 1), (5, 3), (16, 16), (33, 65), (65, 33), (70, 100), (7, 0), (0, 7), (31, 31)]


def _results(inputs, causal: bool, tile: int) -> dict[str, torch.Tensor]:
    q, k, v = (t.transpose(1, 2).clone().requires_grad_() for t in (inputs.q, inputs.k, inputs.v))
    out, lse = learn.attention(q, k, v, causal=causal, tile=tile)
    grads = torch.autograd.grad((out, lse), (q, k, v), (inputs.dout.transpose(1, 2), inputs.dlse))
    found = {"out": out.detach(), **dict(zip(("dq", "dk", "dv"), grads))}
    return {**{name: tensor.transpose(1, 2) for name, tensor in found.items()}, "lse": lse.detach()}


def _check(case: AttentionCase, tile: int) -> None:
    inputs = make_inputs(case)
    oracle, eager = run(case, inputs, "reference", torch.float64), run(case, inputs, "reference")
    found = _results(inputs, case.arguments["causal"], tile)
    assert found.keys() == oracle.keys()
    # What the rounding of delta leaves in dq and dk where the rest cancels, as in docs/contract.md.
    delta = size((inputs.dout.double() * oracle["out"]).norm(dim=-1))
    left = {"dq": size(inputs.k), "dk": size(inputs.q)}
    for name, tensor in found.items():
        cancelled = Size(1, 1) if name == "lse" else Size()
        if name in left:
            cancelled = Size(*(a * b * case.head_dim**-0.5 for a, b in zip(delta, left[name])))
        assert_close(f"{case}: {name}", tensor, oracle[name], eager[name], cancelled)


@each_case("dtype", [torch.float64, torch.float32])
@each_case("causal", [False, True])
@each_case("seq_q, seq_k", SHAPES)
def test_agrees_with_the_oracle(seq_q, seq_k, causal, dtype):
    case = AttentionCase(
        seq_q=seq_q, seq_k=seq_k, head_dim=24, head_dim_v=40, dtype=dtype, arguments={"causal": causal}
    )
    _check(case, tile=16)


@pytest.mark.parametrize("tile", [1, 7, 32, 1000])
def test_any_tile_gives_the_same(tile):
    _check(AttentionCase(seq_q=20, seq_k=30, arguments={"causal": True}), tile)


@pytest.mark.parametrize("causal", [False, True])
def test_gradients_are_those_of_differences(causal):
    shapes = ((2, 7, 3), (2, 5, 3), (2, 5, 4))
    tensors = [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes]
    # Rows that see no key have lse = -inf, of which a difference is not defined.
    first = 2 if causal else 0

    def visible_rows(q, k, v):
        out, lse = learn.attention(q, k, v, causal=causal, tile=2)
        return out, lse[:, first:]

    assert torch.autograd.gradcheck(visible_rows, tensors)


def test_a_row_without_keys_is_zero_and_has_no_gradient():
    q, k = torch.randn(4, 8, requires_grad=True), torch.randn(2, 8, requires_grad=True)
    out, lse = learn.attention(q, k, k, causal=True)
    assert not out[:2].any() and bool((lse[:2] == float("-inf")).all())
    out.sum().backward()
    assert not q.grad[:2].any() and q.grad[2:].any() and k.grad.isfinite().all()


def test_no_tensor_has_all_scores(monkeypatch):
    """Of 512 x 512 scores at most 32 x 32 are there at a time."""
    sizes = []
    exp = torch.exp
    monkeypatch.setattr(torch, "exp", lambda x: (sizes.append(x.numel()), exp(x))[1])
    q = torch.randn(512, 8, requires_grad=True)
    learn.attention(q, q, q)[0].sum().backward()
    assert max(sizes) == 32 * 32


@each_case("change", [{"q": (4, 9)}, {"k": (3, 8)}, {"v": (2, 8)}, {"k": (1, 3, 8)}, {"tile": 0}])
def test_what_does_not_fit_raises(change):
    shapes = {"q": (4, 8), "k": (5, 8), "v": (5, 6)} | change
    with pytest.raises(ValueError, match=r"expected q \[\.\.\., Sq, D\].* got \("):
        learn.attention(*(torch.zeros(shapes[name]) for name in "qkv"), tile=change.get("tile", 32))


def test_it_fits_on_a_page():
    assert len(Path(learn.__file__).read_text("utf-8").splitlines()) <= 80
