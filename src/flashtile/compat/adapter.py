"""Modules of other libraries as tables of names and arguments, and functions that have the arguments of their table.

A name whose arguments differ from flashtile's in names and defaults alone needs no code: its table says both. Any other
has a body, which picks by name the arguments that it uses, and hands on the rest; it may serve several names::

    def flash_attn_func(return_attn_probs, **given): ...
    flash_attn_kvpacked_func = flash_attn_func

    Names(("flash_attn_2",), "", {"flash_attn_kvpacked_func": "q, kv, dropout_p=0.0, causal=False"}).serve(globals())
"""

from __future__ import annotations

import ast
import importlib
import inspect
import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor, nn
from torch.nn import functional as F

#: The words that defaults in tables are written with.
_WORDS = {"torch": torch, "LayerNorm": nn.LayerNorm, "Dropout": nn.Dropout, "gelu": F.gelu, "sigmoid": F.sigmoid}
#: `name(arguments)`, where arguments may have one pair of parentheses in another.
_ENTRY = re.compile(r"([\w.]+)\(((?:[^()]|\([^()]*\))*)\)")
#: An argument that is not served, or has no effect; and one that has another name here.
_MARK, _RENAMED = re.compile(r"(\w+)(?:=\w+)?([!~])"), re.compile(r"(\w+)->(\w+)")

#: The condition that an argument is not its default, None, True or False.
_IS_ANOTHER = {"None": "{} is not None", "True": "not {}"}


class Names(NamedTuple):
    """The names of a module of another library.

    Attributes:
        homes: modules that have them, by full name or by that in `flashtile.compat`; the first that has one counts.
        prefix: what they begin with there, where there are others of the same name.
        arguments: name -> arguments, as one writes them; of a class those of its constructor, and "Class.method".
        unused: name -> arguments that its body does not get: of one with a remedy only the default is served, the
            others have no effect.
        renamed: name -> arguments that its body gets by another name, with that name.
    """

    homes: tuple[str, ...]
    prefix: str
    arguments: dict[str, str]
    unused: Mapping[str, Mapping[str, str]] = {}
    renamed: Mapping[str, Mapping[str, str]] = {}

    @property
    def public(self) -> list[str]:
        """The names of functions and classes."""
        return list(dict.fromkeys(name.partition(".")[0] for name in self.arguments))

    def found(self) -> dict[str, Any]:
        """The object behind each name."""
        found: dict[str, Any] = {}
        for home in reversed(self.homes):
            found |= vars(importlib.import_module(home if home.startswith("flashtile") else f"flashtile.compat.{home}"))
        own = {name.removeprefix(self.prefix): value for name, value in found.items() if name.startswith(self.prefix)}
        return {name: (own if name in own else found)[name] for name in self.public}

    def serve(self, home: dict[str, Any]) -> None:
        """Gives the functions and methods of a module, by its globals, the arguments of their names in the table. Names
        that it lacks are made of those of the other homes, where these have other arguments."""
        others: dict[str, Any] = {}
        for other in reversed([each for each in self.homes if each.startswith("flashtile")]):
            others |= vars(importlib.import_module(other))
        for name, arguments in self.arguments.items():
            own, _, method = name.partition(".")
            own = self.prefix + own if self.prefix + own in home else own
            value = home.get(own, others.get(own))
            if value is None or "*args" in arguments:
                continue
            changes = self.unused.get(name, {}), self.renamed.get(name, {})
            body = getattr(value, method) if method else value
            function = body.__init__ if isinstance(body, type) else body  # type: ignore[misc]
            if _has(body, arguments) and (not any(changes) or hasattr(function, "is_adapted")):
                continue
            if not isinstance(value, type):
                made = home[own] = adapted(own, arguments, body, *changes)
            else:
                method = method or "__init__"
                made = adapted(f"{own}.{method}", arguments, function, *changes)
                if own not in home:
                    value = home[own] = type(own, (value,), {"__doc__": value.__doc__, "__module__": home["__name__"]})
                setattr(value, method, staticmethod(made) if arguments.startswith("ctx") else made)
            made.__module__ = home["__name__"]


def tables(text: str, remedies: Mapping[str, str] = {}) -> dict[str, Names]:
    """The modules of a text.

    A line without indentation is `module = home`, or `module = home, second home`, or `module = home: prefix`; "." is
    the module that the others are in. `name(arguments)` of the module follow, indented; of two alike the last counts.
    Of an argument that is marked by "!" only the default is served (False where there is none), and `remedies` says by
    its name what to do instead; one that is marked by "~" has no effect; `theirs->ours` has another name here.
    """
    modules = {}
    for part in re.split(r"^(?=\S)", text.strip(), flags=re.MULTILINE)[1:]:
        header, _, entries = part.partition("\n")
        module, homes, prefix = (re.split(" = |: ", header) + [""])[:3]
        arguments, unused, renamed = {}, {}, {}
        for name, given in _ENTRY.findall(entries):
            arguments[name] = re.sub(r"[!~]|->\w+", "", " ".join(given.split()))
            if marks := _MARK.findall(given):
                unused[name] = {argument: remedies[argument] if mark == "!" else "" for argument, mark in marks}
            if others := _RENAMED.findall(given):
                renamed[name] = dict(others)
        modules[module] = Names(tuple(homes.split(", ")), prefix, arguments, unused, renamed)
    return modules


def adapted(
    name: str, arguments: str, body: Callable[..., Any], unused: Mapping[str, str] = {},
    renamed: Mapping[str, str] = {},
) -> Callable[..., Any]:  # fmt: skip
    """A function or method with these arguments that calls body with them by name; the others as in `Names`."""
    own = name.rpartition(".")[2]
    if own == "__init__":
        arguments = f"self, {arguments}"
    parsed = ast.parse(f"def f({arguments}): ...").body[0].args  # type: ignore[attr-defined]
    names = [one.arg for one in parsed.args]
    served = dict.fromkeys(names, "False") | dict(zip(reversed(names), map(ast.unparse, reversed(parsed.defaults))))
    lines = [
        f"if {_IS_ANOTHER.get(served[one], '{}').format(one)}:\n            "
        f"_refuse({one!r}, {served[one]!r}, {one}, {remedy!r})"
        for one, remedy in unused.items() if remedy
    ]  # fmt: skip
    handed = [
        each if each in ("self", "ctx") else f"{renamed.get(each, each)}={each}" for each in names if each not in unused
    ]
    handed += [] if parsed.kwarg is None else [f"**{parsed.kwarg.arg}"]
    lines.append(f"return _body({', '.join(handed)})")
    # The body is a closure, because torch.compile looks for globals in a module.
    space: dict[str, Any] = {**_WORDS}
    source = f"    def {own}({arguments}):\n        " + "\n        ".join(lines)
    exec(f"def around(_body, _refuse):\n{source}\n    return {own}", space)
    made = space["around"](body, refuse)
    made.__qualname__, made.__doc__, made.is_adapted = name, body.__doc__, True
    return made


def _has(body: Any, arguments: str) -> bool:
    """Whether a function, or a class's constructor, has these arguments as it is; modules of flashtile also collect
    `other_names`, to refuse them."""
    space: dict[str, Any] = {**_WORDS}
    exec(f"def f({arguments}): ...", space)
    own, given = (
        [(each.name, each.kind, each.default) for each in inspect.signature(one).parameters.values()]
        for one in (body, space["f"])
    )
    return [each for each in own if each[0] != "other_names"] == given


def refuse(name: str, expected: str, given: object, remedy: str) -> NoReturn:
    """Raises for an argument that is not served."""
    plain = given is None or isinstance(given, (bool, int, float, str))
    came = repr(given) if plain else "a tensor" if isinstance(given, Tensor) else f"a {type(given).__name__}"
    raise ValueError(f"{name}: expected {expected}, got {came}; {remedy}")


def refuse_given(remedy: str, **arguments: object) -> None:
    """Raises for the first of these arguments that is not None."""
    for name, given in arguments.items():
        if given is not None:
            refuse(name, "None", given, remedy)
