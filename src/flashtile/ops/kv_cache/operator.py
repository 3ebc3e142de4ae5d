"""The operators. There is no autograd: a cache is for inference, and inputs that want a gradient are refused before.

Two operators with the same arguments: one reads the caches, the other writes the new rows to them first, and says so in
its schema.
"""

from __future__ import annotations

from collections.abc import Hashable
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flashtile.ops.common import dispatch, watch
from flashtile.ops.common.backends import standard_backends
from flashtile.ops.common.flops import product_flops, values_on_host
from flashtile.ops.common.operators import operator
from flashtile.ops.kv_cache import checks, repeated
from flashtile.ops.kv_cache.spec import CacheCall, CacheSpec, lse_dtype, new_counts, query_counts
from flashtile.ops.softmax.merge import finish_attention, merge_attention_

_BACKENDS = standard_backends("kv_cache")


class Results(NamedTuple):
    out: Tensor
    lse: Tensor


def run_with_cache(call: CacheCall, spec: CacheSpec, backend: str) -> tuple[Tensor, Tensor]:
    """Runs the operator. Returns (out, lse)."""
    if dispatch.transformed():
        raise NotImplementedError(
            "flashtile.attention_with_kv_cache has no torch.func transforms and no forward-mode derivative: it writes "
            "to its caches; use flashtile.attention"
        )
    if dispatch.unobserved(*call):
        return _forward(call, spec, backend)
    return (_read if call.k is None else _append)(*call, *spec, backend)


def remember(key: Hashable, given: repeated.Given, call: CacheCall, spec: CacheSpec, backend: str) -> None:
    """Lets calls like one that was served be served the short way, where the backend has one."""
    prepare = None if watch.watching() else getattr(_module(call, backend), "prepare_calls", None)
    if prepare is not None:
        repeated.remember(key, given, _readable(call), spec, prepare)


def _forward(call: CacheCall, spec: CacheSpec, backend: str) -> tuple[Tensor, Tensor]:
    """Runs the backend that serves the call."""
    checks.check_values(call, spec)
    if call.k is not None and call.k.numel():
        checks.check_destinations(call, spec)
    if spec.shared_rows and call.batch:
        checks.check_behind_shared_rows(call, spec)
        out, lse = _forward_behind_prefix(_readable(call), spec, backend)
    else:
        out, lse = _module(call, backend).forward(_readable(call), spec._replace(shared_rows=0))
    if call.k is not None:
        factors = (call.descale_k, call.descale_v) if spec.factors_of_rows else ()
        repeated.mark_written([each for each in (call.k_cache, call.v_cache, *factors) if each is not None])
    return out, lse


def _module(call: CacheCall, backend: str) -> ModuleType:
    """The module of the backend that serves a call."""
    in_float64 = call.rotary_cos is not None and call.rotary_cos.dtype is torch.float64
    return _BACKENDS.implementation(backend, call.q.device, torch.float64 if in_float64 else call.q.dtype)


def _readable(call: CacheCall) -> CacheCall:
    """The call with copies of what backends cannot read as it lies."""
    # Factors are written, and may have any strides. Kernels read slopes element after element: those of one sequence
    # that all share are copied.
    return CacheCall(*[None if tensor is None else _last_contiguous(tensor) for tensor in call])._replace(  # type: ignore[arg-type]
        descale_k=call.descale_k,
        descale_v=call.descale_v,
        alibi_slopes=None if call.alibi_slopes is None else call.alibi_slopes.contiguous(),
    )


def _last_contiguous(tensor: Tensor) -> Tensor:
    """Backends take any strides but the last, and that too where it leads nowhere. (Caches have been checked for it: a
    copy of one would get the new rows.)"""
    if not tensor.dim() or tensor.stride(-1) == 1 or tensor.shape[-1] == 1:
        return tensor
    return tensor.contiguous()


def _fake(call: CacheCall, spec: CacheSpec) -> tuple[Tensor, Tensor]:
    *rows, heads, _ = call.q.shape
    out = call.q.new_empty((*rows, heads, call.v_cache.shape[-1]))
    lse = (heads, *rows) if len(rows) == 1 else (rows[0], heads, rows[1])
    return out, call.q.new_empty(lse, dtype=lse_dtype(call.q.dtype))


def _flops(call: CacheCall, spec: CacheSpec) -> int:
    """Two products over all pairs of a query and a row of its sequence, also of rows that are not visible. Of a packed
    call whose lengths are on a GPU, a sequence counts as long as the cache allows."""
    heads, head_dim = call.q.shape[-2:]
    lengths = [spec.length] * call.batch if call.cache_lengths is None else values_on_host(call.cache_lengths)
    on_host = all(starts is None or values_on_host(starts) for starts in (call.cu_seqlens_q, call.cu_seqlens_new))
    if lengths is None or not on_host:
        pairs = call.q.shape[0] * (1 if call.cu_seqlens_q is not None else call.q.shape[1]) * call.capacity
    else:
        pairs = sum(
            queries * (length + new) for queries, length, new in zip(query_counts(call), lengths, new_counts(call))
        )
    return product_flops(pairs * heads, head_dim + call.v_cache.shape[-1], 1)


_read, _append = (
    operator(name, CacheCall, (CacheSpec,), Results, run=_forward, fake=_fake, writes=writes, flops=_flops).overload
    for name, writes in (("attention_cached", ""), ("attention_cached_", "k_cache v_cache descale_k descale_v"))
)


# --- a common prefix -------------------------------------------------------------------------------------------------
# Its rows are read once for all sequences, and the results are merged. The queries of all sequences are those of a
# single one that attends to the prefix, and each sequence attends to the rows behind it. Every query stands behind the
# prefix, so it sees all of that.


def _forward_behind_prefix(call: CacheCall, spec: CacheSpec, backend: str) -> tuple[Tensor, Tensor]:
    """Runs the backend that serves the call: at once where it can, else prefix and own rows apart."""
    module = _module(call, backend)
    at_once = getattr(module, "forward_behind_prefix", None)
    if at_once is not None and (results := at_once(call, spec)) is not None:
        return results
    left = torch.full((call.batch,), spec.shared_rows, dtype=torch.int32, device=call.q.device)
    own, own_lse = module.forward(call._replace(cache_left_padding=left), spec._replace(shared_rows=0))
    of_prefix, prefix_lse = module.forward(*_prefix_call(call, spec))
    packed, (heads, width) = call.cu_seqlens_q is not None, own.shape[-2:]
    batch, rows = (1, call.q.shape[0]) if packed else call.q.shape[:2]
    acc = own.new_empty((batch, rows, heads, width), dtype=own_lse.dtype)
    row_max, row_sum = own_lse.new_empty((2, batch, heads, rows))
    parts = ((of_prefix, prefix_lse.view(heads, batch, rows).transpose(0, 1)), (own, own_lse.view(batch, heads, rows)))
    for number, (part, lse) in enumerate(parts):
        merge_attention_(acc, row_max, row_sum, part.view(acc.shape), lse, first=not number, backend=backend)
    out, lse = finish_attention(acc, row_max, row_sum, own.dtype, backend=backend)
    return out.view(own.shape), lse.view(own_lse.shape)


def _prefix_call(call: CacheCall, spec: CacheSpec) -> tuple[CacheCall, CacheSpec]:
    """The call in which all queries attend to the prefix, where sequence 0 has it."""
    q, starts, longest = call.q, call.cu_seqlens_q, 0
    if starts is None:
        q = q.flatten(0, 1)[None]
    else:
        starts, longest = starts[:: call.batch], q.shape[0]  # the first and the last
    prefix = CacheCall(
        q, call.k_cache, call.v_cache,
        cache_batch_indices=_first(call.cache_batch_indices), block_table=_first(call.block_table),
        cu_seqlens_q=starts, descale_k=call.descale_k, descale_v=call.descale_v,
    )  # fmt: skip
    if prefix.block_table is prefix.cache_batch_indices is None:
        caches = ("k_cache", "v_cache", "descale_k", "descale_v")
        prefix = prefix._replace(**{name: _first(getattr(call, name)) for name in caches})
    return prefix, spec._replace(
        length=spec.shared_rows, window_left=None, window_right=None, max_seqlen_q=longest, shared_rows=0
    )


def _first(tensor: Tensor | None) -> Any:
    """The part of sequence 0."""
    return None if tensor is None else tensor[:1]
