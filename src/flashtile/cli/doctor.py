"""`flashtile doctor`: what is installed, and which backends really work here."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

import flashtile
from flashtile import testing
from flashtile.bench.commands import default_device
from flashtile.bench.record import FACTS, machine, versions
from flashtile.bench.report import Table

BACKENDS = ("split", "hopper", "triton", "cpu", "reference")


@dataclass(frozen=True)
class Diagnosis:
    """Whether a backend gave right results on a device, and if not, why."""

    backend: str
    device: torch.device
    problem: str | None


def examine(backend: str) -> Diagnosis:
    """Runs a small forward and backward, and compares them with the fp64 reference."""
    device = torch.device("cpu") if backend == "cpu" else default_device()
    case = testing.AttentionCase(
        seq_q=96, seq_k=96, head_dim=32, head_dim_v=32, dtype=_dtype(device), arguments={"causal": True}
    )
    try:
        testing.check(case, backend, device)
    except Exception as error:  # whatever is wrong is what the user wants to know
        lines = str(error).strip().splitlines() or [""]
        # Only what flashtile did not foresee needs the name of its exception.
        prefix = "" if isinstance(error, ValueError) else f"{type(error).__name__}: "
        return Diagnosis(backend, device, prefix + lines[0])
    return Diagnosis(backend, device, None)


def default_backend() -> str:
    """The backend that `backend="auto"` takes here, for the call that `examine` makes."""
    device = default_device()
    q = torch.empty(1, 96, 1, 32, dtype=_dtype(device), device="meta")
    return flashtile.explain(q, q, q, causal=True, device=device).backend or "none"


def facts_table() -> Table:
    """Versions, and facts of the device."""
    facts: dict[str, Any] = machine(default_device())
    lines = [[name, version or "not installed"] for name, version in versions().items() if version or name == "triton"]
    lines += [[label, str(facts[name])] for name, label in FACTS.items() if facts.get(name)]
    return Table("This machine", ["", "here"], lines, words=True)


def backends_table(diagnoses: list[Diagnosis]) -> Table:
    lines = [[d.backend, str(d.device), "works" if d.problem is None else d.problem] for d in diagnoses]
    title = "Backends, each tried with a small forward and backward"
    return Table(title, ["backend", "tensors on", "result"], lines, words=True)


def _dtype(device: torch.device) -> torch.dtype:
    """One that every GPU has: bf16 came with compute capability 8."""
    return torch.float16 if device.type == "cuda" else torch.float32
