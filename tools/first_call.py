"""How long a user waits for the first call: forward and backward in a new process, with and without compiled kernels.

    python tools/first_call.py [--output record.json]

Each measurement is a process of its own; importing torch and starting CUDA are not counted, importing flashtile and
Triton are. "cold" starts with an empty Triton cache, "cached" with the one that the cold process filled. The score
function is new to either library: the cache of "function" has the kernels of the cold process alone.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

from flashtile.bench.record import command_line, make_record, make_row, write_record

_CASE = {"B": 2, "S": 1024, "H": 16, "Hkv": 16, "D": 128, "Dv": 128, "causal": True, "dtype": "bf16"}

_PROCESS = """
import time, torch
q, k, v = (torch.randn(2, 1024, 16, 128, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
frequency, gain = torch.rand(16, device="cuda"), torch.rand(16, 1024, device="cuda")
waves = lambda score, b, h, i, j: score + gain[h, j] * torch.sin(frequency[h] * (i - j))
torch.autograd.grad((q @ k.transpose(-1, -2)).sum(), q)
torch.cuda.synchronize()
begin = time.perf_counter()
{call}.sum().backward()
torch.cuda.synchronize()
print(time.perf_counter() - begin)
"""

#: The measurements in their order: the name of the cache's state, the implementation, and the call.
_CALLS = (
    ("cold", "flashtile-auto", "import flashtile\nflashtile.attention(q, k, v, causal=True)"),
    ("cached", "flashtile-auto", "import flashtile\nflashtile.attention(q, k, v, causal=True)"),
    ("function", "flashtile-auto", "import flashtile\nflashtile.attention(q, k, v, causal=True, score_mod=waves)"),
    (
        "function",
        "flex",
        "from torch.nn.attention.flex_attention import create_block_mask, flex_attention\n"
        "mask = create_block_mask(lambda b, h, i, j: i >= j, None, None, 1024, 1024)\n"
        "q, k, v = (tensor.transpose(1, 2) for tensor in (q, k, v))\n"
        "torch.compile(flex_attention)(q, k, v, score_mod=waves, block_mask=mask)",
    ),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("needs a GPU; torch.cuda.is_available() is False")
    rows = []
    with tempfile.TemporaryDirectory() as cache:
        for state, implementation, call in _CALLS:
            seconds = _first_call(call, cache)
            print(f"{implementation}, {state}: {seconds:.2f} s")
            case = {**_CASE, "cache": state}
            if state == "function":
                case["function"] = "waves"
            rows.append(make_row("attention-first-call", "fwd+bwd", implementation, case, ms=1000 * seconds))
    if arguments.output:
        command = command_line("python tools/first_call.py")
        write_record(make_record(torch.device("cuda"), command, rows), arguments.output)


def _first_call(call: str, cache: str) -> float:
    """Seconds of the first call in a new process, whose caches of compiled kernels are here."""
    environment = {**os.environ, "TRITON_CACHE_DIR": cache, "TORCHINDUCTOR_CACHE_DIR": cache}
    command = [sys.executable, "-c", _PROCESS.replace("{call}", call)]
    return float(subprocess.run(command, env=environment, capture_output=True, check=True, text=True).stdout)


if __name__ == "__main__":
    main()
