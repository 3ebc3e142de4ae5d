"""Draws the pictures of the documents that show data, masks and records, as SVG files:
`python tools/draw_docs.py [FOLDER]`.

The other pictures of docs/images are edited as files. Each picture is a light card of its own with a border, so that it
can be read on a light and on a dark page. A test holds the committed files to what this script draws.
"""

from __future__ import annotations

import itertools
import json
import math
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from xml.sax.saxutils import escape

from flashtile import BlockMask, patterns
from flashtile.bench.cases import Case
from flashtile.bench.tables import find_table

ROOT = Path(__file__).parent.parent
IMAGES = ROOT / "docs" / "images"

CARD, BORDER, INK, SOFT = "#fcfcfd", "#b8c0cc", "#1d2733", "#5b6776"
Q, K, SCORES = "#2f6db5", "#c05d12", "#7b4bab"
EMPTY = "#e9edf2"

#: Implementations of the record, as the legend names them, and their colours.
SPEEDS = {
    "flashtile-hopper": ("flashtile", Q),
    "fa4": ("FlashAttention-4", K),
    "sdpa-cudnn": ("PyTorch, cuDNN", "#6b7a8c"),
    "sdpa-flash": ("PyTorch, FlashAttention-2", "#a7b3c0"),
}


class Picture:
    """An SVG file that is being drawn. Sizes in pixels."""

    def __init__(self, width: int, height: int, title: str) -> None:
        self._size, self._title, self._parts = (width, height), title, []
        self.box(1, 1, width - 2, height - 2, CARD, BORDER, radius=10)

    def box(
        self, x: float, y: float, width: float, height: float, fill: str, line: str = "none",
        radius: float = 3, opacity: float = 1,
    ) -> None:  # fmt: skip
        self._parts.append(
            f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="{radius:g}" fill="{fill}" '
            f'fill-opacity="{opacity:g}" stroke="{line}" stroke-width="1.5"/>'
        )

    def text(
        self, x: float, y: float, words: str, size: float = 14, colour: str = INK, anchor: str = "middle",
        bold: bool = False,
    ) -> None:  # fmt: skip
        weight = ' font-weight="600"' if bold else ""
        self._parts.append(
            f'<text x="{x:g}" y="{y:g}" font-size="{size:g}" fill="{colour}" text-anchor="{anchor}"{weight}>'
            f"{escape(words)}</text>"
        )

    def line(self, points: Iterable[tuple[float, float]], colour: str, width: float = 1.5) -> None:
        """A line through some points."""
        places = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        self._parts.append(f'<polyline points="{places}" fill="none" stroke="{colour}" stroke-width="{width:g}"/>')

    def svg(self) -> str:
        width, height = self._size
        head = (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
            f'role="img" font-family="system-ui, Segoe UI, Helvetica, Arial, sans-serif">\n<title>'
        )
        return head + f"{escape(self._title)}</title>\n" + "\n".join(self._parts) + "\n</svg>\n"


def _masks() -> dict[str, BlockMask]:
    """Every pattern of `flashtile.patterns`, of 24 to 27 tokens or blocks."""
    return {
        "causal": patterns.causal(24),
        "sliding_window": patterns.sliding_window(24, left=5, right=0),
        "with global tokens": patterns.sliding_window(24, left=2, right=2, global_tokens=2),
        "prefix_lm": patterns.prefix_lm(24, 9),
        "documents": patterns.documents(lengths=[7, 4, 10, 3]),
        "documents & causal": patterns.documents(lengths=[7, 4, 10, 3]) & patterns.causal(24),
        "tree": patterns.tree([6, 5, 4, 6, 3], [-1, 0, 1, 0, 3]),
        "dilated": patterns.dilated(24, 3, 3, 3),
        "strided": patterns.strided(24, 5),
        "fixed": patterns.fixed(24, 6, 2),
        "neighborhood, 2-D": patterns.neighborhood((5, 5), 3),
        "neighborhood, 3-D": patterns.neighborhood((3, 3, 3), (2, 2, 2)),
        "neighborhood, dilated": patterns.neighborhood(24, 4, 3),
        "big_bird": patterns.big_bird(24 * 16, 16),
        "butterfly": patterns.butterfly(24 * 16, 16),
        "~ sliding_window": ~patterns.sliding_window(24, left=4, right=4),
    }


def block_masks() -> Picture:
    """The visible pairs of every ready-made mask."""
    masks, across, side, step_x, step_y = _masks(), 5, 120, 148, 160
    picture = Picture(30 + across * step_x, 24 + -(-len(masks) // across) * step_y, "The ready-made block masks")
    for number, (name, mask) in enumerate(masks.items()):
        x, y = 24 + number % across * step_x, 36 + number // across * step_y
        picture.text(x, y - 8, name, 12.5, anchor="start")
        picture.box(x, y, side, side, EMPTY)
        dense = mask.to_dense()[0, 0]
        shown = dense[:: max(dense.shape[0] // 24, 1), :: max(dense.shape[0] // 24, 1)]
        cell = side / shown.shape[0]
        for row, line in enumerate(shown.tolist()):
            start = 0
            for seen, run in itertools.groupby(line):
                length = len(list(run))
                if seen:
                    picture.box(x + start * cell, y + row * cell, length * cell, cell - 0.5, SCORES, radius=0)
                start += length
    return picture


def recorded_speeds() -> dict[tuple[str, int, bool, str], float]:
    """TFLOP/s by (phase, head_dim, causal, implementation), of 8,192 tokens."""
    record = json.loads((ROOT / "benchmarks" / "results" / "h200-attention.json").read_text("utf-8"))
    return {
        (row["phase"], row["case"]["D"], row["case"]["causal"], row["impl"]): row["tflops"]
        for row in record["rows"]
        if find_table(case := Case.from_record(row["case"])) == "default" and case.S == 8192
    }


def attention_speed() -> Picture:
    """Bars of the record beside its peers: for forward and backward, head_dim 64, 128 and 256, full and causal."""
    picture = Picture(900, 420, "TFLOP/s of attention on one H200, beside its peers")
    picture.text(450, 32, "bfloat16, 8,192 tokens, one NVIDIA H200: TFLOP/s, higher is better", 16, bold=True)
    found, bottom, unit, bar = recorded_speeds(), 326, 0.28, 13
    for phase, name, left in (("fwd", "forward", 56), ("bwd", "backward", 486)):
        picture.text(left + 195, 62, name, 15, bold=True)
        for level in range(0, 900, 200):
            picture.box(left, bottom - unit * level - 0.5, 390, 1, BORDER, radius=0, opacity=0.6)
            picture.text(left - 8, bottom - unit * level + 4, f"{level}", 12, SOFT, anchor="end")
        for place, (head_dim, causal) in enumerate((d, c) for d in (64, 128, 256) for c in (False, True)):
            x = left + 6 + place * 65
            for index, (impl, (_, colour)) in enumerate(SPEEDS.items()):
                height = unit * found[phase, head_dim, causal, impl]
                picture.box(x + index * bar, bottom - height, bar - 1.5, height, colour, radius=1.5)
            ours = found[phase, head_dim, causal, "flashtile-hopper"]
            picture.text(x + bar / 2, bottom - unit * ours - 6, f"{ours:.0f}", 12, Q, bold=True)
            picture.text(x + 2 * bar, bottom + 18, "causal" if causal else "full", 12, SOFT)
            if causal:
                picture.text(x - 6, bottom + 38, f"head_dim {head_dim}", 13)
    for index, (name, colour) in enumerate(SPEEDS.values()):
        picture.box(180 + index * 150, 384, 14, 14, colour)
        picture.text(201 + index * 150, 396, name, 13, anchor="start")
    return picture


def _losses(record: str, words: str, apart: float) -> Picture:
    """Losses on real text by step, of both implementations, and how far they lie apart, at most `apart`."""
    rows = json.loads((ROOT / "benchmarks" / "results" / f"{record}.json").read_text("utf-8"))["rows"]
    (theirs, ours), steps = (row["curve"] for row in rows), len(rows[0]["curve"])
    picture = Picture(900, 360, f"Losses of {words} with transformers' eager attention and with flashtile")
    differences = [abs(one - other) for one, other in zip(ours, theirs)]
    top = 4 * math.ceil(max(theirs) / 4)
    panels = ((66, "loss, nats a token", top, (theirs, ours)), (506, "difference", apart, (differences,)))
    for left, title, most, curves in panels:
        picture.text(left + 180, 34, f"{words}: {title}", 15, bold=True)
        for level in range(5):
            y = 310 - 60 * level
            picture.box(left, y - 0.5, 360, 1, BORDER, radius=0, opacity=0.6)
            picture.text(left - 8, y + 4, f"{most * level / 4:g}", 12, SOFT, anchor="end")
        for curve, colour in zip(curves, (K, Q) if len(curves) > 1 else (INK,)):
            points = enumerate(curve, 1)
            picture.line(((left + 360 * x / steps, 310 - 240 * min(1, y / most)) for x, y in points), colour, 1)
        picture.text(left + 360, 330, f"step {steps:,}", 12, SOFT, anchor="end")
    for x, name, colour in ((66, "transformers, eager", K), (236, "flashtile", Q)):
        picture.box(x, 336, 14, 14, colour)
        picture.text(x + 20, 348, name, 13, anchor="start")
    return picture


def loss_gpt2_tiny() -> Picture:
    """In float32 on a CPU."""
    return _losses("cpu-gpt2-curves", "GPT-2, two layers", 1e-6)


def loss_gpt2_small() -> Picture:
    """In bfloat16 on an H200."""
    return _losses("h200-training-curves", "GPT-2 small", 0.24)


PICTURES: tuple[Callable[[], Picture], ...] = (block_masks, attention_speed, loss_gpt2_tiny, loss_gpt2_small)


def main(folder: Path = IMAGES) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for draw in PICTURES:
        (folder / f"{draw.__name__}.svg").write_text(draw().svg(), "utf-8")


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
