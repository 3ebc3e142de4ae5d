"""Tables in the Hopper kernels: a bias or a boolean mask that broadcasts to the scores.

TMA brings the tiles of a bias of queries × keys where it can (`configs.moves_by_tma`), with the keys of a forward and
the queries of a backward, whose barrier says that they are there. `ldmatrix` hands each thread the elements of its own
scores, four times two in an instruction.

Of other tables threads read the elements that belong to their own scores from device memory. A dimension of size 1 is
not read over and over: without rows, a padding mask `[batch, 1, 1, seq_k]` is one vector `[N]` for all rows of a tile.
"""

from typing import Any, NamedTuple

from flashtile._backends.gluon import gl, gluon, tma_load
from flashtile.ops.attention.hopper.pieces import matrix


class TableTiles(NamedTuple):
    """The tiles of bias and mask that belong to a tile of scores, and what a score function reads for it, a tuple; each
    a placeholder where a call has nothing of the kind."""

    bias: Any
    mask: Any
    read: Any


class MovedBias(NamedTuple):
    """A bias that TMA brings: its descriptor, and `parameters.TableNumbers`."""

    descriptor: Any
    numbers: Any


@gluon.jit
def table_of_head(pointer, numbers, sequence, head):
    """A pointer to the first element of a head of a sequence; None where there is no table. `numbers`:
    `parameters.TableNumbers`."""
    first = None
    if pointer is not None:
        batch = gl.to_tensor(sequence).to(gl.int64) * numbers.stride_batch
        first = pointer + (batch + gl.to_tensor(head).to(gl.int64) * numbers.stride_head)
    return first


@gluon.jit
def make_bias_tiles(desc, STAGES: gl.constexpr, PARTS: gl.constexpr):
    """Room for the tiles of a bias that TMA brings: `PARTS` in each stage of a ring of keys or queries."""
    return gl.allocate_shared_memory(desc.dtype, [STAGES * PARTS] + desc.block_shape, desc.layout)


@gluon.constexpr_function
def bias_bytes(tiles, PARTS):
    """Bytes of these tiles in a stage; 0 without any."""
    return 0 if tiles is None else tiles.dtype.primitive_bitwidth // 8 * PARTS * tiles.shape[-2] * tiles.shape[-1]


@gluon.jit
def move_bias(
    bias, tiles, place, sequence, head, query, key, barrier, PARTS: gl.constexpr, ALONG_KEYS: gl.constexpr
):  # fmt: skip
    """Producer: starts the loads of the tiles of stage `place` of a head's bias, from `query` and `key` on, beside each
    other along queries or keys. Where a bias broadcasts along sequences or heads, its descriptor has one of them."""
    sequence = gl.where(bias.numbers.stride_batch == 0, 0, sequence)
    head = gl.where(bias.numbers.stride_head == 0, 0, head)
    for part in gl.static_range(PARTS):
        tma_load(bias.descriptor, (sequence, head, query, key), barrier, tiles.index(place * PARTS + part))
        if ALONG_KEYS:
            key += tiles.shape[-1]
        else:
            query += tiles.shape[-2]


@gluon.jit
def moved_bias(place, first_query, QUERIES: gl.constexpr, layout: gl.constexpr, TRANSPOSED: gl.constexpr):
    """`QUERIES` rows from `first_query` on of a tile that TMA brought, in eights as `load_table` returns them."""
    tile = matrix(place, place.shape[-2], place.shape[-1])
    if QUERIES < place.shape[-2]:
        tile = tile.slice(first_query, QUERIES)
    if TRANSPOSED:
        tile = tile.permute([1, 0])
    return in_eights(tile.load(layout))


@gluon.jit
def load_table(
    pointer, numbers, STRIDE_COLUMN: gl.constexpr, first_query, first_key, QUERIES: gl.constexpr, KEYS: gl.constexpr,
    layout: gl.constexpr, OTHER: gl.constexpr, TRANSPOSED: gl.constexpr,
):  # fmt: skip
    """The tile of a head's table (`table_of_head`) from `first_query` and `first_key` on, `OTHER` past its end.
    `STRIDE_COLUMN`: 0 where columns of the table broadcast.

    It belongs to scores `[QUERIES, KEYS]`, TRANSPOSED `[KEYS, QUERIES]`, in the layout of a product, and comes in
    eights of their columns, `[rows, columns / 8, 8]` (`in_eights`), with 1 in the place of what broadcasts.

    Which eight it is, is known when the kernel compiles. So a thread has an address for each of its rows, and constants
    for what lies beside.
    """
    ROWS: gl.constexpr = KEYS if TRANSPOSED else QUERIES
    COLUMNS: gl.constexpr = QUERIES if TRANSPOSED else KEYS
    eights: gl.constexpr = in_eights(gl.zeros([ROWS, COLUMNS], gl.int32, layout)).type.layout
    down = gl.arange(0, ROWS, gl.SliceLayout(1, gl.SliceLayout(2, eights)))[:, None, None]
    eight = gl.arange(0, COLUMNS // 8, gl.SliceLayout(0, gl.SliceLayout(2, eights)))[None, :, None]
    within = gl.arange(0, 8, gl.SliceLayout(0, gl.SliceLayout(1, eights)))[None, None, :]
    inside = None
    # Wide arithmetic for the tile's first element and for its rows; columns lie near each other.
    if numbers.stride_row is not None:
        pointer += first_query.to(gl.int64) * numbers.stride_row
        if TRANSPOSED:
            pointer += within.to(gl.int64) * numbers.stride_row
            pointer += eight.to(gl.int64) * (8 * numbers.stride_row)
        else:
            pointer += down.to(gl.int64) * numbers.stride_row
        if numbers.rows is not None:
            if TRANSPOSED:
                inside = within < numbers.rows - first_query - 8 * eight
            else:
                inside = down < numbers.rows - first_query
    if STRIDE_COLUMN > 0:
        pointer += first_key.to(gl.int64) * STRIDE_COLUMN
        if TRANSPOSED:
            pointer += down * STRIDE_COLUMN
        else:
            pointer += within * STRIDE_COLUMN
            pointer += eight * (8 * STRIDE_COLUMN)
        if numbers.columns is not None:
            if TRANSPOSED:
                before_end = down < numbers.columns - first_key
            else:
                before_end = within < numbers.columns - first_key - 8 * eight
            if inside is None:
                inside = before_end
            else:
                inside = inside & before_end
    if inside is None:
        tile = gl.load(pointer)
    else:
        tile = gl.load(pointer, mask=inside, other=OTHER)
    return tile


@gluon.jit
def last_shown(pointer, numbers, STRIDE_COLUMN: gl.constexpr, keys):
    """How many keys there are up to the last one that a mask shows whose rows are all alike, from its first element on.
    By one warp, from behind, so that a mask without padding is done after the first step."""
    STEP: gl.constexpr = 128
    place = gl.arange(0, STEP, gl.BlockedLayout([STEP // 32], [32], [1], [0]))
    if numbers.columns is not None:
        keys = gl.minimum(keys, numbers.columns)
    end = keys
    shown = keys * 0
    while (end > 0) & (shown == 0):
        begin = (end - 1) // STEP * STEP
        key = begin + place
        found = gl.load(pointer + key.to(gl.int64) * STRIDE_COLUMN, mask=key < keys, other=0)
        shown = gl.max(gl.where(found != 0, key + 1, 0), 0)
        end = begin
    return shown


@gluon.jit
def in_eights(x):
    """`[R, C]` as `[R, C / 8, 8]`: each thread keeps what it holds."""
    return gl.reshape(x, [x.shape[0], x.shape[1] // 8, 8])


@gluon.jit
def add_bias(scores, bias, unit):
    """Scores `[R, C]` with a tile of a bias, of which a number 1 is `unit` in the units of scores."""
    changed = gl.reshape(in_eights(scores) + bias.to(gl.float32) * unit, scores.shape)
    return gl.convert_layout(changed, scores.type.layout, assert_trivial=True)


@gluon.jit
def hide_by_mask(scores, mask):
    """Scores `[R, C]`, -inf where a tile of a mask, as bytes, is 0."""
    changed = gl.reshape(gl.where(mask != 0, in_eights(scores), float("-inf")), scores.shape)
    return gl.convert_layout(changed, scores.type.layout, assert_trivial=True)
