"""Calls that `flashtile tune` is to tune, as options of the command line, which show their help without torch."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated

from typer import Argument, Option

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
