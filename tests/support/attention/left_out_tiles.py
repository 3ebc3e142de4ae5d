"""A process that looks for tiles which a kernel left as they were in memory: `python left_out_tiles.py SECONDS`.

Each call finds NaN in the memory that it is given for its results. So a tile that nobody computes is seen, which a
repeated call would hide by the results of the one before. Several such processes share a GPU: the fault that this looks
for came about once in ten thousand calls of a program that had the GPU to itself in turns (decisions/hopper_forward.md,
"Tiles that nobody computed").
"""

from __future__ import annotations

import sys
import time

import torch
from torch import Tensor

import flashtile
from flashtile.testing.cases import leave_nan

#: How many lines such a process prints.
CASES = 5
#: Calls at a time, between two looks at what they left.
_TOGETHER = 20


def _tensors(*shape: int) -> tuple[Tensor, ...]:
    return tuple(torch.randn(*shape, device="cuda", dtype=torch.bfloat16).requires_grad_() for _ in range(3))


def _dense(batch: int, seq: int, heads: int, head_dim: int) -> tuple:
    q, k, v = _tensors(batch, seq, heads, head_dim)
    return (q, k, v), lambda: flashtile.attention(q, k, v, causal=True, backend="hopper")


def _packed(length: int, count: int, heads: int, head_dim: int) -> tuple:
    q, k, v = _tensors(length * count, heads, head_dim)
    bounds = torch.arange(0, length * count + 1, length, device="cuda", dtype=torch.int32)
    return (q, k, v), lambda: flashtile.attention_varlen(
        q, k, v, bounds, max_seqlen_q=length, causal=True, backend="hopper"
    )


def main(seconds: float) -> None:
    cases = {
        "64": _dense(4, 4096, 8, 64),
        "128": _dense(6, 2112, 8, 128),
        "256": _dense(2, 2112, 8, 256),
        "64-packed": _packed(1000, 16, 8, 64),
        "128-packed": _packed(333, 20, 16, 128),
    }
    for _, call in cases.values():
        call().sum().backward()
    calls = dict.fromkeys(cases, 0)
    missing = {name: torch.zeros(4, dtype=torch.int64, device="cuda") for name in cases}
    begin = time.perf_counter()
    while time.perf_counter() - begin < seconds:
        for name, (inputs, call) in cases.items():
            with torch.no_grad():
                for _ in range(_TOGETHER):
                    leave_nan(*inputs)
                    missing[name][0] += call().isnan().any()
            for _ in range(2):
                out = call()
                dout = torch.ones_like(out)
                leave_nan(*inputs)
                found = (out, *torch.autograd.grad(out, inputs, dout))
                missing[name] += torch.stack([tensor.isnan().any() for tensor in found])
            calls[name] += _TOGETHER + 2
            torch.cuda.synchronize()
    for name, count in calls.items():
        print(name, count, "calls with NaN in out, dq, dk, dv:", *missing[name].tolist())


if __name__ == "__main__":
    main(float(sys.argv[1]))
