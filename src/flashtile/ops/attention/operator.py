"""The operator: torch.library schemas, fakes and implementations, and the only autograd code of attention.

A call comes from `api`, passes PyTorch's dispatcher (where fake tensors and `torch.compile` stop), and goes on to
the backend that `select` names. Where nothing could stop there (plain tensors, no mode, no trace), it skips the
dispatcher, which costs as much host time as the rest of a call.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from flashtile.ops.attention.arguments import (
    GRADIENTS_SCHEMA,
    LEARNED,
    SIDE,
    SIDE_SCHEMA,
    SINGLE_SIDE_SCHEMA,
    SINGLE_WANTED_SCHEMA,
    SPEC,
    SPEC_SCHEMA,
    WANTED_SCHEMA,
    flat,
    saved_side,
    side_tensors,
    unflatten,
    unflatten_backward,
)
from flashtile.ops.attention.calls import PlainCall, serve_backward, serve_forward
from flashtile.ops.attention.spec import (
    NOTHING_WANTED,
    AttentionSpec,
    Gradients,
    SideInputs,
    Wanted,
    out_dtype,
    plain_side,
    wanted_of,
)
from flashtile.ops.common import dispatch

_library = torch.library.Library("flashtile", "DEF")
_library.define(
    f"attention_forward(Tensor q, Tensor k, Tensor v, {SIDE_SCHEMA}, {SPEC_SCHEMA}, str backend)"
    " -> (Tensor out, Tensor lse, Tensor max_scores)"
)
_library.define(
    "attention_backward(Tensor dout, Tensor? dlse, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, "
    f"{SIDE_SCHEMA}, {SPEC_SCHEMA}, {WANTED_SCHEMA}, str backend) -> ({GRADIENTS_SCHEMA}, Tensor[] dcaptured)"
)
# The backward without captured tensors: PyTorch maps no operator with lists of tensors over `is_grads_batched=True`.
_library.define(
    "attention_backward_single(Tensor dout, Tensor? dlse, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, "
    f"{SINGLE_SIDE_SCHEMA}, {SPEC_SCHEMA}, {SINGLE_WANTED_SCHEMA}, str backend) -> ({GRADIENTS_SCHEMA})"
)
_forward_op = torch.ops.flashtile.attention_forward.default
_backward_op = torch.ops.flashtile.attention_backward.default

# Gradients that a backward has of single tensors.
_SINGLE_GRADIENTS = len(Gradients._fields) - 1


def run_attention(
    q: Tensor, k: Tensor, v: Tensor, side: SideInputs, spec: AttentionSpec, backend: str
) -> tuple[Tensor, ...]:
    """Runs the operator, recorded by autograd where a gradient is wanted. Returns (out, lse), or (out, lse, max_scores)
    if the spec asks for it."""
    if dispatch.transformed():
        return _asked_for(_TransformedAttention.apply(q, k, v, *flat(side, spec, backend)), spec)
    if torch.is_grad_enabled():
        learned = any(wanted_of(side).flags)
        if learned or q.requires_grad or k.requires_grad or v.requires_grad:
            if torch.compiler.is_compiling():
                q, k, v, side = _distinct(q, k, v, side)
                return _Attention.apply(q, k, v, *flat(side, spec, backend))
            # Autograd sees only tensors that are arguments themselves.
            return _apply(q, k, v, *flat(side, spec, backend)) if learned else _apply(q, k, v, side, spec, backend)
    return _run_forward(q, k, v, side, spec, backend)


def run_plain(q: Tensor, k: Tensor, v: Tensor, call: PlainCall, return_lse: bool) -> Tensor | tuple[Tensor, Tensor]:
    """Runs a call that has a key (`calls.key_of`), recorded by autograd where a gradient is wanted. Returns out, or
    (out, lse)."""
    if torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad):
        return (_apply_plain if return_lse else _apply_plain_out)(q, k, v, call)
    out, lse = call.forward(q, k, v)
    return (out, lse) if return_lse else out


def _asked_for(results: tuple[Tensor, ...], spec: AttentionSpec) -> tuple[Tensor, ...]:
    """The results of the operator, which always has three, without the third if it was not asked for."""
    return results if spec.returns_max_scores else results[:2]


def _run_forward(
    q: Tensor, k: Tensor, v: Tensor, side: SideInputs, spec: AttentionSpec, backend: str, recorded: bool = False
) -> tuple[Tensor, ...]:
    plain = plain_side(side)
    if dispatch.unobserved(q, k, v) if plain else dispatch.unobserved(q, k, v, *side_tensors(side)):
        return serve_forward(q, k, v, side, spec, backend, plain, recorded)
    return _asked_for(_forward_op(q, k, v, *side, *spec, backend), spec)


def run_unrecorded(
    q: Tensor, k: Tensor, v: Tensor, side: SideInputs, spec: AttentionSpec, backend: str
) -> tuple[Tensor, Tensor]:
    """Runs the forward within another operator, where neither autograd nor the dispatcher has to see it. Returns (out,
    lse)."""
    out, lse = serve_forward(q, k, v, side, spec, backend, plain_side(side))
    return out, lse


def run_backward(
    dout: Tensor,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    side: SideInputs,
    spec: AttentionSpec,
    wanted: Wanted,
    backend: str,
) -> Gradients:
    """Runs the backward from given results, which autograd does not record."""
    if dispatch.unobserved(q, k, v, dout, dlse, out, lse, *side_tensors(side)):
        return serve_backward(dout, dlse, q, k, v, out, lse, side, spec, wanted, backend)
    grads = _backward_op(dout, dlse, q, k, v, out, lse, *side, *spec, *wanted, backend)
    return _gradients(grads[:-1], grads[-1], wanted)


def _gradients(grads: Sequence[Tensor], of_captured: Sequence[Tensor], wanted: Wanted) -> Gradients:
    """What an operator returned, without what was not wanted."""
    single: list[Any] = [grad if wants else None for grad, wants in zip(grads[3:], wanted[:-1])]
    single.append(tuple(grad if wants else None for grad, wants in zip(of_captured, wanted.captured)))
    return Gradients(grads[0], grads[1], grads[2], *single)


def _distinct(q: Tensor, k: Tensor, v: Tensor, side: SideInputs) -> tuple[Tensor, Tensor, Tensor, SideInputs]:
    """The same arguments, no tensor twice."""
    names = [name for name, entry in zip(SideInputs._fields, side) if isinstance(entry, Tensor)]
    tensors = q, k, v, *(getattr(side, name) for name in names), *side.captured
    q, k, v, *entries = dispatch.distinct(tensors)  # type: ignore[assignment]
    replaced: dict[str, Any] = {**dict(zip(names, entries)), "captured": tuple(entries[len(names) :])}
    return q, k, v, side._replace(**replaced)


class _Attention(torch.autograd.Function):
    """Attention recorded for the backward pass.

    Beside q, k and v it takes side inputs, spec and backend: flat where it is traced, as three objects where not.
    """

    @staticmethod
    def forward(ctx, q, k, v, *rest):
        side, spec, backend = unflatten(rest)
        results = _run_forward(q, k, v, side, spec, backend, recorded=True)
        _save(ctx, q, k, v, results, side, spec, backend, len(rest))
        return results

    @staticmethod
    def backward(ctx, dout, dlse, *of_max_scores):
        return _Attention.gradients(ctx, dout, dlse, ctx.saved_tensors)

    @staticmethod
    def gradients(ctx, dout, dlse, saved):
        q, k, v, out, lse, *rest = saved
        max_seqlens, spec, backend, other_arguments = ctx.scalars
        side = saved_side(rest, max_seqlens)
        wanted = Wanted(captured=(False,) * len(side.captured)) if side.captured else NOTHING_WANTED
        if other_arguments > 3:
            needs = ctx.needs_input_grad[3:]
            wanted = Wanted(*(needs[index] for index in LEARNED), tuple(needs[SPEC + 1 :]))
        if dout is None:
            dout = torch.zeros_like(out)
        tensors = (dout, dlse, q, k, v, out, lse)
        if (torch.is_grad_enabled() or dispatch.transformed()) and not torch.compiler.is_compiling():
            # A number, because functorch would take several booleans for several operands.
            bits = sum(wants << place for place, wants in enumerate(wanted.captured))
            grads = _DifferentiableBackward.apply(*tensors, *flat(side, (*spec, *wanted[:-1], bits), backend))
            grads = _gradients(grads[:_SINGLE_GRADIENTS], grads[_SINGLE_GRADIENTS:], wanted)
        elif dispatch.batched(dout, dlse):
            # For several gradients in one, PyTorch calls the operator with one after another.
            if side.captured:
                raise NotImplementedError(
                    "score_mod: expected one that reads no tensors beside is_grads_batched=True, got one that reads "
                    f"{len(side.captured)}; call torch.autograd.grad for one gradient after another"
                )
            operator = torch.ops.flashtile.attention_backward_single.default
            grads = _gradients(operator(*tensors, *side[:-1], *spec, *wanted[:-1], backend), (), wanted)
        elif dispatch.unobserved(q, k, v, dout, dlse, *(() if plain_side(side) else side_tensors(side))):
            grads = serve_backward(*tensors, side, spec, wanted, backend)
        else:
            grads = _backward_op(*tensors, *side, *spec, *wanted, backend)
            grads = _gradients(grads[:-1], grads[-1], wanted)
        if other_arguments <= 3:
            return grads.q, grads.k, grads.v, *(None,) * other_arguments
        others: list[Tensor | None] = [None] * (SPEC + 1)
        for index, grad in zip(LEARNED, grads[3:-1]):
            others[index] = grad
        return grads.q, grads.k, grads.v, *others, *grads.captured


class _PlainAttention(_Attention):
    """The same of a `PlainCall`, which comes in the place of side inputs, spec and backend."""

    @staticmethod
    def forward(ctx, q, k, v, call):
        out, lse = call.recorded_forward(q, k, v)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.call = call
        ctx.scalars = call.scalars
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    def backward(ctx, dout, dlse):
        saved = ctx.saved_tensors
        if dispatch.undisturbed() and not torch.is_grad_enabled():
            grads = ctx.call.backward(dout, dlse, *saved)
            if grads is not None:
                return *grads, None
        return _Attention.gradients(ctx, dout, dlse, saved)


class _PlainAttentionOut(_PlainAttention):
    """The same without lse, which is one output less for autograd to keep."""

    @staticmethod
    def forward(ctx, q, k, v, call):
        return _PlainAttention.forward(ctx, q, k, v, call)[0]

    @staticmethod
    def backward(ctx, dout):
        return _PlainAttention.backward(ctx, dout, None)


#: `_Attention.apply` without what it does first for `torch.func` transforms, which take another way above.
_apply = super(torch.autograd.Function, _Attention).apply
_apply_plain = super(torch.autograd.Function, _PlainAttention).apply
_apply_plain_out = super(torch.autograd.Function, _PlainAttentionOut).apply


class _TransformedAttention(_Attention):
    """The same in the form that `torch.func` transforms ask for, which costs more on each call.

    Only through an autograd.Function do they see that a tensor inside a mapped one wants a gradient, or that an input
    has a tangent; the bare operator would drop either in silence.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(q, k, v, *rest):
        side, spec, backend = unflatten(rest)
        return _forward_op(q, k, v, *side, *spec, backend)

    @staticmethod
    def setup_context(ctx, inputs, output):
        q, k, v, *rest = inputs
        ctx.save_for_forward(*_save(ctx, q, k, v, output, *unflatten(rest), len(rest)))

    @staticmethod
    def jvp(ctx, *tangents):
        from flashtile.ops.attention.forward_mode import Tangents, forward_derivative

        dispatch.refuse_nested_forward_mode("flashtile.attention")
        q, k, v, _, _, *rest = ctx.saved_tensors
        max_seqlens, spec, _, _ = ctx.scalars
        side = saved_side(rest, max_seqlens)
        given = Tangents(*tangents[:3], *(tangents[3 + index] for index in LEARNED), tuple(tangents[3 + SPEC + 1 :]))
        return *forward_derivative(q, k, v, side, spec, given), None


def _save(
    ctx,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    results: tuple[Tensor, ...],
    side: SideInputs,
    spec: AttentionSpec,
    backend: str,
    other_arguments: int,
) -> tuple[Tensor | None, ...]:
    """Keeps what the backward needs, and returns the tensors of it."""
    out, lse, *max_scores = results
    if max_scores:
        ctx.mark_non_differentiable(*max_scores)
        spec = spec._replace(returns_max_scores=False)
    saved = q, k, v, out, lse, *side_tensors(side)
    ctx.save_for_backward(*saved)
    ctx.scalars = (side.max_seqlen_q, side.max_seqlen_k), spec, backend, other_arguments
    ctx.set_materialize_grads(False)
    return saved


class _DifferentiableBackward(torch.autograd.Function):
    """The backward pass where it is differentiated again (`create_graph=True`, forward mode over reverse mode): the
    operator, itself differentiable through the eager reference."""

    generate_vmap_rule = True

    @staticmethod
    def forward(*arguments):
        tensors, side, spec, wanted, backend = unflatten_backward(arguments)
        *grads, of_captured = _backward_op(*tensors, *side, *spec, *wanted, backend)
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
    """The backward that a `_DifferentiableBackward` has recorded as a function of (dout, dlse, q, k, v, what learns),
    by the eager reference; and the arguments. out and lse are functions of the inputs here, so the whole derivative
    goes to those."""
    from flashtile.ops.attention import reference

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


def _forward_implementation(q, k, v, *rest):
    with torch.no_grad():
        side, spec, backend = unflatten(rest)
        results = serve_forward(q, k, v, side, spec, backend, plain_side(side))
        return results if spec.returns_max_scores else (*results, q.new_empty(0, dtype=lse_dtype(q.dtype)))


def _backward_implementation(*arguments):
    tensors, side, spec, wanted, backend = unflatten_backward(arguments)
    with torch.no_grad():
        grads = serve_backward(*tensors, side, spec, wanted, backend)

    # Contiguous, as the fake says: rows of a gradient may be padded.
    def returned(grad: Tensor | None) -> Tensor:
        return tensors[2].new_empty(0) if grad is None else grad.contiguous()

    return *map(returned, grads[:-1]), list(map(returned, grads.captured))


def _backward_single_implementation(*arguments):
    *others, backend = arguments
    tensors, rest = others[:7], others[7:]
    single, scalars = rest[: SIDE - 1], rest[SIDE - 1 :]
    return _backward_implementation(*tensors, *single, (), *scalars, (), backend)[:_SINGLE_GRADIENTS]


def _forward_fake(q, k, v, *rest):
    out = q.new_empty(*q.shape[:-1], v.shape[-1], dtype=out_dtype(q.dtype))
    statistics = lse_shape(q), lse_dtype(q.dtype)
    asked = unflatten(rest)[1].returns_max_scores
    return out, *(q.new_empty(shape, dtype=statistics[1]) for shape in (statistics[0], statistics[0] if asked else 0))


def _backward_fake(*arguments):
    (_, _, q, k, v, *_), side, _, wanted, _ = unflatten_backward(arguments)

    def returned(tensor: Tensor | None, wants: bool) -> Tensor:
        return tensor.new_empty(tensor.shape) if wants and tensor is not None else q.new_empty(0)

    learned = (side[index] for index in LEARNED)
    of_captured = list(map(returned, side.captured, wanted.captured))
    return *(t.new_empty(t.shape) for t in (q, k, v)), *map(returned, learned, wanted[:-1]), of_captured


def lse_shape(q: Tensor) -> tuple[int, ...]:
    """`[batch, heads, seq_q]` for q `[batch, seq_q, heads, head_dim]`; `[heads, total_q]` for packed q."""
    return (q.shape[0], q.shape[2], q.shape[1]) if q.dim() == 4 else (q.shape[1], q.shape[0])


def lse_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype is torch.float64 else torch.float32


def _vmap_rule(op: Callable, first_side: int) -> Callable:
    """Batching rule of a dense call: the mapped dimension joins the batch, the first dimension of every tensor.

    `first_side`: where the side inputs begin among the arguments.
    """

    def rule(info, in_dims, *arguments):
        side = SideInputs(*arguments[first_side : first_side + SIDE])
        spec = AttentionSpec(*arguments[first_side + SIDE : first_side + SPEC])
        others = side_tensors(side._replace(key_lengths=None, captured=()))
        if spec.score_program is not None or any(other is not None for other in others):
            raise NotImplementedError(
                "flashtile.attention under torch.func.vmap: expected a dense call without dropout, bias, mask, ALiBi, "
                "sinks, block mask and score_mod; for others put the mapped dimension into the batch, or append the "
                "sequences to cu_seqlens"
            )
        folded = [
            _fold(argument, dim, info.batch_size) if isinstance(argument, Tensor) else argument
            for argument, dim in zip(arguments, in_dims, strict=True)
        ]
        outputs = op(*folded)
        sizes = info.batch_size, arguments[0].shape[1 if in_dims[0] == 0 else 0]  # either may be 0
        single = [t for t in outputs if isinstance(t, Tensor)]
        mapped = (t.unflatten(0, sizes) if t.dim() > 1 else t for t in single)
        nothing = outputs[len(single) :]  # the gradients of captured tensors, which there are none of
        return (*mapped, *nothing), (*(0 if t.dim() > 1 else None for t in single), *nothing)

    return rule


def _fold(tensor: Tensor, dim: int | None, size: int) -> Tensor:
    mapped = tensor.expand(size, *tensor.shape) if dim is None else tensor.movedim(dim, 0)
    return mapped.flatten(0, 1)


for _device in ("CPU", "CUDA"):
    _library.impl("attention_forward", _forward_implementation, _device)
    _library.impl("attention_backward", _backward_implementation, _device)
    _library.impl("attention_backward_single", _backward_single_implementation, _device)
for _name in ("attention_forward", "attention_backward", "attention_backward_single"):
    # Autograd is recorded above the operators, by the functions here, and never inside (see the implementations).
    _library.impl(_name, torch.library.fallthrough_kernel, "Autograd")
dispatch.register_fake("flashtile::attention_forward", _forward_fake, _library)
dispatch.register_fake("flashtile::attention_backward", _backward_fake, _library)
torch.library.register_vmap("flashtile::attention_forward", _vmap_rule(_forward_op, 3), lib=_library)
torch.library.register_vmap("flashtile::attention_backward", _vmap_rule(_backward_op, 7), lib=_library)
