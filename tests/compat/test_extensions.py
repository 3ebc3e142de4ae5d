"""The extensions of flash_attn 1: halves of functions, by their definition, and served under their own names."""

import pytest
import torch
from torch.nn import functional as F

import flashtile
import flashtile.compat
from flashtile.testing import assert_close, assert_same
from support.attention.compat_cases import (
    Meaning,
    attention_by_definition,
    cumulative,
    devices,
    every_dtype,
    extension,
    normal,
    packed_by_definition,
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


LENGTHS = [5, 0, 40, 33]


@places
@each_case("dropout_p, causal", [(0.0, False), (0.25, True)])
def test_attention(dropout_p, causal, device, dtype):
    """The functions of the interface call these with the same arguments; dropout by rng_state, or by the generator."""
    q, k, v = (normal(78, 4, 16, seed=seed).to(device, dtype) for seed in range(3))
    dout, ends = normal(78, 4, 16, seed=3).to(q), cumulative(LENGTHS, device)
    lengths, options = (ends, ends, 40, 40), (dropout_p, 0.3, False, causal)
    out, generator = torch.empty_like(q), torch.Generator(device).manual_seed(7)
    lse, rng_state, weights = flash_attn_cuda.fwd(q, k, v, out, *lengths, *options, True, 0, generator)
    assert lse.shape == (4, 4, 48) and weights.shape == (4, 4, 48, 64) and rng_state.shape == (2,)
    assert len(flash_attn_cuda.fwd(q, k, v, torch.empty_like(q), *lengths, *options, False, 0)) == 2
    kept = None
    if dropout_p:
        kept = flashtile.dropout_mask(rng_state, dropout_p, batch=4, heads=4, seq_q=40, seq_k=40)
    meaning = Meaning(scale=0.3, causal=causal, top_left=True, dropout_p=dropout_p)

    def definition(wide):
        leaves = [x.to(wide).requires_grad_() for x in (q, k, v)]
        result, _ = packed_by_definition(*leaves, LENGTHS, LENGTHS, meaning, kept)
        return result.detach(), *torch.autograd.grad(result, leaves, dout.to(wide))

    oracle, eager = definition(torch.float64), definition(dtype)
    for given in ({"rng_state": rng_state}, {"gen": torch.Generator(device).manual_seed(7)}):
        grads = [torch.full_like(x, float("nan")) for x in (q, k, v)]
        *results, sums = flash_attn_cuda.bwd(dout, q, k, v, out, lse, *grads, *lengths, *options, 1, **given)
        assert all(result is grad for result, grad in zip(results, grads)) and sums.shape == (4, 4, 48)
        for name, got, exact, plain in zip(("out", "dq", "dk", "dv"), (out, *grads), oracle, eager):
            assert_close(name, got, exact, plain)


@places
@pytest.mark.parametrize(("dropout_p", "causal"), [(0.0, False), (0.25, True)], ids=["plain", "causal with dropout"])
def test_block_sparse_attention(dropout_p, causal, device, dtype):
    lengths = [270, 0, 7, 130]
    total, longest = sum(lengths), 270
    layout = torch.rand(18, 2, generator=torch.Generator().manual_seed(0)) < 0.6
    layout[3] = False  # queries that see nothing
    q, k, v = (normal(total, 2, 16, seed=seed).to(device, dtype) for seed in range(3))
    dout, ends = normal(total, 2, 16, seed=3).to(q), cumulative(lengths, device)
    converted = convert_blockmask(layout, causal=False).to(device)
    given = (ends, ends, converted, longest, longest, dropout_p, 0.3, causal)
    seed = torch.Generator(device).manual_seed(7)
    out, lse = flash_attn_cuda.fwd_block(q, k, v, *given, False, seed)
    assert lse.shape == (4, 2, 272) and lse[1].isneginf().all() and lse[0, :, 48:64].isneginf().all()
    drawn = torch.randint(
        2**32, (2,), dtype=torch.int64, device=device, generator=torch.Generator(device).manual_seed(7)
    )
    kept = None
    if dropout_p:
        kept = flashtile.dropout_mask(drawn, dropout_p, batch=4, heads=2, seq_q=longest, seq_k=longest)
    shown = layout.repeat_interleave(16, 0)[:longest].repeat_interleave(256, 1)[:, :longest].to(device)
    bias = torch.zeros(longest, longest, dtype=torch.float64, device=device).masked_fill(~shown, float("-inf"))

    def definition(wide):
        leaves = [x.to(wide).requires_grad_() for x in (q, k, v)]
        parts = []
        for number, parts_of in enumerate(zip(*(leaf.split(lengths) for leaf in leaves))):
            rows = lengths[number]
            meaning = Meaning(0.3, causal, bias=bias[:rows, :rows], top_left=True, dropout_p=dropout_p)
            part = None if kept is None else kept[number : number + 1, :, :rows, :rows]
            parts.append(attention_by_definition(*(x[None] for x in parts_of), meaning, part)[0][0])
        result = torch.cat(parts)
        return result.detach(), *torch.autograd.grad(result, leaves, dout.to(wide))

    grads = [torch.full_like(x, float("nan")) for x in (q, k, v)]
    arguments = dout, q, k, v, out, lse, *grads, *given
    *_, sums = flash_attn_cuda.bwd_block(*arguments, torch.Generator(device).manual_seed(7))
    assert sums.shape == (4, 2, 272) and not sums[1].any()
    for name, got, exact, plain in zip(
        ("out", "dq", "dk", "dv"), (out, *grads), definition(torch.float64), definition(dtype)
    ):
        assert_close(name, got, exact, plain)
    with pytest.raises(ValueError, match="return_softmax: expected False"):
        flash_attn_cuda.fwd_block(q, k, v, *given, True)


# Norms


def norm_call(rms, subset, scaled, dropout_p, device, dtype):
    """Arguments of a forward and what they mean: a function of leaves and masks that returns z and x."""
    rows = 7
    inputs = normal(5 if subset else rows, 12), normal(rows, 12, seed=1), normal(12, seed=2), normal(12, seed=3)
    leaves = [t.to(device, dtype) for t in inputs]
    takes = torch.tensor([0, 1, 0, 3, 2, 5, 4], dtype=torch.int32, device=device) if subset else None
    gives = torch.tensor([2, 0, 1, 0, 3, 0, 0], dtype=torch.int32, device=device) if subset else None
    rowscale = normal(rows, seed=4).to(device, dtype) if scaled and not subset else None
    colscale = normal(12, seed=5).to(device, dtype) if scaled else None
    constant = 0.5 if subset else 1.0

    def definition(x0, residual, gamma, beta, colscale, mask):
        wide = torch.promote_types(x0.dtype, torch.float32)
        branch = x0.to(wide) * constant
        branch = branch if rowscale is None else branch * rowscale.to(wide)[:, None]
        branch = branch if colscale is None else branch * colscale.to(wide)
        branch = branch if mask is None else branch * mask / (1 - dropout_p)
        if takes is not None:
            branch = torch.cat((branch.new_zeros(1, 12), branch))[takes.long()]
        x = (branch + residual.to(wide)).to(residual.dtype)
        normed = x.to(wide)
        normed = F.rms_norm(normed, (12,), eps=1e-3) if rms else F.layer_norm(normed, (12,), eps=1e-3)
        z = normed * gamma.to(wide) + beta.to(wide)
        if gives is not None:
            z = torch.stack([z[(gives == number).nonzero()[0, 0]] for number in (1, 2, 3)])
        return z.to(x0.dtype), x

    return leaves, (rowscale, colscale, takes, gives), constant, definition


@every_dtype
@each_case("rms", [False, True])
@each_case(
    "subset, scaled, dropout_p", [(False, False, 0.0), (False, True, 0.25), (True, True, 0.0), (True, False, 0.25)]
)
def test_norms(subset, scaled, dropout_p, rms, device, dtype):
    leaves, others, constant, definition = norm_call(rms, subset, scaled, dropout_p, device, dtype)
    numrows = 3 if subset else 0
    z, x, mask, mu, rsigma = dropout_layer_norm.dropout_add_ln_fwd(
        *leaves, *others, dropout_p, 1e-3, constant, numrows, None, False, rms
    )
    assert (mask is None) is (dropout_p == 0) and (mask is None or (mask.dtype is torch.uint8 and mask.any()))
    wide = torch.promote_types(dtype, torch.float32)
    mean = torch.zeros_like(mu) if rms else x.to(wide).mean(-1)
    power = x.to(wide).square().mean(-1) if rms else x.to(wide).var(-1, correction=0)
    assert_same(mu, mean)
    assert_same(rsigma, (power + 1e-3).rsqrt())
    dz, dx = normal(*z.shape, seed=6).to(z), normal(*x.shape, seed=7).to(x)
    colscale = others[1]

    def by_autograd(dtype):
        given = [leaf.to(dtype).requires_grad_() for leaf in (*leaves, *([] if colscale is None else [colscale]))]
        outputs = definition(*given[:4], None if colscale is None else given[4], mask)
        return [out.detach() for out in outputs] + list(
            torch.autograd.grad(outputs, given, (dz.to(dtype), dx.to(dtype)))
        )

    dx0, dresidual, dgamma, dbeta, _, _, *dcolscale = dropout_layer_norm.dropout_add_ln_bwd(
        dz, dx, x, leaves[0], mask, mu, rsigma, leaves[2], *others, dropout_p, constant, leaves[0].shape[0], True, rms
    )
    got = [z, x, dx0, dresidual, dgamma, dbeta, *dcolscale[:1]]
    names = ("z", "x", "dx0", "dresidual", "dgamma", "dbeta", "dcolscale")
    for name, result, exact, plain in zip(names, got, by_autograd(torch.float64), by_autograd(dtype)):
        assert_close(name, result, exact, plain)


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
    x0, x1, residual = (normal(5, 12, seed=seed).float().to(device).requires_grad_() for seed in range(3))
    weights = [normal(12, seed=3 + seed).float().to(device).requires_grad_() for seed in range(4)]
    gamma0, beta0, gamma1, beta1 = weights
    generator = torch.Generator(device).manual_seed(7)
    given = (gamma0, beta0, gamma1, beta1) if second else (gamma0, beta0, None, None)
    z0, z1, x, mask0, mask1, mu, rsigma = dropout_layer_norm.dropout_add_ln_parallel_residual_fwd(
        x0, x1, residual, *given, dropout_p, 1e-3, generator, False, rms
    )
    assert (z1 is None) is not second and (mask0 is None) is (mask1 is None) is (dropout_p == 0)
    kept = [1.0 if mask is None else mask / (1 - dropout_p) for mask in (mask0, mask1)]
    total = x0 * kept[0] + x1 * kept[1] + residual
    normed = F.rms_norm(total, (12,), eps=1e-3) if rms else F.layer_norm(total, (12,), eps=1e-3)
    outputs = [normed * gamma0 + beta0] + [normed * gamma1 + beta1] * second + [total]
    upstream = [normal(5, 12, seed=8 + number).to(x) for number in range(len(outputs))]
    for got, wanted in zip([z0, *[z1] * second, x], outputs, strict=True):
        assert_same(got, wanted.detach())
    leaves = [x0, x1, residual, gamma0, beta0] + [gamma1, beta1] * second
    expected = torch.autograd.grad(outputs, leaves, upstream)
    *results, a, b, c, d = dropout_layer_norm.dropout_add_ln_parallel_residual_bwd(
        upstream[0], upstream[1] if second else None, upstream[-1], x, mask0, mask1, mu, rsigma, gamma0,
        gamma1 if second else None, dropout_p, True, True, rms,
    )  # fmt: skip
    assert a is b is c is d is None and len(results) == 7 and (results[5] is None) is not second
    for got, wanted in zip(results, expected):
        assert_same(got, wanted)
    alone = dropout_layer_norm.dropout_add_ln_parallel_residual_fwd(
        x0, None, None, gamma0, beta0, None, None, dropout_p, 1e-3, None, False, rms
    )
    assert (alone[2] is None) is (dropout_p == 0) and alone[1] is alone[4] is None


def test_every_number_of_rows_is_served():
    assert scaled_masked_softmax_cuda.get_batch_per_block(33, 77, 3, 5) == 1
