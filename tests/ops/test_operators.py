"""What the factory of operators makes (`ops/common/operators.py`), with the operation of docs/adding_an_operation.md: a
temporary folder gets its files, which are in examples/operation."""

import importlib
import importlib.util
import inspect
import shutil
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.autograd import gradcheck
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

import flashtile.ops
from flashtile.ops.common import operators
from flashtile.testing import assert_same

EXAMPLE = Path(__file__).parents[2] / "examples" / "operation"


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """A folder with the files of the example, where `flashtile.ops` finds them."""
    folder = tmp_path_factory.mktemp("page")
    for file in EXAMPLE.glob("*.py"):
        place = folder / ("tests/ops/gate" if file.stem.startswith("test_") else "src/flashtile/ops/gate") / file.name
        place.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(file, place)
    flashtile.ops.__path__.append(str(folder / "src/flashtile/ops"))
    yield folder
    flashtile.ops.__path__.pop()
    for name in [name for name in operators.OPERATORS if name.startswith("gate_")]:
        del operators.OPERATORS[name]


@pytest.fixture
def gate(files):
    return importlib.import_module("flashtile.ops.gate.api").tanh_gate


def _leaves(*shape: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_() for _ in range(2)]


def _tests(files: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location("page_tests", files / "tests/ops/gate/test_semantics.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_tests_of_the_example_pass(files):
    tests = _tests(files)
    functions = [each for name, each in inspect.getmembers(tests, inspect.isfunction) if name.startswith("test_")]
    assert len(functions) == 4
    for function in functions:
        if not inspect.signature(function).parameters:
            function()
    for shape in ((3, 1001), (0, 5)):
        for dtype in (torch.float32, torch.float16, torch.bfloat16):
            tests.test_backends(shape, dtype, "cpu")


@pytest.mark.interpreter
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_the_kernels_of_the_example_run(dtype, files):
    for shape in ((3, 1001), (0, 5)):
        _tests(files).test_backends(shape, dtype, "triton")


def test_the_operation_obeys_the_rules_of_imports(files):
    from test_architecture import parsed, violations

    for path in (files / "src/flashtile/ops/gate").glob("*.py"):
        assert not violations(parsed(path), f"flashtile.ops.gate.{path.stem}", is_package=False)


def test_exported_and_in_operations_of_pytorch(gate):
    class Module(torch.nn.Module):
        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            return gate(x, y, 0.7)

    x, y = (leaf.detach() for leaf in _leaves(2, 3))
    program = torch.export.export(Module(), (x, y))
    targets = [str(node.target) for node in program.graph.nodes if node.op == "call_function"]
    assert targets == ["flashtile.gate_forward.default"]
    decomposed = program.run_decompositions(flashtile.decompositions())
    assert not any("flashtile" in str(node.target) for node in decomposed.graph.nodes)
    assert_same(decomposed.module()(x, y), gate(x, y, 0.7))


def test_modes_see_the_operators(gate):
    seen = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(str(function))
            return function(*args, **(kwargs or {}))

    x, y = _leaves(2, 3)
    with Watch():
        gate(x, y).sum().backward()
    assert {"flashtile.gate_forward.default", "flashtile.gate_backward.default"} <= set(seen)
    assert not torch.ops.flashtile.gate_forward(x, y, 1.0, "cpu").requires_grad, "autograd is recorded above them"


def test_a_named_backend_is_refused_under_transforms(gate):
    with pytest.raises(ValueError, match=r"^backend: expected 'auto' or 'reference' under torch\.func transforms"):
        torch.func.vmap(lambda x, y: gate(x, y, backend="cpu"))(*_leaves(4, 3))


def test_a_tensor_that_is_given_twice(gate):
    x, _ = _leaves(4, 3)
    expected = torch.autograd.grad(gate(x, x.detach()).sum() + gate(x.detach(), x).sum(), x)[0]
    assert_same(torch.autograd.grad(gate(x, x).sum(), x)[0], expected)
    compiled = torch.compile(gate, fullgraph=True, backend="aot_eager")
    assert_same(torch.autograd.grad(compiled(x, x).sum(), x)[0], expected)
    torch._dynamo.reset()


def test_third_derivatives(gate):
    x, y = _leaves(3)

    def second(x: Tensor) -> Tensor:
        first = torch.autograd.grad(gate(x, y).sum(), x, create_graph=True)[0]
        return torch.autograd.grad(first.sum(), x, create_graph=True)[0]

    assert gradcheck(second, x)


class _Pair(NamedTuple):
    a: Tensor
    b: Tensor | None


class _Flags(NamedTuple):
    second: bool
    of: torch.dtype
    times: int


class _Sums(NamedTuple):
    first: Tensor
    second: Tensor | None
    third: Tensor


def _sums(pair: _Pair, flags: _Flags, backend: str = "") -> _Sums:
    sums = [pair.a.sum(dim, dtype=flags.of) for dim in range(2)]
    return _Sums(sums[0], sums[1] if flags.second else None, sums[0] * flags.times)


@pytest.fixture(scope="module")
def sums():
    """An operator with an optional tensor, an optional result and FLOPs."""
    return operators.operator(
        "test_of_sums",
        _Pair,
        (_Flags,),
        _Sums,
        run=_sums,
        fake=lambda pair, flags: [pair.a.new_empty(pair.a.shape[dim], dtype=flags.of) for dim in (1, 0, 1)],
        present=lambda pair, flags: (True, flags.second, True),
        flops=lambda pair, flags: 7 * pair.a.shape[0],
    )


@pytest.mark.parametrize("second", [True, False])
def test_optional_results(second, sums):
    a, flags = torch.randn(3, 4), _Flags(second, torch.float64, 2)
    schema = "test_of_sums(Tensor a, Tensor? b, bool second, ScalarType of, SymInt times, str backend) -> Tensor[]"
    assert str(sums.overload._schema) == f"flashtile::{schema}"
    torch.library.opcheck(sums.overload, (a, None, *flags, ""))
    with FlopCounterMode(display=False) as counter:
        observed = sums.call(_Pair(a, None), flags, "")
    assert counter.get_total_flops() == 21
    direct = sums.call(_Pair(a, None), flags, "")
    assert type(observed) is type(direct) is _Sums
    assert (observed.second is not None) is (direct.second is not None) is second
    assert_same([t for t in observed if t is not None], [t for t in direct if t is not None])


def test_what_is_written_is_returned():
    def double(pair: _Pair, backend: str) -> None:
        pair.a.mul_(2)

    made = operators.operator("test_of_doubles", _Pair, (), None, run=double, writes="a")
    a = torch.ones(3)
    assert made.call(_Pair(a, None), "") is a and (a == 2).all()
    with FakeTensorMode() as mode:
        fake = mode.from_tensor(a)
        assert made.call(_Pair(fake, None), "") is fake
    torch.library.opcheck(made.overload, (torch.ones(3), None, ""))
