"""Kernels that other processes compile while this one compiles another."""

from __future__ import annotations

import os
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

from flashtile._backends import ahead, devices

if devices.triton_missing():
    pytest.skip(devices.triton_missing(), allow_module_level=True)
if devices.interpreting():
    pytest.skip("compiles kernels: needs TRITON_INTERPRET unset", allow_module_level=True)

import triton

import flashtile
from flashtile._backends import launch
from flashtile.ops.attention.triton import launch as attention_launch
from machine_code import Call, plan

_HOPPER = devices.KNOWN_DEVICES["sm_90"]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(launch, "device_facts", lambda device: _HOPPER)


def _hits(plans: list[launch.Plan]) -> list[bool]:
    """Compiles kernels one after another; for which of them Triton's cache had them."""
    hits: list[bool] = []
    with mock.patch.object(triton.knobs.compilation, "listener", lambda **seen: hits.append(seen["cache_hit"])):
        for each in plans:
            launch.compile_kernel(each.source, _HOPPER)
    return hits


def _plans() -> list[launch.Plan]:
    return [plan(kernel, _HOPPER, Call(seq_q=64, seq_k=64)).kernel for kernel in ("forward", "dq", "dkdv")]


def test_other_processes_compile_what_comes_next() -> None:
    forward, dq, dkdv = _plans()
    launch.compile_together(forward, [dq, dkdv])
    assert _hits([forward, dq, dkdv]) == [False, True, True]
    assert not ahead._running and not launch._FOLLOWERS


def test_no_process_starts_where_the_first_kernel_is_on_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    forward, dq, _ = _plans()
    assert _hits([forward]) == [False]
    launch.compile_together(forward, [dq])
    monkeypatch.setattr(ahead, "start", lambda *started: pytest.fail("started a process"))
    assert _hits([forward]) == [True]


def test_what_fails_elsewhere_is_compiled_here() -> None:
    forward, dq, _ = _plans()
    launch.compile_together(forward, [dq])
    with mock.patch.object(ahead.gc, "disable", side_effect=RuntimeError):  # only a child calls it
        assert _hits([forward, dq]) == [False, False]


def test_a_process_without_end_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ahead, "PATIENCE", 0.05)
    ahead.start("what", lambda: time.sleep(60))
    process = ahead._running["what"]
    began = time.monotonic()
    ahead.wait("what")
    assert time.monotonic() - began < 10
    with pytest.raises(ChildProcessError):
        os.waitpid(process, 0)


def test_a_forward_has_its_backward_compiled_beside_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a score function is new and a tensor wants a gradient: the kernels that the backward then asks for."""
    asked: list[tuple[Any, ...]] = []
    together: list[Any] = []

    def plan_for(kernel: str, *given: Any) -> Any:
        asked.append((kernel, *given[4:]))
        return SimpleNamespace(
            kernel=SimpleNamespace(is_new=True, programs=0, name=kernel),
            outputs=(),
            waves=0,
            shares=1,
        )

    monkeypatch.setattr(attention_launch, "plan_for", plan_for)
    monkeypatch.setattr(attention_launch, "compile_together", lambda first, others: together.append((first, others)))
    table = torch.zeros(2, requires_grad=True)
    function = flashtile.trace_score_mod(lambda score, batch, head, q_index, k_index: score + table[head])
    q = torch.zeros(1, 8, 2, 16, dtype=torch.float16)
    side = attention_launch.SideInputs(captured=function.captured)
    spec = attention_launch.AttentionSpec(1.0, score_program=function.program)
    attention_launch.compile_backward_too(plan_for("forward").kernel, q, q, q, side, spec)
    ((first, others),) = together
    assert first.name == "forward" and [each.name for each in others] == ["dq", "dkdv"]
    assert [kernel for kernel, *_ in asked] == ["forward", "dq", "dkdv"] and asked[1][-1] == (True,)
    together.clear()
    detached = side._replace(captured=(table.detach(),))
    attention_launch.compile_backward_too(plan_for("forward").kernel, q, q, q, detached, spec)
    assert not together
