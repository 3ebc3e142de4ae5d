"""The extensions of flash_attn 1: halves of functions, by their definition, and served under their own names."""

import pytest
import torch
from torch.nn import functional as F

import flashtile
import flashtile.compat
from flashtile.testing import assert_same
from support.attention.compat_cases import (
    cumulative,
    devices,
    every_dtype,
    extension,
    normal,
    places,
    served,
)
from support.running.each_case import each_case

dropout_layer_norm = extension("dropout_layer_norm")
flash_attn_cuda = extension("flash_attn_cuda")
fused_dense_lib = extension("fused_dense_lib")
rotary_emb = extension("rotary_emb")
scaled_masked_softmax_cuda = extension("scaled_masked_softmax_cuda")
scaled_upper_triang_masked_softmax_cuda = extension("scaled_upper_triang_masked_softmax_cuda")
xentropy_cuda_lib = extension("xentropy_cuda_lib")
fused_softmax = served(1, "fused_softmax")
convert_blockmask = served(1, "flash_blocksparse_attn_interface").convert_blockmask
flash_blocksparse_attn_func = served(1, "flash_blocksparse_attn_interface").flash_blocksparse_attn_func


def perceptron(device):
    shapes = ((5, 6), (8, 6), (8,), (4, 8), (4,))
    leaves = [normal(*shape, seed=seed).float().to(device).requires_grad_() for seed, shape in enumerate(shapes)]
    x, weight1, bias1, weight2, bias2 = leaves
    out = F.linear(F.gelu(F.linear(x, weight1, bias1), approximate="tanh"), weight2, bias2)
    dout = normal(5, 4, seed=7).to(out)
    return leaves, dout, torch.autograd.grad(out, leaves, dout)


@devices
def test_linear_layers(device):
    (x, weight1, bias1, weight2, _), dout, (dx, dw1, db1, dw2, db2) = perceptron(device)
    out1, before = fused_dense_lib.linear_gelu_forward(x, weight1, bias1, True, 0)
    assert_same(before, F.linear(x, weight1, bias1))
    assert_same(fused_dense_lib.linear_act_forward(x, weight1, bias1, False, False, 0)[0], before.relu())
    assert len(fused_dense_lib.linear_act_forward(x, weight1, bias1, True, False, 0)) == 1
    assert not before.requires_grad
    grads = fused_dense_lib.linear_gelu_linear_backward(x, before, out1, weight1, weight2, dout, 0)
    for got, wanted in zip(grads, (dx, dw1, db1, dw2, db2), strict=True):
        assert_same(got, wanted)
    start = normal(5, 6, seed=9).to(x)
    grads = fused_dense_lib.linear_residual_gelu_linear_backward(
        x, before, out1, weight1, weight2, dout, buffer := start.clone(), 0
    )
    assert grads[0] is buffer
    assert_same(buffer, start + dx)
    dbefore, dbias = fused_dense_lib.bias_act_linear_dgrad_bgrad(weight2, dout, before, True, 0)
    assert_same(dbias, db1)
    for got, wanted in zip(fused_dense_lib.linear_bias_backward(x, weight1, dbefore), (dx, dw1, db1), strict=True):
        assert_same(got, wanted)
    assert fused_dense_lib.linear_bias_wgrad(x, dbefore, False)[1] is None
    for call in (
        lambda: fused_dense_lib.linear_act_forward(x, weight1, bias1, False, True, 0),
        lambda: fused_dense_lib.bias_act_linear_dgrad_bgrad(weight2, dout, before, False, 0),
    ):
        with pytest.raises(ValueError, match=r"save_pre_act|is_gelu"):
            call()


@devices
def test_rotation(device):
    a, b = (normal(2, 5, 3, 4, seed=seed).float().to(device) for seed in range(2))
    angles = normal(5, 1, 4, seed=2).float().to(device)
    first, second = torch.empty_like(a), torch.empty_like(b)
    rotary_emb.apply_rotary(a, b, angles.cos(), angles.sin(), first, second, False)
    assert_same(first, a * angles.cos() - b * angles.sin())
    assert_same(second, a * angles.sin() + b * angles.cos())
    rotary_emb.apply_rotary(first, second, angles.cos(), angles.sin(), first, second, True)
    assert_same(first, a)
    assert_same(second, b)


@devices
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("inplace", [False, True])
def test_cross_entropy(inplace, smoothing, device):
    logits, labels = normal(5, 11).float().to(device), torch.tensor([3, 0, 9, 10, 7], device=device)
    leaf = logits.clone().requires_grad_()
    expected = F.cross_entropy(leaf, labels, label_smoothing=smoothing, reduction="none")
    losses, lse = xentropy_cuda_lib.forward(logits, labels, smoothing)
    assert_same(losses, expected.detach())
    assert_same(lse, logits.logsumexp(1))
    dloss = normal(5, seed=1).float().to(device)
    grad = xentropy_cuda_lib.backward(dloss, logits, lse, labels, smoothing, inplace)
    assert_same(grad, torch.autograd.grad(expected, leaf, dloss)[0])
    assert (grad.data_ptr() == logits.data_ptr()) is inplace
    with pytest.raises(ValueError, match="total_classes"):
        xentropy_cuda_lib.forward(logits, labels, smoothing, 22)


@devices
def test_softmax(device):
    x = normal(2, 3, 5, 5).float().to(device).requires_grad_()
    mask = (normal(2, 1, 5, 5, seed=1) < -0.5).to(device)
    causal = torch.ones(5, 5, dtype=torch.bool, device=device).triu(1)
    for out, hidden, backward, recorded in (
        (
            scaled_masked_softmax_cuda.forward(x, mask, 0.5), mask, scaled_masked_softmax_cuda.backward,
            fused_softmax.scaled_masked_softmax(x, mask, 0.5),
        ),
        (
            scaled_upper_triang_masked_softmax_cuda.forward(x.flatten(0, 1), 0.5).view(x.shape), causal,
            scaled_upper_triang_masked_softmax_cuda.backward,
            fused_softmax.scaled_upper_triang_masked_softmax(x, None, 0.5),
        ),
    ):  # fmt: skip
        expected = (x * 0.5).masked_fill(hidden, float("-inf")).softmax(-1)
        assert_same(out, expected.detach())
        assert torch.equal(recorded, out) and recorded.requires_grad and not out.requires_grad
        dout = normal(2, 3, 5, 5, seed=2).to(out)
        assert_same(backward(dout, out, 0.5), torch.autograd.grad(expected, x, dout)[0])
    with pytest.raises(ValueError, match="mask: expected None"):
        fused_softmax.scaled_upper_triang_masked_softmax(x, mask, 0.5)


# Attention


LENGTHS_Q, LENGTHS_K = [5, 0, 40, 33], [9, 4, 33, 40]
dropout_and_causal = pytest.mark.parametrize(
    ("dropout_p", "causal"), [(0.0, False), (0.25, True)], ids=["plain", "causal with dropout"]
)


@places
@dropout_and_causal
def test_attention(dropout_p, causal, device, dtype):
    """The halves of attention; dropout by rng_state, or by the generator."""
    leaves = [
        normal(rows, 4, 16, seed=seed).to(device, dtype).requires_grad_() for seed, rows in enumerate((78, 86, 86))
    ]
    q, k, v = (leaf.detach() for leaf in leaves)
    dout, ends_q, ends_k = normal(78, 4, 16, seed=3).to(q), cumulative(LENGTHS_Q, device), cumulative(LENGTHS_K, device)
    lengths, options = (ends_q, ends_k, 40, 40), (dropout_p, 0.3, False, causal)
    out, generator = torch.empty_like(q), torch.Generator(device).manual_seed(7)
    lse, rng_state, weights = flash_attn_cuda.fwd(q, k, v, out, *lengths, *options, True, 0, generator)
    assert lse.shape == (4, 4, 48) and weights.shape == (4, 4, 48, 64) and rng_state.shape == (2,)
    assert len(flash_attn_cuda.fwd(q, k, v, torch.empty_like(q), *lengths, *options, False, 0)) == 2
    dropout = {"dropout_p": dropout_p, "dropout_seed": rng_state} if dropout_p else {}
    longest = {"max_seqlen_q": 40, "max_seqlen_k": 40}
    expected = flashtile.attention_varlen(
        *leaves, ends_q, ends_k, **longest, scale=0.3, causal=causal, align="top_left", **dropout
    )
    derived = torch.autograd.grad(expected, leaves, dout)
    for given in ({"rng_state": rng_state}, {"gen": torch.Generator(device).manual_seed(7)}):
        grads = [torch.full_like(x, float("nan")) for x in (q, k, v)]
        *results, sums = flash_attn_cuda.bwd(dout, q, k, v, out, lse, *grads, *lengths, *options, 1, **given)
        assert all(result is grad for result, grad in zip(results, grads)) and sums.shape == (4, 4, 48)
        assert_same([out, *grads], [expected.detach(), *derived])


@places
@dropout_and_causal
def test_block_sparse_attention(dropout_p, causal, device, dtype):
    layout = torch.rand(18, 2, generator=torch.Generator().manual_seed(0)) < 0.6
    layout[3] = False  # queries that see nothing
    ends = cumulative([270, 0, 7, 130], device)
    leaf = normal(407, 3, 2, 16).to(device, dtype).requires_grad_()
    torch.manual_seed(7)
    expected = flash_blocksparse_attn_func(leaf, ends, layout[:17].to(device), dropout_p, 270, 0.3, causal)
    dout = normal(407, 2, 16, seed=3).to(expected)
    q, k, v = (part.contiguous() for part in leaf.detach().unbind(1))
    given = (ends, ends, convert_blockmask(layout, causal=False).to(device), 270, 270, dropout_p, 0.3, causal)
    out, lse = flash_attn_cuda.fwd_block(q, k, v, *given, False, torch.Generator(device).manual_seed(7))
    assert lse.shape == (4, 2, 272) and lse[1].isneginf().all() and lse[0, :, 48:64].isneginf().all()
    grads = [torch.full_like(x, float("nan")) for x in (q, k, v)]
    arguments = dout, q, k, v, out, lse, *grads, *given
    *_, sums = flash_attn_cuda.bwd_block(*arguments, torch.Generator(device).manual_seed(7))
    assert sums.shape == (4, 2, 272) and not sums[1].any()
    assert_same([out, torch.stack(grads, 1)], [expected.detach(), torch.autograd.grad(expected, leaf, dout)[0]])
    with pytest.raises(ValueError, match="return_softmax: expected False"):
        flash_attn_cuda.fwd_block(q, k, v, *given, True)


# Norms


def fused_norm(rms):
    return flashtile.dropout_add_rms_norm if rms else flashtile.dropout_add_layer_norm


@every_dtype
@each_case("rms", [False, True])
@each_case(
    "subset, scaled, dropout_p", [(False, False, 0.0), (False, True, 0.25), (True, True, 0.0), (True, False, 0.25)]
)
def test_norms(subset, scaled, dropout_p, rms, device, dtype):
    """The halves of flashtile's functions."""
    shapes = [(5 if subset else 7, 12), (7, 12), (12,), (12,), (12,)]
    leaves = [normal(*shape, seed=seed).to(device, dtype).requires_grad_() for seed, shape in enumerate(shapes)]
    leaves = leaves if scaled else leaves[:4]
    x0, gamma, colscale = leaves[0], leaves[2], leaves[4] if scaled else None
    rowscale = normal(7, seed=5).to(device, dtype) if scaled and not subset else None
    takes = torch.tensor([0, 1, 0, 3, 2, 5, 4], dtype=torch.int32, device=device) if subset else None
    gives = torch.tensor([2, 0, 1, 0, 3, 0, 0], dtype=torch.int32, device=device) if subset else None
    constant, numrows = (0.5, 3) if subset else (1.0, 0)
    torch.manual_seed(7)
    *expected, kept = fused_norm(rms)(
        *leaves[:4], dropout_p, 1e-3, rowscale, colscale, prenorm=True, return_dropout_mask=True, x0_subset=takes,
        out_subset=gives, rowscale_const=constant, out_numrows=numrows,
    )  # fmt: skip
    others, generator = (rowscale, colscale, takes, gives), torch.Generator(device).manual_seed(7)
    z, x, mask, mu, rsigma = dropout_layer_norm.dropout_add_ln_fwd(
        *leaves[:4], *others, dropout_p, 1e-3, constant, numrows, generator, False, rms
    )
    assert_same(mask, kept.to(torch.uint8) if dropout_p else None)
    wide = x.to(torch.promote_types(dtype, torch.float32))
    assert_same(mu, torch.zeros_like(mu) if rms else wide.mean(-1))
    assert_same(rsigma, ((wide.square().mean(-1) if rms else wide.var(-1, correction=0)) + 1e-3).rsqrt())
    upstream = [normal(*out.shape, seed=6 + number).to(out) for number, out in enumerate(expected)]
    results = dropout_layer_norm.dropout_add_ln_bwd(
        *upstream, x, x0, mask, mu, rsigma, gamma, *others, dropout_p, constant, x0.shape[0], True, rms
    )
    grads = [*results[:4], *results[6:7]]
    derived = torch.autograd.grad(expected, leaves, upstream)
    assert_same([z, x, *grads], [*(out.detach() for out in expected), *derived])


@devices
@each_case("rms", [False, True])
def test_norms_of_what_is_not_there(rms, device):
    """A plain norm returns neither x nor mask, and a backward of it no gradient of a residual."""
    x, gamma = normal(5, 12).float().to(device), normal(12, seed=1).float().to(device)
    nothing = (None,) * 4
    z, same, mask, mu, rsigma = dropout_layer_norm.dropout_add_ln_fwd(
        x, None, gamma, None, *nothing, 0.0, 1e-3, 1.0, 0, None, False, rms
    )
    assert same is mask is None
    leaf = x.clone().requires_grad_()
    expected = (F.rms_norm(leaf, (12,), eps=1e-3) if rms else F.layer_norm(leaf, (12,), eps=1e-3)) * gamma
    assert_same(z, expected.detach())
    dz = normal(5, 12, seed=2).to(x)
    dx0, dresidual, *_ = dropout_layer_norm.dropout_add_ln_bwd(
        dz, None, x, None, None, mu, rsigma, gamma, *nothing, 0.0, 1.0, 0, False, rms
    )
    assert dresidual is None
    assert_same(dx0, torch.autograd.grad(expected, leaf, dz)[0])
    wide = dropout_layer_norm.dropout_add_ln_fwd(
        x.half(), None, gamma, None, *nothing, 0.0, 1e-3, 1.0, 0, None, True, rms
    )
    assert wide[1].dtype is torch.float32, "the sum of another dtype is not x0"
    with pytest.raises(ValueError, match="x0: expected a tensor beside colscale"):
        dropout_layer_norm.dropout_add_ln_bwd(
            dz, None, x, None, None, mu, rsigma, gamma, None, gamma, None, None, 0.0, 1.0, 0, False, rms
        )


@devices
@each_case("rms", [False, True])
@each_case("second", [False, True])
@each_case("dropout_p", [0.0, 0.25])
def test_norms_of_parallel_branches(dropout_p, second, rms, device):
    shapes = [(5, 12)] * 3 + [(12,)] * (4 if second else 2)
    leaves = [normal(*shape, seed=seed).float().to(device).requires_grad_() for seed, shape in enumerate(shapes)]
    x0, x1, residual, *weights = leaves
    gamma0, beta0, gamma1, beta1 = (*weights, None, None)[:4]
    torch.manual_seed(7)
    *expected, kept0, kept1 = fused_norm(rms)(
        x0, residual, gamma0, beta0, dropout_p, 1e-3, prenorm=True, return_dropout_mask=True, x1=x1, weight1=gamma1,
        bias1=beta1,
    )  # fmt: skip
    generator = torch.Generator(device).manual_seed(7)
    z0, z1, x, *masks, mu, rsigma = dropout_layer_norm.dropout_add_ln_parallel_residual_fwd(
        *leaves[:3], gamma0, beta0, gamma1, beta1, dropout_p, 1e-3, generator, False, rms
    )
    assert (z1 is None) is not second
    assert_same(masks, [kept.to(torch.uint8) if dropout_p else None for kept in (kept0, kept1)])
    dz0, *dz1, dx = upstream = [normal(5, 12, seed=8 + number).to(x) for number in range(len(expected))]
    *grads, a, b, c, d = dropout_layer_norm.dropout_add_ln_parallel_residual_bwd(
        dz0, *(dz1 or [None]), dx, x, *masks, mu, rsigma, gamma0, gamma1, dropout_p, True, True, rms
    )
    assert a is b is c is d is None and len(grads) == 7 and (grads[5] is None) is not second
    derived = torch.autograd.grad(expected, leaves, upstream)
    assert_same([z0, *[z1] * second, x], [out.detach() for out in expected])
    assert_same(grads[: len(leaves)], derived)
    alone = dropout_layer_norm.dropout_add_ln_parallel_residual_fwd(
        x0, None, None, gamma0, beta0, None, None, dropout_p, 1e-3, None, False, rms
    )
    assert (alone[2] is None) is (dropout_p == 0) and alone[1] is alone[4] is None


def test_every_number_of_rows_is_served():
    assert scaled_masked_softmax_cuda.get_batch_per_block(33, 77, 3, 5) == 1
