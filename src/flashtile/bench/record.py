"""Records: what was measured, on what, with what. benchmarks/results/README.md describes the format.

A row's `timer` says how it was timed: "cuda-graph", "cuda-events", "perf-counter" or "thread-time".
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import platform
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

import flashtile
from flashtile.bench.errors import ChoiceError
from flashtile.bench.implementations import device_memory

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

#: A file holds a record, and a record has a row for each measurement.
Record = dict[str, Any]
Row = dict[str, Any]


def make_record(device: torch.device, command: str, rows: Sequence[Row]) -> Record:
    return {
        "machine": machine(device),
        "versions": versions(),
        "commit": commit(),
        "command": command,
        "rows": list(rows),
    }


def write_record(record: Record, path: Path) -> None:
    """Writes a record as JSON, one row a line, so that a later diff shows which rows changed."""
    head = {key: value for key, value in record.items() if key != "rows"}
    rows = ",\n".join("    " + json.dumps(row, allow_nan=False) for row in record["rows"])
    opening = json.dumps(head, indent=2, allow_nan=False).removesuffix("\n}")
    write_whole(path, f'{opening},\n  "rows": [\n{rows}\n  ]\n}}\n')


def write_whole(path: Path, text: str) -> None:
    """Writes a file, and its folder where there is none. Where that fails, what was there stays: a record is written
    after each case, and a full disk must not take the cases before.

    Raises:
        ChoiceError: it cannot be written.
    """
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
        raise ChoiceError(f"{path} cannot be written: {error.strerror}; name a file in another folder") from None


def require_writable(path: Path | None, option: str = "--output") -> None:
    """Makes the folder of a file that is to be written in the end, before anything is measured for it.

    Raises:
        ChoiceError: the file cannot be written.
    """
    if path is None:
        return
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        existed = path.exists()
        path.open("ab").close()
    except OSError as error:
        raise ChoiceError(
            f"{option}: expected a file that can be written, got {path}: {error.strerror}; name one in another folder"
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
        facts["gpu_capability"] = f"sm_{properties.major}{properties.minor}"
        facts["gpu_multiprocessors"] = properties.multi_processor_count
        facts["gpu_memory_gib"] = round(properties.total_memory / 2**30, 1)
        facts["driver"] = _driver_version()
    return facts


def versions() -> dict[str, str | None]:
    """Versions of everything that a figure depends on; None where it is not installed."""
    found: dict[str, str | None] = {
        "python": platform.python_version(),
        "flashtile": flashtile.__version__,
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "cudnn": str(torch.backends.cudnn.version()) if torch.backends.cudnn.is_available() else None,
    }
    # On ROCm and XPU the package is another one.
    found["triton"] = None
    if importlib.util.find_spec("triton") is not None:
        packages = importlib.metadata.packages_distributions().get("triton", [])
        found["triton"] = importlib.metadata.version(packages[0]) if packages else None
    for package in _PEER_PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = None
    return found


def commit() -> str | None:
    """The commit of the checkout that flashtile runs from, with `-dirty` for changed files.

    Outside a checkout the environment variable FLASHTILE_COMMIT may name it; else None.
    """
    if "FLASHTILE_COMMIT" in os.environ:
        return os.environ["FLASHTILE_COMMIT"]
    package = Path(flashtile.__file__).parent
    if _output(["git", "-C", str(package), "ls-files", "--error-unmatch", "__init__.py"]) is None:
        return None  # installed, perhaps inside the checkout of something else
    head = _output(["git", "-C", str(package), "rev-parse", "--short=12", "HEAD"])
    changed = _output(["git", "-C", str(package), "status", "--porcelain", "--", "."])
    return f"{head}-dirty" if changed else head


def _driver_version() -> str | None:
    text = _output(["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"])
    return text.splitlines()[0] if text else None


def _cpu_name() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass  # not Linux
    return platform.processor() or platform.machine()


def _output(command: list[str]) -> str | None:
    """What a command prints, or None when it is missing or fails."""
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=20).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None
