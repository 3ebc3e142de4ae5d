"""Compiling before measuring: every case is called in every way that it has, and no failure ends the run."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from flashtile.bench.companions.ahead import call_once, compile_ahead
from flashtile.bench.companions.case import Way
from flashtile.bench.companions.implementations import select_implementations
from flashtile.bench.companions.movement import Copy
from flashtile.bench.companions.norms import RMSNorm

CPU = torch.device("cpu")
CASES = [RMSNorm("fp32", 3, 8), RMSNorm("fp32", 3, 16), Copy("fp32", 1)]


@pytest.fixture
def calls(monkeypatch):
    seen = []

    def eager(case, others):
        def function(x, weight):
            seen.append((case.columns, x.requires_grad and torch.is_grad_enabled()))
            return case.formula((x, weight), others)

        return Way(function)

    monkeypatch.setattr(RMSNorm, "eager", eager)
    return seen


def test_every_phase_of_every_case_is_called_once(calls):
    compile_ahead(CASES, select_implementations(["eager"], CPU), CPU, 2, ThreadPoolExecutor)
    assert sorted(calls) == [(8, False), (8, True), (16, False), (16, True)]


def test_implementations_that_are_not_chosen_are_not_called(calls):
    call_once(CASES[0], ["flashtile-cpu"], "cpu")
    assert calls == []


def test_failures_are_left_to_the_measuring_process(calls, monkeypatch):
    monkeypatch.setattr(RMSNorm, "flashtile", lambda case, backend, others: 1 / 0)
    call_once(CASES[0], ["flashtile-cpu", "eager"], "cpu")
    assert len(calls) == 2
