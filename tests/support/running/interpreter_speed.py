"""Triton's interpreter without work whose result it throws away or has had before, which takes most of its time.

- Before each addition, subtraction and product of integers it computes, on 64 bits, whether the result overflows, and
  asserts so only in debug mode, which is off (`device_assert` of Triton's semantics).
- At each call of a device function it replaces the functions of `triton.language` by its own ones. Within a launch the
  kernel's start has done that already.
- For each result it makes the shape anew, as a type and as a tensor has it, and finds numpy's type in a table that it
  makes anew. Kernels have few shapes and types.
"""

from __future__ import annotations

import dataclasses
import functools
from types import FunctionType, ModuleType
from typing import Any

import triton
import triton.language as tl
from triton.runtime import interpreter


def skip_needless_work() -> None:
    """Holds for the rest of the process."""
    options = interpreter.interpreter_builder.options
    if not options.debug:
        interpreter.interpreter_builder.options = dataclasses.replace(options, sanitize_overflow=False)
    if not triton.__version__.startswith("3.6."):
        return  # another Triton than the pinned one, whose interpreter may do this in another way
    replace_functions = interpreter._patch_lang

    def replace_functions_once(kernel: FunctionType) -> Any:
        replaced = all(map(_replaced, _languages(kernel)))
        return interpreter._LangPatchScope() if replaced else replace_functions(kernel)

    interpreter._patch_lang = replace_functions_once
    interpreter._get_np_dtype = _numpy_type(interpreter._get_np_dtype)
    tl.core.block_type.__init__ = _block_type(tl.core.block_type.__init__)
    tl.core.tensor.__init__ = _tensor
    tl.core.dtype.__eq__ = _equal(tl.core.dtype.__eq__)


@functools.cache
def _languages(kernel: FunctionType) -> list[ModuleType]:
    """Modules of Triton's language that a kernel or device function names."""
    return [of for of in kernel.__globals__.values() if isinstance(of, ModuleType) and of in (tl, tl.core)]


def _replaced(language: ModuleType) -> bool:
    """Whether a module of Triton's language has the interpreter's functions, and so has the class of its tensors."""
    return language.range.__module__ == interpreter.__name__ and not tl.core.is_builtin(tl.core.tensor.__add__)


def _numpy_type(find: Any) -> Any:
    """`interpreter._get_np_dtype`, which looks at the type of the elements alone."""
    known: dict[str, Any] = {}

    def found(of: Any) -> Any:
        name = of.scalar.name
        if name not in known:
            known[name] = find(of)
        return known[name]

    return found


#: Sizes -> the shape and the number of elements, as a tensor has them.
_SHAPES: dict[tuple[int, ...], tuple[Any, Any]] = {}


def _block_type(make: Any) -> Any:
    """The constructor of `block_type`. Types of one shape share what describes it."""
    known: dict[tuple, dict[str, Any]] = {}

    def __init__(self: Any, element_ty: Any, shape: Any) -> None:
        sizes = tuple([size.value if isinstance(size, tl.constexpr) else size for size in shape])
        key = element_ty.name, sizes
        if key not in known:
            make(self, element_ty, shape)
            known[key] = dict(vars(self), sizes=sizes)
        vars(self).update(known[key])
        self.element_ty = element_ty

    return __init__


def _tensor(self: Any, handle: Any, type: Any) -> None:
    """The constructor of `tensor`. Tensors of one shape share what describes it."""
    sizes = type.sizes if type.is_block() else ()
    if sizes not in _SHAPES:
        numel = 1
        for size in sizes:
            numel *= size
        _SHAPES[sizes] = tl.core.tuple([tl.constexpr(size) for size in sizes]), tl.constexpr(numel)
    self.handle, self.type, self.dtype = handle, type, type.scalar
    self.shape, self.numel = _SHAPES[sizes]


def _equal(compare: Any) -> Any:
    """The comparison of types, most of which are one object."""
    return lambda self, other: self is other or compare(self, other)
