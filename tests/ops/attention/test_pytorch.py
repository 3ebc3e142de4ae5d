"""Attention as a part of PyTorch: dispatcher, compiler, autograd to any order, autocast, transforms."""

import copy
import pickle
import shutil
import threading
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounter
from torch._subclasses import FakeTensorMode
from torch.autograd import gradgradcheck
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import flashtile
from flashtile.ops.attention import cpu
from flashtile.ops.attention.operator import run_attention
from flashtile.ops.attention.spec import AttentionSpec, SideInputs, Wanted
from flashtile.testing import assert_same
from support.running.autograd import compiled_with_count, leaf, results

COMPILER = "inductor" if shutil.which("g++") else "aot_eager"

# PyTorch's own forward mode and compiler still use it.
pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit.script:DeprecationWarning")


def dense_inputs(batch: int = 2, seq: int = 9, dim: int = 8, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """q of 4 heads, k and v of 2."""
    heads = (4, 2, 2)
    return [leaf(batch, seq, h, dim, dtype=dtype, seed=s) for s, h in enumerate(heads)]


def packed_inputs(lengths: tuple[int, ...], dtype: torch.dtype = torch.float32) -> tuple[list[Tensor], Tensor]:
    inputs = [leaf(sum(lengths), h, 8, dtype=dtype, seed=s) for s, h in enumerate((4, 2, 2))]
    return inputs, torch.tensor([0, *lengths]).cumsum(0).int()


# --- the dispatcher -------------------------------------------------------------------------------------------------


class OpCase(NamedTuple):
    name: str
    packed: bool = False
    side: dict[str, Any] = {}
    spec: dict[str, Any] = {}


OP_CASES = (
    OpCase("plain"),
    OpCase("causal", spec={"window_right": 0}),
    OpCase("key_lengths", side={"key_lengths": torch.tensor([3, 9])}),
    OpCase("dropout", side={"dropout_seed": torch.tensor([1, 2])}, spec={"dropout_p": 0.3}),
    OpCase("bias", side={"bias": torch.randn(1, 4, 9, 9)}),
    OpCase("mask", side={"mask": torch.rand(2, 1, 9, 9) < 0.7}, spec={"softcap": 3.0}),
    OpCase("alibi", side={"alibi_slopes": torch.rand(2, 4)}),
    OpCase("sinks", side={"sinks": torch.randn(4)}, spec={"window_right": 0}),
    OpCase("max_scores", spec={"returns_max_scores": True}),
    OpCase("packed", packed=True, spec={"window_left": 2, "top_left": True}),
)


def op_arguments(case: OpCase) -> tuple[list[Tensor], tuple[Any, ...]]:
    """Tensors and flat rest of the arguments of the operators."""
    if case.packed:
        inputs, cu = packed_inputs((4, 0, 5))
        side = SideInputs(cu, cu.clone(), 9, 9)
    else:
        inputs, side = dense_inputs(), SideInputs(None, None, 9, 9)
    return inputs, (*side._replace(**case.side), *AttentionSpec(0.3)._replace(**case.spec))


@pytest.mark.parametrize("backend", ["reference", "cpu"])
@pytest.mark.parametrize("case", OP_CASES, ids=lambda case: case.name)
def test_opcheck_forward(case, backend):
    inputs, rest = op_arguments(case)
    torch.library.opcheck(torch.ops.flashtile.attention_forward.default, (*inputs, *rest, backend))


@pytest.mark.parametrize("with_dlse", [False, True], ids=["out", "lse"])
@pytest.mark.parametrize("case", OP_CASES, ids=lambda case: case.name)
def test_opcheck_backward(case, with_dlse):
    inputs, rest = op_arguments(case)
    out, lse, _ = torch.ops.flashtile.attention_forward(*inputs, *rest, "cpu")
    dlse = torch.randn_like(lse) if with_dlse else None
    saved = [t.detach() for t in (*inputs, out, lse)]
    upstream = torch.randn_like(out).requires_grad_()
    wanted = Wanted(*(name in case.side for name in Wanted._fields[:-1]))
    arguments = (upstream, dlse, *saved, *rest, *wanted, "cpu")
    torch.library.opcheck(torch.ops.flashtile.attention_backward.default, arguments)


def test_dispatch_modes_see_the_operator():
    # Counters of operations, selective checkpointing and tracers all work through such modes.
    seen = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(function)
            return function(*args, **(kwargs or {}))

    with Watch():
        results(lambda *qkv: flashtile.attention(*qkv), dense_inputs())
    assert torch.ops.flashtile.attention_forward.default in seen
    assert torch.ops.flashtile.attention_backward.default in seen


def test_fake_tensors_give_shapes_without_computing():
    with FakeTensorMode():
        q, k, v = (torch.empty(2, 5, 2, 8, requires_grad=True) for _ in range(3))
        out = flashtile.attention(q, k, v, causal=True)
        out.sum().backward()
    assert out.shape == q.grad.shape == (2, 5, 2, 8)


# --- torch.compile --------------------------------------------------------------------------------------------------


COMPILE_OPTIONS = {
    "plain": {},
    "causal": {"causal": True},
    "window": {"window": (3, 1), "align": "top_left"},
    "scale": {"scale": -0.5},
    "lse": {"return_lse": True},
    "key_lengths": {"key_lengths": torch.tensor([3, 9])},
    "dropout": {"dropout_p": 0.3, "dropout_seed": torch.tensor([1, 2])},
}


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize("options", COMPILE_OPTIONS.values(), ids=COMPILE_OPTIONS)
def test_compiled_equals_eager(options):
    def function(q: Tensor, k: Tensor, v: Tensor) -> Any:
        return flashtile.attention(q, k, v, **options)

    compiled, _ = compiled_with_count(function)
    assert_same(results(compiled, dense_inputs()), results(function, dense_inputs()))


@pytest.mark.slow
@pytest.mark.usefixtures("fresh_compiler")
def test_compiled_by_the_default_compiler():
    def function(x: Tensor) -> Tensor:
        q, k, v = (x * 2).chunk(3, dim=-1)
        return flashtile.attention(q, k, v, causal=True).tanh()

    compiled = torch.compile(function, fullgraph=True, backend=COMPILER)
    assert_same(results(compiled, [leaf(2, 9, 2, 24)]), results(function, [leaf(2, 9, 2, 24)]))


@pytest.mark.usefixtures("fresh_compiler")
def test_dynamic_sizes_from_the_start():
    compiled, compilations = compiled_with_count(flashtile.attention)
    for seq in (9, 12, 17):
        inputs = dense_inputs(seq=seq)
        for tensor in inputs:
            torch._dynamo.mark_dynamic(tensor, 1)
        assert_same(results(compiled, inputs), results(flashtile.attention, inputs))
    assert len(compilations) == 1


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
def test_compiled_with_changing_numbers():
    # The second value of a number makes the compiler treat it as a symbol; the checks must let symbols through.
    def function(q: Tensor, k: Tensor, v: Tensor, scale: float, left: int) -> Tensor:
        return flashtile.attention(q, k, v, scale=scale, window=(left, None))

    compiled, _ = compiled_with_count(function)
    q, k, v = dense_inputs()
    for scale, left in ((0.5, 1), (0.25, 2), (2, 3), (3, 4)):
        assert_same(compiled(q, k, v, scale, left), function(q, k, v, scale, left))


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


class GradientCase(NamedTuple):
    name: str
    options: dict[str, Any] = {}
    lengths: tuple[int, ...] | None = None


GRADIENT_CASES = (
    GradientCase("plain"),
    GradientCase("causal", {"causal": True}),
    GradientCase("window-negative-scale", {"window": (1, 0), "align": "top_left", "scale": -0.7}),
    GradientCase("key_lengths", {"key_lengths": torch.tensor([2, 0])}),
    GradientCase("dropout", {"dropout_p": 0.4, "dropout_seed": torch.tensor([5, 6]), "causal": True}),
    GradientCase("packed", {"causal": True}, lengths=(2, 0, 3)),
    GradientCase("packed-dropout", {"dropout_p": 0.4, "dropout_seed": torch.tensor([5, 6])}, lengths=(1, 4)),
)


def gradient_problem(case: GradientCase) -> tuple[Callable[..., Any], list[Tensor]]:
    """A function of float64 (q, k, v) with more keys than queries in the dense cases, and its inputs."""
    if case.lengths is not None:
        cu = torch.tensor([0, *case.lengths]).cumsum(0)
        total = sum(case.lengths) + 1  # one row that no sequence owns
        inputs = [leaf(total, h, d, dtype=torch.float64, seed=h) for h, d in ((2, 3), (1, 3), (1, 2))]
        call = lambda q, k, v: flashtile.attention_varlen(  # noqa: E731
            q, k, v, cu, **case.options, return_lse=True
        )
    else:
        shapes = ((2, 3, 2, 3), (2, 4, 1, 3), (2, 4, 1, 2))
        inputs = [leaf(*shape, dtype=torch.float64, seed=s) for s, shape in enumerate(shapes)]
        call = lambda q, k, v: flashtile.attention(  # noqa: E731
            q, k, v, **case.options, return_lse=True
        )

    def function(*qkv: Tensor) -> tuple[Tensor, Tensor]:
        out, lse = call(*qkv)
        return out, lse.masked_fill(lse.isinf(), 0)  # finite differences of -inf are NaN

    return function, inputs


@pytest.mark.parametrize("case", GRADIENT_CASES, ids=lambda case: case.name)
def test_gradgradcheck(case):
    function, inputs = gradient_problem(case)
    assert gradgradcheck(function, inputs, fast_mode=True)


@pytest.mark.parametrize("output", [0, 1], ids=["out", "lse"])
def test_gradgradcheck_through_one_output(output):
    function, inputs = gradient_problem(GRADIENT_CASES[1])
    used = inputs if output == 0 else inputs[:2]  # lse does not depend on v
    assert gradgradcheck(lambda *given: function(*given, *inputs[len(given) :])[output], used)


def test_third_derivative():
    function, inputs = gradient_problem(GRADIENT_CASES[1])

    def gradient(*qkv: Tensor) -> tuple[Tensor, ...]:
        return torch.autograd.grad(function(*qkv)[0].sin().sum(), qkv, create_graph=True)

    assert gradgradcheck(gradient, inputs, fast_mode=True)


@pytest.mark.parametrize(
    "arguments",
    [lambda x: (x, x, x), lambda x: (x, 2 * x, x.tanh()), lambda x: (x, x.flip(1), x[..., :1])],
    ids=["same", "made-of-each-other", "partly"],
)
def test_double_backward_of_inputs_that_depend_on_each_other(arguments):
    x = leaf(1, 3, 1, 2, dtype=torch.float64)
    assert gradgradcheck(lambda x: flashtile.attention(*arguments(x)), [x])


@pytest.mark.parametrize("wanted", ["q", "k", "v", "qk", "qv", "kv"])
def test_gradients_of_some_inputs_only(wanted):
    def gradients(names: str) -> dict[str, Tensor]:
        inputs = dict(zip("qkv", dense_inputs()))
        for name, tensor in inputs.items():
            tensor.requires_grad_(name in names)
        flashtile.attention(**inputs, causal=True).sin().sum().backward()
        assert all(tensor.grad is None for name, tensor in inputs.items() if name not in names)
        return {name: inputs[name].grad for name in names}

    everything = gradients("qkv")
    assert_same(gradients(wanted), {name: everything[name] for name in wanted})


def test_gradient_through_lse_only():
    q, k, v = dense_inputs(dtype=torch.float64)
    _, lse = flashtile.attention(q, k, v, return_lse=True)
    dq, dk, dv = torch.autograd.grad(lse.sin().sum(), (q, k, v))
    scores = torch.einsum("bihd,bjhd->bhij", q, k.repeat_interleave(2, dim=2)) / 8**0.5
    wanted = torch.autograd.grad(scores.logsumexp(-1).sin().sum(), (q, k))
    assert_same((dq, dk), wanted)
    assert not dv.any()


def test_second_backward_with_retained_graph():
    q, k, v = dense_inputs()
    loss = flashtile.attention(q, k, v, dropout_p=0.2).sin().sum()
    first = torch.autograd.grad(loss, (q, k, v), retain_graph=True)
    assert_same(list(torch.autograd.grad(loss, (q, k, v))), list(first))


def test_backward_without_retained_graph_is_refused_twice():
    loss = flashtile.attention(*dense_inputs()).sum()
    loss.backward()
    with pytest.raises(RuntimeError, match="second time"):
        loss.backward()


@pytest.mark.parametrize("case", ["dense", "packed"])
def test_nothing_quadratic_is_saved(case):
    saved = []
    seq = 96

    def pack(tensor: Tensor) -> Tensor:
        saved.append(tensor.numel())
        return tensor

    options = {"causal": True, "dropout_p": 0.1, "return_lse": True}
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        if case == "dense":
            flashtile.attention(*dense_inputs(1, seq), **options)
        else:
            inputs, cu_seqlens = packed_inputs((seq,))
            flashtile.attention_varlen(*inputs, cu_seqlens, **options)
    assert saved
    assert max(saved) == seq * 4 * 8, "the largest is q or out"


# --- strides --------------------------------------------------------------------------------------------------------

LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "heads-first": lambda t: t.transpose(1, 2).contiguous().transpose(1, 2),
    "sequence-first": lambda t: t.transpose(0, 1).contiguous().transpose(0, 1),
    "dim-not-last": lambda t: t.transpose(1, 3).contiguous().transpose(1, 3),
    "every-second": lambda t: t.repeat_interleave(2, dim=3)[..., ::2],
    "slice": lambda t: torch.cat((t, t), dim=3)[..., : t.shape[3]],
    "offset": lambda t: torch.cat((t[:, :1], t), dim=1)[:, 1:],
    "reversed-batch": lambda t: t.flip(0).contiguous().flip(0),
}


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_strides_do_not_matter(layout):
    def function(q: Tensor, k: Tensor, v: Tensor) -> Any:
        return flashtile.attention(q, k, v, causal=True, return_lse=True)

    rearranged = results(lambda *inputs: function(*map(layout, inputs)), dense_inputs())
    assert_same(rearranged, results(function, dense_inputs()))


def test_expanded_inputs():
    # One key/value head for all, and one batch entry for all, by stride 0.
    q, k, v = leaf(3, 7, 4, 8), leaf(1, 7, 1, 8, seed=1), leaf(1, 7, 1, 8, seed=2)
    expanded = results(
        lambda q, k, v: flashtile.attention(q, k.expand(3, -1, 4, -1), v.expand(3, -1, 4, -1)),
        [q, k, v],
    )
    copied = results(lambda q, k, v: flashtile.attention(q, k.repeat(3, 1, 4, 1), v.repeat(3, 1, 4, 1)), [q, k, v])
    assert_same(expanded, copied)


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_strides_of_the_upstream_gradient_do_not_matter(layout):
    q, k, v = dense_inputs()
    out, lse = flashtile.attention(q, k, v, return_lse=True)
    dout, dlse = torch.randn_like(out), torch.randn_like(lse)
    slanted = dlse.transpose(1, 2).contiguous().transpose(1, 2)
    rearranged = torch.autograd.grad((out, lse), (q, k, v), (layout(dout), slanted), retain_graph=True)
    assert_same(rearranged, torch.autograd.grad((out, lse), (q, k, v), (dout, dlse)))


def test_upstream_gradient_of_a_sum():
    # The gradient of sum() is one number expanded by stride 0.
    q, k, v = dense_inputs()
    out, lse = flashtile.attention(q, k, v, return_lse=True)
    sums = torch.autograd.grad((out.sum(), lse.sum()), (q, k, v), retain_graph=True)
    ones = torch.autograd.grad((out, lse), (q, k, v), (torch.ones_like(out), torch.ones_like(lse)))
    assert_same(sums, ones)


def test_inputs_are_not_changed():
    inputs = dense_inputs()
    tensors = {"key_lengths": torch.tensor([3, 9]), "dropout_seed": torch.tensor([1, 2])}
    before = [t.detach().clone() for t in (*inputs, *tensors.values())]
    out, lse = flashtile.attention(*inputs, **tensors, dropout_p=0.5, return_lse=True)
    upstream = torch.randn_like(out), torch.randn_like(lse)
    copies = [t.clone() for t in (*upstream, out, lse)]
    torch.autograd.grad((out, lse), inputs, upstream)
    unchanged = [t.detach() for t in (*inputs, *tensors.values(), *upstream, out, lse)]
    assert all(map(torch.equal, unchanged, [*before, *copies]))


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


def test_autocast_leaves_float64_alone():
    inputs = dense_inputs(dtype=torch.float64)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        inside = results(flashtile.attention, inputs)
    assert_same(inside, results(flashtile.attention, inputs))


def test_autocast_does_not_reach_the_arithmetic_inside():
    # Accumulators in float32 would be matrix products in bfloat16 if autocast were left on below the operator.
    def function(q: Tensor, k: Tensor, v: Tensor) -> Any:
        return flashtile.attention(q, k, v, causal=True, return_lse=True)

    inputs = dense_inputs(seq=70, dtype=torch.bfloat16)
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


@pytest.mark.parametrize("copy_of", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))], ids=["copy", "pickle"])
def test_copies_of_modules_work(copy_of):
    block = Block()
    block(leaf(2, 6, 8)).sum().backward()
    block.zero_grad()
    assert_same(*(block_gradients(b, lambda b, x: b(x)) for b in (copy_of(block), block)))


def test_manual_seed_reproduces_dropout_bit_for_bit():
    def outputs(seed: int) -> list[Tensor]:
        torch.manual_seed(seed)
        return results(lambda *qkv: flashtile.attention(*qkv, dropout_p=0.5), dense_inputs())

    assert_same(outputs(5), outputs(5))
    assert not torch.equal(outputs(5)[0], outputs(6)[0])


def test_each_call_draws_its_own_dropout():
    q, k, v = dense_inputs()
    torch.manual_seed(0)
    first, second = (flashtile.attention(q, k, v, dropout_p=0.5) for _ in range(2))
    assert not torch.equal(first, second)


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


def test_func_grad_equals_autograd():
    q = leaf(2, 5, 2, 4)
    (expected,) = torch.autograd.grad(smooth_loss(q), q)
    assert_same(torch.func.grad(smooth_loss)(q.detach()), expected)


def test_func_second_order_equals_autograd():
    q = leaf(2, 4, 2, 4, dtype=torch.float64)
    (first,) = torch.autograd.grad(smooth_loss(q), q, create_graph=True)
    (expected,) = torch.autograd.grad(first.square().sum(), q)
    second = torch.func.grad(lambda q: torch.func.grad(smooth_loss)(q).square().sum())(q.detach())
    assert_same(second, expected)


def test_jacrev_through_lse():
    q, k, v = (t.detach() for t in dense_inputs(1, 3, 2, torch.float64))
    function = lambda q: flashtile.attention(q, k, v, return_lse=True)[1]  # noqa: E731
    assert_same(torch.func.jacrev(function)(q), torch.autograd.functional.jacobian(function, q))


@pytest.mark.parametrize("dims", [(0, 0, 0), (0, None, None), (1, 0, None), (None, 3, 3)], ids=str)
@pytest.mark.parametrize("options", [{}, {"window": (2, 1), "key_lengths": torch.tensor([4, 2])}], ids=["", "lengths"])
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


def test_gradient_through_vmap():
    samples = torch.stack([leaf(1, 4, 2, 4, seed=seed).detach() for seed in range(3)]).requires_grad_()
    (actual,) = torch.autograd.grad(torch.func.vmap(smooth_loss)(samples).sum(), samples)
    expected = [torch.func.grad(smooth_loss)(sample) for sample in samples.detach()]
    assert_same(actual, torch.stack(expected))


def test_vmap_over_packed_sequences_is_refused():
    inputs, cu_seqlens = packed_inputs((2, 3))
    mapped = [t.detach().expand(2, -1, -1, -1) for t in inputs]
    with pytest.raises(NotImplementedError, match="vmap: expected a dense call"):
        torch.func.vmap(lambda q, k, v: flashtile.attention_varlen(q, k, v, cu_seqlens))(*mapped)


@pytest.mark.parametrize("randomness", ["same", "different"])
def test_vmap_with_dropout_is_refused(randomness):
    mapped = [t.detach().expand(2, -1, -1, -1, -1) for t in dense_inputs()]
    with pytest.raises(NotImplementedError, match="without dropout"):
        torch.func.vmap(lambda *qkv: flashtile.attention(*qkv, dropout_p=0.5), randomness=randomness)(*mapped)


def test_operator_is_not_differentiable_by_itself():
    # Autograd is recorded by run_attention; a fallback at the operator would record it a second time, wrongly.
    inputs, rest = op_arguments(OP_CASES[0])
    out, *_ = torch.ops.flashtile.attention_forward(*inputs, *rest, "cpu")
    assert not out.requires_grad
    sides = len(SideInputs._fields)
    recorded, _ = run_attention(*inputs, SideInputs(*rest[:sides]), AttentionSpec(*rest[sides:]), "cpu")
    assert recorded.requires_grad


@pytest.mark.unpoisoned
def test_pytorchs_deterministic_mode_is_that_of_attention(monkeypatch):
    asked = []
    forward = cpu.forward

    def noted(*call: Any) -> Any:
        asked.append(call[-1].deterministic)
        return forward(*call)

    monkeypatch.setattr(cpu, "forward", noted)
    q = torch.randn(1, 8, 2, 16)
    for mode in (False, True, False):
        torch.use_deterministic_algorithms(mode)
        try:
            flashtile.attention(q, q, q)
        finally:
            torch.use_deterministic_algorithms(False)
    assert asked == [False, True, False]


@pytest.mark.unpoisoned
def test_a_compiled_call_is_traced_anew_in_deterministic_mode():
    counter = CompileCounter()
    attend = torch.compile(lambda q: flashtile.attention(q, q, q), backend=counter, fullgraph=True)
    q = torch.randn(1, 8, 2, 16)
    for mode in (False, True, False, True):
        torch.use_deterministic_algorithms(mode)
        try:
            attend(q)
        finally:
            torch.use_deterministic_algorithms(False)
    assert counter.frame_count == 2
