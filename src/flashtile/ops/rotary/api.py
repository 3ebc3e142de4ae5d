"""The public rotary functions: what a user calls. They check, build the spec, and hand on to the operator."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NoReturn

from torch import Tensor

from flashtile.ops.common import dtensor
from flashtile.ops.common.backends import standard_backends
from flashtile.ops.common.other_names import refuse_other_names
from flashtile.ops.common.sizes import known
from flashtile.ops.rotary import checks
from flashtile.ops.rotary.operator import run_rotary
from flashtile.ops.rotary.spec import RotarySpec, Rotation

_BACKENDS = standard_backends("rotary")

_DENSE = ("batch", "seq", "heads", "head_dim")
_PACKED = ("total", "heads", "head_dim")


def apply_rotary(
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
    interleaved: bool = False,
    inplace: bool = False,
    seqlen_offsets: int | Tensor = 0,
    cu_seqlens: Tensor | None = None,
    max_seqlen: int | None = None,
    conjugate: bool = False,
    *,
    position_ids: Tensor | None = None,
    backend: str = "auto",
    **other_names: NoReturn,
) -> Tensor:
    """Rotary position embedding: rotates pairs of elements of each head by an angle that grows with the position.

    ::

        (a, b)  ->  (a · cos - b · sin,  a · sin + b · cos)

    Differentiable in x. The arithmetic is float32 (float64 for float64), whatever the dtypes of x and the tables are.

    Args:
        x: `[batch, seq, heads, head_dim]`, or `[total, heads, head_dim]` with cu_seqlens or position_ids `[total]`;
            float16, bfloat16, float32, or float64 (CPU and reference only). Any strides.
        cos: `[positions, rotary_dim / 2]` in any of these dtypes, from `rotary_tables`. Elements from rotary_dim on
            stay as they are. No gradient flows to it.
        sin: the same.
        interleaved: pairs are `(x[2i], x[2i + 1])`, else `(x[i], x[i + rotary_dim / 2])`.
        inplace: write to x, and return it.
        seqlen_offsets: position of the first row: an int for all sequences, or `[batch]` int32 or int64, one for each.
        cu_seqlens: `[batch + 1]` int32 or int64: sequence `b` has the rows from `cu_seqlens[b]` to `cu_seqlens[b + 1]`.
            Rows past the last one belong to no sequence and stay as they are.
        max_seqlen: length of the longest of these sequences, for the check of the tables' length.
        conjugate: rotate in the opposite direction, which undoes the rotation.
        position_ids: a position for each row, int32 or int64 `[batch, seq]` or `[1, seq]`; of x `[total, heads,
            head_dim]` it is `[total]`. They say all about positions: not together with seqlen_offsets, cu_seqlens and
            max_seqlen.
        backend: "auto" chooses by device; "triton", "cpu" or "reference" run that backend or raise.

    Returns:
        The rotated x, in its shape and dtype.

    Raises:
        TypeError: a dtype or an argument's type is wrong.
        ValueError: a shape, a device or a value is wrong, the tables are too short, or the named backend cannot serve
            the call. Positions that depend on values in tensors are always checked on a CPU, and on a GPU only with the
            environment variable `FLASHTILE_CHECK_VALUES=1`; without the check, a row past the table is not rotated.

    Reference:
        Su et al., "RoFormer: Enhanced Transformer with Rotary Position Embedding" (2021).
    """
    if other_names:
        refuse_other_names(apply_rotary, other_names)
    layout = _layout(cu_seqlens, position_ids)
    checks.check_input("x", x, layout)
    if dtensor.present(x, cos, sin):
        call = partial(
            apply_rotary, interleaved=interleaved, max_seqlen=max_seqlen, conjugate=conjugate, backend=backend
        )
        return _sharded(call, x, "bsh.", inplace, seqlen_offsets, (cos, sin, None, None), cu_seqlens, position_ids)
    heads = x.shape[-2]
    return _rotate(
        "x", x, (cos, sin, None, None), heads, heads, interleaved, inplace, seqlen_offsets, cu_seqlens, max_seqlen,
        position_ids, conjugate, backend,
    )  # fmt: skip


def apply_rotary_qkv(
    qkv: Tensor,
    cos: Tensor,
    sin: Tensor,
    cos_k: Tensor | None = None,
    sin_k: Tensor | None = None,
    interleaved: bool = False,
    inplace: bool = False,
    seqlen_offsets: int | Tensor = 0,
    num_heads_q: int | None = None,
    cu_seqlens: Tensor | None = None,
    max_seqlen: int | None = None,
    *,
    position_ids: Tensor | None = None,
    backend: str = "auto",
    **other_names: NoReturn,
) -> Tensor:
    """Rotates the queries and keys of packed qkv in one launch. The values stay as they are.

    Args:
        qkv: `[batch, seq, 3, heads, head_dim]`, or `[batch, seq, heads_q + 2 heads_kv, head_dim]` with num_heads_q;
            with cu_seqlens or position_ids `[total]`: `[total, ...]`.
        cos: tables for the queries, and without cos_k also for the keys; see `apply_rotary`.
        sin: the same.
        cos_k: tables for the keys, if they differ (xPos).
        sin_k: the same.
        interleaved: which elements form a pair; see `apply_rotary`.
        inplace: write to qkv, and return it.
        seqlen_offsets: position of the first row; see `apply_rotary`.
        num_heads_q: heads of q, for the second layout.
        cu_seqlens: where packed sequences begin; see `apply_rotary`.
        max_seqlen: length of the longest of them.
        position_ids: a position for each row; see `apply_rotary`.
        backend: as for `apply_rotary`.

    Returns:
        qkv in its shape and dtype, rotated.

    Raises:
        TypeError, ValueError: as `apply_rotary`.
    """
    if other_names:
        refuse_other_names(apply_rotary_qkv, other_names)
    checks.check_tensors(qkv=qkv)
    layout = _layout(cu_seqlens, position_ids)
    rows = len(layout) - 2
    apart = qkv.dim() == rows + 3 and qkv.shape[rows] == 3
    if not apart:
        checks.check_input("qkv", qkv, (*layout[:-2], "heads_q + 2 heads_kv", "head_dim"))
    if dtensor.present(qkv, cos, sin, cos_k, sin_k):
        call = partial(
            apply_rotary_qkv, interleaved=interleaved, num_heads_q=num_heads_q, max_seqlen=max_seqlen, backend=backend
        )
        letters, tables = "bs.h." if apart else "bs..", (cos, sin, cos_k, sin_k)
        return _sharded(call, qkv, letters, inplace, seqlen_offsets, tables, cu_seqlens, position_ids)
    if apart:
        if num_heads_q not in (None, qkv.shape[-2]):
            raise ValueError(
                f"num_heads_q: expected None for qkv {tuple(qkv.shape)}, where q, k and v are apart, got "
                f"{num_heads_q!r}; it belongs to heads in one dimension, [..., heads_q + 2 heads_kv, head_dim]"
            )
        heads_q, heads_rotated, flat = qkv.shape[-2], 2 * qkv.shape[-2], _merge_heads("qkv", qkv, inplace)
    else:
        heads_q, heads_rotated = checks.check_heads(num_heads_q, qkv.shape[-2])
        flat = qkv
    if cos_k is None and sin_k is None:
        heads_q = heads_rotated
    rotated = _rotate(
        "qkv", flat, (cos, sin, cos_k, sin_k), heads_q, heads_rotated, interleaved, inplace, seqlen_offsets, cu_seqlens,
        max_seqlen, position_ids, False, backend,
    )  # fmt: skip
    return qkv if inplace else rotated.view(qkv.shape)


def apply_rotary_kv(
    kv: Tensor,
    cos: Tensor,
    sin: Tensor,
    interleaved: bool = False,
    inplace: bool = False,
    seqlen_offsets: int | Tensor = 0,
    cu_seqlens: Tensor | None = None,
    max_seqlen: int | None = None,
    *,
    position_ids: Tensor | None = None,
    backend: str = "auto",
    **other_names: NoReturn,
) -> Tensor:
    """Rotates the keys of packed kv in one launch. The values stay as they are.

    Args:
        kv: `[batch, seq, 2, heads, head_dim]`, or `[total, 2, heads, head_dim]` with cu_seqlens or position_ids
            `[total]`.
        cos: tables for the keys; see `apply_rotary`.
        sin: the same.
        interleaved: which elements form a pair; see `apply_rotary`.
        inplace: write to kv, and return it.
        seqlen_offsets: position of the first row; see `apply_rotary`.
        cu_seqlens: where packed sequences begin; see `apply_rotary`.
        max_seqlen: length of the longest of them.
        position_ids: a position for each row; see `apply_rotary`.
        backend: as for `apply_rotary`.

    Returns:
        kv in its shape and dtype, rotated.

    Raises:
        TypeError, ValueError: as `apply_rotary`.
    """
    if other_names:
        refuse_other_names(apply_rotary_kv, other_names)
    layout = (*_layout(cu_seqlens, position_ids)[:-2], "2", "heads", "head_dim")
    checks.check_input("kv", kv, layout)
    if kv.shape[-3] != 2:
        raise ValueError(f"kv: expected [{', '.join(layout)}], got shape {tuple(kv.shape)}; stack k and v")
    if dtensor.present(kv, cos, sin):
        call = partial(apply_rotary_kv, interleaved=interleaved, max_seqlen=max_seqlen, backend=backend)
        return _sharded(call, kv, "bs.h.", inplace, seqlen_offsets, (cos, sin, None, None), cu_seqlens, position_ids)
    heads, flat = kv.shape[-2], _merge_heads("kv", kv, inplace)
    rotated = _rotate(
        "kv", flat, (cos, sin, None, None), heads, heads, interleaved, inplace, seqlen_offsets, cu_seqlens, max_seqlen,
        position_ids, False, backend,
    )  # fmt: skip
    return kv if inplace else rotated.view(kv.shape)


def _layout(cu_seqlens: Tensor | None, position_ids: Tensor | None) -> tuple[str, ...]:
    """The dimensions of x: tokens are in one where there are cumulative lengths, or positions `[total]`."""
    of_tokens = cu_seqlens is not None or (isinstance(position_ids, Tensor) and position_ids.dim() == 1)
    return _PACKED if of_tokens else _DENSE


def _sharded(
    call: Callable[..., Tensor],
    x: Tensor,
    letters: str,
    inplace: bool,
    seqlen_offsets: int | Tensor,
    tables: tuple[Tensor, Tensor, Tensor | None, Tensor | None],
    cu_seqlens: Tensor | None,
    position_ids: Tensor | None,
) -> Tensor:
    """A call with DTensors. Rows are sharded only if each has its position. `letters`: the dimensions of dense x."""
    checks.raise_not_bool(inplace=inplace)
    packed = _layout(cu_seqlens, position_ids) is _PACKED
    letters = letters[packed:]
    if position_ids is None:
        letters = letters.replace("s", ".")
    operands: dict[str, tuple[Tensor | None, str]] = {
        name: (table, "..") for name, table in zip(("cos", "sin", "cos_k", "sin_k"), tables)
    }
    operands["seqlen_offsets"] = seqlen_offsets if isinstance(seqlen_offsets, Tensor) else None, "." if packed else "b"
    operands |= {"cu_seqlens": (cu_seqlens, "."), "position_ids": (position_ids, "bs"[packed:])}

    def function(division: dtensor.Division, x: Tensor, *others: Tensor | None) -> Tensor:
        given = {name: part for name, part in zip(operands, others) if part is not None}
        return call(x, **{"seqlen_offsets": seqlen_offsets, **given})

    rotated = dtensor.call(function, {"x": (x, letters), **operands}, letters, ("cos", "sin", "cos_k", "sin_k"))
    return x.copy_(rotated) if inplace else rotated


def _merge_heads(name: str, packed: Tensor, inplace: bool) -> Tensor:
    """`[..., parts, heads, head_dim]` as `[..., parts · heads, head_dim]`."""
    checks.raise_not_bool(inplace=inplace)
    if inplace and packed.shape[-3] > 1 and packed.stride(-3) != packed.shape[-2] * packed.stride(-2):
        raise ValueError(
            f"{name}: expected heads that follow one another in memory for inplace=True, got strides "
            f"{packed.stride()}; leave inplace out, or make it contiguous"
        )
    return packed.flatten(-3, -2)


def _rotate(
    name: str,
    x: Tensor,
    tables: tuple[Tensor, Tensor, Tensor | None, Tensor | None],
    heads_q: int,
    heads_rotated: int,
    interleaved: bool,
    inplace: bool,
    seqlen_offsets: int | Tensor,
    cu_seqlens: Tensor | None,
    max_seqlen: int | None,
    position_ids: Tensor | None,
    conjugate: bool,
    backend: str,
) -> Tensor:
    _BACKENDS.check(backend)
    checks.raise_not_bool(interleaved=interleaved, inplace=inplace, conjugate=conjugate)
    if inplace:
        checks.check_inplace(name, x)
    cos, sin, cos_k, sin_k = tables
    checks.check_tables(name, x, cos, sin)
    if (cos_k is None) is not (sin_k is None):
        raise ValueError("cos_k, sin_k: expected both or neither, got one; pass the pair of tables of the keys")
    if cos_k is not None and sin_k is not None:
        checks.check_tables(name, x, cos_k, sin_k, "_k")
        if cos_k.shape != cos.shape or cos_k.dtype is not cos.dtype:
            raise ValueError(
                f"cos_k: expected the shape and dtype of cos, {tuple(cos.shape)} {cos.dtype}, "
                f"got {tuple(cos_k.shape)} {cos_k.dtype}"
            )
    offset, offsets = 0, None
    if position_ids is None:
        batch = x.shape[0] if cu_seqlens is None else checks.check_sequences(cu_seqlens, x.device, name)
        offset, offsets = checks.resolve_offsets(seqlen_offsets, batch, x.device, name)
        checks.check_max_seqlen(max_seqlen)
        longest = x.shape[1] if cu_seqlens is None else max_seqlen
        if longest is not None and not known(x.numel() == 0):
            checks.check_table_length(cos, longest, offset, "make the table longer")
    else:
        checks.check_positions(position_ids, name, x, seqlen_offsets, cu_seqlens, max_seqlen)
    spec = RotarySpec(interleaved, conjugate, heads_q, heads_rotated, offset)
    return run_rotary(Rotation(x, cos, sin, cos_k, sin_k, offsets, cu_seqlens, position_ids), spec, inplace, backend)
