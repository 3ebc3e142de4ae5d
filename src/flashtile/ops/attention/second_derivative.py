"""The derivative of the backward pass, through the eager reference, with its matrix of scores."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from flashtile.ops.attention import reference
from flashtile.ops.attention.arguments import saved_side, side_tensors, unflatten_backward
from flashtile.ops.attention.spec import AttentionSpec, SideInputs, Wanted, lse_dtype, lse_shape
from flashtile.ops.common import dispatch


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
        learned = iter(dlearned)
        of_flags = [next(learned) if wants else None for wants in ctx.wanted.flags]
        of_side = dict(zip(Wanted._fields[:-1], of_flags))
        return (
            *(ddout, ddlse if ctx.needs_input_grad[1] else None, dq, dk, dv, None, None),
            *(of_side.get(name) for name in SideInputs._fields),
            *(None,) * (len(AttentionSpec._fields) + len(Wanted._fields) + 1),
            *of_flags[len(of_side) :],
        )

    @staticmethod
    def jvp(ctx, *tangents):
        dispatch.refuse_nested_forward_mode("flashtile.attention")
        first_order, primals = _reference_backward(ctx)
        of_side = dict(zip(SideInputs._fields, tangents[7:]))
        of_captured = tangents[len(tangents) - len(ctx.wanted.captured) :]
        of_flags = (*(of_side[name] for name in Wanted._fields[:-1]), *of_captured)
        of_learned = (tangent for tangent, wants in zip(of_flags, ctx.wanted.flags) if wants)
        given = zip((*tangents[:5], *of_learned), primals)
        directions = tuple(torch.zeros_like(of) if tangent is None else tangent for tangent, of in given)
        # Twice in reverse: PyTorch does not nest its own forward mode in one that is under way.
        first, pullback = torch.func.vjp(first_order, *primals)
        _, push_forward = torch.func.vjp(pullback, tuple(map(torch.zeros_like, first)))
        ((dq, dk, dv, *dlearned),) = push_forward(directions)
        learned = iter(dlearned)
        return dq, dk, dv, *(next(learned) if wants else dq.new_zeros(0) for wants in ctx.wanted.flags)


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
