"""Attention as a part of PyTorch, beyond what `test_every_call` asks of all functions: compiler, autograd, autocast,
transforms."""

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounter
from torch.autograd import gradgradcheck
from torch.utils.checkpoint import checkpoint

import flashtile
from flashtile.ops.attention import cpu
from flashtile.testing import assert_same
from support.running.autograd import compiled_with_count, leaf, results

# PyTorch's own forward mode and compiler still use it.
pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit.script:DeprecationWarning")


def dense_inputs(batch: int = 2, seq: int = 9, dim: int = 8, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """q of 4 heads, k and v of 2."""
    heads = (4, 2, 2)
    return [leaf(batch, seq, h, dim, dtype=dtype, seed=s) for s, h in enumerate(heads)]


def packed_inputs(lengths: tuple[int, ...], dtype: torch.dtype = torch.float32) -> tuple[list[Tensor], Tensor]:
    inputs = [leaf(sum(lengths), h, 8, dtype=dtype, seed=s) for s, h in enumerate((4, 2, 2))]
    return inputs, torch.tensor([0, *lengths]).cumsum(0).int()


# --- torch.compile --------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("fresh_compiler")
def test_compiled_packed_with_other_lengths():
    def function(q: Tensor, k: Tensor, v: Tensor) -> Any:
        return flashtile.attention_varlen(q, k, v, cu_seqlens, causal=True)

    compiled, compilations = compiled_with_count(function)
    for lengths in ((3, 4), (5, 0, 7), (2, 8, 1), (1, 1, 1, 9)):
        inputs, cu_seqlens = packed_inputs(lengths)
        assert_same(results(compiled, inputs), results(function, inputs))
    assert len(compilations) <= 3


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize("names", ["xxx", "xyy", "xxy", "xyx"])
def test_compiled_with_one_tensor_in_several_places(names):
    x, y = leaf(2, 5, 2, 8), leaf(2, 5, 2, 8, seed=1)
    places = [{"x": x, "y": y}[name] for name in names]

    def function(*distinct: Tensor) -> Tensor:
        return flashtile.attention(*places) + 0 * distinct[0]

    compiled, _ = compiled_with_count(function)
    leaves = list(dict.fromkeys(places))
    # The gradients of one tensor are summed in another order.
    assert_same(results(compiled, leaves), results(function, leaves))


@pytest.mark.usefixtures("fresh_compiler")
def test_compiled_dropout_follows_the_manual_seed():
    compiled, _ = compiled_with_count(lambda q, k, v: flashtile.attention(q, k, v, dropout_p=0.5))

    def outputs(seed: int) -> list[Tensor]:
        torch.manual_seed(seed)
        return results(compiled, dense_inputs())

    assert_same(outputs(3), outputs(3))
    assert not torch.equal(outputs(3)[0], outputs(4)[0])


@pytest.mark.usefixtures("fresh_compiler")
def test_compiled_under_autocast():
    def function(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return flashtile.attention(q, k, v)

    compiled, _ = compiled_with_count(function)
    assert compiled(*dense_inputs()).dtype is torch.bfloat16
    assert_same(results(compiled, dense_inputs()), results(function, dense_inputs()))


@pytest.mark.usefixtures("fresh_compiler")
def test_errors_come_through_the_compiler():
    compiled = torch.compile(flashtile.attention, backend="aot_eager")
    q, k, v = dense_inputs()
    with pytest.raises(ValueError, match="expected the head_dim of q"):
        compiled(q, k[..., :3], v)


# --- derivatives ----------------------------------------------------------------------------------------------------


def few_inputs() -> list[Tensor]:
    """In float64, with more keys than queries."""
    shapes = ((2, 3, 2, 3), (2, 4, 1, 3), (2, 4, 1, 2))
    return [leaf(*shape, dtype=torch.float64, seed=seed) for seed, shape in enumerate(shapes)]


def causal(*qkv: Tensor) -> Any:
    return flashtile.attention(*qkv, causal=True, return_lse=True)


@pytest.mark.parametrize("output", [0, 1], ids=["out", "lse"])
def test_gradgradcheck_through_one_output(output):
    inputs = few_inputs()
    used = inputs if output == 0 else inputs[:2]  # lse does not depend on v
    assert gradgradcheck(lambda *given: causal(*given, *inputs[len(given) :])[output], used, fast_mode=True)


def test_third_derivative():
    def gradient(*qkv: Tensor) -> tuple[Tensor, ...]:
        return torch.autograd.grad(causal(*qkv)[0].sin().sum(), qkv, create_graph=True)

    assert gradgradcheck(gradient, few_inputs(), fast_mode=True)


@pytest.mark.parametrize("case", ["dense", "packed", "bias"])
def test_nothing_quadratic_is_saved(case):
    """But for a bias, once."""
    saved = []
    seq = 96

    def pack(tensor: Tensor) -> Tensor:
        saved.append(tensor.numel())
        return tensor

    options: dict[str, Any] = {"causal": True, "dropout_p": 0.1, "return_lse": True}
    if case == "bias":
        options["bias"] = leaf(seq, seq)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        if case == "packed":
            inputs, cu_seqlens = packed_inputs((seq,))
            flashtile.attention_varlen(*inputs, cu_seqlens, **options)
        else:
            flashtile.attention(*dense_inputs(1, seq), **options)
    *others, largest = sorted(saved)
    if case == "bias":
        assert largest == seq * seq
        *others, largest = others
    assert largest == seq * 4 * 8, "the largest is q or out"


def test_upstream_gradient_of_a_sum():
    # The gradient of sum() is one number expanded by stride 0.
    q, k, v = dense_inputs()
    out, lse = flashtile.attention(q, k, v, return_lse=True)
    sums = torch.autograd.grad((out.sum(), lse.sum()), (q, k, v), retain_graph=True)
    ones = torch.autograd.grad((out, lse), (q, k, v), (torch.ones_like(out), torch.ones_like(lse)))
    assert_same(sums, ones)


# --- autocast, checkpointing, modules, threads ----------------------------------------------------------------------


def test_autocast_computes_in_the_autocast_dtype():
    q, k, v = dense_inputs()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out, lse = flashtile.attention(q, k.bfloat16(), v, return_lse=True)
    assert (out.dtype, lse.dtype) == (torch.bfloat16, torch.float32)
    by_hand = flashtile.attention(q.bfloat16(), k.bfloat16(), v.bfloat16())
    assert torch.equal(out, by_hand)
    dq, dk, dv = torch.autograd.grad(out.float().sum(), (q, k, v))
    assert {dq.dtype, dk.dtype, dv.dtype} == {torch.float32}


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_autocast_does_not_reach_the_arithmetic_inside(dtype):
    """Nor float64. Accumulators in float32 would be products in bfloat16 if it were left on below the operator."""

    def function(q: Tensor, k: Tensor, v: Tensor) -> Any:
        return flashtile.attention(q, k, v, causal=True, return_lse=True)

    inputs = dense_inputs(seq=70, dtype=dtype)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        inside = results(function, inputs)
    assert_same(inside, results(function, inputs))


def test_autocast_does_not_cast_integers():
    integers = torch.zeros(1, 2, 1, 4, dtype=torch.int64)
    with torch.autocast("cpu", dtype=torch.bfloat16), pytest.raises(TypeError, match=r"got torch\.int64"):
        flashtile.attention(integers, integers, integers)


class Block(torch.nn.Module):
    """Self-attention with a projection and dropout: the smallest module that holds attention."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = torch.nn.Linear(8, 24)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, 2, 4)).unbind(2)
        return flashtile.attention(q, k, v, causal=True, dropout_p=0.3).flatten(2)


def block_gradients(block: Block, run: Callable[[Block, Tensor], Tensor]) -> list[Tensor]:
    x = leaf(2, 6, 8)
    torch.manual_seed(11)
    run(block, x).sin().sum().backward()
    gradients = [x.grad, *(p.grad.clone() for p in block.parameters())]
    block.zero_grad()
    return gradients


@pytest.mark.parametrize("reentrant", [True, False], ids=["reentrant", "non-reentrant"])
def test_activation_checkpointing_replays_dropout(reentrant):
    block = Block()
    plain = block_gradients(block, lambda block, x: block(x))
    replayed = block_gradients(block, lambda block, x: checkpoint(block, x, use_reentrant=reentrant))
    assert_same(replayed, plain)


def test_no_dropout_draws_nothing():
    state = torch.get_rng_state()
    flashtile.attention(*dense_inputs(), dropout_p=0)
    flashtile.attention(*dense_inputs(), dropout_seed=torch.tensor([1, 2]))
    assert torch.equal(torch.get_rng_state(), state)


def test_threads_do_not_disturb_each_other():
    expected = results(lambda *qkv: flashtile.attention(*qkv, causal=True), dense_inputs(seq=70))
    found: list[list[Tensor]] = []

    def work() -> None:
        for _ in range(5):
            found.append(results(lambda *qkv: flashtile.attention(*qkv, causal=True), dense_inputs(seq=70)))

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 20
    for one in found:
        assert_same(one, expected)


# --- torch.func -----------------------------------------------------------------------------------------------------


def smooth_loss(q: Tensor) -> Tensor:
    return flashtile.attention(q, 0.5 * q.detach(), 2 * q, causal=True).sin().sum()


@pytest.mark.parametrize("dims", [(0, 0, 0), (0, None, None), (1, 0, None), (None, 3, 3)], ids=str)
@pytest.mark.parametrize(
    "options", [{}, {"window": (2, 1), "key_lengths": torch.tensor([4, 2]), "softcap": 0.5}], ids=["", "lengths"]
)
def test_vmap_equals_loop(dims, options):
    def function(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        return flashtile.attention(q, k, v, return_lse=True, **options)

    singles = [t.detach() for t in dense_inputs(2, 5)]
    mapped = [t if dim is None else torch.stack((t, -t, 2 * t), dim=dim) for t, dim in zip(singles, dims, strict=True)]
    pieces = [[t] * 3 if dim is None else t.unbind(dim) for t, dim in zip(mapped, dims, strict=True)]
    expected = [torch.stack(column) for column in zip(*(function(*qkv) for qkv in zip(*pieces)))]
    assert_same(torch.func.vmap(function, in_dims=dims)(*mapped), tuple(expected))


@pytest.mark.parametrize("samples, batch", [(0, 2), (3, 0), (0, 0)], ids=str)
def test_vmap_over_nothing(samples, batch):
    q, k = torch.randn(samples, batch, 5, 2, 4), torch.randn(batch, 7, 2, 4)
    one = torch.func.grad(lambda q: flashtile.attention(q, k, k).sum())
    assert torch.func.vmap(lambda q: flashtile.attention(q, k, k))(q).shape == q.shape
    assert torch.func.vmap(one)(q).shape == q.shape


def test_vmap_over_key_lengths():
    inputs = [t.detach() for t in dense_inputs(2, 5)]
    lengths = torch.tensor([[1, 2], [3, 4], [5, 0]])
    function = lambda lengths: flashtile.attention(*inputs, key_lengths=lengths)  # noqa: E731
    assert_same(torch.func.vmap(function)(lengths), torch.stack([function(row) for row in lengths]))


def test_gradients_of_each_sample():
    samples = torch.stack([leaf(1, 4, 2, 4, seed=seed).detach() for seed in range(3)])
    expected = torch.stack([torch.func.grad(smooth_loss)(sample) for sample in samples])
    assert_same(torch.func.vmap(torch.func.grad(smooth_loss))(samples), expected)


@pytest.mark.unpoisoned
def test_pytorchs_deterministic_mode_is_that_of_attention(monkeypatch):
    """A compiled call is traced anew where it changes."""
    asked, forward, counter = [], cpu.forward, CompileCounter()

    def noted(*call: Any) -> Any:
        asked.append(call[-1].deterministic)
        return forward(*call)

    monkeypatch.setattr(cpu, "forward", noted)
    compiled = torch.compile(lambda q: flashtile.attention(q, q, q), backend=counter, fullgraph=True)
    q = torch.randn(1, 8, 2, 16)
    for mode in (False, True, False, True):
        torch.use_deterministic_algorithms(mode)
        try:
            flashtile.attention(q, q, q)
            compiled(q)
        finally:
            torch.use_deterministic_algorithms(False)
    assert asked == [False] * 2 + [True] * 2 + [False] * 2 + [True] * 2 and counter.frame_count == 2
