"""Checks of arguments that several operations take: an error names argument, expectation, what came and the remedy."""

from __future__ import annotations

import inspect
import math
import numbers
import os
from collections.abc import Sequence

import torch
from torch import Tensor

from flashtile.ops.common.sizes import differ, known

INDEX_DTYPES = (torch.int32, torch.int64)
FLOAT_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)

#: Rows that kernels of a GPU count in 32 bits, with room for a tile past the last.
MAX_ROWS = 2**31 - 2**16
#: The same where they are positions of queries and keys, whose differences are put together with a window's sides.
MAX_POSITIONS = 2**29

#: From here on, sums with a count may leave 64 bits.
LARGEST_COUNT = 2**62

#: Opt-in check of the values in index tensors, which costs a synchronisation on a GPU.
CHECK_VALUES = os.environ.get("FLASHTILE_CHECK_VALUES", "0") not in ("", "0")


def readable(tensor: Tensor) -> bool:
    """Whether the values of an index tensor may be read for a check: on a CPU always, on a GPU only on request."""
    return tensor.device.type == "cpu" or read_on_request(tensor)


def may_be_readable(tensor: Tensor) -> bool:
    """Whether there are calls in which the values of a tensor like this one may be read."""
    return CHECK_VALUES or tensor.device.type == "cpu"


def read_on_request(tensor: Tensor) -> bool:
    """Whether `FLASHTILE_CHECK_VALUES=1` asks for checks of values, and those of a tensor can be read now."""
    return CHECK_VALUES and not (tensor.device.type == "cuda" and torch.cuda.is_current_stream_capturing())


def check_tensors(**tensors: Tensor) -> None:
    """Checks that arguments are tensors, and neither nested nor sparse: those have no strides."""
    compiling = torch.compiler.is_compiling()  # a compiled backward may not read a layout
    for name, tensor in tensors.items():
        if not isinstance(tensor, Tensor):
            raise TypeError(f"{name}: expected a torch.Tensor, got {type(tensor).__name__}; use torch.as_tensor(...)")
        if compiling:
            continue
        if tensor.is_nested:
            raise TypeError(
                f"{name}: expected a dense tensor, got a nested one; pass its values and offsets to "
                "flashtile.attention_varlen, and its values to other functions"
            )
        if tensor.layout is not torch.strided:
            raise TypeError(f"{name}: expected a dense tensor, got layout {tensor.layout}; pass {name}.to_dense()")


def check_function(name: str, function: object, takes: str, instead: str) -> None:
    """Checks that an argument is a function that can be called with these arguments by position.

    Args:
        takes: their names, as in "batch, head".
        instead: what to do if it is no function.
    """
    if not callable(function):
        raise TypeError(f"{name}: expected a function ({takes}), got {type(function).__name__}; {instead}")
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # of a builtin, which has none
        return
    try:
        signature.bind(*takes.split(", "))
    except TypeError:
        raise TypeError(
            f"{name}: expected a function ({takes}), got one with the parameters {signature}; it is called with these "
            f"{len(takes.split(', '))} by position"
        ) from None


def type_name(value: object) -> str:
    """The type of an argument with its module, for errors about one whose name others have too."""
    return f"{type(value).__module__}.{type(value).__qualname__}"


def check_rows(name: str, rows: int, most: int = MAX_ROWS) -> None:
    """For the plan of a launch. Elements are counted in 64 bits, rows in 32."""
    if rows > most:
        raise ValueError(f"{name}: expected at most {most} rows on a GPU, got {rows}; split it, and call for each part")


def check_count(name: str, count: int, remedy: str, least: int = 0) -> None:
    """For a number of things that are to be made, which an exported program may leave open."""
    if isinstance(count, bool) or not isinstance(count, (int, torch.SymInt)):
        raise TypeError(f"{name}: expected an int, got {count!r}; {remedy}")
    if count < least:
        raise ValueError(f"{name}: expected at least {least}, got {count}; {remedy}")
    if known(count >= LARGEST_COUNT):
        raise ValueError(f"{name}: expected a number below 2**62, got {count}; {remedy}")


def check_programs(name: str, programs: int) -> None:
    """For the plan of a launch whose programs may be more than its rows."""
    if programs >= 2**31:
        raise ValueError(
            f"{name}: expected fewer than {2**31} tiles of rows, heads and batch entries on a GPU, got {programs}; "
            "split the batch, and call for each part"
        )


def check_float_dtype(name: str, dtype: torch.dtype) -> None:
    if dtype not in FLOAT_DTYPES:
        raise TypeError(f"{name}: expected dtype float16, bfloat16, float32 or float64, got {dtype}; cast it first")


def check_device(name: str, tensor: Tensor, device: torch.device, of: str = "q") -> None:
    if tensor.device != device:
        raise ValueError(f"{name}: expected the device of {of}, {device}, got {tensor.device}; move it")


def raise_not_bool(**flags: bool) -> None:
    for name, flag in flags.items():
        if not isinstance(flag, bool):
            raise TypeError(f"{name}: expected True or False, got {flag!r}; use bool(...)")


def check_choice(name: str, value: str, choices: Sequence[str], remedy: str = "") -> None:
    # Values of other types, such as NumPy's arrays, may compare with each choice and find no one answer.
    if not isinstance(value, str) or value not in choices:
        hint = f"; {remedy}" if remedy else ""
        raise ValueError(f"{name}: expected one of {', '.join(map(repr, choices))}, got {value!r}{hint}")


def as_float(name: str, value: float, why_not_tensor: str = "reading it would synchronise, pass a number") -> float:
    """A number of any type as a float."""
    if type(value) is float:
        return value
    if isinstance(value, Tensor):
        raise TypeError(f"{name}: expected a float, got a Tensor; {why_not_tensor}")
    if isinstance(value, bool) or not isinstance(value, (float, int, numbers.Real)):
        raise TypeError(f"{name}: expected a float, got {value!r}; pass a number")
    try:
        return float(value)
    except OverflowError:
        raise ValueError(f"{name}: expected a number that a float holds, got one beyond 1.8e308; pass less") from None


def largest_number(dtype: torch.dtype) -> float:
    """The largest number in what computes with inputs of a dtype, float64 or float32: finite also times log₂e."""
    return _LARGEST_DOUBLE if dtype is torch.float64 else _LARGEST_FLOAT


_LARGEST_FLOAT, _LARGEST_DOUBLE = (torch.finfo(dtype).max / 1.5 for dtype in (torch.float32, torch.float64))


def finite_float(
    name: str,
    value: float,
    remedy: str,
    why_not_tensor: str = "reading it would synchronise, pass a number",
    dtype: torch.dtype = torch.float64,
) -> float:
    """A number of any type as a float, finite in what computes with inputs of `dtype`."""
    value = as_float(name, value, why_not_tensor)
    if not abs(value) < math.inf:  # not math.isfinite, which torch.compile cannot trace where floats are dynamic
        raise ValueError(f"{name}: expected a finite number, got {value}; {remedy}")
    largest = largest_number(dtype)
    if abs(value) > largest:
        raise ValueError(
            f"{name}: expected a magnitude of at most {largest:.1e}, which the arithmetic of {dtype} inputs can hold, "
            f"got {value}; {remedy}"
        )
    return value


def resolve_dropout(
    dropout_p: float, dropout_seed: Tensor | None, device: torch.device, dropped: str = "weights", of: str = "q"
) -> float:
    """Checks the dropout arguments; returns the probability as a float."""
    dropout_p = as_float("dropout_p", dropout_p, "reading it would synchronise, pass a Python float")
    if not 0.0 <= dropout_p < 1.0:
        raise ValueError(
            f"dropout_p: expected a probability in [0, 1), got {dropout_p}; 0.1 drops a tenth of the {dropped}"
        )
    if dropout_seed is not None:
        check_dropout_seed(dropout_seed)
        check_device("dropout_seed", dropout_seed, device, of)
    return dropout_p


def check_dropout_seed(dropout_seed: Tensor) -> None:
    remedy = "make one with flashtile.draw_dropout_seed(device)"
    if not isinstance(dropout_seed, Tensor):
        raise TypeError(f"dropout_seed: expected an int64 tensor, got {type(dropout_seed).__name__}; {remedy}")
    check_tensors(dropout_seed=dropout_seed)
    if dropout_seed.dtype is not torch.int64:
        raise TypeError(f"dropout_seed: expected dtype int64, got {dropout_seed.dtype}; {remedy}")
    if dropout_seed.shape != (2,):
        raise ValueError(f"dropout_seed: expected shape (2,), got {tuple(dropout_seed.shape)}; {remedy}")


def check_lengths(name: str, lengths: Tensor, size: int, device: torch.device, meaning: str, of: str = "q") -> None:
    """Checks shape, dtype and device of a vector of integers (lengths, offsets, row numbers), not its values."""
    if not isinstance(lengths, Tensor):
        raise TypeError(
            f"{name}: expected an int32 or int64 tensor, got {type(lengths).__name__}; use torch.tensor(...)"
        )
    check_tensors(**{name: lengths})
    if lengths.dtype not in INDEX_DTYPES:
        raise TypeError(f"{name}: expected dtype int32 or int64, got {lengths.dtype}; cast it")
    if differ(lengths.shape, (size,)):
        raise ValueError(
            f"{name}: expected shape ({size},), {meaning}, got {tuple(lengths.shape)}; it is a vector of integers, "
            "not a mask"
        )
    check_device(name, lengths, device, of)


def check_table_pair(cos_name: str, cos: Tensor, sin_name: str, sin: Tensor, name: str, head_dim: int) -> None:
    """Checks shapes and dtypes of a pair of tables of angles, for the tensor of the given name."""
    if cos.dim() != 2 or 2 * cos.shape[1] > head_dim:
        raise ValueError(
            f"{cos_name}: expected shape (positions, rotary_dim / 2) with rotary_dim up to the head_dim of {name}, "
            f"{head_dim}, got {tuple(cos.shape)}; a table has one column for each pair of elements"
        )
    if sin.shape != cos.shape:
        raise ValueError(f"{sin_name}: expected the shape of {cos_name}, {tuple(cos.shape)}, got {tuple(sin.shape)}")
    if sin.dtype is not cos.dtype:
        raise TypeError(f"{sin_name}: expected the dtype of {cos_name}, {cos.dtype}, got {sin.dtype}; cast one of them")
