"""The one registry: of each benchmark its operations, cases and implementations, and the problem of a case."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from flashtile.bench import (
    companion_products,
    companions,
    implementations,
    oracle,
    serving,
    serving_cases,
    tables,
    training,
)
from flashtile.bench.base import AnyCase, Implementation
from flashtile.bench.cases import Case
from flashtile.bench.record import Row
from flashtile.bench.runner import ProblemOf


@dataclass(frozen=True)
class Benchmark:
    """What a command measures.

    Attributes:
        title: of its tables.
        unit: of its speeds; None where it depends on the case (`AnyCase.unit`).
        operations: names in records -> the class of their cases.
        groups: from a device, the cases that `--list` shows, by heading.
        implementations: in which ways.
        problem: makes the problem of a case.
        needs: implementations whose package is missing are refused, always or where they are named.
    """

    title: str
    unit: str | None
    operations: Mapping[str, type[AnyCase]]
    groups: Callable[[torch.device], Mapping[str, Sequence[AnyCase]]]
    implementations: tuple[Implementation, ...]
    problem: ProblemOf
    needs: str = ""


def _companions(device: torch.device) -> dict[str, list[AnyCase]]:
    cases = companion_products.companion_cases(device)
    return {f"cases of {op}": [case for case in cases if case.op == op] for op in companion_products.OPERATIONS}


BENCHMARKS = {
    "attention": Benchmark(
        "Attention", "TFLOP/s", {"attention": Case},
        lambda device: {
            f"cases of table {name}": cases
            for name, cases in {**tables.tables(device), tables.HOST_TIME: tables.host_cases(device)}.items()
        },
        implementations.IMPLEMENTATIONS, oracle.AttentionProblem,
    ),
    "companions": Benchmark(
        "Companions", None, companion_products.OPERATIONS, _companions, companions.IMPLEMENTATIONS,
        companions.CompanionProblem, needs="named",
    ),
    "serving": Benchmark(
        "Serving", None, dict.fromkeys(("serving", "decode"), serving_cases.ServingCase),
        lambda device: {f"cases of table {name}": cases for name, cases in serving_cases.tables(device).items()},
        serving.IMPLEMENTATIONS, serving.ServingProblem,
    ),
    "train": Benchmark(
        "Training", "tokens/s", {"train-step": training.TrainCase},
        lambda device: {"cases": training.training_cases(device)}, training.IMPLEMENTATIONS, training.TrainProblem,
        needs="all",
    ),
}  # fmt: skip
_BY_OPERATION = {op: benchmark for benchmark in BENCHMARKS.values() for op in benchmark.operations}


def benchmark_of(op: str) -> Benchmark:
    """The benchmark that an operation's rows belong to; attention's for an operation of none."""
    return _BY_OPERATION.get(op, BENCHMARKS["attention"])


def case_of(row: Mapping[str, Any]) -> AnyCase:
    """The case of a record's row."""
    return benchmark_of(row["op"]).operations.get(row["op"], Case).from_record(row["case"])


def case_name(row: Row) -> str:
    """The name of a row's case; of attention with its batch and heads."""
    case = case_of(row)
    if not isinstance(case, Case):
        return case.name
    return f"b{case.B}-h{case.H}{'' if case.H == case.Hkv else f':{case.Hkv}'}-{case.name}"
