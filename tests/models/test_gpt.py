"""The GPT: shapes, causality, learning, the same with either attention; its styles, caches, generation."""

from dataclasses import replace

import pytest
import torch

import flashtile
from flashtile.models import GPT, BertConfig, GPTConfig, flashtile_attention, plain_attention
from flashtile.testing import assert_close, assert_same
from support.running.each_case import each_case

SMALL = GPTConfig(context=32, layers=2, heads=2, width=32)

NEOX = replace(SMALL, positions="rotary", rotary_dim=8, parallel=True, tied=False, activation="gelu")
LLAMA = replace(
    SMALL, heads=4, heads_kv=2, hidden=40, positions="rotary", norm="rms", activation="swiglu", attention_bias=False,
    mlp_bias=False, tied=False, window=9, fused_loss=True,
)  # fmt: skip
STYLES = {"gpt2": SMALL, "neox": NEOX, "llama": LLAMA}


def make(attention=flashtile_attention, config=SMALL, dtype=torch.float32):
    torch.manual_seed(0)
    return GPT(config, attention).to(dtype)


def tokens(batch=2, length=33, seed=1):
    return torch.randint(256, (batch, length), generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_flashtile_and_plain_give_the_same_loss_and_gradients(dtype):
    def results(attention, dtype):
        model = make(attention, dtype=dtype)
        loss = model.loss(tokens())
        loss.backward()
        return {"loss": loss.detach(), **{name: parameter.grad for name, parameter in model.named_parameters()}}

    actual, eager = results(flashtile_attention, dtype), results(plain_attention, dtype)
    for name, oracle in results(plain_attention, torch.float64).items():
        assert_close(name, actual[name], oracle, eager[name])


@pytest.mark.parametrize("config", STYLES.values(), ids=STYLES)
def test_styles_compile_whole_and_are_the_same(config):
    model = make(None, replace(config, layers=1))
    batch = tokens()
    compiled = torch.compile(model.loss, fullgraph=True, backend="aot_eager")
    grads = []
    for loss in (compiled(batch), model.loss(batch)):
        grads.append([loss.detach(), *torch.autograd.grad(loss, list(model.parameters()))])
    for mine, theirs in zip(*grads, strict=True):
        assert_same(mine, theirs)


@each_case("config", [SMALL, LLAMA])
def test_the_fused_loss_is_the_same(config):
    batch, grads = tokens(), []
    for fused in (True, False):
        model = make(None, replace(config, fused_loss=fused), torch.float64)
        loss = model.loss(batch)
        grads.append([loss.detach(), *torch.autograd.grad(loss, list(model.parameters()))])
    for mine, theirs in zip(*grads, strict=True):
        assert_same(mine, theirs)


@each_case("config", STYLES.values())
def test_a_cache_gives_the_logits_of_the_whole(config):
    model, batch = make(None, config, torch.float64), tokens()[:, :-1]
    cache = model.new_cache(2, 32)
    with torch.no_grad():
        parts = [model(part, cache) for part in batch.split([20, 1, 1, 10], dim=1)]
        assert_same(torch.cat(parts, dim=1), model(batch))


@each_case("config", STYLES.values())
def test_from_the_meta_device(config):
    empty = GPT(config, device="meta")
    assert all(parameter.is_meta for parameter in empty.parameters())
    model = empty.to_empty(device="cpu")
    ordinary = make(None, config)
    for each in (model, ordinary):
        torch.manual_seed(0)
        each.initialise()
    for mine, theirs in zip(model.parameters(), ordinary.parameters(), strict=True):
        assert torch.equal(mine, theirs)
    assert_same(model(tokens(length=9)), ordinary(tokens(length=9)))


@each_case("config", [SMALL, NEOX])
@each_case("kind", ["embedding_dropout", "attention_dropout", "residual_dropout"])
def test_dropout_in_training_only(kind, config):
    model, plain = make(None, replace(config, **{kind: 0.5})), make(None, config)
    batch = tokens()
    assert torch.equal(model.eval().loss(batch), plain.loss(batch))
    torch.manual_seed(1)
    dropped = model.train().loss(batch)
    torch.manual_seed(1)
    assert torch.equal(model.loss(batch), dropped)
    assert not torch.equal(dropped, plain.loss(batch))


def test_a_residual_stream_in_float32():
    """With narrow weights it changes the logits, by rounding alone."""
    narrow, wide = (make(None, replace(SMALL, residual_in_fp32=wide), torch.bfloat16) for wide in (False, True))
    first, second, exact = narrow(tokens()[:, 1:]), wide(tokens()[:, 1:]), make(None)(tokens()[:, 1:])
    assert first.dtype is second.dtype is torch.bfloat16
    assert not torch.equal(first, second)
    assert (second - exact).square().mean() < (first - exact).square().mean()


def test_greedy_generation_takes_the_most_probable_token():
    model, prompt = make(None, LLAMA), tokens(length=6)
    out = model.generate(prompt, 10)
    assert torch.equal(out[:, :6], prompt)
    with torch.no_grad():
        assert torch.equal(model(out[:, :-1])[:, 5:].argmax(-1), out[:, 6:])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_generation_under_autocast(dtype):
    """The cache has the dtype of the keys, which is that of autocast, but for float64."""
    model, prompt = make(None, LLAMA, dtype), tokens(length=6)
    with torch.autocast("cpu", torch.bfloat16):
        out = model.generate(prompt, 4)
        cache = model.new_cache(2, 10)
        with torch.no_grad():
            steps = torch.cat([model(prompt, cache), *(model(out[:, at : at + 1], cache) for at in range(6, 9))], 1)
    assert torch.equal(steps[:, 5:].argmax(-1), out[:, 6:])
    assert cache[0].k.dtype is (torch.float64 if dtype is torch.float64 else torch.bfloat16)


def test_drawn_generation_follows_the_probabilities():
    model = make(None, replace(SMALL, vocabulary=8, initial_std=0.3))
    prompt = torch.zeros(4000, 1, dtype=torch.long)

    def draw(**options):
        return model.generate(prompt, 1, generator=torch.Generator().manual_seed(0), **options)[:, 1]

    with torch.no_grad():
        probabilities = (model(prompt[:1])[0, -1] / 2).softmax(-1)
    drawn = draw(temperature=2.0)
    frequencies = drawn.bincount(minlength=8) / 4000
    assert (frequencies - probabilities).abs().max() < 5 * 0.5 / 4000**0.5  # five standard deviations
    assert torch.equal(draw(temperature=2.0), drawn)
    assert set(draw(temperature=2.0, top_k=3).tolist()) == set(probabilities.topk(3).indices.tolist())


def test_mistakes_are_explained():
    with pytest.raises(ValueError, match="width: expected a multiple of heads, 5, got 32"):
        GPTConfig(heads=5, width=32)
    with pytest.raises(ValueError, match="positions: expected one of 'learned', 'rotary', got 'none'"):
        GPTConfig(positions="none")
    with pytest.raises(ValueError, match="activation: expected one of 'gelu', 'gelu_tanh', 'relu', 'swiglu', got"):
        GPTConfig(activation="tanh")
    with pytest.raises(ValueError, match="rotary_dim: expected None with positions='learned', got 8"):
        GPTConfig(rotary_dim=8)
    with pytest.raises(ValueError, match="num_heads_kv: expected a divisor of num_heads, 2, got 3"):
        make(None, replace(SMALL, heads_kv=3))
    with pytest.raises(ValueError, match="attention: expected None with attention_dropout, window or heads_kv"):
        make(plain_attention, LLAMA)
    with pytest.raises(ValueError, match="attention: expected None with a cache"):
        make(plain_attention).generate(tokens(length=6), 2)
    with pytest.raises(ValueError, match="tokens: expected at most 32 in a row"):
        make(None)(tokens(length=33))
    with pytest.raises(ValueError, match=r"new_tokens: expected at most 32 tokens with the prompt .* got 30 and 3"):
        make(None).generate(tokens(length=30), 3)
    with pytest.raises(TypeError, match=r"new_tokens: expected an int, got 2\.0"):
        make(None).generate(tokens(length=3), 2.0)
    with pytest.raises(ValueError, match=r"tokens: expected \[batch, seq\] with at least one token"):
        make(None).generate(tokens(length=0), 4)
    with pytest.raises(ValueError, match="new_tokens: expected at least 0, got -1"):
        make(None).generate(tokens(length=3), -1)
    with pytest.raises(ValueError, match=r"tokens: expected \[batch, seq\], got shape \(6,\)"):
        make(None)(tokens(length=6)[0])
    with pytest.raises(ValueError, match=r"temperature: expected at least 0, got -1.0"):
        make(None).generate(tokens(length=3), 4, temperature=-1.0)
    with pytest.raises(ValueError, match="top_k, generator: expected None with temperature=0"):
        make(None).generate(tokens(length=3), 4, top_k=3)
    with pytest.raises(ValueError, match="top_k: expected at least 1, got 0"):
        make(None).generate(tokens(length=3), 4, temperature=1.0, top_k=0)


@each_case("config", [GPTConfig, BertConfig])
def test_sizes_are_numbers(config):
    for name in ("context", "layers", "heads", "width", "vocabulary", "hidden"):
        for wrong in (2.0, "2", True):
            with pytest.raises(TypeError, match=f"{name}: expected an int, got {wrong!r}"):
                config(**{name: wrong})
        with pytest.raises(ValueError, match=f"{name}: expected at least 0, got -1"):
            config(**{name: -1})
    with pytest.raises(TypeError, match="context: expected an int, got None"):
        config(context=None)


@pytest.mark.gpu
@pytest.mark.parametrize("config", STYLES.values(), ids=STYLES)
def test_generation_on_a_gpu_waits_for_nothing(config):
    model = make(None, config).cuda()
    prompt = tokens(length=6).cuda()
    expected = model.generate(prompt, 10)
    torch.cuda.set_sync_debug_mode("error")
    try:
        out = model.generate(prompt, 10)
        drawn = model.generate(prompt, 10, temperature=1.0, top_k=5)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.equal(out, expected) and torch.equal(drawn[:, :6], prompt)


@each_case("name", ["position", "head"])
def test_layers_with_hooks_are_called(name):
    """Position embeddings and the head, of which the fused loss would read the weight alone."""
    model = make(config=replace(SMALL, tied=False, fused_loss=True))
    given = tokens()
    loss, logits = model.loss(given), model(given[:, :-1])
    getattr(model, name).register_forward_hook(lambda module, inputs, out: 0.5 * out)
    assert not torch.equal(model.loss(given), loss)
    assert not torch.equal(model(given[:, :-1]), logits)
    assert_same(model.loss(given), flashtile.cross_entropy(model(given[:, :-1]), given[:, 1:]))
