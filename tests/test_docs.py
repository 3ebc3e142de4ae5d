"""The documents are true: their Python runs, their links lead somewhere, the files and targets they name exist."""

from __future__ import annotations

import functools
import importlib
import re
from pathlib import Path

import pytest
import torch

import flashtile

ROOT = Path(__file__).parent.parent
SOURCE = Path(flashtile.__file__).parent
DOCUMENTS = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
_SNIPPET = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"\]\(([^)#\s]*)(#[^)\s]*)?\)")
_FILE = re.compile(r"`((?:src|tests|docs|examples|benchmarks|\.ci)/[\w./-]+)`")
_TARGET = re.compile(r"\bmake ([a-z][a-z-]*)\b")


def _name(path: Path) -> str:
    return str(path.relative_to(ROOT))


def _snippets(text: str) -> list[tuple[int, str]]:
    """(line number, source) of each Python snippet."""
    return [(text.count("\n", 0, match.start(1)), match.group(1)) for match in _SNIPPET.finditer(text)]


def _anchors(text: str) -> set[str]:
    headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {"#" + re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("path", [path for path in DOCUMENTS if _SNIPPET.search(path.read_text("utf-8"))], ids=_name)
def test_snippets_run(path, monkeypatch):
    """All snippets of a document run in order in one namespace. `torch.compile` stops short of generating C++."""
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="aot_eager"))
    torch.manual_seed(0)
    namespace = {"__name__": "snippets"}
    for line, source in _snippets(path.read_text("utf-8")):
        exec(compile("\n" * line + source, str(path), "exec"), namespace)


@pytest.mark.parametrize("path", EXAMPLES, ids=_name)
def test_examples_run(path):
    source = path.read_text("utf-8")
    exec(compile(source, str(path), "exec"), {"__name__": "__main__"})


@pytest.mark.parametrize("path", DOCUMENTS, ids=_name)
def test_links_and_files_exist(path):
    text = path.read_text("utf-8")
    for target, anchor in _LINK.findall(text):
        if "://" in target:
            continue
        file = (path.parent / target).resolve() if target else path
        assert file.exists(), f"link to {target}"
        if anchor and file.suffix == ".md":
            assert anchor in _anchors(file.read_text("utf-8")), f"link to {target}{anchor}"
    for file in _FILE.findall(text):
        assert (ROOT / file).exists(), f"names {file}"


@pytest.mark.parametrize("path", DOCUMENTS, ids=_name)
def test_make_targets_exist(path):
    makefile = (ROOT / "Makefile").read_text("utf-8")
    code = re.findall(r"`[^`\n]+`|^```.*?^```$", path.read_text("utf-8"), re.MULTILINE | re.DOTALL)
    for target in {target for snippet in code for target in _TARGET.findall(snippet)}:
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), f"make {target}"


@pytest.mark.parametrize("path", DOCUMENTS, ids=_name)
def test_public_names_and_commands_exist(path):
    text = path.read_text("utf-8")
    for name in re.findall(r"`flashtile\.(\w+)", text):
        assert hasattr(importlib.import_module("flashtile"), name) or (SOURCE / name).exists(), f"flashtile.{name}"
    commands = set(re.findall(r"`flashtile ([a-z-]+)", text))
    if commands:
        typer = pytest.importorskip("typer")
        known = set(typer.main.get_command(importlib.import_module("flashtile.cli.app").app).commands)
        assert commands <= known


def test_the_changelog_knows_this_version():
    assert f"## [{flashtile.__version__}]" in (ROOT / "CHANGELOG.md").read_text("utf-8")
