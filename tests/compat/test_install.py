"""Installing the names of flash_attn in a process, by call, by runner, by pytest plugin; and taking them away again."""

import importlib
import importlib.metadata as metadata
import importlib.util
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

import flashtile.compat
from flashtile.compat import pytest_plugin
from flashtile.compat.__main__ import main
from flashtile.compat.signatures import SERVED
from support.running.each_case import each_case
from support.running.python import run_python

#: Distributions with modules of the name: one as if the real one were installed, one that only adds to it.
REAL = {
    "flash_attn/__init__.py": "__version__ = '2.0.0'\nwho = 'real'\n",
    "flash_attn/layers.py": "who = 'real'\n",
    "flash_attn-2.0.0.dist-info/METADATA": "Metadata-Version: 2.1\nName: flash_attn\nVersion: 2.0.0\n",
}
NAMESPACE = {"flash_attn/cute/__init__.py": "who = 'cute'\n"}


def loaded() -> set[str]:
    return {name for name in sys.modules if name.split(".")[0] in ("flash_attn", "flash_attn_interface")}


@pytest.fixture(autouse=True)
def process(monkeypatch):
    """The process as it was before, with nothing of the name in it; what is on disk is only what a test puts there."""
    before = {name: sys.modules.pop(name) for name in loaded()}
    monkeypatch.setattr(sys, "path", [place for place in sys.path if not _has_flash_attn(place)])
    monkeypatch.setattr(sys, "argv", sys.argv)
    finders = list(sys.meta_path)
    importlib.invalidate_caches()
    yield
    for name in ("flash_attn", "flash_attn_interface", "flash_attn.cute"):
        flashtile.compat.uninstall(name)
    assert sys.meta_path == finders
    for name in loaded():
        del sys.modules[name]
    sys.modules.update(before)


def _has_flash_attn(place):
    return importlib.machinery.PathFinder.find_spec("flash_attn", [place]) is not None


def folder_with(files, folder):
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text, "utf-8")
    return str(folder)


@pytest.fixture
def real(tmp_path, monkeypatch):
    """A folder with a real flash_attn in it, which can be imported."""
    folder = folder_with(REAL, tmp_path / "site")
    monkeypatch.syspath_prepend(folder)
    return folder


def test_nothing_is_served_unless_installed():
    assert importlib.util.find_spec("flash_attn") is None
    assert flashtile.compat.installed() == {}
    assert not [finder for finder in sys.meta_path if type(finder).__module__.startswith("flashtile.compat")]


@pytest.mark.parametrize(
    ("version", "release", "name"), [(2, "2.8.3", "flash_attn_varlen_func"), (1, "1.0.9", "flash_attn_unpadded_func")]
)
def test_names_and_metadata(version, release, name):
    flashtile.compat.install("flash_attn", version=version)
    assert flashtile.compat.installed() == {"flash_attn": version}
    assert importlib.util.find_spec("flash_attn") is not None
    flash_attn = importlib.import_module("flash_attn")
    interface = importlib.import_module("flash_attn.flash_attn_interface")
    rotary = importlib.import_module("flash_attn.layers.rotary")
    assert flash_attn.__version__ == release and flash_attn.__name__ == "flash_attn"
    assert name in interface.__all__ and callable(getattr(interface, name)) and flash_attn.layers.rotary is rotary
    assert interface.__name__ == "flash_attn.flash_attn_interface" and Path(interface.__file__).exists()
    for distribution in ("flash_attn", "flash-attn", "Flash.Attn"):
        assert metadata.version(distribution) == release
    assert metadata.metadata("flash_attn")["Name"] == "flash_attn"
    assert "flash_attn" in [found.metadata["Name"] for found in metadata.distributions()]
    assert metadata.packages_distributions()["flash_attn"] == ["flash_attn"]
    flashtile.compat.install("flash_attn", version=version)
    assert sys.modules["flash_attn"] is flash_attn, "a second installation changes nothing"

    flashtile.compat.uninstall("flash_attn")
    assert flashtile.compat.installed() == {} and not loaded()
    with pytest.raises(metadata.PackageNotFoundError):
        metadata.version("flash_attn")
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("flash_attn")
    flashtile.compat.uninstall("flash_attn")


@each_case("name", SERVED)
def test_every_name_is_served(name):
    served = SERVED[name][0]
    flashtile.compat.install(name)
    try:
        module = importlib.import_module(name)
        assert module.__name__ == name and module.__version__ == metadata.version(served.distribution) == served.release
        for own, value in served.modules["."].found().items():
            assert getattr(module, own) is value
        assert flashtile.compat.installed() == {name: served.version}
    finally:
        flashtile.compat.uninstall(name)
    assert name not in sys.modules


def test_another_version_needs_override():
    flashtile.compat.install()
    importlib.import_module("flash_attn")
    with pytest.raises(RuntimeError, match="version: expected 2"):
        flashtile.compat.install("flash_attn", 1)
    assert flashtile.compat.installed() == {"flash_attn": 2}
    flashtile.compat.install("flash_attn", 1, override=True)
    assert importlib.import_module("flash_attn").__version__ == "1.0.9"


def test_a_real_one_is_not_replaced_in_silence(real):
    with pytest.raises(RuntimeError, match="expected it not to be installed"):
        flashtile.compat.install("flash_attn")
    imported = importlib.import_module("flash_attn")
    layers = importlib.import_module("flash_attn.layers")
    with pytest.raises(RuntimeError, match="expected it not to be imported yet"):
        flashtile.compat.install("flash_attn")
    assert imported.who == "real" and flashtile.compat.installed() == {}

    flashtile.compat.install("flash_attn", override=True)
    assert importlib.import_module("flash_attn").__version__ == metadata.version("flash_attn") == "2.8.3"
    importlib.import_module("flash_attn.layers.rotary")
    flashtile.compat.uninstall("flash_attn")
    assert importlib.import_module("flash_attn") is imported
    assert importlib.import_module("flash_attn.layers") is layers
    assert metadata.version("flash_attn") == "2.0.0"


def test_what_only_adds_to_the_name_stays(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(folder_with(NAMESPACE, tmp_path / "site"))
    flashtile.compat.install("flash_attn")
    assert importlib.import_module("flash_attn").__version__ == "2.8.3"
    assert importlib.import_module("flash_attn.cute").who == "cute"
    importlib.import_module("flash_attn.bert_padding")


def test_a_name_within_a_package(tmp_path, monkeypatch):
    """flash_attn.cute alone has an empty package around it, which goes with it."""
    flashtile.compat.install("flash_attn.cute")
    assert importlib.util.find_spec("flash_attn").origin is None
    cute = importlib.import_module("flash_attn.cute")
    assert importlib.import_module("flash_attn.cute.interface").flash_attn_func is cute.flash_attn_func
    assert metadata.version("flash-attn-4") == cute.__version__ == "4.0.0"
    assert metadata.packages_distributions()["flash_attn"] == ["flash_attn_4"]
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("flash_attn.bert_padding")

    flashtile.compat.install("flash_attn")
    assert importlib.import_module("flash_attn").__version__ == "2.8.3"
    assert importlib.import_module("flash_attn.cute").__version__ == "4.0.0"
    assert sorted(metadata.packages_distributions()["flash_attn"]) == ["flash_attn", "flash_attn_4"]
    flashtile.compat.uninstall("flash_attn.cute")
    assert not hasattr(importlib.import_module("flash_attn"), "cute")
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("flash_attn.cute")
    flashtile.compat.uninstall("flash_attn")
    flashtile.compat.install("flash_attn.cute")
    importlib.import_module("flash_attn.cute")
    flashtile.compat.uninstall("flash_attn.cute")
    assert not loaded() and importlib.util.find_spec("flash_attn") is None


@pytest.mark.parametrize("served", [False, True], ids=["alone", "beside version 2"])
def test_a_real_name_within_a_package_is_not_replaced_in_silence(served, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(folder_with(NAMESPACE, tmp_path / "site"))
    if served:
        flashtile.compat.install("flash_attn")
    with pytest.raises(RuntimeError, match=r"flash_attn.cute: expected it not to be installed"):
        flashtile.compat.install("flash_attn.cute")
    assert not loaded(), "nothing was imported to find it"
    real = importlib.import_module("flash_attn.cute")
    with pytest.raises(RuntimeError, match="expected it not to be imported yet"):
        flashtile.compat.install("flash_attn.cute")
    flashtile.compat.install("flash_attn.cute", override=True)
    assert importlib.import_module("flash_attn.cute").__version__ == "4.0.0"
    flashtile.compat.uninstall("flash_attn.cute")
    assert importlib.import_module("flash_attn").cute is real


def test_names_and_versions_are_checked():
    with pytest.raises(ValueError, match="name: expected one of 'flash_attn'"):
        flashtile.compat.install("xformers")
    with pytest.raises(ValueError, match="version: expected 2 or 1"):
        flashtile.compat.install("flash_attn", 4)
    with pytest.raises(ValueError, match="name: expected one of"):
        flashtile.compat.uninstall("torch")
    assert flashtile.compat.installed() == {}


SCRIPT = """
import sys
import beside
import flash_attn
print(flash_attn.__version__, __name__, sys.argv, beside.__name__)
"""


@pytest.fixture
def program(tmp_path, monkeypatch):
    """A script, with a module that it finds beside it, in the working directory."""
    (tmp_path / "program.py").write_text(SCRIPT, "utf-8")
    (tmp_path / "beside.py").write_text("", "utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend("")  # as `python -m` has it
    yield str(tmp_path / "program.py")
    sys.modules.pop("beside", None)


@pytest.mark.parametrize(
    ("options", "release"),
    [([], "2.8.3"), (["--version", "1"], "1.0.9"), (["--name", "flash_attn", "--version", "2"], "2.8.3")],
)
def test_runner(options, release, program, capsys):
    arguments = ["--version", "7", "-m", "x"]
    main([*options, program, *arguments])
    assert capsys.readouterr().out == f"{release} __main__ {[program, *arguments]} beside\n"
    main([*options, "-m", "program", "--size", "3"])
    assert capsys.readouterr().out == f"{release} __main__ {[program, '--size', '3']} beside\n"


@pytest.mark.slow
@pytest.mark.skipif(sys.version_info < (3, 11), reason="Python 3.10 has no -P")
def test_runner_as_a_command_leaves_a_safe_path_alone(program, tmp_path):
    """There the first folder is not that of the program, and need not be found again."""
    path = folder_with({"beside.py": ""}, tmp_path / "first")
    folder = folder_with({"program.py": SCRIPT}, tmp_path / "programs")
    printed = run_python("-P", "-m", "flashtile.compat", f"{folder}/program.py", "--help", path=path)
    assert printed == f"2.8.3 __main__ {[f'{folder}/program.py', '--help']} beside\n"


def test_runner_refuses(real, program, capsys):
    with pytest.raises(SystemExit) as left:
        main([program])
    assert left.value.code == 2 and "expected it not to be installed" in capsys.readouterr().err
    main(["--override", program])
    assert capsys.readouterr().out.startswith("2.8.3 ")
    with pytest.raises(SystemExit):
        main([])
    assert "expected a script" in capsys.readouterr().err


TEST = """
import flash_attn

def test_version():
    from flash_attn.bert_padding import pad_input
    assert flash_attn.__version__ == "1.0.9"
"""


@pytest.mark.slow
def test_pytest_plugin(tmp_path, real):
    (tmp_path / "conftest.py").write_text("import flash_attn\nassert flash_attn.__version__ == '1.0.9'\n", "utf-8")
    (tmp_path / "test_it.py").write_text(TEST, "utf-8")
    options = SimpleNamespace(flash_attn_version=1, flash_attn_override=False)
    with pytest.raises(pytest.UsageError, match="expected it not to be installed"):
        pytest_plugin.pytest_load_initial_conftests(SimpleNamespace(known_args_namespace=options))
    arguments = ["-m", "pytest", "-q", "-p", "flashtile.compat.pytest_plugin", "-p", "no:cacheprovider"]
    arguments += ["--flash-attn-version", "1", "--flash-attn-override"]
    assert "1 passed" in run_python(*arguments, cwd=tmp_path, path=real)
