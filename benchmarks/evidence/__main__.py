"""Draws and tabulates records of the training scripts: `python -m benchmarks.evidence RECORD... --output FOLDER`.

As SVG files: loss curves of `benchmarks.gpt2`, tokens each second and share of the GPU's peak against the context of
`flashtile bench train`, accuracy beside time of `benchmarks.lra`; in the terminal tables of these and of
`benchmarks.bert`. Pictures need matplotlib (the extra "plots").
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.evidence.plots import draw_all
from benchmarks.evidence.summary import summary


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.evidence", description=__doc__.partition("\n")[0])
    parser.add_argument("records", nargs="+", type=Path, help="JSON files")
    parser.add_argument("--output", type=Path, help="folder for the pictures; without it there are tables alone")
    given = parser.parse_args(arguments)
    rows = []
    for path in given.records:
        try:
            rows += json.loads(path.read_text("utf-8"))["rows"]
        except (OSError, ValueError, KeyError, TypeError) as error:
            print(
                f"records: expected a record, got {path}: {error}; the scripts write them with --output",
                file=sys.stderr,
            )
            return 2
    print(summary(rows))
    if given.output is not None:
        for path in draw_all(rows, given.output):
            print(path)
    return 0


if __name__ == "__main__":
    sys.exit(main())
