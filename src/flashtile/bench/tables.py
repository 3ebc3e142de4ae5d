"""The tables of cases that are measured, by name, and choosing from them."""

from __future__ import annotations

import functools
import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import count, islice, product
from typing import Any

import torch

from flashtile.bench.base import half_dtype, select_named
from flashtile.bench.cases import Case, packed_case
from flashtile.bench.masks import PADDING, long_tailed_lengths
from flashtile.bench.values import BATCH, MADE, MODEL, NORMAL, TRAINED

DEFAULT, ALL = "default", "all"
_BOTH, _HALF = (False, True), ("bf16", "fp16")


def _case(batch: int, seq: int, heads: int, head_dim: int, **more: Any) -> Case:
    """As many key/value heads as query heads, all of one size."""
    return Case(batch, seq, heads, heads, head_dim, head_dim, **more)


def wide_case(seq: int, head_dim: int, **more: Any) -> Case:
    """16,384 tokens and a model width of 2048, as published attention benchmarks use."""
    return _case(16384 // seq, seq, 2048 // head_dim, head_dim, **more)


def _sized(head_dim: int, seq: int, causal: bool) -> Case:
    """16,384 tokens of 16 heads, or 8 wide ones."""
    return _case(16384 // seq, seq, 16 if head_dim < 128 else 8, head_dim, causal=causal)


def long_cases() -> list[Case]:
    """One sequence of 8,192 to 131,072 tokens, with 8 heads of 128, and up to 32,768 with 32."""
    sizes = [(2**power, heads) for power in range(13, 18) for heads in (8, 32) if heads << power <= 2**20]
    return [_case(1, seq, heads, 128, causal=causal) for (seq, heads), causal in product(sizes, _BOTH)]


def value_cases() -> list[Case]:
    """Every kind of values in two sequences of 8,192 tokens, and what a trained model's layers compute at 4,096."""
    layer = _case(BATCH, MODEL.context, MODEL.heads, MODEL.head_dim, causal=True)
    heads = {64: 16, 128: 16, 256: 8}
    made = [
        _case(2, 8192, heads[dim], dim, causal=causal, dtype=dtype, values=values)
        for dtype, dim, causal, values in product(_HALF, heads, _BOTH, MADE)
    ]
    taken = product(_HALF, (NORMAL, *(f"{TRAINED}{layer}" for layer in range(MODEL.layers))))
    return [*made, *(replace(layer, dtype=dtype, values=values) for dtype, values in taken)]


def _cpu_tables() -> dict[str, list[Case]]:
    kinds: list[dict[str, Any]] = [{"dtype": dtype, "causal": each} for dtype in ("fp32", "bf16") for each in _BOTH]
    changes: tuple[dict[str, Any], ...] = ({"mask": PADDING}, {"mask": "random0.5"}, {"bias": "1HSS"})
    features = (
        *(_case(2, 512, 8, 64, **change) for change in changes),
        _case(1, 2048, 8, 64, causal=True, window=(255, 0)),
        Case(1, 1024, 16, 4, 64, 64, causal=True, window=(127, 0)),
        _case(64, 49, 4, 32, bias="1HSS"),  # windows of Swin
    )
    # A prompt with 32 and 8 heads of 128; short sequences; one key/value head for all.
    grouped = (1, 1024, 32, 8, 128, 128), (4, 256, 16, 4, 64, 64), (1, 1024, 8, 1, 64, 64)
    return {
        DEFAULT: [
            *(_case(1, seq, 4, 64, **kind) for kind in kinds for seq in (1024, 2048, 4096, 8192)),
            _case(1, 4096, 4, 64, causal=True, window=(256, 0), dtype="fp32"),
            _case(1, 2048, 4, 64, causal=True, dropout_p=0.1, dtype="fp32"),
        ],
        "grouped": [Case(*size, **kind) for size in grouped for kind in kinds],
        "features": [replace(case, dtype=dtype) for dtype in ("fp32", "bf16") for case in features],
        "card": [
            _case(1, 512, 4, 64, causal=True, dtype="fp32"),
            Case(1, 512, 8, 2, 64, 64, causal=True, dtype="bf16"),
            _case(1, 1024, 4, 64, causal=True, window=(127, 0), dtype="fp32"),
        ],
    }


def varlen_cases(heads: Mapping[int, int], causals: Sequence[bool]) -> list[Case]:
    """One packed batch of 65,536 tokens. `heads`: head_dim -> heads."""
    return [packed_case(long_tailed_lengths(), n, dim, causal) for dim, n in heads.items() for causal in causals]


def mask_cases() -> list[Case]:
    """Block-sparse beside dense, narrow windows, biases, documents beside the same packed, and a soft cap."""
    names = (None, *(f"tiles128:{density:g}" for density in (0.05, 0.1, 0.25, 0.5)))
    windows = [(visible - 1, 1024 * n) for visible in (128, 1024, 4096) for n in (8, 16, 32, 64)]
    packed = varlen_cases({64: 16, 128: 16}, [True])
    return [
        *(_case(1, 16384, 16, head_dim, mask=name) for head_dim in (64, 128) for name in names),
        *(_case(1, seq, 16, 64, causal=True, window=(left, 0)) for left, seq in windows),
        *(_case(4, seq, 16, head_dim, bias="1HSS") for head_dim in (64, 128) for seq in (2048, 4096)),
        *(each for case in packed for each in (replace(case, B=1, S=65536, lengths=None, mask="documents768"), case)),
        _case(4, 4096, 16, 128, causal=True, softcap=30.0),
    ]


def feature_cases() -> list[Case]:
    """Dropout, biases and masks in the shapes of models that have them, each beside the same call without."""
    with_dropout = [
        _case(8, 1024, 12, 64, causal=True),  # GPT-2
        _case(16, 512, 16, 64),  # BERT-large
        *(wide_case(seq, head_dim) for head_dim in (32, 64, 128, 256) for seq in (1024, 4096)),
        _case(4, 4096, 16, 96),
        *(wide_case(16384, head_dim) for head_dim in (64, 128)),
    ]
    biases = [
        _case(16, 512, 16, 64, bias="1HSS"),  # T5
        _case(2, 1536, 16, 64, bias="BHSS"),  # of pairs
        _case(64, 768, 4, 32, bias="1HSS"),  # triangle attention
        _case(4096, 49, 6, 32, bias="1HSS"),  # windows of Swin
        _case(4, 2048, 16, 96, bias="1HSS"),
        _case(4, 2048, 8, 256, bias="1HSS"),
        _case(1, 8192, 8, 64, bias="1HSS"),
    ]
    sizes = (8, 2048, 32), (2, 12288, 8)
    hidden = [_case(*size, 64, mask=mask) for size in sizes for mask in (PADDING, "random0.5")]
    dropped = [replace(case, dropout_p=0.1) for case in with_dropout]
    plain = [replace(case, bias=None, mask=None) for case in (*with_dropout, *biases, *hidden)]
    return [*dropped, *biases, *hidden, *dict.fromkeys(plain)]


def shape_cases() -> list[Case]:
    """Shapes of models that the other tables do not have, among them sizes of heads between the powers of two. Cases
    that few implementations serve come last."""
    few = ((80, 1024, False), (96, 1024, True), (192, 1024, False), (256, 1024, True))
    long = ((80, 16384, True), (96, 16384, False), (224, 16384, True))
    return [
        *(_sized(dim, 4096, causal) for dim in (72, 80, 96, 104, 112, 160, 192, 224, 256) for causal in _BOTH),
        *(_case(16, 729, 16, head_dim) for head_dim in (72, 80)),  # SigLIP and ViT
        *(_sized(*size) for size in (*few, *long)),
        Case(1, 32768, 16, 2, 128, 128, causal=True, window=(4096, 0)),
        Case(1, 16384, 32, 8, 128, 128, causal=True, window=(1024, 0)),
        Case(1, 16384, 32, 4, 128, 128, causal=True, window=(1024, 0)),
        Case(2, 8192, 64, 8, 64, 64, causal=True, window=(127, 0)),
        _case(1, 32768, 16, 128, causal=True),
        _case(128, 128, 16, 128, causal=True),
        _case(128, 128, 32, 64),
        Case(1, 1000, 32, 8, 128, 128, causal=True),
        _case(64, 128, 12, 64, causal=True),
        _case(64, 197, 12, 64),  # ViT
        _case(4, 4096, 10, 64, Sk=77),  # cross attention of images on text
        _case(4096, 49, 6, 32),  # windows of Swin
        *(_case(4, seq, 4, 512, causal=causal) for seq in (1024, 4096) for causal in _BOTH),
        _case(4, 1024, 4, 320),
        _case(4, 4096, 4, 320, causal=True),
    ]


def float32_cases() -> list[Case]:
    """Heads of all sizes in float32: 8,192 tokens of 1,024 columns, other lengths, and single wide heads."""
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
    return [_case(*size, causal=causal, dtype="fp32") for *size, causal in shapes]


#: Lengths of the packed batch of the table "card".
_CARD_LENGTHS = (2048, 1024, 1024, 512, 512, 3000, 72)


def card_cases(dtype: str) -> list[Case]:
    """A few calls of every kind, each within 2 GiB with its peers and its check. The table takes at most 10 minutes on
    any GPU, of which compiling takes the most. `dtype`: of all but the last two, `base.half_dtype`."""
    half = (
        _case(8, 1024, 8, 64, causal=True),
        _case(2, 4096, 8, 64),
        _case(8, 1024, 8, 128),
        _case(2, 4096, 8, 128, causal=True),
        _case(1, 16384, 4, 128, causal=True),
        _case(2, 4096, 4, 256, causal=True),
        Case(2, 4096, 16, 4, 128, 128, causal=True),
        _case(1, 16384, 8, 64, causal=True, window=(1023, 0)),
        packed_case(_CARD_LENGTHS, 8, 128, causal=True),
        _case(4, 1024, 8, 64, bias="1HSS"),
        _case(4, 1024, 8, 64, mask=PADDING),
        _case(8, 1024, 8, 64, causal=True, dropout_p=0.1),
    )
    single = (_case(4, 1024, 8, 64, causal=True, dtype="fp32"), _case(1, 4096, 4, 128, dtype="fp32"))
    return [*(replace(case, dtype=dtype) for case in half), *single]


def function_cases() -> list[Case]:
    """Scores and masks as functions, each with 16 heads in one sequence; documents and trees are packed ones."""
    full = ("relative", "prefix-lm", "neighborhood")
    lengths = {"relative": 4096, "waves": 4096, "documents": 65536, "tree": 65536}
    names = ("relative", "alibi", "softcap", "waves", "documents", "window", "prefix-lm", "dilated", "neighborhood")
    return [
        _case(1, lengths.get(name, 8192), 16, head_dim, causal=name not in full, function=name)
        for head_dim in (128, 64)
        for name in (*names, "tree")
    ]


def host_cases(device: torch.device) -> list[Case]:
    """Calls so small that launching them takes longer than running them: a plain one, then others."""
    plain = _case(1, 128, 2, 64, dtype="bf16" if device.type == "cuda" else "fp32")
    changes: tuple[dict[str, Any], ...] = (
        {"causal": True, "window": (31, 0)}, {"softcap": 30.0}, {"dropout_p": 0.1}, {"mask": PADDING},
        {"mask": "random0.5"}, {"mask": "tiles64:0.5"}, {"bias": "1HSS"}, {"function": "waves"},
        {"function": "alibi", "causal": True},
    )  # fmt: skip
    packed = packed_case((48, 80), 2, 64, causal=False, dtype=plain.dtype)
    return [plain, packed, *(replace(plain, **change) for change in changes)]


# Shapes that nobody chose: drawn at random, the same in every run. A table of chosen shapes says little of the others,
# and a kernel can be tuned to it. Lengths and numbers of tokens are drawn evenly on a scale of logarithms.
# A table with a number behind its name (`random:17`) is drawn from another seed.

#: FLOPs of a forward at most, so that a case takes some 10 ms; bytes of q at most, in 16 bits.
_MOST_FLOPS, _MOST_BYTES = 6e12, 2**29
#: Sequences of a batch at most, and of a packed one.
_MOST_SEQUENCES, _MOST_PACKED = 512, 200
#: Sizes of heads and their numbers; the commonest ones more than once.
_HEAD_DIMS = (32, 40, 48, 56, 64, 64, 64, 72, 80, 88, 96, 112, 120, 128, 128, 128, 144, 160, 176, 192, 208, 240, 256)
_HEADS, _COMMON_HEADS = (4, 6, 8, 12, 16, 20, 24, 32, 40), (8, 12, 16, 32, 32)
#: Kinds of calls, by what they have beside q, k and v. More than half have nothing.
_KINDS = (*("plain",) * 6, "window", "cross", "packed", "dropout")

#: Of small calls: FLOPs of a forward and tokens of a batch at most, sizes of heads and their numbers, and kinds.
_SMALL_FLOPS, _SMALL_TOKENS = 2e10, 2**14
_SMALL_HEAD_DIMS, _SMALL_HEADS = (32, 64, 64, 64, 80, 96, 128, 128, 128, 192, 256), (2, 4, 8, 12, 16, 32)
_SMALL_KINDS = (*("plain",) * 6, "window", "softcap", "packed", "dropout", "padding", "mask", "bias")


def _drawn(candidate: Callable[[random.Random], Case | None], number: int, seed: int) -> list[Case]:
    """The first `number` cases that a function draws; it gives None for a shape that is not measured."""
    draw = random.Random(seed)
    return list(islice(filter(None, (candidate(draw) for _ in count())), number))


def _common_case(draw: random.Random) -> Case | None:
    """Heads of 64 and 128 in bfloat16, with and without a causal mask, grouped and not, of 128 to 32,768 tokens."""
    head_dim = draw.choice((64, 128))
    seq = _logarithmic(draw, 7, 15)
    if draw.random() < 0.4:
        seq = seq // 128 * 128
    batch = max(1, round(2 ** draw.uniform(11, 15) / seq))
    heads, group = draw.choice(_COMMON_HEADS), draw.choice((1, 1, 4, 8))
    if heads % group:
        return None
    causal = draw.random() < 0.6
    if _flops(batch, seq, seq, heads, head_dim) > _MOST_FLOPS:
        return None
    return Case(batch, seq, heads, heads // group, head_dim, head_dim, causal=causal)


def _odd_case(draw: random.Random) -> Case | None:
    """Heads of 32 to 256 in both 16-bit dtypes, 64 to 23,000 tokens; some windows, other keys, packed, dropout."""
    head_dim, seq = draw.choice(_HEAD_DIMS), _odd_length(draw)
    batch = max(1, round(2 ** draw.uniform(11, 15.5) / seq))
    if batch > _MOST_SEQUENCES:
        return None
    heads = draw.choice(_HEADS)
    if 2 * seq * batch * heads * head_dim > _MOST_BYTES:
        return None
    group = draw.choice((1, 1, 1, 2, 4, 8))
    if heads % group:
        return None
    causal, kind = draw.random() < 0.55, draw.choice(_KINDS)
    more: dict[str, Any] = {"dtype": "bf16" if draw.random() < 0.75 else "fp16"}
    if kind == "window":
        more["window"] = (_logarithmic(draw, 5, 11), 0)
    elif kind == "cross":
        more["Sk"] = _logarithmic(draw, 4, 12)
    elif kind == "dropout":
        more["dropout_p"] = 0.1
    if kind == "packed":
        batch, seq, more["lengths"] = _packed(draw, min(batch, _MOST_PACKED), seq)
    elif _flops(batch, seq, more.get("Sk", seq), heads, head_dim) > _MOST_FLOPS:
        return None
    more["causal"] = causal and kind not in ("window", "cross")
    return Case(batch, seq, heads, heads // group, head_dim, head_dim, **more)


def _small_case(draw: random.Random) -> Case | None:
    """Calls below 0.1 ms of a GPU, with heads of 32 to 256; windows, packed batches, dropout, masks, biases."""
    seq = _logarithmic(draw, 4, 12)
    if draw.random() < 0.5:
        seq = max(16, seq // 64 * 64)
    batch = max(1, round(2 ** draw.uniform(4, 14) / seq))
    head_dim, heads, group = draw.choice(_SMALL_HEAD_DIMS), draw.choice(_SMALL_HEADS), draw.choice((1, 1, 4))
    kind, causal = draw.choice(_SMALL_KINDS), draw.random() < 0.5
    flops = _flops(batch, seq, seq, heads, head_dim)
    if heads % group or flops > _SMALL_FLOPS or batch * seq > _SMALL_TOKENS:
        return None
    kinds: dict[str, dict[str, Any]] = {
        "window": {"causal": True, "window": (draw.randrange(8, 512), 0)},
        "softcap": {"causal": causal, "softcap": 30.0},
        "dropout": {"causal": causal, "dropout_p": 0.1},
        "padding": {"mask": PADDING},
        "mask": {"mask": "random0.5"},
        "bias": {"bias": "1HSS"},
    }
    more = kinds.get(kind, {"causal": causal})
    if kind == "packed":
        batch, seq, more["lengths"] = _packed(draw, batch, seq)
    return Case(batch, seq, heads, heads // group, head_dim, head_dim, **more)


def _packed(draw: random.Random, batch: int, longest: int) -> tuple[int, int, tuple[int, ...]]:
    """The sequences of a packed batch: how many, the longest, and all lengths."""
    lengths = tuple(max(8, int(longest * draw.uniform(0.2, 1))) for _ in range(batch))
    return batch, max(lengths), lengths


def _odd_length(draw: random.Random) -> int:
    """A length of which three in ten are powers of two, as many multiples of 8, and the others any."""
    seq = _logarithmic(draw, 6, 14.5)
    if draw.random() >= 0.6:
        return seq
    return max(64, 1 << round(math.log2(seq))) if draw.random() < 0.5 else seq // 8 * 8


def _logarithmic(draw: random.Random, least: float, most: float) -> int:
    """A number from 2**least to 2**most whose logarithm is drawn evenly."""
    return int(2 ** draw.uniform(least, most))


def _flops(batch: int, queries: int, keys: int, heads: int, head_dim: int) -> int:
    """FLOPs of a forward without a mask."""
    return 4 * batch * heads * queries * keys * head_dim


def small_cases(number: int, seed: int) -> list[Case]:
    """`number` calls, each drawn by `_small_case`."""
    return _drawn(_small_case, number, seed)


#: Name of a table -> what draws its cases, their number, and the seed.
_DRAWN = {"random": (_common_case, 40, 5), "random-odd": (_odd_case, 60, 1)}


def tables(device: torch.device) -> dict[str, list[Case]]:
    """Name -> cases of a device's tables, the default one first."""
    if device.type != "cuda":
        return _cpu_tables()
    lengths = (512, 1024, 2048, 4096, 8192, 16384)
    return {
        DEFAULT: [wide_case(seq, dim, causal=causal) for dim in (64, 128, 256) for causal in _BOTH for seq in lengths],
        "values": value_cases(),
        "long": long_cases(),
        "grouped": [Case(2, seq, 64, 8, 128, 128, causal=causal) for causal in _BOTH for seq in (*lengths[2:], 32768)],
        "mla": [Case(1, 8192, 128, 128, 192, 128, causal=causal) for causal in _BOTH],
        "window": [_case(1, 8192, 128, 64, causal=True, window=(127, 0))],
        "varlen": varlen_cases({64: 32, 128: 16}, _BOTH), "masks": mask_cases(), "features": feature_cases(),
        "shapes": shape_cases(), "float32": float32_cases(), "functions": function_cases(),
        "card": card_cases(half_dtype(device)),
        **{name: _drawn(*how) for name, how in _DRAWN.items()},
    }  # fmt: skip


def find_table(case: Case) -> str:
    """The first table that has a case; "default" for a case of none."""
    return _tables_by_case().get(case, DEFAULT)


@functools.cache
def _tables_by_case() -> dict[Case, str]:
    known = tables(torch.device("cuda"))
    known["card"] = [case for dtype in _HALF for case in card_cases(dtype)]  # of any GPU
    return {case: name for name in reversed(known) for case in known[name]}


def cases_named(device: torch.device, names: Sequence[str] = (), quick: bool = False) -> list[Case]:
    """The cases of the named tables, the default one when none is named, every one for "all", each once. `quick`: a few
    cases that show every kind. Raises UserError if there is no table of a name."""
    known = tables(device)
    for name in names:
        drawn, _, seed = name.partition(":")
        if drawn in _DRAWN and drawn in known and seed.isdecimal():
            known[name] = _drawn(*_DRAWN[drawn][:2], int(seed))
    chosen = select_named("--table", names or [DEFAULT], {**known, ALL: []}, device.type)
    if ALL in names:
        chosen = list(known.values())
    return list(dict.fromkeys(case for cases in chosen for case in (_few(cases, device) if quick else cases)))


def _few(cases: list[Case], device: torch.device) -> list[Case]:
    """The cases of a long table that show every kind; a short table as it is."""
    head_dim, lengths = (128, (2048, 8192)) if device.type == "cuda" else (64, (1024,))
    few = [case for case in cases if case.D == head_dim and case.S in lengths] or cases
    for case in cases:
        if _parts(case) not in map(_parts, few):
            few.append(case)
    return few


def _parts(case: Case) -> tuple[Any, ...]:
    """The optional parts that a case has."""
    parts = case.window, case.lengths, case.mask, case.softcap, case.bias, case.Sk
    return *(part is not None for part in parts), case.function
