"""Host side of the kernels over a cache: outputs and launches. The backend module for "triton".

Up to three kernels follow one another on the stream: new rows are appended (and queries rotated), programs attend to
their splits, and where there are several, their parts are combined.
"""

from __future__ import annotations

import torch
from torch import Tensor

from flashtile._backends.allocate import empty
from flashtile._backends.devices import interpreting
from flashtile._backends.launch import pointer
from flashtile.ops.kv_cache.spec import CacheCall, CacheSpec
from flashtile.ops.kv_cache.triton.plan import Launch, plan_for


def forward(call: CacheCall, spec: CacheSpec) -> tuple[Tensor, Tensor]:
    """(out, lse); shapes as in `flashtile.attention_with_kv_cache`."""
    if interpreting() and call.q.dtype is torch.bfloat16:
        raise ValueError(
            "backend: 'triton' cannot serve this call: Triton's interpreter multiplies bfloat16 wrongly; use float16 "
            "or float32 there"
        )
    q, device = call.q, call.q.device
    indices = tuple(map(pointer, call[5:9]))  # lengths, entries, left padding, table
    plan = plan_for(call, spec)
    if plan.append is not None:
        rotated = None if plan.rotated is None else empty(*plan.rotated, device)
        tensors = (q, rotated, call.k, call.v, call.k_cache, call.v_cache, call.rotary_cos, call.rotary_sin)
        if rotated is None:
            tensors = (*tensors[:6], None, None)
        _run(plan.append, *map(pointer, tensors), *indices[:2], indices[3], length=spec.length)
        q = q if rotated is None else rotated
    out, lse = empty(*plan.out, device), empty(*plan.lse, device)
    inputs = (*map(pointer, (q, call.k_cache, call.v_cache)),)
    rest = (*indices, *map(pointer, (call.alibi_slopes, call.sinks)))
    if plan.combine is None:
        _run(plan.attend, *inputs, pointer(out), pointer(lse), *rest, length=spec.length)
    else:
        parts, parts_lse = empty(*plan.parts, device), empty(*plan.parts_lse, device)
        _run(plan.attend, *inputs, pointer(parts), pointer(parts_lse), *rest, length=spec.length)
        launch, programs, scalars = plan.combine
        if programs:
            launch(programs, *map(pointer, (parts, parts_lse, out, lse)), *scalars)
    return out, lse


def _run(of: Launch, *pointers: object, length: int) -> None:
    if of.programs:
        of.launch(of.programs, *pointers, *of.scalars, length)
