"""The public rotary functions, which check a call, and its operators."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any, NoReturn

import torch
from torch import Tensor

from flashtile.ops.common import checks, dispatch, dtensor
from flashtile.ops.common.backends import standard_backends
from flashtile.ops.common.memory import check_writable
from flashtile.ops.common.operators import Differentiable, OnBackend, operator
from flashtile.ops.common.other_names import refuse_other_names
from flashtile.ops.common.repeated import call_table
from flashtile.ops.common.rows import last_contiguous
from flashtile.ops.common.sizes import exporting, known
from flashtile.ops.rotary import spec as reference
from flashtile.ops.rotary import tables
from flashtile.ops.rotary.spec import RotarySpec, Rotation, positions

_BACKENDS = standard_backends("rotary")
_CALLS = call_table()

_DENSE = ("batch", "seq", "heads", "head_dim")
_PACKED = ("total", "heads", "head_dim")


def apply_rotary(
    x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False, inplace: bool = False,
    seqlen_offsets: int | Tensor = 0, cu_seqlens: Tensor | None = None, max_seqlen: int | None = None,
    conjugate: bool = False, *, position_ids: Tensor | None = None, backend: str = "auto", **other_names: NoReturn,
) -> Tensor:  # fmt: skip
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
    where, flags = (seqlen_offsets, cu_seqlens, max_seqlen, position_ids), (interleaved, inplace, conjugate)
    call = _call((x, cos, sin, None, None), where, (backend, "x", *flags))
    repeated = _CALLS.run(*call)
    if repeated is not None:
        return repeated
    layout = _layout(cu_seqlens, position_ids)
    _check_input("x", x, layout)
    if dtensor.present(x, cos, sin):
        function = partial(
            apply_rotary, interleaved=interleaved, max_seqlen=max_seqlen, conjugate=conjugate, backend=backend
        )
        return _sharded(function, call[0], "bsh.", inplace, seqlen_offsets)
    return _rotate(call, x, (x.shape[-2], x.shape[-2]), flags, where)


def apply_rotary_qkv(
    qkv: Tensor, cos: Tensor, sin: Tensor, cos_k: Tensor | None = None, sin_k: Tensor | None = None,
    interleaved: bool = False, inplace: bool = False, seqlen_offsets: int | Tensor = 0, num_heads_q: int | None = None,
    cu_seqlens: Tensor | None = None, max_seqlen: int | None = None, *, position_ids: Tensor | None = None,
    backend: str = "auto", **other_names: NoReturn,
) -> Tensor:  # fmt: skip
    """Rotates the queries and keys of packed qkv in one launch. The values stay as they are.

    Args:
        qkv: `[batch, seq, 3, heads, head_dim]`, or `[batch, seq, heads_q + 2 heads_kv, head_dim]` with num_heads_q;
            with cu_seqlens or position_ids `[total]`: `[total, ...]`.
        cos, sin: tables for the queries, and without cos_k also for the keys.
        cos_k, sin_k: tables for the keys, if they differ (xPos).
        inplace: write to qkv, and return it.
        num_heads_q: heads of q, for the second layout.

    The other arguments, and errors, are those of `apply_rotary`.

    Returns:
        qkv in its shape and dtype, rotated.
    """
    if other_names:
        refuse_other_names(apply_rotary_qkv, other_names)
    where, flags = (seqlen_offsets, cu_seqlens, max_seqlen, position_ids), (interleaved, inplace, False)
    call = _call((qkv, cos, sin, cos_k, sin_k), where, (backend, "qkv", *flags, num_heads_q))
    repeated = _CALLS.run(*call)
    if repeated is not None:
        return repeated
    checks.check_tensors(qkv=qkv)
    layout = _layout(cu_seqlens, position_ids)
    rows = len(layout) - 2
    apart = qkv.dim() == rows + 3 and qkv.shape[rows] == 3
    if not apart:
        _check_input("qkv", qkv, (*layout[:-2], "heads_q + 2 heads_kv", "head_dim"))
    if dtensor.present(qkv, cos, sin, cos_k, sin_k):
        function = partial(
            apply_rotary_qkv, interleaved=interleaved, num_heads_q=num_heads_q, max_seqlen=max_seqlen, backend=backend
        )
        return _sharded(function, call[0], "bs.h." if apart else "bs..", inplace, seqlen_offsets)
    if apart:
        if num_heads_q not in (None, qkv.shape[-2]):
            raise ValueError(
                f"num_heads_q: expected None for qkv {tuple(qkv.shape)}, where q, k and v are apart, got "
                f"{num_heads_q!r}; it belongs to heads in one dimension, [..., heads_q + 2 heads_kv, head_dim]"
            )
        heads_q, heads_rotated, flat = qkv.shape[-2], 2 * qkv.shape[-2], _merge_heads("qkv", qkv, inplace)
    else:
        heads_q, heads_rotated = _check_heads(num_heads_q, qkv.shape[-2])
        flat = qkv
    if cos_k is None and sin_k is None:
        heads_q = heads_rotated
    rotated = _rotate(call, flat, (heads_q, heads_rotated), flags, where)
    return qkv if inplace else rotated.view(qkv.shape)


def apply_rotary_kv(
    kv: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False, inplace: bool = False,
    seqlen_offsets: int | Tensor = 0, cu_seqlens: Tensor | None = None, max_seqlen: int | None = None, *,
    position_ids: Tensor | None = None, backend: str = "auto", **other_names: NoReturn,
) -> Tensor:  # fmt: skip
    """Rotates the keys of packed kv in one launch. The values stay as they are.

    Args:
        kv: `[batch, seq, 2, heads, head_dim]`, or `[total, 2, heads, head_dim]` with cu_seqlens or position_ids
            `[total]`.
        cos, sin: tables for the keys.
        inplace: write to kv, and return it.

    The other arguments, and errors, are those of `apply_rotary`.

    Returns:
        kv in its shape and dtype, rotated.
    """
    if other_names:
        refuse_other_names(apply_rotary_kv, other_names)
    where, flags = (seqlen_offsets, cu_seqlens, max_seqlen, position_ids), (interleaved, inplace, False)
    call = _call((kv, cos, sin, None, None), where, (backend, "kv", *flags))
    repeated = _CALLS.run(*call)
    if repeated is not None:
        return repeated
    layout = (*_layout(cu_seqlens, position_ids)[:-2], "2", "heads", "head_dim")
    _check_input("kv", kv, layout)
    if kv.shape[-3] != 2:
        raise ValueError(f"kv: expected [{', '.join(layout)}], got shape {tuple(kv.shape)}; stack k and v")
    if dtensor.present(kv, cos, sin):
        function = partial(apply_rotary_kv, interleaved=interleaved, max_seqlen=max_seqlen, backend=backend)
        return _sharded(function, call[0], "bs.h.", inplace, seqlen_offsets)
    heads, flat = kv.shape[-2], _merge_heads("kv", kv, inplace)
    rotated = _rotate(call, flat, (heads, heads), flags, where)
    return kv if inplace else rotated.view(kv.shape)


def _layout(cu_seqlens: Tensor | None, position_ids: Tensor | None) -> tuple[str, ...]:
    """The dimensions of x: tokens are in one where there are cumulative lengths, or positions `[total]`."""
    by_token = cu_seqlens is not None or (isinstance(position_ids, Tensor) and position_ids.dim() == 1)
    return _PACKED if by_token else _DENSE


def _sharded(
    call: Callable[..., Tensor], given: Rotation, letters: str, inplace: bool, seqlen_offsets: int | Tensor
) -> Tensor:
    """A call with DTensors. Rows are sharded only if each has its position. `letters`: the dimensions of dense x."""
    checks.raise_not_bool(inplace=inplace)
    x, *angles, offsets, cu_seqlens, position_ids = given
    packed = _layout(cu_seqlens, position_ids) is _PACKED
    letters = letters[packed:]
    if position_ids is None:
        letters = letters.replace("s", ".")
    operands: dict[str, tuple[Tensor | None, str]] = {
        name: (table, "..") for name, table in zip(("cos", "sin", "cos_k", "sin_k"), angles)
    }
    operands["seqlen_offsets"] = offsets, "." if packed else "b"
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


#: seqlen_offsets, cu_seqlens, max_seqlen and position_ids.
_Where = tuple["int | Tensor", "Tensor | None", "int | None", "Tensor | None"]
#: The tensors of a call, and its other arguments: the backend, the name of the first tensor, and more.
_Call = tuple[Rotation, tuple[Any, ...]]


def _call(tensors: Sequence[Any], where: _Where, scalars: tuple[Any, ...]) -> _Call:
    """The key that a call is looked up by. `tensors`: x and the tables."""
    offsets, cu_seqlens, max_seqlen, position_ids = where
    of_sequences = offsets if isinstance(offsets, Tensor) else None
    offset = offsets if of_sequences is None else None
    return Rotation._make((*tensors, of_sequences, cu_seqlens, position_ids)), (*scalars, offset, max_seqlen)


def _rotate(call: _Call, x: Tensor, heads: tuple[int, int], flags: tuple[bool, bool, bool], where: _Where) -> Tensor:
    """Checks and runs a call. `x`: the first tensor with heads in one dimension; `heads`: of q, and those that are
    rotated; `flags`: interleaved, inplace and conjugate."""
    given, (backend, name, *_) = call
    _BACKENDS.check(backend)
    (interleaved, inplace, conjugate), (seqlen_offsets, cu_seqlens, max_seqlen, position_ids) = flags, where
    checks.raise_not_bool(interleaved=interleaved, inplace=inplace, conjugate=conjugate)
    if inplace:
        check_writable(name, x, "leave inplace out")
    _, cos, sin, cos_k, sin_k, *_ = given
    checks.check_tables("cos", cos, "sin", sin, name, x)
    if (cos_k is None) is not (sin_k is None):
        raise ValueError("cos_k, sin_k: expected both or neither, got one; pass the pair of tables of the keys")
    if cos_k is not None and sin_k is not None:
        checks.check_tables("cos_k", cos_k, "sin_k", sin_k, name, x)
        if cos_k.shape != cos.shape or cos_k.dtype is not cos.dtype:
            raise ValueError(
                f"cos_k: expected the shape and dtype of cos, {tuple(cos.shape)} {cos.dtype}, "
                f"got {tuple(cos_k.shape)} {cos_k.dtype}"
            )
    for table_name, table in zip(Rotation._fields[1:5], given[1:5]):
        if table is not None:
            checks.check_wants_no_gradient(table_name, table, "table")
    offset, offsets = 0, None
    if position_ids is None:
        batch = (
            x.shape[0]
            if cu_seqlens is None
            else checks.check_cu_seqlens("cu_seqlens", cu_seqlens, x.device, of=name) - 1
        )
        offset, offsets = _resolve_offsets(seqlen_offsets, batch, x.device, name)
        checks.check_max_seqlen("max_seqlen", max_seqlen)
        longest = x.shape[1] if cu_seqlens is None else max_seqlen
        if longest is not None and not known(x.numel() == 0):
            tables.check_table_length(cos, longest, offset, "make the table longer")
    else:
        tables.check_positions(position_ids, name, x, seqlen_offsets, cu_seqlens, max_seqlen)
    spec = RotarySpec(interleaved, conjugate, *heads, offset)
    rotation = given._replace(x=x, offsets=offsets)
    repeated = None if inplace else _rotated.repeat(given, rotation, spec, backend)
    if repeated is not None and (kept := _CALLS.keep_call(*call, repeated)):
        return repeated(kept)
    return _run(rotation, spec, inplace, backend)


def _check_input(name: str, x: Tensor, layout: tuple[str, ...]) -> None:
    checks.check_input(name, x, f"({', '.join(layout)})", "reshape it", 0)
    if x.dim() != len(layout):
        raise ValueError(
            f"{name}: expected {len(layout)} dimensions [{', '.join(layout)}], got shape {tuple(x.shape)}; "
            "packed sequences go with cu_seqlens, a dense batch without"
        )


def _check_heads(num_heads_q: int | None, heads: int) -> tuple[int, int]:
    """Heads of q, and of q and k together, of packed `[..., heads_q + 2 heads_kv, head_dim]`."""
    if num_heads_q is None or not checks.is_integer(num_heads_q):
        raise TypeError(
            f"num_heads_q: expected an int for qkv of 4 dimensions, got {num_heads_q!r}; it says which heads are q's"
        )
    if not 0 < num_heads_q < heads or (heads - num_heads_q) % 2:
        raise ValueError(
            f"num_heads_q: expected a number that leaves an even number of the {heads} heads for k and v, "
            f"got {num_heads_q}"
        )
    return num_heads_q, num_heads_q + (heads - num_heads_q) // 2


def _resolve_offsets(offsets: int | Tensor, batch: int, device: torch.device, of: str) -> tuple[int, Tensor | None]:
    """The offset of all sequences, and those of each."""
    if isinstance(offsets, Tensor):
        checks.check_lengths("seqlen_offsets", offsets, batch, device, "one offset for each sequence", of)
        return 0, offsets
    if not checks.is_integer(offsets):
        raise TypeError(f"seqlen_offsets: expected an int or an integer tensor, got {offsets!r}")
    if known(offsets < 0):
        raise ValueError(f"seqlen_offsets: expected at least 0, got {offsets}; it is the position of the first row")
    return offsets, None


def _check_values(rotation: Rotation, spec: RotarySpec) -> None:
    """Checks positions against the table: always on a CPU, on a GPU with FLASHTILE_CHECK_VALUES=1."""
    offsets, cu_seqlens, position_ids = rotation.offsets, rotation.cu_seqlens, rotation.position_ids
    given = next((each for each in (position_ids, cu_seqlens, offsets) if each is not None), None)
    if given is None or not checks.readable(given) or not rotation.x.numel():
        return
    if cu_seqlens is not None:
        checks.check_cu_seqlens_values("cu_seqlens", cu_seqlens, rotation.x.shape[0])
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


# --- operators -------------------------------------------------------------------------------------------------------


def _dtype(rotation: Rotation, spec: RotarySpec) -> torch.dtype:
    return torch.float64 if torch.float64 in (rotation.x.dtype, rotation.cos.dtype) else rotation.x.dtype


def _on_backend(**more: Any) -> OnBackend:
    """What runs the operators."""
    return OnBackend(
        _BACKENDS, "forward", dtype=_dtype, arrange=last_contiguous, check=_check_values,
        checked=lambda rotation: (rotation.offsets, rotation.cu_seqlens, rotation.position_ids), **more,
    )  # fmt: skip


_rotary = operator(
    "rotary",
    Rotation,
    (RotarySpec,),
    Tensor,
    run=_on_backend(),
    fake=lambda rotation, spec: rotation.x.new_empty(rotation.x.shape),
    decomposition=reference.rotate,
)  # fmt: skip


def _rotate_by_formula(rotation: Rotation, spec: RotarySpec) -> Tensor:
    """In PyTorch's operations; of several gradients at a time by the operator, which PyTorch calls for one after
    another."""
    if dispatch.batched(rotation.x):
        return _rotary.overload(*rotation, *spec, "auto")
    return reference.rotate(rotation, spec)


_rotary_inplace = operator("rotary_", Rotation, (RotarySpec,), None, run=_on_backend(written="x"), writes="x").call
#: The backward is the rotation the other way.
_rotated = Differentiable(
    _rotary,
    _rotary,
    SimpleNamespace(forward=reference.rotate, backward=_rotate_by_formula),
    save=lambda rotation, out, spec, ctx: (rotation[1:], (spec._replace(conjugate=not spec.conjugate),)),
)


def _run(rotation: Rotation, spec: RotarySpec, inplace: bool, backend: str) -> Tensor:
    """Runs the operator, recorded by autograd where a gradient is wanted. Returns the rotated x."""
    if not inplace:
        return _rotated(rotation, spec, backend)
    x = rotation.x
    recorded = torch.is_grad_enabled() and x.requires_grad
    if dispatch.transformed() or exporting() or (recorded and torch.compiler.is_compiling()):
        # The compiler turns the copy into a write to x, and knows its derivative. An exported program may have to run
        # without flashtile, and only the operator that writes nothing in place is one of PyTorch's others.
        return x.copy_(_rotated(rotation, spec, backend))
    return _apply(rotation, spec, backend, *rotation) if recorded else _rotary_inplace(rotation, spec, backend)


class _RotaryInplace(torch.autograd.Function):
    """The rotation in place, recorded for a backward."""

    @staticmethod
    def forward(ctx, rotation, spec, backend, x, *tables):
        ctx.save_for_backward(*tables)
        ctx.scalars = spec._replace(conjugate=not spec.conjugate), backend
        ctx.mark_dirty(x)
        return _rotary_inplace(rotation, spec, backend)

    @staticmethod
    def backward(ctx, dout):
        (spec, backend), tables = ctx.scalars, ctx.saved_tensors  # read once, as activation checkpointing asks for
        run = _rotate_by_formula if dispatch.batched(dout) else partial(_rotated, backend=backend)
        dx = run(Rotation(dout, *tables), spec)
        return None, None, None, dx, *(None,) * len(tables)


_apply = dispatch.direct_apply(_RotaryInplace)
