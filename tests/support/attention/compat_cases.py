"""What the tests of flashtile.compat compare with: attention by its definition, and inputs for it."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import flashtile
from flashtile.compat.signatures import EXTENSIONS, VERSION_1, VERSION_2, VERSION_3, VERSION_4
from flashtile.testing import assert_close
from support.running.autograd import normal

#: A dtype and where it is tried.
PLACES = [
    *(pytest.param("cpu", dtype, id=f"cpu-{dtype}"[:3] + f"-{str(dtype)[6:]}")
      for dtype in (torch.float16, torch.float32, torch.float64)),
    *(pytest.param("cuda", dtype, marks=pytest.mark.gpu, id=f"cuda-{str(dtype)[6:]}")
      for dtype in (torch.float16, torch.bfloat16)),
]  # fmt: skip
#: Where a call is tried whose arithmetic is flashtile's own: each function has tests of its dtypes at its own door.
CALLS = [
    pytest.param("cpu", torch.float32, id="cpu"), pytest.param("cuda", torch.float16, marks=pytest.mark.gpu, id="cuda"),
]  # fmt: skip
every_dtype, places = (pytest.mark.parametrize(("device", "dtype"), cases) for cases in (PLACES, CALLS))
devices = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])


@dataclass(frozen=True)
class Meaning:
    """What a call does, in the terms of its definition; sides of the window are unlimited where negative."""

    scale: float | None = None
    causal: bool = False
    window: tuple[int, int] = (-1, -1)
    softcap: float = 0.0
    alibi_slopes: Tensor | None = None
    bias: Tensor | None = None
    top_left: bool = False
    dropout_p: float = 0.0
    chunk: int = 0


def visible_keys(seq_q: int, seq_k: int, meaning: Meaning) -> Tensor:
    """bool `[seq_q, seq_k]`."""
    left, right = meaning.window[0], 0 if meaning.causal else meaning.window[1]
    query = torch.arange(seq_q)[:, None] + (0 if meaning.top_left else seq_k - seq_q)
    distance = torch.arange(seq_k) - query
    visible = torch.ones(seq_q, seq_k, dtype=torch.bool)
    if left >= 0:
        visible &= distance >= -left
    if right >= 0:
        visible &= distance <= right
    if meaning.chunk:
        visible &= torch.arange(seq_k) // meaning.chunk == query.div(meaning.chunk, rounding_mode="floor")
    return visible


def scores_by_definition(q: Tensor, k: Tensor, meaning: Meaning) -> Tensor:
    """`[B, H, Sq, Sk]`, -inf where not visible; q `[B, Sq, H, D]`, k `[B, Sk, G, D]`."""
    k = k.repeat_interleave(q.shape[2] // k.shape[2], dim=2)
    scale = 1 / math.sqrt(q.shape[-1]) if meaning.scale is None else meaning.scale
    scores = torch.einsum("bqhd,bkhd->bhqk", q, k) * scale
    scores = scores.to(torch.promote_types(q.dtype, torch.float32))
    if meaning.softcap:
        scores = meaning.softcap * torch.tanh(scores / meaning.softcap)
    seq_q, seq_k = scores.shape[-2:]
    if meaning.bias is not None:
        scores = scores + meaning.bias.to(scores)
    if meaning.alibi_slopes is not None:
        distance = torch.arange(seq_q)[:, None] + seq_k - seq_q - torch.arange(seq_k)
        scores = scores - meaning.alibi_slopes.to(scores)[..., None, None] * distance.abs().to(scores)
    return scores.masked_fill(~visible_keys(seq_q, seq_k, meaning).to(scores.device), -math.inf)


def attention_by_definition(
    q: Tensor, k: Tensor, v: Tensor, meaning: Meaning, kept: Tensor | None = None, sinks: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """out `[B, Sq, H, D]` and lse `[B, H, Sq]`, by matrices; `kept` bool `[B, H, Sq, Sk]` is the dropout, `sinks` are
    those of the heads."""
    scores = scores_by_definition(q, k, meaning)
    summed = scores
    if sinks is not None:
        summed = torch.cat((scores, sinks.to(scores)[None, :, None, None].expand(*scores.shape[:3], 1)), -1)
    blind = summed.isneginf().all(-1)
    # The gradient of a logsumexp of nothing would be NaN.
    lse = torch.logsumexp(summed.masked_fill(blind[..., None], 0), -1).masked_fill(blind, -math.inf)
    weights = (scores - lse.masked_fill(blind, 0)[..., None]).exp()
    if kept is not None:
        weights = weights * kept / (1 - meaning.dropout_p)
    v = v.repeat_interleave(q.shape[2] // v.shape[2], dim=2)
    return torch.einsum("bhqk,bkhd->bqhd", weights.to(v.dtype), v), lse


def packed_by_definition(
    q: Tensor, k: Tensor, v: Tensor, lengths_q: list[int], lengths_k: list[int], meaning: Meaning,
    kept: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The same of packed sequences: out `[total_q, H, D]`, lse `[H, total_q]`."""
    outs, lses = [], []
    ends = zip(pairwise([0, *accumulate(lengths_q)]), pairwise([0, *accumulate(lengths_k)]))
    for number, ((q0, q1), (k0, k1)) in enumerate(ends):
        slopes = meaning.alibi_slopes
        one = replace(meaning, alibi_slopes=slopes[number] if slopes is not None and slopes.dim() == 2 else slopes)
        part = None if kept is None else kept[number : number + 1, :, : q1 - q0, : k1 - k0]
        out, lse = attention_by_definition(q[None, q0:q1], k[None, k0:k1], v[None, k0:k1], one, part)
        outs.append(out[0])
        lses.append(lse[0])
    return torch.cat(outs), torch.cat(lses, dim=1)


def cumulative(lengths: list[int], device: str = "cpu") -> Tensor:
    return torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, device=device)


def check_against(
    function: Callable[..., Any], definition: Callable[..., Any], inputs: list[Tensor], device: str, dtype: torch.dtype
) -> None:
    """Asserts that outputs and gradients are those of the definition, by the tolerance policy.

    Both functions take the inputs and return a tensor or several; the oracle is the definition in float64.
    """
    rounded = [x.to(dtype) for x in inputs]
    actual = _results(function, rounded, device, dtype)
    oracle = _results(definition, rounded, device, torch.float64)
    eager = _results(definition, rounded, device, dtype)
    assert len(actual) == len(oracle)
    for number, (got, exact, plain) in enumerate(zip(actual, oracle, eager)):
        assert_close(f"result {number}", got, exact, plain)


def _results(function: Callable[..., Any], inputs: list[Tensor], device: str, dtype: torch.dtype) -> list[Tensor]:
    leaves = [x.detach().to(device, dtype, copy=True).requires_grad_() for x in inputs]
    outputs = function(*leaves)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    upstream = [normal(*out.shape, seed=9).to(out) for out in outputs]
    grads = torch.autograd.grad(outputs, leaves, upstream)
    return [out.detach() for out in outputs] + list(grads)


def check_8_bits(out: Tensor, q: Tensor, k: Tensor, v: Tensor, factors: Sequence[Tensor], meaning: Meaning) -> None:
    """Asserts that a dense result of float8_e4m3fn inputs is right, by the tolerance policy, on the device of q.

    The oracle is the definition of the numbers that they stand for; a plain call of flashtile, which has tests of its
    own, tells how far 8-bit products may lie from it.
    """
    wide = []
    for x, factor in zip((q, k, v), factors, strict=True):
        factor = factor.to(x.device).repeat_interleave(x.shape[2] // factor.shape[1], 1)
        wide.append(x.double() * factor[:, None, :, None].double())
    exact = attention_by_definition(*wide, meaning)[0]
    named = {f"descale_{name}": factor.to(q.device) for name, factor in zip("qkv", factors)}
    left, right = (None if side < 0 else side for side in meaning.window)
    plain = flashtile.attention(q, k, v, causal=meaning.causal, window=(left, right), **named)
    assert_close("out", out, exact.cpu(), plain)


def group_head_dropout(
    seed: int, device: str, dropout_p: float, batch: int, heads: int, seq_q: int, seq_k: int
) -> Tensor:
    """Which weights a call keeps that is the first to draw from torch's generator after `torch.manual_seed`."""
    torch.manual_seed(seed)
    drawn = flashtile.draw_dropout_seed(torch.device(device))
    return flashtile.dropout_mask(drawn, dropout_p, batch=batch, heads=heads, seq_q=seq_q, seq_k=seq_k)


def served(version: int, module: str = ".") -> SimpleNamespace:
    """The names of a module of a version, as they are when it is installed."""
    return SimpleNamespace(**[VERSION_1, VERSION_2, VERSION_3, VERSION_4][version - 1].modules[module].found())


def extension(name: str) -> SimpleNamespace:
    """The names of a compiled extension of version 1."""
    return SimpleNamespace(**EXTENSIONS[name].found())


def arguments_of(function: Callable[..., Any]) -> str:
    """Names and defaults as one writes them: `q, k, causal=False`. Without `other_names`, which modules of flashtile
    collect to refuse them."""
    if inspect.isbuiltin(function):  # `apply` of PyTorch 2.14's autograd functions, which has no signature
        return "*args, **kwargs"
    parts = []
    for name, parameter in inspect.signature(function).parameters.items():
        if name == "other_names":
            continue
        star = {parameter.VAR_KEYWORD: "**", parameter.VAR_POSITIONAL: "*"}.get(parameter.kind, "")
        default = parameter.default
        shown = getattr(default, "__name__", None) or repr(default)
        parts.append(star + name + ("" if default is parameter.empty else f"={shown}"))
    return ", ".join(parts)
