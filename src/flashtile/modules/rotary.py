"""Rotary position embedding as a module, with cached tables."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

import flashtile
from flashtile.ops.common.sizes import exporting, known


class Source(NamedTuple):
    """What tables were made from: `frequencies`, the buffer `inv_freq`, and `version`, how often it had been written to
    (None in inference mode; -1 in a compiled graph: the next call outside makes the tables again)."""

    frequencies: Tensor
    version: int | None


class RotaryEmbedding(nn.Module):
    """Rotates queries and keys in place, by tables that are created once and grow with the sequences.

    Args:
        dim: elements of a head that are rotated; even.
        base: base of the first frequencies `base ** (-2i / dim)`. Later, `inv_freq` counts.
        interleaved: pairs are `(x[2i], x[2i + 1])`, else `(x[i], x[i + dim / 2])`.
        scale_base: scale base of xPos (`flashtile.xpos_scale`): queries grow and keys decay with the position. None =
            no xPos.
        device: device of the frequencies.
        scaling: for contexts longer than those of training (`flashtile.RotaryScaling`).

    Attributes:
        inv_freq: float32 `[dim / 2]`, radians per position of each pair. The tables are made from it, and made again
            when it was replaced or written to; a compiled graph notices only the former. A cast of the model leaves it.
    """

    inv_freq: Tensor

    def __init__(
        self, dim: int, base: float = 10000.0, interleaved: bool = False, scale_base: float | None = None,
        device: torch.device | str | None = None, scaling: flashtile.RotaryScaling | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        self.dim = dim
        self.base = base
        self.interleaved = interleaved
        self.scale_base = scale_base
        self.scaling = scaling
        frequencies = flashtile.rotary_frequencies(dim, base, scaling, device)
        self.register_buffer("inv_freq", frequencies, persistent=False)
        self._tables: tuple[Tensor, Tensor, Tensor | None, Tensor | None] | None = None
        self._made_from: Source | None = None

    def tables(self, positions: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
        """cos and sin for at least this many positions, and with xPos also the tables of the keys; float32."""
        if exporting() and not torch.compiler.is_dynamo_compiling():
            # Tables of some length would bound that of the exported model.
            return self._compute_tables(positions, device)
        made = self._tables
        rows = 0 if made is None else made[0].shape[0]
        if not known(rows < positions) and not known(rows >= positions):
            return self._compute_tables(positions, device)
        if made is None or rows < positions or made[0].device != device or self._is_stale(self._made_from):
            made = self._make_tables(positions, device)
            # Fake ones, of a call that only asks for shapes, hold no values to keep; those made under torch.func
            # transforms are wrapped for them, and could be neither copied nor pickled afterwards.
            if type(made[0]) is Tensor and not torch._C._are_functorch_transforms_active():
                self._tables, self._made_from = made, self._source()
        return made

    def _source(self) -> Source:
        """The source of tables that are made now."""
        frequencies = self.inv_freq
        if torch.compiler.is_compiling():
            return Source(frequencies, -1)
        return Source(frequencies, None if frequencies.is_inference() else frequencies._version)

    def _is_stale(self, source: Source | None) -> bool:
        """Whether the frequencies were replaced or written to since then. Nothing reads them."""
        if source is None or self._buffers["inv_freq"] is not source.frequencies:
            return True
        if torch.compiler.is_compiling() or source.version is None:
            return False
        return source.frequencies._version != source.version

    def _apply(self, fn: Any, recurse: bool = True) -> RotaryEmbedding:
        frequencies = self.inv_freq
        super()._apply(fn, recurse)
        moved = self.inv_freq
        # A cast would round them, and `to_empty` leaves memory that nobody has written.
        if not moved.is_meta:
            self.inv_freq = (
                self._first_frequencies(moved.device) if frequencies.is_meta else frequencies.to(moved.device)
            )
        return self

    def _first_frequencies(self, device: torch.device) -> Tensor:
        return flashtile.rotary_frequencies(self.dim, self.base, self.scaling, device)

    def _make_tables(self, positions: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
        # Always float32, and outside of autograd and inference mode, so that one call's tables serve any other.
        with torch.inference_mode(False), torch.no_grad():
            return self._compute_tables(positions, device)

    def _compute_tables(
        self, positions: int, device: torch.device
    ) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
        # Frequencies on the meta device have no values, in a model that was made there and got its parameters later.
        frequencies = self._first_frequencies(device) if self.inv_freq.is_meta else self.inv_freq
        if hasattr(frequencies, "full_tensor"):  # a DTensor, where distribute_module has replicated the buffers
            frequencies = frequencies.full_tensor()
        frequencies = frequencies.to(device, torch.float32)
        angles = torch.outer(torch.arange(positions, dtype=torch.float32, device=device), frequencies)
        cos, sin = angles.cos(), angles.sin()
        if self.scaling is not None:
            cos, sin = cos * self.scaling.magnitude, sin * self.scaling.magnitude
        if self.scale_base is None:
            return cos, sin, None, None
        scale = flashtile.xpos_scale(positions, self.dim, self.scale_base, device=device)
        return cos * scale, sin * scale, cos / scale, sin / scale

    def forward(
        self, qkv: Tensor, kv: Tensor | None = None, seqlen_offset: int | Tensor = 0, max_seqlen: int | None = None,
        num_heads_q: int | None = None,
    ) -> Tensor | tuple[Tensor, Tensor]:  # fmt: skip
        """Rotates in place.

        Args:
            qkv: `[batch, seq, 3, heads, head_dim]`, or `[batch, seq, heads_q + 2 heads_kv, head_dim]` with num_heads_q;
                with kv, q alone: `[batch, seq, heads_q, head_dim]`.
            kv: `[batch, seq, 2, heads_kv, head_dim]`.
            seqlen_offset: position of the first row, or `[batch]` integers, one for each sequence.
            max_seqlen: the largest position plus one, which determines the length of the tables; required with offsets
                in a tensor.
            num_heads_q: heads of q in the second layout.

        Returns:
            qkv; with kv, the pair of q and kv.
        """
        if isinstance(seqlen_offset, Tensor):
            if max_seqlen is None:
                raise ValueError(
                    "max_seqlen: expected an int together with offsets in a tensor, got None; it sizes the tables, and "
                    "reading the offsets would synchronise"
                )
            positions = max_seqlen
        else:
            positions = max(qkv.shape[1] + seqlen_offset, max_seqlen or 0)
        cos, sin, cos_k, sin_k = self.tables(positions, qkv.device)
        if kv is None:
            return flashtile.apply_rotary_qkv(
                qkv, cos, sin, cos_k, sin_k, self.interleaved, True,
                seqlen_offsets=seqlen_offset, num_heads_q=num_heads_q,
            )  # fmt: skip
        q = flashtile.apply_rotary(qkv, cos, sin, self.interleaved, True, seqlen_offset)
        of_keys = (cos, sin) if cos_k is None or sin_k is None else (cos_k, sin_k)
        return q, flashtile.apply_rotary_kv(kv, *of_keys, self.interleaved, True, seqlen_offset)

    def extra_repr(self) -> str:
        return f"{self.dim}, base={self.base}, interleaved={self.interleaved}, scale_base={self.scale_base}"
