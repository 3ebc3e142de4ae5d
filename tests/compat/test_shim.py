"""The distributions that put the names on disk: they build, install without a network, and serve the same names."""

from __future__ import annotations

import shutil

import pytest

from compat_cases import ROOT, run_python
from flashtile.compat.finder import EXTENSIONS

VERSION_2 = """
import flash_attn, flashtile.compat.flash_attn
from flash_attn import flash_attn_interface, flash_attn_func
from flash_attn.bert_padding import unpad_input
from flash_attn.ops.triton.layer_norm import rms_norm_fn
assert flash_attn.__version__ == "2.8.3" and metadata.version("flash_attn") == "2.8.3+flashtile"
assert flash_attn_func is flash_attn_interface.flash_attn_func
assert flash_attn_func.__module__ == "flash_attn.flash_attn_interface"
q = torch.randn(1, 5, 2, 8)
assert flash_attn_func(q, q, q, causal=True).shape == q.shape
assert set(flash_attn.__all__) == set(flashtile.compat.flash_attn.__all__)
"""
VERSION_1 = """
import flash_attn
from flash_attn.flash_attn_interface import flash_attn_unpadded_func
from flash_attn.modules.embedding import GPT2Embeddings
assert flash_attn.__version__ == "1.0.9" and metadata.version("flash_attn") == "1.0.9+flashtile"
assert flash_attn_unpadded_func.__module__ == "flash_attn.flash_attn_interface"
"""
VERSION_3 = """
import flash_attn_interface, flashtile.compat.flash_attn_3.flash_attn_interface as served
assert metadata.version("flash-attn-3") == "3.0.0b1+flashtile"
assert "flash_attn_3" in metadata.packages_distributions()["flash_attn_interface"]
functions = {name for name, value in vars(served).items() if getattr(value, "__module__", "") == served.__name__}
assert set(flash_attn_interface.__all__) == {name for name in functions if not name.startswith("_")}
assert all(getattr(flash_attn_interface, name) is getattr(served, name) for name in flash_attn_interface.__all__)
"""
VERSION_4 = """
import flash_attn.cute
from flash_attn.cute.block_sparsity import BlockSparseTensorsTorch
assert flash_attn.cute.__version__ == "4.0.0" and metadata.version("flash-attn-4") == "4.0.0+flashtile"
assert "flash-attn-4" in metadata.packages_distributions()["flash_attn"]
q = torch.randn(1, 5, 2, 8)
assert flash_attn.cute.flash_attn_func(q, q, q)[0].shape == q.shape
"""
COMPILED = """
import importlib, types
for name in EXTENSIONS:
    module = importlib.import_module(name)
    served = importlib.import_module("flashtile.compat.flash_attn_v1.extensions." + name)
    functions = {
        name for name, value in vars(served).items()
        if isinstance(value, types.FunctionType) and not name.startswith("_")
        and (value.__module__ == served.__name__ or name in getattr(served, "__all__", ()))
    }
    assert set(module.__all__) == functions, (name, functions)
    assert all(getattr(module, name) is getattr(served, name) for name in functions)
"""
#: What is flashtile's already is not refused, and comes back when it is uninstalled.
INSTALLED = """
import flashtile.compat
for name, distribution in NAMES.items():
    before = metadata.version(distribution)
    flashtile.compat.install(name)
    assert flashtile.compat.installed() == {name: flashtile.compat.finder.SERVED[name][0].version}
    importlib.import_module(name)
    flashtile.compat.uninstall(name)
    assert metadata.version(distribution) == before and before.endswith("+flashtile")
"""
START = """
import importlib, importlib.metadata as metadata, importlib.util, sys
import torch
for name in NAMES:
    assert importlib.util.find_spec(name).origin.startswith(sys.argv[1]), name
"""

#: Folders that are installed together, the files that they put on disk, and what is asked of them.
TOGETHER = {
    "all but version 1": (
        ["flash-attn-shim", "flash-attn-3-shim", "flash-attn-4-shim", "flash-attn-extensions-shim"],
        {"flash_attn/__init__.py", "flash_attn_interface.py", "flash_attn/cute/__init__.py"}
        | {f"{name}.py" for name in EXTENSIONS},
        {"flash_attn": "flash-attn", "flash_attn_interface": "flash-attn-3", "flash_attn.cute": "flash-attn-4"}
        | dict.fromkeys(EXTENSIONS, "flash-attn-extensions"),
        VERSION_2 + VERSION_3 + VERSION_4 + COMPILED,
    ),
    "version 1": (
        ["flash-attn-1-shim"], {"flash_attn/__init__.py"}, {"flash_attn": "flash-attn"}, VERSION_1,
    ),
    "version 4 alone": (
        ["flash-attn-4-shim"], {"flash_attn/cute/__init__.py"}, {"flash_attn.cute": "flash-attn-4"}, VERSION_4,
    ),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("case", TOGETHER)
def test_builds_installs_and_serves(case, tmp_path):
    pytest.importorskip("hatchling", reason="the build backend of the distributions")
    folders, files, names, check = TOGETHER[case]
    sources = [shutil.copytree(ROOT / "packaging" / folder, tmp_path / folder) for folder in folders]
    target = tmp_path / "target"
    options = ["--no-deps", "--no-build-isolation", "--no-index", "--disable-pip-version-check", "--quiet"]
    done = run_python("-m", "pip", "install", *options, "--target", str(target), *map(str, sources))
    assert done.returncode == 0, done.stderr
    installed = {str(path.relative_to(target)) for path in target.rglob("*.py")}
    assert installed == files, "all else is flashtile's"
    given = f"NAMES = {names!r}\nEXTENSIONS = {EXTENSIONS!r}\n"
    done = run_python("-c", given + START + check + INSTALLED, str(target), path=str(target))
    assert done.returncode == 0, done.stderr


def test_every_distribution_is_tried():
    folders = {path.name for path in (ROOT / "packaging").iterdir() if path.is_dir()}
    assert folders == {folder for tried, *_ in TOGETHER.values() for folder in tried}
