"""How the command starts: without torch where it needs none, and where packages are missing."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import flashtile
from support.running import missing_packages


@pytest.fixture
def run_without(tmp_path):
    return lambda names, *arguments: missing_packages.run_without(names, tmp_path, *arguments)


@pytest.mark.parametrize(
    "arguments", [("--version",), ("--help",), ("explain", "--help"), ("report", "--help")], ids=" ".join
)
def test_version_and_help_need_no_torch(run_without, arguments):
    pytest.importorskip("typer")
    done = run_without({"torch"}, "-m", "flashtile", *arguments)
    assert done.returncode == 0, done.stderr
    assert (f"flashtile {flashtile.__version__}\n" if "--version" in arguments else "Usage: ") in done.stdout


def test_the_module_of_the_benchmarks_is_the_same_command(run_without):
    """Their help, which needs no torch, and what they say where typer is missing."""
    pytest.importorskip("typer")
    one = run_without({"torch"}, "-m", "flashtile", "bench", "attention", "--help")
    other = run_without({"torch"}, "-m", "flashtile.bench", "attention", "--help")
    assert "Usage: flashtile bench attention" in one.stdout and other.stdout == one.stdout, other.stderr
    without = run_without({"typer"}, "-m", "flashtile.bench", "--help")
    assert without.returncode == 1 and 'needs typer: in a checkout of flashtile, pip install ".[cli]"' in without.stderr


def test_the_script_starts_without_torch_too(run_without, tmp_path):
    pytest.importorskip("typer")
    script = tmp_path / "flashtile"
    script.write_text("import sys\nfrom flashtile.cli import main\nsys.exit(main())\n", "utf-8")
    done = run_without({"torch"}, script, "--help")
    assert done.returncode == 0 and "explain" in done.stdout, done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("program", ["-c", "flashtile"], ids=["program", "command"])
def test_names_load_when_they_are_asked_for(run_without, program):
    """Modules in a program, and all public names in the command, which has no torch before."""
    names = ("compat", "distributed", "integrations", "io_model", "learn", "models", "modules", "testing")
    lines = (
        f"import sys; sys.argv = ['{program}']; import flashtile",
        f"assert {program == 'flashtile'} is ('torch' not in sys.modules)",
        f"names = {names}",
        "assert set(names) <= set(dir(flashtile))",
        "assert not {f'flashtile.{name}' for name in names} & sys.modules.keys()",
        "assert all(getattr(flashtile, name) is sys.modules[f'flashtile.{name}'] for name in names)",
        "assert flashtile.modules.MHA and not hasattr(flashtile, 'nothing')",
        "import torch; assert torch.ops.flashtile.attention_forward.default",
        f"assert flashtile.__all__ == {flashtile.__all__}",
        "assert all(hasattr(flashtile, name) for name in flashtile.__all__)",
    )
    done = run_without((), "-c", "; ".join(lines))
    assert done.returncode == 0, done.stderr


def test_a_command_gets_the_public_names_and_does_not_speak_of_numpy_where_it_is_missing(run_without):
    pytest.importorskip("typer")
    done = run_without({"numpy"}, "-m", "flashtile", "explain", "--dtype", "fp32", "--device", "cpu")
    assert done.returncode == 0 and done.stdout.startswith("backend: cpu") and not done.stderr, done.stderr


@pytest.mark.slow
def test_torch_speaks_of_numpy(run_without):
    """Else the test above is void."""
    assert "Failed to initialize NumPy" in run_without({"numpy"}, "-c", "import torch").stderr


@pytest.mark.slow
def test_without_triton_the_cpu_serves_and_the_doctor_says_how_to_get_it(run_without):
    """It is no dependency: builds of torch for GPUs bring it, and a CPU needs none."""
    lines = (
        "import torch, flashtile, flashtile.modules, flashtile.models, flashtile.compat, flashtile.distributed",
        "x = torch.randn(1, 20, 2, 16, requires_grad=True)",
        "flashtile.attention(x, x, x, causal=True).sum().backward()",
        "flashtile.layer_norm(x, torch.ones(16), None).sum().backward()",
        "print(flashtile.explain(x, x, x, device='h100').backend)",
        "try: flashtile.attention(x, x, x, backend='triton'); print('fell back')",
        "except (ValueError, RuntimeError, ImportError) as error: assert 'riton' in str(error)",
        "from flashtile.cli import main; main('doctor', '--json')",
    )
    pytest.importorskip("typer")
    done = run_without({"triton", "matplotlib"}, "-c", "\n".join(lines))
    backend, _, printed = done.stdout.partition("\n")
    assert backend == "None", done.stderr
    found = json.loads(printed)
    remedies = {lack["name"]: lack["remedy"] for lack in found["missing"]}
    assert found["auto"] == "cpu" and found["versions"]["triton"] is None
    assert "a build of torch for GPUs brings it" in remedies["triton"] or torch.version.cuda, remedies
    assert remedies["matplotlib"] == 'in a checkout of flashtile, pip install ".[plots]"'


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full")
def test_a_full_disk_is_told_without_a_traceback():
    pytest.importorskip("typer")
    with open("/dev/full", "w") as full:
        command = [sys.executable, "-m", "flashtile", "--help"]
        env = {**os.environ, "PYTHONPATH": str(missing_packages.SOURCE)}
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, timeout=100, env=env)
    assert done.returncode == 2 and done.stderr == "error: No space left on device\n", done.stderr
