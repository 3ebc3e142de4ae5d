"""flash_attn's functions beside attention: padding, rotary, norms, losses, linear layers, by their definition."""

import pytest
import torch
import torch._dynamo
from torch.nn import functional as F

import flashtile
from flashtile.testing import assert_same
from support.attention.compat_cases import check_against, devices, every_dtype, normal, places, served
from support.running.each_case import each_case

bert_padding = served(2, "bert_padding")
rotary = served(2, "layers.rotary")
CrossEntropyLoss = served(2, "losses.cross_entropy").CrossEntropyLoss
fused_dense = served(2, "ops.fused_dense")
layer_norm = served(2, "ops.layer_norm")
fused_dense_sqrelu_dense_function = served(2, "ops.triton.mlp").fused_dense_sqrelu_dense_function
rms_norm = served(2, "ops.rms_norm")
triton_cross_entropy = served(2, "ops.triton.cross_entropy")
triton_norm = served(2, "ops.triton.layer_norm")
apply_rotary = served(2, "ops.triton.rotary").apply_rotary
bert_padding_v1 = served(1, "bert_padding")
rotary_v1 = served(1, "layers.rotary")
CrossEntropyLossV1 = served(1, "losses.cross_entropy").CrossEntropyLoss
CrossEntropyLossApex = served(1, "losses.cross_entropy_apex").CrossEntropyLossApex

MASK = torch.tensor([[1, 1, 0, 1], [0, 0, 0, 0], [1, 0, 0, 0]])


# Padding


@each_case("mask", [MASK, MASK.bool()])
def test_unpad(mask):
    x = normal(3, 4, 2)
    rows, indices, cu_seqlens, longest, used = bert_padding.unpad_input(x, mask)
    assert torch.equal(rows, x[MASK.bool()])
    assert indices.tolist() == [0, 1, 3, 8] and cu_seqlens.tolist() == [0, 3, 3, 4] and longest == 3
    assert used.tolist() == [3, 0, 1] and cu_seqlens.dtype is used.dtype is torch.int32
    assert torch.equal(bert_padding.pad_input(rows, indices, 3, 4), x * MASK[..., None])
    assert len(bert_padding_v1.unpad_input(x, mask)) == 4
    for one, two in zip(bert_padding_v1.unpad_input(x, mask), (rows, indices, cu_seqlens, longest)):
        assert (one == two) if isinstance(one, int) else torch.equal(one, two)


def test_unused_rows_are_kept_and_not_counted():
    x, unused = normal(3, 4, 2), torch.tensor([[0, 0, 1, 0], [1, 0, 0, 0], [0, 0, 0, 0]])
    rows, indices, cu_seqlens, longest, used = bert_padding.unpad_input(x, MASK, unused)
    assert indices.tolist() == [0, 1, 2, 3, 4, 8] and torch.equal(rows, x.flatten(0, 1)[indices])
    assert cu_seqlens.tolist() == [0, 4, 5, 6] and longest == 4 and used.tolist() == [3, 0, 1]


def test_concatenated_sequences():
    x = normal(2, 6, 2)
    in_length = torch.tensor([[2, 3, 0, 0, 0, 0], [1, 0, 0, 0, 0, 0]])
    rows, indices, cu_seqlens, longest = bert_padding.unpad_input_for_concatenated_sequences(x, in_length)
    assert indices.tolist() == [0, 1, 2, 3, 4, 6] and torch.equal(rows, x.flatten(0, 1)[indices])
    assert cu_seqlens.tolist() == [0, 2, 5, 6] and cu_seqlens.dtype is torch.int32 and longest == 3


@every_dtype
def test_rows_by_number(device, dtype):
    index = torch.tensor([4, 0, 2], device=device)
    check_against(
        lambda x: bert_padding.index_first_axis(x, index), lambda x: x[index], [normal(6, 2, 3)], device, dtype
    )
    check_against(
        lambda x: bert_padding.index_put_first_axis(x, index, 6),
        lambda x: x.new_zeros(6, 2, 3).index_copy(0, index, x), [normal(3, 2, 3)], device, dtype,
    )  # fmt: skip
    check_against(
        lambda x: bert_padding.index_first_axis_residual(x, index), lambda x: (x[index], x.clone()),
        [normal(6, 2, 3)], device, dtype,
    )  # fmt: skip


# Rotary


def tables(positions: int, pairs: int, device: str, dtype: torch.dtype) -> list[torch.Tensor]:
    angles = torch.outer(torch.arange(positions).double(), 0.3 ** torch.arange(pairs).double())
    return [angles.cos().to(device, dtype), angles.sin().to(device, dtype)]


turned = rotary.apply_rotary_emb_torch  # by a formula of its own


@places
@each_case("interleaved", [False, True])
def test_rotary(interleaved, device, dtype):
    cos, sin = tables(12, 3, device, dtype)
    x = normal(2, 7, 4, 10)
    for function in (rotary.apply_rotary_emb, rotary_v1.apply_rotary_emb_func):
        check_against(
            lambda x, function=function: function(x, cos[:7], sin[:7], interleaved),
            lambda x: turned(x, cos[:7], sin[:7], interleaved), [x], device, dtype,
        )  # fmt: skip
    check_against(
        lambda x: rotary.apply_rotary_emb(x, cos, sin, interleaved, seqlen_offsets=3),
        lambda x: turned(x, cos[3:10], sin[3:10], interleaved), [x], device, dtype,
    )  # fmt: skip
    check_against(
        lambda x: apply_rotary(x, cos, sin, 3, interleaved=interleaved, conjugate=True),
        lambda x: turned(x, cos[3:10], -sin[3:10], interleaved), [x], device, dtype,
    )  # fmt: skip


@places
def test_rotary_over_a_leaf(device, dtype):
    """flash_attn writes to a leaf that wants a gradient; the gradient is that of what the leaf held."""
    cos, sin = tables(12, 3, device, dtype)
    cases = [
        (lambda x: rotary.apply_rotary_emb(x, cos, sin, True, inplace=True, seqlen_offsets=2), normal(2, 7, 4, 10)),
        (lambda x: rotary.apply_rotary_emb_qkv_(x, cos, sin, cos, -sin, seqlen_offsets=2), normal(2, 7, 3, 4, 10)),
        (lambda x: rotary.apply_rotary_emb_kv_(x, cos, sin, False, 2), normal(2, 7, 2, 4, 10)),
        (lambda x: rotary_v1.apply_rotary_emb_qkv_(x, cos[:7], sin[:7]), normal(2, 7, 3, 4, 10)),
    ]
    for function, given in cases:
        for view in (False, True):
            leaf = given.to(device, dtype, copy=True).requires_grad_()
            out = function(leaf[...] if view else leaf)
            other = given.to(device, dtype, copy=True).requires_grad_()
            expected = function(other * 1)
            assert torch.equal(leaf, expected) and torch.equal(out, expected)
            upstream = normal(*out.shape, seed=5).to(out)
            grads = torch.autograd.grad(out, leaf, upstream), torch.autograd.grad(expected, other, upstream)
            assert_same(*grads)


@pytest.mark.slow
@devices
@torch._dynamo.config.patch(recompile_limit=64)
def test_rotary_over_a_leaf_compiles_for_one_layout_after_another(device):
    """Sizes and offsets become dynamic, where PyTorch before 2.13 meets an AssertionError of its own."""
    torch.compiler.reset()
    compiled = torch.compile(rotary.apply_rotary_emb_qkv_, fullgraph=True, backend="aot_eager")
    cos, sin = tables(14, 4, device, torch.float32)
    apart, together = ((3, 4), None), ((8,), 4)
    of_each = torch.tensor([1, 2], device=device)
    for (heads, num_heads_q), offset in [(apart, 0), (together, 0), (apart, 3), (together, of_each), (apart, of_each)]:
        results = []
        for run in (rotary.apply_rotary_emb_qkv_, compiled):
            leaf = normal(2, 7, *heads, 10).float().to(device).requires_grad_()
            out = run(leaf, cos, sin, interleaved=True, seqlen_offsets=offset, num_heads_q=num_heads_q)
            (grad,) = torch.autograd.grad(out.square().sum(), leaf)
            results.append([out, grad, leaf.detach()])
            assert torch.equal(out, leaf)
        assert_same(*results)


def test_rotary_module():
    qkv = normal(2, 7, 3, 4, 10).float()
    module = rotary.RotaryEmbedding(6, 100.0)
    angles = torch.outer(torch.arange(9.0), 100.0 ** (-torch.arange(0, 6, 2) / 6))
    cos, sin = angles.cos()[2:], angles.sin()[2:]
    out = module(qkv.clone(), seqlen_offset=2)
    assert_same(out[:, :, 0], turned(qkv[:, :, 0], cos, sin, False))
    q, kv = module(qkv[:, :, 0].clone(), qkv[:, :, 1:].clone(), seqlen_offset=2)
    assert_same(torch.cat((q[:, :, None], kv), 2), out)
    assert_same(rotary_v1.RotaryEmbedding(6, 100.0)(qkv.clone(), 2), out)
    with pytest.raises(ValueError, match="pos_idx_in_fp32"):
        rotary_v1.RotaryEmbedding(6, pos_idx_in_fp32=False)
    with pytest.raises(ValueError, match="cos"):
        rotary.apply_rotary_emb_torch(qkv[:, :, 0], *tables(7, 6, "cpu", torch.float32))


# Norms


def normed(rms, x, weight, bias, eps):
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    out = F.rms_norm(wide, x.shape[-1:], eps=eps) if rms else F.layer_norm(wide, x.shape[-1:], eps=eps)
    out = out * weight.to(wide)
    return (out if bias is None else out + bias.to(wide)).to(x.dtype)


@devices
@each_case("rms", [False, True])
@each_case("parallel", [False, True])
def test_norm_functions_and_their_references(parallel, rms, device):
    shapes = [(5, 12)] * 3 + [(12,)] * 4
    leaves = [normal(*shape, seed=seed).float().to(device).requires_grad_() for seed, shape in enumerate(shapes)]
    x, residual, x1, weight, bias, weight1, bias1 = leaves
    rowscale = normal(5, seed=8).to(x)
    run = triton_norm.rms_norm_fn if rms else triton_norm.layer_norm_fn
    reference = triton_norm.rms_norm_ref if rms else triton_norm.layer_norm_ref
    second = {"x1": x1, "weight1": weight1, "bias1": bias1} if parallel else {"rowscale": rowscale}
    options = {"eps": 1e-3, "dropout_p": 0.25, "prenorm": True, "zero_centered_weight": True}
    *results, mask, mask1 = run(x, weight, bias, residual, **second, **options, return_dropout_mask=True)
    assert (mask1 is None) is not parallel
    masks = {"dropout_mask": mask, "dropout_mask1": mask1}
    expected = reference(x, weight, bias, residual, **second, **options, **masks, upcast=True)
    upstream = [normal(5, 12, seed=9 + number).to(x) for number in range(len(results))]
    wanting = [x, residual, weight, bias, *([x1, weight1, bias1] if parallel else [])]
    grads, derived = (torch.autograd.grad(outs, wanting, upstream) for outs in (results, expected))
    for got, wanted in zip([*results, *grads], [*expected, *derived], strict=True):
        assert_same(got.detach(), wanted.detach())
    plain = run(x, weight, bias, prenorm=True, return_dropout_mask=True)
    assert len(plain) == 4 and plain[2] is plain[3] is None, "no masks without dropout"
    for out in (plain[0], run(x, weight, bias), reference(x, weight, bias)):
        assert_same(out.detach(), normed(rms, x, weight, bias, 1e-6).detach())
    with pytest.raises(ValueError, match="rowscale"):
        reference(x, weight, bias, x1=x1, rowscale=rowscale)


@every_dtype
def test_norm_dtypes_and_buffers(device, dtype):
    wide = torch.float64 if dtype is torch.float64 else torch.float32
    x, weight = normal(5, 12).to(device, dtype), normal(12).to(device, dtype)
    out, total = triton_norm.rms_norm_fn(x, weight, None, prenorm=True, out_dtype=wide, residual_in_fp32=True)
    assert out.dtype is wide and total.dtype is wide
    exact = normed(True, x.to(wide), weight.to(wide), None, 1e-6)
    assert (out - exact).abs().max() <= 32 * torch.finfo(wide).eps, "not rounded to the dtype of x on the way"
    narrow = triton_norm.rms_norm_fn(x.to(wide), weight, None, out_dtype=dtype)
    assert torch.equal(narrow, out.to(dtype))
    buffer, sums = torch.empty_like(x), torch.empty_like(x)
    results = triton_norm.layer_norm_fn(x, weight, None, x, prenorm=True, out=buffer, residual_out=sums)
    assert results[0] is buffer and results[1] is sums and torch.equal(sums, x + x)
    leaf = weight.clone().requires_grad_()
    triton_norm.layer_norm_fn(x, leaf, None, out=torch.empty_like(x)).sum().backward()
    assert leaf.grad.abs().sum() > 0
    with pytest.raises(ValueError, match="out: expected"):
        triton_norm.layer_norm_fn(x, weight, None, out=x[:1])
    with pytest.raises(ValueError, match="residual_out"):
        triton_norm.layer_norm_fn(x, weight, None, residual_out=sums)


@each_case("rms", [False, True])
def test_norm_and_linear_layer(rms):
    x, residual, weight, bias = normal(5, 12), normal(5, 12, seed=1), normal(12, seed=2), normal(12, seed=3)
    matrix, linear_bias = normal(7, 12, seed=4), normal(7, seed=5)
    check_against(
        lambda x, r, w, b, m, c: triton_norm.layer_norm_linear_fn(x, w, b, m, c, r, prenorm=True, is_rms_norm=rms),
        lambda x, r, w, b, m, c: (F.linear(normed(rms, x + r, w, b, 1e-6), m, c), x + r),
        [x, residual, weight, bias, matrix, linear_bias], "cpu", torch.float32,
    )  # fmt: skip
    with torch.autocast("cpu", torch.bfloat16):
        out = triton_norm.layer_norm_linear_fn(*(t.float() for t in (x, weight, bias, matrix, linear_bias)))
    assert out.dtype is torch.bfloat16


@places
@each_case("second", [False, True])
@each_case("rms", [False, True])
def test_dropout_add_norm(rms, second, device, dtype):
    """Functions of flashtile, with masks of bytes."""
    module, name = (rms_norm, "rms_norm") if rms else (layer_norm, "layer_norm")
    function = getattr(flashtile, f"dropout_add_{name}")
    x, residual, x1 = (normal(2, 5, 12, seed=seed).to(device, dtype) for seed in range(3))
    weight, weight1 = normal(12, seed=3).to(x), normal(12, seed=4).to(x)
    options = {"prenorm": True, "return_dropout_mask": True}
    torch.manual_seed(7)
    if second:
        run = getattr(module, f"dropout_add_{name}_parallel_residual")
        results = run(x, x1, residual, weight, None, weight1, None, 0.25, 1e-3, **options)
        options |= {"x1": x1, "weight1": weight1}
    else:
        results = getattr(module, f"dropout_add_{name}")(x, residual, weight, None, 0.25, 1e-3, **options)
    torch.manual_seed(7)
    expected = function(x, residual, weight, None, 0.25, 1e-3, **options)
    for got, wanted in zip(results, expected, strict=True):
        assert got.dtype is (torch.uint8 if wanted.dtype is torch.bool else dtype)
        assert_same(got, wanted.to(got.dtype))
    parallel = getattr(module, f"dropout_add_{name}_parallel_residual")
    results = parallel(x, None, residual, weight, None, None, None, 0.0, 1e-3, True, return_dropout_mask=True)
    assert len(results) == 5 and results[1] is None
    assert all(mask.dtype is torch.uint8 and mask.all() for mask in results[3:])
    plain = module.rms_norm(x, weight, 1e-3) if rms else module.layer_norm(x, weight, None, 1e-3)
    assert_same(plain, normed(rms, x, weight, None, 1e-3))


@devices
@pytest.mark.parametrize("module", [layer_norm, rms_norm], ids=["layer", "rms"])
@pytest.mark.parametrize("prenorm", [False, True])
def test_subset_norms_have_the_inner_dimensions_of_x0(prenorm, module, device):
    """Whole batch entries are left out: what is left keeps `[entries, seq, hidden]`."""
    run = module.dropout_add_layer_norm_subset if module is layer_norm else module.dropout_add_rms_norm_subset
    x0, residual = normal(2, 4, 12).float().to(device), normal(3, 4, 12, seed=1).float().to(device)
    weight = normal(12, seed=2).float().to(device)
    takes = torch.tensor([1, 2, 3, 4, 0, 0, 0, 0, 5, 6, 7, 8], dtype=torch.int32, device=device)
    gives = torch.tensor([0, 0, 0, 0, 1, 2, 3, 4, 0, 0, 0, 0], dtype=torch.int32, device=device)
    options = {"x0_subset": takes.view(3, 4), "out_subset": gives.view(3, 4), "out_numrows": 4, "rowscale_const": 2.0}
    results = run(x0, residual, weight, None, 0.25, 1e-3, **options, prenorm=prenorm, return_dropout_mask=True)
    z, *sums, mask = results
    assert len(sums) == prenorm and mask.dtype is torch.uint8
    spread = torch.zeros_like(residual)
    spread[[0, 2]] = 2 * x0 * mask / 0.75
    total = residual + spread
    assert_same(z, normed(module is rms_norm, total[1:2], weight, None, 1e-3))
    for x in sums:
        assert_same(x, total)
    assert run(x0, residual, weight, None, 0.0, 1e-3, **options).shape == (1, 4, 12)
    with pytest.raises(ValueError, match="multiple of 4"):
        run(x0, residual, weight, None, 0.0, 1e-3, **options | {"out_numrows": 6})


def test_norm_modules():
    x, residual = normal(2, 5, 12).float(), normal(2, 5, 12, seed=1).float()
    ones = torch.ones(12)
    for module, expected in (
        (rms_norm.RMSNorm(12), normed(True, x, ones, None, 1e-5)),
        (triton_norm.RMSNorm(12), normed(True, x, ones, None, 1e-5)),
        (triton_norm.RMSNorm(12, zero_centered_weight=True), normed(True, x, ones, None, 1e-5)),
    ):
        assert_same(module(x), expected)
        assert set(module.state_dict()) == {"weight"}
    for module, rms in ((layer_norm.DropoutAddLayerNorm, False), (rms_norm.DropoutAddRMSNorm, True)):
        z, total = module(12, prenorm=True, p=0.5).eval()(x, residual)
        assert_same(total, x + residual)
        assert_same(z, normed(rms, total, ones, None, 1e-5))
    dropping = triton_norm.RMSNorm(12, dropout_p=0.5)
    _, total = dropping(x, residual, prenorm=True)
    assert not torch.equal(total, x + residual)
    assert torch.equal(dropping.eval()(x, residual, prenorm=True)[1], x + residual)


# Losses


LABELS = torch.tensor([3, 0, -100, 10, 7])


def losses(logits, labels, **options):
    """Losses of rows, and the part of the log-sum-exp in them."""
    return flashtile.cross_entropy(logits, labels, reduction="none", return_z_loss=True, **options)


@every_dtype
@each_case("given", [False, True])
@each_case("options", [{}, {"label_smoothing": 0.1, "logit_scale": 0.7, "lse_square_scale": 1e-2}])
def test_losses_of_rows(options, given, device, dtype):
    logits, labels = normal(5, 11).to(device, dtype).requires_grad_(), LABELS.to(device)
    wide = logits.detach().to(torch.promote_types(dtype, torch.float32)) * options.get("logit_scale", 1.0)
    lse, upstream = wide.logsumexp(-1) if given else None, normal(5, seed=1).to(wide)
    results = []
    for loss, z_loss in (
        triton_cross_entropy.cross_entropy_loss(logits, labels, lse, **options),
        losses(logits, labels, **options),
    ):
        assert not z_loss.requires_grad
        results.append([loss.detach(), z_loss, *torch.autograd.grad(loss, logits, upstream)])
    assert_same(*results)


@each_case("given", [False, True])
@each_case("reduction", ["mean", "sum", "none"])
def test_loss_module(reduction, given):
    logits, options = normal(5, 11).float(), {"label_smoothing": 0.1, "lse_square_scale": 1e-2}
    module = CrossEntropyLoss(-100, reduction, **options, return_z_loss=True)
    loss, z_loss = module(logits, LABELS, logits.logsumexp(-1) if given else None)
    expected = flashtile.cross_entropy(logits, LABELS, reduction=reduction, **options)
    assert_same(loss, expected)
    assert z_loss.shape == loss.shape
    with pytest.raises(ValueError, match="reduction"):
        CrossEntropyLoss(reduction="max")


@each_case("given", [False, True])
def test_loss_gradient_in_place(given):
    leaf = normal(5, 11).float().requires_grad_()
    logits = leaf * 1.0
    loss, _ = triton_cross_entropy.cross_entropy_loss(
        logits, LABELS, logits.detach().logsumexp(-1) if given else None, inplace_backward=True
    )
    kept = logits.detach()
    loss.sum().backward()
    assert_same(kept, leaf.grad)
    expected = torch.autograd.grad(losses(leaf, LABELS)[0].sum(), leaf)[0]
    assert_same(leaf.grad, expected)


def test_large_logits_with_a_given_lse():
    logits, labels = torch.tensor([[1e30, -2e30, 3e29]]), torch.tensor([1])
    loss, z_loss = triton_cross_entropy.cross_entropy_loss(logits, labels, logits.logsumexp(-1))
    assert_same(loss, F.cross_entropy(logits, labels, reduction="none"))
    assert not z_loss.any()


def test_losses_of_version_1():
    logits = normal(5, 11).float()
    assert CrossEntropyLossApex is CrossEntropyLossV1
    smooth = losses(logits, LABELS, label_smoothing=0.1)[0]
    assert_same(CrossEntropyLossV1(label_smoothing=0.1)(logits, LABELS), smooth.sum() / 4)
    assert_same(CrossEntropyLossV1(reduction="none")(logits, LABELS), losses(logits, LABELS)[0])
    with pytest.raises(ValueError, match="reduction"):
        CrossEntropyLossV1(reduction="sum")


def test_a_given_lse_needs_one_process():
    with pytest.raises(ValueError, match="precomputed_lse"):
        triton_cross_entropy.cross_entropy_loss(normal(5, 11), LABELS, normal(5), process_group=object())
    with pytest.raises(ValueError, match="precomputed_lse"):
        triton_cross_entropy.cross_entropy_loss(normal(5, 11), LABELS, normal(4))


# Linear layers


@each_case("name, level", [("gelu_approx", 0), ("relu", 1), ("sqrelu", 2), ("function", 1)])
def test_perceptron(level, name):
    shapes = [(2, 5, 6), (8, 6), (8,), (4, 8), (4,)]
    leaves = [normal(*shape, seed=seed).float().requires_grad_() for seed, shape in enumerate(shapes)]
    x, weight1, bias1, weight2, bias2 = leaves
    if name == "function":
        out = fused_dense_sqrelu_dense_function(*leaves, level)
    else:
        out = fused_dense.fused_mlp_func(x, weight1, weight2, bias1, bias2, name, checkpoint_lvl=level)
    activation = {"gelu_approx": "gelu_tanh", "relu": "relu"}.get(name, "squared_relu")
    results = [out, flashtile.fused_mlp(*leaves, activation=activation)]
    assert_same(*([out.detach(), *torch.autograd.grad(out.square().sum(), leaves)] for out in results))


def test_linear_modules():
    x = normal(2, 5, 6).float()
    dense = fused_dense.FusedDense(6, 4, return_residual=True)
    out, residual = dense(x)
    assert_same(out, F.linear(x, dense.weight, dense.bias))
    assert torch.equal(residual, x)
    assert_same(fused_dense.fused_dense_func(x, dense.weight, dense.bias), out)
    mlp = fused_dense.FusedMLP(6, activation="relu", heuristic=-1)
    assert set(mlp.state_dict()) == {"fc1.weight", "fc1.bias", "fc2.weight", "fc2.bias"} and mlp.fc1.out_features == 24
    assert_same(mlp(x), mlp.fc2(mlp.fc1(x).relu()))


@each_case(
    "call, names",
    [
        (lambda x, w: fused_dense.fused_dense_func(x, w, process_group=object()), "process_group"),
        (lambda x, w: fused_dense.FusedDense(6, 4)(x, object()), "process_group"),
        (lambda x, w: fused_dense.fused_mlp_func(x, w, w.t(), process_group=object()), "process_group"),
        (lambda x, w: fused_dense.fused_mlp_func(x, w, w.t(), activation="gelu"), "activation"),
        (lambda x, w: fused_dense.fused_mlp_func(x, w.requires_grad_(), w.t(), save_pre_act=False), "save_pre_act"),
        (lambda x, w: fused_dense.FusedMLP(6)(x, object()), "process_group"),
    ],
)
def test_what_linear_layers_refuse(call, names):
    with pytest.raises(ValueError, match=names):
        call(torch.randn(2, 6), torch.randn(4, 6))
