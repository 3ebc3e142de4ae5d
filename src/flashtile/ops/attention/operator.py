"""The operator: torch.library schemas, fakes and implementations, and the only autograd code of attention.

A call comes from `api`, passes PyTorch's dispatcher (where fake tensors and `torch.compile` stop), and goes on to
the backend that `select` names. If nothing could stop there (plain tensors, no mode, no trace), it skips the
dispatcher, which costs as much host time as the rest of a call.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from flashtile.ops.attention.derivatives import DifferentiableBackward, Tangents, forward_derivative
from flashtile.ops.attention.score_program import UNCHANGED, moved
from flashtile.ops.attention.select import serve_backward, serve_forward
from flashtile.ops.attention.spec import (
    GRADIENTS_SCHEMA,
    LEARNED,
    SIDE,
    SIDE_SCHEMA,
    SINGLE,
    SINGLE_SIDE_SCHEMA,
    SINGLE_WANTED_SCHEMA,
    SPEC,
    SPEC_SCHEMA,
    WANTED_SCHEMA,
    AttentionSpec,
    BackwardInputs,
    Gradients,
    Origin,
    SideInputs,
    Wanted,
    flat,
    lse_dtype,
    lse_shape,
    out_dtype,
    saved_side,
    side_tensors,
    unflatten,
    unflatten_backward,
    wanted_gradients,
)
from flashtile.ops.common import dispatch, dtensor
from flashtile.ops.common.flops import product_flops, register_flops, values_on_host

# Floating-point operations of the operators, as PyTorch counts those of its flash attention: two products forward and
# five backward over all pairs of a query and a key of one sequence, whether or not a mask shows them.


def visited_pairs(q: Tensor, k: Tensor, side: SideInputs) -> int:
    """Pairs of a query and a key, of all sequences and heads."""
    if side.cu_seqlens_q is None or side.cu_seqlens_k is None:
        batch, seq_q, heads, _ = q.shape
        return batch * seq_q * k.shape[1] * heads
    ends = values_on_host(side.cu_seqlens_q), values_on_host(side.cu_seqlens_k)
    if ends[0] is None or ends[1] is None:
        return q.shape[0] * side.max_seqlen_k * q.shape[1]  # at most
    lengths = [[end - start for start, end in pairwise(each)] for each in ends if each is not None]
    return sum(of_q * of_k for of_q, of_k in zip(*lengths)) * q.shape[1]


def _forward_flops(q: Tensor, k: Tensor, v: Tensor, *rest: Any, **_: Any) -> int:
    return product_flops(visited_pairs(q, k, SideInputs(*rest[:SIDE])), q.shape[-1] + v.shape[-1], 1)


def _backward_flops(
    dout: Tensor, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *rest: Any, **_: Any
) -> int:
    """Scores again, dq and dk; the gradient of the weights, and dv."""
    return product_flops(visited_pairs(q, k, SideInputs(*rest[:SIDE])), 3 * q.shape[-1] + 2 * v.shape[-1], 1)


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
    """Runs the operator, recorded by autograd where a gradient is wanted: (out, lse), or (out, lse, max_scores)."""
    if dtensor.present(q, k, v, *side_tensors(side)):
        return _run_sharded(q, k, v, side, spec, backend)
    if dispatch.transformed():
        return _asked_for(_TransformedAttention.apply(q, k, v, *flat(side, spec, backend)), spec)
    if torch.is_grad_enabled() and (
        q.requires_grad or k.requires_grad or v.requires_grad or any(wanted_gradients(side).flags)
    ):
        if torch.compiler.is_compiling():
            q, k, v, side = _distinct(q, k, v, side)
            return _Attention.apply(q, k, v, *flat(side, spec, backend))
        return _apply(q, k, v, *flat(side, spec, backend))
    return _run_forward(q, k, v, side, spec, backend)


def _run_sharded(
    q: Tensor, k: Tensor, v: Tensor, side: SideInputs, spec: AttentionSpec, backend: str
) -> tuple[Tensor, ...]:
    """`run_attention` of DTensors, on each rank's batch entries and heads, or the heads of packed sequences."""
    batch = "b" if spec.block_shape is None or spec.block_shape[0] == 1 else "."
    heads = "h" if spec.block_shape is None or spec.block_shape[1] == 1 else "."
    rows = "." if side.packed else batch + "."
    of_sequences = "." if side.packed else batch
    letters = {
        "key_lengths": of_sequences, "sinks": heads, "bias": f"{of_sequences}{heads}..",
        "mask": f"{of_sequences}{heads}..", "descale_q": of_sequences + heads, "descale_k": of_sequences + heads,
        "descale_v": of_sequences + heads,
        "alibi_slopes": of_sequences + heads,
    }  # fmt: skip
    operands: dict[str, tuple[Any, str]] = {
        name: (tensor, f"{rows}{heads}.") for name, tensor in (("q", q), ("k", k), ("v", v))
    }
    names = *SINGLE, *(f"captured[{place}]" for place in range(len(side.captured)))
    for name, tensor in zip(names, side_tensors(side), strict=True):
        dims = 0 if tensor is None else tensor.dim()
        operands[name] = tensor, letters.get(name, "." * dims)[-dims:]
    all_heads, sequences = q.shape[-2], q.shape[0]

    def function(division: dtensor.Division, q: Tensor, k: Tensor, v: Tensor, *aux: Any) -> tuple[Tensor, ...]:
        own = saved_side(aux, (side.max_seqlen_q, side.max_seqlen_k))
        if own.dropout_seed is not None:
            own = own._replace(dropout_seed=division.agree(own.dropout_seed))
        if "b" in division.letters or "h" in division.letters:
            place = division.start("b", sequences), division.start("h", all_heads)
            own, placed = _placed(own, spec, place, all_heads, q.device)
            return run_attention(q, k, v, own, placed, backend)
        return run_attention(q, k, v, own, spec, backend)

    lse = f"{'' if side.packed else batch}{heads}."
    results = (f"{rows}{heads}.", lse, lse)[: 2 + spec.returns_max_scores]
    learned = {*Wanted._fields, *names[len(SINGLE) :]}
    return dtensor.call(function, operands, results, learned)


def _placed(
    side: SideInputs, spec: AttentionSpec, place: tuple[int, int], all_heads: int, device: torch.device
) -> tuple[SideInputs, AttentionSpec]:
    """Side inputs and spec of a rank, whose dropout bits and score function count batch entries and heads in the whole
    call. `place`: the rank's first of both."""
    if spec.dropout_p:
        origin = Origin(0, 0, 0, 0, all_heads) if spec.origin is None else spec.origin
        spec = spec._replace(origin=origin._replace(matrix=origin.matrix + place[0] * origin.heads + place[1]))
    if spec.score_program not in (None, UNCHANGED):
        program, used = moved(spec.score_program)
        starts = *place, 0, 0
        numbers = tuple(torch.full((), starts[index], dtype=torch.int32, device=device) for index in used)
        side, spec = side._replace(captured=side.captured + numbers), spec._replace(score_program=program)
    return side, spec


def _asked_for(results: tuple[Tensor, ...], spec: AttentionSpec) -> tuple[Tensor, ...]:
    """The results of the operator, which always has three, without the third if it was not asked for."""
    return results if spec.returns_max_scores else results[:2]


def _run_forward(
    q: Tensor, k: Tensor, v: Tensor, side: SideInputs, spec: AttentionSpec, backend: str, recorded: bool = False
) -> tuple[Tensor, ...]:
    plain = side.plain
    if dispatch.unobserved(q, k, v) if plain else dispatch.unobserved(q, k, v, *side_tensors(side)):
        return serve_forward(q, k, v, side, spec, backend, plain, recorded=recorded)
    return _asked_for(_forward_op(q, k, v, *side, *spec, backend), spec)


def run_backward(
    given: BackwardInputs, side: SideInputs, spec: AttentionSpec, wanted: Wanted, backend: str
) -> Gradients:
    """Runs the backward from given results, which autograd does not record."""
    if dispatch.unobserved(given.q, *given, *(() if side.plain else side_tensors(side))):
        return serve_backward(given, side, spec, wanted, backend)
    grads = _backward_op(*given, *side, *spec, *wanted, backend)
    return _gradients(grads[:-1], grads[-1], wanted)


def _gradients(grads: Sequence[Tensor], of_captured: Sequence[Tensor], wanted: Wanted) -> Gradients:
    """The results of an operator, without those that were not wanted."""
    single: list[Any] = [grad if wants else None for grad, wants in zip(grads[3:], wanted[:-1])]
    single.append(tuple(grad if wants else None for grad, wants in zip(of_captured, wanted.captured)))
    return Gradients(grads[0], grads[1], grads[2], *single)


def _distinct(q: Tensor, k: Tensor, v: Tensor, side: SideInputs) -> tuple[Tensor, Tensor, Tensor, SideInputs]:
    """The same arguments, no tensor twice."""
    tensors: list[Any] = dispatch.distinct((q, k, v, *side_tensors(side)))
    q, k, v, *aux = tensors
    return q, k, v, saved_side(aux, (side.max_seqlen_q, side.max_seqlen_k))


class _Attention(torch.autograd.Function):
    """Attention recorded for the backward pass. Beside q, k and v it takes side inputs, spec and backend, `flat`."""

    @staticmethod
    def forward(ctx, q, k, v, *rest):
        side, spec, backend = unflatten(rest)
        results = _run_forward(q, k, v, side, spec, backend, recorded=True)
        _save(ctx, (q, k, v), results, side, spec, backend)
        return results

    @staticmethod
    def backward(ctx, dout, dlse, *of_max_scores):
        q, k, v, out, lse, *aux = ctx.saved_tensors
        needs = ctx.needs_input_grad[3:]
        max_seqlens, spec, backend = ctx.scalars
        side = saved_side(aux, max_seqlens)
        wanted = Wanted(*(needs[index] for index in LEARNED), tuple(needs[SPEC + 1 :]))
        grads = recorded_gradients((dout, dlse, q, k, v, out, lse), side, spec, wanted, backend)
        others: list[Tensor | None] = [None] * (SPEC + 1)
        for index, grad in zip(LEARNED, grads[3:-1]):
            others[index] = grad
        return grads.q, grads.k, grads.v, *others, *grads.captured


def recorded_gradients(
    given: Sequence[Any], side: SideInputs, spec: AttentionSpec, wanted: Wanted, backend: str
) -> Gradients:
    """The gradients of a recorded call, however PyTorch asks for them. `given`: `BackwardInputs`, dout may be None."""
    inputs = BackwardInputs(*given)
    if inputs.dout is None:
        inputs = inputs._replace(dout=torch.zeros_like(inputs.out))
    if (torch.is_grad_enabled() or dispatch.transformed()) and not torch.compiler.is_compiling():
        # A number, because functorch would take several booleans for several operands.
        bits = sum(wants << place for place, wants in enumerate(wanted.captured))
        grads = DifferentiableBackward.apply(*inputs, *flat(side, (*spec, *wanted[:-1], bits), backend))
        return _gradients(grads[:_SINGLE_GRADIENTS], grads[_SINGLE_GRADIENTS:], wanted)
    if dispatch.batched(inputs.dout, inputs.dlse):
        # For several gradients in one, PyTorch calls the operator with one after another.
        if side.captured:
            raise NotImplementedError(
                "score_mod: expected one that reads no tensors beside is_grads_batched=True, got one that reads "
                f"{len(side.captured)}; call torch.autograd.grad for one gradient after another"
            )
        operator = torch.ops.flashtile.attention_backward_single.default
        return _gradients(operator(*inputs, *side[:-1], *spec, *wanted[:-1], backend), (), wanted)
    return run_backward(inputs, side, spec, wanted, backend)


#: `_Attention.apply` without what it does first for `torch.func` transforms, which take another way above.
_apply = super(torch.autograd.Function, _Attention).apply


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
        ctx.save_for_forward(*_save(ctx, (q, k, v), output, *unflatten(rest)))

    @staticmethod
    def jvp(ctx, *tangents):
        dispatch.refuse_nested_forward_mode("flashtile.attention")
        q, k, v, _, _, *rest = ctx.saved_tensors
        max_seqlens, spec, _ = ctx.scalars
        side = saved_side(rest, max_seqlens)
        of_side, of_captured = SideInputs(*tangents[3 : 3 + SIDE]), tuple(tangents[3 + SPEC + 1 :])
        given = Tangents(*tangents[:3], of_side, of_captured)
        return *forward_derivative(q, k, v, side, spec, given), None


def _save(
    ctx, qkv: tuple[Tensor, Tensor, Tensor], results: tuple[Tensor, ...], side: SideInputs, spec: AttentionSpec,
    backend: str,
) -> tuple[Tensor | None, ...]:  # fmt: skip
    """Keeps what the backward needs, and returns the tensors of it."""
    out, lse, *max_scores = results
    if max_scores:
        ctx.mark_non_differentiable(*max_scores)
        spec = spec._replace(returns_max_scores=False)
    saved = *qkv, out, lse, *side_tensors(side)
    ctx.save_for_backward(*saved)
    ctx.scalars = (side.max_seqlen_q, side.max_seqlen_k), spec, backend
    ctx.set_materialize_grads(False)
    return saved


def _forward_implementation(q, k, v, *rest):
    with torch.no_grad():
        side, spec, backend = unflatten(rest)
        results = serve_forward(q, k, v, side, spec, backend, side.plain)
        return results if spec.returns_max_scores else (*results, q.new_empty(0, dtype=lse_dtype(q.dtype)))


def _backward_implementation(*arguments):
    tensors, side, spec, wanted, backend = unflatten_backward(arguments)
    with torch.no_grad():
        grads = serve_backward(BackwardInputs(*tensors), side, spec, wanted, backend)

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


def _vmap_rule(op: Callable, first_side: int) -> Callable:
    """Batching rule of a dense call: the mapped dimension joins the batch of every tensor. `first_side`: number of the
    first side input."""

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
register_flops("attention_forward", _forward_flops)
register_flops("attention_backward", _backward_flops)
register_flops("attention_backward_single", _backward_flops)
