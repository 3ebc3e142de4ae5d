"""From padded batches to packed sequences and back; each function is the gradient of the other."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd import forward_ad

from flashtile.ops.common.sizes import differ


class Unpadded(NamedTuple):
    """The kept rows of a padded batch, one sequence after another: the result of `unpad_input`.

    Attributes:
        x: `[total, ...]`.
        indices: int64 `[total]`, the row of `[batch · seq]` that each row comes from, for `pad_input`.
        cu_seqlens: int32 `[batch + 1]`; sequence `b` has the rows from `cu_seqlens[b]` to `cu_seqlens[b + 1]`.
        max_seqlen: length of the longest sequence; with `total=` only an upper bound, seq.
        lengths: int32 `[batch]`, the length of each sequence.
    """

    x: Tensor
    indices: Tensor
    cu_seqlens: Tensor
    max_seqlen: int
    lengths: Tensor


def unpad_input(x: Tensor, mask: Tensor, *, total: int | None = None) -> Unpadded:
    """Removes the padding of a batch: takes the rows that a mask keeps, as `flashtile.attention_varlen` expects them.

    The host must know the number of kept rows to allocate them. The call therefore waits for the GPU once, unless you
    pass `total`. Differentiable in x, also in forward mode; the gradient costs a copy, not a sum.

    Args:
        x: `[batch, seq, ...]`, any dtype and strides.
        mask: bool `[batch, seq]`, True = keep. Any pattern: padding on the left, on the right or in between.
        total: number of True elements of the mask, if the host knows it. Checked on a CPU; on a GPU it must be right.

    Raises:
        TypeError: x or the mask is no tensor, the mask is not bool, or total is no int.
        ValueError: shapes or devices do not fit, or total is wrong.
    """
    _check_mask(x, mask)
    lengths = mask.sum(dim=1, dtype=torch.int32)
    cu_seqlens = torch.nn.functional.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))
    max_seqlen = mask.shape[1]
    if total is None:
        # Both numbers in one wait. The cumulative lengths begin with 0, so an empty batch has a maximum too.
        total, max_seqlen = torch.stack((cu_seqlens[-1], cu_seqlens.diff(prepend=cu_seqlens[:1]).max())).tolist()
    else:
        _check_total(total, cu_seqlens)
    indices = _kept_indices(mask.flatten(), total)
    return Unpadded(_gather(x.flatten(0, 1), indices), indices, cu_seqlens, max_seqlen, lengths)


def pad_input(x: Tensor, indices: Tensor, batch: int, seqlen: int) -> Tensor:
    """Puts packed rows back into a padded batch: the inverse of `unpad_input`.

    Args:
        x: `[total, ...]`.
        indices: int32 or int64 `[total]` from `unpad_input`, each row at most once.
        batch: number of sequences of the result.
        seqlen: rows of each sequence.

    Returns:
        `[batch, seqlen, ...]`, 0 in rows that no index names. Differentiable in x.

    Raises:
        TypeError: x is no tensor, or indices is no tensor of integers.
        ValueError: the number of indices is not that of the rows, their device differs, or a row has no place. (On a
            GPU an index past the last place is an illegal access.)
    """
    _check_tensors(x=x, indices=indices)
    if indices.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"indices: expected dtype int32 or int64, got {indices.dtype}; take those of unpad_input")
    if differ(indices.shape, x.shape[:1]):
        raise ValueError(
            f"indices: expected shape {tuple(x.shape[:1])}, one for each row of x, got {tuple(indices.shape)}"
        )
    if indices.device != x.device:
        raise ValueError(f"indices: expected the device of x, {x.device}, got {indices.device}; move them")
    if not torch.compiler.is_compiling() and x.shape[0] > batch * seqlen:
        raise ValueError(
            f"batch, seqlen: expected places for the {x.shape[0]} rows of x, got {batch} and {seqlen}; pass those of "
            "the batch that was unpadded"
        )
    try:
        padded = _scatter(x, indices, batch * seqlen)
    except IndexError:
        raise ValueError(
            f"indices: expected places of {batch} sequences of {seqlen} rows, from 0 to {batch * seqlen - 1}, got "
            f"{int(indices.min())} to {int(indices.max())}; pass batch and seqlen of the batch that was unpadded"
        ) from None
    return padded.unflatten(0, (batch, seqlen))


def _gather(x: Tensor, indices: Tensor) -> Tensor:
    """Rows by number, each at most once."""
    if forward_ad._current_level >= 0:
        # PyTorch's own has derivatives in any order of modes; inside those of a Function forward mode is switched off,
        # and that within another one would be 0.
        return x.index_select(0, indices)
    return _Gather.apply(x, indices)


class _Gather(torch.autograd.Function):
    """`_gather` with a gradient that is a copy, where that of `index_select` alone would add."""

    generate_vmap_rule = True

    @staticmethod
    def forward(rows: Tensor, indices: Tensor) -> Tensor:
        return rows.index_select(0, indices)

    @staticmethod
    def setup_context(ctx, inputs, output) -> None:
        rows, indices = inputs
        ctx.save_for_backward(indices)
        ctx.rows = rows.shape[0]

    @staticmethod
    def backward(ctx, grad: Tensor):
        return _scatter(grad, ctx.saved_tensors[0], ctx.rows), None


def _scatter(x: Tensor, indices: Tensor, rows: int) -> Tensor:
    """PyTorch's own gradient of this is the gather."""
    return x.new_zeros(rows, *x.shape[1:]).index_copy(0, indices.long(), x)


def _kept_indices(kept: Tensor, total: int) -> Tensor:
    """Numbers of the True elements, of which there are `total`. `nonzero` would wait for their number again: here each
    kept row writes its own to its place, and the others to one place more, which is cut off."""
    place = torch.where(kept, kept.cumsum(0) - 1, total).clamp(max=total)
    numbers = torch.arange(kept.shape[0], device=kept.device)
    return numbers.new_zeros(total + 1).scatter_(0, place, numbers)[:total]


def _check_tensors(**tensors: Tensor) -> None:
    for name, tensor in tensors.items():
        if not isinstance(tensor, Tensor):
            raise TypeError(f"{name}: expected a tensor, got {type(tensor).__name__}; use torch.tensor(...)")


def _check_mask(x: Tensor, mask: Tensor) -> None:
    _check_tensors(x=x, mask=mask)
    if mask.dtype is not torch.bool:
        raise TypeError(f"mask: expected dtype bool, True = keep, got {mask.dtype}; compare or cast it")
    if mask.dim() != 2 or differ(mask.shape, x.shape[:2]):
        raise ValueError(
            f"mask: expected the (batch, seq) of x, {tuple(x.shape[:2])}, got {tuple(mask.shape)}; one element a token"
        )
    if mask.device != x.device:
        raise ValueError(f"mask: expected the device of x, {x.device}, got {mask.device}; move it")


def _check_total(total: int, cu_seqlens: Tensor) -> None:
    if isinstance(total, bool) or not isinstance(total, (int, torch.SymInt)):
        raise TypeError(f"total: expected an int, got {total!r}; leave it out if the host does not know it")
    if cu_seqlens.device.type == "cpu" and not torch.compiler.is_compiling() and int(cu_seqlens[-1]) != total:
        raise ValueError(f"total: expected the number of True elements of the mask, {int(cu_seqlens[-1])}, got {total}")
