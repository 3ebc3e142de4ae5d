"""Checks of a kernel's machine code. A kernel is compiled only if a check of it is new (`remembered_checks`)."""

from __future__ import annotations

import functools
import hashlib
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import triton
from triton._C.libtriton import get_cache_invalidating_env_vars
from triton.compiler.compiler import make_backend
from triton.runtime.cache import triton_key

from flashtile._backends.devices import KNOWN_DEVICES
from flashtile._backends.launch import KernelSource
from support.compilation.content import content_of
from support.compilation.machine_code import binary_of, compiler_input, read_binary, search_code
from support.compilation.remembered_checks import MEMORY

#: Triton's library is another for each version of Python.
COMPILER = f"Triton {triton.__version__} for Python {sys.version_info.major}.{sys.version_info.minor}"


def check_code(source: KernelSource, arch: str, check: Callable[..., None], *expected: Any) -> None:
    """Compiles a kernel, searches its code for faults of ptxas, and calls `check(binary, *expected)`.

    Nothing is compiled if the table has this check. So `check` is a function of a module, and what it compares the
    binary with is in `expected`.

    Raises:
        WrongCodeError: faults were found.
        AssertionError: of the check.
    """
    served = MEMORY.serves(COMPILER)
    key = check_key(source, arch, check, *expected) if served else ""
    if not MEMORY.knows(key):
        check(binary_of(source, KNOWN_DEVICES[arch]), *expected)
    if served:
        MEMORY.add(key)


def check_key(source: KernelSource, arch: str, check: Callable[..., None], *expected: Any) -> str:
    """The hash of all that decides whether a check passes."""
    return _hash(code_key(source, arch), arch, content_of(search_code, read_binary, check), content_of(*expected))[:20]


def code_key(source: KernelSource, arch: str) -> str:
    """The hash of all that decides a kernel's machine code.

    These are the parts of the key of Triton's own cache on disk, and two of them are found in another way. Libraries
    are told by their contents, not their paths. Triton's hash of a function leaves out classes, attributes of modules
    and functions that write instructions, and it orders constants by where they lie in memory. `content_of` does not.
    """
    ast, target, options = compiler_input(source, KNOWN_DEVICES[arch])
    backend = make_backend(target)
    options = dict(vars(backend.parse_options(options)))
    options["extern_libs"] = [(name, _file_hash(path)) for name, path in options.get("extern_libs") or ()]
    compiled = content_of(ast.fn, ast.signature, ast.constants, ast.attrs)
    return _hash(compiled, backend.hash(), repr(sorted(options.items())), _compiler())


def _compiler() -> str:
    """All that compiles and is no argument: Triton with LLVM, which it contains, Gluon, and variables that both read.
    The version of ptxas is in the backend's hash."""
    knobs = triton.knobs
    groups = (knobs.compilation, knobs.language, knobs.nvidia, knobs.amd)
    names = {knob.key for group in groups for knob in group.knob_descriptors.values()}
    variables = {**get_cache_invalidating_env_vars(), **{name: os.environ[name] for name in names & os.environ.keys()}}
    return _hash(triton_key(), _gluon(), repr(sorted(variables.items())))


@functools.cache
def _gluon() -> str:
    folder = Path(triton.__file__).parent / "experimental" / "gluon"
    return _hash(*(path.read_text("utf-8") for path in sorted(folder.rglob("*.py"))))


@functools.cache
def _file_hash(path: str) -> str:
    return hashlib.sha256(Path(path).read_bytes()).hexdigest()


def _hash(*texts: str) -> str:
    return hashlib.sha256("\n".join(texts).encode()).hexdigest()
