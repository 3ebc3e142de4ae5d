"""The one registry: of each benchmark its operations, cases and implementations, and the problem of a case."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from flashtile.bench import (
    breakdown,
    companion_products,
    companions,
    implementations,
    oracle,
    serving,
    serving_cases,
    tables,
    training,
)  # fmt: skip
from flashtile.bench.base import AnyCase, Implementation
from flashtile.bench.cases import Case
from flashtile.bench.record import Row
from flashtile.bench.runner import ProblemOf, Run, run_case, run_host_time

#: Options of the command line by name, those that were given; of names a list.
Options = Mapping[str, Any]


@dataclass(frozen=True)
class Benchmark:
    """What a command measures.

    Attributes:
        title: of its tables.
        unit: of its speeds; None where it depends on the case (`AnyCase.unit`).
        operations: names in records -> the class of their cases.
        groups: from a device, the cases that `--list` shows, by heading.
        cases: those that options choose on a device.
        implementations: in which ways.
        problem: makes the problem of a case.
        run: measures a case.
        needs: implementations whose package is missing are refused, always or where they are named.
    """

    title: str
    unit: str | None
    operations: Mapping[str, type[AnyCase]]
    groups: Callable[[torch.device], Mapping[str, Sequence[AnyCase]]]
    cases: Callable[[Options, torch.device], Sequence[AnyCase]]
    implementations: tuple[Implementation, ...]
    problem: ProblemOf
    run: Run = run_case
    needs: str = ""


Tables = Callable[[torch.device], Mapping[str, Sequence[AnyCase]]]


def _headed(known: Tables) -> Tables:
    return lambda device: {f"cases of {name}": cases for name, cases in known(device).items()}


def _named(option: str, cases_of: Callable[..., Sequence[AnyCase]]) -> Callable[[Options, torch.device], Any]:
    return lambda given, device: cases_of(device, given.get(option, ()), given.get("quick", False))


BENCHMARKS = {
    "attention": Benchmark(
        "Attention", "TFLOP/s", {"attention": Case}, _headed(tables.tables), _named("table", tables.cases_of),
        implementations.IMPLEMENTATIONS, oracle.AttentionProblem,
    ),
    "companions": Benchmark(
        "Companions", None, companion_products.OPERATIONS, _headed(companion_products.tables),
        _named("op", companion_products.cases_of), companions.IMPLEMENTATIONS, companions.CompanionProblem,
        needs="named",
    ),
    "serving": Benchmark(
        "Serving", None, dict.fromkeys(("serving", "decode"), serving_cases.ServingCase),
        _headed(serving_cases.tables), _named("table", serving_cases.cases_of), serving.IMPLEMENTATIONS,
        serving.ServingProblem,
    ),
    "train": Benchmark(
        "Training", "tokens/s", {"train-step": training.TrainCase},
        lambda device: {"cases": training.training_cases(device)}, training.chosen_cases, training.IMPLEMENTATIONS,
        training.TrainProblem, needs="all",
    ),
    "host-time": Benchmark(
        "Host time", None, {"attention-host": Case}, lambda device: {"cases": tables.host_cases(device)},
        lambda given, device: tables.host_cases(device)[: 1 if given.get("quick") else None],
        tuple(
            replace(each, default=each.default and each.name not in ("flex", "sdpa-efficient", "torch-varlen"))
            for each in implementations.IMPLEMENTATIONS
        ),
        oracle.AttentionProblem, run_host_time,
    ),
    "breakdown": Benchmark(
        "Standard attention", None, {"attention-breakdown": Case},
        lambda device: {"cases": [breakdown.default_case(device)]},
        lambda given, device: [breakdown.chosen_case(given, device)],
        tuple(replace(each, default=each.default and each.ours) for each in implementations.IMPLEMENTATIONS),
        oracle.AttentionProblem, breakdown.run_breakdown,
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
