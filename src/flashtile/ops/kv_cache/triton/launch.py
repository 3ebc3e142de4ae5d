"""Host side of the kernels over a cache: outputs and launches. The backend module for "triton".

Up to three kernels follow one another on the stream: new rows are appended (and queries rotated), programs attend to
their splits, and where there are several, their parts are combined.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from flashtile._backends.devices import device_facts, interpreting
from flashtile._backends.launch import pointers
from flashtile.ops.common import checks
from flashtile.ops.kv_cache.spec import CacheCall, CacheSpec
from flashtile.ops.kv_cache.triton.plan import CachePlan, plan_for


def forward(call: CacheCall, spec: CacheSpec) -> tuple[Tensor, Tensor]:
    """(out, lse); shapes as in `flashtile.attention_with_kv_cache`."""
    if interpreting() and call.k_cache.dtype is torch.bfloat16:
        raise ValueError(
            "backend: 'triton' cannot serve this call: Triton's interpreter multiplies bfloat16 wrongly; use float16 "
            "or float32 there"
        )
    _check_eight_bits(call)
    if spec.batch_invariant and spec.scale <= 0:
        # As attention's forward has it, whose kernel takes the maximum before it scales.
        call = call._replace(q=-call.q if spec.scale else torch.zeros_like(call.q))
        spec = spec._replace(scale=-spec.scale or 1.0)
    if not call.batch and call.cu_seqlens_q is not None:
        return _unowned_results(call)
    return _launch(plan_for(call, spec), call, spec.length)


def prepare_calls(call: CacheCall, spec: CacheSpec) -> Callable[..., tuple[Tensor, Tensor]] | None:
    """`forward` of all calls that look like this one, from their tensors and the length of all sequences; None where
    values are read first, or q is changed."""
    changed = spec.batch_invariant and spec.scale <= 0
    if interpreting() or checks.CHECK_VALUES or changed or not call.batch:
        return None
    return functools.partial(_launch, plan_for(call, spec))


def _launch(plan: CachePlan, tensors: Sequence[Any], length: int) -> tuple[Tensor, Tensor]:
    """`tensors`: those of `CacheCall`."""
    (
        q, k_cache, v_cache, k, v, lengths, entries, left, table, cos, sin, slopes, sinks, starts, new_starts,
        descale_k, descale_v, tree,
    ) = tensors  # fmt: skip
    indices = lengths, entries, left, table, starts, new_starts, tree
    if plan.append is not None:
        (rotated,) = plan.append.allocate()
        if rotated is None:
            cos = sin = None
        appended = q, rotated, k, v, k_cache, v_cache, cos, sin, *indices, descale_k, descale_v
        plan.append.launch(*pointers(appended), length)
        q = q if rotated is None else rotated
    if plan.latent is not None:
        return plan.latent.run(q, k_cache, indices, length)
    attended = q, k_cache, v_cache
    results = None
    if plan.split is not None:
        results = plan.split.run(attended, (*indices, slopes, sinks, descale_k, descale_v), length)
    others: tuple[Any, ...] = starts, slopes, sinks, lengths, entries, table, new_starts
    if plan.steps is not None:
        results = plan.steps.run(attended, others, length)
    others = *others, descale_k, descale_v, tree
    if plan.chunks is not None:
        results = plan.chunks.run(attended, results, others, length)
    assert results is not None
    return results


def _unowned_results(call: CacheCall) -> tuple[Tensor, Tensor]:
    """Those of packed queries that belong to no sequence."""
    total_q, heads, _ = call.q.shape
    out = call.q.new_zeros(total_q, heads, call.v_cache.shape[-1])
    return out, call.q.new_full((heads, total_q), float("-inf"), dtype=torch.float32)


def _check_eight_bits(call: CacheCall) -> None:
    """Raises where Triton cannot read or write the caches."""
    dtype, facts = call.k_cache.dtype, device_facts(call.q.device)
    if interpreting() and call.k is not None and dtype in (torch.float8_e4m3fn, torch.float8_e5m2):
        raise ValueError(
            f"backend: 'triton' cannot serve this call: Triton's interpreter rounds to {dtype} wrongly; append to "
            "caches of int8 there"
        )
    unknown = (facts.is_cuda and facts.capability < 89) or facts.arch in ("gfx942", "gfx1100")
    if dtype is torch.float8_e4m3fn and unknown and not interpreting():
        raise ValueError(
            f"k_cache: expected float8_e5m2 or int8 on {facts.arch}, whose Triton has no float8_e4m3fn, got it; make "
            "the caches in one of those"
        )
