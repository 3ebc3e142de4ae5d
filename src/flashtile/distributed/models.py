"""Models of flashtile over a sequence that is cut over ranks: their attention and positions exchanged."""

from __future__ import annotations

import functools
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from flashtile.distributed.context_parallel import Strategy, context_parallel_attention
from flashtile.distributed.layout import LayoutKind
from flashtile.distributed.places import mesh_places
from flashtile.distributed.sharding import kept_positions, shard_sequence
from flashtile.models import GPT, Bert
from flashtile.modules import MHA, RotaryEmbedding
from flashtile.modules.attention import InnerAttention
from flashtile.modules.rotary import Source


def context_parallel(
    model: nn.Module, mesh: DeviceMesh, *, strategy: Strategy = "ring", layout: LayoutKind = "zigzag"
) -> nn.Module:
    """Makes a model take shards of sequences: every `MHA` in it attends over the tokens of all ranks.

    It replaces attention, rotary embedding and learned positions in place. Parameters and state-dict keys stay the
    same. Pass the model the shards of tokens that `shard_sequence` cuts, and compute the loss on shards with
    `mean_over_shards`. The gradients of parameters are then this rank's part, which FSDP or DDP sums over the ranks.

    Args:
        model: an `MHA`, or a model that contains some, such as `flashtile.models.GPT`.
        mesh: the ranks, as in `context_parallel_attention`.
        strategy, layout: as in `context_parallel_attention`.

    Returns:
        The model.

    Raises:
        TypeError, ValueError: attention or positions of the model cannot be replaced.
    """
    ranks = mesh_places(mesh).ranks
    mixers = [module for module in model.modules() if isinstance(module, MHA)]
    if not mixers:
        raise TypeError(
            f"model: expected one with flashtile.modules.MHA, got {type(model).__name__}; for transformers take "
            "flashtile.integrations.transformers.context_parallel, in others' attention call context_parallel_attention"
        )
    for module in model.modules():
        if isinstance(module, Bert):
            raise ValueError("model: expected one without padding masks, got a Bert; it packs rows by their values")
        if isinstance(module, GPT):
            module.numbered = functools.partial(_numbered, mesh, layout, ranks, module.config.context)
    for mixer in mixers:
        if not isinstance(mixer.inner_attn, InnerAttention):
            raise ValueError(
                f"model: expected attention of flashtile's own, got {type(mixer.inner_attn).__name__}; give GPT no "
                "attention="
            )
        mixer.inner_attn = ContextParallelInner(mixer.inner_attn, mesh, strategy, layout)
        if mixer.rotary_emb is not None:
            mixer.rotary_emb = cast(Any, ShardedRotary(mixer.rotary_emb, mesh, layout))
    return model


def _numbered(
    mesh: DeviceMesh, layout: LayoutKind, ranks: int, context: int, length: int, device: torch.device
) -> Tensor:
    """The numbers, within the sequence, of the tokens of a shard."""
    if length * ranks > context:
        raise ValueError(
            f"tokens: expected at most {context} in a row (the context), got {length * ranks} in the shards of all "
            f"{ranks} ranks"
        )
    return kept_positions(length * ranks, mesh, layout, device)


class ContextParallelInner(nn.Module):
    """In the place of an `InnerAttention`: the same options, over the tokens of all ranks
    (`context_parallel_attention`)."""

    def __init__(self, inner: InnerAttention, mesh: DeviceMesh, strategy: Strategy, layout: LayoutKind) -> None:
        super().__init__()
        self.inner, self.strategy, self.layout = inner, strategy, layout
        self._mesh = mesh

    def forward(self, q: Tensor, k: Tensor, v: Tensor, *packing: Any) -> Tensor:
        """Attention of shards `[batch, seq / ranks, heads, head_dim]`; arguments as of `InnerAttention`."""
        if not packing:
            raise ValueError("cache: expected None with shards of sequences, got one; decode with a model of its own")
        causal, *lengths = packing
        if any(length is not None for length in lengths):
            raise ValueError(
                "cu_seqlens: expected None with shards of sequences, got lengths; pass them to "
                "flashtile.distributed.context_parallel_attention, with positions from sequence_positions"
            )
        options = self.inner.options(q, causal)
        return context_parallel_attention(
            q, k, v, mesh=self._mesh, strategy=self.strategy, layout=self.layout, reduce_gradients=False, **options
        )

    def extra_repr(self) -> str:
        return f"strategy={self.strategy!r}, layout={self.layout!r}, {self.inner.extra_repr()}"


class ShardedRotary(nn.Module):
    """In the place of a `RotaryEmbedding`: tables whose rows are the positions of this rank's tokens."""

    def __init__(self, rotary: RotaryEmbedding, mesh: DeviceMesh, layout: LayoutKind) -> None:
        super().__init__()
        self.rotary, self.layout = rotary, layout
        self.interleaved, self.scale_base = rotary.interleaved, rotary.scale_base
        self._mesh, self._ranks = mesh, mesh_places(mesh).ranks
        self._made: tuple[int, tuple[Tensor | None, ...]] | None = None
        self._made_from: Source | None = None

    def tables(self, positions: int, device: torch.device) -> tuple[Tensor | None, ...]:
        """As of `RotaryEmbedding`: row `i` is of this rank's token `i`, of exactly so many."""
        made = self._made
        if (
            made is None
            or made[0] != positions
            or made[1][0].device != device  # type: ignore[union-attr]
            or self.rotary._is_stale(self._made_from)
        ):
            length = positions * self._ranks
            # xPos counts from the middle of the table, so that it must be that of the sequence.
            whole = self.rotary._make_tables(length, device)
            with torch.inference_mode(False), torch.no_grad():
                shards = tuple(
                    None if t is None else shard_sequence(t[:length], self._mesh, dim=0, layout=self.layout)
                    for t in whole
                )
            self._made, self._made_from = (positions, shards), self.rotary._source()
            return shards
        return made[1]
