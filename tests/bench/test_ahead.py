"""Compiling attention before it is measured: every case is called in every way that compiles something."""

import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch

from flashtile.bench import commands
from flashtile.bench.base import Implementation
from flashtile.bench.cases import Case
from flashtile.bench.commands import call_once, compile_ahead
from flashtile.bench.companion_cases import Copy, RMSNorm
from flashtile.bench.companions import IMPLEMENTATIONS as COMPANIONS
from flashtile.bench.companions import Way
from flashtile.bench.implementations import build_flashtile

CPU = torch.device("cpu")
CASES = [Case(1, seq, 1, 1, head_dim, head_dim, dtype="fp32") for head_dim in (8, 16) for seq in (5, 6)]


@pytest.fixture
def seen(monkeypatch):
    """The calls of implementations that note them, of which one fails and one compiles nothing."""
    calls = []

    def build(case, inputs):
        attend = build_flashtile("reference")(case, inputs)

        def noted(q, k, v):
            calls.append((case.D, case.S))
            return attend(q, k, v)

        return noted

    def fail(case, inputs):
        raise RuntimeError("a peer's error")

    known = [Implementation("noted", ("cpu",), build), Implementation("failing", ("cpu",), fail)]
    known.append(Implementation("ready", ("cpu",), build, compiles=False))
    benchmark = replace(commands.BENCHMARKS["attention"], implementations=known)
    monkeypatch.setitem(commands.BENCHMARKS, "attention", benchmark)
    monkeypatch.delenv("FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED", raising=False)
    yield known, calls
    os.environ.pop("FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED", None)


def test_every_case_is_called_where_something_is_compiled(seen):
    known, calls = seen
    compile_ahead("attention", CASES, known, CPU, 2, ThreadPoolExecutor)
    assert sorted(set(calls)) == sorted((case.D, case.S) for case in CASES) and len(calls) == 2 * len(CASES)
    assert os.environ["FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED"] == "1"


def test_a_call_without_memory_is_tried_again(seen, monkeypatch):
    known, calls = seen
    monkeypatch.setattr(commands, "_PAUSE", 0)

    def build(case, inputs):
        calls.append(case)
        raise torch.OutOfMemoryError if len(calls) < 3 else RuntimeError

    known[1] = Implementation("failing", ("cpu",), build)
    call_once("attention", CASES[0], "failing", "cpu")
    assert len(calls) == 3


def test_cases_of_the_same_kernels_do_not_follow_one_another():
    assert [(case.D, case.S) for case in commands._interleaved(CASES)] == [(8, 5), (16, 5), (8, 6), (16, 6)]
    causal = replace(CASES[1], causal=True)
    assert commands._interleaved([CASES[0], CASES[1], causal]) == [CASES[0], causal, CASES[1]]


def test_every_phase_of_a_companion_is_called_once(monkeypatch):
    calls = []

    def eager(case, others):
        def function(x, weight):
            calls.append((case.columns, x.requires_grad and torch.is_grad_enabled()))
            return case.formula(x, weight)

        return Way(function)

    monkeypatch.setattr(RMSNorm, "eager", eager)
    cases = [RMSNorm("fp32", 3, 8), RMSNorm("fp32", 3, 16), Copy("fp32", 1)]
    chosen = [each for each in COMPANIONS if each.name == "eager"]
    compile_ahead("companions", cases, chosen, CPU, 2, ThreadPoolExecutor)
    assert sorted(calls) == [(8, False), (8, True), (16, False), (16, True)]


def test_processes_do_not_start_compilers_of_their_own():
    from torch._inductor import config

    # By its own means: pytest's monkeypatch would leave the setting deleted.
    with config.patch(compile_threads=7):
        commands._share_cores()
        assert config.compile_threads == 1
