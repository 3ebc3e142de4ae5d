"""Shards of batches: cutting tensors along the sequence, putting them together, positions, and the loss over shards."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from flashtile.distributed.checks import check_documents
from flashtile.distributed.layout import LayoutKind
from flashtile.distributed.merge import wide_dtype
from flashtile.distributed.places import Places, mesh_places


def shard_sequence(tensor: Tensor, mesh: DeviceMesh, *, dim: int = 1, layout: LayoutKind = "zigzag") -> Tensor:
    """This rank's shard of a tensor that has the whole sequence along `dim`.

    Shift labels before you cut them, because neighbours in a shard need not be neighbours in the sequence.

    Args:
        tensor: any tensor, such as tokens `[batch, seq]`, the same on all ranks.
        mesh: the ranks, as in `context_parallel_attention`. In a mesh of two dimensions the first is the ring.
        dim: the dimension of the tokens; 0 for packed tensors.
        layout: "zigzag" or "contiguous".

    Returns:
        The tokens of this rank, in the order of `sequence_positions`, contiguous.

    Raises:
        TypeError: tensor is no tensor.
        ValueError: the tensor has no such dimension, or its length cannot be divided evenly: it must be a multiple of
            `2 · ranks` for "zigzag", and of `ranks` for "contiguous".
    """
    places = mesh_places(mesh)
    _check_dim(tensor, dim)
    cut = places.layout(tensor.shape[dim], layout)
    runs = [tensor.narrow(dim, chunk.start, chunk.length) for chunk in cut.chunks(places.rank)]
    return torch.cat(runs, dim=dim).contiguous()


def unshard_sequence(tensor: Tensor, mesh: DeviceMesh, *, dim: int = 1, layout: LayoutKind = "zigzag") -> Tensor:
    """The whole tensor on every rank, gathered from the shards of all ranks. For looking at results; no gradient.

    Args:
        tensor: this rank's shard.
        mesh, dim, layout: as in `shard_sequence`.

    Raises:
        TypeError: tensor is no tensor.
        ValueError: the tensor requires a gradient, or has no such dimension.
    """
    _check_dim(tensor, dim)
    if tensor.requires_grad and torch.is_grad_enabled():
        raise ValueError(
            "tensor: expected one without a gradient, got one that requires it; compute the loss on shards "
            "(mean_over_shards), or detach it"
        )
    places = mesh_places(mesh)
    parts = [tensor]
    for group in reversed(places.groups):
        parts = [shard for part in parts for shard in group.gather(part.contiguous(), "unshard_sequence").wait()]
        parts = [torch.stack(parts)]
    shards = parts[0].view(places.ranks, *tensor.shape)
    cut = places.layout(tensor.shape[dim] * places.ranks, layout)
    runs = sorted((chunk, rank) for rank in range(places.ranks) for chunk in cut.chunks(rank))
    return torch.cat([shards[rank].narrow(dim, chunk.local, chunk.length) for chunk, rank in runs], dim=dim)


def _check_dim(tensor: Tensor, dim: int) -> None:
    if not isinstance(tensor, Tensor):
        raise TypeError(f"tensor: expected a torch.Tensor, got {type(tensor).__name__}; use torch.as_tensor(...)")
    if isinstance(dim, bool) or not isinstance(dim, int):
        raise TypeError(f"dim: expected an int, got {dim!r}; it is the dimension of the tokens")
    if not -tensor.dim() <= dim < tensor.dim():
        raise ValueError(
            f"dim: expected a dimension of the tensor, of shape {tuple(tensor.shape)}, got {dim}; packed tensors have "
            "their tokens in dim=0"
        )


def sequence_positions(
    length: int,
    mesh: DeviceMesh,
    *,
    layout: LayoutKind = "zigzag",
    cu_seqlens: Sequence[int] | Tensor | None = None,
    device: torch.device | str | None = None,
) -> Tensor:
    """The position of each token of this rank's shard, for rotary and learned position embeddings.

    Args:
        length: number of tokens of the whole sequence.
        mesh, layout: as in `shard_sequence`.
        cu_seqlens: cumulative lengths of packed documents. Positions then count from the start of each document. Tokens
            past the last document count from its end.
        device: device of the result.

    Returns:
        int64 `[length / ranks]`.

    Raises:
        TypeError: the length or cu_seqlens are no integers.
        ValueError: the length cannot be divided evenly, or cu_seqlens are not cumulative lengths from 0 up to it.
    """
    if isinstance(length, bool) or not isinstance(length, (int, torch.SymInt)):
        raise TypeError(f"length: expected an int, got {length!r}; it is the number of tokens")
    if length < 0:
        raise ValueError(f"length: expected at least 0, got {length}; it is the number of tokens")
    positions = torch.arange(length, device="cpu")
    if cu_seqlens is not None:
        edges = torch.tensor(check_documents(cu_seqlens, length), device="cpu")
        positions -= edges[torch.searchsorted(edges, positions, right=True) - 1]
    return shard_sequence(positions, mesh, dim=0, layout=layout).to(device)


@functools.lru_cache(maxsize=32)
def kept_positions(length: int, mesh: DeviceMesh, layout: LayoutKind, device: torch.device) -> Tensor:
    """`sequence_positions`, kept for later calls, which may record a gradient: no inference tensor then."""
    with torch.inference_mode(False):
        return sequence_positions(length, mesh, layout=layout, device=device)


def mean_over_shards(total: Tensor, count: Tensor | int, mesh: DeviceMesh) -> Tensor:
    """The mean over the tokens of all shards. Its gradient on each rank is that of the rank's own tokens.

    The gradients of parameters are then parts that must be summed over the ranks of the mesh. FSDP and DDP take the
    mean over ranks, so multiply the loss by the number of ranks.

    Args:
        total: scalar, the sum of this shard's losses.
        count: number of losses in this shard. Shards may have different numbers, also none.
        mesh: the ranks.

    Returns:
        Scalar in the dtype of total, the same on all ranks.

    Raises:
        TypeError: total is no floating-point tensor.
        ValueError: total or count is no scalar.
    """
    if not isinstance(total, Tensor) or not total.is_floating_point():
        given = total.dtype if isinstance(total, Tensor) else type(total).__name__
        raise TypeError(
            f"total: expected a tensor of floating-point numbers, whose dtype the mean has, got {given}; cast it"
        )
    for name, scalar in (("total", total), ("count", count)):
        if isinstance(scalar, Tensor) and scalar.dim():
            raise ValueError(f"{name}: expected a scalar, got shape {tuple(scalar.shape)}; add up this shard's")
    return _MeanOverShards.apply(mesh_places(mesh), total, count)


class _MeanOverShards(torch.autograd.Function):
    @staticmethod
    def forward(ctx, places: Places, total: Tensor, count: Tensor | int) -> Tensor:
        wide = wide_dtype(total.dtype)
        count = torch.as_tensor(count, device=total.device)
        sums = torch.stack((total.to(wide), count.to(wide)))
        places.add_up(sums, "mean_over_shards")
        ctx.save_for_backward(sums[1])
        return (sums[0] / sums[1]).to(total.dtype)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[None, Tensor, None]:
        (count,) = ctx.saved_tensors
        return None, (grad / count).to(grad.dtype), None
