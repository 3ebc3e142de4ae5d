"""Bias, ALiBi slopes and sinks as tensors that learn, and soft cap and masks beside them: autograd to any order, the
compiler, transforms, memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

import flashtile
from flashtile.ops.attention import cpu
from flashtile.ops.attention.spec import AttentionSpec, BackwardInputs, SideInputs, Wanted
from flashtile.testing import AttentionCase, assert_same, make_inputs, run
from support.attention.cpu_tiles import use_small_tiles
from support.attention.memory import LargestTensor
from support.running.autograd import compiled_with_count, leaf

LEARNED = ("bias", "alibi_slopes", "sinks")

# PyTorch's own forward mode and compiler still use it.
pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit.script:DeprecationWarning")


def call_inputs(seq: int = 6, dtype: torch.dtype = torch.float32, batch: int = 2) -> dict[str, Tensor]:
    """All that learns in a dense call of 4 heads, 2 of them of keys and values."""
    tensors = {name: leaf(batch, seq, heads, 8, dtype=dtype, seed=heads) for name, heads in zip("qkv", (4, 2, 2))}
    tensors["bias"] = leaf(4, seq, seq, dtype=dtype, seed=3)
    return {**tensors, **{name: leaf(4, dtype=dtype, seed=seed) for seed, name in enumerate(LEARNED[1:])}}


def attend(**tensors: Any) -> tuple[Tensor, Tensor]:
    return flashtile.attention(**tensors, causal=True, softcap=3.0, return_lse=True)


def loss_of(outputs: tuple[Tensor, Tensor]) -> Tensor:
    return outputs[0].sin().sum() + outputs[1].cos().sum()


def gradients(function: Callable[..., tuple[Tensor, Tensor]], tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    grads = torch.autograd.grad(loss_of(function(**tensors)), list(tensors.values()))
    return dict(zip(tensors, grads, strict=True))


def identical(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert actual.keys() == expected.keys()
    assert all(torch.equal(actual[name], expected[name]) for name in expected)


# --- derivatives ----------------------------------------------------------------------------------------------------


def test_one_bias_in_two_calls():
    first, second = call_inputs(), call_inputs()
    bias = first["bias"]
    second = {**second, "q": leaf(2, 6, 4, 8, seed=11), "bias": bias}
    apart = [gradients(attend, given)["bias"] for given in (first, second)]
    both = loss_of(attend(**first)) + loss_of(attend(**second))
    assert_same(torch.autograd.grad(both, bias)[0], apart[0] + apart[1])


@pytest.mark.parametrize("name", ["k", "bias"])
def test_change_in_place_between_forward_and_backward_is_noticed(name):
    tensors = {name: 1 * tensor for name, tensor in call_inputs().items()}
    loss = loss_of(attend(**tensors))
    tensors[name].add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_deterministic_gives_the_same_bits_in_every_run():
    arguments = {"deterministic": True, "softcap": 2.0}
    case = AttentionCase(
        seq_q=70, seq_k=90, bias="11qk", alibi_slopes="h", sinks=True, mask="b11k", arguments=arguments
    )
    inputs = make_inputs(case)
    identical(run(case, inputs, "cpu"), run(case, inputs, "cpu"))


# --- dtypes ---------------------------------------------------------------------------------------------------------


def test_gradients_come_in_the_dtype_of_the_inputs():
    tensors = {name: tensor.detach().bfloat16().requires_grad_() for name, tensor in call_inputs().items()}
    grads = gradients(attend, tensors)
    assert {grad.dtype for grad in grads.values()} == {torch.bfloat16}
    for name in LEARNED:
        tensors[name] = tensors[name].detach().float().requires_grad_()
    grads = gradients(attend, tensors)
    assert {name for name, grad in grads.items() if grad.dtype is torch.float32} == set(LEARNED)


def test_autocast_takes_biases_of_its_dtype_and_of_float32():
    tensors = call_inputs()
    by_hand = {name: tensor.bfloat16() if name in "qkv" else tensor for name, tensor in tensors.items()}
    expected = attend(**by_hand)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        actual = attend(**tensors)
        narrow = attend(**{**tensors, "bias": tensors["bias"].bfloat16()})
    assert narrow[0].dtype is torch.bfloat16
    assert_same(actual, expected)
    grads = torch.autograd.grad(loss_of(actual), list(tensors.values()))
    assert {grad.dtype for grad in grads} == {torch.float32}


# --- fake tensors and the compiler ----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["bias", "mask", "alibi_slopes", "sinks"])
def test_subclasses_beside_q_see_the_operators(name):
    # q, k and v are plain: the tensor beside them is what the dispatcher has to ask.
    seen = []

    class Watched(Tensor):
        @staticmethod
        def __new__(cls, inner: Tensor) -> Watched:
            return Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype, device=inner.device)

        def __init__(self, inner: Tensor) -> None:
            self.inner = inner

        @classmethod
        def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(function)
            unwrapped = pytree.tree_map_only(Watched, lambda watched: watched.inner, (args, kwargs or {}))
            results = function(*unwrapped[0], **unwrapped[1])
            # Views of it go on to the operator, whose results are plain.
            return Watched(results) if isinstance(results, Tensor) else results

    tensors = call_inputs() | {"mask": torch.ones(6, 6) > 0}
    tensors = {key: tensors[key].detach() for key in ("q", "k", "v", name)}
    tensors["q"].requires_grad_()
    expected = attend(**tensors)
    actual = attend(**{**tensors, name: Watched(tensors[name])})
    assert_same(actual, expected)
    assert torch.ops.flashtile.attention_forward.default in seen
    assert_same(
        torch.autograd.grad(loss_of(actual), tensors["q"]), torch.autograd.grad(loss_of(expected), tensors["q"])
    )
    assert torch.ops.flashtile.attention_backward.default in seen


@pytest.mark.usefixtures("fresh_compiler")
def test_one_compilation_serves_all_sizes():
    def function(**tensors: Tensor) -> tuple[Tensor, Tensor]:
        return attend(**tensors)

    compiled, compilations = compiled_with_count(function)
    for batch, seq in ((2, 6), (3, 9), (4, 40)):
        tensors = call_inputs(seq, batch=batch)
        assert_same(gradients(compiled, tensors), gradients(function, tensors))
    assert len(compilations) == 2, "the first with fixed sizes, the second with free ones"


# --- memory ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(1, 1, 128, 128), (1, 1, 1, 128), (2, 1, 1, 1)], ids=str)
@pytest.mark.parametrize("expanded", [False, True])
def test_gradient_of_a_shared_bias_makes_nothing_larger(shape, expanded, monkeypatch):
    # Below the operator, where the mode sees what the backend does. Small tiles, so that they are not the largest.
    use_small_tiles(monkeypatch, 32)
    batch, heads, seq, head_dim = 2, 4, 128, 8
    q, k, v, dout = (torch.randn(batch, seq, heads, head_dim) for _ in range(4))
    mask = torch.ones(1, 1, 1, 1, dtype=torch.bool).expand(batch, heads, seq, seq) if expanded else None
    side, spec = SideInputs(None, None, seq, seq, bias=torch.randn(shape), mask=mask), AttentionSpec(0.3, softcap=2.0)
    with LargestTensor() as seen:
        out, lse = cpu.forward(q, k, v, side, spec)
        grads = cpu.backward(
            BackwardInputs(dout, torch.ones_like(lse), q, k, v, out, lse), side, spec, Wanted(bias=True)
        )
    assert grads.bias.shape == shape
    assert 0 < seen.elements <= max(q.numel(), grads.bias.numel())
