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

import threading
from typing import Any

import torch
from torch import Tensor
from torch.torch_version import TorchVersion

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


#: Whether `seeds_from` says what PyTorch draws on a GPU, by the headers that come with it.
_KNOWN = torch.version.hip is None and TorchVersion(torch.__version__) < "2.15"
#: Seeds of a block. It takes about `_SINGLE` launches, so it is made after as many draws from its part of a generator's
#: numbers.
_BLOCK, _SINGLE = 4096, 64
_MOST_BLOCKS = 32


def next_dropout_seed(tensor: Tensor) -> Tensor:
    """`draw_dropout_seed` on the device of a tensor for an eager, unobserved call, with the same numbers and generator
    state; on a GPU mostly without a launch. The seed may share memory with others, and nobody writes to it."""
    if _KNOWN and tensor.is_cuda:
        index = tensor.get_device()
        # A graph that is being captured draws anew at each replay.
        if torch._C._cuda_getDevice() == index and not torch._C._cuda_isCurrentStreamCapturing():
            place = tensor.device, torch._C._cuda_getCurrentRawStream(index)
            seed = _SEEDS.draw(torch.cuda.default_generators[index], *place)
            if seed is not None:
                return seed
    return draw_dropout_seed(tensor.device)


class SeedBlocks:
    """Seeds drawn ahead. A seed is a function of a generator's seed and offset, and a draw advances the offset by 4. A
    block thus serves the draws of a span of offsets, in any order, whatever else draws in between."""

    def __init__(self) -> None:
        # By device, stream, and part of the numbers of a generator: the block, and how many draws found none.
        self._blocks: dict[tuple[Any, ...], Tensor] = {}
        self._missed: dict[tuple[Any, ...], int] = {}
        self._drawing = threading.Lock()

    def draw(self, generator: Any, device: torch.device, stream: int) -> Tensor | None:
        """The next seed; None where there is no block, and nothing is drawn. The stream is the current one."""
        with self._drawing:
            call, seed = generator.get_offset() // 4, generator.initial_seed()
            number, place = divmod(call, _BLOCK)
            key = device, stream, seed, number
            block = self._blocks.get(key)
            if block is None:
                if len(self._missed) >= _MOST_BLOCKS:
                    self._blocks.clear()
                    self._missed.clear()
                self._missed[key] = missed = self._missed.get(key, 0) + 1
                if missed <= _SINGLE:
                    return None
                block = self._blocks[key] = seeds_from(seed, number * _BLOCK, device)
            generator.set_offset(4 * call + 4)
            return block[place]


_SEEDS = SeedBlocks()


@torch.inference_mode(mode=False)
@torch.no_grad()
def seeds_from(seed: int, first: int, device: torch.device) -> Tensor:
    """What `draw_dropout_seed` gives on a GPU whose generator has this seed, at the offsets `4 · (first + i)`: int64
    `[4096, 2]`. PyTorch has the thread of each element call Philox with `counter = (offset // 4, thread)`, of 64 bits
    each, and `key = seed`; the second word is the number (ATen/native/cuda/DistributionTemplates.h)."""
    key = torch.full((), seed - (seed >> 63 << 64), dtype=torch.int64, device=device)
    calls = torch.arange(first, first + _BLOCK, device=device)[:, None]
    threads = torch.arange(2, device=device)[None, :]
    words = philox_words(key, (calls & _MASK32, calls >> 32, threads, torch.zeros_like(key)))
    return words[1].bitwise_and_(_MASK32)


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
    """The kept elements of a matrix `[rows, columns]`: bool of that shape. `seed`: `[2]` int64 (seed, offset).
    `stream`: number of the tensor among those of a call."""
    groups = torch.arange((columns + 3) // 4, device=seed.device)[None, :]
    row = torch.arange(rows, device=seed.device)[:, None]
    words = philox_words(seed[0], (groups, row, torch.full_like(row, stream), seed[1]))
    threshold = keep_threshold(dropout_p)
    kept = torch.stack([word.to(torch.int32) >= threshold for word in words], dim=-1)  # [rows, groups, 4]
    return kept.flatten(1)[:, :columns]
