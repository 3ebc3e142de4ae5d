"""How models are divided over ranks: sequences by `context_parallel`, weights by `tensor_parallel_plan`."""

from __future__ import annotations

import functools
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import ParallelStyle

import flashtile
from flashtile.distributed.context_parallel import Strategy, context_parallel_attention
from flashtile.distributed.layout import LayoutKind
from flashtile.distributed.places import mesh_places
from flashtile.distributed.sharding import kept_positions, shard_sequence
from flashtile.distributed.tensor_parallel import (
    ColumnParallelLinear,
    RowParallelLinear,
    VocabParallelEmbedding,
    check_plain,
    enter,
    heads_divide,
    interleaved,
    local,
    sum_over_ranks,
)
from flashtile.models import GPT, Bert
from flashtile.modules import MHA, Block, FusedMlp, GatedMlp, Mlp, ParallelBlock, RotaryEmbedding
from flashtile.modules.attention import InnerAttention
from flashtile.modules.layers import is_hooked
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
    """An `InnerAttention` with the same options, over the tokens of all ranks."""

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


class _Style(ParallelStyle):
    def __init__(self, sequence_parallel: bool = False) -> None:
        super().__init__()
        self.sequence_parallel = sequence_parallel


class AttentionParallel(_Style):
    """Divides the heads of an `MHA` over the ranks: input projections by columns, the output projection by rows.

    Args:
        sequence_parallel: input and output are shards of the tokens.
    """

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        if not isinstance(module, MHA) or module.cross_attn or not isinstance(module.inner_attn, InnerAttention):
            raise TypeError(
                f"plan: expected an MHA with self-attention of flashtile's own, got {type(module).__name__}; cut it "
                "before context_parallel exchanges its attention"
            )
        ranks, inner = device_mesh.size(), module.inner_attn
        heads_divide(module.num_heads, module.num_heads_kv, ranks)
        if inner.attention_dropout:
            raise ValueError(
                f"plan: expected no attention dropout, got {inner.attention_dropout}; the heads of all ranks would "
                "drop the same weights"
            )
        of_heads = [module.head_dim * heads for heads in (module.num_heads, module.num_heads_kv, module.num_heads_kv)]
        order, shards = interleaved(of_heads, ranks), self.sequence_parallel
        module.Wqkv = cast(Any, ColumnParallelLinear.of(module.Wqkv, device_mesh, order, shards))
        module.out_proj = cast(Any, RowParallelLinear.of(module.out_proj, device_mesh, shards))
        module.num_heads //= ranks
        module.num_heads_kv //= ranks
        if inner._alibi_slopes is not None:
            inner._alibi_slopes = inner._alibi_slopes.chunk(ranks, -1)[device_mesh.get_local_rank()]
        return module


class MlpParallel(_Style):
    """Divides the hidden features of an `Mlp`, `GatedMlp` or `FusedMlp` over the ranks.

    Args:
        sequence_parallel: input and output are shards of the tokens.
    """

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        if not isinstance(module, (Mlp, GatedMlp, FusedMlp)):
            raise TypeError(f"plan: expected an Mlp, GatedMlp or FusedMlp, got {type(module).__name__}")
        if module.return_residual:
            raise ValueError(
                f"plan: expected {type(module).__name__} with return_residual=False, got True; add the input outside"
            )
        if isinstance(module, FusedMlp) and module.accumulate_main_grad:
            raise ValueError(
                "plan: expected FusedMlp with accumulate_main_grad=False, got True; weights that ranks share have "
                "their gradients in grad"
            )
        rows = module.fc1.out_features
        order = interleaved([rows // 2] * 2 if module.gated else [rows], device_mesh.size())
        module.fc1 = cast(Any, ColumnParallelLinear.of(module.fc1, device_mesh, order, self.sequence_parallel))
        module.fc2 = cast(Any, RowParallelLinear.of(module.fc2, device_mesh, self.sequence_parallel))
        if isinstance(module, FusedMlp):
            module.forward = _fused_forward.__get__(module)  # type: ignore[method-assign]
        return module


def _fused_forward(module: FusedMlp, x: Tensor) -> Tensor:
    """The forward of a cut `FusedMlp`: it takes its layers' weights, not their forward, unless that has hooks."""
    if is_hooked(module.fc1) or is_hooked(module.fc2):
        return cast(Tensor, module._called(x))
    fc1, fc2 = cast(ColumnParallelLinear, module.fc1), cast(RowParallelLinear, module.fc2)
    part = flashtile.fused_mlp(
        enter(x, fc1.mesh, fc1.sequence_parallel), local(fc1.weight), None if fc1.bias is None else local(fc1.bias),
        local(fc2.weight), None, activation=module.activation, gated=module.gated,
        checkpoint_level=module.checkpoint_level,
    )  # fmt: skip
    return fc2.finish(part)


class BlockParallel(_Style):
    """Divides both parts of a `Block` or `ParallelBlock`. Every rank computes the norms.

    Args:
        sequence_parallel: norms and residuals are computed for a shard of the tokens.
    """

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        if not isinstance(module, (Block, ParallelBlock)):
            raise TypeError(f"plan: expected a Block or ParallelBlock, got {type(module).__name__}")
        AttentionParallel(self.sequence_parallel)._apply(module.mixer, device_mesh)
        if not isinstance(module.mlp, nn.Identity):
            MlpParallel(self.sequence_parallel)._apply(module.mlp, device_mesh)
        if self.sequence_parallel:
            for norm in (module.norm1, getattr(module, "norm2", None)):
                _reduce_norm_gradients(norm, device_mesh)
        return module


def _reduce_norm_gradients(norm: nn.Module | None, mesh: DeviceMesh) -> None:
    """Gradients of a norm's parameters become those of all ranks' tokens."""
    if norm is not None:
        norm.shared = functools.partial(sum_over_ranks, mesh=mesh)  # type: ignore[assignment]


class PositionsOfShards(nn.Module):
    """An embedding of positions, the same on all ranks, of which each takes those of its shard of the tokens."""

    def __init__(self, embedding: nn.Embedding, mesh: DeviceMesh) -> None:
        super().__init__()
        check_plain(nn.Embedding, embedding)
        self.weight, self._mesh = embedding.weight, mesh

    def forward(self, numbers: Tensor) -> Tensor:
        """int64 `[seq]`, of all tokens -> `[seq / ranks, width]`."""
        own = numbers.chunk(self._mesh.size(), -1)[self._mesh.get_local_rank()]
        return F.embedding(own, sum_over_ranks(self.weight, self._mesh))


class VocabularyParallel(_Style):
    """Divides the embedding and the head of a `GPT`: each rank has some tokens of the vocabulary (`vocabulary_loss`).

    Args:
        sequence_parallel: the blocks get shards of the sequence.
    """

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        if not isinstance(module, GPT):
            raise TypeError(f"plan: expected a GPT, got {type(module).__name__}")
        module.cut = True
        module.token = cast(Any, VocabParallelEmbedding.of(module.token, device_mesh, self.sequence_parallel))
        if module.head is not None:
            module.head = cast(Any, ColumnParallelLinear.of(module.head, device_mesh, None, self.sequence_parallel))
        if self.sequence_parallel:
            _reduce_norm_gradients(module.norm, device_mesh)
            if module.position is not None:
                module.position = cast(Any, PositionsOfShards(module.position, device_mesh))
                module.numbered = module.numbered or _numbers
        return module


def _numbers(length: int, device: torch.device) -> Tensor:
    return torch.arange(length, device=device)


def tensor_parallel_plan(model: nn.Module, sequence_parallel: bool = False) -> dict[str, ParallelStyle]:
    """A plan that divides a model, for `parallelize_module(model, mesh, plan)` on a mesh of one dimension.

    Each rank gets some heads of every attention, some hidden features of every MLP, and some tokens of the vocabulary.
    Parameters become DTensors, or stay the same on all ranks (norms, learned positions, biases of output layers).
    State-dict keys stay the same; `row_orders` says which rows are stored in another order. Each rank draws the dropout
    of embeddings and residuals itself. Give the ranks the same seed, so that they drop the same elements of equal
    activations. With sequence_parallel give them different seeds, because their tokens differ.

    Args:
        model: a `flashtile.models.GPT`, without attention dropout, before `context_parallel` and before FSDP; on the
            meta device, or with the same weights on all ranks.
        sequence_parallel: between attention and MLP each rank has a shard of the tokens, whose number the ranks divide.
            Residuals and norms then take a part of the memory and time. As many bytes are exchanged.

    Raises:
        TypeError: there is no plan for the model.
    """
    if not isinstance(model, GPT):
        raise TypeError(
            f"model: expected a flashtile.models.GPT, got {type(model).__name__}; make a plan of AttentionParallel, "
            "MlpParallel and BlockParallel"
        )
    return {"": VocabularyParallel(sequence_parallel), "blocks.*": BlockParallel(sequence_parallel)}


def row_orders(model: nn.Module) -> dict[str, Tensor]:
    """Parameters that store their rows in another order than the whole model: name -> row there of each stored row."""
    return {
        f"{path}.{name}": module.order
        for path, module in model.named_modules()
        if isinstance(module, ColumnParallelLinear) and module.order is not None
        for name in ("weight", "bias")
        if getattr(module, name) is not None
    }


def vocabulary_loss(model: GPT, hidden: Tensor, labels: Tensor, mesh: DeviceMesh, **options: Any) -> Tensor:
    """Cross-entropy of a model that `tensor_parallel_plan` has divided, from the output of `GPT.hidden`.

    Args:
        hidden: `[B, S, width]`, the same on all ranks, or `[B, S / ranks, width]` with sequence_parallel.
        labels: int64 `[B, S]`.
        mesh: the ranks.
        options: options of `flashtile.cross_entropy`, such as `reduction`.

    Returns:
        The loss over the whole vocabulary, the same on all ranks.

    Raises:
        TypeError: the model is no GPT that `tensor_parallel_plan` has divided.
    """
    if not isinstance(model, GPT) or not isinstance(model.token, VocabParallelEmbedding):
        got = "one that is whole" if isinstance(model, GPT) else type(model).__name__
        raise TypeError(
            f"model: expected a GPT that tensor_parallel_plan has divided, got {got}; divide it by parallelize_module, "
            "or call the loss of the whole model"
        )
    shards = model.token.sequence_parallel
    part = DTensor.from_local(hidden, mesh, [Shard(hidden.dim() - 2) if shards else Replicate()], run_check=False)
    whole = part.redistribute(placements=[Replicate()])
    if model.config.fused_loss:
        found = flashtile.linear_cross_entropy(whole, model.output_weight, labels, **options)
    else:
        found = flashtile.cross_entropy(flashtile.fused_dense(whole, model.output_weight), labels, **options)
    if isinstance(found, tuple):
        return tuple(loss.to_local() for loss in cast(Any, found))
    return cast(DTensor, found).to_local()
