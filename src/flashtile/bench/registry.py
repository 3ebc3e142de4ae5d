"""The one registry: of each benchmark its operations, cases and implementations, and the problem of a case."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

import flashtile
from flashtile.bench import (
    breakdown,
    companion_cases,
    companions,
    implementations,
    oracle,
    serving,
    serving_cases,
    tables,
    training,
)  # fmt: skip
from flashtile.bench.base import AnyCase, Implementation, select_named
from flashtile.bench.cases import Case, packed_case
from flashtile.bench.masks import long_tailed_lengths
from flashtile.bench.record import DEFAULT, DETERMINISTIC, INVARIANT, Row
from flashtile.bench.runner import ProblemOf
from flashtile.bench.serving_cases import ServingCase, mixed_batch
from flashtile.bench.tables import wide_case

#: Options of the command line by name, those that were given; of names a list.
Options = Mapping[str, Any]


@dataclass(frozen=True)
class Benchmark:
    """A command of `flashtile bench`."""

    title: str  # of its tables
    operations: Mapping[str, type[AnyCase]]  # names in records -> the class of their cases
    tables: Callable[[torch.device], Mapping[str, Sequence[AnyCase]]]  # from a device, its cases by names of tables
    implementations: tuple[Implementation, ...]
    problem: ProblemOf
    unit: str | None = None  # of its speeds; None where it depends on the case
    option: str = "table"  # of the command line, that names tables; all of them by default
    #: The cases that options choose on a device, where `option` does not tell.
    choose: Callable[[Options, torch.device], Sequence[AnyCase]] | None = None
    always: tuple[Implementation, ...] = ()  # measured beside the others, whichever are named
    needs: str = ""  # "named" or "all": which implementations are refused where their package is missing

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


def _invariance_tables(device: torch.device) -> dict[str, list[AnyCase]]:
    """Training's calls, decoding and mixed batches: on a GPU 16,384 tokens in sequences of each length, other heads,
    grouped ones and a packed batch; then 4k to 128k rows."""
    if device.type != "cuda":
        small: dict[str, Any] = {"H": 8, "Hkv": 2, "D": 64, "Dv": 64, "dtype": "fp32"}
        return {
            "training": [Case(2, seq, **small, causal=True) for seq in (128, 512)],
            "decode": [ServingCase(batch, 1024, **small) for batch in (1, 4)],
            "mixed": [mixed_batch(2, 6, 64, 128, 512, page=16, **small)],
        }
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


_OF_ATTENTION = {each.name: each for each in implementations.IMPLEMENTATIONS}
_OF_SERVING = {each.name: each for each in serving.IMPLEMENTATIONS}


def _either(name: str, /, **changes: Any) -> Implementation:
    """The one of attention, or that of serving where the case is."""
    of_attention, of_serving = _OF_ATTENTION[name], _OF_SERVING.get(name)

    def unsupported(case: AnyCase, device: torch.device) -> str | None:
        one = of_attention if isinstance(case, Case) else of_serving
        return "measured where there is a backward" if one is None else one.unsupported(case, device)

    def build(case: AnyCase, inputs: Any) -> Any:
        return (of_attention if isinstance(case, Case) or of_serving is None else of_serving).build(case, inputs)

    return replace(of_attention, build=build, unsupported=unsupported, default=True, **changes)


#: With and without the batch-invariant mode, beside peers that promise less.
_MODES = (
    _either(DEFAULT),
    _either(DETERMINISTIC),
    _either(DEFAULT, name=INVARIANT, context=flashtile.batch_invariant_mode),
    _either("sdpa-flash", devices=("cpu",)),
    _either("sdpa-cudnn"),
    _either("fa4"),
    _either("fa4-deterministic"),
)

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
        "Batch-invariant mode", {}, _invariance_tables, _MODES,
        lambda case, on: (oracle.AttentionProblem if isinstance(case, Case) else serving.ServingProblem)(case, on),
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
