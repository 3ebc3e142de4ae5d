"""Triton's interpreter without work whose result it throws away, which takes more than half of its time.

- Before each addition, subtraction and product of integers it computes, on 64 bits, whether the result overflows, and
  asserts so only in debug mode, which is off (`device_assert` of Triton's semantics).
- At each call of a device function it replaces the functions of `triton.language` by its own ones. Within a launch the
  kernel's start has done that already.
"""

from __future__ import annotations

import dataclasses
from types import FunctionType, ModuleType
from typing import Any

import triton.language as tl
from triton.runtime import interpreter


def skip_needless_work() -> None:
    """Holds for the rest of the process."""
    options = interpreter.interpreter_builder.options
    if not options.debug:
        interpreter.interpreter_builder.options = dataclasses.replace(options, sanitize_overflow=False)
    if not hasattr(interpreter, "_LangPatchScope"):
        return  # another Triton than the pinned one, whose interpreter may do this in another way
    replace_functions = interpreter._patch_lang

    def replace_functions_once(kernel: FunctionType) -> Any:
        seen = [of for of in kernel.__globals__.values() if isinstance(of, ModuleType) and of in (tl, tl.core)]
        return interpreter._LangPatchScope() if all(map(_replaced, seen)) else replace_functions(kernel)

    interpreter._patch_lang = replace_functions_once


def _replaced(language: ModuleType) -> bool:
    """Whether a module of Triton's language has the interpreter's functions, and so has the class of its tensors."""
    return language.range.__module__ == interpreter.__name__ and not tl.core.is_builtin(tl.core.tensor.__add__)
