"""How long a user waits for the first call: forward and backward in a new process, with and without compiled kernels.

    python tools/first_call.py [--output record.json]

Each measurement is a process of its own; importing torch and starting CUDA are not counted, importing flashtile and
Triton are. "cold" starts with an empty Triton cache, "cached" with the one that the cold process filled.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile

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
    parser.add_argument("--output")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as cache:
        environment = {**os.environ, "TRITON_CACHE_DIR": cache}
        seconds = {}
        for name in ("cold", "cached"):
            command = [sys.executable, "-c", _PROCESS]
            seconds[name] = float(subprocess.run(command, env=environment, capture_output=True, check=True).stdout)
            print(f"{name}: {seconds[name]:.2f} s")
    if arguments.output:
        with open(arguments.output, "w") as file:
            json.dump(seconds, file)


if __name__ == "__main__":
    main()
