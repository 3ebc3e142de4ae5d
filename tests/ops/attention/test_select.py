"""Backends are objects in a list: what chooses, runs and explains knows none by name."""

import runpy
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

import flashtile
from flashtile.ops.attention import select
from flashtile.ops.attention.call import Call, KernelChoice
from flashtile.ops.attention.spec import AttentionSpec, BackwardInputs, Gradients, SideInputs, Wanted
from flashtile.ops.common.backends import Backend, StandardCall, standard_backends
from support.running.command_line import invoke

ROOT = Path(__file__).parents[3]


def forward(q: Tensor, k: Tensor, v: Tensor, side: SideInputs, spec: AttentionSpec) -> tuple[Tensor, Tensor]:
    return torch.full_like(q, 7.0), torch.zeros(q.shape[0], q.shape[2], q.shape[1])


def backward(inputs: BackwardInputs, side: SideInputs, spec: AttentionSpec, wanted: Wanted) -> Gradients:
    return Gradients(torch.full_like(inputs.q, 3.0), torch.zeros_like(inputs.k), torch.zeros_like(inputs.v))


def softmax(*_: object) -> None:
    """What a backend of another operation would have."""


def unsupported_reason(call: Call) -> str | None:
    if call.spec.softcap:
        return "it has no soft cap"
    if call.phase == "backward" and call.spec.window_right is not None:
        return "its backward hides no keys on the right"
    return None


def describe(call: Call) -> tuple[KernelChoice, ...]:
    return (KernelChoice(f"made-up {call.phase}", backend="made_up", summary="all at once"),)


@pytest.fixture
def _made_up(monkeypatch):
    monkeypatch.setitem(select.BACKENDS.by_name, "made_up", Backend("made_up", __name__, unsupported_reason, describe))
    monkeypatch.setitem(sys.modules, __name__, sys.modules[forward.__module__])


@pytest.mark.usefixtures("_made_up")
def test_a_made_up_backend_serves_calls_and_is_explained():
    q = torch.randn(1, 8, 2, 4, requires_grad=True)
    out = flashtile.attention(q, q.detach(), q.detach(), backend="made_up")
    assert (out == 7).all() and (torch.autograd.grad(out.sum(), q)[0] == 3).all()
    found = flashtile.explain(q, q, q, backend="made_up")
    assert found.backend == "made_up" and [kernel.name for kernel in found.kernels] == [
        "made-up forward", "made-up backward",
    ]  # fmt: skip
    assert "made-up forward (made_up): all at once" in str(found)
    assert found.backends == tuple(select.BACKENDS.by_name)


@pytest.mark.usefixtures("_made_up")
def test_a_made_up_backend_is_in_the_doctor_s_table_and_in_the_feature_matrix():
    """Its results are wrong, which the doctor says. Neither program has a list of backends of its own."""
    result = invoke("doctor")
    assert result.exit_code == 0, result.output
    (line,) = (line for line in result.stdout.splitlines() if line.startswith("made_up"))
    assert "works" not in line
    rows = runpy.run_path(str(ROOT / "tools" / "feature_matrix.py"))["table"]().splitlines()
    assert rows[0].endswith("`made_up` |")
    cells = {label: row.split(" | ")[-1] for row in rows[2:] for label in row.split(" | ")[0].strip("| ").split("; ")}
    assert cells["float16"] == "yes |" and cells["`softcap`"] == "no |"
    assert cells["causal with both alignments, windows"] == "forward¹ |"


@pytest.mark.usefixtures("_made_up")
def test_it_says_what_it_does_not_serve():
    q = torch.randn(1, 8, 2, 4)
    with pytest.raises(ValueError, match="backend: 'made_up' cannot serve this call: it has no soft cap"):
        flashtile.attention(q, q, q, softcap=3.0, backend="made_up")
    assert flashtile.explain(q, q, q, softcap=3.0).rejected["made_up"] == "it has no soft cap"


@pytest.mark.usefixtures("_made_up")
def test_a_backward_that_it_lacks_is_that_of_another():
    q = torch.randn(1, 8, 2, 4, requires_grad=True)
    out = flashtile.attention(q, q, q, causal=True, backend="made_up")
    (dq,) = torch.autograd.grad(out.sum(), q)
    assert (out == 7).all() and not (dq == 3).any()


def test_a_backward_by_name_that_cannot_even_run_the_forward_raises():
    q = torch.randn(1, 8, 2, 16)
    out, lse = flashtile.attention(q, q, q, return_lse=True)
    with pytest.raises(ValueError, match="backend: 'hopper' cannot serve this call: its kernels are for sm_90"):
        flashtile.attention_backward(out, q, q, q, out, lse, backend="hopper")


def test_other_operations_choose_alike(monkeypatch):
    def never(call: StandardCall) -> str | None:
        return "it is made up" if call.requested == "auto" else None

    backends = standard_backends("softmax")
    monkeypatch.setitem(backends.by_name, "made_up", Backend("made_up", __name__, never))
    assert backends.implementation("made_up", torch.device("cpu"), torch.float32).softmax is softmax
    call = StandardCall("softmax", "auto", "cpu", torch.float32, None, False)
    choice = backends.choose(call)
    assert choice.backend == "cpu" and choice.rejected["made_up"] == "it is made up"
    choice = backends.choose(call._replace(device_type="cuda", dtype=torch.float64))
    assert choice.backend is None and choice.rejected.keys() == backends.by_name.keys()
