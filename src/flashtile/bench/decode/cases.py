"""Cases of the decoding benchmark: sizes, tensors, and the bytes of the cache, which bound the speed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor

import flashtile
from flashtile.bench.cases import DTYPES
from flashtile.bench.companions.movement import Copy

OP = "decode"
PHASE = "fwd"

#: Largest cache of a case, keys and values together.
_MOST_BYTES = 60 * 10**9


@dataclass(frozen=True)
class DecodeCase:
    """One step of decoding. Field names are the keys of `case` in a record.

    B sequences of S rows each, of which the last `Sq` belong to the queries; H query heads, Hkv key/value heads, D and
    Dv columns. `page` is the rows of a page, None for a cache in one piece. With `append` the new rows are rotated and
    stored first.
    """

    B: int
    S: int
    H: int = 32
    Hkv: int = 8
    D: int = 128
    Dv: int = 128
    Sq: int = 1
    page: int | None = None
    append: bool = False
    dtype: str = "bf16"

    @property
    def name(self) -> str:
        """A readable identifier, such as `decode-b8-s4096-h32:8-d128-page16-bf16`, that `--cases` patterns match."""
        parts = [OP, f"b{self.B}", f"s{self.S}", f"h{self.H}:{self.Hkv}", f"d{self.D}"]
        parts += [f"v{self.Dv}"] * (self.Dv != self.D) + [f"q{self.Sq}"] * (self.Sq > 1)
        parts += [f"page{self.page}"] * (self.page is not None) + ["append"] * self.append
        return "-".join([*parts, self.dtype])

    @property
    def torch_dtype(self) -> torch.dtype:
        return DTYPES[self.dtype]

    def record(self) -> dict[str, Any]:
        """The `case` object of a record: the same for every implementation."""
        return asdict(self)

    def flops(self, phase: str) -> None:
        """Bytes are what counts."""

    def bytes(self, phase: str) -> int:
        """Bytes of the cache, each row read once. Queries, new rows and results are too few to count."""
        return self.B * self.S * self.Hkv * (self.D + self.Dv) * self.torch_dtype.itemsize


@dataclass
class DecodeInputs:
    """Tensors of a case, which all implementations share: none changes what another reads.

    Attributes:
        q: `[B, Sq, H, D]`.
        k_cache, v_cache: `[B, S, Hkv, D]`, or `[pages, page, Hkv, D]`.
        k, v: `[B, Sq, Hkv, D]`, what is appended; None where nothing is.
        lengths: `[B]` int32, rows before anything is appended.
        block_table: `[B, S / page]` int32, or None.
        cos, sin: tables of the rotation, where something is appended.
    """

    q: Tensor
    k_cache: Tensor
    v_cache: Tensor
    k: Tensor | None
    v: Tensor | None
    lengths: Tensor
    block_table: Tensor | None
    cos: Tensor | None
    sin: Tensor | None


def make_inputs(case: DecodeCase, device: torch.device, seed: int = 0) -> DecodeInputs:
    """Random tensors; pages lie in no order."""
    generator = torch.Generator(device).manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device=device, dtype=case.torch_dtype)

    outer, table = (case.B, case.S), None
    if case.page is not None:
        pages = case.S // case.page
        outer = (case.B * pages, case.page)
        table = torch.randperm(case.B * pages, generator=generator, device=device).view(case.B, pages).int()
    k_cache, v_cache = normal(*outer, case.Hkv, case.D), normal(*outer, case.Hkv, case.Dv)
    k = v = cos = sin = None
    if case.append:
        k, v = normal(case.B, case.Sq, case.Hkv, case.D), normal(case.B, case.Sq, case.Hkv, case.Dv)
        cos, sin = flashtile.rotary_tables(case.S, case.D, device=device)
    before = case.S - (case.Sq if case.append else 0)
    lengths = torch.full((case.B,), before, dtype=torch.int32, device=device)
    return DecodeInputs(normal(case.B, case.Sq, case.H, case.D), k_cache, v_cache, k, v, lengths, table, cos, sin)


def decode_cases(device: torch.device) -> list[DecodeCase | Copy]:
    """Cases of a device, after copies from the size of the smallest case to that of the largest."""
    if device.type != "cuda":
        return _cpu_cases()
    plain = [DecodeCase(batch, rows) for rows in (4096, 32768, 131072) for batch in (1, 8, 32, 128)]
    some = (DecodeCase(8, 4096), DecodeCase(1, 131072), DecodeCase(8, 32768), DecodeCase(32, 32768))
    paged = [DecodeCase(case.B, case.S, page=page) for case in some for page in (16, 64, 256)]
    appending = [DecodeCase(case.B, case.S, append=True) for case in some]
    return [
        *(Copy("bf16", 1024 * mib) for mib in (16, 64, 256, 1024, 4096)),
        *(case for case in plain if case.bytes(PHASE) <= _MOST_BYTES),
        *paged,
        *appending,
    ]


def _cpu_cases() -> list[DecodeCase | Copy]:
    """Caches of small and large models, groups of 1 to 8 and one key/value head for all, pages and new rows."""
    sizes = (
        DecodeCase(1, 2048, 8, 8, 64, 64),
        DecodeCase(1, 4096, 8, 1, 64, 64),
        DecodeCase(1, 8192, 16, 4, 64, 64),
        DecodeCase(16, 512),
        DecodeCase(2, 2048, 32, 4),
        DecodeCase(4, 4096),
        DecodeCase(1, 32768),
        DecodeCase(4, 1024, page=16),
        DecodeCase(4, 1024, page=256),
        DecodeCase(4, 1024, append=True),
    )
    return [Copy("fp32", 1024 * 64), *(replace(case, dtype=dtype) for dtype in ("fp32", "bf16") for case in sizes)]


def quick_cases(cases: Sequence[Any]) -> list[Any]:
    """A few of them: a copy, the first, and the first with pages and with new rows."""
    wanted = (
        lambda case: isinstance(case, Copy),
        lambda case: isinstance(case, DecodeCase),
        lambda case: isinstance(case, DecodeCase) and case.page is not None,
        lambda case: isinstance(case, DecodeCase) and case.append,
    )
    return [next(case for case in cases if matches(case)) for matches in wanted]
