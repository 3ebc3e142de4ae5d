"""What processes do in tests of flashtile as PyTorch's flash attention: DTensors and PyTorch's context parallelism."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor.experimental import context_parallel
from torch.distributed.tensor.experimental._attention import _cp_options, context_parallel_unshard, set_rotate_method
from torch.nn import functional as F

from flashtile.integrations.torch_flash import _Active, _Operators, use_flashtile_as_flash_attention

Results = tuple[list[Tensor], list[Tensor], list[Tensor]]


def scaled_dot_product_attention(q: Tensor, k: Tensor, v: Tensor, is_causal: bool) -> Tensor:
    """PyTorch's context parallelism replaces a function by its name."""
    return torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, 0.0, is_causal)[0]


@contextmanager
def active(device: str) -> Iterator[None]:
    """SDPA is the flash operator, and that is flashtile's. On a CPU PyTorch would choose an operator for CPUs."""
    if device == "cuda":
        use_flashtile_as_flash_attention()
        with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.FLASH_ATTENTION):
            yield
        torch.nn.attention.restore_flash_attention_impl()
        return
    operators = _Active(_Operators({"backend": "auto", "deterministic": False}), "CPU")
    with mock.patch.object(F, "scaled_dot_product_attention", scaled_dot_product_attention):
        yield
    operators.remove()


def inputs(device: str) -> list[Tensor]:
    """q, k, v and the gradient of the result, `[2, 4, 64, 32]`."""
    generator = torch.Generator().manual_seed(0)
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    return [torch.randn(2, 4, 64, 32, generator=generator).to(device, dtype) for _ in range(4)]


def attend(tensors: list[Tensor], causal: bool) -> list[Tensor]:
    q, k, v, dout = tensors
    leaves = [t.detach().clone().requires_grad_() for t in (q, k, v)]
    out = F.scaled_dot_product_attention(*leaves, is_causal=causal)
    return [out.detach(), *torch.autograd.grad(out, leaves, dout)]


def eager(device: str, causal: bool, dtype: torch.dtype | None = None) -> list[Tensor]:
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        return [t.cpu() for t in attend([t.to(dtype) for t in inputs(device)], causal)]


def compared(device: str, found: Callable[[bool], list[Tensor]]) -> dict[str, Results]:
    """Results by name, those of the same dtype in one process, and an oracle's."""
    results = {}
    for name, causal in (("full", False), ("causal", True)):
        with active(device):
            here = [t.cpu() for t in found(causal)]
        results[name] = here, eager(device, causal), eager(device, causal, torch.float64)
    return results


def dtensors(mesh: DeviceMesh) -> dict[str, Results]:
    device, found = mesh.device_type, {}
    for dim, along in ((0, "batch"), (1, "heads")):

        def sharded(causal: bool, dim: int = dim) -> list[Tensor]:
            given = [distribute_tensor(t, mesh, [Shard(dim)]) for t in inputs(device)]
            results = attend(given, causal)
            assert all(isinstance(t, DTensor) and t.placements == (Shard(dim),) for t in results)
            return [t.full_tensor() for t in results]  # type: ignore[attr-defined]

        found |= {f"{along}, {name}": results for name, results in compared(device, sharded).items()}
    return found


def context(mesh: DeviceMesh) -> dict[str, Results]:
    """Through PyTorch's `context_parallel`, with both ways to move keys, and balanced where causal."""
    device, found = mesh.device_type, {}
    for method in ("allgather", "alltoall"):

        def over_ranks(causal: bool) -> list[Tensor]:
            _cp_options.enable_load_balance = causal
            shards: list[Any] = inputs(device)
            with context_parallel(mesh, buffers=shards, buffer_seq_dims=[2] * 4, no_restore_buffers=set(shards)):
                results = attend(shards, causal)
            return context_parallel_unshard(mesh, results, [2] * 4)

        set_rotate_method(method)
        found |= {f"{method}, {name}": results for name, results in compared(device, over_ranks).items()}
    return found


JOBS = {"dtensors": dtensors, "context parallelism": context}
