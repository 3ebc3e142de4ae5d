"""How the key tiles of a causal backward follow one another, for the host: what `backward_tiles` does on the GPU."""

from __future__ import annotations

from flashtile.ops.attention.hopper.backward_tiles import TILES_AT_ONCE, TILES_TOGETHER
from flashtile.ops.attention.hopper.pieces import PAIRS_TOGETHER, TILES_AT_THE_END


def take_two_rounds(tiles: int, lines: int, programs: int) -> bool:
    """Whether under a causal mask no thread block takes more than two tiles of the lines that take turns together, and
    those of lines that others follow more than one (`_lines_together`, `_closing_lines`). Then the second ones end when
    the next lines begin. Lines are those of several query heads."""
    before_last = tiles_before_last(tiles, lines, 2)
    followed = before_last == 0 or programs < _tiles_together(tiles) <= 2 * programs
    return followed and lines * tiles - before_last <= 2 * programs


def tiles_done_before_last(tiles: int, lines: int, group: int, programs: int) -> float:
    """About how many key tiles are done when the longest one of the last lines that take turns begins, under a causal
    mask. The tiles under way are then the short ones of the lines before, and all but done. If the lines that take
    turns are less than a round, they are of any length, and two thirds of their work are left."""
    left = 2 / 3 * programs if _tiles_together(tiles) < programs else 0
    return max(tiles_before_last(tiles, lines, group) - left, 0)


def tiles_before_last(tiles: int, lines: int, group: int) -> int:
    """How many key tiles come before those of the last lines that take turns, which are `_closing_lines` or a few more.
    `group`: query heads of a walk."""
    closing = max(TILES_AT_THE_END.value // tiles, 1)
    if group > 1:
        closing = min(closing, TILES_AT_ONCE.value // 8)
    together = _tiles_together(tiles)
    return max(lines - closing, 0) * tiles // together * together


def _tiles_together(tiles: int) -> int:
    """Key tiles of the lines that take turns together (`_lines_together`), for the host."""
    return min(max(TILES_TOGETHER.value // tiles, 2), PAIRS_TOGETHER.value) * tiles
