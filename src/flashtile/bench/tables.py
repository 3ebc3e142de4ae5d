"""The tables of cases that are measured, by name, and choosing from them.

Every device has the tables "default", "grouped" (heads) and "features" (dropout, biases, masks and windows in the
shapes of models). On a GPU there are also "values" (other numbers than normal ones, forward alone) and more kinds of
attention next to the plain one: "mla" (head sizes 192 and 128), "window", "varlen" (packed batches), "masks" (block
masks and all else that changes scores), "shapes" (head sizes, lengths and windows that no other table has), "float32",
"functions" (scores and masks as Python functions), and two tables of shapes drawn at random, "random" and "random-odd".
"""

from __future__ import annotations

import fnmatch
import functools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, TypeVar

import torch

from flashtile.bench.cases import Case, packed_case
from flashtile.bench.errors import ChoiceError
from flashtile.bench.masks import PADDING, documents, long_tailed_lengths, random_pairs, random_tiles
from flashtile.bench.problem import AnyCase
from flashtile.bench.random_shapes import common_cases, odd_cases
from flashtile.bench.values import BATCH, MADE, MODEL, NORMAL, trained

_AnyCase = TypeVar("_AnyCase", bound=AnyCase)

DEFAULT = "default"
ALL = "all"


def cuda_cases() -> list[Case]:
    """16,384 tokens and a model width of 2048 in every case, bf16, as published attention benchmarks use."""
    return [
        Case(16384 // seq, seq, 2048 // head_dim, 2048 // head_dim, head_dim, head_dim, causal=causal)
        for head_dim in (64, 128, 256)
        for causal in (False, True)
        for seq in (512, 1024, 2048, 4096, 8192, 16384)
    ]


def value_cases() -> list[Case]:
    """Every kind of values in two sequences of 8,192 tokens, and what a trained model's layers compute at 4,096."""
    made = [
        Case(2, 8192, heads, heads, head_dim, head_dim, causal=causal, dtype=dtype, values=values)
        for dtype in ("bf16", "fp16")
        for head_dim, heads in ((64, 16), (128, 16), (256, 8))
        for causal in (False, True)
        for values in MADE
    ]
    shape = (BATCH, MODEL.context, MODEL.heads, MODEL.heads, MODEL.head_dim, MODEL.head_dim)
    layers = [
        Case(*shape, causal=True, dtype=dtype, values=values)
        for dtype in ("bf16", "fp16")
        for values in (NORMAL, *map(trained, range(MODEL.layers)))
    ]
    return [*made, *layers]


def cpu_cases() -> list[Case]:
    """Four heads of 64, 1k to 8k tokens, both dtypes, and one case each for a window and for dropout."""
    plain = [
        Case(1, seq, 4, 4, 64, 64, causal=causal, dtype=dtype)
        for dtype in ("fp32", "bf16")
        for causal in (False, True)
        for seq in (1024, 2048, 4096, 8192)
    ]
    window = Case(1, 4096, 4, 4, 64, 64, causal=True, window=(256, 0), dtype="fp32")
    dropout = Case(1, 2048, 4, 4, 64, 64, causal=True, dropout_p=0.1, dtype="fp32")
    return [*plain, window, dropout]


def cpu_grouped_cases() -> list[Case]:
    """A prompt of 1,024 tokens with 32 query and 8 key/value heads of 128; short sequences in a batch; one key/value
    head for all."""
    sizes = (1, 1024, 32, 8, 128, 128), (4, 256, 16, 4, 64, 64), (1, 1024, 8, 1, 64, 64)
    return [
        Case(*size, causal=causal, dtype=dtype)
        for size in sizes
        for dtype in ("fp32", "bf16")
        for causal in (False, True)
    ]


def cpu_feature_cases() -> list[Case]:
    """What changes or hides scores, with 8 heads of 64, and windows of Swin."""
    changes: list[dict[str, Any]] = [{"mask": PADDING}, {"mask": random_pairs(0.5)}, {"bias": "1HSS"}]
    return [
        case
        for dtype in ("fp32", "bf16")
        for case in (
            *(Case(2, 512, 8, 8, 64, 64, dtype=dtype, **change) for change in changes),
            Case(1, 2048, 8, 8, 64, 64, causal=True, window=(255, 0), dtype=dtype),
            Case(1, 1024, 16, 4, 64, 64, causal=True, window=(127, 0), dtype=dtype),
            Case(64, 49, 4, 4, 32, 32, bias="1HSS", dtype=dtype),
        )
    ]


def grouped_cases() -> list[Case]:
    """64 query heads and 8 key/value heads of 128, batch 2."""
    return [
        Case(2, seq, 64, 8, 128, 128, causal=causal)
        for causal in (False, True)
        for seq in (2048, 4096, 8192, 16384, 32768)
    ]


def mla_cases() -> list[Case]:
    """128 heads of 192 for q and k and of 128 for v, as multi-head latent attention has them in training."""
    return [Case(1, 8192, 128, 128, 192, 128, causal=causal) for causal in (False, True)]


def window_cases() -> list[Case]:
    """128 keys visible, the query's own among them."""
    return [Case(1, 8192, 128, 128, 64, 64, causal=True, window=(127, 0))]


def varlen_cases() -> list[Case]:
    """One packed batch of 65,536 tokens, with heads × head_dim = 2048 as in the default table."""
    lengths = long_tailed_lengths()
    return [
        packed_case(lengths, 2048 // head_dim, head_dim, causal) for head_dim in (64, 128) for causal in (False, True)
    ]


def mask_cases() -> list[Case]:
    """Block-sparse beside dense, narrow windows, biases, documents beside the same packed, and a soft cap."""
    head_dims = (64, 128)
    names = [None, *(random_tiles(density) for density in (0.05, 0.1, 0.25, 0.5))]
    tiles = [_sixteen_heads(1, 16384, head_dim, mask=name) for head_dim in head_dims for name in names]
    windows = [
        _sixteen_heads(1, seq, 64, causal=True, window=(visible - 1, 0))
        for visible in (128, 1024, 4096)
        for seq in (8192, 16384, 32768, 65536)
    ]
    biases = [_sixteen_heads(4, seq, head_dim, bias="1HSS") for head_dim in head_dims for seq in (2048, 4096)]
    packed = [
        case
        for head_dim in head_dims
        for case in (
            _sixteen_heads(1, 65536, head_dim, causal=True, mask=documents()),
            packed_case(long_tailed_lengths(), 16, head_dim, causal=True),
        )
    ]
    return [*tiles, *windows, *biases, *packed, _sixteen_heads(4, 4096, 128, causal=True, softcap=30.0)]


def feature_cases() -> list[Case]:
    """Dropout, biases and masks in the shapes of models that have them, each beside the same call without."""
    with_dropout = [
        Case(8, 1024, 12, 12, 64, 64, causal=True, dropout_p=0.1),  # GPT-2
        Case(16, 512, 16, 16, 64, 64, dropout_p=0.1),  # BERT-large
        *(
            Case(16384 // seq, seq, 2048 // head_dim, 2048 // head_dim, head_dim, head_dim, dropout_p=0.1)
            for head_dim in (32, 64, 128, 256)
            for seq in (1024, 4096)
        ),
        Case(4, 4096, 16, 16, 96, 96, dropout_p=0.1),
        *(
            Case(1, 16384, 2048 // head_dim, 2048 // head_dim, head_dim, head_dim, dropout_p=0.1)
            for head_dim in (64, 128)
        ),
    ]
    biases = [
        Case(16, 512, 16, 16, 64, 64, bias="1HSS"),  # T5
        Case(2, 1536, 16, 16, 64, 64, bias="BHSS"),  # of pairs
        Case(64, 768, 4, 4, 32, 32, bias="1HSS"),  # triangle attention
        Case(4096, 49, 6, 6, 32, 32, bias="1HSS"),  # windows of Swin
        Case(4, 2048, 16, 16, 96, 96, bias="1HSS"),
        Case(4, 2048, 8, 8, 256, 256, bias="1HSS"),
        Case(1, 8192, 8, 8, 64, 64, bias="1HSS"),
    ]
    sizes = (8, 2048, 32), (2, 12288, 8)
    hidden = [
        Case(batch, seq, heads, heads, 64, 64, mask=mask)
        for batch, seq, heads in sizes
        for mask in (PADDING, random_pairs(0.5))
    ]
    plain = [replace(case, dropout_p=0.0, bias=None, mask=None) for case in (*with_dropout, *biases, *hidden)]
    return [*with_dropout, *biases, *hidden, *dict.fromkeys(plain)]


def shape_cases() -> list[Case]:
    """Shapes of models that the other tables do not have. What few implementations serve comes last."""
    between = [
        *(_of_size(head_dim, 4096, causal) for head_dim in _BETWEEN for causal in (False, True)),
        *(Case(16, 729, 16, 16, head_dim, head_dim) for head_dim in (72, 80)),  # SigLIP and ViT
        *(
            _of_size(head_dim, 1024, causal)
            for head_dim, causal in ((80, False), (96, True), (192, False), (256, True))
        ),
        *(_of_size(head_dim, 16384, causal) for head_dim, causal in ((80, True), (96, False), (224, True))),
    ]
    windows = [
        Case(1, 32768, 16, 2, 128, 128, causal=True, window=(4096, 0)),
        Case(1, 16384, 32, 8, 128, 128, causal=True, window=(1024, 0)),
        Case(1, 16384, 32, 4, 128, 128, causal=True, window=(1024, 0)),
        Case(2, 8192, 64, 8, 64, 64, causal=True, window=(127, 0)),
    ]
    lengths = [
        Case(1, 32768, 16, 16, 128, 128, causal=True),
        Case(128, 128, 16, 16, 128, 128, causal=True),
        Case(128, 128, 32, 32, 64, 64),
        Case(1, 1000, 32, 8, 128, 128, causal=True),
        Case(64, 128, 12, 12, 64, 64, causal=True),
        Case(64, 197, 12, 12, 64, 64),  # ViT
        Case(4, 4096, 10, 10, 64, 64, Sk=77),  # cross attention of images on text
        Case(4096, 49, 6, 6, 32, 32),  # windows of Swin
    ]
    wide = [
        *(Case(4, seq, 4, 4, 512, 512, causal=causal) for seq in (1024, 4096) for causal in (False, True)),
        Case(4, 1024, 4, 4, 320, 320),
        Case(4, 4096, 4, 4, 320, 320, causal=True),
    ]
    return [*between, *windows, *lengths, *wide]


def float32_cases() -> list[Case]:
    """Heads of all sizes in float32: 8,192 tokens of 1,024 columns, other lengths, and a single wide head, as
    autoencoders of images have it."""
    shapes = [
        *((4, 2048, 1024 // head_dim, head_dim, True) for head_dim in (32, 64, 96, 128, 160, 192, 256, 512)),
        *((4, 2048, 1024 // head_dim, head_dim, False) for head_dim in (64, 128, 256)),
        *((16, 512, 1024 // head_dim, head_dim, True) for head_dim in (64, 128, 256)),
        (64, 197, 12, 64, False),  # ViT
        (1, 1000, 8, 128, True),
        (8, 1024, 8, 96, False),
        (1, 16384, 8, 128, True),
        *((1, tokens, 1, 512, False) for tokens in (1024, 4096, 16384)),
    ]
    return [
        Case(batch, seq, heads, heads, head_dim, head_dim, causal=causal, dtype="fp32")
        for batch, seq, heads, head_dim, causal in shapes
    ]


#: Sizes of heads between the powers of two, and the widest that the kernels for Hopper serve.
_BETWEEN = (72, 80, 96, 104, 112, 160, 192, 224, 256)


def _of_size(head_dim: int, seq: int, causal: bool) -> Case:
    """16,384 tokens of 16 heads, or 8 wide ones."""
    heads = 16 if head_dim < 128 else 8
    return Case(16384 // seq, seq, heads, heads, head_dim, head_dim, causal=causal)


def function_cases() -> list[Case]:
    """Scores and masks as functions, each with 16 heads in one sequence; documents and trees are packed ones."""
    return [
        _sixteen_heads(1, seq, head_dim, causal=causal, function=name)
        for head_dim in (128, 64)
        for name, seq, causal in (
            ("relative", 4096, False),
            ("alibi", 8192, True),
            ("softcap", 8192, True),
            ("waves", 4096, True),
            ("documents", 65536, True),
            ("window", 8192, True),
            ("prefix-lm", 8192, False),
            ("dilated", 8192, True),
            ("neighborhood", 8192, False),
            ("tree", 65536, True),
        )
    ]


def _sixteen_heads(batch: int, seq: int, head_dim: int, **more: Any) -> Case:
    return Case(batch, seq, 16, 16, head_dim, head_dim, **more)


def tables(device: torch.device) -> dict[str, list[Case]]:
    """Name -> cases of a device's tables, the default one first."""
    if device.type != "cuda":
        return {DEFAULT: cpu_cases(), "grouped": cpu_grouped_cases(), "features": cpu_feature_cases()}
    return {
        DEFAULT: cuda_cases(),
        "values": value_cases(),
        "grouped": grouped_cases(),
        "mla": mla_cases(),
        "window": window_cases(),
        "varlen": varlen_cases(),
        "masks": mask_cases(),
        "features": feature_cases(),
        "shapes": shape_cases(),
        "float32": float32_cases(),
        "functions": function_cases(),
        "random": common_cases(),
        "random-odd": odd_cases(),
    }


def table_of(case: Case) -> str:
    """The first table that has a case; "default" for a case of none."""
    return _tables_by_case().get(case, DEFAULT)


@functools.cache
def _tables_by_case() -> dict[Case, str]:
    known = tables(torch.device("cuda"))
    return {case: name for name in reversed(known) for case in known[name]}


def cases_of(device: torch.device, names: Sequence[str] = (), quick: bool = False) -> list[Case]:
    """The cases of the named tables, the default one when none is named, every one for "all". Each once.

    Args:
        device: whose tables.
        names: of tables.
        quick: a few cases that show every kind, instead of all.

    Raises:
        ChoiceError: there is no table of a name.
    """
    known = tables(device)
    unknown = [name for name in names if name not in (*known, ALL)]
    if unknown:
        there_are = ", ".join((*known, ALL))
        raise ChoiceError(f"--table: no {', '.join(unknown)} on {device.type}; there are: {there_are}")
    chosen = list(known) if ALL in names else list(dict.fromkeys(names)) or [DEFAULT]
    cases = (case for name in chosen for case in (_few(known[name], device) if quick else known[name]))
    return list(dict.fromkeys(cases))


def _few(cases: list[Case], device: torch.device) -> list[Case]:
    """The cases of a long table that show every kind; a short table as it is."""
    head_dim, lengths = (128, (2048, 8192)) if device.type == "cuda" else (64, (1024,))
    few = [case for case in cases if case.D == head_dim and case.S in lengths] or cases
    for case in cases:
        if _kind(case) not in map(_kind, few):
            few.append(case)
    return few


def _kind(case: Case) -> tuple[Any, ...]:
    """What a case has of all that not every case has."""
    parts = case.window, case.lengths, case.mask, case.softcap, case.bias, case.Sk
    return *(part is not None for part in parts), case.function


def select_cases(cases: list[_AnyCase], patterns: list[str]) -> list[_AnyCase]:
    """The cases whose name matches one of the shell patterns (`d64-causal-*`); a bare word matches anywhere.

    Raises:
        ChoiceError: a pattern matches no case.
    """
    if not patterns:
        return cases
    chosen: list[_AnyCase] = []
    for pattern in patterns:
        glob = pattern if any(c in pattern for c in "*?[") else f"*{pattern}*"
        found = [case for case in cases if fnmatch.fnmatch(case.name, glob)]
        if not found:
            names = ", ".join(case.name for case in cases)
            raise ChoiceError(f"--cases: {pattern!r} matches no case; there are: {names}")
        chosen += [case for case in found if case not in chosen]
    return chosen
