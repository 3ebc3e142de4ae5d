"""Texts of score programs from elsewhere: what they name is checked before anything runs."""

import json
import time
from typing import Any

import pytest
import torch
from torch import Tensor

import flashtile
from flashtile.ops.attention.gpu.score_source import function_source, unsupported_operation
from flashtile.ops.attention.gpu.score_writer import ScoreBounds
from flashtile.ops.attention.operator import run_attention
from flashtile.ops.attention.score_arguments import function_parts
from flashtile.ops.attention.score_program import MOST_STEPS, is_elementwise, parse
from flashtile.ops.attention.spec import AttentionSpec, SideInputs

SCORE_PLUS_ONE = ["aten.add.Tensor", ["%score", 1.0], [], "float32"]


def program(*steps: list[Any], captured: tuple[Any, ...] = (), results: Any = None) -> str:
    return json.dumps([captured, steps, [f"%{len(steps) - 1}"] if results is None else results])


def of_captured(*arguments: Any, dtype: str = "float32", captured: Any = ("float32", 1)) -> str:
    return program(["load", arguments, [], dtype], captured=(captured,))


HOSTILE: dict[str, str] = {
    "loads a library": program(["load_library", ["x.so"], [], "float32"]),
    "loads a library by a path": program(["aten..load_library", ["x.so"], [], "float32"]),
    "makes a file": program(["aten.from_file.default", ["made", True, 8], [], "float32"]),
    "in place": program(["aten.add_.Tensor", ["%score", 1.0], [], "float32"]),
    "out": program(["aten.add.out", ["%score", 1.0], [["out", "%score"]], "float32"]),
    "another library": program(["flashtile.softmax_forward.default", ["%score"], [], "float32"]),
    "attribute": program(["aten.add.__class__", ["%score"], [], "float32"]),
    "no operation": program(["aten.__init__.default", ["%score"], [], "float32"]),
    "whole tensor": program(["aten.sum.default", ["%score"], [], "float32"]),
    "other overload": program(["aten.max.default", ["%score"], [], "float32"]),
    "random": program(["aten.rrelu.default", ["%score"], [], "float32"]),
    "too much memory": program(["aten.mvlgamma.default", ["%score", 10**9], [], "float32"]),
    "too few arguments": program(["aten.add.Tensor", ["%score"], [], "float32"]),
    "too many arguments": program(["aten.exp.default", ["%score", 1], [], "float32"]),
    "an unknown keyword": program(["aten.exp.default", ["%score"], [["out", 1]], "float32"]),
    "an argument twice": program(["aten.add.Tensor", ["%score", 1], [["other", 1]], "float32"]),
    "a list": program(["aten.add.Tensor", ["%score", [1]], [], "float32"]),
    "a word for a number": program(["aten.add.Tensor", ["%score", "1"], [], "float32"]),
    "another word": program(["aten.div.Tensor_mode", ["%score", 2], [["rounding_mode", "up"]], "float32"]),
    "source text as a name": program(["aten.exp.default", ["%score); import os; (0"], [], "float32"]),
    "source text as a constant": program(["constant", ["1); import os; (0"], [], "float32"]),
    "source text as a dtype": program(["cast", ["%score"], [], "float32); import os; (0"]),
    "no dtype": program(["cast", ["%score"], [], "load"]),
    "a huge number": program(["constant", [10**400], [], "float32"]),
    "a later value": program(["aten.exp.default", ["%1"], [], "float32"], SCORE_PLUS_ONE),
    "upstream": program(["aten.exp.default", ["%upstream"], [], "float32"]),
    "result": program(SCORE_PLUS_ONE, results=["%1"]),
    "two results": program(SCORE_PLUS_ONE, results=["%0", "%score"]),
    "no captured tensor": of_captured(1, "%head"),
    "captured from the end": of_captured(-1, "%head"),
    "source text as a tensor": of_captured("0 + tl.load(0)", "%head"),
    "too few indices": of_captured(0),
    "float index": of_captured(0, "%score"),
    "other dtype": of_captured(0, "%head", dtype="int64"),
    "captured dtype": of_captured(0, "%head", dtype="complex64", captured=("complex64", 1)),
    "keywords of a read": program(["load", [0, "%head"], [["x", 1]], "float32"], captured=(("float32", 1),)),
    "deep nesting": "[" * 100_000,
    "deep nesting in a step": program(["aten.add.Tensor", [json.loads("[" * 500 + "]" * 500)], [], "float32"]),
    "too many steps": program(*[SCORE_PLUS_ONE] * (MOST_STEPS + 1)),
    "too long": json.dumps([[], [], ["%score"]]) + " " * 2**20,
    "no program": "{}",
    "no text": "import os",
    "empty": "",
}  # fmt: skip


def run(text: str, captured: tuple[Tensor, ...], backend: str) -> Tensor:
    """The operator of attention, as an exported program calls it."""
    q = torch.zeros(1, 4, 2, 8)
    side = SideInputs(max_seqlen_q=4, max_seqlen_k=4, captured=captured)
    return run_attention(q, q, q, side, AttentionSpec(0.5, score_program=text), backend)[0]


@pytest.mark.parametrize("name", HOSTILE)
def test_refused_before_anything_runs(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(torch.ops, "load_library", lambda path: pytest.fail("loads a library"))
    captured = (torch.zeros(2),) if "load" in HOSTILE[name] else ()
    for backend in ("reference", "cpu"):
        with pytest.raises(ValueError, match=r"score program: .*trace_score_mod"):
            run(HOSTILE[name], captured, backend)
    q = torch.zeros(1, 4, 2, 8)
    with pytest.raises(ValueError, match="score program: "):
        flashtile.attention(q, q, q, score_mod=flashtile.ScoreFunction(HOSTILE[name], captured, torch.float32))
    for reads in (lambda text: unsupported_operation(text, True), lambda text: function_parts(text, "float32")):
        with pytest.raises(ValueError, match="score program: "):
            reads(HOSTILE[name])
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "captured", [(), (torch.zeros(2, 2),), (torch.zeros(2).half(),), (torch.zeros(2), torch.zeros(2))]
)
def test_tensors_that_a_program_does_not_read_are_refused(captured):
    text = of_captured(0, "%head")
    assert run(text, (torch.zeros(2),), "cpu").shape == (1, 4, 2, 8)
    for backend in ("reference", "cpu"):
        with pytest.raises(ValueError, match="expected captured tensors of these dtypes and dimensions"):
            run(text, captured, backend)


def test_what_tracing_makes_is_read():
    table = torch.ones(2, 9, dtype=torch.int64)

    def everything(score: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        rounded = torch.div(score * table[h, q - k], 3, rounding_mode="floor").clamp(min=-5.0, max=float("inf"))
        return torch.where((q >= k) | (h == 1), torch.nn.functional.gelu(rounded, approximate="tanh"), -float("inf"))

    text = flashtile.trace_score_mod(everything).program
    assert parse(text).text == text


def test_only_elementwise_operations_that_change_nothing():
    aten = torch.ops.aten
    for func in (aten.add_.Tensor, aten.add.out, aten.sum.default, aten.max.default, aten.from_file.default):
        assert not is_elementwise(func)
    assert is_elementwise(aten.add.Tensor) and is_elementwise(aten.hardswish.default)


def _squares(x: Tensor) -> Tensor:
    return x * x


def _doubles(x: Tensor) -> Tensor:
    return x + x


@pytest.mark.parametrize("step", [_squares, _doubles])
def test_values_that_are_used_twice_each_take_no_time_that_doubles(step):
    table = torch.zeros(8)

    def score_mod(score: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        index, factor = q - k, k.float()
        for _ in range(50):
            index, factor = step(index), step(factor)
        return score + factor + table[index * 0 if step is _squares else index]

    text = flashtile.trace_score_mod(score_mod).program
    before = time.perf_counter()
    function_parts(text, "float32")
    function_source(text, ScoreBounds(1, 1, 1, 1, ((8,),)))
    assert time.perf_counter() - before < 5


def test_long_chains_do_not_exceed_the_recursion_limit():
    def chain(score: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        distance = (q - k).float()
        for _ in range(1500):
            distance = -distance
        return score + distance

    q = torch.randn(1, 4, 2, 8)
    result = flashtile.attention(q, q, q, score_mod=chain)
    flashtile.testing.assert_same(result, flashtile.attention(q, q, q, score_mod=lambda s, b, h, q, k: s + (q - k)))


def test_functions_with_too_many_steps_are_refused_when_traced():
    def endless(score: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        for _ in range(MOST_STEPS + 1):
            score = score + 1
        return score

    with pytest.raises(ValueError, match=f"more than {MOST_STEPS} steps in endless"):
        flashtile.trace_score_mod(endless)


def test_infinite_powers_are_not_for_kernels():
    text = flashtile.trace_score_mod(lambda s, b, h, q, k: s ** float("inf")).program
    assert unsupported_operation(text, False) == "aten.pow.Tensor_Scalar"
