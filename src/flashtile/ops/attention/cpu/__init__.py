"""The CPU backend: PyTorch's own flash attention where it computes the same, tiles in PyTorch for all other calls."""

from __future__ import annotations

import functools
from collections.abc import Callable

from torch import Tensor

from flashtile.ops.attention.cpu import tiled, torch_flash
from flashtile.ops.attention.cpu.backend import served_by_torch
from flashtile.ops.attention.cpu.tiled import column_sums, lengths_as_mask
from flashtile.ops.attention.fp8 import dequantized
from flashtile.ops.attention.spec import FP8, AttentionSpec, Gradients, SideInputs, Wanted, out_dtype

__all__ = ["backward", "column_sums", "forward", "prepare_unmasked"]


def forward(q: Tensor, k: Tensor, v: Tensor, side: SideInputs, spec: AttentionSpec) -> tuple[Tensor, ...]:
    """(out, lse), or (out, lse, max_scores), of a call on the CPU; shapes as in `flashtile.attention` and
    `attention_varlen`."""
    if q.dtype is FP8:
        out, *statistics = forward(*dequantized(q, k, v, side), spec)
        return out.to(out_dtype(FP8)), *statistics
    if not spec.batch_invariant:
        k, v, side = lengths_as_mask(q, k, v, side)
    if served_by_torch(spec, side, q.shape, k.shape, v.shape, q.dtype)[0]:
        found = torch_flash.forward(q, k, v, side, spec)
        if found is not None:
            return found
    return tiled.forward(q, k, v, side, spec)


def prepare_unmasked(
    q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec
) -> Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor] | None] | None:
    """A function that computes the forward of calls like this one without any mask, for any number of keys; None where
    that would not be PyTorch's flash attention. The function returns None for a result that it cannot tell from a wrong
    one."""
    if not served_by_torch(spec, SideInputs(), q.shape, k.shape, v.shape, q.dtype)[0]:
        return None
    return functools.partial(torch_flash.forward_unmasked, scale=spec.scale)


def backward(
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
) -> Gradients:
    """The gradients of a call on the CPU from its outputs and their gradients."""
    if dlse is not None and not dlse.any():
        dlse = None  # torch.compile passes zeros where nothing comes through lse
    if not spec.batch_invariant:
        k, v, side = lengths_as_mask(q, k, v, side)
    if dlse is None and served_by_torch(spec, side, q.shape, k.shape, v.shape, q.dtype, wanted)[0]:
        found = torch_flash.backward(dout, q, k, v, out, lse, side, spec=spec, wanted=wanted)
        if found is not None:
            return found
    return tiled.backward(dout, dlse, q, k, v, out, lse, side=side, spec=spec, wanted=wanted)
