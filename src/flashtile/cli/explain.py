"""`flashtile explain`: which backend and kernel would serve a call, found without running it."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

import torch

import flashtile
from flashtile import io_model
from flashtile.bench.cases import DTYPES
from flashtile.bench.report import Table
from flashtile.cli.errors import UserError
from flashtile.io_model.text import comparison_lines


@dataclass(frozen=True)
class Call:
    """A call of `flashtile.attention`: shapes and flags. `seq_k`, `heads_kv`, `head_dim_v`: None = as the other."""

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


def explain(call: Call) -> flashtile.Explanation:
    """The answer of `flashtile.explain`, on tensors that hold no data."""
    dtype = parse_dtype(call.dtype)
    seq_k = call.seq_q if call.seq_k is None else call.seq_k
    heads_kv = call.heads_kv or call.heads

    def meta(*shape: int) -> torch.Tensor:
        if math.prod(shape) * dtype.itemsize >= 2**63:
            raise UserError(
                f"--batch, --seq, --heads, --head-dim: expected tensors of fewer than 2**63 bytes, got shape {shape}; "
                "no GPU holds them"
            )
        return torch.empty(shape, dtype=dtype, device="meta")

    try:
        return flashtile.explain(
            meta(call.batch, call.seq_q, call.heads, call.head_dim),
            meta(call.batch, seq_k, heads_kv, call.head_dim),
            meta(call.batch, seq_k, heads_kv, call.head_dim_v or call.head_dim),
            causal=call.causal,
            window=parse_window(call.window),
            dropout_p=call.dropout_p,
            deterministic=call.deterministic,
            backend=call.backend,
            device=call.device or ("cuda" if torch.cuda.is_available() else "cpu"),
        )
    except (TypeError, ValueError) as error:
        raise UserError(str(error)) from None


def describe_io(call: Call, measure: bool = False) -> Table | str:
    """What the call moves and computes, standard and in tiles, by `flashtile.io_model`; or why that is not told.

    Args:
        call: as for `explain`, which served it.
        measure: measures the rates of a processor, which no table has.
    """
    name = call.device or ("cuda" if torch.cuda.is_available() else "cpu")
    if name == "cpu" and not measure:
        return "IO model: --io measures the rates of this processor, in about two seconds"
    if name.startswith("cuda"):
        name = torch.cuda.get_device_name(torch.device(name))
    device = io_model.measure_cpu() if name == "cpu" else io_model.find_device(name)
    if device is None:
        return f"IO model: no data sheet of {name}; there are {', '.join(io_model.DEVICES)}"
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
