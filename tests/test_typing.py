"""What mypy reads: every host function of the kernels' packages is typed; modules of kernels are listed one by one."""

import ast
import inspect
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import flashtile
from support.running.each_case import each_case
from tools import public_stub

ROOT = Path(__file__).parents[1]
#: What makes a function Triton's to read, not Python's.
_KERNEL = {"jit", "builtin", "constexpr_function", "aggregate"}


def _name(decorator: ast.expr) -> str:
    """`triton.jit` and `gluon.jit(...)` are both "jit"."""
    called = decorator.func if isinstance(decorator, ast.Call) else decorator
    return called.attr if isinstance(called, ast.Attribute) else called.id if isinstance(called, ast.Name) else ""


def _functions(body: list[ast.stmt], inside_kernel: bool = False) -> Iterator[tuple[ast.FunctionDef, bool]]:
    """The functions and methods of a module, and whether Triton reads them."""
    for node in body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            kernel = inside_kernel or not _KERNEL.isdisjoint(map(_name, node.decorator_list))
            if isinstance(node, ast.FunctionDef):
                yield node, kernel
            else:
                yield from _functions(node.body, kernel)
        elif isinstance(node, ast.If):
            yield from _functions([*node.body, *node.orelse], inside_kernel)


def _typed(function: ast.FunctionDef) -> bool:
    arguments = [*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs]
    return function.returns is not None and all(each.annotation or each.arg in ("self", "cls") for each in arguments)


def _overrides() -> list[dict]:
    if sys.version_info < (3, 11):
        pytest.skip("reads pyproject.toml with tomllib, which Python 3.11 has")
    import tomllib

    return tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["tool"]["mypy"]["overrides"]


def _listed(typed: bool) -> list[str]:
    """The modules, or patterns, in which mypy refuses functions without types, or allows them."""
    return [
        name
        for override in _overrides()
        if override.get("disallow_untyped_defs") is typed
        for name in override["module"]
    ]


def _path(module: str) -> Path:
    return (ROOT / "src").joinpath(*module.split(".")).with_suffix(".py")


def test_modules_that_mypy_excepts_have_kernels_whose_functions_alone_are_untyped():
    listed = _listed(False)
    assert listed == sorted(listed) and not any("*" in name for name in listed)
    for module in listed:
        found = list(_functions(ast.parse(_path(module).read_text("utf-8")).body))
        assert any(kernel for _, kernel in found), f"{module} has no kernel: take it out of the exceptions"
        untyped = [function.name for function, kernel in found if not kernel and not _typed(function)]
        assert not untyped, f"{module}: {', '.join(untyped)} run on the host and have no types"


@each_case("package", ["triton", "hopper", "split", "split_keys"])
def test_packages_of_kernels_are_typed(package):
    assert any(f".{package}.*" in pattern for pattern in _listed(True))
    assert any((ROOT / "src" / "flashtile" / "ops").rglob(f"{package}/*.py"))


#: A user's file: each line is one that type checkers accept, but for the last three.
USER = """
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import AuxRequest
import flashtile

def both(found: Tensor | tuple[Tensor, ...]) -> Tensor:
    return found if isinstance(found, Tensor) else found[0]

def losses(x: Tensor, weight: Tensor, labels: Tensor, flag: bool) -> Tensor:
    flashtile.cross_entropy(x, labels).backward()
    flashtile.cross_entropy(x, labels, label_smoothing=0.1, class_weights=weight, return_z_loss=False).backward()
    flashtile.linear_cross_entropy(x, weight, labels, softcap=30.0).backward()
    loss, z_loss = flashtile.cross_entropy(x, labels, return_z_loss=True)
    loss, z_loss = flashtile.linear_cross_entropy(x, weight, labels, None, return_z_loss=True)
    return loss + z_loss + both(flashtile.cross_entropy(x, labels, return_z_loss=flag))

def attend(q: Tensor, flag: bool) -> Tensor:
    out = flashtile.attention(q, q, q, causal=True, window=(3, None)).sum()
    more, lse = flashtile.attention(q, q, q, return_lse=True)
    out = out + more + lse + both(flashtile.attention(q, q, q, return_lse=flag))
    out = out + both(flashtile.attention_varlen(q, q, q, q, return_lse=flag, return_max_scores=flag))
    return out + both(flashtile.attention_with_kv_cache(q, q, q, return_lse=flag))

def flex(q: Tensor, flag: bool) -> Tensor:
    out = flashtile.flex_attention(q, q, q).sum()
    more, lse = flashtile.flex_attention(q, q, q, enable_gqa=True, return_lse=True)
    found = flashtile.flex_attention(q, q, q, return_lse=flag)
    result, aux = flashtile.flex_attention(q, q, q, return_aux=AuxRequest(lse=True))
    assert aux.lse is not None and isinstance(found, (Tensor, tuple))
    return out + more + lse + result + aux.lse

def rest(x: Tensor, weight: Tensor, flag: bool) -> Tensor:
    out = flashtile.dropout_add_layer_norm(x, None, weight, None).sum()
    out, residual = flashtile.dropout_add_rms_norm(x, x, weight, prenorm=True)
    out = out + residual + both(flashtile.dropout_add_rms_norm(x, x, weight, prenorm=flag))
    out = out + flashtile.fused_dense(x, weight).sum() + flashtile.fused_mlp(x, weight, None, weight, None).sum()
    out, residual = flashtile.fused_dense(x, weight, return_residual=True)
    return out + residual + flashtile.apply_rotary(x, weight, weight, position_ids=x)

SHOWN = torch.ones(1)
flashtile.attention(SHOWN, SHOWN, SHOWN, attn_mask=None)
flashtile.rms_norm(SHOWN, epsilon=1.0)
flashtile.cross_entropy(SHOWN, SHOWN, return_z_loss=True).backward()
"""


@pytest.mark.slow
@pytest.mark.parametrize("checker", ["mypy", "pyright"])
def test_a_users_file(checker, tmp_path):
    """What is right is accepted, and the last three lines are not."""
    found = shutil.which(checker, path=f"{Path(sys.executable).parent}:{os.environ.get('PATH', '')}")
    if found is None:
        pytest.skip(f"{checker} is not installed")
    file = tmp_path / "user.py"
    file.write_text(USER, "utf-8")
    options = (
        ["--pythonpath", sys.executable] if checker == "pyright" else ["--config-file", str(ROOT / "pyproject.toml")]
    )
    environment = os.environ | {"PYTHONPATH": str(ROOT / "src")}
    run = subprocess.run([found, *options, str(file)], cwd=ROOT, env=environment, capture_output=True, text=True)
    lines = {int(line.split(":")[1]) for line in run.stdout.splitlines() if " error: " in line or " - error" in line}
    count = USER.count("\n")
    assert lines == {count - 2, count - 1, count}, run.stdout + run.stderr


def _imported(tree: ast.Module) -> set[tuple[str | None, str, str | None]]:
    found = set()
    for node in tree.body:
        if isinstance(node, ast.Import | ast.ImportFrom):
            module = node.module if isinstance(node, ast.ImportFrom) else None
            found |= {(module, alias.name, alias.asname) for alias in node.names}
    return found


def test_the_stub_is_that_of_the_sources():
    stub = ast.parse((ROOT / "src" / "flashtile" / "_public.pyi").read_text("utf-8"))
    made = ast.parse(public_stub.stub())
    remedy = "run python tools/public_stub.py --write, and ruff on its file"
    assert _imported(stub) == _imported(made), remedy
    bodies = ([ast.unparse(node) for node in tree.body if "import " not in ast.unparse(node)] for tree in (stub, made))
    assert next(bodies) == next(bodies), remedy
    assert "NoReturn" not in public_stub.stub()


def test_signatures_show_no_arguments_that_are_refused():
    """`help` and notebooks ask for signatures at run time."""
    for name in flashtile.__all__:
        value = getattr(flashtile, name)
        if inspect.isfunction(value):
            kinds = {parameter.kind for parameter in inspect.signature(value).parameters.values()}
            assert kinds.isdisjoint({inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL}), name
