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
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from flashtile.ops.attention.intervals import tile_bounds
from flashtile.ops.attention.mask_sources import (
    Predicate,
    Source,
    anywhere,
    as_four,
    both,
    check_count,
    check_flex,
    checked_elements,
    checked_layout,
    checked_shape,
    checked_tiles,
    either,
    empty_and_full,
    flex_blocks,
    flex_list,
    flex_source,
    inverted,
    kinds_source,
    larger_tile,
    layout_source,
    looked_up,
    mapped,
    resolved_device,
    stored_tile,
)
from flashtile.ops.attention.spec import AttentionSpec, SideInputs
from flashtile.ops.attention.tile_lists import (
    FULL,
    Bounds,
    Elements,
    Grid,
    Places,
    Shape,
    Tiles,
    build,
    build_with_room,
)
from flashtile.ops.common.checks import check_function, check_tensors

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask as FlexBlockMask


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class BlockMask:
    """Block-sparse visibility: which pairs of query and key attention may use, stored by tiles.

    Create one with `from_dense`, `from_layout`, `from_predicate`, `from_flex`, or a function of `flashtile.patterns`. A
    mask is immutable. Using it reads nothing on the host. Building it does, except with `max_partial_tiles`.

    Attributes:
        shape: `(batch, heads, seq_q, seq_k)`; a batch or heads of 1 fits any number.
        tile: `(tile_q, tile_k)` of the lists, multiples of 64.
        lists: one int32 tensor with row_offsets, column_offsets, columns, kinds, rows, row_kinds, row_ranks, row_order,
            row_bits and column_bits one after another, so that a call passes a single tensor. The attributes of these
            names are views of it.
        tile_masks: `[patterns, tile_q, tile_k]` uint8, 1 = visible, 0 past the ends of the sequences; all are
            different, unless the mask was built with `max_partial_tiles`.

    Masks combine with `&`, `|` and `~`. Two masks are equal if their shape, tile and visible pairs are equal. Comparing
    them synchronises.

    Reference:
        Dao et al., "FlashAttention" (2022), section 3.3: block-sparse FlashAttention.
    """

    shape: Shape
    tile: tuple[int, int]
    lists: Tensor
    tile_masks: Tensor

    @classmethod
    def from_dense(cls, mask: Tensor, tile: tuple[int, int] = (128, 128)) -> BlockMask:
        """A block mask from a mask that is stored as a matrix.

        Args:
            mask: bool `[seq_q, seq_k]` or `[batch, heads, seq_q, seq_k]`, True = visible; a batch or heads of 1 fits
                any number.
            tile: `(tile_q, tile_k)`, multiples of 16. The stored tile is the smallest multiple of it that 64 divides.

        Raises:
            TypeError: mask is not a bool tensor, or tile is no pair of ints.
            ValueError: mask has another rank, or tile is not a multiple of 16.
        """
        check_tensors(mask=mask)
        mask = as_four("mask", mask, "seq_q, seq_k")
        batch, heads, seq_q, seq_k = mask.shape
        grid = Grid((batch, heads, seq_q, seq_k), stored_tile(tile))
        return from_bounds(grid, mask.device, anywhere, looked_up(mask, grid.tile))

    @classmethod
    def from_layout(
        cls,
        layout: Tensor,
        tile: tuple[int, int],
        seq_q: int,
        seq_k: int,
        element_mask: Tensor | None = None,
    ) -> BlockMask:
        """A block mask from a coarse layout, which says for each tile whether it is visible.

        Args:
            layout: bool or integer `[ceil(seq_q / tile_q), ceil(seq_k / tile_k)]`, or with batch and heads in front; a
                tile is visible if its element is not 0.
            tile: `(tile_q, tile_k)` of the layout, multiples of 16; the first block-sparse FlashAttention had (16,
                256).
            seq_q: number of queries; the last tiles may extend past it.
            seq_k: number of keys.
            element_mask: which pairs of the visible tiles are visible; None = all. A bool tensor, either with every
                pair, as in `from_dense`, or with the visible tiles in the order of `layout.nonzero()`,
                `[tiles, tile_q, tile_k]`.

        Raises:
            TypeError: a dtype or an argument's type is wrong.
            ValueError: tile is not a multiple of 16, or a shape does not fit the others.
        """
        stored = stored_tile(tile)
        named = checked_layout(layout, tile, *checked_shape(1, 1, seq_q, seq_k)[2:])
        batch, heads = named.shape[:2]
        source = layout_source(named, tile, stored)
        if element_mask is not None:
            check_tensors(element_mask=element_mask)
            if element_mask.dim() == 3:
                source = layout_source(named, tile, stored, checked_tiles(element_mask, named, tile))
            else:
                element_mask = checked_elements(element_mask, named, seq_q, seq_k)
                batch, heads = torch.broadcast_shapes((batch, heads), element_mask.shape[:2])
                source = both(source, Source(anywhere, looked_up(element_mask, stored)))
        return from_bounds(Grid((batch, heads, seq_q, seq_k), stored), named.device, *source)

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
        max_partial_tiles: int | None = None,
    ) -> BlockMask:
        """A block mask from a function of the indices, as FlexAttention's `mask_mod`.

        Whole tiles are examined first, by interval arithmetic: comparisons, arithmetic, logic, `//`, `%`, `torch.where`
        and look-ups tell of most tiles whether they are empty or full. The function is then evaluated for every pair of
        the others, some tiles at a time. Operations without a rule are allowed, and leave more tiles to be evaluated.

        Args:
            predicate: `predicate(batch, head, q_index, k_index)` takes four int64 scalars, and returns a bool tensor
                without dimensions, True = visible. It is plain Python with PyTorch operations and look-ups such as
                `ids[batch, q_index]`. It is mapped by `torch.vmap`, so it must not branch on the indices: use `&`, `|`,
                `~` and `torch.where`.
            batch: number of batch entries, None if the mask is the same for all.
            heads: number of heads, None if the mask is the same for all.
            seq_q: number of queries.
            seq_k: number of keys.
            tile: `(tile_q, tile_k)`, multiples of 16.
            device: where the function is evaluated; also the device of the mask.
            max_partial_tiles: room for so many tiles that are not known to be empty or full, of all batch entries and
                heads. With it nothing is read on the host: the mask is built without waiting for the GPU, also while a
                CUDA graph is captured. It has a pattern for each of these tiles, and lists with room for all tiles.
                Too little room raises on a CPU; on a GPU it is an assertion of the device, as an index out of range
                is. Without it, the tiles are counted on the host.

        Raises:
            TypeError: an argument has the wrong type, or predicate returns something else than a bool tensor, or
                branches on an index.
            ValueError: a size is negative, tile is not a multiple of 16, the result has dimensions, or
                max_partial_tiles is too small.

        Reference:
            Moore, "Interval Analysis" (1966); PyTorch's FlexAttention for the meaning of the function.
        """
        instead = "a mask that is there already goes to BlockMask.from_dense"
        check_function("predicate", predicate, "batch, head, q_index, k_index", instead)
        sizes = {"batch": 1 if batch is None else batch, "heads": 1 if heads is None else heads}
        shape = checked_shape(**sizes, seq_q=seq_q, seq_k=seq_k)
        grid, device = Grid(shape, stored_tile(tile)), resolved_device(device)
        elements = mapped(predicate, grid)
        if math.prod(shape):
            first = torch.zeros(1, dtype=torch.int64, device=device)
            mapped(predicate, grid._replace(tile=(1, 1)))(Tiles(*[first] * 8))  # raises what the function does wrong
        return from_bounds(grid, device, tile_bounds(predicate), elements, max_partial_tiles)

    @classmethod
    def from_flex(cls, block_mask: FlexBlockMask) -> BlockMask:
        """The same mask as one of FlexAttention, whose mask_mod is evaluated for the pairs of its partial blocks.

        Args:
            block_mask: a `torch.nn.attention.flex_attention.BlockMask` whose BLOCK_SIZE are multiples of 16.

        Raises:
            TypeError: the argument is something else.
            ValueError: a block size is not a multiple of 16, or it is a slice that is no mask of its own yet.
        """
        check_flex(block_mask)
        tile_q, tile_k = block_mask.BLOCK_SIZE
        seq_q, seq_k = block_mask.shape[-2:]
        tiles_k = -(-seq_k // tile_k)
        full = flex_blocks(block_mask.full_kv_num_blocks, block_mask.full_kv_indices, tiles_k)
        partial = flex_blocks(block_mask.kv_num_blocks, block_mask.kv_indices, tiles_k)
        assert partial is not None
        grid = Grid((*partial.shape[:2], seq_q, seq_k), stored_tile((tile_q, tile_k)))
        full = torch.zeros_like(partial) if full is None else full
        return from_bounds(grid, partial.device, *flex_source(block_mask, partial, full, grid))

    def to_flex(self) -> FlexBlockMask:
        """The same mask for FlexAttention. Its mask_mod reads `tile_masks`.

        The lists of FlexAttention, and the table of kinds that mask_mod reads, take `tiles_q · tiles_k` integers for
        each batch entry and head.
        """
        from torch.nn.attention import flex_attention

        batch, heads, seq_q, seq_k = self.shape
        (tile_q, tile_k), patterns = self.tile, self.tile_masks.shape[0]
        table = self.kind_table()
        masks = self.masks_with_ends() != 0

        def mask_mod(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
            # If the mask is shared, batch entry and head are the call's.
            kind = table[b * (batch > 1), h * (heads > 1), q // tile_q, k // tile_k]
            return masks[kind, q % tile_q, k % tile_k]

        lists = [flex_list(tiles) for tiles in (table < patterns, table == patterns + 1)]
        return flex_attention.BlockMask.from_kv_blocks(
            *lists[0], *lists[1], BLOCK_SIZE=self.tile, mask_mod=mask_mod, seq_lengths=(seq_q, seq_k)
        )

    @property
    def device(self) -> torch.device:
        return self.lists.device

    @property
    def grid(self) -> Grid:
        """How many tiles and rows of tiles there are."""
        return Grid(self.shape, self.tile)

    @property
    def entries(self) -> int:
        """Tiles for which the lists have room: more than are stored if the mask was built with `max_partial_tiles`."""
        places = self._places
        return places.kinds - places.columns

    @property
    def row_offsets(self) -> Tensor:
        """`[batch · heads · tiles_q + 1]`: where the entries of each row of tiles start."""
        return self._part(self._places.row_offsets, self.grid.rows + 1)

    @property
    def column_offsets(self) -> Tensor:
        """`[batch · heads · tiles_k + 1]`: where the entries of each column start, in the lists by column."""
        return self._part(self._places.column_offsets, self.grid.columns + 1)

    @property
    def columns(self) -> Tensor:
        """`[entries]`: the key tile, ascending within a row."""
        return self._part(self._places.columns, self.entries)

    @property
    def kinds(self) -> Tensor:
        """`[entries]`: -1 if every pair of the tile is visible, otherwise its index in `tile_masks`."""
        return self._part(self._places.kinds, self.entries)

    @property
    def rows(self) -> Tensor:
        """`[entries]`: the same entries sorted by key tile: the query tile, ascending within a column."""
        return self._part(self._places.rows, self.entries)

    @property
    def row_kinds(self) -> Tensor:
        """`[entries]`: the kinds in the order of `rows`."""
        return self._part(self._places.row_kinds, self.entries)

    @property
    def row_ranks(self) -> Tensor:
        """`[entries]`: in the order of `rows`, how many entries come before in the row."""
        return self._part(self._places.row_ranks, self.entries)

    @property
    def row_order(self) -> Tensor:
        """`[batch · heads · tiles_q]`: the rows of tiles of each batch entry and head, the shortest first."""
        return self._part(self._places.row_order, self.grid.rows)

    @property
    def row_bits(self) -> Tensor:
        """`[patterns, tile_q, tile_k / 32]`: `tile_masks` in bits; bit `c` of word `w` is key `32·w + c`."""
        patterns, tile_q, tile_k = self.tile_masks.shape
        start, words = self._places.row_bits, patterns * tile_q * tile_k // 32
        return self._part(start, words).view(patterns, tile_q, tile_k // 32)

    @property
    def column_bits(self) -> Tensor:
        """`[patterns, tile_k, tile_q / 32]`: the same bits by key."""
        patterns, tile_q, tile_k = self.tile_masks.shape
        start, words = self._places.column_bits, patterns * tile_q * tile_k // 32
        return self._part(start, words).view(patterns, tile_k, tile_q // 32)

    @property
    def _places(self) -> Places:
        return Places.of(self.grid, self.lists.shape[0], self.tile_masks.shape[0])

    def _part(self, start: int, length: int) -> Tensor:
        return self.lists[start : start + length]

    def to(self, device: torch.device | str) -> BlockMask:
        """The same mask on another device; the mask itself if it is already there."""
        if torch.device(device) == self.device:
            return self
        return BlockMask(self.shape, self.tile, self.lists.to(device), self.tile_masks.to(device))

    def cuda(self, device: torch.device | str = "cuda") -> BlockMask:
        return self.to(device)

    def cpu(self) -> BlockMask:
        return self.to("cpu")

    def compact(self) -> BlockMask:
        """The same mask with lists that have no room left, and each pattern once, for one that was built with
        `max_partial_tiles`. Synchronises."""
        return self.with_tile(self.tile)

    def with_tile(self, tile: tuple[int, int]) -> BlockMask:
        """The same pairs in larger tiles, of which there are fewer. Synchronises.

        Raises:
            ValueError: tile is no multiple of the mask's own.
        """
        grid = Grid(self.shape, larger_tile(tile, self.tile))
        return from_bounds(grid, self.device, *self._source(grid.tile))

    def density(self) -> float:
        """Share of all pairs in the stored tiles: the work relative to dense attention. Synchronises."""
        pairs, cells = math.prod(self.shape), self._cells()
        stored = torch.where(cells < self._tiles, self.grid.pairs(cells), 0)
        return int(stored.sum()) / pairs if pairs else 0.0

    def sparsity(self) -> float:
        """`1 - density()`."""
        return 1.0 - self.density()

    def to_dense(self) -> Tensor:
        """bool `[batch, heads, seq_q, seq_k]`, True = visible. Needs several times the memory of that matrix."""
        (batch, heads, seq_q, seq_k), (tile_q, tile_k), grid = self.shape, self.tile, self.grid
        tiles = self.masks_with_ends()[self.kind_table()].view(
            batch * heads, grid.tiles_q, grid.tiles_k, tile_q, tile_k
        )
        dense = tiles.transpose(2, 3).reshape(batch, heads, grid.tiles_q * tile_q, grid.tiles_k * tile_k)
        return dense[..., :seq_q, :seq_k].bool()

    def fits(self, batch: int, heads: int, seq_q: int, seq_k: int) -> str | None:
        """Why the mask does not fit a call of these sizes, in words; None if it does."""
        for name, own, other in zip(("batch", "heads"), self.shape, (batch, heads)):
            if own not in (1, other):
                return f"it was built for {name} {own}, the call has {other}; build it for {other}, or for 1 = any"
        for name, own, other in zip(("seq_q", "seq_k"), self.shape[2:], (seq_q, seq_k)):
            if own != other:
                return f"it was built for {name} {own}, the call has {other}; build it for {other}"
        return None

    def __and__(self, other: BlockMask) -> BlockMask:
        """The pairs that both masks show, in tiles that are multiples of both masks' tiles.

        Building reads values on the host, as every builder does. A batch or heads of 1 fits any number.

        Raises:
            ValueError: the masks differ in seq_q, seq_k, batch, heads or device.
        """
        return self._combined(other, "&", both) if isinstance(other, BlockMask) else NotImplemented

    def __or__(self, other: BlockMask) -> BlockMask:
        """The pairs that one of the masks shows or both do; otherwise as `&`."""
        return self._combined(other, "|", either) if isinstance(other, BlockMask) else NotImplemented

    def __invert__(self) -> BlockMask:
        """The pairs that the mask hides."""
        return from_bounds(self.grid, self.device, *inverted(self._source(self.tile)))

    def _combined(self, other: BlockMask, sign: str, combine: Callable[[Source, Source], Source]) -> BlockMask:
        names = ("batch", "heads", "seq_q", "seq_k")
        for number, (name, own, its) in enumerate(zip(names, self.shape, other.shape)):
            if own != its and (number > 1 or 1 not in (own, its)):
                raise ValueError(
                    f"{sign}: expected two masks of one size, got {name} {own} and {its}; build both for the same call"
                )
        if self.device != other.device:
            raise ValueError(
                f"{sign}: expected two masks on one device, got {self.device} and {other.device}; use mask.to(device)"
            )
        batch, heads = (max(sizes) if min(sizes) else 0 for sizes in zip(self.shape[:2], other.shape[:2]))
        tile = math.lcm(self.tile[0], other.tile[0]), math.lcm(self.tile[1], other.tile[1])
        grid = Grid((batch, heads, *self.shape[2:]), tile)
        return from_bounds(grid, self.device, *combine(self._source(tile), other._source(tile)))

    def _source(self, tile: tuple[int, int]) -> Source:
        """The parts that a mask with larger tiles is built from."""
        return kinds_source(self.kind_table(), self.masks_with_ends().bool(), tile)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, BlockMask):
            return NotImplemented
        if self.shape != other.shape or self.tile != other.tile:
            return False
        its = other.to(self.device)
        if torch.equal(self.lists, its.lists) and torch.equal(self.tile_masks, its.tile_masks):
            return True
        own, its = self.compact(), its.compact()
        return torch.equal(own.lists, its.lists) and torch.equal(own.tile_masks, its.tile_masks)

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return (
            f"BlockMask(shape={self.shape}, tile={self.tile}, entries={self.entries} of "
            f"{self.grid.rows * self.grid.tiles_k}, patterns={self.tile_masks.shape[0]}, device={str(self.device)!r})"
        )

    def _cells(self) -> Tensor:
        """The number of each entry's tile, `[entries]` int64; the number of all tiles where there is room left."""
        entry = torch.arange(self.entries, device=self.device)
        row = torch.searchsorted(self.row_offsets, entry, right=True) - 1
        return torch.where(row < self.grid.rows, row * self.grid.tiles_k + self.columns, self._tiles)

    @property
    def _tiles(self) -> int:
        return self.grid.rows * self.grid.tiles_k

    def masks_with_ends(self) -> Tensor:
        """`tile_masks`, and after them an empty and a full one."""
        return torch.cat((self.tile_masks, empty_and_full(self.tile, self.device)))

    def kind_table(self) -> Tensor:
        """The number in `masks_with_ends` of each tile, `[batch, heads, tiles_q, tiles_k]` int64."""
        patterns = self.tile_masks.shape[0]
        table = torch.full((self._tiles + 1,), patterns, device=self.device)
        kinds = torch.where(self.kinds == FULL, patterns + 1, self.kinds).long()
        table = table.index_put((self._cells(),), kinds)[:-1]
        return table.view(*self.shape[:2], self.grid.tiles_q, self.grid.tiles_k)


def call_mask(side: SideInputs, spec: AttentionSpec) -> BlockMask | None:
    """The block mask of a call; None without one."""
    if side.block_lists is None or side.block_patterns is None or spec.block_shape is None:
        return None
    batch, heads, tile_q, tile_k = spec.block_shape
    shape = batch, heads, side.max_seqlen_q, side.max_seqlen_k
    return BlockMask(shape, (tile_q, tile_k), side.block_lists, side.block_patterns)


# torch.compile and torch.func see the tensors of a mask, and its sizes as constants.
pytree.register_pytree_node(
    BlockMask,
    lambda mask: ([mask.lists, mask.tile_masks], (mask.shape, mask.tile)),
    lambda tensors, sizes: BlockMask(*sizes, *tensors),
    serialized_type_name="flashtile.BlockMask",
)


def from_bounds(
    grid: Grid,
    device: torch.device,
    bounds: Callable[[Tiles], Bounds],
    elements: Elements,
    max_partial_tiles: int | None = None,
) -> BlockMask:
    """A mask from what is known of the tiles of a grid, and the elements of those in doubt."""
    if max_partial_tiles is None:
        return BlockMask(grid.shape, grid.tile, *build(grid, device, bounds, elements))
    check_count("max_partial_tiles", max_partial_tiles, 0, "it is a number of tiles, or None")
    return BlockMask(grid.shape, grid.tile, *build_with_room(grid, device, bounds, elements, max_partial_tiles))
