"""Dropout, bias, masks, slopes and key lengths of the Hopper kernels on a GPU, as in models that use them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

import flashtile
from flashtile.ops.attention import select
from flashtile.testing import AttentionCase, check, make_inputs, with_arguments
from support.attention.attention_cases import (
    COMBINED,
    CONSTANT_SCORE_MOD_PAIRS,
    check_again,
    parameters,
    score_mod_combined,
)
from support.running.covering import turns

pytestmark = [pytest.mark.gpu, pytest.mark.hopper]

_BF16 = torch.bfloat16
_DTYPES = (_BF16, torch.float16)
_BASE = AttentionCase(batch=2, heads=4, heads_kv=2, seq_q=517, seq_k=643, head_dim=64, head_dim_v=64, dtype=_BF16)
_FEATURES: dict[str, dict[str, Any]] = {
    "padding mask": {"mask": "b11k"},
    "padding as lengths": {"key_lengths": (643, 130)},
    "no keys": {"key_lengths": (0, 7), "arguments": {"causal": True}},
    "dense mask": {"mask": "b1qk", "arguments": {"deterministic": True}},
    "mask of heads": {"mask": "1hqk"},
    "T5": {"bias": "1hqk", "arguments": {"scale": 1.0}},
    "pair bias": {"bias": "bhqk"},
    "pair bias in float32": {"bias": "bhqk", "bias_dtype": torch.float32},
    "bias of keys": {"bias": "b11k"},
    "bias of queries": {"bias": "11q1", "bias_dtype": torch.float32},
    "bias and tiles": {"bias": "1hqk", "block_mask": (128, 128)},
    "bias and function": {"bias": "1hqk", "score_mod": True, "constant": ("score_mod",)},
    "triangle": {"bias": "1hqk", "mask": "b11k", "key_lengths": (643, 200)},
    "GPT-2": {"arguments": {"dropout_p": 0.1, "causal": True}},
    "BERT": {"mask": "b11k", "arguments": {"dropout_p": 0.1}},
    "dropout of capped scores": {"arguments": {"dropout_p": 0.3, "softcap": 5.0, "deterministic": True}},
    "slopes": {"alibi_slopes": "bh", "arguments": {"causal": True}},
    "slopes of capped scores": {"alibi_slopes": "h", "sinks": True, "arguments": {"softcap": 5.0, "window": (200, 60)}},
    "all and slopes": {
        "bias": "1hqk", "mask": "b11k", "key_lengths": (643, 200), "alibi_slopes": "bh", "sinks": True,
        "arguments": {"dropout_p": 0.2, "softcap": 5.0, "deterministic": True},
    },
    "all": {
        "bias": "1hqk", "mask": "b11k", "key_lengths": (643, 200), "alibi_slopes": "h", "constant": ("alibi_slopes",),
        "sinks": True, "arguments": {"dropout_p": 0.2, "window": (200, 60)},
    },
}  # fmt: skip
_Kind = tuple[tuple[int, int], torch.dtype]
_HEADS = [(32, 32), (64, 64), (80, 80), (96, 96), (128, 128), (192, 128), (256, 256)]
#: All of them in both dtypes, which take turns.
_KINDS: list[_Kind] = [(heads, _DTYPES[number % 2]) for number, heads in enumerate(2 * _HEADS)]


def _case(
    change: dict[str, Any], heads: tuple[int, int] = (64, 64), dtype: torch.dtype = _BF16, **sizes: Any
) -> AttentionCase:
    base = replace(_BASE, **{"head_dim": heads[0], "head_dim_v": heads[1], "dtype": dtype, **sizes})
    others = {name: value for name, value in change.items() if name != "arguments"}
    return with_arguments(replace(base, **others), **change.get("arguments", {}))


@pytest.mark.parametrize("feature, kind", turns(_FEATURES, _KINDS, 3), ids=str)
def test_features(feature: str, kind: _Kind) -> None:
    check(_case(_FEATURES[feature], *kind), "hopper", "cuda")


_TABLES = ("padding mask", "dense mask", "T5", "pair bias in float32", "GPT-2", "bias and tiles", "bias and function")


@pytest.mark.parametrize("feature, width", turns(_TABLES, (64, 128, 256), 2))
def test_whole_tiles(feature: str, width: int) -> None:
    """No tile ends past a table."""
    check(_case(_FEATURES[feature], (width, width), seq_q=512, seq_k=768), "hopper", "cuda")


_PACKED: list[dict[str, Any]] = [
    {"arguments": {"dropout_p": 0.2, "causal": True}},
    {"bias": "1hqk", "mask": "11qk"},
    {"bias": "1hqk", "arguments": {"causal": True, "deterministic": True}},
    {"bias": "11qk", "block_mask": (64, 128), "key_lengths": (129, 20, 1, 100)},
    {"key_lengths": (129, 20, 1, 100), "arguments": {"dropout_p": 0.2, "deterministic": True}},
    {"alibi_slopes": "bh", "arguments": {"causal": True}},
    {"alibi_slopes": "h", "arguments": {"softcap": 5.0}},
]


@pytest.mark.parametrize("change, width", turns(_PACKED, (64, 128, 256), 2), ids=str)
def test_packed(change: dict[str, Any], width: int) -> None:
    lengths = {"lengths_q": (129, 0, 1, 300), "lengths_k": (129, 33, 1, 400)}
    check(_case(change, (width, width), **lengths), "hopper", "cuda")


_MOVED: list[dict[str, Any]] = [
    {"bias": "1hqk"},
    {"bias": "b1qk", "arguments": {"causal": True, "deterministic": True}},
    {"bias": "bhqk", "constant": ("bias",), "arguments": {"window": (200, 100), "softcap": 5.0}},
    {"bias": "11qk", "mask": "bhqk", "arguments": {"dropout_p": 0.2}},
    {"bias": "bhqk"},  # of no score that others share: the main kernel stores its gradient
    {"bias": "bhqk", "block_mask": (256, 256), "alibi_slopes": "h"},
]


@pytest.mark.parametrize("change, kind", turns(_MOVED, _KINDS, 5), ids=str)
def test_bias_that_comes_by_tma(change: dict[str, Any], kind: _Kind) -> None:
    """Rows of the bias lie at multiples of 16 bytes, and end within a tile."""
    check(_case(change, *kind, seq_k=648), "hopper", "cuda")


_STORED: list[dict[str, Any]] = [
    {"arguments": {"causal": True, "deterministic": True}},
    {"key_lengths": (643, 130), "arguments": {"dropout_p": 0.2}},
]


@pytest.mark.parametrize("change, kind", turns(_STORED, _KINDS, 5), ids=str)
def test_bias_that_no_scores_share(change: dict[str, Any], kind: _Kind) -> None:
    """The main kernel stores its gradient. TMA does not bring it."""
    check(_case(change, *kind, bias="bhqk"), "hopper", "cuda")


@pytest.mark.parametrize("feature", ["padding as lengths", "dense mask", "GPT-2", "slopes", "all and slopes"])
def test_a_backward_after_the_forward_of_the_portable_kernels(feature: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Any backward follows any forward."""
    serve, served = select.implementation, []

    def implementation(phase: Any, q: Any, k: Any, v: Any, side: Any, spec: Any, backend: str, **more: Any) -> Any:
        portable = phase == "forward" and backend == "hopper"
        served.append((phase, backend))
        return serve(phase, q, k, v, side, spec, "triton" if portable else backend, **more)

    monkeypatch.setattr(select, "implementation", implementation)
    check(_case(_FEATURES[feature]), "hopper", "cuda")
    assert ("backward", "hopper") in served


_IN_ORDER: list[dict[str, Any]] = [
    {"key_lengths": (700, 260)}, {"mask": "b1qk"}, {"arguments": {"dropout_p": 0.1}}, {"alibi_slopes": "h"},
]  # fmt: skip


@pytest.mark.parametrize("change, width", turns(_IN_ORDER, (64, 128, 256), 2), ids=str)
def test_in_order_is_the_same_every_time(change: dict[str, Any], width: int) -> None:
    case = with_arguments(_case(change, (width, width), seq_q=700, seq_k=700), deterministic=True)
    check_again(case, "hopper", 3)


def test_windows_of_swin() -> None:
    """49 tokens: rows of the bias begin anywhere."""
    check(_case({"bias": "1hqk"}, (32, 32), batch=64, heads=6, heads_kv=6, seq_q=49, seq_k=49), "hopper", "cuda")


def _pairs() -> dict[str, AttentionCase]:
    """In sizes of several tiles."""
    lengths = {"key_lengths": (600, 17, 0), "lengths_q": (5, 0, 337), "lengths_k": (333, 4, 520)}
    cases = {}
    for number, (name, case) in enumerate((COMBINED | score_mod_combined() | CONSTANT_SCORE_MOD_PAIRS).items()):
        here: dict[str, Any] = {field: value for field, value in lengths.items() if getattr(case, field)}
        if "key_lengths" in here:
            here["key_lengths"] = here["key_lengths"][: case.batch]
        if case.block_mask:
            here["block_mask"] = (128, 128)
        width = (64, 128, 256)[number % 3]
        dtype = (_BF16, torch.float16)[number % 2]
        sizes = {"seq_q": 430, "seq_k": 620, "head_dim": width, "head_dim_v": width}
        cases[name] = replace(case, **sizes, **here, dtype=dtype)
    return cases


@pytest.mark.parametrize("case", parameters(_pairs()))
def test_pairs_of_features(case: AttentionCase) -> None:
    check(case, "hopper", "cuda")


_FUNCTION_BESIDE: list[dict[str, Any]] = [
    {"seq_q": 512, "seq_k": 640, "arguments": {"causal": True}},  # whole tiles
    {"alibi_slopes": "h", "arguments": {"softcap": 3.0, "deterministic": True}},
    {"bias": "bhqk", "arguments": {"dropout_p": 0.2}},
]


@pytest.mark.parametrize("change, kind", turns(_FUNCTION_BESIDE, _KINDS, 6), ids=str)
def test_derivatives_of_a_score_function(change: dict[str, Any], kind: _Kind) -> None:
    check(_case(change, *kind, score_mod=True, constant=("score_mod",)), "hopper", "cuda")


@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_the_same_weights_are_dropped_on_every_backend(head_dim: int) -> None:
    """With equal weights and values of 1, out counts the kept ones."""
    q = torch.zeros(2, 300, 4, head_dim, dtype=torch.float16, device="cuda")
    k = torch.zeros(2, 512, 4, head_dim, dtype=torch.float16, device="cuda")
    v = torch.zeros_like(k)
    for part in range(8):  # a column of v shows one part of the keys
        v[:, part * 64 : part * 64 + 64, :, part] = 1
    seed = torch.tensor([2**31 + 5, 77], device="cuda")
    outs = [
        flashtile.attention(q, k, v, dropout_p=0.5, dropout_seed=seed, backend=backend)
        for backend in ("hopper", "triton")
    ]
    counts = [(out.double()[..., :8] * 512 * 0.5).round() for out in outs]
    assert torch.equal(*counts)


def test_a_part_of_a_larger_call_drops_the_same_weights() -> None:
    case = with_arguments(replace(_BASE, seq_q=512, seq_k=512, heads_kv=4), dropout_p=0.3)
    inputs = make_inputs(case, "cuda")
    seed = inputs.tensors["dropout_seed"]
    whole, whole_lse = flashtile.attention(
        inputs.q, inputs.k, inputs.v, dropout_p=0.3, dropout_seed=seed, backend="hopper", return_lse=True
    )
    part = flashtile.AttentionPart(256, 0, 512, 512)
    out, lse = flashtile.attention_part(
        inputs.q[:, 256:], inputs.k, inputs.v, part, dropout_p=0.3, dropout_seed=seed, backend="hopper"
    )
    assert torch.equal(out, whole[:, 256:]) and torch.equal(lse, whole_lse[..., 256:])
