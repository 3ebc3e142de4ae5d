"""Dropout in the Hopper kernels: which weights of a tile are kept.

Bits are those of `flashtile.ops.attention.philox`. One call of Philox2x32-7 gives two words, for the weights `(r, c)`,
`(r, c+8)`, `(r+8, c)` and `(r+8, c+8)`. In the result of a product, one thread holds all four, of `S` as well as of
`Sᵀ`. So the counters of a tile `[R, C]` are a tensor `[R/2, C/2]` in the layout in which each thread has the calls of
its own weights, and no word moves.

A call takes seven rounds of one wide multiplication and one exclusive or of three numbers.
"""

from typing import Any, NamedTuple

from flashtile._backends.gluon import gl, gluon

_ROUNDS, _HEAD_ROUNDS = gl.constexpr(7), gl.constexpr(10)
_MULTIPLIER = gl.constexpr(0xD256D193)
_MULTIPLIER_A, _MULTIPLIER_B = gl.constexpr(0xD2511F53), gl.constexpr(0xCD9E8D57)
_WEYL_A, _WEYL_B = gl.constexpr(0x9E3779B9), gl.constexpr(0xBB67AE85)


class HeadDropout(NamedTuple):
    """Dropout of one head of one sequence: the key of Philox and what its counters begin with, and the number of the
    first row and column in a larger call."""

    key: Any
    first_column: Any
    first_row: Any
    threshold: Any
    row: Any
    column: Any


@gluon.jit
def dropout_of_head(side, numbers, sequence, head, heads):
    """What `kept_weights` needs to know of a head, from the side inputs (`parameters`)."""
    seed = gl.load(side.dropout_seed)
    offset = gl.load(side.dropout_seed + 1)
    origin = numbers.origin
    matrix = sequence * heads + head
    row = 0
    column = 0
    if origin.matrix is not None:
        matrix = origin.matrix + sequence * origin.heads + head
        row = origin.row
        column = origin.column
    key, first_column, first_row = _head_words(
        seed.to(gl.uint32), (seed >> 32).to(gl.uint32), matrix.to(gl.uint32), offset.to(gl.uint32)
    )
    return HeadDropout(key, first_column, first_row, numbers.dropout.threshold, row, column)


@gluon.jit
def kept_weights(
    dropout, first_query, first_key, QUERIES: gl.constexpr, KEYS: gl.constexpr, layout: gl.constexpr,
    TRANSPOSED: gl.constexpr,
):  # fmt: skip
    """Which weights of a tile are kept: bool `[QUERIES, KEYS]`, TRANSPOSED `[KEYS, QUERIES]`, in the layout of a
    product of a warpgroup. `first_query` and `first_key` are multiples of 16, also in the numbers of the larger call.
    """
    ROWS: gl.constexpr = KEYS if TRANSPOSED else QUERIES
    COLUMNS: gl.constexpr = QUERIES if TRANSPOSED else KEYS
    calls: gl.constexpr = _calls_layout(ROWS, COLUMNS)
    down = gl.arange(0, ROWS // 2, gl.SliceLayout(1, gl.SliceLayout(2, calls)))[:, None, None]
    # Which eight it is, is known when the kernel compiles; only the place within takes a register.
    eight = gl.arange(0, COLUMNS // 16, gl.SliceLayout(0, gl.SliceLayout(2, calls)))[None, :, None]
    within = gl.arange(0, 8, gl.SliceLayout(0, gl.SliceLayout(1, calls)))[None, None, :]
    query_group = (first_query + dropout.row) // 16 * 8
    key_group = (first_key + dropout.column) // 16 * 8
    # The upper half of sixteen queries has the first word, the lower one the second; keys of the first half have its
    # lower bits, which are moved to where the comparison looks.
    if TRANSPOSED:
        queries = within + query_group + 8 * eight
        upper, lower = _pair_words(dropout, queries.to(gl.uint32), (down + key_group).to(gl.uint32))
        left, right = gl.join(upper << 16, upper), gl.join(lower << 16, lower)
    else:
        keys = within + key_group + 8 * eight
        upper, lower = _pair_words(dropout, (down + query_group).to(gl.uint32), keys.to(gl.uint32))
        left, right = gl.join(upper << 16, lower << 16), gl.join(upper, lower)
    # (row / 16, row % 8, column / 16, column % 8, row + 8?, column + 8?) -> (rows, columns)
    joined = gl.reshape(gl.join(left, right), [ROWS // 16, 8, COLUMNS // 16, 8, 2, 2])
    joined = gl.reshape(gl.permute(joined, [0, 4, 1, 2, 5, 3]), [ROWS, COLUMNS])
    words = gl.convert_layout(joined, layout, assert_trivial=True)
    return words.to(gl.int32, bitcast=True) >= dropout.threshold


@gluon.constexpr_function
def _calls_layout(ROWS, COLUMNS):
    """Calls `[ROWS / 2, COLUMNS / 16, 8]`, each with the thread that has its four weights of a product."""
    across = [[0, 1 << bit, 0] for bit in range((COLUMNS // 16).bit_length() - 1)]
    down = [[32 << bit, 0, 0] for bit in range((ROWS // 64).bit_length() - 1)]
    lanes = [[0, 0, 2], [0, 0, 4], [1, 0, 0], [2, 0, 0], [4, 0, 0]]
    warps = [[8, 0, 0], [16, 0, 0]]
    shape = [ROWS // 2, COLUMNS // 16, 8]
    return gl.DistributedLinearLayout([[0, 0, 1], *across, *down], lanes, warps, [], shape)


@gluon.jit
def _pair_words(dropout, query_group, key_group):
    """Philox2x32-7: the two words of each call. Counters broadcast to the calls of a tile."""
    left = key_group ^ dropout.first_column
    right = query_group ^ dropout.first_row
    key = dropout.key
    for _ in gl.static_range(_ROUNDS):
        # Both halves of a product are one instruction this way, and two as a product and its upper half.
        product = left.to(gl.int64) * _MULTIPLIER
        left = (product >> 32).to(gl.uint32) ^ key ^ right
        right = product.to(gl.uint32)
        key += _WEYL_A
    return left, right


@gluon.jit
def _head_words(seed_a, seed_b, matrix, offset):
    """Philox4x32-10: the first three words of a head."""
    c0 = matrix
    c1 = matrix * 0
    c2 = matrix * 0
    c3 = offset
    for _ in gl.static_range(_HEAD_ROUNDS):
        product_a = c0.to(gl.int64) * _MULTIPLIER_A
        product_b = c2.to(gl.int64) * _MULTIPLIER_B
        c0 = (product_b >> 32).to(gl.uint32) ^ seed_a ^ c1
        c2 = (product_a >> 32).to(gl.uint32) ^ seed_b ^ c3
        c1 = product_b.to(gl.uint32)
        c3 = product_a.to(gl.uint32)
        seed_a += _WEYL_A
        seed_b += _WEYL_B
    return c0, c1, c2
