"""Modifiers of scores and weights in the Hopper kernels: soft cap, ALiBi, bias, mask, dropout, factors of 8-bit inputs.

What a call does not have is None when the kernel compiles.

**Units.** Both kernels hold scores in units in which a factor of `scale_log2` is left to the exponential: products `q
kᵀ`, or with a soft cap `tanh(q kᵀ · scale / softcap)`.

**Tables** are a bias or a boolean mask that broadcasts to the scores. TMA brings the tiles of a bias of queries × keys
where it can (`configs.moves_by_tma`), with the keys of a forward and the queries of a backward, whose barrier says that
they are there. `ldmatrix` hands each thread the elements of its own scores, four times two in an instruction. Of other
tables threads read the elements that belong to their own scores from device memory. A dimension of size 1 is not read
over and over: without rows, a padding mask `[batch, 1, 1, seq_k]` is one vector `[N]` for all rows of a tile.

**Dropout** keeps weights by the bits of `flashtile.ops.attention.philox`. One call of Philox2x32-7 gives two words, for
the weights `(r, c)`, `(r, c+8)`, `(r+8, c)` and `(r+8, c+8)`. In the result of a product, one thread holds all four, of
`S` as well as of `Sᵀ`, so the counters of a tile `[R, C]` are a tensor `[R/2, C/2]` in the layout in which each thread
has the calls of its own weights, and no word moves. A call takes seven rounds of one wide multiplication and one
exclusive or of three numbers.

**8-bit inputs** (e4m3) have factors. Scores are products of 8-bit numbers, for which the tensor cores take half the
time of 16-bit ones. Weights and values are multiplied in bfloat16: a kernel of `convert` writes the values so before
the forward runs, each number as it is. 8-bit weights would have 3 bits after the leading one, and span so few powers of
two that each tile needs the maximum of its rows, which takes the time that the faster product saves
(decisions/hopper_forward.md has both).
"""

import functools
from typing import Any, NamedTuple

from flashtile._backends.gluon import gl, gluon, tma_load
from flashtile._backends.launch import float32
from flashtile.ops.attention.gpu.score_source import (
    SINE_SOURCE,
    additions_source,
    compiled,
    function_source,
    reads_source,
    with_derivative_source,
)
from flashtile.ops.attention.gpu.score_writer import ScoreBounds
from flashtile.ops.attention.hopper.primitives import M, matrix, number_places, read_number, write_number
from flashtile.ops.attention.spec import AttentionSpec

LOG2_E = gl.constexpr(1.4426950408889634)


class ScoreUnits(NamedTuple):
    """`scale_log2`: the factor that is left to the exponential. `cap_scale`: scale / softcap; None without a cap.
    `function_scale`: the factor that makes scores of products, or of their tanh, for a score function, behind which
    they need no other than `log2(e)`; None without a function."""

    scale_log2: Any
    cap_scale: Any
    function_scale: Any

    @staticmethod
    def from_spec(spec: AttentionSpec) -> Any:
        """Describes the units for a kernel, which have no number that the call does not have."""
        capped, changed = spec.softcap > 0, spec.score_program is not None
        scale = spec.softcap if capped else spec.scale
        return ScoreUnits(
            scale_log2=float32(LOG2_E.value if changed else scale * LOG2_E.value),
            cap_scale=float32(spec.scale / spec.softcap if capped else None),
            function_scale=float32(scale if changed else None),
        )


@gluon.jit
def load_slope(side, numbers, sequence, head, seen):
    """ALiBi's slope of one head of one sequence; 0 where `seen` says that nothing is there. None without slopes."""
    slope = None
    if side.alibi_slopes is not None:
        slope = gl.load(side.alibi_slopes + sequence * numbers.stride_slopes_batch + head, mask=seen, other=0.0)
    return slope


@gluon.jit
def distance_shift(seq_q, seq_k, origin):
    """The key at no distance from query 0, as ALiBi counts. `origin`: `spec.Origin`."""
    shift = seq_k - seq_q
    if origin.diagonal is not None:
        shift += origin.diagonal
    return shift


@gluon.jit
def near_shift(shift, first, keys, ROWS: gl.constexpr):
    """`distance_shift` as it is, or where all `keys` lie on one side of `ROWS` queries from `first` on, moved until one
    of these is at no distance from the nearest key. Distances of all keys are then less by the same number, so weights
    stay the same, and scores are small numbers, which float32 holds exactly enough."""
    return gl.minimum(gl.maximum(first + shift, 1 - ROWS), gl.maximum(keys - 1, 0)) - first


@gluon.jit
def raised_to_near(statistic, slope, shift, near, SIGN: gl.constexpr):
    """A row statistic (natural logarithm) as one of scores with the `near_shift`, for SIGN -1 the other way round, in
    one operation, which rounds once."""
    return gl.fma(gl.abs(shift - near).to(gl.float32), SIGN * slope, statistic)


@gluon.jit
def load_row_logit(side, head, seen):
    """The sink of a head; -inf where `seen` says that nothing is there. None without sinks."""
    sink = None
    if side.sinks is not None:
        sink = gl.load(side.sinks + head, mask=seen, other=float("-inf"))
    return sink


@gluon.jit
def join_row_logit(row_sum, reference, logit):
    """Row sums and maxima with the logit among them, and the factor that leads from a row's old unit to the new one."""
    logit *= LOG2_E
    seen = gl.where(row_sum == 0.0, float("-inf"), reference)
    top = finite(gl.maximum(seen, logit))
    own = gl.exp2(seen - top)
    return row_sum * own + gl.exp2(logit - top), top, own


@gluon.jit
def finite(m):
    """The maximum of a row, 0 instead of -inf where it has seen nothing: a difference to -inf would be NaN."""
    return gl.where(m == float("-inf"), 0.0, m)


@gluon.jit
def capped(products, cap_scale):
    """`tanh(products · cap_scale)`, to about 2⁻¹¹ of its value: less than 16-bit scores are rounded by. One instruction
    of the unit for exponentials, where `1 - 2 / (1 + exp 2x)` is two."""
    return gl.inline_asm_elementwise(
        "tanh.approx.f32 $0, $1;", "=f,f", [products * cap_scale], dtype=gl.float32, is_pure=True, pack=1
    )


@gluon.jit
def in_eights_and_distances(x, position, first):
    """`x` `[R, C]` as `[R, C / 8, 8]`, and of each element `position - (first + c)`, where `position` `[R]` and `first`
    count alike.

    Columns are taken in eights: which eight is known when the kernel compiles, only the place within needs registers.
    """
    COLUMNS: gl.constexpr = x.shape[1]
    eights = gl.reshape(x, [x.shape[0], COLUMNS // 8, 8])
    layout: gl.constexpr = eights.type.layout
    of_row: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(2, layout))
    eight = gl.arange(0, COLUMNS // 8, gl.SliceLayout(0, gl.SliceLayout(2, layout))).to(gl.float32) * 8.0
    within = gl.arange(0, 8, gl.SliceLayout(0, gl.SliceLayout(1, layout))).to(gl.float32)
    here = gl.convert_layout((position - first).to(gl.float32), of_row)
    return eights, (here[:, None, None] - within[None, None, :]) - eight[None, :, None]


@gluon.jit
def lowered_by_distance(scores, position, first, slope):
    """Scores `[R, C]` minus `slope · |position - (first + c)|` (`in_eights_and_distances`).

    As one operation: of two, Triton 3.9 computes the second again where a mask follows, from what must then be kept.
    """
    eights, distance = in_eights_and_distances(scores, position, first)
    lowered = gl.reshape(gl.fma(gl.abs(distance), -slope, eights), scores.shape)
    return gl.convert_layout(lowered, scores.type.layout, assert_trivial=True)


class TableTiles(NamedTuple):
    """Bias, mask and a score function's reads for a tile of scores; placeholders for what there is not."""

    bias: Any
    mask: Any
    read: Any


class MovedBias(NamedTuple):
    """A bias that TMA brings: its descriptor, and `parameters.TableNumbers`."""

    descriptor: Any
    numbers: Any


@gluon.jit
def head_table(pointer, numbers, sequence, head):
    """A pointer to the first element of a head of a sequence, or None. `numbers`: `parameters.TableNumbers`."""
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
    """Producer: loads stage `place` of a head's bias from `query` and `key` on, tiles side by side along one."""
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
    """The tile of a head's table (`head_table`) from `first_query` and `first_key` on, `OTHER` past its end.
    `STRIDE_COLUMN`: 0 where columns of the table broadcast.

    It belongs to scores `[QUERIES, KEYS]`, TRANSPOSED `[KEYS, QUERIES]`, in the layout of a product, and comes in
    eights of their columns, `[rows, columns / 8, 8]` (`in_eights`), with 1 in the place of what broadcasts.

    Which eight it is, is known when the kernel compiles, so a thread has an address for each of its rows, and constants
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


@gluon.jit
def hide_outside_tree(scores, tree, first_query, first_key):
    """Scores `[R, C]` of queries and keys from these on, -inf where the `cache.Tree` does not show the key. `first_key`
    counts from the tree's first column; all queries see the keys before that."""
    eights = in_eights(scores)
    layout: gl.constexpr = eights.type.layout
    row = gl.arange(0, scores.shape[0], gl.SliceLayout(1, gl.SliceLayout(2, layout)))[:, None, None]
    eight = 8 * gl.arange(0, scores.shape[1] // 8, gl.SliceLayout(0, gl.SliceLayout(2, layout)))[None, :, None]
    within = gl.arange(0, 8, gl.SliceLayout(0, gl.SliceLayout(1, layout)))[None, None, :]
    before = within < -first_key - eight
    inside = (within < tree.columns - first_key - eight) & (row < tree.rows - first_query)
    place = tree.first + (first_query + row).to(gl.int64) * tree.stride
    shown = gl.load(
        place + first_key.to(gl.int64) + within + eight, mask=inside & (within >= -first_key - eight), other=0
    )
    changed = gl.reshape(gl.where(before | (shown != 0), eights, float("-inf")), scores.shape)
    return gl.convert_layout(changed, scores.type.layout, assert_trivial=True)


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
def head_dropout(side, numbers, sequence, head, heads):
    """Numbers of a head that `kept_weights` needs, from the side inputs (`parameters`)."""
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
    """The weights of a tile that are kept: bool `[QUERIES, KEYS]`, TRANSPOSED `[KEYS, QUERIES]`, in the layout of a
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


#: The smallest unit of scores: less, as factors may make it, is 0 or has few bits, and hidden scores times 0 are NaN.
LEAST_UNIT = gl.constexpr(2.0**-126)


@gluon.jit
def load_descale(pointer, strides, group, sequence, head, exists):
    """The factor of a query head, 1 without one or without such a sequence. `group` query heads share one."""
    factor = gl.to_tensor(1.0)
    if pointer is not None:
        place = sequence.to(gl.int64) * strides.batch + head // group * strides.head
        factor = gl.load(pointer + place, mask=exists, other=1.0)
    return factor


@gluon.jit
def _constant(value, dtype: gl.constexpr):
    return gl.to_tensor(value).to(dtype)


@gluon.jit
def _hyperbolic_tangent(x, PRECISE: gl.constexpr):
    """To a few units of 2⁻²⁴. A division would multiply twice more, to be right for denormal numbers."""
    inverse = gl.inline_asm_elementwise(
        "rcp.approx.ftz.f32 $0, $1;", "=f,f", [1.0 + gl.exp2(x * 2.8853900817779268)], dtype=gl.float32, is_pure=True,
        pack=1,
    )  # fmt: skip
    return 1.0 - 2.0 * inverse


@gluon.constexpr_function
def _distinct_layout(ROWS, COLUMNS):
    """The layout of a product of a warpgroup, `[64, 64]`, if all its rows or columns are one: no thread has a number
    twice."""
    registers = [[0, 1], [8, 0], [0, 8], [0, 16], [0, 32]]
    lanes, warps = [[0, 2], [0, 4], [1, 0], [2, 0], [4, 0]], [[16, 0], [32, 0]]
    registers, lanes, warps = (
        [[row if ROWS > 1 else 0, column if COLUMNS > 1 else 0] for row, column in each]
        for each in (registers, lanes, warps)
    )
    return gl.DistributedLinearLayout([each for each in registers if any(each)], lanes, warps, [], [ROWS, COLUMNS])


@gluon.jit
def _add_to_entries(sums_ptr, offsets, values, inside):
    """Adds values to the sums at offsets where they lie inside, in no fixed order: `[64, 64]`, or less where rows or
    columns were added up, or `diagonal_sums`."""
    inside &= values != 0.0
    if len(values.shape) == 2:
        # Where numbers were added up, a thread has each several times, and would add it as often.
        layout: gl.constexpr = _distinct_layout(values.shape[0], values.shape[1])
        offsets = gl.convert_layout(offsets, layout, assert_trivial=True)
        values = gl.convert_layout(values, layout, assert_trivial=True)
        inside = gl.convert_layout(inside, layout, assert_trivial=True)
    gl.atomic_add(sums_ptr + offsets, values, mask=inside, sem="relaxed")


@gluon.jit
def diagonal_sums(x, first_row):
    """The sums of the diagonals `row - column` of `x` `[64, 64]`, the result of a product of a warpgroup, and the rows
    in which they cross the first column, counted from `first_row`. Each warp sums its 16 rows: a diagonal is there up
    to four times. Zeros fill the shape up, `[4, 8, 4, 2, 2]`.

    A thread has a row `g` of eight, two columns `u` of each eight, and all eights: 2 of rows, 8 of columns. What lies
    on one diagonal of eights it adds up by itself. Diagonal `8·m + n` then has the elements of eight `m` in which `g -
    u` is `n`, and those of eight `m + 1` in which it is `n - 8`. For each `m` every element is turned to row `n`, which
    is a shuffle, and four threads add up.
    """
    parts = gl.permute(gl.reshape(x, [4, 2, 8, 2, 2, 2, 8]), [0, 2, 6, 5, 4, 3, 1])  # warp, g, u, eights
    upper, lower = gl.split(parts)
    eights = Eights(_unpacked(upper, 8), _unpacked(lower, 8))
    first, before = _sum_eights(eights, 0.0, 0, 4)
    second, before = _sum_eights(eights, before, 4, 8)
    third, _ = _sum_eights(eights, before, 8, 10)
    layout: gl.constexpr = first.type.layout
    warp = gl.arange(0, 4, gl.SliceLayout(1, gl.SliceLayout(2, layout)))[:, None, None]
    n = gl.arange(0, 8, gl.SliceLayout(0, gl.SliceLayout(2, layout)))[None, :, None]
    thread = gl.arange(0, 4, gl.SliceLayout(0, gl.SliceLayout(1, layout)))[None, None, :]
    row = first_row - 64 + 16 * warp + n + 8 * thread
    rows = gl.join(gl.join(row, row + 32), gl.join(row + 64, row + 96))
    return gl.join(gl.join(first, second), gl.join(third, gl.zeros_like(third))), rows


class Eights(NamedTuple):
    """Parts of a tile, 8 rows of each warp and 8 columns, `[4, 8, 8]`: those of 8 upper rows, and of 8 lower ones."""

    upper: Any
    lower: Any


@gluon.jit
def _sum_eights(eights, before, BEGIN: gl.constexpr, END: gl.constexpr):
    """The sums of diagonals `8·m + n`, `[4, 8, 4]`: of those `m` from `BEGIN - 8` to `END - 8` each thread of a row has
    its own. `before`: the sum of all eights `BEGIN - 8`. That of `END - 8` comes second."""
    zeros = gl.zeros_like(eights.upper[BEGIN % 8])
    layout: gl.constexpr = zeros.type.layout
    g = gl.arange(0, 8, gl.SliceLayout(0, gl.SliceLayout(2, layout)))[None, :, None]
    u = gl.arange(0, 8, gl.SliceLayout(0, gl.SliceLayout(1, layout)))[None, None, :]
    turned = (g + u) % 8 + zeros.to(gl.int32)
    found = gl.sum(gl.reshape(zeros, [4, 8, 4, 2]), 3)
    thread = gl.arange(0, 4, gl.SliceLayout(0, gl.SliceLayout(1, found.type.layout)))[None, None, :]
    for place in gl.static_range(BEGIN, END):
        following = zeros
        if place < 8:
            following += eights.upper[7 - place]
        if place > 0 and place < 9:
            following += eights.lower[8 - place]
        own = gl.gather(gl.where(u > g, following, before), turned, 1)
        total = gl.sum(gl.sum(gl.reshape(own, [4, 8, 4, 2]), 3), 2)
        found = gl.where(thread == place - BEGIN, total[:, :, None], found)
        before = following
    return found, before


@gluon.jit
def _unpacked(x, COUNT: gl.constexpr):
    """A tuple of the parts of `x` along its last dimensions, which are 2 each; the last one is the slowest."""
    parts = (x,)
    if COUNT > 1:
        first, second = gl.split(x)
        parts = _unpacked(first, COUNT // 2) + _unpacked(second, COUNT // 2)
    return parts


_NAMES = {
    "tl": gl,
    "constant": _constant,
    "hyperbolic_tangent": _hyperbolic_tangent,
    "sine": compiled(SINE_SOURCE, gluon.jit, {"tl": gl}),
    "add_to_entries": _add_to_entries,
    "diagonal_sums": diagonal_sums,
}


@functools.lru_cache(maxsize=1024)
def gluon_function(text: str, bounds: ScoreBounds | None) -> Any:
    """The `@gluon.jit` function of a program: see `score_source.function_source`."""
    return compiled(function_source(text, bounds, reads_before=True), gluon.jit, _NAMES)


@functools.lru_cache(maxsize=1024)
def gluon_derivative(text: str, bounds: ScoreBounds | None) -> Any:
    """The same with its derivative: see `score_source.with_derivative_source`."""
    return compiled(with_derivative_source(text, bounds), gluon.jit, _NAMES)


@functools.lru_cache(maxsize=1024)
def gluon_additions(text: str, summed: tuple[bool, ...], bounds: ScoreBounds | None) -> Any:
    """The `@gluon.jit` function that adds up the gradients of captured tensors: see `score_source.additions_source`."""
    return compiled(additions_source(text, summed, bounds), gluon.jit, _NAMES)


@functools.lru_cache(maxsize=1024)
def gluon_reads(text: str, bounds: ScoreBounds | None, with_derivative: bool = False) -> Any:
    """The `@gluon.jit` function of its reads before the scores are there; None where there are none."""
    source = reads_source(text, bounds, with_derivative)
    return None if source is None else compiled(source, gluon.jit, _NAMES)


# Walking over the tiles of a block mask in the Hopper kernels.
#
# The mask's lists name, for each line (a row of its tiles, in the backward a column), the tiles that have something
# visible. The producer reads them. For each tile it publishes, through shared memory, the number and the kind: FULL,
# EMPTY, or the place of the pattern. Consumers then read the bits of the pattern, one for each row and column of
# their 64 rows: in the forward while the scores are computed, in the backward, which lacks the registers, after that.
# Stored tiles are TILE_Q × TILE_K, multiples of the kernels' tiles. Both are 0 where there is no block mask.


#: As in `flashtile.ops.attention.tile_lists`.
FULL = gl.constexpr(-1)
EMPTY = gl.constexpr(-2)

#: Fields that a producer publishes of a listed tile, and how many they are: its number, its kind, and in the backward
#: the head (counted from the first one) and how many tiles of keys add to its dq before this one.
TILE_NUMBER, TILE_KIND, TILE_HEAD, TILE_TURN = (gl.constexpr(field) for field in range(4))
TILE_INFO_FIELDS = gl.constexpr(4)


class BlockLists(NamedTuple):
    """A block mask's lists. `numbers` (`parameters.BlockNumbers`): where parts begin, and their strides."""

    lists_ptr: Any
    numbers: Any


@gluon.jit
def _first_line(blocks, sequence, head):
    """The first line of a head, among the lines of all heads."""
    return sequence * blocks.numbers.stride_batch + head * blocks.numbers.stride_head


@gluon.jit
def line_entries(blocks, sequence, head, line):
    """The begin and the end of the entries of a line."""
    pointer = blocks.lists_ptr + blocks.numbers.offsets + _first_line(blocks, sequence, head) + line
    return gl.load(pointer), gl.load(pointer + 1)


@gluon.jit
def listed_line(blocks, sequence, head, line, rows, exists, OTHER: gl.constexpr, TILE: gl.constexpr):
    """The begin of the entries of a line of a packed call, and how many tiles of `OTHER` they list before row `rows`.

    The lists are made for the longest sequence. Entries ascend, so those that begin past the end of a shorter one come
    last. A sequence that does not `exist` has no line: rows past the last sequence.
    """
    pointer = blocks.lists_ptr + blocks.numbers.offsets + _first_line(blocks, sequence, head) + line
    entry = gl.load(pointer, mask=exists, other=0)
    low = entry
    high = gl.load(pointer + 1, mask=exists, other=0)
    while low < high:
        middle = (low + high) // 2
        if gl.load(blocks.lists_ptr + blocks.numbers.tiles + middle) * TILE < rows:
            low = middle + 1
        else:
            high = middle
    last = gl.load(blocks.lists_ptr + blocks.numbers.tiles + (low - 1), mask=low > entry, other=-1)
    past_end = gl.maximum((last + 1) * (TILE // OTHER) - gl.cdiv(rows, OTHER), 0)
    return entry, (low - entry) * (TILE // OTHER) - past_end


@gluon.jit
def load_tile_kind(blocks, entry, last_entry, tile):
    """The kind of a tile of the line whose entries lie between these two; EMPTY where it is not listed. By one warp."""
    STEP: gl.constexpr = 128
    place = gl.arange(0, STEP, gl.BlockedLayout([STEP // 32], [32], [1], [0]))
    kind = gl.to_tensor(EMPTY)
    for first in range(entry, last_entry, STEP):
        pointer = blocks.lists_ptr + first + place
        inside = place < last_entry - first
        tiles = gl.load(pointer + blocks.numbers.tiles, mask=inside, other=-1)
        kinds = gl.load(pointer + blocks.numbers.kinds, mask=inside, other=EMPTY)
        kind = gl.maximum(kind, gl.max(gl.where(tiles == tile, kinds, EMPTY), 0))  # EMPTY is the least
    return kind


@gluon.jit
def listed_tile(blocks, entry, step, listed, OTHER: gl.constexpr, TILE: gl.constexpr):
    """Number and kind of the kernel's tile `step` of a line whose entries begin at `entry`, where `TILE` is cut into
    tiles of `OTHER`. A line without entries (not `listed`) has an invisible one."""
    place = blocks.lists_ptr + entry + step // (TILE // OTHER)
    tile = gl.load(place + blocks.numbers.tiles, mask=listed, other=0) * (TILE // OTHER) + step % (TILE // OTHER)
    return tile, gl.load(place + blocks.numbers.kinds, mask=listed, other=EMPTY)


@gluon.jit
def listed_rank(blocks, entry, step, OTHER: gl.constexpr, TILE: gl.constexpr):
    """How many stored tiles are before that of `listed_tile` in the other list; ranks lie behind kinds."""
    numbers = blocks.numbers
    return gl.load(blocks.lists_ptr + entry + step // (TILE // OTHER) + (2 * numbers.kinds - numbers.tiles))


@gluon.jit
def make_tile_info(PLACES: gl.constexpr):
    """Room for what the producer publishes of so many listed tiles."""
    return number_places(PLACES * TILE_INFO_FIELDS)


@gluon.jit
def write_tile_info(tile_info, place, FIELD: gl.constexpr, number):
    """The producer's side, before the tile itself is announced."""
    write_number(tile_info.index(place * TILE_INFO_FIELDS + FIELD), number)


@gluon.jit
def read_tile_info(tile_info, place, FIELD: gl.constexpr):
    return read_number(tile_info.index(place * TILE_INFO_FIELDS + FIELD))


@gluon.constexpr_function
def _bits_layout(WORDS):
    """Each thread has the words of both rows that it has scores of."""
    words = [[0, 1 << bit] for bit in range(WORDS.bit_length() - 1)]
    lanes = [[0, 0], [0, 0], [1, 0], [2, 0], [4, 0]]
    return gl.DistributedLinearLayout([*words, [8, 0]], lanes, [[16, 0], [32, 0]], [], [64, WORDS])


@gluon.jit
def load_bits(
    blocks, kind, first_row, column, COLUMNS: gl.constexpr, TILE_ROWS: gl.constexpr, TILE_COLUMNS: gl.constexpr
):
    """`[64, COLUMNS / 32]` words: what of the `column`-th COLUMNS 64 rows see; 0 without a pattern."""
    WORDS: gl.constexpr = COLUMNS // 32
    layout: gl.constexpr = _bits_layout(WORDS)
    # What all threads share first: then a thread's own part is a single offset.
    base = blocks.lists_ptr + blocks.numbers.bits + kind.to(gl.int64) * (TILE_ROWS * TILE_COLUMNS // 32)
    base += first_row % TILE_ROWS * (TILE_COLUMNS // 32) + column % (TILE_COLUMNS // COLUMNS) * WORDS
    row = gl.arange(0, M, gl.SliceLayout(1, layout))[:, None]
    word = gl.arange(0, WORDS, gl.SliceLayout(0, layout))[None, :]
    pattern = gl.zeros([M, WORDS], gl.int32, layout) + kind >= 0
    return gl.load(base + (row * (TILE_COLUMNS // 32) + word), mask=pattern, other=0)


@gluon.jit
def where_visible(bits, x, OTHER: gl.constexpr):
    """`x` `[64, C]`, fragments of a product, where the bit of an element is set in `bits` `[64, C / 32]`; else `OTHER`.

    A thread has two neighbours of every eight columns. Which eight, and which neighbour, is known when the kernel
    compiles; so words are shifted to the thread's own two once, and then each bit is a constant.
    """
    C: gl.constexpr = x.shape[1]
    parts = gl.reshape(x, [M, C // 32, 4, 4, 2])
    layout: gl.constexpr = parts.type.layout
    of_word: gl.constexpr = gl.SliceLayout(2, gl.SliceLayout(3, gl.SliceLayout(4, layout)))
    of_eight: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(3, gl.SliceLayout(4, layout))))
    of_two: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(2, gl.SliceLayout(4, layout))))
    of_one: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(2, gl.SliceLayout(3, layout))))
    words = gl.convert_layout(bits, of_word, assert_trivial=True).to(gl.uint32)[:, :, None, None, None]
    own = words >> (2 * gl.arange(0, 4, of_two)).to(gl.uint32)[None, None, None, :, None]
    place = (
        8 * gl.arange(0, 4, of_eight)[None, None, :, None, None] + gl.arange(0, 2, of_one)[None, None, None, None, :]
    )
    place = place.to(gl.uint32)
    shown = gl.where(((own >> place) & 1) != 0, parts, OTHER)
    return gl.convert_layout(gl.reshape(shown, x.shape), x.type.layout, assert_trivial=True)
