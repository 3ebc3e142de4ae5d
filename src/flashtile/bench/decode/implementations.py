"""Implementations of a step of decoding that are measured beside one another: ours and the peers.

All read the same cache where it is. PyTorch's functions have heads before rows, so they get a view.
"""

from __future__ import annotations

import importlib.util
import inspect
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

import flashtile
from flashtile.bench.cases import select_named
from flashtile.bench.companions import implementations as companions
from flashtile.bench.decode.cases import DecodeCase, DecodeInputs

#: Returns out `[B, Sq, H, Dv]`.
Step = Callable[[], Tensor]


@dataclass(frozen=True)
class Implementation:
    """One way to compute a step.

    Attributes:
        name: as it stands in records.
        devices: device types it is measured on.
        build: makes the step of a case.
        unsupported: why it cannot run a case, or None.
        context: what must be entered around its calls.
    """

    name: str
    devices: tuple[str, ...]
    build: Callable[[DecodeInputs], Step]
    unsupported: Callable[[DecodeCase], str | None] = lambda case: None
    context: Callable[[], AbstractContextManager[Any]] = nullcontext


def _flashtile(backend: str) -> Callable[[DecodeInputs], Step]:
    def build(inputs: DecodeInputs) -> Step:
        positional = inputs.q, inputs.k_cache, inputs.v_cache, inputs.k, inputs.v
        options: dict[str, Any] = {
            "cache_lengths": inputs.lengths,
            "block_table": inputs.block_table,
            "rotary_cos": inputs.cos,
            "rotary_sin": inputs.sin,
            "backend": backend,
        }
        return lambda: flashtile.attention_with_kv_cache(*positional, **options)

    return build


def _sdpa(inputs: DecodeInputs) -> Step:
    q, k, v = (t.transpose(1, 2) for t in (inputs.q, inputs.k_cache, inputs.v_cache))
    grouped = q.shape[1] != k.shape[1]
    return lambda: F.scaled_dot_product_attention(q, k, v, enable_gqa=grouped).transpose(1, 2)


def _matmul(inputs: DecodeInputs) -> Step:
    """The plain computation with the heads of a group as rows, which repeats no keys."""
    batch, seq_q, heads, head_dim = inputs.q.shape
    heads_kv = inputs.k_cache.shape[2]
    q = inputs.q.view(batch, heads_kv, heads // heads_kv, head_dim)
    k, v = inputs.k_cache.permute(0, 2, 3, 1), inputs.v_cache.transpose(1, 2)
    scale = head_dim**-0.5
    return lambda: (q @ k).mul_(scale).softmax(-1).matmul(v).view(batch, seq_q, heads, -1)


def _gathered(inputs: DecodeInputs) -> Step:
    """sdpa on the rows of all pages, side by side."""
    assert inputs.block_table is not None
    pages = inputs.block_table.flatten()
    caches, batch = (inputs.k_cache, inputs.v_cache), len(inputs.q)
    grouped = inputs.q.shape[2] != inputs.k_cache.shape[2]

    def step() -> Tensor:
        k, v = (cache.index_select(0, pages).unflatten(0, (batch, -1)).flatten(1, 2) for cache in caches)
        q, k, v = (t.transpose(1, 2) for t in (inputs.q, k, v))
        return F.scaled_dot_product_attention(q, k, v, enable_gqa=grouped).transpose(1, 2)

    return step


def _fa4(inputs: DecodeInputs) -> Step:
    from flash_attn.cute import flash_attn_func

    attend: Callable[..., Any] = flash_attn_func
    tensors = inputs.q, inputs.k_cache, inputs.v_cache
    splits = {"num_splits": 0} if "num_splits" in inspect.signature(attend).parameters else {}  # 0: it chooses
    try:
        attend(*tensors, **splits)
    except Exception:  # it has kernels for splits on some architectures only
        splits = {}
    return lambda: attend(*tensors, **splits)[0]


def _plain_only(case: DecodeCase) -> str | None:
    if case.page is not None or case.append:
        return "measured on a cache in one piece, to which nothing is appended"
    return "measured with one query, which sees the whole cache" if case.Sq > 1 else None


def _pages_only(case: DecodeCase) -> str | None:
    if case.page is None or case.append:
        return "measured on pages, to which nothing is appended"
    return "measured with one query, which sees the whole cache" if case.Sq > 1 else None


def _fa4_missing(case: DecodeCase) -> str | None:
    if importlib.util.find_spec("flash_attn") is None or importlib.util.find_spec("flash_attn.cute") is None:
        return "flash_attn.cute is not installed"
    return _plain_only(case)


def _sdpa_with(name: str, devices: tuple[str, ...], backend: SDPBackend) -> Implementation:
    return Implementation(f"sdpa-{name}", devices, _sdpa, _plain_only, lambda: sdpa_kernel(backend))


IMPLEMENTATIONS = (
    Implementation("flashtile-triton", ("cuda",), _flashtile("triton")),
    Implementation("flashtile-cpu", ("cpu",), _flashtile("cpu")),
    _sdpa_with("flash", ("cuda", "cpu"), SDPBackend.FLASH_ATTENTION),
    _sdpa_with("cudnn", ("cuda",), SDPBackend.CUDNN_ATTENTION),
    _sdpa_with("efficient", ("cuda",), SDPBackend.EFFICIENT_ATTENTION),
    Implementation("matmul", ("cpu",), _matmul, _plain_only),
    Implementation("sdpa-gathered", ("cpu",), _gathered, _pages_only),
    Implementation("fa4", ("cuda",), _fa4, _fa4_missing),
)

#: What measures the copies beside them.
COPY = next(each for each in companions.IMPLEMENTATIONS if each.name == "eager")


def select_implementations(names: Sequence[str], device: torch.device) -> list[Implementation]:
    """The named implementations, or all of a device.

    Raises:
        ChoiceError: a name is unknown, or not for this device.
    """
    here = {each.name: each for each in IMPLEMENTATIONS if device.type in each.devices}
    return select_named("--impl", names or list(here), here, device.type)
