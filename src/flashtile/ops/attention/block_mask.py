"""`BlockMask`: which pairs of query and key are visible, as lists of tiles.

The lists are what kernels walk. Rows of tiles are numbered `(batch · heads + head) · tiles_q + tile`, and row `r` owns
the entries from `row_offsets[r]` to `row_offsets[r + 1]`: a key tile each, and its kind. Nothing is kept of a tile in
which no pair is visible, nothing but the kind of one in which all are; of the others each distinct pattern is kept
once.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from flashtile.ops.attention.tile_lists import (
    FULL,
    STORED_TILE,
    Bounds,
    Elements,
    Grid,
    Predicate,
    Shape,
    Tiles,
    build,
    predicate_elements,
)
from flashtile.ops.common.checks import check_tensors

#: A user's tile is a multiple of this.
USER_TILE = 16


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class BlockMask:
    """Block-sparse visibility: what attention may look at, by tiles.

    Made by `from_dense`, `from_layout`, `from_predicate`, `from_flex`, or a function of `flashtile.patterns`. It never
    changes. Building reads values on the host; using a mask does not.

    Attributes:
        shape: `(batch, heads, seq_q, seq_k)`; a batch or heads of 1 stands for any number.
        tile: `(tile_q, tile_k)` of the lists, multiples of 64.
        row_offsets: `[batch · heads · tiles_q + 1]` int32: where the entries of each row of tiles start.
        columns: `[entries]` int32: the key tile, ascending within a row.
        kinds: `[entries]` int32: -1 where every pair of the tile is visible, else its place in `tile_masks`.
        column_offsets: `[batch · heads · tiles_k + 1]` int32: the same entries by key tile.
        rows: `[entries]` int32: the query tile, ascending within a column.
        row_kinds: `[entries]` int32: the kinds in that order.
        tile_masks: `[patterns, tile_q, tile_k]` uint8, 1 = visible, 0 past the ends of the sequences; no two are equal.

    Two masks are equal if their shape, tile and visible pairs are. Comparing synchronises.

    Reference:
        Dao et al., "FlashAttention" (2022), section 3.3: block-sparse FlashAttention.
    """

    shape: Shape
    tile: tuple[int, int]
    row_offsets: Tensor
    columns: Tensor
    kinds: Tensor
    column_offsets: Tensor
    rows: Tensor
    row_kinds: Tensor
    tile_masks: Tensor

    @classmethod
    def from_dense(cls, mask: Tensor, tile: tuple[int, int] = (128, 128)) -> BlockMask:
        """The tiles of a mask that is there as a matrix.

        Args:
            mask: bool `[seq_q, seq_k]` or `[batch, heads, seq_q, seq_k]`, True = visible; a batch or heads of 1 stands
                for any number.
            tile: `(tile_q, tile_k)`, multiples of 16. Stored are multiples of it that 64 divides.

        Raises:
            TypeError: mask is not a bool tensor, or tile no pair of ints.
            ValueError: mask has another rank, or tile is no multiple of 16.
        """
        check_tensors(mask=mask)
        mask = _as_four("mask", mask, "seq_q, seq_k")
        batch, heads, seq_q, seq_k = mask.shape
        grid = Grid((batch, heads, seq_q, seq_k), stored_tile(tile))
        return cls._built(grid, mask.device, lambda tiles: Bounds(tiles.everywhere()), _dense_elements(mask, grid))

    @classmethod
    def from_predicate(
        cls,
        predicate: Predicate,
        batch: int | None,
        heads: int | None,
        seq_q: int,
        seq_k: int,
        tile: tuple[int, int] = (128, 128),
        device: torch.device | str | None = None,
    ) -> BlockMask:
        """The tiles of a mask that is given by a function of the indices.

        Every pair is asked for, some tiles at a time: time grows with `seq_q · seq_k`, memory with the result alone.

        Args:
            predicate: `predicate(batch, head, q_index, k_index)` of four int64 tensors that broadcast against one
                another, gives bool that broadcasts to the same, True = visible. A function of element-wise operations
                and of look-ups like `ids[batch, q_index]` will do; it is what FlexAttention calls a mask_mod.
            batch: number of batch entries, None where the mask is the same for all.
            heads: number of heads, likewise.
            seq_q: number of queries.
            seq_k: number of keys.
            tile: `(tile_q, tile_k)`, multiples of 16.
            device: where it is evaluated and the result lies.

        Raises:
            TypeError: an argument has the wrong type, or predicate gives something else than a bool tensor.
            ValueError: a size is negative, tile no multiple of 16, or the result does not broadcast.
        """
        if not callable(predicate):
            raise TypeError(
                f"predicate: expected a function of batch, head, q_index, k_index, got {type(predicate).__name__}; "
                "a mask that is there already goes to BlockMask.from_dense"
            )
        sizes = {"batch": 1 if batch is None else batch, "heads": 1 if heads is None else heads}
        shape = checked_shape(**sizes, seq_q=seq_q, seq_k=seq_k)
        grid = Grid(shape, stored_tile(tile))
        elements = predicate_elements(predicate, grid)
        return cls._built(grid, torch.device(device or "cpu"), lambda tiles: Bounds(tiles.everywhere()), elements)

    @classmethod
    def _built(
        cls, grid: Grid, device: torch.device, bounds: Callable[[Tiles], Bounds], elements: Elements
    ) -> BlockMask:
        """From what is known of the tiles of a grid, and the elements of the others."""
        return cls(grid.shape, grid.tile, *build(grid, device, bounds, elements))

    @property
    def device(self) -> torch.device:
        return self.row_offsets.device

    @property
    def grid(self) -> Grid:
        return Grid(self.shape, self.tile)

    def to(self, device: torch.device | str) -> BlockMask:
        """The same mask on another device; itself where it is there already."""
        if torch.device(device) == self.device:
            return self
        return BlockMask(self.shape, self.tile, *(tensor.to(device) for tensor in _tensors(self)))

    def cuda(self, device: torch.device | str = "cuda") -> BlockMask:
        return self.to(device)

    def cpu(self) -> BlockMask:
        return self.to("cpu")

    def density(self) -> float:
        """Share of the pairs that lie in the stored tiles: what is computed, of what dense attention computes.

        Synchronises.
        """
        batch, heads, seq_q, seq_k = self.shape
        pairs = batch * heads * seq_q * seq_k
        return int(self.grid.pairs(self._cells()).sum()) / pairs if pairs else 0.0

    def sparsity(self) -> float:
        """`1 - density()`."""
        return 1.0 - self.density()

    def to_dense(self) -> Tensor:
        """bool `[batch, heads, seq_q, seq_k]`, True = visible. Takes the memory of that matrix several times."""
        (batch, heads, seq_q, seq_k), (tile_q, tile_k), grid = self.shape, self.tile, self.grid
        # Empty and full tiles become patterns like any other.
        ends = self.tile_masks.new_tensor([0, 1]).view(2, 1, 1).expand(2, tile_q, tile_k)
        masks = torch.cat((self.tile_masks, ends))
        tiles = masks[self._kind_table()].view(batch * heads, grid.tiles_q, grid.tiles_k, tile_q, tile_k)
        dense = tiles.transpose(2, 3).reshape(batch, heads, grid.tiles_q * tile_q, grid.tiles_k * tile_k)
        return dense[..., :seq_q, :seq_k].bool()

    def fits(self, batch: int, heads: int, seq_q: int, seq_k: int) -> str | None:
        """Why the mask does not serve a call of these sizes, in words; None where it does."""
        for name, own, other in zip(("batch", "heads"), self.shape, (batch, heads)):
            if own not in (1, other):
                return f"it was built for {name} {own}, the call has {other}; build it for {other}, or for 1 = any"
        for name, own, other in zip(("seq_q", "seq_k"), self.shape[2:], (seq_q, seq_k)):
            if own != other:
                return f"it was built for {name} {own}, the call has {other}; build it for {other}"
        return None

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, BlockMask):
            return NotImplemented
        if self.shape != other.shape or self.tile != other.tile:
            return False
        # The transposed lists follow from these.
        names = ("row_offsets", "columns", "kinds", "tile_masks")
        return all(torch.equal(getattr(self, name), getattr(other, name).to(self.device)) for name in names)

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return (
            f"BlockMask(shape={self.shape}, tile={self.tile}, entries={self.columns.shape[0]} of "
            f"{self.grid.rows * self.grid.tiles_k}, patterns={self.tile_masks.shape[0]}, device={str(self.device)!r})"
        )

    def _cells(self) -> Tensor:
        """The number of each entry's tile, `[entries]` int64."""
        row = torch.arange(self.grid.rows, device=self.device)
        lengths = self.row_offsets.diff()
        row = torch.repeat_interleave(row, lengths, output_size=self.columns.shape[0])
        return row * self.grid.tiles_k + self.columns

    def _kind_table(self) -> Tensor:
        """The pattern of every tile, `[rows · tiles_k]` int64: `patterns` of an empty, `patterns + 1` of a full one."""
        patterns = self.tile_masks.shape[0]
        table = torch.full((self.grid.rows * self.grid.tiles_k,), patterns, device=self.device)
        table[self._cells()] = torch.where(self.kinds == FULL, patterns + 1, self.kinds).long()
        return table


def _tensors(mask: BlockMask) -> tuple[Tensor, ...]:
    return tuple(getattr(mask, field.name) for field in dataclasses.fields(mask)[2:])


# torch.compile and torch.func see the tensors of a mask, and its sizes as constants.
pytree.register_pytree_node(
    BlockMask,
    lambda mask: (list(_tensors(mask)), (mask.shape, mask.tile)),
    lambda tensors, sizes: BlockMask(*sizes, *tensors),
    serialized_type_name="flashtile.BlockMask",
)


def _dense_elements(mask: Tensor, grid: Grid) -> Elements:
    """The elements out of a bool `[batch, heads, seq_q, seq_k]`."""
    (tile_q, tile_k), (_, _, seq_q, seq_k) = grid.tile, grid.shape
    if grid.sticks_out:
        mask = torch.nn.functional.pad(mask, (0, -seq_k % tile_k, 0, -seq_q % tile_q))
    by_tile = mask.reshape(grid.rows, tile_q, grid.tiles_k, tile_k).transpose(1, 2)
    return lambda tiles: by_tile[tiles.row, tiles.column]


def checked_shape(batch: int, heads: int, seq_q: int, seq_k: int) -> Shape:
    for name, size in (("batch", batch), ("heads", heads), ("seq_q", seq_q), ("seq_k", seq_k)):
        if isinstance(size, bool) or not isinstance(size, int):
            raise TypeError(f"{name}: expected an int, got {size!r}; pass a number")
        if size < 0:
            raise ValueError(f"{name}: expected a size of at least 0, got {size}; pass the length of the call")
    return batch, heads, seq_q, seq_k


def stored_tile(tile: tuple[int, int]) -> tuple[int, int]:
    """The tile of the lists for that of a user."""
    ints = isinstance(tile, (tuple, list)) and all(isinstance(n, int) and not isinstance(n, bool) for n in tile)
    if not ints or len(tile) != 2:
        raise TypeError(f"tile: expected a pair of ints (tile_q, tile_k), got {tile!r}; (128, 128) is usual")
    if not all(size > 0 and size % USER_TILE == 0 for size in tile):
        raise ValueError(f"tile: expected multiples of {USER_TILE}, got {tuple(tile)}; round them up")
    return math.lcm(tile[0], STORED_TILE), math.lcm(tile[1], STORED_TILE)


def _as_four(name: str, mask: Tensor, dims: str) -> Tensor:
    """A bool matrix, or one for each batch entry and head, with all four dimensions."""
    if mask.dtype is not torch.bool:
        raise TypeError(f"{name}: expected dtype bool, True = visible, got {mask.dtype}; use {name} != 0")
    if mask.dim() not in (2, 4):
        raise ValueError(
            f"{name}: expected shape [{dims}] or [batch, heads, {dims}], got {tuple(mask.shape)}; "
            "a batch or heads of 1 stands for any number"
        )
    return mask if mask.dim() == 4 else mask[None, None]
