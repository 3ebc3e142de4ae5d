"""`flashtile warmup`: compiles kernels ahead, so that the first call of a program does not wait for them."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch

import flashtile
from flashtile.bench.start import UserError
from flashtile.cli.explain import parse_dtype


@dataclass(frozen=True)
class Shape:
    """A shape that kernels are compiled for; the batch does not matter to them."""

    head_dim: int
    dtype: str
    causal: bool
    heads: int
    heads_kv: int
    seq: int

    def __str__(self) -> str:
        return f"head_dim {self.head_dim}, {self.dtype}, {'causal' if self.causal else 'full'}"


def shapes(
    head_dims: Iterable[int], dtypes: Iterable[str], causal: bool | None, heads: int, heads_kv: int | None, seq: int
) -> list[Shape]:
    """All combinations; `causal=None` means with and without."""
    flags = (False, True) if causal is None else (causal,)
    return [
        Shape(head_dim, dtype, flag, heads, heads_kv or heads, seq)
        for head_dim, dtype, flag in itertools.product(head_dims, dtypes, flags)
    ]


def require_gpu() -> torch.device:
    if not torch.cuda.is_available():
        raise UserError("there is no GPU here, so there is nothing to compile for; the CPU backend needs no warm-up")
    return torch.device("cuda")


def warm_up(wanted: list[Shape], device: torch.device, on_shape: Callable[[Shape], None]) -> None:
    """Runs a forward and backward of batch 1 of each shape, which leaves its kernels in Triton's cache on disk."""
    for shape in wanted:
        on_shape(shape)
        dtype = parse_dtype(shape.dtype)
        q, k, v = (
            torch.zeros(1, shape.seq, heads, shape.head_dim, dtype=dtype, device=device, requires_grad=True)
            for heads in (shape.heads, shape.heads_kv, shape.heads_kv)
        )
        try:
            out = flashtile.attention(q, k, v, causal=shape.causal)
        except (TypeError, ValueError) as error:
            raise UserError(f"{shape}: {error}") from None
        out.backward(torch.zeros_like(out))
