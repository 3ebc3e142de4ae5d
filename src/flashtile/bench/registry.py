"""The one registry: of each benchmark its operations, cases and implementations, and the problem of a case."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from flashtile.bench import (
    breakdown,
    companion_cases,
    companions,
    implementations,
    invariance,
    oracle,
    serving,
    serving_cases,
    tables,
    training,
)  # fmt: skip
from flashtile.bench.base import AnyCase, Implementation, select_named
from flashtile.bench.cases import Case
from flashtile.bench.record import Row
from flashtile.bench.runner import ProblemOf

#: Options of the command line by name, those that were given; of names a list.
Options = Mapping[str, Any]


Tables = Callable[[torch.device], Mapping[str, Sequence[AnyCase]]]


@dataclass(frozen=True)
class Benchmark:
    """A command of `flashtile bench`.

    Attributes:
        title: of its tables.
        operations: names in records -> the class of their cases.
        tables: from a device, its cases by the names of tables.
        implementations: in which ways.
        problem: makes the problem of a case.
        unit: of its speeds; None where it depends on the case (`AnyCase.unit`).
        option: of the command line, that names tables.
        choose: the cases that options choose on a device; None where `option` names tables, and all by default.
        always: what is measured beside the implementations, whichever are named.
        needs: implementations whose package is missing are refused, always or where they are named.
    """

    title: str
    operations: Mapping[str, type[AnyCase]]
    tables: Tables
    implementations: tuple[Implementation, ...]
    problem: ProblemOf
    unit: str | None = None
    option: str = "table"
    choose: Callable[[Options, torch.device], Sequence[AnyCase]] | None = None
    always: tuple[Implementation, ...] = ()
    needs: str = ""

    def cases(self, given: Options, device: torch.device) -> Sequence[AnyCase]:
        """The cases that options choose. Raises UserError for an unknown name."""
        if self.choose is not None:
            return self.choose(given, device)
        known = self.tables(device)
        chosen = select_named(f"--{self.option}", given.get(self.option) or list(known), known, device.type)
        first = 1 if given.get("quick") else None  # of each table
        return list(dict.fromkeys(case for cases in chosen for case in cases[:first]))


def _implementations(default: Callable[[Implementation], bool]) -> tuple[Implementation, ...]:
    """Attention's, with fewer of them measured by default."""
    return tuple(replace(each, default=each.default and default(each)) for each in implementations.IMPLEMENTATIONS)


BENCHMARKS = {
    "attention": Benchmark(
        "Attention", {"attention": Case}, tables.tables, implementations.IMPLEMENTATIONS, oracle.AttentionProblem,
        unit="TFLOP/s",
        choose=lambda given, device: tables.cases_named(device, given.get("table", ()), given.get("quick", False)),
    ),
    "companions": Benchmark(
        "Companions", companion_cases.OPERATIONS, companion_cases.tables, companions.IMPLEMENTATIONS,
        companions.CompanionProblem, option="op", needs="named",
    ),
    "serving": Benchmark(
        "Serving", dict.fromkeys(("serving", "decode"), serving_cases.ServingCase), serving_cases.tables,
        serving.IMPLEMENTATIONS, serving.ServingProblem,
    ),
    "invariance": Benchmark(
        "Batch-invariant mode", {}, invariance.tables, invariance.IMPLEMENTATIONS, invariance.make_problem,
    ),
    "train": Benchmark(
        "Training", {"train-step": training.TrainCase}, lambda device: {"all": training.training_cases(device)},
        training.IMPLEMENTATIONS, training.TrainProblem, unit="tokens/s", choose=training.chosen_cases, needs="all",
    ),
    "host-time": Benchmark(
        "Host time", {"attention-host": Case}, lambda device: {"all": tables.host_cases(device)},
        _implementations(lambda each: each.name not in ("flex", "sdpa-efficient", "torch-varlen")),
        oracle.HostProblem,
    ),
    "breakdown": Benchmark(
        "Standard attention", {"attention-breakdown": Case}, lambda device: {"all": [breakdown.default_case(device)]},
        _implementations(lambda each: each.ours), breakdown.BreakdownProblem, choose=breakdown.chosen_case,
        always=(breakdown.STANDARD,),
    ),
}  # fmt: skip
_BY_OPERATION = {op: benchmark for benchmark in BENCHMARKS.values() for op in benchmark.operations}


def find_benchmark(op: str) -> Benchmark:
    """The benchmark that an operation's rows belong to; attention's for an operation of none."""
    return _BY_OPERATION.get(op, BENCHMARKS["attention"])


def find_case(row: Mapping[str, Any]) -> AnyCase:
    """The case of a record's row."""
    return find_benchmark(row["op"]).operations.get(row["op"], Case).from_record(row["case"])


def case_name(row: Row) -> str:
    """The name of a row's case; of attention with its batch and heads."""
    case = find_case(row)
    if not isinstance(case, Case):
        return case.name
    return f"b{case.B}-h{case.H}{'' if case.H == case.Hkv else f':{case.Hkv}'}-{case.name}"
