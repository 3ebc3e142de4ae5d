"""The benchmark of the batch-invariant mode: training's calls, decoding and mixed batches, with and without it, beside
peers that promise less."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

import flashtile
from flashtile.bench import implementations, serving
from flashtile.bench.base import AnyCase, Implementation, Problem
from flashtile.bench.cases import Case, packed_case
from flashtile.bench.masks import long_tailed_lengths
from flashtile.bench.oracle import AttentionProblem
from flashtile.bench.record import DEFAULT, DETERMINISTIC, INVARIANT
from flashtile.bench.serving_cases import ServingCase, mixed_batch
from flashtile.bench.tables import wide_case


def _cuda_tables() -> dict[str, list[AnyCase]]:
    """16,384 tokens in sequences of each length, other heads, grouped ones and a packed batch; then 4k to 128k rows."""
    batches, rows_in_use = (1, 4, 16, 64), (4096, 16384, 65536, 131072)
    return {
        "training": [
            *(wide_case(seq, 128, causal=True) for seq in (512, 1024, 4096, 16384)),
            wide_case(4096, 128), wide_case(4096, 64, causal=True),
            Case(2, 8192, 64, 8, 128, 128, causal=True), packed_case(long_tailed_lengths(), 16, 128, causal=True),
        ],
        "decode": [ServingCase(batch, rows) for rows in rows_in_use for batch in batches if batch * rows < 2**22],
        "mixed": [mixed_batch(*half, 512, 2048, 16384, page=64) for half in ((8, 120), (8, 0), (0, 120))],
    }  # fmt: skip


def _cpu_tables() -> dict[str, list[AnyCase]]:
    small: dict[str, Any] = {"H": 8, "Hkv": 2, "D": 64, "Dv": 64, "dtype": "fp32"}
    return {
        "training": [Case(2, seq, **small, causal=True) for seq in (128, 512)],
        "decode": [ServingCase(batch, 1024, **small) for batch in (1, 4)],
        "mixed": [mixed_batch(2, 6, 64, 128, 512, page=16, **small)],
    }


def tables(device: torch.device) -> dict[str, list[AnyCase]]:
    """Name -> cases."""
    return _cuda_tables() if device.type == "cuda" else _cpu_tables()


def make_problem(case: Any, device: torch.device) -> Problem:
    """That of a case's own benchmark."""
    return AttentionProblem(case, device) if isinstance(case, Case) else serving.ServingProblem(case, device)


_OF_ATTENTION = {each.name: each for each in implementations.IMPLEMENTATIONS}
_OF_SERVING = {each.name: each for each in serving.IMPLEMENTATIONS}


def _either(name: str, /, **changes: Any) -> Implementation:
    """The one of attention, or that of serving where the case is."""
    of_attention, of_serving = _OF_ATTENTION[name], _OF_SERVING.get(name)

    def own(case: AnyCase) -> Implementation:
        return of_attention if of_serving is None or isinstance(case, Case) else of_serving

    def unsupported(case: AnyCase, device: torch.device) -> str | None:
        if of_serving is None and isinstance(case, ServingCase):
            return "measured where there is a backward"
        return own(case).unsupported(case, device)

    def build(case: AnyCase, inputs: Any) -> Any:
        return own(case).build(case, inputs)

    return replace(of_attention, build=build, unsupported=unsupported, default=True, **changes)


IMPLEMENTATIONS = (
    _either(DEFAULT),
    _either(DETERMINISTIC),
    _either(DEFAULT, name=INVARIANT, context=flashtile.batch_invariant_mode),
    _either("sdpa-flash", devices=("cpu",)),
    _either("sdpa-cudnn"),
    _either("fa4"),
    _either("fa4-deterministic"),
)
