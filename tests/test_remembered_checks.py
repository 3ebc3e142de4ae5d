"""A check of machine code is passed over only if all that decides it is as it was when it passed."""

from __future__ import annotations

import datetime
import importlib
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from support.compilation import needs_triton  # noqa: F401

# isort: split
import triton

from flashtile._backends.launch import KernelSource, Parameter, pointer_to, specialise
from support.attention.hopper_forms import BACKWARD_FORMS, FORMS
from support.compilation import checked_code, remembered_checks
from support.compilation.checked_code import COMPILER, check_code, check_key, code_key
from support.compilation.content import UnknownContentError, content_of
from support.compilation.machine_code import Call, call_source, hopper_plan
from support.compilation.remembered_checks import Memory, drawn, read_table, renewed, write_table

#: A kernel, what it calls in another module, and a check.
_MODULES = {
    "callee": """
        import triton
        import triton.language as tl
        from typing import NamedTuple
        from flashtile._backends.gluon import aggregate, builtin
        import numbers_of

        FACTOR = tl.constexpr(3)

        class Rows(NamedTuple):
            first: int
            last: int = 7

        @aggregate
        class Pair:
            one: tl.constexpr

            @triton.constexpr_function
            def __init__(self, one):
                self.one = tl.constexpr(one)

        @triton.constexpr_function
        def doubled(x):
            return 2 * x

        @builtin
        def written(x, _semantic=None):
            return _semantic.add(x, x, True)

        @triton.jit
        def scaled(x):
            pair = Pair(5)
            rows = Rows(1)
            return x * FACTOR + numbers_of.SHIFT + doubled(2) + written(x) + pair.one + rows.first
    """,
    "numbers_of": """
        import triton.language as tl

        SHIFT = tl.constexpr(11)
        UNUSED = tl.constexpr(13)
    """,
    "kernels_of": """
        import triton
        import triton.language as tl
        from callee import scaled

        @triton.jit
        def copy_kernel(x_ptr, size, BLOCK: tl.constexpr):
            at = tl.arange(0, BLOCK)
            tl.store(x_ptr + at, scaled(tl.load(x_ptr + at)), mask=at < size)
    """,
    "checks_of": """
        import re

        _PATTERN = re.compile("HGMMA")
        LIMITS = {"spilled": 17}

        def check(binary, limit):
            _compare(binary.spilled, limit)

        def _compare(found, limit):
            from more_checks import largest

            assert found <= min(limit, largest(LIMITS["spilled"])) and not _PATTERN.search("")
    """,
    "more_checks": """
        def largest(number):
            return number + 19
    """,
}


@pytest.fixture
def key_with(tmp_path, monkeypatch):
    """The key of a check if a text in one of the modules is another."""

    def load(old: str, new: str) -> tuple[ModuleType, ModuleType]:
        folder = tmp_path / str(len(list(tmp_path.iterdir())))
        folder.mkdir()
        for name, text in _MODULES.items():
            lines = "\n".join(line.removeprefix(" " * 8) for line in text.splitlines())
            (folder / f"{name}.py").write_text(lines.replace(old, new))
            sys.modules.pop(name, None)
        monkeypatch.syspath_prepend(folder)
        return importlib.import_module("kernels_of"), importlib.import_module("checks_of")

    def key(old: str = "", new: str = "", limit: int = 5, arch: str = "sm_90", **options: Any) -> str:
        kernels, checks = load(old, new) if old else load("-", "-")
        return check_key(_source(kernels.copy_kernel, **options), arch, checks.check, limit)

    yield key
    for name in _MODULES:
        sys.modules.pop(name, None)


def _source(kernel: Any, block: int = 64, multiple: int = 16, size: str = "i32", **options: int) -> KernelSource:
    parameters = {"x_ptr": pointer_to(torch.float32, multiple), "size": Parameter(size)}
    return specialise(kernel, parameters, {"BLOCK": block}, **{"num_warps": 4, **options}).source


def test_a_key_is_the_same_in_another_folder(key_with):
    assert key_with() == key_with() == key_with("UNUSED", "UNREAD")


@pytest.mark.parametrize(
    "old, new",
    [
        ("mask=at < size", "mask=at <= size"),
        ("tl.constexpr(3)", "tl.constexpr(4)"),
        ("tl.constexpr(11)", "tl.constexpr(12)"),
        ("x * FACTOR", "x + FACTOR"),
        ("2 * x", "3 * x"),
        ("_semantic.add", "_semantic.mul"),
        ("Pair(5)", "Pair(6)"),
        ("tl.constexpr(one)", "tl.constexpr(one + 1)"),
        ("first: int\n    last: int = 7", "last: int = 7\n    first: int = 0"),
        ("last: int = 7", "last: int = 8"),
        ("found <= min", "found < min"),
        ("_compare(binary.spilled", "_compare(binary.shared_memory"),
        ('"spilled": 17', '"spilled": 18'),
        ('re.compile("HGMMA")', 're.compile("GMMA")'),
        ("number + 19", "number + 20"),
    ],
    ids=lambda text: text.replace("\n", " "),
)  # fmt: skip
def test_another_source_has_another_key(old, new, key_with):
    """Of the kernel, of what it calls, of what that uses, of the check and of what that uses."""
    assert sum(old in text.replace("\n        ", "\n") for text in _MODULES.values()) == 1
    assert key_with(old, new) != key_with()


@pytest.mark.parametrize(
    "old, new",
    [
        ("import triton.language as tl\nfrom callee", "import triton.language as tl\n\nfrom callee"),
        ("    pair = Pair(5)", '    """A docstring."""\n\n    pair = Pair(5)'),
        ("pair = Pair(5)", "pair = Pair(5)  # a comment"),
        ("doubled", "twice"),
        ("written", "added"),
        ("_compare", "_assert_fits"),
    ],
    ids=["line", "docstring", "comment", "constexpr", "builtin", "check"],
)
def test_prose_places_and_names_of_functions_are_in_no_key(old, new, key_with):
    assert sum(old in text.replace("\n        ", "\n") for text in _MODULES.values()) == 1
    assert key_with(old, new) == key_with()


@pytest.mark.parametrize(
    "change",
    [
        {"limit": 6},
        {"limit": True},
        {"arch": "sm_80"},
        {"arch": "gfx942"},
        {"block": 128},
        {"multiple": 8},
        {"size": "i64"},
        {"num_warps": 8},
        {"num_stages": 2},
        {"max_registers": 64},
    ],
    ids=str,
)
def test_another_specialisation_has_another_key(change, key_with):
    assert key_with(**change) != key_with(limit=1 if change == {"limit": True} else 5)


@pytest.mark.parametrize(
    "variable", ["DISABLE_PTXAS_OPT", "TRITON_DISABLE_LINE_INFO", "PTXAS_OPTIONS", "AMDGCN_USE_BUFFER_OPS"]
)
def test_what_the_compiler_reads_of_the_environment_is_in_the_key(variable, monkeypatch):
    source = call_source("forward", "sm_90", Call())
    key = code_key(source, "sm_90")
    monkeypatch.setenv(variable, "1")
    assert code_key(source, "sm_90") != key


def test_the_compiler_is_in_the_key(monkeypatch):
    source = call_source("forward", "sm_90", Call())
    keys = [code_key(source, "sm_90")]
    for name, other in (("triton_key", lambda: "other"), ("_gluon", lambda: "other")):
        with monkeypatch.context() as patched:
            patched.setattr(checked_code, name, other)
            keys.append(code_key(source, "sm_90"))
    with monkeypatch.context() as patched:
        patched.setattr(triton.backends.nvidia.compiler, "get_ptxas_version", lambda arch: "another release")
        keys.append(code_key(source, "sm_90"))
    assert len(set(keys)) == len(keys) and keys[0] == code_key(source, "sm_90")


def test_constants_of_nested_parameters_are_in_the_key():
    """Of a Gluon kernel: a flag among the constants, and a field of a NamedTuple that is one."""
    source = hopper_plan(FORMS["64"]).kernel.source
    nested = next(name for name, value in source.constants.items() if "." in name and isinstance(value, (bool, int)))
    plain = next(name for name, value in source.constants.items() if "." not in name and value is True)
    changed = [
        source._replace(constants=source.constants | {name: not source.constants[name]}) for name in (nested, plain)
    ]
    assert len({code_key(each, "sm_90") for each in (source, *changed)}) == 3


def test_each_form_has_its_own_key():
    sources = [of.source("main") for of in BACKWARD_FORMS.values()]
    different = [source for number, source in enumerate(sources) if source not in sources[:number]]
    assert len({code_key(source, "sm_90") for source in sources}) == len(different)


def test_what_is_not_known_has_no_content():
    with pytest.raises(UnknownContentError, match="got <object object"):
        content_of(object())
    assert content_of({"a": 1}) != content_of({"a": True}) and content_of((1, 2)) != content_of([1, 2])


def _check(binary: Any, limit: int) -> None:
    assert binary <= limit


@pytest.fixture
def compiled(monkeypatch):
    """Kernels that `check_code` compiles, in place of which it gets a 5."""
    names: list[str] = []

    def compile_nothing(source: KernelSource, device: Any) -> int:
        names.append(device.arch)
        return 5

    monkeypatch.setattr(checked_code, "binary_of", compile_nothing)
    return names


def test_only_new_checks_compile(compiled, monkeypatch):
    source = call_source("forward", "sm_90", Call())
    memory = Memory(COMPILER, {check_key(source, "sm_90", _check, 5): "a.py::test"}, trusts_table=True)
    monkeypatch.setattr(checked_code, "MEMORY", memory)
    check_code(source, "sm_90", _check, 5)
    assert compiled == [] and memory.passed.keys() == memory.table.keys()
    check_code(source, "sm_90", _check, 6)
    assert compiled == ["sm_90"] and len(memory.passed) == 2
    with pytest.raises(AssertionError):
        check_code(source, "sm_90", _check, 4)
    assert compiled == ["sm_90"] * 2 and len(memory.passed) == 2, "what fails is not remembered"
    memory.trusts_table = False
    check_code(source, "sm_90", _check, 5)
    assert compiled == ["sm_90"] * 3


def test_with_another_compiler_all_is_compiled(compiled, monkeypatch):
    source = call_source("forward", "sm_90", Call())
    memory = Memory(
        "Triton 3.5.0 for Python 3.11", {check_key(source, "sm_90", _check, 5): "a.py::test"}, trusts_table=True
    )
    monkeypatch.setattr(checked_code, "MEMORY", memory)
    check_code(source, "sm_90", _check, 5)
    assert compiled == ["sm_90"] and not memory.passed


def test_a_table_is_read_as_it_was_written(tmp_path):
    table = {"ab": "tests/b.py::test[x y]", "cd": "tests/a.py::test"}
    write_table(tmp_path / "table.txt", "Triton 3.6.0 for Python 3.11", table)
    assert read_table(tmp_path / "table.txt") == ("Triton 3.6.0 for Python 3.11", table)
    assert (tmp_path / "table.txt").read_text().splitlines()[2:] == ["tests/a.py::test cd", "tests/b.py::test[x y] ab"]
    assert read_table(tmp_path / "none.txt") == ("", {})


def test_a_run_renews_what_the_table_has_of_its_files_or_of_the_tests_chosen():
    table = {"1": "a.py::test_x", "2": "a.py::test_y", "3": "b.py::test"}
    passed = {"4": "a.py::test_x"}
    assert renewed(table, passed, whole_files=True) == {"3": "b.py::test", "4": "a.py::test_x"}
    assert renewed(table, passed, whole_files=False) == {"2": "a.py::test_y", "3": "b.py::test", "4": "a.py::test_x"}


def test_another_fiftieth_is_drawn_each_day():
    tests = [f"test[{number}]" for number in range(400)]
    days = [datetime.date(2026, 1, 1) + datetime.timedelta(days) for days in range(200)]
    shares = [{test for test in tests if drawn(test, day)} for day in days]
    assert all(len(share) < 25 for share in shares) and sum(map(len, shares)) > 1400 and shares[0] != shares[1]
    assert len(set.union(*shares)) > 380


def test_the_table_is_of_the_tests_that_are_there():
    _, table = read_table(remembered_checks.TABLE)
    root = Path(__file__).parent.parent
    assert table and all((root / test.partition("::")[0]).is_file() for test in table.values())
