"""What a release promises: the same bytes for the same commit, types, a quick import, an ordered changelog."""

from __future__ import annotations

import compileall
import hashlib
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

import flashtile

ROOT = Path(__file__).parent.parent
SOURCE = Path(flashtile.__file__).parent
#: What importing flashtile may take beyond importing torch, as a part of that. It takes 0.11 to 0.13, and Triton would
#: add 0.14.
MOST_OF_TORCH = 0.15
_BUILT = ("src", "tests", "docs", "decisions", "examples", "benchmarks", "tools")
_FILES = ("LICENSE", "Makefile", "mkdocs.yml", ".gitignore", "pyproject.toml", "requirements-dev.txt")


def _build(checkout: Path, epoch: int) -> dict[str, Path]:
    """Wheel and sdist of a checkout, by their endings."""
    done = subprocess.run(
        [sys.executable, "-m", "hatchling", "build"],
        cwd=checkout,
        env={**os.environ, "SOURCE_DATE_EPOCH": str(epoch)},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    return {
        path.name.partition("flashtile-" + flashtile.__version__)[2]: path for path in (checkout / "dist").iterdir()
    }


@pytest.fixture(scope="module")
def builds(tmp_path_factory) -> list[dict[str, Path]]:
    """The same sources built twice: in two folders, the files of the second with other times and in another order."""
    pytest.importorskip("hatchling")
    found = []
    for name, touched in (("one", 1_700_000_000), ("two", 1_600_000_000)):
        checkout = tmp_path_factory.mktemp(name)
        for folder in _BUILT if name == "one" else reversed(_BUILT):
            shutil.copytree(ROOT / folder, checkout / folder, ignore=shutil.ignore_patterns("__pycache__"))
        for file in [
            *ROOT.glob("*.md"),
            *(ROOT / part for part in ("LICENSE", "Makefile", "mkdocs.yml", ".gitignore")),
        ]:
            shutil.copy(file, checkout)
        for part in ("pyproject.toml", "requirements-dev.txt"):
            shutil.copy(ROOT / part, checkout)
        for path in checkout.rglob("*"):
            os.utime(path, (touched, touched))
        found.append(_build(checkout, 1_750_000_000))
    return found


def test_the_same_sources_give_the_same_bytes(builds):
    first, second = ({ending: hashlib.sha256(p.read_bytes()).hexdigest() for ending, p in b.items()} for b in builds)
    assert first.keys() == {"-py3-none-any.whl", ".tar.gz"}
    assert first == second


def test_the_wheel_has_the_package_and_nothing_else(builds):
    with zipfile.ZipFile(builds[0]["-py3-none-any.whl"]) as wheel:
        names = set(wheel.namelist())
        metadata = wheel.read(f"flashtile-{flashtile.__version__}.dist-info/METADATA").decode()
    sources = {p.relative_to(SOURCE.parent).as_posix() for p in SOURCE.rglob("*") if p.suffix in (".py", ".typed")}
    assert sources <= names
    assert "flashtile/py.typed" in names
    assert all(name.startswith(("flashtile/", f"flashtile-{flashtile.__version__}.dist-info/")) for name in names)
    # The core needs torch, whose builds for GPUs bring Triton; everything else is an extra.
    needed = [line for line in re.findall(r"^Requires-Dist: (.*)$", metadata, re.MULTILINE) if "extra ==" not in line]
    assert {re.match(r"\w+", line)[0] for line in needed} == {"torch"}


def test_an_index_shows_a_readme_without_dead_links(builds):
    """As long as there is no address, no link to a file; with one, addresses of the project and absolute links."""
    local = re.compile(r"\]\((?!https?://|#)")
    with zipfile.ZipFile(builds[0]["-py3-none-any.whl"]) as wheel:
        metadata = wheel.read(f"flashtile-{flashtile.__version__}.dist-info/METADATA").decode()
    assert "Fast, exact attention" in metadata and not local.search(metadata)
    spec = importlib.util.spec_from_file_location("package_metadata", ROOT / "tools" / "package_metadata.py")
    hook = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(hook)
    readme, place = (ROOT / "README.md").read_text("utf-8"), "https://example.org/flashtile"
    assert local.search(readme), "the test is void"
    text = hook.readme_for_index(readme, place)
    assert not local.search(text) and f"]({place}/raw/HEAD/docs/images/attention_speed.svg)" in text
    assert f"]({place}/blob/HEAD/docs/which_one.md#not-yet)" in text
    assert all(address.startswith(place) for address in hook.addresses(place).values())


def test_what_is_installed_by_name_is_never_flashtile():
    """It is on no package index, where somebody else may take its name."""
    named = re.compile(r"pip install[^\n`#]*[\s\"']flashtile\b(?!/)")
    places = [
        *ROOT.glob("*.md"),
        *(p for part in ("src", "docs", "examples", "packaging") for p in (ROOT / part).rglob("*")),
    ]
    texts = {p: p.read_text("utf-8") for p in places if p.suffix in (".py", ".md", ".toml", ".jinja")}
    assert named.search('pip install "flashtile[cli]"') and not [p for p, text in texts.items() if named.search(text)]
    assert not [p for p, text in texts.items() if 'dependencies = ["flashtile"]' in text]


def test_the_sdist_has_what_its_tests_need(builds):
    with tarfile.open(builds[0][".tar.gz"]) as sdist:
        names = {name.partition("/")[2] for name in sdist.getnames()}
    assert {"pyproject.toml", "Makefile", "mkdocs.yml", "requirements-dev.txt", "CHANGELOG.md", "LICENSE"} <= names
    assert {"docs/index.md", "docs/images/traffic.svg", "tests/test_release.py", "src/flashtile/py.typed"} <= names
    assert not [name for name in names if "__pycache__" in name or name.endswith(".pyc")]


def test_import_is_quick_beyond_torch(tmp_path):
    """Processor time of the quickest of some processes, as other work on the machine does not count, beside that of
    torch, as machines differ; of compiled sources, as an installation has them."""
    shutil.copytree(SOURCE, tmp_path / "flashtile", ignore=shutil.ignore_patterns("__pycache__"))
    assert compileall.compile_dir(tmp_path, quiet=2)
    program = (
        "import sys, time\n"
        "start = time.process_time()\n"
        "import torch\n"
        "middle = time.process_time()\n"
        "import flashtile\n"
        "print((time.process_time() - middle) / (middle - start), 'triton' in sys.modules)\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    parts = []
    for _ in range(5):
        output = subprocess.run(
            [sys.executable, "-c", program], env=environment, capture_output=True, text=True, timeout=120, check=True
        ).stdout
        part, triton_loaded = output.split()
        assert triton_loaded == "False"
        parts.append(float(part))
        if parts[-1] <= MOST_OF_TORCH:
            return
    pytest.fail(f"importing flashtile took {min(parts):.3f} of the time of importing torch, not {MOST_OF_TORCH}")


def _versions(changelog: str) -> list[tuple[str, str]]:
    return re.findall(r"^## \[([\d.]+)\] - (unreleased|\d{4}-\d{2}-\d{2})$", changelog, re.MULTILINE)


def test_the_changelog_is_in_order():
    text = (ROOT / "CHANGELOG.md").read_text("utf-8")
    versions = _versions(text)
    assert len(versions) == len(re.findall(r"^## ", text, re.MULTILINE)), "each heading: ## [version] - date"
    numbers = [tuple(map(int, version.split("."))) for version, _ in versions]
    assert numbers == sorted(numbers, reverse=True) and len(set(numbers)) == len(numbers), "the newest comes first"
    assert versions[0][0] == flashtile.__version__
    dates = [date for _, date in versions]
    assert "unreleased" not in dates[1:], "only the newest may be unreleased"
    assert dates[1:] == sorted(dates[1:], reverse=True)
    kinds = re.findall(r"^### (.*)$", text, re.MULTILINE)
    assert set(kinds) <= {"Added", "Changed", "Deprecated", "Removed", "Fixed", "Security"}


def test_versions_in_the_documents_are_those_of_the_project():
    project = (ROOT / "pyproject.toml").read_text("utf-8")
    makefile = (ROOT / "Makefile").read_text("utf-8")
    install = (ROOT / "docs" / "install.md").read_text("utf-8")
    table = {
        cells[0]: cells[1:]
        for cells in re.findall(r"^\| (\w+) \| ([^|]*?) \| ([^|]*?) \| [^|]* \|$", install, re.MULTILINE)
    }
    (python,) = re.findall(r'requires-python = ">=([\d.]+)"', project)
    (torch,) = re.findall(r'"torch>=([\d.]+)"', project)
    (triton,) = re.findall(r'"triton>=([\d.]+);', project)
    for name, version in (("Python", python), ("torch", torch), ("triton", triton)):
        assert table[name][0].startswith(f"{version} or newer")
    contributing = (ROOT / "CONTRIBUTING.md").read_text("utf-8")
    assert f"| oldest | {python} | {torch} | {triton} |" in contributing
    assert f"make test-all PYTHON=python{python} TORCH=torch=={torch}.0 " in contributing
    (pinned_torch,) = re.findall(r"TORCH \?= torch==(\d+\.\d+)", makefile)
    (pinned_triton,) = re.findall(r"TRITON \?= triton==(\d+\.\d+)", makefile)
    assert table["torch"][1].startswith(pinned_torch) and table["triton"][1].startswith(pinned_triton)
    classifiers = set(re.findall(r'"Programming Language :: Python :: (3\.\d+)"', project))
    assert min(classifiers, key=lambda v: int(v[2:])) == python
