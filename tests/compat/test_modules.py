"""flash_attn.modules of both versions: attention with projections, caches and masks, blocks, perceptrons."""

import copy
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from flashtile.testing import assert_close, assert_same, size
from support.attention.compat_cases import Meaning, attention_by_definition, cumulative, devices, normal, served
from support.models.module_cases import check_module
from support.running.each_case import each_case

block = served(2, "modules.block")
mha = served(2, "modules.mha")
mlp = served(2, "modules.mlp")
RMSNorm = served(2, "ops.rms_norm").RMSNorm
block_v1 = served(1, "modules.block")
mha_v1 = served(1, "modules.mha")
mlp_v1 = served(1, "modules.mlp")

MASK = torch.arange(9) < torch.tensor([[9], [4]])


def linear(module, x):
    """In PyTorch's operations: on a GPU the module's own take no float64."""
    return F.linear(x, module.weight, module.bias)


def norm(module, x):
    """A norm, likewise."""
    return F.rms_norm(x, x.shape[-1:], module.weight, module.eps) if type(module) is RMSNorm else module(x)


def by_definition(module, x, x_kv=None, meaning=None, mask=None):
    """An MHA of its own parameters, by matrices; `mask` is bool `[batch, seq_k]` or `[batch, 1, seq_q, seq_k]`."""
    dim = module.head_dim
    if module.cross_attn:
        q, kv = linear(module.Wq, x), linear(module.Wkv, x_kv)
    else:
        q, kv = linear(module.Wqkv, x).split([module.embed_dim, 2 * module.num_heads_kv * dim], -1)
    q = q.unflatten(-1, (module.num_heads, dim))
    k, v = kv.unflatten(-1, (2, module.num_heads_kv, dim)).unbind(2)
    if module.rotary_emb_dim:
        q, k = (turned(module, t) for t in (q, k))
    if mask is not None:
        mask = mask if mask.dim() == 4 else mask[:, None, None, :]
        bias = torch.zeros_like(mask, dtype=x.dtype).masked_fill(~mask, float("-inf"))
        meaning = Meaning(**{**meaning.__dict__, "bias": bias})
    out, _ = attention_by_definition(q, k, v, meaning)
    return linear(module.out_proj, out.flatten(2))


def check(module, call, definition, *inputs):
    """Asserts outputs and gradients of a call by the tolerance policy; both functions take the module first."""
    forwards = [
        lambda *given, of=of: found if isinstance(found := of(*given), tuple) else (found,) for of in (call, definition)
    ]
    check_module(module, *forwards, list(inputs), torch.float32, inputs[0].device.type)


def turned(module, x):
    pairs = module.rotary_emb_dim // 2
    angles = torch.outer(torch.arange(x.shape[1]), module.rotary_emb.inv_freq.cpu()).to(x)
    cos, sin = angles.cos()[:, None], angles.sin()[:, None]
    a, b = x[..., :pairs], x[..., pairs : 2 * pairs]
    return torch.cat((a * cos - b * sin, a * sin + b * cos, x[..., 2 * pairs :]), -1)


SLOPES = torch.tensor(mha.get_alibi_slopes(4))
MHAS = {
    "plain": ({}, Meaning()),
    "flash": ({"use_flash_attn": True, "causal": True}, Meaning(causal=True)),
    "rotary": ({"causal": True, "rotary_emb_dim": 6, "fused_bias_fc": True}, Meaning(causal=True)),
    "grouped": ({"num_heads_kv": 2, "causal": True, "rotary_emb_dim": 4}, Meaning(causal=True)),
    "alibi": (
        {"use_flash_attn": True, "use_alibi": True, "window_size": (3, 0), "softmax_scale": 0.3, "num_heads_kv": 1},
        Meaning(scale=0.3, window=(3, 0), alibi_slopes=SLOPES),
    ),
}
mhas = pytest.mark.parametrize(("options", "meaning"), MHAS.values(), ids=MHAS.keys())


@devices
@mhas
@each_case("checkpointing", [False, True])
def test_self_attention(checkpointing, options, meaning, device):
    module = mha.MHA(32, 4, **options, checkpointing=checkpointing).to(device)
    x = normal(2, 9, 32).float().to(device)
    check(module, lambda module, x: module(x), lambda module, x: by_definition(module, x, meaning=meaning), x)


@devices
@each_case("causal", [False, True])
@each_case("heads_kv", [4, 2])
def test_padding_masks(heads_kv, causal, device):
    module, x = mha.MHA(32, 4, heads_kv, causal=causal).to(device), normal(2, 9, 32).float().to(device)
    mask, meaning = MASK.to(device), Meaning(causal=causal)
    check(
        module,
        lambda module, x: module(x, key_padding_mask=mask),
        lambda module, x: by_definition(module, x, meaning=meaning, mask=mask),
        x,
    )


@devices
@each_case("causal", [False, True])
@each_case("flash", [False, True])
def test_cross_attention(flash, causal, device):
    module = mha.MHA(32, 4, cross_attn=True, causal=causal, use_flash_attn=flash).to(device)
    x, x_kv = normal(2, 5, 32).float().to(device), normal(2, 9, 32, seed=1).float().to(device)
    meaning = Meaning(causal=causal)
    check(
        module,
        lambda module, x, x_kv: (module(x, x_kv), module(x)),
        lambda module, x, x_kv: (by_definition(module, x, x_kv, meaning), by_definition(module, x, x, meaning)),
        x,
        x_kv,
    )
    if not causal:
        assert_same(module(x, x_kv, mixer_subset=slice(0, 2)), module(x, x_kv)[:, :2])
    if not flash:
        mask = MASK.to(device)
        if causal:  # the diagonal ends at the last of as many keys as are kept
            ends = torch.arange(5, device=device)[:, None] + mask.sum(1)[:, None, None, None] - 5
            mask = mask[:, None, None, :] & (torch.arange(9, device=device) <= ends)
        # No gradients: those of the definition are NaN where a row sees no key.
        wide = copy.deepcopy(module).double()
        oracle = by_definition(wide, x.double(), x_kv.double(), Meaning(), mask)
        eager = by_definition(module, x, x_kv, Meaning(), mask)
        assert_close("out", module(x, x_kv, MASK.to(device)), oracle, eager)


def test_packed_inputs_and_residual():
    module = mha.MHA(32, 4, use_flash_attn=True, causal=True, return_residual=True)
    x, cu = normal(12, 32).float(), cumulative([5, 7])
    out, residual = module(x, cu_seqlens=cu, max_seqlen=7)
    assert residual is x
    for rows in (slice(0, 5), slice(5, 12)):
        assert_same(out[rows], module(x[None, rows])[0][0])


@each_case("heads_kv", [4, 2])
def test_convolution(heads_kv):
    module, x = mha.MHA(32, 4, heads_kv, dwconv=True, causal=True), normal(2, 9, 32).float()
    names = {name.split(".")[0] for name in module.state_dict()}
    convs = {"dwconv_qkv"} if heads_kv == 4 else {"dwconv_q", "dwconv_kv"}
    assert names == {"Wqkv", "out_proj"} | convs
    later = x.clone()
    later[:, 5:] = 0
    assert torch.equal(module(later)[:, :5], module(x)[:, :5]), "no token sees later ones"
    doubled = copy.deepcopy(module)
    with torch.no_grad():
        for name in convs:
            conv = getattr(module, name)
            conv.weight.zero_()[..., 2] = 2
            conv.bias.zero_()
        for parameter in doubled.Wqkv.parameters():
            parameter *= 2
    assert_same(module(x), by_definition(doubled, x, meaning=Meaning(causal=True)))


@devices
@each_case("lengths_given", [False, True])
@each_case(
    "options",
    [{}, {"rotary_emb_dim": 6, "num_heads_kv": 2}, {"use_flash_attn": True, "use_alibi": True, "window_size": (4, 0)}],
)
@torch.no_grad()
def test_decoding(options, lengths_given, device):
    module = mha.MHA(32, 4, causal=True, layer_idx=3, **options).to(device)
    x = normal(2, 9, 32).float().to(device)
    params = SimpleNamespace(
        max_batch_size=5, max_seqlen=12, seqlen_offset=0, batch_size_offset=2, key_value_memory_dict={},
        lengths_per_sample=None,
    )  # fmt: skip
    steps = [module(x[:, :6], inference_params=params)]
    for position in (6, 7, 8):
        params.seqlen_offset = position
        if lengths_given:
            lengths = torch.full((5,), 11, dtype=torch.int32, device=device)
            lengths[2:4] = position
            params.lengths_per_sample = lengths
        steps.append(module(x[:, position : position + 1], inference_params=params))
    assert_same(torch.cat(steps, 1), module(x))
    cache = params.key_value_memory_dict[3]
    assert cache.shape == (5, 12, 2, module.num_heads_kv, 8)


@each_case("options", [{}, {"rotary_emb_dim": 6, "num_heads_kv": 2, "use_flash_attn": True}])
@torch.no_grad()
def test_decoding_under_autocast(options):
    """The cache that the first call makes has the dtype of what the projection gives."""
    module, x = mha.MHA(32, 4, causal=True, layer_idx=0, **options), normal(2, 7, 32).float()
    params = SimpleNamespace(
        max_batch_size=2, max_seqlen=12, seqlen_offset=0, batch_size_offset=0, key_value_memory_dict={},
        lengths_per_sample=None,
    )  # fmt: skip
    with torch.autocast("cpu", torch.bfloat16):
        whole, first = module(x), module(x[:, :6], inference_params=params)
        params.seqlen_offset = 6
        out = torch.cat((first, module(x[:, 6:], inference_params=params)), 1)
    assert out.dtype is params.key_value_memory_dict[0].dtype is torch.bfloat16
    oracle = copy.deepcopy(module).double()(x.double())
    assert_close("out", out, oracle, whole)


@each_case(
    "make, names",
    [
        (lambda: mha.MHA(32, 4, use_alibi=True), "use_alibi"),
        (lambda: mha.MHA(32, 4, window_size=(3, 3)), "window_size"),
        (lambda: mha.MHA(32, 4, cross_attn=True, rotary_emb_dim=4), "rotary_emb_dim"),
        (lambda: mha.MHA(32, 5), "embed_dim"),
        (lambda: mha.MHA(32, 4)(torch.randn(1, 5, 32), torch.randn(1, 5, 32)), "x_kv"),
        (lambda: mha.MHA(32, 4)(torch.randn(5, 32), cu_seqlens=cumulative([5]), max_seqlen=5), "cu_seqlens"),
        (lambda: mha.MHA(32, 4, use_flash_attn=True)(torch.randn(2, 9, 32), key_padding_mask=MASK), "key_padding_mask"),
        (lambda: mha.MHA(32, 4, dwconv=True)(torch.randn(2, 9, 32), inference_params=object()), "inference_params"),
    ],
)
def test_what_does_not_go_together(make, names):
    with pytest.raises(ValueError, match=names):
        make()


def test_modules_without_projections():
    qkv = normal(2, 9, 3, 4, 8).float()
    plain = attention_by_definition(*qkv.unbind(2), Meaning(causal=True, window=(3, -1)))[0]
    out = mha.FlashSelfAttention(causal=True, window_size=(3, -1))(qkv)
    assert_same(out, plain)
    out = mha.FlashCrossAttention(True, None, 0.0, None, (3, -1))(qkv[:, :, 0], qkv[:, :, 1:])
    assert_same(out, plain)
    dropping = mha.SelfAttention(attention_dropout=0.5)
    assert not torch.equal(dropping(qkv), dropping(qkv)), "each call draws other weights"
    assert_same(dropping.eval()(qkv), mha.SelfAttention()(qkv))
    assert_same(mha.SelfAttention()(qkv, causal=True), mha.CrossAttention(True)(qkv[:, :, 0], qkv[:, :, 1:]))


def test_modules_of_version_1():
    qkv, kv = normal(2, 5, 3, 4, 8).float(), normal(2, 9, 2, 4, 8, seed=1).float()
    q = qkv[:, :, 0]
    meaning = Meaning(causal=True, top_left=True)
    assert_same(
        mha_v1.FlashSelfAttention(causal=True, triton=True)(qkv), attention_by_definition(*qkv.unbind(2), meaning)[0]
    )
    expected = attention_by_definition(q, *kv.unbind(2), meaning)[0]
    module = mha_v1.FlashCrossAttention(causal=True)
    assert_same(module(q, kv), expected)
    packed = module(q.flatten(0, 1), kv.flatten(0, 1), None, cumulative([5, 5]), 5, cumulative([9, 9]), 9)
    assert_same(packed, expected.flatten(0, 1))
    x = normal(2, 9, 32).float()
    whole = mha_v1.MHA(32, 4, causal=True, rotary_emb_dim=6, use_flash_attn=True)
    assert_same(whole(x), by_definition(whole, x, meaning=Meaning(causal=True)))
    assert whole.allocate_inference_cache(2, 7).shape == (2, 7, 2, 4, 8)


def test_perceptrons():
    assert mlp.GatedMlp(6).fc2.in_features == 128 and mlp_v1.GatedMlp(6).fc2.in_features == 256


# Blocks


class Scale(nn.Module):
    """A norm that flashtile does not know."""

    def __init__(self, dim):
        super().__init__()
        self.weight = nn.Parameter(torch.rand(dim))

    def forward(self, x):
        return x.tanh() * self.weight


def blocks(norm_cls, **options):
    torch.manual_seed(0)
    mixer = partial(nn.Linear, out_features=16)
    made = block.Block(16, mixer, partial(nn.Linear, out_features=16), norm_cls, **options)
    for name, parameter in made.named_parameters():
        nn.init.normal_(parameter) if "norm" in name else None
    return made


class Twice(RMSNorm):
    """One that does more than its class."""

    def forward(self, x):
        return 2 * super().forward(x)


def hooked(dim):
    made = nn.LayerNorm(dim)
    made.register_forward_hook(lambda module, given, out: 2 * out)
    return made


NORMS = [nn.LayerNorm, partial(nn.RMSNorm, eps=1e-5), RMSNorm, Scale, Twice, hooked]


@devices
@each_case("fused, norm_cls", [(True, nn.LayerNorm), (False, RMSNorm), (True, Scale), (False, Scale), (True, hooked)])
def test_blocks(norm_cls, fused, device):
    x, residual = normal(2, 5, 16).float().to(device), normal(2, 5, 16, seed=1).float().to(device)
    pre = blocks(norm_cls, fused_dropout_add_ln=fused).to(device)

    def by_steps(pre, x, residual):
        first = pre.mixer(norm(pre.norm1, x + residual)) + x + residual
        return pre.mlp(norm(pre.norm2, first)), first

    check(pre, lambda pre, x, residual: pre(x, residual), by_steps, x, residual)
    post = blocks(norm_cls, prenorm=False, fused_dropout_add_ln=fused).to(device)

    def by_steps_behind(post, x):
        middle = norm(post.norm1, post.mixer(x) + x)
        return norm(post.norm2, post.mlp(middle) + middle)

    check(post, lambda post, x: post(x), by_steps_behind, x)
    with pytest.raises(ValueError, match="residual"):
        post(x, residual)


@each_case("norm_cls", [nn.LayerNorm, Scale])
def test_dropout_and_drop_path(norm_cls):
    x, residual = normal(3, 5, 16).float(), normal(3, 5, 16, seed=1).float()
    made = blocks(norm_cls, resid_dropout1=0.5, drop_path2=1.0)
    mixed = []
    made.mixer.register_forward_hook(lambda _, inputs, out: mixed.append(out))
    _, total = made(x, residual)
    dropped = total - residual  # the second branch is dropped whole, so that this is the first
    kept = dropped.abs() > 1e-5
    assert 0.3 < kept.float().mean() < 0.7
    assert_same(dropped[kept], 2 * x[kept], cancelled=size(residual))
    made.eval()
    _, total = made(x, residual)
    assert_same(total, x + residual + mixed[-1])

    many = normal(64, 1, 16).float()
    _, total = blocks(norm_cls, drop_path1=0.5, drop_path2=1.0)(many, torch.zeros_like(many))
    entries = (total != 0).any(-1).flatten()
    assert 16 < entries.sum() < 48
    assert_same(total[entries], 2 * many[entries])
    with pytest.raises(ValueError, match="drop_path"):
        blocks(norm_cls, drop_path1=1.5)


def test_options_of_blocks():
    x = normal(2, 5, 16).to(torch.bfloat16)
    made = blocks(nn.LayerNorm, residual_in_fp32=True, sequence_parallel=True, mark_shared_params=True).bfloat16()
    hidden, total = made(x)
    assert hidden.dtype is torch.bfloat16 and total.dtype is torch.float32
    assert made.norm1.weight._sequence_parallel and made.norm2.bias._shared_params
    assert not hasattr(made.mixer.weight, "_shared_params")
    default = block.Block(64)
    assert type(default.mixer) is mha.MHA and type(default.mlp) is mlp.Mlp and default.mlp.fc1.out_features == 256
    assert type(block_v1.Block(64).mixer) is mha_v1.MHA
    assert default.allocate_inference_cache(2, 7).shape == (2, 7, 2, 1, 64)
    alone = block.Block(16, partial(nn.Linear, out_features=16), nn.Identity)
    assert not hasattr(alone, "norm2") and len(alone(x.float())) == 2
    for fused, dtype in ((False, torch.float32), (True, torch.bfloat16)):
        made, seen = blocks(nn.LayerNorm, fused_dropout_add_ln=fused), []
        made.mixer.register_forward_pre_hook(
            lambda _, given, seen=seen: seen.append(given[0].dtype) or given[0].float()
        )
        made(x)
        assert seen == [dtype], "that of the norm's weight, or of the hidden states"
    with pytest.raises(ValueError, match="residual_in_fp32"):
        block.Block(64, prenorm=False, residual_in_fp32=True)


@each_case("tied", [False, True])
@each_case("norm_cls", NORMS)
def test_parallel_blocks(norm_cls, tied):
    made = block.ParallelBlock(
        16, partial(nn.Linear, out_features=16), partial(nn.Linear, out_features=16), norm_cls, tied_norm=tied
    )
    x1, x2, residual = (normal(2, 5, 16, seed=seed).float() for seed in range(3))
    out1, out2, total = made(x1, x2, residual)
    assert_same(total, x1 + x2 + residual)
    assert_same(out1, made.mixer(made.norm1(total)))
    assert_same(out2, made.mlp((made.norm1 if tied else made.norm2)(total)))
    first = made(x1)
    assert_same(first[2], x1)
