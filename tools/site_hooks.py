"""The parts of the site of the documents beside the files of docs/ (hooks of MkDocs, named in mkdocs.yml).

- Documents of the repository that lie elsewhere become pages: the README, with which the site begins, CONTRIBUTING,
  CHANGELOG, the list of records.
- Records and sources that a document links to become files and pages of the site, so that every link leads somewhere
  without a network. Links are rewritten on the way; the documents keep those that work in a checkout. Decision records
  are for those who have one: the site names their files.
- The search needs no server and no network.
- The API reference is made from the public names: one page for each operation and package. A page begins with the first
  example of its guide, and then has the docstrings.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import pkgutil
import posixpath
import re
from pathlib import Path
from types import ModuleType
from typing import Any

from griffe import ModuleFinder
from mkdocs.structure.files import File, Files, InclusionLevel

# The API reference is that of the sources: the stub of the public functions has no docstrings.
ModuleFinder.extensions_set = {".py"}

ROOT = Path(__file__).parent.parent
#: Documents outside of docs/ -> their pages.
PAGES = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "benchmarks/results/README.md": "records.md",
}
#: Titles of the packages with public names of their own, where it is not their name. The names of `flashtile` itself
#: are divided by the operation that has them.
PACKAGES = {
    "compat": "Other libraries' names",
    "io_model": "IO model",
    "learn": "From scratch",
    "prefix_trees": "Prefix trees",
}
#: Packages within packages that have a page with them, where what they need is installed.
NESTED = {"integrations": ("transformers", "diffusers")}
#: Packages whose names are not public, or have other pages.
_OTHERS = {"bench", "cli", "ops"}
#: Operations whose page has another title than their name.
TITLES = {
    "cross_entropy": "Cross-entropy",
    "dense": "Linear layers",
    "kv_cache": "Decoding",
    "layer_norm": "Norms",
    "rotary": "Rotary embedding",
}
#: API pages -> their guides, where these have other names.
GUIDES = {
    **dict.fromkeys(("cross_entropy", "dense", "layer_norm", "rotary", "softmax"), "companions"),
    "compat": "migrating",
    "learn": "how_it_works",
    "modules": "models",
    "prefix_trees": "training",
    "testing": "contract",
}
#: A parameter that catches other libraries' names for arguments, in a signature: no call has it.
_OTHER_NAMES = re.compile(
    r'(?:<span class="p">,</span>)?\s*<span class="o">\*\*</span><span class="n">other_names</span>'
)
#: One that catches arguments by position, which a signature writes as a bare asterisk.
_BY_POSITION = re.compile(r'(<span class="o">\*</span>)<span class="n">by_position</span>')
_EXAMPLE = re.compile(r"^```python\n.*?^```\n", re.MULTILINE | re.DOTALL)
_CODE = re.compile(r"^```python\n.*?^```$|`[^`\n]+`", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"(\]\()([^)#\s]+)((?:#[^)\s]*)?\))")
#: A block quote that begins with a bold sentence: a warning, which GitHub shows too.
_WARNING = re.compile(r"^> \*\*([^*]+?)\.?\*\*(.*(?:\n>.*)*)", re.MULTILINE)
_DECISION = re.compile(r"\[([^\]]+)\]\((?:\.\./)?(decisions/\w+\.md)(?:#[\w-]+)?\)")


def on_config(config: Any) -> Any:
    """Documents that the navigation does not name come last among the guides, and the API pages last of all."""
    (guides,) = (entry["Guides"] for entry in config.nav if isinstance(entry, dict) and "Guides" in entry)
    named = str(config.nav)
    for path in sorted((ROOT / "docs").glob("*.md")):
        if f"'{path.name}'" not in named:
            guides.append({path.read_text("utf-8").partition("\n")[0].lstrip("# "): path.name})
    config.nav.append({"API": [{title: f"api/{name}.md"} for name, title, _ in api_pages()]})
    return config


def on_files(files: Files, config: Any) -> Files:
    for source, page in PAGES.items():
        files.append(File.generated(config, page, content=(ROOT / source).read_text("utf-8")))
    for name, title, members in api_pages():
        files.append(File.generated(config, f"api/{name}.md", content=_api_page(name, title, members)))
    documents = [*((ROOT / "docs").rglob("*.md")), *(ROOT / source for source in PAGES)]
    linked = {path for document in documents for path in _linked(document) if _place(path) not in files.src_uris}
    for path in sorted(linked):
        place = _place(path)
        if path.suffix == ".py":
            text = f"# {path.name}\n\n`{_name(path)}`\n\n```python\n{path.read_text('utf-8')}```\n"
            page = File.generated(config, place, content=text)
            page.inclusion = InclusionLevel.NOT_IN_NAV
            files.append(page)
        else:
            files.append(File.generated(config, place, abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    document = _document(page.file.src_uri)
    if document is None:
        return markdown
    here = posixpath.dirname(page.file.src_uri)

    def rewritten(match: re.Match[str]) -> str:
        path = _target(document, match[2])
        return match[0] if path is None else match[1] + posixpath.relpath(_place(path), here or ".") + match[3]

    return _WARNING.sub(_admonition, _LINK.sub(rewritten, _DECISION.sub(r"\1 in `\2`", markdown)))


def _admonition(match: re.Match[str]) -> str:
    lines = [line.removeprefix(">").strip() for line in match[2].split("\n")]
    return "\n    ".join([f'!!! warning "{match[1]}"\n', *lines]) + "\n"


def _document(page: str) -> Path | None:
    """The file that a page is made from; None of pages that are made here."""
    path = ROOT / next((source for source, name in PAGES.items() if name == page), f"docs/{page}")
    return path if path.exists() else None


def _linked(document: Path) -> set[Path]:
    """Files of the repository outside of docs/ that a document links to."""
    found = {_target(document, link) for _, link, _ in _LINK.findall(document.read_text("utf-8"))}
    return {path for path in found if path is not None and not path.is_relative_to(ROOT / "docs")}


def _target(document: Path, link: str) -> Path | None:
    """The file of the repository that a link leads to; None where it is none, or is no part of the site."""
    if "://" in link:
        return None
    path = (document.parent / link).resolve()
    is_part = path.is_file() and path.is_relative_to(ROOT) and not path.is_relative_to(ROOT / "decisions")
    return path if is_part else None


def _name(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def _place(path: Path) -> str:
    """The place of a file of the repository on the site."""
    name = _name(path)
    if name.startswith("docs/"):
        return name.removeprefix("docs/")
    return PAGES.get(name, f"files/{name.removesuffix('.py')}.md" if name.endswith(".py") else f"files/{name}")


def api_pages() -> list[tuple[str, str, list[str]]]:
    """(file name, title, full public names) of each page of the API reference."""
    flashtile = importlib.import_module("flashtile")
    groups: dict[str, list[str]] = {"attention": []}
    # Functions before classes.
    for name in sorted(flashtile.__all__, key=lambda name: (name[0].isupper(), name)):
        if name != "__version__":
            groups.setdefault(_operation(getattr(flashtile, name)), []).append(f"flashtile.{name}")
    decompositions = groups.pop("decompositions")
    pages = [(name, TITLES.get(name, name.replace("_", " ").capitalize()), members) for name, members in groups.items()]
    for found in pkgutil.iter_modules(flashtile.__path__):
        if found.name not in _OTHERS and not found.name.startswith("_"):
            package = importlib.import_module(f"flashtile.{found.name}")
            members = _members(package)
            if found.name == "integrations":  # whose guide has it too
                members += decompositions
            for inner in NESTED.get(found.name, ()):
                if importlib.util.find_spec(inner):
                    members += _members(importlib.import_module(f"flashtile.{found.name}.{inner}"))
            pages.append((found.name, PACKAGES.get(found.name, found.name.capitalize()), members))
    return [page for page in pages if page[2]]


def _operation(value: Any) -> str:
    """The operation in whose folder a public object is made."""
    module = inspect.getmodule(value) if not isinstance(value, ModuleType) else value
    parts = (module.__name__ if module else "flashtile").split(".")
    operation = parts[2] if parts[1:2] == ["ops"] else parts[1] if len(parts) > 1 else "flashtile"
    return "attention" if operation == "common" else operation  # what operations share is attention's first


def _members(package: ModuleType) -> list[str]:
    return [f"{package.__name__}.{name}" for name in getattr(package, "__all__", ())]


def _api_page(name: str, title: str, members: list[str]) -> str:
    """The first example of the guide that has a name of the page, and the names in the guide's order."""
    guide = ROOT / "docs" / f"{GUIDES.get(name, name)}.md"
    text = guide.read_text("utf-8") if guide.exists() else ""
    code = [word for span in _CODE.findall(text) for word in re.findall(r"\w+", span)]
    order = {word: place for place, word in reversed([*enumerate(code)])}
    members = sorted(members, key=lambda member: order.get(member.rpartition(".")[2], len(code)))
    names = {member.rpartition(".")[2] for member in members}
    parts = [f"# {title}"]
    if examples := [each for each in _EXAMPLE.findall(text) if names & set(re.findall(r"\w+", each))]:
        heading = text.partition("\n")[0].removeprefix("# ")
        parts += [f"From the guide, [{heading}](../{guide.name}):", examples[0]]
    return "\n\n".join([*parts, *(f"::: {member}" for member in members)]) + "\n"


def on_page_content(html: str, page: Any, config: Any, files: Files) -> str:
    """Docstrings announce a block with two colons, of which a reader needs one, or none where they stand alone.

    Signatures lose the parameters that catch other libraries' names and arguments by position.
    """
    if not page.file.src_uri.startswith("api/"):
        return html
    html = _BY_POSITION.sub(r"\1", _OTHER_NAMES.sub("", html))
    return html.replace("<p>::</p>", "").replace("::</p>", ":</p>")


def on_post_page(output: str, page: Any, config: Any) -> str:
    """The script that lets the search work without a server comes with the site, instead of from another."""
    return _with_own_worker(output, page.file.src_uri)


def on_post_template(output: str, template_name: str, config: Any) -> str:
    return _with_own_worker(output, "")


def _with_own_worker(html: str, page: str) -> str:
    own = posixpath.relpath("assets/worker_in_frame.js", posixpath.dirname(page) or ".")
    return re.sub(r'<script src="https://[^"]*iframe-worker[^"]*">', f'<script src="{own}">', html)
