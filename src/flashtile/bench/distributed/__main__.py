"""`python -m flashtile.bench.distributed`: starts a process for each GPU, measures, and writes one record.

python -m flashtile.bench.distributed --output benchmarks/results/h200x4-context-parallel.json
python -m flashtile.bench.distributed --gpus 2 --quick --output record.json
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path

import torch
import torch.multiprocessing as mp

from flashtile.bench.distributed import worker
from flashtile.bench.distributed.cases import cases_of
from flashtile.bench.distributed.implementations import BASELINE, IMPLEMENTATIONS
from flashtile.bench.errors import ChoiceError
from flashtile.bench.record import require_writable


def main(arguments: list[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    gpus = options.gpus or (torch.cuda.device_count() if device == "cuda" else 2)
    if device == "cuda" and gpus > torch.cuda.device_count():
        print(f"--gpus: expected at most {torch.cuda.device_count()}, got {gpus}", file=sys.stderr)
        return 2
    cases = cases_of(device, gpus, options.quick)
    if options.lengths:
        cases = [case for case in cases if case.S in options.lengths]
    if options.mask != "both":
        cases = [case for case in cases if case.causal is (options.mask == "causal")]
    if not cases:
        print("--lengths: expected some of the table's, such as 131072; none was found", file=sys.stderr)
        return 2
    try:
        require_writable(options.output)
    except ChoiceError as error:
        print(error, file=sys.stderr)
        return 2
    names = [BASELINE, *(name for name in options.impl or IMPLEMENTATIONS if name != BASELINE)]
    end = time.time() + options.limit
    given = sys.argv[1:] if arguments is None else arguments
    command = " ".join(["python -m flashtile.bench.distributed", *_without_output(given)])
    with tempfile.TemporaryDirectory() as folder:
        shared = (cases, names, device, f"{folder}/store", str(options.output), command, options.seconds, end,
                  options.profile)  # fmt: skip
        mp.spawn(worker.run, shared, nprocs=gpus)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m flashtile.bench.distributed", description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("--output", type=Path, required=True, help="file for the record")
    parser.add_argument("--gpus", type=int, help="processes, one for each GPU; all by default, two on a CPU")
    parser.add_argument("--quick", action="store_true", help="32k and 128k tokens alone")
    parser.add_argument("--lengths", type=int, nargs="+", default=[], help="of the table's lengths these")
    parser.add_argument("--mask", choices=("both", "causal", "full"), default="both", help="of the table's cases these")
    parser.add_argument("--impl", nargs="+", choices=list(IMPLEMENTATIONS), help="all by default")
    parser.add_argument("--seconds", type=float, default=0.25, help="for the samples of each phase")
    parser.add_argument("--profile", action="store_true", help="where the time of each goes, and how much is hidden")
    parser.add_argument("--limit", type=float, default=240.0, help="seconds after which nothing new is started")
    return parser


def _without_output(arguments: list[str]) -> list[str]:
    kept = list(arguments)
    if "--output" in kept:
        place = kept.index("--output")
        del kept[place : place + 2]
    return [argument for argument in kept if not argument.startswith("--output=")]


if __name__ == "__main__":
    sys.exit(main())
