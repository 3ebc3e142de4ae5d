"""What every test shares: which tests run, and on this machine can; threads per worker; and poisoned memory."""

from __future__ import annotations

import gc
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import hypothesis
import pytest
import torch
import torch.utils.deterministic

import flashtile
from flashtile.ops.attention.repeated import forget_calls
from flashtile.ops.common.repeated import forget_calls as forget_companion_calls
from flashtile.ops.kv_cache.repeated import forget_calls as forget_cache_calls
from support.compilation import remembered_checks
from support.running import selection

_POISONED_TESTS = Path(__file__).parent / "ops"
#: In a file whose tests all need a GPU.
_NEEDS_GPUS = re.compile(r"^pytestmark = \[?pytest\.mark\.(gpu|hopper|multi_gpu)\b", re.MULTILINE)

hypothesis.settings.register_profile("flashtile", deadline=None, derandomize=True, print_blob=True)
hypothesis.settings.register_profile("explore", deadline=None, max_examples=1000)
hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "flashtile"))


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--part", choices=("quick", "rest"), help="a part of the tests (support/running/selection.py); default: all"
    )
    parser.addoption(
        "--complete", action="store_true", help="fail unless all public names are used and all kernels compile"
    )
    parser.addoption(
        "--all-combinations", action="store_true", help="run every case of parametrisations, not every pair of values"
    )
    parser.addoption("--compile-all", action="store_true", help="take no check of machine code for passed already")
    parser.addoption("--remember", action="store_true", help="run only checks of machine code, and renew their table")


def pytest_configure(config: pytest.Config) -> None:
    """Workers of pytest-xdist and the processes that their tests start share the cores, instead of each starting a
    thread on every one. Triton's interpreter is sped up. Checks of machine code are remembered."""
    config.pluginmanager.register(remembered_checks)
    workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    if workers > 1:
        threads = max(1, torch.get_num_threads() // workers)
        torch.set_num_threads(threads)
        os.environ.setdefault("OMP_NUM_THREADS", str(threads))
    if os.environ.get("TRITON_INTERPRET") == "1":
        from support.running.interpreter_speed import skip_needless_work

        skip_needless_work()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Skips, with the reason, the tests whose hardware or environment is not there; leaves out combinations of
    which each two values are in another, unless they are asked for by name; leaves out the other part."""
    named = any("[" in argument for argument in config.args)
    if not (named or config.option.all_combinations):
        items[:] = selection.in_pairs(items)
    reasons = {mark: reason for mark, reason in _unavailable().items() if reason}
    for item in items:
        for mark, reason in reasons.items():
            if item.get_closest_marker(mark):
                item.add_marker(pytest.mark.skip(reason=reason))
    if part := config.getoption("part"):
        parts = selection.parts(items)
        items[:] = parts.pop(part)
        config.hook.pytest_deselected(items=[item for others in parts.values() for item in others])


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """A run of the interpreted tests alone reads only the files that have some, and one without GPUs none of those
    whose tests all need one: the others take longer to read."""
    if collection_path.suffix != ".py":
        return None
    if config.option.markexpr == "interpreter":
        text = collection_path.read_text()
        return None if "mark.interpreter" in text or '"interpreted"' in text else True
    if config.option.markexpr.startswith("not (gpu or hopper or multi_gpu"):
        return True if _NEEDS_GPUS.search(collection_path.read_text()) else None
    return None


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Thousands of tests are objects that live to the end, so the garbage collector need not look at them. Tests then
    make millions of small ones, most of all where something is compiled: collecting less often saves a fifth of that
    time, for some 70 MB."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.set_threshold(50_000, 20, 50)
        gc.enable()


def _unavailable() -> dict[str, str]:
    """For each mark, why its tests cannot run here; empty where they can."""
    gpus = torch.cuda.device_count()
    hopper = gpus > 0 and torch.version.hip is None and torch.cuda.get_device_capability()[0] == 9
    interpreting = os.environ.get("TRITON_INTERPRET") == "1"
    return {
        "gpu": "" if gpus and not interpreting else "needs a GPU, and TRITON_INTERPRET unset",
        "hopper": "" if hopper and not interpreting else "needs an sm_90 GPU, and TRITON_INTERPRET unset",
        "multi_gpu": "" if gpus > 1 and not interpreting else "needs two GPUs, and TRITON_INTERPRET unset",
        "interpreter": "" if interpreting else "needs TRITON_INTERPRET=1",
    }


@pytest.fixture(autouse=True, scope="session")
def launched_kernels_are_inspected() -> Iterator[None]:
    """A kernel that a test launches on a GPU is searched for faults of ptxas, as the compile tests' kernels are."""
    if not torch.cuda.is_available() or torch.version.hip or os.environ.get("TRITON_INTERPRET") == "1":
        yield
        return
    from flashtile._backends import launch
    from support.compilation.machine_code import compile_source

    with mock.patch.object(launch, "compile_kernel", compile_source):
        yield


@pytest.fixture(autouse=True)
def released_gpu_memory(request: pytest.FixtureRequest) -> Iterator[None]:
    """After a test on a GPU its memory goes back, so that tests of several processes have room beside one another."""
    yield
    if request.node.get_closest_marker("gpu") or request.node.get_closest_marker("hopper"):
        torch.cuda.empty_cache()


@pytest.fixture(autouse=True)
def poisoned_memory(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Under tests/ops, uninitialised memory is NaN (integers: their largest value), so an element that a kernel
    never wrote is seen.

    PyTorch's own fill is used: it reaches `torch.empty`, `empty_like`, `new_empty` and `empty_strided` on every
    device and in every thread, and `torch.compile` knows it. It is active only in deterministic mode, whose warnings
    about other operations are of no interest here. Attention does not follow that mode here, because its gradients in
    no fixed order are tested too.
    """
    wanted = _POISONED_TESTS in request.node.path.parents and not request.node.get_closest_marker("unpoisoned")
    if not wanted:
        yield
        return
    fill = torch.utils.deterministic.fill_uninitialized_memory
    torch.utils.deterministic.fill_uninitialized_memory = True
    torch.use_deterministic_algorithms(True, warn_only=True)
    monkeypatch.setattr("flashtile.ops.attention.options.deterministic_mode", lambda: False)
    yield
    torch.use_deterministic_algorithms(False)
    torch.utils.deterministic.fill_uninitialized_memory = fill


@pytest.fixture(autouse=True)
def forgotten_calls() -> None:
    """A test may change what calls are decided by; so each decides anew about its own."""
    forget_calls()
    forget_cache_calls()
    forget_companion_calls()


@pytest.fixture
def fresh_compiler() -> Iterator[None]:
    """Nothing that torch.compile compiled before or in the test is left."""
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


# Every kernel compiles in a run with --complete; test_selection.py looks at the names

_COMPILED_BY_WORKERS: set[str] = set()


def pytest_sessionfinish(session: pytest.Session) -> None:
    """A worker of pytest-xdist reports which kernels it compiled. A run with --complete fails unless these are all."""
    machine_code = sys.modules.get("support.compilation.machine_code")
    compiled = machine_code.COMPILED if machine_code else set()
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["compiled"] = sorted(compiled)
    elif session.config.option.complete:
        missing = selection.kernels(flashtile) - compiled - _COMPILED_BY_WORKERS
        if missing:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED
            print(f"\nno test of this run compiles {', '.join(sorted(missing))}")


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: object) -> None:
    """A worker has ended."""
    _COMPILED_BY_WORKERS.update(getattr(node, "workeroutput", {}).get("compiled", ()))
