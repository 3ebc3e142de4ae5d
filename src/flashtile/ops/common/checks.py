"""Checks of arguments that several operations take: an error names argument, expectation, what came and the remedy."""

from __future__ import annotations

import inspect
import math
import numbers
import os
from collections.abc import Sequence

import torch
from torch import Tensor

from flashtile.ops.common.rows import compute_dtype
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


def check_shape(name: str, tensor: Tensor, shape: Sequence[int], meaning: str, remedy: str = "reshape it") -> None:
    """Checks that an argument is a tensor of a shape. `meaning`: what the shape is."""
    check_tensors(**{name: tensor})
    if differ(tuple(tensor.shape), tuple(shape)):
        raise ValueError(f"{name}: expected shape {tuple(shape)}, {meaning}, got {tuple(tensor.shape)}; {remedy}")


def check_input(name: str, x: Tensor, shape: str, remedy: str, least: int = 1) -> None:
    """Checks the tensor that a call computes with: its dtype, and that it has at least so many dimensions."""
    check_tensors(**{name: x})
    check_float_dtype(name, x.dtype)
    if x.dim() < least:
        raise ValueError(f"{name}: expected shape {shape}, got {tuple(x.shape)}; {remedy}")


def check_function(name: str, function: object, takes: str, instead: str) -> None:
    """Checks that an argument is a function of `takes` ("batch, head") by position. `instead`: the remedy."""
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
    if not is_integer(count):
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


def check_dtype(name: str, tensor: Tensor, dtype: torch.dtype, of: str, remedy: str = "cast one of them") -> None:
    if tensor.dtype is not dtype:
        raise TypeError(f"{name}: expected the dtype of {of}, {dtype}, got {tensor.dtype}; {remedy}")


def check_like(name: str, tensor: Tensor, x: Tensor, of: str = "q", remedy: str = "cast one of them") -> None:
    """Checks that a tensor has the device and the dtype of x, whose name is given."""
    check_device(name, tensor, x.device, of)
    check_dtype(name, tensor, x.dtype, of, remedy)


def check_index(name: str, tensor: Tensor) -> None:
    """Checks that an argument is a tensor of integers."""
    if not isinstance(tensor, Tensor):
        raise TypeError(
            f"{name}: expected an int32 or int64 tensor, got {type(tensor).__name__}; use torch.tensor(...)"
        )
    check_tensors(**{name: tensor})
    if tensor.dtype not in INDEX_DTYPES:
        raise TypeError(f"{name}: expected dtype int32 or int64, got {tensor.dtype}; cast it")


def check_wants_no_gradient(name: str, tensor: Tensor, what: str = "tensor", remedy: str = "detach it") -> None:
    if tensor.requires_grad:
        raise ValueError(f"{name}: expected a {what} that wants no gradient, got one with requires_grad=True; {remedy}")


def refuse(beside: str, remedy: str, **arguments: object) -> None:
    """Raises for arguments that are not None, and cannot be `beside` another one."""
    for name, value in arguments.items():
        if value is not None:
            got = "a tensor" if isinstance(value, Tensor) else repr(value)
            raise ValueError(f"{name}: expected None {beside}, got {got}; {remedy}")


def is_integer(value: object) -> bool:
    """Whether an argument is an int, which may be symbolic, and no bool."""
    return isinstance(value, (int, torch.SymInt)) and not isinstance(value, bool)


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
    check_shape("dropout_seed", dropout_seed, (2,), "a seed and an offset", remedy)


def check_lengths(name: str, lengths: Tensor, size: int, device: torch.device, meaning: str, of: str = "q") -> None:
    """Checks shape, dtype and device of a vector of integers (lengths, offsets, row numbers), not its values."""
    check_index(name, lengths)
    check_shape(name, lengths, (size,), meaning, "it is a vector of integers, not a mask")
    check_device(name, lengths, device, of)


def check_heads(names: str, heads_q: int, heads_kv: int) -> None:
    """Checks that heads of keys and values can be shared by those of queries."""
    if heads_q < 1 or heads_kv < 1 or heads_q % heads_kv:
        raise ValueError(
            f"{names}: expected a number of heads that divides the {heads_q} of q, got {heads_kv}; query head h reads "
            "key/value head h // (heads_q // heads_kv)"
        )


def check_tables(cos_name: str, cos: Tensor, sin_name: str, sin: Tensor, name: str, x: Tensor) -> None:
    """Checks a pair of tables of angles for x `[..., head_dim]`, whose name is given."""
    check_tensors(**{cos_name: cos, sin_name: sin})
    for table_name, table in ((cos_name, cos), (sin_name, sin)):
        check_float_dtype(table_name, table.dtype)
        check_device(table_name, table, x.device, name)
    if cos.dim() != 2 or 2 * cos.shape[1] > x.shape[-1]:
        raise ValueError(
            f"{cos_name}: expected shape (positions, rotary_dim / 2) with rotary_dim up to the head_dim of {name}, "
            f"{x.shape[-1]}, got {tuple(cos.shape)}; a table has one column for each pair of elements"
        )
    check_shape(sin_name, sin, cos.shape, f"that of {cos_name}", "make both tables at once")
    check_dtype(sin_name, sin, cos.dtype, cos_name)


# --- packed sequences: where each begins, and how long the longest is -------------------------------------------------


def check_cu_seqlens(
    name: str, cu_seqlens: Tensor, device: torch.device, entries: int | None = None, meaning: str = "", of: str = "q"
) -> int:
    """Checks cumulative lengths, not their values; returns how many there are. `entries`: how many there must be. `of`:
    the tensor whose device it is."""
    check_tensors(**{name: cu_seqlens})
    if entries is None:
        if cu_seqlens.dim() != 1 or cu_seqlens.shape[0] < 1:
            raise ValueError(
                f"{name}: expected shape (batch + 1,), got {tuple(cu_seqlens.shape)}; an empty batch is "
                "torch.zeros(1, dtype=torch.int32)"
            )
        entries = cu_seqlens.shape[0]
    check_lengths(name, cu_seqlens, entries, device, f"batch + 1 cumulative lengths{meaning}", of)
    return entries


def check_max_seqlen(name: str, max_seqlen: int | None) -> None:
    if max_seqlen is None:
        return
    if isinstance(max_seqlen, Tensor):
        raise TypeError(f"{name}: expected an int, got a Tensor; reading it would synchronise, leave it out instead")
    if not is_integer(max_seqlen):
        raise TypeError(f"{name}: expected an int, got {max_seqlen!r}; leave it out if it is not known")
    if known(max_seqlen < 0):
        raise ValueError(
            f"{name}: expected an upper bound of the sequence lengths, at least 0, got {max_seqlen}; leave it out"
        )
    if known(max_seqlen >= LARGEST_COUNT):
        raise ValueError(f"{name}: expected an upper bound below 2**62, got {max_seqlen}; leave it out")


def check_cu_seqlens_values(name: str, cu_seqlens: Tensor, total: int, max_seqlen: int | None = None) -> None:
    """Checks the values of cumulative lengths against the number of packed rows and the longest sequence."""
    first, last = int(cu_seqlens[0]), int(cu_seqlens[-1])
    if first != 0:
        raise ValueError(f"{name}: expected to start at 0, got {first}; prepend 0 to the cumulative lengths")
    lengths = cu_seqlens.diff()
    if (lengths < 0).any():
        where = int((lengths < 0).nonzero()[0])
        raise ValueError(
            f"{name}: expected cumulative lengths that never decrease, got {int(cu_seqlens[where])} then "
            f"{int(cu_seqlens[where + 1])} at index {where + 1}; pass lengths.cumsum(0) behind a 0"
        )
    if last > total:
        raise ValueError(
            f"{name}: expected its last value to be at most the packed total, {total}, got {last}; pass all of the rows"
        )
    if max_seqlen is not None and lengths.numel() and int(lengths.max()) > max_seqlen:
        raise ValueError(
            f"max_seqlen{name.removeprefix('cu_seqlens')}: expected an upper bound of the sequence lengths, got "
            f"{max_seqlen} for a sequence of {int(lengths.max())}; leave it out if it is not known"
        )


# --- what shapes and changes the scores of attention ------------------------------------------------------------------


def resolve_window(causal: bool, window: tuple[int | None, int | None] | None) -> tuple[int | None, int | None]:
    """The canonical (left, right) of `causal` and `window` together."""
    if window is None:
        left = right = None
    else:
        if not isinstance(window, (tuple, list)) or len(window) != 2:
            raise TypeError(f"window: expected a pair (left, right), got {window!r}; use None for an unlimited side")
        left, right = window
        for side, keys in (("left", left), ("right", right)):
            if keys is None:
                continue
            if isinstance(keys, bool) or not isinstance(keys, int):
                raise TypeError(f"window: expected int or None on the {side}, got {keys!r}; None is unlimited")
            if not 0 <= keys < 2**31:
                raise ValueError(
                    f"window: expected {side} from 0 to 2**31 - 1, got {keys}; use None for an unlimited side"
                )
    return left, 0 if causal else right


def resolve_scale(scale: float | None, head_dim: int, dtype: torch.dtype) -> float:
    """The scale of the scores of q in a dtype."""
    if scale is None:
        return 1.0 / math.sqrt(head_dim)
    why_not_tensor = "reading it would synchronise, multiply q by it instead"
    remedy = "leave it out for 1/sqrt(head_dim)"
    return finite_float("scale", scale, remedy, why_not_tensor, dtype)


def resolve_softcap(softcap: float | None, scale: float, dtype: torch.dtype) -> float:
    """The soft cap as a float, 0.0 for none, beside the scale of the scores of q in a dtype."""
    if softcap is None:
        return 0.0
    softcap = as_float("softcap", softcap)
    if not 0.0 <= softcap < math.inf:
        raise ValueError(f"softcap: expected a finite number of at least 0, got {softcap}; leave it out for no cap")
    largest = largest_number(dtype)
    if softcap > largest or abs(scale) > softcap * largest > 0:
        raise ValueError(
            f"softcap: expected at most {largest:.1e}, and as much of scale / softcap, got {softcap} beside a scale of "
            f"{scale}; leave it out for no cap"
        )
    return softcap


def resolve_alibi_slopes(alibi_slopes: Tensor, batch: int, heads: int, q: Tensor) -> Tensor:
    """Slopes `[heads]` or `[batch, heads]` in the dtype of lse."""
    check_tensors(alibi_slopes=alibi_slopes)
    if differ(alibi_slopes.shape, (heads,)) and differ(alibi_slopes.shape, (batch, heads)):
        raise ValueError(
            f"alibi_slopes: expected shape [heads_q] = [{heads}] or [batch, heads_q] = [{batch}, {heads}], got "
            f"{list(alibi_slopes.shape)}; slopes belong to query heads"
        )
    return _as_statistics("alibi_slopes", alibi_slopes, q)


def resolve_sinks(sinks: Tensor, heads: int, q: Tensor) -> Tensor:
    """Sinks `[heads]` in the dtype of lse."""
    check_tensors(sinks=sinks)
    if tuple(sinks.shape) != (heads,):
        raise ValueError(
            f"sinks: expected shape [heads_q] = [{heads}], one logit for each query head, got {list(sinks.shape)}; "
            "query heads that share keys have one each"
        )
    return _as_statistics("sinks", sinks, q)


def _as_statistics(name: str, tensor: Tensor, q: Tensor) -> Tensor:
    """A small tensor in float32, or float64 beside float64 q."""
    check_device(name, tensor, q.device)
    wide = compute_dtype(q.dtype)
    narrow = q.dtype if q.dtype.itemsize > 1 else torch.bfloat16  # beside 8 bits that of out
    if tensor.dtype not in (narrow, wide):
        raise TypeError(f"{name}: expected dtype {wide}, or that of out, {narrow}, got {tensor.dtype}; cast it")
    return tensor.to(wide)
