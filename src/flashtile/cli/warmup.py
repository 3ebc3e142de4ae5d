"""`flashtile warmup`: compiles kernels ahead, so that the first call of a program does not wait for them."""

from __future__ import annotations

import itertools
from collections.abc import Iterable

import torch

import flashtile
from flashtile.bench.cases import Case
from flashtile.bench.start import UserError
from flashtile.cli.explain import parse_dtype


def shapes(
    head_dims: Iterable[int], dtypes: Iterable[str], causal: bool | None, heads: int, heads_kv: int | None, seq: int
) -> list[Case]:
    """All combinations, of batch 1, which does not matter to kernels; `causal=None` means with and without."""
    return [
        Case(1, seq, heads, heads_kv or heads, head_dim, head_dim, causal=flag, dtype=dtype)
        for head_dim, dtype, flag in itertools.product(
            head_dims, dtypes, (False, True) if causal is None else (causal,)
        )
    ]


def require_gpu() -> torch.device:
    if not torch.cuda.is_available():
        raise UserError("there is no GPU here, so there is nothing to compile for; the CPU backend needs no warm-up")
    return torch.device("cuda")


def warm_up(case: Case, device: torch.device) -> None:
    """Runs a forward and backward, which leaves their kernels in Triton's cache on disk."""
    dtype = parse_dtype(case.dtype)
    q, k, v = (torch.zeros(shape, dtype=dtype, device=device, requires_grad=True) for shape in case.shapes())
    try:
        out = flashtile.attention(q, k, v, causal=case.causal)
    except (TypeError, ValueError) as error:
        raise UserError(f"{case.name}: {error}") from None
    out.backward(torch.zeros_like(out))
