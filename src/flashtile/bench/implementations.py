"""Implementations of attention that are measured beside one another: ours and the peers.

Each gets inputs in the layout it calls its own, contiguous, so that none pays for another's layout.
"""

from __future__ import annotations

import importlib.util
import inspect
import os
from collections.abc import Callable, Collection
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

import flashtile
from flashtile.bench.cases import Case, Inputs, select_named

Attention = Callable[[Tensor, Tensor, Tensor], Tensor]

#: torch.compile makes new FlexAttention kernels for every shape; these lengths are enough to compare with.
_FLEX_LENGTHS = (2048, 8192)
#: Share of a device's memory that the N×N matrices of the plain computation may take.
_PLAIN_MEMORY_SHARE = 0.4


@dataclass(frozen=True)
class Implementation:
    """One way to compute attention.

    Attributes:
        name: as it stands in records.
        devices: device types it is measured on.
        build: makes the function `(q, k, v) -> out` for a case.
        unsupported: why it cannot run a case on a device, or None.
        heads_first: its layout is `[B, H, S, D]` instead of `[B, S, H, D]`. Not for packed batches.
        context: what must be entered around its calls.
        default: measured when no `--impl` is given.
    """

    name: str
    devices: tuple[str, ...]
    build: Callable[[Case, Inputs], Attention]
    unsupported: Callable[[Case, torch.device], str | None] = lambda case, device: None
    heads_first: bool = False
    context: Callable[[], AbstractContextManager[Any]] = nullcontext
    default: bool = True

    @property
    def ours(self) -> bool:
        return self.name.startswith("flashtile")


def build_flashtile(backend: str) -> Callable[[Case, Inputs], Attention]:
    def build(case: Case, inputs: Inputs) -> Attention:
        arguments = {**case.arguments(), "dropout_seed": inputs.dropout_seed, "backend": backend}
        cu_seqlens = inputs.cu_seqlens
        if cu_seqlens is None:
            return lambda q, k, v: flashtile.attention(q, k, v, **arguments)
        arguments |= {"max_seqlen_q": case.S, "max_seqlen_k": case.S}
        return lambda q, k, v: flashtile.attention_varlen(q, k, v, cu_seqlens, **arguments)

    return build


def _build_sdpa(case: Case, inputs: Inputs) -> Attention:
    grouped = case.H != case.Hkv
    if case.window is None:
        return lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=case.causal, enable_gqa=grouped)
    row = torch.arange(case.S, device=inputs.q.device)
    mask = _visibility(case)(row[:, None], row[None, :])
    return lambda q, k, v: F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=grouped)


def _build_flex(case: Case, inputs: Inputs) -> Attention:
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    torch.compiler.reset()  # each case compiles its own kernels; the limit on recompilations counts them together
    compiled = torch.compile(flex_attention, dynamic=False)
    block_mask = None
    if case.causal or case.window is not None:
        visible = _visibility(case)

        def mask_mod(batch: Tensor, head: Tensor, row: Tensor, column: Tensor) -> Tensor:
            return visible(row, column)

        block_mask = create_block_mask(mask_mod, None, None, case.S, case.S, inputs.q.device)
    return lambda q, k, v: compiled(q, k, v, block_mask=block_mask, enable_gqa=case.H != case.Hkv)


def _build_fa4(case: Case, inputs: Inputs) -> Attention:
    from flash_attn.cute import flash_attn_func, flash_attn_varlen_func

    mask = {"causal": case.causal, "window_size": case.window or (None, None)}
    if inputs.cu_seqlens is None:
        return lambda q, k, v: flash_attn_func(q, k, v, **mask)[0]
    lengths = {
        "cu_seqlens_q": inputs.cu_seqlens,
        "cu_seqlens_k": inputs.cu_seqlens,
        "max_seqlen_q": case.S,
        "max_seqlen_k": case.S,
    }
    return lambda q, k, v: flash_attn_varlen_func(q, k, v, **lengths, **mask)[0]


def _build_torch_varlen(case: Case, inputs: Inputs) -> Attention:
    from torch.nn.attention.varlen import varlen_attn

    assert inputs.cu_seqlens is not None
    lengths = (inputs.cu_seqlens, inputs.cu_seqlens, case.S, case.S)
    attend: Callable[..., Any] = varlen_attn
    options = torch_varlen_options(case, inspect.signature(attend).parameters)
    return lambda q, k, v: attend(q, k, v, *lengths, **options)


def torch_varlen_options(case: Case, offered: Collection[str]) -> dict[str, Any]:
    """Keyword arguments of `varlen_attn`: its first version has `is_causal`, later ones say it by `window_size`.

    Args:
        case: without a window, which the first version does not take.
        offered: names of its parameters.
    """
    options: dict[str, Any] = {"enable_gqa": True} if case.H != case.Hkv and "enable_gqa" in offered else {}
    if case.causal:
        options |= {"is_causal": True} if "is_causal" in offered else {"window_size": (-1, 0)}
    return options


def _visibility(case: Case) -> Callable[[Tensor, Tensor], Tensor]:
    """Whether a query sees a key, for a case with a mask; made of no more comparisons than the case needs."""
    left, right = case.window or (None, None)
    keys_left = case.S if left is None else left
    keys_right = 0 if case.causal else case.S if right is None else right

    def visible(row: Tensor, column: Tensor) -> Tensor:
        seen = column <= row + keys_right
        return seen if left is None else seen & (column >= row - keys_left)

    return visible


def _no_dropout(case: Case, device: torch.device) -> str | None:
    return "its dropout bits are its own, so its result cannot be checked" if case.dropout_p else None


def _dense_only(case: Case, device: torch.device) -> str | None:
    return "takes no packed batch" if case.lengths is not None else _no_dropout(case, device)


def _no_mask_kernel(case: Case, device: torch.device) -> str | None:
    if case.window is not None and device.type == "cuda":
        return "sdpa has no argument for a window, so a window of this kernel cannot be reached through it"
    return _dense_only(case, device)


def _flex_limits(case: Case, device: torch.device) -> str | None:
    if case.lengths is None and case.S not in _FLEX_LENGTHS:
        return f"compiles for each shape, so measured at S = {' and '.join(map(str, _FLEX_LENGTHS))} only"
    return _dense_only(case, device)


def hopper_limits(case: Case, device: torch.device) -> str | None:
    """Why flashtile's kernels for Hopper would not serve a case, in flashtile's own words."""
    if torch.cuda.get_device_capability(device) != (9, 0):
        return "its kernels are for sm_90"
    rows = (case.B, case.S) if case.lengths is None else (case.tokens,)
    shapes = ((*rows, case.H, case.D), (*rows, case.Hkv, case.D), (*rows, case.Hkv, case.Dv))
    q, k, v = (torch.empty(shape, dtype=case.torch_dtype, device="meta") for shape in shapes)
    packed: dict[str, Any] = {}
    if case.lengths is not None:
        cu_seqlens = torch.empty(case.B + 1, dtype=torch.int32, device="meta")
        packed = {"cu_seqlens_q": cu_seqlens, "max_seqlen_q": case.S, "max_seqlen_k": case.S}
    answer = flashtile.explain(q, k, v, **packed, **case.arguments(), backend="hopper", device=device)
    return answer.reason if answer.backend is None else None


def _torch_varlen_limits(case: Case, device: torch.device) -> str | None:
    if importlib.util.find_spec("torch.nn.attention.varlen") is None:
        return "torch.nn.attention.varlen is not in this PyTorch"
    if case.lengths is None:
        return "takes packed batches only"
    return "measured without windows" if case.window is not None else _no_dropout(case, device)


def _fa4_missing(case: Case, device: torch.device) -> str | None:
    if importlib.util.find_spec("flash_attn") is None or importlib.util.find_spec("flash_attn.cute") is None:
        return "flash_attn.cute is not installed"
    return _no_dropout(case, device)


def _plain_limits(case: Case, device: torch.device) -> str | None:
    """The forward's scores and weights, and their gradients, live at once in the backward."""
    needed = 4 * case.B * case.H * case.S**2 * 4
    memory = device_memory(device)
    if case.lengths is None and memory is not None and needed > _PLAIN_MEMORY_SHARE * memory:
        return f"its S×S matrices would take about {needed / 2**30:.0f} GiB"
    return _dense_only(case, device)


def device_memory(device: torch.device) -> int | None:
    """Bytes of memory of a device; None where the system does not tell."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    if not hasattr(os, "sysconf"):  # Windows
        return None
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


IMPLEMENTATIONS = (
    Implementation("flashtile-hopper", ("cuda",), build_flashtile("hopper"), hopper_limits),
    Implementation("flashtile-triton", ("cuda",), build_flashtile("triton")),
    Implementation("flashtile-cpu", ("cpu",), build_flashtile("cpu")),
    Implementation(
        "sdpa-flash",
        ("cuda", "cpu"),
        _build_sdpa,
        _no_mask_kernel,
        heads_first=True,
        context=lambda: sdpa_kernel(SDPBackend.FLASH_ATTENTION),
    ),
    Implementation(
        "sdpa-cudnn",
        ("cuda",),
        _build_sdpa,
        _no_mask_kernel,
        heads_first=True,
        context=lambda: sdpa_kernel(SDPBackend.CUDNN_ATTENTION),
    ),
    Implementation(
        "sdpa-math",
        ("cuda", "cpu"),
        _build_sdpa,
        _plain_limits,
        heads_first=True,
        context=lambda: sdpa_kernel(SDPBackend.MATH),
        default=False,
    ),
    Implementation("flex", ("cuda",), _build_flex, _flex_limits, heads_first=True),
    Implementation("fa4", ("cuda",), _build_fa4, _fa4_missing),
    Implementation("torch-varlen", ("cuda",), _build_torch_varlen, _torch_varlen_limits),
)


def select_implementations(names: list[str], device: torch.device) -> list[Implementation]:
    """The named implementations, or all defaults of a device.

    Raises:
        ChoiceError: a name is unknown, or not for this device.
    """
    here = [implementation for implementation in IMPLEMENTATIONS if device.type in implementation.devices]
    if not names:
        return [implementation for implementation in here if implementation.default]
    return select_named("--impl", names, {implementation.name: implementation for implementation in here}, device.type)
