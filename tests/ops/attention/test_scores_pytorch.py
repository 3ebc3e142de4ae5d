"""Bias, ALiBi slopes and sinks as tensors that learn, and soft cap and masks beside them: autograd to any order, the
compiler, transforms, memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.autograd import gradgradcheck
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


class GradientCase(NamedTuple):
    """A call with more keys than queries and grouped heads: the shapes of bias and slopes, and other options."""

    name: str
    bias: tuple[int, ...]
    slopes: tuple[int, ...] = (2,)
    options: dict[str, Any] = {}
    packed: bool = False


_DROPOUT = {"dropout_p": 0.4, "dropout_seed": torch.tensor([5, 6])}
_MASK = torch.tensor([[True, False, True, True], [False] * 4, [True, True, False, True]])
GRADIENT_CASES = (
    GradientCase("causal-softcap", (3, 4), options={"causal": True, "softcap": 0.9}),
    GradientCase("dropout-softcap", (2, 1, 1, 4), (2, 2), {**_DROPOUT, "softcap": 0.9}),
    GradientCase("key_lengths", (1,), options={"key_lengths": torch.tensor([2, 0]), "scale": -0.7}),
    GradientCase("packed-dropout-mask", (4,), (2,), {**_DROPOUT, "softcap": 2.0, "mask": _MASK}, packed=True),
)


def gradient_problem(case: GradientCase) -> tuple[Callable[..., tuple[Tensor, Tensor]], list[Tensor]]:
    """A function of float64 (q, k, v, bias, slopes, sinks), and its inputs."""
    sizes = ((2, 3), (1, 3), (1, 2))  # heads and head_dim
    rows = ((6,), (7,), (7,)) if case.packed else ((2, 3), (2, 4), (2, 4))
    shapes = [*(row + size for row, size in zip(rows, sizes)), case.bias, case.slopes, (2,)]
    inputs = [leaf(*shape, dtype=torch.float64, seed=seed) for seed, shape in enumerate(shapes)]
    attention: Callable[..., Any] = flashtile.attention
    options = {**case.options, "return_lse": True}
    if case.packed:  # lengths 2, 0, 3 and 1, 2, 4; one row of queries that no sequence owns
        attention = flashtile.attention_varlen
        options |= {"cu_seqlens_q": torch.tensor([0, 2, 2, 5]), "cu_seqlens_k": torch.tensor([0, 1, 3, 7])}
        options |= {"max_seqlen_q": 3, "max_seqlen_k": 4}

    def function(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, slopes: Tensor, sinks: Tensor) -> Any:
        out, lse = attention(q, k, v, bias=bias, alibi_slopes=slopes, sinks=sinks, **options)
        return out, lse.masked_fill(lse.isinf(), 0)  # finite differences of -inf are NaN

    return function, inputs


@pytest.mark.parametrize("case", GRADIENT_CASES, ids=lambda case: case.name)
def test_gradgradcheck(case):
    function, inputs = gradient_problem(case)
    assert gradgradcheck(function, inputs, fast_mode=True)


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


def test_nothing_as_large_as_the_scores_is_saved():
    saved = []

    def pack(tensor: Tensor) -> Tensor:
        saved.append(tensor.numel())
        return tensor

    tensors = call_inputs(seq=96)
    tensors["bias"] = leaf(96, 96)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        attend(**tensors)
    assert max(saved) == 96 * 96, "the largest is the bias itself"
    assert saved.count(96 * 96) == 1
