"""Attention in parts: a rectangle of the scores of a larger call, and the backward from given results."""

from __future__ import annotations

import functools
from collections import OrderedDict
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from flashtile.ops.attention import checks
from flashtile.ops.attention.block_mask import BlockMask, from_bounds
from flashtile.ops.attention.operator import run_attention, run_backward
from flashtile.ops.attention.options import (
    DENSE_LAYOUT,
    PACKED_LAYOUT,
    AttentionOptions,
    PartOptions,
    Taken,
    add_scores,
    make_spec,
    option_names,
    resolve_dropout,
    resolve_lengths,
    take,
    with_options,
)
from flashtile.ops.attention.score_arguments import add_program
from flashtile.ops.attention.score_program import UNCHANGED, ScoreFunction, moved
from flashtile.ops.attention.score_tracing import resolve_score_mod
from flashtile.ops.attention.spec import (
    AttentionSpec,
    BackwardInputs,
    Gradients,
    Origin,
    SideInputs,
    Wanted,
    lse_dtype,
    lse_shape,
)
from flashtile.ops.attention.tile_lists import Bounds, Grid, Tiles
from flashtile.ops.common.checks import check_max_seqlen, check_tensors, raise_not_bool
from flashtile.ops.common.sizes import differ, exceeds, known

if TYPE_CHECKING:
    from typing_extensions import Unpack

_PART_NAMES, _BACKWARD_NAMES = option_names(PartOptions), option_names(AttentionOptions)


@dataclass(frozen=True)
class AttentionPart:
    """The rectangle of a larger call's scores that a call computes. Its q, k and v are slices of the larger call's.

    Attributes:
        row: number of the first query within its sequence.
        column: number of the first key.
        seq_q: queries of the whole sequence.
        seq_k: keys of the whole sequence.
        head: number of the first query head.
        heads: query heads of the larger call; None = as many as in this call.
        sequence: number of the first batch entry or packed sequence.
    """

    row: int
    column: int
    seq_q: int
    seq_k: int
    head: int = 0
    heads: int | None = None
    sequence: int = 0


@with_options(PartOptions)
def attention_part(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    part: AttentionPart,
    *,
    cu_seqlens: Tensor | None = None,
    max_seqlen: int | None = None,
    return_max_scores: bool = False,
    **options: Unpack[PartOptions],
) -> tuple[Tensor, ...]:
    """Attention of some queries to some keys of a larger call.

    Diagonal, window, dropout bits, ALiBi distances and key lengths are those of the larger call. Each weight is
    therefore that of the larger call, except that the softmax sums over the keys of this part. `logsumexp_merge` of
    parts that cover all keys gives the result of the larger call. Sinks are not an argument, because they belong to no
    key: merge a part with `out = 0` and `lse = sinks`. Differentiable in q, k, v, bias and alibi_slopes, also through
    `lse`.

    Args:
        q: `[batch, rows, heads_q, head_dim]`; with cu_seqlens `[total, heads_q, head_dim]`.
        k: `[batch, columns, heads_kv, head_dim]`, or packed.
        v: `[batch, columns, heads_kv, head_dim_v]`, or packed.
        part: where the tensors lie in the larger call.
        cu_seqlens: `[sequences + 1]`, for queries and keys alike: the part consists of whole packed sequences. Row and
            column of the part must then be 0, and its seq_q and seq_k are not used.
        max_seqlen: upper bound of their lengths, as for `attention_varlen`; None without cu_seqlens.
        return_max_scores: also return the largest score of each row, among the keys of this part.
        dropout_seed: required if dropout_p is not 0, and the same for all parts.
        key_lengths: `[batch]`, counted in the keys of the larger call.
        bias: the rectangle of the larger call's bias, broadcasts to `[batch, heads_q, rows, columns]`. The same holds
            for mask.
        alibi_slopes: `[heads_q]` or `[batch, heads_q]`, for the heads of this call.
        block_mask: of the larger call, whose rectangle is taken here. Taking it reads values on the host, once for each
            mask and rectangle.
        score_mod: of the larger call: its indices count there.

    The other arguments are those of `attention`.

    Returns:
        out `[batch, rows, heads_q, head_dim_v]`, the softmax over the keys of this part, and lse
        `[batch, heads_q, rows]`; packed `[total, heads_q, head_dim_v]` and `[heads_q, total]`. With `return_max_scores`
        also those, in the shape of lse.

    Raises:
        TypeError, ValueError: as `attention`, or the part does not lie in the larger call.

    Reference:
        Liu et al., "Ring Attention with Blockwise Transformers" (2023), section 3.
    """
    given = take(attention_part, options, _PART_NAMES)
    raise_not_bool(return_max_scores=return_max_scores)
    check_tensors(q=q, k=k, v=v)
    q, k, v = checks.autocast(q, k, v)
    side, spec = _described(q, k, v, part, cu_seqlens, max_seqlen, given)
    spec = spec._replace(returns_max_scores=return_max_scores)
    return run_attention(q, k, v, side, spec, given.backend)


@with_options(AttentionOptions)
def attention_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    part: AttentionPart | None = None,
    *,
    dlse: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    max_seqlen: int | None = None,
    cu_seqlens_k: Tensor | None = None,
    max_seqlen_k: int | None = None,
    **options: Unpack[AttentionOptions],
) -> Gradients:
    """The gradients of attention, computed from its results: what a call, or a part, adds to those of its inputs.

    With `delta = rowsum(dout · out) - dlse` and the weights `p = exp(score - lse)`::

        dv = pᵀ dout        dscore = p · (dout vᵀ - delta)        dq = scale · dscore k        dk = scale · dscoreᵀ q

    `out` and `lse` may cover more keys than k. The gradients of parts then add up to those of the whole. Autograd
    records nothing here.

    Args:
        dout: `[batch, rows, heads_q, head_dim_v]`, gradient of out.
        q: as for `attention`, or with `part` for `attention_part`, in the dtype in which that call ran: this function
            does not follow autocast.
        k: the same.
        v: the same.
        out: `[batch, rows, heads_q, head_dim_v]`, over all keys that lse covers.
        lse: `[batch, heads_q, rows]`, float32 (float64 for float64).
        part: where the tensors lie in a larger call; None = they are the whole call.
        dlse: gradient of lse, in its shape; None = 0.
        cu_seqlens_k: `[sequences + 1]`, for the keys, if they differ from cu_seqlens; not with `part`.
        max_seqlen_k: upper bound of their lengths; None without cu_seqlens_k.
        bias: if it requires a gradient, the result contains that gradient. The same holds for alibi_slopes, sinks and
            the tensors that score_mod reads.
        sinks: `[heads_q]`: the sinks that lse includes. Their gradient belongs to the rows, so request it in one part
            of each row only.

    The other arguments are those of `attention_part`.

    Returns:
        A tuple with the fields q, k, v, bias, alibi_slopes and sinks, each in its input's shape and dtype. The last
        three are None if not requested. A further field, captured, has a gradient, or None, for each tensor that
        score_mod reads, in the order of `trace_score_mod(...).captured`.

    Raises:
        TypeError, ValueError: as `attention_part`; dout, out, lse or dlse do not fit; or the backend is "reference",
            which cannot compute gradients from results.

    Reference:
        Dao, "FlashAttention-2" (2023), algorithm 2; Liu et al., "Ring Attention with Blockwise Transformers" (2023).
    """
    given = take(attention_backward, options, _BACKWARD_NAMES)
    check_tensors(q=q, k=k, v=v)
    side, spec = _described(
        q, k, v, part, cu_seqlens, max_seqlen, given, cu_seqlens_k=cu_seqlens_k, max_seqlen_k=max_seqlen_k
    )
    _check_results(dout, q, v, out, lse, dlse)
    if given.backend == "reference":
        raise ValueError(
            "backend: expected one that computes gradients from out and lse, got 'reference', which differentiates its "
            "own forward; take 'auto' or 'cpu'"
        )
    learned = {name: getattr(given, name) for name in Wanted._fields[:-1]}
    single = {name: tensor is not None and tensor.requires_grad for name, tensor in learned.items()}
    wanted = Wanted(**single, captured=tuple(tensor.requires_grad for tensor in side.captured))
    with torch.no_grad():
        inputs = BackwardInputs(dout, dlse, q, k, v, out, lse)
        grads = run_backward(inputs, side, spec, wanted, given.backend)
    # Behind the tensors that the function reads are those that say where the part lies.
    own = 0 if given.score_mod is None else len(resolve_score_mod(given.score_mod, q).captured)
    return grads._replace(captured=grads.captured[:own])


def _described(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    part: AttentionPart | None,
    cu_seqlens: Tensor | None,
    max_seqlen: int | None,
    given: Taken,
    cu_seqlens_k: Tensor | None = None,
    max_seqlen_k: int | None = None,
) -> tuple[SideInputs, AttentionSpec]:
    """The meaning of a call, as operators take it; keys are packed as queries are unless the last two say otherwise."""
    if cu_seqlens_k is not None and (cu_seqlens is None or part is not None):
        raise ValueError(
            "cu_seqlens_k: expected None without cu_seqlens and with part, got a tensor; it belongs to a whole packed "
            "call, and cu_seqlens are those of its queries"
        )
    if cu_seqlens_k is None:
        _check_bounds(cu_seqlens, max_seqlen, max_seqlen_k)
        cu_seqlens_k, max_seqlen_k = cu_seqlens, max_seqlen
    checks.check_qkv(q, k, v, DENSE_LAYOUT if cu_seqlens is None else PACKED_LAYOUT)
    if given.dropout_p and given.dropout_seed is None:
        raise ValueError(
            "dropout_seed: expected a seed beside dropout_p, the same for all parts and for the backward, got None; "
            "draw one with flashtile.draw_dropout_seed"
        )
    dropout_p, dropout_seed = resolve_dropout(given.dropout_p, given.dropout_seed, q.device)
    spec = make_spec(q, given, dropout_p)
    check_max_seqlen("max_seqlen", max_seqlen)
    others = given._replace(max_seqlen_q=max_seqlen, max_seqlen_k=max_seqlen_k, score_mod=None)
    side, batch = resolve_lengths(q, k, cu_seqlens, cu_seqlens_k, others)
    if part is not None:
        columns = k.shape[-3]
        spec = placed(spec, part, q.shape[-3], columns, q.shape[-2], side.packed, given)
        lengths = given.key_lengths
        if lengths is not None and not side.packed and (part.column or not known(columns >= part.seq_k)):
            side = side._replace(key_lengths=(lengths - part.column).clamp(0, columns))
        if given.block_mask is not None:
            others = others._replace(block_mask=_rectangle(given.block_mask, part, q, batch, side))
    side, spec = add_scores(side._replace(dropout_seed=dropout_seed), spec, q, k, v, batch, others)
    if given.score_mod is not None:
        function = resolve_score_mod(given.score_mod, q)
        side, spec = add_program(side, spec, function if part is None else _placed(function, part, q.device))
    return side, spec


def _rectangle(mask: BlockMask, part: AttentionPart, q: Tensor, batch: int, side: SideInputs) -> BlockMask:
    """The part of the larger call's mask; of a packed one, the masks of its sequences."""
    if not isinstance(mask, BlockMask):
        return mask  # refused later
    rows, columns = (part.row, side.max_seqlen_q), (part.column, side.max_seqlen_k)
    place = Rectangle((part.sequence, batch), (part.head, q.shape[-2]), rows, columns)
    for name, of_mask, (first, count) in zip(("batch", "heads", "seq_q", "seq_k"), mask.shape, place):
        if (of_mask != 1 or name.startswith("seq")) and exceeds(first + count, of_mask):
            raise ValueError(
                f"block_mask: expected the mask of the larger call, with {name} at least {first + count}, got {of_mask}"
                "; its rectangle is taken here"
            )
    return mask_part(mask, place)


def _placed(function: ScoreFunction, part: AttentionPart, device: torch.device) -> ScoreFunction:
    """The function with indices that count in the larger call."""
    if function.program == UNCHANGED:
        return function
    program, places = moved(function.program)
    starts = part.sequence, part.head, part.row, part.column
    captured = *function.captured, *(_number(starts[place], device) for place in places)
    return function._replace(program=program, captured=captured)


@functools.lru_cache(maxsize=1024)
def _number(value: int, device: torch.device) -> Tensor:
    """A scalar on a device, which nothing waits for again."""
    return torch.tensor(value, dtype=torch.int32, device=device)


def _check_bounds(cu_seqlens: Tensor | None, max_seqlen: int | None, max_seqlen_k: int | None) -> None:
    """Keys without cu_seqlens of their own have no bound of their own either; a dense call has none."""
    if max_seqlen_k is not None:
        raise ValueError(
            f"max_seqlen_k: expected it beside cu_seqlens_k only, got {max_seqlen_k!r}; max_seqlen is the bound of "
            "queries and keys alike"
        )
    if cu_seqlens is None and max_seqlen is not None:
        raise ValueError(
            f"max_seqlen: expected it beside cu_seqlens only, got {max_seqlen!r}; leave it out of a dense call"
        )


def placed(
    spec: AttentionSpec, part: AttentionPart, rows: int, columns: int, heads: int, packed: bool, given: Taken
) -> AttentionSpec:
    """The spec of a part: the band shifted, and where positions matter otherwise, the place."""
    _check_numbers(part)
    if packed:
        if part.row or part.column:
            raise ValueError(
                f"part: expected row and column 0 with cu_seqlens, got {part.row} and {part.column}; a part of a "
                "sequence is a dense call"
            )
        shift = distance = 0
    else:
        _check_place(part, rows, columns)
        distance = part.row + part.seq_k - part.seq_q - part.column
        shift = part.row - part.column if spec.top_left else distance
        spec = _shifted(spec, shift, rows, columns)
        distance -= columns - rows
    all_heads = heads if part.heads is None else part.heads
    if part.head < 0 or part.sequence < 0 or part.head + heads > all_heads:
        raise ValueError(
            f"part: expected heads {part.head} to {part.head + heads} within the {all_heads} of the larger call, and a "
            f"sequence of at least 0, got sequence {part.sequence}"
        )
    if not spec.dropout_p and not given.by_distance:
        return spec
    matrix = part.sequence * all_heads + part.head
    return spec._replace(origin=Origin(part.row, part.column, distance, matrix, all_heads))


def _check_numbers(part: AttentionPart) -> None:
    if not isinstance(part, AttentionPart):
        raise TypeError(
            f"part: expected a flashtile.AttentionPart, got {type(part).__name__}; write AttentionPart(row, column, "
            "seq_q, seq_k)"
        )
    numbers = {
        "row": part.row, "column": part.column, "seq_q": part.seq_q, "seq_k": part.seq_k, "head": part.head,
        "heads": 1 if part.heads is None else part.heads, "sequence": part.sequence,
    }  # fmt: skip
    for name, number in numbers.items():
        if isinstance(number, bool) or not isinstance(number, (int, torch.SymInt)):
            raise TypeError(f"part: expected an int as {name}, got {number!r}; use int(...)")


def _check_place(part: AttentionPart, rows: int, columns: int) -> None:
    for name, first, count, whole in (
        ("row", part.row, rows, part.seq_q), ("column", part.column, columns, part.seq_k),
    ):  # fmt: skip
        if known(first < 0) or exceeds(first + count, whole):
            raise ValueError(
                f"part: expected {name}s {first} to {first + count} within the {whole} of the whole sequence; {name} "
                "counts from its start"
            )


def _shifted(spec: AttentionSpec, shift: int, rows: int, columns: int) -> AttentionSpec:
    """The band counted from the rectangle's own corner; sides that hide nothing of it are left out."""
    spec = spec.shifted(shift)
    left, right = spec.window_left, spec.window_right
    if left is not None and known(left >= rows - 1):
        left = None
    if right is not None and known(right >= columns - 1):
        right = None
    # Both alignments of a square are the same. One of them is taken, so that they share what is compiled.
    return spec._replace(window_left=left, window_right=right, top_left=not known(rows == columns))


def _check_results(dout: Tensor, q: Tensor, v: Tensor, out: Tensor, lse: Tensor, dlse: Tensor | None) -> None:
    check_tensors(dout=dout, out=out, lse=lse)
    rows = (*q.shape[:-1], v.shape[-1])
    statistics = lse_dtype(q.dtype)
    given = [("dout", dout, rows, q.dtype), ("out", out, rows, q.dtype), ("lse", lse, lse_shape(q), statistics)]
    if dlse is not None:
        check_tensors(dlse=dlse)
        given.append(("dlse", dlse, lse_shape(q), statistics))
    for name, tensor, shape, dtype in given:
        if differ(tensor.shape, shape) or tensor.dtype is not dtype or tensor.device != q.device:
            raise ValueError(
                f"{name}: expected {dtype} {tuple(shape)} on {q.device}, got {tensor.dtype} {tuple(tensor.shape)} on "
                f"{tensor.device}; pass what attention with return_lse=True gives of q, k and v, which autocast may "
                "have cast, and gradients like it"
            )


class Rectangle(NamedTuple):
    """The place of a part in a mask: pairs of a first number and a count."""

    batch: tuple[int, int]
    heads: tuple[int, int]
    rows: tuple[int, int]
    columns: tuple[int, int]


#: Rectangles of masks, with the mask, so that its number stays its own; the oldest go first. Making one reads values on
#: the host, and a model takes the same ones in every layer.
_known: OrderedDict[tuple[int, Rectangle], tuple[BlockMask, BlockMask]] = OrderedDict()
_MOST_KNOWN = 128


def mask_part(mask: BlockMask, place: Rectangle) -> BlockMask:
    """The mask of a rectangle, which must lie within the mask. Its tiles are those of the mask."""
    if _is_whole(mask, place):
        return mask
    key = id(mask), place
    if key not in _known:
        _known[key] = mask, _made(mask, place)
        if len(_known) > _MOST_KNOWN:
            _known.popitem(last=False)
    return _known[key][1]


def _is_whole(mask: BlockMask, place: Rectangle) -> bool:
    return all(
        (first, count) == (0, size) or (dim < 2 and size == 1)
        for dim, ((first, count), size) in enumerate(zip(place, mask.shape))
    )


def _made(mask: BlockMask, place: Rectangle) -> BlockMask:
    (tile_q, tile_k), (row, column) = mask.tile, (place.rows[0], place.columns[0])
    table = mask.kind_table()
    for dim, (first, count) in enumerate(place[:2]):
        table = table if table.shape[dim] == 1 else table.narrow(dim, first, count)
    masks = mask.masks_with_ends().bool()
    empty, full = masks.shape[0] - 2, masks.shape[0] - 1
    grid = Grid((*table.shape[:2], place.rows[1], place.columns[1]), mask.tile)
    aligned = row % tile_q == 0 and column % tile_k == 0

    def bounds(tiles: Tiles) -> Bounds:
        rows = [(of + row) // tile_q for of in (tiles.first_q, tiles.last_q)]
        columns = [(of + column) // tile_k for of in (tiles.first_k, tiles.last_k)]
        kinds = [table[tiles.batch, tiles.head, q_tile, k_tile] for q_tile in rows for k_tile in columns]
        alike = torch.stack(torch.broadcast_tensors(*kinds))
        return Bounds((alike != empty).any(0), (alike == full).all(0), kinds[0] if aligned else None)

    def elements(tiles: Tiles) -> Tensor:
        within_q, within_k = (torch.arange(size, device=mask.device) for size in mask.tile)
        q = (tiles.first_q[:, None] + within_q).clamp(max=place.rows[1] - 1)[:, :, None] + row
        k = (tiles.first_k[:, None] + within_k).clamp(max=place.columns[1] - 1)[:, None, :] + column
        kind = table[tiles.batch[:, None, None], tiles.head[:, None, None], q // tile_q, k // tile_k]
        return masks[kind, q % tile_q, k % tile_k]

    return from_bounds(grid, mask.device, bounds, elements)
