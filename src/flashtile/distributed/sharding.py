"""Shards of batches: cutting tensors along the sequence, putting them together, positions, and the loss over shards."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from flashtile.distributed.layout import LayoutKind
from flashtile.distributed.places import Places, places_of


def shard_sequence(tensor: Tensor, mesh: DeviceMesh, *, dim: int = 1, layout: LayoutKind = "zigzag") -> Tensor:
    """This rank's shard of a tensor that has the whole sequence along `dim`.

    Shift labels against tokens before: neighbours in a shard need not be neighbours in the sequence.

    Args:
        tensor: any, such as tokens `[batch, seq]`, the same on all ranks.
        mesh: the ranks, as for `context_parallel_attention`: in two dimensions the ring's come first.
        dim: along which tokens follow one another; 0 for packed tensors.
        layout: "zigzag" or "contiguous".

    Returns:
        The tokens of this rank, in the order of `sequence_positions`, contiguous.

    Raises:
        ValueError: the length cannot be cut evenly: a multiple of `2 · ranks` for "zigzag", of `ranks` for
            "contiguous".
    """
    places = places_of(mesh)
    cut = places.layout(tensor.shape[dim], layout)
    runs = [tensor.narrow(dim, chunk.start, chunk.length) for chunk in cut.chunks(places.rank)]
    return torch.cat(runs, dim=dim).contiguous()


def unshard_sequence(tensor: Tensor, mesh: DeviceMesh, *, dim: int = 1, layout: LayoutKind = "zigzag") -> Tensor:
    """The whole tensor from the shards of all ranks, on every rank: for looking at results, without a gradient.

    Args:
        tensor: this rank's shard.
        mesh, dim, layout: as for `shard_sequence`.

    Raises:
        ValueError: the tensor wants a gradient.
    """
    if tensor.requires_grad and torch.is_grad_enabled():
        raise ValueError(
            "tensor: expected one without a gradient, got one that requires it; compute the loss on shards "
            "(mean_over_shards), or detach it"
        )
    places = places_of(mesh)
    parts = [tensor]
    for group in reversed(places.groups):
        parts = [shard for part in parts for shard in group.gather(part.contiguous(), "unshard_sequence").wait()]
        parts = [torch.stack(parts)]
    shards = parts[0].view(places.ranks, *tensor.shape)
    cut = places.layout(tensor.shape[dim] * places.ranks, layout)
    runs = sorted((chunk, rank) for rank in range(places.ranks) for chunk in cut.chunks(rank))
    return torch.cat([shards[rank].narrow(dim, chunk.local, chunk.length) for chunk, rank in runs], dim=dim)


def sequence_positions(
    length: int,
    mesh: DeviceMesh,
    *,
    layout: LayoutKind = "zigzag",
    cu_seqlens: Sequence[int] | None = None,
    device: torch.device | str | None = None,
) -> Tensor:
    """Which position each token of this rank's shard has: what rotary and learned position embeddings need.

    Args:
        length: tokens of the whole sequence.
        mesh, layout: as for `shard_sequence`.
        cu_seqlens: cumulative lengths of packed documents: positions count from the start of each. Tokens past the last
            count from its end.
        device: of the result.

    Returns:
        int64 `[length / ranks]`.
    """
    positions = torch.arange(length)
    if cu_seqlens is not None:
        edges = torch.as_tensor(cu_seqlens, dtype=torch.int64)
        positions -= edges[torch.searchsorted(edges, positions, right=True) - 1]
    return shard_sequence(positions, mesh, dim=0, layout=layout).to(device)


def mean_over_shards(total: Tensor, count: Tensor | int, mesh: DeviceMesh) -> Tensor:
    """The mean over the tokens of all shards, whose gradient on each rank is that of its own tokens.

    Gradients of parameters are then parts that add up: let FSDP or DDP sum them over the ranks of the mesh (they take
    the mean, so multiply the loss by the number of ranks).

    Args:
        total: scalar, the sum of this shard's losses.
        count: how many this shard has; shards may have different numbers, also none.
        mesh: the ranks.

    Returns:
        Scalar in the dtype of total, the same on all ranks.
    """
    return _MeanOverShards.apply(places_of(mesh), total, count)


class _MeanOverShards(torch.autograd.Function):
    @staticmethod
    def forward(ctx, places: Places, total: Tensor, count: Tensor | int) -> Tensor:
        wide = torch.float64 if total.dtype is torch.float64 else torch.float32
        count = torch.as_tensor(count, device=total.device)
        sums = torch.stack((total.to(wide), count.to(wide)))
        places.add_up(sums, "mean_over_shards")
        ctx.save_for_backward(sums[1])
        return (sums[0] / sums[1]).to(total.dtype)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[None, Tensor, None]:
        (count,) = ctx.saved_tensors
        return None, (grad / count).to(grad.dtype), None
