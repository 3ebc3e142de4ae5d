"""What the linear layers mean: against PyTorch's own on the reference and on the CPU; gradients; autocast; PyTorch."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

import flashtile
from flashtile.testing import assert_same
from support.companions.dense_cases import MlpCase, check
from support.running.autograd import normal
from support.running.each_case import each_case

# PyTorch's own forward mode still uses it.
pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit.script:DeprecationWarning")
both_backends = pytest.mark.parametrize("backend", ["reference", "cpu"])
levels = pytest.mark.parametrize("level", [0, 1, 2])
_FUNCTIONS = {
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "gelu": F.gelu,
    "relu": F.relu,
    "squared_relu": lambda x: F.relu(x).square(),
    "silu": F.silu,
}


def dense_operands(dtype: torch.dtype = torch.float64) -> tuple[Tensor, ...]:
    """x, weight, bias."""
    return tuple(
        normal(*shape, seed=seed, dtype=dtype).requires_grad_() for seed, shape in enumerate([(2, 3, 4), (5, 4), (5,)])
    )


def mlp_operands(gated: bool = False, dtype: torch.dtype = torch.float64) -> tuple[Tensor, ...]:
    """x, weight1, bias1, weight2, bias2."""
    rows = 10 if gated else 5
    shapes = [(2, 3, 4), (rows, 4), (rows,), (3, 5), (3,)]
    return tuple(normal(*shape, seed=seed, dtype=dtype).requires_grad_() for seed, shape in enumerate(shapes))


# --- meaning --------------------------------------------------------------------------------------------------------


@both_backends
@each_case("gated", [False, True])
@each_case("activation", _FUNCTIONS)
def test_mlp_is_that_of_pytorch(activation, gated, backend):
    x, weight1, bias1, weight2, bias2 = operands = mlp_operands(gated)
    out = flashtile.fused_mlp(*operands, activation=activation, gated=gated, backend=backend)
    pre, function = F.linear(x, weight1, bias1), _FUNCTIONS[activation]
    hidden = pre[..., :5] * function(pre[..., 5:]) if gated else function(pre)
    assert_same(out, F.linear(hidden, weight2, bias2))


@both_backends
def test_dense_is_that_of_pytorch(backend):
    x, weight, bias = dense_operands()
    assert_same(flashtile.fused_dense(x, weight, bias, backend=backend), F.linear(x, weight, bias))
    assert_same(flashtile.fused_dense(x[0, 0], weight, backend=backend), F.linear(x[0, 0], weight))


@levels
def test_levels_keep_what_they_say(level):
    """Each level keeps one less of pre (9 columns) and hidden (9 columns); hidden only for the gradient of weight2."""
    x, weight1, bias1, weight2 = normal(6, 4).requires_grad_(), normal(9, 4), normal(9), normal(3, 9)
    for frozen, expected in ((False, 2 - level), (True, min(1, 2 - level))):
        kept: list[tuple[int, ...]] = []
        weight2.requires_grad_(not frozen)
        with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(tuple(t.shape)) or t, lambda t: t):  # noqa: B023
            flashtile.fused_mlp(x, weight1, bias1, weight2, None, checkpoint_level=level, backend="cpu")
        assert kept.count((6, 9)) == expected


@both_backends
def test_gradient_of_the_residual_joins_that_of_x(backend):
    x, weight, bias = dense_operands()
    out, residual = flashtile.fused_dense(x, weight, bias, return_residual=True, backend=backend)
    assert torch.equal(residual, x) and residual.shape == x.shape
    dout, dresidual = normal(2, 3, 5, seed=7), normal(2, 3, 4, seed=8)
    grads = torch.autograd.grad((out, residual), (x, weight, bias), (dout, dresidual))
    assert_same(grads[0], dout @ weight + dresidual)
    (alone,) = torch.autograd.grad(flashtile.fused_dense(x, weight, return_residual=True)[1], x, dresidual)
    assert torch.equal(alone, dresidual)
    operands = mlp_operands()
    _, residual = flashtile.fused_mlp(*operands, return_residual=True, backend=backend)
    (alone,) = torch.autograd.grad(residual, operands[0], dresidual)
    assert torch.equal(alone, dresidual)


@given(
    shape=st.lists(st.integers(0, 5), max_size=3), sizes=st.tuples(*[st.integers(0, 9)] * 3),
    activation=st.sampled_from(list(_FUNCTIONS)), gated=st.booleans(), level=st.integers(0, 2),
    biases=st.tuples(st.booleans(), st.booleans()), dtype=st.sampled_from([torch.float32, torch.bfloat16]),
)  # fmt: skip
def test_any_call_is_right(shape, dtype, **fields):
    check(MlpCase(shape=tuple(shape), dtype=dtype, **fields), "cpu")


# --- the weight's gradient ------------------------------------------------------------------------------------------


@both_backends
def test_wgrad(backend):
    x, dout = normal(2, 3, 4), normal(2, 3, 5, seed=1)
    dweight, dbias = flashtile.linear_bias_wgrad(x, dout, backend=backend)
    assert_same(dweight, dout.flatten(0, 1).t() @ x.flatten(0, 1))
    assert_same(dbias, dout.sum((0, 1)))
    assert flashtile.linear_bias_wgrad(x, dout, bias=False, backend=backend)[1] is None


@each_case("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_wgrad_is_added_to_a_buffer(dtype):
    x, dout = normal(40, 4, dtype=dtype), normal(40, 5, seed=1, dtype=dtype)
    wide = torch.float64 if dtype is torch.float64 else torch.float32
    buffer = normal(5, 4, seed=2, dtype=wide)
    expected = buffer.double() + dout.double().t() @ x.double()
    dweight, _ = flashtile.linear_bias_wgrad(x, dout, main_grad=buffer)
    assert dweight is buffer
    assert_same(buffer, expected.to(wide))  # no rounding to dtype on the way


def test_a_small_gradient_is_not_lost_in_a_wide_buffer():
    x, dout = torch.full((1, 1), 2.0**-12, dtype=torch.bfloat16), torch.ones(1, 1, dtype=torch.bfloat16)
    buffer = torch.ones(1, 1)
    for _ in range(4):
        flashtile.linear_bias_wgrad(x, dout, main_grad=buffer, bias=False)
    assert buffer.item() == 1 + 4 * 2.0**-12


@both_backends
def test_backward_adds_to_main_grad(backend):
    x, weight, bias = dense_operands()
    buffer = torch.zeros_like(weight).detach()
    for times in (1, 2):
        flashtile.fused_dense(x, weight, bias, main_grad=buffer, backend=backend).sum().backward()
        assert_same(buffer, times * x.detach().sum((0, 1)).expand(5, 4))
    assert weight.grad is None and bias.grad is not None and x.grad is not None
    operands = mlp_operands()
    buffers = [torch.zeros_like(operands[place]).detach() for place in (1, 3)]
    out = flashtile.fused_mlp(*operands, main_grad1=buffers[0], main_grad2=buffers[1], backend=backend)
    # Another micro-batch may add to them between forward and backward.
    buffers[0].zero_()
    out.sum().backward()
    expected = torch.autograd.grad(flashtile.fused_mlp(*operands).sum(), (operands[1], operands[3]))
    assert_same(tuple(buffers), expected)
    assert operands[1].grad is None and operands[3].grad is None


# --- autocast -------------------------------------------------------------------------------------------------------


@each_case("dtype", [torch.bfloat16, torch.float16])
def test_autocast_casts_as_pytorch_does(dtype):
    operands = mlp_operands(dtype=torch.float32)
    x, weight1, bias1, weight2, bias2 = operands
    with torch.autocast("cpu", dtype):
        out, residual = flashtile.fused_mlp(*operands, activation="relu", return_residual=True)
        expected = F.linear(F.relu(F.linear(x, weight1, bias1)), weight2, bias2)
    assert out.dtype is expected.dtype is dtype
    assert_same(out, expected)
    assert residual is x, "a residual keeps its dtype"
    grads = torch.autograd.grad(out.sum() + residual.sum(), operands)
    assert all(grad.dtype is torch.float32 for grad in grads)
    wanted = torch.autograd.grad(expected.sum() + x.sum(), operands)
    assert_same(grads, wanted)


def test_autocast_leaves_float64_alone():
    with torch.autocast("cpu", torch.bfloat16):
        assert flashtile.fused_dense(*dense_operands()).dtype is torch.float64


def test_a_backward_within_autocast_keeps_the_dtypes_of_the_forward():
    operands = mlp_operands(dtype=torch.float32)
    out = flashtile.fused_mlp(*operands, checkpoint_level=2)
    expected = torch.autograd.grad(out, operands, torch.ones_like(out), retain_graph=True)
    with torch.autocast("cpu", torch.bfloat16):
        grads = torch.autograd.grad(out, operands, torch.ones_like(out))
    assert_same(grads, expected)


# --- PyTorch --------------------------------------------------------------------------------------------------------


def test_compiled_backward_adds_to_main_grad():
    torch._dynamo.reset()
    x, weight, bias = dense_operands()
    buffer = torch.ones_like(weight).detach()
    call = lambda x, weight, buffer: flashtile.fused_dense(x, weight, bias, main_grad=buffer)  # noqa: E731
    torch.compile(call, fullgraph=True, backend="aot_eager")(x, weight, buffer).sum().backward()
    assert_same(buffer, 1 + x.detach().sum((0, 1)).expand(5, 4))
    assert weight.grad is None
    torch._dynamo.reset()


def test_tied_operands_compile():
    torch._dynamo.reset()
    x, weight = normal(3, 4).requires_grad_(), normal(4, 4, seed=1).requires_grad_()
    call = lambda x, weight: flashtile.fused_mlp(x, weight, None, weight, None).square().sum()  # noqa: E731
    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    expected = torch.autograd.grad(call(x, weight), (x, weight))
    assert_same(torch.autograd.grad(compiled(x, weight), (x, weight)), expected)
    torch._dynamo.reset()


def test_products_are_counted():
    operands = mlp_operands()
    with FlopCounterMode(display=False) as counter:
        flashtile.fused_mlp(*operands).sum().backward()
    assert counter.get_total_flops() == 3 * 2 * 6 * (4 * 5 + 5 * 3)
