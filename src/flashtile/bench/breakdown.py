"""Standard attention, the computation that `flashtile.io_model.standard` models, and where it spends its time: each of
its steps alone, beside one fused call.

Shapes: N matrices (batch × heads), S sequence, D head_dim. Steps are the operations that PyTorch runs for
`standard_attention` and its gradients, each on tensors that are there already.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import flashtile
from flashtile.bench.base import device_memory, select_implementations
from flashtile.bench.cases import Case
from flashtile.bench.implementations import IMPLEMENTATIONS
from flashtile.bench.oracle import AttentionProblem
from flashtile.bench.record import Row, require_writable
from flashtile.bench.report import BREAKDOWN, FUSED
from flashtile.bench.runner import run_cases, side_stream
from flashtile.bench.start import ChoiceError, how_to_install
from flashtile.bench.timing import make_timer

_ROUNDS = 5
_SECONDS = {"cuda": 0.2, "cpu": 0.4}
_PHASES = {"fwd": "forward", "bwd": "backward"}
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
        # What `torch.nn.functional.dropout` runs on a GPU; on a CPU that would be several steps.
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


class Steps:
    """The steps of standard attention, in the order in which they run, on the tensors of one run."""

    def __init__(self, case: Case, device: torch.device) -> None:
        if case.window is not None or case.lengths is not None or case.changes_scores or case.H != case.Hkv:
            raise ChoiceError("breakdown: expected a dense case without windows, masks and grouped heads, got another")
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
        self.dweights = self.of_weights() if case.dropout_p else self.dkept
        self.dscores = self.of_scores()

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
            steps["dropout, backward"] = self.of_weights
        return {
            **steps,
            "softmax, backward": self.of_scores,
            "dq": lambda: torch.bmm(self.dscores, self.k) * self.scale,
            "dk": lambda: torch.bmm(self.dscores.transpose(1, 2), self.q) * self.scale,
        }

    def dropout(self) -> tuple[Tensor, Tensor]:
        return torch.native_dropout(self.weights, self.dropout_p, True)

    def of_weights(self) -> Tensor:
        return _aten.native_dropout_backward(self.dkept, self.keeps, 1 / (1 - self.dropout_p))

    def of_scores(self) -> Tensor:
        return _aten._softmax_backward_data(self.dweights, self.weights, -1, self.weights.dtype)


def run_breakdown(
    case: Case, device: torch.device, impl: Sequence[str] = (), seconds: float | None = None
) -> list[Row]:
    """Rows with op "attention-breakdown": `step` names a step of the implementation "standard", or "one call".

    Args:
        case: dense, plain or causal, perhaps with dropout.
        device: where.
        impl: implementations of one call, ours when empty; a wrong result gets no time.
        seconds: time for the samples of each step; None for the device's default.

    Raises:
        ChoiceError: the case has something else, is no call of ours, or its matrices do not fit the device's memory.
    """
    seconds = _SECONDS[device.type] if seconds is None else seconds
    chosen = select_implementations(IMPLEMENTATIONS, impl, device)
    _check_memory(case, device)
    _check_call(case, device)
    with side_stream(device):
        steps = Steps(case, device)
        rows = [
            _row(case, "standard", phase, name, **found)
            for phase, calls in (("fwd", steps.forward()), ("bwd", steps.backward()))
            for name, found in _times(calls, device, seconds).items()
        ]
        del steps
    ours = chosen if impl else [implementation for implementation in chosen if implementation.ours]
    for found in run_cases([case], ours, device, AttentionProblem, seconds):
        kept = {key: found[key] for key in ("ms", "why", "timer", "error") if key in found}
        rows.append(_row(case, found["impl"], found["phase"], FUSED, **kept))
    return rows


def _check_call(case: Case, device: torch.device) -> None:
    """Asks about the call instead of making it: steps have no checks of their own."""
    q, k, v = (torch.empty(shape, dtype=case.torch_dtype, device="meta") for shape in case.shapes())
    try:
        flashtile.explain(q, k, v, causal=case.causal, dropout_p=case.dropout_p, device=device)
    except ValueError as error:
        raise ChoiceError(f"breakdown: {error}") from None


def _check_memory(case: Case, device: torch.device) -> None:
    needed = _MATRICES * case.B * case.H * case.S**2 * case.torch_dtype.itemsize
    free = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else device_memory(device)
    if free is not None and needed > free:
        raise ChoiceError(
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


def check_picture(path: Path) -> Any:
    """An empty figure for a picture that can be drawn into this file.

    Raises:
        ChoiceError: matplotlib is not installed or has no such format, or the file cannot be written.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise ChoiceError(f"--plot: needs matplotlib: {how_to_install('plots')}") from None
    figure = Figure(figsize=(11, 4.8), layout="constrained")
    formats = figure.canvas.get_supported_filetypes()
    if path.suffix.lower().removeprefix(".") not in formats:
        raise ChoiceError(f"--plot: expected a file that ends in one of {', '.join(formats)}, got {path}")
    require_writable(path, "--plot")
    return figure


def draw_breakdown(rows: Sequence[Row], path: Path) -> None:
    """Draws the steps as stacked bars, forward and backward, beside one call; the ending of the file says the format.

    Raises:
        ChoiceError: as `check_picture`.
    """
    figure = check_picture(path)
    timed = [row for row in rows if row["ms"] is not None]
    phases = [phase for phase in _PHASES if any(row["phase"] == phase for row in timed)]
    for axes, phase in zip(figure.subplots(1, max(len(phases), 1), squeeze=False)[0], phases):
        _draw_phase(axes, [row for row in timed if row["phase"] == phase])
        axes.set_title(_PHASES[phase])
        axes.set_ylabel("ms")
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(fontsize=8, frameon=False, loc="upper left", bbox_to_anchor=(1, 1), reverse=True)
    figure.savefig(path, dpi=160)


def _draw_phase(axes: Any, rows: Sequence[Row]) -> None:
    """A stack for each implementation; its parts are named where they are high enough, and in the legend."""
    heights: dict[str, float] = {}
    for place, row in enumerate(rows):
        impl, bottom = row["impl"], heights.get(row["impl"], 0.0)
        words = f"{row['step']}: {row['ms']:.3g}" if row["step"] != FUSED else f"{impl}: {row['ms']:.3g}"
        colour = "#333333" if row["step"] == FUSED else f"C{place}"
        bar = axes.bar(impl, row["ms"], 0.6, bottom, color=colour, edgecolor="white", label=words)
        if row["ms"] > 0.06 * sum(one["ms"] for one in rows if one["impl"] == "standard"):
            axes.bar_label(bar, [row["step"]], label_type="center", color="white", fontsize=8)
        heights[impl] = bottom + row["ms"]
