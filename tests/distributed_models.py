"""What processes do in tests of models: each gets a mesh of all of them."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from flashtile.distributed import context_parallel, mean_over_shards, shard_sequence, unshard_sequence
from flashtile.models import GPT, GPTConfig

SMALL: dict[str, Any] = {"context": 32, "layers": 2, "heads": 4, "width": 32, "vocabulary": 61}
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
    return torch.randint(config.vocabulary, (2, config.context + 1), generator=generator)


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
            logits = sharded(x)
            loss = F.cross_entropy(logits.flatten(0, 1), y.flatten(), reduction="sum")
            mean = mean_over_shards(loss, y.numel(), mesh)
            mean.backward()
            grads = {key: p.grad for key, p in sharded.named_parameters()}
            whole = unshard_sequence(logits.detach(), mesh)
            found[f"{name}-{strategy}"] = {"logits": whole, "loss": mean.detach(), **grads}
    return found


def refused(mesh: DeviceMesh) -> list[str]:
    from flashtile.models import Bert, BertConfig

    found = []
    config = CONFIGS["gpt2"]
    sharded = context_parallel(model(config), mesh)
    actions = (
        lambda: sharded(tokens(config)[:, :20]),
        lambda: sharded.generate(tokens(config)[:, :8], 2),
        lambda: context_parallel(torch.nn.Linear(2, 2), mesh),
        lambda: context_parallel(GPT(config, attention=lambda q, k, v: v), mesh),
        lambda: context_parallel(Bert(BertConfig(layers=1, heads=2, width=8, vocabulary=10)), mesh),
    )
    for action in actions:
        try:
            action()
            found.append("nothing")
        except (TypeError, ValueError) as error:
            found.append(str(error))
    return found


JOBS = {"context": in_context, "refused": refused}
