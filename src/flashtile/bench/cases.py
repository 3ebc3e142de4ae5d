"""Cases of the attention benchmark: shapes, their work in FLOPs and bytes, and their tensors.

Shape letters: B batch, S sequence, H query heads, Hkv key/value heads, D head_dim of q and k, Dv head_dim of v.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, ClassVar

import torch
from torch import Tensor

from flashtile import BlockMask
from flashtile.bench import masks
from flashtile.bench.base import AnyCase
from flashtile.bench.values import NORMAL, TRAINED, activations, changed

#: The backward recomputes the scores and makes four more products of the size of the forward's two.
_BACKWARD_FLOPS = 2.5


@dataclass(frozen=True)
class Case(AnyCase):
    """One attention call.

    With `lengths` the batch is packed: B sequences of these lengths, the longest of them S. `mask` names a mask of
    `masks.py`; that of documents is causal where the case is. `bias` is the shape of one that wants its gradient,
    `1HSS` or `BHSS`. `values` names what the tensors hold (`values.py`). `Sk` is the number of keys if it is not S, the
    number of queries. `function` names a function of scores or a mask of `masks.py`; such a mask is all that is
    visible, and `causal` says whether it is.
    """

    op: ClassVar[str] = "attention"
    later: ClassVar[tuple[str, ...]] = ("function",)

    B: int
    S: int
    H: int
    Hkv: int
    D: int
    Dv: int
    causal: bool = False
    window: tuple[int | None, int | None] | None = None
    dropout_p: float = 0.0
    dtype: str = "bf16"
    lengths: tuple[int, ...] | None = None
    mask: str | None = None
    softcap: float | None = None
    bias: str | None = None
    values: str = NORMAL
    Sk: int | None = None
    function: str | None = None

    def __post_init__(self) -> None:
        if self.Sk is not None:
            assert not (self.causal or self.window or self.lengths or self.bias), "keys have positions of their own"
        if self.lengths is not None:
            assert (self.B, self.S) == (len(self.lengths), max(self.lengths))
            assert not (self.dropout_p or self.changes_scores), "the check of a packed batch has none of these"
        if self.mask is not None:
            assert self.window is None and not self.dropout_p, "a mask stands alone"
            assert not self.causal or self.segments is not None, "the mask holds all that is visible"
        if self.bias is not None:
            assert self.bias in ("1HSS", "BHSS") and not self.dropout_p
            assert self.segments is None, "the check of a bias has one sequence in each batch entry"
        if self.function is not None:
            assert self.B == 1 and self.H == self.Hkv and self.lengths is None, "the check picks heads of one sequence"
            others = self.mask, self.bias, self.softcap, self.window, self.Sk
            assert all(part is None for part in others) and not self.dropout_p, "a function stands alone"
            if self.function in masks.MASKS:
                assert self.causal == (self.function in masks.CAUSAL)
            else:
                assert self.function in masks.SCORES
        assert self.values == NORMAL or (self.lengths is None and self.H == self.Hkv and self.Sk is None), (
            "other values are for plain calls"
        )

    @property
    def name(self) -> str:
        """Such as `d64-causal-s2048-bf16`."""
        parts = [
            f"d{self.D}" if self.D == self.Dv else f"d{self.D}:{self.Dv}",
            "causal" if self.causal else "full",
            self.window and "w" + ":".join("inf" if n is None else str(n) for n in self.window),
            self.H != self.Hkv and f"g{self.H // self.Hkv}",
            self.dropout_p and f"p{self.dropout_p}",
            self.mask,
            self.softcap is not None and f"cap{self.softcap:g}",
            self.bias and f"bias{self.bias}",
            self.function,
            self.values != NORMAL and self.values,
            (f"s{self.S}" if self.lengths is None else f"packed{self.tokens}") + (f":{self.Sk}" if self.Sk else ""),
            self.dtype,
        ]
        return "-".join(str(part) for part in parts if part)

    @property
    def keys(self) -> int:
        """Keys of a batch entry, or of the longest sequence of a packed batch."""
        return self.S if self.Sk is None else self.Sk

    @property
    def shown(self) -> masks.Mask | None:
        """What mask or function show; None where that follows from causal and window."""
        return masks.find_mask(self.mask or self.function, self.B, self.S, self.keys, self.causal)

    @property
    def has_mask_tensor(self) -> bool:
        """Whether the mask is a tensor of booleans, not a block mask."""
        return self.shown is not None and self.shown.tensor is not None

    @property
    def tokens(self) -> int:
        """Queries of the whole batch."""
        return self.B * self.S if self.lengths is None else sum(self.lengths)

    @property
    def changes_scores(self) -> bool:
        """Whether there is more to the scores than product, band and dropout."""
        changes = self.mask, self.softcap, self.bias, self.function
        return any(part is not None for part in changes)

    @property
    def segments(self) -> tuple[int, ...] | None:
        """Lengths of the parts that do not see each other: of a packed batch, or of each batch entry's documents."""
        return self.lengths if self.shown is None else self.shown.parts

    @property
    def bias_shape(self) -> tuple[int, ...] | None:
        return None if self.bias is None else (self.B if self.bias[0] == "B" else 1, self.H, self.S, self.S)

    def arguments(self) -> dict[str, Any]:
        """Keyword arguments of `flashtile.attention`, without tensors and masks."""
        return {name: getattr(self, name) for name in ("causal", "window", "dropout_p", "softcap")}

    def shapes(self) -> tuple[tuple[int, ...], ...]:
        """Shapes of q, k and v in flashtile's layout."""
        rows = (self.B, self.S) if self.lengths is None else (self.tokens,)
        key_rows = rows if self.Sk is None else (self.B, self.Sk)
        return (*rows, self.H, self.D), (*key_rows, self.Hkv, self.D), (*key_rows, self.Hkv, self.Dv)

    def visible_pairs(self) -> float:
        """(query, key) pairs of one head, over the batch, that count as work."""
        if self.shown is not None:
            return self.shown.pairs
        entries, sequences = (self.B, (self.S,)) if self.lengths is None else (1, self.lengths)
        return entries * sum(count * self._pairs(seq) for seq, count in Counter(sequences).items())

    def _pairs(self, seq: int) -> float:
        """Pairs of one sequence: queries × keys, by convention half if causal, the exact number for a window."""
        if self.window is None:
            return seq * (self.Sk or seq) / (2 if self.causal else 1)
        left, right = self.window
        left = seq if left is None else left
        right = 0 if self.causal else seq if right is None else right
        return sum(min(seq - 1, row + right) - max(0, row - left) + 1 for row in range(seq))

    def flops(self, phase: str) -> float:
        """Floating-point operations of phase "fwd" or "bwd"."""
        forward = 2 * self.H * self.visible_pairs() * (self.D + self.Dv)
        return forward if phase == "fwd" else _BACKWARD_FLOPS * forward

    def bytes(self, phase: str) -> int:
        """Bytes that must move at least: every input read once, every output written once."""
        q, out = self.H * self.D, self.H * self.Dv
        key_value = self.Hkv * (self.D + self.Dv)
        key_rows = self.tokens if self.Sk is None else self.B * self.Sk
        once = self.tokens * (q + out) + key_rows * key_value + math.prod(self.bias_shape or (0,))
        return (once if phase == "fwd" else 2 * once) * self.torch_dtype.itemsize


def packed_case(lengths: Sequence[int], heads: int, head_dim: int, causal: bool, dtype: str = "bf16") -> Case:
    """Sequences of these lengths one after another, as many key/value heads as query heads."""
    sizes = (len(lengths), max(lengths), heads, heads, head_dim, head_dim)
    return Case(*sizes, causal=causal, dtype=dtype, lengths=tuple(lengths))


@dataclass
class Inputs:
    """Tensors of a case in flashtile's layout."""

    q: Tensor  # `[B, S, H, D]`, or `[tokens, H, D]` of a packed batch, and k, v and dout accordingly
    k: Tensor
    v: Tensor
    dout: Tensor
    dropout_seed: Tensor | None  # `[2]` int64
    cu_seqlens: Tensor | None  # `[B + 1]` int32, where each sequence of a packed batch starts
    bias: Tensor | None  # `[1 or B, H, S, S]`
    block_mask: BlockMask | None  # the case's mask, causal where the case is; None where it is a tensor
    mask: Tensor | None  # `[1 or B, 1, 1 or S, keys]` of booleans
    tables: tuple[Tensor, ...]  # what the case's function of scores reads

    def named(self) -> dict[str, Tensor]:
        """What may have a gradient, by name."""
        found = {"q": self.q, "k": self.k, "v": self.v} | ({} if self.bias is None else {"bias": self.bias})
        return found | {f"table{number}": table for number, table in enumerate(self.tables)}


def make_inputs(case: Case, device: torch.device) -> Inputs:
    """Random normal inputs, drawn on the device, or what `case.values` makes of them."""
    generator = torch.Generator(device).manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device=device).to(case.torch_dtype)

    if case.values.startswith(TRAINED):
        layer = activations(device)[int(case.values.removeprefix(TRAINED))]
        q, k, v = (tensor.to(case.torch_dtype) for tensor in layer)
    else:
        q, k, v = changed(case.values, *(normal(*shape) for shape in case.shapes()))
    dropout_seed = torch.tensor([1234567, 89], device=device) if case.dropout_p else None
    block_mask, mask = make_masks(case, device)
    dout = normal(*case.shapes()[0][:-1], case.Dv)
    cu_seqlens = None if case.lengths is None else cumulative(case.lengths, device)
    bias = None if case.bias_shape is None else normal(*case.bias_shape)
    tables = masks.tables(case.function, case.H, case.S, generator)
    return Inputs(q, k, v, dout, dropout_seed, cu_seqlens, bias, block_mask=block_mask, mask=mask, tables=tables)


def make_masks(case: Case, device: torch.device) -> tuple[BlockMask | None, Tensor | None]:
    """A case's mask as a block mask, or as a tensor of booleans."""
    shown = case.shown or masks.Mask(0)
    return shown.block_mask(device), shown.tensor and shown.tensor(device)


def cumulative(lengths: Sequence[int], device: torch.device) -> Tensor:
    """`[batch + 1]` int32: where each sequence starts, and where the last one ends."""
    return torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, device=device)
