"""What users may watch: names in profiles, the log of choices, and the search for the first NaN."""

import os
import runpy
import subprocess
import sys
import types
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

import flashtile
from flashtile._backends import observe
from flashtile.ops.attention import select
from flashtile.ops.common import backends, watch

SOURCE = Path(flashtile.__file__).parent.parent
INF, NAN = float("inf"), float("nan")


def run_python(source, **environment):
    """Standard output and error of a process with these environment variables."""
    environment = {"PATH": os.environ.get("PATH", ""), "PYTHONPATH": str(SOURCE), **environment}
    done = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, env=environment, timeout=120)
    return done.stdout, done.stderr


CALLS = """
import torch, flashtile
q = torch.randn(1, 40, 2, 16, requires_grad=True)
with torch.profiler.profile() as profile:
    for _ in range(2):
        flashtile.attention(q, q, q, causal=True).sum().backward()
    flashtile.rms_norm(torch.randn(4, 16), torch.ones(16))
print(sorted(event.key for event in profile.key_averages() if "flashtile" in event.key))
try:
    flashtile.attention(q * 1e30, q * 1e30, q)
except FloatingPointError as error:
    print("found:", error)
"""


OPERATIONS = ("attention", "layer_norm", "rotary", "softmax", "cross_entropy", "dense", "kv_cache")


@pytest.fixture
def chosen_anew():
    """Backends are chosen, watched and logged in the test as in a new process, and after it too."""
    chosen = [select.BACKENDS, *map(backends.standard_backends, OPERATIONS[1:])]

    def forget():
        for each in chosen:
            each.implementation.cache_clear()
            each._logged.clear()

    forget()
    yield
    forget()


@pytest.fixture
def same_log():
    """The log is as before when the test is over."""
    handlers, level = observe.log.handlers[:], observe.log.level
    yield
    observe.log.handlers[:] = handlers
    observe.log.setLevel(level)


def test_without_environment_variables_nothing_is_watched(chosen_anew, capsys):
    module = types.ModuleType("m")
    assert watch.watched("attention", "cpu", module) is module
    assert not observe.NVTX and not watch.CHECK_NAN
    exec(CALLS, {})
    out, error = capsys.readouterr()
    assert "flashtile::attention_forward" in out and "flashtile::rms" not in out and "[cpu]" not in out
    assert "found:" not in out and "flashtile.select" not in error


def test_environment_variables_name_log_and_check(chosen_anew, same_log, capsys, monkeypatch):
    """They are read at import, so the modules that do it are read anew, under other names."""
    for name, value in (("NVTX", "1"), ("LOG", "select"), ("CHECK_NAN", "1")):
        monkeypatch.setenv(f"FLASHTILE_{name}", value)
    monkeypatch.setattr(observe, "NVTX", runpy.run_path(observe.__file__)["NVTX"])
    monkeypatch.setattr(watch, "CHECK_NAN", runpy.run_path(watch.__file__)["CHECK_NAN"])
    exec(CALLS, {})
    out, error = capsys.readouterr()
    for name in ("attention.forward[cpu]", "attention.backward[cpu]", "layer_norm.forward[cpu]"):
        assert f"flashtile.{name}" in out
    lines = [line for line in error.splitlines() if line.startswith("flashtile.select: ")]
    assert len(lines) == 3, "each choice once"
    assert "attention forward, torch.float32 on cpu: cpu (the first choice" in lines[0]
    assert "not triton: it needs" in lines[0]
    assert "found: flashtile.attention.forward[cpu]: result 0 [1, 40, 2, 16] float32" in out
    assert "and no input has any. Inputs: q [1, 40, 2, 16] float32, |x| up to" in out


@pytest.mark.parametrize(("name", "value"), [("FLASHTILE_LOG", "all"), ("FLASHTILE_NVTX", "2")])
def test_what_the_variables_do_not_know_is_an_error(name, value, monkeypatch):
    """They are read at import, so the module is read anew, under another name."""
    monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match=f"{name}: expected .*{value}"):
        runpy.run_path(observe.__file__)


def test_a_log_of_choices_through_logging(chosen_anew, caplog):
    with caplog.at_level("INFO", logger="flashtile.select"):
        for _ in range(2):
            flashtile.scaled_causal_softmax(torch.randn(1, 4, 4))
    assert [record.message.partition(" (")[0] for record in caplog.records] == ["softmax, torch.float32 on cpu: cpu"]


@pytest.mark.interpreter
def test_launches_are_named_in_a_profile_and_logged(caplog):
    q = torch.randn(1, 20, 1, 24, requires_grad=True)
    with caplog.at_level("INFO", logger="flashtile.select"), torch.profiler.profile() as profile:
        flashtile.attention(q, q, q, backend="triton").sum().backward()
    names = {event.key for event in profile.key_averages()}
    assert {f"flashtile::launch attention_{kernel}_kernel" for kernel in ("forward", "dq", "dkdv")} <= names
    kernels = [record.message for record in caplog.records if record.message.startswith("kernel attention_forward")]
    assert len(kernels) == 1 and "BLOCK_M=" in kernels[0] and "STRIDE" not in kernels[0]


@pytest.mark.gpu
def test_launches_are_named_in_a_profile_on_a_gpu():
    q = torch.randn(1, 80, 2, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)

    def call():
        flashtile.attention(q, q, q, backend="triton").sum().backward()

    call()
    with torch.profiler.profile() as profile:
        call()
    names = {event.key for event in profile.key_averages()}
    assert {f"flashtile::launch attention_{kernel}_kernel" for kernel in ("forward", "dq", "dkdv")} <= names


@pytest.mark.gpu
def test_nvtx_and_the_check_on_a_gpu():
    source = CALLS.replace("randn(1, 40, 2, 16,", "randn(1, 40, 2, 16, device='cuda',").replace(
        "torch.randn(4, 16), torch.ones(16)", "torch.randn(4, 16, device='cuda'), torch.ones(16, device='cuda')"
    )
    out, error = run_python(source, FLASHTILE_NVTX="1", FLASHTILE_LOG="select", FLASHTILE_CHECK_NAN="1")
    assert "flashtile.attention.forward[triton]" in out and "flashtile::launch attention_forward_kernel" in out
    assert "found: flashtile.attention.forward[triton]: result 0" in out
    assert "kernel attention_forward_kernel for cuda:0" in error


class Gradients(NamedTuple):
    q: torch.Tensor
    k: torch.Tensor | None = None


@pytest.fixture
def checked(monkeypatch):
    """Watches functions as a backend's module, and calls them."""
    monkeypatch.setattr(watch, "CHECK_NAN", True)

    def call(function, *arguments, name="forward"):
        module = types.ModuleType("m")
        setattr(module, name, function)
        return getattr(watch.watched("attention", "cpu", module), name)(*arguments)

    return call


def test_the_message_names_call_result_and_inputs(checked):
    def forward(q, side):
        return q * NAN, q

    with pytest.raises(FloatingPointError) as error:
        checked(forward, torch.full((2, 3), -2.0), Gradients(torch.ones(4, dtype=torch.float16)))
    assert str(error.value) == (
        "flashtile.attention.forward[cpu]: result 0 [2, 3] float32, |x| up to 0 has 6 NaN and 0 inf, and no input has "
        "any. Inputs: q [2, 3] float32, |x| up to 2; side.q [4] float16, |x| up to 1"
    )


def test_gradients_are_named(checked):
    with pytest.raises(FloatingPointError, match=r"the gradient of k .* has 0 NaN and 2 inf"):
        checked(lambda q: Gradients(q, q / 0), torch.ones(2), name="backward")


def test_a_lambda_is_a_function_and_other_values_pass(checked, monkeypatch):
    monkeypatch.setattr(watch, "CHECK_NAN", True)
    module = types.ModuleType("m")
    module.LIMIT = 7
    assert watch.watched("attention", "cpu", module).LIMIT == 7
    assert checked(lambda q: (q, torch.tensor([INF]).int()), torch.ones(2))[0].sum() == 2


def test_minus_infinity_where_it_means_something(checked):
    hidden = torch.tensor([0.0, -INF])
    _, lse = checked(lambda q: (q, hidden), torch.ones(2))  # the log-sum-exp of a row that sees nothing
    assert lse is hidden
    with pytest.raises(FloatingPointError, match="result 0"):
        checked(lambda q: (hidden, q), torch.ones(2))
    assert checked(lambda q, bias: (hidden, q), torch.ones(2), hidden)[0] is hidden
    with pytest.raises(FloatingPointError, match=r"bias \[2\] float32, |x| up to 0 with 1 -inf"):
        checked(lambda q, bias: (hidden * 0, q), torch.ones(2), hidden)


def test_what_came_from_elsewhere_is_said_and_not_blamed(checked, caplog):
    broken = torch.tensor([1.0, NAN])
    assert checked(lambda q: (q,), broken)[0] is broken
    assert "flashtile.attention.forward[cpu]: input q already has 1 NaN and 0 inf" in caplog.text


def test_inputs_are_looked_at_before_they_are_written_over(checked):
    def forward(q):
        return (q.mul_(INF),)

    with pytest.raises(FloatingPointError, match=r"Inputs: q \[2\] float32, \|x\| up to 1"):
        checked(forward, torch.ones(2))


def test_every_operation_is_watched(chosen_anew, monkeypatch):
    """With the check on, all operations run, forward and backward, and nothing is found in what is finite."""
    monkeypatch.setattr(watch, "CHECK_NAN", True)
    seen = set()
    original = watch._watch
    monkeypatch.setattr(watch, "_watch", lambda label, function: (seen.add(label), original(label, function))[1])
    x = torch.randn(2, 6, 2, 8, requires_grad=True)
    flat = torch.randn(6, 8, requires_grad=True)
    flashtile.attention(x, x, x, causal=True, align="top_left").sum().backward()
    flashtile.attention(x[:, :2], x, x, causal=True, window=(1, 0)).sum().backward()
    flashtile.layer_norm(flat, torch.ones(8, requires_grad=True)).sum().backward()
    flashtile.apply_rotary(x, *flashtile.rotary_tables(6, 8)).sum().backward()
    flashtile.scaled_causal_softmax(torch.randn(1, 4, 4, requires_grad=True)).sum().backward()
    flashtile.cross_entropy(flat, torch.arange(6)).sum().backward()
    flashtile.fused_mlp(flat, torch.randn(16, 8), None, torch.randn(8, 16), None).sum().backward()
    flashtile.attention_with_kv_cache(x[:, :1].detach(), x.detach(), x.detach())
    assert {label.split(".")[1] for label in seen} == set(OPERATIONS)
