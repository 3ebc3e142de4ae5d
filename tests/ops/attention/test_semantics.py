"""What a call means: small examples whose results are known without computing."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

import flashtile
from flashtile.testing import assert_same
from support.running.autograd import normal

INFINITY = float("inf")


def cumulative(lengths: tuple[int, ...]) -> Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).int()


# --- which keys a query sees ----------------------------------------------------------------------------------------


def picture(weights: Tensor) -> list[str]:
    """Rows of `x` (visible) and `.` of a matrix of weights `[queries, keys]`."""
    return ["".join("x" if weight > 0 else "." for weight in row) for row in weights]


def weights_of(seq_q: int, seq_k: int, **options: Any) -> Tensor:
    """The attention weights `[queries, keys]`, read off by values that are unit vectors."""
    q, k = torch.zeros(1, seq_q, 1, 4), torch.zeros(1, seq_k, 1, 4)
    return flashtile.attention(q, k, torch.eye(seq_k)[None, :, None], **options)[0, :, 0]


PICTURES = [
    ((2, 4), {}, ["xxxx", "xxxx"]),
    ((2, 4), {"causal": True}, ["xxx.", "xxxx"]),
    ((2, 4), {"causal": True, "align": "top_left"}, ["x...", "xx.."]),
    ((4, 2), {"causal": True}, ["..", "..", "x.", "xx"]),
    ((4, 2), {"causal": True, "align": "top_left"}, ["x.", "xx", "xx", "xx"]),
    ((3, 3), {"causal": True}, ["x..", "xx.", "xxx"]),
    ((4, 4), {"window": (1, 1)}, ["xx..", "xxx.", ".xxx", "..xx"]),
    ((4, 4), {"window": (1, None)}, ["xxxx", "xxxx", ".xxx", "..xx"]),
    ((4, 4), {"window": (None, 1)}, ["xx..", "xxx.", "xxxx", "xxxx"]),
    ((4, 4), {"window": (None, None)}, ["xxxx"] * 4),
    ((4, 4), {"window": (0, 0)}, ["x...", ".x..", "..x.", "...x"]),
    ((4, 4), {"window": [2, 3], "causal": True}, ["x...", "xx..", "xxx.", ".xxx"]),
    ((4, 4), {"window": (1, None), "causal": True}, ["x...", "xx..", ".xx.", "..xx"]),
    ((2, 5), {"window": (1, 0)}, ["..xx.", "...xx"]),
    ((2, 5), {"window": (1, 0), "align": "top_left"}, ["x....", "xx..."]),
    ((5, 2), {"window": (0, 0)}, ["..", "..", "..", "x.", ".x"]),
    ((5, 2), {"window": (0, 0), "align": "top_left"}, ["x.", ".x", "..", "..", ".."]),
    ((3, 3), {"window": (2**31 - 1, 2**31 - 1)}, ["xxx"] * 3),
    ((3, 4), {"key_lengths": (2,)}, ["xx.."] * 3),
    ((3, 4), {"key_lengths": (2,), "causal": True}, ["xx..", "xx..", "xx.."]),
    ((3, 4), {"key_lengths": (2,), "causal": True, "align": "top_left"}, ["x...", "xx..", "xx.."]),
    ((3, 4), {"key_lengths": (1,), "window": (1, 0)}, ["x...", "....", "...."]),
    ((2, 3), {"key_lengths": (0,)}, ["...", "..."]),
    ((2, 3), {"key_lengths": (3,)}, ["xxx", "xxx"]),
]


@pytest.mark.parametrize("sizes, options, expected", PICTURES, ids=lambda value: str(value).replace(" ", ""))
def test_visible_keys(sizes, options, expected):
    if "key_lengths" in options:
        options = {**options, "key_lengths": torch.tensor(options["key_lengths"])}
    weights = weights_of(*sizes, **options)
    assert picture(weights) == expected
    # All scores are 0: what is visible is weighted equally.
    seen = (weights > 0).sum(-1, keepdim=True)
    assert_same(weights, (weights > 0) / seen.clamp(min=1))


# --- scores, scale, lse ---------------------------------------------------------------------------------------------


def test_softmax_by_hand():
    q = torch.tensor([2.0, 0.0]).view(1, 1, 1, 2)
    k = torch.tensor([[1.0, 5.0], [0.5, -7.0]]).view(1, 2, 1, 2)
    v = torch.tensor([[1.0], [3.0]]).view(1, 2, 1, 1)
    out, lse = flashtile.attention(q, k, v, scale=1.0, return_lse=True)
    total = math.exp(2) + math.exp(1)
    assert out.item() == pytest.approx((math.exp(2) * 1 + math.exp(1) * 3) / total, rel=1e-6)
    assert lse.item() == pytest.approx(math.log(total), rel=1e-6)


@pytest.mark.parametrize("scale", [None, 1.0, 0.0, -0.5, 2, 1e-3], ids=str)
def test_scale(scale):
    q, k, v = normal(2, 3, 2, 16), normal(2, 5, 2, 16, seed=1), normal(2, 5, 2, 4, seed=2)
    out, lse = flashtile.attention(q, k, v, scale=scale, return_lse=True)
    factor = 0.25 if scale is None else scale
    scores = factor * torch.einsum("bihd,bjhd->bhij", q, k)
    assert_same(lse, scores.logsumexp(-1))
    assert_same(out, torch.einsum("bhij,bjhd->bihd", scores.softmax(-1), v))


@pytest.mark.parametrize("scale", [1e-42, 1e-60, -1e-60], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_a_scale_that_is_0_in_float32_hides_keys_as_others_do(dtype, scale):
    q, k, v = (normal(1, 40, 1, 8, dtype=dtype, seed=seed).requires_grad_() for seed in range(3))
    out = flashtile.attention(q, k, v, causal=True, scale=scale)
    gradients = torch.autograd.grad(out.float().sum(), (q, k, v))
    expected = flashtile.attention(q, k, v, causal=True, scale=0)
    assert torch.equal(out, expected)
    for actual, of_0 in zip(gradients, torch.autograd.grad(expected.float().sum(), (q, k, v)), strict=True):
        assert torch.equal(actual, of_0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64], ids=str)
def test_types_and_shapes(dtype):
    q, k, v = (normal(2, s, h, d).to(dtype) for s, h, d in ((3, 4, 8), (5, 2, 8), (5, 2, 6)))
    out, lse = flashtile.attention(q, k, v, return_lse=True)
    assert (out.dtype, out.shape) == (dtype, (2, 3, 4, 6))
    assert (lse.dtype, lse.shape) == (torch.float64 if dtype is torch.float64 else torch.float32, (2, 4, 3))
    assert isinstance(flashtile.attention(q, k, v), Tensor)


def test_types_and_shapes_packed():
    q, k, v = (normal(7, h, d).float() for h, d in ((4, 8), (2, 8), (2, 6)))
    out, lse = flashtile.attention_varlen(q, k, v, cumulative((3, 4)), return_lse=True)
    assert (out.dtype, out.shape) == (torch.float32, (7, 4, 6))
    assert (lse.dtype, lse.shape) == (torch.float32, (4, 7))


@pytest.mark.parametrize("magnitude", [30.0, 1e4, -1e4], ids=str)
def test_large_scores_do_not_overflow(magnitude):
    q, k = torch.full((1, 3, 1, 4), magnitude), torch.ones(1, 5, 1, 4)
    out, lse = flashtile.attention(q, k, torch.ones(1, 5, 1, 2), scale=1.0, return_lse=True)
    assert_same(out, torch.ones_like(out))
    assert_same(lse, torch.full_like(lse, 4 * magnitude + math.log(5)))


# --- heads and head sizes -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("heads, heads_kv", [(6, 3), (6, 2), (6, 1), (6, 6)], ids=str)
def test_query_head_reads_its_group(heads, heads_kv):
    q, k = torch.zeros(1, 2, heads, 4), torch.zeros(1, 3, heads_kv, 4)
    v = torch.arange(heads_kv).float().view(1, 1, heads_kv, 1).expand(1, 3, -1, -1)
    out = flashtile.attention(q, k, v)
    group = heads // heads_kv
    assert out[0, 0, :, 0].tolist() == pytest.approx([head // group for head in range(heads)])


# --- rows, sequences and batches without anything -------------------------------------------------------------------


@pytest.mark.parametrize("lengths", [(), (0,), (0, 0, 0)], ids=str)
@pytest.mark.parametrize("rows", [0, 3])
def test_packed_without_any_row(lengths, rows):
    q, k, v = (normal(rows, 2, 8).requires_grad_() for _ in range(3))
    out, lse = flashtile.attention_varlen(q, k, v, cumulative(lengths), return_lse=True)
    assert out.shape == (rows, 2, 8)
    assert not out.any()
    assert (lse == -INFINITY).all()
    gradients = torch.autograd.grad((out, lse), (q, k, v), (torch.ones_like(out), torch.ones_like(lse)))
    assert not any(gradient.any() for gradient in gradients)


# --- packed sequences and key lengths -------------------------------------------------------------------------------


def packed_inputs(lengths_q: tuple[int, ...], lengths_k: tuple[int, ...]) -> list[Tensor]:
    """q of 4 heads, k and v of 2, with one row at the end that no sequence owns."""
    sizes = ((sum(lengths_q), 4), (sum(lengths_k), 2), (sum(lengths_k), 2))
    return [normal(total + 1, heads, 8, seed=seed).requires_grad_() for seed, (total, heads) in enumerate(sizes)]


def test_equal_lengths_packed_are_a_batch_with_the_same_dropout():
    q, k, v = (normal(3, s, h, 8) for s, h in ((20, 4), (33, 2), (33, 2)))
    options = {"dropout_p": 0.4, "dropout_seed": torch.tensor([7, 8]), "causal": True}
    packed = flashtile.attention_varlen(
        q.flatten(0, 1), k.flatten(0, 1), v.flatten(0, 1), cumulative((20,) * 3), cumulative((33,) * 3), **options
    )
    assert_same(packed.unflatten(0, (3, 20)), flashtile.attention(q, k, v, **options))


@pytest.mark.parametrize("bounds", [(None, None), (5, 5), (100, None), (5, 1000)], ids=str)
def test_max_seqlen_is_only_a_bound(bounds):
    q, k, v = packed_inputs((3, 5), (3, 5))
    given = {"max_seqlen_q": bounds[0], "max_seqlen_k": bounds[1], "causal": True}
    plain = flashtile.attention_varlen(q, k, v, cumulative((3, 5)), causal=True)
    assert_same(flashtile.attention_varlen(q, k, v, cumulative((3, 5)), **given), plain)


def test_rows_of_no_sequence_may_be_anything():
    inputs = packed_inputs((3, 5), (4, 4))
    spoiled = [t.detach().clone() for t in inputs]
    for tensor in spoiled:
        tensor[-1] = float("nan")

    def gradients(leaves: list[Tensor]) -> tuple[Tensor, ...]:
        out = flashtile.attention_varlen(*leaves, cumulative((3, 5)), cumulative((4, 4)))
        return (out, *torch.autograd.grad(out.sin().sum(), leaves))

    assert_same(gradients([t.requires_grad_() for t in spoiled]), gradients(inputs))


# --- dropout --------------------------------------------------------------------------------------------------------


def test_dropout_scales_what_it_keeps():
    q, k = (normal(2, s, 2, 8, seed=s) for s in (20, 24))
    v = torch.eye(24, dtype=torch.float64)[None, :, None].expand(2, -1, 2, -1)
    seed = torch.tensor([3, 4])
    options = {"causal": True}
    weights = flashtile.attention(q, k, v, **options)
    dropped, lse = flashtile.attention(q, k, v, dropout_p=0.25, dropout_seed=seed, return_lse=True, **options)
    kept = flashtile.dropout_mask(seed, 0.25, batch=2, heads=2, seq_q=20, seq_k=24).transpose(1, 2)
    assert_same(dropped, weights * kept / 0.75)
    assert_same(lse, flashtile.attention(q, k, v, return_lse=True, **options)[1])
