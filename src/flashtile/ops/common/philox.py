"""Dropout bits: Philox4x32-10, the seed that drives it, and the bits of a matrix that is read row by row.

Every backend drops the same elements, because the bits are a function and not a state. One Philox call yields four
32-bit words. An operation that works on rows uses them for four neighbours in a row, which one thread of a GPU kernel
loads together::

    counter = (column // 4, row, stream, offset)      key = seed (64 bits)
    word    = column % 4
    kept    ⇔ int32(word) >= keep_threshold(dropout_p)

`stream` tells apart the tensors of one call. Attention, whose kernels hold tiles of tensor cores, has a scheme of its
own (`flashtile.ops.attention.philox`).

Reference: Salmon, Moraes, Dror, Shaw, "Parallel random numbers: as easy as 1, 2, 3" (SC 2011).
"""

from __future__ import annotations

import torch
from torch import Tensor

_ROUNDS = 10
#: After so many rounds all words but the last have the broadcast shape of the counters: from then on, in place.
_MIXING_ROUNDS = 3
_MULTIPLIER_A, _MULTIPLIER_B = 0xD2511F53, 0xCD9E8D57
_WEYL_A, _WEYL_B = 0x9E3779B9, 0xBB67AE85
_MASK32 = 0xFFFFFFFF


def keep_threshold(dropout_p: float) -> int:
    """The int32 below which a signed random word drops its element: P(word < threshold) = dropout_p."""
    return min(round(dropout_p * 2**32), 2**32 - 1) - 2**31


def draw_dropout_seed(device: torch.device | str | None = None) -> Tensor:
    """Draws a dropout seed from torch's generator of `device`, without synchronising.

    Args:
        device: the device of the generator and of the seed; None = torch's default device.

    Returns:
        `[2]` int64 tensor (seed, offset), each in [0, 2³²). `torch.manual_seed` makes it reproducible. A CUDA graph
        that captures the draw gets new bits at each replay.
    """
    return torch.randint(2**32, (2,), dtype=torch.int64, device=device)


def philox_words(seed: Tensor, counters: tuple[Tensor, Tensor, Tensor, Tensor]) -> tuple[Tensor, ...]:
    """Philox4x32-10 in int64 arithmetic: four words for each broadcast counter, in the low 32 bits."""
    c0, c1, c2, c3 = counters
    rounds = torch.arange(_ROUNDS, device=seed.device)
    keys_a = ((seed & _MASK32) + rounds * _WEYL_A) & _MASK32
    keys_b = (((seed >> 32) & _MASK32) + rounds * _WEYL_B) & _MASK32
    keys = list(zip(keys_a.unbind(), keys_b.unbind()))
    # A product of two 32-bit numbers fills the 64 bits, sign included, so both its halves are exact. The bits of c1
    # and c3 above 32 fall away with the next mask.
    for key_a, key_b in keys[:_MIXING_ROUNDS]:
        product_a, product_b = c0 * _MULTIPLIER_A, c2 * _MULTIPLIER_B
        c0 = ((product_b >> 32) ^ (c1 ^ key_a)).bitwise_and_(_MASK32)
        c2 = ((product_a >> 32) ^ (c3 ^ key_b)).bitwise_and_(_MASK32)
        c1, c3 = product_b, product_a
    high = torch.empty_like(c0)
    for key_a, key_b in keys[_MIXING_ROUNDS:]:
        product_a, product_b = c0.mul_(_MULTIPLIER_A), c2.mul_(_MULTIPLIER_B)
        torch.bitwise_right_shift(product_b, 32, out=high)
        c0 = c1.bitwise_xor_(high).bitwise_xor_(key_a).bitwise_and_(_MASK32)
        torch.bitwise_right_shift(product_a, 32, out=high)
        mixed = c3.bitwise_xor_(high) if c3.shape == high.shape else c3 ^ high
        c2 = mixed.bitwise_xor_(key_b).bitwise_and_(_MASK32)
        c1, c3 = product_b, product_a
    return c0, c1, c2, c3


def keep_rows(seed: Tensor, dropout_p: float, stream: int, rows: int, columns: int) -> Tensor:
    """The kept elements of a matrix `[rows, columns]`: bool of that shape, True = kept.

    Args:
        seed: `[2]` int64 (seed, offset).
        dropout_p: in [0, 1).
        stream: number of the tensor among those of a call.
        rows: of the matrix.
        columns: of the matrix.
    """
    groups = torch.arange((columns + 3) // 4, device=seed.device)[None, :]
    row = torch.arange(rows, device=seed.device)[:, None]
    words = philox_words(seed[0], (groups, row, torch.full_like(row, stream), seed[1]))
    threshold = keep_threshold(dropout_p)
    kept = torch.stack([word.to(torch.int32) >= threshold for word in words], dim=-1)  # [rows, groups, 4]
    return kept.flatten(1)[:, :columns]
