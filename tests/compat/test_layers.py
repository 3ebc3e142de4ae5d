"""The layers of flash_attn beside attention, norms and losses: activations, perceptrons, embeddings, patches."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from flashtile.testing import assert_close, assert_same
from support.attention.compat_cases import check_against, every_dtype, normal, places, served
from support.running.each_case import each_case

PatchEmbed = served(2, "layers.patch_embed").PatchEmbed
BertEmbeddings = served(2, "modules.embedding").BertEmbeddings
ColumnParallelEmbedding = served(2, "modules.embedding").ColumnParallelEmbedding
GPT2Embeddings = served(2, "modules.embedding").GPT2Embeddings
VocabParallelEmbedding = served(2, "modules.embedding").VocabParallelEmbedding
activations = served(2, "ops.activations")
triton_dgrad_act = served(2, "ops.triton.linear").triton_dgrad_act
triton_linear_act = served(2, "ops.triton.linear").triton_linear_act
FusedDenseSqreluDense = served(2, "ops.triton.mlp").FusedDenseSqreluDense


def gelu_tanh(x):
    return F.gelu(x, approximate="tanh")


#: Name of the recorded function, its definition, shapes of its arguments.
RECORDED = {
    "bias_gelu_impl": (lambda y, bias: gelu_tanh(y + bias), [(3, 5, 8), (8,)]),
    "fast_gelu_impl": (gelu_tanh, [(5, 8)]),
    "swiglu": (lambda x, y: F.silu(x) * y, [(5, 8), (5, 8)]),
}


@every_dtype
@each_case("name", RECORDED)
def test_activations(name, device, dtype):
    definition, shapes = RECORDED[name]
    inputs = [normal(*shape, seed=seed) for seed, shape in enumerate(shapes)]
    check_against(getattr(activations, name), definition, inputs, device, dtype)


#: Name of a gradient, and the function that it belongs to.
GRADIENTS = {"gelu_bwd": gelu_tanh, "relu_bwd": F.relu, "sqrelu_bwd": activations.sqrelu_fwd}


@every_dtype
@each_case("name", GRADIENTS)
def test_gradients_of_activations(name, device, dtype):
    x, dout = (normal(5, 8, seed=seed).to(device, dtype) for seed in range(2))

    def by_autograd(dtype):
        leaf = x.to(dtype).requires_grad_()
        return torch.autograd.grad(GRADIENTS[name](leaf), leaf, dout.to(dtype))[0]

    got = getattr(activations, name)(dout, x)
    assert got.dtype is dtype
    assert_close(name, got, by_autograd(torch.float64), by_autograd(dtype))


def test_an_activation_has_a_second_derivative():
    x, y = normal(3, 4).requires_grad_(), normal(3, 4, seed=1).requires_grad_()
    assert torch.autograd.gradgradcheck(activations.swiglu, (x, y))
    assert torch.autograd.gradgradcheck(activations.bias_gelu_impl, (x, y[0]))


ACTIVATIONS = {"id": lambda x: x, "gelu": F.gelu, "gelu_approx": gelu_tanh, "squared_relu": lambda x: F.relu(x) ** 2}


@places
@each_case("name", ACTIVATIONS)
@each_case("biased", [False, True])
def test_linear_layer_with_its_activation(biased, name, device, dtype):
    x, weight = normal(2, 5, 6).to(device, dtype), normal(8, 6, seed=1).to(device, dtype)
    bias = normal(8, seed=2).to(device, dtype) if biased else None
    dout, second = normal(2, 5, 4, seed=3).to(device, dtype), normal(4, 8, seed=4).to(device, dtype)
    out, saved = triton_linear_act(x, weight, bias, name, save_act_input=True)
    grad = triton_dgrad_act(dout, second, name, saved)

    def by_definition(wide):
        before = F.linear(x.to(wide), weight.to(wide), None if bias is None else bias.to(wide))
        leaf = saved.to(wide).requires_grad_()
        after = F.linear(ACTIVATIONS[name](leaf), second.to(wide))
        return before, ACTIVATIONS[name](before), *torch.autograd.grad(after, leaf, dout.to(wide))

    for label, got, exact, plain in zip(
        ("argument", "result", "gradient"), (saved, out, grad), by_definition(torch.float64), by_definition(dtype)
    ):
        assert_close(label, got, exact, plain)
    assert torch.equal(triton_linear_act(x, weight, bias, name), out)
    assert not triton_linear_act(x, weight.requires_grad_(), bias, name).requires_grad


def test_what_linear_layers_with_activations_refuse():
    x, weight = normal(2, 6), normal(8, 6)
    with pytest.raises(ValueError, match="activation: expected one of 'id'"):
        triton_linear_act(x, weight, activation="relu")
    with pytest.raises(ValueError, match="act_input: expected a tensor"):
        triton_dgrad_act(x, weight.t(), "gelu")


def test_module_with_the_square_of_relu():
    mlp = FusedDenseSqreluDense(6, checkpoint_lvl=1)
    assert mlp.checkpoint_level == 1
    assert {name: tuple(value.shape) for name, value in mlp.state_dict().items()} == {
        "fc1.weight": (24, 6), "fc1.bias": (24,), "fc2.weight": (6, 24), "fc2.bias": (6,),
    }  # fmt: skip
    x = normal(2, 5, 6).float()
    assert_same(mlp(x), mlp.fc2(F.relu(mlp.fc1(x)).square()))
    with pytest.raises(ValueError, match="bias2: expected True"):
        FusedDenseSqreluDense(6, bias2=False)


IDS = torch.tensor([[3, 1, 4, 1, 5], [9, 2, 6, 5, 3]])


@each_case("width", [None, 3])
@each_case("positions", [0, 8])
def test_embeddings_of_gpt2(positions, width):
    module = GPT2Embeddings(6, 10, positions, padding_idx=4, word_embed_proj_dim=width)
    names = {"word_embeddings.weight"} | ({"project_in.weight"} if width else set())
    assert set(module.state_dict()) == names | ({"position_embeddings.weight"} if positions else set())
    tokens = F.embedding(IDS, module.word_embeddings.weight, 4)
    expected = tokens @ module.project_in.weight.t() if width else tokens
    given = torch.tensor([[2, 3, 4, 5, 6], [0, 1, 2, 3, 4]])
    if positions:
        table = module.position_embeddings.weight
        assert_same(module(IDS, given), expected + table[given])
        expected = expected + table[:5]
    assert_same(module(IDS), expected)
    module(IDS).sum().backward()
    assert not module.word_embeddings.weight.grad[4].any()


@each_case("positions", [0, 8])
@each_case("segments", [0, 2])
def test_embeddings_of_bert(segments, positions):
    module = BertEmbeddings(6, 10, positions, segments, dtype=torch.float64)
    expected = module.word_embeddings.weight[IDS]
    if positions:
        expected = expected + module.position_embeddings.weight[:5]
    assert set(dict(module.named_children())) == {"word_embeddings"} | (
        {"position_embeddings"} if positions else set()
    ) | ({"token_type_embeddings"} if segments else set())
    segment = (IDS > 3).long()
    if segments:
        table = module.token_type_embeddings.weight
        assert_same(module(IDS, token_type_ids=segment), expected + table[segment])
        expected = expected + table[0]
    assert_same(module(IDS), expected)


def test_embeddings_that_processes_could_share():
    for module in (VocabParallelEmbedding(10, 6, padding_idx=4), ColumnParallelEmbedding(10, 6, 4)):
        assert module.padding_idx == 4
        assert torch.equal(module(IDS), F.embedding(IDS, module.weight))
    for make in (VocabParallelEmbedding, ColumnParallelEmbedding):
        with pytest.raises(ValueError, match="process_group: expected None"):
            make(10, 6, process_group=object())


@each_case("flatten", [True, False])
@each_case("fused", [False, True])
def test_patches(fused, flatten):
    """A patch embedding is a convolution whose stride is its size."""
    module = PatchEmbed((6, 8), (3, 2), 5, 7, norm_layer=nn.LayerNorm, flatten=flatten, fused_bias_fc=fused)
    assert set(module.state_dict()) == {"proj.weight", "proj.bias", "norm.weight", "norm.bias"}
    assert (module.img_size, module.patch_size, module.grid_size, module.num_patches) == ((6, 8), (3, 2), (2, 4), 8)
    images = normal(2, 5, 6, 8).float()
    with torch.no_grad():
        module.norm.weight.copy_(normal(7, seed=1))
    kernel = module.proj.weight.view(7, 5, 3, 2)
    expected = module.norm(F.conv2d(images, kernel, module.proj.bias, stride=(3, 2)).permute(0, 2, 3, 1))
    assert_same(module(images), expected.flatten(1, 2) if flatten else expected)
    with pytest.raises(ValueError, match="x: expected images"):
        module(images[:, :, 1:])
    plain = PatchEmbed(8, 4, bias=False)
    assert plain.patch_size == (4, 4) and set(plain.state_dict()) == {"proj.weight"}
    assert plain(normal(1, 3, 8, 8).float()).shape == (1, 4, 768)
