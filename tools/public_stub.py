"""Writes `src/flashtile/_public.pyi`: the public functions as type checkers and editors see them.

The functions collect arguments that they do not have in `*by_position: NoReturn` and `**other_names: NoReturn`, so that
an error can say what these are called here. An editor would show both in each signature. In the stub they are left out,
and overloads name all optional arguments. A function without overloads that returns `A | B` has three in the stub: A
without the arguments that ask for more (`return_*`), B with the first of them, and `A | B` if that is not known. With
`A | B | C`, B is for the first of them alone, and C for the second.
`--write` writes the file; a test holds it to the sources.
"""

from __future__ import annotations

import argparse
import ast
import builtins
import copy
from collections.abc import Iterator
from pathlib import Path

SOURCES = Path(__file__).parents[1] / "src"
STUB = SOURCES / "flashtile" / "_public.pyi"
TYPING = {name: f"from typing import {name}" for name in ("Literal", "overload")}
#: Arguments that ask for more results, where their names do not say so.
ASK_FOR_MORE = dict.fromkeys(
    ("dropout_add_layer_norm", "dropout_add_rms_norm"), ("prenorm", "return_dropout_mask", "weight1")
)


class Module:
    """The functions of a module (each name -> its overloads, and last its implementation), and where the names in it
    come from (each name -> the line that imports it)."""

    def __init__(self, name: str) -> None:
        path = SOURCES.joinpath(*name.split(".")).with_suffix(".py")
        self.functions: dict[str, list[ast.FunctionDef]] = {}
        self.origins: dict[str, str] = {}
        for node in _statements(ast.parse(path.read_text("utf-8")).body):
            if isinstance(node, ast.FunctionDef):
                self.functions.setdefault(node.name, []).append(node)
            if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
                self.origins[node.name] = f"from {name} import {node.name}"
            elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
                self.origins[node.targets[0].id] = f"from {name} import {node.targets[0].id}"
            elif isinstance(node, ast.Import):
                for alias in node.names:
                    self.origins[alias.asname or alias.name.partition(".")[0]] = f"import {alias.name}"
            elif isinstance(node, ast.ImportFrom):
                for alias in node.names:
                    renamed = f" as {alias.asname}" if alias.asname else ""
                    self.origins[alias.asname or alias.name] = f"from {node.module} import {alias.name}{renamed}"


def _statements(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """The imports of a module, also those of `if TYPE_CHECKING`."""
    for node in body:
        yield node
        if isinstance(node, ast.If):
            yield from _statements(node.body)


def _collects(argument: ast.arg | None) -> bool:
    """Whether an argument is there for others that the function does not have."""
    return argument is not None and argument.annotation is not None and ast.unparse(argument.annotation) == "NoReturn"


def _by_name(function: ast.FunctionDef) -> dict[str, tuple[ast.arg, ast.expr | None]]:
    """The arguments by name only, with their defaults."""
    arguments = function.args
    return {each.arg: (each, default) for each, default in zip(arguments.kwonlyargs, arguments.kw_defaults)}


def _signature(function: ast.FunctionDef, implementation: ast.FunctionDef) -> ast.FunctionDef:
    """A function, or an overload, without what it collects and with each optional argument by its name."""
    arguments, named = function.args, _by_name(function)
    if function is not implementation and arguments.kwarg is not None:
        given = {each.arg for each in arguments.args}
        named = {name: each for name, each in _by_name(implementation).items() if name not in given} | named
        arguments.kwarg = None
    if _collects(arguments.kwarg):
        arguments.kwarg = None
    if _collects(arguments.vararg):
        arguments.vararg = None
    arguments.kwonlyargs = [each for each, _ in named.values()]
    arguments.kw_defaults = [default for _, default in named.values()]
    decorators = [each for each in function.decorator_list if ast.unparse(each) == "overload"]
    body: list[ast.stmt] = [ast.Expr(ast.Constant(...))]
    return ast.FunctionDef(
        name=function.name, args=arguments, body=body, decorator_list=decorators, returns=function.returns,
        type_params=[], lineno=0,
    )  # fmt: skip


def _overloads(function: ast.FunctionDef) -> list[ast.FunctionDef]:
    """Those of a function that returns `A | B` or more, before the function; for others it alone."""
    named = [each.arg for each in (*function.args.args, *function.args.kwonlyargs)]
    asking = ASK_FOR_MORE.get(function.name) or tuple(name for name in named if name.startswith("return_"))
    if not asking or not isinstance(function.returns, ast.BinOp):
        return [function]
    fewer, *more, unknown = (copy.deepcopy(function) for _ in range(len(_alternatives(function.returns)) + 1))
    fewer.returns, *_ = _alternatives(function.returns)
    _leave_out(fewer, asking)
    for number, (each, returns) in enumerate(zip(more, _alternatives(function.returns)[1:])):
        each.returns = returns
        _ask(each, asking[number])
        if len(more) > 1:
            _leave_out(each, asking[number + 1 :])
    for each in (fewer, *more, unknown):
        each.decorator_list = [ast.Name("overload")]
    return [fewer, *more, unknown, function]


def _alternatives(returns: ast.expr) -> list[ast.expr]:
    """A, B and C of `A | B | C`."""
    return [*_alternatives(returns.left), returns.right] if isinstance(returns, ast.BinOp) else [returns]


def _leave_out(function: ast.FunctionDef, asking: tuple[str, ...]) -> None:
    """Arguments that ask for more results do not here."""
    for argument in (*function.args.args, *function.args.kwonlyargs):
        if argument.arg in asking:
            is_flag = ast.unparse(argument.annotation or ast.Constant(None)) == "bool"
            argument.annotation = ast.parse("Literal[False]" if is_flag else "None", mode="eval").body


def _ask(function: ast.FunctionDef, name: str) -> None:
    """An argument asks for more results: it has no default, so it and those behind it are taken by name only."""
    arguments = function.args
    while name in (each.arg for each in arguments.args):
        arguments.kwonlyargs.insert(0, arguments.args.pop())
        arguments.kw_defaults.insert(0, arguments.defaults.pop())
    at = next(at for at, each in enumerate(arguments.kwonlyargs) if each.arg == name)
    kind = arguments.kwonlyargs[at].annotation
    literal = ast.parse("Literal[True]", mode="eval").body
    arguments.kwonlyargs[at].annotation = kind.left if isinstance(kind, ast.BinOp) else literal
    arguments.kw_defaults[at] = None


def _names(signature: ast.FunctionDef) -> set[str]:
    """The names that a signature needs, also in annotations that are strings."""
    return {node.id for node in ast.walk(signature) if isinstance(node, ast.Name)} - set(dir(builtins))


def stub() -> str:
    """The text of the stub."""
    public = ast.parse((SOURCES / "flashtile" / "_public.py").read_text("utf-8"))
    names = next(node for node in public.body if isinstance(node, ast.Assign))
    exported = set(ast.literal_eval(names.value))
    imports: dict[str, str] = {}
    written: list[str] = []
    for node in public.body:
        if not isinstance(node, ast.ImportFrom):
            continue
        assert node.module is not None
        path = SOURCES.joinpath(*node.module.split(".")).with_suffix(".py")
        module = Module(node.module) if path.exists() else None
        for alias in node.names:
            if alias.name not in exported:
                continue
            functions = [] if module is None else module.functions.get(alias.name, [])
            functions = _overloads(functions[0]) if len(functions) == 1 else functions
            if not functions:
                imports[alias.name] = f"from {node.module} import {alias.name} as {alias.name}"
            for function in functions[:-1] or functions:
                signature = _signature(function, functions[-1])
                written.append(ast.unparse(signature))
                assert module is not None
                origins = TYPING | module.origins
                imports = {name: origins[name] for name in _names(signature)} | imports
    head = '"""The public names for type checkers and editors. Written by tools/public_stub.py."""'
    return "\n".join([head, *sorted(imports.values()), ast.unparse(names), *written]) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--write", action="store_true", help=f"write {STUB.relative_to(SOURCES.parent)}")
    if parser.parse_args().write:
        STUB.write_text(stub(), "utf-8")
    else:
        print(stub(), end="")


if __name__ == "__main__":
    main()
