"""Host side of the kernels that split the keys, which attention over a cache has too: a forward only."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from flashtile._backends.alignment import used_strides
from flashtile._backends.devices import interpreting
from flashtile._backends.launch import plan_cache, pointers
from flashtile._backends.pipeline import Pipeline
from flashtile.ops.attention.call import visible_keys
from flashtile.ops.attention.spec import AttentionSpec, SideInputs
from flashtile.ops.common.checks import MAX_POSITIONS, check_rows
from flashtile.ops.common.split_keys.plan import SplitCall, split_pipeline


def forward(q: Tensor, k: Tensor, v: Tensor, side: SideInputs, spec: AttentionSpec) -> tuple[Tensor, Tensor]:
    """Runs the kernels. Shapes as in `flashtile.attention`. Returns (out, lse)."""
    _, *by_head = side.learnable
    run = _pipeline_for(q, k, v, side, spec).run
    out, lse, *_ = run(*pointers((q, k, v, side.key_lengths, *by_head)), k.shape[1])
    return out, lse


def prepare_forward(
    q: Tensor, k: Tensor, v: Tensor, side: SideInputs, spec: AttentionSpec
) -> Callable[[Tensor, Tensor, Tensor, tuple[Tensor, ...]], tuple[Tensor, Tensor]] | None:
    """`forward` of all 16-bit calls that look like this one, from q, k, v and the tensors beside them; or None."""
    if q.dtype is torch.float32 or interpreting():
        return None
    run_kernels, length = _pipeline_for(q, k, v, side, spec).run, k.shape[1]

    def run(q: Tensor, k: Tensor, v: Tensor, aux: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
        out, lse, *_ = run_kernels(*pointers((q, k, v, *aux)), length)
        return out, lse

    return run


def _pipeline_for(q: Tensor, k: Tensor, v: Tensor, side: SideInputs, spec: AttentionSpec) -> Pipeline:
    return _pipeline(split_call(q, k, v, side, spec), q.device)


_pipeline = plan_cache(split_pipeline)


def split_call(q: Tensor, k: Tensor, v: Tensor, side: SideInputs, spec: AttentionSpec) -> SplitCall:
    """A call of attention as the kernels' plan sees it: a cache of one length, whose diagonal is told."""
    (batch, seq_q, heads, head_dim), (_, seq_k, heads_kv, head_dim_v) = q.shape, v.shape
    check_rows("k", seq_k, MAX_POSITIONS)
    first, last = visible_keys(seq_q, seq_k, spec)
    bottom_right = seq_k - seq_q
    lengths, slope_dims = side.key_lengths, side.slope_dims
    return SplitCall(
        dtype=q.dtype,
        shape=(batch, seq_q, heads, heads_kv, head_dim, head_dim_v),
        strides=tuple(used_strides(tensor.shape[:-1], tensor.stride()) for tensor in (q, k, v)),
        misalignment=(q.data_ptr() | k.data_ptr() | v.data_ptr()) & 15,
        capacity=seq_k,
        scale=spec.scale,
        allow_tf32=torch._C._get_cublas_allow_tf32(),
        index_dtypes=(None if lengths is None else lengths.dtype, *[None] * 6),
        window_left=spec.window_left,
        window_right=spec.window_right,
        diagonal=0 if spec.top_left else bottom_right,
        slope_diagonal=bottom_right + (spec.origin.diagonal if spec.origin else 0) if slope_dims else None,
        visible=last - first,
        softcap=spec.softcap,
        slope_dims=slope_dims,
        row_logits=side.has_row_logit,
    )
