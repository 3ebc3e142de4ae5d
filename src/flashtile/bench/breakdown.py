"""Standard attention, the computation that `flashtile.io_model.standard` models, and where it spends its time: each of
its steps alone, beside one fused call.

Shapes: N matrices (batch × heads), S sequence, D head_dim. Steps are the operations that PyTorch runs for
`standard_attention` and its gradients, each on tensors that are there already.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

import flashtile
from flashtile.bench.base import DTYPES, Implementation, device_memory, select_named
from flashtile.bench.cases import Case
from flashtile.bench.record import Row
from flashtile.bench.runner import Announce, ProblemOf, announced, run_case, say_nothing
from flashtile.bench.start import UserError
from flashtile.bench.timing import make_timer

#: The operation of these rows, and the step that stands for all of another implementation.
BREAKDOWN, FUSED = "attention-breakdown", "one call"
_ROUNDS = 5
_SECONDS = {"cuda": 0.2, "cpu": 0.4}
#: Matrices S×S of a step's tensors that are there at once.
_MATRICES = 7

_aten = torch.ops.aten


def standard_attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, dropout_p: float = 0.0) -> Tensor:
    """`dropout(softmax(q kᵀ / sqrt(D) + mask)) v`, in the dtype of the inputs, every step a kernel of its own.

    Args:
        q, k, v: `[N, S, D]`.
        mask: `[S, S]`, 0 where visible and -inf where not; None where all is visible.
        dropout_p: probability that a weight is dropped.

    Returns:
        out `[N, S, D]`.
    """
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
    """The steps of standard attention, in the order in which they run, on the tensors of one run."""

    def __init__(self, case: Case, device: torch.device) -> None:
        if case.window is not None or case.lengths is not None or case.changes_scores or case.H != case.Hkv:
            raise UserError("breakdown: expected a dense case without windows, masks and grouped heads, got another")
        generator = torch.Generator(device).manual_seed(0)
        rows = case.B * case.H, case.S

        def normal(columns: int) -> Tensor:
            return torch.randn(*rows, columns, generator=generator, device=device).to(case.torch_dtype)

        self.q, self.k, self.v, self.dout = normal(case.D), normal(case.D), normal(case.Dv), normal(case.Dv)
        self.dropout_p, self.scale = case.dropout_p, 1 / math.sqrt(case.D)
        self.mask = causal_mask(case.S, case.torch_dtype, device) if case.causal else None
        self.scores = scores(self.q, self.k, None)
        if self.mask is not None:
            self.scores.add_(self.mask)  # the tensors of the run: afterwards the mask is a step of its own
        self.weights = self.scores.softmax(dim=-1)
        self.kept: Tensor = self.weights
        self.keeps: Tensor | None = None
        if case.dropout_p:
            self.kept, self.keeps = self.dropout()
        self.out = torch.bmm(self.kept, self.v)
        self.dkept = torch.bmm(self.dout, self.v.transpose(1, 2))
        self.dweights = self.weight_steps() if case.dropout_p else self.dkept
        self.dscores = self.score_steps()

    def forward(self) -> dict[str, Callable[[], Any]]:
        """Name of a step -> its call. The mask is added in place; what is hidden stays hidden however often it is."""
        steps: dict[str, Callable[[], Any]] = {"q kᵀ": lambda: scores(self.q, self.k, None)}
        if self.mask is not None:
            steps["mask"] = partial(self.scores.add_, self.mask)
        steps["softmax"] = lambda: self.scores.softmax(dim=-1)
        if self.dropout_p:
            steps["dropout"] = self.dropout
        return {**steps, "weights · v": lambda: torch.bmm(self.kept, self.v)}

    def backward(self) -> dict[str, Callable[[], Any]]:
        """The same of the gradients."""
        steps: dict[str, Callable[[], Any]] = {
            "dout · vᵀ": lambda: torch.bmm(self.dout, self.v.transpose(1, 2)),
            "dv": lambda: torch.bmm(self.kept.transpose(1, 2), self.dout),
        }
        if self.dropout_p:
            steps["dropout, backward"] = self.weight_steps
        return {
            **steps,
            "softmax, backward": self.score_steps,
            "dq": lambda: torch.bmm(self.dscores, self.k) * self.scale,
            "dk": lambda: torch.bmm(self.dscores.transpose(1, 2), self.q) * self.scale,
        }

    def dropout(self) -> tuple[Tensor, Tensor]:
        return torch.native_dropout(self.weights, self.dropout_p, True)

    def weight_steps(self) -> Tensor:
        return _aten.native_dropout_backward(self.dkept, self.keeps, 1 / (1 - self.dropout_p))

    def score_steps(self) -> Tensor:
        return _aten._softmax_backward_data(self.dweights, self.weights, -1, self.weights.dtype)


def run_breakdown(
    case: Case,
    implementations: Sequence[Implementation],
    device: torch.device,
    problem: ProblemOf,
    seconds: float | None = None,
    announce: Announce = say_nothing,
) -> list[Row]:
    """Rows with op "attention-breakdown": `step` names a step of the implementation "standard", or "one call".

    Args:
        case: dense, plain or causal, perhaps with dropout.
        implementations: of one call; a wrong result gets no time.
        device: where.
        problem: makes the problem of one call.
        seconds: time for the samples of each step; None for the device's default.

    Raises:
        UserError: the case has something else, is no call of ours, or its matrices do not fit the device's memory.
    """
    seconds = _SECONDS[device.type] if seconds is None else seconds
    _check_memory(case, device)
    _check_call(case, device)
    with announced(announce, "timing steps"):
        steps = Steps(case, device)
        rows = [
            _row(case, "standard", phase, name, **found)
            for phase, calls in (("fwd", steps.forward()), ("bwd", steps.backward()))
            for name, found in _times(calls, device, seconds).items()
        ]
        del steps
    for found in run_case(case, implementations, device, problem, seconds, announce):
        kept = {key: found[key] for key in ("ms", "why", "timer", "error") if key in found}
        rows.append(_row(case, found["impl"], found["phase"], FUSED, **kept))
    return rows


def _check_call(case: Case, device: torch.device) -> None:
    """Asks about the call instead of making it: steps have no checks of their own."""
    q, k, v = (torch.empty(shape, dtype=case.torch_dtype, device="meta") for shape in case.shapes())
    try:
        flashtile.explain(q, k, v, causal=case.causal, dropout_p=case.dropout_p, device=device)
    except ValueError as error:
        raise UserError(f"breakdown: {error}") from None


def _check_memory(case: Case, device: torch.device) -> None:
    needed = _MATRICES * case.B * case.H * case.S**2 * case.torch_dtype.itemsize
    free = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else device_memory(device)
    if free is not None and needed > free:
        raise UserError(
            f"breakdown: the matrices of {case.name} with batch {case.B} take {needed / 2**30:.0f} GiB, and "
            f"{free / 2**30:.0f} are {'free' if device.type == 'cuda' else 'there'}; take a smaller --batch or --seq"
        )


def _times(calls: dict[str, Callable[[], Any]], device: torch.device, seconds: float) -> dict[str, dict[str, Any]]:
    """Name of a step -> median time and timer; the steps take turns."""
    timers = {name: make_timer(call, device) for name, call in calls.items()}
    samples: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(_ROUNDS):
        for name, timer in timers.items():
            samples[name] += timer.sample(seconds / _ROUNDS)
    return {name: {"ms": statistics.median(samples[name]), "timer": timers[name].kind} for name in calls}


def _row(case: Case, impl: str, phase: str, step: str, **found: Any) -> Row:
    nothing = {"tflops": None, "gbps": None, "error": None}
    return {"op": BREAKDOWN, "phase": phase, "impl": impl, "case": case.record(), "step": step, **nothing, **found}
