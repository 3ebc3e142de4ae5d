"""Dropout bits: Philox4x32-10 as a pure function of (seed, offset, batch, head, row, column).

Every backend keeps or drops the same weights. One Philox call yields four 32-bit words, which serve the four
elements `(r, c), (r, c+8), (r+8, c), (r+8, c+8)`: in a tensor-core fragment one thread owns exactly these four,
of `S` as well as of `Sᵀ`, so no bits are computed twice and none have to move::

    counter = (column_group, row_group, batch * heads + head, offset)      key = seed (64 bits)
    row_group = (row // 16) * 8 + row % 8          column_group = (column // 16) * 8 + column % 8
    word      = 2 * (row // 8 % 2) + (column // 8 % 2)
    kept      ⇔ int32(word) >= keep_threshold(dropout_p)

Reference: Salmon, Moraes, Dror, Shaw, "Parallel random numbers: as easy as 1, 2, 3" (SC 2011).
"""

from __future__ import annotations

import torch
from torch import Tensor

from flashtile.ops.attention.checks import check_dropout_seed, resolve_dropout

_ROUNDS = 10
_MULTIPLIER_A, _MULTIPLIER_B = 0xD2511F53, 0xCD9E8D57
_WEYL_A, _WEYL_B = 0x9E3779B9, 0xBB67AE85
_MASK32 = 0xFFFFFFFF


def keep_threshold(dropout_p: float) -> int:
    """The int32 below which a signed random word drops its weight: P(word < threshold) = dropout_p."""
    return min(round(dropout_p * 2**32), 2**32 - 1) - 2**31


def draw_dropout_seed(device: torch.device | str | None = None) -> Tensor:
    """Draws a dropout seed from torch's generator of `device`, without synchronising.

    Returns:
        `[2]` int64 tensor (seed, offset), each in [0, 2³²). `torch.manual_seed` makes it reproducible, and a
        CUDA graph that captures the draw gets fresh bits at each replay.
    """
    return torch.randint(2**32, (2,), dtype=torch.int64, device=device)


def philox_words(seed: Tensor, counters: tuple[Tensor, Tensor, Tensor, Tensor]) -> tuple[Tensor, ...]:
    """Philox4x32-10 in int64 arithmetic: four words for each broadcast counter, in the low 32 bits."""
    c0, c1, c2, c3 = counters
    key_a, key_b = seed & _MASK32, (seed >> 32) & _MASK32
    for _ in range(_ROUNDS):
        # A product of two 32-bit numbers fills the 64 bits, sign included, so both its halves are exact. What
        # c1 and c3 carry above 32 bits falls away with the next mask.
        product_a, product_b = c0 * _MULTIPLIER_A, c2 * _MULTIPLIER_B
        c0 = ((product_b >> 32) ^ c1 ^ key_a) & _MASK32
        c2 = ((product_a >> 32) ^ c3 ^ key_b) & _MASK32
        c1, c3 = product_b, product_a
        key_a, key_b = (key_a + _WEYL_A) & _MASK32, (key_b + _WEYL_B) & _MASK32
    return c0, c1, c2, c3


def keep_tile(seed: Tensor, dropout_p: float, sequence_head: Tensor, rows: range, columns: range) -> Tensor:
    """Which weights of a tile are kept.

    Args:
        seed: `[2]` int64 (seed, offset).
        dropout_p: in [0, 1).
        sequence_head: int64 `[n]`, `batch * heads + head` of each matrix.
        rows: query rows of the tile (step 1).
        columns: key columns of the tile (step 1).

    Returns:
        bool `[n, len(rows), len(columns)]`, True = kept.
    """
    row_groups, column_groups = (
        torch.arange(span.start // 16 * 8, (span.stop + 15) // 16 * 8, device=seed.device) for span in (rows, columns)
    )
    counters = (
        column_groups[None, None, :],
        row_groups[None, :, None],
        sequence_head[:, None, None],
        seed[1],
    )
    threshold = keep_threshold(dropout_p)
    # [word, n, row_group, column_group], a word and its two groups giving 2 × 8 rows and 2 × 8 columns of 16
    kept = torch.stack([word.to(torch.int32) >= threshold for word in philox_words(seed[0], counters)])
    kept = kept.unflatten(3, (-1, 8)).unflatten(2, (-1, 8)).unflatten(0, (2, 2))
    kept = kept.permute(2, 3, 0, 4, 5, 1, 6).flatten(4, 6).flatten(1, 3)
    first_row, first_column = rows.start % 16, columns.start % 16
    return kept[:, first_row : first_row + len(rows), first_column : first_column + len(columns)]


def dropout_mask(dropout_seed: Tensor, dropout_p: float, *, batch: int, heads: int, seq_q: int, seq_k: int) -> Tensor:
    """Materialises the dropout mask of a call, for inspection and tests.

    The mask of `attention(..., dropout_p=p, dropout_seed=seed)` is the same on every backend. For packed
    (variable-length) calls, `batch` is the number of sequences, and rows and columns count from the start of
    each sequence.

    Args:
        dropout_seed: `[2]` int64 (seed, offset), as given to the call (see `draw_dropout_seed`).
        dropout_p: probability of dropping, in [0, 1).
        batch: batch entries or sequences.
        heads: query heads.
        seq_q: query rows.
        seq_k: key columns.

    Returns:
        bool `[batch, heads, seq_q, seq_k]` on the seed's device, True = kept.
    """
    check_dropout_seed(dropout_seed)
    dropout_p = resolve_dropout(dropout_p, dropout_seed, dropout_seed.device)
    sequence_head = torch.arange(batch * heads, device=dropout_seed.device)
    mask = keep_tile(dropout_seed, dropout_p, sequence_head, range(seq_q), range(seq_k))
    return mask.view(batch, heads, seq_q, seq_k)
