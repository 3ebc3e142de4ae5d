"""What processes do in tests of models: each gets a mesh of all of them."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import parallelize_module
from torch.nn.utils.parametrizations import weight_norm
from torch.utils.checkpoint import checkpoint

from flashtile.distributed import (
    ColumnParallelLinear,
    MlpParallel,
    RowParallelLinear,
    VocabParallelEmbedding,
    context_parallel,
    mean_over_shards,
    row_orders,
    shard_sequence,
    tensor_parallel_plan,
    unshard_sequence,
    vocabulary_loss,
)
from flashtile.models import GPT, GPTConfig
from flashtile.modules import FusedMlp, Mlp
from support.distributed.processes import refusal

SMALL: dict[str, Any] = {"context": 32, "layers": 2, "heads": 4, "width": 32, "vocabulary": 64}
#: GPT-2, Llama with grouped heads, GPT-NeoX with parallel blocks.
CONFIGS = {
    "gpt2": GPTConfig(**SMALL),
    "llama": GPTConfig(
        heads_kv=2, hidden=64, positions="rotary", norm="rms", activation="swiglu", tied=False, attention_bias=False,
        mlp_bias=False, **SMALL,
    ),
    "neox": GPTConfig(positions="rotary", rotary_dim=4, parallel=True, tied=False, **SMALL),
}  # fmt: skip


def tokens(config: GPTConfig) -> Tensor:
    generator = torch.Generator().manual_seed(3)
    drawn = torch.randint(config.vocabulary, (2, config.context + 1), generator=generator, device="cpu")
    return drawn.to(torch.get_default_device())


def model(config: GPTConfig) -> GPT:
    torch.manual_seed(5)
    return GPT(config, dtype=torch.float64)


def alone(config: GPTConfig) -> dict[str, Tensor]:
    """Logits, loss and gradients of one process."""
    whole, batch = model(config), tokens(config)
    logits = whole(batch[:, :-1])
    loss = F.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())
    loss.backward()
    grads = {name: p.grad for name, p in whole.named_parameters()}
    return {"logits": logits.detach(), "loss": loss.detach(), **grads}


def in_context(mesh: DeviceMesh) -> dict[str, dict[str, Tensor]]:
    """The same of shards of the sequence; gradients are this rank's parts."""
    found = {}
    for name, config in CONFIGS.items():
        for strategy in ("ring", "all_to_all"):
            sharded = context_parallel(model(config), mesh, strategy=strategy)
            batch = tokens(config)
            x, y = shard_sequence(batch[:, :-1], mesh), shard_sequence(batch[:, 1:], mesh)
            with torch.inference_mode():  # evaluated before it is trained
                sharded(x)
            logits = sharded(x)
            loss = F.cross_entropy(logits.flatten(0, 1), y.flatten(), reduction="sum")
            mean = mean_over_shards(loss, y.numel(), mesh)
            mean.backward()
            grads = {key: p.grad for key, p in sharded.named_parameters()}
            whole = unshard_sequence(logits.detach(), mesh)
            found[f"{name}-{strategy}"] = {"logits": whole, "loss": mean.detach(), **grads}
    return found


def checkpointed(mesh: DeviceMesh) -> dict[str, tuple[list[Tensor], list[Tensor]]]:
    """Gradients of blocks that are computed again in the backward, with the same dropout, and of those that are not."""
    found = {}
    config = replace(CONFIGS["gpt2"], attention_dropout=0.2)
    x, y = (shard_sequence(part, mesh) for part in (tokens(config)[:, :-1], tokens(config)[:, 1:]))
    for strategy in ("ring", "all_to_all"):
        grads = []
        for again in (False, True):
            sharded = context_parallel(model(config), mesh, strategy=strategy)
            if again:
                for block in sharded.blocks:
                    block.forward = partial(checkpoint, block.forward, use_reentrant=False)
            torch.manual_seed(7 + mesh.get_local_rank())
            F.cross_entropy(sharded(x).flatten(0, 1), y.flatten(), reduction="sum").backward()
            grads.append([p.grad for p in sharded.parameters()])
        found[strategy] = grads[0], grads[1]
    return found


def refused(mesh: DeviceMesh) -> list[str]:
    from flashtile.models import Bert, BertConfig

    config = CONFIGS["gpt2"]
    sharded = context_parallel(model(config), mesh)
    calls = (
        lambda: sharded(tokens(config)[:, :20]),
        lambda: sharded.generate(tokens(config)[:, :8], 2),
        lambda: context_parallel(torch.nn.Linear(2, 2), mesh),
        lambda: context_parallel(GPT(config, attention=lambda q, k, v: v), mesh),
        lambda: context_parallel(Bert(BertConfig(layers=1, heads=2, width=8, vocabulary=10)), mesh),
        lambda: sharded.loss(tokens(config)[:, :9]),
    )
    return [refusal(call) for call in calls]


def in_tensor(mesh: DeviceMesh) -> dict[str, dict[str, Tensor]]:
    """The loss and all gradients of a model whose weights are cut, put together again."""
    found = {}
    for name, config in CONFIGS.items():
        for fused, shards in itertools.product((False, True), (False, True)):
            cut = model(replace(config, fused_loss=fused))
            parallelize_module(cut, mesh, tensor_parallel_plan(cut, sequence_parallel=shards))
            batch = tokens(config)
            hidden = cut.hidden(batch[:, :-1])
            loss = vocabulary_loss(cut, hidden, batch[:, 1:], mesh)
            loss.backward()
            orders = row_orders(cut)
            grads = {}
            for key, p in cut.named_parameters():
                grad = p.grad.full_tensor() if isinstance(p.grad, DTensor) else p.grad
                grads[key] = grad[orders[key].argsort()] if key in orders else grad
            found[f"{name}-{fused}-{shards}"] = {"loss": loss.detach(), **grads}
    return found


def layers(mesh: DeviceMesh) -> dict[str, Tensor]:
    """A perceptron and an embedding, with and without shards of tokens, beside whole layers of the same weights."""
    found = {}
    rank, ranks = mesh.get_local_rank(), mesh.size()
    with mock.patch("torch.compiler.is_compiling", return_value=True):  # as on a GPU, where tokens are not looked at
        outside = VocabParallelEmbedding(8, 6, mesh)(torch.tensor([[0, 8, -1]])).isnan().all(-1)
    found["outside"] = outside, torch.tensor([[False, True, True]])
    for sequence in (False, True):
        torch.manual_seed(11)
        options: dict[str, Any] = {"sequence_parallel": sequence, "dtype": torch.float64}
        embedding = VocabParallelEmbedding(8, 6, mesh, **options)
        first = ColumnParallelLinear(6, 4, mesh, **options)
        second = RowParallelLinear(4, 6, mesh, **options)
        torch.manual_seed(11)
        whole = [nn.Embedding(8, 6, dtype=torch.float64), nn.Linear(6, 4, dtype=torch.float64)]
        whole.append(nn.Linear(4, 6, dtype=torch.float64))
        numbers = torch.tensor([[0, 7, 3, 4], [5, 5, 1, 2]])
        out = second(torch.tanh(first(embedding(numbers))))
        expected = whole[2](torch.tanh(whole[1](whole[0](numbers))))
        upstream = torch.arange(expected.numel(), dtype=torch.float64).view(expected.shape)
        out.backward(upstream.chunk(ranks, 1)[rank] if sequence else upstream)
        expected.backward(upstream)
        found[f"out-{sequence}"] = out.detach(), (expected.chunk(ranks, 1)[rank] if sequence else expected).detach()
        for layer, of in zip((embedding, first, second), whole):
            for key, parameter in layer.named_parameters():
                grad = parameter.grad
                grad = grad.full_tensor() if isinstance(grad, DTensor) else grad
                found[f"{type(layer).__name__}-{key}-{sequence}"] = grad, of.get_parameter(key).grad
    return found


def second_derivatives(mesh: DeviceMesh) -> dict[str, tuple[Tensor, Tensor]]:
    """Second derivatives of a perceptron, cut and whole; its input is the same on all ranks, or cut into shards."""
    found = {}
    for sequence in (False, True):
        torch.manual_seed(13)
        first, second = nn.Linear(6, 4, dtype=torch.float64), nn.Linear(4, 6, dtype=torch.float64)
        cut = (ColumnParallelLinear.of(first, mesh, None, sequence), RowParallelLinear.of(second, mesh, sequence))
        x = torch.randn(2, 4, 6, dtype=torch.float64)
        (expected,) = _curvature((first, second), x)
        given = x.chunk(mesh.size(), 1)[mesh.get_local_rank()] if sequence else x
        (curvature,) = _curvature(cut, given)
        whole = unshard_sequence(curvature, mesh, layout="contiguous") if sequence else curvature
        found[f"second derivative-{sequence}"] = whole, expected
    return found


def _curvature(steps: Sequence[Callable[[Tensor], Tensor]], x: Tensor) -> tuple[Tensor, ...]:
    """The gradient of the sum of squares of the gradient of a sum of cubes."""
    x = x.clone().requires_grad_()
    out = x
    for step in steps:
        out = step(torch.tanh(out))
    (grad,) = torch.autograd.grad(out.pow(3).sum(), x, create_graph=True)
    return torch.autograd.grad(grad.square().sum(), x)


class _Adapted(nn.Linear):
    """What an adapter makes of a layer: the same weight, and something beside the product."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + x


def refused_plans(mesh: DeviceMesh) -> list[str]:
    cut = model(CONFIGS["gpt2"])
    parallelize_module(cut, mesh, tensor_parallel_plan(cut))
    odd = replace(CONFIGS["llama"], heads_kv=1)
    dropping = replace(CONFIGS["gpt2"], attention_dropout=0.1)
    calls = (
        lambda: tensor_parallel_plan(nn.Linear(2, 2)),
        lambda: parallelize_module(model(odd), mesh, tensor_parallel_plan(model(odd))),
        lambda: parallelize_module(model(dropping), mesh, tensor_parallel_plan(model(dropping))),
        lambda: ColumnParallelLinear(4, 3, mesh),
        lambda: RowParallelLinear(4, 4, mesh, sequence_parallel=True)(torch.zeros(3, 2)),
        lambda: ColumnParallelLinear(4, 4, mesh, sequence_parallel=True)(torch.zeros(4)),
        lambda: RowParallelLinear(4, 4, mesh, sequence_parallel=True)(torch.zeros(2)),
        lambda: ColumnParallelLinear(4, 4, init_device_mesh("cpu", (1, mesh.size()))),
        lambda: VocabParallelEmbedding(4, 4, mesh.get_group()),
        lambda: VocabParallelEmbedding.of(nn.Embedding(4, 4, padding_idx=0), mesh),
        lambda: VocabParallelEmbedding.of(nn.Embedding(4, 4, max_norm=1.0), mesh),
        lambda: MlpParallel()._apply(Mlp(4, return_residual=True), mesh),
        lambda: MlpParallel()._apply(FusedMlp(4, accumulate_main_grad=True), mesh),
        lambda: VocabParallelEmbedding(4, 4, mesh)(torch.tensor([[0, 4]])),
        lambda: VocabParallelEmbedding(4, 4, mesh)(torch.tensor([[-1, 0]])),
        lambda: cut(tokens(CONFIGS["gpt2"])[:, :8]),
        lambda: cut.loss(tokens(CONFIGS["gpt2"])),
        lambda: cut.generate(tokens(CONFIGS["gpt2"])[:, :8], 2),
        lambda: cut.initialise(),
        lambda: RowParallelLinear.of(_Adapted(4, 4), mesh),
        lambda: ColumnParallelLinear.of(weight_norm(nn.Linear(4, 4)), mesh),
        lambda: VocabParallelEmbedding.of(nn.Linear(4, 4), mesh),
    )
    return [refusal(call) for call in calls]


JOBS = {
    "context": in_context, "refused": refused, "tensor": in_tensor, "layers": layers, "second": second_derivatives,
    "refused plans": refused_plans, "checkpointed": checkpointed,
}  # fmt: skip
