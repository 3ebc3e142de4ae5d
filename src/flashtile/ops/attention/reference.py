"""The eager reference: the definition of the semantics, written to be read, not to be fast.

It builds the whole score matrix of some rows and heads (`Part`), works in any float dtype on any device, changes
nothing in place, is differentiable to any order by autograd and `torch.func`, and imports no kernel. In fp16 and bf16
it computes as an eager model would, rounding where PyTorch rounds, except that the softmax runs in float32; 8-bit
inputs become what they stand for in float32 first.

Shapes::

    B batch   H query heads, of those that are asked for   Hkv key/value heads that they read   G = H // Hkv
    R rows    C keys    D head dimension
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flashtile.ops.attention.block_mask import BlockMask, call_mask
from flashtile.ops.attention.philox import keep_rows
from flashtile.ops.attention.score_program import INPUTS, apply, parse
from flashtile.ops.attention.spec import (
    FP8,
    AttentionSpec,
    BackwardInputs,
    Gradients,
    SideInputs,
    Wanted,
    dequantized,
    lse_dtype,
    out_dtype,
)
from flashtile.ops.common.dispatch import autograd_in_operator
from flashtile.ops.common.rows import logsumexp


def forward(q: Tensor, k: Tensor, v: Tensor, side: SideInputs, spec: AttentionSpec) -> tuple[Tensor, ...]:
    """Attention of a dense or packed call: (out, lse), or (out, lse, max_scores)."""
    if q.dtype is FP8:
        out, *statistics = forward(*dequantized(q, k, v, side), spec)
        return out.to(out_dtype(FP8)), *statistics
    if side.packed:
        return _forward_packed(q, k, v, side, spec)
    return _forward_dense(q, k, v, side, spec)


def backward(inputs: BackwardInputs, side: SideInputs, spec: AttentionSpec, wanted: Wanted) -> Gradients:
    """Gradients by PyTorch's autograd through `forward`; `out` and `lse` are not used."""
    dout, dlse, q, k, v, _, lse = inputs
    with autograd_in_operator():
        leaves = [tensor.detach().requires_grad_() for tensor in (q, k, v, *learned_inputs(side, wanted))]
        outputs = forward(leaves[0], leaves[1], leaves[2], with_learned(side, wanted, leaves[3:]), spec)[:2]
        upstream = (dout, torch.zeros_like(lse) if dlse is None else dlse)
        grads = torch.autograd.grad(outputs, leaves, upstream, allow_unused=True, materialize_grads=True)
    of_learned = iter([grad.contiguous() for grad in grads])
    found: list[Any] = [next(of_learned) for _ in range(3)]
    found += [next(of_learned) if wants else None for wants in wanted[:-1]]
    found.append(tuple(next(of_learned) if wants else None for wants in wanted.captured))
    return Gradients(*found)


def column_sums(q: Tensor, k: Tensor, lse: Tensor, side: SideInputs, spec: AttentionSpec) -> Tensor:
    """The sum over queries of each key's weights, `[batch, heads_q, seq_k]`, packed `[heads_q, total_k]`."""
    if not side.packed:
        return _column_sums_dense(q, k, lse, side, spec)
    sums = lse.new_zeros(q.shape[1], k.shape[0])
    for sequence, rows, columns, one in side.sequences():
        given = q[None, rows], k[None, columns], lse[None, :, rows]
        sums[:, columns] = _column_sums_dense(*given, one, spec, sequence)[0]
    return sums


def learned_inputs(side: SideInputs, wanted: Wanted) -> list[Tensor]:
    """The side inputs whose gradient is wanted."""
    tensors = (*(getattr(side, name) for name in Wanted._fields[:-1]), *side.captured)
    return [tensor for tensor, wants in zip(tensors, wanted.flags) if wants]


def with_learned(side: SideInputs, wanted: Wanted, learned: Sequence[Tensor]) -> SideInputs:
    """The side inputs with the `learned_inputs` exchanged."""
    given = iter(learned)
    single: dict[str, Any] = {name: next(given) for name, wants in zip(Wanted._fields[:-1], wanted) if wants}
    flags = wanted.captured or (False,) * len(side.captured)
    captured = tuple(next(given) if wants else tensor for tensor, wants in zip(side.captured, flags))
    return side._replace(**single, captured=captured)


def _forward_dense(
    q: Tensor, k: Tensor, v: Tensor, side: SideInputs, spec: AttentionSpec, sequence: int | None = None
) -> tuple[Tensor, ...]:
    batch, _, heads, _ = q.shape
    part = whole_part(q, k, sequence)
    seen = seen_keys(part, side, spec)
    keys, values = load_keys(k, part, heads, seen), load_keys(v, part, heads, seen)
    scores, shown, _ = modified_scores(products(load_rows(q, part), keys, part), part, side, spec)
    weights = softmax(scores, shown, part, side)
    probs = dropped(weights.keys, kept_weights(part, batch, heads, side, spec), spec)
    # Masking out as well keeps whatever gradient comes from above out of rows without a visible key.
    out = weighted(probs.to(q.dtype), values, part).masked_fill(~shown.any(dim=-1, keepdim=True), 0)
    results = out.transpose(1, 2).contiguous(), weights.lse.squeeze(-1)
    return (*results, _largest(scores.masked_fill(~shown, float("-inf")))) if spec.returns_max_scores else results


def _forward_packed(q: Tensor, k: Tensor, v: Tensor, side: SideInputs, spec: AttentionSpec) -> tuple[Tensor, ...]:
    """Each sequence as a batch of one, its rows put back in place; this reads `cu_seqlens` on the host."""
    parts, end = [], 0
    for sequence, rows, columns, one in side.sequences():
        parts.append(_forward_dense(q[None, rows], k[None, columns], v[None, columns], one, spec, sequence))
        end = rows.stop
    # Rows past the last sequence are queries without keys.
    nothing = spec._replace(score_program=None)
    parts.append(_forward_dense(q[None, end:], k[None, :0], v[None, :0], SideInputs(), nothing))
    outs, *statistics = zip(*parts)
    return torch.cat(outs, dim=1)[0], *(torch.cat(rows, dim=2)[0] for rows in statistics)


def _largest(scores: Tensor) -> Tensor:
    """The largest of each row, without a gradient; -inf where there is none."""
    if not scores.shape[-1]:
        return scores.new_full(scores.shape[:-1], float("-inf"))
    return scores.detach().amax(dim=-1)


def _column_sums_dense(
    q: Tensor, k: Tensor, lse: Tensor, side: SideInputs, spec: AttentionSpec, sequence: int | None = None
) -> Tensor:
    part, lse = whole_part(q, k, sequence), lse[..., None]
    keys = load_keys(k, part, q.shape[2], seen_keys(part, side, spec))
    product = products(load_rows(q, part), keys, part)
    scores, shown, _ = modified_scores(product, part, side, spec)
    return torch.exp(scores - lse).masked_fill(~(shown & ~lse.isneginf()), 0).sum(dim=-2)


# The weights of some rows


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

    @property
    def key_numbers(self) -> Tensor:
        return torch.arange(self.first_key, self.first_key + self.keys, device=self.rows.device)


class Weights(NamedTuple):
    """The softmax of some rows, 0 where nothing is visible. `keys`: `[B, H, R, C]`. `row_logit`: `[B, H, R, 1]`, of the
    sink; None without sinks. `lse`: `[B, H, R, 1]`, -inf where there is neither key nor sink."""

    keys: Tensor
    row_logit: Tensor | None
    lse: Tensor


class Changes(NamedTuple):
    """Intermediate results that the tangents of scores need; None for what the call does not have. `cap`: derivative of
    the soft cap, `[B, H, R, C]`. `inputs`: arguments of the score function, by their names in a program."""

    cap: Tensor | None
    inputs: dict[str, Tensor] | None


def whole_part(q: Tensor, k: Tensor, sequence: int | None = None) -> Part:
    """All scores of a dense call, q `[B, S, H, D]` and k `[B, S, Hkv, D]`."""
    (_, seq_q, heads, _), (_, seq_k, heads_kv, _) = q.shape, k.shape
    rows = torch.arange(seq_q, device=q.device)
    return Part(rows, None, heads // heads_kv, 0, seq_k, seq_q, seq_k, sequence=sequence)


def load_rows(tensor: Tensor, part: Part) -> Tensor:
    """The part's rows of `[B, S, H, D]`: `[B, Hkv, G·R, D]`."""
    rows = tensor.index_select(1, part.rows)
    if part.heads is not None:
        rows = rows.index_select(2, part.heads)
    return _stacked(rows.transpose(1, 2), part)


def load_keys(tensor: Tensor, part: Part, heads: int, seen: Tensor) -> Tensor:
    """The part's keys or values of `[B, S, Hkv, D]`: `[B, Hkv, C, D]`, each head as often as the chosen heads read it.
    `heads`: query heads of the call. Keys that are not `seen` (`seen_keys`) may be NaN, and are 0 here."""
    # Not by brackets, which make an alias of everything: that has no rule where one tangent stands for several.
    keys = tensor.narrow(1, part.first_key, part.keys)
    if part.heads is not None:
        keys = keys.index_select(2, part.heads // (heads // tensor.shape[2]))
    return keys.transpose(1, 2).masked_fill(~seen[..., None], 0)


def seen_keys(part: Part, side: SideInputs, spec: AttentionSpec) -> Tensor:
    """The keys that some of the rows see by the band and the key lengths: bool `[B | 1, 1, C]`."""
    return shown_by_position(part, side, spec).any(dim=-2)


def products(rows: Tensor, keys: Tensor, part: Part) -> Tensor:
    """`rows keysᵀ` of `[B, Hkv, G·R, D]` and `[B, Hkv, C, D]`: `[B, H, R, C]`."""
    return _by_heads(rows @ keys.transpose(-1, -2), part)


def weighted(weights: Tensor, values: Tensor, part: Part) -> Tensor:
    """`weights values` of `[B, H, R, C]` and `[B, Hkv, C, D]`: `[B, H, R, D]`."""
    return _by_heads(_stacked(weights, part) @ values, part)


def _stacked(by_head: Tensor, part: Part) -> Tensor:
    """`[B, H, R, X]` as `[B, Hkv, G·R, X]`; `unflatten` has no batching rule."""
    batch, heads, rows, last = by_head.shape
    return by_head.reshape(batch, heads // part.group, part.group * rows, last)


def _by_heads(stacked: Tensor, part: Part) -> Tensor:
    """`[B, Hkv, G·R, X]` as `[B, H, R, X]`."""
    batch, heads_kv, _, last = stacked.shape
    return stacked.reshape(batch, heads_kv * part.group, part.rows.shape[0], last)


def _table(tensor: Tensor, part: Part) -> Tensor:
    """The part's share of what broadcasts to the scores, `[B | 1, H | 1, S | 1, S | 1]`."""
    if part.heads is not None and tensor.shape[1] > 1:
        tensor = tensor.index_select(1, part.heads)
    if tensor.shape[2] > 1:
        tensor = tensor.index_select(2, part.rows)
    if tensor.shape[3] > 1:
        tensor = tensor.narrow(-1, part.first_key, part.keys)
    return tensor


def _for_heads(tensor: Tensor, part: Part) -> Tensor:
    """One number for each head, `[H]` or `[B, H]`, beside the scores: `[B | 1, H, 1, 1]`."""
    if part.heads is not None:
        tensor = tensor.index_select(-1, part.heads)
    return tensor.reshape(-1, tensor.shape[-1], 1, 1)


def modified_scores(
    product: Tensor, part: Part, side: SideInputs, spec: AttentionSpec
) -> tuple[Tensor, Tensor, Changes]:
    """The results from products `[B, H, R, C]`: scores in the dtype of lse, of which none is masked yet; and which
    pairs are visible, bool that broadcasts to them. A score of -inf hides its pair, whatever made it."""
    scores, cap, inputs = (product * spec.scale).to(lse_dtype(product.dtype)), None, None
    shown = _shown_by_arguments(part, side, spec)
    if spec.softcap:
        tanh = torch.tanh(scores / spec.softcap)
        scores, cap = spec.softcap * tanh, 1 - tanh * tanh
    if spec.score_program is not None:
        inputs, program = _function_inputs(scores, part), parse(spec.score_program)
        if torch.is_grad_enabled():
            # Pairs that the function hides have no gradient, whatever its derivative is there.
            with torch.no_grad():
                found = with_terms(apply(program, inputs, side.captured, shown), part, side, spec)
            shown = shown & ~found.isneginf()
        scores = apply(program, inputs, side.captured, shown)
    scores = with_terms(scores, part, side, spec)
    return scores, shown & ~scores.isneginf(), Changes(cap, inputs)


def with_terms(scores: Tensor, part: Part, side: SideInputs, spec: AttentionSpec) -> Tensor:
    """Scores `[B, H, R, C]` plus the terms that are linear in a tensor of their own, so that the tangents of scores get
    those of the tensors in the same way."""
    if side.bias is not None:
        scores = scores + _table(side.bias, part).to(scores.dtype)
    if side.alibi_slopes is not None:
        diagonal = part.seq_k - part.seq_q + (0 if spec.origin is None else spec.origin.diagonal)
        distance = (part.rows[:, None] + diagonal - part.key_numbers).abs().to(scores.dtype)
        scores = scores - _for_heads(side.alibi_slopes, part) * distance
    return scores


def _function_inputs(scores: Tensor, part: Part) -> dict[str, Tensor]:
    """The arguments of a score function, int32 beside the scores."""
    batch, heads, _, _ = scores.shape
    device = scores.device
    sequence = (part.sequence or 0) + torch.arange(batch, device=device)
    head = torch.arange(heads, device=device) if part.heads is None else part.heads
    numbers = sequence.view(-1, 1, 1, 1), head.view(-1, 1, 1), part.rows.view(-1, 1), part.key_numbers[None]
    return dict(
        zip(INPUTS, (scores, *(number.int().reshape((1,) * (4 - number.dim()) + number.shape) for number in numbers)))
    )


def shown_by_position(part: Part, side: SideInputs, spec: AttentionSpec) -> Tensor:
    """Pairs that the band and the key lengths show: bool `[B | 1, 1, R, C]`."""
    key = part.key_numbers
    diagonal = part.rows[:, None] + (0 if spec.top_left else part.seq_k - part.seq_q)
    shown = torch.ones_like(diagonal == key)[None, None]
    if spec.window_left is not None:
        shown = shown & (key >= diagonal - spec.window_left)
    if spec.window_right is not None:
        shown = shown & (key <= diagonal + spec.window_right)
    return shown if side.key_lengths is None else shown & (key < side.key_lengths.view(-1, 1, 1, 1))


def _shown_by_arguments(part: Part, side: SideInputs, spec: AttentionSpec) -> Tensor:
    """Pairs that all but the score function show: bool that broadcasts to `[B, H, R, C]`."""
    shown = shown_by_position(part, side, spec)
    if side.mask is not None:
        shown = shown & _table(side.mask, part)
    if side.bias is not None:
        shown = shown & ~_table(side.bias, part).isneginf()
    if (block_mask := call_mask(side, spec)) is not None:
        shown = shown & _shown_by_tiles(block_mask, part)
    return shown


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


def row_logits(part: Part, side: SideInputs) -> Tensor | None:
    """The sinks of a part, `[1, H, 1, 1]`: one more key, which has no value. None without sinks."""
    return None if side.sinks is None else _for_heads(side.sinks, part)


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


def kept_weights(part: Part, batch: int, heads: int, side: SideInputs, spec: AttentionSpec) -> Tensor | None:
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


def dropped(weights: Tensor, kept: Tensor | None, spec: AttentionSpec) -> Tensor:
    """Weights after dropout."""
    return weights if kept is None else weights * kept / (1 - spec.dropout_p)
