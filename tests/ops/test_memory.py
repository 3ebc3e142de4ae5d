"""Which tensors have an address of its own for each element."""

import itertools
import random

import torch
from torch import Tensor

from flashtile.ops.common.memory import overlaps_itself, share_memory

_STRIDES = (0, 1, 2, 3, 4, 6, 8, 12)


def _view(memory: Tensor, numbers: random.Random) -> Tensor:
    dims = numbers.randint(1, 4)
    shape = [numbers.choice((0, 1, 2, 3, 4, 2, 3)) for _ in range(dims)]
    return memory.as_strided(shape, [numbers.choice(_STRIDES) for _ in range(dims)], numbers.randint(0, 40))


def _addresses(view: Tensor) -> list[int]:
    places = itertools.product(*map(range, view.shape))
    return [view.storage_offset() + sum(map(int.__mul__, place, view.stride())) for place in places]


def test_as_the_addresses_say():
    numbers, memory = random.Random(0), torch.empty(300)
    for _ in range(2000):
        one, other = _view(memory, numbers), _view(memory, numbers)
        found, others = _addresses(one), _addresses(other)
        layouts = one.shape, one.stride(), other.shape, other.stride()
        assert overlaps_itself(one) == (len(set(found)) < len(found)), layouts
        if not (one.is_contiguous() and other.is_contiguous() and 0 in (one.numel(), other.numel())):
            assert share_memory(one, other) == bool(set(found) & set(others)), layouts


def test_caches_of_long_sequences_are_told_apart_at_once():
    pool = torch.empty(64, 100_000, 8, 192, device="meta")
    assert not overlaps_itself(pool[..., :128]) and not overlaps_itself(pool.transpose(1, 2)[:, :, ::2])
