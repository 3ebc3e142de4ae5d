"""Calls as options of the command line, which show their help without torch: one to explain, and those to tune."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Annotated, Literal

from typer import Argument, Option

from flashtile.bench.start import UserError

#: The name of 8-bit inputs, which have a forward only.
FP8 = "fp8"
_BOTTOM_RIGHT: Literal["bottom_right"] = "bottom_right"


@dataclass(frozen=True)
class Call:
    """A call of `flashtile.attention`, as options say it; 8-bit inputs have factors, sinks a logit for each head."""

    batch: Annotated[int | None, Option(min=0, help="Batch size; default: 1.")] = None
    seq: Annotated[int | None, Option(min=0, help="Number of queries; default: 1024.")] = None
    seq_k: Annotated[int | None, Option(min=0, help="Number of keys; default: as queries.")] = None
    heads: Annotated[int, Option(min=1, help="Query heads.")] = 16
    heads_kv: Annotated[int | None, Option(min=1, help="Key/value heads; default: as query heads.")] = None
    head_dim: Annotated[int, Option(min=1, help="Size of a head of q and k.")] = 64
    head_dim_v: Annotated[int | None, Option(min=1, help="Size of a head of v; default: as q and k.")] = None
    dtype: Annotated[str, Option(help="fp16, bf16, fp32 or fp64; fp8 for 8-bit inputs.")] = "bf16"
    causal: Annotated[bool, Option("--causal", help="No key right of the diagonal.")] = False
    window: Annotated[str | None, Option(help="LEFT,RIGHT keys, such as 256,0 or 256,none.")] = None
    align: Annotated[
        str, Option(help="Where the diagonal of --causal and --window ends: bottom_right or top_left.")
    ] = _BOTTOM_RIGHT
    dropout_p: Annotated[float, Option(help="Probability of dropping a weight.")] = 0.0
    mask: Annotated[str | None, Option(help="Shape of a mask: BHQK with 1s, such as B11K for padding.")] = None
    bias: Annotated[str | None, Option(help="Shape of a learned bias, such as 1HQK.")] = None
    softcap: Annotated[float | None, Option(help="Soft cap of the scores.")] = None
    alibi: Annotated[bool, Option("--alibi", help="With slopes of ALiBi.")] = False
    sinks: Annotated[bool, Option("--sinks", help="With attention sinks, a logit for each query head.")] = False
    block_mask: Annotated[
        str | None, Option(help="A pattern: causal, window:256,0, documents:300,724, prefix:100, big-bird, ….")
    ] = None
    lengths: Annotated[
        str | None, Option(help="Packed sequences, such as 300,1024, in place of --batch and --seq.")
    ] = None
    deterministic: Annotated[bool, Option("--deterministic", help="Bit-for-bit gradients.")] = False
    backend: Annotated[str, Option(help="auto, or one by name: split, hopper, triton, cpu, reference.")] = "auto"
    device: Annotated[
        str | None, Option(help="cpu, cuda, or a GPU that need not be here: h100, or an architecture, sm_90.")
    ] = None

    @property
    def sizes(self) -> tuple[int, int, int]:
        """Sequences, queries and keys of each; of packed sequences one, as long as the longest."""
        if self.lengths is not None:
            longest = max(parse_lengths(self.lengths))
            return 1, longest, longest
        seq_q = 1024 if self.seq is None else self.seq
        return 1 if self.batch is None else self.batch, seq_q, seq_q if self.seq_k is None else self.seq_k

    @property
    def plain(self) -> bool:
        """Whether it is a dense call of 16 bits or more whose scores nothing changes."""
        changed = self.softcap or self.alibi or self.sinks or self.dtype == FP8 or self.align != _BOTTOM_RIGHT
        return self.mask is self.bias is self.lengths is self.block_mask is None and not changed

    @property
    def place(self) -> str:
        """The device as `flashtile.explain` names it."""
        if self.device is None:
            import torch

            return "cuda" if torch.cuda.is_available() else "cpu"
        return self.device

    @property
    def present(self) -> bool:
        """Whether the device is here; of another one, flashtile's table of devices tells what kernels need to know."""
        return self.place.split(":")[0] in ("cpu", "cuda")


def parse_lengths(text: str) -> list[int]:
    """`300,1024` as numbers."""
    if not re.fullmatch(r"\d+(,\d+)*", text.replace(" ", "")):
        raise UserError(f"--lengths: expected the lengths of packed sequences, such as 300,1024, got {text!r}")
    return [int(length) for length in text.split(",")]


#: What can be named, in the order in which it is tuned.
OPERATIONS = ("attention", "decoding", "norms", "losses")


@dataclass(frozen=True)
class Calls:
    """The calls: all combinations of what is given several times, or those of a program."""

    operations: Annotated[
        list[str] | None, Argument(help=f"{', '.join(OPERATIONS)}; default: all of them.", show_default=False)
    ] = None
    program: Annotated[
        str | None, Option(help="Tune what this program calls instead: 'train.py --steps 10' or '-m package.train'.")
    ] = None
    head_dim: Annotated[list[int], Option(min=1, help="Head size; repeat for several.")] = field(
        default_factory=lambda: [64, 128]
    )
    dtype: Annotated[list[str], Option(help="fp16, bf16 or fp32; repeat for several.")] = field(
        default_factory=lambda: ["bf16"]
    )
    causal: Annotated[bool | None, Option(help="One of the two only; default: both.")] = None
    seq: Annotated[list[int], Option(min=1, help="Sequence length; repeat for several.")] = field(
        default_factory=lambda: [1024, 4096]
    )
    heads: Annotated[int, Option(min=1, help="Query heads.")] = 16
    heads_kv: Annotated[int, Option(min=1, help="Key/value heads of a cache.")] = 4
    backend: Annotated[str, Option(help="Of attention: auto, triton or hopper.")] = "auto"
    page_size: Annotated[list[int], Option(min=0, help="Rows of a page of a cache; 0 = no pages.")] = field(
        default_factory=lambda: [0, 16]
    )
    width: Annotated[list[int], Option(min=1, help="Columns of norms; repeat for several.")] = field(
        default_factory=lambda: [4096]
    )
    vocabulary: Annotated[list[int], Option(min=1, help="Columns of losses; repeat for several.")] = field(
        default_factory=lambda: [32000]
    )
