"""Layers whose weights are cut over ranks: linear layers by columns and rows, an embedding by its vocabulary.

Weights are DTensors on a mesh of one dimension, so that FSDP and `torch.distributed.checkpoint` know their place. With
`sequence_parallel` activations between such layers are shards of the sequence (dimension -2): a column layer gathers
them, a row layer scatters its sums. Reference: Shoeybi et al., "Megatron-LM" (2019), section 3; Korthikanti et al.,
"Reducing Activation Recomputation in Large Transformer Models" (2022), section 4.2.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.nn.utils.parametrize import is_parametrized

from flashtile.distributed.merge import wide_dtype
from flashtile.modules.layers import computes_only, is_hooked

#: The dimension of activations `[..., tokens, features]` along which sequence parallelism cuts them.
_TOKENS = -2

#: What `torch.nn.Embedding` has and `VocabParallelEmbedding` has not.
_EMBEDDING_OPTIONS = ("padding_idx", "max_norm", "scale_grad_by_freq", "sparse")


def _added_up(tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
    total = tensor.contiguous().clone()
    dist.all_reduce(total, group=group)
    return total


def _gathered(tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
    parts = [torch.empty_like(tensor, memory_format=torch.contiguous_format) for _ in range(group.size())]
    dist.all_gather(parts, tensor.contiguous(), group=group)
    return torch.cat(parts, dim=_TOKENS)


def _scattered(tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Parts go to their ranks as they are, and are added up there in float32, in the order of the ranks."""
    ranks = group.size()
    parts = torch.stack(tensor.chunk(ranks, dim=_TOKENS)).contiguous()
    received = torch.empty_like(parts)
    dist.all_to_all_single(received, parts, group=group)
    wide = wide_dtype(tensor.dtype)
    return received.sum(0, dtype=wide).to(tensor.dtype)


#: What ranks exchange, and what they exchange of its gradients: another of these, so that it has a derivative too.
_EXCHANGES: dict[str, tuple[Callable[[Tensor, dist.ProcessGroup], Tensor], str]] = {
    # The same on all ranks, each of which uses it for its part: gradients are added up.
    "enter": (lambda tensor, group: tensor.view_as(tensor), "leave"),
    # The sum of the ranks' parts; each part's gradient is the sum's.
    "leave": (_added_up, "enter"),
    # Shards of tokens to all tokens; the gradients of all ranks are added up and cut again.
    "gather": (_gathered, "scatter"),
    # The sum of the ranks' parts, of which each keeps a shard of the tokens.
    "scatter": (_scattered, "gather"),
}


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx, tensor: Tensor, group: dist.ProcessGroup, kind: str) -> Tensor:
        ctx.group = group
        run, ctx.of_gradients = _EXCHANGES[kind]
        return run(tensor, group)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None, None]:
        return _Exchange.apply(grad, ctx.group, ctx.of_gradients), None, None


def enter(tensor: Tensor, mesh: DeviceMesh, sequence_parallel: bool = False) -> Tensor:
    """The input of all ranks, each for its part of the features: alike, or shards of tokens that are gathered."""
    if sequence_parallel:
        _check_has_tokens(tensor)
    return _Exchange.apply(tensor, mesh.get_group(), "gather" if sequence_parallel else "enter")


def leave(tensor: Tensor, mesh: DeviceMesh, sequence_parallel: bool = False) -> Tensor:
    """The sum of what the ranks have, on all of them, or with sequence_parallel its tokens shared out."""
    if sequence_parallel:
        _check_has_tokens(tensor)
    if sequence_parallel and tensor.shape[_TOKENS] % mesh.size():
        raise ValueError(
            f"x: expected a number of tokens that the {mesh.size()} ranks divide with sequence_parallel=True, got "
            f"{tensor.shape[_TOKENS]}; pad the sequence"
        )
    return _Exchange.apply(tensor, mesh.get_group(), "scatter" if sequence_parallel else "leave")


def _check_has_tokens(tensor: Tensor) -> None:
    if tensor.dim() < 2:
        raise ValueError(
            f"x: expected shape (..., tokens, features) with sequence_parallel=True, got {tuple(tensor.shape)}; it is "
            "the tokens that are cut"
        )


def sum_over_ranks(parameter: Tensor, mesh: DeviceMesh) -> Tensor:
    """A parameter that all ranks have and use for their tokens: its gradient is the sum of theirs."""
    return _Exchange.apply(parameter, mesh.get_group(), "enter")


def check_plain(kind: type[nn.Module], layer: nn.Module) -> None:
    """Refuses another class, hooks and parametrizations: only the weights of a layer that is cut are read, so whatever
    else the layer does would be lost in silence."""
    if not computes_only(layer, kind) or is_parametrized(layer):
        hooks = " with hooks" if is_hooked(layer) else ""
        raise TypeError(
            f"layer: expected a torch.nn.{kind.__name__}, got {type(layer).__module__}.{type(layer).__qualname__}"
            f"{hooks}; its weights are cut, not what it does with them: merge adapters and parametrizations before, "
            "add hooks after"
        )


def local(parameter: Tensor) -> Tensor:
    """This rank's part of a parameter; its gradient finds the way back."""
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter


def sharded(tensor: Tensor, mesh: DeviceMesh, dim: int, order: Tensor | None = None) -> nn.Parameter:
    """The part of a whole tensor that this rank keeps. `order`: of rows of the whole as they are cut."""
    if not isinstance(mesh, DeviceMesh):
        raise TypeError(
            f"mesh: expected a torch.distributed DeviceMesh, got {type(mesh).__name__}; make one with "
            "init_device_mesh(device_type, (ranks,))"
        )
    if mesh.ndim != 1:
        raise ValueError(f"mesh: expected one dimension, got {mesh.ndim}; take a part of it, such as mesh['tp']")
    ranks = mesh.size()
    if tensor.shape[dim] % ranks:
        raise ValueError(f"mesh: expected a number of ranks that divides the {tensor.shape[dim]} features, got {ranks}")
    learned = tensor.requires_grad
    with torch.no_grad():
        if order is not None and not tensor.is_meta:
            tensor = tensor[order.to(tensor.device)]
        part = tensor.chunk(ranks, dim)[mesh.get_local_rank()].contiguous().clone()
        return nn.Parameter(DTensor.from_local(part, mesh, [Shard(dim)], run_check=False), learned)


class _ParallelLinear(nn.Module):
    """A linear layer whose weight is divided over ranks, along its dimension `_dim`."""

    _dim = 0

    def __init__(
        self, in_features: int, out_features: int, mesh: DeviceMesh, bias: bool = True, sequence_parallel: bool = False,
        device: torch.device | str | None = None, dtype: torch.dtype | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        self._take(nn.Linear(in_features, out_features, bias, device, dtype), mesh, sequence_parallel)

    @classmethod
    def _from_linear(
        cls, linear: nn.Linear, mesh: DeviceMesh, sequence_parallel: bool, order: Tensor | None = None
    ) -> Any:
        check_plain(nn.Linear, linear)
        made = cls.__new__(cls)
        nn.Module.__init__(made)
        made._take(linear, mesh, sequence_parallel, order)
        return made

    def _take(self, linear: nn.Linear, mesh: DeviceMesh, sequence_parallel: bool, order: Tensor | None = None) -> None:
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.mesh, self.order, self.sequence_parallel = mesh, order, sequence_parallel
        self.weight = sharded(linear.weight, mesh, self._dim, order)
        whole = self._dim == 1 or linear.bias is None
        self.bias = linear.bias if whole else sharded(linear.bias, mesh, 0, order)

    def extra_repr(self) -> str:
        return f"{self.in_features}, {self.out_features}, ranks={self.mesh.size()}, bias={self.bias is not None}"


class ColumnParallelLinear(_ParallelLinear):
    """A linear layer whose output features are divided over the ranks.

    Args:
        in_features: features of the input, which is whole on all ranks.
        out_features: output features of all ranks together; the number of ranks divides it.
        mesh: the ranks, with one dimension.
        bias: the layer has a bias, which is divided too.
        sequence_parallel: the input is this rank's shard of the tokens; the layer gathers all shards.
        device, dtype: device and dtype of the parameters. All ranks draw the same weights, so give them the same seed.
    """

    #: For `MHA`, which may then rotate what the layer returns in place.
    keeps_no_output = True

    @classmethod
    def of(
        cls, linear: nn.Linear, mesh: DeviceMesh, order: Tensor | None = None, sequence_parallel: bool = False
    ) -> ColumnParallelLinear:
        """The layer with the weights of a whole one. `order`: the rows in the order in which they are divided."""
        return cls._from_linear(linear, mesh, sequence_parallel, order)

    def forward(self, x: Tensor) -> Tensor:
        """`[..., in_features]` -> `[..., out_features / ranks]`; with sequence_parallel for all tokens."""
        bias = None if self.bias is None else local(self.bias)
        return F.linear(enter(x, self.mesh, self.sequence_parallel), local(self.weight), bias)


class RowParallelLinear(_ParallelLinear):
    """A linear layer whose input features are divided over the ranks. The products are summed over the ranks.

    Args:
        in_features: input features of all ranks together; the number of ranks divides it.
        out_features: features of the output, which is whole on all ranks.
        mesh: the ranks, with one dimension.
        bias: the layer has a bias, the same on all ranks, which is added once.
        sequence_parallel: each rank keeps a shard of the output's tokens.
        device, dtype: as for `ColumnParallelLinear`.
    """

    _dim = 1

    @classmethod
    def of(cls, linear: nn.Linear, mesh: DeviceMesh, sequence_parallel: bool = False) -> RowParallelLinear:
        """The layer with the weights of a whole one."""
        return cls._from_linear(linear, mesh, sequence_parallel)

    def forward(self, x: Tensor) -> Tensor:
        """`[..., in_features / ranks]` -> `[..., out_features]`; with sequence_parallel for this rank's tokens."""
        return self.finish(F.linear(x, local(self.weight)))

    def finish(self, part: Tensor) -> Tensor:
        """The layer's output from this rank's product."""
        out = leave(part, self.mesh, self.sequence_parallel)
        if self.bias is None:
            return out
        # If ranks have shards of the tokens, each sees a part of the bias's gradient.
        bias = sum_over_ranks(self.bias, self.mesh) if self.sequence_parallel else self.bias
        return out + bias.to(out.dtype)


class VocabParallelEmbedding(nn.Module):
    """An embedding whose vocabulary is divided over the ranks.

    Args:
        num_embeddings: vocabulary of all ranks together; the number of ranks divides it.
        embedding_dim: features of the output, which is whole on all ranks.
        mesh: the ranks, with one dimension.
        sequence_parallel: each rank keeps a shard of the output's tokens.
        device, dtype: as for `ColumnParallelLinear`.
    """

    def __init__(
        self, num_embeddings: int, embedding_dim: int, mesh: DeviceMesh, sequence_parallel: bool = False,
        device: torch.device | str | None = None, dtype: torch.dtype | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        self._take(nn.Embedding(num_embeddings, embedding_dim, device=device, dtype=dtype), mesh, sequence_parallel)

    @classmethod
    def of(cls, embedding: nn.Embedding, mesh: DeviceMesh, sequence_parallel: bool = False) -> VocabParallelEmbedding:
        """The layer with the weights of a whole one, which must have no other options."""
        check_plain(nn.Embedding, embedding)
        options = {name: getattr(embedding, name) for name in _EMBEDDING_OPTIONS}
        given = {name: value for name, value in options.items() if value is not None and value is not False}
        if given:
            raise ValueError(
                f"embedding: expected one without {', '.join(_EMBEDDING_OPTIONS)}, got {given}; ranks that share the "
                "vocabulary do not have them"
            )
        made = cls.__new__(cls)
        nn.Module.__init__(made)
        made._take(embedding, mesh, sequence_parallel)
        return made

    def _take(self, embedding: nn.Embedding, mesh: DeviceMesh, sequence_parallel: bool) -> None:
        self.num_embeddings, self.embedding_dim = embedding.num_embeddings, embedding.embedding_dim
        self.mesh, self.sequence_parallel = mesh, sequence_parallel
        self.weight = sharded(embedding.weight, mesh, 0)

    def forward(self, tokens: Tensor) -> Tensor:
        """int64 `[..., seq]` -> `[..., seq, embedding_dim]`; with sequence_parallel, seq becomes `seq / ranks`.

        A token outside the vocabulary raises a ValueError on a CPU. On a GPU the check would synchronise, so the
        embedding of such a token is NaN.
        """
        weight = local(self.weight)
        outside = (tokens < 0) | (tokens >= self.num_embeddings)
        readable = type(outside) is Tensor and outside.device.type == "cpu" and not torch.compiler.is_compiling()
        if readable and outside.any():
            raise ValueError(
                f"tokens: expected numbers from 0 to {self.num_embeddings - 1}, got {int(tokens[outside][0])}; the "
                "embedding has no others"
            )
        own = tokens - self.mesh.get_local_rank() * weight.shape[0]
        elsewhere = (own < 0) | (own >= weight.shape[0])
        # 0 where another rank has it; of a token that nobody has, 0 of all ranks would pass for an embedding.
        nothing = weight.new_zeros(tokens.shape).masked_fill(outside, float("nan"))
        found = F.embedding(own.masked_fill(elsewhere, 0), weight)
        found = torch.where(elsewhere.unsqueeze(-1), nothing.unsqueeze(-1), found)
        return leave(found, self.mesh, self.sequence_parallel)

    def extra_repr(self) -> str:
        return f"{self.num_embeddings}, {self.embedding_dim}, ranks={self.mesh.size()}"


def interleaved(groups: list[int], ranks: int) -> Tensor:
    """Rows of layers that stand one above the other, so ordered that each rank's share of every one is together.
    `groups`: rows of each (q, k and v, or values and gates), which the ranks divide."""
    starts = [sum(groups[:place]) for place in range(len(groups))]
    for rows in groups:
        if rows % ranks:
            raise ValueError(f"mesh: expected a number of ranks that divides {rows} rows, got {ranks}")
    return torch.cat(
        [
            start + rank * rows // ranks + torch.arange(rows // ranks, device="cpu")
            for rank in range(ranks)
            for start, rows in zip(starts, groups)
        ]
    )


def heads_divide(heads: int, heads_kv: int, ranks: int) -> None:
    """Raises ValueError unless the ranks divide both."""
    if math.gcd(heads, heads_kv) % ranks:
        raise ValueError(
            f"mesh: expected a number of ranks that divides the {heads} query and {heads_kv} key/value heads, got "
            f"{ranks}; take fewer for tensor parallelism"
        )
