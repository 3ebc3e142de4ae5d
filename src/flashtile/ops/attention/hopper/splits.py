"""Into how many splits the forward divides the keys of calls that have fewer tiles of queries than fill a GPU. Nothing
here needs Triton."""

from flashtile.ops.attention.call import Call, visible_keys
from flashtile.ops.attention.hopper.configs import HopperConfig, value_parts
from flashtile.ops.attention.hopper.few_tiles import lengths
from flashtile.ops.common.split_keys.configs import MAX_SPLITS

#: Microseconds of 64 keys for a consumer that has a multiprocessor for itself, and of each column of a head; how many
#: times as long that takes where another one shares it; and of a tile of queries beside its keys, and of putting splits
#: together. An H200, 32 heads of 128: 1 × 64 queries, 4,096 keys 39, with 2, 4 and 8 splits 27, 20 and 18.
_KEYS, _COLUMN, _SHARED, _TILE, _COMBINING = 0.32, 0.0018, 1.6, 4, 6


def forward_splits(call: Call, config: HopperConfig) -> int:
    """`count_splits` of a call of attention."""
    if call.packed:
        return count_splits(call, config, lengths(call)[1], call.batch)
    first, last = visible_keys(call.rows_q, call.rows_k, call.spec)
    return count_splits(call, config, last - first)


def count_splits(call: Call, config: HopperConfig, keys: int, sequences: int = 1) -> int:
    """Into how many splits the keys are divided, of which queries see so many: all tiles of queries are computed at
    once, in the least time. In the batch-invariant mode there is one. `sequences`: those of a packed call that have
    tiles."""
    if call.spec.batch_invariant or call.spec.returns_max_scores or call.spec.block_shape is not None or keys <= 0:
        return 1
    tiles = call.tiles(call.rows_q, config.block_m)
    if call.packed:  # about as many as have rows
        tiles = max(call.rows_q // config.block_m, sequences, 1)
    tiles *= call.lines * value_parts(call.head_dims[1])
    left, right = call.spec.window_left, call.spec.window_right
    if left is not None and right is not None:  # a tile of queries sees no more
        keys = min(keys, max(left + right + config.block_m, 1))
    key_tiles = -(-keys // config.block_n)
    unit = config.block_n / 64 * (_KEYS + _COLUMN * sum(call.head_dims) / 2)

    def time(splits: int) -> float:
        shared = config.consumers > 1 or tiles * splits > call.multiprocessors
        work = -(-key_tiles // splits) * unit * (_SHARED if shared else 1)
        return work + _TILE + (_COMBINING if splits > 1 else 0)

    most = min(config.resident * call.multiprocessors // max(tiles, 1), key_tiles, MAX_SPLITS)
    return min(range(1, max(most, 1) + 1), key=time)
