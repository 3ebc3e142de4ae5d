"""Compact masks say what the whole ones of transformers say, and whole ones are made where nothing else is right."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

masking_utils = pytest.importorskip("transformers.masking_utils")

from flashtile.integrations.transformers import compact  # noqa: E402
from flashtile.integrations.transformers.attention import visible_keys  # noqa: E402
from flashtile.integrations.transformers.masks import make_mask  # noqa: E402
from support.running.each_case import each_case  # noqa: E402

WINDOW = 3
PATTERNS = {
    "causal": (masking_utils.causal_mask_function, True),
    "full": (masking_utils.bidirectional_mask_function, False),
    "causal window": (masking_utils.sliding_window_causal_mask_function(WINDOW), True),
    "window": (masking_utils.sliding_window_bidirectional_mask_function(WINDOW), False),
}
MODULE = SimpleNamespace(config=SimpleNamespace(sliding_window=WINDOW))


def dense(mask: Tensor, seq_q: int, seq_k: int) -> Tensor:
    """What attention makes of a mask: bool `[B | 1, 1, Q, K]`."""
    visible = visible_keys(MODULE, mask, seq_q, seq_k, True, None)
    row = torch.arange(seq_q)[:, None] + visible.keys - seq_q
    key = torch.arange(seq_k)
    shown = (key < visible.keys) & torch.ones(seq_q, 1, dtype=torch.bool)
    if visible.causal:
        shown = shown & (key <= row)
    left, right = visible.window or (None, None)
    if left is not None and right is not None:
        shown = shown & (key >= row - left) & (key <= row + right)
    if visible.mask is not None:
        shown = shown & torch.nn.functional.pad(visible.mask, (0, seq_k - visible.mask.shape[-1]))
    return shown.expand(mask.shape[0], 1, seq_q, seq_k)


@st.composite
def mask_arguments(draw: st.DrawFn) -> dict[str, Any]:
    """Any call: tokens before the queries, keys of a cache dropped or not yet there, padding on either side."""
    name = draw(st.sampled_from(list(PATTERNS)))
    pattern, causal = PATTERNS[name]
    q_length, q_offset = draw(st.integers(1, 5)), draw(st.integers(0, 6))
    kv_offset = draw(st.integers(0, q_offset)) if q_offset else 0
    kv_length = q_offset + q_length - kv_offset + draw(st.integers(0, 3))
    attention_mask = None
    if draw(st.booleans()):
        known = draw(st.integers(max(1, kv_offset), kv_offset + kv_length + 1))
        bits = st.lists(st.lists(st.booleans(), min_size=known, max_size=known), min_size=2, max_size=2)
        attention_mask = torch.tensor(draw(bits))
    as_tensor = draw(st.booleans())
    return {
        "batch_size": 2,
        "q_length": q_length,
        "kv_length": kv_length,
        "q_offset": torch.tensor(q_offset) if as_tensor else q_offset,
        "kv_offset": kv_offset,
        "mask_function": pattern,
        "attention_mask": attention_mask,
        "local_size": WINDOW if "window" in name else None,
        "allow_is_causal_skip": causal and draw(st.booleans()),
        "allow_is_bidirectional_skip": not causal and draw(st.booleans()),
        "config": MODULE.config,
    }


@given(mask_arguments())
def test_compact_masks_say_what_whole_ones_say(arguments):
    whole = masking_utils.sdpa_mask(
        **{**arguments, "allow_is_causal_skip": False, "allow_is_bidirectional_skip": False}
    )
    mask = make_mask(**arguments)
    rows, keys = arguments["q_length"], arguments["kv_length"]
    if compact.decode(mask) is None:
        assert torch.equal(mask, whole)
        return
    assert mask.shape[2] == 1 and mask.shape[1] <= 8
    assert torch.equal(dense(mask, rows, keys).expand(2, -1, -1, -1), whole)


@each_case("name", PATTERNS)
@each_case("padded", [False, True])
def test_the_usual_calls_are_compact(name, padded):
    pattern, causal = PATTERNS[name]
    padding = torch.tensor([[False, True, True, True, True], [True] * 5]) if padded else None
    for q_length, q_offset in ((5, 0), (2, 3)) if causal else ((5, 0),):
        mask = make_mask(
            2, q_length, 5, q_offset, 0, pattern, padding,
            allow_is_causal_skip=causal, allow_is_bidirectional_skip=not causal,
        )  # fmt: skip
        decoded = compact.decode(mask)
        assert decoded is not None and (decoded.visible is not None) == padded


def test_padding_that_hides_nothing_is_left_out_on_a_cpu():
    decoded = compact.decode(make_mask(2, 5, 5, attention_mask=torch.ones(2, 5, dtype=torch.bool)))
    assert decoded is not None and decoded.keys == 5 and decoded.visible is None


def packed(pattern: Any, positions: Tensor, sequence_of_row: Tensor) -> Any:
    """A pattern within packed sequences, as the installed transformers composes it."""
    make = getattr(masking_utils, "packed_sequence_compatibility_function", None)
    if make is not None:
        return make(pattern, positions, sequence_of_row)
    return masking_utils.and_masks(pattern, masking_utils.packed_sequence_mask_function(sequence_of_row))


@each_case("name", ["causal", "causal window"])
def test_packed_sequences_keep_where_they_end(name):
    sequence_of_row = torch.tensor([[0, 0, 0, 1, 1, 2], [0, 0, 0, 0, 0, 0]])
    positions = torch.tensor([[0, 1, 2, 0, 1, 0], [0, 1, 2, 3, 4, 5]])
    pattern = packed(PATTERNS[name][0], positions, sequence_of_row)
    decoded = compact.decode(make_mask(2, 6, 6, mask_function=pattern, allow_is_causal_skip=False))
    assert decoded is not None and decoded.band == compact.Band(causal=True, windowed=name != "causal")
    assert decoded.ends is not None and decoded.ends.tolist() == [3, 5, 6, 12]


CHUNKED = masking_utils.chunked_causal_mask_function(WINDOW, torch.zeros(2, dtype=torch.int64))
OTHERS = {
    "chunks": (CHUNKED, {"local_size": WINDOW, "config": SimpleNamespace(attention_chunk_size=WINDOW)}),
    "union": (masking_utils.or_masks(masking_utils.causal_mask_function, lambda b, h, q, k: k < 2),
              {"allow_is_causal_skip": False}),
    "somebody's own": (lambda b, h, q, k: k != q, {}),
    "packed chunks": (packed(CHUNKED, torch.arange(6).expand(2, 6), torch.zeros(2, 6, dtype=torch.int64)),
                      {"allow_is_causal_skip": False}),
    "asked for": (masking_utils.causal_mask_function, {"allow_is_causal_skip": False}),
}  # fmt: skip


@each_case("name", OTHERS)
def test_other_patterns_are_whole(name):
    pattern, options = OTHERS[name]
    mask = make_mask(2, 6, 6, mask_function=pattern, **options)
    row, key = torch.arange(6)[:, None], torch.arange(6)
    expected = pattern(torch.arange(2)[:, None, None, None], 0, row, key)
    assert mask.dtype is torch.bool and torch.equal(mask, expected.expand(2, 1, 6, 6))


def test_moving_and_slicing_keep_the_meaning():
    padding = torch.tensor([[False, True, True, True], [True, True, True, False]])
    mask = make_mask(2, 4, 4, attention_mask=padding)
    expected = dense(mask, 4, 4)
    for changed in (mask.contiguous(), mask[..., :4], mask.clone(), mask.to("cpu", copy=True)):
        assert torch.equal(dense(changed, 4, 4), expected)
    assert torch.equal(dense(mask[1:], 4, 4), expected[1:])
