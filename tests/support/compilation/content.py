"""What functions and values consist of, as a hash: two that have one hash do the same.

A function consists of its source and of all that it names: functions, classes and constants of this project, and what
those name in turn. Of other packages only the names count, because their versions are told elsewhere
(`checked_code.code_key`). Of a function the instructions count: not its name, module, place, comments or docstrings,
nor what other functions call it. Of a NamedTuple that kernels take, the fields count and no method of the host.
"""

from __future__ import annotations

import ast
import dataclasses
import dis
import enum
import functools
import hashlib
import importlib
import inspect
import re
import sys
import textwrap
import types
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import triton
from triton.runtime.jit import JITCallable

#: Packages whose functions and classes are told by their names.
_OTHERS = sys.stdlib_module_names | {"numpy", "pytest", "_pytest", "torch", "triton"}

#: What is a value for itself.
_PLAIN = (type(None), bool, int, float, complex, str, bytes, types.EllipsisType, torch.dtype, torch.device)

#: What Python itself puts into classes.
_GENERATED = {
    *("__module__", "__qualname__", "__doc__", "__dict__", "__weakref__", "__slots__", "__firstlineno__"),
    *("__static_attributes__", "__orig_bases__", "__match_args__", "__dataclass_fields__", "__dataclass_params__"),
    *("__abstractmethods__", "_abc_impl"),
}


class UnknownContentError(TypeError):
    """A value of a kind whose content is not known here."""


def content_of(*values: Any) -> str:
    """The hash of values and of all that they name."""
    reached: list[Any] = []
    texts = [_text(value, reached) for value in values]
    hashes = {id(of): _closure_hash(of) for of in reached}
    return _hash("\n".join([*texts, *sorted(set(hashes.values()))]))


#: How far apart in the chain of names two definitions may be that change places and change the hash.
_ROUNDS = 3


@functools.cache
def _closure_hash(root: Any) -> str:
    """The hash of a function or class and of all that it names. Each is hashed with the hashes of what it names, some
    rounds long, because functions and classes may name one another."""
    waiting, found = [root], {}
    while waiting:
        named = waiting.pop()
        if id(named) not in found:
            found[id(named)] = _definition(named)
            waiting += found[id(named)][1]
    hashes = {key: _hash(text) for key, (text, _) in found.items()}
    for _ in range(_ROUNDS):
        hashes = {
            key: _hash("\n".join([text, *(hashes[id(of)] for of in names)])) for key, (text, names) in found.items()
        }
    return _hash("\n".join([hashes[id(root)], *sorted(set(hashes.values()))]))


@functools.cache
def _definition(of: Any) -> tuple[str, tuple[Any, ...]]:
    """A function or class: its text, and the functions and classes that it names."""
    reached: list[Any] = []
    parts = [*(_parts_of_class(of) if isinstance(of, type) else _parts_of_function(of))]
    aliases = {} if isinstance(of, type) else _aliases(of)
    own = sorted((aliases.get(name, name), value) for name, value in parts if name in aliases)
    others = [(name, value) for name, value in parts if name not in aliases]
    text = "\n".join([_own_text(of), *(f"{name} = {_text(value, reached)}" for name, value in own + others)])
    return text, tuple(reached)


def _parts_of_function(function: Any) -> Iterator[tuple[str, Any]]:
    """The values that a function names: globals, what it imports, attributes of modules, variables of functions around
    it, and defaults."""
    python = function.fn if isinstance(function, JITCallable) else function
    names = set(_names(python.__code__))
    for name in sorted(set(_loaded_globals(python.__code__)) & python.__globals__.keys()):
        yield from _parts_of_name(name, python.__globals__[name], names)
    for name in sorted(_imports(python.__code__)):
        yield from _parts_of_name(name, importlib.import_module(name), names)
    for name, cell in zip(python.__code__.co_freevars, python.__closure__ or ()):
        yield from _parts_of_name(name, cell.cell_contents, names)
    yield "defaults", (python.__defaults__, python.__kwdefaults__)


def _parts_of_name(name: str, value: Any, names: set[str]) -> Iterator[tuple[str, Any]]:
    if not isinstance(value, types.ModuleType):
        yield name, value
    elif not _is_other(value.__name__):
        for attribute in sorted(names & vars(value).keys()):
            yield from _parts_of_name(f"{name}.{attribute}", getattr(value, attribute), names)


def _names(code: types.CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _names(constant)


def _loaded_globals(code: types.CodeType) -> Iterator[str]:
    """Names that a function reads of its module; those of attributes, which `_names` has too, are others."""
    yield from (each.argval for each in dis.get_instructions(code) if each.opname in ("LOAD_GLOBAL", "LOAD_NAME"))
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _loaded_globals(constant)


def _imports(code: types.CodeType) -> set[str]:
    """Names of the modules that a function imports."""
    found = {each.argval for each in dis.get_instructions(code) if each.opname == "IMPORT_NAME"}
    return found.union(*(_imports(constant) for constant in code.co_consts if isinstance(constant, types.CodeType)))


def _parts_of_class(of: type) -> Iterator[tuple[str, Any]]:
    of = _without_wrapper(of)
    yield "bases", tuple(base for base in of.__bases__ if base is not object)
    if issubclass(of, enum.Enum):
        yield "members", {name: member.value for name, member in of.__members__.items()}
    for name, value in sorted(vars(of).items()):
        value = value.__func__ if isinstance(value, (staticmethod, classmethod)) else value
        if hasattr(of, "_fields") and isinstance(value, types.FunctionType) and of.__module__.startswith("flashtile."):
            continue  # of the host: a kernel sees the fields of a NamedTuple alone
        if isinstance(value, property):
            yield name, (value.fget, value.fset)
        elif isinstance(value, functools.cached_property):
            yield name, value.func
        elif name == "__annotations__":
            yield name, {field: _annotation(kind) for field, kind in value.items()}
        elif not (name in _GENERATED or _is_generated(value) or (isinstance(value, enum.Enum) and value in of)):
            yield name, value


def _annotation(kind: Any) -> Any:
    return kind if isinstance(kind, type) else repr(kind)


def _without_wrapper(of: type) -> type:
    """The class that `triton.language.core._aggregate` has wrapped."""
    if not getattr(of, "__triton_aggregate__", False):
        return of
    return inspect.getclosurevars(of.__setattr__).nonlocals["cls"]


def _is_generated(value: Any) -> bool:
    """Whether a class has it from `NamedTuple`, a dataclass or C: its fields tell as much."""
    if isinstance(value, types.FunctionType):
        return value.__code__.co_filename.startswith("<") and not _has_source(value)
    return (
        not isinstance(value, (JITCallable, type))
        and (inspect.isdatadescriptor(value) or inspect.ismethoddescriptor(value))
        and _is_other(type(value).__module__)
    )


def _has_source(function: Any) -> bool:
    try:
        return bool(inspect.getsourcelines(function))
    except OSError:
        return False


@functools.cache
def _aliases(function: Any) -> dict[str, str]:
    """For each function of this project that a function names, by the name: which of these it is, in order of the
    instructions."""
    python = function.fn if isinstance(function, JITCallable) else function
    tree = _parsed(_source(function))
    if tree is None:
        return {}
    named = (node.id for node in ast.walk(tree) if isinstance(node, ast.Name))
    mine = (name for name in dict.fromkeys(named) if _is_function_of_ours(python.__globals__.get(name)))
    return {name: f"@{number:03}" for number, name in enumerate(mine)}


def _is_function_of_ours(value: Any) -> bool:
    python = value.fn if isinstance(value, JITCallable) else value
    return isinstance(python, types.FunctionType) and not _is_other(python.__module__)


@functools.cache
def _own_text(of: Any) -> str:
    """The name of a class, or the instructions of a function."""
    if isinstance(of, type):
        return f"class {of.__qualname__}"
    facts = type(of).__name__, getattr(of, "noinline", None), getattr(of, "version", None)
    return f"{facts}\n{_instructions(_source(of), _aliases(of))}"


def _source(function: Any) -> str:
    return "".join(function.raw_src) if isinstance(function, JITCallable) else inspect.getsource(function)


def _parsed(source: str) -> ast.Module | None:
    """None: lines around a lambda."""
    try:
        return ast.parse(textwrap.dedent(source))
    except SyntaxError:
        return None


def _instructions(source: str, aliases: Mapping[str, str]) -> str:
    """The source of a function as a compiler sees it: no name, comments, docstrings or places of its own, and other
    functions by their aliases."""
    tree = _parsed(source)
    if tree is None:
        return source
    for node in ast.walk(tree):
        if isinstance(node, ast.Name):
            node.id = aliases.get(node.id, node.id)
        elif isinstance(node, ast.FunctionDef) and ast.get_docstring(node, clean=False) is not None:
            node.body = node.body[1:] or [ast.Pass()]
    definition = tree.body[0]
    if isinstance(definition, ast.FunctionDef):
        definition.name, definition.decorator_list = "", []
    return ast.dump(tree)


def _text(value: Any, reached: list[Any]) -> str:
    """A value as text; the functions and classes in it are added to `reached`."""
    if isinstance(value, enum.Enum):
        return f"{_text(type(value), reached)}.{value.name}"
    if isinstance(value, _PLAIN):
        return repr(value)
    if isinstance(value, triton.language.constexpr):
        return f"constexpr({_text(value.value, reached)})"
    if isinstance(value, (JITCallable, types.FunctionType, type)):
        return _named(value, reached)
    if hasattr(value, "__wrapped__"):  # of `functools.cache`
        return _text(value.__wrapped__, reached)
    if isinstance(value, functools.partial):
        return f"partial({_text((value.func, value.args, value.keywords), reached)})"
    if isinstance(value, (tuple, list)):
        return f"{_named(type(value), reached)}[{', '.join(_text(each, reached) for each in value)}]"
    if isinstance(value, (set, frozenset)):
        return f"set[{', '.join(sorted(_text(each, reached) for each in value))}]"
    if isinstance(value, Mapping):
        pairs = (f"{_text(key, reached)}: {_text(of, reached)}" for key, of in value.items())
        return f"{{{', '.join(pairs)}}}"
    if isinstance(value, re.Pattern):
        return f"pattern({value.pattern!r}, {value.flags})"
    if isinstance(value, Path):
        return f"path({value.name})"  # where packages lie differs from machine to machine
    if dataclasses.is_dataclass(value):
        fields = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
        return f"{_named(type(value), reached)}({_text(fields, reached)})"
    return _text_of_others(value)


def _text_of_others(value: Any) -> str:
    """Values of other packages."""
    if isinstance(value, (triton.language.dtype, types.GenericAlias, types.UnionType)):
        return repr(value)
    if isinstance(value, (types.BuiltinFunctionType, types.MethodDescriptorType)) or callable(value):
        module, name = getattr(value, "__module__", None), getattr(value, "__qualname__", None)
        if name and (module is None or _is_other(module)):
            return f"{module}.{name}"
    if _is_other(type(value).__module__) and "typing" in type(value).__module__:
        return repr(value)
    raise UnknownContentError(f"expected functions, classes and constants, got {value!r}; add its kind to {__name__}")


def _named(of: Any, reached: list[Any]) -> str:
    """What a function or class says itself; of other packages the name. What it names is found through `reached`."""
    module = of.fn.__module__ if isinstance(of, JITCallable) else of.__module__
    if _is_other(module):
        return f"{module}.{of.__name__}"
    reached.append(of)
    return _hash(_own_text(of))


def _is_other(module: str) -> bool:
    return module.partition(".")[0] in _OTHERS


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
