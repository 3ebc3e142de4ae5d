"""Modifiers of the scores of a tile on the CPU (soft cap, bias, ALiBi, masks), and the gradients that come back.

Letters as in `tiles`. A block sees its part of each side input as a view `[b, h, G, Sq, Sk]`, each size its own or 1;
scores carry a factor log₂e.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from flashtile.ops.attention.block_mask import call_mask
from flashtile.ops.attention.cpu.tiles import LN2, LOG2E, SMALL_TILE, Block, KeyTile, Segment, hide, within
from flashtile.ops.attention.score_program import INPUTS, UPSTREAM, ScoreProgram, add_at, apply, parse, read, run
from flashtile.ops.attention.score_tracing import derivative
from flashtile.ops.attention.spec import AttentionSpec, SideInputs, Wanted


class Modifiers(NamedTuple):
    """Modifiers of the scores of a block; None for what the call does not have.

    Attributes:
        softcap: bound of the scores, times log₂e; 0 = none.
        function: the score function.
        bias: view of the bias.
        slopes: of ALiBi, `[b | 1, h, G, 1, 1]`.
        mask: view of the mask.
        tiles: of the block mask, see `TileMask`.
    """

    softcap: float
    function: FunctionOfBlock | None
    bias: Tensor | None
    slopes: Tensor | None
    mask: Tensor | None
    tiles: TileMask | None


class FunctionOfBlock(NamedTuple):
    """A score function, what it captures, and its indices in a block.

    Attributes:
        text: of its program.
        captured: the tensors that it reads.
        batch: int32 `[b, 1, 1, 1, 1]`.
        head: int32 `[1, h, G, 1, 1]`.
    """

    text: str
    captured: tuple[Tensor, ...]
    batch: Tensor
    head: Tensor

    @property
    def program(self) -> ScoreProgram:
        return parse(self.text)

    def inputs(self, scores: Tensor, rows: range, keys: range | KeyTile) -> dict[str, Tensor]:
        """The arguments for a tile, `scores` `[b, h, G, R, C]` without the factor."""
        row = torch.arange(rows.start, rows.stop, dtype=torch.int32, device="cpu").view(1, 1, 1, -1, 1)
        column = torch.arange(keys.start, keys.stop, dtype=torch.int32, device="cpu").view(1, 1, 1, 1, -1)
        return dict(zip(INPUTS, (scores, self.batch, self.head, row, column)))


class Derivatives(NamedTuple):
    """Derivatives of the changes of a tile of scores; None for what the call does not have. `cap`: derivative of the
    soft cap, `[N, G·R, C]`. `inputs`: arguments of the score function, see `FunctionOfBlock.inputs`."""

    cap: Tensor | None
    inputs: dict[str, Tensor] | None


class TileMask(NamedTuple):
    """A block mask by tiles: `kinds` `[b | 1, h | 1, G | 1, tiles_q, tiles_k]`, numbers of `patterns` `[P, tq, tk]`."""

    kinds: Tensor
    patterns: Tensor


def block_modifiers(
    block: Block, side: SideInputs, spec: AttentionSpec, tile_mask: TileMask | None
) -> Modifiers | None:
    """The modifiers of a block, or None without any. `tile_mask`: that of the call."""
    changes = side.bias, side.alibi_slopes, side.mask, side.block_lists, spec.score_program
    if not spec.softcap and all(change is None for change in changes):
        return None
    return Modifiers(
        spec.softcap * LOG2E,
        None if spec.score_program is None else _block_function(block, side, spec.score_program),
        None if side.bias is None else scores_view(block, side.bias),
        None if side.alibi_slopes is None else scores_view(block, _as_table(side.alibi_slopes)),
        None if side.mask is None else scores_view(block, side.mask),
        None if tile_mask is None else tile_mask._replace(kinds=scores_view(block, tile_mask.kinds)),
    )


def _block_function(block: Block, side: SideInputs, text: str) -> FunctionOfBlock:
    batches = block.batches.stop - block.batches.start
    batch = torch.arange(block.sequence, block.sequence + batches, dtype=torch.int32, device="cpu")
    head = torch.arange(block.heads.start, block.heads.stop, dtype=torch.int32, device="cpu")
    return FunctionOfBlock(text, side.captured, batch.view(-1, 1, 1, 1, 1), head.view(1, -1, block.group, 1, 1))


def scores_view(block: Block, tensor: Tensor) -> Tensor:
    """The block's part of what broadcasts to the scores: `[B | 1, H | 1, ...]` to `[b | 1, h | 1, G | 1, ...]`, B batch
    entries or packed sequences."""
    if tensor.shape[0] > 1:
        tensor = tensor[_sequences(block)]
    return tensor.unsqueeze(2) if tensor.shape[1] == 1 else tensor[:, block.heads].unflatten(1, (-1, block.group))


def _as_table(slopes: Tensor) -> Tensor:
    """ALiBi's slopes, `[H]` or `[B, H]`, as what broadcasts to the scores, `[B | 1, H, 1, 1]`."""
    return (slopes if slopes.dim() == 2 else slopes[None])[..., None, None]


def segment_slopes(segment: Segment, side: SideInputs) -> Tensor | None:
    """ALiBi's slopes of a segment, `[b | 1, H, 1, 1]`; None without them."""
    if side.alibi_slopes is None:
        return None
    table = _as_table(side.alibi_slopes)
    return table[_sequences(segment)] if len(table) > 1 else table


def _sequences(part: Block | Segment) -> slice:
    """The batch entries of a block or a segment, or its packed sequence, among those of the call."""
    return slice(part.sequence, part.sequence + part.batches.stop - part.batches.start)


def part(view: Tensor, rows: range, keys: range | KeyTile) -> Tensor:
    """Rows and keys of a view `[..., Sq | 1, Sk | 1]`."""
    if view.shape[-2] > 1:
        view = view[..., rows.start : rows.stop, :]
    if view.shape[-1] > 1:
        view = view[..., keys.start : keys.stop]
    return view


def modify(scores: Tensor, block: Block, rows: range, keys: KeyTile, modifiers: Modifiers) -> Derivatives:
    """Changes a tile of scores `[N, G·R, C]` in place."""
    cap, inputs = None, None
    if modifiers.softcap:
        tanh = scores.div_(modifiers.softcap).tanh_()
        cap = 1 - tanh * tanh
        scores.mul_(modifiers.softcap)
    by_head = split_heads(scores, block, rows)
    if modifiers.function is not None:
        inputs = modifiers.function.inputs(by_head * LN2, rows, keys)
        by_head.copy_(apply(modifiers.function.program, inputs, modifiers.function.captured)).mul_(LOG2E)
    inner, inner_rows, inner_keys = within(by_head, block, rows, keys)
    if modifiers.bias is not None:
        inner.add_(part(modifiers.bias, inner_rows, inner_keys).to(scores.dtype), alpha=LOG2E)
    if modifiers.slopes is not None:
        near = near_diagonals(block.diagonal, rows, block.visible.keys, scores.dtype)
        by_head.addcmul_(modifiers.slopes, distances(near, keys), value=-LOG2E)
    if modifiers.mask is not None:
        hide(inner, part(modifiers.mask, inner_rows, inner_keys))
    if modifiers.tiles is not None:
        hide(inner, _visible(modifiers.tiles, inner_rows, inner_keys))
    return Derivatives(cap, inputs)


def split_heads(tile: Tensor, block: Block, rows: range) -> Tensor:
    """A view of a tile `[N, G·R, C]`: `[b, h, G, R, C]`."""
    heads = block.heads_kv.stop - block.heads_kv.start
    return tile.view(-1, heads, block.group, len(rows), tile.shape[-1])


def diagonals(diagonal: int, rows: range, dtype: torch.dtype) -> Tensor:
    """The keys at no distance from some rows, `[R]`."""
    return torch.arange(rows.start, rows.stop, dtype=dtype, device="cpu") + diagonal


def near_diagonals(diagonal: int, rows: range, keys: int, dtype: torch.dtype) -> Tensor:
    """The same, but no farther away than the first or the last of so many keys, `[R]`. All keys of such a row lie on
    one side of it: their distances are less by the same number, so weights stay the same, and scores are small numbers,
    which the dtype holds exactly enough."""
    return diagonals(diagonal, rows, dtype).clamp_(0, max(0, keys - 1))


def distances(diagonals: Tensor, keys: range | KeyTile) -> Tensor:
    """`|diagonal - j|` of diagonals `[R]`: `[R, C]`."""
    return (diagonals[:, None] - torch.arange(keys.start, keys.stop, dtype=diagonals.dtype, device="cpu")).abs_()


def raised_to_near(diagonal: int, rows: range, keys: int, slopes: Tensor) -> Tensor | None:
    """By how much scores relative to `near_diagonals` are larger, `[..., R, 1]` for slopes `[..., 1, 1]`, or None."""
    apart = diagonals(diagonal, rows, slopes.dtype)
    apart.sub_(near_diagonals(diagonal, rows, keys, slopes.dtype)).abs_()
    return slopes * apart[:, None] if apart.any() else None


def raised_rows(block: Block, rows: range, modifiers: Modifiers | None) -> Tensor | None:
    """`raised_to_near` of a tile of rows, `[N, G·R, 1]`; None if scores are not raised."""
    if modifiers is None or modifiers.slopes is None:
        return None
    raised = raised_to_near(block.diagonal, rows, block.visible.keys, modifiers.slopes)
    if raised is None:
        return None
    batches, heads_kv = block.batches.stop - block.batches.start, block.heads_kv.stop - block.heads_kv.start
    return raised.expand(batches, heads_kv, -1, -1, -1).reshape(batches * heads_kv, -1, 1)


def call_tile_mask(side: SideInputs, spec: AttentionSpec) -> TileMask | None:
    """A call's block mask, made once; blocks take views of `[batch | 1, heads | 1, tiles_q, tiles_k]` kinds."""
    mask = call_mask(side, spec)
    return None if mask is None else TileMask(mask.kind_table(), mask.masks_with_ends().bool())


def is_scattered(mask: TileMask | None) -> bool:
    """Whether a block mask leaves so many small tiles empty that they beat large ones, a third faster per score."""
    if mask is None or not mask.kinds.numel():
        return False
    shown = (mask.kinds != len(mask.patterns) - 2).flatten(0, -3).any(dim=0, keepdim=True).float()
    small, large = (
        F.max_pool2d(shown, [max(1, tile // size) for size in mask.patterns.shape[1:]], ceil_mode=True).mean()
        for tile in (SMALL_TILE, 2 * SMALL_TILE)
    )
    return bool(small < 0.6 * large)


def wholly_hidden(modifiers: Modifiers | None, rows: range, keys: range | KeyTile) -> bool:
    """Whether the block mask shows nothing of a tile, so that it need not be computed."""
    if modifiers is None or modifiers.tiles is None:
        return False
    nothing = len(modifiers.tiles.patterns) - 2
    return bool((_tile_kinds(modifiers.tiles, rows, keys) == nothing).all())


def _tile_kinds(tiles: TileMask, rows: range, keys: range | KeyTile) -> Tensor:
    """Kinds of the stored tiles that a tile lies in."""
    _, tile_q, tile_k = tiles.patterns.shape
    last_q, last_k = (rows.stop - 1) // tile_q, (keys.stop - 1) // tile_k
    return tiles.kinds[..., rows.start // tile_q : last_q + 1, keys.start // tile_k : last_k + 1]


def _visible(tiles: TileMask, rows: range, keys: range | KeyTile) -> Tensor:
    """The pairs of a tile that a block mask shows: `[b | 1, h | 1, G | 1, R, C]`."""
    _, tile_q, tile_k = tiles.patterns.shape
    kinds = _tile_kinds(tiles, rows, keys)
    whole = tiles.patterns[kinds].transpose(-3, -2).flatten(-2).flatten(-3, -2)
    top, left = rows.start % tile_q, keys.start % tile_k
    return whole[..., top : top + len(rows), left : left + keys.stop - keys.start]


def row_logits(block: Block, side: SideInputs) -> Tensor | None:
    """The sinks of the block's stacked heads, times log₂e: `[N, G, 1, 1]`; None without them."""
    if side.sinks is None:
        return None
    sinks = (side.sinks[block.heads] * LOG2E).view(-1, block.group, 1, 1)
    return sinks.repeat(block.batches.stop - block.batches.start, 1, 1, 1)


class SideGradients:
    """Gradients of side inputs, summed over all tiles, in the compute dtype; None for what is not wanted."""

    def __init__(self, side: SideInputs, wanted: Wanted, dtype: torch.dtype) -> None:
        self.bias, self.alibi_slopes, self.sinks = (
            torch.zeros(tensor.shape, dtype=dtype, device="cpu") if wants and tensor is not None else None
            for wants, tensor in zip(wanted, side.learnable)
        )
        self.captured = [
            torch.zeros(tensor.shape, dtype=dtype, device="cpu") if wants else None
            for wants, tensor in zip(wanted.captured, side.captured)
        ]

    def add_scores(self, dscores: Tensor, block: Block, rows: range, keys: range, factor: float) -> None:
        """Takes in the gradient of a tile of scores as the softmax has them, `factor` times `[N, G·R, C]`."""
        if self.bias is None and self.alibi_slopes is None:
            return
        by_head = split_heads(dscores, block, rows)
        if self.bias is not None:
            inner, inner_rows, inner_keys = within(by_head, block, rows, keys)
            target = part(scores_view(block, self.bias), inner_rows, inner_keys)
            target.add_(inner.sum_to_size(target.shape), alpha=factor)
        if self.alibi_slopes is not None:
            target = scores_view(block, _as_table(self.alibi_slopes))
            away = distances(diagonals(block.diagonal, rows, dscores.dtype), keys)
            along = (by_head * away).sum_to_size(target.shape)
            target.sub_(along, alpha=factor)

    def change_back(
        self, dscores: Tensor, weights: Tensor, block: Block, rows: range, modifiers: Modifiers, to: Derivatives,
        factor: float,
    ) -> None:  # fmt: skip
        """Takes the gradient of scores back through `modify`, in place; adds that of captured tensors."""
        if modifiers.function is not None and to.inputs is not None:
            by_head = split_heads(dscores, block, rows)
            gradient = derivative(modifiers.function.text, dscores.dtype)
            tensors, dims = modifiers.function.captured, by_head.dim()
            inputs = {**to.inputs, UPSTREAM: by_head}
            values = run(gradient.program, inputs, lambda _, step, at: read(tensors[step.arguments[0]], at, dims)[0])
            # The derivative at a hidden pair may be anything.
            hidden = split_heads(weights, block, rows) == 0
            for captured, indices, name in gradient.loads:
                if captured < len(self.captured) and (total := self.captured[captured]) is not None:
                    value = values[name].broadcast_to(by_head.shape).to(total.dtype)
                    add_at(total, [values[index] for index in indices], value.masked_fill(hidden, 0), factor)
            if gradient.score is None:
                by_head.zero_()
            else:
                by_head.copy_(values[gradient.score]).masked_fill_(hidden, 0)
        if to.cap is not None:
            dscores.mul_(to.cap)

    def add_rows(self, logit_weights: Tensor, delta: Tensor, block: Block, rows: range, factor: float) -> None:
        """Takes in some rows: what their logits without a key weigh, and `factor` times delta, `[N, G·R, 1]` each."""
        if self.sinks is not None:
            target = self.sinks[block.heads].view(1, -1, block.group, 1, 1)
            target.sub_(split_heads(logit_weights * delta, block, rows).sum_to_size(target.shape), alpha=factor)

    def add_call(self, out: Tensor, dout: Tensor, lse: Tensor, blind: Tensor, side: SideInputs) -> None:
        """`add_rows` of all rows of a call, out `[B, S, H, D]`. `blind`: rows that see nothing."""
        if self.sinks is not None and side.sinks is not None:
            delta = (out.to(lse.dtype) * dout).sum(dim=-1).transpose(1, 2)
            weights = (side.sinks[:, None] - lse).exp_().masked_fill_(blind, 0)
            self.sinks.sub_(weights.mul_(delta).sum(dim=(0, 2)))

    def finish(self, side: SideInputs) -> tuple[Any, ...]:
        """In the dtype of the inputs, in the order of `Wanted`."""

        def finished(total: Tensor | None, of: Tensor | None) -> Tensor | None:
            return None if total is None or of is None else total.to(of.dtype)

        single = self.bias, self.alibi_slopes, self.sinks
        return *map(finished, single, side.learnable), tuple(map(finished, self.captured, side.captured))
