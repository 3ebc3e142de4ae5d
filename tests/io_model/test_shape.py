"""What is visible, and in how many tiles, against a mask that is counted."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from flashtile import io_model
from support.running.each_case import each_case

SIDES = st.none() | st.integers(0, 20)


def visible(shape):
    """`[seq_q, seq_k]`, by the formula of the contract."""
    left, right = shape.window or (None, None)
    right = 0 if shape.causal else right
    shift = 0 if shape.align == "top_left" else shape.keys - shape.seq_q
    offset = torch.arange(shape.keys)[None, :] - torch.arange(shape.seq_q)[:, None] - shift
    seen = torch.ones_like(offset, dtype=torch.bool)
    if left is not None:
        seen &= offset >= -left
    if right is not None:
        seen &= offset <= right
    return seen


@given(
    seq_q=st.integers(1, 40),
    seq_k=st.integers(1, 40),
    causal=st.booleans(),
    align=st.sampled_from(["bottom_right", "top_left"]),
    window=st.none() | st.tuples(SIDES, SIDES),
    block_q=st.integers(1, 17),
    block_k=st.integers(1, 17),
)
def test_pairs_and_tiles_are_those_of_the_mask(seq_q, seq_k, causal, align, window, block_q, block_k):
    shape = io_model.Shape(1, 1, seq_q, 8, seq_k=seq_k, causal=causal, align=align, window=window)
    seen = visible(shape)
    assert shape.visible_pairs() == int(seen.sum())
    tiles = 0
    for rows in seen.split(block_q):
        columns = rows.any(0).nonzero()
        if len(columns):  # a tile of rows walks from the first key that one of them sees to the last
            tiles += int(columns[-1]) // block_k - int(columns[0]) // block_k + 1
    assert shape.visited_tiles(block_q, block_k) == tiles


def test_sizes_are_those_of_the_tensors():
    shape = io_model.Shape(2, 6, 5, 16, seq_k=7, heads_kv=3, head_dim_v=8)
    q, k, v = (torch.empty(2, s, h, d, dtype=torch.bfloat16) for s, h, d in ((5, 6, 16), (7, 3, 16), (7, 3, 8)))
    sizes = {name: tensor.nbytes for name, tensor in (("q", q), ("k", k), ("v", v))}
    assert shape.sizes == {**sizes, "out": 2 * 5 * 6 * 8 * 2, "lse": 2 * 5 * 6 * 4}


@each_case(
    "arguments, error, message",
    [
        ({"seq_k": 0}, ValueError, "seq_k: expected an int of at least 1, got 0"),
        ({"heads_kv": 3}, ValueError, "heads_kv: expected a divisor of heads, 4, got 3"),
        ({"dtype": torch.int8}, TypeError, "dtype: expected one of torch.float16"),
        ({"align": "left"}, ValueError, "align: expected"),
        ({"window": (-1, None)}, ValueError, "window: expected sides of at least 0"),
        ({"window": 5}, TypeError, r"window: expected a pair \(left, right\), got 5"),
        ({"window": (1, 2, 3)}, TypeError, r"window: expected a pair \(left, right\), got \(1, 2, 3\)"),
        ({"dropout_p": 1.0}, ValueError, "dropout_p: expected a probability"),
    ],
)
def test_what_is_no_call_is_refused(arguments, error, message):
    with pytest.raises(error, match=message):
        io_model.Shape(1, 4, 8, 16, **arguments)
