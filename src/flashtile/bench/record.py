"""Records: what was measured, on what, with what, and the ratios of their rows. benchmarks/results/README.md describes
the format.

A row's `timer` says how it was timed: "cuda-graph", "cuda-events", "perf-counter" or "thread-time".
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import math
import os
import platform
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch

import flashtile
from flashtile.bench.base import device_memory, is_ours
from flashtile.bench.start import UserError, installed

_PEER_PACKAGES = ("flash-attn-4", "nvidia-cutlass-dsl", "liger-kernel", "quack-kernels", "transformers")

#: Facts of a machine -> what they are called.
FACTS = {
    "gpu": "GPU",
    "gpu_capability": "architecture",
    "gpu_multiprocessors": "multiprocessors",
    "gpu_memory_gib": "GPU memory (GiB)",
    "driver": "driver",
    "cpu": "processor",
    "cpu_cores": "cores",
    "torch_threads": "torch threads",
    "cpu_memory_gib": "memory (GiB)",
    "system": "system",
}

#: Keys of every row, with the types of their values.
_OF_EVERY_ROW: dict[str, type | tuple[type, ...]] = {
    "op": str, "phase": str, "impl": str, "case": dict, "ms": (int, float, type(None)),
}  # fmt: skip
#: Units of speeds -> their keys in a row. The first that a row has tells most.
SPEEDS = {"tokens/s": "tokens_per_s", "TFLOP/s": "tflops", "GB/s": "gbps"}
#: Keys of measured values: speeds divide by them, and pictures take their logarithms.
_MEASURED = ("ms", *SPEEDS.values(), "peak_mib", "memory_mib")

#: Implementations that are measured beside others, but do not compute the same call.
YARDSTICKS = ("copy", "dense")
#: Ours in the batch-invariant mode, without it, and with gradients that repeat.
INVARIANT, DEFAULT, DETERMINISTIC = "flashtile-invariant", "flashtile-auto", "flashtile-deterministic"

#: A file holds a record, and a record has a row for each measurement.
Record = dict[str, Any]
Row = dict[str, Any]
_Item = TypeVar("_Item")
_Group = TypeVar("_Group")


def make_record(device: torch.device, command: str, rows: Sequence[Row]) -> Record:
    found = {"machine": machine(device), "versions": versions(), "commit": commit()}
    return {**found, "command": command, "rows": list(rows)}


def make_row(op: str, phase: str, impl: str, case: dict[str, Any], **found: Any) -> Row:
    """A row of a record; what is not given is null."""
    nothing = dict.fromkeys(("ms", "tflops", "gbps", "error"))
    return {"op": op, "phase": phase, "impl": impl, "case": case, **nothing, **found}


def command_line(program: str = "flashtile", arguments: Sequence[str] | None = None) -> str:
    """How a program was started: its arguments (None for those of the process) without the place of its output."""
    kept: list[str] = []
    given = iter(sys.argv[1:] if arguments is None else arguments)
    for argument in given:
        if argument in ("--output", "-o"):
            next(given, None)
        elif not argument.startswith("--output="):
            kept.append(argument)
    return " ".join([program, shlex.join(kept)]).rstrip()


class Recorder:
    """A record that grows, and is written whenever it has grown, so that a run that is cut short leaves its rows.

    Machine, versions and commit are those of the start: what the run has loaded.
    """

    def __init__(self, device: torch.device, command: str, output: Path | None) -> None:
        self.record: Record = make_record(device, command, [])
        self._output = output

    @property
    def rows(self) -> list[Row]:
        return self.record["rows"]

    def add(self, rows: Sequence[Row]) -> None:
        """Takes some more rows."""
        self.rows.extend(rows)
        if self._output is not None:
            write_record(self.record, self._output)


def write_record(record: Record, path: Path) -> None:
    """Writes a record as JSON, one row a line, so that a later diff shows which rows changed."""
    head = {key: value for key, value in record.items() if key != "rows"}
    rows = ",\n".join("    " + json.dumps(row, allow_nan=False) for row in record["rows"])
    opening = json.dumps(head, indent=2, allow_nan=False).removesuffix("\n}")
    write_whole(path, f'{opening},\n  "rows": [\n{rows}\n  ]\n}}\n')


def read_record(path: Path) -> Record:
    """A record from its file. Raises UserError if there is no such file, or it is no record."""
    try:
        record = json.loads(path.read_text("utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        why = getattr(error, "strerror", None) or error
        raise UserError(f"record: {path} cannot be read: {why}") from None
    except json.JSONDecodeError as error:
        raise UserError(f"record: {path} is no JSON file: {error}") from None
    if not isinstance(record, dict) or not isinstance(record.get("rows"), list):
        raise UserError(f"record: expected an object with a list of rows in {path}; `flashtile bench -o` writes one")
    for number, row in enumerate(record["rows"], 1):
        if not isinstance(row, dict) or not all(isinstance(row.get(k, ...), of) for k, of in _OF_EVERY_ROW.items()):
            raise UserError(
                f"record: expected rows with {', '.join(_OF_EVERY_ROW)} in {path}, got row {number}: {str(row)[:80]}; "
                "`flashtile bench -o` writes such"
            )
        for name in _MEASURED:
            value = row.get(name)
            finite = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
            if value is not None and not (finite and (value > 0 if name == "ms" else value >= 0)):
                raise UserError(
                    f"record: expected times above 0 and finite speeds and sizes in {path}, got {name} {value!r} in "
                    f"row {number}; take the row out, or write null for what was not measured"
                )
    return record


def write_whole(path: Path, text: str) -> None:
    """Writes a file, and its folder where there is none. If that fails (UserError), the earlier file stays: a full disk
    must not take the cases before."""
    # Beside a file; a device is no file that another could take the place of.
    beside = path.with_name(f"{path.name}.{os.getpid()}.tmp") if path.is_file() or not path.exists() else path
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        beside.write_text(text, encoding="utf-8")
        if beside != path:
            beside.replace(path)
    except OSError as error:
        if beside != path:
            beside.unlink(missing_ok=True)
        raise UserError(f"{path} cannot be written: {error.strerror}; name a file in another folder") from None


def require_writable(path: Path | None) -> None:
    """Makes the folder of a file before anything is measured for it. Raises UserError if the file cannot be written."""
    if path is None:
        return
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        existed = path.exists()
        path.open("ab").close()
    except OSError as error:
        raise UserError(
            f"--output: expected a file that can be written, got {path}: {error.strerror}; name one in another folder"
        ) from None
    if not existed:
        path.unlink()


def machine(device: torch.device) -> dict[str, Any]:
    """Facts of the device and of the processor beside it."""
    memory = device_memory(torch.device("cpu"))
    facts: dict[str, Any] = {
        "device": device.type,
        "cpu": _cpu_name(),
        "cpu_cores": os.cpu_count(),
        "torch_threads": torch.get_num_threads(),
        "cpu_memory_gib": None if memory is None else round(memory / 2**30, 1),
        "system": f"{platform.system()} {platform.machine()}",
    }
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        facts["gpu"] = properties.name
        facts["gpu_capability"] = _architecture(properties)
        facts["gpu_multiprocessors"] = properties.multi_processor_count
        facts["gpu_memory_gib"] = round(properties.total_memory / 2**30, 1)
        facts["driver"] = _driver()
    return facts


def _architecture(properties: Any) -> str:
    """Such as "sm_89" or "gfx942"."""
    if torch.version.hip:
        return str(properties.gcnArchName).partition(":")[0]
    return f"sm_{properties.major}{properties.minor}"


def _driver() -> str | None:
    """The version of the GPU's driver."""
    if torch.version.hip:
        version = Path("/sys/module/amdgpu/version")
        return version.read_text().strip() if version.exists() else None
    found = _output(["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"])
    return found.splitlines()[0] if found else None


def versions() -> dict[str, str | None]:
    """Versions of everything that a figure depends on; None where it is not installed."""
    found: dict[str, str | None] = {
        "python": platform.python_version(),
        "flashtile": flashtile.__version__,
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "rocm": torch.version.hip,
        "cudnn": str(torch.backends.cudnn.version()) if torch.backends.cudnn.is_available() else None,
    }
    # On ROCm and XPU the package is another one.
    packages = importlib.metadata.packages_distributions().get("triton", []) if installed("triton") else []
    found["triton"] = importlib.metadata.version(packages[0]) if packages else None
    for package in _PEER_PACKAGES:
        found[package] = None
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[package] = importlib.metadata.version(package)
    return found


def commit() -> str | None:
    """The commit of flashtile's checkout, with `-dirty` for changes; else the environment's FLASHTILE_COMMIT."""
    if "FLASHTILE_COMMIT" in os.environ:
        return os.environ["FLASHTILE_COMMIT"]
    package = Path(flashtile.__file__).parent
    if _output(["git", "-C", str(package), "ls-files", "--error-unmatch", "__init__.py"]) is None:
        return None  # installed, perhaps inside the checkout of something else
    head = _output(["git", "-C", str(package), "rev-parse", "--short=12", "HEAD"])
    changed = _output(["git", "-C", str(package), "status", "--porcelain", "--", "."])
    return f"{head}-dirty" if changed else head


def _cpu_name() -> str:
    with contextlib.suppress(OSError):  # not Linux
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _output(command: list[str]) -> str | None:
    """The output of a command, or None when it is missing or fails."""
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=20).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None


def case_key(row: Row) -> str:
    """Cases are the same when their operations and `case` objects are."""
    return json.dumps([row["op"], row["case"]], sort_keys=True)


def grouped(items: Iterable[_Item], key: Callable[[_Item], _Group]) -> dict[_Group, list[_Item]]:
    """Items by what a function says of them, in the order in which they come."""
    found: dict[_Group, list[_Item]] = {}
    for each in items:
        found.setdefault(key(each), []).append(each)
    return found


def ratios_to_best(rows: Iterable[Row]) -> list[Row]:
    """Our rows with a speed, each with the fastest `peer` with one and the `ratio` to its speed, above 1 where ours is
    the faster; none without a peer. Yardsticks are no peers."""
    return _ratios(row for row in rows if row["impl"] not in YARDSTICKS)


def ratios_to_peer(rows: Sequence[Row], peer: str) -> list[Row]:
    """The same against one peer, in the cases that it ran."""
    return _ratios(row for row in rows if is_ours(row["impl"]) or row["impl"] == peer)


def _ratios(rows: Iterable[Row]) -> list[Row]:
    found = []
    timed = (row for row in rows if row["ms"] is not None)
    for group in grouped(timed, lambda row: (case_key(row), row["phase"])).values():
        peers = [row for row in group if not is_ours(row["impl"])]
        if peers:
            best = min(peers, key=lambda row: row["ms"])
            beside = ({**row, "peer": best["impl"], "ratio": best["ms"] / row["ms"]} for row in group)
            found += [row for row in beside if is_ours(row["impl"])]
    return found


def mode_ratios(rows: Sequence[Row]) -> list[tuple[Row, dict[str, float]]]:
    """Each row of the batch-invariant mode, and how many times as fast it is as the default, as deterministic=True and
    as the fastest peer (by its name), where these have a speed. The peer comes last."""
    timed = {(case_key(row), row["phase"], row["impl"]): row for row in rows if row["ms"] is not None}
    best = {(case_key(row), row["phase"]): row for row in ratios_to_best(rows) if row["impl"] == INVARIANT}
    found = []
    for (case, phase, impl), row in timed.items():
        if impl == INVARIANT:
            beside = (timed.get((case, phase, other)) for other in (DEFAULT, DETERMINISTIC))
            ratios = {other["impl"]: other["ms"] / row["ms"] for other in beside if other}
            peer = best.get((case, phase))
            found.append((row, ratios | ({peer["peer"]: peer["ratio"]} if peer else {})))
    return found


def geometric_mean(values: Iterable[float]) -> float:
    """The mean for ratios; NaN for none."""
    logs = [math.log(value) for value in values]
    return math.exp(sum(logs) / len(logs)) if logs else math.nan


def peers(rows: Iterable[Row]) -> list[str]:
    """Peers and yardsticks with at least one speed, in the order of the rows."""
    return list(dict.fromkeys(row["impl"] for row in rows if row["ms"] is not None and not is_ours(row["impl"])))


def row_key(row: Row) -> tuple[str, ...]:
    """Identifies what a row measured, the same in two records: also by the step of a breakdown."""
    return case_key(row), row["impl"], row["phase"], row.get("step", "")
