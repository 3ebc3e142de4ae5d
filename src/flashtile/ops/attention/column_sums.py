"""The operator of column sums, the attention that each key receives: schema, fake and implementation. It has no
derivative."""

from __future__ import annotations

import torch
from torch import Tensor

from flashtile.ops.attention import checks, flops, select
from flashtile.ops.attention.arguments import SIDE_SCHEMA, SPEC_SCHEMA, side_tensors, unflatten
from flashtile.ops.attention.calls import readable_side, rows_contiguous
from flashtile.ops.attention.spec import AttentionSpec, SideInputs, lse_dtype
from flashtile.ops.common import dispatch
from flashtile.ops.common.flops import register_flops

_library = torch.library.Library("flashtile", "FRAGMENT")
_library.define(
    f"attention_column_sums(Tensor q, Tensor k, Tensor lse, {SIDE_SCHEMA}, {SPEC_SCHEMA}, str backend) -> Tensor"
)
_op = torch.ops.flashtile.attention_column_sums.default


def run_column_sums(q: Tensor, k: Tensor, lse: Tensor, side: SideInputs, spec: AttentionSpec, backend: str) -> Tensor:
    """`[batch, heads_q, seq_k]`, packed `[heads_q, total_k]`, in the dtype of lse.

    Raises:
        ValueError: a gradient is wanted, or the backend cannot serve the call.
        NotImplementedError: under `torch.func` transforms and in forward mode.
    """
    tensors = (q, k, lse, *side_tensors(side))
    if dispatch.transformed():
        raise NotImplementedError(
            "flashtile.attention_column_sums under torch.func or in forward mode: expected none, it has no derivative "
            "and no batching rule; sum the rows of flashtile.attention_probs"
        )
    if torch.is_grad_enabled() and any(tensor is not None and tensor.requires_grad for tensor in tensors):
        raise ValueError(
            "q, k, lse, bias, alibi_slopes: expected tensors that want no gradient, as column sums have none, got some "
            "that do; call it under torch.no_grad(), or sum the rows of flashtile.attention_probs, which has a gradient"
        )
    if dispatch.unobserved(*tensors):
        return _column_sums(q, k, lse, side, spec, backend)
    return _op(q, k, lse, *side, *spec, backend)


def _column_sums(q: Tensor, k: Tensor, lse: Tensor, side: SideInputs, spec: AttentionSpec, backend: str) -> Tensor:
    checks.check_values(side, q.shape[0], k.shape[0])
    implementation = select.implementation("column_sums", q, k, k, side, spec, backend)
    side = side if side.plain else readable_side(side)
    return implementation.column_sums(rows_contiguous(q), rows_contiguous(k), lse.contiguous(), side, spec)


def _implementation(q, k, lse, *rest):
    with torch.no_grad():
        return _column_sums(q, k, lse, *unflatten(rest))


def _fake(q, k, lse, *rest):
    shape = (q.shape[0], q.shape[2], k.shape[1]) if q.dim() == 4 else (q.shape[1], k.shape[0])
    return q.new_empty(shape, dtype=lse_dtype(q.dtype))


for _device in ("CPU", "CUDA"):
    _library.impl("attention_column_sums", _implementation, _device)
dispatch.register_fake("flashtile::attention_column_sums", _fake, _library)
register_flops("attention_column_sums", flops.column_sums)
