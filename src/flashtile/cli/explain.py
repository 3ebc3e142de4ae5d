"""`flashtile explain`: which backend and kernel would serve a call, found without running it."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Any

import torch

import flashtile
from flashtile import io_model
from flashtile.bench.cases import DTYPES
from flashtile.bench.report import Table
from flashtile.cli.errors import UserError
from flashtile.io_model.text import comparison_lines


@dataclass(frozen=True)
class Call:
    """A call of `flashtile.attention`: shapes and flags. `seq_k`, `heads_kv`, `head_dim_v`: None = as the other.

    Attributes:
        mask, bias: their dimensions, such as "B11K" (`parse_scores_shape`).
        lengths: of packed sequences, such as "300,1024"; then `batch` and `seq_q` do not count.
    """

    batch: int
    seq_q: int
    seq_k: int | None
    heads: int
    heads_kv: int | None
    head_dim: int
    head_dim_v: int | None
    dtype: str
    causal: bool
    window: str | None
    dropout_p: float
    deterministic: bool
    backend: str
    device: str | None
    mask: str | None = None
    bias: str | None = None
    softcap: float | None = None
    alibi: bool = False
    lengths: str | None = None

    @property
    def plain(self) -> bool:
        """Whether it is a dense call whose scores nothing changes."""
        return self.mask is self.bias is self.lengths is None and not (self.softcap or self.alibi)

    @property
    def place(self) -> str:
        """The device as `flashtile.explain` names it."""
        if self.device is None:
            return "cuda" if torch.cuda.is_available() else "cpu"
        return self.device


def explain(call: Call) -> flashtile.Explanation:
    """The answer of `flashtile.explain`, on tensors that hold no data."""
    dtype = parse_dtype(call.dtype)
    heads_kv = call.heads_kv or call.heads
    options: dict[str, Any] = {}
    rows_q: tuple[int, ...]
    rows_k: tuple[int, ...]
    if call.lengths is None:
        seq_k = call.seq_q if call.seq_k is None else call.seq_k
        rows_q, rows_k, sizes = (call.batch, call.seq_q), (call.batch, seq_k), (call.batch, call.seq_q, seq_k)
    else:
        lengths = parse_lengths(call.lengths)
        if call.seq_k is not None:
            raise UserError("--seq-k: expected none beside --lengths, which keys have too; leave it out")
        rows_q = rows_k = (sum(lengths),)
        sizes = 1, max(lengths), max(lengths)
        options["cu_seqlens_q"] = torch.empty(len(lengths) + 1, dtype=torch.int32, device="meta")
        options["max_seqlen_q"] = options["max_seqlen_k"] = max(lengths)

    def meta(*shape: int, dtype: torch.dtype = dtype) -> torch.Tensor:
        if math.prod(shape) * dtype.itemsize >= 2**63:
            raise UserError(
                f"--batch, --seq, --heads, --head-dim: expected tensors of fewer than 2**63 bytes, got shape {shape}; "
                "no GPU holds them"
            )
        return torch.empty(shape, dtype=dtype, device="meta")

    if call.mask is not None:
        options["mask"] = meta(*parse_scores_shape("--mask", call.mask, call.heads, *sizes), dtype=torch.bool)
    if call.bias is not None:
        options["bias"] = meta(*parse_scores_shape("--bias", call.bias, call.heads, *sizes)).requires_grad_()
    if call.alibi:
        options["alibi_slopes"] = meta(call.heads, dtype=torch.promote_types(dtype, torch.float32))
    try:
        return flashtile.explain(
            meta(*rows_q, call.heads, call.head_dim),
            meta(*rows_k, heads_kv, call.head_dim),
            meta(*rows_k, heads_kv, call.head_dim_v or call.head_dim),
            causal=call.causal,
            window=parse_window(call.window),
            dropout_p=call.dropout_p,
            softcap=call.softcap,
            deterministic=call.deterministic,
            backend=call.backend,
            device=call.place,
            **options,
        )
    except (TypeError, ValueError) as error:
        raise UserError(str(error)) from None


def describe_io(call: Call, name: str, measure: bool = False) -> Table | str:
    """What the call moves and computes, standard and in tiles, by `flashtile.io_model`; or why that is not told.

    Args:
        call: as for `explain`, which served it.
        name: of the device, as `explain` found it (`Explanation.device`).
        measure: measures the rates of a processor, which no table has.
    """
    if not call.plain:
        return "IO model: it has no packed sequences, and none of --mask, --bias, --softcap and --alibi"
    if call.place == "cpu":
        if not measure:
            return "IO model: --io measures the rates of this processor, in about two seconds"
        device = io_model.measure_cpu()
    else:
        # One with a data sheet of its own has other rates than the first of its architecture.
        found = io_model.find_device(call.place) or io_model.find_device(name)
        if found is None:
            return f"IO model: no data sheet of {name}; there are {', '.join(io_model.DEVICES)}"
        device = found
    try:
        shape = io_model.Shape(
            call.batch,
            call.heads,
            call.seq_q,
            call.head_dim,
            call.seq_k,
            call.heads_kv,
            call.head_dim_v,
            dtype=parse_dtype(call.dtype),
            causal=call.causal,
            window=parse_window(call.window),
            dropout_p=call.dropout_p,
        )
        headings, *lines = comparison_lines(shape, device, kernels=True, backend=call.backend)
        return Table(f"IO model: forward and backward on {device.name}", headings, lines)
    except ValueError as error:
        return f"IO model: {error}"


def parse_dtype(name: str) -> torch.dtype:
    if name not in DTYPES:
        raise UserError(f"--dtype: expected one of {', '.join(DTYPES)}, got {name!r}")
    return DTYPES[name]


def parse_window(text: str | None) -> tuple[int | None, int | None] | None:
    """`256,0` or `256,none` as a pair."""
    if text is None:
        return None
    match = re.fullmatch(r"(\d+|none),(\d+|none)", text.replace(" ", "").lower())
    if match is None:
        raise UserError(f"--window: expected LEFT,RIGHT such as 256,0 or 256,none (unlimited), got {text!r}")
    left, right = (None if side == "none" else int(side) for side in match.groups())
    return left, right


def parse_lengths(text: str) -> list[int]:
    """`300,1024` as numbers."""
    if not re.fullmatch(r"\d+(,\d+)*", text.replace(" ", "")):
        raise UserError(f"--lengths: expected the lengths of packed sequences, such as 300,1024, got {text!r}")
    return [int(length) for length in text.split(",")]


def parse_scores_shape(
    option: str, text: str, heads: int, batch: int, seq_q: int, seq_k: int
) -> tuple[int, int, int, int]:
    """The shape of a mask or a bias: `B11K`, each dimension a letter, or 1 where it broadcasts. S is one of Q and K, as
    in the names of benchmarks (`1HSS`)."""
    match = re.fullmatch("([B1])([H1])([QS1])([KS1])", text.upper())
    if match is None:
        raise UserError(
            f"{option}: expected BHQK for [batch, heads, seq_q, seq_k], with 1 where it broadcasts, got {text!r}; a "
            "mask of padding is B11K"
        )
    of_batch, of_heads, of_q, of_k = (letter != "1" for letter in match.groups())
    return batch if of_batch else 1, heads if of_heads else 1, seq_q if of_q else 1, seq_k if of_k else 1
