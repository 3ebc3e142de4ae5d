"""Lists of tiles: how a mask over pairs of query and key is cut into tiles, sorted into empty, full and partial ones.

`Bounds` says of each tile what is surely known. The elements of tiles in doubt are made, some at a time, and compared,
so that memory grows with the result and not with the matrix.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

#: The kind of a tile in which every pair is visible; while building, also that of one in which none is.
FULL, EMPTY = -1, -2
#: Tiles are multiples of this in both directions: eight bools are read as one word, and 64 ones fit into a byte.
STORED_TILE = 64
#: Pairs whose elements are made at once; building takes about 30 bytes of memory for each.
PAIRS_AT_ONCE = 2**22
#: Tiles that are sorted by their bounds at once.
TILES_AT_ONCE = 2**20

Shape = tuple[int, int, int, int]


class Grid(NamedTuple):
    """How a mask is cut into tiles. A tile has a number, its cell: `row · tiles_k + key tile`."""

    shape: Shape
    tile: tuple[int, int]

    @property
    def tiles_q(self) -> int:
        return -(-self.shape[2] // self.tile[0])

    @property
    def tiles_k(self) -> int:
        return -(-self.shape[3] // self.tile[1])

    @property
    def rows(self) -> int:
        """Rows of tiles, of all batch entries and heads."""
        return self.shape[0] * self.shape[1] * self.tiles_q

    @property
    def columns(self) -> int:
        """Columns of tiles, likewise."""
        return self.shape[0] * self.shape[1] * self.tiles_k

    @property
    def sticks_out(self) -> bool:
        """Whether there are tiles that the sequences do not fill."""
        return self.shape[2] % self.tile[0] != 0 or self.shape[3] % self.tile[1] != 0

    def pairs(self, cells: Tensor) -> Tensor:
        """How many pairs of each tile exist: at the ends of the sequences tiles stick out."""
        row, column = cells // self.tiles_k, cells % self.tiles_k
        queries = (self.shape[2] - row % self.tiles_q * self.tile[0]).clamp(max=self.tile[0])
        return queries * (self.shape[3] - column * self.tile[1]).clamp(max=self.tile[1])


class Places(NamedTuple):
    """The places where the parts of `BlockMask.lists` begin.

    Attributes:
        row_offsets, column_offsets: one for each row and column of tiles, and the end of the last.
        columns, kinds: of each entry by row: its key tile, and what is visible in it.
        rows, row_kinds: of each entry by column: its query tile, likewise.
        row_ranks: how many entries come before it in its row. These five parts lie one behind the other.
        row_order: the rows of tiles of each batch entry and head, those with the fewest entries first; they are walked
            from the last, so that a GPU is full to the end.
        row_bits: the patterns `[patterns, tile_q, tile_k / 32]`: bit `c` of word `w` is key `32·w + c`.
        column_bits: the same by key, `[patterns, tile_k, tile_q / 32]`. Both begin at multiples of 16 bytes.
    """

    row_offsets: int
    column_offsets: int
    columns: int
    kinds: int
    rows: int
    row_kinds: int
    row_ranks: int
    row_order: int
    row_bits: int
    column_bits: int

    @classmethod
    def of(cls, grid: Grid, length: int, patterns: int) -> Places:
        """In lists of so many numbers, of a mask with so many patterns."""
        bits = length - 2 * patterns * math.prod(grid.tile) // 32
        offsets = grid.rows + grid.columns + 2
        entries = (bits - offsets - grid.rows) // 5
        columns, kinds, rows, row_kinds, ranks, order = (offsets + entries * part for part in range(6))
        return cls(
            0, grid.rows + 1, columns, kinds, rows, row_kinds, ranks,
            row_order=order, row_bits=bits, column_bits=(bits + length) // 2,
        )  # fmt: skip


class Tiles(NamedTuple):
    """Some tiles of a grid, by int64 tensors that broadcast against one another. `batch`, `head`: that they belong to.
    `q_tile`, `k_tile`: which of its tiles they are. `first_q`, `last_q`, `first_k`, `last_k`: the queries and keys in
    them, those past the ends left out."""

    batch: Tensor
    head: Tensor
    q_tile: Tensor
    k_tile: Tensor
    first_q: Tensor
    last_q: Tensor
    first_k: Tensor
    last_k: Tensor

    @classmethod
    def of(cls, grid: Grid, row: Tensor, column: Tensor) -> Tiles:
        (_, heads, seq_q, seq_k), (tile_q, tile_k) = grid.shape, grid.tile
        sequence, q_tile = row // grid.tiles_q, row % grid.tiles_q
        first_q, first_k = q_tile * tile_q, column * tile_k
        last_q, last_k = (first_q + tile_q - 1).clamp(max=seq_q - 1), (first_k + tile_k - 1).clamp(max=seq_k - 1)
        return cls(sequence // heads, sequence % heads, q_tile, column, first_q, last_q, first_k, last_k=last_k)


class Bounds(NamedTuple):
    """Facts about tiles before their elements are made; tensors that broadcast to `[rows, tiles_k]`. `possible`: bool:
    a pair of the tile may be visible. `certain`: bool: all pairs of the tile surely are. `key`: int64: tiles with equal
    keys have equal elements, but for pairs past the ends; None = not known."""

    possible: Tensor
    certain: Tensor
    key: Tensor | None = None


#: The elements of some tiles, whose tensors are `[tiles]`: bool that broadcasts to `[tiles, tile_q, tile_k]`.
Elements = Callable[[Tiles], Tensor]


class _Entries(NamedTuple):
    """Some tiles: cells and kinds `[entries]` int64, and the patterns `[patterns, tile_q, tile_k]` bool."""

    cells: Tensor
    kinds: Tensor
    patterns: Tensor


def build(
    grid: Grid, device: torch.device, bounds: Callable[[Tiles], Bounds], elements: Elements
) -> tuple[Tensor, Tensor]:
    """`BlockMask.lists` and `tile_masks` from what is known of the tiles of a grid, and the elements of the others."""
    none = torch.zeros(0, dtype=torch.int64, device=device)
    parts = [_Entries(none, none, torch.zeros((0, *grid.tile), dtype=torch.bool, device=device))]
    columns = torch.arange(grid.tiles_k, device=device)[None, :]
    for rows in _ranges(grid.rows if grid.tiles_k else 0, TILES_AT_ONCE // max(grid.tiles_k, 1)):
        row = torch.arange(rows.start, rows.stop, device=device)[:, None]
        known = bounds(Tiles.of(grid, row, columns))
        cells = row * grid.tiles_k + columns
        doubtful = (known.possible & ~known.certain).expand_as(cells)
        full = cells[known.certain.expand_as(cells)]
        parts.append(_Entries(full, torch.full_like(full, FULL), parts[0].patterns))
        key = None if known.key is None else known.key.expand_as(cells)[doubtful]
        if (doubtful_cells := cells[doubtful]).shape[0]:
            parts.append(_examined(grid, doubtful_cells, key, elements))
    return _assembled(grid, _joined(parts))


def _ranges(total: int, step: int) -> Iterator[range]:
    step = max(step, 1)
    return (range(start, min(start + step, total)) for start in range(0, total, step))


def _examined(grid: Grid, cells: Tensor, key: Tensor | None, elements: Elements) -> _Entries:
    """The tiles in doubt that turn out not to be empty. One of the tiles with the same key is looked at."""
    looked_at, group = cells, None
    if key is not None:
        # Tiles that stick out have fewer pairs than others of their key.
        at_end = 2 * (cells // grid.tiles_k % grid.tiles_q == grid.tiles_q - 1).long()
        at_end += cells % grid.tiles_k == grid.tiles_k - 1
        keys, group = torch.unique(4 * key + at_end, return_inverse=True)
        looked_at = torch.zeros_like(keys).scatter_(0, group, cells)
    tiles_at_once = max(PAIRS_AT_ONCE // math.prod(grid.tile), 1)
    entries = _joined([_classified(grid, some, elements) for some in looked_at.split(tiles_at_once)])
    kinds = entries.kinds if group is None else entries.kinds[group]
    seen = kinds != EMPTY
    return _Entries(cells[seen], kinds[seen], entries.patterns)


def _classified(grid: Grid, cells: Tensor, elements: Elements) -> _Entries:
    """Makes the elements of some tiles, and tells which are empty, which full, and what the others look like."""
    masks, kinds = _examine(grid, cells, elements)
    partial = (kinds >= 0).nonzero()[:, 0]
    patterns, which = _distinct(masks[partial])
    kinds[partial] = which
    return _Entries(cells, kinds, patterns)


def _examine(grid: Grid, cells: Tensor, elements: Elements) -> tuple[Tensor, Tensor]:
    """The elements of some tiles `[tiles, tile_q, tile_k]` bool, and whether they are EMPTY, FULL or partial (0)."""
    tiles = Tiles.of(grid, cells // grid.tiles_k, cells % grid.tiles_k)
    masks = elements(tiles).expand(cells.shape[0], *grid.tile)
    if grid.sticks_out:
        within_q = tiles.first_q[:, None] + torch.arange(grid.tile[0], device=cells.device) < grid.shape[2]
        within_k = tiles.first_k[:, None] + torch.arange(grid.tile[1], device=cells.device) < grid.shape[3]
        masks = masks & (within_q[:, :, None] & within_k[:, None, :])
    # In memory of their own: eight are read as one word below, which a slice may not be aligned for.
    masks = masks.clone(memory_format=torch.contiguous_format)
    visible = _counted(masks)
    kinds = torch.where(visible == grid.pairs(cells), FULL, torch.where(visible > 0, 0, EMPTY))
    return masks, kinds


def _counted(masks: Tensor) -> Tensor:
    """How many pairs of each tile are visible. Eight bytes are added up at a time, and 64 fit into a byte."""
    words = masks.view(torch.int64).view(masks.shape[0], -1, STORED_TILE, masks.shape[2] // 8)
    return words.sum(dim=2).view(torch.uint8).flatten(1).sum(dim=1, dtype=torch.int64)


def _distinct(masks: Tensor) -> tuple[Tensor, Tensor]:
    """The distinct ones of `[tiles, tile_q, tile_k]` bool, in an order that is theirs alone, and which each is."""
    words = masks.contiguous().flatten(1).view(torch.int64)
    hashes, which = torch.unique(_hashed(words), return_inverse=True)
    number = torch.arange(words.shape[0], device=words.device)
    one_of_each = torch.zeros_like(hashes).scatter_(0, which, number)
    if torch.equal(words[one_of_each][which], words):
        return masks[one_of_each], which
    # Two that differ have one hash: compared in full, which takes longer.
    distinct, which = torch.unique(words, dim=0, return_inverse=True)
    return distinct.view(torch.bool).view(-1, *masks.shape[1:]), which


def _hashed(words: Tensor) -> Tensor:
    """One number for each row of int64 words: of their products with odd numbers, which differ from place to place."""
    place = torch.arange(words.shape[1], device=words.device)
    mixed = (words + place) * 0x2545F4914F6CDD1D
    mixed = (mixed ^ (mixed >> 32)) * 0x369DEA0F31A53F85
    return (mixed ^ (mixed >> 29)).sum(dim=1)


def _joined(parts: list[_Entries]) -> _Entries:
    kinds, patterns = [], 0
    for part in parts:
        kinds.append(torch.where(part.kinds < 0, part.kinds, part.kinds + patterns))
        patterns += part.patterns.shape[0]
    return _Entries(
        torch.cat([part.cells for part in parts]), torch.cat(kinds), torch.cat([part.patterns for part in parts])
    )


def _assembled(grid: Grid, entries: _Entries) -> tuple[Tensor, Tensor]:
    """Both lists of the tiles that are not empty, and the distinct patterns."""
    patterns, which = _distinct(entries.patterns)
    _check_size(grid, entries.cells.shape[0], patterns)
    kinds = entries.kinds
    if patterns.shape[0]:
        kinds = torch.where(kinds < 0, kinds, which[kinds.clamp(min=0)])
    cells, order = torch.sort(entries.cells)
    return _with_bits(_listed(grid, cells, kinds[order]), patterns), patterns.to(torch.uint8)


def _listed(grid: Grid, cells: Tensor, kinds: Tensor) -> tuple[Tensor, ...]:
    """The parts of `BlockMask.lists` up to the row order, from tiles in order. The last ones may be EMPTY: the lists
    have room there."""
    listed = kinds != EMPTY
    # Tiles that are not listed belong to a row and a column behind the last one.
    row = torch.where(listed, cells // grid.tiles_k, grid.rows)
    column = torch.where(listed, row // grid.tiles_q * grid.tiles_k + cells % grid.tiles_k, grid.columns)
    by_column, transposed = torch.sort(column, stable=True)
    offsets, column_offsets = _offsets(row, grid.rows), _offsets(by_column, grid.columns)
    ranks = torch.arange(row.shape[0], device=row.device) - offsets[row]
    key_tile, kinds, ranks = (part * listed for part in (cells % grid.tiles_k, kinds, ranks))
    lists = (part[transposed] for part in (row % grid.tiles_q, kinds, ranks))
    return offsets, column_offsets, key_tile, kinds, *lists, _shortest_first(offsets, grid.tiles_q)


def _check_size(grid: Grid, entries: int, patterns: Tensor) -> None:
    total = 5 * entries + 2 * (grid.rows + 1) + grid.columns + patterns.numel() // 16
    if total >= 2**31:
        raise ValueError(
            f"tile: expected a mask of fewer than 2**31 numbers, got {total} for {entries} tiles that "
            f"are not empty and {patterns.shape[0]} patterns; use larger tiles"
        )


def _with_bits(lists: Sequence[Tensor], patterns: Tensor) -> Tensor:
    """`BlockMask.lists` from its parts up to the row order, and the patterns."""
    numbers = [part.int() for part in lists]
    padding = numbers[0].new_zeros(-sum(part.shape[0] for part in numbers) % 4)
    return torch.cat([*numbers, padding, _bits(patterns), _bits(patterns.transpose(1, 2))])


def build_with_room(
    grid: Grid, device: torch.device, bounds: Callable[[Tiles], Bounds], elements: Elements, room: int
) -> tuple[Tensor, Tensor]:
    """As `build`, but no shape depends on what is visible, so nothing is read on the host: the lists have room for all
    tiles, and `tile_masks` for `room`, each with a pattern of its own. Having more in doubt is an error, on a GPU a
    failed assertion."""
    if not grid.rows or not grid.tiles_k:
        return build(grid, device, bounds, elements)
    row, column = torch.arange(grid.rows, device=device)[:, None], torch.arange(grid.tiles_k, device=device)
    known = bounds(Tiles.of(grid, row, column))
    doubtful = (known.possible & ~known.certain).expand(grid.rows, grid.tiles_k).flatten()
    number = doubtful.cumsum(0) - 1
    _check_room(number[-1] + 1, room)
    total = doubtful.shape[0]
    cells = torch.zeros(room + 1, dtype=torch.int64, device=device)
    place = torch.where(doubtful, number, room).clamp(max=room)  # the last one is cut off
    cells = cells.scatter_(0, place, torch.arange(total, device=device))[:room]
    some = cells.split(max(PAIRS_AT_ONCE // math.prod(grid.tile), 1)) if room else ()
    examined = [_examine(grid, part, elements) for part in some]
    none = torch.zeros((0, *grid.tile), dtype=torch.bool, device=device)
    masks = torch.cat([none, *(masks for masks, _ in examined)])
    kinds = torch.cat([cells[:0], *(kinds for _, kinds in examined)])
    kinds = torch.where(kinds == 0, torch.arange(room, device=device), kinds)
    table = torch.where(known.certain, FULL, EMPTY).expand(grid.rows, grid.tiles_k).flatten()
    used = torch.arange(room, device=device) <= number[-1]
    table = torch.cat((table, table[:1])).scatter_(0, torch.where(used, cells, total), kinds)[:total]
    patterns = masks & (used & (kinds >= 0))[:, None, None]
    _check_size(grid, total, patterns)
    order = (table == EMPTY).int().argsort(stable=True)
    return _with_bits(_listed(grid, order, table[order]), patterns), patterns.to(torch.uint8)


def _check_room(doubtful: Tensor, room: int) -> None:
    message = "max_partial_tiles: expected room for all tiles that are not known to be empty or full"
    if doubtful.device.type == "cpu" and int(doubtful) > room:
        raise ValueError(f"{message}, {int(doubtful)}, got {room}; pass more, or None to count them on the host")
    torch._assert_async(doubtful <= room, f"{message}, got {room}; pass more, or None to count them on the host")


def _offsets(owners: Tensor, total: int) -> Tensor:
    """The start of each owner's entries, `[total + 1]`; owners ascend."""
    return torch.searchsorted(owners, torch.arange(total + 1, device=owners.device))


def _shortest_first(offsets: Tensor, lines: int) -> Tensor:
    """The lines of each batch entry and head, `lines` of them, those with the fewest entries first."""
    entries = offsets.diff()
    return entries.view(entries.shape[0] // max(lines, 1), lines).argsort(dim=1, stable=True).flatten()


def _bits(masks: Tensor) -> Tensor:
    """bool `[patterns, rows, columns]` as int32, 32 columns in each, one behind the other."""
    eights = masks.reshape(-1, 8).to(torch.uint8)
    place = 2 ** torch.arange(8, dtype=torch.uint8, device=masks.device)
    return (eights * place).sum(dim=1, dtype=torch.uint8).view(torch.int32)
