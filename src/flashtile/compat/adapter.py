"""Modules of other libraries as tables of names and arguments, and functions that have the arguments of their table.

A body takes all arguments by name, picks those that it uses, and hands on the rest::

    INTERFACE = Names(("flash_attn_2",), "", {"flash_attn_kvpacked_func": "q, kv, dropout_p=0.0, causal=False"})

    @INTERFACE.takes
    def flash_attn_kvpacked_func(kv, **given):
        return flash_attn_func(k=kv[..., 0, :, :], v=kv[..., 1, :, :], **given)
"""

from __future__ import annotations

import ast
import importlib
import re
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn import functional as F

#: The words that defaults in tables are written with.
_WORDS = {"torch": torch, "LayerNorm": nn.LayerNorm, "Dropout": nn.Dropout, "gelu": F.gelu, "sigmoid": F.sigmoid}
#: `name(arguments)`, where arguments may have one pair of parentheses in another.
_ENTRY = re.compile(r"([\w.]+)\(((?:[^()]|\([^()]*\))*)\)")


class Names(NamedTuple):
    """The names of a module of another library.

    Attributes:
        homes: modules that have them, by full name or by that in `flashtile.compat`; the first that has one counts.
        prefix: what they begin with there, where there are others of the same name.
        arguments: name -> arguments, as one writes them; of a class those of its constructor, and "Class.method".
    """

    homes: tuple[str, ...]
    prefix: str
    arguments: dict[str, str]

    @property
    def public(self) -> list[str]:
        """The names of functions and classes."""
        return list(dict.fromkeys(name.partition(".")[0] for name in self.arguments))

    def found(self) -> dict[str, Any]:
        """The object behind each name."""
        found: dict[str, Any] = {}
        for home in reversed(self.homes):
            found |= vars(importlib.import_module(home if "." in home else f"flashtile.compat.{home}"))
        own = {name.removeprefix(self.prefix): value for name, value in found.items() if name.startswith(self.prefix)}
        return {name: (own if name in own else found)[name] for name in self.public}

    def takes(self, body: Callable[..., Any]) -> Callable[..., Any]:
        """A function or method with the arguments of its name in the table, which calls body with all of them by name;
        `self` and `ctx` are given by place."""
        name = body.__qualname__.removesuffix(".__init__")
        return self.made(name, body, body.__doc__)

    def made(self, name: str, body: Callable[..., Any], doc: str | None) -> Callable[..., Any]:
        """The same of a body that serves several names."""
        made = adapted(name, self.arguments[name.removeprefix(self.prefix)], body)
        made.__module__, made.__doc__ = f"flashtile.compat.{self.homes[0]}", doc
        return made


def tables(text: str) -> dict[str, Names]:
    """The modules of a text.

    A line without indentation is `module = home`, or `module = home, second home`, or `module = home: prefix`; "." is
    the module that the others are in. `name(arguments)` of the module follow, indented; of two alike the last counts.
    """
    modules = {}
    for part in re.split(r"^(?=\S)", text.strip(), flags=re.MULTILINE)[1:]:
        header, _, entries = part.partition("\n")
        module, homes, prefix = (re.split(" = |: ", header) + [""])[:3]
        arguments = {name: " ".join(given.split()) for name, given in _ENTRY.findall(entries)}
        modules[module] = Names(tuple(homes.split(", ")), prefix, arguments)
    return modules


def adapted(name: str, arguments: str, body: Callable[..., Any]) -> Callable[..., Any]:
    """A function or method with these arguments that calls body with them, as `Names.takes` tells."""
    own = name.rpartition(".")[2]
    if own == "__init__" or own[:1].isupper():  # a constructor
        own, arguments = "__init__", f"self, {arguments}"
    parsed = ast.parse(f"def f({arguments}): ...").body[0].args  # type: ignore[attr-defined]
    given = [one.arg for one in parsed.args]
    handed = [each if each in ("self", "ctx") else f"{each}={each}" for each in given]
    handed += [] if parsed.kwarg is None else [f"**{parsed.kwarg.arg}"]
    # The body is a closure, because torch.compile looks for globals in a module.
    space: dict[str, Any] = {**_WORDS}
    source = f"    def {own}({arguments}):\n        return _body({', '.join(handed)})\n"
    exec(f"def around(_body):\n{source}    return {own}", space)
    made = space["around"](body)
    made.__qualname__ = name
    return made
