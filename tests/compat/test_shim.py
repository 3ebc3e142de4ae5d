"""The distributions that put the names on disk: they build, install without a network, and serve the same names."""

import shutil
import zipfile

import pytest

from flashtile.compat.signatures import EXTENSIONS, SERVED
from support.running.each_case import each_case
from support.running.python import ROOT, run_python

#: Each check begins as a copy of a process that has imported flashtile.
FORK = """
import importlib, importlib.metadata as metadata, importlib.util, os, sys
import flashtile.compat
from flashtile.compat.signatures import SERVED
for path, NAMES, check in eval(sys.argv[1]):
    if not (child := os.fork()):
        sys.path.insert(0, path)
        exec(check)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0, path
"""
#: What each name on disk has: its version, the names of its table, and modules below it.
CHECK = """
for name, (distribution, version) in NAMES.items():
    served = {served.version: served for served in SERVED[name]}[version]
    assert importlib.util.find_spec(name).origin.startswith(path), name
    module = importlib.import_module(name)
    assert module.__version__ == served.release and metadata.version(distribution) == f"{served.release}+flashtile"
    if sys.version_info >= (3, 11):  # Python 3.10 asks for a file that setuptools alone writes
        assert distribution in metadata.packages_distributions()[name.partition(".")[0]]
    for below, names in served.modules.items():
        module = importlib.import_module(name if below == "." else f"{name}.{below}")
        assert all(getattr(module, own) is value for own, value in names.found().items()), module
        assert set(module.__all__) == {own for own in names.public if not own.startswith("_")}
"""
#: What is flashtile's already is not refused, and comes back when it is uninstalled.
INSTALLED = """
for name, (distribution, _) in NAMES.items():
    before = metadata.version(distribution)
    flashtile.compat.install(name)
    assert flashtile.compat.installed() == {name: SERVED[name][0].version}
    importlib.import_module(name)
    flashtile.compat.uninstall(name)
    assert metadata.version(distribution) == before and before.endswith("+flashtile")
"""

#: Folders that are installed together, the files that they put on disk, and of each name its distribution and version.
TOGETHER = {
    "all but version 1": (
        ["flash-attn-shim", "flash-attn-3-shim", "flash-attn-4-shim", "flash-attn-extensions-shim"],
        {"flash_attn/__init__.py", "flash_attn_interface.py", "flash_attn/cute/__init__.py"}
        | {f"{name}.py" for name in EXTENSIONS},
        {"flash_attn": ("flash-attn", 2), "flash_attn_interface": ("flash_attn_3", 3),
         "flash_attn.cute": ("flash-attn-4", 4)}
        | dict.fromkeys(EXTENSIONS, ("flash-attn-extensions", 1)),
    ),
    "version 1": (["flash-attn-1-shim"], {"flash_attn/__init__.py"}, {"flash_attn": ("flash-attn", 1)}),
    "version 4 alone": (
        ["flash-attn-4-shim"], {"flash_attn/cute/__init__.py"}, {"flash_attn.cute": ("flash-attn-4", 4)},
    ),
}  # fmt: skip
FOLDERS = {folder for folders, *_ in TOGETHER.values() for folder in folders}


@pytest.fixture
def wheels(tmp_path, monkeypatch):
    """The wheels of all distributions, by their folders."""
    backend = pytest.importorskip("hatchling.build", reason="the build backend of the distributions")

    def built(folder):
        with monkeypatch.context() as here:
            here.chdir(shutil.copytree(ROOT / "packaging" / folder, tmp_path / folder))
            return tmp_path / backend.build_wheel(str(tmp_path))

    return {folder: built(folder) for folder in FOLDERS}


@pytest.mark.slow
def test_builds_installs_and_serves(wheels, tmp_path):
    checks = []
    for case, (folders, files, names) in TOGETHER.items():
        target = tmp_path / case
        for folder in folders:
            zipfile.ZipFile(wheels[folder]).extractall(target)  # all that an installation of them does
        installed = {str(path.relative_to(target)) for path in target.rglob("*.py")}
        assert installed == files, "all else is flashtile's"
        checks.append((str(target), names, CHECK + INSTALLED))
    run_python("-c", FORK, repr(checks))


def test_every_distribution_is_tried():
    folders = {path.parent.name for path in (ROOT / "packaging").glob("*/pyproject.toml")}
    assert folders == FOLDERS


@each_case("folder", sorted(FOLDERS))
def test_every_distribution_is_of_the_tables(folder):
    """Its files, and what its pyproject.toml says of name and release."""
    tomllib = pytest.importorskip("tomllib", reason="Python 3.11 has it")
    files = sorted((ROOT / "packaging" / folder).rglob("*.py"))
    project = tomllib.loads((ROOT / "packaging" / folder / "pyproject.toml").read_text("utf-8"))["project"]
    for file in files:
        name = ".".join(file.relative_to(ROOT / "packaging" / folder).with_suffix("").parts).removesuffix(".__init__")
        served = next(one for one in SERVED[name] if project["version"] == f"{one.release}+flashtile")
        assert project["name"].replace("-", "_") == (served.shim or served.distribution).replace("-", "_")
        assert file.read_text("utf-8") == (
            f'"""{name} of version {served.version}, served by flashtile."""\n\n'
            f"from flashtile.compat.finder import fill\n\nfill(__name__, {served.version})\n"
        )
