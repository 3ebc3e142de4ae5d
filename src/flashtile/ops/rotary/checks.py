"""Checks of user input at the public edge: each error names argument, expectation, what came and the remedy."""

from __future__ import annotations

import torch
from torch import Tensor

from flashtile.ops.common.checks import (
    INDEX_DTYPES,
    check_choice,
    check_device,
    check_float_dtype,
    check_lengths,
    check_tensors,
    raise_not_bool,
    readable,
)
from flashtile.ops.common.memory import check_writable
from flashtile.ops.common.sizes import differ, exceeds, known
from flashtile.ops.common.table_checks import check_table_pair
from flashtile.ops.rotary.spec import RotarySpec, Rotation, positions

__all__ = [
    "check_choice",
    "check_heads",
    "check_inplace",
    "check_input",
    "check_max_seqlen",
    "check_positions",
    "check_sequences",
    "check_table_length",
    "check_tables",
    "check_tensors",
    "check_values",
    "raise_not_bool",
    "resolve_offsets",
]


def check_input(name: str, x: Tensor, layout: tuple[str, ...]) -> None:
    check_tensors(**{name: x})
    check_float_dtype(name, x.dtype)
    if x.dim() != len(layout):
        raise ValueError(
            f"{name}: expected {len(layout)} dimensions [{', '.join(layout)}], got shape {tuple(x.shape)}; "
            "packed sequences go with cu_seqlens, a dense batch without"
        )


def check_inplace(name: str, x: Tensor) -> None:
    """Checks that a rotation can be written to x."""
    check_writable(name, x, "leave inplace out")


def check_tables(name: str, x: Tensor, cos: Tensor, sin: Tensor, suffix: str = "") -> None:
    """Checks a pair of tables against x `[..., head_dim]`, whose name is given."""
    cos_name, sin_name = f"cos{suffix}", f"sin{suffix}"
    check_tensors(**{cos_name: cos, sin_name: sin})
    for table_name, table in ((cos_name, cos), (sin_name, sin)):
        check_float_dtype(table_name, table.dtype)
        check_device(table_name, table, x.device, name)
        if table.requires_grad:
            raise ValueError(
                f"{table_name}: expected a table that wants no gradient, got one with requires_grad=True; detach it"
            )
    check_table_pair(cos_name, cos, sin_name, sin, name, x.shape[-1])


def check_heads(num_heads_q: int | None, heads: int) -> tuple[int, int]:
    """Heads of q, and of q and k together, of packed `[..., heads_q + 2 heads_kv, head_dim]`."""
    if isinstance(num_heads_q, bool) or not isinstance(num_heads_q, (int, torch.SymInt)):
        raise TypeError(
            f"num_heads_q: expected an int for qkv of 4 dimensions, got {num_heads_q!r}; it says which heads are q's"
        )
    if not 0 < num_heads_q < heads or (heads - num_heads_q) % 2:
        raise ValueError(
            f"num_heads_q: expected a number that leaves an even number of the {heads} heads for k and v, "
            f"got {num_heads_q}"
        )
    return num_heads_q, num_heads_q + (heads - num_heads_q) // 2


def resolve_offsets(offsets: int | Tensor, batch: int, device: torch.device, of: str) -> tuple[int, Tensor | None]:
    """The offset of all sequences, and those of each."""
    if isinstance(offsets, Tensor):
        check_lengths("seqlen_offsets", offsets, batch, device, "one offset for each sequence", of)
        return 0, offsets
    if isinstance(offsets, bool) or not isinstance(offsets, (int, torch.SymInt)):
        raise TypeError(f"seqlen_offsets: expected an int or an integer tensor, got {offsets!r}")
    if known(offsets < 0):
        raise ValueError(f"seqlen_offsets: expected at least 0, got {offsets}; it is the position of the first row")
    return offsets, None


def check_max_seqlen(max_seqlen: int | None) -> None:
    if max_seqlen is None:
        return
    if isinstance(max_seqlen, bool) or not isinstance(max_seqlen, (int, torch.SymInt)):
        raise TypeError(f"max_seqlen: expected an int, got {max_seqlen!r}; leave it out if it is not known")
    if known(max_seqlen < 0):
        raise ValueError(f"max_seqlen: expected at least 0, got {max_seqlen}; it is the longest sequence")


def check_positions(
    position_ids: Tensor,
    name: str,
    x: Tensor,
    offsets: int | Tensor,
    cu_seqlens: Tensor | None,
    max_seqlen: int | None,
) -> None:
    """Checks type, shape and device of a position for each row, and that nothing else says where rows are."""
    check_tensors(position_ids=position_ids)
    if position_ids.dtype not in INDEX_DTYPES:
        raise TypeError(f"position_ids: expected dtype int32 or int64, got {position_ids.dtype}; cast it")
    check_device("position_ids", position_ids, x.device, name)
    others = (("seqlen_offsets", offsets if isinstance(offsets, Tensor) or not known(offsets == 0) else None),)
    for other, given in (*others, ("cu_seqlens", cu_seqlens), ("max_seqlen", max_seqlen)):
        if given is not None:
            raise ValueError(f"{other}: expected none beside position_ids, got a value; add it to position_ids")
    rows = tuple(x.shape[:-2])
    found = tuple(position_ids.shape)
    alike = len(found) == len(rows) == 2 and known(found[0] == 1)
    if differ(found[alike:], rows[alike:]):
        also = f" or {(1, rows[1])}" if len(rows) == 2 else ""
        raise ValueError(
            f"position_ids: expected shape {rows}{also}, a position for each row of {name}, got {found}; reshape it"
        )


def check_sequences(cu_seqlens: Tensor, device: torch.device, of: str) -> int:
    """Checks cumulative lengths; returns the number of sequences."""
    check_tensors(cu_seqlens=cu_seqlens)
    if cu_seqlens.dim() != 1 or cu_seqlens.shape[0] < 1:
        raise ValueError(f"cu_seqlens: expected shape (batch + 1,), got {tuple(cu_seqlens.shape)}")
    check_lengths("cu_seqlens", cu_seqlens, cu_seqlens.shape[0], device, "batch + 1 cumulative lengths", of)
    return cu_seqlens.shape[0] - 1


def check_table_length(cos: Tensor, rows: int, offset: int, remedy: str) -> None:
    if exceeds(rows + offset, cos.shape[0]):
        raise ValueError(
            f"cos: expected at least {rows + offset} positions, {rows} rows from position {offset} on, "
            f"got {cos.shape[0]}; {remedy}"
        )


def check_values(rotation: Rotation, spec: RotarySpec) -> None:
    """Checks positions against the table: always on a CPU, on a GPU with FLASHTILE_CHECK_VALUES=1."""
    offsets, cu_seqlens, position_ids = rotation.offsets, rotation.cu_seqlens, rotation.position_ids
    given = next((each for each in (position_ids, cu_seqlens, offsets) if each is not None), None)
    if given is None or not readable(given) or not rotation.x.numel():
        return
    if cu_seqlens is not None:
        _check_cumulative(cu_seqlens, rotation.x.shape[0])
        if cu_seqlens.shape[0] == 1:
            return
    if offsets is not None and offsets.numel() and int(offsets.min()) < 0:
        raise ValueError(f"seqlen_offsets: expected offsets of at least 0, got {int(offsets.min())}")
    if position_ids is not None and int(position_ids.min()) < 0:
        raise ValueError(f"position_ids: expected positions of at least 0, got {int(position_ids.min())}")
    farthest = int(positions(rotation, spec).max())
    if farthest >= rotation.cos.shape[0]:
        raise ValueError(
            f"cos: expected at least {farthest + 1} positions, the farthest that a row has, got "
            f"{rotation.cos.shape[0]}; make the table longer"
        )


def _check_cumulative(cu_seqlens: Tensor, total: int) -> None:
    if int(cu_seqlens[0]) != 0:
        raise ValueError(f"cu_seqlens: expected to start at 0, got {int(cu_seqlens[0])}; prepend 0")
    if (cu_seqlens.diff() < 0).any():
        raise ValueError("cu_seqlens: expected cumulative lengths that never decrease, got some that do; sort them")
    if int(cu_seqlens[-1]) > total:
        raise ValueError(
            f"cu_seqlens: expected its last value to be at most the rows of x, {total}, got {int(cu_seqlens[-1])}"
        )
