"""Host side of the kernels that split the keys, which attention over a cache has too. A backend module of `select`.

There is a forward only: out and lse mean what they mean in every backend, so the backward is another's.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from flashtile._backends.alignment import used_strides
from flashtile._backends.devices import interpreting
from flashtile._backends.launch import plan_cache
from flashtile.ops.attention.seen_keys import visible_keys
from flashtile.ops.attention.spec import AttentionSpec, SideInputs
from flashtile.ops.common.checks import MAX_POSITIONS, check_rows
from flashtile.ops.common.split_keys.launch import attend
from flashtile.ops.common.split_keys.plan import SplitCall, SplitPlan, split_plan


def forward(q: Tensor, k: Tensor, v: Tensor, side: SideInputs, spec: AttentionSpec) -> tuple[Tensor, Tensor]:
    """Runs the kernels. Shapes as in `flashtile.attention`. Returns (out, lse)."""
    _, *by_head = side.learnable
    return attend(_plan_for(q, k, v, side, spec), (q, k, v), (side.key_lengths, *by_head), k.shape[1])


def prepare_forward(
    q: Tensor, k: Tensor, v: Tensor, side: SideInputs, spec: AttentionSpec
) -> Callable[[Tensor, Tensor, Tensor, tuple[Tensor, ...]], tuple[Tensor, Tensor]] | None:
    """`forward` of all 16-bit calls that look like this one, from q, k, v and the tensors beside them; or None."""
    if q.dtype is torch.float32 or interpreting():
        return None
    plan, length = _plan_for(q, k, v, side, spec), k.shape[1]
    return lambda q, k, v, aux: attend(plan, (q, k, v), aux, length)


def _plan_for(q: Tensor, k: Tensor, v: Tensor, side: SideInputs, spec: AttentionSpec) -> SplitPlan:
    lengths = side.key_lengths
    return _plan(
        q.device,
        q.dtype,
        (q.shape, k.shape, v.shape),
        (q.stride(), k.stride(), v.stride()),
        (q.data_ptr() | k.data_ptr() | v.data_ptr()) & 15,
        None if lengths is None else lengths.dtype,
        side.slope_dims,
        side.has_row_logit,
        spec,
        torch._C._get_cublas_allow_tf32(),
    )


@plan_cache
def _plan(device: torch.device, *facts: Any) -> SplitPlan:
    """`facts`: the arguments of `split_call`."""
    return split_plan(split_call(*facts), device)


def split_call(
    dtype: torch.dtype,
    shapes: tuple[tuple[int, ...], ...],
    strides: tuple[tuple[int, ...], ...],
    misalignment: int,
    lengths_dtype: torch.dtype | None,
    slope_dims: int,
    row_logits: bool,
    spec: AttentionSpec,
    allow_tf32: bool,
) -> SplitCall:
    """A call of attention as the kernels' plan sees it: a cache of one length, whose diagonal is told."""
    (batch, seq_q, heads, head_dim), _, (_, seq_k, heads_kv, head_dim_v) = shapes
    check_rows("k", seq_k, MAX_POSITIONS)
    first, last = visible_keys(seq_q, seq_k, spec)
    bottom_right = seq_k - seq_q
    return SplitCall(
        dtype,
        (batch, seq_q, heads, heads_kv, head_dim, head_dim_v),
        tuple(used_strides(shape[:-1], stride) for shape, stride in zip(shapes, strides)),
        misalignment,
        seq_k,
        spec.scale,
        allow_tf32,
        (lengths_dtype, *[None] * 6),
        window_left=spec.window_left,
        window_right=spec.window_right,
        diagonal=0 if spec.top_left else bottom_right,
        slope_diagonal=bottom_right + (spec.origin.diagonal if spec.origin else 0) if slope_dims else None,
        visible=last - first,
        softcap=spec.softcap,
        slope_dims=slope_dims,
        row_logits=row_logits,
    )
