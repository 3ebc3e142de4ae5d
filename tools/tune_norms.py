"""Offline tuner of the norm kernels: times cuts on the GPU of this machine, beside a copy and PyTorch's own norms.

    python tools/tune_norms.py --output norms.json [--widths 1024 4096 8192] [--residual] [--dropout 0.1]

Prints, for each norm, width and pass, the cuts from fast to slow, with GB/s (inputs read once and outputs written once)
and what part of the copy's GB/s that is. The cut of the table is marked. A person copies the winner, with its reason,
into `flashtile/ops/layer_norm/kernels.py`; nothing is tuned on a user's machine. A cut must give the results of
the table's before its time counts. The backward is both kernels, as a user runs it.
"""

from __future__ import annotations

import argparse
import itertools
import json
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from tuning import DEVICE, choosing, milliseconds, time_right

from flashtile._backends.devices import device_facts
from flashtile.ops.common.tiles import RowTile
from flashtile.ops.layer_norm import kernels
from flashtile.ops.layer_norm.spec import NormSpec, Operands, Upstream, Wanted

SECONDS = 0.2


def candidates(phase: str, width: int) -> list[RowTile]:
    """Cuts worth timing: whole rows with 4 to 64 elements to a thread, several short ones together; and loops."""
    block_n = max(16, 1 << (width - 1).bit_length())
    whole = [(rows, block_n) for rows in (1, 2, 4, 8, 16)] + [
        (rows, size) for rows in (1, 2, 4, 8) for size in (1024, 4096)
    ]
    found = []
    for (rows, size), warps in itertools.product(dict.fromkeys(whole), (1, 2, 4, 8, 16, 32)):
        if not 4 <= rows * size / (32 * warps) <= 64 or size > block_n:
            continue
        if phase == "forward":
            found.append(RowTile(rows, size, warps))
            continue
        # Programs that stay: from 8 to 32 warps on a multiprocessor, one to three rows ahead.
        found += [
            RowTile(rows, size, warps, stages, programs)
            for stages, programs in itertools.product((2, 3, 4), (1, 2, 4, 8))
            if 8 <= warps * programs <= 32 and rows * size * (stages - 1) * programs * 4 < 200 * 1024
        ]
    return found


class Problem:
    """One call: x0 (and residual) `[rows, width]` and the parameters in one dtype."""

    def __init__(self, arguments: argparse.Namespace, rms: bool, width: int) -> None:
        dtype, rows = getattr(torch, arguments.dtype), arguments.rows
        residual_dtype = getattr(torch, arguments.residual_dtype or arguments.dtype)
        make = lambda *shape, of=dtype: torch.randn(*shape, device=DEVICE).to(of)  # noqa: E731
        residual = make(rows, width, of=residual_dtype) if arguments.residual else None
        seed = torch.tensor([1, 2], device=DEVICE) if arguments.dropout else None
        bias = None if rms else make(width)
        self.operands = Operands(make(rows, width), residual, weight=make(width), bias=bias, dropout_seed=seed)
        sum_dtype = residual_dtype if arguments.residual else dtype
        self.spec = NormSpec(rms, 1e-5, arguments.dropout, 1.0, False, sum_dtype, rows)
        results = kernels.forward(self.operands, self.spec)
        x = self.operands.x0 if results.x is None else results.x
        saved = (x, None, results.mean, results.rstd, *self.operands[3:])
        dz, dx = make(rows, width), torch.randn_like(x) if arguments.residual else None
        self.given, self.wanted = Upstream(dz, None, dx, *saved), Wanted(rows, arguments.residual, False, True)

    def forward(self) -> tuple[Tensor | None, ...]:
        return kernels.forward(self.operands, self.spec)

    def backward(self) -> tuple[Tensor | None, ...]:
        return kernels.backward(self.given, self.spec, self.wanted)

    def bytes(self, phase: str) -> int:
        """Bytes of all that must be read and written once."""
        given = self.given
        read = (self.operands.x0, self.operands.residual) if phase == "forward" else (given.dz, given.dx, given.x)
        return sum(t.nbytes for t in (*read, *getattr(self, phase)()) if t is not None)

    def peers(self, phase: str) -> dict[str, Callable[[], Any]]:
        """PyTorch's own, eager and compiled, where the call is a plain norm."""
        if self.operands.residual is not None or self.spec.dropout_p or DEVICE.type != "cuda":
            return {}
        given = (self.operands.x0, self.operands.weight, self.operands.bias)
        x, weight, bias = (None if t is None else t.detach().requires_grad_() for t in given)

        def plain(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
            shape = x.shape[1:]
            return F.rms_norm(x, shape, weight, 1e-5) if self.spec.rms else F.layer_norm(x, shape, weight, bias, 1e-5)

        leaves = [t for t in (x, weight, bias) if t is not None]
        calls = {}
        for name, function in (("eager", plain), ("compile", torch.compile(plain))):
            if phase == "forward":
                calls[name] = lambda function=function: function(x.detach(), weight.detach(), bias)
            else:
                z = function(x, weight, bias)
                calls[name] = lambda z=z: torch.autograd.grad(z, leaves, self.given.dz, retain_graph=True)
        return calls


def table_cut(phase: str, problem: Problem) -> RowTile:
    """The cut that a call takes by itself."""
    seen: list[RowTile] = []
    from_table = getattr(kernels, f"{phase}_config")
    with choosing(kernels, f"{phase}_config", lambda *given: seen.append(from_table(*given)) or seen[-1]):
        getattr(problem, phase)()
    return seen[0]


def measure(phase: str, problem: Problem, limit: int | None) -> list[dict[str, Any]]:
    call, table = getattr(problem, phase), table_cut(phase, problem)
    expected, rows = call(), []
    width = problem.operands.x0.shape[1]
    for config in [table, *(c for c in candidates(phase, width) if c != table)][:limit]:
        with choosing(kernels, f"{phase}_config", lambda *given, config=config: config):
            row = {"cut": list(config), "table": config == table}
            rows.append(row | time_right(call, expected, SECONDS, 0.01))
    peers = problem.peers(phase).items()
    return rows + [{"cut": name, "table": False, "ms": milliseconds(f, SECONDS)} for name, f in peers]


def copy_speed() -> float:
    """GB/s of a copy, bytes read plus written."""
    elements = 2**30 if DEVICE.type == "cuda" else 2**20
    source = torch.empty(elements, dtype=torch.uint8, device=DEVICE)
    target = torch.empty_like(source)
    return 2 * elements / milliseconds(lambda: target.copy_(source), SECONDS) / 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", required=True)
    parser.add_argument("--widths", nargs="+", type=int, default=[1024, 2048, 4096, 5120, 8192, 16384])
    parser.add_argument("--rows", type=int, default=16384)
    parser.add_argument("--norms", nargs="+", default=["layer", "rms"])
    parser.add_argument("--phases", nargs="+", default=["forward", "backward"])
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--residual", action="store_true")
    parser.add_argument("--residual-dtype")
    parser.add_argument("--dropout", type=float, default=0.0)
    parser.add_argument("--limit", type=int, help="cuts to time, the table's first; 1 times only that and the peers")
    arguments = parser.parse_args()
    copy, report = copy_speed(), []
    print(f"{device_facts(DEVICE).arch}, copy {copy:.0f} GB/s, {arguments}", flush=True)
    for width, norm, phase in itertools.product(arguments.widths, arguments.norms, arguments.phases):
        problem = Problem(arguments, norm == "rms", width)
        rows, size = measure(phase, problem, arguments.limit), problem.bytes(phase)
        timed = sorted((row for row in rows if row["ms"]), key=lambda row: row["ms"])
        print(f"{norm} {width} {phase}", flush=True)
        for row in timed[:6] + [row for row in timed[6:] if row["table"] or isinstance(row["cut"], str)]:
            speed = size / row["ms"] / 1e6
            mark = "  <- table" if row["table"] else ""
            print(f"  {row['ms'] * 1e3:8.1f} µs {speed:6.0f} GB/s {speed / copy:5.0%}  {row['cut']}{mark}", flush=True)
        report.append({"norm": norm, "width": width, "phase": phase, "bytes": size, "cuts": rows})
    with open(arguments.output, "w") as file:
        json.dump({"copy_gbps": copy, "arguments": vars(arguments), "rows": report}, file)


if __name__ == "__main__":
    main()
