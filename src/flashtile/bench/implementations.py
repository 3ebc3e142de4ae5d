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
from flashtile.bench import functions
from flashtile.bench.cases import Case, Inputs, cumulative, make_block_mask, make_mask_tensor, select_named
from flashtile.bench.flex import build_flex, visible_in_band

#: `(q, k, v) -> out`; in a case with a bias `(q, k, v, bias) -> out`, and with the tables of a function behind v where
#: it learns them.
Attention = Callable[..., Tensor]

#: torch.compile makes new FlexAttention kernels for every shape; of what others have too, these lengths are enough.
_FLEX_LENGTHS = (2048, 8192, 16384)
#: sdpa's memory-efficient kernel is slower than its others where those serve a case and there are more keys than this.
_FEW_KEYS = 256
#: The widest heads of FlashAttention and cuDNN.
_FLASH_HEAD_DIM = 256
#: Share of a device's memory that the N×N matrices of the plain computation may take.
_PLAIN_MEMORY_SHARE = 0.4


@dataclass(frozen=True)
class Implementation:
    """One way to compute attention.

    Attributes:
        name: as it stands in records.
        devices: device types it is measured on.
        build: makes the function for a case.
        unsupported: why it cannot run a case on a device, or None.
        heads_first: its layout is `[B, H, S, D]` instead of `[B, S, H, D]`. Not for packed batches.
        context: what must be entered around its calls.
        default: measured when no `--impl` is given.
        own_dropout: it draws bits of dropout of its own, so no other implementation drops the same weights.
        compiles: it compiles kernels when it is called first.
    """

    name: str
    devices: tuple[str, ...]
    build: Callable[[Case, Inputs], Attention]
    unsupported: Callable[[Case, torch.device], str | None] = lambda case, device: None
    heads_first: bool = False
    context: Callable[[], AbstractContextManager[Any]] = nullcontext
    default: bool = True
    own_dropout: bool = False
    compiles: bool = True

    @property
    def ours(self) -> bool:
        return self.name.startswith("flashtile")


def build_flashtile(backend: str) -> Callable[[Case, Inputs], Attention]:
    def build(case: Case, inputs: Inputs) -> Attention:
        arguments = {**case.arguments(), "dropout_seed": inputs.dropout_seed, "backend": backend}
        cu_seqlens = inputs.cu_seqlens
        if case.function in functions.SCORES:
            return _with_score_mod(case, inputs, arguments)
        if cu_seqlens is None:
            arguments |= _mask_arguments(inputs.block_mask, inputs.mask)
            return lambda q, k, v, bias=None: flashtile.attention(q, k, v, bias=bias, **arguments)
        arguments |= {"max_seqlen_q": case.S, "max_seqlen_k": case.S}
        return lambda q, k, v: flashtile.attention_varlen(q, k, v, cu_seqlens, **arguments)

    return build


def _with_score_mod(case: Case, inputs: Inputs, arguments: dict[str, Any]) -> Attention:
    """A call with the case's function, which reads the tables that it is given, or those of the inputs."""
    assert case.function is not None
    make = functions.SCORES[case.function].make

    def attend(q: Tensor, k: Tensor, v: Tensor, *tables: Tensor) -> Tensor:
        return flashtile.attention(q, k, v, score_mod=make(tables or inputs.tables, case.S), **arguments)

    return attend


def _build_builtin(case: Case, inputs: Inputs) -> Attention:
    """The case by an argument of flashtile instead of a function."""
    if case.function == "documents":
        lengths = functions.document_lengths(case.S)
        cu_seqlens, longest = cumulative(lengths, inputs.q.device), max(lengths)
        packed: dict[str, Any] = {"causal": True, "max_seqlen_q": longest, "max_seqlen_k": longest}
        return lambda q, k, v: flashtile.attention_varlen(q[0], k[0], v[0], cu_seqlens, **packed)[None]
    arguments: dict[str, Any] = {"causal": case.causal}
    if case.function == "alibi":
        arguments["alibi_slopes"] = inputs.tables[0]
    elif case.function == "softcap":
        arguments["softcap"] = functions.SOFTCAP
    else:
        arguments["window"] = (functions.window_left(case.S), 0)
    return lambda q, k, v: flashtile.attention(q, k, v, **arguments)


def _no_builtin(case: Case, device: torch.device) -> str | None:
    if case.function is None:
        return "measured beside functions only"
    known = case.function in ("alibi", "softcap", "documents", "window")
    return None if known else "flashtile has no argument for it"


def _mask_arguments(block_mask: flashtile.BlockMask | None, mask: Tensor | None) -> dict[str, Any]:
    """A block mask holds all that is visible, so that causal need not be said beside it."""
    if mask is not None:
        return {"mask": mask}
    return {} if block_mask is None else {"block_mask": block_mask, "causal": False}


def _build_sdpa(case: Case, inputs: Inputs) -> Attention:
    grouped = case.H != case.Hkv
    mask = inputs.mask
    if inputs.block_mask is not None:
        mask = inputs.block_mask.to_dense()
    elif case.window is not None:
        row = torch.arange(case.S, device=inputs.q.device)
        mask = visible_in_band(case)(row[:, None], row[None, :])
    causal = case.causal and mask is None

    def attend(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None = None) -> Tensor:
        added = mask if bias is None else bias
        return F.scaled_dot_product_attention(
            q, k, v, attn_mask=added, dropout_p=case.dropout_p, is_causal=causal, enable_gqa=grouped
        )

    return attend


def _build_fa4(case: Case, inputs: Inputs) -> Attention:
    from flash_attn.cute import flash_attn_func, flash_attn_varlen_func

    mask: dict[str, Any] = {"causal": case.causal, "window_size": case.window or (None, None)}
    if case.softcap is not None:
        mask["softcap"] = case.softcap
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


def _no_dropout(case: Case, device: torch.device) -> str | None:
    return "has no dropout" if case.dropout_p else None


def _dense_only(case: Case, device: torch.device) -> str | None:
    return "takes no packed batch" if case.lengths is not None else None


def _sdpa_limits(case: Case, device: torch.device) -> str | None:
    """Why no kernel of sdpa serves a case; None if one may."""
    if case.function is not None:
        return "measured without functions"
    if case.softcap is not None:
        return "sdpa has no argument for a soft cap"
    if case.bias is not None and (case.causal or case.window is not None or case.mask is not None):
        return "sdpa takes a bias or a mask, not both"
    return _dense_only(case, device)


def _no_mask_kernel(case: Case, device: torch.device) -> str | None:
    if case.bias is not None:
        return "has no gradient of a bias"
    if case.function is not None:
        return "measured without functions"
    for what in ("window", "mask"):
        if getattr(case, what) is not None and device.type == "cuda":
            return f"sdpa has no argument for a {what}, so a {what} of this kernel cannot be reached through it"
    return _sdpa_limits(case, device)


def _cudnn_limits(case: Case, device: torch.device) -> str | None:
    return _sdpa_limits(case, device) if case.has_mask_tensor else _no_mask_kernel(case, device)


def _efficient_limits(case: Case, device: torch.device) -> str | None:
    added = case.bias is not None or case.has_mask_tensor or case.dropout_p > 0
    plain = not case.changes_scores and case.window is None
    if not (added or (plain and (case.dtype == "fp32" or case.D > _FLASH_HEAD_DIM or case.keys <= _FEW_KEYS))):
        return (
            "measured with a bias, a tensor as mask or dropout, in float32, with heads over "
            f"{_FLASH_HEAD_DIM}, or with at most {_FEW_KEYS} keys only"
        )
    return _sdpa_limits(case, device)


def _flex_limits(case: Case, device: torch.device) -> str | None:
    if case.lengths is None and not case.changes_scores and case.S not in _FLEX_LENGTHS:
        return f"compiles for each shape, so measured at S = {', '.join(map(str, _FLEX_LENGTHS))} only"
    if case.has_mask_tensor:
        return "measured without masks that are tensors"
    return _dense_only(case, device) or _no_dropout(case, device)


def hopper_limits(case: Case, device: torch.device) -> str | None:
    """Why flashtile's kernels for Hopper would not serve a case, in flashtile's own words."""
    if torch.cuda.get_device_capability(device) != (9, 0):
        return "its kernels are for sm_90"
    rows = (case.B, case.S) if case.lengths is None else (case.tokens,)
    key_rows = rows if case.Sk is None else (case.B, case.Sk)
    shapes = ((*rows, case.H, case.D), (*key_rows, case.Hkv, case.D), (*key_rows, case.Hkv, case.Dv))
    q, k, v = (torch.empty(shape, dtype=case.torch_dtype, device="meta") for shape in shapes)
    packed: dict[str, Any] = {}
    if case.lengths is not None:
        cu_seqlens = torch.empty(case.B + 1, dtype=torch.int32, device="meta")
        packed = {"cu_seqlens_q": cu_seqlens, "max_seqlen_q": case.S, "max_seqlen_k": case.S}
    arguments = {**case.arguments(), **packed}
    block_mask, mask = make_block_mask(case, device), make_mask_tensor(case, device)
    arguments |= _mask_arguments(block_mask and block_mask.to("meta"), None if mask is None else mask.to("meta"))
    if case.function in functions.SCORES:
        arguments["score_mod"] = _score_mod_on_meta(case)
    if case.bias_shape is not None:
        arguments["bias"] = torch.empty(case.bias_shape, dtype=case.torch_dtype, device="meta")
    answer = flashtile.explain(q, k, v, **arguments, backend="hopper", device=device)
    return answer.reason if answer.backend is None else None


def _score_mod_on_meta(case: Case) -> functions.ScoreMod:
    assert case.function is not None
    tables = functions.tables(case.function, case.H, case.S, torch.Generator())
    meta = [table.to("meta").requires_grad_(functions.learns(case.function)) for table in tables]
    return functions.SCORES[case.function].make(meta, case.S)


def _torch_varlen_limits(case: Case, device: torch.device) -> str | None:
    if importlib.util.find_spec("torch.nn.attention.varlen") is None:
        return "torch.nn.attention.varlen is not in this PyTorch"
    if case.lengths is None:
        return "takes packed batches only"
    return "measured without windows" if case.window is not None else _no_dropout(case, device)


def _fa4_missing(case: Case, device: torch.device) -> str | None:
    if importlib.util.find_spec("flash_attn") is None or importlib.util.find_spec("flash_attn.cute") is None:
        return "flash_attn.cute is not installed"
    if not (case.mask is case.bias is case.function is None):
        return "measured without masks and biases, which it takes as functions in a language of its own"
    return _no_dropout(case, device)


def _plain_limits(case: Case, device: torch.device) -> str | None:
    """The forward's scores and weights, and their gradients, live at once in the backward."""
    needed = 4 * case.B * case.H * case.S**2 * 4
    memory = device_memory(device)
    if case.lengths is None and memory is not None and needed > _PLAIN_MEMORY_SHARE * memory:
        return f"its S×S matrices would take about {needed / 2**30:.0f} GiB"
    return _sdpa_limits(case, device)


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
    Implementation("flashtile-auto", ("cuda",), build_flashtile("auto"), default=False),
    Implementation("flashtile-cpu", ("cpu",), build_flashtile("cpu")),
    Implementation("flashtile-builtin", ("cuda", "cpu"), _build_builtin, _no_builtin, default=False),
    Implementation(
        "sdpa-flash",
        ("cuda", "cpu"),
        _build_sdpa,
        _no_mask_kernel,
        heads_first=True,
        context=lambda: sdpa_kernel(SDPBackend.FLASH_ATTENTION),
        own_dropout=True,
        compiles=False,
    ),
    Implementation(
        "sdpa-cudnn",
        ("cuda",),
        _build_sdpa,
        _cudnn_limits,
        heads_first=True,
        context=lambda: sdpa_kernel(SDPBackend.CUDNN_ATTENTION),
        own_dropout=True,
        compiles=False,
    ),
    Implementation(
        "sdpa-efficient",
        ("cuda",),
        _build_sdpa,
        _efficient_limits,
        heads_first=True,
        context=lambda: sdpa_kernel(SDPBackend.EFFICIENT_ATTENTION),
        own_dropout=True,
        compiles=False,
    ),
    Implementation(
        "sdpa-math",
        ("cuda", "cpu"),
        _build_sdpa,
        _plain_limits,
        heads_first=True,
        context=lambda: sdpa_kernel(SDPBackend.MATH),
        own_dropout=True,
        compiles=False,
        default=False,
    ),
    Implementation("flex", ("cuda",), build_flex, _flex_limits, heads_first=True),
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
