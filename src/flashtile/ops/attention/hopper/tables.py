"""Tables in the Hopper kernels: a bias or a boolean mask that broadcasts to the scores.

Threads read the elements that belong to their own scores. A dimension of size 1 is not read over and over: without
rows, a padding mask `[batch, 1, 1, seq_k]` is one vector `[N]` for all rows of a tile.
"""

from typing import Any, NamedTuple

from flashtile._backends.gluon import gl, gluon


class Table(NamedTuple):
    """A table of all heads, or, with `pointer` at its first element, that of one head of one sequence.

    Strides are in elements. `stride_row` is None and `STRIDE_COLUMN` 0 where a dimension broadcasts. `rows` and
    `columns` say where the table ends; None where no tile ends past it. A call without such a table has all None.
    """

    pointer: Any
    stride_batch: Any
    stride_head: Any
    stride_row: Any
    STRIDE_COLUMN: Any
    rows: Any
    columns: Any


@gluon.jit
def table_of_head(table, sequence, head):
    """A pointer to the first element of a head of a sequence."""
    return table.pointer + (sequence.to(gl.int64) * table.stride_batch + head.to(gl.int64) * table.stride_head)


@gluon.jit
def load_table(
    table, pointer, first_query, first_key, QUERIES: gl.constexpr, KEYS: gl.constexpr, layout: gl.constexpr,
    OTHER: gl.constexpr, TRANSPOSED: gl.constexpr,
):  # fmt: skip
    """The tile of a head's table from `first_query` and `first_key` on, `OTHER` past its end.

    `[QUERIES, KEYS]`, TRANSPOSED `[KEYS, QUERIES]`, in the layout of a product, with 1 in the place of a dimension that
    broadcasts. `pointer`: as `table_of_head` returns it.
    """
    query = gl.arange(0, QUERIES, gl.SliceLayout(0 if TRANSPOSED else 1, layout))
    key = gl.arange(0, KEYS, gl.SliceLayout(1 if TRANSPOSED else 0, layout))
    if TRANSPOSED:
        query = query[None, :]
        key = key[:, None]
    else:
        query = query[:, None]
        key = key[None, :]
    inside = None
    # Wide arithmetic for the tile's first element and for its rows; columns lie near each other.
    if table.stride_row is not None:
        pointer += first_query.to(gl.int64) * table.stride_row
        pointer += query.to(gl.int64) * table.stride_row
        if table.rows is not None:
            inside = query < table.rows - first_query
    if table.STRIDE_COLUMN > 0:
        pointer += first_key.to(gl.int64) * table.STRIDE_COLUMN
        pointer += key * table.STRIDE_COLUMN
        if table.columns is not None:
            within = key < table.columns - first_key
            if inside is None:
                inside = within
            else:
                inside &= within
    if inside is None:
        tile = gl.load(pointer)
    else:
        tile = gl.load(pointer, mask=inside, other=OTHER)
    return tile
