"""Implementations of attention that are measured: ours and the peers, each with contiguous inputs in its layout."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

import flashtile
from flashtile import patterns
from flashtile.bench import masks
from flashtile.bench.base import Implementation, device_memory
from flashtile.bench.cases import Case, Inputs, cumulative, make_masks
from flashtile.bench.masks import ScoreMod, Visible

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask as FlexBlockMask

#: `(q, k, v) -> out`; in a case with a bias `(q, k, v, bias) -> out`, and with the tables of a function behind v where
#: it learns them.
Attention = Callable[..., Tensor]

#: The packages of FlashAttention-4 and of PyTorch's `varlen_attn`.
FA4, TORCH_VARLEN = ("flash_attn.cute",) * 2, ("torch.nn.attention.varlen",) * 2
#: torch.compile makes new FlexAttention kernels for every shape; of what others have too, these lengths are enough.
_FLEX_LENGTHS = (2048, 8192, 16384)
#: sdpa's memory-efficient kernel is slower than its others where those serve a case and there are more keys than this.
_FEW_KEYS = 256
#: The widest heads of FlashAttention and cuDNN.
_FLASH_HEAD_DIM = 256
#: Share of a device's memory that the N×N matrices of the plain computation may take.
_PLAIN_MEMORY_SHARE = 0.4


def build_flashtile(backend: str, deterministic: bool = False) -> Callable[[Case, Inputs], Attention]:
    def build(case: Case, inputs: Inputs) -> Attention:
        arguments = {**case.arguments(), "dropout_seed": inputs.dropout_seed, "backend": backend}
        arguments["deterministic"] = deterministic
        cu_seqlens = inputs.cu_seqlens
        if case.function in masks.SCORES:
            make = masks.SCORES[case.function].make  # it reads the tables that it is given, or those of the inputs
            return lambda q, k, v, *tables: flashtile.attention(
                q, k, v, score_mod=make(tables or inputs.tables, case.S), **arguments
            )
        if cu_seqlens is None:
            arguments |= _mask_arguments(inputs.block_mask, inputs.mask)
            return lambda q, k, v, bias=None: flashtile.attention(q, k, v, bias=bias, **arguments)
        arguments |= {"max_seqlen_q": case.S, "max_seqlen_k": case.S}
        return lambda q, k, v: flashtile.attention_varlen(q, k, v, cu_seqlens, **arguments)

    return build


def _build_builtin(case: Case, inputs: Inputs) -> Attention:
    """The case by an argument of flashtile instead of a function."""
    if case.function == "documents":
        lengths = masks.packed_lengths(case.S)
        cu_seqlens, longest = cumulative(lengths, inputs.q.device), max(lengths)
        packed: dict[str, Any] = {"causal": True, "max_seqlen_q": longest, "max_seqlen_k": longest}
        return lambda q, k, v: flashtile.attention_varlen(q[0], k[0], v[0], cu_seqlens, **packed)[None]
    name, value = {
        "alibi": ("alibi_slopes", inputs.tables and inputs.tables[0]),
        "softcap": ("softcap", masks.SOFTCAP),
        "window": ("window", (masks.window_left(case.S), 0)),
    }[case.function or ""]
    arguments: dict[str, Any] = {name: value, "causal": case.causal}
    return lambda q, k, v: flashtile.attention(q, k, v, **arguments)


def _no_builtin(case: Case, device: torch.device) -> str | None:
    if case.function in ("alibi", "softcap", "documents", "window"):
        return None
    return "flashtile has no argument for it" if case.function else "measured beside functions only"


def _mask_arguments(block_mask: flashtile.BlockMask | None, mask: Tensor | None) -> dict[str, Any]:
    """A block mask holds all that is visible, so that causal need not be said beside it."""
    if mask is not None:
        return {"mask": mask}
    return {} if block_mask is None else {"block_mask": block_mask, "causal": False}


def _build_sdpa(case: Case, inputs: Inputs) -> Attention:
    mask = inputs.mask
    if inputs.block_mask is not None:
        mask = inputs.block_mask.to_dense()
    elif case.window is not None:
        row = torch.arange(case.S, device=inputs.q.device)
        mask = visible_in_band(case)(row[:, None], row[None, :])
    options: dict[str, Any] = {"dropout_p": case.dropout_p, "is_causal": case.causal and mask is None}
    options["enable_gqa"] = case.H != case.Hkv
    attend: Callable[..., Tensor] = F.scaled_dot_product_attention
    return lambda q, k, v, bias=None: attend(q, k, v, attn_mask=mask if bias is None else bias, **options)


def _build_fa4(case: Case, inputs: Inputs, deterministic: bool = False) -> Attention:
    from flash_attn.cute import flash_attn_func, flash_attn_varlen_func

    mask: dict[str, Any] = {"causal": case.causal, "window_size": case.window or (None, None)}
    mask["deterministic"] = deterministic
    if case.softcap is not None:
        mask["softcap"] = case.softcap
    if inputs.cu_seqlens is None:
        return lambda q, k, v: flash_attn_func(q, k, v, **mask)[0]
    mask |= {f"cu_seqlens_{side}": inputs.cu_seqlens for side in "qk"}
    mask |= {f"max_seqlen_{side}": case.S for side in "qk"}
    return lambda q, k, v: flash_attn_varlen_func(q, k, v, **mask)[0]


def _build_torch_varlen(case: Case, inputs: Inputs) -> Attention:
    from torch.nn.attention.varlen import varlen_attn

    assert inputs.cu_seqlens is not None
    lengths = (inputs.cu_seqlens, inputs.cu_seqlens, case.S, case.S)
    attend: Callable[..., Any] = varlen_attn
    options = torch_varlen_options(case, inspect.signature(attend).parameters)
    return lambda q, k, v: attend(q, k, v, *lengths, **options)


def torch_varlen_options(case: Any, offered: Collection[str]) -> dict[str, Any]:
    """Keyword arguments of `varlen_attn` for a case without a window. `offered`: names of its parameters; its first
    version has `is_causal`, later ones `window_size`."""
    options: dict[str, Any] = {"enable_gqa": True} if case.H != case.Hkv and "enable_gqa" in offered else {}
    if case.causal:
        options |= {"is_causal": True} if "is_causal" in offered else {"window_size": (-1, 0)}
    return options


Limits = Callable[[Case, torch.device], str | None]


def _lacks(**reasons: str) -> Limits:
    """The reason of the first of some parts that a case has; None where it has none of them."""

    def limits(case: Case, device: torch.device) -> str | None:
        has = {
            "dropout": case.dropout_p, "packed": case.lengths, "dense": case.lengths is None, "bias": case.bias,
            "bias_and_mask": case.bias and (case.causal or case.window or case.mask),
        }  # fmt: skip
        return next((why for part, why in reasons.items() if has.get(part, getattr(case, part, None))), None)

    return limits


_sdpa_limits = _lacks(
    function="measured without functions", softcap="sdpa has no argument for a soft cap",
    bias_and_mask="sdpa takes a bias or a mask, not both", packed="takes no packed batch",
)  # fmt: skip
_fa4_limits = _lacks(
    **dict.fromkeys(
        ("mask", "bias", "function"),
        "measured without masks and biases, which it takes as functions in a language of its own",
    ),
    dropout="has no dropout",
)
_torch_varlen_limits = _lacks(
    dense="takes packed batches only", window="measured without windows", dropout="has no dropout"
)
_no_mask_tensor = _lacks(
    has_mask_tensor="measured without masks that are tensors", packed="takes no packed batch", dropout="has no dropout"
)


def _no_mask_kernel(case: Case, device: torch.device) -> str | None:
    if case.bias is not None:
        return "has no gradient of a bias"
    hides = next((what for what in ("window", "mask") if getattr(case, what) is not None), None)
    if case.function is None and hides and device.type == "cuda":
        return f"sdpa has no argument for a {hides}, so a {hides} of this kernel cannot be reached through it"
    return _sdpa_limits(case, device)


def _efficient_limits(case: Case, device: torch.device) -> str | None:
    added = case.bias is not None or case.has_mask_tensor or case.dropout_p > 0
    plain = not case.changes_scores and case.window is None
    others_do_not = case.dtype == "fp32" or case.D > _FLASH_HEAD_DIM or _before_flash(device)
    if not (added or (plain and (others_do_not or case.keys <= _FEW_KEYS))):
        return (
            "measured with a bias, a tensor as mask or dropout, in float32, with heads over "
            f"{_FLASH_HEAD_DIM}, with at most {_FEW_KEYS} keys, or on GPUs before sm_80 only"
        )
    return _sdpa_limits(case, device)


def _before_flash(device: torch.device) -> bool:
    """Whether a GPU is too old for FlashAttention and cuDNN."""
    nvidia = device.type == "cuda" and torch.cuda.is_available() and not torch.version.hip
    return nvidia and torch.cuda.get_device_capability(device) < (8, 0)


def _flex_limits(case: Case, device: torch.device) -> str | None:
    if case.lengths is None and not case.changes_scores and case.S not in _FLEX_LENGTHS:
        return f"compiles for each shape, so measured at S = {', '.join(map(str, _FLEX_LENGTHS))} only"
    return _no_mask_tensor(case, device)


def hopper_limits(case: Case, device: torch.device) -> str | None:
    """Why flashtile's kernels for Hopper would not serve a case, in flashtile's own words."""
    if torch.cuda.get_device_capability(device) != (9, 0):
        return "its kernels are for sm_90"
    q, k, v = (torch.empty(shape, dtype=case.torch_dtype, device="meta") for shape in case.shapes())
    arguments = case.arguments()
    if case.lengths is not None:
        cu_seqlens = torch.empty(case.B + 1, dtype=torch.int32, device="meta")
        arguments |= {"cu_seqlens_q": cu_seqlens, "max_seqlen_q": case.S, "max_seqlen_k": case.S}
    block_mask, mask = make_masks(case, device)
    arguments |= _mask_arguments(block_mask and block_mask.to("meta"), None if mask is None else mask.to("meta"))
    if case.function in masks.SCORES:
        tables = masks.tables(case.function, case.H, case.S, torch.Generator())
        meta = [table.to("meta").requires_grad_(masks.learns(case.function)) for table in tables]
        arguments["score_mod"] = masks.SCORES[case.function].make(meta, case.S)
    if case.bias_shape is not None:
        arguments["bias"] = torch.empty(case.bias_shape, dtype=case.torch_dtype, device="meta")
    answer = flashtile.explain(q, k, v, **arguments, backend="hopper", device=device)
    return answer.reason if answer.backend is None else None


def _plain_limits(case: Case, device: torch.device) -> str | None:
    """The forward's scores and weights, and their gradients, live at once in the backward."""
    needed = 4 * case.B * case.H * case.S**2 * 4
    memory = device_memory(device)
    if case.lengths is None and memory is not None and needed > _PLAIN_MEMORY_SHARE * memory:
        return f"its S×S matrices would take about {needed / 2**30:.0f} GiB"
    return _sdpa_limits(case, device)


def build_flex(case: Case, inputs: Inputs) -> Callable[..., Tensor]:
    """The compiled function `(q, k, v, [bias or tables]) -> out`. `fullgraph` makes an error of what torch.compile does
    not trace, and of its limit on recompilations."""
    torch.compiler.reset()  # each case compiles its own kernels; the limit on recompilations counts them together
    return torch.compile(flex_function(case, inputs), dynamic=False, fullgraph=True)


def flex_function(case: Case, inputs: Inputs) -> Callable[..., Tensor]:
    """The function, to be compiled: in eager execution FlexAttention computes the whole matrix in silence."""
    from torch.nn.attention.flex_attention import flex_attention

    lists, grouped = _block_mask(case, inputs), case.H != case.Hkv

    def attend(q: Tensor, k: Tensor, v: Tensor, *more: Tensor) -> Tensor:
        if not torch.compiler.is_compiling():
            raise RuntimeError("fell back to eager execution, whose time would be another's")
        if case.function in masks.SCORES:
            score_mod: ScoreMod | None = masks.SCORES[case.function].make(more or inputs.tables, case.S)
        else:
            score_mod = _score_mod(case, more[0] if more else None)
        return flex_attention(q, k, v, score_mod=score_mod, block_mask=lists, enable_gqa=grouped)

    return attend


def _score_mod(case: Case, bias: Tensor | None) -> ScoreMod | None:
    softcap, shared = case.softcap, case.bias == "1HSS"

    def score_mod(score: Tensor, batch: Tensor, head: Tensor, row: Tensor, column: Tensor) -> Tensor:
        if softcap is not None:
            score = softcap * torch.tanh(score / softcap)
        return score if bias is None else score + bias[0 if shared else batch, head, row, column]

    return None if softcap is None and bias is None else score_mod


def _block_mask(case: Case, inputs: Inputs) -> FlexBlockMask | None:
    """Our lists of blocks, which are FlexAttention's, with its usual functions for the elements of partial blocks."""
    from torch.nn.attention.flex_attention import BlockMask as FlexBlockMask

    device = inputs.q.device
    if inputs.block_mask is None and not case.causal and case.window is None:
        return None
    left, right = case.window or (None, None)
    band = patterns.sliding_window(case.S, None, left, 0 if case.causal else right, device=device)
    lists = (inputs.block_mask or band).to_flex()
    if case.shown is not None and case.shown.full:
        return lists
    visible = visible_in_band(case) if case.shown is None else case.shown.indices(device)
    blocks = (lists.kv_num_blocks, lists.kv_indices, lists.full_kv_num_blocks, lists.full_kv_indices)
    return FlexBlockMask.from_kv_blocks(
        *blocks, lists.BLOCK_SIZE, lambda batch, head, row, column: visible(row, column), (case.S, case.S)
    )


def visible_in_band(case: Case) -> Visible:
    """Whether a query sees a key by causal and window; made of no more comparisons than the case needs."""
    left, right = case.window or (None, None)
    keys_left = case.S if left is None else left
    keys_right = 0 if case.causal else case.S if right is None else right

    def visible(row: Tensor, column: Tensor) -> Tensor:
        seen = column <= row + keys_right
        return seen if left is None else seen & (column >= row - keys_left)

    return visible


def sdpa(name: str, devices: tuple[str, ...], build: Callable[..., Any], **more: Any) -> Implementation:
    """PyTorch's function with one of its backends."""
    backend = getattr(SDPBackend, "MATH" if name == "math" else f"{name.upper()}_ATTENTION")
    return Implementation(f"sdpa-{name}", devices, build, context=lambda: sdpa_kernel(backend), compiles=False, **more)


def _sdpa(name: str, limits: Limits, devices: tuple[str, ...] = ("cuda",), **more: Any) -> Implementation:
    return sdpa(name, devices, _build_sdpa, unsupported=limits, heads_first=True, own_dropout=True, **more)


IMPLEMENTATIONS = (
    Implementation("flashtile-hopper", ("cuda",), build_flashtile("hopper"), hopper_limits),
    Implementation("flashtile-triton", ("cuda",), build_flashtile("triton")),
    Implementation("flashtile-auto", ("cuda", "cpu"), build_flashtile("auto"), default=False),
    Implementation("flashtile-cpu", ("cpu",), build_flashtile("cpu")),
    Implementation("flashtile-builtin", ("cuda", "cpu"), _build_builtin, _no_builtin, default=False),
    Implementation("flashtile-deterministic", ("cuda", "cpu"), build_flashtile("auto", True), default=False),
    _sdpa("flash", _no_mask_kernel, ("cuda", "cpu")),
    _sdpa("cudnn", lambda case, device: (_sdpa_limits if case.has_mask_tensor else _no_mask_kernel)(case, device)),
    _sdpa("efficient", _efficient_limits),
    _sdpa("math", _plain_limits, ("cuda", "cpu"), default=False),
    Implementation("flex", ("cuda",), build_flex, _flex_limits, heads_first=True),
    Implementation("fa4", ("cuda",), _build_fa4, _fa4_limits, FA4),
    Implementation(
        "fa4-deterministic", ("cuda",), partial(_build_fa4, deterministic=True), _fa4_limits, FA4, default=False
    ),
    Implementation("torch-varlen", ("cuda",), _build_torch_varlen, _torch_varlen_limits, TORCH_VARLEN),
)
