"""Which ptxas kernels are assembled with."""

import threading
from types import SimpleNamespace

import pytest

from flashtile._backends import devices

if devices.triton_missing():
    pytest.skip(devices.triton_missing(), allow_module_level=True)

import triton
from triton import knobs

from flashtile._backends import assembler as module
from flashtile._backends.assembler import assembler
from flashtile._backends.devices import KNOWN_DEVICES

_HOPPER, _BLACKWELL = KNOWN_DEVICES["sm_90"], KNOWN_DEVICES["sm_100"]


@pytest.fixture
def older(monkeypatch):
    """The path of the ptxas that Hopper kernels are to be assembled with, as with Triton 3.9."""
    path = knobs.nvidia.ptxas.path
    monkeypatch.setattr(module, "_older", lambda: path)
    monkeypatch.delenv("TRITON_PTXAS_BLACKWELL_PATH", raising=False)
    return path


def test_kernels_for_hopper_are_assembled_with_the_older_one(older):
    before = knobs.nvidia.ptxas_blackwell.path
    with assembler(_HOPPER) as given:
        assert knobs.nvidia.ptxas_blackwell.path == older
        # Triton's disk cache does not mistake the code of the one for that of the other.
        assert given["_env_vars"]["ptxas_blackwell"] == knobs.nvidia.ptxas.version
    assert knobs.nvidia.ptxas_blackwell.path == before and "ptxas_blackwell" not in vars(knobs.nvidia)


def test_other_gpus_keep_tritons_choice(older):
    with assembler(_BLACKWELL) as given:
        assert given == {} and "ptxas_blackwell" not in vars(knobs.nvidia)


def test_a_users_choice_holds(older, monkeypatch, tmp_path):
    """By the variable, or by the knob, which sets the variable too."""
    monkeypatch.setenv("TRITON_PTXAS_BLACKWELL_PATH", str(tmp_path))
    with assembler(_HOPPER) as given:
        assert given == {} and "ptxas_blackwell" not in vars(knobs.nvidia)
    monkeypatch.delenv("TRITON_PTXAS_BLACKWELL_PATH")
    monkeypatch.setitem(vars(knobs.nvidia), "ptxas_blackwell", str(tmp_path))
    with assembler(_HOPPER) as given:
        assert given == {} and vars(knobs.nvidia)["ptxas_blackwell"] == str(tmp_path)


def test_threads_that_compile_at_the_same_time_end_in_any_order(older):
    entered, may_leave = threading.Event(), threading.Event()

    def compile_longer() -> None:
        with assembler(_HOPPER):
            entered.set()
            may_leave.wait(30)

    thread = threading.Thread(target=compile_longer)
    with assembler(_HOPPER):
        thread.start()
        assert entered.wait(30)
    assert knobs.nvidia.ptxas_blackwell.path == older  # the other one still compiles
    may_leave.set()
    thread.join()
    assert "ptxas_blackwell" not in vars(knobs.nvidia)


def test_the_choice_ends_when_the_compiler_raises(older):
    with pytest.raises(RuntimeError, match="does not compile"), assembler(_HOPPER):
        raise RuntimeError("does not compile")
    assert "ptxas_blackwell" not in vars(knobs.nvidia)


@pytest.mark.parametrize("version, of_older, expected", [
    ("3.6.0", "12.8", False), ("3.8.0", "12.9", False), ("3.9.0", "12.9", True), ("3.10.0+git", "12.9", True),
    ("3.9.0", "13.4", False),
])  # fmt: skip
def test_which_versions_have_an_older_one(version, of_older, expected, monkeypatch):
    tool = SimpleNamespace(path="/somewhere/ptxas", version=of_older)
    monkeypatch.setattr(triton, "__version__", version)
    monkeypatch.setattr(module, "knobs", SimpleNamespace(nvidia=SimpleNamespace(ptxas=tool)))
    assert module._older.__wrapped__() == (tool.path if expected else None)


def test_a_triton_without_it_is_taken_as_it_is(monkeypatch):
    monkeypatch.setattr(triton, "__version__", "3.10.0")
    monkeypatch.setattr(module, "knobs", SimpleNamespace(nvidia=SimpleNamespace()))
    assert module._older.__wrapped__() is None
