"""What the benchmark measures: attention of one GPU, ours over several, and PyTorch's own context parallelism."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Literal, NamedTuple, cast

import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

import flashtile
from flashtile.bench.distributed.cases import ParallelCase
from flashtile.distributed import context_parallel_attention, shard_sequence

LayoutKind = Literal["zigzag", "contiguous"]
Strategy = Literal["ring", "all_to_all", "all_gather", "ring_all_to_all"]


class Problem(NamedTuple):
    """What an implementation computes with.

    Attributes:
        leaves: q, k and v of this rank, which want gradients, in flashtile's layout.
        dout: of this rank.
        forward: computes the output of the leaves.
        layout: how the sequence is cut.
    """

    leaves: tuple[Tensor, ...]
    dout: Tensor
    forward: Callable[[], Tensor]
    layout: LayoutKind


#: Makes the problem of a case on a mesh, from the tensors of the whole sequence, and holds it open.
Implementation = Callable[[ParallelCase, DeviceMesh, tuple[Tensor, ...]], Any]


@contextmanager
def one_gpu(case: ParallelCase, mesh: DeviceMesh, whole: tuple[Tensor, ...]) -> Iterator[Problem]:
    """All of the work on this GPU alone."""
    q, k, v = (t.requires_grad_() for t in whole[:3])
    yield Problem((q, k, v), whole[3], lambda: flashtile.attention(q, k, v, causal=case.causal), "contiguous")


def ours(strategy: str) -> Implementation:
    @contextmanager
    def make(case: ParallelCase, mesh: DeviceMesh, whole: tuple[Tensor, ...]) -> Iterator[Problem]:
        q, k, v, dout = (shard_sequence(t, mesh) for t in whole)
        leaves = tuple(t.requires_grad_() for t in (q, k, v))

        def forward() -> Tensor:
            named = cast(Strategy, strategy)
            return context_parallel_attention(q, k, v, mesh=mesh, strategy=named, causal=case.causal)

        yield Problem(leaves, dout, forward, "zigzag")

    return make


def torch_context_parallel(rotation: str) -> Implementation:
    """`torch.distributed.tensor.experimental.context_parallel` around `scaled_dot_product_attention`, which it makes a
    ring. It is balanced like ours under a causal mask, and cuts runs without one."""

    @contextmanager
    def make(case: ParallelCase, mesh: DeviceMesh, whole: tuple[Tensor, ...]) -> Iterator[Problem]:
        from torch.distributed.tensor.experimental import _attention as experimental
        from torch.distributed.tensor.experimental import context_parallel

        experimental.set_rotate_method(rotation)
        experimental._cp_options.enable_load_balance = case.causal
        layout: LayoutKind = "zigzag" if case.causal else "contiguous"
        dout = shard_sequence(whole[3], mesh, layout=layout)
        # It shards its buffers in place, in PyTorch's layout.
        q, k, v = (t.transpose(1, 2).contiguous() for t in whole[:3])
        repeats = case.H // case.Hkv
        if repeats > 1:  # its ring does not know grouped heads
            k, v = (t.repeat_interleave(repeats, dim=1) for t in (k, v))
        buffers = [q, k, v]
        with context_parallel(mesh, buffers=buffers, buffer_seq_dims=[2, 2, 2], no_restore_buffers=set(buffers)):
            for tensor in buffers:
                tensor.requires_grad_()

            def forward() -> Tensor:
                return F.scaled_dot_product_attention(q, k, v, is_causal=case.causal).transpose(1, 2)

            yield Problem((q, k, v), dout, forward, layout)

    return make


#: In the order in which they are measured; the first is what efficiencies refer to.
IMPLEMENTATIONS: dict[str, Implementation] = {
    "flashtile-one-gpu": one_gpu,
    "flashtile-ring": ours("ring"),
    "flashtile-all_to_all": ours("all_to_all"),
    "flashtile-all_gather": ours("all_gather"),
    "torch-cp-allgather": torch_context_parallel("allgather"),
    "torch-cp-alltoall": torch_context_parallel("alltoall"),
}
BASELINE = "flashtile-one-gpu"


def gradients_in_layout(name: str, case: ParallelCase, grads: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Gradients of q, k and v as of flashtile's tensors."""
    if not name.startswith("torch-"):
        return grads
    dq, dk, dv = (g.transpose(1, 2) for g in grads)
    groups = (case.Hkv, case.H // case.Hkv)
    return dq, *(g.unflatten(2, groups).float().sum(3).to(g.dtype) for g in (dk, dv))
