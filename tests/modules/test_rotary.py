"""The rotary module: its tables are cached and grow; it does what the functions do."""

import copy

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import flashtile
from flashtile.modules import RotaryEmbedding
from flashtile.testing import assert_same
from support.running.each_case import each_case


@each_case("scale_base", [None, 512.0])
def test_is_the_functions(scale_base):
    qkv = torch.randn(2, 7, 3, 4, 16)
    module = RotaryEmbedding(16, scale_base=scale_base)
    cos, sin = flashtile.rotary_tables(9, 16)
    scale = torch.ones(9, 8) if scale_base is None else flashtile.xpos_scale(9, 16, scale_base)
    tables = (cos * scale, sin * scale, cos / scale, sin / scale)
    expected = flashtile.apply_rotary_qkv(qkv, *tables, seqlen_offsets=2)
    given = qkv.clone()
    assert module(given, seqlen_offset=2) is given
    assert_same(given, expected)
    q, kv = module(qkv[:, :, 0].clone(), qkv[:, :, 1:].clone(), seqlen_offset=2)
    assert_same(torch.cat((q[:, :, None], kv), dim=2), expected)


def test_tables_are_made_once_and_grow():
    module = RotaryEmbedding(16)
    with torch.inference_mode():
        module(torch.randn(1, 20, 3, 2, 16))
    cos = module.tables(10, torch.device("cpu"))[0]
    assert cos.shape[0] == 20 and cos is module.tables(20, torch.device("cpu"))[0]
    assert module.tables(21, torch.device("cpu"))[0].shape[0] == 21
    leaf = torch.randn(1, 20, 3, 2, 16, requires_grad=True)
    module(leaf * 1).sum().backward()
    assert leaf.grad is not None and not module.state_dict()


def test_tables_of_a_fake_call_are_not_kept():
    """Such a call asks for shapes alone: the next one must find angles."""
    qkv = torch.randn(1, 5, 3, 2, 16)
    module, expected = RotaryEmbedding(16), RotaryEmbedding(16)(qkv.clone())
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        module(mode.from_tensor(qkv))
    assert torch.equal(module(qkv), expected)


@each_case("scale_base", [None, 512.0])
def test_tables_of_a_transformed_call_are_not_kept(scale_base):
    """Under torch.func.grad they are wrapped for it: the module could not be copied afterwards."""
    qkv = torch.randn(1, 5, 3, 2, 16)
    module = RotaryEmbedding(16, scale_base=scale_base)
    torch.func.grad(lambda x: module(x * 1).square().sum())(qkv)
    assert_same(copy.deepcopy(module)(qkv.clone()), module(qkv.clone()))


def test_offsets_in_a_tensor_need_a_length():
    module, offsets = RotaryEmbedding(16), torch.tensor([3, 5])
    x = torch.randn(2, 4, 3, 2, 16)
    with pytest.raises(ValueError, match="max_seqlen: expected an int together with offsets in a tensor"):
        module(x.clone(), seqlen_offset=offsets)
    cos, sin = flashtile.rotary_tables(9, 16)
    expected = flashtile.apply_rotary_qkv(x, cos, sin, seqlen_offsets=offsets)
    assert_same(module(x.clone(), seqlen_offset=offsets, max_seqlen=9), expected)


def test_scaling():
    scaling = flashtile.RotaryScaling("yarn", 4.0, original_length=16)
    x = torch.randn(1, 30, 3, 2, 16)
    cos, sin = flashtile.rotary_tables(30, 16, scaling=scaling)
    expected = flashtile.apply_rotary_qkv(x, cos, sin)
    assert_same(RotaryEmbedding(16, scaling=scaling)(x.clone()), expected)


@each_case("replaced", [False, True])
def test_tables_follow_the_frequencies(replaced):
    x = torch.randn(1, 9, 3, 2, 16)
    module = RotaryEmbedding(16)
    before = module(x.clone())
    slower = flashtile.rotary_frequencies(16, 500.0)
    if replaced:
        module.inv_freq = slower
    else:
        module.inv_freq.copy_(slower)
    expected = RotaryEmbedding(16, 500.0)(x.clone())
    assert not torch.equal(before, expected)
    assert torch.equal(module(x.clone()), expected)
    cos = module.tables(9, x.device)[0]
    assert cos is module.tables(9, x.device)[0], "made once"
    assert torch.equal(copy.deepcopy(module)(x.clone()), expected)


def test_a_compiled_graph_follows_replaced_frequencies():
    torch._dynamo.reset()
    x, module = torch.randn(1, 9, 3, 2, 16), RotaryEmbedding(16)
    compiled = torch.compile(lambda x: module(x * 1), fullgraph=True, backend="eager")
    assert_same(compiled(x), module(x.clone()))
    module.inv_freq = flashtile.rotary_frequencies(16, 500.0)
    assert_same(compiled(x), RotaryEmbedding(16, 500.0)(x.clone()))
    torch._dynamo.reset()


def test_frequencies_survive_casts_and_the_meta_device():
    x, expected = torch.randn(1, 9, 3, 2, 16), RotaryEmbedding(16)
    changed = RotaryEmbedding(16)
    changed.inv_freq.mul_(0.5)
    for module, frequencies in (
        (RotaryEmbedding(16).bfloat16(), expected.inv_freq),
        (changed.half(), expected.inv_freq * 0.5),
        (RotaryEmbedding(16).to_empty(device="cpu"), expected.inv_freq),
        (RotaryEmbedding(16, device="meta").to_empty(device="cpu"), expected.inv_freq),
    ):
        assert torch.equal(module.inv_freq, frequencies) and module.inv_freq.dtype is torch.float32
    # A model that was made on the meta device and got its parameters only.
    assert torch.equal(RotaryEmbedding(16, device="meta")(x.clone()), expected(x.clone()))
    with torch.inference_mode():
        module = RotaryEmbedding(16)
        assert torch.equal(module(x.clone()), expected(x.clone()))
    assert torch.equal(module(x.clone()), expected(x.clone()))
