"""What mypy reads: every host function of the kernels' packages is typed; modules of kernels are listed one by one."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

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


def test_modules_that_mypy_excepts_have_kernels_whose_functions_alone_are_untyped() -> None:
    listed = _listed(False)
    assert listed == sorted(listed) and not any("*" in name for name in listed)
    for module in listed:
        found = list(_functions(ast.parse(_path(module).read_text("utf-8")).body))
        assert any(kernel for _, kernel in found), f"{module} has no kernel: take it out of the exceptions"
        untyped = [function.name for function, kernel in found if not kernel and not _typed(function)]
        assert not untyped, f"{module}: {', '.join(untyped)} run on the host and have no types"


@pytest.mark.parametrize("package", ["triton", "hopper", "split", "split_keys"])
def test_packages_of_kernels_are_typed(package: str) -> None:
    assert any(f".{package}.*" in pattern for pattern in _listed(True))
    assert any((ROOT / "src" / "flashtile" / "ops").rglob(f"{package}/*.py"))
