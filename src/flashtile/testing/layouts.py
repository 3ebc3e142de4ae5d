"""Memory layouts of tensors, apart from their values: wider rows, and addresses that are not aligned."""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Layout:
    """The elements in front of a tensor's first one, and behind each row of its last dimension. An odd number leaves
    16-bit rows that cannot be copied asynchronously, so their tiles lie in shared memory in another way."""

    before: int = 0
    behind_rows: int = 0

    def __str__(self) -> str:
        return f"{self.before} before, {self.behind_rows} behind each row"

    def place(self, tensor: Tensor) -> Tensor:
        """A copy of a tensor with this layout. Elements outside its rows are NaN, or True, to show who reads them."""
        *outer, columns = tensor.shape
        width = columns + self.behind_rows
        poison = float("nan") if tensor.dtype.is_floating_point else True
        storage = tensor.new_full((self.before + math.prod(outer) * width,), poison)
        placed = storage[self.before :].view(*outer, width)[..., :columns]
        return placed.copy_(tensor)


#: Rows at every place modulo 16 bytes, and whole tensors that begin between two places that are multiples of 4 bytes.
ODD_STRIDE = Layout(behind_rows=1)
ODD_ADDRESS = Layout(before=1)
#: Rows in a wider tensor, and an address in its middle, that are multiples of 16 bytes, as TMA needs them.
IN_WIDER_ROWS = Layout(before=8, behind_rows=8)
