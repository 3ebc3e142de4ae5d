"""Standard attention (`flashtile.io_model.standard` models it), and where it spends its time: each step alone, beside
one fused call. Shapes: N matrices (batch × heads), S sequence, D head_dim."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

import flashtile
from flashtile.bench.base import DTYPES, Implementation, free_memory, select_named
from flashtile.bench.cases import Case
from flashtile.bench.oracle import AttentionProblem
from flashtile.bench.start import UserError

#: The operation of these rows, and the step that stands for all of another implementation.
BREAKDOWN, FUSED = "attention-breakdown", "one call"
#: Matrices S×S of a step's tensors that are there at once.
_MATRICES = 7

_aten = torch.ops.aten


def standard_attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, dropout_p: float = 0.0) -> Tensor:
    """`dropout(softmax(q kᵀ / sqrt(D) + mask)) v` of q, k, v `[N, S, D]`, in their dtype, every step a kernel of its
    own. `mask`: `[S, S]`, 0 where visible and -inf where not; None where all is visible."""
    weights = scores(q, k, mask).softmax(dim=-1)
    if dropout_p:
        # `torch.nn.functional.dropout` runs this on a GPU; on a CPU it would be several steps.
        weights, _ = torch.native_dropout(weights, dropout_p, True)
    return torch.bmm(weights, v)


def scores(q: Tensor, k: Tensor, mask: Tensor | None) -> Tensor:
    """`[N, S, S]`: the scale is part of the product, the mask is added in place."""
    empty = q.new_empty(q.shape[0], q.shape[1], k.shape[1])
    found = torch.baddbmm(empty, q, k.transpose(1, 2), beta=0, alpha=1 / math.sqrt(q.shape[-1]))
    return found if mask is None else found.add_(mask)


def causal_mask(seq: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """`[S, S]`: -inf right of the diagonal, 0 elsewhere."""
    return torch.full((seq, seq), float("-inf"), dtype=dtype, device=device).triu(1)


def default_case(device: torch.device) -> Case:
    """On a GPU that of the first FlashAttention's figures: GPT-2, 64 sequences of 1,024 tokens, dropout."""
    if device.type == "cuda":
        return Case(64, 1024, 16, 16, 64, 64, causal=True, dropout_p=0.1)
    return Case(1, 512, 8, 8, 64, 64, causal=True, dropout_p=0.1, dtype="fp32")


def chosen_case(given: Mapping[str, Any], device: torch.device) -> list[Case]:
    """The default case with what options of the command line say."""
    if "dtype" in given:
        select_named("--dtype", [given["dtype"]], DTYPES, device.type)
    fields = {"batch": ("B",), "seq": ("S",), "heads": ("H", "Hkv"), "head_dim": ("D", "Dv")}
    fields |= {name: (name,) for name in ("dropout_p", "dtype")}
    wanted: dict[str, Any] = {field: given[name] for name, names in fields.items() if name in given for field in names}
    return [replace(default_case(device), **wanted | ({"causal": False} if given.get("full") else {}))]


class Steps:
    """The steps of standard attention, in the order in which they run, on the tensors of one run. `calls` has them by
    "fwd" or "bwd" and the step's name. Raises UserError if the case has something else."""

    def __init__(self, case: Case, device: torch.device) -> None:
        if case.window is not None or case.lengths is not None or case.changes_scores or case.H != case.Hkv:
            raise UserError("breakdown: expected a dense case without windows, masks and grouped heads, got another")
        generator = torch.Generator(device).manual_seed(0)
        self.q, self.k, self.v, self.dout = q, k, v, dout = [
            torch.randn(case.B * case.H, case.S, columns, generator=generator, device=device).to(case.torch_dtype)
            for columns in (case.D, case.D, case.Dv, case.Dv)
        ]
        dropout_p, scale = case.dropout_p, 1 / math.sqrt(case.D)
        mask = causal_mask(case.S, case.torch_dtype, device) if case.causal else None
        added = scores(q, k, mask)
        weights = kept = added.softmax(dim=-1)

        dkept = dweights = torch.bmm(dout, v.transpose(1, 2))
        drop = partial(torch.native_dropout, weights, dropout_p, True)
        if dropout_p:
            kept, self.keeps = drop()
            drop_backward = partial(_aten.native_dropout_backward, dkept, self.keeps, 1 / (1 - dropout_p))
            dweights = drop_backward()
        softmax_backward = partial(_aten._softmax_backward_data, dweights, weights, -1, weights.dtype)
        dscores = softmax_backward()
        steps: dict[str, Callable[[], Any] | None] = {
            "fwd, q kᵀ": lambda: scores(q, k, None),
            "fwd, mask": None if mask is None else partial(added.add_, mask),
            "fwd, softmax": lambda: added.softmax(dim=-1),
            "fwd, dropout": drop if dropout_p else None,
            "fwd, weights · v": lambda: torch.bmm(kept, v),
            "bwd, dout · vᵀ": lambda: torch.bmm(dout, v.transpose(1, 2)),
            "bwd, dv": lambda: torch.bmm(kept.transpose(1, 2), dout),
            "bwd, dropout, backward": drop_backward if dropout_p else None,
            "bwd, softmax, backward": softmax_backward,
            "bwd, dq": lambda: torch.bmm(dscores, k) * scale,
            "bwd, dk": lambda: torch.bmm(dscores.transpose(1, 2), q) * scale,
        }
        self.calls: Mapping[str, Callable[[], Any]] = {name: call for name, call in steps.items() if call is not None}

    def results(self, phase: str) -> dict[str, Tensor]:
        self.calls[phase]()
        return {}

    def facts(self, phase: str) -> dict[str, Any]:
        return {}


#: What has steps.
STANDARD = Implementation("standard", build=Steps, judged=False)


class BreakdownProblem(AttentionProblem):
    """Each step of the implementation "standard", and all of a call of the others. Raises UserError if the case is not
    dense, plain or causal, perhaps with dropout, or its matrices do not fit the device's memory."""

    def __init__(self, case: Case, device: torch.device) -> None:
        needed = _MATRICES * case.B * case.H * case.S**2 * case.torch_dtype.itemsize
        if needed > (free := free_memory(device)):
            raise UserError(
                f"breakdown: the matrices of {case.name} with batch {case.B} take {needed / 2**30:.0f} GiB, and "
                f"{free / 2**30:.0f} are free; take a smaller --batch or --seq"
            )
        q, k, v = (torch.empty(shape, dtype=case.torch_dtype, device="meta") for shape in case.shapes())
        try:  # asks about the call instead of making it: steps have no checks of their own
            flashtile.explain(q, k, v, causal=case.causal, dropout_p=case.dropout_p, device=device)
        except ValueError as error:
            raise UserError(f"breakdown: {error}") from None
        self._steps = Steps(case, device)
        super().__init__(case, device)
        self.op = BREAKDOWN

    def measured_phases(self, implementation: Implementation) -> Sequence[str]:
        return tuple(self._steps.calls) if implementation is STANDARD else self.phases

    def labels(self, phase: str) -> dict[str, Any]:
        phase, _, step = phase.partition(", ")
        return {"phase": phase, "step": step or FUSED}

    def bind(self, implementation: Implementation) -> Any:
        return self._steps if implementation is STANDARD else super().bind(implementation)

    def speed(self, phase: str, ms: float) -> dict[str, Any]:
        return {}
