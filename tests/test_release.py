"""What a release promises: the same bytes for the same commit, types, a quick import, an ordered changelog."""

import hashlib
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path
from types import ModuleType

import pytest
import torch

import flashtile
from flashtile.testing import assert_same
from support.running.once import once
from support.running.python import run_python

ROOT = Path(__file__).parent.parent
SOURCE = Path(flashtile.__file__).parent
#: What importing flashtile may take beyond importing torch, as a part of that. It takes 0.11 to 0.13, and Triton would
#: add 0.14.
MOST_OF_TORCH = 0.15
#: Packages that only parts of flashtile need.
OPTIONAL = ("typer", "rich", "matplotlib", "jinja2", "numpy", "transformers", "diffusers")
_BUILT = ("src", "tests", "docs", "decisions", "examples", "benchmarks", "packaging", "tools")
_FILES = ("CITATION.cff", "LICENSE", "Makefile", "mkdocs.yml", ".gitignore", "pyproject.toml", "requirements-dev.txt")


def _build(checkout: Path, epoch: int) -> None:
    """Makes wheel and sdist of a checkout in its folder `dist`."""
    done = subprocess.run(
        [sys.executable, "-m", "hatchling", "build"],
        cwd=checkout,
        env={**os.environ, "SOURCE_DATE_EPOCH": str(epoch)},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr


@pytest.fixture(scope="module")
def builds(tmp_path_factory):
    """The same sources built twice: in two folders, the files of the second with other times and in another order."""
    pytest.importorskip("hatchling")

    def make(folder: Path) -> None:
        for name, touched in (("one", 1_700_000_000), ("two", 1_600_000_000)):
            checkout = folder / name
            for part in _BUILT if name == "one" else reversed(_BUILT):
                shutil.copytree(ROOT / part, checkout / part, ignore=shutil.ignore_patterns("__pycache__"))
            for file in (*ROOT.glob("*.md"), *(ROOT / part for part in _FILES)):
                shutil.copy(file, checkout)
            for path in checkout.rglob("*"):
                os.utime(path, (touched, touched))
            _build(checkout, 1_750_000_000)

    folder = once(tmp_path_factory, "builds", make)
    prefix = "flashtile-" + flashtile.__version__
    return [
        {path.name.removeprefix(prefix): path for path in (folder / name / "dist").iterdir()} for name in ("one", "two")
    ]


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
    hook = _module(ROOT / "tools" / "package_metadata.py")
    readme, place = (ROOT / "README.md").read_text("utf-8"), "https://example.org/flashtile"
    assert local.search(readme), "the test is void"
    text = hook.readme_for_index(readme, place)
    assert not local.search(text) and f"]({place}/raw/HEAD/docs/images/attention_speed.svg)" in text
    assert f"]({place}/blob/HEAD/docs/which_one.md#by-features)" in text
    assert all(address.startswith(place) for address in hook.addresses(place).values())


def _module(path: Path, name: str = "") -> ModuleType:
    """A module by its file."""
    spec = importlib.util.spec_from_file_location(name or path.stem, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def test_an_index_takes_the_files(builds):
    """What twine and an index check, without a network: the metadata are whole, and the same in both files."""
    with zipfile.ZipFile(builds[0]["-py3-none-any.whl"]) as wheel:
        folder = f"flashtile-{flashtile.__version__}.dist-info"
        metadata = wheel.read(f"{folder}/METADATA")
        assert wheel.read(f"{folder}/licenses/LICENSE") == (ROOT / "LICENSE").read_bytes()
    with tarfile.open(builds[0][".tar.gz"]) as sdist:
        of_sdist = sdist.extractfile(f"flashtile-{flashtile.__version__}/PKG-INFO").read()
    assert metadata == of_sdist
    found = pytest.importorskip("packaging.metadata").Metadata.from_email(metadata)  # raises for all that is wrong
    assert (found.metadata_version, found.description_content_type) == ("2.4", "text/markdown")
    assert (found.license_expression, found.license_files) == ("BSD-3-Clause", ["LICENSE"])
    assert set(found.classifiers) <= pytest.importorskip("trove_classifiers").classifiers
    check = pytest.importorskip("twine.commands.check")
    assert not check.check([str(path) for path in builds[0].values()], strict=True)


def test_a_version_gets_into_all_files(tmp_path):
    tool = _module(ROOT / "tools" / "set_version.py")
    (tmp_path / "src" / "flashtile").mkdir(parents=True)
    for name in ("CHANGELOG.md", "CITATION.cff", "src/flashtile/__init__.py"):
        shutil.copy(ROOT / name, tmp_path / name)
    date = "2030-01-31"
    tool.set_version(tmp_path, flashtile.__version__, date)
    versions = _versions((tmp_path / "CHANGELOG.md").read_text("utf-8"))
    assert versions[0] == (flashtile.__version__, date) and len(versions) >= 2
    with pytest.raises(SystemExit, match="expected"):
        tool.set_version(tmp_path, versions[1][0], date)
    tool.set_version(tmp_path, "99.0.0", "unreleased")
    assert '__version__ = "99.0.0"' in (tmp_path / "src/flashtile/__init__.py").read_text("utf-8")
    assert _versions((tmp_path / "CHANGELOG.md").read_text("utf-8")) == [("99.0.0", "unreleased"), *versions]
    tool.set_version(tmp_path, "99.0.0", "2031-01-31")
    citation = (tmp_path / "CITATION.cff").read_text("utf-8")
    assert "\nversion: 99.0.0\ndate-released: 2031-01-31\nkeywords:" in citation


def test_the_citation_is_of_a_version_in_the_changelog():
    citation = pytest.importorskip("yaml").safe_load((ROOT / "CITATION.cff").read_text("utf-8"))
    assert {"cff-version", "message", "title", "authors", "version", "license"} <= citation.keys()
    assert citation["version"] in [v for v, _ in _versions((ROOT / "CHANGELOG.md").read_text("utf-8"))]


@pytest.fixture(scope="module")
def hub(tmp_path_factory):
    """A repository of the kernels hub."""
    folder = tmp_path_factory.mktemp("hub")
    _module(ROOT / "tools" / "kernels_repository.py").write(folder, 3)
    return folder


def test_a_kernel_of_the_hub_works_beside_another_version(hub):
    """Loaded as the kernels package does, under the name in its metadata; nothing of it is the installed flashtile."""
    variant = hub / "build" / "torch-cpu"
    name = json.loads((variant / "metadata.json").read_text("utf-8"))["id"]
    kernel = _module(variant / "__init__.py", name)
    q = torch.randn(1, 9, 2, 16, requires_grad=True)
    out, ours = (module.attention(q, q, q, alibi_slopes=torch.ones(2)) for module in (kernel, flashtile))
    assert torch.equal(out, ours)
    out.sum().backward()
    assert kernel.modules.MHA(16, 2)(torch.randn(1, 4, 16)).shape == (1, 4, 16)
    found = {own: vars(module) for own, module in list(sys.modules.items()) if own.partition(".")[0] == name}
    assert len(found) > 50
    for own, values in found.items():
        foreign = [
            key for key, value in values.items() if str(getattr(value, "__module__", "")).startswith("flashtile")
        ]
        assert not foreign, own


def test_flops_of_two_copies_are_counted(hub):
    """In a process of its own, because the counter is imported after both."""
    script = (
        "import importlib.util, sys, flashtile, torch\n"
        "spec = importlib.util.spec_from_file_location(*sys.argv[1:])\n"
        "copy = sys.modules[spec.name] = importlib.util.module_from_spec(spec)\n"
        "spec.loader.exec_module(copy)\n"
        "from torch.utils.flop_counter import FlopCounterMode\n"
        "q = torch.randn(1, 9, 2, 16)\n"
        "for module in (flashtile, copy):\n"
        "    with FlopCounterMode(display=False) as counter:\n"
        "        module.attention(q, q, q)\n"
        "    print(counter.get_total_flops())\n"
    )
    variant = hub / "build" / "torch-cpu"
    name = json.loads((variant / "metadata.json").read_text("utf-8"))["id"]
    counts = run_python("-c", script, name, str(variant / "__init__.py"))
    assert counts.split() == [str(4 * 9 * 9 * 2 * 16)] * 2


def test_a_layer_of_the_hub_takes_the_place_of_another(hub):
    kernels = pytest.importorskip("kernels")

    @kernels.use_kernel_forward_from_hub("RMSNorm")
    class Norm(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.weight, self.variance_epsilon = torch.nn.Parameter(torch.rand(32)), 1e-6

        def forward(self, hidden_states):
            return torch.nn.functional.rms_norm(hidden_states, (32,), self.weight, self.variance_epsilon)

    repository = kernels.LocalLayerRepository(hub, layer_name="RMSNorm")
    norm, x = Norm(), torch.randn(4, 32)
    expected = norm(x)
    with kernels.use_kernel_mapping({"RMSNorm": {"cpu": repository}}, inherit_mapping=False):
        found = kernels.kernelize(norm, mode=kernels.Mode.TRAINING, device="cpu", use_fallback=False)(x)
    assert_same(found, expected)
    found.sum().backward()
    assert norm.weight.grad is not None


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
    assert {"docs/attention.md", "docs/images/traffic.svg", "tests/test_release.py", "src/flashtile/py.typed"} <= names
    assert not [name for name in names if "__pycache__" in name or name.endswith(".pyc")]


def test_import_is_quick_beyond_torch_and_loads_no_kernel_compiler_or_optional_package():
    """Processor time of the quickest of some processes, as other work on the machine does not count, beside that of
    torch, as machines differ; of compiled sources, as an installation has them: the first process
    leaves them behind."""
    program = (
        "import sys, time\n"
        "start = time.process_time()\n"
        "import torch\n"
        "middle, before = time.process_time(), set(sys.modules)\n"
        "import flashtile\n"
        "print((time.process_time() - middle) / (middle - start), *set(sys.modules) - before)\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(SOURCE.parent), "PYTHONDONTWRITEBYTECODE": ""}
    parts = []
    for _ in range(5):
        output = subprocess.run(
            [sys.executable, "-c", program], env=environment, capture_output=True, text=True, timeout=120, check=True
        ).stdout
        part, *loaded = output.split()
        heavy = (*OPTIONAL, "triton", "torch._dynamo", "torch._inductor", "torch.distributed.tensor")
        assert "torch.utils.flop_counter" not in loaded
        assert not [name for name in loaded if any(f"{name}.".startswith(f"{each}.") for each in heavy)]
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
