"""An attention case with its tensors: implementations bound to them, and the fp64 oracle that judges their results.

The oracle is `flashtile.attention(backend="reference")` in float64, by blocks of queries, sequences and documents, and
the tolerance is the project's one policy (`flashtile.testing`). Whole heads are checked in every batch entry, because a
gradient of k or v sums over all queries, and one of a bias over the batch. If all heads would be too much work, evenly
spaced ones are checked; with dropout, whose bits depend on a head's index, the first ones of the first batch entry.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

import flashtile
from flashtile.bench import base, masks
from flashtile.bench.base import Implementation, Tensors, Verdict, Way, judge, spread
from flashtile.bench.cases import Case, Inputs, make_inputs
from flashtile.bench.timing import HostTimer
from flashtile.bench.values import NORMAL

#: Elements of one fp64 score matrix that the check may hold at once, where there is memory (`base.check_elements`).
_SCORES = {"cuda": 2**27, "cpu": 2**23}


class Bound(base.Bound):
    """Calls of one implementation in one case. PyTorch keeps the seed of a forward outside a graph on the host, where a
    captured backward cannot read it."""

    def __init__(self, implementation: Implementation, case: Case, inputs: Inputs) -> None:
        self.implementation = implementation
        learns = masks.learns(case.function)
        leaves = {name: tensor for name, tensor in inputs.named().items() if learns or not name.startswith("table")}
        change = self._change_layout
        way = Way(implementation.build(case, inputs), change, change, change, change)
        captured = not (implementation.own_dropout and case.dropout_p)
        given = base.Inputs(leaves, {}, [inputs.dout])
        super().__init__(way, given, ("out",), peak="bwd", records=True, captured=captured)

    def _change_layout(self, tensors: Tensors) -> Tensors:
        """From flashtile's layout to the implementation's, and back; heads of a bias come first in every layout."""
        if not self.implementation.heads_first:
            return tensors
        return [tensor.transpose(1, 2) for tensor in tensors[:3]] + tensors[3:]


class AttentionProblem(base.Problem):
    """One attention call and its gradients."""

    def __init__(self, case: Case, device: torch.device) -> None:
        super().__init__(case, device)
        if case.values != NORMAL:
            self.phases = ("fwd",)  # a backward reads finished statistics: its time depends on no values
        self._oracle = functools.cache(lambda case: Oracle(case, self._inputs))

    @functools.cached_property
    def _inputs(self) -> Inputs:
        return make_inputs(self.case, self.device)

    def bind(self, implementation: Implementation) -> Bound:
        return Bound(implementation, self.case, self._inputs)

    def judge(self, bound: Bound, phase: str, results: dict[str, Tensor]) -> Verdict:
        """An implementation that drops weights by bits of its own is judged by what it computes without dropout."""
        if not (self.case.dropout_p and bound.implementation.own_dropout):
            return self._oracle(self.case).judge(results)
        without = replace(self.case, dropout_p=0.0)
        with bound.implementation.context():
            whole = Bound(bound.implementation, without, self._inputs).results(phase)
        verdict = self._oracle(without).judge(whole)
        if all(torch.equal(results[name], tensor) for name, tensor in whole.items()):
            return Verdict(verdict.error, "wrong result: nothing is dropped")
        return verdict


class HostProblem(AttentionProblem):
    """The host's own time for one call, what a program pays for each small call."""

    phases = ("fwd-nograd", "fwd", "fwd+bwd")

    def __init__(self, case: Case, device: torch.device) -> None:
        super().__init__(case, device)
        self.op = f"{case.op}-host"

    def timer(self, call: Callable[[], Any]) -> HostTimer:
        return HostTimer(call, self.device)

    def speed(self, phase: str, ms: float) -> dict[str, Any]:
        return {}


class Oracle:
    """Right results, and those of the eager computation that set the tolerance, for some heads of a case."""

    def __init__(self, case: Case, inputs: Inputs) -> None:
        self._case = case
        self._heads = _choose_heads(case, inputs.q.device)
        picked = {name: self._pick(name, tensor) for name, tensor in {**inputs.named(), "dout": inputs.dout}.items()}
        exact = {name: tensor.double() for name, tensor in picked.items()}
        seed, mask = inputs.dropout_seed, inputs.mask
        self._exact, self._eager = (_reference(case, tensors, seed, mask) for tensors in (exact, picked))

    def judge(self, results: dict[str, Tensor]) -> Verdict:
        """Compares an output, and gradients where there are any, in flashtile's layout."""
        exact, eager = self._exact, self._eager
        return judge((name, self._pick(name, found), exact[name], eager[name]) for name, found in results.items())

    def _pick(self, name: str, tensor: Tensor) -> Tensor:
        """The chosen key/value heads of a tensor, or the query heads that read them: `[B, S, heads, D]`, of a packed
        batch `[1, tokens, heads, D]`, of a bias `[1 or B, heads, S, S]`, of a table `[heads, ...]`."""
        name, tensor = name.removeprefix("d"), tensor.detach()
        if name.startswith("table"):
            return tensor[self._heads]
        if self._case.lengths is not None:
            tensor = tensor[None]
        elif self._case.dropout_p:
            tensor = tensor[:1]
        dim = 1 if name == "bias" else 2
        grouped = tensor.unflatten(dim, (self._case.Hkv, -1))  # the heads of a group beside one another
        return grouped.index_select(dim, self._heads).flatten(dim, dim + 1)


def _choose_heads(case: Case, device: torch.device) -> Tensor:
    """Indices of the key/value heads to check."""
    pairs = case.S * case.keys if case.segments is None else sum(seq**2 for seq in case.segments)
    entries = case.B if case.lengths is None and not case.dropout_p else 1
    affordable = max(2, base.check_elements(_SCORES[device.type], device) // (entries * pairs * (case.H // case.Hkv)))
    if case.dropout_p:
        return torch.arange(min(affordable, case.Hkv), device=device)
    return spread(affordable, case.Hkv, device)


def _reference(
    case: Case, tensors: dict[str, Tensor], dropout_seed: Tensor | None, mask: Tensor | None
) -> dict[str, Tensor]:
    """Output and gradients of the eager reference in the tensors' dtype, by blocks of queries. Tensors are
    `[B, S, heads, D]`; sequences and documents stand one after another."""
    tables = [name for name in tensors if name.startswith("table")]
    given = [name for name in tensors if name != "dout"]
    wanted = [name for name in given if masks.learns(case.function) or name not in tables]
    out = torch.empty_like(tensors["dout"])
    sums = {name: torch.zeros_like(tensors[name], dtype=torch.float64) for name in wanted}
    for rows, keys in _blocks(case, tensors["q"]):
        of_rows, of_keys = (slice(None), rows), (slice(None), keys)
        places: dict[str, Any] = {"q": of_rows, "k": of_keys, "v": of_keys, "bias": (..., rows, keys)}
        leaves = {name: tensors[name][places.get(name, ...)].clone() for name in given}
        wanted_leaves = [leaves[name].requires_grad_() for name in wanted]
        arguments: dict[str, Any] = {name: leaf for name, leaf in leaves.items() if name in places} | case.arguments()
        if case.function in masks.SCORES:
            score_mod = masks.SCORES[case.function].make([leaves[name] for name in tables], case.S)
            arguments["score_mod"] = _from_row(rows.start, score_mod)
        arguments |= {"mask": _shown(case, rows, keys, mask, out.device), "dropout_seed": dropout_seed}
        found = flashtile.attention(**arguments, backend="reference")
        out[:, rows] = found.detach()
        gradients = torch.autograd.grad(found, wanted_leaves, tensors["dout"][:, rows])
        for name, gradient in zip(wanted, gradients, strict=True):
            sums[name][places.get(name, ...)] += gradient
    return {"out": out} | {f"d{name}": total.to(tensors[name].dtype) for name, total in sums.items()}


def _from_row(first: int, whole: masks.ScoreMod) -> masks.ScoreMod:
    """A function of scores for a block of queries, of which the first is that row of the whole."""
    return lambda score, batch, head, q_index, k_index: whole(score, batch, head, q_index + first, k_index)


def _blocks(case: Case, q: Tensor) -> Iterator[tuple[slice, slice]]:
    """Queries that are computed at once, and the keys that they may see. A block's last query must be its last key's
    diagonal, unless there is no band; dropout bits count rows from the start."""
    batch, rows, heads, _ = q.shape
    lengths, scores = case.segments or (rows,), base.check_elements(_SCORES[q.device.type], q.device)
    for begin, seq in zip(accumulate(lengths, initial=0), lengths):
        keys = case.Sk or seq
        hides_later = case.causal or (case.window is not None and case.window[1] == 0 and keys == seq)
        whole = case.dropout_p or (case.window is not None and not hides_later)
        block = seq if whole else max(1, scores // (batch * heads * keys))
        left = None if case.window is None or whole else case.window[0]
        for start in range(0, seq, block):
            stop = min(start + block, seq)
            first = 0 if left is None else max(0, start - left)
            yield slice(begin + start, begin + stop), slice(begin + first, begin + (stop if hides_later else keys))


def _shown(case: Case, rows: slice, keys: slice, mask: Tensor | None, device: torch.device) -> Tensor | None:
    """The keys that some queries see, by the tensor or by the function of the indices; None where causal and window
    tell."""
    if mask is not None:
        return mask if mask.shape[2] == 1 else mask[:, :, rows]
    if case.shown is None:
        return None
    q_index, k_index = (range(part.start, part.stop) for part in (rows, keys))
    return case.shown.shown(q_index, k_index, device)[None, None]
