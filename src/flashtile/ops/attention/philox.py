"""Dropout bits: a pure function of (seed, offset, batch, head, row, column), by Philox.

Every backend keeps or drops the same weights. One call of Philox2x32-7 yields 64 bits, which serve the four elements
`(r, c), (r, c+8), (r+8, c), (r+8, c+8)` with 16 each: in a tensor-core fragment one thread owns exactly these four,
of `S` as well as of `Sᵀ`, so no bits are computed twice and none have to move. The key, and where the counters begin,
are the first three words of one call of Philox4x32-10 for each head::

    key, first_column, first_row, _ = Philox4x32-10(counter = (batch * heads + head, 0, 0, offset), key = seed)
    row_group = (row // 16) * 8 + row % 8          column_group = (column // 16) * 8 + column % 8
    words     = Philox2x32-7(counter = (column_group ^ first_column, row_group ^ first_row), key = key)
    bits      = 16 bits of words[row // 8 % 2], the upper ones if column // 8 % 2
    kept      ⇔ int16(bits) >= keep_threshold(dropout_p) / 2¹⁶

The probability of dropping is therefore `dropout_p` to within 2⁻¹⁷.

Reference: Salmon, Moraes, Dror, Shaw, "Parallel random numbers: as easy as 1, 2, 3" (SC 2011).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from flashtile.ops.attention.spec import Origin
from flashtile.ops.common.checks import check_count, check_dropout_seed, resolve_dropout
from flashtile.ops.common.philox import draw_dropout_seed as draw_dropout_seed
from flashtile.ops.common.philox import philox_words

_ROUNDS = 7
_MULTIPLIER, _WEYL, _MASK32 = 0xD256D193, 0x9E3779B9, 0xFFFFFFFF


def keep_threshold(dropout_p: float) -> int:
    """The int32 below which a word drops its element: a multiple of 2¹⁶, because 16 bits of the word decide."""
    return (min(round(dropout_p * 2**16), 2**16 - 1) - 2**15) * 2**16


def pair_words(key: Tensor, counter: tuple[Tensor, Tensor], scratch: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Philox2x32-7 in int64 arithmetic: two words for each broadcast counter, in the low 32 bits. Those above are not
    cleared. `scratch`: flat int64 memory for three numbers for each counter, in which the words are made, so that they
    last until it is used again; None = new memory."""
    left, right = counter
    shape = torch.broadcast_shapes(key.shape, left.shape, right.shape)
    numbers = 3 * math.prod(shape)
    if scratch is None:
        scratch = torch.empty(numbers, dtype=torch.int64, device=key.device)
    own, product, spare = scratch[:numbers].view(3, *shape)
    # A product of two 32-bit numbers fills the 64 bits, sign included, so both its halves are exact. What right carries
    # above 32 bits falls away with the next mask.
    small = left * _MULTIPLIER
    torch.bitwise_xor(small >> 32, right ^ key, out=own).bitwise_and_(_MASK32)
    torch.mul(own, _MULTIPLIER, out=product)
    torch.bitwise_right_shift(product, 32, out=own).bitwise_xor_(small ^ (key + _WEYL)).bitwise_and_(_MASK32)
    for number in range(2, _ROUNDS):
        torch.mul(own, _MULTIPLIER, out=spare)
        product.bitwise_xor_(key + number * _WEYL)
        torch.bitwise_right_shift(spare, 32, out=own).bitwise_xor_(product).bitwise_and_(_MASK32)
        product, spare = spare, product
    return own, product


def head_words(seed: Tensor, sequence_head: Tensor) -> Tensor:
    """Key, first column and first row of each head, int64 `[n, 3]`, from the arguments of `keep_tile`. All tiles of a
    head have the same."""
    zero = torch.zeros_like(sequence_head)
    words = philox_words(seed[0], (sequence_head, zero, zero, seed[1] + zero))
    return torch.stack(words[:3], 1).bitwise_and_(_MASK32)


def _group_words(
    of_heads: Tensor, rows: Tensor, columns: Tensor, scratch: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """For groups `rows` and `columns` of each matrix, int16 `[n, rows, columns, 2]` twice: the bits that decide on the
    elements `(r, c), (r, c+8)`, and on `(r+8, c), (r+8, c+8)`. `of_heads`: their `head_words`."""
    key, first_column, first_row = of_heads[:, :, None, None].unbind(1)
    words = pair_words(key, (columns[None, None, :] ^ first_column, rows[None, :, None] ^ first_row), scratch)
    top, bottom = (word.view(torch.int16).unflatten(-1, (-1, 4))[..., :2] for word in words)
    return top, bottom


def scratch_numbers(rows: range, columns: range) -> int:
    """Numbers of 64 bits that `keep_head_tile` takes for a matrix."""
    return 3 * len(_groups(rows)) * len(_groups(columns))


def _groups(span: range) -> range:
    """The groups in which rows or columns lie."""
    return range(span.start // 16 * 8, (span.stop + 15) // 16 * 8)


def keep_tile(seed: Tensor, dropout_p: float, sequence_head: Tensor, rows: range, columns: range) -> Tensor:
    """The weights of a tile that are kept.

    Args:
        seed: `[2]` int64 (seed, offset).
        dropout_p: in [0, 1).
        sequence_head: int64 `[n]`, `batch * heads + head` of each matrix.
        rows: query rows of the tile (step 1).
        columns: key columns of the tile (step 1).

    Returns:
        bool `[n, len(rows), len(columns)]`, True = kept.
    """
    return keep_head_tile(head_words(seed, sequence_head), dropout_p, rows, columns)


def keep_head_tile(
    of_heads: Tensor, dropout_p: float, rows: range, columns: range, scratch: Tensor | None = None
) -> Tensor:
    """As `keep_tile`, from the `head_words` of the matrices. `scratch`: flat int64 memory, `scratch_numbers` for each
    matrix; None = new memory, whose pages fault in each time."""
    shape, device = (len(of_heads), len(rows), len(columns)), of_heads.device
    if 0 in shape:
        return torch.empty(shape, dtype=torch.bool, device=device)
    row_groups, column_groups = (
        torch.arange(span.start, span.stop, device=device) for span in (_groups(rows), _groups(columns))
    )
    threshold = keep_threshold(dropout_p) >> 16
    matrices, bands, blocks = len(of_heads), len(row_groups) // 8, len(column_groups) // 8
    kept = torch.empty(matrices, bands, 2, 8, blocks, 2, 8, dtype=torch.bool, device=device)
    for half, bits in enumerate(_group_words(of_heads, row_groups, column_groups, scratch)):
        of_half = bits.view(matrices, bands, 8, blocks, 8, 2)
        for side in (0, 1):
            torch.ge(of_half[..., side], threshold, out=kept[:, :, half, :, :, side])
    kept = kept.view(matrices, 16 * bands, 16 * blocks)
    first_row, first_column = rows.start % 16, columns.start % 16
    return kept[:, first_row : first_row + len(rows), first_column : first_column + len(columns)]


def keep_rows(
    seed: Tensor, dropout_p: float, sequence_head: Tensor, rows: Tensor, first_column: int, columns: int
) -> Tensor:
    """As `keep_tile`, of rows `[rows]` in any order, `columns` from `first_column` on: bool `[n, rows, columns]`."""
    groups = torch.arange(first_column // 16 * 8, (first_column + columns + 15) // 16 * 8, device=seed.device)
    row_groups = torch.div(rows, 16, rounding_mode="floor") * 8 + rows % 8
    top, bottom = _group_words(head_words(seed, sequence_head), row_groups, groups)
    bits = torch.where((rows % 16 >= 8)[:, None, None], bottom, top)
    kept = (bits >= keep_threshold(dropout_p) >> 16).movedim(-1, 0)  # of columns c and c + 8
    kept = kept.unflatten(3, (-1, 8)).permute(1, 2, 3, 0, 4).flatten(2)  # [n, rows, 16 · groups of columns]
    skipped = first_column % 16
    return kept[:, :, skipped : skipped + columns]


def sequence_heads(sequences: range, heads: range, all_heads: int, origin: Origin | None) -> Tensor:
    """`sequence · heads + head` of matrices, int64 `[sequences · heads]`, as the larger call numbers (`origin`)."""
    first, all_heads = (0, all_heads) if origin is None else (origin.matrix, origin.heads)
    sequence = torch.arange(sequences.start, sequences.stop, device="cpu")
    return (first + sequence[:, None] * all_heads + torch.arange(heads.start, heads.stop, device="cpu")).flatten()


def positions(rows: range, columns: range, origin: Origin | None) -> tuple[range, range]:
    """Rows and columns of a tile as they are numbered in the larger call."""
    if origin is None:
        return rows, columns
    row, column = origin.row, origin.column
    return range(rows.start + row, rows.stop + row), range(columns.start + column, columns.stop + column)


def dropout_mask(dropout_seed: Tensor, dropout_p: float, *, batch: int, heads: int, seq_q: int, seq_k: int) -> Tensor:
    """The dropout mask of a call as a tensor, for inspection and tests.

    `attention(..., dropout_p=p, dropout_seed=seed)` uses this mask on every backend. For packed (variable-length)
    calls, `batch` is the number of sequences, and rows and columns count from the start of each sequence.

    Args:
        dropout_seed: `[2]` int64 (seed, offset), as given to the call (see `draw_dropout_seed`).
        dropout_p: probability of dropping, in [0, 1).
        batch: batch entries or sequences.
        heads: query heads.
        seq_q: query rows.
        seq_k: key columns.

    Returns:
        bool `[batch, heads, seq_q, seq_k]` on the seed's device, True = kept.

    Raises:
        TypeError: the seed is no int64 tensor, or a size is no int.
        ValueError: the seed has another shape, the probability is out of range, or a size is negative.

    Reference:
        Salmon et al., "Parallel random numbers: as easy as 1, 2, 3" (2011): Philox. The module's
        docstring has the counters.
    """
    check_dropout_seed(dropout_seed)
    for name, size in (("batch", batch), ("heads", heads), ("seq_q", seq_q), ("seq_k", seq_k)):
        check_count(name, size, "pass that of the call")
    dropout_p = resolve_dropout(dropout_p, dropout_seed, dropout_seed.device)
    sequence_head = torch.arange(batch * heads, device=dropout_seed.device)
    mask = keep_tile(dropout_seed, dropout_p, sequence_head, range(seq_q), range(seq_k))
    return mask.view(batch, heads, seq_q, seq_k)
