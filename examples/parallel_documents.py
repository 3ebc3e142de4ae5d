"""FSDP2, tensor and context parallelism together, on packed documents, with a checkpoint for any number of processes.

torchrun --nproc-per-node 4 examples/parallel_documents.py --context 2 --tensor 2 --checkpoint /tmp/documents
python examples/parallel_documents.py --checkpoint /tmp/documents --resume

The second command goes on in one process. Both print the losses that one process has from the start. The model has
flashtile's functions and PyTorch's styles of tensor parallelism: activations between the layers are DTensors, sharded
along the tokens. Processes that share a sequence also share the weights (FSDP). `examples/train_gpt.py` is a whole
training script, with data parallelism.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.elastic.multiprocessing.errors import record
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

import flashtile
from flashtile.distributed import context_parallel_attention, mean_over_shards, shard_sequence
from flashtile.modules import FusedMlp, RMSNorm

VOCABULARY, WIDTH, HEADS, HEAD_DIM, LAYERS = 32, 32, 4, 8, 2
LENGTHS = [27, 5, 21, 11]
NO_LABEL = -100


class Attention(nn.Module):
    """Causal attention of each token to its document. `mesh`: processes that share the sequence, or None."""

    def __init__(self, mesh: DeviceMesh | None) -> None:
        super().__init__()
        self.mesh = mesh
        self.q, self.k, self.v, self.out = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))

    def forward(self, x: Tensor, positions: Tensor, offsets: tuple[int, ...]) -> Tensor:
        # With tensor parallelism, the layers return some of the heads: [tokens, heads / processes, head_dim].
        q, k, v = (layer(x).unflatten(-1, (-1, HEAD_DIM)) for layer in (self.q, self.k, self.v))
        tables = flashtile.rotary_tables(max(LENGTHS), HEAD_DIM, device=q.device)
        q, k = (flashtile.apply_rotary(t, *tables, position_ids=positions) for t in (q, k))
        if self.mesh is None:
            out = flashtile.attention_varlen(q, k, v, torch.tensor(offsets, device=q.device), causal=True)
        else:
            out = context_parallel_attention(q, k, v, mesh=self.mesh, cu_seqlens=offsets, causal=True)
        return self.out(out.flatten(-2))


class Block(nn.Module):
    def __init__(self, mesh: DeviceMesh | None) -> None:
        super().__init__()
        self.norm1, self.norm2 = RMSNorm(WIDTH, eps=1e-6), RMSNorm(WIDTH, eps=1e-6)
        self.attention, self.mlp = Attention(mesh), FusedMlp(WIDTH, 4 * WIDTH)

    def forward(self, x: Tensor, positions: Tensor, offsets: tuple[int, ...]) -> Tensor:
        x = x + self.attention(self.norm1(x), positions, offsets)
        return x + self.mlp(self.norm2(x))


class Model(nn.Module):
    def __init__(self, mesh: DeviceMesh | None) -> None:
        super().__init__()
        self.token = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block(mesh) for _ in range(LAYERS))
        self.norm = RMSNorm(WIDTH, eps=1e-6)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor, labels: Tensor, positions: Tensor, offsets: tuple[int, ...]) -> Tensor:
        """The sum of the losses of `[tokens]`, of which `offsets` says where each document begins. They are numbers,
        with which the host plans: FSDP would move a tensor to the GPU."""
        x = self.token(tokens)
        for block in self.blocks:
            x = block(x, positions, offsets)
        total = flashtile.linear_cross_entropy(self.norm(x), self.head.weight, labels, reduction="sum")
        return total.full_tensor() if isinstance(total, DTensor) else total


def divide(model: Model, mesh: DeviceMesh) -> None:
    """Tensor parallelism within a layer; FSDP over the processes that share a sequence."""
    tokens = {"output_layouts": Shard(0), "use_local_output": False}
    heads: dict[str, Any] = {f"attention.{name}": ColwiseParallel() for name in "qkv"}
    parallelize_module(
        model, mesh["tensor"],
        {
            "token": RowwiseParallel(input_layouts=Replicate(), **tokens),
            "norm": SequenceParallel(sequence_dim=0),
            "head": ColwiseParallel(),
        },
    )  # fmt: skip
    for block in model.blocks:
        parallelize_module(
            block, mesh["tensor"],
            {
                "norm1": SequenceParallel(sequence_dim=0),
                "attention": PrepareModuleInput(
                    input_layouts=(Shard(0), None, None), desired_input_layouts=(Replicate(), None, None)
                ),
                **heads,
                "attention.out": RowwiseParallel(**tokens),
                "norm2": SequenceParallel(sequence_dim=0),
                "mlp": PrepareModuleInput(input_layouts=Shard(0), desired_input_layouts=Replicate()),
                "mlp.fc1": ColwiseParallel(),
                "mlp.fc2": RowwiseParallel(**tokens),
            },
        )  # fmt: skip
        fully_shard(block, mesh=mesh["context"])
    fully_shard(model, mesh=mesh["context"])


def documents(step: int) -> tuple[Tensor, Tensor, Tensor, tuple[int, ...]]:
    """Tokens, labels and positions of packed documents, `[tokens]` each, and where each begins, `[documents + 1]`."""
    draw = torch.Generator().manual_seed(step)
    starts = torch.randint(VOCABULARY, (len(LENGTHS),), generator=draw)
    numbers = [torch.arange(length) for length in LENGTHS]
    tokens = [(start + 3 * number) % VOCABULARY for start, number in zip(starts, numbers)]
    # The next token of the same document: shifted before the sequence is cut.
    labels = [F.pad(document[1:], (0, 1), value=NO_LABEL) for document in tokens]
    offsets = (*accumulate(LENGTHS, initial=0),)
    return torch.cat(tokens), torch.cat(labels), torch.cat(numbers), offsets


def train_step(model: Model, optimizer: torch.optim.Optimizer, mesh: DeviceMesh | None, step: int) -> float:
    """One step; returns the mean loss over all documents before it."""
    *rows, offsets = documents(step)
    tokens, labels, positions = (t.to(next(model.parameters()).device) for t in rows)
    if mesh is None:
        loss = model(tokens, labels, positions, offsets) / (labels != NO_LABEL).sum()
        loss.backward()
    else:
        shards = mesh["context"]
        tokens, labels, positions = (shard_sequence(t, shards, dim=0) for t in (tokens, labels, positions))
        total = model(tokens, labels, positions, offsets)
        loss = mean_over_shards(total, (labels != NO_LABEL).sum(), shards)
        (loss * shards.size()).backward()  # FSDP takes the mean of gradients whose sum is due
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


@record  # torchrun prints the error of the first process that fails
def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--context", type=int, default=1, help="processes that share a sequence")
    parser.add_argument("--tensor", type=int, default=1, help="processes that share the weights of a layer")
    parser.add_argument("--steps", type=int, default=4, help="steps of this run")
    parser.add_argument("--checkpoint", help="folder of a checkpoint, which is written at the end")
    parser.add_argument("--resume", action="store_true", help="go on from the checkpoint")
    parser.add_argument("--float64", action="store_true", help="weights in float64")
    options = parser.parse_args(arguments)
    device, mesh = torch.device("cuda" if torch.cuda.is_available() else "cpu"), None
    launched = "WORLD_SIZE" in os.environ
    if launched:
        if device.type == "cuda":
            device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
            torch.cuda.set_device(device)
        dist.init_process_group("cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo")
        mesh = init_device_mesh(device.type, (options.context, options.tensor), mesh_dim_names=("context", "tensor"))
    torch.manual_seed(0)  # the same weights everywhere
    model = Model(None if mesh is None else mesh["context"])
    model = model.to(device, torch.float64 if options.float64 else torch.float32)
    if mesh is not None:
        divide(model, mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    done = 0
    if options.resume:
        weights, moments = get_state_dict(model, optimizer)
        state: dict[str, Any] = {"model": weights, "optimizer": moments, "step": 0}
        dcp.load(state, checkpoint_id=options.checkpoint)
        set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
        done = state["step"]
    for step in range(done, done + options.steps):
        loss = train_step(model, optimizer, mesh, step)
        if not launched or dist.get_rank() == 0:
            print(f"step {step}: loss {loss:.9f}", flush=True)
    if options.checkpoint:
        weights, moments = get_state_dict(model, optimizer)
        state = {"model": weights, "optimizer": moments, "step": done + options.steps}
        dcp.save(state, checkpoint_id=options.checkpoint)
    if launched:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
