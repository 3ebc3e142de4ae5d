"""Some rows of attention in PyTorch's own operations: their weights, and forward-mode and second derivatives.

Nothing is changed in place, so autograd and `torch.func` go through. Memory and time are those of the rows times the
keys. `flashtile.attention_probs` returns weights.

**Forward mode** (Jacobian-vector product), by formula, some rows at a time: memory linear in the length. With the
tangents of all inputs, weights `p` of a row and of its sink, and dropout `z = kept / (1 - dropout_p)`::

    ds   = f'(d(scale · q kᵀ) · (1 - tanh²)) + dbias - distance · dslope    1 - tanh²: of the soft cap, f' of score_mod
    dlse = rowsum(p · ds) + p_sink · dsink
    dout = (z · p · (ds - dlse)) v + (z · p) dv

**The derivative of the backward pass** goes through the eager reference, with its matrix of scores.

Shapes::

    B batch   H query heads, of those that are asked for   Hkv key/value heads that they read   G = H // Hkv
    R rows    C keys    D head dimension

Reference: Griewank and Walther, "Evaluating Derivatives" (2008), section 3.1, for the rule; the softmax's derivative as
in Dao et al., "FlashAttention" (2022), appendix B.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flashtile.ops.attention import reference
from flashtile.ops.attention.block_mask import BlockMask, call_mask
from flashtile.ops.attention.call import visible_keys
from flashtile.ops.attention.philox import keep_rows
from flashtile.ops.attention.score_program import INPUTS, UPSTREAM, apply, parse, read, run
from flashtile.ops.attention.score_tracing import derivative
from flashtile.ops.attention.spec import (
    LEARNED,
    SPEC,
    AttentionSpec,
    SideInputs,
    Wanted,
    lse_dtype,
    lse_shape,
    saved_side,
    side_tensors,
    unflatten_backward,
)
from flashtile.ops.common import dispatch
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

    @property
    def key_numbers(self) -> Tensor:
        return torch.arange(self.first_key, self.first_key + self.keys, device=self.rows.device)


class Weights(NamedTuple):
    """The softmax of some rows, 0 where nothing is visible. `keys`: `[B, H, R, C]`. `row_logit`: `[B, H, R, 1]`, of the
    sink; None without sinks. `lse`: `[B, H, R, 1]`, -inf where there is neither key nor sink."""

    keys: Tensor
    row_logit: Tensor | None
    lse: Tensor


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
        distance = (part.rows[:, None] + diagonal - part.key_numbers).abs().to(scores.dtype)
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


def modified_scores(
    product: Tensor, part: Part, side: SideInputs, spec: AttentionSpec
) -> tuple[Tensor, Tensor, Changes]:
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
    numbers = sequence.view(-1, 1, 1, 1), head.view(-1, 1, 1), part.rows.view(-1, 1), part.key_numbers[None]
    return dict(
        zip(INPUTS, (scores, *(number.int().reshape((1,) * (4 - number.dim()) + number.shape) for number in numbers)))
    )


def _shown_by_arguments(part: Part, side: SideInputs, spec: AttentionSpec) -> Tensor:
    """Pairs that all but the score function show: bool that broadcasts to `[B, H, R, C]`."""
    key = part.key_numbers
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
    changed, shown, _ = modified_scores(product, part, side, spec)
    return softmax(changed, shown, part, side)


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


def _valid(part: Part, key_lengths: Tensor) -> Tensor:
    """Keys within the length of their batch entry: `[B, 1, 1, C]`."""
    return part.key_numbers < key_lengths.view(-1, 1, 1, 1)


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


#: Scores that are made at a time, but for at least as many rows as `_FEWEST_ROWS` of all heads.
_SCORES_AT_ONCE = 2**22
_FEWEST_ROWS = 64


class Tangents(NamedTuple):
    """Tangents of the inputs, in their shapes and dtypes; None = 0. `side`: of side inputs, without `captured`."""

    q: Tensor | None
    k: Tensor | None
    v: Tensor | None
    side: SideInputs
    captured: tuple[Tensor | None, ...] = ()


def forward_derivative(
    q: Tensor, k: Tensor, v: Tensor, side: SideInputs, spec: AttentionSpec, tangents: Tangents
) -> tuple[Tensor, Tensor]:
    """The tangents of out and lse; shapes as in `flashtile.attention` and `attention_varlen`."""
    with dispatch.without_autocast(q):
        if side.packed:
            return _packed(q, k, v, side, spec, tangents)
        return _dense(q, k, v, side, spec, tangents, None)


def _dense(
    q: Tensor, k: Tensor, v: Tensor, side: SideInputs, spec: AttentionSpec, tangents: Tangents, sequence: int | None
) -> tuple[Tensor, Tensor]:
    batch, seq_q, heads, _ = q.shape
    seq_k, group = k.shape[1], heads // k.shape[2]
    scores_of_row = max(1, batch * heads * seq_k)
    rows_at_once = max(_FEWEST_ROWS, _SCORES_AT_ONCE // scores_of_row)
    outs, lses = [], []
    for first in range(0, max(seq_q, 1), rows_at_once):
        last = min(first + rows_at_once, seq_q)
        rows = torch.arange(first, last, device=q.device)
        first_key, last_key = visible_keys(seq_q, seq_k, spec, first, last)
        part = Part(rows, None, group, first_key, last_key - first_key, seq_q, seq_k, sequence=sequence)
        dout, dlse = _rows(q, k, v, part, side, spec, tangents)
        outs.append(dout.transpose(1, 2))
        lses.append(dlse)
    return torch.cat(outs, dim=1).to(q.dtype), torch.cat(lses, dim=2)


def _rows(
    q: Tensor, k: Tensor, v: Tensor, part: Part, side: SideInputs, spec: AttentionSpec, tangents: Tangents
) -> tuple[Tensor, Tensor]:
    """Tangents of some rows: out `[B, H, R, Dv]` and lse `[B, H, R]`."""
    batch, _, heads, _ = q.shape
    q_rows, keys = load_rows(q, part), load_keys(k, part, heads, side)
    product = products(q_rows, keys, part)
    scores, shown, changes = modified_scores(product, part, side, spec)
    weights = softmax(scores, shown, part, side)

    dscores = torch.zeros_like(scores)
    if tangents.q is not None:
        dscores = dscores + products(load_rows(tangents.q, part), keys, part)
    if tangents.k is not None:
        dkeys = load_keys(tangents.k, part, heads, side)
        dscores = dscores + products(q_rows, dkeys, part)
    dscores = dscores * spec.scale
    if changes.cap is not None:
        dscores = dscores * changes.cap
    if changes.inputs is not None:
        dscores = _through_function(dscores, changes.inputs, side, spec, tangents.captured)
    dscores = with_terms(dscores, part, tangents.side, spec).masked_fill(~shown, 0)

    dlse = (weights.keys * dscores).sum(dim=-1, keepdim=True)
    dlogits = row_logits(part, tangents.side)
    if dlogits is not None and weights.row_logit is not None:
        dlse = dlse + weights.row_logit * dlogits
    kept = kept_weights(part, batch, heads, side, spec)

    def dropped(weights: Tensor) -> Tensor:
        return weights if kept is None else weights * kept / (1 - spec.dropout_p)

    values = load_keys(v, part, heads, side)
    dout = weighted(dropped(weights.keys * (dscores - dlse)), values, part)
    if tangents.v is not None:
        dvalues = load_keys(tangents.v, part, heads, side)
        dout = dout + weighted(dropped(weights.keys), dvalues, part)
    return dout, dlse.squeeze(-1)


def _through_function(
    dscores: Tensor,
    inputs: dict[str, Tensor],
    side: SideInputs,
    spec: AttentionSpec,
    dcaptured: Sequence[Tensor | None],
) -> Tensor:
    """The tangents behind the score function, from those in front of it."""
    assert spec.score_program is not None
    gradient = derivative(spec.score_program, dscores.dtype)
    inputs = {**inputs, UPSTREAM: torch.ones_like(dscores)}
    values = run(gradient.program, inputs, lambda _, step, at: read(side.captured[step.arguments[0]], at, 4)[0])
    total = torch.zeros_like(dscores) if gradient.score is None else dscores * values[gradient.score]
    for captured, indices, name in gradient.loads:
        tangent = dcaptured[captured] if dcaptured else None
        if tangent is not None:
            total = total + values[name] * read(tangent, [values[index] for index in indices], 4)[0]
    return total


def _packed(
    q: Tensor, k: Tensor, v: Tensor, side: SideInputs, spec: AttentionSpec, tangents: Tangents
) -> tuple[Tensor, Tensor]:
    """Each sequence as a batch of one; this reads `cu_seqlens` on the host."""
    outs, lses, end = [], [], 0
    for sequence, rows, keys, one in side.sequences():
        moved: dict[str, Any] = {
            name: None if tangent is None else tangent[None, where]
            for name, tangent, where in (("q", tangents.q, rows), ("k", tangents.k, keys), ("v", tangents.v, keys))
        }
        own = tangents._replace(**moved, side=tangents.side.for_sequence(sequence))
        dout, dlse = _dense(q[None, rows], k[None, keys], v[None, keys], one, spec, own, sequence)
        outs.append(dout[0])
        lses.append(dlse[0])
        end = rows.stop
    rest = q.shape[0] - end  # rows past the last sequence
    outs.append(q.new_zeros(rest, q.shape[1], v.shape[-1]))
    lses.append(q.new_zeros(q.shape[1], rest, dtype=lse_dtype(q.dtype)))
    return torch.cat(outs, dim=0), torch.cat(lses, dim=1)


class DifferentiableBackward(torch.autograd.Function):
    """The backward pass where it is differentiated again (`create_graph=True`, forward mode over reverse mode): the
    operator, itself differentiable through the eager reference."""

    generate_vmap_rule = True

    @staticmethod
    def forward(*arguments):
        tensors, side, spec, wanted, backend = unflatten_backward(arguments)
        *grads, of_captured = torch.ops.flashtile.attention_backward.default(*tensors, *side, *spec, *wanted, backend)
        return *grads, *of_captured

    @staticmethod
    def setup_context(ctx, inputs, output):
        (dout, dlse, q, k, v, _, _), side, ctx.spec, ctx.wanted, _ = unflatten_backward(inputs)
        ctx.max_seqlens = side.max_seqlen_q, side.max_seqlen_k
        saved = dout, dlse, q, k, v, *side_tensors(side)
        ctx.save_for_backward(*saved)
        ctx.save_for_forward(*saved)
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx, *grads):
        first_order, primals = _reference_backward(ctx)
        first, pullback = torch.func.vjp(first_order, *primals)
        of_learned = [grad for grad, wants in zip(grads[3:], ctx.wanted.flags) if wants]
        given = zip((*grads[:3], *of_learned), first)
        upstream = tuple(torch.zeros_like(of) if grad is None else grad for grad, of in given)
        ddout, ddlse, dq, dk, dv, *dlearned = pullback(upstream)
        found: list[Tensor | None] = [None] * len(ctx.needs_input_grad)
        found[:5] = ddout, ddlse if ctx.needs_input_grad[1] else None, dq, dk, dv
        for place, grad in zip(_learned_places(ctx.wanted), dlearned, strict=True):
            found[place] = grad
        return tuple(found)

    @staticmethod
    def jvp(ctx, *tangents):
        dispatch.refuse_nested_forward_mode("flashtile.attention")
        first_order, primals = _reference_backward(ctx)
        of_learned = (tangents[place] for place in _learned_places(ctx.wanted))
        given = zip((*tangents[:5], *of_learned), primals)
        directions = tuple(torch.zeros_like(of) if tangent is None else tangent for tangent, of in given)
        # Twice in reverse: PyTorch does not nest its own forward mode in one that is under way.
        first, pullback = torch.func.vjp(first_order, *primals)
        _, push_forward = torch.func.vjp(pullback, tuple(map(torch.zeros_like, first)))
        ((dq, dk, dv, *dlearned),) = push_forward(directions)
        learned = iter(dlearned)
        return dq, dk, dv, *(next(learned) if wants else dq.new_zeros(0) for wants in ctx.wanted.flags)


def _learned_places(wanted: Wanted) -> list[int]:
    """The places of what learns among the arguments of `DifferentiableBackward`."""
    first_captured = 7 + SPEC + len(Wanted._fields) + 1
    places = *(7 + place for place in LEARNED), *range(first_captured, first_captured + len(wanted.captured))
    return [place for place, wants in zip(places, wanted.flags, strict=True) if wants]


def _reference_backward(ctx) -> tuple[Callable, tuple[Tensor, ...]]:
    """The backward that a `DifferentiableBackward` has recorded as a function of (dout, dlse, q, k, v, what learns),
    by the eager reference; and the arguments. out and lse are functions of the inputs here, so the whole derivative
    goes to those."""
    dout, dlse, q, k, v, *rest = ctx.saved_tensors
    side = saved_side(rest, ctx.max_seqlens)

    def forward(q, k, v, *learned):
        return reference.forward(q, k, v, reference.with_learned(side, ctx.wanted, learned), ctx.spec)

    def first_order(dout, dlse, *inputs):
        _, pullback = torch.func.vjp(forward, *inputs)
        return pullback((dout, dlse))

    if dlse is None:
        dlse = q.new_zeros(lse_shape(q), dtype=lse_dtype(q.dtype))
    return first_order, (dout, dlse, q, k, v, *reference.learned_inputs(side, ctx.wanted))
