"""The kernels of a backward are known at its forward, where they are compiled together, without a GPU."""

import threading
import weakref
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import flashtile
from support.compilation import needs_triton  # noqa: F401

# isort: split
from triton import jit
from triton import language as tl

from flashtile._backends import clear_plans, together
from flashtile._backends import launch as backend_launch
from flashtile._backends.launcher import LoadedFunction
from flashtile.ops.attention import repeated, select
from flashtile.ops.attention.gpu import reductions
from flashtile.ops.attention.hopper import launch as hopper
from flashtile.ops.attention.score_tracing import trace_score_mod
from flashtile.ops.attention.spec import AttentionSpec, AuxForm, BackwardInputs, SideInputs, Wanted, wanted_gradients
from flashtile.ops.attention.triton import launch as triton
from support.attention.backend_calls import HOPPER

_Q = torch.zeros(2, 200, 4, 64, dtype=torch.bfloat16)
_K = torch.zeros(2, 150, 2, 64, dtype=torch.bfloat16)
_SHORT = torch.zeros(2, 40, 4, 64, dtype=torch.bfloat16)
_FLOAT32_Q, _FLOAT32_K = (torch.zeros(2, 200, heads, 96) for heads in (4, 2))
_WIDE_FLOAT32_Q, _WIDE_FLOAT32_K = (torch.zeros(2, 200, heads, 192) for heads in (4, 2))
_WIDE_Q, _WIDE_K = (torch.zeros(2, 200, heads, 320, dtype=torch.bfloat16) for heads in (4, 2))
_CAUSAL = AttentionSpec(0.125, None, 0)
_BIAS = torch.zeros(1, 4, 200, 152, dtype=torch.bfloat16)[..., :150].requires_grad_()
_TABLE = torch.zeros(4, requires_grad=True)
_CUMULATIVE = torch.tensor([0, 70, 200], dtype=torch.int32)


def _side(q: Tensor, k: Tensor, **given: Any) -> SideInputs:
    return SideInputs(max_seqlen_q=q.shape[-3], max_seqlen_k=k.shape[-3], **given)


def _function(captured: bool) -> tuple[AttentionSpec, tuple[Tensor, ...]]:
    function = trace_score_mod(lambda score, b, h, i, j: score * 2 + _TABLE[h] if captured else score.tanh())
    return _CAUSAL._replace(score_program=function.program), function.captured


_CASES = {
    "plain": (_Q, _K, _side(_Q, _K), AttentionSpec(0.125)),
    "causal": (_Q, _K, _side(_Q, _K), _CAUSAL),
    "in order": (_Q, _K, _side(_Q, _K), _CAUSAL._replace(deterministic=True)),
    "packed": (_Q[0], _Q[0], _side(_Q[0], _Q[0], cu_seqlens_q=_CUMULATIVE, cu_seqlens_k=_CUMULATIVE), _CAUSAL),
    "one tile": (_SHORT, _SHORT, _side(_SHORT, _SHORT), AttentionSpec(0.125)),
    "one tile, learned bias": (_SHORT, _SHORT, _side(_SHORT, _SHORT, bias=_BIAS[:, :, :40, :40]), AttentionSpec(0.125)),
    "learned bias": (_Q, _K, _side(_Q, _K, bias=_BIAS), AttentionSpec(0.125)),
    "learned slopes": (_Q, _K, _side(_Q, _K, alibi_slopes=_TABLE), _CAUSAL),
    "sinks": (_Q, _K, _side(_Q, _K, sinks=_TABLE), _CAUSAL),
    "float32": (_FLOAT32_Q, _FLOAT32_K, _side(_FLOAT32_Q, _FLOAT32_K, sinks=_TABLE), _CAUSAL),
    "wide, float32": (_WIDE_FLOAT32_Q, _WIDE_FLOAT32_K, _side(_WIDE_FLOAT32_Q, _WIDE_FLOAT32_K), _CAUSAL),
    "wide": (_WIDE_Q, _WIDE_K, _side(_WIDE_Q, _WIDE_K, sinks=_TABLE), _CAUSAL),
    "wide packed": (
        _WIDE_Q[0], _WIDE_Q[0], _side(_WIDE_Q[0], _WIDE_Q[0], cu_seqlens_q=_CUMULATIVE, cu_seqlens_k=_CUMULATIVE),
        _CAUSAL,
    ),
    "function": (_Q, _K, _side(_Q, _K), _function(False)[0]),
    "learned table": (_Q, _K, _side(_Q, _K, captured=(_TABLE,)), _function(True)[0]),
}  # fmt: skip


@pytest.fixture
def launched(monkeypatch):
    """Sources of the kernels that are launched."""
    found: list[Any] = []

    def make_launch(source: Any, *_: Any) -> Callable[..., None]:
        found.append(source)
        return lambda *given: None

    monkeypatch.setattr(backend_launch, "make_launch", make_launch)
    monkeypatch.setattr(backend_launch, "_load_with_others", lambda plan: None)
    monkeypatch.setattr("flashtile.ops.attention.call.current_machine", lambda device: HOPPER)
    monkeypatch.setattr("flashtile._backends.tma._encoded", lambda *given: (0,))
    monkeypatch.setattr("flashtile._backends.tma._described", lambda *given: (0,))
    clear_plans()
    yield found
    clear_plans()


@pytest.mark.parametrize("module", [triton, hopper], ids=["triton", "hopper"])
@pytest.mark.parametrize("case", _CASES)
def test_the_plans_of_a_backward_are_those_that_it_launches(case, module, launched):
    q, k, side, spec = _CASES[case]
    if case == "learned table" and module is hopper:
        return  # the portable kernels serve it
    wanted, dout = wanted_gradients(side), torch.zeros_like(q)
    lse = torch.zeros(*q.shape[:-3], q.shape[-2], q.shape[-3])
    with torch.no_grad():
        module.backward(BackwardInputs(dout, None, q, k, k, torch.zeros_like(q), lse), side, spec, wanted)
    expected = select.backward_plans(q, k, k, side, spec, module.__name__.split(".")[-2], wanted)
    assert len(launched) == len(expected) > 0
    assert all(plan.source in launched for plan in expected)


def test_a_recorded_forward_says_which_launches_follow(monkeypatch):
    """A launch sees them while the forward runs, and only where autograd records it."""
    seen: list[int] = []

    class Module:
        """A backend that launches nothing."""

        pipeline = SimpleNamespace(launches=["first", "second"])
        plan_backward = staticmethod(lambda call: Module)

        @staticmethod
        def forward(q: Tensor, k: Tensor, v: Tensor, side: SideInputs, spec: AttentionSpec) -> tuple[Tensor, Tensor]:
            seen.append(len(together.launched_soon()))
            return torch.zeros_like(q), torch.zeros(q.shape[0], q.shape[2], q.shape[1])

    monkeypatch.setattr(select, "implementation", lambda *_, **wanted: Module)
    repeated.forget_calls()
    q, k, v = (torch.zeros(1, 8, 2, 16) for _ in range(3))
    for arguments in ({}, {"alibi_slopes": torch.zeros(2)}):
        for recorded in (False, True, True):
            flashtile.attention(q.clone().requires_grad_(recorded), k, v, **arguments)
    repeated.forget_calls()
    # The first of calls that are alike says so; for those after it all is compiled.
    assert seen == [0, 2, 0, 0, 2, 0] and together.launched_soon() == ()


def test_kernels_are_loaded_at_the_same_time(monkeypatch):
    """With the one that is launched; what does not compile raises at its own launch."""
    meeting, device = threading.Barrier(3, timeout=30), torch.device("cpu")
    plans = {name: backend_launch.Plan(_source(name), 1, (), device) for name in ("first", "second", "broken")}
    loaded: dict[Any, str] = {}

    def load(source: Any, device: torch.device) -> LoadedFunction:
        name = source.constants["NAME"]
        if threading.current_thread() is not threading.main_thread():
            meeting.wait()
        if name == "broken":
            raise RuntimeError("does not compile")
        loaded[backend_launch._key(source, device)] = name
        return LoadedFunction(0, 0, 0)

    monkeypatch.setattr(backend_launch, "_LOADED", loaded)
    monkeypatch.setattr(backend_launch, "_loaded", load)
    with together.Soon(lambda: list(plans.values())):
        backend_launch._load_with_others(plans["first"])
        assert sorted(loaded.values()) == ["first", "second"]
        backend_launch._load_with_others(plans["second"])  # is there already, so nobody meets
    with pytest.raises(RuntimeError, match="does not compile"):
        plans["broken"].launch()


def _source(name: str) -> Any:
    return backend_launch.KernelSource(_kernel, (), (), {"NAME": name}, 4)


@jit
def _kernel(NAME: tl.constexpr) -> None:
    """Does nothing."""


def test_starts_of_waves_keep_their_memory_until_all_are_launched(monkeypatch):
    """Launches read them by address, and what is allocated in between would lie there."""
    begun = []

    def starts(*_):
        tensor = torch.zeros(2, 2, dtype=torch.int32)
        begun.append(weakref.ref(tensor))
        return tensor

    def run(*given):
        assert begun[0]() is not None
        return [torch.zeros(1)] * 3

    monkeypatch.setattr(reductions, "wave_starts", starts)
    plan = reductions.BackwardPlan(SimpleNamespace(run=run, outputs=()), waves=(2, 4))
    side = SideInputs()
    plan.runner(AuxForm.from_side(side), Wanted())(torch.zeros(1), None, [torch.zeros(1)] * 5)
    assert begun
