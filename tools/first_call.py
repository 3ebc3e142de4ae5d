"""How long a user waits for the first call: forward and backward in a new process, with and without compiled kernels.

    python tools/first_call.py [--output record.json]

Each measurement is a process of its own; importing torch and starting CUDA are not counted, importing flashtile and
Triton are. "cold" starts with an empty Triton cache, "cached" with the one that the cold process filled.
"""

from __future__ import annotations

import argparse
import os
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

from flashtile.bench.record import make_record, write_record

_CASE = {"B": 2, "S": 1024, "H": 16, "Hkv": 16, "D": 128, "Dv": 128, "causal": True, "dtype": "bf16"}

_PROCESS = """
import time, torch
q, k, v = (torch.randn(2, 1024, 16, 128, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
torch.autograd.grad((q @ k.transpose(-1, -2)).sum(), q)
torch.cuda.synchronize()
begin = time.perf_counter()
import flashtile
flashtile.attention(q, k, v, causal=True).sum().backward()
torch.cuda.synchronize()
print(time.perf_counter() - begin)
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("needs a GPU; torch.cuda.is_available() is False")
    rows = []
    with tempfile.TemporaryDirectory() as cache:
        for name in ("cold", "cached"):
            seconds = _first_call(cache)
            print(f"{name}: {seconds:.2f} s")
            case = {**_CASE, "cache": name}
            rows.append(
                {
                    "op": "attention-first-call",
                    "phase": "fwd+bwd",
                    "impl": "flashtile-triton",
                    "case": case,
                    "ms": 1000 * seconds,
                }
            )
    if arguments.output:
        command = shlex.join(["python", *sys.argv])
        write_record(make_record(torch.device("cuda"), command, rows), arguments.output)


def _first_call(cache: str) -> float:
    """Seconds of the first call in a new process that uses this Triton cache."""
    environment = {**os.environ, "TRITON_CACHE_DIR": cache}
    command = [sys.executable, "-c", _PROCESS]
    return float(subprocess.run(command, env=environment, capture_output=True, check=True).stdout)


if __name__ == "__main__":
    main()
