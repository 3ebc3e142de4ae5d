"""Tensors without numbers, which write down what a score function does with them.

What it does with other tensors alone (`torch.log(table)`) is done there and then, and its result captured.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch._decomp import decomposition_table
from torch.overrides import TorchFunctionMode

from flashtile.ops.attention.score_program import (
    CAPTURED_DTYPES,
    CAST,
    CONSTANT,
    INDEX_DTYPES,
    LOAD,
    MOST_STEPS,
    ProgramBuilder,
    ScoreProgram,
    Step,
    dtype_name,
    is_elementwise,
)

aten = torch.ops.aten

#: Operations that read a number out of a tensor: none of a symbol has one.
_READS_NUMBERS = {aten._local_scalar_dense.default, aten.is_nonzero.default, aten.item.default, aten.equal.default}
#: Operations that leave a scalar as it is.
_KEEPS = {
    aten.alias.default, aten.clone.default, aten.contiguous.default, aten.detach.default, aten.expand.default,
    aten.lift_fresh.default, aten.lift_fresh_copy.default, aten.positive.default, aten.reshape.default,
    aten.squeeze.default, aten._unsafe_view.default, aten.view.default,
}  # fmt: skip
#: PyTorch has a form of these in operations that it does tag (it tags that of silu too, which kernels lack).
_IN_OTHERS = {
    aten.elu_backward.default, aten.hardsigmoid_backward.default, aten.hardswish_backward.default,
    aten.hardtanh_backward.default, aten.leaky_relu_backward.default, aten.log_sigmoid_forward.default,
    aten.mish_backward.default, aten.silu_backward.default, aten.softplus_backward.default,
}  # fmt: skip
#: PyTorch has no such form of these.
_SHRINKING_BACKWARD = {aten.hardshrink_backward.default, aten.softshrink_backward.default}
#: Constants of a symbol's dtype, and where their value stands among the arguments.
_FILLS: dict[Any, float | None] = {
    aten.zeros_like.default: 0, aten.ones_like.default: 1, aten.full_like.default: None,
    aten.new_zeros.default: 0, aten.new_ones.default: 1, aten.new_full.default: None, aten.fill.Scalar: None,
}  # fmt: skip
#: Reads of what a tensor is like, not of its numbers.
_DESCRIBES = {"dim", "size", "numel", "__len__", "is_floating_point", "__get__", "stride", "nelement"}

_LIBRARIES = tuple(str(Path(module.__file__).parent) for module in (torch, sys.modules["flashtile"]) if module.__file__)


class Symbol(Tensor):
    """A scalar without a number, or what is left of a captured tensor after the first indices. `recorder`: of its
    program. `value`: its name there; None for the rest of a captured tensor. `rest`: number of the captured tensor, and
    the names of the first indices."""

    recorder: Recorder
    value: str | None
    rest: tuple[Any, ...]

    __torch_function__: Any = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(
        cls: type[Symbol],
        recorder: Recorder,
        value: str | None,
        dtype: torch.dtype,
        shape: Sequence[int] = (),
        rest: tuple[Any, ...] = (),
        requires_grad: bool = False,
    ) -> Symbol:
        # On the CPU, so that scalars which PyTorch makes of numbers can be read.
        symbol = torch.Tensor._make_wrapper_subclass(cls, shape, dtype=dtype, requires_grad=requires_grad)
        symbol.recorder, symbol.value, symbol.rest = recorder, value, rest
        return symbol

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        first = next(symbols_in((args, kwargs)))
        return first.recorder.record(func, args, kwargs or {})


def symbols_in(found: Any) -> Iterator[Symbol]:
    """The symbols in nested arguments."""
    if isinstance(found, Symbol):
        yield found
    elif isinstance(found, (tuple, list)):
        for entry in found:
            yield from symbols_in(entry)
    elif isinstance(found, dict):
        yield from symbols_in(tuple(found.values()))


class Recorder:
    """Writes down the steps of a program, each one once. `captured`: the tensors that were read. `of_derivative`:
    PyTorch's autograd calls the operations, not a user. `repeatable`: another call of the function with tensors like
    these makes the same program."""

    def __init__(self, device: torch.device | None = None, of_derivative: bool = False) -> None:
        self.device, self.of_derivative = device, of_derivative
        self.captured: list[Tensor] = []
        self.steps: list[Step] = []
        self.repeatable = True
        self._numbers: dict[Any, int] = {}

    def input(self, name: str, dtype: torch.dtype, requires_grad: bool = False) -> Symbol:
        return Symbol(self, name, dtype, requires_grad=requires_grad)

    def step(
        self, operation: str, arguments: Sequence[Any], dtype: torch.dtype, keywords: dict[str, Any] | None = None
    ) -> Symbol:
        step = Step(operation, tuple(arguments), tuple(sorted((keywords or {}).items())), dtype_name(dtype))
        # By the text too, because 1, 1.0 and True are equal.
        number = self._numbers.setdefault((step, repr(step)), len(self.steps))
        if number == len(self.steps):
            if number == MOST_STEPS and not self.of_derivative:
                _refuse(f"it has more than {MOST_STEPS} steps", "put what a loop computes into a tensor, and read that")
            self.steps.append(step)
        return Symbol(self, f"%{number}", dtype)

    def constant(self, value: float, dtype: torch.dtype) -> Symbol:
        value = value if isinstance(value, (bool, int, float)) else float("nan")
        return self.step(CONSTANT, (value,), dtype)

    def read(self, tensor: Tensor, indices: Any) -> Symbol:
        """`tensor[indices]`."""
        indices = indices if isinstance(indices, tuple) else (indices,)
        if isinstance(tensor, Symbol):
            if tensor.value is not None:
                _refuse("it indexes a scalar", "a score and the index arguments have no dimensions")
            number, *first = tensor.rest
        else:
            number, first = self._captured_number(tensor), []
        if len(indices) > tensor.dim():
            raise IndexError(f"score_mod: expected at most {tensor.dim()} indices, got {len(indices)} {_place()}")
        found = [self._index(index) for index in indices]
        rest = (number, *first, *found)
        if len(found) == tensor.dim():
            return self.step(LOAD, rest, tensor.dtype)
        return Symbol(self, None, tensor.dtype, tensor.shape[len(found) :], rest)

    def _index(self, index: Any) -> str:
        if isinstance(index, bool) or not isinstance(index, (int, Tensor)):
            _refuse(
                f"it indexes a captured tensor by {index!r}",
                "index by integers and integer scalars; slice, transpose or unsqueeze the tensor before the call",
            )
        symbol = self.constant(index, torch.int32) if isinstance(index, int) else self.scalar(index)
        if symbol.dtype not in INDEX_DTYPES or symbol.value is None:
            _refuse(
                f"it indexes by {dtype_name(symbol.dtype)} of shape {list(symbol.shape)}", "index by integer scalars"
            )
        return symbol.value

    def scalar(self, tensor: Tensor) -> Symbol:
        """A symbol for a tensor that an operation takes beside others."""
        if isinstance(tensor, Symbol):
            return tensor
        if tensor.dim():
            number = self._captured_number(tensor)
            return Symbol(self, None, tensor.dtype, tensor.shape, (number,))
        if tensor.device.type == "cpu" and self.device != tensor.device and not tensor.requires_grad:
            # PyTorch lets such a scalar join tensors on any device.
            self.repeatable = False
            return self.constant(tensor.item(), tensor.dtype)
        return self.step(LOAD, (self._captured_number(tensor),), tensor.dtype)

    def _captured_number(self, tensor: Tensor) -> int:
        for number, found in enumerate(self.captured):
            if found is tensor:
                return number
        if tensor.dtype not in CAPTURED_DTYPES:
            raise TypeError(
                f"score_mod: expected captured tensors of floating point, integers or bool, got {tensor.dtype} "
                f"{_place()}; cast it before the call"
            )
        if tensor.device != self.device:
            raise ValueError(
                f"score_mod: expected captured tensors on the device of q, {self.device}, got one of shape "
                f"{list(tensor.shape)} on {tensor.device} {_place()}; make it before the call, on that device"
            )
        if tensor.layout is not torch.strided:
            raise TypeError(
                f"score_mod: expected captured tensors that are dense, got layout {tensor.layout} {_place()}; pass "
                "to_dense()"
            )
        self.captured.append(tensor)
        return len(self.captured) - 1

    def record(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The result of an operation on symbols."""
        for symbol in symbols_in((args, kwargs)):
            if symbol.value is None:
                _refuse(
                    f"{func} takes a captured tensor of shape {list(symbol.shape)}",
                    "read it by an index in each dimension, table[head, q_index - k_index]",
                )
        if func in _READS_NUMBERS:
            _refuse(
                f"{func} asks for the number in a score or an index: data-dependent control flow",
                "write `torch.where(condition, a, b)` instead of if, and `&`, `|`, `~` instead of and, or, not",
            )
        if func._schema.is_mutable:
            return self._changed(func, args, kwargs)
        first = args[0]
        if func in _KEEPS:
            if any(size != 1 for size in (args[1] if len(args) > 1 and isinstance(args[1], (list, tuple)) else ())):
                _refuse(f"{func} makes more than a scalar", "compute with scalars; PyTorch broadcasts over the tile")
            return Symbol(self, first.value, first.dtype)
        if func in _FILLS:
            return self._filled(func, args, kwargs)
        if func is aten._to_copy.default:
            dtype = kwargs.get("dtype") or first.dtype
            return first if dtype is first.dtype else self.step(CAST, (first.value,), dtype)
        if func is aten.sgn.default and not self.of_derivative:
            func = aten.sign.default  # the same, and its derivative is no zero of a kind of its own
        if func in _IN_OTHERS:
            return decomposition_table[func](*args, **kwargs)
        if func in _SHRINKING_BACKWARD:
            gradient, given, width = args
            return torch.where((given >= -width) & (given <= width), 0.0, gradient)
        if func is aten.empty_like.default and self.of_derivative:  # it is filled then
            return self.constant(0, first.dtype)
        if not is_elementwise(func):
            # Such as `to` within a form in other operations: below autograd PyTorch leaves them whole.
            composed = func.decompose(*args, **kwargs)
            if composed is not NotImplemented:
                return composed
            _refuse(
                f"{func} is not elementwise",
                "compute with scalars and reads of captured tensors; do the rest before the call",
            )
        if kwargs.get("dtype") is not None:
            _refuse(f"{func} has a dtype", "cast its result: x.to(dtype)")
        arguments = [self._argument(argument) for argument in args]
        keywords = {name: self._argument(argument) for name, argument in kwargs.items() if argument is not None}
        return self.step(str(func), arguments, _result_dtype(func, args, kwargs), keywords)

    def _changed(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Symbol:
        """The first argument after an operation in place, such as PyTorch has in derivatives: it gets another value."""
        name, overload = str(func).removeprefix("aten.").split(".")
        if not self.of_derivative or not name.endswith("_") or not isinstance(args[0], Symbol):
            _refuse(f"{func} changes a tensor in place", "write the operation that returns a new tensor")
        result = self.record(getattr(getattr(aten, name[:-1]), overload), args, kwargs)
        args[0].value = result.value
        return args[0]

    def _argument(self, argument: Any) -> Any:
        if isinstance(argument, Tensor):
            if not isinstance(argument, Symbol):
                argument = self.constant(argument.item(), argument.dtype)  # made of a number by PyTorch itself
            return argument.value
        if argument is None or isinstance(argument, (bool, int, float, str)):
            return argument
        return _refuse(f"it computes with {argument!r}", "pass numbers and tensors")

    def _filled(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Symbol:
        shape = args[1] if "new" in str(func) else ()
        if tuple(shape):
            _refuse(f"{func} makes a tensor of shape {list(shape)}", "make it before the call")
        value = _FILLS[func]
        return self.constant(args[-1] if value is None else value, kwargs.get("dtype") or args[0].dtype)

    def program(self, results: Sequence[str]) -> tuple[ScoreProgram, dict[str, str]]:
        """The steps that results need, numbered anew; and the new name of each old one."""
        builder = ProgramBuilder(self.steps, range(len(self.captured)))
        named = builder.copied(*results)
        captured = tuple((dtype_name(tensor.dtype), tensor.dim()) for tensor in self.captured)
        return ScoreProgram(captured, tuple(builder.steps), named), builder.names


def _result_dtype(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.dtype:
    """By PyTorch's own rules for scalars."""
    try:
        result = _computed(func, args, kwargs, "cpu")
    except (RuntimeError, NotImplementedError):
        # Some operations have no 16-bit kernel on a CPU. Meta tensors know all, but take a second of imports.
        result = _computed(func, args, kwargs, "meta")
    if not isinstance(result, Tensor):
        _refuse(f"{func} has several results", "write it as operations with one result each")
    return result.dtype


def _computed(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], device: str) -> Any:
    """The operation on ones in the place of symbols."""

    def one(argument: Any) -> Any:
        return torch.ones((), dtype=argument.dtype, device=device) if isinstance(argument, Tensor) else argument

    return func(*map(one, args), **{name: one(of) for name, of in kwargs.items()})


class RefusedError(ValueError):
    """A function does something that cannot be a step of a program: `what`, in words."""

    def __init__(self, what: str, remedy: str) -> None:
        self.what = what
        super().__init__(
            f"score_mod: expected elementwise operations on scalars and reads of captured tensors, got a function "
            f"where {what} {_place()}; {remedy}"
        )


def _refuse(what: str, remedy: str) -> NoReturn:
    raise RefusedError(what, remedy)


def _place() -> str:
    """The line of the user's function that is being traced, for messages."""
    frame = inspect.currentframe()
    while frame is not None:
        path = frame.f_code.co_filename
        if not path.startswith(_LIBRARIES) and not path.startswith("<frozen"):
            return f"in {frame.f_code.co_name} ({path}:{frame.f_lineno})"
        frame = frame.f_back
    return "in its body"


class Capturing(TorchFunctionMode):
    """Sees every call of PyTorch in a score function, before autograd and `torch.func` do, and so the tensors that the
    caller holds."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self.recorder = recorder

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if next(symbols_in((args, kwargs)), None) is None:
            if name not in _DESCRIBES:
                self.recorder.repeatable = False
            return func(*args, **kwargs)
        if func is torch.Tensor.__getitem__:
            return self.recorder.read(*args)
        if name == "__setitem__":
            _refuse("it writes to a tensor", "build the tensor before the call")
        if name in _DESCRIBES:
            return func(*args, **kwargs)
        return func(*_with_scalars(args, self.recorder), **_with_scalars(kwargs, self.recorder))


def _with_scalars(found: Any, recorder: Recorder) -> Any:
    """Nested arguments with a symbol for each tensor."""
    if isinstance(found, Tensor):
        return recorder.scalar(found)
    if isinstance(found, (tuple, list)):
        return type(found)(_with_scalars(entry, recorder) for entry in found)
    if isinstance(found, dict):
        return {name: _with_scalars(entry, recorder) for name, entry in found.items()}
    return found
