"""The operator: torch.library schemas, fakes and implementations, and the only autograd code of attention.

A call comes from `api`, passes PyTorch's dispatcher (where fake tensors and `torch.compile` stop), and goes on to
the backend that `select` names.
"""

from __future__ import annotations

import torch
from torch import Tensor

from flashtile.ops.attention import checks, select
from flashtile.ops.attention.spec import AttentionSpec, SideInputs

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
    f"attention_backward(Tensor dout, Tensor? dlse, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, {_SIDE_SCHEMA}, "
    f"{_SPEC_SCHEMA}, str backend) -> (Tensor dq, Tensor dk, Tensor dv)"
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
    if torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad):
        return _Attention.apply(q, k, v, *side, *spec, backend)
    return _forward_op(q, k, v, *side, *spec, backend)


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, *rest):
        side, spec, backend = _unflatten(rest)
        out, lse = _forward_op(q, k, v, *rest)
        ctx.save_for_backward(
            q, k, v, out, lse, side.cu_seqlens_q, side.cu_seqlens_k, side.key_lengths, side.dropout_seed
        )
        ctx.max_seqlens, ctx.spec, ctx.backend = (side.max_seqlen_q, side.max_seqlen_k), spec, backend
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    def backward(ctx, dout, dlse):
        q, k, v, out, lse, cu_seqlens_q, cu_seqlens_k, key_lengths, dropout_seed = ctx.saved_tensors
        side = SideInputs(cu_seqlens_q, cu_seqlens_k, *ctx.max_seqlens, key_lengths, dropout_seed)
        if dout is None:
            dout = torch.zeros_like(out)
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            grads = _differentiable_backward(dout, dlse, q, k, v, side, ctx.spec)
        else:
            grads = _backward_op(dout, dlse, q, k, v, out, lse, *side, *ctx.spec, ctx.backend)
        return *grads, *(None,) * (_SPEC + 1)


def _differentiable_backward(
    dout: Tensor, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, side: SideInputs, spec: AttentionSpec
) -> tuple[Tensor, ...]:
    """The backward under `create_graph=True`: through the eager reference, so that it can be differentiated again."""
    from flashtile.ops.attention import reference

    with torch.enable_grad():
        inputs = [t if t.requires_grad else t.detach().requires_grad_() for t in (q, k, v)]
        out, lse = reference.forward(*inputs, side, spec)
        outputs, grads = ([out], [dout]) if dlse is None else ([out, lse], [dout, dlse])
        return torch.autograd.grad(outputs, inputs, grads, create_graph=True)


def _forward_implementation(q, k, v, *rest):
    side, spec, backend = _unflatten(rest)
    checks.check_values(side, q.shape[0], k.shape[0])
    implementation = select.implementation(q, backend)
    return implementation.forward(_rows_contiguous(q), _rows_contiguous(k), _rows_contiguous(v), side, spec)


def _backward_implementation(dout, dlse, q, k, v, out, lse, *rest):
    side, spec, backend = _unflatten(rest)
    implementation = select.implementation(q, backend)
    dout, q, k, v = (_rows_contiguous(t) for t in (dout, q, k, v))
    return implementation.backward(dout, dlse, q, k, v, out, lse, side, spec)


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


def _unflatten(rest: tuple) -> tuple[SideInputs, AttentionSpec, str]:
    return SideInputs(*rest[:_SIDE]), AttentionSpec(*rest[_SIDE:_SPEC]), rest[_SPEC]


def _rows_contiguous(tensor: Tensor) -> Tensor:
    """Kernels take any strides whose last dimension is contiguous."""
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


for _device in ("CPU", "CUDA"):
    _library.impl("attention_forward", _forward_implementation, _device)
    _library.impl("attention_backward", _backward_implementation, _device)
torch.library.register_fake("flashtile::attention_forward", _forward_fake, lib=_library)
torch.library.register_fake("flashtile::attention_backward", _backward_fake, lib=_library)
