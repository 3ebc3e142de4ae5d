"""Dropout, bias, masks and key lengths of the Hopper kernels on a GPU, in the shapes of models that use them.

The forward runs on the Hopper kernels. Gradients come from whichever kernels `explain` names for them.
"""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch

import flashtile
from flashtile.testing import AttentionCase, Size, assert_close, check, make_inputs, with_arguments
from flashtile.testing.cases import Inputs
from support.attention.attention_cases import COMBINED, CONSTANT_SCORE_MOD_PAIRS, SCORE_MOD_PAIRS, parameters
from support.running.covering import turns

pytestmark = [pytest.mark.gpu, pytest.mark.hopper]

_BF16 = torch.bfloat16
_BASE = AttentionCase(batch=2, heads=4, heads_kv=2, seq_q=517, seq_k=643, head_dim=64, head_dim_v=64, dtype=_BF16)
_WIDTHS = list(zip((32, 64, 80, 96, 128, 192, 256, 64, 128, 256, 32), itertools.cycle((_BF16, torch.float16))))
_MODELS = {
    "padding mask": {"mask": "b11k"},
    "padding as lengths": {"key_lengths": (643, 130)},
    "dense mask": {"mask": "b1qk"},
    "mask of heads": {"mask": "1hqk"},
    "T5": {"bias": "1hqk", "arguments": {"scale": 1.0}},
    "pair bias": {"bias": "bhqk"},
    "pair bias in float32": {"bias": "bhqk", "bias_dtype": torch.float32},
    "bias of keys": {"bias": "b11k"},
    "bias of queries": {"bias": "11q1", "bias_dtype": torch.float32},
    "triangle": {"bias": "1hqk", "mask": "b11k"},
    "GPT-2": {"arguments": {"dropout_p": 0.1, "causal": True}},
    "BERT": {"mask": "b11k", "arguments": {"dropout_p": 0.1}},
    "ALiBi": {"alibi_slopes": "h", "arguments": {"causal": True}},
}


def _case(change: dict[str, Any], base: AttentionCase = _BASE) -> AttentionCase:
    change = dict(change)
    arguments = change.pop("arguments", {})
    return with_arguments(replace(base, **change), **arguments)


def _forward(case: AttentionCase, inputs: Inputs, backend: str, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    given = {
        name: of.to(dtype) if name == "bias" and dtype is torch.float64 else of for name, of in inputs.tensors.items()
    }
    q, k, v = (tensor.to(dtype) for tensor in (inputs.q, inputs.k, inputs.v))
    if dtype is torch.float64 and "alibi_slopes" in given:
        given["alibi_slopes"] = given["alibi_slopes"].double()
    out, lse = flashtile.attention(q, k, v, **given, **case.keywords(), return_lse=True, backend=backend)
    return {"out": out, "lse": lse}


@pytest.mark.parametrize("model, kind", turns(_MODELS, _WIDTHS, 3), ids=str)
def test_forward_of_models(model: str, kind: tuple[int, torch.dtype]) -> None:
    head_dim, dtype = kind
    case = _case(_MODELS[model], replace(_BASE, head_dim=head_dim, head_dim_v=head_dim, dtype=dtype))
    inputs = make_inputs(case, "cuda")
    actual = _forward(case, inputs, "hopper", dtype)
    oracle = _forward(case, inputs, "reference", torch.float64)
    eager = _forward(case, inputs, "reference", dtype)
    for name, value in actual.items():
        assert_close(f"{case}: {name}", value, oracle[name], eager[name], Size(1, 1) if name == "lse" else Size())


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("model", _MODELS)
def test_models(model: str, head_dim: int) -> None:
    check(_case(_MODELS[model], replace(_BASE, head_dim=head_dim, head_dim_v=head_dim)), "hopper", "cuda")


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("model", ["padding mask", "dense mask", "T5", "pair bias in float32", "GPT-2"])
def test_whole_tiles(model: str, head_dim: int) -> None:
    """No tile ends past a table."""
    base = replace(_BASE, seq_q=512, seq_k=768, head_dim=head_dim, head_dim_v=head_dim)
    check(_case(_MODELS[model], base), "hopper", "cuda")


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize(
    "change",
    [
        {"arguments": {"dropout_p": 0.2, "causal": True}},
        {"bias": "1hqk", "mask": "11qk"},
        {"key_lengths": (129, 20, 1, 100), "arguments": {"dropout_p": 0.2}},
    ],
    ids=str,
)
def test_packed(change: dict, head_dim: int) -> None:
    lengths = {"lengths_q": (129, 0, 1, 300), "lengths_k": (129, 33, 1, 400)}
    base = replace(_BASE, **lengths, head_dim=head_dim, head_dim_v=head_dim)
    check(_case(change, base), "hopper", "cuda")


@pytest.mark.parametrize("dtype", [_BF16, torch.float16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("head_dim", [32, 64, 96, 128, 192, 256])
@pytest.mark.parametrize(
    "change",
    [
        {"bias": "1hqk"},
        {"bias": "b1qk", "arguments": {"causal": True, "deterministic": True}},
        {"bias": "bhqk", "constant": ("bias",), "arguments": {"window": (200, 100), "softcap": 5.0}},
        {"bias": "11qk", "mask": "bhqk", "arguments": {"dropout_p": 0.2}},
    ],
    ids=str,
)
def test_bias_that_comes_by_tma(change: dict, head_dim: int, dtype: torch.dtype) -> None:
    """Rows of the bias lie at multiples of 16 bytes, and end within a tile."""
    base = replace(_BASE, seq_k=648, head_dim=head_dim, head_dim_v=head_dim, dtype=dtype)
    check(_case(change, base), "hopper", "cuda")


@pytest.mark.parametrize("dtype", [_BF16, torch.float16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("head_dim", [32, 64, 96, 128, 192])
@pytest.mark.parametrize(
    "change",
    [
        {"seq_k": 648},
        {"arguments": {"causal": True, "deterministic": True}},
        {"key_lengths": (643, 130), "arguments": {"dropout_p": 0.2}},
        {"block_mask": (256, 256), "alibi_slopes": "h"},
    ],
    ids=str,
)
def test_bias_that_no_scores_share(change: dict, head_dim: int, dtype: torch.dtype) -> None:
    """The main kernel stores its gradient."""
    base = replace(_BASE, bias="bhqk", head_dim=head_dim, head_dim_v=head_dim, dtype=dtype)
    check(_case(change, base), "hopper", "cuda")


def test_windows_of_swin() -> None:
    """49 tokens: rows of the bias begin anywhere."""
    check(replace(_BASE, batch=64, heads=6, heads_kv=6, seq_q=49, seq_k=49, head_dim=32, head_dim_v=32, bias="1hqk"),
          "hopper", "cuda")  # fmt: skip


def _pairs() -> dict[str, AttentionCase]:
    """In sizes of several tiles."""
    lengths = {"key_lengths": (600, 17, 0), "lengths_q": (5, 0, 337), "lengths_k": (333, 4, 520)}
    cases = {}
    for number, (name, case) in enumerate((COMBINED | SCORE_MOD_PAIRS | CONSTANT_SCORE_MOD_PAIRS).items()):
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


@pytest.mark.parametrize("dtype", [_BF16, torch.float16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("heads", [(32, 32), (64, 64), (96, 80), (128, 128), (192, 128), (256, 256)], ids=str)
@pytest.mark.parametrize(
    "change",
    [
        {"seq_q": 512, "seq_k": 640, "arguments": {"causal": True}},
        {"alibi_slopes": "h", "arguments": {"softcap": 3.0, "deterministic": True}},
        {"bias": "bhqk", "arguments": {"dropout_p": 0.2}},
    ],
    ids=["causal, whole tiles", "softcap and slopes", "bias and dropout"],
)
def test_derivatives_of_a_score_function(heads: tuple[int, int], change: dict, dtype: torch.dtype) -> None:
    base = replace(_BASE, head_dim=heads[0], head_dim_v=heads[1], dtype=dtype, score_mod=True, constant=("score_mod",))
    check(_case(change, base), "hopper", "cuda")


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
