"""Models of diffusers with `set_attention_backend("flashtile")` beside diffusers' native attention."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import flashtile
from flashtile.integrations import use_flashtile_sdpa
from flashtile.testing import Size, assert_close, assert_same, size
from support.distributed.processes import start, start_once
from support.models.diffusers_cases import (
    JOBS,
    MODELS,
    STRATEGIES,
    attention_dispatch,
    build,
    diffusers,
    drawn,
    mask_of_keys,
    qkv,
)
from support.running.missing_packages import run_without

from flashtile.integrations.diffusers import register  # isort: skip  # which needs diffusers, as do its cases

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(autouse=True, scope="module")
def registered():
    diffusers.logging.set_verbosity_error()
    register()
    return


def run(name: str, backend: str, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    """The output, and gradients."""
    model, inputs = build(name, backend, dtype)
    out = model(**inputs, return_dict=False)[0]
    out.backward(drawn(*out.shape, seed=1).to(dtype))
    grads = {f"d {key}": p.grad for key, p in model.named_parameters() if p.grad is not None}
    return {"out": out.detach(), **grads}


@pytest.mark.parametrize("name", MODELS)
def test_models_are_those_with_native_attention(name):
    actual, eager = run(name, "flashtile"), run(name, "native")
    oracle = run(name, "native", torch.float64)
    assert actual.keys() == oracle.keys() and len(actual) > 10
    largest = max(size(value).typical for key, value in oracle.items() if key.startswith("d "))
    for key, value in actual.items():
        assert_close(key, value, oracle[key].double(), eager[key], Size(largest, largest) if key != "out" else Size())


def dispatched(backend: str, tensors: list[Tensor], options: dict[str, Any]) -> list[Tensor]:
    *leaves, dout = (t.detach().requires_grad_() for t in tensors)
    out = attention_dispatch.dispatch_attention_fn(*leaves, **options, backend=backend)
    return [out.detach(), *torch.autograd.grad(out, leaves, dout)]


def test_a_unet_without_the_dispatcher_runs_within_the_context_of_sdpa():
    torch.manual_seed(0)
    blocks = {"down_block_types": ("CrossAttnDownBlock2D",), "up_block_types": ("CrossAttnUpBlock2D",)}
    unet = diffusers.UNet2DConditionModel(
        sample_size=8, block_out_channels=(32,), layers_per_block=1, cross_attention_dim=16, attention_head_dim=2,
        norm_num_groups=8, **blocks,
    )  # fmt: skip
    inputs = (drawn(2, 4, 8, 8), torch.tensor([5]), drawn(2, 77, 16))

    def results() -> list[Tensor]:
        unet.zero_grad()
        out = unet(*inputs).sample
        out.square().sum().backward()
        return [out.detach(), *(p.grad.clone() for p in unet.parameters() if p.grad is not None)]

    expected = results()
    with use_flashtile_sdpa(backend="cpu"):
        actual = results()
    largest = max(size(value).typical for value in expected[1:])
    assert len(actual) == len(expected) > 10
    assert_same(actual, expected, cancelled=Size(largest, largest))


MASKS = {
    "none": lambda keys: None,
    "keys": lambda keys: torch.arange(keys) < torch.tensor([[keys], [40]]),
    "keys, 4 dimensions": lambda keys: (torch.arange(keys) < torch.tensor([[keys], [40]]))[:, None, None],
    "added": lambda keys: drawn(2, 1, 9, keys),
    "of each head": lambda keys: drawn(2, 9, keys) > 0,
}


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize(("head_dim", "keys"), [(64, 77), (128, 512)])
def test_masks_and_cross_attention(mask, head_dim, keys):
    q, dout = (drawn(2, 9, 2, head_dim, seed=seed) for seed in (0, 1))
    tensors = [q, drawn(2, keys, 2, head_dim, seed=2), drawn(2, keys, 2, head_dim, seed=3), dout]
    options = {"attn_mask": MASKS[mask](keys)}
    actual, eager = dispatched("flashtile", tensors, options), dispatched("native", tensors, options)
    if mask == "added":
        options = {"attn_mask": options["attn_mask"].double()}
    oracle = dispatched("native", [t.double() for t in tensors], options)
    for name, *results in zip(("out", "dq", "dk", "dv"), actual, oracle, eager, strict=True):
        assert_close(name, *results)


def test_options():
    tensors = [drawn(1, seq, heads, 16) for seq, heads in ((6, 4), (9, 2), (9, 2), (6, 4))]
    options = {"is_causal": True, "enable_gqa": True, "scale": 0.3}
    assert_same(dispatched("flashtile", tensors, options), dispatched("native", tensors, options))
    q, k, v, _ = tensors
    out, lse = attention_dispatch.dispatch_attention_fn(
        q, k, v, enable_gqa=True, attention_kwargs={"return_lse": True}, backend="flashtile"
    )
    scores = torch.einsum("bqhd,bkhd->bqhk", q, k.repeat_interleave(2, dim=2)) / 4
    assert_same(lse, scores.logsumexp(-1))
    assert out.shape == q.shape


def test_what_is_not_served_is_named():
    q, k = drawn(1, 6, 4, 16), drawn(1, 9, 2, 16)
    call = attention_dispatch.dispatch_attention_fn
    with pytest.raises(ValueError, match="enable_gqa: expected True for 4 query heads and 2 key heads, got False"):
        call(q, k, k, backend="flashtile")
    with pytest.raises(ValueError, match="block_mask: expected None with the attention backend 'flashtile'"):
        call(q, q, q, backend="flashtile", attention_kwargs={"block_mask": object()})


@pytest.mark.filterwarnings("ignore:.torch.jit.script:DeprecationWarning")
def test_compiled_in_one_graph():
    def call(q: Tensor) -> Tensor:
        return attention_dispatch.dispatch_attention_fn(q, q, q, backend="flashtile")

    q = drawn(1, 20, 2, 64)
    assert_same(torch.compile(call, fullgraph=True, backend="aot_eager")(q), call(q))


def test_names_and_options_are_checked():
    register("flashtile_cpu", backend="cpu", deterministic=True)
    with attention_dispatch.attention_backend("flashtile_cpu"):
        q = drawn(1, 6, 4, 16)
        assert attention_dispatch.dispatch_attention_fn(q, q, q).shape == q.shape
    for name in ("native", "Flashtile", "flash-tile"):
        with pytest.raises(ValueError, match="name: expected one in lower case that diffusers does not use"):
            register(name)
    with pytest.raises(TypeError, match="name: expected a str"):
        register(None)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="backend: expected one of 'auto'"):
        register(backend="foo")


def test_without_diffusers_the_package_is_named(tmp_path):
    done = run_without({"diffusers"}, tmp_path, "-c", "import flashtile.integrations.diffusers")
    assert done.stderr.splitlines()[-1] == (
        'ImportError: flashtile.integrations.diffusers needs diffusers: pip install "diffusers>=0.42"'
    )


# --- several processes ----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    return start_once(JOBS, 2, tmp_path_factory, __name__)


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_attention_over_shards(strategy, masked, results):
    name = f"{strategy}, masked" if masked else strategy
    parts = [of_rank["attention"][name] for of_rank in results]
    if masked and strategy.startswith("ring"):
        assert parts[0] == "attn_mask: expected none over sequences that are cut over ranks, got one"
        return
    expected = dispatched("native", qkv(), {"attn_mask": mask_of_keys()} if masked else {})
    found = [torch.cat(shards, dim=1) for shards in zip(*parts, strict=True)]
    assert len(found) == (1 if strategy.endswith("anything") else 4)
    assert_same(found, expected[: len(found)])


@pytest.mark.slow
def test_ring_and_ulysses_together(tmp_path):
    parts = [of_rank["attention"]["both"] for of_rank in start({"attention": JOBS["attention"]}, 4, tmp_path)]
    found = [torch.cat(shards, dim=1) for shards in zip(*parts, strict=True)]
    assert_same(found, dispatched("native", qkv(), {}))


def test_autocast_over_shards(results):
    found = torch.cat([of_rank["attention"]["autocast"] for of_rank in results], dim=1)
    assert_same(found, flashtile.attention(*(t.bfloat16() for t in qkv()[:3])))


@pytest.mark.parametrize("strategy", ["ring", "ulysses"])
@pytest.mark.parametrize("name", ["flux", "wan"])
def test_models_over_shards(name, strategy, results):
    model, inputs = build(name, "native")
    with torch.no_grad():
        expected = model(**inputs, return_dict=False)[0]
    for of_rank in results:
        assert_same(of_rank["models"][f"{name}, {strategy}"], expected)
