"""The rules of docs/design.md about who may import whom, read from the sources, and what importing flashtile costs."""

from __future__ import annotations

import ast
import functools
import gc
import importlib
import inspect
from collections.abc import Iterator
from pathlib import Path

import pytest
from torch.utils._device import _device_constructors

import flashtile
from support.running.each_case import each_case
from support.running.python import run_python

SOURCE = Path(flashtile.__file__).parent
FILES = sorted(SOURCE.rglob("*.py"))
#: Files of kernels, and the host's files beside them.
KERNELS = [
    path
    for path in FILES
    if path.is_relative_to(SOURCE / "ops") and {"gpu", "hopper", "triton", "split_keys", "kernels.py"} & set(path.parts)
]
MAX_LINES = 500
#: Lines of a file of kernels: what one warpgroup does stays in one place.
MAX_LINES_OF_KERNELS = 800
#: Parameters of a function of a kernel file; what belongs together is a `NamedTuple`.
MAX_PARAMETERS = 40
#: Files of attention whose code names a modifier, at most (docs/adding_a_feature.md has the number).
MAX_FILES_OF_A_MODIFIER = 8
#: The parts of an operation whose functions are public.
FRONTS = {"api", "merge"}
#: Parts of attention that hand on all side inputs alike.
PASS_ON = {"repeated", "select", "inspection", "operator"}


def _by_name(text: str) -> dict[str, set[str]]:
    """Lines of a name and what belongs to it."""
    lines = (line.partition(":") for line in text.strip().split("\n"))
    return {name.strip(): set(names.split()) for name, _, names in lines}


#: What each part of an operation's folder may import from that folder. `operator` reaches the implementations through
#: `select`, and `reference` for the backward of the backward. `select` imports the `BACKEND` of each package too, which
#: needs no Triton.
WITHIN_OPERATION = _by_name("""
    __init__:
    api: block_mask checks layers linear operator options repeated select shared spec tables
    shared: operator rows spec
    trees:
    rows: spec
    score_arguments: score_program score_tracing spec
    options: block_mask checks philox score_arguments score_program select spec
    checks: block_mask rows spec
    pytorch: api block_mask checks options score_tracing spec
    partial: block_mask checks operator options score_arguments score_program score_tracing spec tile_lists
    repeated: block_mask call checks operator philox rows score_tracing select spec
    operator: checks cpu derivatives hopper philox reference repeated rows score_program select spec triton
    select: call checks score_program spec
    derivatives: call reference score_program score_tracing spec
    inspection: call checks operator options partial reference select spec
    gpu: call intervals philox score_program score_tracing spec tile_lists
    call: spec
    philox: spec
    merge: spec
    linear: spec
    layers: spec
    tables:
    spec:
    tile_lists:
    mask_sources: tile_lists
    intervals: mask_sources score_program score_symbols tile_lists
    block_mask: intervals mask_sources spec tile_lists
    patterns: block_mask intervals mask_sources tile_lists
    score_program:
    score_symbols: score_program
    score_tracing: score_program score_symbols
    reference: block_mask philox rows score_program spec
    cpu: block_mask call losses philox rows score_program score_tracing spec
    kernels: spec
    triton: call gpu rows spec
    hopper: call gpu spec
    split: call spec
""")
#: What kernels of one operation take from another's: the vocabulary of the Hopper kernels.
HOPPER_VOCABULARY = "attention.hopper.primitives"
#: A plan that chooses between packages of kernels, and between these and the forward of attention.
PLAN_OF_CACHES = "kv_cache.triton.launch"
FORWARD_OVER_CACHES = "attention.hopper.cache_launch"
#: What operations share, and which of its parts may use device facts. It knows no operation; all of them may use it.
COMMON, COMMON_ON_BACKENDS = "common", {"backends", "repeated", "split_keys", "tiles", "watch"}
#: One table of what every operation's operators are in PyTorch's own.
GATHERED = "decompositions"
_PUBLIC = "bench cli compat distributed integrations io_model learn models modules prefix_trees testing"
#: Packages that stand on the public names, as a user does.
ON_PUBLIC_NAMES = set(_PUBLIC.split())
#: What every package asks alike while PyTorch traces.
SIZES = ["ops", "common", "sizes"]
#: PyTorch's functions that make a tensor on the default device unless they are told another.
FACTORIES = {function.__name__ for function in _device_constructors()}
#: Third-party packages that only these parts may need.
OPTIONAL = {
    "typer": {"cli"},
    "rich": {"cli", "bench"},
    "matplotlib": {"cli", "bench"},
    "jinja2": {"bench"},
    "numpy": set(),
    "transformers": {"bench", "integrations"},
    "diffusers": {"integrations"},
}


def module_name(path: Path) -> str:
    parts = path.relative_to(SOURCE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def is_package(path: Path) -> bool:
    return path.name == "__init__.py"


@functools.cache
def parsed(path: Path) -> ast.Module:
    """The tree of a file. It is kept to the end, and the garbage collector would take twice as long as the parser."""
    gc.disable()
    try:
        return ast.parse(path.read_text(encoding="utf-8"))
    finally:
        gc.enable()


@functools.lru_cache(maxsize=len(FILES))
def nodes(tree: ast.AST) -> list[ast.AST]:
    """All nodes of a tree, which is walked once for all tests."""
    return list(ast.walk(tree))


def imports_of(tree: ast.AST, module: str, is_package: bool) -> Iterator[str]:
    """Full names of what a module imports, wherever in it, and of what it reaches as `flashtile.<package>`."""
    package = module if is_package else module.rpartition(".")[0]
    for node in nodes(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parent = package.split(".")[: len(package.split(".")) - node.level + 1]
                base = ".".join([*parent, base] if base else parent)
            yield from (f"{base}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "flashtile":
            yield f"flashtile.{node.attr}"


def violations(tree: ast.AST, module: str, is_package: bool) -> list[str]:
    return [
        f"{module} imports {name}: {why}"
        for name in imports_of(tree, module, is_package)
        if (why := _forbidden(module.split("."), name.split(".")))
    ]


def _forbidden(module: list[str], name: list[str]) -> str:
    """Why `module` may not import `name`; empty where it may."""
    package = module[1] if len(module) > 1 else ""
    if name[0] in OPTIONAL:
        allowed = OPTIONAL[name[0]]
        return "" if package in allowed else f"only {sorted(allowed)} may, the core needs torch and Triton alone"
    if name[0] != "flashtile":
        return ""
    target = name[1] if len(name) > 1 else ""
    if package == "_backends":
        return "" if target == "_backends" else "_backends knows no operation"
    if package in ON_PUBLIC_NAMES:
        private = target == "ops" or (target.startswith("_") and not target.endswith("__"))
        private = private and name[1:4] != SIZES
        return "use the public names of flashtile" if private else ""
    if package == "ops":
        if target == "_backends":
            part = module[3] if len(module) > 3 else ""
            choosing = {"backend", "inspection", "repeated", "select"}
            own = choosing | {"call", "gpu", "kernels", "triton", "hopper", "split"}
            allowed = COMMON_ON_BACKENDS if module[2] == COMMON else own
            return "" if part in allowed else "only kernels, plans, and what chooses, runs or explains calls need it"
        if target != "ops":
            return "operations import operations only"
        return _forbidden_within_operation(module, name)
    return ""


def _forbidden_within_operation(module: list[str], name: list[str]) -> str:
    operation, part = module[2], module[3] if len(module) > 3 else "__init__"
    if name[2:3] == [COMMON]:
        return ""
    if operation == GATHERED:
        return "" if name[3] in {"reference", "spec"} else "it gathers the references of all operations"
    if operation == COMMON:
        return "what operations share knows none of them"
    if part == "hopper" and ".".join(name[2:5]) == HOPPER_VOCABULARY:
        return ""
    if ".".join(module[2:]) == PLAN_OF_CACHES and ".".join(name[2:5]) == FORWARD_OVER_CACHES:
        return ""
    if len(name) < 4 or name[2] != operation:
        return "" if len(name) > 3 and name[3] in FRONTS else "another operation is used through its api"
    if part not in WITHIN_OPERATION:
        return f"say in WITHIN_OPERATION what {part!r} may import"
    if ".".join(module[2:]) == PLAN_OF_CACHES and name[3] == "hopper":
        return ""
    if (part, name[4:]) in (("select", ["BACKEND"]), ("api", ["invariant_tiles"])):
        return ""
    if name[3] == part or name[3] in WITHIN_OPERATION[part]:
        return ""
    return f"{part} may import {sorted(WITHIN_OPERATION[part])}"


def test_imports_follow_the_rule():
    found = [violation for path in FILES for violation in violations(parsed(path), module_name(path), is_package(path))]
    assert not found


@each_case(
    "module, source",
    [
        ("flashtile.ops.attention.cpu", "from flashtile.ops.attention import reference"),
        ("flashtile.ops.attention.cpu.tiles", "from flashtile.ops.attention.reference import forward"),
        ("flashtile.ops.attention.triton.forward", "from ..cpu import forward"),
        ("flashtile.ops.attention.select", "from flashtile.ops.attention.triton import launch"),
        ("flashtile.ops.attention.spec", "def f():\n    from flashtile.ops.attention import api"),
        ("flashtile.ops.attention.reference", "from flashtile._backends import devices"),
        ("flashtile.ops.rotary.triton", "from flashtile.ops.attention.triton import tiles"),
        ("flashtile.ops.common.checks", "from flashtile.ops.attention.spec import AttentionSpec"),
        ("flashtile.ops.common.checks", "from flashtile._backends import devices"),
        ("flashtile._backends.launch", "from flashtile.ops.attention.spec import AttentionSpec"),
        ("flashtile.models.gpt", "from flashtile.ops.attention.api import attention"),
        ("flashtile.ops.decompositions", "from flashtile.ops.rotary.cpu import forward"),
        ("flashtile.bench.cases", "import flashtile\nflashtile._backends.devices"),
        ("flashtile.ops.attention.api", "import numpy as np"),
        ("flashtile.models.gpt", "from rich.console import Console"),
        ("flashtile.models.hugging_face", "import transformers"),
    ],
)
def test_the_rule_sees_a_breach(module, source):
    assert violations(ast.parse(source), module, is_package=False)


def test_files_are_short():
    too_long = {}
    for path in FILES:
        text = path.read_text(encoding="utf-8")
        of_kernels = "@gluon.jit" in text or "@triton.jit" in text
        if (lines := text.count("\n")) > (MAX_LINES_OF_KERNELS if of_kernels else MAX_LINES):
            too_long[module_name(path)] = lines
    assert not too_long, "split them"


def test_files_say_what_they_hold():
    silent = [module_name(path) for path in FILES if path.stat().st_size and not ast.get_docstring(parsed(path))]
    assert not silent, "the first line of a module says what it holds"


def test_kernels_read_state_by_name():
    found = {module_name(path): subscripts for path in KERNELS if (subscripts := numbered_subscripts(parsed(path)))}
    assert not found, "state has names"


def test_rows_of_tables_name_their_numbers():
    tables = [path for path in KERNELS if path.name.endswith(("configs.py", "kernels.py"))]
    assert len(tables) > 2
    calls = [node for path in tables for node in nodes(parsed(path)) if isinstance(node, ast.Call)]
    made = [call for call in calls if isinstance(call.func, ast.Name) and call.func.id[:1].isupper()]
    unnamed = [ast.unparse(call) for call in made if sum(isinstance(each, ast.Constant) for each in call.args) > 2]
    assert not unnamed, "write the names of the fields"


def numbered_subscripts(tree: ast.AST) -> list[str]:
    """Where jitted functions read a tuple by a number; shapes have no names."""
    return [
        f"{ast.unparse(node)} in {function.name}, line {node.lineno}"
        for function in jitted(tree)
        for node in ast.walk(function)
        if isinstance(node, ast.Subscript)
        and isinstance(node.slice, ast.Constant)
        and isinstance(node.slice.value, int)
        and not (isinstance(node.value, ast.Attribute) and node.value.attr in ("shape", "block_shape"))
    ]


def test_numbers_in_place_of_names_are_seen():
    source = "@gluon.jit\ndef f(call, x):\n    return call[9] + producing[1][0].STAGES + x.shape[0] + x[None, :]"
    assert len(numbered_subscripts(ast.parse(source))) == 3
    assert not numbered_subscripts(ast.parse(source.replace("@gluon.jit", "@functools.cache")))


def test_kernels_take_what_belongs_together_as_one():
    found = {
        f"{module_name(path)}.{name}": count for path in KERNELS for name, count in parameters(parsed(path)).items()
    }
    many = {name: count for name, count in found.items() if count > MAX_PARAMETERS}
    assert not many, f"group them in a NamedTuple: {many}"


def parameters(tree: ast.AST) -> dict[str, int]:
    """The number of parameters of each jitted function; of methods with one name the largest."""
    counts: dict[str, int] = {}
    for function in jitted(tree):
        count = len(function.args.args) + len(function.args.kwonlyargs)
        counts[function.name] = max(count, counts.get(function.name, 0))
    return counts


def jitted(tree: ast.AST) -> Iterator[ast.FunctionDef]:
    """The functions of a tree with a decorator of Triton or Gluon."""
    for node in nodes(tree):
        if isinstance(node, ast.FunctionDef) and any("jit" in ast.unparse(each) for each in node.decorator_list):
            yield node


def test_parameters_of_kernels_are_counted():
    source = "@triton.jit\ndef f(a, b: tl.constexpr, *, c): ...\ndef g(a): ..."
    assert parameters(ast.parse(source)) == {"f": 3}


def test_long_calls_name_what_they_pass():
    found = {module_name(path): calls for path in FILES if (calls := long_calls(parsed(path)))}
    assert not found, "pass structs, or keywords from the eighth argument on"


def test_long_calls_are_found():
    body = "g(1, 2, 3, 4, 5, 6, 7, 8); g(1, 2, 3, 4, 5, 6, 7, *more, x=8)"
    assert long_calls(ast.parse(body)) == ["g, line 1"]


def long_calls(tree: ast.AST) -> list[str]:
    """Calls with eight arguments or more by position."""
    return [
        f"{ast.unparse(node.func)}, line {node.lineno}"
        for node in nodes(tree)
        if isinstance(node, ast.Call) and sum(not isinstance(each, ast.Starred) for each in node.args) >= 8
    ]


def test_factories_say_the_device():
    found = {module_name(path): calls for path in FILES if (calls := factories_without_device(parsed(path)))}
    assert not found, "say device=: without it the tensor lies on the user's default device"


def factories_without_device(tree: ast.AST) -> list[str]:
    """Calls of PyTorch's functions that make a tensor on the default device, because they have no `device`."""
    return [
        f"{ast.unparse(node)}, line {node.lineno}"
        for node in nodes(tree)
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and ast.unparse(node.func).removeprefix("torch.") in FACTORIES
        and ast.unparse(node.func).startswith("torch.")
        and not any(keyword.arg in ("device", None) for keyword in node.keywords)
    ]


def test_factories_without_a_device_are_seen():
    source = (
        "torch.empty(3, dtype=d), torch.arange(3, device=q.device), torch.eye(3, **where), torch.tensor(1), q.tensor(1)"
    )
    assert len(factories_without_device(ast.parse(source))) == 2
    assert {"arange", "as_tensor", "full", "linspace", "randint", "randperm", "scalar_tensor", "zeros"} <= FACTORIES


@pytest.mark.parametrize("modifier", ["sink", "alibi"])
def test_a_modifier_is_known_where_it_is_applied(modifier):
    attention = SOURCE / "ops" / "attention"
    naming = {
        path.relative_to(attention).with_suffix("").as_posix()
        for path in attention.rglob("*.py")
        if any(modifier in name for name in identifiers(parsed(path)))
    }
    assert {"spec", "reference", "cpu/scores", "gpu/scores"} <= naming
    assert not naming & PASS_ON, "hand on all side inputs alike, by the fields of their NamedTuples"
    assert len(naming) <= MAX_FILES_OF_A_MODIFIER, sorted(naming)


def identifiers(tree: ast.AST) -> set[str]:
    """The names in code, in small letters; not those in comments, docstrings and messages."""
    found = set()
    for node in nodes(tree):
        for field in ("id", "attr", "arg", "name"):
            name = getattr(node, field, None)
            if isinstance(name, str):
                found.add(name.lower())
    return found


def test_identifiers_are_found():
    source = "def Ff(aa, *, bb=0):\n    'zz'\n    return gg(hh=aa.ii)"
    assert identifiers(ast.parse(source)) == {"ff", "aa", "bb", "gg", "hh", "ii"}


@each_case(
    "module",
    [
        "flashtile",
        "flashtile.compat",
        "flashtile.distributed",
        "flashtile.integrations",
        "flashtile.io_model",
        "flashtile.learn",
        "flashtile.models",
        "flashtile.modules",
        "flashtile.testing",
    ],
)
def test_public_names_have_docstrings(module):
    namespace = importlib.import_module(module)
    public = {name: getattr(namespace, name) for name in namespace.__all__ if name != "__version__"}
    assert public
    missing = [name for name, value in public.items() if not (inspect.ismodule(value) or inspect.getdoc(value))]
    assert not missing


def test_works_with_an_older_triton():
    output = run_python(
        "-c",
        "import sys, types, torch\n"
        "sys.modules['triton'] = types.ModuleType('triton')\n"
        "sys.modules['triton'].__version__ = '3.2.0'\n"
        "import flashtile\n"
        "q = torch.randn(1, 5, 2, 8, requires_grad=True)\n"
        "flashtile.attention(q, q, q, causal=True).sum().backward()\n"
        "assert q.grad.isfinite().all()\n"
        "print(flashtile.explain(q, q, q, device='sm_90').rejected['triton'])\n"
        "from flashtile.cli import card\n"
        "print('rows of a card:', len(card.rows_in_use(torch.device('cpu'))))\n",
    )
    assert "its kernels need Triton 3.6 or newer, and 3.2.0 is installed" in output
    assert "rows of a card: 0" in output


def test_every_test_compiles_where_the_code_is_searched_for_faults():
    """`machine_code.compile_source` does that. A test which compiles past it would let a wrong kernel through."""
    tests = Path(__file__).parent
    direct = {
        path.relative_to(tests).as_posix()
        for path in tests.rglob("*.py")
        if "compile_kernel" in (text := path.read_text("utf-8"))
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.ImportFrom) and any(alias.name == "compile_kernel" for alias in node.names)
    }
    assert direct == {"support/compilation/machine_code.py"}


def test_no_number_goes_through_shared_memory():
    """The scalar of `gl.atomic_add` got lost there (`hopper.schedule.take_number`). So nothing may use it."""
    used = []
    for path in (SOURCE / "ops" / "attention" / "hopper").glob("*.py"):
        of_file = nodes(parsed(path))
        unused = [node.value for node in of_file if isinstance(node, ast.Expr)]
        calls = [node for node in of_file if isinstance(node, ast.Call) and ast.unparse(node.func) == "gl.atomic_add"]
        used += [f"{path.name}:{call.lineno}" for call in calls if call not in unused]
    assert not used, f"expected take_number, got the scalar of gl.atomic_add in {used}"
