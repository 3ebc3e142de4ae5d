"""Multi-head attention: its projections around the functions, alone and together; caches, masks, mistakes."""

import copy
from collections.abc import Callable
from itertools import accumulate, pairwise
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import flashtile
from flashtile.modules import (
    MHA,
    FlashCrossAttention,
    FlashMHA,
    FlashSelfAttention,
    KVCache,
    RotaryEmbedding,
    alibi_slopes,
)
from flashtile.testing import assert_close, assert_same
from support.models.module_cases import DEVICES
from support.running.each_case import each_case

EMBED, HEADS, D = 48, 6, 8
X = torch.zeros(1, 7, EMBED)
OPTIONS: list[dict[str, Any]] = [
    {},
    {"causal": True, "num_heads_kv": 2, "qkv_proj_bias": False, "out_proj_bias": False},
    {"causal": True, "rotary_emb_dim": 8, "num_heads_kv": 3},
    {"rotary_emb_dim": 4, "rotary_emb_interleaved": True, "rotary_emb_base": 100.0, "softmax_scale": 0.2},
    {"rotary_emb_dim": 8, "rotary_emb_scale_base": 32.0, "causal": True},
    {"causal": True, "window_size": (3, 0), "num_heads_kv": 1},
    {"causal": True, "use_alibi": True, "num_heads_kv": 2},
    {"use_alibi": True, "rotary_emb_dim": 8},
]


def in_full(module: MHA, x: Tensor, x_kv: Tensor | None = None, table: int | None = None) -> Tensor:
    """The module of dense inputs by functions, and a rotary module of `table` positions."""
    if x_kv is None:
        widths = [module.embed_dim, *[module.num_heads_kv * module.head_dim] * 2]
        q, k, v = (t.unflatten(-1, (-1, module.head_dim)) for t in module.Wqkv(x).split(widths, -1))
        if (own := module.rotary_emb) is not None:
            rotary = RotaryEmbedding(own.dim, own.base, own.interleaved, own.scale_base, x.device)
            cos, sin, *of_keys = rotary.tables(table or x.shape[1], x.device)
            q = flashtile.apply_rotary(q, cos, sin, own.interleaved)
            k = flashtile.apply_rotary(k, *(of_keys if own.scale_base else (cos, sin)), own.interleaved)
    else:
        q = module.Wq(x).unflatten(-1, (-1, module.head_dim))
        k, v = (t.unflatten(-1, (-1, module.head_dim)) for t in module.Wkv(x_kv).chunk(2, -1))
    window = [None if side == -1 else side for side in module.inner_attn.window_size]
    slopes = alibi_slopes(HEADS, x.device).to(torch.promote_types(x.dtype, torch.float32)) if module.use_alibi else None
    options = {"causal": module.causal, "window": window, "scale": module.inner_attn.softmax_scale}
    out = flashtile.attention(q, k, v, alibi_slopes=slopes, **options)
    return F.linear(out.flatten(2), module.out_proj.weight, module.out_proj.bias)


def check(module: MHA, run: Callable[..., Tensor], plain: Callable[..., Tensor], *inputs: Tensor) -> None:
    """Asserts that results and gradients of two functions of inputs are the same."""
    found = []
    for function in (run, plain):
        leaves = [x.clone().requires_grad_() for x in inputs]
        out = function(*leaves)
        dout = torch.linspace(-1, 1, out.numel(), dtype=out.dtype, device=out.device).view(out.shape)
        found.append([out, *torch.autograd.grad(out, [*leaves, *module.parameters()], dout)])
    assert_same(*found)


def make(**options: Any) -> MHA:
    torch.manual_seed(0)
    return MHA(EMBED, HEADS, **options)


@pytest.mark.parametrize("device", DEVICES)
@each_case("options", OPTIONS)
def test_dense_packed_and_padded(options, device):
    """Of padded ones, kept tokens attend to one another as if the others had never been there; the others give 0 and
    take nothing."""
    module, x = make(**options).to(device), torch.randn(3, 9, EMBED, device=device)
    check(module, module, lambda x: in_full(module, x), x)
    ends = torch.tensor([0, 4, 4, 11], dtype=torch.int32, device=device)

    def in_turn(x):
        return torch.cat([in_full(module, x[None, a:b], table=7)[0] for a, b in pairwise(ends.tolist())])

    rows = torch.randn(11, EMBED, device=device)
    check(module, lambda x: module(x, cu_seqlens=ends, max_seqlen=7), in_turn, rows)
    if "rotary_emb_scale_base" not in options:  # the middle of the table of xPos is then elsewhere
        check(module, lambda x: module(x, cu_seqlens=ends), in_turn, rows)
    mask = torch.ones(3, 9, dtype=torch.bool, device=device)
    mask[0, 5:] = mask[1, [0, 3]] = mask[2] = False

    def one_by_one(x):
        out = torch.zeros_like(x)
        for row, keep in enumerate(mask):
            attended = in_full(module, x[row, keep][None], table=7)[0]
            out = out.index_put((torch.tensor(row, device=x.device), keep.nonzero().flatten()), attended)
        return out

    check(module, lambda x: module(x, key_padding_mask=mask), one_by_one, x)
    assert torch.equal(module(x.masked_fill(~mask[..., None], torch.nan), key_padding_mask=mask), module(x, None, mask))


@pytest.mark.parametrize("device", DEVICES)
@each_case("heads_kv", [HEADS, 2])
def test_cross_attention(heads_kv, device):
    module = make(cross_attn=True, num_heads_kv=heads_kv).to(device)
    x, x_kv = torch.randn(2, 5, EMBED, device=device), torch.randn(2, 9, EMBED, device=device)
    check(module, module, lambda x, x_kv: in_full(module, x, x_kv), x, x_kv)
    mask = torch.ones(2, 9, dtype=torch.bool, device=device)
    mask[0, 6:] = mask[1, [0, 4]] = False

    def one_by_one(x, x_kv):
        return torch.cat([in_full(module, x[i][None], x_kv[i, keep][None]) for i, keep in enumerate(mask)])

    check(module, lambda x, x_kv: module(x, x_kv, key_padding_mask=mask), one_by_one, x, x_kv)
    cu_q, cu_k = (torch.tensor([0, *accumulate(n)], dtype=torch.int32, device=device) for n in ([3, 2], [2, 7]))

    def in_turn(x, x_kv):
        parts = zip(pairwise(cu_q.tolist()), pairwise(cu_k.tolist()), strict=True)
        return torch.cat([in_full(module, x[None, a:b], x_kv[None, c:d])[0] for (a, b), (c, d) in parts])

    packed = lambda x, x_kv: module(x, x_kv, None, cu_q, 3, cu_k, 7)  # noqa: E731
    check(module, packed, in_turn, x[0], x_kv[0])


@pytest.mark.parametrize("device", DEVICES)
@each_case("options", [o for o in OPTIONS if o.get("causal") and "rotary_emb_scale_base" not in o])
def test_decoding_with_a_cache_is_the_whole_at_once(options, device):
    """A prompt, then tokens one by one, then two at once."""
    x = torch.randn(2, 12, EMBED, dtype=torch.float64 if device == "cpu" else torch.float32, device=device)
    module = make(**options, layer_idx=1).to(x)
    cache = KVCache(2, 15, module.num_heads_kv, D, device, x.dtype)
    keys = cache.k
    with torch.no_grad():
        parts = [module(part, cache=[None, cache]) for part in x.split([7, 1, 1, 1, 2], 1)]
        expected = module(x)
    assert_same(torch.cat(parts, 1), expected)
    assert cache.length == 12 and cache.k is keys
    if module.rotary_emb is not None:
        assert module.rotary_emb.tables(1, x.device)[0].shape[0] == 15  # made once, not longer in each step
    cache.length = 7  # forget what followed the prompt
    with torch.no_grad():
        assert_same(module(x[:, 7:8], cache=cache), expected[:, 7:8])


@torch.no_grad()
def test_steps_split_the_keys_and_prompts_and_dropout_do_not(monkeypatch):
    called = []
    for name in ("attention", "attention_with_kv_cache"):
        function = getattr(flashtile, name)
        monkeypatch.setattr(
            flashtile, name, lambda *args, f=function, n=name, **options: called.append(n) or f(*args, **options)
        )
    module, x = make(causal=True, dropout=0.5), torch.randn(2, 40, EMBED)
    cache = KVCache(2, 80, HEADS, D)
    for training, rows in ((False, 40), (False, 1), (False, 16), (True, 1), (False, 17)):
        module.train(training)(x[:, :rows], cache=cache)
    assert called == ["attention", *["attention_with_kv_cache"] * 2, "attention", "attention"]


@pytest.mark.gpu
@torch.no_grad()
def test_a_step_with_a_cache_waits_for_nothing():
    module = make(causal=True, rotary_emb_dim=8).cuda()
    cache, x = KVCache(2, 12, HEADS, D, "cuda"), torch.randn(2, 12, EMBED, device="cuda")
    expected = module(x)
    parts = [module(x[:, :10], cache=cache), module(x[:, 10:11], cache=cache)]
    torch.cuda.set_sync_debug_mode("error")
    try:
        parts.append(module(x[:, 11:], cache=cache))
    finally:
        torch.cuda.set_sync_debug_mode("default")
    oracle = copy.deepcopy(module).cpu().double()(x.cpu().double())
    assert_close("out", torch.cat(parts, 1), oracle, expected)


@pytest.mark.parametrize("options", [OPTIONS[2], OPTIONS[4], OPTIONS[6]], ids=["rotary", "xPos", "alibi"])
def test_compiles_whole(options):
    module, x = make(**options), torch.randn(2, 7, EMBED)
    compiled = torch.compile(module, fullgraph=True, backend="eager")
    out = compiled(x)
    assert_same(out, module(x))
    (expected,) = torch.autograd.grad(module(x).square().sum(), [module.out_proj.weight])
    assert_same(torch.autograd.grad(out.square().sum(), [module.out_proj.weight])[0], expected)


@torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True, capture_scalar_outputs=True)
@pytest.mark.parametrize("compiles", [False, True], ids=["export", "compile"])
def test_batches_and_masks_that_depend_on_data(compiles):
    class OfChosen(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.mha = make(causal=True, rotary_emb_dim=8)

        def forward(self, chosen: Tensor, x: Tensor, mask: Tensor) -> Tensor:
            return self.mha(x[chosen], key_padding_mask=mask[chosen.clone()])  # two sizes to PyTorch

    model, x = OfChosen(), torch.randn(3, 7, EMBED)
    mask = torch.arange(7) < torch.tensor([[7], [2], [5]])
    chosen = torch.tensor([True, False, True])
    traced = (
        torch.compile(model, fullgraph=True, backend="aot_eager")
        if compiles
        else torch.export.export(model, (chosen, x, mask)).module()
    )
    for each in (chosen, ~chosen):
        assert_same(traced(each, x, mask), model(each, x, mask))


def test_rotation_is_in_place_only_where_nobody_sees_it():
    x, module = torch.randn(2, 7, EMBED), make(rotary_emb_dim=8)
    plain, seen = module(x), []
    linear = F.linear(x, module.Wqkv.weight, module.Wqkv.bias)
    rotate = flashtile.apply_rotary_qkv
    with mock.patch.object(flashtile, "apply_rotary_qkv", side_effect=rotate) as called:
        module(x)
        assert called.call_args.args[6], "inplace"
        handle = module.Wqkv.register_forward_hook(lambda module, inputs, out: seen.append(out))
        assert torch.equal(module(x), plain) and torch.equal(seen[0], linear)
        handle.remove()
        module.Wqkv.register_full_backward_hook(lambda module, *grads: seen.append(grads[1][0]))
        module(x).sum().backward()
        assert not called.call_args.args[6] and seen[1].shape == linear.shape


def test_a_projection_may_need_its_output():
    module, x = make(rotary_emb_dim=8), torch.randn(2, 7, EMBED)
    module.Wqkv = nn.Sequential(module.Wqkv, nn.Sigmoid())
    outs = module(x), in_full(module, x)
    assert_same(*outs)
    grads = (torch.autograd.grad(out.square().sum(), module.Wqkv[0].weight)[0] for out in outs)
    assert_same(*grads)


def test_state_dict_keys():
    kinds = {"weight", "bias"}
    assert set(make(rotary_emb_dim=8).state_dict()) == {f"{n}.{k}" for n in ("Wqkv", "out_proj") for k in kinds}
    cross = make(cross_attn=True).state_dict()
    assert set(cross) == {f"{n}.{k}" for n in ("Wq", "Wkv", "out_proj") for k in kinds}
    assert make(num_heads_kv=2).Wqkv.weight.shape == (EMBED + 2 * 2 * D, EMBED)
    assert set(make(qkv_proj_bias=False, out_proj_bias=False).state_dict()) == {"Wqkv.weight", "out_proj.weight"}


def test_residual_and_dropout():
    x = torch.randn(2, 7, EMBED)
    module = make(dropout=0.5)
    assert torch.equal(module.eval()(x), make()(x))
    assert not torch.equal(module.train()(x), make()(x))
    out, residual = make(return_residual=True)(x)
    assert residual is x and torch.equal(out, make()(x))


def test_empty_inputs():
    assert make()(torch.randn(0, 7, EMBED)).shape == (0, 7, EMBED)
    assert make(rotary_emb_dim=8)(torch.randn(2, 0, EMBED)).shape == (2, 0, EMBED)


@each_case("batch_first", [True, False])
@each_case("bias", [True, False])
def test_flash_mha(batch_first, bias):
    torch.manual_seed(0)
    module = FlashMHA(EMBED, HEADS, bias=bias, batch_first=batch_first, causal=True)
    expected = make(causal=True, qkv_proj_bias=bias, out_proj_bias=bias)
    expected.load_state_dict(copy.deepcopy(module.state_dict()))
    x, mask = torch.randn(3, 7, EMBED), torch.rand(3, 7) < 0.7
    turn = (lambda x: x) if batch_first else (lambda x: x.transpose(0, 1))
    out, weights = module(turn(x), key_padding_mask=mask)
    assert weights is None
    assert_same(turn(out), expected(x, key_padding_mask=mask))
    with pytest.raises(ValueError, match="need_weights: expected False"):
        module(x, need_weights=True)


@torch.no_grad()
def test_mistakes_are_explained():
    x, mask, cu = torch.randn(2, 7, EMBED), torch.ones(2, 7, dtype=torch.bool), torch.tensor([0, 7])
    cross = make(cross_attn=True)

    def cache(length: int = 7, dtype: torch.dtype = torch.float32) -> KVCache:
        return KVCache(2, length, HEADS, D, dtype=dtype)

    for message, call in {
        "embed_dim: expected a multiple of num_heads, 7, got 48": lambda: MHA(48, 7),
        "num_heads_kv: expected a divisor of num_heads, 6, got 4": lambda: MHA(48, 6, 4),
        "rotary_emb_dim: expected 0 with cross_attn=True, got 8": lambda: make(cross_attn=True, rotary_emb_dim=8),
        "x_kv: expected a tensor with cross_attn=True": lambda: cross(x),
        "x_kv: expected None with cross_attn=False": lambda: make()(x, x),
        r"x: expected \[batch, seq, embed_dim\], with embed_dim 48, got shape \(7, 48\)": lambda: make()(x[0]),
        r"x: expected \[total, embed_dim\], packed by": lambda: make()(x, cu_seqlens=cu),
        "cu_seqlens_k: expected None with cross_attn=False": lambda: make()(x[0], cu_seqlens=cu, cu_seqlens_k=cu),
        "max_seqlen_k: expected None with cross_attn=False": lambda: make()(x[0], cu_seqlens=cu, max_seqlen_k=7),
        "cu_seqlens_k: expected None without cu_seqlens": lambda: cross(x, x, cu_seqlens_k=cu),
        "max_seqlen: expected None without cu_seqlens, got": lambda: make()(x, key_padding_mask=mask, max_seqlen=7),
        "x_kv: expected the batch of x, 2, got 1": lambda: cross(x, x[:1]),
        "cu_seqlens_k: expected a tensor beside cu_seqlens": lambda: cross(x[0], x[0], cu_seqlens=cu),
        "key_padding_mask: expected None with cu_seqlens": lambda: make()(x[0], None, mask, cu),
        "key_padding_mask: expected None where cross attention is causal": lambda: make(cross_attn=True, causal=True)(
            x, x, mask
        ),
        r"key_padding_mask: expected bool \(2, 7\), True = keep, got torch.bool \(1, 7\)": lambda: cross(
            x, x, mask[:1]
        ),
        r"key_padding_mask: expected bool \(2, 7\), True = keep, got torch.int64": lambda: make()(x, None, mask.long()),
        "max_seqlen: expected None without cu_seqlens": lambda: make()(x, max_seqlen=7),
        "cache: expected None where attention is not causal": lambda: make()(x, cache=cache()),
        "cache: expected None with key_padding_mask": lambda: make(causal=True)(x, None, mask, cache=cache()),
        "cache: expected None with rotary_emb_scale_base": lambda: make(
            causal=True, rotary_emb_dim=8, rotary_emb_scale_base=32.0
        )(x, cache=cache()),
        "cache: expected a KVCache without layer_idx": lambda: make(causal=True)(x, cache=[cache()]),
        "cache: expected at most 6 tokens, its capacity, got 7": lambda: make(causal=True)(x, cache=cache(6)),
        r"k: expected shape \(2, 7, 6, 8\), that of the cache, got \(2, 7, 2, 8\)": lambda: make(
            causal=True, num_heads_kv=2
        )(x, cache=cache()),
        "k: expected torch.bfloat16 on cpu, those of the cache": lambda: make(causal=True)(
            x, cache=cache(dtype=torch.bfloat16)
        ),
    }.items():
        with pytest.raises(ValueError, match=message):
            call()
    with torch.enable_grad(), pytest.raises(ValueError, match="expected no gradient with a cache"):
        make(causal=True)(x, cache=cache())


def test_sizes_are_numbers():
    with pytest.raises(TypeError, match=r"capacity: expected an int, got 8\.0"):
        KVCache(2, 8.0, HEADS, D)
    with pytest.raises(ValueError, match="batch: expected at least 0, got -1"):
        KVCache(-1, 8, HEADS, D)
    with pytest.raises(TypeError, match=r"num_heads: expected an int, got 2\.0"):
        MHA(32, 2.0)


@each_case(
    "make_or_call, message",
    [
        (lambda: MHA(48, 6, batch_first=True), r"^MHA has no argument batch_first; leave it out, dense inputs are \["),
        (lambda: MHA(48, 6, bias=False), "no argument bias; it is called qkv_proj_bias and out_proj_bias$"),
        (lambda: MHA(48, 6, attention_dropout=0.1), "no argument attention_dropout; it is called dropout$"),
        (lambda: MHA(48, 6, num_kv_heads=2), "no argument num_kv_heads; it is called num_heads_kv$"),
        (lambda: MHA(48, 6, rotary_dim=8), r"no argument rotary_dim; did you mean rotary_emb_dim\?$"),
        (lambda: MHA(48, 6, colour=8), "no argument colour; it has embed_dim, num_heads, "),
        (lambda: MHA(48, 6)(X, mask=None), "^a call of MHA has no argument mask; key_padding_mask=, True = keep"),
        (lambda: MHA(48, 6)(X, need_weights=True), "no argument need_weights; leave it out.*attention_probs computes"),
        (lambda: MHA(48, 6)(X, is_causal=True), "no argument is_causal; pass causal=True when you make the module$"),
        (lambda: MHA(48, 6)(X, cu_seqlens_q=None), "no argument cu_seqlens_q; it is called cu_seqlens$"),
        (lambda: FlashMHA(48, 6, dropout=0.1), "^FlashMHA has no argument dropout; it is called attention_dropout$"),
        (lambda: FlashMHA(48, 6)(X, attn_mask=None), "^a call of FlashMHA has no argument attn_mask; key_padding_mask"),
        (
            lambda: FlashSelfAttention(scale=1.0),
            "^FlashSelfAttention has no argument scale; it is called softmax_scale",
        ),
        (lambda: FlashSelfAttention()(X, max_s=7), "a call of FlashSelfAttention has no argument max_s; it is called"),
        (lambda: FlashCrossAttention()(X, X, is_causal=True), "no argument is_causal; it is called causal$"),
    ],
)
def test_names_of_other_libraries_lead_to_those_of_the_modules(make_or_call, message):
    with pytest.raises(TypeError, match=message):
        make_or_call()
