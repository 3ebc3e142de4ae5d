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

from flashtile.ops.attention import checks, select
from flashtile.ops.attention.spec import AttentionSpec, SideInputs
from flashtile.ops.common import dispatch

_SIDE_SCHEMA = (
    "Tensor? cu_seqlens_q, Tensor? cu_seqlens_k, SymInt max_seqlen_q, SymInt max_seqlen_k, "
    "Tensor? key_lengths, Tensor? dropout_seed"
)
_SPEC_SCHEMA = "float scale, int? window_left, int? window_right, bool top_left, float dropout_p, bool deterministic"

_library = torch.library.Library("flashtile", "DEF")
_library.define(
    f"attention_forward(Tensor q, Tensor k, Tensor v, {_SIDE_SCHEMA}, {_SPEC_SCHEMA}, str backend)"
    " -> (Tensor out, Tensor lse)"
)
_library.define(
    "attention_backward(Tensor dout, Tensor? dlse, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, "
    f"{_SIDE_SCHEMA}, {_SPEC_SCHEMA}, str backend) -> (Tensor dq, Tensor dk, Tensor dv)"
)
_forward_op = torch.ops.flashtile.attention_forward.default
_backward_op = torch.ops.flashtile.attention_backward.default

# Where the side inputs end and the spec ends in the flat argument lists of the schemas.
_SIDE = len(SideInputs._fields)
_SPEC = _SIDE + len(AttentionSpec._fields)


def run_attention(
    q: Tensor, k: Tensor, v: Tensor, side: SideInputs, spec: AttentionSpec, backend: str
) -> tuple[Tensor, Tensor]:
    """Runs the operator, recorded by autograd where a gradient is wanted. Returns (out, lse)."""
    if dispatch.transformed():
        return _TransformedAttention.apply(q, k, v, *side, *spec, backend)
    if torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad):
        if torch.compiler.is_compiling():
            q, k, v, side = _distinct(q, k, v, side)
            return _Attention.apply(q, k, v, *side, *spec, backend)
        return _apply(q, k, v, side, spec, backend)
    return _run_forward(q, k, v, side, spec, backend)


def _run_forward(
    q: Tensor, k: Tensor, v: Tensor, side: SideInputs, spec: AttentionSpec, backend: str
) -> tuple[Tensor, Tensor]:
    if dispatch.unobserved(q, k, v):
        return _forward(q, k, v, side, spec, backend)
    return _forward_op(q, k, v, *side, *spec, backend)


def _distinct(q: Tensor, k: Tensor, v: Tensor, side: SideInputs) -> tuple[Tensor, Tensor, Tensor, SideInputs]:
    """The same arguments, none twice: torch.compile cannot trace an autograd.Function that gets a tensor twice."""
    if k is q:
        k = k.view_as(k)
    if v is q or v is k:
        v = v.view_as(v)
    if side.cu_seqlens_k is not None and side.cu_seqlens_k is side.cu_seqlens_q:
        side = side._replace(cu_seqlens_k=side.cu_seqlens_k.view_as(side.cu_seqlens_k))
    return q, k, v, side


class _Attention(torch.autograd.Function):
    """Attention recorded for the backward pass.

    Beside q, k and v it takes side inputs, spec and backend: flat where it is traced, as three objects where not.
    """

    @staticmethod
    def forward(ctx, q, k, v, *rest):
        side, spec, backend = _unflatten(rest)
        out, lse = _run_forward(q, k, v, side, spec, backend)
        _save(ctx, q, k, v, out, lse, side, spec, backend, len(rest))
        return out, lse

    @staticmethod
    def backward(ctx, dout, dlse):
        q, k, v, out, lse, cu_seqlens_q, cu_seqlens_k, key_lengths, dropout_seed = ctx.saved_tensors
        max_seqlens, spec, backend, other_arguments = ctx.scalars
        side = SideInputs(cu_seqlens_q, cu_seqlens_k, *max_seqlens, key_lengths, dropout_seed)
        if dout is None:
            dout = torch.zeros_like(out)
        tensors = (dout, dlse, q, k, v, out, lse)
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            grads = _DifferentiableBackward.apply(*tensors, *side, *spec, backend)
        elif dispatch.unobserved(q, k, v, dout):
            grads = _backward(*tensors, side, spec, backend)
        else:
            grads = _backward_op(*tensors, *side, *spec, backend)
        return *grads, *(None,) * other_arguments


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
        return _forward_op(q, k, v, *rest)

    @staticmethod
    def setup_context(ctx, inputs, output):
        q, k, v, *rest = inputs
        _save(ctx, q, k, v, *output, *_unflatten(rest), len(rest))

    @staticmethod
    def jvp(ctx, *tangents):
        raise NotImplementedError(
            "flashtile.attention has no forward-mode derivative (torch.func.jvp, torch.func.jacfwd, "
            "torch.autograd.forward_ad); use reverse mode: torch.func.vjp, torch.func.jacrev"
        )


def _save(
    ctx,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    side: SideInputs,
    spec: AttentionSpec,
    backend: str,
    other_arguments: int,
) -> None:
    cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, key_lengths, dropout_seed = side
    ctx.save_for_backward(q, k, v, out, lse, cu_seqlens_q, cu_seqlens_k, key_lengths, dropout_seed)
    ctx.scalars = (max_seqlen_q, max_seqlen_k), spec, backend, other_arguments
    ctx.set_materialize_grads(False)


class _DifferentiableBackward(torch.autograd.Function):
    """The backward pass under `create_graph=True`: the operator, itself differentiable through the eager reference."""

    generate_vmap_rule = True

    @staticmethod
    def forward(*arguments):
        return _backward_op(*arguments)

    @staticmethod
    def setup_context(ctx, inputs, output):
        dout, dlse, q, k, v, _, _, *rest = inputs
        side, ctx.spec, _ = _unflatten(rest)
        ctx.save_for_backward(
            dout, dlse, q, k, v, side.cu_seqlens_q, side.cu_seqlens_k, side.key_lengths, side.dropout_seed
        )

    @staticmethod
    def backward(ctx, *grads):
        from flashtile.ops.attention import reference

        dout, dlse, q, k, v, cu_seqlens_q, cu_seqlens_k, key_lengths, dropout_seed = ctx.saved_tensors
        side = SideInputs(cu_seqlens_q, cu_seqlens_k, 0, 0, key_lengths, dropout_seed)

        # out and lse are functions of q, k and v here, so the whole derivative goes to those.
        def first_order(dout, dlse, q, k, v):
            _, pullback = torch.func.vjp(lambda *qkv: reference.forward(*qkv, side, ctx.spec), q, k, v)
            return pullback((dout, dlse))

        if dlse is None:
            dlse = q.new_zeros(lse_shape(q), dtype=lse_dtype(q.dtype))
        _, pullback = torch.func.vjp(first_order, dout, dlse, q, k, v)
        ddout, ddlse, *dqkv = pullback(grads)
        return ddout, ddlse if ctx.needs_input_grad[1] else None, *dqkv, *(None,) * (_SPEC + 3)


def _forward(
    q: Tensor, k: Tensor, v: Tensor, side: SideInputs, spec: AttentionSpec, backend: str
) -> tuple[Tensor, Tensor]:
    """Runs the forward of the backend that serves the call."""
    checks.check_values(side, q.shape[0], k.shape[0])
    q, k, v = _rows_contiguous(q), _rows_contiguous(k), _rows_contiguous(v)
    implementation = select.implementation("forward", q, k, v, side, spec, backend)
    return implementation.forward(q, k, v, _contiguous_side(side), spec)


def _backward(
    dout: Tensor,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    side: SideInputs,
    spec: AttentionSpec,
    backend: str,
) -> tuple[Tensor, Tensor, Tensor]:
    """Runs the backward of the backend that serves the call."""
    dout, q, k, v = (_rows_contiguous(t) for t in (dout, q, k, v))
    implementation = select.implementation("backward", q, k, v, side, spec, backend)
    return implementation.backward(dout, dlse, q, k, v, out, lse, _contiguous_side(side), spec)


def _forward_implementation(q, k, v, *rest):
    with torch.no_grad():
        return _forward(q, k, v, *_unflatten(rest))


def _backward_implementation(dout, dlse, q, k, v, out, lse, *rest):
    with torch.no_grad():
        return _backward(dout, dlse, q, k, v, out, lse, *_unflatten(rest))


def _forward_fake(q, k, v, *rest):
    out = q.new_empty(*q.shape[:-1], v.shape[-1])
    return out, q.new_empty(lse_shape(q), dtype=lse_dtype(q.dtype))


def _backward_fake(dout, dlse, q, k, v, out, lse, *rest):
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def lse_shape(q: Tensor) -> tuple[int, ...]:
    """`[batch, heads, seq_q]` for q `[batch, seq_q, heads, head_dim]`; `[heads, total_q]` for packed q."""
    return (q.shape[0], q.shape[2], q.shape[1]) if q.dim() == 4 else (q.shape[1], q.shape[0])


def lse_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype is torch.float64 else torch.float32


def _unflatten(rest: Sequence) -> tuple[SideInputs, AttentionSpec, str]:
    if len(rest) == 3:
        return tuple(rest)
    return SideInputs(*rest[:_SIDE]), AttentionSpec(*rest[_SIDE:_SPEC]), rest[_SPEC]


def _rows_contiguous(tensor: Tensor) -> Tensor:
    """Kernels take any strides whose last dimension is contiguous."""
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


def _contiguous_side(side: SideInputs) -> SideInputs:
    """Kernels read the side inputs element after element; a slice or an expanded length is copied."""
    if side.cu_seqlens_q is None and side.key_lengths is None and side.dropout_seed is None:
        return side
    tensors: dict[str, Any] = {
        name: entry.contiguous() for name, entry in side._asdict().items() if isinstance(entry, Tensor)
    }
    return side._replace(**tensors)


def _vmap_rule(op: Callable) -> Callable:
    """Batching rule of a dense call: the mapped dimension joins the batch, the first dimension of every tensor."""

    def rule(info, in_dims, *arguments):
        side, _, _ = _unflatten(arguments[-_SPEC - 1 :])
        if side.packed or side.dropout_seed is not None:
            raise NotImplementedError(
                "flashtile.attention under torch.func.vmap: expected a dense call without dropout; for others put the "
                "mapped dimension into the batch, or append the sequences to cu_seqlens"
            )
        folded = [
            _fold(argument, dim, info.batch_size) if isinstance(argument, Tensor) else argument
            for argument, dim in zip(arguments, in_dims, strict=True)
        ]
        outputs = op(*folded)
        return tuple(t.unflatten(0, (info.batch_size, -1)) for t in outputs), (0,) * len(outputs)

    return rule


def _fold(tensor: Tensor, dim: int | None, size: int) -> Tensor:
    mapped = tensor.expand(size, *tensor.shape) if dim is None else tensor.movedim(dim, 0)
    return mapped.flatten(0, 1)


for _device in ("CPU", "CUDA"):
    _library.impl("attention_forward", _forward_implementation, _device)
    _library.impl("attention_backward", _backward_implementation, _device)
for _name in ("attention_forward", "attention_backward"):
    # Autograd is recorded above the operators, by the functions here, and never inside (see the implementations).
    _library.impl(_name, torch.library.fallthrough_kernel, "Autograd")
torch.library.register_fake("flashtile::attention_forward", _forward_fake, lib=_library)
torch.library.register_fake("flashtile::attention_backward", _backward_fake, lib=_library)
torch.library.register_vmap("flashtile::attention_forward", _vmap_rule(_forward_op), lib=_library)
torch.library.register_vmap("flashtile::attention_backward", _vmap_rule(_backward_op), lib=_library)
