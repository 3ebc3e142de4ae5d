"""The Hopper kernels on a GPU against the fp64 oracle: what they serve of the portable kernels, and their own cases."""

import itertools
import subprocess
import sys
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch

import flashtile
from flashtile import BlockMask
from flashtile._backends import clear_plans
from flashtile.ops.attention import select
from flashtile.testing import AttentionCase, Size, assert_close, assert_same, check, make_inputs, run
from support.attention import left_out_tiles
from support.attention.attention_cases import (
    COMBINED,
    EDGES,
    SCORE_MOD_PAIRS,
    changed,
    check_again,
    check_forward,
    score_mod_combined,
)
from support.running.covering import covering_choices, turns

pytestmark = [pytest.mark.gpu, pytest.mark.hopper]

_BF16, _FP16 = torch.bfloat16, torch.float16
_DTYPES = (_BF16, _FP16)
_MULTIPROCESSORS = torch.cuda.get_device_properties(0).multi_processor_count if torch.cuda.is_available() else 132
_LARGE = AttentionCase(batch=2, heads=4, heads_kv=2, seq_q=517, seq_k=643, head_dim=64, head_dim_v=64, dtype=_BF16)
#: `_case(192, 128, seq_q=70, causal=True)`.
_case = partial(changed, _LARGE)
_short = partial(changed, replace(_LARGE, seq_q=230, seq_k=230))


def _served(cases: dict[str, AttentionCase]) -> dict[str, AttentionCase]:
    """Without what stays with the portable kernels, as `explain` tells."""
    return {name: case for name, case in cases.items() if _answer(replace(case, dtype=_BF16)).backend == "hopper"}


def _answer(case: AttentionCase) -> flashtile.Explanation:
    inputs = make_inputs(case)
    given = {**inputs.tensors, **case.keywords(), "backend": "hopper", "device": "sm_90"}
    return flashtile.explain(inputs.q, inputs.k, inputs.v, **given)


_SERVED = _served(COMBINED | EDGES)


class _Calls(NamedTuple):
    """Calls that are compared with the oracle, and what they need.

    Attributes:
        cases: the calls.
        patches: what is put in the place of names in `flashtile.ops.attention`, for plans of these calls alone.
        again: how many other runs have the same bits.
        names: in these results, or in all.
    """

    cases: list[AttentionCase]
    patches: dict[str, Any] = {}
    again: int = 0
    names: tuple[str, ...] = ()


#: Small calls have the tiles of large ones, which several consumers share.
_SEVERAL_CONSUMERS = {
    f"hopper.configs.{name}": lambda *_: False for name in ("one_consumer_pays", "short_tiles_pay", "gives_at_most")
}
_CAUSAL, _IN_ORDER = {"causal": True}, {"causal": True, "deterministic": True}
_MASKS: list[dict[str, Any]] = [{}, _CAUSAL, {"window": (200, 30)}, {"window": (90, None), "align": "top_left"}]
_EACH_WIDTH = [
    (40, 40), (64, 64), (80, 80), (96, 96), (128, 128), (160, 160), (192, 192), (256, 256), (192, 128), (136, 72),
    (64, 128), (256, 192), (24, 200), (272, 40), (192, 512), (320, 320), (512, 384), (512, 512),
]  # fmt: skip
_ONE_TILE = [
    (16, 16, _BF16), (32, 32, _FP16), (40, 64, _BF16), (64, 64, _FP16), (80, 80, _BF16), (96, 96, _FP16),
    (128, 128, _BF16), (64, 96, _FP16), (160, 160, _BF16), (192, 128, _FP16), (256, 256, _BF16),
]  # fmt: skip
_FEW_KEYS = ((3, 49, 49), (3, 77, 77), (3, 128, 128), (3, 513, 77), (3, 1, 100), (400, 49, 49))
_WIDE = [
    (264, 264, _FP16), (384, 320, _BF16), (448, 448, _FP16), (512, 64, _BF16), (128, 512, _BF16), (8, 264, _FP16),
    (512, 512, _FP16),
]  # fmt: skip
_WIDE_LENGTHS: list[dict[str, Any]] = [
    {"lengths_q": (129, 0, 700, 1, 64, 191), "lengths_k": (129, 33, 300, 1, 0, 800)},
    {"lengths_q": (129, 700, 64), "lengths_k": (129, 300, 800), "key_lengths": (70, 300, 0)},
    {"key_lengths": (643, 70), "sinks": True},
    {"softcap": 3.0},
    {"lengths_q": (129, 0, 700, 1), "lengths_k": (129, 33, 300, 1), "softcap": 3.0},
]
_WIDE_KINDS = turns([(512, 512), (320, 264), (512, 64), (128, 512), (64, 320)], _MASKS, 4)[::3]
_SLOPES = {"alibi_slopes": "h", "constant": ("alibi_slopes",)}
_SCORES: list[dict[str, Any]] = [
    {"softcap": 3.0}, {**_SLOPES, "alibi_slopes": "bh"}, {"sinks": True}, {**_SLOPES, "sinks": True, "softcap": 3.0},
]  # fmt: skip
_BANDS = [
    _CAUSAL, {"causal": True, "align": "top_left"}, {"window": (70, 0)}, {"window": (5, 200)}, {"window": (None, 130)},
    {"window": (0, 0)},
]  # fmt: skip
_LISTS = [
    ((128, 128), {}), ((256, 128), _CAUSAL), ((128, 384), {"window": (200, 30)}), ((64, 64), {}), ((64, 128), _CAUSAL),
    ((384, 64), {}),
]  # fmt: skip
_HEADS_OF_LISTS = [(40, 40), (64, 64), (96, 96), (128, 128), (192, 128), (256, 256), (64, 64)]
_LENGTHS_OF_LISTS = {"lengths_q": (700, 0, 1, 130, 1100), "lengths_k": (650, 70, 1, 390, 1000), "batch": 5}
_FUNCTION = {"score_mod": True, "constant": ("score_mod",)}
#: As in models that use them; each two features are in "pairs".
_FEATURES: dict[str, dict[str, Any]] = {
    "padding mask": {"mask": "b11k"},
    "padding as lengths": {"key_lengths": (643, 130)},
    "dense mask": {"mask": "b1qk", "deterministic": True},
    "T5": {"bias": "1hqk", "scale": 1.0},
    "pair bias in float32": {"bias": "bhqk", "bias_dtype": torch.float32},
    "bias and tiles": {"bias": "1hqk", "block_mask": (128, 128)},
    "bias and function": {"bias": "1hqk", **_FUNCTION},
    "GPT-2": {"dropout_p": 0.1, "causal": True},
    "slopes": {"alibi_slopes": "bh", "causal": True},
    "all and slopes": {
        "bias": "1hqk", "mask": "b11k", "key_lengths": (643, 200), "alibi_slopes": "bh", "sinks": True,
        "dropout_p": 0.2, "softcap": 5.0, "deterministic": True,
    },
}  # fmt: skip
_WHOLE_TILES = (
    "padding mask", "dense mask", "T5", "pair bias in float32", "GPT-2", "bias and tiles", "bias and function",
)  # fmt: skip
_HEADS = [(32, 32), (64, 64), (80, 80), (96, 96), (128, 128), (192, 128), (256, 256)]
#: All of them in both dtypes, which take turns.
_KINDS = [(heads, _DTYPES[number % 2]) for number, heads in enumerate(2 * _HEADS)]


def _kinds(changes: list[dict[str, Any]], times: int, **more: Any) -> list[AttentionCase]:
    """Each change with so many kinds of heads."""
    return [
        _case(*heads, dtype=dtype, **{**more, **change}) for change, (heads, dtype) in turns(changes, _KINDS, times)
    ]


def _pairs() -> list[AttentionCase]:
    """In sizes of several tiles."""
    cases = []
    for number, case in enumerate((COMBINED | score_mod_combined() | SCORE_MOD_PAIRS).values()):
        here: dict[str, Any] = {
            "key_lengths": (600, 17, 0)[: case.batch], "lengths_q": (5, 0, 337), "lengths_k": (333, 4, 520),
            "block_mask": (128, 128),
        }  # fmt: skip
        here = {field: value for field, value in here.items() if getattr(case, field)}
        heads, dtype = _KINDS[number % len(_KINDS)]
        cases.append(changed(case, *heads, seq_q=430, seq_k=620, dtype=dtype, **here))
    return cases


_PARTS = [
    (1, 2, 2, 4096, 77), (1, 2, 1, 4096, 130), (2, 3, 3, 1111, 300), (1, 8, 1, 2500, 64), (1, 1, 1, 5000, 1),
    (1, 8, 8, 2457, 2457),  # 160 walks or more: a thread block takes several parts
]  # fmt: skip


def _in_parts(deterministic: bool) -> list[AttentionCase]:
    """Walks over the queries are in parts, most of them because keys are few."""
    named = [
        (dict(zip(("batch", "heads", "heads_kv", "seq_q", "seq_k"), sizes)), head_dim)
        for sizes, head_dim in turns(_PARTS, [40, 64, 128, 160, 256], 2)
    ]
    return [
        _short(head_dim, deterministic=deterministic, **sizes, **arguments)
        for sizes, head_dim in named
        for arguments in ({}, {"softcap": 5.0})
    ]


def _rows_of_lines(changes: list[dict[str, Any]]) -> list[AttentionCase]:
    """Each thread block has as many lines as any other one."""
    return [
        _case(
            d, e, **{"batch": _MULTIPROCESSORS, "heads": 1, "heads_kv": 1, "seq_q": rows, "seq_k": rows + 33, **change}
        )
        for change, (d, e, rows) in turns(changes, [(32, 32, 500), (64, 64, 300), (80, 104, 200), (128, 128, 200)], 2)
    ]


_GROUPS: dict[str, _Calls] = {
    # The other dtype is among the pairs.
    "served": _Calls(
        [replace(_SERVED[name], dtype=dtype) for name, dtype in turns(_SERVED, [_FP16, _BF16])], _SEVERAL_CONSUMERS
    ),
    "pairs": _Calls(_pairs()),
    # Of a single consumer each.
    "few tiles": _Calls([_case(*widths, **mask) for widths, mask in turns(_EACH_WIDTH[:-6], _MASKS[::-1], 2)]),
    "many tiles": _Calls(
        [_case(*widths, **mask) for widths, mask in turns(_EACH_WIDTH, [*_MASKS, {}], 2)], _SEVERAL_CONSUMERS
    ),
    # dq is stored, not summed, where every query tile visits the only key tile; also by many thread blocks.
    "all keys in one tile": _Calls([
        _case(d, e, batch=batch, heads=6, heads_kv=3, seq_q=seq_q, seq_k=seq_k, dtype=dtype, **arguments)
        for d, e, dtype in _ONE_TILE
        for (batch, seq_q, seq_k), arguments in turns(_FEW_KEYS, ({}, _CAUSAL, {"deterministic": True}), 2)
    ]),
    "packed over many tiles": _Calls([
        _case(d, lengths_q=(129, 0, 700, 1, 64, 191), lengths_k=(129, 33, 300, 1, 0, 800), **mask)
        for d, mask in turns([64, 128, 192, 256, 512], _MASKS, 2)
    ]),
    # Sums have a fixed order.
    "wide": _Calls(
        [
            _case(d, e, heads_kv=heads_kv, seq_q=seq_q, seq_k=seq_k, dtype=dtype, sinks=heads_kv == 2, **mask)
            for (d, e, dtype), mask in turns(_WIDE, _MASKS, 2)
            for heads_kv, seq_q, seq_k in ((4, 517, 643), (2, 300, 65), (1, 1, 700), (2, 700, 1))
        ],
        again=1,
    ),
    "lengths and soft caps of wide heads": _Calls(
        [_case(*heads, **change, **mask) for change, (heads, mask) in turns(_WIDE_LENGTHS, _WIDE_KINDS, 3)], again=1
    ),
    "scores that change": _Calls([
        _case(*heads, dtype=dtype, **scores, **mask, **lengths)
        for scores, heads, lengths, mask, dtype in covering_choices(
            _SCORES,
            [(40, 40), (64, 64), (128, 128), (192, 128), (256, 256), (512, 512)],
            [{}, {"lengths_q": (129, 0, 300, 1, 64), "lengths_k": (129, 33, 200, 1, 0)}],
            [{}, _CAUSAL, {"window": (90, None), "align": "top_left"}],
            _DTYPES,
        )
    ]),
    # More tiles than multiprocessors: the order of tiles, the counters, and what a tile leaves behind for the next.
    "many tiles each": _Calls([
        _case(d, batch=6, heads=8, seq_q=1300, seq_k=1000, causal=causal)
        for d in (64, 128) for causal in (False, True)
    ]),
    # So long that three take turns: as often as there are key tiles, which may be never.
    "three consumers": _Calls(
        [
            _case(batch=1, **change)
            for change in (
                {"seq_q": 1300, "seq_k": 1500, "softcap": 3.0},
                {"seq_q": 1300, "seq_k": 1},
                {"lengths_q": (1500, 0, 1, 300), "lengths_k": (1200, 33, 1, 0)},
                {"seq_q": 2300, "seq_k": 2200, "causal": True},
                {"seq_q": 2200, "seq_k": 2500, "causal": True, "align": "top_left"},
                {"lengths_q": (2200, 0, 1, 200), "lengths_k": (2300, 33, 1, 0), "causal": True},
            )
        ],
        _SEVERAL_CONSUMERS,
    ),
    # The steps that a mask or the end of the keys cuts have a loop of their own. The end cuts all of the last tile's.
    "long walks": _Calls([
        _case(128, batch=32, heads=8, heads_kv=1, seq_q=seq_q, seq_k=seq_k, **mask)
        for seq_q, seq_k in ((1100, 1000), (1030, 1300)) for mask in (*_BANDS[:2], _IN_ORDER, {})
    ]),
    # Programs take a second key tile, whose queries come in the opposite order.
    "walks that go up": _Calls([
        _case(d, batch=1, heads=16, heads_kv=8, seq_q=seq_q, seq_k=seq_k, causal=True, **scores)
        for d, (seq_q, seq_k), scores in covering_choices(
            (64, 128, 256), ((4096, 4096), (4100, 4300)), ({}, _SLOPES)
        )
    ]),
    # So few key tiles that the query heads of a key/value head are divided.
    "heads that share keys among several walks": _Calls([
        _case(*heads, batch=1, heads=12, seq_q=1500, seq_k=1400, **arguments)
        for arguments, heads in turns(
            [{}, _CAUSAL, _IN_ORDER, {"window": (1100, 0)}, {"softcap": 5.0}],
            [(64, 64), (104, 80), (128, 128), (192, 128), (256, 256), (64, 64)], 3,
        )
    ]),
    "packed and listed tiles among several walks": _Calls([
        _case(128, batch=1, heads=heads, heads_kv=1, seq_q=1500, seq_k=1400, dtype=_FP16, causal=True, **change)
        for heads in (3, 7)
        for change in (
            {"lengths_q": (700, 0, 900), "lengths_k": (650, 70, 1000)}, {"block_mask": (128, 128)}
        )
    ]),
    # There are enough walks for all programs, which would find too little in the L2 cache (`shares_in_cache`).
    "heads divided for the cache": _Calls([
        _case(d, batch=12, heads=16, seq_q=1100, seq_k=1100, **mask) for d in (64, 128, 256)
        for mask in (_CAUSAL, _IN_ORDER)
    ]),
    # Two key tiles, whose dq a thread block sums alone; also several lines.
    "short sequences of wide heads": _Calls(
        [
            _case(
                *heads, batch=batch * _MULTIPROCESSORS, heads=1, heads_kv=1, seq_q=111, seq_k=128, dtype=dtype, **mask
            )
            for dtype, mask, heads in covering_choices(
                _DTYPES,
                [{}, _CAUSAL, {"causal": True, "softcap": 5.0}, {"dropout_p": 0.2}, {"window": (40, 30)}],
                [(176, 176), (192, 256), (208, 208), (256, 256)],
            )
            for batch in (1, 3)
        ],
        again=1, names=("dq", "dk", "dv"),
    ),
    # Sums of whole lines have one order.
    "whole lines": _Calls(
        _rows_of_lines([
            {}, _CAUSAL, {"window": (90, 60), "dtype": _FP16}, {**_IN_ORDER, "softcap": 5.0, "sinks": True},
            {"heads": 3, "seq_q": 100, "seq_k": 200}, {"dropout_p": 0.2, "seq_q": 120, "seq_k": 150},
            {"bias": "b1qk", "seq_q": 130, "seq_k": 200},
        ]),
        again=1, names=("dq", "dk", "dv"),
    ),
    # A thread block takes whole lines of short sequences, beside longer ones and such with more queries than keys.
    "short packed sequences": _Calls(
        [
            _case(*width, lengths_q=(129, 0, 300, 130, 1, 250), lengths_k=(130, 33, 300, 70, 90, 256), **change)
            for change, width in turns(
                [
                    {}, _CAUSAL, {"window": (70, None), "align": "top_left"}, {"window": (100, 20), "dropout_p": 0.3},
                    {"alibi_slopes": "bh", "softcap": 5.0, "causal": True}, {"bias": "11qk", "sinks": True},
                    {"score_mod": True},
                ],
                [(32, 32), (64, 64), (96, 40), (128, 128)], 3,
            )
        ],
        {"hopper.schedule._SHORT_LINES": 0, "hopper.schedule._SHORT_TILES": 2},
    ),
    # More than a warp finds in two rounds.
    "many packed sequences": _Calls(
        [_case(d, lengths_q=(1, 0, 3, 70) * 300, lengths_k=(2, 5, 3, 65) * 300, **_CAUSAL) for d in (64, 128)]
    ),
    # As where the L2 cache would not hold what a walk reads.
    "walks that begin where others are": _Calls(
        [
            _case(d, batch=8, heads_kv=heads_kv, seq_q=seq_q, seq_k=seq_k, **scores)
            for scores, (seq_q, seq_k, heads_kv), d in covering_choices(
                ({}, _SLOPES), ((512, 2304, 4), (500, 2190, 2)), (64, 128, 256)
            )
        ],
        {"hopper.schedule.WALK_BEYOND_CACHE": 512},
    ),
    # Tiles of more rows than a key tile has keys: a band hides key tiles from one consumer that another visits.
    "consumers that skip key tiles": _Calls([
        _case(d, **change, **band)
        for band, change, d in covering_choices(
            _BANDS,
            [
                {"batch": 3, "heads": 8, "seq_q": 901, "seq_k": 1333},
                {"batch": 3, "heads": 8, "seq_q": 1333, "seq_k": 901},
                {"lengths_q": (700, 0, 1, 300), "lengths_k": (500, 33, 1, 0)},
            ],
            (192, 256),
        )
    ]),
    # Their tiles take so little time that a warpgroup which is held up comes to them late. It once waited without an
    # end, in some order of events (`test_hopper_emulated`).
    "keys that no query sees": _Calls(
        [
            _case(d, heads=16, **change)
            for d in (64, 128, 256)
            for change in (
                {"seq_q": 400, "seq_k": 4000, "align": "top_left", **_IN_ORDER},
                {
                    "lengths_q": (1, 0, 900, 0, 150), "lengths_k": (3000, 900, 1, 2300, 700), "deterministic": True,
                },
                {"seq_q": 400, "seq_k": 4000, "align": "top_left", **_CAUSAL},
            )
        ],
        again=20, names=("dk", "dv"),
    ),
    # A mask for each head, of grouped heads; tiles that stick out, and some that lie past the end as a whole.
    "block masks": _Calls([
        _case(*heads, block_mask=tile, **mask) for (tile, mask), heads in turns(_LISTS, _HEADS_OF_LISTS, 3)
    ]),
    # Lists are those of the longest sequence; shorter ones end within their tiles, or before them.
    "block masks of packed sequences": _Calls([
        _case(*heads, block_mask=tile, deterministic=deterministic, **_LENGTHS_OF_LISTS, **mask)
        for (tile, mask), heads in turns(_LISTS, _HEADS_OF_LISTS[::-1], 3) for deterministic in (False, True)
    ]),
    "block masks and scores that change": _Calls([
        _case(d, block_mask=(128, 128), **scores) for scores in _SCORES for d in (64, 128)
    ]),
    "block masks in order": _Calls(
        [
            _case(d, seq_q=1500, seq_k=1700, block_mask=(128, 256), deterministic=True, **lengths)
            for d in (64, 128)
            for lengths in (
                {}, {"batch": 4, "lengths_q": (1500, 300, 0, 900), "lengths_k": (1700, 333, 60, 1200)}
            )
        ],
        again=20,
    ),
    # Heads that share keys walk together, or each by itself. Lines may rise, but for the first (8 heads).
    **{
        f"in order{', heads by themselves' if not divides else ''}": _Calls(
            [
                _case(d, seq_q=1500, seq_k=1700, heads=8, heads_kv=heads_kv, **_IN_ORDER, **window, **lengths)
                for lengths, heads_kv, window, d in covering_choices(
                    ({}, {"lengths_q": (900, 40, 0, 1500), "lengths_k": (1000, 7, 30, 1500)}),
                    (2, 8) if divides else (2,), ({}, {"window": (600, None)}), (64, 128, 256),
                )
            ],
            {} if divides else {"gpu.tile_configs._STEPS_OF_A_SUM": 2**31}, again=30,
        )
        for divides in (False, True)
    },
    # No tile ends past a table.
    "whole tiles": _Calls([
        _case(width, seq_q=512, seq_k=768, **_FEATURES[name]) for name, width in turns(_WHOLE_TILES, (64, 128, 256), 2)
    ]),
    # Rows of the bias lie at multiples of 16 bytes, and end within a tile.
    "bias by TMA": _Calls(_kinds(
        [
            {"bias": "1hqk"}, {"bias": "b1qk", **_IN_ORDER},
            {"bias": "bhqk", "constant": ("bias",), "window": (200, 100), "softcap": 5.0},
            {"bias": "11qk", "mask": "bhqk", "dropout_p": 0.2},
            {"bias": "bhqk"},  # of no score that others share: the main kernel stores its gradient
            {"bias": "bhqk", "block_mask": (256, 256), "alibi_slopes": "h"},
        ],
        5, seq_k=648,
    )),
    # The main kernel stores the gradient. TMA does not bring the bias.
    "bias that no scores share": _Calls(
        _kinds([_IN_ORDER, {"key_lengths": (643, 130), "dropout_p": 0.2}], 5, bias="bhqk")
    ),
    "features in order": _Calls(
        [
            _case(width, seq_q=700, seq_k=700, deterministic=True, **change)
            for change, width in turns(
                [{"key_lengths": (700, 260)}, {"mask": "b1qk"}, {"dropout_p": 0.1}, {"alibi_slopes": "h"}],
                (64, 128, 256), 2,
            )
        ],
        again=3,
    ),
    # 49 tokens: rows of the bias begin anywhere.
    "windows of Swin": _Calls([_case(32, batch=64, heads=6, heads_kv=6, seq_q=49, seq_k=49, bias="1hqk")]),
    "score functions": _Calls(_kinds(
        [
            {"seq_q": 512, "seq_k": 640, "causal": True},  # whole tiles
            {"alibi_slopes": "h", "softcap": 3.0, "deterministic": True}, {"bias": "bhqk", "dropout_p": 0.2},
        ],
        6, **_FUNCTION,
    )),
    # All queries of a key tile, and 64 keys, of which two warpgroups take turns with the queries.
    "what a score function reads": _Calls(_kinds(
        [
            {"seq_q": 512, "seq_k": 640, "causal": True}, {"window": (200, 60), "softcap": 3.0},
            {"block_mask": (64, 64), "dropout_p": 0.2}, {"lengths_q": (5, 0, 337), "lengths_k": (333, 4, 520)},
        ],
        8, score_mod=True,
    )),
    "short calls": _Calls([
        _short(width, dtype=dtype, **change)
        for change, (width, dtype) in turns(
            [
                {}, _CAUSAL, {"causal": True, "softcap": 5.0},
                {"lengths_q": (129, 0, 70), "lengths_k": (136, 33, 90), "alibi_slopes": "h", "causal": True},
                {"lengths_q": (129, 1, 64), "lengths_k": (136, 130, 1)}, {"key_lengths": (70, 200), "sinks": True},
            ],
            [(width, _DTYPES[at % 2]) for at, width in enumerate(2 * [32, 40, 64, 72, 96, 112, 128])], 4,
        )
    ]),
    "keys in splits": _Calls(
        [
            _case(*width, dtype=dtype, **change)
            for change, (width, dtype) in turns(
                [
                    {}, _CAUSAL, {"window": (200, 30), "dropout_p": 0.2}, {"window": (90, None), "align": "top_left"},
                    {"lengths_q": (129, 0, 300), "lengths_k": (336, 33, 390), "alibi_slopes": "h", "sinks": True},
                    {"bias": "1hqk"}, {"mask": "b1qk", "softcap": 5.0}, {"key_lengths": (70, 600), "sinks": True},
                    {"seq_q": 64, "seq_k": 4096}, {"score_mod": True, "causal": True},
                ],
                list(zip([(64, 64), (128, 128), (256, 256), (40, 72), (192, 128)], itertools.cycle(_DTYPES))), 2,
            )
        ],
        {"hopper.launch.forward_splits": lambda *_: 4},
    ),
    # Nothing is checked against the ends of tables where whole tiles cover them, in a split without keys neither.
    "keys in splits, covered": _Calls(
        [
            _case(*width, seq_q=256, seq_k=512, align="top_left", causal=True, **change)
            for change, width in turns(
                [{"bias": "bhqk", "bias_dtype": torch.float32}, {"mask": "bhqk"}, {"score_mod": True}, {}],
                [(64, 64), (128, 128), (256, 256)], 1,
            )
        ],
        {"hopper.launch.forward_splits": lambda *_: 4},
    ),
    # Lengths around those at which tiles change; also in more tiles than a GPU takes at once.
    "lengths": _Calls([
        _short(d, batch=batch, seq_q=seq, seq_k=seq, causal=causal)
        for causal, d, seq in covering_choices(
            (False, True), (64, 128), (1, 64, 127, 128, 197, 256, 300, 512, 700, 1024)
        )
        for batch in (2, 40)
    ]),
    "walks in parts": _Calls(_in_parts(False)),
    "walks in parts, in order": _Calls(_in_parts(True), again=1),
}  # fmt: skip


@pytest.fixture
def patched(monkeypatch):
    """Puts other values in the place of names in `flashtile.ops.attention`; no plan is from before or stays."""

    def patch(patches: dict[str, Any]) -> None:
        for name, value in patches.items():
            monkeypatch.setattr(f"flashtile.ops.attention.{name}", value)
        if patches:
            clear_plans()

    yield patch
    clear_plans()


@pytest.mark.parametrize(
    "group, case", [(name, case) for name, calls in _GROUPS.items() for case in calls.cases], ids=str
)
def test_calls(group, case, patched):
    calls = _GROUPS[group]
    patched(calls.patches)
    if calls.again:
        check_again(case, "hopper", calls.again, calls.names)
    else:
        check(case, "hopper", "cuda")


@pytest.mark.parametrize("arguments", [{}, {"causal": True, "deterministic": True}], ids=str)
@pytest.mark.parametrize("packed", [False, True], ids=["dense", "packed"])
@pytest.mark.parametrize("head_dim", [1, 36, 65, 100, 187, 250])
def test_heads_that_are_no_multiple_of_16_bytes(head_dim, packed, arguments):
    """Their rows must begin at one; gradients are views of such rows too."""
    lengths = {"lengths_q": (129, 0, 300), "lengths_k": (129, 33, 400)} if packed else {}
    case = _case(head_dim, 64, **lengths, **arguments)
    inputs = make_inputs(case, "cuda")
    rows = -(-head_dim // 8) * 8
    inputs.q, inputs.k = (
        torch.full((*t.shape[:-1], rows), float("nan"), dtype=t.dtype, device="cuda")[..., :head_dim].copy_(t)
        for t in (inputs.q, inputs.k)
    )
    check(case, "hopper", "cuda", inputs=inputs)


def _course(name: str, keys: int) -> torch.Tensor:
    """What one column of every key holds, from the first key to the last; that of every query holds 40."""
    place = torch.arange(keys, device="cuda")
    return {
        "rising": torch.linspace(-60, -10, keys, device="cuda"),
        "falling": torch.linspace(-10, -60, keys, device="cuda"),
        "jump": torch.where(place < keys // 5, 60.0, -60.0),
        "steps": place // 128 * 3.0 - 50,
    }[name]


@pytest.mark.parametrize("dtype", [_BF16, _FP16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("arguments", [{}, {"causal": True}, {"window": (1030, 0)}, {"window": (1030, 50)}], ids=str)
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("course", ["rising", "falling", "jump", "steps"])
def test_scores_that_move_along_the_keys(course, head_dim, arguments, dtype):
    """Tiles whose scores all lie far above or below those of the tiles before, all of them negative or not; with a
    mask, rows that see nothing of their first tile."""
    q, k, v = (torch.randn(1, rows, 2, head_dim, device="cuda", dtype=dtype) for rows in (1100, 1500, 1500))
    q[..., 0] = 40.0
    k[..., 0] = _course(course, 1500)[:, None].to(dtype)
    check_forward(q, k, v, "hopper", **arguments)


_LEAPING = {
    "none": [],
    "one": [(0, 3)],
    "some": [(0, 0), (1, 2), (1, 5)],
    "all": [(batch_entry, head) for batch_entry in (0, 1) for head in range(8)],
}


@pytest.mark.parametrize("dtype", [_BF16, _FP16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("arguments", [{}, {"causal": True}, {"window": (1900, 0)}], ids=str)
@pytest.mark.parametrize("head_dim, head_dim_v", [(64, 64), (128, 128), (192, 128), (256, 256)], ids=str)
@pytest.mark.parametrize("heads", _LEAPING)
def test_weights_that_leave_their_range(heads, head_dim, head_dim_v, arguments, dtype):
    """The scores of the first keys, which are visited last, are larger than the others by more than weights can be."""
    torch.manual_seed(5)
    q, k = (torch.randn(2, 2700, 8, head_dim, device="cuda", dtype=dtype) for _ in range(2))
    v = torch.randn(2, 2700, 8, head_dim_v, device="cuda", dtype=dtype)
    q[..., 0] = 50.0
    k[..., 0] = 0.0
    for batch_entry, head in _LEAPING[heads]:
        k[batch_entry, :9, head, 0] = 50.0
    out, lse = flashtile.attention(q, k, v, return_lse=True, backend="hopper", **arguments)
    again, _ = flashtile.attention(q, k, v, return_lse=True, backend="hopper", **arguments)
    assert torch.equal(out, again)
    for first in (0, 4):  # the scores of all heads at once would fill the memory
        part = [t[:, :, first : first + 4] for t in (q, k, v)]
        oracle = flashtile.attention(*(t.double() for t in part), return_lse=True, backend="reference", **arguments)
        eager = flashtile.attention(*part, return_lse=True, backend="reference", **arguments)
        assert_close("out", out[:, :, first : first + 4], oracle[0], eager[0], Size())
        assert_close("lse", lse[:, first : first + 4], oracle[1], eager[1], Size(1, 1))


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_weights_that_leave_their_range_over_a_block_mask(head_dim, causal):
    """A list begins with any tile of keys, and may hold none or one."""
    torch.manual_seed(9)
    q, k, v = (torch.randn(1, 2700, 4, head_dim, device="cuda", dtype=_BF16) for _ in range(3))
    q[..., 0] = 50.0
    k[..., 0] = 0.0
    k[:, 300:320, 1:3, 0] = 50.0
    layout = torch.rand(4, 11, 11, generator=torch.Generator().manual_seed(1)) < 0.4
    layout[:, 5] = False
    layout[:, 7] = True
    block_mask = BlockMask.from_layout(layout[None].cuda(), (256, 256), 2700, 2700)
    check_forward(q, k, v, "hopper", block_mask=block_mask, causal=causal)


_SPREADS = {
    "normal": lambda q, k: (q, k),
    "wide": lambda q, k: (q * 16, k),
    "growing": lambda q, k: (q, k * torch.linspace(0.05, 20, k.shape[1], device="cuda", dtype=k.dtype)[:, None, None]),
    "sink": lambda q, k: (q, torch.cat([k[:, :1] * 50, k[:, 1:]], 1)),
    "spike": lambda q, k: (q, torch.cat([k[:, :900], k[:, 900:901] * 100, k[:, 901:]], 1)),
}


#: Of 64, 128, 192 and 256 columns, some causal, some in each dtype.
_KINDS_OF_ROWS = [(64, False, _BF16), (128, True, _FP16), (192, False, _FP16), (256, True, _BF16)]


@pytest.mark.parametrize("values, kind", turns(_SPREADS, _KINDS_OF_ROWS, 2), ids=str)
def test_bits_of_a_row_depend_on_that_row_alone(values, kind, patched):
    """Not on other rows of its tile, other heads or batch entries, whose references rise where its own does not; only
    on the number of splits."""
    patched({"hopper.launch.forward_splits": lambda *_: 1})
    head_dim, causal, dtype = kind
    torch.manual_seed(7)
    q, k, v = (torch.randn(2, 1300, 3, head_dim, device="cuda", dtype=dtype) for _ in range(3))
    q, k = _SPREADS[values](q, k)
    call = {"causal": causal, "return_lse": True, "backend": "hopper"}
    out, lse = flashtile.attention(q, k, v, **call)
    mine = torch.zeros(2, 1300, 3, dtype=torch.bool, device="cuda")
    mine[0, 5::9, 0] = True
    mine[0, 64:128, 2] = True
    q[~mine] = q[~mine].flip(-1) * 30
    k[1], v[1] = 7.0, float("nan")
    other_out, other_lse = flashtile.attention(q, k, v, **call)
    assert torch.equal(out[mine], other_out[mine])
    assert torch.equal(lse.mT[mine], other_lse.mT[mine])
    alone = flashtile.attention(q[:1, :, :1], k[:1, :, :1], v[:1, :, :1], causal=causal, backend="hopper")
    assert torch.equal(alone[:, 5::9], out[:1, 5::9, :1])


@pytest.mark.parametrize("exponents", [(-4.0, 0.0), (0.0, -9.6)], ids=["rising", "falling"])
@pytest.mark.parametrize("dtype", [_BF16, _FP16], ids=["bf16", "fp16"])
def test_many_small_weights_beside_a_large_one(dtype, exponents):
    """Thousands of equal weights that together are as heavy as the largest one. All are rounded alike, so that what a
    format cannot hold would show in the sum."""
    q, k = (torch.zeros(1, 8192, 2, 64, device="cuda", dtype=dtype) for _ in range(2))
    q[..., 0] = 8.0  # times 1/8
    k[..., 0] = exponents[1]
    k[:, -1, :, 0] = exponents[0]
    v = torch.rand(1, 8192, 2, 64, device="cuda", dtype=dtype)
    check_forward(q, k, v, "hopper")


@pytest.mark.parametrize("causal", [False, True])
def test_large_values_beside_scores_that_rise(causal):
    """Sums of weights alone would fit, their products with such values would not."""
    q, k = (torch.zeros(1, 2000, 2, 64, device="cuda", dtype=_BF16) for _ in range(2))
    q[..., 0] = 1.0
    k[:, :700, :, 0] = 160.0  # times 1/8: weights up to 2^28.9
    v = torch.full_like(q, 2.0**105)
    out = flashtile.attention(q, k, v, causal=causal, backend="hopper")
    assert_same(out, v)


def test_weights_that_leave_their_range_in_some_packed_sequences():
    torch.manual_seed(6)
    lengths = torch.tensor([1300, 40, 0, 2100, 900])
    cu_seqlens = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)]).to("cuda", torch.int32)
    q, k, v = (torch.randn(int(lengths.sum()), 4, 128, device="cuda", dtype=_BF16) for _ in range(3))
    q[..., 0] = 50.0
    k[..., 0] = 0.0
    k[1400:1500, 1::2, 0] = 50.0  # the first keys of the fourth sequence
    bounds = {"max_seqlen_q": 2100, "max_seqlen_k": 2100}
    check_forward(q, k, v, "hopper", cu_seqlens_q=cu_seqlens, cu_seqlens_k=cu_seqlens, causal=True, **bounds)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_nan_and_infinite_scores_stay_in_their_rows(head_dim, bad):
    q, k, v = (torch.randn(1, 1700, 2, head_dim, device="cuda", dtype=_BF16) for _ in range(3))
    k[..., 0] = k[..., 0].abs() + 0.1
    clean = flashtile.attention(q, k, v, causal=True, backend="hopper")
    broken = q.clone()
    seen = [3, 200, 699, 1500]
    broken[0, seen, :, 0] = bad
    out, lse = flashtile.attention(broken, k, v, causal=True, return_lse=True, backend="hopper")
    rows = torch.zeros(1700, dtype=torch.bool, device="cuda")
    rows[seen] = True
    assert out[:, rows].isnan().all() and lse[..., rows].isnan().all()
    oracle = flashtile.attention(q.double(), k.double(), v.double(), causal=True, backend="reference")
    assert_close("out", out[:, ~rows], oracle[:, ~rows], clean[:, ~rows])


@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_an_infinite_gradient_stays_in_its_column_of_dv(head_dim):
    """delta of that row is not finite, and nor are dq and dk; its weights are."""
    q, k, v, dout = (torch.randn(1, 300, 2, head_dim, device="cuda", dtype=_BF16) for _ in range(4))
    v.requires_grad_()
    out = flashtile.attention(q, k, v, causal=True, backend="hopper")
    (clean,) = torch.autograd.grad(out, v, dout, retain_graph=True)
    dout[0, 200, :, 5] = torch.inf
    (broken,) = torch.autograd.grad(out, v, dout)
    others = torch.arange(head_dim, device="cuda") != 5
    assert_same(broken[..., others], clean[..., others])
    assert broken[:, :201, :, 5].isinf().all()  # of keys that the row does not see 0 · inf, NaN, as in eager mode


@pytest.mark.parametrize("exponent", [-40, -80])
@pytest.mark.parametrize("head_dim", [64, 128, 192])
def test_tiny_scales(head_dim, exponent):
    """lse in units of scores is as much larger; below 2⁻⁶⁴ it is not an operand."""
    q, k, v, dout = (torch.randn(1, 300, 2, head_dim, device="cuda", dtype=_BF16) for _ in range(4))
    q, k, v = q * 2.0 ** (-exponent / 2 - 2), k * 2.0 ** (-exponent / 2 - 2), v[..., :128]
    dout = dout[..., :128]
    expected, mine, eager = (
        torch.autograd.grad(flashtile.attention(*given, scale=2.0**exponent, backend=backend), given, dout.to(dtype))
        for dtype, backend in ((torch.float64, "reference"), (_BF16, "hopper"), (_BF16, "reference"))
        for given in [[x.to(dtype).requires_grad_() for x in (q, k, v)]]
    )
    for name, exact, of_mine, of_eager in zip("qkv", expected, mine, eager):
        scale = exact.abs().max()
        assert_close(name, of_mine.double() / scale, exact / scale, of_eager.double() / scale, Size())


def test_a_large_sink_and_rows_that_see_nothing_else():
    q, k, v = (torch.randn(1, 96, 2, 64, device="cuda", dtype=_BF16) for _ in range(3))
    sinks = torch.tensor([200.0, -torch.inf], device="cuda")
    _, lse = check_forward(q, k[:, :64], v[:, :64], "hopper", sinks=sinks, causal=True)
    assert (lse[:, 0].round() == 200).all() and (lse[:, 1, :32] == -torch.inf).all()


@pytest.mark.parametrize("batch", [1, 300])
def test_rows_past_the_last_sequence(batch):
    cu_seqlens = torch.arange(0, 7 * batch + 1, 7, device="cuda", dtype=torch.int32)
    q, k, v = (torch.randn(7 * batch + 150, 2, 64, device="cuda", dtype=_BF16) for _ in range(3))
    for cu_q, cu_k in ((cu_seqlens, cu_seqlens.long()), (cu_seqlens.long(), cu_seqlens)):
        out, lse = check_forward(q, k, v, "hopper", cu_seqlens_q=cu_q, cu_seqlens_k=cu_k, causal=True)
        assert not out[7 * batch :].any() and (lse[:, 7 * batch :] == -torch.inf).all()


@pytest.mark.parametrize("backend", ["hopper", "triton", "split"])
def test_a_batch_of_one_may_have_any_stride(backend):
    """Such tensors are contiguous, so that nobody can make them so."""
    q, k, v = torch.randn(3, 200, 2, 64, 1, device="cuda", dtype=_BF16).permute(0, 4, 1, 2, 3)
    assert q.stride(0) == 1 and q.is_contiguous()
    results = []
    for given in ((q, k, v), [t.reshape(200, 2, 64)[None] for t in (q, k, v)]):
        leaves = [t.detach().requires_grad_() for t in given]
        out = flashtile.attention(*leaves, causal=True, deterministic=True, backend=backend)
        results.append((out, *torch.autograd.grad(out.sum(), leaves)))
    assert all(map(torch.equal, *results))


_FAR = {
    "batch": ((2, 200, 2, 64), (2**31 + 8, 128, 64, 1)),
    "row": ((2, 2, 2, 64), (128, 2**31 + 8, 64, 1)),
    "head": ((2, 200, 2, 64), (200 * 64, 64, 2**31 + 8, 1)),
}


@pytest.mark.parametrize("backend", ["hopper", "triton"])
@pytest.mark.parametrize("far", _FAR)
def test_gradients_with_strides_past_two_to_the_31(far, backend):
    shape, strides = _FAR[far]
    storage = torch.zeros(2**31 + 2**20, device="cuda", dtype=_BF16)
    small = [torch.randn(shape, device="cuda", dtype=_BF16) for _ in range(4)]
    large = [storage.as_strided(shape, strides, 2**17 * i).copy_(t) for i, t in enumerate(small)]
    results = []
    for *inputs, dout in (small, large):
        leaves = [t.detach().requires_grad_() for t in inputs]
        out = flashtile.attention(*leaves, causal=True, deterministic=True, backend=backend)
        results.append((out, *torch.autograd.grad(out, leaves, dout)))
    assert all(map(torch.equal, *results))


def test_gradients_of_a_sequence_of_two_to_the_31_elements():
    """Far from the edges of a part of it, a window makes the part's results those of the whole."""
    seq, part, edge = 2**19, 512, 128
    q, k, v, dout = (torch.randn(1, seq, 32, 128, device="cuda", dtype=_BF16) for _ in range(4))
    leaves = [t.requires_grad_() for t in (q, k, v)]
    out = flashtile.attention(*leaves, window=(64, 0), backend="hopper")
    actual = dict(zip(("out", "dq", "dk", "dv"), (out.detach(), *torch.autograd.grad(out, leaves, dout))))
    for first in (0, seq // 2 - 100, seq - part):
        inside = slice(0 if first == 0 else edge, part if first + part == seq else part - edge)
        expected = []
        for dtype in (torch.float64, _BF16):
            parts = [t[:, first : first + part].detach().to(dtype).requires_grad_() for t in (q, k, v)]
            of_part = flashtile.attention(*parts, window=(64, 0), backend="reference")
            grads = torch.autograd.grad(of_part, parts, dout[:, first : first + part].to(dtype))
            expected.append((of_part.detach(), *grads))
        for (name, value), oracle, eager in zip(actual.items(), *expected):
            mine = value[:, first : first + part]
            assert_close(f"{name} at {first}", *(t[:, inside] for t in (mine, oracle, eager)))


@pytest.mark.parametrize("packed", [False, True], ids=["dense", "packed"])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_backwards_in_order_on_two_streams(head_dim, packed):
    """Each has the multiprocessors that the other left, so that some of its programs begin when others have ended;
    nobody may wait for those that have not begun (`test_programs_that_begin_late`)."""
    lengths = {"lengths_q": (700, 300, 1100, 90), "lengths_k": (700, 300, 1100, 90)} if packed else {}
    case = _case(head_dim, heads=16, seq_q=1500, seq_k=1500, **lengths, **_IN_ORDER)
    inputs = make_inputs(case, "cuda")
    first = check(case, "hopper", inputs=inputs)
    streams = [torch.cuda.Stream() for _ in range(2)]
    torch.cuda._sleep(100_000_000)  # until all calls are in line
    for stream in streams:
        stream.wait_stream(torch.cuda.current_stream())
    found = []
    for turn in range(40):
        with torch.cuda.stream(streams[turn % 2]):
            found.append(run(case, inputs, "hopper"))
    torch.cuda.synchronize()
    assert all(torch.equal(each[name], first[name]) for each in found for name in first)


@pytest.mark.parametrize("rows", ["dense", "one query each"])
def test_a_cuda_graph_and_eager_calls_do_not_share_their_counters(rows):
    """Nor does the memory of a graph's results begin where the counters of its launch lie."""
    if rows == "dense":
        q, k, v = (torch.randn(4, 1500, 16, 64, device="cuda", dtype=_BF16) for _ in range(3))
        call = partial(flashtile.attention, q, k, v, causal=True, return_lse=True, backend="hopper")
    else:
        lengths = torch.arange(2048, 4096, 64)
        starts = [torch.tensor([0, *counts], device="cuda").cumsum(0).int() for counts in ([1] * 32, lengths)]
        q, k, v = (torch.randn(n, 32, 128, device="cuda", dtype=_BF16) for n in (32, *[int(lengths.sum())] * 2))
        options = {"max_seqlen_q": 1, "max_seqlen_k": 4096, "causal": True, "return_lse": True, "backend": "hopper"}
        call = partial(flashtile.attention_varlen, q, k, v, *starts, **options)
    expected = call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = [call() for _ in range(3)]
    side = torch.cuda.Stream()
    torch.cuda.synchronize()
    for _ in range(20):
        for tensor in itertools.chain(*captured):
            tensor.fill_(7)
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            graph.replay()
        eager = [call() for _ in range(3)]
        torch.cuda.synchronize()
        for results in (*captured, *eager):
            assert all(torch.equal(found, wanted) for found, wanted in zip(results, expected))


def test_automatic_choice_on_this_gpu():
    q = torch.randn(1, 65, 2, 64, device="cuda", dtype=_BF16)
    assert flashtile.explain(q, q, q).backend == "hopper"
    assert torch.equal(flashtile.attention(q, q, q), flashtile.attention(q, q, q, backend="hopper"))
    assert flashtile.explain(q, q, q, dropout_p=0.1).backend == "hopper"
    few, wide = q[:, :64], q.float()
    assert flashtile.explain(few, few, few).backend == flashtile.explain(wide, wide, wide).backend == "triton"


def test_no_tile_is_left_out():
    """Of processes that share the GPU, none finds results that nobody wrote (`left_out_tiles`)."""
    command = [sys.executable, left_out_tiles.__file__, "15"]
    processes = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(6)]
    lines = [line for process in processes for line in process.communicate()[0].splitlines()]
    assert len(lines) == 6 * left_out_tiles.CASES and not [line for line in lines if not line.endswith(": 0 0 0 0")]


@pytest.mark.parametrize("feature", ["padding as lengths", "dense mask", "GPT-2", "slopes", "all and slopes"])
def test_a_backward_after_the_forward_of_the_portable_kernels(feature, monkeypatch):
    """Any backward follows any forward."""
    serve, served = select.implementation, []

    def implementation(phase: Any, q: Any, k: Any, v: Any, side: Any, spec: Any, backend: str, **more: Any) -> Any:
        portable = phase == "forward" and backend == "hopper"
        served.append((phase, backend))
        return serve(phase, q, k, v, side, spec, "triton" if portable else backend, **more)

    monkeypatch.setattr(select, "implementation", implementation)
    check(_case(**_FEATURES[feature]), "hopper", "cuda")
    assert ("backward", "hopper") in served


def test_a_part_of_a_larger_call_drops_the_same_weights():
    inputs = make_inputs(_case(seq_q=512, seq_k=512, heads_kv=4, dropout_p=0.3), "cuda")
    seed = inputs.tensors["dropout_seed"]
    whole, whole_lse = flashtile.attention(
        inputs.q, inputs.k, inputs.v, dropout_p=0.3, dropout_seed=seed, backend="hopper", return_lse=True
    )
    part = flashtile.AttentionPart(256, 0, 512, 512)
    out, lse = flashtile.attention_part(
        inputs.q[:, 256:], inputs.k, inputs.v, part, dropout_p=0.3, dropout_seed=seed, backend="hopper"
    )
    assert torch.equal(out, whole[:, 256:]) and torch.equal(lse, whole_lse[..., 256:])


_FLOAT32: dict[str, dict[str, Any]] = {
    "full": {"batch": 3, "seq_q": 512, "seq_k": 512},
    "causal, shared keys": {"seq_q": 643, "seq_k": 643, "causal": True},
    "long, causal": {"batch": 1, "seq_q": 3000, "seq_k": 3000, "causal": True},
    "one query, sinks": {"seq_q": 1, "seq_k": 700, "sinks": True},
    "rows that see nothing": {"seq_q": 300, "seq_k": 100, "sinks": True, "causal": True},
    "one key, other scale": {"seq_k": 1, "scale": -0.1},
    "window": {"seq_q": 700, "seq_k": 800, "window": (90, 3)},
    "window, top left": {"seq_q": 517, "window": (None, 20), "align": "top_left"},
    "heads divided": {"heads": 8, "heads_kv": 1, "seq_q": 2000, "seq_k": 70},
}


_FLOAT32_WIDTHS = [
    (128, 128), (96, 96), (72, 128), (128, 64), (80, 8), (256, 256), (192, 192), (144, 144), (192, 128), (256, 64),
    (192, 256), (128, 192), (512, 512), (320, 320), (512, 8), (72, 512),
]  # fmt: skip


@pytest.mark.parametrize("widths, name", turns(_FLOAT32_WIDTHS, _FLOAT32, 2), ids=str)
def test_backward_of_float32(widths, name):
    """Its sums have a fixed order, so each run has the same bits."""
    case = _short(*widths, dtype=torch.float32, **_FLOAT32[name])
    inputs = make_inputs(case, "cuda")
    given = {**inputs.tensors, **case.keywords(), "device": "sm_90"}
    choice = flashtile.explain(inputs.q, inputs.k, inputs.v, **given)
    assert [(kernel.name, kernel.backend) for kernel in choice.kernels[-3:]] == [
        (name, "hopper") for name in ("dv", "dk", "dq")
    ]
    check_again(case, "auto", 3)


@pytest.mark.parametrize("widths, name", turns(_FLOAT32_WIDTHS, [*_FLOAT32][::-1], 1), ids=str)
def test_forward_of_float32(widths, name):
    """Its sums have a fixed order, so each run has the same bits."""
    case = _short(*widths, dtype=torch.float32, **_FLOAT32[name])
    check_again(case, "hopper", 3, ("out", "lse"))


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("head_dim", [256, 512])
def test_forward_of_float32_with_infinite_and_missing_numbers(head_dim, causal):
    """The parts of an infinite number are infinite and NaN. Scores are hidden before they count, values are not."""
    q, k, v = (torch.randn(1, 200, 2, head_dim, device="cuda") for _ in range(3))
    if causal:
        k[0, 150, 0] = torch.inf
    else:
        v[0, 130, 1, 7], v[0, 160, 1, 9] = torch.inf, torch.nan
    out, _ = check_forward(q, k, v, "hopper", causal=causal)
    assert not out.isfinite().all()
