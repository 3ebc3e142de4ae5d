"""The site of the documents: builds without a warning, needs nothing from a network, and knows every public name."""

import importlib
import json
import os
import pkgutil
import re
import subprocess
import sys
from pathlib import Path
from urllib.parse import unquote

import pytest

import flashtile
from support.running.once import once

pytest.importorskip("mkdocs", reason="the extra 'docs' is not installed")
pytest.importorskip("material", reason="the extra 'docs' is not installed")

pytestmark = pytest.mark.slow  # the site takes ten seconds to build
ROOT = Path(__file__).parent.parent
_REFERENCE = re.compile(r'<(\w+)\b[^>]*?\b(?:src|href)="([^"]*)"')
#: Elements that a browser loads by itself.
_LOADED = {"script", "link", "img", "iframe", "source"}


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    return once(tmp_path_factory, "site", _build)


def _build(folder: Path) -> None:
    path = os.pathsep.join(filter(None, (str(ROOT / "src"), os.environ.get("PYTHONPATH"))))
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": path, "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def _pages(site: Path) -> list[tuple[Path, str]]:
    return [(path, path.read_text("utf-8")) for path in sorted(site.rglob("*.html"))]


def test_every_document_is_a_page(site):
    documents = {path.relative_to(ROOT / "docs").with_suffix(".html") for path in (ROOT / "docs").rglob("*.md")}
    pages = {path.relative_to(site) for path in site.rglob("*.html")}
    assert documents <= pages
    assert {Path(name) for name in ("contributing.html", "changelog.html", "records.html")} <= pages


def test_no_page_is_named_twice():
    navigation = (ROOT / "mkdocs.yml").read_text("utf-8").partition("\nnav:\n")[2]
    names = re.findall(r" ([\w/]+\.md)$", navigation, re.MULTILINE)
    assert "index.md" in names and len(set(names)) == len(names)


def test_links_lead_somewhere(site):
    """Links to pages, pictures, styles and scripts, on disk as they are, anchors included."""
    texts = dict(_pages(site))
    anchors = {path: set(re.findall(r'\b(?:id|name)="([^"]+)"', text)) for path, text in texts.items()}
    for page, text in texts.items():
        if page.name == "404.html":  # its links are those of a server's root
            continue
        for _, target in _REFERENCE.findall(text):
            if re.match(r"[a-z]+:", target):
                continue
            name, _, anchor = unquote(target).partition("#")
            file = (page.parent / name).resolve() if name else page
            assert file.exists(), f"{page.relative_to(site)} links to {target}"
            if anchor and file in anchors and not anchor.startswith("__"):
                assert anchor in anchors[file], f"{page.relative_to(site)} links to {target}"


def test_a_browser_loads_nothing_from_elsewhere(site):
    for page, text in _pages(site):
        for element, target in _REFERENCE.findall(text):
            assert element not in _LOADED or "//" not in target, f"{page.relative_to(site)}: {element} {target}"
    for style in site.rglob("*.css"):
        assert not re.search(r"url\([\"']?(?:https?:)?//|@import", style.read_text("utf-8")), style.name


def test_every_public_name_is_in_the_reference(site):
    found = {name for _, text in _pages(site / "api") for name in re.findall(r'id="(flashtile[\w.]*)"', text)}
    expected = set()
    packages = [
        each.name for each in pkgutil.iter_modules(flashtile.__path__) if each.name not in ("bench", "cli", "ops")
    ]
    for package in ("flashtile", *(f"flashtile.{name}" for name in packages if not name.startswith("_"))):
        names = getattr(importlib.import_module(package), "__all__", ())
        expected |= {f"{package}.{name}" for name in names if name != "__version__"}
    assert expected <= found, expected - found


def test_api_pages_begin_with_a_call_as_a_user_writes_it(site):
    """An example of the guide, before the first signature; signatures have no types and no overloads."""
    for page, text in _pages(site / "api"):
        first = text.index('class="doc doc-object')
        names = {name.rpartition(".")[2] for name in re.findall(r'id="(flashtile[\w.]*)"', text)}
        example = re.sub(r"<[^>]+>", "", "".join(re.findall(r"<pre>.*?</pre>", text[:first], re.DOTALL)))
        assert names & set(re.findall(r"\w+", example)), page.name
        assert not any(word in text for word in ("Unpack[", "@overload", "other_names", "by_position")), page.name


def test_the_search_knows_the_pages(site):
    index = json.loads((site / "search" / "search_index.json").read_text("utf-8"))
    places = {entry["location"].partition("#")[0] for entry in index["docs"]}
    assert {"attention.html", "how_it_works.html", "api/attention.html"} <= places
    assert "worker_in_frame.js" in (site / "api" / "attention.html").read_text("utf-8")
    assert (site / "search" / "search_index.js").exists()
