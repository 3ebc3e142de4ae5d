"""What the forward does otherwise where q, k and v have 8 bits (e4m3).

The tensor cores take 8-bit operands only with the dimension that is summed over contiguous. For `p v` that is the keys,
so the values come transposed, `[E, N]`: `attention_transpose_kernel` writes them so before the forward runs. The keys
of each sixteen are permuted on the way, and the weights with them. A thread has, of the scores of sixteen keys, the
columns `2t, 2t + 1, 8 + 2t, 8 + 2t + 1` (its number in a group of four is `t`), and as an operand it must hold four
that follow one another, `4t ... 4t + 3`. Counted in the order in which threads hold them,

    place 4t + 2j + e  of sixteen is that of  key 8j + 2t + e      (t < 4; j, e < 2)

no weight leaves its thread.

e4m3 has 3 bits after the leading one, ends at 448, and below 2⁻⁶ loses bits down to 2⁻⁹. Weights, at most 1, are
multiplied by 2⁸, so that they lose theirs below 2⁻¹⁴; the row sums are multiplied alike, and nothing else knows.

The tensor cores add 8-bit products up with about 14 bits, each time relative to the largest. So a product `p v` starts
anew with every tile, and whole tiles are added up in float32: no more instructions, as `o` is to be rescaled anyway.
"""

from flashtile._backends.gluon import gl, gluon, mbarrier, tma_load
from flashtile.ops.attention.hopper.pieces import M, locate_tile, matrix, scale_rows

#: Weights are computed times 2 to this.
WEIGHT_SCALE_LOG2 = gl.constexpr(8.0)


@gluon.jit
def rounded_weights(probs):
    """Weights `[M, N]` rounded, four of a thread to a word: `[M, N / 4]`."""
    sixteens = gl.permute(gl.reshape(probs, [M, probs.shape[1] // 16, 2, 4, 2]), [0, 1, 3, 2, 4])
    even, odd = gl.split(sixteens)
    even_near, even_far = gl.split(even)
    odd_near, odd_far = gl.split(odd)
    words = gl.inline_asm_elementwise(
        """{
            .reg .b16 low, high;
            cvt.rn.satfinite.e4m3x2.f32 low, $2, $1;
            cvt.rn.satfinite.e4m3x2.f32 high, $4, $3;
            mov.b32 $0, {low, high};
        }""",
        "=r,f,f,f,f",
        [even_near, odd_near, even_far, odd_far],
        dtype=gl.int32,
        is_pure=True,
        pack=1,
    )
    return gl.reshape(words, [M, probs.shape[1] // 4])


@gluon.jit
def weights_operand(words, layout: gl.constexpr):
    """Rounded weights as an operand, their keys in the order of the transposed values."""
    near = gl.join(words.to(gl.int8), (words >> 8).to(gl.int8))
    far = gl.join((words >> 16).to(gl.int8), (words >> 24).to(gl.int8))
    bytes_ = gl.permute(gl.join(near, far), [0, 1, 3, 2])
    weights = gl.reshape(bytes_, [M, 4 * words.shape[1]]).to(gl.float8e4nv, bitcast=True)
    return gl.convert_layout(weights, layout, assert_trivial=True)


@gluon.jit
def values_operand(tile, ROWS: gl.constexpr, WIDTH: gl.constexpr):
    """Values `[ROWS, WIDTH]` of a place in a ring as an operand; those of 8 bits lie there transposed."""
    if tile.dtype.primitive_bitwidth == 8:
        values = matrix(tile, WIDTH, ROWS).permute([1, 0])
    else:
        values = matrix(tile, ROWS, WIDTH)
    return values


@gluon.jit
def add_product(earlier, product, product_rest, v):
    """`o` with the product of one more tile. `earlier`: both chunks of the sum before it, and what scales them."""
    o, o_rest = scale_rows(earlier[0], earlier[1], earlier[2], v)
    o += product
    if v.REST > 0:
        o_rest += product_rest
    return o, o_rest


@gluon.jit
def load_descale(descale, sequence, head, seen):
    """The factor that a query head has, 1 where there is none. `descale`: pointer (or None), strides of sequences and
    of key/value heads, query heads of one of these. `seen`: whether there is such a sequence."""
    factor = gl.to_tensor(1.0)
    if descale[0] is not None:
        place = sequence.to(gl.int64) * descale[1] + head // descale[3] * descale[2]
        factor = gl.load(descale[0] + place, mask=seen, other=1.0)
    return factor


@gluon.jit
def load_values(ring, stage, desc, rest_desc, sequence, head_kv, begin, row, PACKED: gl.constexpr):
    """Starts the load of the values of the keys `row...` of a sequence into a place of a ring, which must be empty."""
    full = ring.full.index(stage)
    mbarrier.expect(full, ring.ROWS * (ring.WIDTH + ring.REST))
    if PACKED:
        column = (begin // ring.ROWS + sequence) * ring.ROWS + row
        batch_entry = 0
    else:
        column = row
        batch_entry = sequence
    tma_load(desc, (batch_entry, head_kv, 0, column), full, ring.tiles.index(stage))
    if ring.REST > 0:
        tma_load(rest_desc, (batch_entry, head_kv, ring.WIDTH, column), full, ring.rest.index(stage))


@gluon.jit
def attention_transpose_kernel(
    v_ptr, out_ptr, cu_seqlens_k_ptr, stride_v_batch, stride_v_row, stride_v_head, batch, heads_kv, rows_k, tiles,
    HEAD_DIM_V: gl.constexpr, E: gl.constexpr, N: gl.constexpr, PACKED: gl.constexpr,
):  # fmt: skip
    """Writes one tile of values `[N, E]` transposed and in the order of the weights: `out` is
    `[batch, heads_kv, head_dim_v, tiles · N]`, packed `[1, heads_kv, ...]` with the tiles of sequence `b` from
    `cu_seqlens_k[b] // N + b` on. Keys past the end are zeros. Pointers and strides are those of words of 4 values."""
    number = gl.program_id(0)
    tile = number % tiles
    line = number // tiles
    sequence, head_kv, first, begin, rows, _, _ = locate_tile(
        tile, line, cu_seqlens_k_ptr, cu_seqlens_k_ptr, batch, heads_kv, rows_k, rows_k, N, PACKED
    )
    # Four keys that follow one another in the new order, at the same four columns: a block of bytes to turn over.
    source: gl.constexpr = gl.BlockedLayout([1, 4], [32 // min(32, E // 16), min(32, E // 16)], [4, 1], [1, 0])
    place = gl.arange(0, N // 4, gl.SliceLayout(1, source))[:, None]
    word = gl.arange(0, E // 4, gl.SliceLayout(0, source))[None, :]
    # Places 4t ... 4t + 3 of sixteen: keys 2t, 2t + 1, 8 + 2t, 8 + 2t + 1.
    key = first + place // 4 * 16 + place % 4 * 2
    row = (begin.to(gl.int64) if PACKED else gl.to_tensor(0).to(gl.int64)) + key
    base = v_ptr + head_kv * stride_v_head
    if not PACKED:
        base += sequence * stride_v_batch
    inside = word < HEAD_DIM_V // 4
    v_0 = gl.load(base + row * stride_v_row + word, mask=(key < rows) & inside, other=0)
    v_1 = gl.load(base + (row + 1) * stride_v_row + word, mask=(key + 1 < rows) & inside, other=0)
    v_2 = gl.load(base + (row + 8) * stride_v_row + word, mask=(key + 8 < rows) & inside, other=0)
    v_3 = gl.load(base + (row + 9) * stride_v_row + word, mask=(key + 9 < rows) & inside, other=0)

    target: gl.constexpr = gl.BlockedLayout([4, 1], [8, 4], [1, 4], [0, 1])
    place = gl.arange(0, N // 4, gl.SliceLayout(1, target))[:, None]
    word = gl.arange(0, E // 4, gl.SliceLayout(0, target))[None, :]
    row_words = tiles * (N // 4)
    base = out_ptr + line.to(gl.int64) * HEAD_DIM_V * row_words + tile * (N // 4)
    for byte in gl.static_range(4):
        turned = gl.convert_layout(_column_of_words(v_0, v_1, v_2, v_3, byte), target)
        column = 4 * word + byte
        gl.store(base + column.to(gl.int64) * row_words + place, turned, mask=column < HEAD_DIM_V)


@gluon.jit
def _column_of_words(v_0, v_1, v_2, v_3, BYTE: gl.constexpr):
    """Byte `BYTE` of each of four words, as a word."""
    low = ((v_0 >> 8 * BYTE) & 255) | (((v_1 >> 8 * BYTE) & 255) << 8)
    return low | (((v_2 >> 8 * BYTE) & 255) << 16) | (((v_3 >> 8 * BYTE) & 255) << 24)
