"""Score functions in plain Python: traced into programs, and programs into their derivatives.

Traced steps and described masks are used again as long as all values that the function reads beside its arguments are
as they were.
"""

from __future__ import annotations

import dis
import functools
import types
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flashtile.ops.attention.score_program import (
    CAST,
    INPUTS,
    LOAD,
    UPSTREAM,
    ScoreFunction,
    ScoreProgram,
    Step,
    check_captured,
    parse,
    run,
)
from flashtile.ops.attention.score_symbols import Capturing, Recorder, RefusedError, Symbol
from flashtile.ops.common.checks import check_function
from flashtile.ops.common.dispatch import autograd_in_operator, outside_transforms
from flashtile.ops.common.rows import compute_dtype


def score_dtype(q: Tensor) -> torch.dtype:
    """The dtype in which a function gets them."""
    return compute_dtype(q.dtype)


def resolve_score_mod(score_mod: Callable[..., Any] | ScoreFunction, q: Tensor) -> ScoreFunction:
    """The argument `score_mod` of a call, traced."""
    dtype = score_dtype(q)
    if isinstance(score_mod, ScoreFunction):
        _check_traced(score_mod, dtype, q.device)
        return score_mod
    if torch.compiler.is_compiling():
        # A function that torch.compile has inlined is not there to be called.
        torch._dynamo.graph_break(
            msg="score_mod: expected a flashtile.ScoreFunction in one graph, got a Python function, which is traced on "
            "its own; make it before with flashtile.trace_score_mod, or compile without fullgraph=True"
        )
        return torch.compiler.disable(trace_score_mod)(score_mod, device=q.device, dtype=dtype)
    return trace_score_mod(score_mod, device=q.device, dtype=dtype)


def _check_traced(function: ScoreFunction, dtype: torch.dtype, device: torch.device) -> None:
    """A function that was traced before is for one dtype of scores and one device."""
    if function.dtype is not dtype:
        raise TypeError(
            f"score_mod: expected a ScoreFunction of scores in {dtype}, got one for {function.dtype}; make it with "
            f"flashtile.trace_score_mod(..., dtype={dtype})"
        )
    for tensor in function.captured:
        if tensor.device != device:
            raise ValueError(
                f"score_mod: expected captured tensors on the device of q, {device}, got one on {tensor.device}; make "
                "the ScoreFunction of tensors there"
            )
    if not torch.compiler.is_compiling():  # in a graph, the operator does
        check_captured(function.program, function.captured)


#: Programs by what their functions look like; the oldest go first.
_known: OrderedDict[Any, tuple[str, tuple[int, ...]]] = OrderedDict()
_MOST_KNOWN = 1024
_TAKES = "score, batch, head, q_index, k_index"


def trace_score_mod(
    score_mod: Callable[..., Any], *, device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32
) -> ScoreFunction:
    """Traces a score function once, which `score_mod=` of `flashtile.attention` does otherwise on each call.

    Only for models in one graph of `torch.compile` (`fullgraph=True`) or `torch.export`, which cannot trace a function
    on its own. A function whose code and captured values look as they did in an earlier call is not called again.

    Args:
        score_mod: as for `flashtile.attention`.
        device: of q.
        dtype: of the scores: float32, or float64 if q is float64.

    Returns:
        A `ScoreFunction`, which can be passed as `score_mod`. It holds the tensors that the function read.

    Raises:
        TypeError, ValueError: it is no such function. The message names the operation, its line and the remedy.
    """
    if not isinstance(device, torch.device) or (device.type != "cpu" and device.index is None):
        device = torch.empty(0, device=device).device  # with the number of the GPU
    if dtype not in (torch.float32, torch.float64):
        raise TypeError(f"dtype: expected float32, or float64 for q in float64, got {dtype}; scores have no other")
    seen = Surroundings.of(score_mod)
    key = None if seen is None else (seen.key, dtype, device.type, torch.get_default_dtype())
    if seen is not None and (known := _known.get(key)) is not None:
        text, places = known
        tensors = (*[seen.tensors[place] for place in places],)
        if not [tensor for tensor in tensors if tensor.device != device]:
            return ScoreFunction(text, tensors, dtype)
    recorder = Recorder(device)
    program = _trace(score_mod, dtype, recorder)
    text = program.text
    if seen is not None and recorder.repeatable:
        numbers = {id(tensor): place for place, tensor in enumerate(seen.tensors)}
        places = tuple(numbers.get(id(tensor), -1) for tensor in recorder.captured)
        if -1 not in places:
            _known[key] = text, places
            if len(_known) > _MOST_KNOWN:
                _known.popitem(last=False)
    return ScoreFunction(text, tuple(recorder.captured), dtype)


def _trace(score_mod: Callable[..., Any], dtype: torch.dtype, recorder: Recorder) -> ScoreProgram:
    check_function("score_mod", score_mod, _TAKES, "write one")
    score = recorder.input(INPUTS[0], dtype)
    indices = [recorder.input(name, torch.int32) for name in INPUTS[1:]]
    with torch._C._DisableAutocast(), outside_transforms(), Capturing(recorder):
        result = score_mod(score, *indices)
        if isinstance(result, (int, float)) and not isinstance(result, bool):
            result = recorder.constant(result, dtype)
        if isinstance(result, Tensor):
            result = recorder.scalar(result)
    if not isinstance(result, Symbol):
        raise TypeError(f"score_mod: expected it to return the new score, got {type(result).__name__}; return a scalar")
    if result.value is None:
        raise ValueError(
            f"score_mod: expected it to return a scalar, got shape {list(result.shape)}; index the captured tensor in "
            "each dimension"
        )
    if result.dtype is torch.bool or result.dtype.is_complex:
        raise TypeError(
            f"score_mod: expected it to return a number, got {result.dtype}; to hide pairs, return "
            "torch.where(condition, score, -float('inf')) or pass mask= or block_mask="
        )
    if result.dtype is not dtype:
        result = recorder.step(CAST, (result.value,), dtype)
    assert result.value is not None
    program, _ = recorder.program([result.value])
    return program


class ScoreGradient(NamedTuple):
    """The derivative of a score function times an upstream gradient.

    Attributes:
        program: its inputs are those of the function and the upstream gradient.
        score: the value that is the gradient of the score; None = 0.
        loads: for each read of a captured tensor of floating point that has an influence: the number of the tensor,
            the names of the indices, and the value that is its gradient.
        result: the value that is the result of the function; None where that was not asked for.
    """

    program: ScoreProgram
    score: str | None
    loads: tuple[tuple[int, tuple[str, ...], str], ...]
    result: str | None = None


@functools.lru_cache(maxsize=1024)
def derivative(text: str, dtype: torch.dtype, *, of_score_alone: bool = False) -> ScoreGradient:
    """The derivative of a program, from PyTorch's own derivatives of its operations; ValueError where it has none in
    elementwise operations. `dtype`: of the scores. `of_score_alone`: nothing for captured tensors, but the result
    beside it."""
    try:
        return _derivative(parse(text), dtype, of_score_alone)
    except (RefusedError, RuntimeError) as error:
        why = error.what if isinstance(error, RefusedError) else str(error).partition("\n")[0]
        raise ValueError(
            f"score_mod: expected a function whose derivative consists of elementwise operations, got one where "
            f"PyTorch has another or none: {why}; write it in other operations, or call it under torch.no_grad()"
        ) from error


def _derivative(program: ScoreProgram, dtype: torch.dtype, of_score_alone: bool) -> ScoreGradient:
    recorder = Recorder(of_derivative=True)
    recorder.captured = [
        torch.empty((1,) * dims, dtype=getattr(torch, of), device="cpu") for of, dims in program.captured
    ]
    with torch.inference_mode(False), outside_transforms(), autograd_in_operator():
        score = recorder.input(INPUTS[0], dtype, requires_grad=True)
        inputs = {INPUTS[0]: score, **{name: recorder.input(name, torch.int32) for name in INPUTS[1:]}}
        leaves: list[tuple[Symbol, Step, tuple[str, ...]]] = []

        def load(name: str, step: Step, indices: Sequence[Tensor]) -> Tensor:
            symbols = (
                index if isinstance(index, Symbol) else recorder.constant(index.item(), index.dtype)
                for index in indices
            )
            names = tuple(symbol.value or "" for symbol in symbols)
            value = recorder.step(LOAD, (step.arguments[0], *names), getattr(torch, step.dtype))
            if value.dtype.is_floating_point and not of_score_alone:
                value.requires_grad_()
                leaves.append((value, step, names))
            return value

        result = run(program, inputs, load)[program.results[0]]
        upstream = recorder.input(UPSTREAM, dtype)
        wanted = [score, *(leaf for leaf, _, _ in leaves)]
        found: Sequence[Any] = [None] * len(wanted)
        if result.requires_grad:
            found = torch.autograd.grad(result, wanted, upstream, allow_unused=True)
    # PyTorch's zeros, as of a sign, are no symbols.
    of_score, *of_loads = (gradient.value if isinstance(gradient, Symbol) else None for gradient in found)
    used = [(step, names, value) for (_, step, names), value in zip(leaves, of_loads) if value is not None]
    needed = [*(name for _, names, value in used for name in (*names, value)), *([of_score] if of_score else [])]
    assert isinstance(result, Symbol)
    function_result = result.value if of_score_alone else None
    traced_program, renamed = recorder.program([*needed, *([function_result] if function_result else [])])
    loads = tuple(
        (step.arguments[0], tuple(renamed.get(name, name) for name in names), renamed.get(value, value))
        for step, names, value in used
    )
    of_score, function_result = (name and renamed.get(name, name) for name in (of_score, function_result))
    return ScoreGradient(traced_program, of_score, loads, function_result)


_PLAIN = (bool, int, float, str, torch.dtype, torch.device, type(None))
_SEQUENCES = (tuple, list, torch.Size)
#: Objects of a library that always do the same.
_FIXED = (types.ModuleType, types.BuiltinFunctionType, type, torch._ops.OpOverload, torch._ops.OpOverloadPacket)


class Surroundings(NamedTuple):
    """What a function's results can depend on beside its arguments: `tensors` within reach, in a fixed order, and a
    `key` that is equal where two functions do the same with tensors of the same numbers."""

    key: tuple[Any, ...]
    tensors: tuple[Tensor, ...]

    @staticmethod
    def of(function: Callable[..., Any]) -> Surroundings | None:
        """None where that cannot be told: then the function has to be called anew each time."""
        key: list[Any] = []
        tensors: list[Tensor] = []
        if not _describe(function, key, tensors, ()):
            return None
        return Surroundings(tuple(key), tuple(tensors))


def _describe(found: Any, key: list[Any], tensors: list[Tensor], within: tuple[Any, ...]) -> bool:
    """Adds a value that a function can see to the key and the tensors; False where what it does may change unseen."""
    if isinstance(found, Tensor):
        key.append((found.dtype, found.shape, found.requires_grad))
        tensors.append(found)
        return True
    if isinstance(found, _PLAIN):
        key.append((type(found), repr(found)))
        return True
    for outer in within:
        if found is outer:
            return True
    reachable = _reachable(found, key)
    if reachable is None:
        key.append(found)
        if not isinstance(found, _FIXED):
            return False
        return _from_library(found.__name__ if isinstance(found, types.ModuleType) else found.__module__)
    within = (*within, found)
    for value in reachable:  # noqa: SIM110, a generator takes longer
        if not _describe(value, key, tensors, within):
            return False
    return True


def _reachable(found: Any, key: list[Any]) -> Iterable[Any] | None:
    """The values inside a function or a container, which is added to the key; None for other objects, and for functions
    of which that cannot be told."""
    kind = type(found)
    if kind is types.FunctionType:
        return _reachable_from_function(found, key)
    if kind in _SEQUENCES:
        key.append((kind, len(found)))
        return found
    if kind is dict and all(isinstance(name, str) for name in found):
        key.append((kind, *found))
        return found.values()
    if kind is functools.partial:
        key.append((kind, len(found.args), *found.keywords))
        return [found.func, *found.args, *found.keywords.values()]
    return None


def _reachable_from_function(function: types.FunctionType, key: list[Any]) -> list[Any] | None:
    names = _names(function.__code__)
    if names is None:
        return None
    values = []
    if cells := function.__closure__:
        try:
            values += [cell.cell_contents for cell in cells]
        except ValueError:  # a variable of an outer function that has no value yet
            return None
    of_module = function.__globals__
    if names:
        names = () if _from_library(of_module.get("__name__")) else tuple([name for name in names if name in of_module])
        values += [of_module[name] for name in names]
    positional, named = function.__defaults__ or (), function.__kwdefaults__ or {}
    key.append((function.__code__, names, len(positional), *named))
    values += positional
    values += named.values()
    return values


@functools.lru_cache(maxsize=4096)
def _names(code: types.CodeType) -> tuple[str, ...] | None:
    """The global names that a function reads, those of functions inside it too; None if it imports what may change."""
    names: dict[str, None] = {}
    for instruction in dis.get_instructions(code):
        if instruction.opname == "IMPORT_NAME" and not _from_library(instruction.argval):
            return None
        if instruction.opname == "LOAD_NAME" or "GLOBAL" in instruction.opname:
            names[instruction.argval] = None
    for inner in code.co_consts:
        if isinstance(inner, types.CodeType):
            of_inner = _names(inner)
            if of_inner is None:
                return None
            names |= dict.fromkeys(of_inner)
    return tuple(names)


def _from_library(module: str | None) -> bool:
    return module is not None and module.partition(".")[0] in ("torch", "math", "builtins", "operator")
