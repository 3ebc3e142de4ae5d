"""What processes do in tests of transformers models over shards: each gets a mesh of all of them."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from flashtile.distributed import mean_over_shards, shard_sequence, unshard_sequence
from flashtile.integrations.transformers import context_parallel
from support.distributed.processes import refusal
from support.models import transformers_cases
from support.models.transformers_cases import ALL, VOCABULARY

#: Rotary and learned positions; windows in some layers, soft cap, sinks; both directions. With a strategy each.
MODELS = {"llama": "ring", "gpt2": "all_to_all", "gemma2": "ring", "gpt-oss": "all_to_all", "bert": "ring"}
SEQ = 16


def build(name: str, **more: Any) -> Any:
    return transformers_cases.build(ALL[name], "eager", torch.float64, **more)


def batch() -> tuple[Tensor, Tensor]:
    """Tokens and the labels of their places, already shifted."""
    tokens = torch.randint(3, VOCABULARY, (2, SEQ + 1), generator=torch.Generator().manual_seed(1))
    return tokens[:, :-1], tokens[:, 1:]


def results(logits: Tensor, loss: Tensor, model: Any) -> dict[str, Tensor]:
    grads = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return {"logits": logits.detach(), "loss": loss.detach(), **grads}


def alone(name: str) -> dict[str, Tensor]:
    model, (tokens, labels) = build(name), batch()
    logits = model(tokens, use_cache=False).logits if name != "bert" else model(tokens).logits
    loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten())
    loss.backward()
    return results(logits, loss, model)


def in_context(mesh: DeviceMesh) -> dict[str, dict[str, Tensor]]:
    """The same of shards of the sequence; gradients are this rank's parts."""
    found = {}
    for name, strategy in MODELS.items():
        model = context_parallel(build(name), mesh, strategy=strategy)
        if name == "llama":  # attention again in the backward
            model.train()
            model.gradient_checkpointing_enable()
        tokens, labels = (shard_sequence(part, mesh) for part in batch())
        with torch.inference_mode():  # evaluated before it is trained
            model(tokens)
        logits = model(tokens).logits
        total = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
        mean = mean_over_shards(total, labels.numel(), mesh)
        mean.backward()
        found[name] = results(unshard_sequence(logits.detach(), mesh), mean, model)
    return found


def refused(mesh: DeviceMesh) -> dict[str, str]:
    tokens = shard_sequence(batch()[0], mesh)
    llama = context_parallel(build("llama"), mesh)
    dynamic = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
    actions = {
        "labels": lambda: llama(tokens, labels=tokens),
        "mask": lambda: llama(tokens, torch.ones_like(tokens)),
        "positions": lambda: llama(tokens, position_ids=tokens),
        "cache": lambda: llama(tokens, use_cache=True),
        "generate": lambda: llama.generate(tokens, max_new_tokens=2, do_sample=False, pad_token_id=0),
        "twice": lambda: context_parallel(llama, mesh),
        "rope": lambda: context_parallel(build("llama", rope_parameters=dynamic), mesh),
        "long": lambda: context_parallel(build("gpt2"), mesh)(tokens.repeat(1, 8)),
        "two sequences": lambda: context_parallel(build("t5"), mesh),
        "no model": lambda: context_parallel(torch.nn.Linear(2, 2), mesh),
    }
    return {name: refusal(action) for name, action in actions.items()}


JOBS = {"context": in_context, "refused": refused}
