"""Inputs of 8 bits (float8_e4m3fn): making them, and what they stand for.

A number of q stands for itself times the `descale_q` of its sequence and key/value head, and likewise of k and v.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from flashtile.ops.attention.spec import FP8, SideInputs
from flashtile.ops.common.checks import check_float_dtype, check_tensors
from flashtile.ops.common.eight_bits import factors_for, rounded
from flashtile.ops.common.sizes import known


def quantize_fp8(x: Tensor, heads_kv: int | None = None) -> tuple[Tensor, Tensor]:
    """Rounds q, k or v to 8 bits. Each head is scaled so that its largest number becomes the largest of float8_e4m3fn.

    ::

        (q8, descale_q), (k8, descale_k), (v8, descale_v) = quantize_fp8(q, heads_kv), quantize_fp8(k), quantize_fp8(v)
        out = attention(q8, k8, v8, descale_q=descale_q, descale_k=descale_k, descale_v=descale_v)

    Args:
        x: `[batch, seq, heads, head_dim]`, or packed `[total, heads, head_dim]`, any float dtype. Autograd records
            nothing.
        heads_kv: heads of k and v, if x is q and has more heads: the query heads of a key/value head share a factor.

    Returns:
        x in float8_e4m3fn, contiguous, and the factors, float32: `x ≈ x8 · descale`. They have shape
        `[batch, heads_kv]`, or `[1, heads_kv]` for packed x, whose sequences share them.

    Raises:
        TypeError, ValueError: x is no float tensor of 3 or 4 dimensions, or heads_kv does not divide its heads.

    Reference:
        Micikevicius et al., "FP8 Formats for Deep Learning" (2022), section 3.
    """
    check_tensors(x=x)
    check_float_dtype("x", x.dtype)
    if x.dim() not in (3, 4):
        raise ValueError(
            f"x: expected [batch, seq, heads, head_dim] or [total, heads, head_dim], got shape {list(x.shape)}"
        )
    heads = x.shape[-2]
    heads_kv = heads if heads_kv is None else heads_kv
    if isinstance(heads_kv, bool) or not isinstance(heads_kv, int) or heads_kv < 1 or heads % heads_kv:
        raise ValueError(
            f"heads_kv: expected a divisor of the {heads} heads of x, got {heads_kv!r}; leave it out for k"
        )
    x = x.detach()
    groups = (x if x.dim() == 4 else x[None]).unflatten(2, (heads_kv, -1))  # [batch, seq, heads_kv, group, head_dim]
    magnitudes = groups.abs()
    if not known(groups.shape[1] > 0):  # nothing has no largest
        magnitudes = F.pad(magnitudes, (0, 0, 0, 0, 0, 0, 0, 1))
    largest = magnitudes.amax(dim=(1, 3, 4))
    descale = factors_for(largest, FP8)
    # Rounding of a quotient may lead past the largest number.
    return rounded(groups / descale[:, None, :, None, None], FP8).view(x.shape), descale


def dequantized(q: Tensor, k: Tensor, v: Tensor, side: SideInputs) -> tuple[Tensor, Tensor, Tensor, SideInputs]:
    """The numbers that 8-bit inputs stand for, in float32, and the side inputs without the factors."""
    q, k, v = (
        _times(tensor.float(), descale, cu_seqlens)
        for tensor, descale, cu_seqlens in zip(
            (q, k, v), side.descales, (side.cu_seqlens_q, side.cu_seqlens_k, side.cu_seqlens_k)
        )
    )
    return q, k, v, side._replace(descale_q=None, descale_k=None, descale_v=None)


def _times(x: Tensor, descale: Tensor | None, cu_seqlens: Tensor | None) -> Tensor:
    """x, dense or packed, times the factor `[batch, heads_kv]` of each of its rows."""
    if descale is None:
        return x
    descale = descale.repeat_interleave(x.shape[-2] // descale.shape[-1], dim=-1)
    if cu_seqlens is None:
        return x * descale[:, None, :, None]
    # Rows past the last sequence are no queries or keys of any.
    row = torch.arange(x.shape[0], device=x.device)
    sequence = torch.searchsorted(cu_seqlens[1:].contiguous(), row, right=True).clamp(max=descale.shape[0] - 1)
    return x * descale[sequence].unsqueeze(-1) if descale.shape[0] else x
