"""The processes of a training: one, or those that torchrun started."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from gpt_training.options import OptionError

Result = TypeVar("Result")
_CPU = torch.device("cpu")


@dataclass(frozen=True)
class Processes:
    """This process among the others.

    Attributes:
        rank: its number; 0 prints and writes.
        size: how many there are.
        device: on which it computes.
        launched: by torchrun, also where it is alone.
        context: so many share each sequence.
        tensor: so many with neighbouring numbers share the weights of each layer.
    """

    rank: int
    size: int
    device: torch.device
    launched: bool
    context: int = 1
    tensor: int = 1

    @property
    def replicas(self) -> int:
        """How many sequences are read at the same time, for each that a process is given."""
        return self.size // (self.context * self.tensor)

    @property
    def replica(self) -> int:
        """The number of this process, or of those that share its data."""
        return self.rank // (self.context * self.tensor)

    def mesh(self) -> DeviceMesh:
        """All of them: along "data" they read other sequences, along "context" they share these, along "tensor" the
        weights of each layer."""
        shape = self.replicas, self.context, self.tensor
        return init_device_mesh(self.device.type, shape, mesh_dim_names=("data", "context", "tensor"))

    @property
    def first(self) -> bool:
        return self.rank == 0

    def from_first(self, work: Callable[[], Result]) -> Result:
        """Runs on rank 0 alone; its result, or the user's mistake that it found, is that of every process."""
        answer: list[Any] = [None, None]
        if self.first:
            try:
                answer[0] = work()
            except OptionError as error:
                answer[1] = str(error)
        dist.broadcast_object_list(answer, device=_CPU)
        if answer[1] is not None:
            raise OptionError(answer[1])
        return answer[0]

    def mean(self, values: Sequence[float]) -> list[float]:
        """The mean of each number over the processes."""
        total = torch.tensor(values, dtype=torch.float64)
        dist.all_reduce(total)
        return (total / self.size).tolist()

    def largest(self, value: int) -> int:
        found = torch.tensor(value)
        dist.all_reduce(found, dist.ReduceOp.MAX)
        return int(found)

    def barrier(self) -> None:
        # A reduction on the CPU, by gloo: the barrier of NCCL would occupy the GPU.
        self.largest(0)


@contextmanager
def join_processes(device: str | None, minutes: float, context: int = 1, tensor: int = 1) -> Iterator[Processes]:
    """Joins the processes of torchrun, or makes a group of this one alone, so that all that follows is one path.

    `context` of them share each sequence, and `tensor` the weights of each layer. Numbers and checkpoints go over gloo,
    gradients on GPUs over NCCL.
    """
    kind = device or ("cuda" if torch.cuda.is_available() else "cpu")
    launched = dist.is_torchelastic_launched()
    local = int(os.environ["LOCAL_RANK"]) if launched else 0
    if kind == "cuda" and torch.cuda.device_count() <= local:
        raise OptionError(
            f"--device: expected {local + 1} GPUs for so many processes, got {torch.cuda.device_count()}; start fewer, "
            "or take --device cpu"
        )
    where = torch.device("cuda", local) if kind == "cuda" else _CPU
    if kind == "cuda":
        torch.cuda.set_device(where)
    timeout = timedelta(minutes=minutes)
    if launched:
        dist.init_process_group("cpu:gloo,cuda:nccl" if kind == "cuda" else "gloo", timeout=timeout)
    else:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1, timeout=timeout)
    try:
        size = dist.get_world_size()
        together = context * tensor
        if size % together:
            name = "--cp" if tensor == 1 else "--tp" if context == 1 else "--cp, --tp"
            raise OptionError(
                f"{name}: expected a divisor of the number of processes, {size}, got {together}; start a multiple of "
                f"{together} with torchrun --nproc-per-node"
            )
        yield Processes(dist.get_rank(), size, where, launched, context, tensor)
    finally:
        dist.destroy_process_group()
