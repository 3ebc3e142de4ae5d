"""The record of a GPU that its user hands in: the cases, and what of a record leaves the user's machine.

`public` builds that record from lists of keys, so that a fact that records gain later stays at home until it is named
here. Messages of exceptions lose paths, addresses, and the names of user and machine.
"""

from __future__ import annotations

import contextlib
import getpass
import os
import platform
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from flashtile.bench import tables
from flashtile.bench.base import AnyCase, half_dtype
from flashtile.bench.companion_cases import Copy, CrossEntropy, LayerNorm, LinearCrossEntropy, RMSNorm
from flashtile.bench.record import FACTS, Record
from flashtile.bench.serving_cases import ServingCase

COMMAND = "flashtile bench card"
HAND_IN = (
    "It names the GPU, the processor, the driver and the versions, and neither you nor your machine. To hand it in, "
    "open an issue in flashtile's repository with the file, or a pull request that adds it to benchmarks/results "
    "(docs/hardware.md)."
)
#: Facts of the machine, and versions, that the record has.
MACHINE = ("device", *FACTS)
VERSIONS = (
    "python", "flashtile", "torch", "cuda", "rocm", "cudnn", "triton", "flash-attn-4", "liger-kernel", "quack-kernels",
)  # fmt: skip
#: Fields of each row of a tuned table.
TUNED = ("choice", "key", "cut", "ms", "shipped_ms")
#: Keys of each measurement.
_ROW = ("op", "phase", "impl", "case", "ms", "tflops", "gbps", "error", "timer", "peak_mib", "why")
_COMMIT = re.compile(r"[0-9a-f]{7,40}(-dirty)?")
#: What has two separators of folders, as paths have, or is an address of a network.
_PRIVATE = re.compile(r"""[^\s'"(=,]*(?:[\\/]+[^\s'"\\/),]+){2,}[\\/]?|\b\d{1,3}(?:\.\d{1,3}){3}\b""")
#: Words that makers put into the names of GPUs, and that name none.
_MAKERS = ("nvidia", "geforce", "tesla", "amd", "radeon", "instinct", "graphics", "gpu")


def card_cases(device: torch.device) -> dict[str, Sequence[AnyCase]]:
    """The cases of each benchmark that the record has. They fit into 6 GiB."""
    attention = tables.tables(device)["card"]
    if device.type != "cuda":
        small: dict[str, Any] = {"H": 8, "Hkv": 2, "D": 64, "Dv": 64, "dtype": "fp32"}
        decoding = [ServingCase(2, 1024, **small), ServingCase(2, 1024, page=16, **small)]
        return {"attention": attention, "serving": decoding, "companions": [RMSNorm("fp32", 512, 512)]}
    dtype = half_dtype(device)
    return {
        "attention": attention,
        "serving": [
            ServingCase(8, 4096, dtype=dtype),
            ServingCase(8, 4096, page=16, dtype=dtype),
            ServingCase(1, 32768, dtype=dtype),
            ServingCase(8, 4096, page=16, factors="head", dtype=dtype),
        ],
        "companions": [
            Copy(dtype, 128 * 1024),
            RMSNorm(dtype, 8192, 4096),
            LayerNorm(dtype, 8192, 4096),
            CrossEntropy(dtype, 2048, 32000),
            LinearCrossEntropy(dtype, 4096, 1024, 32000),
        ],
    }


def public(record: Record, checks: Sequence[dict[str, Any]], tuned: Sequence[dict[str, Any]]) -> Record:
    """What of a record is handed in. `checks`: for each backend and operation `backend`, `operation`, `calls`, and in
    `wrong` messages about calls. `tuned`: rows of the user's table that calls read, as `flashtile tune` has them."""
    facts, versions, commit = record["machine"], record["versions"], record["commit"] or ""
    return {
        "machine": {name: facts[name] for name in MACHINE if name in facts},
        "versions": {name: versions.get(name) for name in VERSIONS},
        "commit": commit if _COMMIT.fullmatch(commit) else None,
        "command": COMMAND,
        "tuned": [{name: row[name] for name in TUNED} for row in tuned],
        "checks": [{**check, "wrong": [without_names(message) for message in check["wrong"]]} for check in checks],
        "rows": [
            {name: without_names(row[name]) if name == "why" else row[name] for name in _ROW if name in row}
            for row in record["rows"]
        ],
    }


def without_names(message: str) -> str:
    """A message without paths, addresses, and the names of user and machine."""
    for name in sorted(_names(), key=len, reverse=True):
        message = re.sub(rf"(?<!\w){re.escape(name)}(?!\w)", "…", message)
    return _PRIVATE.sub("…", message)


def _names() -> set[str]:
    """Names of this machine, of its user, and of the user's folders, also as Python quotes them."""
    host = platform.node()
    names = {host, host.partition(".")[0], str(Path.home()), os.getcwd()}
    with contextlib.suppress(OSError, KeyError):  # a user without an entry, as in containers
        names.add(getpass.getuser())
    return {*names, *(name.replace("\\", "\\\\") for name in names)} - {"", "/"}


def file_name(record: Record) -> str:
    """The default name of a record's file: "card-rtx-4090.json"."""
    machine = record["machine"]
    words = re.findall(r"[a-z0-9]+", str(machine.get("gpu", "cpu")).lower())
    return "-".join(["card", *(word for word in words if word not in _MAKERS)]) + ".json"
