"""PyTorch's own CPU flash attention, for the calls that it serves better than the tiles here."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from flashtile.ops.attention.spec import AttentionSpec, SideInputs

_forward_op = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
_backward_op = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default


def served_by_torch(
    spec: AttentionSpec,
    side: SideInputs,
    q_shape: Sequence[int],
    k_shape: Sequence[int],
    v_shape: Sequence[int],
    dtype: torch.dtype,
) -> tuple[bool, str]:
    """Whether PyTorch's CPU flash attention computes a call on the CPU backend.

    Returns:
        (served, reason). A backward that has a gradient of lse goes through the tiles in any case.
    """
    obstacle = _obstacle(spec, side, q_shape, k_shape, v_shape, dtype)
    if obstacle is None:
        return True, "PyTorch's CPU flash attention: a plain dense call"
    return False, f"flashtile tiles: {obstacle}"


def _obstacle(
    spec: AttentionSpec,
    side: SideInputs,
    q_shape: Sequence[int],
    k_shape: Sequence[int],
    v_shape: Sequence[int],
    dtype: torch.dtype,
) -> str | None:
    """What keeps PyTorch's flash attention from serving a call, or None."""
    if side.packed:
        return "PyTorch's CPU flash attention has no packed sequences"
    if spec.softcap or side.bias is not None or side.alibi_slopes is not None or side.sinks is not None:
        return "PyTorch's CPU flash attention has no soft cap, ALiBi or sinks, and no bias with a gradient"
    if side.mask is not None or side.block_lists is not None:
        return "PyTorch's CPU flash attention takes no masks that tiles could skip"
    if spec.dropout_p:
        return "PyTorch's CPU flash attention has no dropout"
    if side.key_lengths is not None:
        return "PyTorch's CPU flash attention has no key lengths without a mask of queries × keys"
    if spec.window_left is not None or spec.window_right not in (None, 0):
        return "PyTorch's CPU flash attention has no windows"
    if spec.window_right == 0 and not spec.top_left and q_shape[1] != k_shape[1]:
        return "PyTorch's CPU flash attention aligns the causal diagonal at the top left"
    if spec.window_right == 0 and spec.scale <= 0:
        return "PyTorch's CPU flash attention scales what it has masked: -inf times a negative scale"
    if q_shape[2] != k_shape[2]:
        return "PyTorch's CPU flash attention reads keys and values once for each query head, the tiles once for all"
    if q_shape[3] != v_shape[3]:
        return "PyTorch's CPU flash attention takes one head_dim"
    if dtype is torch.float16:
        return "PyTorch's CPU flash attention takes several times longer in float16"
    if 0 in (*q_shape, *k_shape):
        return "the call is empty"
    return None


def forward(q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec) -> tuple[Tensor, Tensor]:
    """(out, lse) of a call that is `served_by_torch`."""
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    out, lse = _forward_op(q, k, v, 0.0, spec.window_right == 0, scale=spec.scale)
    if out.dtype is torch.bfloat16:
        # An infinite score makes a row NaN; PyTorch's bfloat16 kernel returns numbers for it.
        infinite = lse == float("inf")
        if infinite.any():
            out.masked_fill_(infinite.unsqueeze(-1), float("nan"))
    return out.transpose(1, 2).contiguous(), lse.contiguous()


def backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, spec: AttentionSpec
) -> tuple[Tensor, ...]:
    """(dq, dk, dv) of a call that is `served_by_torch`, without a gradient of lse."""
    dout, q, k, v, out = (t.transpose(1, 2) for t in (dout, q, k, v, out))
    grads = _backward_op(dout, q, k, v, out, lse, 0.0, spec.window_right == 0, scale=spec.scale)
    return tuple(grad.transpose(1, 2).contiguous() for grad in grads)
