"""Draws pictures of the documents as SVG files, those that explain and those of records:
`python tools/draw_docs.py [FOLDER]`.

Each picture is a light card of its own with a border, so that it can be read on a light and on a dark page. No fonts or
scripts are loaded. A test holds the committed files to what this script draws.
"""

from __future__ import annotations

import itertools
import json
import math
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from xml.sax.saxutils import escape

from flashtile import BlockMask, patterns
from flashtile.bench.cases import Case
from flashtile.bench.tables import find_table

ROOT = Path(__file__).parent.parent
IMAGES = ROOT / "docs" / "images"

CARD, BORDER, INK, SOFT = "#fcfcfd", "#b8c0cc", "#1d2733", "#5b6776"
Q, K, V, SCORES, OUT = "#2f6db5", "#c05d12", "#2e7d46", "#7b4bab", "#a8324a"
EMPTY = "#e9edf2"

#: Implementations of the record, as the legend names them, and their colours.
SPEEDS = {
    "flashtile-hopper": ("flashtile", Q),
    "fa4": ("FlashAttention-4", K),
    "sdpa-cudnn": ("PyTorch, cuDNN", "#6b7a8c"),
    "sdpa-flash": ("PyTorch, FlashAttention-2", "#a7b3c0"),
}

#: The row of docs/how_it_works.md: scores and values of six keys, in tiles of two.
ROW_SCORES, ROW_VALUES, ROW_TILE = (1.0, 3.0, 2.0, 5.0, 0.0, 4.0), (10.0, 20.0, 30.0, 40.0, 50.0, 60.0), 2


class Picture:
    """An SVG file that is being drawn. Sizes in pixels."""

    def __init__(self, width: int, height: int, title: str) -> None:
        self._size, self._title, self._parts = (width, height), title, []
        self.box(1, 1, width - 2, height - 2, CARD, BORDER, radius=10)

    def box(
        self, x: float, y: float, width: float, height: float, fill: str, line: str = "none",
        radius: float = 3, opacity: float = 1, dashed: bool = False,
    ) -> None:  # fmt: skip
        dashes = ' stroke-dasharray="5 4"' if dashed else ""
        self._parts.append(
            f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="{radius:g}" fill="{fill}" '
            f'fill-opacity="{opacity:g}" stroke="{line}" stroke-width="1.5"{dashes}/>'
        )

    def text(
        self, x: float, y: float, words: str, size: float = 14, colour: str = INK, anchor: str = "middle",
        bold: bool = False, mono: bool = False,
    ) -> None:  # fmt: skip
        weight = ' font-weight="600"' if bold else ""
        family = ' font-family="ui-monospace, Menlo, Consolas, monospace"' if mono else ""
        self._parts.append(
            f'<text x="{x:g}" y="{y:g}" font-size="{size:g}" fill="{colour}" text-anchor="{anchor}"{weight}{family}>'
            f"{escape(words)}</text>"
        )

    def arrow(self, x1: float, y1: float, x2: float, y2: float, colour: str = SOFT, width: float = 2) -> None:
        length = math.hypot(x2 - x1, y2 - y1)
        dx, dy = (x2 - x1) / length, (y2 - y1) / length
        tip = [(x2, y2), *((x2 - 9 * dx + side * 5 * dy, y2 - 9 * dy - side * 5 * dx) for side in (1, -1))]
        points = " ".join(f"{x:.1f},{y:.1f}" for x, y in tip)
        end_x, end_y = x2 - 8 * dx, y2 - 8 * dy
        self._parts.append(
            f'<line x1="{x1:g}" y1="{y1:g}" x2="{end_x:.1f}" y2="{end_y:.1f}" stroke="{colour}" '
            f'stroke-width="{width:g}"/><polygon points="{points}" fill="{colour}"/>'
        )

    def line(self, points: Iterable[tuple[float, float]], colour: str, width: float = 1.5) -> None:
        """A line through some points."""
        places = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        self._parts.append(f'<polyline points="{places}" fill="none" stroke="{colour}" stroke-width="{width:g}"/>')

    def labelled(
        self, x: float, y: float, width: float, height: float, words: str, colour: str, size: float = 14
    ) -> None:
        """A box in a light tint of a colour, with words in it."""
        self.box(x, y, width, height, colour, colour, opacity=0.16)
        self.text(x + width / 2, y + height / 2 + size * 0.36, words, size)

    def svg(self) -> str:
        width, height = self._size
        head = (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
            f'role="img" font-family="system-ui, Segoe UI, Helvetica, Arial, sans-serif">\n<title>'
        )
        return head + f"{escape(self._title)}</title>\n" + "\n".join(self._parts) + "\n</svg>\n"


def memory_hierarchy() -> Picture:
    """An H200's memories: narrow and fast at the top, wide and slow at the bottom."""
    picture = Picture(760, 372, "The memories of a GPU: registers and shared memory, L2 cache, device memory")
    levels = (
        ("registers", "256 KiB for each of 132 multiprocessors", "feed the tensor cores: 989 TFLOP/s", 320, OUT),
        ("shared memory", "227 KiB for each: 29 MiB in all", "128 bytes a cycle for each: about 30 TB/s", 420, SCORES),
        ("L2 cache", "50 MB for all", "", 515, Q),
        ("device memory (HBM)", "141 GB", "4.8 TB/s", 610, SOFT),
    )
    picture.text(380, 34, "One H200", 17, bold=True)
    for index, (name, capacity, speed, width, colour) in enumerate(levels):
        y = 52 + index * 66
        picture.box(380 - width / 2, y, width, 56, colour, colour, opacity=0.16)
        picture.text(380, y + (17 if speed else 23), name, 14, bold=True)
        picture.text(380, y + (33 if speed else 41), capacity, 12.5)
        if speed:
            picture.text(380, y + 49, speed, 12.5, SOFT)
    picture.arrow(716, 300, 716, 62)
    picture.text(716, 322, "faster", 13, SOFT)
    picture.arrow(44, 62, 44, 300)
    picture.text(44, 322, "larger", 13, SOFT)
    picture.text(380, 346, "989 TFLOP/s ÷ 4.8 TB/s ≈ 206: a kernel that does less than 206 operations", 13)
    picture.text(380, 363, "for each byte it moves through device memory waits for that memory", 13)
    return picture


def traffic() -> Picture:
    """Traffic through device memory of the standard computation, and of the tiled one."""
    picture = Picture(760, 330, "Standard attention moves the scores through device memory; the tiled one does not")
    picture.text(260, 30, "standard: five kernels", 16, bold=True)
    picture.text(645, 30, "tiled: one kernel", 16, bold=True)
    picture.box(20, 216, 720, 96, SOFT, SOFT, opacity=0.12, radius=8)
    picture.text(34, 304, "device memory", 12.5, SOFT, anchor="start")
    kernels = ("q kᵀ", "mask", "softmax", "dropout", "p v")
    for index, name in enumerate(kernels):
        x = 34 + index * 94
        picture.labelled(x, 60, 76, 44, name, Q)
        if index:
            picture.arrow(x - 22, 232, x + 20, 106, SCORES)
        if index < len(kernels) - 1:
            picture.arrow(x + 52, 106, x + 68, 230, SCORES)
            picture.labelled(x + 52, 234, 42, 42, "S × S", SCORES, 11.5)
    picture.text(330, 304, "each S × S matrix is written, then read again", 13, SCORES)
    picture.labelled(556, 60, 178, 86, "", V)
    picture.text(645, 84, "q kᵀ, mask, softmax,", 13)
    picture.text(645, 102, "dropout, p v", 13)
    picture.text(645, 128, "tiles in shared memory", 12, SOFT)
    for x, words, colour in ((556, "q k v", Q), (656, "out lse", OUT)):
        picture.labelled(x, 236, 78, 38, words, colour, 12.5)
    picture.arrow(595, 234, 595, 148, Q)
    picture.arrow(695, 146, 695, 234, OUT)
    picture.text(645, 196, "S × D each", 12, SOFT)
    return picture


def hopper_roles() -> Picture:
    """One thread block of the Hopper forward: who loads, who computes, and that they do it at the same time."""
    picture = Picture(760, 452, "A producer warp fills rings in shared memory; consumer warpgroups compute in turns")
    picture.text(380, 30, "One thread block of the Hopper forward", 16, bold=True)
    picture.labelled(24, 92, 128, 76, "", SOFT)
    picture.text(88, 126, "producer", 14, bold=True)
    picture.text(88, 146, "1 warp: TMA loads", 12.5, SOFT)
    picture.box(210, 58, 250, 144, SOFT, SOFT, opacity=0.1, radius=8)
    picture.text(335, 78, "rings in shared memory", 13, SOFT)
    for stage in range(2):
        picture.labelled(226 + stage * 112, 90, 106, 42, f"k, stage {stage}", K, 13)
        picture.labelled(226 + stage * 112, 142, 106, 42, f"v, stage {stage}", V, 13)
    picture.arrow(154, 118, 208, 118, SOFT)
    picture.text(181, 108, "full", 12, SOFT)
    picture.arrow(208, 150, 154, 150, SOFT)
    picture.text(181, 168, "empty", 12, SOFT)
    for consumer in range(2):
        y = 58 + consumer * 78
        picture.labelled(520, y, 216, 66, "", Q)
        picture.text(628, y + 26, f"consumer {consumer}", 14, bold=True)
        picture.text(628, y + 46, "4 warps, 64 query rows", 12.5, SOFT)
        picture.arrow(462, y + 33, 518, y + 33, SOFT)
    picture.text(380, 236, "the same in time: while one consumer exponentiates, the other multiplies", 14, bold=True)
    rows = ("producer", "consumer 0", "consumer 1")
    for row, name in enumerate(rows):
        picture.text(112, 277 + row * 48, name, 13, anchor="end")
    for tile in range(5):
        picture.labelled(124 + tile * 120, 254, 114, 36, f"load tile {tile + 1}", K, 12.5)
    for consumer in range(2):
        y, start = 302 + consumer * 48, 244 + consumer * 60
        for step in range(4):
            x = start + step * 120
            picture.labelled(x, y, 57, 36, "q kᵀ, p v", SCORES, 11)
            if x + 117 <= 740:
                picture.labelled(x + 60, y, 57, 36, "exp", OUT, 12.5)
    picture.arrow(124, 412, 722, 412)
    picture.text(423, 434, "time", 13, SOFT)
    return picture


def _grid(
    picture: Picture, x: float, y: float, cell: float, rows: int, cols: int, colour: Callable[[int, int], str]
) -> None:
    for row in range(rows):
        for col in range(cols):
            fill = colour(row, col)
            opacity = 1 if fill == EMPTY else 0.75
            picture.box(x + col * cell + 1, y + row * cell + 1, cell - 2, cell - 2, fill, opacity=opacity)


def forward_tiles() -> Picture:
    """A tile of queries stays, tiles of keys and values pass by; with a causal mask half of them are never visited."""
    picture = Picture(760, 388, "Forward: a tile of queries stays on chip while tiles of keys and values pass by")
    cell, left, top = 44, 190, 92
    picture.text(380, 30, "forward, causal: one thread block has one tile of queries", 16, bold=True)
    for index in range(6):
        active, strength = index <= 3, 0.9 if index == 3 else 0.25
        colour = K if active else EMPTY
        picture.box(left + index * cell + 1, top - 40, cell - 2, 30, colour, opacity=0.75 if active else 1)
        picture.box(140, top + index * cell + 1, 36, cell - 2, Q, opacity=strength)
        picture.box(
            left + 6 * cell + 14, top + index * cell + 1, 36, cell - 2, OUT, opacity=0.9 if index == 3 else 0.25
        )

    def colour(row: int, col: int) -> str:
        if col > row:
            return EMPTY
        return SCORES if row == 3 else "#d9cbe8"

    _grid(picture, left, top, cell, 6, 6, colour)
    picture.text(left - 30, top - 22, "k, v", 13, K, bold=True)
    picture.text(158, top + 6 * cell + 18, "q", 14, Q, bold=True)
    picture.text(left + 6 * cell + 32, top + 6 * cell + 18, "out", 14, OUT, bold=True)
    picture.text(left + 3 * cell, top + 6 * cell + 18, "scores: never in device memory", 13, SCORES)
    picture.text(72, top + 3 * cell + 20, "stays in", 13, SOFT)
    picture.text(72, top + 3 * cell + 36, "shared memory", 13, SOFT)
    picture.arrow(left + 6, top + 3.5 * cell, left + 4 * cell - 6, top + 3.5 * cell, "#ffffff", 3)
    notes = (
        ("one step of the loop:", True), ("load a tile of k and v", False), ("s = q kᵀ", False),
        ("raise the row maximum", False), ("rescale what is summed", False), ("add exp(s − max) and", False),
        ("exp(s − max) v", False), ("at the end:", True), ("divide, write out and lse", False),
    )  # fmt: skip
    for index, (words, bold) in enumerate(notes):
        picture.text(540, top + 8 + index * 24, words, 13, anchor="start", bold=bold)
    picture.box(540, top + 228, 16, 16, EMPTY)
    picture.text(564, top + 241, "hidden: never visited", 13, anchor="start")
    return picture


def online_steps() -> Iterator[tuple[float, float, float, float]]:
    """(row maximum, factor for what was summed, row sum, sum of weighted values) after each tile of the example row."""
    row_max, row_sum, acc = -math.inf, 0.0, 0.0
    for start in range(0, len(ROW_SCORES), ROW_TILE):
        s, v = ROW_SCORES[start : start + ROW_TILE], ROW_VALUES[start : start + ROW_TILE]
        new_max = max(row_max, *s)
        alpha = math.exp(row_max - new_max)
        weights = [math.exp(score - new_max) for score in s]
        row_sum = row_sum * alpha + sum(weights)
        acc = acc * alpha + sum(weight * value for weight, value in zip(weights, v))
        row_max = new_max
        yield row_max, alpha, row_sum, acc


def online_softmax() -> Picture:
    """One row of six scores in three tiles: what the running maximum, sum and output are after each."""
    picture = Picture(760, 316, "Online softmax of one row, step by step")
    picture.text(380, 30, "one row of scores, in tiles of two", 16, bold=True)
    titles = ("scores", "values", "maximum m", "factor α", "sum l", "acc", "acc / l")
    for index, words in enumerate(titles):
        colour = K if index == 0 else V if index == 1 else INK
        picture.text(150, 68 + index * 34, words, 13.5, colour, anchor="end", bold=index < 2)
    for tile, (row_max, alpha, row_sum, acc) in enumerate(online_steps()):
        x = 176 + tile * 192
        for key in range(ROW_TILE):
            place = tile * ROW_TILE + key
            picture.labelled(x + key * 64, 50, 58, 26, f"{ROW_SCORES[place]:g}", K)
            picture.labelled(x + key * 64, 84, 58, 26, f"{ROW_VALUES[place]:g}", V)
        figures = (f"{row_max:g}", f"{alpha:.4f}", f"{row_sum:.4f}", f"{acc:.4f}", f"{acc / row_sum:.4f}")
        for index, words in enumerate(figures):
            changed = index == 1 and 0 < alpha < 1
            picture.box(x, 118 + index * 34, 122, 26, OUT if changed else SOFT, opacity=0.18 if changed else 0.08)
            picture.text(x + 61, 118 + index * 34 + 18, words, 13.5, mono=True)
        if tile < 2:
            picture.arrow(x + 128, 216, x + 186, 216)
    picture.text(380, 303, "α is less than 1 where the maximum rises: what was summed before shrinks by it", 13, SOFT)
    return picture


def recomputation() -> Picture:
    """The tensors that the forward leaves for the backward."""
    picture = Picture(760, 280, "What a forward pass keeps for the backward: all weights, or one number for each row")
    picture.text(190, 32, "standard", 16, bold=True)
    picture.text(570, 32, "tiled", 16, bold=True)
    for x, words in ((46, "q"), (82, "k"), (118, "v")):
        picture.labelled(x, 60, 28, 130, words, Q)
    picture.labelled(170, 60, 130, 130, "p", SCORES, 18)
    picture.text(235, 208, "S × S weights", 13, SCORES)
    picture.text(96, 208, "S × D each", 13, Q)
    picture.text(190, 244, "backward reads p", 14)
    picture.text(190, 264, "memory grows with S²", 13, SOFT)
    for x, words in ((436, "q"), (472, "k"), (508, "v")):
        picture.labelled(x, 60, 28, 130, words, Q)
    picture.labelled(544, 60, 28, 130, "out", OUT, 12)
    picture.box(584, 60, 8, 130, SCORES, SCORES, opacity=0.5)
    picture.text(588, 208, "lse", 13, SCORES)
    picture.text(504, 208, "S × D each", 13, Q)
    picture.labelled(644, 96, 56, 56, "p tile", SCORES, 12)
    picture.arrow(598, 124, 642, 124, SCORES)
    picture.text(672, 172, "exp(s − lse)", 12.5, SCORES)
    picture.text(570, 244, "backward makes p again, tile by tile", 14)
    picture.text(570, 264, "memory grows with S", 13, SOFT)
    return picture


def split_of_work() -> Picture:
    """The forward by tiles of queries, the backward by tiles of keys."""
    picture = Picture(760, 384, "The forward is split over queries, the backward over keys")
    cell, top = 38, 88
    shades = ("#2f6db5", "#5c8fc9", "#8ab1dc", "#2f6db5", "#5c8fc9", "#8ab1dc")
    warm = ("#c05d12", "#d98547", "#eaae80", "#c05d12", "#d98547", "#eaae80")
    for left, title, colours, by_row in ((88, "forward: a thread block has a row", shades, True),
                                         (474, "backward: a thread block has a column", warm, False)):  # fmt: skip
        picture.text(left + 3 * cell, 34, title, 15.5, bold=True)
        _grid(picture, left, top, cell, 6, 6, lambda r, c, cs=colours, rows=by_row: cs[r if rows else c])
        picture.text(left + 3 * cell, top - 12, "keys →", 13, SOFT)
        picture.text(left - 8, top + 3 * cell, "queries ↓", 12.5, SOFT, anchor="end")
    for row in range(6):
        y = top + (row + 0.5) * cell
        picture.arrow(94, y, 88 + 6 * cell - 8, y, "#ffffff", 1.5)
        picture.arrow(88 + 6 * cell + 4, y, 88 + 6 * cell + 24, y, OUT)
    picture.text(88 + 6 * cell + 42, top + 3 * cell + 4, "out", 13.5, OUT, bold=True)
    for col in range(6):
        x = 474 + (col + 0.5) * cell
        picture.arrow(x, top + 6, x, top + 6 * cell - 8, "#ffffff", 1.5)
        picture.arrow(x, top + 6 * cell + 4, x, top + 6 * cell + 22, K)
    picture.text(474 + 3 * cell, top + 6 * cell + 40, "dk, dv", 13.5, K, bold=True)
    picture.arrow(474 + 6 * cell + 4, top + 3 * cell, 474 + 6 * cell + 20, top + 3 * cell, Q)
    picture.text(474 + 6 * cell + 38, top + 3 * cell + 4, "dq", 13.5, Q, bold=True)
    picture.text(88 + 3 * cell + 10, 372, "each row of out is finished by one thread block", 13, SOFT)
    picture.text(474 + 3 * cell, 372, "dq: a sum over the thread blocks of a row", 13, SOFT)
    return picture


def block_sparsity() -> Picture:
    """A mask as lists of tiles: empty ones are in no list, full ones have no pattern."""
    picture = Picture(760, 322, "A block mask stores for each row of tiles those that are not empty")
    cell, left, top, tiles = 36, 60, 74, 6
    picture.text(60 + 3 * cell, 34, "a causal window of two tiles", 16, bold=True)

    def colour(row: int, col: int) -> str:
        if col > row or col < row - 2:
            return EMPTY
        return SCORES if col == row - 1 else "#c9b3df"

    _grid(picture, left, top, cell, tiles, tiles, colour)
    for row in range(tiles):
        for col in (row, row - 2):
            if col >= 0:
                x, y = left + col * cell, top + row * cell
                corners = ((x + 2, y + 2), (x + 2, y + cell - 2), (x + cell - 2, y + cell - 2))
                if col == row - 2:
                    corners = ((x + 2, y + 2), (x + cell - 2, y + 2), (x + cell - 2, y + cell - 2))
                points = " ".join(f"{a:g},{b:g}" for a, b in corners)
                picture._parts.append(f'<polygon points="{points}" fill="{SCORES}" fill-opacity="0.75"/>')
    picture.text(left + 3 * cell, top + 6 * cell + 22, "keys →", 13, SOFT)
    picture.text(330, 62, "what is stored: for each row its tiles", 14, anchor="start", bold=True)
    for row in range(tiles):
        y = top + row * cell
        picture.text(330, y + 23, f"row {row}", 13, SOFT, anchor="start")
        for place, col in enumerate(range(max(row - 2, 0), row + 1)):
            full = col == row - 1
            picture.labelled(386 + place * 46, y + 5, 38, 26, f"{col}", SCORES if full else K, 13)
    legend = (("full: no mask is read", SCORES), ("in doubt: with a pattern", K), ("empty: in no list", EMPTY))
    for index, (words, fill) in enumerate(legend):
        picture.box(544, 104 + index * 34, 18, 18, fill, opacity=1 if fill == EMPTY else 0.4)
        picture.text(570, 118 + index * 34, words, 12.5, anchor="start")
    picture.text(544, 234, "15 of 36 tiles are computed", 13, SOFT, anchor="start")
    return picture


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


PICTURES: tuple[Callable[[], Picture], ...] = (
    memory_hierarchy, traffic, forward_tiles, online_softmax, recomputation, split_of_work, block_sparsity,
    block_masks, hopper_roles, attention_speed, loss_gpt2_tiny, loss_gpt2_small,
)  # fmt: skip


def main(folder: Path = IMAGES) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for draw in PICTURES:
        (folder / f"{draw.__name__}.svg").write_text(draw().svg(), "utf-8")


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
