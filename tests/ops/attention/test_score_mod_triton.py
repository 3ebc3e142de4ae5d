"""Score functions on the portable kernels: pairs with other features, each operation that their sources have, and what
they refuse."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import flashtile
from flashtile._backends import clear_plans, devices
from flashtile.ops.attention.gpu.score_source import (
    SINE_SOURCE,
    additions_source,
    derivative_source,
    function_source,
    unsupported_operation,
)
from flashtile.ops.attention.score_program import parse
from flashtile.testing import assert_close, check
from flashtile.testing.tolerance import Size, size
from gluon_emulator import language
from gluon_emulator.values import Value
from support.attention.attention_cases import parameters, score_mod_combined
from support.running.places import places

F = torch.nn.functional
SEQ, HEADS = 40, 2


@places("interpreted", "gpu")
@pytest.mark.parametrize("case", parameters(score_mod_combined()))
def test_pairs(case, backend, device):
    check(case, backend, device)


def _tables(device: str) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(3)
    table = torch.randn(HEADS, SEQ, generator=generator)
    return {
        "table": table.to(device, copy=True).requires_grad_(),
        "narrow": table[0].half().to(device, copy=True).requires_grad_(),
        "factor": torch.tensor(0.7, device=device, requires_grad=True),
        "numbers": torch.arange(SEQ, device=device) % 7,
        "shown": (torch.arange(SEQ, device=device) % 5 > 0),
    }


Function = Callable[..., Tensor]
#: Functions of the score x, the indices and the tables, which together have every operation that the sources have.
FUNCTIONS: dict[str, Function] = {
    "exponentials": lambda x, b, h, q, k, t: torch.exp(0.1 * x) + torch.exp2(0.1 * x) + torch.log(x * x + 1.5),
    "logarithms": lambda x, b, h, q, k, t: torch.log2(x.square() + 1.5) * (x * x + 0.5).sqrt() + (2 + x * x).rsqrt(),
    "circles": lambda x, b, h, q, k, t: torch.sin(x) * torch.cos(0.5 * x) + torch.erf(x) - torch.tanh(x),
    "gates": lambda x, b, h, q, k, t: torch.sigmoid(x) * F.relu(x + 0.3) + 1.0 / (x * x + 2) + (3 + x * x).reciprocal(),
    "bounds": lambda x, b, h, q, k, t: x.clamp(-0.5, 0.7) + torch.maximum(x, 0.3 * x) - torch.minimum(x, -x).abs(),
    "powers": lambda x, b, h, q, k, t: (
        x**3 + (x * x + 1) ** -2 + (x * x + 1) ** 0.5 + x.sign() * 0.1 + 2.0 ** (0.2 * x)
    ),
    "integers": lambda x, b, h, q, k, t: x + 0.1 * ((q - k) % 7) + 0.2 * ((k - q) // 4) - 0.01 * torch.abs(q - k) + b,
    "rounding": lambda x, b, h, q, k, t: x + torch.floor(0.3 * x) + x.ceil() + torch.div(q, 3, rounding_mode="trunc"),
    "conditions": lambda x, b, h, q, k, t: torch.where(((q >= k) & (q != 3)) | ~(h > 0) ^ (k < 9), x, -x),
    "masks": lambda x, b, h, q, k, t: x.masked_fill(t["shown"][k] & torch.logical_not(q == k), 0.25) * 2,
    "tables": lambda x, b, h, q, k, t: x * t["factor"] + t["table"][h, q - k] - t["table"][h][k] * t["narrow"][q],
    "narrow": lambda x, b, h, q, k, t: x + (t["narrow"][k] * t["narrow"][q]).float() + t["numbers"][q] * 0.1,
    "casts": lambda x, b, h, q, k, t: x * (q.float() / 17 + (k > q).to(x.dtype)) + t["numbers"][-1 - k],
    "constant": lambda x, b, h, q, k, t: t["table"][h, k] + 0 * q,
    "buckets": lambda x, b, h, q, k, t: x + t["table"][h, torch.minimum(torch.abs(q - k), torch.full_like(q, 5))],
    # What a function adds to all scores of a row has a gradient of 0, of which only rounding errors are left.
    "few": lambda x, b, h, q, k, t: x * (t["table"][h, 3] + t["narrow"][q // 3] * t["factor"]) + t["narrow"][k // 8],
}


#: All of them, added up in few functions: without the score, of values, of positions, and with gradients.
TOGETHER = (
    ("constant",),
    ("exponentials", "logarithms", "circles", "gates", "bounds", "powers"),
    ("integers", "rounding", "conditions", "masks", "casts"),
    ("tables", "narrow", "buckets", "few"),
)


def _results(
    function: Function,
    backend: str,
    device: str,
    dtype: torch.dtype = torch.float32,
    deterministic: bool = False,
    query: int | None = None,
) -> dict[str, Tensor]:
    """out and the gradients. `query`: the only one whose out is differentiated; None for all."""
    generator = torch.Generator().manual_seed(0)
    shape = (2, SEQ, HEADS, 16)
    q, k, v, dout = (torch.randn(shape, generator=generator).to(device, dtype) for _ in range(4))
    leaves = {"q": q.requires_grad_(), "k": k.requires_grad_(), "v": v.requires_grad_()}
    tables = _tables(device)
    if dtype is torch.float64:
        learned = ("table", "factor")
        tables |= {name: tables[name].detach().double().requires_grad_() for name in learned}
    learned = {name: tables[name] for name in ("table", "narrow", "factor")}

    def score_mod(score: Tensor, batch: Tensor, head: Tensor, q_index: Tensor, k_index: Tensor) -> Tensor:
        return function(score, batch, head, q_index, k_index, tables)

    if query is not None:
        dout = torch.where(torch.arange(SEQ, device=device)[:, None, None] == query, dout, 0)
    out = flashtile.attention(q, k, v, score_mod=score_mod, backend=backend, deterministic=deterministic)
    found = torch.autograd.grad(out, [*leaves.values(), *learned.values()], dout, allow_unused=True)
    named = {f"d{name}": grad for name, grad in zip((*leaves, *learned), found) if grad is not None}
    return {"out": out.detach(), **named}


def _agrees(name: str, device: str, deterministic: bool = False) -> dict[str, Tensor]:
    actual = _results(FUNCTIONS[name], "triton", device, deterministic=deterministic)
    oracle = _results(FUNCTIONS[name], "reference", device, torch.float64)
    eager = _results(FUNCTIONS[name], "reference", device)
    assert actual.keys() == oracle.keys()
    for result, value in actual.items():
        cancelled = _cancelled(name, result, value.dtype) if result[1:] in _tables("cpu") else Size()
        assert_close(f"{name}: {result}", value, oracle[result], eager[result], cancelled)
    return actual


def _cancelled(name: str, result: str, dtype: torch.dtype) -> Size:
    """How large the float32 parts of a table's gradient are that the queries add, each alone. In "few" an entry of the
    table gets 3,200 terms whose sizes add up to 237, and their sum is 0.04 for one head and 0.76 for the other."""
    parts = torch.stack([_part(name, query)[result] for query in range(SEQ)])
    ratio = torch.finfo(torch.float32).eps / torch.finfo(dtype).eps
    return Size(*(ratio * norm for norm in size(parts)))


@functools.cache
def _part(name: str, query: int) -> dict[str, Tensor]:
    return _results(FUNCTIONS[name], "reference", "cpu", torch.float64, query=query)


@places("interpreted", "gpu")
@pytest.mark.parametrize("name", FUNCTIONS)
def test_operations(name, backend, device):
    _agrees(name, device)


#: Functions whose tables are read by both indices, one of them, the head alone and none.
WITH_GRADIENTS = ("tables", "few")


@pytest.fixture
def waves_of_three(monkeypatch):
    """Few sums, so that small calls come in several waves, the last one with thread blocks to spare."""
    scores = pytest.importorskip("flashtile.ops.attention.gpu.scores")
    monkeypatch.setattr(scores, "_MEMORY", 0)
    monkeypatch.setattr(scores, "_LEAST_SLOTS", 3)
    clear_plans()
    yield
    clear_plans()


@pytest.mark.interpreter
@pytest.mark.parametrize("name", WITH_GRADIENTS)
def test_interpreted_gradients_in_order(name, waves_of_three):
    _agrees(name, "cpu", deterministic=True)


@pytest.mark.gpu
@pytest.mark.parametrize("name", WITH_GRADIENTS)
def test_gradients_in_order_on_a_gpu(name, waves_of_three):
    first, second = (_agrees(name, "cuda", deterministic=True) for _ in range(2))
    assert all(torch.equal(first[result], second[result]) for result in first)


@pytest.mark.gpu
def test_gradients_of_a_long_call_are_the_same_in_every_run():
    generator = torch.Generator("cuda").manual_seed(0)
    q, k, v = (torch.randn(1, 1024, 4, 64, generator=generator, device="cuda").bfloat16() for _ in range(3))
    table = torch.zeros(4, 2047, device="cuda", requires_grad=True)

    def relative(score: Tensor, batch: Tensor, head: Tensor, q_index: Tensor, k_index: Tensor) -> Tensor:
        return score + table[head, q_index - k_index + 1023]

    def gradient() -> Tensor:
        out = flashtile.attention(q, k, v, score_mod=relative, deterministic=True)
        return torch.autograd.grad(out.float().square().sum(), table)[0]

    first = gradient()
    assert first.abs().sum() > 0
    assert all(torch.equal(first, gradient()) for _ in range(10))


def test_a_source_reads_like_the_function():
    table = torch.zeros(3, 9, requires_grad=True)
    text = flashtile.trace_score_mod(lambda s, b, h, q, k: s * 2 + table[h, q - k]).program
    source = function_source(text)
    assert "v0 = score * 2.0\n" in source
    assert "v2 = tl.load(captured.tensor0 + (at2_0 * sizes.size0_1 + at2_1), mask=at2_inside, other=0)" in source
    assert "add_to_entries(sums.sum0" in derivative_source(text, (True,))
    assert "sums." not in derivative_source(text)


@pytest.mark.parametrize(
    "index, by_diagonals",
    [
        (lambda buckets, b, h, q, k: (h, torch.clamp(k - q, -4, 4) + b), True),
        (lambda buckets, b, h, q, k: (h, buckets[q - k]), True),
        (lambda buckets, b, h, q, k: (h, (q - k) * (q % 2)), False),
        (lambda buckets, b, h, q, k: (q % 3, q - k), False),
        (lambda buckets, b, h, q, k: (h, k), False),
    ],
)
def test_which_gradients_are_added_up_by_diagonals(index, by_diagonals):
    table, buckets = torch.zeros(3, 9), torch.zeros(9, dtype=torch.int32)
    text = flashtile.trace_score_mod(lambda s, *at: s + table[index(buckets, *at)]).program
    source = additions_source(text, tuple(dtype == "float32" for dtype, _ in parse(text).captured))
    assert ("diagonal_sums(" in source) is by_diagonals


@pytest.mark.skipif(bool(devices.triton_missing()) or devices.interpreting(), reason="compiles kernels")
@pytest.mark.parametrize("names", TOGETHER)
def test_functions_compile_with_the_gradients_that_they_want(names):
    from support.compilation.checked_code import check_code
    from support.compilation.machine_code import Call, call_source

    tables = _tables("cpu")
    traced = flashtile.trace_score_mod(lambda *score: sum(FUNCTIONS[name](*score, tables) for name in names))
    call = Call(32, 32, seq_q=SEQ, seq_k=SEQ, heads=HEADS, heads_kv=HEADS, score_mod=traced)
    wanted = any(tensor.requires_grad for tensor in traced.captured)
    check_code(call_source("dq", "sm_90", call), "sm_90", _check_sums, ("RED",), wanted)


def _check_sums(binary: Any, instructions: tuple[str, ...], present: bool) -> None:
    """Whether a kernel adds in memory."""
    from support.compilation.machine_code import sass

    assert all((name in sass(binary)) is present for name in instructions)


@pytest.mark.skipif(bool(devices.triton_missing()) or devices.interpreting(), reason="compiles kernels")
@pytest.mark.parametrize("name, device", [("tables", "sm_80"), ("few", "sm_90")])
def test_gradients_in_order_compile_without_atomics(name, device):
    from support.compilation.checked_code import check_code
    from support.compilation.machine_code import Call, call_source

    tables = _tables("cpu")
    traced = flashtile.trace_score_mod(lambda s, b, h, q, k: FUNCTIONS[name](s, b, h, q, k, tables))
    call = Call(64, 64, seq_q=SEQ, seq_k=SEQ, heads=HEADS, heads_kv=HEADS, score_mod=traced, deterministic=True)
    check_code(call_source("dq", device, call), device, _check_sums, ("RED.", "ATOM"), False)


def test_operations_that_the_kernels_lack_are_named():
    text = flashtile.trace_score_mod(lambda s, b, h, q, k: torch.lgamma(s)).program
    assert unsupported_operation(text, False) == "aten.lgamma.default"
    assert unsupported_operation(flashtile.trace_score_mod(lambda s, *_: s + 1).program, True) is None


def test_sine_and_cosine():
    """By polynomials, to a few units of 2⁻²⁴, as long as neighbours of float32 are near each other; else NaN."""
    names: dict[str, Any] = {"tl": language.gl}
    exec(SINE_SOURCE, names)
    generator = torch.Generator().manual_seed(0)
    for limit in (1e-3, 1.0, 100.0, 1e5, 6.5e6):
        x = (2 * torch.rand(20_000, generator=generator) - 1) * limit
        for quarters, exact in enumerate((torch.sin, torch.cos)):
            found = names["sine"](Value(x, language.gl.float32), quarters).data
            assert (found - exact(x.double())).abs().max() < 1.2e-7
    beyond = torch.tensor([7e6, -7e6, float("inf"), float("nan")])
    assert names["sine"](Value(beyond, language.gl.float32), 0).data.isnan().all()


@pytest.mark.skipif(bool(devices.triton_missing()) or devices.interpreting(), reason="asks about a GPU: needs Triton")
def test_explain_names_what_is_not_served():
    table = torch.zeros(9, requires_grad=True)
    q = torch.zeros(1, 128, 2, 64, dtype=torch.bfloat16)

    def asked(function: Any, **options: Any) -> flashtile.Explanation:
        return flashtile.explain(q, q, q, score_mod=function, device="sm_90", **options)

    served = asked(lambda s, b, h, q, k: s + table[q % 9])
    assert [kernel.backend for kernel in served.kernels] == ["hopper", "hopper", "hopper"]
    lacking = asked(lambda s, b, h, q, k: torch.lgamma(s))
    assert lacking.backend is None
    assert all("aten.lgamma" in lacking.rejected[backend] for backend in ("hopper", "triton"))
