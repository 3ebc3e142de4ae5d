"""`flashtile explain`: which backend and kernel would serve a call, found without running it."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import asdict
from typing import Any, Literal, cast

import torch

import flashtile
from flashtile import io_model, patterns
from flashtile.bench.base import DTYPES
from flashtile.bench.report import Table
from flashtile.bench.start import UserError
from flashtile.cli.call import FP8, Call, parse_lengths
from flashtile.io_model.text import comparison_lines


def explain(call: Call) -> flashtile.Explanation:
    """The answer of `flashtile.explain`, on tensors that hold no data."""
    dtype = torch.float8_e4m3fn if call.dtype == FP8 else parse_dtype(call.dtype, also=(FP8,))
    heads_kv = call.heads_kv or call.heads
    options: dict[str, Any] = {}
    sizes = batch, seq_q, seq_k = call.sizes
    rows_q: tuple[int, ...] = (batch, seq_q)
    rows_k: tuple[int, ...] = (batch, seq_k)
    if call.lengths is not None:
        for option, value in (("--batch", call.batch), ("--seq", call.seq), ("--seq-k", call.seq_k)):
            if value is not None:
                raise UserError(
                    f"{option}: expected none beside --lengths, which says how many sequences there are and how long "
                    "queries and keys are; leave it out"
                )
        lengths = parse_lengths(call.lengths)
        rows_q = rows_k = (sum(lengths),)
        options["cu_seqlens_q"] = torch.empty(len(lengths) + 1, dtype=torch.int32, device="meta")
        options["max_seqlen_q"] = options["max_seqlen_k"] = seq_q
    if call.place.split(":")[0] == "cuda" and not torch.cuda.is_available():
        raise UserError(
            f"--device: expected a GPU that is here, got {call.place}, and torch {torch.__version__} finds none; name "
            "one that need not be here, such as h100, or an architecture, such as sm_90"
        )

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
        shape = parse_scores_shape("--bias", call.bias, call.heads, *sizes)
        # 8-bit inputs have no backward.
        options["bias"] = meta(*shape, dtype=torch.bfloat16) if call.dtype == FP8 else meta(*shape).requires_grad_()
    wide = torch.float64 if dtype is torch.float64 else torch.float32
    if call.alibi:
        options["alibi_slopes"] = meta(call.heads, dtype=wide)
    if call.sinks:
        options["sinks"] = meta(call.heads, dtype=wide)
    if call.dtype == FP8:
        sequences = batch if call.lengths is None else len(lengths)
        factors = ("descale_q", "descale_k", "descale_v")
        options |= {name: meta(sequences, heads_kv, dtype=torch.float32) for name in factors}
    q = meta(*rows_q, call.heads, call.head_dim)
    k, v = (meta(*rows_k, heads_kv, width) for width in (call.head_dim, call.head_dim_v or call.head_dim))
    try:
        if call.block_mask is not None:
            options["block_mask"] = parse_block_mask(call.block_mask, seq_q, seq_k).to("meta")
        align = cast(Literal["bottom_right", "top_left"], call.align)
        return flashtile.explain(
            q, k, v, causal=call.causal, align=align, window=parse_window(call.window), dropout_p=call.dropout_p,
            softcap=call.softcap, deterministic=call.deterministic, backend=call.backend, device=call.place, **options,
        )  # fmt: skip
    except (TypeError, ValueError) as error:
        raise UserError(str(error)) from None


def describe_io(call: Call, name: str, measure: bool = False) -> Table | str:
    """Bytes and FLOPs of a call that `explain` served, standard and in tiles, by `flashtile.io_model`; or why they are
    not told. `name`: `Explanation.device`. `measure`: measures the rates of a processor, which no table has."""
    if not call.plain:
        return (
            "IO model: no figures, because it does not cover packed sequences, 8-bit inputs, --mask, --bias, "
            "--softcap, --alibi, --sinks, --align and --block-mask"
        )
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
        batch, seq_q, seq_k = call.sizes
        shape = io_model.Shape(
            batch, call.heads, seq_q, call.head_dim, seq_k, call.heads_kv, call.head_dim_v,
            dtype=parse_dtype(call.dtype), causal=call.causal, window=parse_window(call.window),
            dropout_p=call.dropout_p,
        )  # fmt: skip
        headings, *lines = comparison_lines(shape, device, kernels=True, backend=call.backend)
        return Table(f"IO model: forward and backward on {device.name}", headings, lines)
    except ValueError as error:
        return f"IO model: {error}"


def as_data(call: Call, explanation: flashtile.Explanation, io: Table | str | None) -> dict[str, Any]:
    """The answer for programs: an `Explanation`'s attributes, and the lines of the IO model by their headings."""
    found = {**asdict(explanation), "device_is_here": call.present}
    for kernel in found["kernels"]:  # `summary` says the same in words
        del kernel["tiles"]
    if isinstance(io, Table):
        found["io_model"] = [dict(zip(["computation", *io.headings[1:]], line)) for line in io.lines]
    elif io is not None:
        found["io_model"] = io
    return found


def parse_dtype(name: str, also: tuple[str, ...] = ()) -> torch.dtype:
    if name not in DTYPES:
        raise UserError(f"--dtype: expected one of {', '.join((*DTYPES, *also))}, got {name!r}")
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


#: Name of a pattern -> the fewest and the most numbers behind it, and what makes it of the numbers of queries and keys
#: and of these.
_PATTERNS: dict[str, tuple[int, float, Callable[[int, int, list[int]], flashtile.BlockMask]]] = {
    "causal": (0, 0, lambda q, k, numbers: patterns.causal(q, k)),
    "window": (2, 2, lambda q, k, numbers: patterns.sliding_window(q, k, numbers[0], numbers[1])),
    "documents": (1, math.inf, lambda q, k, numbers: patterns.documents(lengths=numbers)),
    "prefix": (1, 1, lambda q, k, numbers: patterns.prefix_lm(q, *numbers)),
    "butterfly": (0, 1, lambda q, k, numbers: patterns.butterfly(q, *numbers)),
    "big-bird": (0, 1, lambda q, k, numbers: patterns.big_bird(q, *numbers)),
}


def parse_block_mask(text: str, seq_q: int, seq_k: int) -> flashtile.BlockMask:
    """A pattern of `flashtile.patterns`, with numbers: `window:256,0`, `documents:300,724`."""
    name, _, numbers = text.replace(" ", "").partition(":")
    found = [int(number) for number in numbers.split(",")] if re.fullmatch(r"\d+(,\d+)*", numbers) else []
    least, most, make = _PATTERNS.get(name, (math.inf, 0, None))
    if make is None or bool(numbers) != bool(found) or not least <= len(found) <= most:
        raise UserError(
            "--block-mask: expected causal, window:LEFT,RIGHT, documents:LENGTHS, prefix:LENGTH, butterfly[:BLOCK] or "
            f"big-bird[:BLOCK], with numbers of tokens, such as window:256,0, got {text!r}"
        )
    return make(seq_q, seq_k, found)


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
