"""Checks an implementation's output and gradients against an fp64 oracle, before its speed may be reported.

The oracle is `flashtile.attention(backend="reference")` in float64, and the tolerance is the project's one policy
(`flashtile.testing`). Whole heads are checked, with every query and key of theirs, because a gradient of k or v
sums over all queries. Where all heads would be too much work, evenly spaced ones are, the first and the last of the
batch among them. With dropout they are the first heads of the first batch entry, since the random bits depend on a
head's index. Of a packed batch, the chosen heads of every sequence are checked. Queries go through in blocks, so that
no fp64 matrix grows past `_SCORES`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

import flashtile
from flashtile import testing
from flashtile.bench.cases import Case, Inputs

#: Elements of one fp64 score matrix that the check may hold at once.
_SCORES = {"cuda": 2**27, "cpu": 2**23}

TENSORS = {"fwd": ("out",), "bwd": ("out", "dq", "dk", "dv")}


@dataclass(frozen=True)
class Verdict:
    """Judgement of one phase.

    Attributes:
        error: largest absolute difference from the oracle, over the phase's tensors.
        why: what is wrong, or None when every tensor is within the tolerance.
    """

    error: float
    why: str | None


class Oracle:
    """Right results, and those of the eager computation that set the tolerance, for some heads of a case."""

    def __init__(self, case: Case, inputs: Inputs) -> None:
        self._case = case
        self._heads = _choose_heads(case, inputs.q.device)
        picked = [self._pick(t) for t in (inputs.q, inputs.k, inputs.v, inputs.dout)]
        self._exact = _reference(case, [t.double() for t in picked], inputs.dropout_seed)
        self._eager = _reference(case, picked, inputs.dropout_seed)

    def judge(self, phase: str, results: dict[str, Tensor]) -> Verdict:
        """Compares the tensors of phase "fwd" or "bwd", in flashtile's layout."""
        worst, wrong = 0.0, []
        for name in TENSORS[phase]:
            found, exact = self._pick(results[name]), self._exact[name]
            try:
                testing.assert_close(name, found, exact, self._eager[name])
            except AssertionError as error:
                wrong.append(str(error))
            worst = max(worst, testing.error(found, exact) if bool(found.isfinite().all()) else float("inf"))
        return Verdict(worst, "wrong result: " + "; ".join(wrong) if wrong else None)

    def _pick(self, tensor: Tensor) -> Tensor:
        """The chosen key/value heads of a tensor, or the query heads that read them: `[n, S or tokens, heads, D]`."""
        grouped = tensor.detach().unflatten(-2, (self._case.Hkv, -1))  # [..., Hkv, group or 1, D]
        if self._case.lengths is not None:
            return grouped.transpose(0, 1)[self._heads]
        if self._case.dropout_p:
            return grouped[:1, :, : self._heads.numel()].flatten(2, 3)
        batch, head = self._heads // self._case.Hkv, self._heads % self._case.Hkv
        return grouped.transpose(1, 2)[batch, head]


def _choose_heads(case: Case, device: torch.device) -> Tensor:
    """Indices of the key/value heads to check: `batch * Hkv + head`, or `head` of a packed batch."""
    batch, pairs = (case.B, case.S**2) if case.lengths is None else (1, sum(seq**2 for seq in case.lengths))
    affordable = max(2, _SCORES[device.type] // (pairs * (case.H // case.Hkv)))
    if case.dropout_p:
        return torch.arange(min(affordable, case.Hkv), device=device)
    total = batch * case.Hkv
    return torch.linspace(0, total - 1, min(affordable, total), device=device).round().long()


def _reference(case: Case, tensors: list[Tensor], dropout_seed: Tensor | None) -> dict[str, Tensor]:
    """Output and gradients of the eager reference in the tensors' dtype, sequence by sequence of a packed batch."""
    if case.lengths is None:
        return _reference_in_blocks(case, tensors, dropout_seed)
    sequences = zip(*(tensor.split(case.lengths, 1) for tensor in tensors), strict=True)
    results = [_reference_in_blocks(case, list(parts), dropout_seed) for parts in sequences]
    return {name: torch.cat([result[name] for result in results], 1) for name in results[0]}


def _reference_in_blocks(case: Case, tensors: list[Tensor], dropout_seed: Tensor | None) -> dict[str, Tensor]:
    """The same for `[n, S, heads, D]`, by blocks of queries."""
    q, k, v, dout = tensors
    seq = q.shape[1]
    # A block's last query must be its last key's diagonal, which holds for causal, and matters not without a band;
    # dropout bits count rows from the start.
    whole = case.dropout_p or (case.window is not None and not case.causal)
    block = seq if whole else max(1, _SCORES[q.device.type] // (q.shape[0] * q.shape[2] * seq))
    dk, dv = (torch.zeros(t.shape, dtype=torch.float64, device=t.device) for t in (k, v))
    outs, dqs = [], []
    for start in range(0, seq, block):
        stop = min(start + block, seq)
        keys = stop if case.causal else seq
        block_inputs = [t.clone().requires_grad_() for t in (q[:, start:stop], k[:, :keys], v[:, :keys])]
        out = flashtile.attention(*block_inputs, **case.arguments(), dropout_seed=dropout_seed, backend="reference")
        block_dq, block_dk, block_dv = torch.autograd.grad(out, block_inputs, dout[:, start:stop])
        outs.append(out.detach())
        dqs.append(block_dq)
        dk[:, :keys] += block_dk
        dv[:, :keys] += block_dv
    return {"out": torch.cat(outs, 1), "dq": torch.cat(dqs, 1), "dk": dk.to(k.dtype), "dv": dv.to(v.dtype)}
