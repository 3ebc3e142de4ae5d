"""A score function as side inputs and spec of a call: as the arguments that say the same, and as a program."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from flashtile.ops.attention.score_parts import Parts, Slopes, Table, parts_of
from flashtile.ops.attention.score_program import INPUTS, LOAD, UNCHANGED, ScoreFunction, apply, parse
from flashtile.ops.attention.score_tracing import derivative, dtype_of_scores, resolve_score_mod
from flashtile.ops.attention.spec import AttentionSpec, SideInputs, out_dtype
from flashtile.ops.common.sizes import known

_HEAD = INPUTS[2]


def add_score_mod(
    side: SideInputs, spec: AttentionSpec, q: Tensor, score_mod: Callable[..., Any] | ScoreFunction
) -> tuple[SideInputs, AttentionSpec]:
    """Side inputs and spec of a call with a score function, whose other arguments they have already.

    Where a call can take all parts of the function that arguments say as well (`score_parts`), it takes them as these.
    Otherwise the function stays whole.
    """
    function = resolve_score_mod(score_mod, q)
    if torch.compiler.is_compiling():
        return add_program(side, spec, function)
    parts = parts_of(function.program, str(function.dtype).removeprefix("torch."))
    sizes = q.shape[0] if side.cu_seqlens_q is None else side.cu_seqlens_q.shape[0] - 1, q.shape[-2]
    if parts is None or not _taken_apart(parts, function, side, spec, q, sizes):
        return add_program(side, spec, function)
    if parts.softcap:
        spec = spec._replace(softcap=parts.softcap)
    if parts.slopes is not None:
        side = side._replace(alibi_slopes=_slopes(parts.slopes, function, q.device, sizes))
    if parts.bias is not None:
        side = side._replace(bias=_bias(parts.bias, function, side, sizes))
    rest = tuple(function.captured[number] for number in parts.captured)
    return add_program(side, spec, function._replace(program=parts.rest, captured=rest))


def add_program(side: SideInputs, spec: AttentionSpec, function: ScoreFunction) -> tuple[SideInputs, AttentionSpec]:
    """The same with the whole function as it is."""
    if function.program == UNCHANGED:
        return side, spec
    return side._replace(captured=function.captured), spec._replace(score_program=function.program)


def check_derivative(side: SideInputs, spec: AttentionSpec, q: Tensor, k: Tensor, v: Tensor) -> None:
    """Refuses a function that has no derivative where a backward will ask for it."""
    if spec.score_program is None or not torch.is_grad_enabled() or torch.compiler.is_compiling():
        return
    of_captured = any(tensor.requires_grad for tensor in side.captured)
    if of_captured or q.requires_grad or k.requires_grad or v.requires_grad:
        derivative(spec.score_program, dtype_of_scores(q), of_score_alone=not of_captured)


def _taken_apart(
    parts: Parts, function: ScoreFunction, side: SideInputs, spec: AttentionSpec, q: Tensor, sizes: tuple[int, int]
) -> bool:
    """Whether a call can take all parts: none of these arguments is given, and they mean what the function does.
    `sizes`: batch entries, or sequences, and heads."""
    if parts.softcap and spec.softcap:
        return False
    if parts.slopes is not None and (side.alibi_slopes is not None or not _is_alibi(parts.slopes, side, spec)):
        return False
    if parts.bias is None:
        return True
    return side.bias is None and side.cu_seqlens_q is None and _is_bias(parts.bias, function, side, q, sizes)


def _is_alibi(slopes: Slopes, side: SideInputs, spec: AttentionSpec) -> bool:
    """Whether the distance of a function is ALiBi's, which counts from the last query and key."""
    if side.cu_seqlens_q is None:
        same_lengths = known(side.max_seqlen_q == side.max_seqlen_k)
    else:
        same_lengths = side.cu_seqlens_q is side.cu_seqlens_k
    no_later_key = spec.window_right is not None and spec.window_right <= 0
    return same_lengths and (no_later_key or not slopes.below_diagonal)


def _is_bias(table: Table, function: ScoreFunction, side: SideInputs, q: Tensor, sizes: tuple[int, int]) -> bool:
    """Whether a tensor that a function reads can be a bias: of its dtypes, and with an entry for each index."""
    tensor = function.captured[table.captured]
    if tensor.dtype not in (out_dtype(q.dtype), function.dtype):
        return False
    needed = _sizes_by_index(side, sizes)
    return all(known(size >= needed[index]) for size, index in zip(tensor.shape, table.indices))


def _slopes(slopes: Slopes, function: ScoreFunction, device: torch.device, sizes: tuple[int, int]) -> Tensor:
    """`[heads]`, or `[batch, heads]`."""
    captured = [function.captured[number] for number in slopes.captured]
    batch, heads = sizes if slopes.by_batch else (1, sizes[1])
    program = parse(slopes.program)
    steps = [(step.operation, step.arguments) for step in program.steps]
    if steps == [(LOAD, (0, _HEAD))] and captured[0].shape == (heads,) and captured[0].dtype is function.dtype:
        return captured[0]
    of_batch = torch.arange(batch, dtype=torch.int32, device=device)[:, None]
    of_head = torch.arange(heads, dtype=torch.int32, device=device)[None]
    no_score = torch.zeros(batch, heads, dtype=function.dtype, device=device)
    inputs = dict(zip(INPUTS, (no_score, of_batch, of_head, of_batch, of_batch)))
    found = apply(program, inputs, captured).to(function.dtype)
    return found if slopes.by_batch else found[0]


def _bias(table: Table, function: ScoreFunction, side: SideInputs, sizes: tuple[int, int]) -> Tensor:
    """`[batch | 1, heads | 1, seq_q | 1, seq_k | 1]`, a view of the tensor."""
    needed = _sizes_by_index(side, sizes)
    order = sorted(range(len(table.indices)), key=lambda dimension: list(needed).index(table.indices[dimension]))
    found = function.captured[table.captured].permute(order)
    for dimension, (index, size) in enumerate(needed.items()):
        found = found.narrow(dimension, 0, size) if index in table.indices else found.unsqueeze(dimension)
    return found


def _sizes_by_index(side: SideInputs, sizes: tuple[int, int]) -> dict[str, int]:
    """How far each index of a function counts."""
    return dict(zip(INPUTS[1:], (*sizes, side.max_seqlen_q, side.max_seqlen_k)))
