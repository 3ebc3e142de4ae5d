"""Cases of the benchmark of serving, by table."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch

from flashtile.bench.base import AnyCase

PHASE = "fwd"
#: FLOPs for each byte of the cache from which on products are what limits a call.
BALANCE = 200
#: Queries of a sequence up to which a call is a step of decoding.
_STEP = 16


@dataclass(frozen=True)
class ServingCase(AnyCase):
    """One call of `flashtile.attention_with_kv_cache`.

    B sequences of S rows each, of which the last `Sq` belong to the queries; H query heads, Hkv key/value heads, D and
    Dv columns. `page` is the rows of a page, None for a cache in one piece. With `append` the new rows are rotated and
    stored first. A packed batch has the numbers of `queries` and of rows (`lengths`) of each sequence, the largest of
    them Sq and S. `factors` says what those of a cache in float8_e4m3fn belong to, "head" or "page". The first
    `shared_rows` are the same of all sequences. With `tree` the queries are one, in which each token has two children.
    With `latent` the values are the first columns of the keys.
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
    queries: tuple[int, ...] | None = None
    lengths: tuple[int, ...] | None = None
    factors: str | None = None
    shared_rows: int | None = None
    tree: bool = False
    latent: bool = False

    op: ClassVar[str] = "serving"
    later: ClassVar[tuple[str, ...]] = ("queries", "lengths", "factors", "shared_rows", "tree", "latent")
    causal: ClassVar[bool] = True

    @property
    def name(self) -> str:
        """Such as `q1-b8-s4096-h32:8-d128-page16-bf16`."""
        mixed = self.queries is not None
        parts = [f"mixed{sum(self.queries or ())}" if mixed else f"q{self.Sq}", f"b{self.B}", f"s{self.S}"]
        parts += [f"h{self.H}:{self.Hkv}", f"d{self.D}" if self.D == self.Dv else f"d{self.D}:{self.Dv}"]
        parts += [f"page{self.page}"] * (self.page is not None) + ["append"] * self.append
        parts += [f"shared{self.shared_rows}"] * bool(self.shared_rows) + ["tree"] * self.tree
        parts += ["latent"] * self.latent + [f"e4m3-{self.factors}"] * bool(self.factors)
        return "-".join([*parts, self.dtype])

    @property
    def kind(self) -> str:
        special = {
            "mixed batches": self.queries, "8 bits": self.factors, "shared rows": self.shared_rows,
            "trees": self.tree, "latent attention": self.latent, "chunks of prompts": self.Sq > _STEP,
        }  # fmt: skip
        return f"serving: {next((words for words, there in special.items() if there), 'decoding')}"

    @property
    def rows(self) -> tuple[int, ...]:
        """Rows of each sequence, those of the queries among them."""
        return self.lengths or (self.S,) * self.B

    @property
    def counts(self) -> tuple[int, ...]:
        """Queries of each sequence."""
        return self.queries or (self.Sq,) * self.B

    def flops(self, phase: str) -> float:
        pairs = sum(count * rows - count * (count - 1) // 2 for count, rows in zip(self.counts, self.rows))
        return 2 * self.H * pairs * (self.D + self.Dv)

    def bytes(self, phase: str) -> int:
        """Bytes of the cache, each row read once. Queries, new rows, factors and results are not counted."""
        shared = self.shared_rows or 0
        rows = sum(self.rows) - (self.B - 1) * shared
        columns = self.D if self.latent else self.D + self.Dv
        return rows * self.Hkv * columns * (1 if self.factors else self.torch_dtype.itemsize)

    def unit(self, phase: str) -> str:
        return "TFLOP/s" if self.flops(phase) >= BALANCE * self.bytes(phase) else "GB/s"


#: Rows of latent attention.
_LATENT: dict[str, Any] = {"Hkv": 1, "D": 576, "Dv": 512, "latent": True}
_ROWS = (4096, 16384, 65536)


def mixed_batch(chunks: int, tokens: int, chunk: int, least: int, most: int, **more: Any) -> ServingCase:
    """Chunks, then single tokens, each over rows from `least` to `most`, evenly spread."""
    rows = [least + (most - least) * i // max(1, count - 1) for count in (chunks, tokens) for i in range(count)]
    queries = (chunk,) * chunks + (1,) * tokens
    return ServingCase(len(rows), max(rows), Sq=max(queries), queries=queries, lengths=tuple(rows), **more)


def _cuda_tables() -> dict[str, list[ServingCase]]:
    heads = ((16, 8, 256, 256), (64, 8, 64, 64))
    # 8 chunks of 512 and 120 single tokens at 2k to 16k rows, and each half alone; likewise few with many rows.
    halves, few = ((8, 120), (8, 0), (0, 120)), ((1, 4), (1, 0), (0, 4))
    eight = (ServingCase(8, 16384, page=16), ServingCase(8, 65536, page=16), ServingCase(4, 16384, Sq=512, page=16))
    latent: tuple[dict[str, Any], ...] = (
        {"B": 32, "S": 8192, "page": 64},
        {"B": 32, "S": 8192, "page": 64, "factors": "head"},
        {"B": 4, "S": 16384, "page": 64, "Sq": 512},
    )
    # Chunks of a prompt, and of 4 over rows in use, in pages of each size and in one piece; other heads in some sizes.
    some = ((4096, 256), (16384, 512), (65536, 2048))
    chunks = [(rows, chunk, page) for rows in _ROWS for chunk in (64, 256, 512, 2048) for page in (None, 16, 64, 1)]
    # One query, and five of a speculative step; from one sequence to 128; new rows.
    steps = [(rows, count, page) for rows in _ROWS for count in (1, 5) for page in (None, 16, 64, 1)]
    return {
        "mixed": [
            *(mixed_batch(*half, 512, 2048, 16384, page=page) for page in (16, 64) for half in halves),
            *(mixed_batch(*half, 512, 65536, 65536, page=16) for half in few),
        ],
        "eight-bits": [replace(size, factors=factors) for size in eight for factors in ("head", "page")],
        "shared": [ServingCase(64, 32768 + 512, page=16, shared_rows=32768)],
        "trees": [
            ServingCase(8, 16384, Sq=count, page=16, tree=tree) for count in (16, 63) for tree in (False, True)
        ],
        "latent": [ServingCase(**size, H=count, **_LATENT) for count in (16, 128) for size in latent],
        "chunks": [
            *(ServingCase(1, rows, Sq=chunk, page=16) for rows in _ROWS for chunk in (64, 256)),
            *(ServingCase(4, rows, Sq=chunk, page=page) for rows, chunk, page in chunks),
            *(ServingCase(4, rows, *of, chunk, page) for of in heads for rows, chunk in some for page in (None, 16)),
        ],
        "decode": [
            *(ServingCase(8, rows, Sq=count, page=page) for rows, count, page in steps),
            *(ServingCase(batch, rows) for batch, rows in ((1, 4096), (128, 4096), (32, 32768), (1, 131072))),
            *(ServingCase(16, 8192, 16, 1, 256, 256, page=page) for page in (None, 16)),
            *(ServingCase(8, rows, page=16, append=True) for rows in (4096, 65536)),
        ],
    }  # fmt: skip


def _cpu_tables() -> dict[str, list[ServingCase]]:
    small: dict[str, Any] = {"H": 8, "Hkv": 2, "D": 64, "Dv": 64, "dtype": "fp32"}
    sizes = ((64, 512), (64, 2048), (256, 512), (256, 2048))
    latent = {**_LATENT, "D": 80, "Dv": 64, "H": 8, "dtype": "fp32"}
    # Caches of small and large models, groups of 1 to 8 and one key/value head for all, pages and new rows.
    decoding = (
        ServingCase(1, 2048, 8, 8, 64, 64), ServingCase(1, 4096, 8, 1, 64, 64), ServingCase(1, 8192, 16, 4, 64, 64),
        ServingCase(16, 512), ServingCase(2, 2048, 32, 4), ServingCase(4, 4096), ServingCase(1, 32768),
        ServingCase(4, 1024, page=16), ServingCase(4, 1024, page=256), ServingCase(4, 1024, append=True),
    )  # fmt: skip
    return {
        "mixed": [mixed_batch(*half, 64, 128, 512, page=16, **small) for half in ((2, 6), (2, 0), (0, 6))],
        "eight-bits": [ServingCase(4, 1024, page=16, factors=factors, **small) for factors in ("head", "page")],
        "shared": [ServingCase(8, 576, page=16, shared_rows=512, **small)],
        "trees": [ServingCase(2, 512, Sq=15, page=16, tree=tree, **small) for tree in (True, False)],
        "latent": [ServingCase(4, 1024, page=16, **latent)],
        "chunks": [ServingCase(2, rows, Sq=chunk, page=page, **small) for page in (16, None) for chunk, rows in sizes],
        "decode": [replace(case, dtype=dtype) for dtype in ("fp32", "bf16") for case in decoding],
    }


def tables(device: torch.device) -> dict[str, list[ServingCase]]:
    """Name -> cases."""
    return _cuda_tables() if device.type == "cuda" else _cpu_tables()
