"""Checks of user input at the public edge: each error names argument, expectation, what came and the remedy."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Sequence

import torch
from torch import Tensor

from flashtile.ops.attention.block_mask import BlockMask
from flashtile.ops.attention.spec import FP8, MAX_HEAD_DIM, SideInputs, lse_dtype, out_dtype
from flashtile.ops.common import checks, sizes
from flashtile.ops.common.checks import (
    FLOAT_DTYPES,
    check_cu_seqlens_values,
    check_device,
    check_tensors,
    readable,
    type_name,
)
from flashtile.ops.common.dispatch import transformed


def check_qkv(q: Tensor, k: Tensor, v: Tensor, layout: Sequence[str], eight_bits: bool = False) -> None:
    """Checks ranks, shapes, dtypes, devices and head counts of q, k, v. `layout`: names of the dimensions, `("batch",
    "seq", "heads", "head_dim")` or without batch when packed. `eight_bits`: float8_e4m3fn is served too."""
    rank = len(layout)
    check_tensors(q=q, k=k, v=v)
    if not (
        q.dim() == k.dim() == v.dim() == rank and q.dtype is k.dtype is v.dtype and q.device == k.device == v.device
    ):
        _raise_rank_dtype_device(q, k, v, layout)
    if q.dtype not in FLOAT_DTYPES and not (eight_bits and q.dtype is FP8):
        also = " (the forward of attention and attention_varlen: or float8_e4m3fn)" if q.dtype.itemsize == 1 else ""
        raise TypeError(
            f"q, k, v: expected dtype float16, bfloat16, float32 or float64{also}, got {q.dtype}; cast them first"
        )
    q_shape, k_shape, v_shape = q.shape, k.shape, v.shape
    if sizes.differ(k_shape[:-1], v_shape[:-1]):
        raise ValueError(
            f"v: expected the {', '.join(layout[:-1])} of k, {tuple(k_shape[:-1])}, got {tuple(v_shape[:-1])}; "
            "each key has one value"
        )
    if rank == 4 and sizes.differ(q_shape[:1], k_shape[:1]):
        raise ValueError(
            f"k: expected the batch size of q, {q_shape[0]}, got {k_shape[0]}; expand k and v, or repeat them"
        )
    head_dim, head_dim_v = q_shape[-1], v_shape[-1]
    if head_dim != k_shape[-1]:
        raise ValueError(f"k: expected the head_dim of q, {head_dim}, got {k_shape[-1]}; scores are their products")
    if not (1 <= head_dim <= MAX_HEAD_DIM and 1 <= head_dim_v <= MAX_HEAD_DIM):
        name, wrong = ("v", head_dim_v) if 1 <= head_dim <= MAX_HEAD_DIM else ("q", head_dim)
        raise ValueError(
            f"{name}: expected head_dim from 1 to {MAX_HEAD_DIM}, got {wrong}; split the head into several"
        )
    heads_q, heads_kv = q_shape[-2], k_shape[-2]
    checks.check_heads("k, v", heads_q, heads_kv)


def _raise_rank_dtype_device(q: Tensor, k: Tensor, v: Tensor, layout: Sequence[str]) -> None:
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        if tensor.dim() != len(layout):
            hint = (
                "for packed sequences use flashtile.attention_varlen"
                if len(layout) == 4
                else "for a dense batch use flashtile.attention"
            )
            raise ValueError(
                f"{name}: expected {len(layout)} dimensions [{', '.join(layout)}], got shape {tuple(tensor.shape)}; "
                f"{hint}"
            )
    for name, tensor in (("k", k), ("v", v)):
        if tensor.dtype is not q.dtype:
            raise TypeError(f"{name}: expected the dtype of q, {q.dtype}, got {tensor.dtype}; cast one of them")
        if tensor.device != q.device:
            raise ValueError(f"{name}: expected the device of q, {q.device}, got {tensor.device}; move one of them")


#: More heads than any model has.
_MANY_HEADS = 256
#: Whether the layout was warned of in this process.
_warned = False


def warn_swapped_layout(q: Tensor, layout: Sequence[str]) -> None:
    """Warns once in a process where q, whose shape was checked, has more heads than any model, and far fewer tokens:
    then it probably has PyTorch's layout, heads before tokens, which gives wrong numbers without an error. Calls by
    flashtile itself have the right one, as that of `scaled_dot_product_attention` for inputs without heads."""
    global _warned
    heads, tokens = q.shape[-2], q.shape[-3]
    if _warned or torch.compiler.is_compiling() or heads <= _MANY_HEADS or 4 * tokens > heads:
        return
    caller = sys._getframe(3).f_globals.get("__name__", "")  # of the public function, which calls `checked_qkv`
    if caller.startswith("flashtile."):
        return
    _warned = True
    swapped = [*layout[:-3], layout[-2], layout[-3], layout[-1]]
    warnings.warn(
        f"q: expected [{', '.join(layout)}], got shape {list(q.shape)}, which is {tokens} tokens of {heads} heads; if "
        f"it is [{', '.join(swapped)}], pass q.transpose(-3, -2), and k and v likewise, or call "
        "flashtile.scaled_dot_product_attention, which takes heads before tokens. This warning comes once",
        stacklevel=4,
    )


def autocast(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Under `torch.autocast`, attention runs in the autocast dtype, as PyTorch's own does."""
    if not torch._C._is_any_autocast_enabled() or (dtype := autocast_dtype(q.device)) is None:
        return q, k, v
    # float64 stays, as it does in PyTorch, and so does what stands for other numbers.
    q, k, v = (t.to(dtype) if t.is_floating_point() and t.dtype not in (torch.float64, FP8) else t for t in (q, k, v))
    return q, k, v


def autocast_dtype(device: torch.device) -> torch.dtype | None:
    """The dtype in which attention runs under `torch.autocast`; None outside."""
    if device.type == "meta" or not torch.is_autocast_enabled(device.type):
        return None
    return torch.get_autocast_dtype(device.type)


def autocast_casts(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Whether `autocast` may change a tensor."""
    dtype = autocast_dtype(q.device)
    return dtype is not None and not (q.dtype is k.dtype is v.dtype is dtype)


def check_forward_only(q: Tensor, k: Tensor, v: Tensor, side: SideInputs) -> None:
    """8-bit inputs have no derivative."""
    if transformed():
        raise NotImplementedError(
            "flashtile.attention of float8_e4m3fn inputs under torch.func or in forward mode: expected none, it has no "
            "derivative and no batching rule; pass 16-bit q, k and v"
        )
    tensors = (q, k, v, *side.learnable, *side.descales, *side.captured)
    if torch.is_grad_enabled() and any(tensor is not None and tensor.requires_grad for tensor in tensors):
        raise ValueError(
            "q, k, v: expected tensors that want no gradient, as attention of float8_e4m3fn inputs has no backward, "
            "got some that do (or bias, alibi_slopes, sinks, a captured tensor or a descale factor); call it under "
            "torch.no_grad(), or pass 16-bit q, k and v"
        )


def resolve_descale(name: str, descale: Tensor, batch: int, heads_kv: int, q: Tensor) -> Tensor:
    """A descale factor as `[batch, heads_kv]`."""
    if q.dtype is not FP8:
        raise ValueError(
            f"{name}: expected None beside inputs of {q.dtype}, got a tensor; factors belong to float8_e4m3fn inputs, "
            "multiply others by them"
        )
    check_tensors(**{name: descale})
    if descale.dtype is not torch.float32:
        raise TypeError(f"{name}: expected dtype float32, got {descale.dtype}; cast it")
    check_device(name, descale, q.device)
    try:
        return descale.broadcast_to(batch, heads_kv)
    except RuntimeError:
        raise ValueError(
            f"{name}: expected a shape that broadcasts to [batch, heads_kv] = {[batch, heads_kv]}, got "
            f"{list(descale.shape)}; a factor belongs to a sequence and a key/value head, also those of q"
        ) from None


def resolve_bias(bias: Tensor, sizes: tuple[int, int, int, int], q: Tensor) -> Tensor:
    """A bias as `[batch | 1, heads | 1, seq_q | 1, seq_k | 1]`."""
    check_tensors(bias=bias)
    wide = lse_dtype(q.dtype)
    narrow = out_dtype(q.dtype)
    if bias.dtype not in (narrow, wide):
        of = "q" if narrow is q.dtype else "out"
        raise TypeError(f"bias: expected the dtype of {of}, {narrow}, or {wide}, got {bias.dtype}; cast it")
    return _broadcast_scores("bias", bias, sizes, q.device)


def resolve_mask(mask: Tensor, sizes: tuple[int, int, int, int], device: torch.device) -> Tensor:
    """A mask as `[batch | 1, heads | 1, seq_q | 1, seq_k | 1]`."""
    check_tensors(mask=mask)
    if mask.dtype is not torch.bool:
        raise TypeError(
            f"mask: expected dtype bool, True = visible, got {mask.dtype}; use mask.bool(), or bias= for numbers to add"
        )
    return _broadcast_scores("mask", mask, sizes, device)


def _broadcast_scores(name: str, tensor: Tensor, full: tuple[int, int, int, int], device: torch.device) -> Tensor:
    """A tensor for the scores with all four dimensions, each of its full size or 1."""
    check_device(name, tensor, device)
    shape = (1,) * (4 - tensor.dim()) + tuple(tensor.shape)
    if not sizes.broadcasts(shape, full):
        raise ValueError(
            f"{name}: expected a shape that broadcasts to [batch, heads_q, seq_q, seq_k] = {list(full)} (of a packed "
            f"call [1, heads_q, max_seqlen_q, max_seqlen_k]), got {list(tensor.shape)}; insert dimensions of size 1"
            f"{_dimensions_hint(name, tensor, full)}"
        )
    return tensor if tensor.dim() == 4 else tensor.view(shape)


def _dimensions_hint(name: str, tensor: Tensor, sizes: tuple[int, int, int, int]) -> str:
    """A hint where to insert dimensions, for the two shapes that people have most."""
    batch, _, seq_q, seq_k = sizes
    if tuple(tensor.shape) == (batch, seq_k):
        return f", for padded keys {name}[:, None, None]"
    return f", for all heads {name}[:, None]" if tuple(tensor.shape) == (batch, seq_q, seq_k) else ""


def check_block_mask(block_mask: BlockMask, q: Tensor, sizes: tuple[int, int, int, int]) -> None:
    """`sizes`: batch entries or sequences, heads, queries and keys of the call."""
    if not isinstance(block_mask, BlockMask):
        raise TypeError(
            f"block_mask: expected a flashtile.BlockMask, got {type_name(block_mask)}; build one with "
            "BlockMask.from_flex from PyTorch's, or with from_dense, from_layout or from_predicate"
        )
    if block_mask.device != q.device:
        raise ValueError(
            f"block_mask: expected the device of q, {q.device}, got {block_mask.device}; move it: block_mask.to(...)"
        )
    misfit = block_mask.fits(*sizes)
    if misfit:
        raise ValueError(f"block_mask: {misfit}")


def check_cu_seqlens(cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, device: torch.device) -> int:
    """Checks the two cumulative length vectors against each other; returns the number of sequences."""
    entries = checks.check_cu_seqlens("cu_seqlens_q", cu_seqlens_q, device)
    checks.check_cu_seqlens("cu_seqlens_k", cu_seqlens_k, device, entries, ", as many for keys as for queries")
    return entries - 1


def check_longest(max_seqlen_q: int | None, max_seqlen_k: int | None) -> None:
    """Bias and masks of a packed call are as large as its longest sequence, which the host does not know otherwise."""
    if max_seqlen_q is None or max_seqlen_k is None:
        raise ValueError(
            "max_seqlen_q, max_seqlen_k: expected both beside bias, mask or block_mask, whose sizes they are; pass "
            "the longest query and key lengths"
        )


def check_values(side: SideInputs, total_q: int, total_k: int) -> None:
    """Checks the values in `cu_seqlens` and `key_lengths`: always on a CPU, on a GPU with FLASHTILE_CHECK_VALUES=1."""
    for name, cu_seqlens, total, max_seqlen in (
        ("cu_seqlens_q", side.cu_seqlens_q, total_q, side.max_seqlen_q),
        ("cu_seqlens_k", side.cu_seqlens_k, total_k, side.max_seqlen_k),
    ):
        if cu_seqlens is not None and readable(cu_seqlens):
            check_cu_seqlens_values(name, cu_seqlens, total, max_seqlen)
    if side.key_lengths is not None and readable(side.key_lengths):
        _check_key_lengths(
            side.key_lengths, side.max_seqlen_k if side.cu_seqlens_k is None else side.cu_seqlens_k.diff()
        )
    for name, descale in zip(("descale_q", "descale_k", "descale_v"), side.descales):
        if descale is not None and readable(descale) and not ((descale > 0) & descale.isfinite()).all():
            raise ValueError(
                f"{name}: expected positive finite factors, got {descale.min().item()} to {descale.max().item()}; "
                "signs belong into the tensor"
            )


def _check_key_lengths(key_lengths: Tensor, seq_k: int | Tensor) -> None:
    """Checks values: `seq_k` is the number of keys, of a packed call that of each sequence."""
    if (key_lengths < 0).any():
        raise ValueError(
            f"key_lengths: expected lengths of at least 0, got {key_lengths.min().item()}; a length of 0 hides all keys"
        )
    too_long = key_lengths > seq_k
    if too_long.any():
        where = int(too_long.nonzero()[0])
        most = int(seq_k[where]) if isinstance(seq_k, Tensor) else seq_k
        raise ValueError(
            f"key_lengths: expected lengths of at most the number of keys, {most}, got {int(key_lengths[where])} at "
            f"index {where}; pass all of the keys, or key_lengths.clamp(max=...)"
        )
