"""Device memory, checked at every access, shared memory, and the descriptors by which TMA moves tiles between them."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from gluon_emulator.values import BY_TORCH, DType, Value

_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
#: By how many bits an address is shifted for the number of its word.
_SHIFTS = {1: 0, 2: 1, 4: 2, 8: 3}


class Memory(TorchDispatchMode):
    """The tensors that kernels may touch: those given, and all that are made while this mode is on."""

    def __init__(self) -> None:
        super().__init__()
        self._regions: list[tuple[int, int, Tensor]] = []
        self._words_of: dict[tuple[int, int], tuple[Tensor, int]] = {}

    def know(self, *tensors: Any) -> None:
        for tensor in tensors:
            if isinstance(tensor, Tensor) and tensor.numel() and tensor.device.type == "cpu":
                extent = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride()))
                begin = tensor.data_ptr()
                self._regions.append((begin, begin + extent * tensor.itemsize, tensor))

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        self.know(*tree_leaves(result))
        return result

    def load(self, addresses: Tensor, dtype: DType, mask: Tensor) -> Tensor:
        """Elements at addresses; zeros where masked."""
        shown = mask.numpy()  # whose choices of elements take half of the time
        if shown.all():
            words, places = self._find(addresses, dtype)
            return words.take(places).view(dtype.held_as)
        result = torch.zeros(addresses.shape, dtype=dtype.held_as)
        if shown.any():
            words, places = self._find(torch.from_numpy(addresses.numpy()[shown]), dtype)
            result.view(words.dtype).numpy()[shown] = words.take(places).numpy()
        return result

    def store(self, addresses: Tensor, data: Tensor, dtype: DType, mask: Tensor) -> None:
        shown = mask.numpy()
        if shown.any():
            places, stored = addresses.numpy()[shown], data.contiguous().view(_WORDS[dtype.itemsize]).numpy()[shown]
            words, found = self._find(torch.from_numpy(places), dtype)
            words.numpy()[found.numpy()] = stored

    def add(self, addresses: Tensor, data: Tensor, dtype: DType, mask: Tensor) -> Tensor:
        """Returns what was there before all additions."""
        before = self.load(addresses, dtype, mask)
        own, places = addresses[mask].unique(return_inverse=True)
        if own.numel():
            everywhere = torch.ones(own.shape, dtype=torch.bool)
            total = self.load(own, dtype, everywhere).index_add_(0, places, data.expand(mask.shape)[mask])
            self.store(own, total, dtype, everywhere)
        return before

    def box(self, address: int, sizes: Sequence[int], strides: Sequence[int], dtype: DType) -> Tensor:
        """Elements that lie so far apart from an address on, where they are."""
        extent = 1 + sum((size - 1) * stride for size, stride in zip(sizes, strides))
        words, begin = self._words(address, address + extent * dtype.itemsize, dtype)
        place, within = divmod(address - begin, dtype.itemsize)
        assert not within, "an address that is no multiple of its element's size"
        return words.as_strided(sizes, strides, place).view(dtype.held_as)

    def _find(self, addresses: Tensor, dtype: DType) -> tuple[Tensor, Tensor]:
        """The memory that addresses are in as words of the size of an element, and their places there."""
        lowest, highest = torch.aminmax(addresses)
        words, begin = self._words(int(lowest), int(highest) + dtype.itemsize, dtype)
        places = addresses - begin
        if dtype.itemsize > 1:
            within = places.numpy() & (dtype.itemsize - 1)
            assert not within.any(), "an address that is no multiple of its element's size"
            places = places >> _SHIFTS[dtype.itemsize]
        return words, places

    def _words(self, first: int, last: int, dtype: DType) -> tuple[Tensor, int]:
        """The memory with these addresses as words of the size of an element, and where it begins."""
        for number, (begin, end, tensor) in enumerate(self._regions):
            if begin <= first and last <= end:
                if (number, dtype.itemsize) not in self._words_of:
                    storage = tensor.untyped_storage()
                    count = storage.nbytes() // dtype.itemsize
                    words = torch.empty(0, dtype=_WORDS[dtype.itemsize]).set_(storage, 0, (count,))  # type: ignore[call-overload]
                    self._words_of[number, dtype.itemsize] = words, storage.data_ptr()
                return self._words_of[number, dtype.itemsize]
        raise AssertionError(f"access outside of all tensors: {dtype.name} from {first:#x} to {last:#x}")


@dataclass(frozen=True)
class Descriptor:
    """A tensor as TMA sees it: `shape` and `strides` in elements from `address` on, moved in boxes of `block_shape`.
    What is outside is read as 0, or as NaN."""

    dtype: DType
    block_shape: list[int]
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    address: int
    layout: Any = None
    nan_outside: bool = False

    def __post_init__(self) -> None:
        assert self.address % 16 == 0, "TMA reads from multiples of 16 bytes"
        assert all(stride * self.dtype.itemsize % 16 == 0 for stride in self.strides[:-1])
        assert self.strides[-1] == 1 and all(1 <= size <= 256 for size in self.block_shape)

    def inside(self, coordinates: Sequence[Any]) -> tuple[int, tuple[slice, ...]]:
        """The part of a box that is inside of the tensor, and the address of its first element. Sums wrap around 64
        bits."""
        assert len(coordinates) == len(self.shape)
        address, part = self.address, []
        for coordinate, size, length, stride in zip(coordinates, self.block_shape, self.shape, self.strides):
            first = int(coordinate)
            begin = min(max(-first, 0), size)
            part.append(slice(begin, max(min(length - first, size), begin)))
            address += (first + begin) * stride * self.dtype.itemsize
        return (address + 2**63) % 2**64 - 2**63, tuple(part)

    def find(self, memory: Memory, address: int, part: tuple[slice, ...]) -> Tensor:
        """What `inside` has found, where it is."""
        sizes = [along.stop - along.start for along in part]
        if not all(sizes):
            return torch.empty(sizes, dtype=self.dtype.held_as)
        return memory.box(address, sizes, [s if n > 1 else 0 for s, n in zip(self.strides, sizes)], self.dtype)

    def load(self, memory: Memory, address: int, part: tuple[slice, ...]) -> Tensor:
        """The box."""
        found = self.find(memory, address, part)
        if list(found.shape) == self.block_shape:
            return found
        box = torch.full(self.block_shape, math.nan if self.nan_outside else 0, dtype=self.dtype.held_as)
        box[part] = found
        return box


class Shared:
    """A part of shared memory. `unfenced`: what threads have stored there that TMA and products may not see yet;
    `stores`: as many entries as such stores are in all that was allocated with it."""

    def __init__(
        self, data: Tensor, find_unfenced: Callable[[], Tensor], stores: list[None], dtype: DType, layout: Any
    ) -> None:
        self.data, self._find_unfenced, self.stores, self.dtype, self.layout = (
            data,
            find_unfenced,
            stores,
            dtype,
            layout,
        )
        self._slots: dict[int, Shared] = {}

    @functools.cached_property
    def unfenced(self) -> Tensor:
        return self._find_unfenced()  # which few of the views need

    @staticmethod
    def allocate(dtype: DType, shape: Sequence[int], layout: Any) -> Shared:
        data = torch.empty(list(map(int, shape)), dtype=dtype.held_as)
        unfenced = torch.zeros(data.shape, dtype=torch.bool)
        shared = Shared(data, lambda: unfenced, [], dtype, layout)
        shared.poison()
        return shared

    @property
    def shape(self) -> list[int]:
        return list(self.data.shape)

    def poison(self) -> None:
        """What nobody may read: it is about to change."""
        if self.dtype.is_floating:
            self.data.view(_WORDS[self.dtype.itemsize]).fill_(-1)  # a NaN in all of these types
        else:
            self.data.fill_(torch.iinfo(self.data.dtype).max)

    def _viewed(self, function: Any, layout: Any = None) -> Shared:
        return Shared(function(self.data), lambda: function(self.unfenced), self.stores, self.dtype, layout)

    def index(self, place: Any) -> Shared:
        place = int(place)
        if place not in self._slots:
            assert 0 <= place < self.data.shape[0], "outside of what was allocated"
            self._slots[place] = self._viewed(lambda data: data[place], self.layout)
        return self._slots[place]

    def slice(self, first: int, count: int, dim: int = 0) -> Shared:
        return self._viewed(lambda data: data.narrow(dim, first, count), self.layout)

    def permute(self, order: Sequence[int]) -> Shared:
        return self._viewed(lambda data: data.permute(order))

    def reinterpret(self, dtype: DType, shape: Sequence[int], layout: Any) -> Shared:
        shape = list(map(int, shape))
        count = math.prod(shape)  # the beginning of it, or all
        if dtype is self.dtype and shape == self.shape:
            return self._viewed(lambda data: data, layout)
        if dtype is self.dtype:
            return self._viewed(lambda data: data.view(-1)[:count].view(shape), layout)
        data = self.data.view(-1).view(dtype.held_as)[:count].view(shape)
        unfenced = torch.zeros(shape, dtype=torch.bool)
        return Shared(data, lambda: unfenced, [], dtype, layout)

    def load(self, layout: Any = None) -> Value:
        return Value(self.data.clone(), self.dtype, layout)


def dtype_of(dtype: torch.dtype) -> DType:
    return BY_TORCH[dtype]
