"""Attention cases: what a call is, random inputs for it, and its check against the oracle."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

import flashtile
from flashtile.testing.tolerance import Size, assert_close, size


@dataclass(frozen=True)
class AttentionCase:
    """One call: dense with `batch`, `seq_q`, `seq_k`; packed with `lengths_q`, `lengths_k`.

    `arguments` are keyword arguments of `flashtile.attention` other than tensors. `key_lengths` are given as a tuple.
    """

    seq_q: int = 64
    seq_k: int = 64
    batch: int = 2
    heads: int = 2
    heads_kv: int = 2
    head_dim: int = 32
    head_dim_v: int = 32
    dtype: torch.dtype = torch.float32
    lengths_q: tuple[int, ...] | None = None
    lengths_k: tuple[int, ...] | None = None
    key_lengths: tuple[int, ...] | None = None
    arguments: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        sizes = (
            f"varlen{list(self.lengths_q)}x{list(self.lengths_k or self.lengths_q)}"
            if self.lengths_q is not None
            else f"b{self.batch}q{self.seq_q}k{self.seq_k}"
        )
        flags = "".join(f"-{key}{value}" for key, value in self.arguments.items())
        lengths = f"-keys{list(self.key_lengths)}" if self.key_lengths is not None else ""
        heads = f"h{self.heads}:{self.heads_kv}-d{self.head_dim}:{self.head_dim_v}"
        return f"{sizes}-{heads}-{str(self.dtype)[6:]}{flags}{lengths}"

    @property
    def packed(self) -> bool:
        return self.lengths_q is not None


@dataclass
class Inputs:
    """Tensors of one case: q, k, v, the upstream gradients, and the extra tensor arguments of the call."""

    q: Tensor
    k: Tensor
    v: Tensor
    dout: Tensor
    dlse: Tensor
    tensors: dict[str, Tensor]


def make_inputs(case: AttentionCase, device: torch.device | str = "cpu", seed: int = 0) -> Inputs:
    """Random normal inputs, the same for a case and seed on every device."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int, dtype: torch.dtype = case.dtype) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype).to(device)

    tensors: dict[str, Tensor] = {}
    rows_q: tuple[int, ...]
    rows_k: tuple[int, ...]
    lse_shape: tuple[int, ...]
    if case.lengths_q is not None:
        lengths_k = case.lengths_k if case.lengths_k is not None else case.lengths_q
        rows_q, rows_k = (sum(case.lengths_q),), (sum(lengths_k),)
        tensors["cu_seqlens_q"] = _cumulative(case.lengths_q, device)
        tensors["cu_seqlens_k"] = _cumulative(lengths_k, device)
        lse_shape = (case.heads, *rows_q)
    else:
        rows_q, rows_k = (case.batch, case.seq_q), (case.batch, case.seq_k)
        lse_shape = (case.batch, case.heads, case.seq_q)
    if case.key_lengths is not None:
        tensors["key_lengths"] = torch.tensor(case.key_lengths, dtype=torch.int32, device=device)
    if case.arguments.get("dropout_p"):
        tensors["dropout_seed"] = torch.tensor([1234567 + seed, 89], device=device)
    return Inputs(
        q=normal(*rows_q, case.heads, case.head_dim),
        k=normal(*rows_k, case.heads_kv, case.head_dim),
        v=normal(*rows_k, case.heads_kv, case.head_dim_v),
        dout=normal(*rows_q, case.heads, case.head_dim_v),
        dlse=normal(*lse_shape, dtype=torch.float64 if case.dtype is torch.float64 else torch.float32),
        tensors=tensors,
    )


def run(case: AttentionCase, inputs: Inputs, backend: str, dtype: torch.dtype | None = None) -> dict[str, Tensor]:
    """Runs forward and backward of a case. Returns out, lse, dq, dk, dv; `dtype` casts the inputs first."""
    dtype = dtype or case.dtype
    q, k, v = (t.to(dtype).detach().requires_grad_() for t in (inputs.q, inputs.k, inputs.v))
    function: Callable[..., Any] = flashtile.attention_varlen if case.packed else flashtile.attention
    out, lse = function(q, k, v, **inputs.tensors, **case.arguments, return_lse=True, backend=backend)
    # A row with no visible key has lse = -inf: no gradient reaches it, whatever comes from above.
    dq, dk, dv = torch.autograd.grad((out, lse), (q, k, v), (inputs.dout.to(dtype), inputs.dlse.to(lse.dtype)))
    return {"out": out.detach(), "lse": lse.detach(), "dq": dq, "dk": dk, "dv": dv}


def check(
    case: AttentionCase, backend: str, device: torch.device | str = "cpu", seed: int = 0, inputs: Inputs | None = None
) -> dict[str, Tensor]:
    """Asserts that a backend's forward and backward of a case agree with the fp64 oracle. Returns its results."""
    inputs = inputs or make_inputs(case, device, seed)
    actual = run(case, inputs, backend)
    oracle = run(case, inputs, "reference", torch.float64)
    eager = run(case, inputs, "reference")
    cancelled = _cancelled(case, inputs, oracle["out"])
    for name, value in actual.items():
        assert_close(f"{case}: {name}", value, oracle[name], eager[name], cancelled.get(name, Size()))
    return actual


def _cancelled(case: AttentionCase, inputs: Inputs, out: Tensor) -> dict[str, Size]:
    """How large the numbers are that cancel within the results.

    A backward pass without the N×N matrix takes `delta = rowsum(dout · out)` from the rounded out. The error of that
    sum goes, by the weights, into dq along the mean key and into dk along queries, and is there still when what it was
    subtracted from is gone (one key: dq = dk = 0). lse is a sum of the largest score and a logarithm, each about 1.
    """
    arguments = {name: value for name, value in case.arguments.items() if name != "dropout_p"}
    tensors = {name: value for name, value in inputs.tensors.items() if name != "dropout_seed"}
    delta = (inputs.dout.double() * out).norm(dim=-1, keepdim=True)
    probe = replace(
        inputs,
        v=torch.ones_like(inputs.v[..., :1]),
        dout=delta,
        dlse=torch.zeros_like(inputs.dlse),
        tensors=tensors,
    )
    weighted = run(replace(case, arguments=arguments), probe, "reference", torch.float64)["dv"]
    scale = abs(case.arguments.get("scale", case.head_dim**-0.5))
    return {
        "lse": Size(1, 1),
        "dq": Size(*(scale * a * b for a, b in zip(size(delta), size(inputs.k)))),
        "dk": Size(*(scale * a * b for a, b in zip(size(weighted), size(inputs.q)))),
    }


def with_arguments(case: AttentionCase, **arguments: Any) -> AttentionCase:
    """The same case with more keyword arguments of the call."""
    return replace(case, arguments={**case.arguments, **arguments})


def _cumulative(lengths: tuple[int, ...], device: torch.device | str) -> Tensor:
    return torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, device=device)
