"""The distribution that puts a flash_attn on disk: it builds, installs without a network, and serves the same names."""

from __future__ import annotations

import shutil

import pytest

from compat_cases import ROOT, run_python

CHECK = """
import importlib.metadata as metadata, importlib.util, sys
import torch
assert importlib.util.find_spec("flash_attn").origin.startswith(sys.argv[1])
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
flashtile.compat.install("flash_attn")  # what is there is flashtile's already
import flash_attn
assert metadata.version("flash_attn") == "2.8.3"
flashtile.compat.uninstall("flash_attn")
assert metadata.version("flash_attn") == "2.8.3+flashtile"
"""


def test_builds_installs_and_serves(tmp_path):
    pytest.importorskip("hatchling", reason="the build backend of the distribution")
    source = tmp_path / "source"
    shutil.copytree(ROOT / "packaging" / "flash-attn-shim", source)
    target = tmp_path / "target"
    options = ["--no-deps", "--no-build-isolation", "--no-index", "--disable-pip-version-check", "--quiet"]
    done = run_python("-m", "pip", "install", *options, "--target", str(target), str(source))
    assert done.returncode == 0, done.stderr
    installed = {str(path.relative_to(target)) for path in target.rglob("*.py")}
    assert installed == {"flash_attn/__init__.py"}, "all else is flashtile's"
    done = run_python("-c", CHECK, str(target), path=str(target))
    assert done.returncode == 0, done.stderr
