"""Unpadding: the rows that a mask keeps, and back; each is the gradient of the other."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flashtile.modules import pad_input, unpad_input
from flashtile.testing import assert_same
from support.running.each_case import each_case


def random_mask(batch: int, seq: int, seed: int = 0) -> torch.Tensor:
    return torch.rand(batch, seq, generator=torch.Generator().manual_seed(seed)) < 0.6


def check(x: torch.Tensor, mask: torch.Tensor, total: int | None = None) -> None:
    kept = unpad_input(x, mask, total=total)
    assert torch.equal(kept.x, x[mask])
    assert torch.equal(kept.indices, mask.flatten().nonzero().flatten())
    lengths = mask.sum(1)
    assert kept.lengths.tolist() == lengths.tolist() and kept.lengths.dtype is torch.int32
    assert kept.cu_seqlens.tolist() == [0, *lengths.cumsum(0).tolist()] and kept.cu_seqlens.dtype is torch.int32
    longest = max(lengths.tolist(), default=0)
    assert kept.max_seqlen == (longest if total is None else mask.shape[1]) and isinstance(kept.max_seqlen, int)
    expected = torch.where(mask.view(*mask.shape, *[1] * (x.dim() - 2)), x, 0)
    assert torch.equal(pad_input(kept.x, kept.indices, *mask.shape), expected)


@given(st.integers(0, 4), st.integers(0, 9), st.integers(0, 3), st.booleans())
@settings(max_examples=50)
def test_is_indexing_with_the_mask(batch, seq, seed, known):
    mask = random_mask(batch, seq, seed)
    check(torch.randn(batch, seq, 3), mask, int(mask.sum()) if known else None)


@each_case("x", [
    torch.randn(3, 5), torch.randn(3, 5, 2, 4), torch.randn(5, 3, 4).transpose(0, 1),
    torch.randn(3, 1, 4).expand(3, 5, 4), torch.arange(15).view(3, 5),
])  # fmt: skip
def test_any_shape_strides_and_dtype(x):
    check(x, random_mask(3, 5))
    check(x, torch.zeros(3, 5, dtype=torch.bool))
    check(x, torch.ones(3, 5, dtype=torch.bool))


def dual(function, x, direction):
    with torch.autograd.forward_ad.dual_level():
        out = function(torch.autograd.forward_ad.make_dual(x, direction))
        return torch.autograd.forward_ad.unpack_dual(out).tangent


@pytest.mark.parametrize("derivative", [torch.func.jvp, lambda f, x, d: (f(*x), dual(f, *x, *d))], ids=["jvp", "dual"])
def test_in_forward_mode(derivative):
    mask = random_mask(3, 5)
    x, direction = torch.randn(3, 5, 2), torch.randn(3, 5, 2)
    rows, of_rows = derivative(lambda x: unpad_input(x, mask).x, (x,), (direction,))
    assert torch.equal(rows, x[mask]) and torch.equal(of_rows, direction[mask])
    indices = unpad_input(x, mask).indices
    _, padded = derivative(lambda rows: pad_input(rows, indices, 3, 5), (x[mask],), (direction[mask],))
    assert torch.equal(padded, direction * mask[..., None])


@each_case("inner", [torch.func.jacrev, torch.func.jacfwd])
@each_case("outer", [torch.func.jacrev, torch.func.jacfwd])
def test_second_derivatives_in_any_order_of_modes(outer, inner):
    mask, x = random_mask(3, 5), torch.randn(3, 5, dtype=torch.float64)

    def cubes(x):
        kept = unpad_input(x**3, mask)
        return pad_input(kept.x, kept.indices, 3, 5).sum()

    hessian = outer(inner(cubes))(x)
    assert_same(hessian.view(15, 15), torch.diag((6 * x * mask).flatten()))


def test_compiles_whole_with_a_known_total():
    mask = random_mask(3, 5)
    total = int(mask.sum())

    @torch.compile(fullgraph=True, backend="eager")
    def there_and_back(x):
        kept = unpad_input(x, mask, total=total)
        return pad_input(kept.x * 2, kept.indices, 3, 5)

    x = torch.randn(3, 5, 4, requires_grad=True)
    out = there_and_back(x)
    out.sum().backward()
    assert torch.equal(out, 2 * x * mask[..., None])
    assert torch.equal(x.grad, 2.0 * mask[..., None].expand(3, 5, 4))


def test_exports_with_a_batch_that_depends_on_data():
    class ThereAndBack(torch.nn.Module):
        def forward(self, chosen: torch.Tensor, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
            x, mask = x[chosen], mask[chosen.clone()]  # of two sizes to PyTorch
            rows, kept = x.flatten(0, 1)[mask.flatten()], mask.flatten().nonzero().flatten()
            return pad_input(rows, kept, *mask.shape) + pad_input(*unpad_input(x, mask)[:2], *mask.shape)

    model, x, mask = ThereAndBack(), torch.randn(3, 5, 4), random_mask(3, 5)
    chosen = torch.tensor([True, False, True])
    program = torch.export.export(model, (chosen, x, mask)).module()
    for each in (chosen, ~chosen):
        assert_same(program(each, x, mask), model(each, x, mask))


def test_mistakes_are_explained():
    x, mask = torch.randn(3, 5, 4), random_mask(3, 5)
    with pytest.raises(TypeError, match=r"mask: expected dtype bool, True = keep, got torch\.int64"):
        unpad_input(x, mask.long())
    with pytest.raises(ValueError, match=r"mask: expected the \(batch, seq\) of x, \(3, 5\), got \(5, 3\)"):
        unpad_input(x, mask.T)
    with pytest.raises(ValueError, match="mask: expected the device of x, cpu, got meta"):
        unpad_input(x, mask.to("meta"))
    with pytest.raises(
        ValueError, match=rf"total: expected the number of True elements of the mask, {mask.sum()}, got"
    ):
        unpad_input(x, mask, total=int(mask.sum()) + 1)
    with pytest.raises(TypeError, match=r"total: expected an int, got 7\.0"):
        unpad_input(x, mask, total=7.0)
    with pytest.raises(ValueError, match=r"indices: expected shape \(4,\), one for each row of x, got \(3,\)"):
        pad_input(x[0, :4], torch.arange(3), 3, 5)
    with pytest.raises(TypeError, match=r"indices: expected dtype int32 or int64, got torch.float32"):
        pad_input(x[0, :3], torch.ones(3), 3, 5)
    with pytest.raises(TypeError, match="mask: expected a tensor, got NoneType"):
        unpad_input(torch.randn(3, 5, 2), None)
    with pytest.raises(TypeError, match="indices: expected a tensor, got list"):
        pad_input(torch.randn(2, 2), [0, 1], 3, 5)
    with pytest.raises(ValueError, match="indices: expected the device of x, cpu, got meta"):
        pad_input(torch.randn(2, 2), torch.arange(2, device="meta"), 3, 5)
    with pytest.raises(ValueError, match="batch, seqlen: expected places for the 4 rows of x, got 0 and 5"):
        pad_input(torch.randn(4, 2), torch.arange(4), 0, 5)
    for wrong in (6, -1):
        with pytest.raises(ValueError, match=f"indices: expected places of 3 sequences of 2 rows, .* {wrong}"):
            pad_input(torch.randn(2, 2), torch.tensor([2, wrong]), 3, 2)


@pytest.mark.gpu
def test_on_a_gpu_a_known_total_waits_for_nothing():
    mask, x = random_mask(7, 300).cuda(), torch.randn(7, 300, 64, device="cuda", requires_grad=True)
    total = int(mask.sum())
    expected = torch.where(mask[..., None], x, 0)
    grad = torch.randn_like(x)
    torch.cuda.set_sync_debug_mode("error")
    try:
        kept = unpad_input(x, mask, total=total)
        out = pad_input(kept.x, kept.indices, 7, 300)
        out.backward(grad)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.equal(out, expected) and torch.equal(x.grad, torch.where(mask[..., None], grad, 0))
    assert unpad_input(x, mask).max_seqlen == mask.sum(1).max()
