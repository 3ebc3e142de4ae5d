"""The Hopper kernels' own source, run on a CPU by tests/gluon_emulator: results, and what programs owe one another.

The machine has three multiprocessors, so that programs take several tiles each, and draws the order of events by lot.
Sizes are small; thresholds from which on the kernels take another way are lowered to them.
"""

import math
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from types import ModuleType
from typing import Any, NamedTuple

import pytest
import torch

import flashtile
from flashtile._backends import devices
from flashtile.ops.attention import repeated, select
from flashtile.testing import AttentionCase, Inputs, Size, assert_close, check, make_inputs, run, with_arguments
from gluon_emulator import EmulatedHopper, forget_copies
from gluon_emulator.serving import served_by
from support.attention.attention_cases import COMBINED, changed, score_mod_combined
from support.attention.far_alibi import check as check_far_alibi
from support.attention.max_scores import call
from support.attention.max_scores import check as check_max_scores
from support.running.covering import turns

pytestmark = pytest.mark.skipif(
    bool(devices.triton_missing()) or devices.interpreting(), reason="needs Triton, not interpreting"
)
_FP8, _FP16, _BF16, _FP32 = torch.float8_e4m3fn, torch.float16, torch.bfloat16, torch.float32
_SMALL = AttentionCase(batch=1, heads=2, heads_kv=1, seq_q=200, seq_k=330, head_dim=64, head_dim_v=64, dtype=_BF16)
#: `_case(192, 128, seq_q=70, causal=True)`; `_two` has a batch of two.
_case = partial(changed, _SMALL)
_two = partial(changed, replace(_SMALL, batch=2))


@pytest.fixture(autouse=True)
def products_in_float32(monkeypatch):
    """PyTorch on a CPU multiplies matrices of 16 bits up to 30 times more slowly than in float32, and both ways round
    each result once."""
    multiply = torch.Tensor.__matmul__

    def multiply_rounded(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return multiply(a.float(), b.float()).to(a.dtype) if a.dtype in (_BF16, _FP16) else multiply(a, b)

    monkeypatch.setattr(torch.Tensor, "__matmul__", multiply_rounded)


def _check_forward(case: AttentionCase, backend: str, inputs: Inputs | None = None) -> dict[str, torch.Tensor]:
    """Compares what a forward gives, for mechanisms that a backward does not have."""
    inputs = inputs or make_inputs(case)
    kinds = (backend, case.dtype), ("reference", torch.float64), ("reference", case.dtype)
    actual, oracle, eager = (call(case, inputs, *kind, return_lse=True) for kind in kinds)
    for name, cancelled, *values in zip(("out", "lse"), (Size(), Size(1, 1)), actual, oracle, eager):
        assert_close(f"{case}: {name}", *values, cancelled)
    return dict(zip(("out", "lse"), actual))


@pytest.fixture
def hopper(monkeypatch):
    """Makes a machine that serves from now on what asks for "hopper"."""

    def make(seed: int = 0, held: int = 0, **thresholds: Any) -> EmulatedHopper:
        emulated = EmulatedHopper(multiprocessors=3, seed=seed, held=held)
        small = dict.fromkeys(("HALF_CAUSAL", "HALF_ODD", "HALF_WIDE", "HALF_WIDE_CAUSAL", "_MORE_ROUNDS"), 0)
        small |= dict.fromkeys(("HALF_WINDOW", "HALF_WINDOW_WIDE"), -1)
        for name, value in {**small, **thresholds}.items():
            (module,) = (each for each in emulated.modules.values() if _defines(each, name))
            setattr(module, name, value)
        repeated.forget_calls()  # which remember the machine before
        monkeypatch.setattr(select, "implementation", served_by(emulated))
        return emulated

    return make


def _defines(module: ModuleType, name: str) -> bool:
    defining = "configs", "schedule", "backward_configs", *["launch"] * (name == "forward_splits")
    return module.__name__.rpartition(".")[2] in defining and name in vars(module)


class _Calls(NamedTuple):
    """Calls that are compared with the oracle, and what holds of them all.

    Attributes:
        cases: the calls.
        thresholds: what the machine is made with.
        same: names of results that have the same bits in each order of events, () for all: the orders after the first
            are compared with it instead of the oracle.
        orders: of events, so many.
        launches, never: a kernel that is launched, and one that is not.
        ends: the kernels that are launched last; sums of divided heads count if they are named.
        values: what `_spread` makes of the inputs.
        check: compares with the oracle.
    """

    cases: Iterable[AttentionCase]
    thresholds: dict[str, Any] = {}
    same: tuple[str, ...] | None = None
    orders: int = 1
    launches: str | None = None
    never: str | None = None
    ends: tuple[str, ...] = ()
    values: str | None = None
    check: Callable[..., dict[str, torch.Tensor]] = check


_MASKS: dict[str, dict[str, Any]] = {
    "full": {}, "causal": {"causal": True}, "window": {"window": (90, 20)},
    "top-left": {"window": (70, None), "align": "top_left"}, "in-order": {"causal": True, "deterministic": True},
}  # fmt: skip
_TOP_LEFT = _MASKS["top-left"]
_IN_ORDER = _MASKS["in-order"]
#: Heads that meet every mask; others differ from these in the chunks of their columns.
_ROWS = ((64, 64), (128, 128), (192, 128), (256, 256))
_CHUNKS = ((40, 72), (80, 80), (96, 96), (160, 144), (272, 40), (192, 320), (320, 272), (512, 384))
_PACKED = {"lengths_q": (129, 0, 1, 70), "lengths_k": (129, 33, 1, 90)}
_PACKED_LONG = {"lengths_q": (140, 1, 0, 200), "lengths_k": (129, 33, 70, 270)}
_PACKED_EVEN = {"lengths_q": (129, 0, 70), "lengths_k": (136, 33, 90)}
_LAST_KEYS = {"window": (None, 20), "align": "top_left"}
_FUNCTION = {"score_mod": True, "constant": ("score_mod",)}
_BACKWARD, _END, _SHARES = "attention_backward_kernel", "attention_end_kernel", "attention_shares_kernel"
_BEGIN, _BIAS_GRADIENT = "attention_begin_kernel", "attention_bias_gradient_kernel"
_CAPTURED_GRADIENT = "attention_captured_gradient_kernel"
_FLOAT32_FORWARD = "attention_float32_forward_kernel"


def _float32_ends(kernels: str) -> tuple[str, ...]:
    parts = (_BEGIN, *["attention_convert_kernel"] * 4)
    return (*parts, f"{kernels}_dv_kernel", *[f"{kernels}_dk_dq_kernel"] * 2)


#: Rows of these biases lie at multiples of 16 bytes, so TMA brings their tiles. The last ones end within a tile.
_MOVED: list[dict[str, Any]] = [
    {"bias": "1hqk"},
    {"bias": "11qk", "seq_q": 60, "seq_k": 64},  # in parts
    {"bias": "b1qk", **_IN_ORDER},
    {"bias": "1hqk", "block_mask": (256, 128), "dropout_p": 0.3},
    {"bias": "11qk", "lengths_q": (129, 1), "lengths_k": (136, 130), "key_lengths": (70, 130), "causal": True},
    {
        "bias": "1hqk", "lengths_q": (0, 129, 70, 5), "lengths_k": (40, 136, 0, 1), "alibi_slopes": "h",
        "window": (90, 20),
    },
    {"bias": "b1qk", "block_mask": (128, 256), "key_lengths": (200, 140), "causal": True},
    {"bias": "1hqk", "block_mask": (64, 64)},
    {"bias": "1hqk", **_FUNCTION},
    {"bias": "bhqk", "softcap": 3.0, **_FUNCTION},
    {"bias": "11qk", "lengths_q": (129, 70), "lengths_k": (136, 90), "block_mask": (128, 128), **_FUNCTION},
]  # fmt: skip
_MOVED_CONSTANT = {"seq_k": 328, "bias": "bhqk", "constant": ("bias",), "window": (90, 20), "softcap": 3.0}


def _moved(change: dict[str, Any], d: int) -> AttentionCase:
    return _two(d, **{"seq_q": 130, "seq_k": 200, "dtype": _FP16 if d == 128 else _BF16, **change})


_WIDE = [
    _case(320, 264, heads=3, seq_q=130, seq_k=200, causal=True),
    _two(320, 264, lengths_q=(65, 0, 130, 1), lengths_k=(65, 20, 100, 7), sinks=True, causal=True, softcap=2.0),
    # Few keys with many queries: dk and dv are sums of parts.
    _case(264, 64, heads=4, seq_q=600, seq_k=70),
    _case(448, 64, seq_q=130, seq_k=1, scale=-0.1),
    _case(512, 448, seq_q=1, seq_k=200, dtype=_FP16, sinks=True),
    _case(264, 512, seq_q=200, seq_k=70, sinks=True, causal=True),  # rows that see nothing
    _case(8, 512, seq_q=130, seq_k=200, **_LAST_KEYS),
    _two(264, 64, lengths_q=(80, 129, 0, 40), lengths_k=(190, 64, 9, 50), key_lengths=(150, 64, 9, 0), window=(30, 40)),
    _two(320, 512, seq_q=70, seq_k=200, key_lengths=(70, 0), sinks=True, softcap=2.0),
]
_float32 = partial(changed, replace(_SMALL, dtype=_FP32))
_FLOAT32 = [
    _float32(128, 96, causal=True),
    _float32(72, 64, heads=4, seq_q=600, seq_k=70),  # heads divided
    _float32(96, 64, seq_k=1, scale=-0.1),
    _float32(72, 128, seq_q=1, sinks=True),
    _float32(128, 72, seq_q=300, seq_k=100, sinks=True, causal=True),  # rows that see nothing
    _float32(96, 80, seq_k=200, window=(3, 0)),
    _float32(80, 8, seq_k=200, **_LAST_KEYS),
]
_FLOAT32_WIDE = [
    _float32(256, seq_q=130, seq_k=140, causal=True),
    _float32(512, seq_q=70, seq_k=140, causal=True),  # nothing stays
    _float32(160, seq_q=130, seq_k=1, scale=-0.1),
    _float32(136, 200, seq_q=1, sinks=True),
    _float32(192, 128, seq_q=130, seq_k=70, sinks=True, causal=True),
    _float32(144, seq_q=130, seq_k=200, window=(3, 0)),
    _float32(256, 8, seq_q=130, seq_k=200, **_LAST_KEYS),
    _float32(72, 256, seq_q=130, seq_k=140),
    _float32(264, 320, seq_q=70, seq_k=140),  # the keys of dv do not stay
    _float32(512, 8, seq_q=70, seq_k=140),
    _float32(72, 512, seq_q=70, seq_k=140),
]
_MANY_KEPT = {"_MORE_ROUNDS": 10**9, "_KEPT_BYTES": 10**9}
_lines = partial(changed, replace(_SMALL, batch=3, seq_q=130, seq_k=200))
_WHOLE_LINES = [
    _lines(32, seq_q=200, seq_k=330, window=(90, 20)),
    _lines(96, 40, heads=6, heads_kv=2, seq_k=130),  # two key tiles
    _lines(128, seq_k=330, causal=True),
    _lines(heads=4, seq_q=200, window=(100, 140)),  # wider than keys
    _lines(seq_q=330, seq_k=330, **_TOP_LEFT),
    _lines(seq_k=66, window=(70, None)),  # one key tile
    _lines(dtype=_FP16, dropout_p=0.3),
    _lines(128, sinks=True, softcap=5.0, causal=True),
    _lines(bias="1hqk", mask="b11k", heads_kv=2),
    _lines(**_FUNCTION),
    _lines(scale=-0.1),
    _lines(208, causal=True),
    _lines(192, bias="bhqk", heads_kv=2, seq_k=130),
    _lines(256, 208, mask="b11k", alibi_slopes="h", heads_kv=2),
]
_SHORT = {"_SHORT_LINES": 0, "_SHORT_TILES": 2}
#: The third sequence is longer, the fourth has more queries than keys.
_short = partial(changed, replace(_SMALL, lengths_q=(129, 0, 300, 130, 1, 250), lengths_k=(130, 33, 300, 70, 90, 256)))
_SHORT_SEQUENCES = [
    _short(64, causal=True),
    _short(128, heads=4, heads_kv=2),
    _short(96, **_TOP_LEFT),
    _short(64, window=(70, None)),
    _short(32, dropout_p=0.3, window=(100, 20), dtype=_FP16),
    _short(128, alibi_slopes="bh", softcap=5.0, causal=True),
    _short(64, bias="11qk", sinks=True),
    _short(64, score_mod=True, causal=True),
    _short(32, lengths_q=(3, 0, 70) * 13, lengths_k=(5, 2, 70) * 13),  # a search of two rounds
]
_SLOPES: list[dict[str, Any]] = [
    {"alibi_slopes": "h"},
    {"alibi_slopes": "bh", **_IN_ORDER},
    {"alibi_slopes": "bh", "window": (90, 20), "softcap": 3.0},
    {"alibi_slopes": "h", "align": "top_left", "dropout_p": 0.2, "softcap": 3.0},
    {"alibi_slopes": "bh", "key_lengths": (150, 0), "sinks": True},
    {"alibi_slopes": "bh", **_PACKED, "softcap": 3.0, "deterministic": True},
]
_TABLES: list[dict[str, Any]] = [
    {"mask": "b11k"}, {"mask": "1hq1"}, {"mask": "11qk"}, {"mask": "1111"}, {"bias": "1h1k"},
    {"bias": "bhqk", "bias_dtype": _FP32}, {"bias": "1hqk", "mask": "b1qk", "key_lengths": (300, 129)},
]  # fmt: skip
#: Lists name tiles past the end of the shorter sequences, whole and in part: neither may be computed.
_PACKED_BLOCKS: list[dict[str, Any]] = [
    _IN_ORDER, {"alibi_slopes": "bh", "dropout_p": 0.2}, {},
    {"key_lengths": (129, 20, 0, 130), "deterministic": True},
]  # fmt: skip
_HALF: list[dict[str, Any]] = [
    {}, {"causal": True}, {"dtype": _FP16, "causal": True, "softcap": 5.0},
    {**_PACKED_EVEN, "alibi_slopes": "h", "causal": True}, {"lengths_q": (129, 1, 64), "lengths_k": (136, 130, 1)},
    {"key_lengths": (70,), "sinks": True}, {"window": (64, 64)},
    {"alibi_slopes": "h", "dtype": _FP16, "window": (40, 0), "softcap": 5.0},
    {**_PACKED_EVEN, "sinks": True, "window": (100, 10)},
]  # fmt: skip


def _pairs_of_features() -> list[AttentionCase]:
    """In sizes of several tiles and in 16 bits. TMA brings every second bias."""
    cases = []
    for number, case in enumerate((COMBINED | score_mod_combined()).values()):
        longest, longest_packed = ((198, 148), (200, 144))[number // 2 % 2]
        here: dict[str, Any] = {
            "key_lengths": (190, 17, 0)[: case.batch], "lengths_q": (5, 0, 137), "lengths_k": (133, 4, longest_packed),
            "block_mask": (128, 128),
        }  # fmt: skip
        here = {field: value for field, value in here.items() if getattr(case, field)}
        cases.append(replace(case, seq_q=150, seq_k=longest, dtype=(_BF16, _FP16)[number % 2], **here))
    return cases


def _late(kind: str) -> list[AttentionCase]:
    change: dict[str, Any] = {
        "causal": {"causal": True}, "block mask": {"block_mask": (128, 128)},
        "packed": {"causal": True, "lengths_q": (100, 0, 200), "lengths_k": (200, 33, 300)},
    }[kind]  # fmt: skip
    heads = {
        "causal": ((128, 128, True), (256, 256, True)), "block mask": ((64, 64, True), (192, 128, True)),
        "packed": ((128, 128, True), (128, 128, False)),
    }[kind]  # fmt: skip
    return [_case(d, e, seq_q=200, seq_k=300, deterministic=ordered, **change) for d, e, ordered in heads]


_MAX_SCORES: list[dict[str, Any]] = [
    {"causal": True}, {"window": (90, 20), "softcap": 5.0}, {**_PACKED, "causal": True},
    {"mask": "1hqk", "bias": "bhqk", "sinks": True}, {"score_mod": True, "key_lengths": (200,)},
]  # fmt: skip
_BLOCKS = {"seq_k": 390, "block_mask": (128, 128)}
_SMALLER_TILES = [
    _case(64, **_BLOCKS | {"block_mask": (64, 64)}),
    _case(64, **_BLOCKS | {"block_mask": (64, 128), "bias": "1hqk", **_IN_ORDER}),
    _case(128, **_BLOCKS | {"block_mask": (64, 64), "dropout_p": 0.2, "deterministic": True}),
    _case(128, **_BLOCKS | {"block_mask": (192, 64), "key_lengths": (300,), "alibi_slopes": "bh", "sinks": True}),
    _case(128, **_BLOCKS | {"block_mask": (64, 64), **_PACKED_LONG}),
    _case(192, 128, **_BLOCKS | {"block_mask": (64, 64), "softcap": 5.0}),
    *(_case(d, **_BLOCKS | {"block_mask": (64, 64), "causal": True}) for d in (256, 320)),
]
_VALUES = ("normal", "rising", "large", "sink", "spike")
_NARROW = ((64, _BF16), (64, _FP16))
_OTHERS = ((128, _BF16), (192, _FP16), (512, _BF16))
_KINDS_OF_LATE = ("causal", "packed", "block mask")
_parts = partial(changed, replace(_SMALL, heads=1, seq_q=790, head_dim=128, head_dim_v=128))


def _in_two_orders(name: str, cases: list[AttentionCase], first: int, **facts: Any) -> dict[str, _Calls]:
    """Groups of calls whose results have the same bits in each order of events, `same`, which the `first` ones show."""
    same = facts.pop("same", ())
    return {
        name: _Calls(cases[first:], **facts),
        f"{name}, in two orders": _Calls(cases[:first], same=same, orders=2, **facts),
    }


_GROUPS: dict[str, _Calls] = {
    "heads and masks": _Calls(
        [_case(*heads, **mask) for heads, mask in turns(_ROWS, _MASKS.values(), 2)]
        + [_case(*heads, seq_q=130, seq_k=200, **_IN_ORDER) for heads in _CHUNKS]
    ),
    "scores of fewer columns than a tile has": _Calls([
        _case(224), _case(208, dtype=_FP16, causal=True),
        _case(240, lengths_q=(129, 0, 70), lengths_k=(136, 33, 90)), _case(104, 112, causal=True, softcap=5.0),
    ]),
    **_in_two_orders(
        "wide", _WIDE, 2, ends=("attention_wide_dv_kernel", *["attention_wide_dk_dq_kernel"] * 2)
    ),
    **_in_two_orders(
        "float32", _FLOAT32, 1, launches=_FLOAT32_FORWARD, ends=_float32_ends("attention_float32")
    ),
    **_in_two_orders(
        "float32, wide", _FLOAT32_WIDE, 1, launches=_FLOAT32_FORWARD, ends=_float32_ends("attention_float32_wide")
    ),
    "forward of float32 alone": _Calls(
        [_float32(48, 448, seq_q=130, seq_k=200, window=(3, 0))], launches=_FLOAT32_FORWARD, never=_BEGIN
    ),
    "packed": _Calls([
        _case(d, **_PACKED, **arguments)
        for d, arguments in turns(
            (64, 128, 256, 512), ({}, {"causal": True}, {"window": (70, 0), "deterministic": True})
        )
    ]),
    "largest scores": _Calls(
        [
            _case(d, dtype=dtype, **change)
            for change, (d, dtype) in turns(_MAX_SCORES, ((64, _FP16), (128, _BF16), (320, _BF16)), 2)
        ],
        check=check_max_scores,
    ),
    **_in_two_orders(
        "whole lines", _WHOLE_LINES, 2, thresholds=_MANY_KEPT, same=("dq", "dk", "dv"), never=_END
    ),
    "short packed sequences": _Calls(_SHORT_SEQUENCES, thresholds=_SHORT),
    "short packed sequences, walks in parts": _Calls(
        [_short(64, heads=4, heads_kv=2)], thresholds={**_SHORT, "choose_parts": lambda *_: 2}
    ),
    "bias by TMA": _Calls(
        [_moved(*each) for each in turns(_MOVED, (32, 128, 40, 256))], launches=_BIAS_GRADIENT
    ),
    "constant bias by TMA": _Calls([_moved(_MOVED_CONSTANT, d) for d in (32, 128)], never=_BIAS_GRADIENT),
    "order of a bias's gradient": _Calls(
        [
            _case(seq_k=200, bias="1hqk", lengths_q=(129, 0, 70, 200)),
            _case(seq_k=200, bias="1hqk", block_mask=(128, 128), batch=3),
        ],
        same=("dbias",), orders=2,
    ),
    # The main kernel stores the gradient.
    "bias that no scores share": _Calls(
        [
            _two(d, **{"seq_k": 200, "bias": "bhqk", **change})
            for change, d in turns(
                [
                    {}, {"seq_k": 198, **_IN_ORDER}, {"key_lengths": (100, 200), "dropout_p": 0.3},
                    {"block_mask": (256, 128), "alibi_slopes": "h"}, {"seq_q": 49, "seq_k": 49},
                ],
                (40, 96, 128),
            )
        ],
        never=_BIAS_GRADIENT,
    ),
    "no room for the gradient of scores": _Calls([_case(256, seq_k=328, bias="bhqk")], launches=_BIAS_GRADIENT),
    "slopes": _Calls(
        [
            _two(*heads, seq_q=150, seq_k=200, **change)
            for change, heads in turns(_SLOPES, ((64, 64), (192, 128), (256, 256)))
        ]
    ),
    # Small outputs in float16, whose rounding alone makes most of the error that is allowed.
    "slopes before their terms are rounded": _Calls([
        _two(
            192, 64, seq_q=127, seq_k=300, dtype=_FP16, key_lengths=(65, 127), bias="bhqk", alibi_slopes="h",
            sinks=True, causal=True, align="top_left", softcap=2.0, scale=-0.2,
        )
    ]),
    # A key of a head has one owner, which adds in the order of its steps.
    "order of slopes": _Calls(
        [_case(heads=4, heads_kv=2, alibi_slopes="h", causal=True)],
        same=("dalibi_slopes",), orders=2,
    ),
    "all in order": _Calls(
        [
            _case(heads=4, heads_kv=2, alibi_slopes="h", **_IN_ORDER),
            _case(128, heads=4, heads_kv=2, seq_q=260, seq_k=390, **_IN_ORDER),
        ],
        same=(), orders=2,
    ),
    "scores that change": _Calls([
        _case(
            d, dtype=dtype, alibi_slopes="h", constant=("alibi_slopes",), sinks=True, causal=True, softcap=5.0,
            **lengths,
        )
        for (d, dtype), lengths in turns(
            ((64, _FP16), (128, _BF16), (512, _BF16), (256, _FP16)),
            ({}, {"lengths_q": (100, 0, 60), "lengths_k": (70, 33, 60)}),
        )
    ]),
    "pairs": _Calls(_pairs_of_features()),
    "score functions": _Calls(
        [
            _case(64, dtype=_FP16, causal=True, **_FUNCTION),
            _case(128, dropout_p=0.2, **_IN_ORDER, **_FUNCTION),
            _case(192, 128, block_mask=(128, 128), key_lengths=(300,), **_FUNCTION),
            _case(256, seq_q=130, seq_k=200, bias="1hqk", dtype=_FP16, dropout_p=0.2, window=(90, 20), **_FUNCTION),
            _case(256, alibi_slopes="h", softcap=3.0, **_FUNCTION),
        ],
        launches=_BACKWARD,
    ),
    "what a score function reads": _Calls(
        [
            _case(64, seq_k=390, window=(90, 20), score_mod=True),
            _two(128, dtype=_FP16, dropout_p=0.2, softcap=3.0, score_mod=True, **_PACKED_LONG),
            _case(128, score_mod=True, **_BLOCKS | {"block_mask": (64, 64)}),
            _case(256, bias="1hqk", seq_q=130, seq_k=200, causal=True, score_mod=True),
        ],
        ends=(_CAPTURED_GRADIENT,),
    ),
    # Also where no tile ends past them.
    "tables": _Calls([
        _two(d, seq_q=seq_q, seq_k=seq_k, dtype=dtype, **tables)
        for tables, (seq_q, seq_k, d, dtype) in turns(
            _TABLES,
            [(256, 384, 64, _FP16), (100, 150, 256, _BF16), (129, 321, 128, _BF16), (129, 200, 512, _FP16)],
        )
    ]),
    "dropout": _Calls([
        _case(d, dropout_p=0.2, causal=True, lengths_q=(129, 0, 70), lengths_k=(229, 33, 90))
        for d in (64, 192, 512)
    ]),
    # Scores that rise are exponentiated again, with the same random bits.
    "dropout, rising": _Calls(
        [_case(d, dropout_p=0.2, causal=True) for d in (64, 128, 192, 256, 512)], values="rising",
        check=_check_forward,
    ),
    "block masks": _Calls([
        _case(*heads, **_BLOCKS, **arguments)
        for heads, arguments in turns(
            ((64, 64), (128, 128), (192, 128), (512, 512)), ({}, {"causal": True}, {"deterministic": True})
        )
    ]),
    # Tiles of 64 queries have a single consumer, and those of 64 keys tiles of as many.
    "block masks of smaller tiles": _Calls(_SMALLER_TILES),
    "packed block masks": _Calls([
        _case(d, e, block_mask=(tile, tile), **_PACKED_LONG, **change)
        for change, (d, e, tile) in turns(
            _PACKED_BLOCKS, ((64, 64, 256), (128, 128, 128), (192, 128, 128), (256, 256, 128))
        )
    ]),
    # The steps that a mask cuts have a loop of their own; walks of heads that share keys go up, or meet.
    "long walks": _Calls(
        [
            _case(d, seq_k=515, **arguments)
            for d, arguments in turns((64, 128, 256), ({}, {"causal": True}, _IN_ORDER))
        ]
        + [_case(64, seq_k=515, causal=True, score_mod=True)],
        {"_LONG_WALK": 256, "WALK_BEYOND_CACHE": 512},
    ),
    # The first queries see no key, so dq is summed.
    "heads that share keys among several walks": _Calls(
        [_case(d, heads=4, seq_q=seq_q, seq_k=100, causal=True) for d, seq_q in ((128, 300), (256, 520))],
        ends=(_BACKWARD, _END, _SHARES),
    ),
    "heads that share keys in one walk": _Calls(
        [
            _case(128, heads=2, heads_kv=heads_kv, seq_q=seq_q, seq_k=100, causal=True)
            for heads_kv, seq_q in ((1, 120), (2, 300))
        ],
        ends=(_BACKWARD, _END), never=_SHARES,
    ),
    # Of short calls, and in narrow windows.
    "tiles of half the keys": _Calls(
        [_case(d, **{"seq_k": 230, **change}) for change, d in turns(_HALF, (32, 64, 128))],
        {
            "HALF_CAUSAL": 512, "HALF_WIDE": 512, "HALF_WIDE_CAUSAL": 1024, "HALF_WINDOW": 512,
            "HALF_WINDOW_WIDE": 1024,
        },
    ),
    "an odd number of tiles of half the keys": _Calls(
        [
            _case(d, **{"seq_k": 310, **change})
            for change, d in turns(
                ({}, {"seq_k": 40}, {"lengths_q": (129, 0, 70), "lengths_k": (310, 33, 64)}, {"key_lengths": (70,)}),
                (72, 96),
            )
        ],
        {"HALF_ODD": 448},
    ),
    "walks over queries in parts": _Calls(
        [
            _parts(seq_k=77),
            _parts(256, seq_k=128),  # two key tiles, so dq is summed
            _parts(seq_k=77, softcap=5.0),
            _parts(seq_k=130, heads=2, deterministic=True),
            _parts(seq_k=300, heads=4, heads_kv=2),  # several parts for each thread block
        ],
        {"choose_parts": lambda *_: 3}, ends=(_SHARES,),
    ),
    # Tables and reads of a score function are not checked against their ends where whole tiles cover them: a split that
    # has no keys stays within, too.
    "keys in splits, covered": _Calls(
        [
            _two(*d, seq_q=256, seq_k=512, align="top_left", causal=True, **change)
            for change, d in turns(
                (
                    {"bias": "bhqk", "bias_dtype": _FP32}, {"mask": "bhqk"}, {"bias": "bhqk"}, _FUNCTION, {},
                    {"mask": "b11k", "bias": "1h1k"},
                ),
                ((64, 64), (128, 128), (256, 256)), 1,
            )
        ],
        {"forward_splits": lambda *_: 4}, launches="combine_kernel", check=_check_forward,
    ),
    # Some of the splits have no keys; tiles of two consumers, of one, with all their stages, with parts of v.
    "keys in splits": _Calls(
        [
            _two(*d, **change)
            for change, d in turns(
                (
                    {}, {"causal": True}, {"window": (90, 20), "dropout_p": 0.3}, _TOP_LEFT,
                    {**_PACKED, "causal": True}, {"softcap": 5.0, "alibi_slopes": "bh", "sinks": True, **_PACKED_LONG},
                    {"bias": "1hqk"}, {"mask": "b1qk", "seq_q": 60}, {**_FUNCTION, "causal": True},
                    {"key_lengths": (70, 0), "sinks": True},
                ),
                ((64, 64), (128, 128), (192, 128), (256, 256), (512, 512)), 1,
            )
        ],
        {"forward_splits": lambda *_: 4}, launches="combine_kernel", check=_check_forward,
    ),
    # Heads that have tiles of other sizes have the values that rise most. The window hides the first tile of most rows.
    **{
        f"{values} scores": _Calls(
            [
                _case(d, seq_q=260, seq_k=400, dtype=dtype, **arguments)
                for (d, dtype), arguments in turns(
                    _NARROW + (_OTHERS if values in ("rising", "spike") else ()),
                    ({"causal": True}, {"window": (300, 5)}),
                )
            ],
            values=values, check=_check_forward,
        )
        for values in _VALUES[1:]
    },
    # Nobody waits for a phase of a barrier that others may complete twice before it looks: these tiles take no time, so
    # that a warpgroup which is held up comes to them late.
    "keys that no query sees": _Calls(
        [
            _two(d, **change)
            for change, d in turns(
                (
                    {"seq_q": 75, "seq_k": 400, "align": "top_left", **_IN_ORDER},
                    {"lengths_q": (1, 0, 15, 0, 150), "lengths_k": (145, 1, 1, 230, 70)},
                ),
                (64, 128, 256), 2,
            )
        ],
        orders=2,
    ),
    # Nobody waits for what a program that has not begun is to do: two calls on two streams would wait for each other
    # without an end.
    **{f"programs that begin late, {kind}": _Calls(_late(kind), {"held": 2}) for kind in _KINDS_OF_LATE},
}  # fmt: skip


def _parameters() -> list:
    """The quick tests have a case of each group but those that try orders of events, thresholds and unusual values."""
    return [
        pytest.param(
            name,
            case,
            seed,
            id=f"{name}-{case}",
            marks=pytest.mark.slow if calls.orders > 1 or calls.values or calls.thresholds else (),
        )
        for name, calls in _GROUPS.items()
        for seed, case in enumerate(calls.cases)
    ]


@pytest.mark.parametrize("group, case, first_seed", _parameters())
def test_calls(hopper, group, case, first_seed):
    """Each case of a group has another order of events."""
    calls = _GROUPS[group]
    inputs = make_inputs(case)
    _spread(inputs, calls.values)
    first: dict[str, torch.Tensor] = {}
    for seed in range(first_seed, first_seed + calls.orders):
        emulated = hopper(seed=seed, **calls.thresholds)
        if first and calls.same is not None:
            again = run(case, inputs, "hopper")
            assert all(torch.equal(first[name], again[name]) for name in calls.same or first), seed
        else:
            first = calls.check(case, "hopper", **({"inputs": inputs} if calls.values else {}))
        launched = [name for name in emulated.launched if name != _SHARES or _SHARES in (calls.never, *calls.ends)]
        assert calls.launches in (None, *launched) and calls.never not in launched
        assert tuple(launched[len(launched) - len(calls.ends) :]) == calls.ends


def _spread(inputs: Any, values: str | None) -> None:
    """Makes the scores of `inputs` differ by more than the weights of one reference can."""
    dtype, rows, keys = inputs.k.dtype, inputs.q.shape[1], inputs.k.shape[1]
    if values == "rising":  # towards the first keys, which come last, for some of the queries
        inputs.k.mul_(torch.linspace(12, 1, keys)[None, :, None, None].to(dtype))
        inputs.q[:, rows // 3 : rows // 2].mul_(4)
    elif values == "large":
        inputs.q.mul_(16)
    elif values == "sink":  # the key that is visited last
        inputs.k[:, 0].mul_(100)
    elif values == "spike":
        inputs.k[:, keys * 3 // 4].mul_(300)
    elif values == "infinite":
        inputs.k[:, keys // 2, :, 0] = float("inf")


@pytest.mark.parametrize(
    "widths, arguments, summed",
    [
        (widths, *arguments)
        for widths, arguments in turns(
            [
                (32, 64, 66), (64, 64, 128), (96, 80, 77), (160, 144, 77), (128, 128, 100), (192, 128, 120),
                (208, 256, 60),
            ],
            [
                ({}, False), ({"window": (70, None)}, True),
                ({"window": (None, 9), "align": "top_left", "softcap": 5.0}, False), (_IN_ORDER, False),
            ],
        )
    ],
    ids=str,
)  # fmt: skip
def test_all_keys_in_one_tile(hopper, widths, arguments, summed):
    """dq is stored as it is multiplied where each query tile visits the only key tile, and summed elsewhere."""
    emulated, (d, e, seq_k) = hopper(), widths
    for seq_q in (49, 200):
        check(_case(d, e, heads=3, heads_kv=3, seq_q=seq_q, seq_k=seq_k, **arguments), "hopper")
        seen = min(seq_k, seq_q + 9)  # keys that the window shows to a query: the others are cut off
        two_tiles = "softcap" in arguments and d > 128 and seen > 64
        needs_sums = summed or two_tiles or ("causal" in arguments and seq_q > seq_k)
        assert (emulated.launched[-1] == _END) is needs_sums


def test_padding_reaches_no_gradient_of_wide_heads(hopper):
    """What lies past a key length, whose own gradient is zero."""
    case = replace(_SMALL, batch=2, seq_q=70, seq_k=200, head_dim=64, head_dim_v=264, key_lengths=(140, 0))
    inputs = make_inputs(case)
    expected = {}
    for padding in (0.0, float("nan")):
        hopper()
        for tensor in (inputs.k, inputs.v):
            tensor[0, 140:], tensor[1] = padding, padding
        found = run(case, inputs, "hopper")
        assert all(torch.equal(found[name], expected.setdefault(name, found[name])) for name in found)
    assert not found["dk"][0, 140:].any() and not found["dv"][1].any()


@pytest.mark.parametrize(
    "changes",
    [{}, {"head_dim": 128, "head_dim_v": 128}, {"key_lengths": (300, 7, 129)},
     {"lengths_q": (65, 130, 1), "lengths_k": (100, 7, 129)}],
    ids=str,
)  # fmt: skip
def test_keys_past_the_end_have_no_weight_beside_the_smallest_scores(hopper, changes):
    """Such a key would have a score of 0, where all others have -500, and a weight that no number holds."""
    hopper()
    case = replace(_SMALL, batch=3, seq_q=70, **changes)
    inputs = make_inputs(case)
    inputs.q.fill_(0.5 * math.sqrt(500 / math.sqrt(case.head_dim)))
    inputs.k.fill_(-2 * math.sqrt(500 / math.sqrt(case.head_dim)))
    results = run(case, inputs, "hopper")
    assert results["lse"].max() < -450
    check(case, "hopper", inputs=inputs)


def test_batch_entries_and_heads_may_share_the_lists_of_a_block_mask(hopper):
    """The kernel of a bias's gradient searches these once."""
    emulated = hopper()
    case = replace(_SMALL, batch=3, seq_q=256, seq_k=384, bias="11qk")
    inputs = make_inputs(case)
    generator = torch.Generator().manual_seed(1)
    mask = torch.rand(1, 1, 256, 384, generator=generator) < 0.5
    mask[..., :128, 128:256] = False
    mask[..., 128:, :128] = True
    inputs.tensors["block_mask"] = flashtile.BlockMask.from_dense(mask)
    check(case, "hopper", inputs=inputs)
    assert "attention_bias_gradient_kernel" in emulated.launched


@pytest.mark.parametrize("head_dim", [64, 128])
def test_far_keys_have_the_weights_of_near_ones(hopper, head_dim):
    hopper()
    check_far_alibi("hopper", head_dim)


@pytest.mark.parametrize("head_dim, seq_k", [(64, 256), (160, 150)])
def test_gradients_of_what_a_score_function_reads(hopper, head_dim, seq_k):
    """By one index, by two, by their distance, and by none; of a tensor that does not learn there is none. Tiles divide
    the first call."""
    emulated = hopper()
    generator = torch.Generator().manual_seed(1)
    tensors = [torch.randn(1, rows, 2, head_dim, generator=generator).to(_BF16) for rows in (128, seq_k, seq_k)]
    sizes: dict[str, tuple[int, ...]] = {
        "every": (),
        "heads": (2,),
        "keys": (seq_k,),
        "rows": (2, 128),
        "table": (2, 384),
        "few": (3, 2),
        "fixed": (2,),
    }
    numbers = {name: 0.3 * torch.randn(shape, generator=generator) for name, shape in sizes.items()}
    upstream = torch.randn(1, 128, 2, head_dim, generator=generator).to(_BF16)

    def gradients(backend: str, dtype: torch.dtype, wide: torch.dtype) -> dict[str, torch.Tensor]:
        at = {name: of.to(wide).requires_grad_(name != "fixed") for name, of in numbers.items()}

        def function(score: Any, batch: Any, head: Any, q_index: Any, k_index: Any) -> Any:
            score = score * (1 + at["heads"][head])
            score = score + at["table"][head, q_index - k_index + seq_k - 1] * at["fixed"][head]
            score = score + at["keys"][k_index] * at["rows"][head, q_index] + at["few"][k_index % 3, q_index % 2]
            return score + at["every"] * torch.sin(score)

        q, k, v = (tensor.to(dtype).requires_grad_() for tensor in tensors)
        out = flashtile.attention(q, k, v, score_mod=function, causal=True, backend=backend)
        learned = {"q": q, **{name: of for name, of in at.items() if name != "fixed"}}
        return dict(zip(learned, torch.autograd.grad(out, [*learned.values()], upstream.to(out.dtype))))

    found = gradients("hopper", _BF16, torch.float32)
    oracle, eager = gradients("reference", torch.float64, torch.float64), gradients("reference", _BF16, torch.float32)
    for name, gradient in found.items():
        assert_close(name, gradient, oracle[name], eager[name])
    assert emulated.launched[-1] == _CAPTURED_GRADIENT


@pytest.mark.parametrize("packed", [False, True], ids=["dense", "packed"])
def test_key_tiles_behind_the_last_shown_key_are_left_out(hopper, packed):
    """What lies there may be anything, and the others are those of key lengths, bit for bit."""
    hopper()
    lengths = (129, 300, 0)
    sizes = {"lengths_q": (40, 150, 9), "lengths_k": (330, 330, 330)} if packed else {"batch": 3, "seq_k": 330}
    case = replace(_SMALL, **sizes, key_lengths=(300, 300, 300) if packed else lengths)
    inputs = make_inputs(case)
    q, k, v = inputs.q, inputs.k, inputs.v
    function = flashtile.attention_varlen if packed else flashtile.attention
    given = {name: of for name, of in inputs.tensors.items() if name != "key_lengths"}
    given |= {"return_lse": True, "backend": "hopper"}
    if packed:
        given |= {"max_seqlen_q": 150, "max_seqlen_k": 330}
    expected = function(q, k, v, **given, key_lengths=inputs.tensors["key_lengths"])
    shown = torch.arange(330) < inputs.tensors["key_lengths"][: 1 if packed else 3, None]
    for tensor in (k, v):
        by_sequence = tensor.view(3, 330, 1, 64)
        by_sequence[:, 384:] = float("nan")
        if not packed:
            by_sequence[0, 256:] = float("nan")
    found = function(q, k, v, **given, mask=shown[:, None, None, :])
    for one, other in zip(found, expected):
        assert torch.equal(one, other)


@pytest.mark.parametrize("layout", ["rows first", "heads first", "broadcast", "one key"])
def test_padding_may_be_anything(hopper, layout):
    """What lies past a key length reaches no result, however k and v lie in memory."""
    hopper()
    case = replace(_SMALL, batch=2, seq_q=130, seq_k=1 if layout == "one key" else 200, key_lengths=(140, 0))
    inputs = make_inputs(case)
    q, k, v = inputs.q, inputs.k, inputs.v
    if layout == "broadcast":
        k, v = (tensor[:1].expand_as(tensor) for tensor in (k, v))
    elif layout == "rows first":
        k, v = (tensor.transpose(0, 1).contiguous().transpose(0, 1) for tensor in (k, v))
    elif layout == "heads first":
        k, v = (tensor.transpose(1, 2).contiguous().transpose(1, 2) for tensor in (k, v))
    inputs.k, inputs.v = k, v
    check(case, "hopper", inputs=inputs)
    lengths = inputs.tensors["key_lengths"]
    expected = flashtile.attention(q, k, v, key_lengths=lengths, backend="hopper", return_lse=True)
    if layout != "broadcast":
        for tensor in (k, v):
            for sequence, length in enumerate(lengths.tolist()):
                tensor[sequence, length:] = float("nan")
    found = flashtile.attention(q, k, v, key_lengths=lengths, backend="hopper", return_lse=True)
    for one, other in zip(found, expected):
        assert torch.equal(one, other)


@pytest.mark.parametrize("deterministic", [False, True], ids=["free", "ordered"])
def test_block_masks_leave_rows_past_the_last_sequence_alone(hopper, deterministic):
    """They have no list, and would be far behind the last one: zeros, and nothing is read there."""
    hopper()
    generator = torch.Generator().manual_seed(1)
    shown = torch.rand(3, 1, 130, 260, generator=generator) < 0.4  # one mask for each sequence
    shown[:, :, :, 128:] &= torch.rand(3, 1, 1, 1, generator=generator) < 0.7
    mask = flashtile.BlockMask.from_dense(shown, (128, 128))
    offsets_q, offsets_k = torch.tensor([0, 100, 230, 231]), torch.tensor([0, 260, 300, 430])
    tensors = [torch.randn(rows, 2, 64, generator=generator) for rows in (900, 1100, 1100)]

    def gradients(backend: str, dtype: torch.dtype) -> dict[str, torch.Tensor]:
        q, k, v = (tensor.to(torch.bfloat16).to(dtype).requires_grad_() for tensor in tensors)
        out = flashtile.attention_varlen(
            q, k, v, offsets_q.int(), offsets_k.int(), max_seqlen_q=130, max_seqlen_k=260, block_mask=mask,
            deterministic=deterministic, backend=backend,
        )  # fmt: skip
        dq, dk, dv = torch.autograd.grad(out, (q, k, v), torch.ones_like(out))
        return {"out": out.detach(), "dq": dq, "dk": dk, "dv": dv}

    oracle, eager = (gradients("reference", dtype) for dtype in (torch.float64, torch.bfloat16))
    for name, value in gradients("hopper", torch.bfloat16).items():
        last = 231 if name in ("out", "dq") else 430
        assert not value[last:].any()
        assert_close(name, value, oracle[name], eager[name])


@pytest.mark.parametrize("values, dtype", turns([*_VALUES, "infinite"], [torch.bfloat16, torch.float16]), ids=str)
def test_bits_of_a_row_depend_on_that_row_alone(hopper, dtype, values):
    """Also on a row whose scores keep all others busy, or are not numbers."""
    hopper()
    case = with_arguments(replace(_SMALL, batch=2, seq_q=260, seq_k=400, dtype=dtype), causal=True)
    inputs = make_inputs(case)
    _spread(inputs, values)
    q, k, v = inputs.q.detach(), inputs.k.detach(), inputs.v.detach()
    out, lse = flashtile.attention(q, k, v, causal=True, return_lse=True, backend="hopper")
    changed = q.clone()
    mine = torch.zeros(q.shape[:3], dtype=torch.bool)
    mine[:, 3::7] = True
    mine[1], mine[:, :, 1] = False, False
    changed[~mine] = changed[~mine].flip(-1) * 50
    k[1], v[1] = 7.0, float("nan")
    other_out, other_lse = flashtile.attention(changed, k, v, causal=True, return_lse=True, backend="hopper")
    for one, other in ((out, other_out), (lse.mT, other_lse.mT)):
        assert torch.equal(one[mine].nan_to_num(7.0), other[mine].nan_to_num(7.0))


@pytest.mark.parametrize("arguments", [{}, {"causal": True, "softcap": 6.0}], ids=str)
@pytest.mark.parametrize("packed", [False, True], ids=["dense", "packed"])
@pytest.mark.parametrize("long", [False, True], ids=["two", "three"])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_8_bits(hopper, head_dim, long, packed, arguments):
    """Beside the definition in float64 of the same 8-bit numbers; weights are rounded to bfloat16. A long call of heads
    of 128 has three consumers."""
    emulated = hopper(**({"LONG_8": 64, "LONG_8_CAUSAL": 64} if long else {}))
    lengths = {"lengths_q": (190, 0, 300), "lengths_k": (230, 33, 260)} if packed else {}
    case = replace(_SMALL, seq_q=390, head_dim=head_dim, head_dim_v=head_dim, **lengths)
    inputs = make_inputs(with_arguments(case, **arguments))
    given = {**inputs.tensors, **with_arguments(case, **arguments).keywords()}
    q, k, v = (tensor.to(_FP8) for tensor in (inputs.q, inputs.k, inputs.v))
    function = flashtile.attention_varlen if case.packed else flashtile.attention
    out = function(q, k, v, **given, backend="hopper")
    oracle, eager = (
        function(*(tensor.to(dtype) for tensor in (q, k, v)), **given, backend="reference")
        for dtype in (torch.float64, torch.bfloat16)
    )
    assert emulated.launched == ["attention_convert_kernel", "attention_forward_kernel"]
    assert_close("out", out, oracle, eager)


def test_8_bit_factors_whose_product_is_0(hopper):
    """They make scores of 0, and hidden keys stay hidden."""
    hopper()
    inputs = make_inputs(_SMALL)
    q, k, v = (tensor.to(_FP8) for tensor in (inputs.q, inputs.k, inputs.v))
    tiny = torch.full((1, 1), 2.0**-80)
    out = flashtile.attention(q, k, v, causal=True, descale_q=tiny, descale_k=tiny, backend="hopper")
    oracle, eager = (
        flashtile.attention(0 * q.to(dtype), k.to(dtype), v.to(dtype), causal=True, backend="reference")
        for dtype in (torch.float64, torch.bfloat16)
    )
    assert_close("out", out, oracle, eager)


def _nothing(*arguments: Any, **keywords: Any) -> None:
    return None


def _twice(module: ModuleType) -> None:
    release = module.Ring.release
    module.Ring.release = lambda ring, slot: (release(ring, slot), release(ring, slot))


def _never(method: str) -> Callable[[ModuleType], None]:
    return lambda module: setattr(module.Ring, method, _nothing)


def _rings_without_wait(module: ModuleType) -> None:
    make_ring = module.make_ring

    def make(*arguments: Any) -> Any:
        ring = make_ring(*arguments)
        ring.acquire = _nothing
        return ring

    module.make_ring = make  # type: ignore[attr-defined]


def _without(name: str) -> Callable[[ModuleType], None]:
    return lambda module: setattr(module, name, _nothing)


def _handovers_without_wait(module: ModuleType) -> None:
    module.Handover.acquire = _nothing


def _scores_at_once(module: ModuleType) -> None:
    module.warpgroup_mma_wait = lambda in_flight, products: products[0]  # type: ignore[attr-defined]


#: What goes wrong -> (module, how, what the machine says).
_FAULTS: dict[str, tuple[str, Callable[[ModuleType], None], str]] = {
    "tiles are never released": ("primitives", _never("release"), "deadlock"),
    "tiles are released twice": ("primitives", _twice, "more arrivals|deadlock|largest error"),
    "no wait for tiles": ("primitives", _never("acquire"), "more arrivals|deadlock|largest error"),
    "no wait for room": ("primitives", _never("wait_empty"), "more arrivals|deadlock|largest error"),
    "scores are not waited for": ("forward_softmax", _scores_at_once, "before warpgroup_mma_wait"),
    "out is not fenced": ("forward_softmax", _without("fence_async_shared"), "without fence_async_shared"),
    "out may not have been read yet": (
        "forward_softmax",
        _without("tma_store_wait"),
        "largest error|memory ends while TMA",
    ),
    "no wait for queries": ("backward", _rings_without_wait, "more arrivals|deadlock|largest error"),
    "no wait for ds": ("backward_pieces", _handovers_without_wait, "more arrivals|deadlock|largest error"),
    "sums are not fenced": ("backward_dq", _without("fence_async_shared"), "without fence_async_shared"),
}


@pytest.mark.parametrize("fault", _FAULTS)
def test_faults_are_found(hopper, fault):
    """The machine sees what would go wrong on a GPU, at times."""
    name, spoil, found = _FAULTS[fault]

    def run_with_fault() -> None:
        for seed in range(5):
            forget_copies()
            spoil(hopper(seed).modules[name])
            check(replace(_SMALL, seq_q=330, head_dim=128, head_dim_v=128), "hopper")

    try:
        with pytest.raises(AssertionError, match=found):
            run_with_fault()
    finally:
        forget_copies()
