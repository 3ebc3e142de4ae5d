"""How long and how many the query tiles of a call are: whether one consumer computes them in less time than several."""

from flashtile.ops.attention.call import Call
from flashtile.ops.attention.gpu.tile_configs import longest_lengths

#: Query rows of a tile of one consumer, and of three, the row of long calls with heads of up to 64 columns.
ROWS_OF_ONE, ROWS_OF_THREE = 64, 3 * 64

#: The time of a tile of two programs that share a multiprocessor, and of one that has it for itself, where a tile of
#: three consumers takes 1. Heads of 64 without a mask, time of three consumers over that of one (an H100): 20 heads,
#: 1,500 tokens 1.19, two of these sequences 0.92; 12 heads, 0.86; 8 heads, 4,096 tokens 1.18, 12 heads 0.81.
_OF_A_PAIR, _OF_ONE = 0.83, 0.5

#: How many such tiles a multiprocessor may get under a causal mask: heads of 64, 1,024 tokens, 4, 12 and 32 heads (0.5,
#: 1.5 and 3.9 tiles) 1.28, 1.17 and 0.99; 8,192 tokens, 4 heads (3.9) 1.32; 4,096 tokens, 12 heads (5.8) 0.79. Of 128,
#: 1,024 tokens, 8 and 16 heads (1 and 1.9) 1.26 and 1.13, 2,048 tokens, 16 heads (3.9) 1.00.
_CAUSAL_NARROW, _CAUSAL_WIDE = 4, 2

#: Queries and keys up to which sequences with an odd number of tiles have one consumer: with heads of 65 to 96 under a
#: causal mask, which beyond have tiles of 128 keys; with wider ones and no mask; and otherwise. `configs._SHORT_SINGLE`
#: has the figures.
MIDDLE_CAUSAL, _FULL_WIDE, _ODD = 640, 160, 320


def query_tiles(call: Call, queries: int) -> int:
    """Tiles of so many queries in all heads; of a packed call no more than if all sequences were as long as the
    longest."""
    tiles = call.tiles(call.rows_q, queries)
    return call.lines * (min(tiles, call.batch * tiles_of_longest(call, queries)) if call.packed else tiles)


def tiles_of_longest(call: Call, queries: int) -> int:
    """Tiles of so many queries in the longest sequence."""
    return -(-call.max_seqlens[0] // queries)


def gives_at_most(call: Call, most: int) -> bool:
    """Whether no multiprocessor gets more than so many tiles of one consumer."""
    return query_tiles(call, ROWS_OF_ONE) <= most * call.multiprocessors


def one_consumer_pays(call: Call) -> bool:
    """Whether tiles of one consumer take less time than those of the row of a long call."""
    widest = max(call.head_dims)
    if widest <= 128 and call.spec.window_right is not None and call.spec.window_left is None:
        # A mask hides keys on the right alone, so tiles are short and long.
        return gives_at_most(call, _CAUSAL_NARROW if widest <= 64 else _CAUSAL_WIDE)
    if widest > 64:
        # Heads of 128, 8 heads, 1,024 tokens (one tile) 1.27, 16 heads (two) 1.08, 2,048 tokens (four) 0.94. Of 160,
        # 192 and 256, one tile: 1.23 to 1.51.
        return gives_at_most(call, 1)
    pairs, others = divmod(query_tiles(call, ROWS_OF_ONE), 2 * call.multiprocessors)
    time = pairs * _OF_A_PAIR
    if others:
        time += _OF_ONE if others <= call.multiprocessors else _OF_A_PAIR
    return time < -(-query_tiles(call, ROWS_OF_THREE) // call.multiprocessors)


def short_tiles_pay(call: Call) -> bool:
    """Whether tiles of one consumer take less time under a causal mask than those of two, with heads of 193 to 256
    columns, however many there are: fewer of a tile's scores are hidden.

    Microseconds on an H100, two consumers and one, 16,384 tokens: 8 heads of 256, in sequences of 128 96.5 and
    93.9, of 256 102.9 and 95.5, of 384 106.5 and 99.5, of 512 107.6 and 104.2, of 768 114.1 and 129.3; heads of 224, of
    256 91.7 and 87.8, of 333 93.7 and 95.2, of 512 97.3 and 101.1; 10 heads of 192, of 256 91.7 and 90.3."""
    widest = max(call.head_dims)
    return 192 < widest and max(lengths(call)) <= (512 if widest > 224 else 256)


def lengths(call: Call) -> tuple[int, int]:
    """Queries and keys of the longest sequence."""
    queries, keys = longest_lengths(call)
    return queries, keys or queries


def fit_one_tile(call: Call) -> bool:
    """Whether the queries of each sequence fit a tile of one consumer: another one would have nothing to do."""
    return lengths(call)[0] <= ROWS_OF_ONE


def leave_one_idle(call: Call) -> bool:
    """Whether sequences are short and have an odd number of tiles, of which two consumers would leave half of the last
    empty."""
    widest, both, right = max(call.head_dims), lengths(call), call.spec.window_right is not None
    most = MIDDLE_CAUSAL if right and 64 < widest <= 96 else _FULL_WIDE if not right and widest > 96 else _ODD
    odd = -(-both[0] // ROWS_OF_ONE) % 2 == 1
    return odd and max(both) <= most and call.spec.window_left is None
