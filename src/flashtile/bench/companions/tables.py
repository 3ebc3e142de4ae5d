"""The operations, and the cases of each that are measured on a device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from flashtile.bench.cases import select_named
from flashtile.bench.companions.case import Case
from flashtile.bench.companions.losses import CrossEntropy, LinearCrossEntropy
from flashtile.bench.companions.mlp import FusedDense, FusedMLP
from flashtile.bench.companions.movement import Copy
from flashtile.bench.companions.norms import DropoutAddLayerNorm, DropoutAddRMSNorm, LayerNorm, RMSNorm
from flashtile.bench.companions.rotary import Rotary
from flashtile.bench.companions.softmax import CausalSoftmax, MaskedSoftmax

_KINDS: tuple[type[Case], ...] = (
    Copy,
    LayerNorm,
    RMSNorm,
    DropoutAddLayerNorm,
    DropoutAddRMSNorm,
    Rotary,
    CausalSoftmax,
    MaskedSoftmax,
    CrossEntropy,
    LinearCrossEntropy,
    FusedDense,
    FusedMLP,
)
OPERATIONS = {kind.op: kind for kind in _KINDS}


def companion_cases(device: torch.device) -> list[Case]:
    """Cases of all operations, the copies first."""
    return _cuda_cases() if device.type == "cuda" else _cpu_cases()


def _cuda_cases() -> list[Case]:
    """Copies from the size of the smallest case to that of the largest, and sizes of large language models, in bf16."""
    widths = (1024, 4096, 8192)
    return [
        *(Copy("bf16", 1024 * mib) for mib in (32, 128, 256, 1024, 2048)),
        *(LayerNorm("bf16", 16384, width) for width in widths),
        *(RMSNorm("bf16", 16384, width) for width in widths),
        *(DropoutAddLayerNorm("bf16", 16384, width, p) for p in (0.1, 0.0) for width in widths),
        *(DropoutAddRMSNorm("bf16", 16384, width) for width in widths),
        Rotary("bf16", 4, 4096, 32, 128),
        CausalSoftmax("bf16", 8, 16, 2048),
        MaskedSoftmax("bf16", 8, 16, 2048),
        *(CrossEntropy("bf16", 8192, vocabulary) for vocabulary in (50257, 50304, 128256)),
        LinearCrossEntropy("bf16", 16384, 4096, 128256),
        FusedDense("bf16", 16384, 4096, 4096),
        FusedMLP("bf16", 16384, 4096, 16384, "gelu_tanh"),
        FusedMLP("bf16", 16384, 4096, 16384, "silu", gated=True),
    ]


def _cpu_cases() -> list[Case]:
    """A small case of each operation, in fp32."""
    return [
        Copy("fp32", 1024),
        LayerNorm("fp32", 512, 512),
        RMSNorm("fp32", 512, 512),
        *(DropoutAddLayerNorm("fp32", 512, 512, p) for p in (0.1, 0.0)),
        DropoutAddRMSNorm("fp32", 512, 512),
        Rotary("fp32", 2, 256, 8, 64),
        CausalSoftmax("fp32", 1, 4, 256),
        MaskedSoftmax("fp32", 1, 4, 256),
        CrossEntropy("fp32", 256, 1000),
        LinearCrossEntropy("fp32", 256, 64, 1000),
        FusedDense("fp32", 256, 128, 512),
        FusedMLP("fp32", 256, 128, 512, "gelu_tanh"),
        FusedMLP("fp32", 256, 128, 512, "silu", gated=True),
    ]


def cases_of(device: torch.device, operations: Sequence[str] = (), quick: bool = False) -> list[Case]:
    """The cases of the named operations, of all when none is named; with `quick` the first of each.

    Raises:
        ChoiceError: there is no such operation.
    """
    wanted = select_named("--op", operations or list(OPERATIONS), OPERATIONS, device.type)
    cases = [case for case in companion_cases(device) if type(case) in wanted]
    return list({type(case): case for case in reversed(cases)}.values())[::-1] if quick else cases


def case_of(op: str, record: dict[str, Any]) -> Case:
    """The case of a record's row."""
    return OPERATIONS[op].from_record(record)
