"""Forward-mode derivatives of attention, and the derivative of its backward pass, in PyTorch's own operations.

**Forward mode** (Jacobian-vector product), by formula, some rows at a time: memory linear in the length. With the
tangents of all inputs, weights `p` of a row and of its sink, and dropout `z = kept / (1 - dropout_p)`::

    ds   = f'(d(scale · q kᵀ) · (1 - tanh²)) + dbias - distance · dslope    1 - tanh²: of the soft cap, f' of score_mod
    dlse = rowsum(p · ds) + p_sink · dsink
    dout = (z · p · (ds - dlse)) v + (z · p) dv

**The derivative of the backward pass** goes through the eager reference, with its matrix of scores. Shapes are written
as there.

Reference: Griewank and Walther, "Evaluating Derivatives" (2008), section 3.1, for the rule; the softmax's derivative as
in Dao et al., "FlashAttention" (2022), appendix B.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flashtile.ops.attention import reference
from flashtile.ops.attention.call import visible_keys
from flashtile.ops.attention.reference import (
    Part,
    dropped,
    kept_weights,
    load_keys,
    load_rows,
    modified_scores,
    products,
    row_logits,
    seen_keys,
    softmax,
    weighted,
    with_terms,
)
from flashtile.ops.attention.score_program import UPSTREAM, read, run
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
    wide_q, wide_k, wide_v = (tensor.to(lse_dtype(q.dtype)) for tensor in (q, k, v))
    scores_of_row = max(1, batch * heads * seq_k)
    rows_at_once = max(_FEWEST_ROWS, _SCORES_AT_ONCE // scores_of_row)
    outs, lses = [], []
    for first in range(0, max(seq_q, 1), rows_at_once):
        last = min(first + rows_at_once, seq_q)
        rows = torch.arange(first, last, device=q.device)
        first_key, last_key = visible_keys(seq_q, seq_k, spec, first, last)
        part = Part(rows, None, group, first_key, last_key - first_key, seq_q, seq_k, sequence=sequence)
        dout, dlse = _rows(wide_q, wide_k, wide_v, part, side, spec, tangents)
        outs.append(dout.transpose(1, 2))
        lses.append(dlse)
    return torch.cat(outs, dim=1).to(q.dtype), torch.cat(lses, dim=2)


def _rows(
    q: Tensor, k: Tensor, v: Tensor, part: Part, side: SideInputs, spec: AttentionSpec, tangents: Tangents
) -> tuple[Tensor, Tensor]:
    """Tangents of some rows: out `[B, H, R, Dv]` and lse `[B, H, R]`."""
    batch, _, heads, _ = q.shape
    of_keys = functools.partial(load_keys, part=part, heads=heads, seen=seen_keys(part, side, spec))
    dq, dk, dv = (None if tensor is None else tensor.to(q.dtype) for tensor in tangents[:3])
    q_rows, keys, values = load_rows(q, part), of_keys(k), of_keys(v)
    product = products(q_rows, keys, part)
    scores, shown, changes = modified_scores(product, part, side, spec)
    weights = softmax(scores, shown, part, side)

    dscores = torch.zeros_like(scores)
    if dq is not None:
        dscores = dscores + products(load_rows(dq, part), keys, part)
    if dk is not None:
        dscores = dscores + products(q_rows, of_keys(dk), part)
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
    dout = weighted(dropped(weights.keys * (dscores - dlse), kept, spec), values, part)
    if dv is not None:
        dout = dout + weighted(dropped(weights.keys, kept, spec), of_keys(dv), part)
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
