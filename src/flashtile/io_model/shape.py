"""The call that is modelled: sizes, dtype, what is visible, dropout."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


@dataclass(frozen=True)
class Shape:
    """A dense call of `flashtile.attention` and its backward. The arguments mean the same as there.

    Attributes:
        batch: batch entries.
        heads: query heads.
        seq_q: queries.
        head_dim: head dimension of q and k.
        seq_k: keys; None = seq_q.
        heads_kv: key/value heads, a divisor of heads; None = heads.
        head_dim_v: head dimension of v; None = head_dim.
        dtype: dtype of q, k and v.
        causal: hide the keys right of the diagonal.
        align: where the diagonal lies, "bottom_right" or "top_left".
        window: number of keys visible on each side of the diagonal, None = unlimited.
        dropout_p: probability that a weight is dropped, in [0, 1).

    Raises:
        TypeError: dtype is not float16, bfloat16, float32 or float64, or window is no pair.
        ValueError: a size, the alignment, the window or the probability is out of range.
    """

    batch: int
    heads: int
    seq_q: int
    head_dim: int
    seq_k: int | None = None
    heads_kv: int | None = None
    head_dim_v: int | None = None
    dtype: torch.dtype = torch.bfloat16
    causal: bool = False
    align: Literal["bottom_right", "top_left"] = "bottom_right"
    window: tuple[int | None, int | None] | None = None
    dropout_p: float = 0.0

    def __post_init__(self) -> None:
        for name in ("batch", "heads", "seq_q", "head_dim", "seq_k", "heads_kv", "head_dim_v"):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, int) or value < 1):
                raise ValueError(
                    f"{name}: expected an int of at least 1, got {value!r}; a call without work has no model"
                )
        if self.heads % self.kv_heads:
            raise ValueError(f"heads_kv: expected a divisor of heads, {self.heads}, got {self.heads_kv}; change either")
        if self.dtype not in _DTYPES:
            raise TypeError(f"dtype: expected one of {', '.join(map(str, _DTYPES))}, got {self.dtype!r}; cast")
        if self.align not in ("bottom_right", "top_left"):
            raise ValueError(f"align: expected 'bottom_right' or 'top_left', got {self.align!r}; choose one of them")
        if self.window is not None and (not isinstance(self.window, (tuple, list)) or len(self.window) != 2):
            raise TypeError(f"window: expected a pair (left, right), got {self.window!r}; None is an unlimited side")
        if self.window is not None and any(side is not None and side < 0 for side in self.window):
            raise ValueError(f"window: expected sides of at least 0, or None, got {self.window}; None is unlimited")
        if not 0 <= self.dropout_p < 1:
            raise ValueError(f"dropout_p: expected a probability in [0, 1), got {self.dropout_p}; 0 is no dropout")

    @property
    def keys(self) -> int:
        """seq_k, resolved."""
        return self.seq_q if self.seq_k is None else self.seq_k

    @property
    def kv_heads(self) -> int:
        """heads_kv, resolved."""
        return self.heads if self.heads_kv is None else self.heads_kv

    @property
    def dim_v(self) -> int:
        """head_dim_v, resolved."""
        return self.head_dim if self.head_dim_v is None else self.head_dim_v

    @property
    def banded(self) -> bool:
        """Whether a causal mask or a window hides some pairs."""
        return self._band() != (None, None)

    @property
    def score_matrices(self) -> int:
        """Matrices of scores, one for each batch entry and query head."""
        return self.batch * self.heads

    @property
    def pairs(self) -> int:
        """(query, key) pairs of all matrices, hidden ones too."""
        return self.score_matrices * self.seq_q * self.keys

    @property
    def sizes(self) -> dict[str, int]:
        """Bytes of q, k, v, out and lse. A gradient is as large as its tensor."""
        queries, keys = self.batch * self.seq_q * self.heads, self.batch * self.keys * self.kv_heads
        element = self.dtype.itemsize
        return {
            "q": queries * self.head_dim * element,
            "k": keys * self.head_dim * element,
            "v": keys * self.dim_v * element,
            "out": queries * self.dim_v * element,
            "lse": queries * (8 if self.dtype is torch.float64 else 4),
        }

    def visible_pairs(self) -> int:
        """Visible (query, key) pairs of one matrix of scores."""
        first, last = self._visible(torch.arange(self.seq_q, device="cpu"))
        return int((last - first).clamp(min=0).sum())

    def visited_tiles(self, block_q: int, block_k: int) -> int:
        """Tiles of `block_q` queries and `block_k` keys with a visible pair, of one matrix of scores."""
        top = torch.arange(0, self.seq_q, block_q, device="cpu")
        bottom = (top + block_q).clamp(max=self.seq_q) - 1
        first = self._visible(top)[0]
        last = self._visible(bottom)[1]
        tiles = (last + block_k - 1) // block_k - first // block_k
        return int(torch.where(last > first, tiles, 0).sum())

    def _band(self) -> tuple[int | None, int | None]:
        left, right = self.window or (None, None)
        return left, 0 if self.causal else right

    def _visible(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """First visible key of each row, and the one past its last."""
        left, right = self._band()
        diagonal = rows + (0 if self.align == "top_left" else self.keys - self.seq_q)
        first = torch.zeros_like(rows) if left is None else (diagonal - left).clamp(0, self.keys)
        last = torch.full_like(rows, self.keys) if right is None else (diagonal + right + 1).clamp(0, self.keys)
        return first, last
