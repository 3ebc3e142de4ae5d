"""The norms as a part of PyTorch: dispatcher, compiler, autograd to any order, transforms, modes."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import gradcheck, gradgradcheck
from torch.utils.checkpoint import checkpoint

import flashtile
from flashtile.ops.layer_norm.spec import NormSpec, Operands, Wanted
from flashtile.testing import assert_same
from support.running.autograd import leaf, results

pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit.script:DeprecationWarning")
both_backends = pytest.mark.parametrize("backend", ["reference", "cpu"])
both_norms = pytest.mark.parametrize("rms", [False, True], ids=["layer", "rms"])

_SEED = torch.tensor([5, 6])
_SUBSET = torch.tensor([0, 3, 1, 0, 2, 4])


#: Name -> tensors that take a gradient, by shape, and what else the call gets.
CASES: dict[str, tuple[dict[str, tuple[int, ...]], dict[str, Any]]] = {
    "plain": ({"x0": (4, 5)}, {}),
    "residual": ({"x0": (4, 5), "residual": (4, 5), "weight": (5,), "bias": (5,)}, {"prenorm": True}),
    "dropout": (
        {"x0": (4, 5), "residual": (4, 5), "weight": (5,), "layerscale": (5,)},
        {"dropout_p": 0.3, "dropout_seed": _SEED, "prenorm": True, "zero_centered_weight": True},
    ),
    "parallel": (
        {"x0": (4, 5), "x1": (4, 5), "weight": (5,), "bias": (5,), "weight1": (5,), "bias1": (5,)},
        {"dropout_p": 0.3, "dropout_seed": _SEED},
    ),
    "subset": (
        {"x0": (4, 5), "residual": (6, 5), "weight": (5,)},
        {"x0_subset": _SUBSET, "out_subset": _SUBSET, "out_numrows": 5, "rowscale_const": 1.5, "prenorm": True},
    ),
}
all_cases = pytest.mark.parametrize("case", CASES)


def problem(case: str, rms: bool, backend: str, dtype: torch.dtype = torch.float64) -> tuple[Callable, list[Tensor]]:
    """A function of the tensors that take a gradient, and these."""
    shapes, options = CASES[case]
    inputs = [leaf(*shape, seed=seed, dtype=dtype) for seed, shape in enumerate(shapes.values())]
    call = flashtile.dropout_add_rms_norm if rms else flashtile.dropout_add_layer_norm

    def function(*tensors: Tensor) -> Any:
        arguments = {"residual": None, "weight": None, "bias": None, **dict(zip(shapes, tensors)), **options}
        return call(**arguments, backend=backend)

    return function, inputs


@all_cases
@both_norms
@both_backends
def test_gradcheck(case, rms, backend):
    assert gradcheck(*problem(case, rms, backend))


@all_cases
@both_norms
@both_backends
def test_gradgradcheck(case, rms, backend):
    assert gradgradcheck(*problem(case, rms, backend), fast_mode=True)


@both_backends
def test_only_some_want_a_gradient(backend):
    x, weight = leaf(3, 8), leaf(8, seed=1)
    dz = torch.randn(3, 8)
    both = torch.autograd.grad(flashtile.layer_norm(x, weight, backend=backend), (x, weight), dz)
    (dx,) = torch.autograd.grad(flashtile.layer_norm(x, weight.detach(), backend=backend), x, dz)
    (dweight,) = torch.autograd.grad(flashtile.layer_norm(x.detach(), weight, backend=backend), weight, dz)
    assert_same([dx, dweight], list(both))


# --- the dispatcher -------------------------------------------------------------------------------------------------


def op_arguments(case: str, rms: bool) -> tuple[Operands, NormSpec]:
    shapes, options = CASES[case]
    tensors = {name: leaf(*shape, seed=seed) for seed, (name, shape) in enumerate(shapes.items())}
    tensors |= {name: value for name, value in options.items() if isinstance(value, Tensor)}
    operands = Operands(**tensors)
    scalars = (options.get("dropout_p", 0.0), options.get("rowscale_const", 1.0), "zero_centered_weight" in options)
    return operands, NormSpec(rms, 1e-5, *scalars, torch.float32, options.get("out_numrows", operands.rows))


@all_cases
@both_norms
def test_opcheck(case, rms):
    operands, spec = op_arguments(case, rms)
    forward, backward = torch.ops.flashtile.layer_norm_forward, torch.ops.flashtile.layer_norm_backward
    torch.library.opcheck(forward.default, (*operands, *spec, "cpu"))
    z, *rest = (t.detach() for t in forward(*operands, *spec, "cpu"))
    z1 = rest.pop(0) if operands.weight1 is not None else None
    x = operands.x0.detach() if len(rest) == 1 + (not rms) else rest.pop(0)
    mean = None if rms else rest.pop(0)
    x0 = None if operands.layerscale is None else operands.x0.detach()
    others = [t if t is None else t.detach() for t in operands[3:]]
    wanted = Wanted(operands.x0.shape[0], operands.residual is not None, operands.x1 is not None, True)
    dz1 = None if z1 is None else torch.randn_like(z1)
    saved = (torch.randn_like(z), dz1, torch.randn_like(x), x, x0, mean, *rest, *others)
    torch.library.opcheck(backward.default, (*saved, *spec, *wanted, "cpu"))


def test_checkpointing_draws_the_same_dropout():
    x = leaf(20, 30)
    call = lambda x: flashtile.dropout_add_layer_norm(x, None, None, None, 0.5).sin()  # noqa: E731
    torch.manual_seed(1)
    plain = torch.autograd.grad(call(x).sum(), x)
    torch.manual_seed(1)
    checkpointed = torch.autograd.grad(checkpoint(call, x, use_reentrant=False).sum(), x)
    assert_same(list(checkpointed), list(plain))


# --- torch.compile --------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("fresh_compiler")
@all_cases
def test_compiled_equals_eager(case):
    function, inputs = problem(case, case == "residual", "cpu", torch.float32)
    assert_same(
        results(torch.compile(function, fullgraph=True, backend="aot_eager"), inputs), results(function, inputs)
    )


@pytest.mark.usefixtures("fresh_compiler")
def test_one_compilation_serves_all_sizes():
    compilations = []
    compiler = torch._dynamo.lookup_backend("aot_eager")

    def counting(graph: Any, inputs: Any) -> Any:
        compilations.append(graph)
        return compiler(graph, inputs)

    function = lambda x, r: flashtile.dropout_add_layer_norm(x, r, None, None, prenorm=True)  # noqa: E731
    compiled = torch.compile(function, fullgraph=True, backend=counting)
    for rows in (3, 5, 8):
        inputs = [leaf(2, rows, 7), leaf(2, rows, 7, seed=1)]
        assert_same(results(compiled, inputs), results(function, inputs))
    assert len(compilations) == 2, "the first with fixed sizes, the second with free ones"


@pytest.mark.slow
@pytest.mark.usefixtures("fresh_compiler")
def test_compiled_by_the_default_compiler():
    # Nothing but the operator: what the compiler makes of others takes long to build.
    function = lambda x, w: flashtile.rms_norm(x, w)  # noqa: E731
    inputs = [leaf(4, 6), leaf(6, seed=1)]
    assert_same(results(torch.compile(function, fullgraph=True), inputs), results(function, inputs))
