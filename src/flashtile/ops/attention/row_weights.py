"""The attention weights of some rows, in PyTorch's own operations: `flashtile.attention_probs` returns such weights,
and forward-mode differentiation makes them a few rows at a time. Nothing is changed in place, so autograd and
`torch.func` go through. Memory and time are those of the rows times the keys.

Shapes::

    B batch   H query heads, of those that are asked for   Hkv key/value heads that they read   G = H // Hkv
    R rows    C keys    D head dimension
"""

from __future__ import annotations

import contextlib
from typing import NamedTuple

import torch
from torch import Tensor

from flashtile.ops.attention.block_mask import BlockMask, call_mask
from flashtile.ops.attention.philox import keep_rows
from flashtile.ops.attention.score_program import INPUTS, apply, parse
from flashtile.ops.attention.spec import AttentionSpec, SideInputs, lse_dtype
from flashtile.ops.common.rows import logsumexp


class Part(NamedTuple):
    """A choice of scores of a dense call, or of one sequence of a packed one.

    Attributes:
        rows: int64 `[R]`, numbers of queries in any order.
        heads: int64 `[H]`, numbers of query heads in any order; None = all.
        group: G, query heads that read one of the key/value heads in turn; 1 where heads are chosen.
        first_key, keys: the first of the keys, which lie side by side, and C. Not a range, whose length is a number
            once and for all also where the program that is traced leaves it open.
        seq_q, seq_k: lengths of the call.
        sequence: number of the packed sequence that is the only batch entry; None in a dense call.
    """

    rows: Tensor
    heads: Tensor | None
    group: int
    first_key: int
    keys: int
    seq_q: int
    seq_k: int
    sequence: int | None = None


class Weights(NamedTuple):
    """The softmax of some rows, 0 where nothing is visible. `keys`: `[B, H, R, C]`. `row_logit`: `[B, H, R, 1]`, of the
    sink; None without sinks. `lse`: `[B, H, R, 1]`, -inf where there is neither key nor sink."""

    keys: Tensor
    row_logit: Tensor | None
    lse: Tensor


def no_autocast(device: torch.device) -> contextlib.AbstractContextManager:
    """Keeps autocast from narrowing the products here: it has decided about q, k and v already."""
    if not torch._C._is_any_autocast_enabled() or device.type == "meta":
        return contextlib.nullcontext()
    return torch.autocast(device.type, enabled=False)


def load_rows(tensor: Tensor, part: Part) -> Tensor:
    """The part's rows of `[B, S, H, D]`: `[B, Hkv, G·R, D]`."""
    rows = tensor.index_select(1, part.rows)
    if part.heads is not None:
        rows = rows.index_select(2, part.heads)
    by_head = rows.to(lse_dtype(tensor.dtype)).transpose(1, 2)  # [B, H, R, D]
    return _stacked(by_head, part)


def load_keys(tensor: Tensor, part: Part, heads: int, side: SideInputs) -> Tensor:
    """The part's keys or values of `[B, S, Hkv, D]`: `[B, Hkv, C, D]`, each head as often as the chosen heads read it.
    `heads`: query heads of the call. Keys past a key length may be NaN, and are 0 here."""
    # Not by brackets, which make an alias of everything: that has no rule where one tangent stands for several.
    keys = tensor.narrow(1, part.first_key, part.keys)
    if part.heads is not None:
        keys = keys.index_select(2, part.heads // (heads // tensor.shape[2]))
    keys = keys.to(lse_dtype(tensor.dtype)).transpose(1, 2)
    if side.key_lengths is not None:
        keys = keys.masked_fill(~_valid(part, side.key_lengths)[:, :, 0, :, None], 0)
    return keys


def products(rows: Tensor, keys: Tensor, part: Part) -> Tensor:
    """`rows keysᵀ` of `[B, Hkv, G·R, D]` and `[B, Hkv, C, D]`: `[B, H, R, C]`."""
    return split_heads(rows @ keys.transpose(-1, -2), part)


def weighted(weights: Tensor, values: Tensor, part: Part) -> Tensor:
    """`weights values` of `[B, H, R, C]` and `[B, Hkv, C, D]`: `[B, H, R, D]`."""
    return split_heads(_stacked(weights, part) @ values, part)


def _stacked(by_head: Tensor, part: Part) -> Tensor:
    """`[B, H, R, X]` as `[B, Hkv, G·R, X]`; `unflatten` has no batching rule."""
    batch, heads, rows, last = by_head.shape
    return by_head.reshape(batch, heads // part.group, part.group * rows, last)


def split_heads(stacked: Tensor, part: Part) -> Tensor:
    """`[B, Hkv, G·R, X]` as `[B, H, R, X]`."""
    batch, heads_kv, _, last = stacked.shape
    return stacked.reshape(batch, heads_kv * part.group, part.rows.shape[0], last)


def part_table(tensor: Tensor, part: Part) -> Tensor:
    """The part's share of what broadcasts to the scores, `[B | 1, H | 1, S | 1, S | 1]`."""
    if part.heads is not None and tensor.shape[1] > 1:
        tensor = tensor.index_select(1, part.heads)
    if tensor.shape[2] > 1:
        tensor = tensor.index_select(2, part.rows)
    if tensor.shape[3] > 1:
        tensor = tensor.narrow(-1, part.first_key, part.keys)
    return tensor


def _by_head(tensor: Tensor, part: Part) -> Tensor:
    """One number for each head, `[H]` or `[B, H]`, beside the scores: `[B | 1, H, 1, 1]`."""
    if part.heads is not None:
        tensor = tensor.index_select(-1, part.heads)
    return tensor.reshape(-1, tensor.shape[-1], 1, 1)


def with_terms(scores: Tensor, part: Part, side: SideInputs, spec: AttentionSpec) -> Tensor:
    """Scores `[B, H, R, C]` plus the terms that are linear in a tensor of their own, so that the tangents of scores get
    those of the tensors in the same way."""
    if side.bias is not None:
        scores = scores + part_table(side.bias, part).to(scores.dtype)
    if side.alibi_slopes is not None:
        diagonal = part.seq_k - part.seq_q + (0 if spec.origin is None else spec.origin.diagonal)
        distance = (part.rows[:, None] + diagonal - _key_numbers(part)).abs().to(scores.dtype)
        scores = scores - _by_head(side.alibi_slopes, part) * distance
    return scores


def row_logits(part: Part, side: SideInputs) -> Tensor | None:
    """The sinks of a part, `[1, H, 1, 1]`; None without sinks."""
    return None if side.sinks is None else _by_head(side.sinks, part)


class Changes(NamedTuple):
    """Intermediate results that the tangents of scores need; None for what the call does not have. `cap`: derivative of
    the soft cap, `[B, H, R, C]`. `inputs`: arguments of the score function, by their names in a program."""

    cap: Tensor | None
    inputs: dict[str, Tensor] | None


def scores(product: Tensor, part: Part, side: SideInputs, spec: AttentionSpec) -> tuple[Tensor, Tensor, Changes]:
    """The results from products `[B, H, R, C]`: scores, of which none is masked yet; and which pairs are visible, bool
    that broadcasts to them. A score of -inf hides its pair."""
    scores, cap, inputs = product * spec.scale, None, None
    shown = _shown_by_arguments(part, side, spec)
    if spec.softcap:
        tanh = torch.tanh(scores / spec.softcap)
        scores, cap = spec.softcap * tanh, 1 - tanh * tanh
    if spec.score_program is not None:
        inputs = _function_inputs(scores, part)
        scores = apply(parse(spec.score_program), inputs, side.captured, shown)
    scores = with_terms(scores, part, side, spec)
    shown = shown & ~scores.isneginf()
    return scores, shown, Changes(cap, inputs)


def _function_inputs(scores: Tensor, part: Part) -> dict[str, Tensor]:
    """The arguments of a score function, int32 beside the scores."""
    batch, heads, _, _ = scores.shape
    device = scores.device
    sequence = (part.sequence or 0) + torch.arange(batch, device=device)
    head = torch.arange(heads, device=device) if part.heads is None else part.heads
    numbers = sequence.view(-1, 1, 1, 1), head.view(-1, 1, 1), part.rows.view(-1, 1), _key_numbers(part)[None]
    return dict(
        zip(INPUTS, (scores, *(number.int().reshape((1,) * (4 - number.dim()) + number.shape) for number in numbers)))
    )


def _shown_by_arguments(part: Part, side: SideInputs, spec: AttentionSpec) -> Tensor:
    """Pairs that all but the score function show: bool that broadcasts to `[B, H, R, C]`."""
    key = _key_numbers(part)
    diagonal = part.rows[:, None] + (0 if spec.top_left else part.seq_k - part.seq_q)
    shown = torch.ones_like(diagonal == key)[None, None]
    if spec.window_left is not None:
        shown = shown & (key >= diagonal - spec.window_left)
    if spec.window_right is not None:
        shown = shown & (key <= diagonal + spec.window_right)
    if side.key_lengths is not None:
        shown = shown & _valid(part, side.key_lengths)
    if side.mask is not None:
        shown = shown & part_table(side.mask, part)
    if side.bias is not None:
        shown = shown & ~part_table(side.bias, part).isneginf()
    if (block_mask := call_mask(side, spec)) is not None:
        shown = shown & _shown_by_tiles(block_mask, part)
    return shown


def softmax(scores: Tensor, shown: Tensor, part: Part, side: SideInputs) -> Weights:
    """The softmax of scores `[B, H, R, C]` over what is visible, and over the sink."""
    batch, _, rows, _ = scores.shape
    blind = ~shown.any(dim=-1, keepdim=True)
    scores = scores.masked_fill(~shown, float("-inf"))
    nothing = blind
    sink = row_logits(part, side)
    if sink is not None:
        sink = sink.expand(batch, -1, rows, 1).to(scores.dtype)
        nothing = blind & sink.isneginf()
        scores = torch.cat((scores, sink), dim=-1)
    # The softmax of nothing would be NaN, and so would its gradient.
    scores = scores.masked_fill(nothing, 0)
    lse = logsumexp(scores, -1).masked_fill(nothing, float("-inf"))
    weights = torch.softmax(scores, dim=-1)
    if sink is None:
        return Weights(weights.masked_fill(blind, 0), None, lse)
    return Weights(weights[..., :-1].masked_fill(blind, 0), weights[..., -1:].masked_fill(nothing, 0), lse)


def weights(q: Tensor, k: Tensor, part: Part, side: SideInputs, spec: AttentionSpec) -> Weights:
    """The weights of a part before dropout. q `[B, S, H, D]` and k `[B, S, Hkv, D]` are those of the call."""
    keys = load_keys(k, part, q.shape[2], side)
    product = products(load_rows(q, part), keys, part)
    changed, shown, _ = scores(product, part, side, spec)
    return softmax(changed, shown, part, side)


def kept(part: Part, batch: int, heads: int, side: SideInputs, spec: AttentionSpec) -> Tensor | None:
    """Weights that dropout keeps, bool `[B, H, R, C]`; None without dropout. `heads`: those of the call."""
    if side.dropout_seed is None:
        return None
    device = part.rows.device
    chosen = torch.arange(heads, device=device) if part.heads is None else part.heads
    first, all_heads, row, column = 0, heads, 0, 0
    if spec.origin is not None:
        row, column, _, first, all_heads = spec.origin
    sequences = (part.sequence or 0) + torch.arange(batch, device=device)
    sequence_head = first + sequences[:, None] * all_heads + chosen
    first_key = part.first_key + column
    bits = keep_rows(side.dropout_seed, spec.dropout_p, sequence_head.flatten(), part.rows + row, first_key, part.keys)
    return bits.unflatten(0, (batch, chosen.shape[0]))


def _key_numbers(part: Part) -> Tensor:
    return torch.arange(part.first_key, part.first_key + part.keys, device=part.rows.device)


def _valid(part: Part, key_lengths: Tensor) -> Tensor:
    """Keys within the length of their batch entry: `[B, 1, 1, C]`."""
    return _key_numbers(part) < key_lengths.view(-1, 1, 1, 1)


def _shown_by_tiles(mask: BlockMask, part: Part) -> Tensor:
    """Pairs that the block mask shows: bool `[B | 1, H | 1, R, C]`."""
    table, (tile_q, _) = mask.kind_table(), mask.tile
    if part.sequence is not None and table.shape[0] > 1:
        table = table.narrow(0, part.sequence, 1)
    if part.heads is not None and table.shape[1] > 1:
        table = table.index_select(1, part.heads)
    kinds = table.index_select(2, part.rows // tile_q)  # [B | 1, H | 1, R, tiles of keys]
    rows = mask.masks_with_ends().bool()[kinds, (part.rows % tile_q)[:, None]]  # [..., tile_k]
    return rows.flatten(-2)[..., part.first_key : part.first_key + part.keys]
