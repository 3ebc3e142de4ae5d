"""The Hopper kernels' own source, run on a CPU by tests/gluon_emulator: results, and what programs owe one another.

The machine has three multiprocessors, so that programs take several tiles each, and draws the order of events by lot.
Sizes are small; thresholds from which on the kernels take another way are lowered to them.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import replace
from types import ModuleType
from typing import Any

import pytest
import torch

import flashtile
from flashtile._backends import devices
from flashtile.ops.attention import repeated, select
from flashtile.testing import AttentionCase, Size, assert_close, check, make_inputs, run, with_arguments
from gluon_emulator import EmulatedHopper, forget_copies
from gluon_emulator.serving import served_by
from support.attention.attention_cases import COMBINED, parameters, score_mod_combined
from support.attention.far_alibi import check as check_far_alibi
from support.attention.max_scores import check as check_max_scores

pytestmark = pytest.mark.skipif(
    bool(devices.triton_missing()) or devices.interpreting(), reason="needs Triton, not interpreting"
)
_FP8 = torch.float8_e4m3fn
_SMALL = AttentionCase(
    batch=1, heads=2, heads_kv=1, seq_q=200, seq_k=330, head_dim=64, head_dim_v=64, dtype=torch.bfloat16
)


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch) -> Callable[..., EmulatedHopper]:
    """Makes a machine that serves from now on what asks for "hopper"."""

    def make(seed: int = 0, held: int = 0, **thresholds: int) -> EmulatedHopper:
        emulated = EmulatedHopper(multiprocessors=3, seed=seed, held=held)
        small = dict.fromkeys(("HALF_CAUSAL", "HALF_ODD", "HALF_WIDE", "HALF_WIDE_CAUSAL", "_MORE_ROUNDS"), 0)
        small |= dict.fromkeys(("HALF_WINDOW", "HALF_WINDOW_WIDE"), -1)
        for name, number in {**small, **thresholds}.items():
            (module,) = (each for each in emulated.modules.values() if _defines(each, name))
            setattr(module, name, number)
        repeated.forget_calls()  # which remember the machine before
        monkeypatch.setattr(select, "implementation", served_by(emulated))
        return emulated

    return make


def _defines(module: ModuleType, name: str) -> bool:
    return module.__name__.rpartition(".")[2] in ("configs", "schedule", "backward_configs") and name in vars(module)


_MASKS = {
    "full": {},
    "causal": {"causal": True},
    "window": {"window": (90, 20)},
    "top-left": {"window": (70, None), "align": "top_left"},
    "in-order": {"causal": True, "deterministic": True},
}


#: Heads of a row of the tables, which meet every mask; others differ from these in the chunks of their columns.
_ROWS = ((64, 64), (128, 128), (192, 128), (256, 256), (512, 512))
_CHUNKS = ((40, 72), (80, 80), (96, 96), (160, 144), (272, 40), (192, 320), (320, 272), (512, 384))


@pytest.mark.parametrize(
    "heads, mask",
    [*((heads, mask) for heads in _ROWS for mask in _MASKS), *((heads, "in-order") for heads in _CHUNKS)],
    ids=str,
)
def test_heads_and_masks(hopper: Callable, heads: tuple[int, int], mask: str) -> None:
    hopper()
    case = replace(_SMALL, head_dim=heads[0], head_dim_v=heads[1])
    check(with_arguments(case, **_MASKS[mask]), "hopper")


#: Heads whose scores are products of fewer columns than their tiles have.
_CUT: dict[str, dict[str, Any]] = {
    "full": {"head_dim": 224},
    "causal": {"head_dim": 208, "dtype": torch.float16, "arguments": {"causal": True}},
    "packed": {"head_dim": 240, "lengths_q": (129, 0, 70), "lengths_k": (136, 33, 90)},
    "of 128": {"head_dim": 104, "head_dim_v": 112, "arguments": {"causal": True, "softcap": 5.0}},
}


@pytest.mark.parametrize("changes", _CUT.values(), ids=_CUT)
def test_scores_of_fewer_columns_than_a_tile_has(hopper: Callable, changes: dict[str, Any]) -> None:
    hopper()
    check(replace(_SMALL, **{"head_dim_v": changes["head_dim"], **changes}), "hopper")


_WIDE: dict[str, dict[str, Any]] = {
    "one key, other scale": {"seq_k": 1, "head_dim": 448, "head_dim_v": 64, "arguments": {"scale": -0.1}},
    "shared keys, causal": {"heads": 4, "head_dim": 320, "head_dim_v": 264, "arguments": {"causal": True}},
    "one query, sinks": {"seq_q": 1, "head_dim": 512, "head_dim_v": 448, "dtype": torch.float16, "sinks": True},
    "rows that see nothing": {
        "seq_q": 300, "seq_k": 100, "head_dim": 264, "head_dim_v": 512, "sinks": True, "arguments": {"causal": True},
    },
    "window": {
        "seq_k": 200, "head_dim": 384, "head_dim_v": 320, "dtype": torch.float16, "arguments": {"window": (3, 0)},
    },
    "narrow queries": {"head_dim": 8, "head_dim_v": 512, "arguments": {"window": (None, 20), "align": "top_left"}},
    "packed, causal, soft cap": {
        "heads": 4, "head_dim": 320, "head_dim_v": 264, "lengths_q": (65, 0, 130, 1), "lengths_k": (65, 20, 100, 7),
        "sinks": True, "arguments": {"causal": True, "softcap": 2.0},
    },
    "packed, full": {
        "head_dim": 512, "head_dim_v": 512, "dtype": torch.float16, "lengths_q": (63, 1, 70), "lengths_k": (129, 64, 0),
    },
    "packed, window, key lengths": {
        "head_dim": 264, "head_dim_v": 64, "lengths_q": (80, 129, 0, 40), "lengths_k": (190, 64, 9, 50),
        "key_lengths": (150, 64, 9, 0), "arguments": {"window": (30, 40)},
    },
    "key lengths, soft cap": {
        "seq_k": 200, "head_dim": 320, "head_dim_v": 512, "key_lengths": (70, 0), "sinks": True,
        "arguments": {"softcap": 2.0},
    },
    "key lengths, causal": {
        "heads": 4, "head_dim": 64, "head_dim_v": 320, "dtype": torch.float16, "key_lengths": (129, 300),
        "arguments": {"causal": True},
    },
}  # fmt: skip


@pytest.mark.parametrize("changes", _WIDE.values(), ids=_WIDE)
def test_backward_of_wide_heads(hopper: Callable, changes: dict[str, Any]) -> None:
    """Its sums have a fixed order: no order of events changes a bit."""
    case = replace(_SMALL, batch=2, **changes)
    emulated = hopper(seed=0)
    first = check(case, "hopper")
    assert emulated.launched[-3:] == ["attention_wide_dv_kernel", *["attention_wide_dk_dq_kernel"] * 2]
    hopper(seed=1)
    again = run(case, make_inputs(case), "hopper")
    assert all(torch.equal(first[name], again[name]) for name in first)


def test_padding_reaches_no_gradient_of_wide_heads(hopper: Callable) -> None:
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


def test_backward_of_wide_heads_divides_heads_that_share_keys(hopper: Callable) -> None:
    """Few keys with many queries: dk and dv are sums of parts."""
    hopper()
    check(replace(_SMALL, heads=4, seq_q=1100, seq_k=70, head_dim=264, head_dim_v=64), "hopper")


_FLOAT32: dict[str, dict[str, Any]] = {
    "one key, other scale": {"seq_k": 1, "head_dim": 96, "head_dim_v": 64, "arguments": {"scale": -0.1}},
    "shared keys, causal": {"heads": 4, "head_dim": 128, "head_dim_v": 96, "arguments": {"causal": True}},
    "full": {"seq_q": 130, "seq_k": 140, "head_dim": 128, "head_dim_v": 128},
    "one query, sinks": {"seq_q": 1, "head_dim": 72, "head_dim_v": 128, "sinks": True},
    "rows that see nothing": {
        "seq_q": 300, "seq_k": 100, "head_dim": 128, "head_dim_v": 72, "sinks": True, "arguments": {"causal": True},
    },
    "window": {"seq_k": 200, "head_dim": 96, "head_dim_v": 80, "arguments": {"window": (3, 0)}},
    "narrow values": {"head_dim": 80, "head_dim_v": 8, "arguments": {"window": (None, 20), "align": "top_left"}},
    "heads divided": {"heads": 4, "seq_q": 1100, "seq_k": 70, "head_dim": 72, "head_dim_v": 64},
}  # fmt: skip

_FLOAT32_WIDE: dict[str, dict[str, Any]] = {
    "shared keys, causal": {"heads": 4, "head_dim": 256, "head_dim_v": 256, "arguments": {"causal": True}},
    "one query, sinks": {"seq_q": 1, "head_dim": 136, "head_dim_v": 200, "sinks": True},
    "rows that see nothing": {
        "seq_q": 200, "seq_k": 100, "head_dim": 192, "head_dim_v": 128, "sinks": True, "arguments": {"causal": True},
    },
    "one key, other scale": {"seq_k": 1, "head_dim": 160, "head_dim_v": 160, "arguments": {"scale": -0.1}},
    "window": {"seq_k": 200, "head_dim": 144, "head_dim_v": 144, "arguments": {"window": (3, 0)}},
    "narrow values": {"head_dim": 256, "head_dim_v": 8, "arguments": {"window": (None, 20), "align": "top_left"}},
    "narrow queries": {"seq_q": 130, "seq_k": 140, "head_dim": 72, "head_dim_v": 256},
    "nothing stays": {"seq_q": 70, "head_dim": 512, "head_dim_v": 512, "arguments": {"causal": True}},
    "keys of dv do not stay": {"seq_q": 70, "head_dim": 264, "head_dim_v": 320},
    "narrow values of the widest": {"seq_q": 70, "head_dim": 512, "head_dim_v": 8},
    "narrow queries of the widest": {"seq_q": 70, "head_dim": 72, "head_dim_v": 512},
}  # fmt: skip


@pytest.mark.parametrize(
    "changes, kernels",
    [
        *((changes, "attention_float32") for changes in _FLOAT32.values()),
        *((changes, "attention_float32_wide") for changes in _FLOAT32_WIDE.values()),
    ],
    ids=[*_FLOAT32, *(f"wide, {name}" for name in _FLOAT32_WIDE)],
)
def test_backward_of_float32(hopper: Callable, changes: dict[str, Any], kernels: str) -> None:
    """Its sums have a fixed order: no order of events changes a bit."""
    case = replace(_SMALL, dtype=torch.float32, **changes)
    emulated = hopper(seed=0)
    first = check(case, "hopper")
    gradients = [f"{kernels}_dv_kernel", *[f"{kernels}_dk_dq_kernel"] * 2]
    launched = [name for name in emulated.launched if name != "attention_shares_kernel"]
    assert launched[-8:] == ["attention_begin_kernel", *["attention_parts_kernel"] * 4, *gradients]
    hopper(seed=1)
    again = run(case, make_inputs(case), "hopper")
    assert all(torch.equal(first[name], again[name]) for name in first)


_FLOAT32_FORWARD: dict[str, dict[str, Any]] = {
    "one key, other scale": {"seq_k": 1, "head_dim": 320, "head_dim_v": 64, "arguments": {"scale": -0.1}},
    "shared keys, causal": {"heads": 4, "head_dim": 256, "head_dim_v": 256, "arguments": {"causal": True}},
    "full": {"seq_q": 70, "seq_k": 140, "head_dim": 512, "head_dim_v": 512},
    "one query, sinks": {"seq_q": 1, "head_dim": 136, "head_dim_v": 128, "sinks": True},
    "rows that see nothing": {
        "seq_q": 300, "seq_k": 100, "head_dim": 192, "head_dim_v": 72, "sinks": True, "arguments": {"causal": True},
    },
    "window": {"seq_k": 200, "head_dim": 48, "head_dim_v": 448, "arguments": {"window": (3, 0)}},
    "two chunks, causal": {"head_dim": 72, "head_dim_v": 128, "arguments": {"causal": True}},
    "window, top left": {"head_dim": 160, "head_dim_v": 8, "arguments": {"window": (None, 20), "align": "top_left"}},
}  # fmt: skip


@pytest.mark.parametrize("changes", _FLOAT32_FORWARD.values(), ids=_FLOAT32_FORWARD)
def test_forward_of_float32(hopper: Callable, changes: dict[str, Any]) -> None:
    """Its sums have a fixed order: no order of events changes a bit."""
    case = replace(_SMALL, dtype=torch.float32, **changes)
    inputs = make_inputs(case)

    def forward(backend: str, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
        q, k, v, *sinks = (t.to(dtype) for t in (inputs.q, inputs.k, inputs.v, *inputs.tensors.values()))
        given = dict(zip(inputs.tensors, sinks))
        return flashtile.attention(q, k, v, **given, **case.keywords(), return_lse=True, backend=backend)

    results = []
    for seed in range(2):
        emulated = hopper(seed=seed)
        results.append(forward("hopper", torch.float32))
        assert emulated.launched == [*["attention_parts_kernel"] * 3, "attention_float32_forward_kernel"]
    oracle, eager = forward("reference", torch.float64), forward("reference", torch.float32)
    for name, found, again, exact, plain in zip(("out", "lse"), *results, oracle, eager):
        assert torch.equal(found, again)
        assert_close(name, found, exact, plain, Size(1, 1) if name == "lse" else Size())


@pytest.mark.parametrize("arguments", [{}, {"causal": True}, {"window": (70, 0), "deterministic": True}], ids=str)
@pytest.mark.parametrize("head_dim", [64, 128, 256, 512])
def test_packed_sequences(hopper: Callable, head_dim: int, arguments: dict) -> None:
    hopper()
    case = replace(
        _SMALL, lengths_q=(129, 0, 1, 70), lengths_k=(129, 33, 1, 90), head_dim=head_dim, head_dim_v=head_dim
    )
    check(with_arguments(case, **arguments), "hopper")


@pytest.mark.parametrize(
    "shape, arguments",
    [
        ({}, {"causal": True}),
        ({}, {"window": (90, 20), "softcap": 5.0}),
        ({"lengths_q": (129, 0, 1, 70), "lengths_k": (129, 33, 1, 90)}, {"causal": True}),
        ({"mask": "1hqk", "bias": "bhqk", "sinks": True}, {}),
        ({"score_mod": True, "key_lengths": (200,)}, {}),
    ],
    ids=str,
)
@pytest.mark.parametrize("head_dim, dtype", [(64, torch.float16), (128, torch.bfloat16), (320, torch.bfloat16)])
def test_the_largest_scores(hopper: Callable, head_dim: int, dtype: torch.dtype, shape: dict, arguments: dict) -> None:
    hopper()
    case = replace(_SMALL, head_dim=head_dim, head_dim_v=head_dim, dtype=dtype, **shape)
    check_max_scores(with_arguments(case, **arguments), "hopper")


@pytest.mark.parametrize(
    "arguments, summed",
    [
        ({}, False),
        ({"causal": True, "deterministic": True}, False),
        ({"window": (None, 9), "align": "top_left", "softcap": 5.0}, False),
        ({"window": (70, None)}, True),
    ],
    ids=str,
)
@pytest.mark.parametrize(
    "head_dim, head_dim_v, seq_k",
    [(32, 64, 66), (64, 64, 128), (96, 80, 77), (128, 128, 100), (160, 144, 77), (192, 128, 120), (208, 256, 60)],
    ids=str,
)
def test_all_keys_in_one_tile(
    hopper: Callable, head_dim: int, head_dim_v: int, seq_k: int, arguments: dict, summed: bool
) -> None:
    """dq is stored as it is multiplied where each query tile visits the only key tile, and summed elsewhere."""
    emulated = hopper()
    for seq_q in (49, 200):
        case = replace(
            _SMALL, batch=2, heads=3, heads_kv=3, seq_q=seq_q, seq_k=seq_k, head_dim=head_dim, head_dim_v=head_dim_v
        )
        check(with_arguments(case, **arguments), "hopper")
        seen = min(seq_k, seq_q + 9)  # keys that the window shows to a query: the others are cut off
        two_tiles = "softcap" in arguments and head_dim > 128 and seen > 64
        needs_sums = summed or two_tiles or ("causal" in arguments and seq_q > seq_k)
        assert (emulated.launched[-1] == "attention_end_kernel") is needs_sums


_WHOLE_LINES: dict[str, dict[str, Any]] = {
    "full, several lines each": {"heads": 4, "heads_kv": 4},
    "causal": {"head_dim": 128, "head_dim_v": 128, "arguments": {"causal": True}},
    "in order": {"head_dim": 80, "head_dim_v": 96, "arguments": {"causal": True, "deterministic": True}},
    "two key tiles, shared": {"heads": 6, "heads_kv": 2, "seq_k": 130, "head_dim": 96, "head_dim_v": 40},
    "window": {"head_dim": 32, "head_dim_v": 32, "arguments": {"window": (90, 20)}},
    "window, shared, wider than keys": {"heads": 4, "seq_k": 200, "arguments": {"window": (100, 140)}},
    "window on the left, top left": {"seq_q": 330, "arguments": {"window": (70, None), "align": "top_left"}},
    "one key tile in a window": {"seq_k": 66, "arguments": {"window": (70, None)}},
    "float16, dropout": {"dtype": torch.float16, "arguments": {"dropout_p": 0.3}},
    "soft cap, sinks": {
        "head_dim": 128, "head_dim_v": 128, "sinks": True, "arguments": {"softcap": 5.0, "causal": True},
    },
    "slopes that learn": {"alibi_slopes": "h", "arguments": {"causal": True}},
    "a bias of scores": {"bias": "bhqk", "heads": 2, "heads_kv": 2, "seq_q": 130},
    "a mask, a shared bias": {"bias": "1hqk", "mask": "b11k", "heads": 2, "heads_kv": 2, "seq_q": 130},
    "a score function": {"score_mod": True, "constant": ("score_mod",)},
    "other scale": {"arguments": {"scale": -0.1}},
    "wide, causal": {"head_dim": 208, "head_dim_v": 208, "arguments": {"causal": True}},
    "widest, full, shared": {"heads": 4, "head_dim": 256, "head_dim_v": 256, "seq_k": 100},
    "wide, a bias of scores": {
        "head_dim": 192, "head_dim_v": 192, "bias": "bhqk", "heads": 2, "heads_kv": 2, "seq_q": 130, "seq_k": 130,
    },
    "widest, a mask, slopes that learn": {
        "head_dim": 256, "head_dim_v": 208, "mask": "b11k", "alibi_slopes": "h", "heads": 2, "heads_kv": 2,
    },
    "wide, in order, dropout": {
        "head_dim": 192, "head_dim_v": 192, "seq_q": 130, "seq_k": 130,
        "arguments": {"deterministic": True, "dropout_p": 0.2},
    },
}  # fmt: skip


@pytest.mark.parametrize("changes", _WHOLE_LINES.values(), ids=_WHOLE_LINES)
def test_thread_blocks_of_whole_lines_sum_dq_alone(hopper: Callable, changes: dict[str, Any]) -> None:
    """They store it as it is to be, and no order of events changes a bit."""
    case = replace(_SMALL, **{"batch": 3, **changes})
    emulated = hopper(seed=0, _MORE_ROUNDS=10**9, _KEPT_BYTES=10**9)
    first = check(case, "hopper")
    assert "attention_end_kernel" not in emulated.launched
    hopper(seed=1, _MORE_ROUNDS=10**9, _KEPT_BYTES=10**9)
    again = run(case, make_inputs(case), "hopper")
    assert all(torch.equal(first[name], again[name]) for name in ("dq", "dk", "dv"))


@pytest.mark.parametrize(
    "changes",
    [{}, {"head_dim": 128, "head_dim_v": 128}, {"head_dim": 192, "head_dim_v": 128}, {"key_lengths": (300, 7, 129)},
     {"lengths_q": (65, 130, 1), "lengths_k": (100, 7, 129)}],
    ids=str,
)  # fmt: skip
def test_keys_past_the_end_have_no_weight_beside_the_smallest_scores(hopper: Callable, changes: dict[str, Any]) -> None:
    """Such a key would have a score of 0, where all others have -500, and a weight that no number holds."""
    hopper()
    case = replace(_SMALL, batch=3, **changes)
    inputs = make_inputs(case)
    inputs.q.fill_(0.5 * math.sqrt(500 / math.sqrt(case.head_dim)))
    inputs.k.fill_(-2 * math.sqrt(500 / math.sqrt(case.head_dim)))
    results = run(case, inputs, "hopper")
    assert results["lse"].max() < -450
    check(case, "hopper", inputs=inputs)


#: Rows of these biases lie at multiples of 16 bytes, so TMA brings their tiles. The last ones end within a tile.
_MOVED_BIASES: dict[str, dict[str, Any]] = {
    "of heads": {"bias": "1hqk"},
    "in parts": {"bias": "11qk", "seq_q": 60, "seq_k": 64},
    "of sequences, causal, in order": {"bias": "b1qk", "arguments": {"causal": True, "deterministic": True}},
    "constant, window, softcap": {
        "bias": "bhqk", "constant": ("bias",), "arguments": {"window": (90, 20), "softcap": 3.0},
    },
    "block mask, dropout": {"bias": "1hqk", "block_mask": (256, 128), "arguments": {"dropout_p": 0.3}},
    "packed": {"bias": "1hqk", "lengths_q": (129, 0, 70), "lengths_k": (136, 33, 90)},
    "packed, one for all, key lengths": {
        "bias": "11qk", "lengths_q": (129, 1), "lengths_k": (136, 130), "key_lengths": (70, 130),
        "arguments": {"causal": True},
    },
    "packed, window, slopes, empty ones": {
        "bias": "1hqk", "lengths_q": (0, 129, 70, 5), "lengths_k": (40, 136, 0, 1), "alibi_slopes": "h",
        "arguments": {"window": (90, 20)},
    },
    "packed, block mask": {
        "bias": "1hqk", "lengths_q": (129, 1, 70), "lengths_k": (264, 33, 150), "block_mask": (64, 128),
    },
    "block mask of heads, one bias for all": {
        "bias": "b1qk", "block_mask": (128, 256), "key_lengths": (328, 140), "arguments": {"causal": True},
    },
    "tiles of 64 keys": {"bias": "1hqk", "block_mask": (64, 64)},
    "score function": {"bias": "1hqk", "score_mod": True, "constant": ("score_mod",)},
    "score function, softcap, of each score": {
        "bias": "bhqk", "score_mod": True, "constant": ("score_mod",), "arguments": {"softcap": 3.0},
    },
    "score function, packed, block mask": {
        "bias": "11qk", "lengths_q": (129, 70), "lengths_k": (136, 90), "block_mask": (128, 128), "score_mod": True,
        "constant": ("score_mod",),
    },
}  # fmt: skip


@pytest.mark.parametrize("head_dim", [32, 40, 128, 256])
@pytest.mark.parametrize("changes", _MOVED_BIASES.values(), ids=_MOVED_BIASES)
def test_bias_that_comes_by_tma(hopper: Callable, changes: dict[str, Any], head_dim: int) -> None:
    emulated = hopper(seed=head_dim)
    sizes = {"batch": 2, "seq_q": 200, "seq_k": 328, "head_dim": head_dim, "head_dim_v": head_dim}
    case = replace(_SMALL, **sizes | changes)
    if head_dim == 128:
        case = replace(case, dtype=torch.float16)
    check(case, "hopper")
    assert ("attention_bias_gradient_kernel" in emulated.launched) is ("bias" in case.learned)


@pytest.mark.parametrize("change", [{"lengths_q": (129, 0, 70, 200)}, {"block_mask": (128, 128), "batch": 4}], ids=str)
def test_gradient_of_a_bias_has_the_same_bits_in_any_order_of_events(hopper: Callable, change: dict[str, Any]) -> None:
    """What is left out changes no order of what is added."""
    case = replace(_SMALL, seq_k=200, bias="1hqk", **change)
    hopper(seed=0)
    first = check(case, "hopper")
    hopper(seed=1)
    again = run(case, make_inputs(case), "hopper")
    assert torch.equal(first["dbias"], again["dbias"])


def test_batch_entries_and_heads_may_share_the_lists_of_a_block_mask(hopper: Callable) -> None:
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


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"seq_k": 330, "arguments": {"causal": True, "deterministic": True}},
        {"key_lengths": (100, 328), "arguments": {"dropout_p": 0.3}},
        {"block_mask": (256, 128), "alibi_slopes": "h"},
        {"seq_q": 49, "seq_k": 49},
    ],
    ids=str,
)
@pytest.mark.parametrize("head_dim", [40, 96, 128])
def test_bias_that_no_scores_share(hopper: Callable, changes: dict[str, Any], head_dim: int) -> None:
    """The main kernel stores its gradient."""
    emulated = hopper(seed=head_dim)
    sizes = {"batch": 2, "seq_q": 200, "seq_k": 328, "head_dim": head_dim, "head_dim_v": head_dim, "bias": "bhqk"}
    check(replace(_SMALL, **{**sizes, **changes}), "hopper")
    assert "attention_bias_gradient_kernel" not in emulated.launched


def test_gradient_of_the_scores_that_has_no_room_on_its_way(hopper: Callable) -> None:
    emulated = hopper()
    check(replace(_SMALL, seq_k=328, head_dim=256, head_dim_v=256, bias="bhqk"), "hopper")
    assert "attention_bias_gradient_kernel" in emulated.launched


_SLOPES: dict[str, dict[str, Any]] = {
    "full": {"alibi_slopes": "h"},
    "causal, in order": {"alibi_slopes": "bh", "arguments": {"causal": True, "deterministic": True}},
    "window, softcap": {"alibi_slopes": "bh", "arguments": {"window": (90, 20), "softcap": 3.0}},
    "dropout, softcap": {"alibi_slopes": "h", "arguments": {"align": "top_left", "dropout_p": 0.2, "softcap": 3.0}},
    "lengths": {"alibi_slopes": "bh", "key_lengths": (201, 0), "sinks": True},
    "packed, softcap, in order": {
        "alibi_slopes": "bh", "lengths_q": (129, 0, 1, 70), "lengths_k": (129, 33, 1, 90),
        "arguments": {"softcap": 3.0, "deterministic": True},
    },
}  # fmt: skip


@pytest.mark.parametrize("change", _SLOPES.values(), ids=_SLOPES)
@pytest.mark.parametrize("head_dim, head_dim_v", [(64, 64), (192, 128), (256, 256)], ids=str)
def test_slopes_that_learn(hopper: Callable, head_dim: int, head_dim_v: int, change: dict) -> None:
    """Heads that share keys have a gradient each, and hidden keys and rows past the end give nothing."""
    hopper()
    change = dict(change)
    arguments = change.pop("arguments", {})
    case = replace(_SMALL, batch=2, seq_q=150, head_dim=head_dim, head_dim_v=head_dim_v, **change)
    check(with_arguments(case, **arguments), "hopper")


def test_slopes_are_summed_before_their_terms_are_rounded(hopper: Callable) -> None:
    """Small outputs in float16, whose rounding alone makes most of the error that is allowed."""
    hopper()
    case = replace(
        _SMALL, batch=2, seq_q=127, seq_k=300, head_dim=192, dtype=torch.float16, key_lengths=(65, 127), bias="bhqk",
        alibi_slopes="h", sinks=True,
    )  # fmt: skip
    check(with_arguments(case, causal=True, align="top_left", softcap=2.0, scale=-0.2), "hopper")


@pytest.mark.parametrize("deterministic", [False, True], ids=["free", "ordered"])
def test_slopes_that_learn_have_the_same_bits_in_any_order_of_events(hopper: Callable, deterministic: bool) -> None:
    """A key of a head has one owner, which adds in the order of its steps; only walks that meet change these."""
    case = replace(_SMALL, heads=4, heads_kv=2, seq_q=260, seq_k=390, alibi_slopes="h")
    case = with_arguments(case, causal=True, deterministic=deterministic)
    hopper(seed=0)
    first = check(case, "hopper")
    hopper(seed=1)
    again = run(case, make_inputs(case), "hopper")
    names = first if deterministic else ["dalibi_slopes"]
    assert all(torch.equal(first[name], again[name]) for name in names)


@pytest.mark.parametrize("head_dim", [64, 128])
def test_far_keys_have_the_weights_of_near_ones(hopper: Callable, head_dim: int) -> None:
    hopper()
    check_far_alibi("hopper", head_dim)


@pytest.mark.parametrize("packed", [False, True], ids=["dense", "packed"])
@pytest.mark.parametrize(
    "head_dim, dtype",
    [(64, torch.float16), (128, torch.bfloat16), (256, torch.float16), (512, torch.bfloat16)],
    ids=str,
)
def test_scores_that_change(hopper: Callable, head_dim: int, dtype: torch.dtype, packed: bool) -> None:
    hopper()
    lengths = {"lengths_q": (100, 0, 60), "lengths_k": (70, 33, 60)} if packed else {}
    scores = {"alibi_slopes": "h", "constant": ("alibi_slopes",), "sinks": True}
    case = replace(_SMALL, head_dim=head_dim, head_dim_v=head_dim, dtype=dtype, **scores, **lengths)
    check(with_arguments(case, causal=True, softcap=5.0), "hopper")


def _emulated_pairs() -> list:
    """Pairs of features, in sizes of several tiles and in 16 bits. TMA brings every second bias."""
    cases = {}
    for number, (name, case) in enumerate((COMBINED | score_mod_combined()).items()):
        longest, longest_packed = ((310, 220), (312, 224))[number // 2 % 2]
        changes = {
            "key_lengths": (300, 17, 0),
            "lengths_q": (5, 0, 137),
            "lengths_k": (133, 4, longest_packed),
            "block_mask": (128, 128),
        }
        here = {field: value for field, value in changes.items() if getattr(case, field)}
        if "key_lengths" in here:
            here["key_lengths"] = here["key_lengths"][: case.batch]
        dtype = (torch.bfloat16, torch.float16)[number % 2]
        cases[name] = replace(case, seq_q=150, seq_k=longest, dtype=dtype, **here)
    return parameters(cases)


@pytest.mark.parametrize("case", _emulated_pairs())
def test_pairs_of_features(hopper: Callable, case: AttentionCase) -> None:
    hopper()
    check(case, "hopper")


_WITH_A_FUNCTION = {
    "causal": {"dtype": torch.float16, "arguments": {"causal": True}},
    "in order, dropout": {"arguments": {"deterministic": True, "dropout_p": 0.2, "causal": True}},
    "slopes behind a soft cap": {"alibi_slopes": "h", "arguments": {"softcap": 3.0}},
    "shared bias": {"bias": "1hqk", "dtype": torch.float16, "arguments": {"dropout_p": 0.2, "window": (90, 20)}},
    "own bias": {"bias": "bhqk"},
    "packed": {"batch": 3, "lengths_q": (5, 0, 137), "lengths_k": (133, 4, 220), "arguments": {"causal": True}},
    "blocks": {"block_mask": (128, 128), "key_lengths": (300,)},
}


@pytest.mark.parametrize(
    "heads, name",
    [
        ((64, 64), "causal"), ((64, 64), "own bias"), ((128, 128), "packed"), ((128, 128), "in order, dropout"),
        ((192, 128), "slopes behind a soft cap"), ((192, 128), "blocks"), ((256, 256), "shared bias"),
        ((256, 256), "slopes behind a soft cap"),
    ],
    ids=str,
)  # fmt: skip
def test_derivatives_of_a_score_function(hopper: Callable, heads: tuple[int, int], name: str) -> None:
    machine = hopper()
    case = replace(_SMALL, head_dim=heads[0], head_dim_v=heads[1], score_mod=True, constant=("score_mod",))
    check(replace(case, **_WITH_A_FUNCTION[name]), "hopper")
    assert "attention_backward_kernel" in machine.launched


@pytest.mark.parametrize("head_dim", [64, 128])
def test_reads_of_a_score_function_that_stay_within(hopper: Callable, head_dim: int) -> None:
    """Tiles divide the call, so reads have no checks, and addresses in parts of rows and of columns."""
    hopper()
    generator = torch.Generator().manual_seed(1)
    q, k, v = (torch.randn(1, rows, 2, head_dim, generator=generator).to(torch.bfloat16) for rows in (384, 256, 256))
    table, gain = torch.randn(2, 700, generator=generator), torch.randn(256, generator=generator)

    def relative(score: Any, batch: Any, head: Any, q_index: Any, k_index: Any) -> Any:
        return score + table[head, q_index - k_index + 300] * gain[k_index]

    def run_on(backend: str, dtype: torch.dtype) -> torch.Tensor:
        tensors = (tensor.to(dtype) for tensor in (q, k, v))
        return flashtile.attention(*tensors, score_mod=relative, causal=True, backend=backend)

    oracle, eager = run_on("reference", torch.float64), run_on("reference", torch.bfloat16)
    assert_close("out", run_on("hopper", torch.bfloat16), oracle, eager)


_TABLES = {
    "mask of keys": {"mask": "b11k"},
    "mask of queries": {"mask": "1hq1"},
    "mask": {"mask": "11qk"},
    "one mask": {"mask": "1111"},
    "bias of keys": {"bias": "1h1k"},
    "wide bias": {"bias": "bhqk", "bias_dtype": torch.float32},
    "bias and mask": {"bias": "1hqk", "mask": "b1qk", "key_lengths": (300, 129)},
}


@pytest.mark.parametrize("tables", _TABLES.values(), ids=_TABLES)
@pytest.mark.parametrize(
    "seq_q, seq_k, head_dim, dtype",
    [
        (256, 384, 64, torch.float16),
        (129, 321, 128, torch.bfloat16),
        (100, 150, 256, torch.bfloat16),
        (129, 200, 512, torch.float16),
    ],
    ids=str,
)
def test_tables(
    hopper: Callable, seq_q: int, seq_k: int, head_dim: int, dtype: torch.dtype, tables: dict[str, Any]
) -> None:
    """Also where no tile ends past them."""
    hopper()
    size = {"batch": 2, "seq_q": seq_q, "seq_k": seq_k, "head_dim": head_dim, "head_dim_v": head_dim}
    check(replace(_SMALL, **size, dtype=dtype, **tables), "hopper")


@pytest.mark.parametrize("head_dim", [64, 128, 192, 256, 512])
@pytest.mark.parametrize("packed", [False, True], ids=["dense", "packed"])
def test_dropout(hopper: Callable, head_dim: int, packed: bool) -> None:
    """Scores that rise are exponentiated again, with the same random bits."""
    hopper()
    lengths = {"lengths_q": (129, 0, 70), "lengths_k": (229, 33, 90)} if packed else {}
    case = replace(_SMALL, head_dim=head_dim, head_dim_v=head_dim, **lengths)
    case = with_arguments(case, dropout_p=0.2, causal=True)
    check(case, "hopper")
    if not packed:
        inputs = make_inputs(case)
        _spread(inputs, "rising")
        check(case, "hopper", inputs=inputs)


@pytest.mark.parametrize("packed", [False, True], ids=["dense", "packed"])
def test_key_tiles_behind_the_last_shown_key_are_left_out(hopper: Callable, packed: bool) -> None:
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
def test_padding_may_be_anything(hopper: Callable, layout: str) -> None:
    """What lies past a key length reaches no result, however k and v lie in memory."""
    hopper()
    case = replace(_SMALL, batch=2, seq_k=1 if layout == "one key" else 330, key_lengths=(140, 0))
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


@pytest.mark.parametrize("arguments", [{}, {"causal": True}, {"deterministic": True}], ids=str)
@pytest.mark.parametrize("head_dim, head_dim_v", [(64, 64), (128, 128), (192, 128), (512, 512)])
def test_block_masks(hopper: Callable, head_dim: int, head_dim_v: int, arguments: dict) -> None:
    hopper()
    case = replace(_SMALL, seq_q=300, seq_k=400, head_dim=head_dim, head_dim_v=head_dim_v, block_mask=(128, 128))
    check(with_arguments(case, **arguments), "hopper")


@pytest.mark.parametrize(
    "head_dim, head_dim_v, tile, change",
    [
        (64, 64, (64, 64), {}),
        (64, 64, (64, 128), {"bias": "1hqk", "arguments": {"causal": True, "deterministic": True}}),
        (128, 128, (64, 64), {"arguments": {"dropout_p": 0.2, "deterministic": True}}),
        (128, 128, (192, 64), {"key_lengths": (300,), "alibi_slopes": "bh", "sinks": True}),
        (128, 128, (64, 64), {"lengths_q": (140, 1, 0, 300), "lengths_k": (129, 33, 70, 390)}),
        (192, 128, (64, 64), {"arguments": {"softcap": 5.0}}),
        (256, 256, (64, 64), {"arguments": {"causal": True}}),
        (320, 320, (64, 64), {"arguments": {"causal": True}}),
    ],
    ids=str,
)
def test_block_masks_of_smaller_tiles(
    hopper: Callable, head_dim: int, head_dim_v: int, tile: tuple[int, int], change: dict
) -> None:
    """Tiles of 64 queries have a single consumer, and those of 64 keys tiles of as many."""
    change = dict(change)
    arguments = change.pop("arguments", {})
    case = replace(_SMALL, seq_q=300, seq_k=400, head_dim=head_dim, head_dim_v=head_dim_v, block_mask=tile, **change)
    hopper()
    check(with_arguments(case, **arguments), "hopper")


_PACKED_BLOCKS: dict[str, dict[str, Any]] = {
    "free": {},
    "causal, in order": {"arguments": {"causal": True, "deterministic": True}},
    "lengths, in order": {"key_lengths": (129, 20, 0, 130), "arguments": {"deterministic": True}},
    "slopes": {"alibi_slopes": "bh", "arguments": {"dropout_p": 0.2}},
}


def _heads_and_packed_blocks() -> list:
    """Wide heads, which have other roles, in the cases that differ most."""
    narrow = itertools.product([(64, 64, 256), (128, 128, 128)], _PACKED_BLOCKS)
    wide = itertools.product([(192, 128, 128), (256, 256, 128)], ["causal, in order", "slopes"])
    return [pytest.param(*heads, _PACKED_BLOCKS[name], id=f"{heads}-{name}") for heads, name in (*narrow, *wide)]


@pytest.mark.parametrize("head_dim, head_dim_v, tile, change", _heads_and_packed_blocks())
def test_block_masks_of_packed_sequences(
    hopper: Callable, head_dim: int, head_dim_v: int, tile: int, change: dict
) -> None:
    """Lists name tiles past the end of the shorter sequences, whole and in part: neither may be computed."""
    hopper()
    change = dict(change)
    arguments = change.pop("arguments", {})
    lengths = {"lengths_q": (140, 1, 0, 300), "lengths_k": (129, 33, 70, 390)}
    case = replace(_SMALL, **lengths, head_dim=head_dim, head_dim_v=head_dim_v, block_mask=(tile, tile), **change)
    check(with_arguments(case, **arguments), "hopper")


@pytest.mark.parametrize("deterministic", [False, True], ids=["free", "ordered"])
def test_block_masks_leave_rows_past_the_last_sequence_alone(hopper: Callable, deterministic: bool) -> None:
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


@pytest.mark.parametrize("arguments", [{}, {"causal": True}, {"causal": True, "deterministic": True}], ids=str)
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_long_walks(hopper: Callable, head_dim: int, arguments: dict) -> None:
    """The steps that a mask cuts have a loop of their own; walks of heads that share keys go up, or meet."""
    hopper(_LONG_WALK=256, WALK_BEYOND_CACHE=512)
    case = replace(_SMALL, heads=4, heads_kv=2, seq_q=200, seq_k=515, head_dim=head_dim, head_dim_v=head_dim)
    check(with_arguments(case, **arguments), "hopper")


@pytest.mark.parametrize(
    "heads, heads_kv, head_dim, seq_q, divides",
    [(4, 1, 128, 300, True), (3, 1, 128, 300, False), (2, 2, 128, 300, False), (4, 1, 256, 520, True)],
)
def test_heads_that_share_keys_among_several_walks(
    hopper: Callable, heads: int, heads_kv: int, head_dim: int, seq_q: int, divides: bool
) -> None:
    emulated = hopper()
    sizes = {"heads": heads, "heads_kv": heads_kv, "head_dim": head_dim, "head_dim_v": head_dim}
    case = replace(_SMALL, seq_q=seq_q, seq_k=100, **sizes)
    check(with_arguments(case, causal=True), "hopper")  # the first queries see no key, so dq is summed
    sums = ["attention_shares_kernel"] if divides else []
    assert emulated.launched[-2 - len(sums) :] == ["attention_backward_kernel", "attention_end_kernel", *sums]


@pytest.mark.parametrize("head_dim", [32, 64, 128])
@pytest.mark.parametrize(
    "changes, arguments",
    [
        ({}, {}),
        ({}, {"causal": True}),
        ({"dtype": torch.float16}, {"causal": True, "softcap": 5.0}),
        ({"lengths_q": (129, 0, 70), "lengths_k": (136, 33, 90), "alibi_slopes": "h"}, {"causal": True}),
        ({"lengths_q": (129, 1, 64), "lengths_k": (136, 130, 1)}, {}),
        ({"key_lengths": (70,), "sinks": True}, {}),
        ({}, {"window": (64, 64)}),
        ({"alibi_slopes": "h", "dtype": torch.float16}, {"window": (40, 0), "softcap": 5.0}),
        ({"lengths_q": (129, 0, 70), "lengths_k": (136, 33, 90), "sinks": True}, {"window": (100, 10)}),
    ],
    ids=str,
)
def test_tiles_of_half_the_keys(hopper: Callable, head_dim: int, changes: dict, arguments: dict) -> None:
    """Of short calls, and in narrow windows."""
    hopper(HALF_CAUSAL=512, HALF_WIDE=512, HALF_WIDE_CAUSAL=1024, HALF_WINDOW=512, HALF_WINDOW_WIDE=1024)
    case = replace(_SMALL, seq_k=230, head_dim=head_dim, head_dim_v=head_dim, **changes)
    check(with_arguments(case, **arguments), "hopper")


@pytest.mark.parametrize("head_dim", [72, 96])
@pytest.mark.parametrize(
    "changes",
    [{"seq_k": 310}, {"seq_k": 40}, {"lengths_q": (129, 0, 70), "lengths_k": (310, 33, 64)}, {"key_lengths": (70,)}],
    ids=str,
)
def test_an_odd_number_of_tiles_of_half_the_keys(hopper: Callable, head_dim: int, changes: dict) -> None:
    hopper(HALF_ODD=448)
    case = replace(_SMALL, seq_k=310, head_dim=head_dim, head_dim_v=head_dim)
    check(replace(case, **changes), "hopper")


@pytest.mark.parametrize(
    "changes, arguments",
    [
        ({"seq_k": 77}, {}),
        ({"seq_k": 128, "head_dim": 256, "head_dim_v": 256}, {}),  # two key tiles, so dq is summed
        ({"seq_k": 77}, {"softcap": 5.0}),
        ({"seq_k": 130, "heads": 2}, {"deterministic": True}),
        ({"seq_k": 300, "heads": 4, "heads_kv": 2}, {}),  # several parts for each thread block
    ],
    ids=str,
)
def test_walks_over_queries_are_in_parts(hopper: Callable, changes: dict, arguments: dict) -> None:
    emulated = hopper()
    (launch,) = (each for each in emulated.modules.values() if "choose_parts" in vars(each))
    launch.choose_parts = lambda *_: 3
    case = replace(_SMALL, heads=1, heads_kv=1, seq_q=790, head_dim=128, head_dim_v=128)
    check(with_arguments(replace(case, **changes), **arguments), "hopper")
    assert emulated.launched[-1] == "attention_shares_kernel"


def _spread(inputs: Any, values: str) -> None:
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


_VALUES = ("normal", "rising", "large", "sink", "spike")


def _heads_and_values() -> list[tuple[int, torch.dtype, str]]:
    """All values that rise in both dtypes; in other heads, which have tiles of other sizes, those that rise most."""
    narrow = [(64, dtype, values) for dtype in (torch.bfloat16, torch.float16) for values in _VALUES[1:]]
    heads = ((128, torch.bfloat16), (192, torch.float16), (512, torch.bfloat16))
    return narrow + [(*head, values) for head in heads for values in ("rising", "spike")]


@pytest.mark.parametrize("head_dim, dtype, values", _heads_and_values(), ids=str)
def test_scores_that_rise_after_the_first_tile(
    hopper: Callable, head_dim: int, dtype: torch.dtype, values: str
) -> None:
    hopper()
    case = replace(_SMALL, seq_q=260, seq_k=400, head_dim=head_dim, head_dim_v=head_dim, dtype=dtype)
    inputs = make_inputs(case)
    _spread(inputs, values)
    # The window hides the first tile from most rows.
    for arguments in ({"causal": True}, {"window": (300, 5)}):
        check(with_arguments(case, **arguments), "hopper", inputs=inputs)


@pytest.mark.parametrize("values", [*_VALUES, "infinite"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_bits_of_a_row_depend_on_that_row_alone(hopper: Callable, dtype: torch.dtype, values: str) -> None:
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
def test_8_bits(hopper: Callable, head_dim: int, long: bool, packed: bool, arguments: dict) -> None:
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
    assert emulated.launched == ["attention_widen_kernel", "attention_forward_kernel"]
    assert_close("out", out, oracle, eager)


def test_8_bit_factors_whose_product_is_0(hopper: Callable) -> None:
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


def test_events_in_another_order(hopper: Callable) -> None:
    """What programs add up in order has the same bits in any order of events."""
    case = replace(_SMALL, heads=4, heads_kv=2, seq_q=260, seq_k=390, head_dim=128, head_dim_v=128)
    case = with_arguments(case, causal=True, deterministic=True)
    hopper(seed=0)
    first = check(case, "hopper")
    for seed in range(1, 3):
        hopper(seed=seed)
        again = run(case, make_inputs(case), "hopper")
        assert all(torch.equal(first[name], again[name]) for name in first), seed


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize(
    "changes, arguments",
    [
        ({"seq_q": 75, "seq_k": 400}, {"causal": True, "align": "top_left", "deterministic": True}),
        ({"lengths_q": (1, 0, 15, 0, 150), "lengths_k": (145, 1, 1, 230, 70)}, {}),
    ],
    ids=["dense", "packed"],
)
def test_keys_that_no_query_sees(hopper: Callable, changes: dict, arguments: dict, head_dim: int, seed: int) -> None:
    """Nobody waits for a phase of a barrier that others may complete twice before it looks: their tiles take no time,
    so that a warpgroup which is held up comes to them late."""
    hopper(seed)
    case = replace(_SMALL, batch=2, head_dim=head_dim, head_dim_v=head_dim, **changes)
    check(with_arguments(case, **arguments), "hopper")


@pytest.mark.parametrize("kind", ["causal", "packed", "block mask"])
@pytest.mark.parametrize(
    "head_dim, head_dim_v, deterministic",
    [(64, 64, True), (128, 128, True), (192, 128, True), (256, 256, True), (128, 128, False)],
    ids=str,
)
def test_programs_that_begin_late(
    hopper: Callable, head_dim: int, head_dim_v: int, kind: str, deterministic: bool
) -> None:
    """Nobody waits for what a program that has not begun is to do: two calls on two streams would wait for each other
    without an end."""
    hopper(held=2)
    lengths = {"lengths_q": (100, 0, 200), "lengths_k": (200, 33, 300)} if kind == "packed" else {}
    case = replace(_SMALL, seq_q=300, seq_k=400, head_dim=head_dim, head_dim_v=head_dim_v, **lengths)
    if kind == "block mask":
        case = replace(case, block_mask=(128, 128))
    check(with_arguments(case, causal=kind != "block mask", deterministic=deterministic), "hopper")


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
def test_faults_are_found(hopper: Callable, fault: str) -> None:
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
