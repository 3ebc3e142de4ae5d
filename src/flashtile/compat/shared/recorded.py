"""The autograd classes behind flash_attn 2's attention functions, for programs that call `apply` of one.

The functions need none of them: flashtile records its own calls. Each class takes the arguments of its function in
their order, then whether autograd records (`is_grad_enabled`), and returns out, or with return_softmax (out, lse,
S_dmask). lse is differentiable; slopes of ALiBi are not, and pages of `block_table` have no gradient.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from flashtile.compat.shared import calls
from flashtile.compat.shared.arguments import refuse, unpacked
from flashtile.compat.shared.calls import Call, Packed

Output = Tensor | tuple[Tensor, ...]


def _forward(
    ctx: Any,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    layout: Packed | None,
    call: Call,
    return_softmax: bool,
    is_grad_enabled: bool,
) -> Output:
    """Runs the forward, and keeps what the backward reads where an input requires grad."""
    recorded = is_grad_enabled and any(ctx.needs_input_grad)
    slopes = call.alibi_slopes
    if recorded and slopes is not None and slopes.requires_grad:
        refuse("alibi_slopes", "slopes that require no grad", slopes, "the functions beside these classes learn them")
    if recorded and layout is not None and layout.block_table is not None:
        refuse("block_table", "None where an input requires grad", layout.block_table, "call flash_attn_varlen_func")
    out, lse, weights, seed = calls.forward(q, k, v, layout, call, return_softmax and call.dropout_p > 0)
    ctx.set_materialize_grads(False)
    if recorded:
        cu_seqlens = (None, None) if layout is None else layout[:2]
        ctx.save_for_backward(q, k, v, out, lse, seed, slopes, *cu_seqlens)
        ctx.scalars = call._replace(alibi_slopes=None), None if layout is None else layout[2:4]
    if not return_softmax:
        return out
    ctx.mark_non_differentiable(weights)
    return out, lse, weights


def _backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None = None, *_: None) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of q, k and v."""
    q, k, v, out, lse, seed, slopes, cu_seqlens_q, cu_seqlens_k = ctx.saved_tensors
    call, longest = ctx.scalars
    layout = None if longest is None else Packed(cu_seqlens_q, cu_seqlens_k, *longest)
    dout = torch.zeros_like(out) if dout is None else dout
    call = call._replace(alibi_slopes=slopes)
    return calls.backward(dout, q, k, v, out, lse, layout, call, seed, dlse=dlse)


def _with_nones(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
    """Gradients of the first inputs, None for the others."""
    return *gradients, *(None,) * (len(ctx.needs_input_grad) - len(gradients))


class FlashAttnFunc(torch.autograd.Function):
    """Attention of a dense batch; `flash_attn_func`."""

    @staticmethod
    def forward(
        ctx, q, k, v, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic,
        return_softmax, is_grad_enabled=True,
    ):  # fmt: skip
        call = Call(dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic)
        return _forward(ctx, q, k, v, None, call, return_softmax, is_grad_enabled)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, *gradients):
        return _with_nones(ctx, *_backward(ctx, *gradients))


class FlashAttnKVPackedFunc(torch.autograd.Function):
    """`flash_attn_kvpacked_func`."""

    @staticmethod
    def forward(
        ctx, q, kv, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic,
        return_softmax, is_grad_enabled=True,
    ):  # fmt: skip
        k, v = unpacked("kv", kv, 2, "batch, seq_k")
        call = Call(dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic)
        return _forward(ctx, q, k, v, None, call, return_softmax, is_grad_enabled)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, *gradients):
        dq, dk, dv = _backward(ctx, *gradients)
        return _with_nones(ctx, dq, torch.stack((dk, dv), -3))


class FlashAttnQKVPackedFunc(torch.autograd.Function):
    """`flash_attn_qkvpacked_func`."""

    @staticmethod
    def forward(
        ctx, qkv, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_softmax,
        is_grad_enabled=True,
    ):  # fmt: skip
        q, k, v = unpacked("qkv", qkv, 3, "batch, seq")
        call = Call(dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic)
        return _forward(ctx, q, k, v, None, call, return_softmax, is_grad_enabled)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, *gradients):
        return _with_nones(ctx, torch.stack(_backward(ctx, *gradients), -3))


class FlashAttnVarlenFunc(torch.autograd.Function):
    """Attention of packed sequences; `flash_attn_varlen_func`."""

    @staticmethod
    def forward(
        ctx, q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p, softmax_scale, causal,
        window_size, softcap, alibi_slopes, deterministic, return_softmax, block_table, is_grad_enabled=True,
    ):  # fmt: skip
        call = Call(dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic)
        layout = Packed(cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, block_table)
        return _forward(ctx, q, k, v, layout, call, return_softmax, is_grad_enabled)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, *gradients):
        return _with_nones(ctx, *_backward(ctx, *gradients))


class FlashAttnVarlenKVPackedFunc(torch.autograd.Function):
    """`flash_attn_varlen_kvpacked_func`."""

    @staticmethod
    def forward(
        ctx, q, kv, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p, softmax_scale, causal,
        window_size, softcap, alibi_slopes, deterministic, return_softmax, is_grad_enabled=True,
    ):  # fmt: skip
        k, v = unpacked("kv", kv, 2, "total_k")
        call = Call(dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic)
        layout = Packed(cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
        return _forward(ctx, q, k, v, layout, call, return_softmax, is_grad_enabled)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, *gradients):
        dq, dk, dv = _backward(ctx, *gradients)
        return _with_nones(ctx, dq, torch.stack((dk, dv), -3))


class FlashAttnVarlenQKVPackedFunc(torch.autograd.Function):
    """`flash_attn_varlen_qkvpacked_func`."""

    @staticmethod
    def forward(
        ctx, qkv, cu_seqlens, max_seqlen, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes,
        deterministic, return_softmax, is_grad_enabled=True,
    ):  # fmt: skip
        q, k, v = unpacked("qkv", qkv, 3, "total")
        call = Call(dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic)
        layout = Packed(cu_seqlens, cu_seqlens, max_seqlen, max_seqlen)
        return _forward(ctx, q, k, v, layout, call, return_softmax, is_grad_enabled)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, *gradients):
        return _with_nones(ctx, torch.stack(_backward(ctx, *gradients), -3))
