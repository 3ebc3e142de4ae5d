"""The CPU backend against the fp64 oracle: every feature and pair of features, on both of its paths."""

from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import flashtile
from flashtile.ops.attention import cpu
from flashtile.ops.attention.cpu import tiled, tiles, torch_parts
from flashtile.ops.attention.spec import NOTHING_WANTED, AttentionSpec, SideInputs
from flashtile.testing import AttentionCase, assert_same, check, make_inputs, run
from support.attention.attention_cases import COMBINED, EDGES, changed, combined, score_mod_combined
from support.attention.cpu_tiles import use_only_tiles, use_small_tiles
from support.attention.mask_checks import shown_by_band
from support.running.covering import turns
from support.running.python import run_python

DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
BASE = AttentionCase(batch=2, seq_q=75, seq_k=101, heads=4, heads_kv=4, head_dim=24, head_dim_v=24)


@pytest.fixture
def small_tiles(monkeypatch):
    use_small_tiles(monkeypatch, 32)


@pytest.fixture
def only_tiles(monkeypatch):
    use_only_tiles(monkeypatch)


#: What the tests of all backends share. Dtypes take turns.
CASES = COMBINED | EDGES | score_mod_combined()


@pytest.mark.parametrize("name, dtype", turns(CASES, [torch.float32, torch.bfloat16, torch.float64]), ids=str)
def test_every_pair_of_features_on_tiles(name, dtype, small_tiles, only_tiles):
    case = replace(CASES[name], dtype=dtype)
    check(replace(case, bias_dtype=None) if dtype is torch.float64 else case, "cpu")


@pytest.mark.parametrize("seq", [1, 2, 15, 16, 17, 255, 256, 257, 600])
@pytest.mark.parametrize("causal", [False, True])
def test_sizes_around_the_tiles(seq, causal, only_tiles):
    check(replace(BASE, seq_q=seq, seq_k=seq + 3 * causal, batch=8 if seq < 16 else 1), "cpu")


def _served(case: AttentionCase) -> bool:
    """Whether PyTorch's flash attention serves a call both ways, where there is no gradient of lse, bias or slopes."""
    others = case.arguments.get("softcap") or case.arguments.get("dropout_p") or case.arguments.get("scale", 1) <= 0
    return not (others or case.block_mask or case.head_dim != case.head_dim_v or 0 in case.shape_of("bqk"))


_NOT_SERVED = ("head_dims", "softcap", "block_mask", "dropout", "scale")
#: Each two features that it serves in one call, and shapes of which it makes other parts.
SERVED = {name: case for name, case in (combined(*_NOT_SERVED) | EDGES).items() if _served(case)} | {
    "scale": changed(BASE, scale=0.3),
    "more_keys": changed(BASE, seq_q=50, causal=True),
    "more_queries": changed(BASE, seq_k=40, causal=True),
    "right_of_the_diagonal": changed(BASE, window=(None, 20)),
    "left_of_the_diagonal": changed(BASE, window=(None, 0), align="top_left"),
    "window_past_the_keys": changed(BASE, seq_k=60, window=(20, 0), sinks=True),
    "row": changed(BASE, seq_q=1, causal=True, scale=-0.2),
    "row_in_a_window": changed(BASE, seq_q=1, window=(30, 0)),
    "row_top_left": changed(BASE, seq_q=1, window=(None, 6), align="top_left"),
    "row_of_key_lengths": changed(BASE, batch=3, seq_q=1, key_lengths=(1, 101, 0)),
    "row_of_tables": changed(BASE, seq_q=1, mask="bh1k", bias="11qk", sinks=True),
    "wide_bias": changed(BASE, bias="11qk", bias_dtype=torch.float32),
    "bias_of_heads": changed(BASE, seq_q=50, bias="bhq1", mask="1hqk", causal=True),
    "packed_row": changed(BASE, lengths_q=(40, 5, 9, 1), lengths_k=(33, 17, 9, 140), window=(12, 0)),
}


@pytest.fixture
def no_tiles(monkeypatch):
    def refuse(*_):
        raise AssertionError("the tiles computed a call that PyTorch's flash attention serves")

    monkeypatch.setattr(tiles, "has_float16_matmul", lambda: True)
    monkeypatch.setattr(tiles, "emulates_bfloat16", lambda: False)
    monkeypatch.setattr(cpu.tiled, "forward", refuse)
    monkeypatch.setattr(cpu.tiled, "backward", refuse)


_KINDS = product(DTYPES, [4, 2, 1], [False, True])


@pytest.mark.parametrize("name, kind", turns(SERVED, _KINDS, 2), ids=str)
def test_calls_served_by_pytorch_without_gradient_of_lse(name, kind, no_tiles, monkeypatch):
    """With tables as large as there are, or `small`, of one head of 16 rows; and then sequences of other lengths apart,
    which are together in the next test."""
    dtype, heads_kv, small = kind
    if small:
        for limit in ("_SHARED_TABLE_ROWS", "_TABLE_ROWS", "_FEWEST_TABLE_ROWS"):
            monkeypatch.setattr(torch_parts, limit, 16)
        monkeypatch.setattr(torch_parts, "_TABLE_ELEMENTS_PER_THREAD", 1)
        monkeypatch.setattr(tiled, "_SCORES_OF_A_SEQUENCE", 0)
    case = replace(SERVED[name], heads=4, heads_kv=heads_kv, dtype=dtype, constant=("bias", "alibi_slopes"))
    _check_without_lse(replace(case, bias_dtype=None) if dtype is torch.float64 else case)


@pytest.mark.parametrize("by_torch", [True, False], ids=["torch", "tiles"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("changes", [
    {"key_lengths": (150, 0, 149, 300, 7)},
    {"key_lengths": (100, 150, 150, 120, 31), "mask": "b11k", "arguments": {"causal": True}},
    {"key_lengths": (120, 150, 130, 130, 100), "bias": "1hqk", "sinks": True, "constant": ("bias",)},
], ids=["plain", "mask", "bias"])  # fmt: skip
def test_short_sequences_of_other_lengths_are_one_call(changes, dtype, by_torch, monkeypatch):
    """Their lengths become a mask, and hidden keys and values have no effect: not even on the last bit."""
    if not by_torch:
        use_only_tiles(monkeypatch)
    found, segments = [], tiles.segments

    def listed(*arguments):
        found.append(list(segments(*arguments)))
        return found[-1]

    for module in (tiles, torch_parts):
        monkeypatch.setattr(module, "segments", listed)
    case = replace(BASE, **{"batch": 5, "seq_q": 150, "seq_k": 150, "dtype": dtype, **changes})
    inputs = make_inputs(case)
    clean = check(case, "cpu", inputs=inputs)
    length = case.key_lengths[-1]
    for hidden in (float("nan"), float("inf"), torch.finfo(dtype).max, 1e3):
        inputs.k[-1, length:] = inputs.v[-1, length:] = hidden
        dirty = run(case, inputs, "cpu")
        assert all(torch.equal(dirty[name], value) for name, value in clean.items()), hidden
    assert {len(each) for each in found} == {1}


@pytest.fixture
def given_to_pytorch(monkeypatch):
    """Makes a list of the shapes of a tensor that PyTorch's forward or backward is called with first."""

    def listed(name: str) -> list[torch.Size]:
        shapes, operator = [], getattr(torch_parts, name)
        monkeypatch.setattr(
            torch_parts,
            name,
            lambda first, *rest, **scale: shapes.append(first.shape) or operator(first, *rest, **scale),
        )
        return shapes

    return listed


@pytest.mark.parametrize("packs", [False, True])
@pytest.mark.parametrize("most", [100, 200], ids=["apart", "stacked"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_gradients_of_a_group_in_16_bits(dtype, most, packs, no_tiles, given_to_pytorch, monkeypatch):
    """The heads of a group are rows of one head, or heads that read it in turn. Nothing else changes."""
    monkeypatch.setattr(tiles, "packs_16_bits", lambda: packs)
    monkeypatch.setattr(torch_parts, "_MOST_STACKED_GRADIENTS", most)
    shapes = given_to_pytorch("_backward_op")
    _check_without_lse(replace(BASE, seq_q=150, seq_k=130, heads_kv=2, dtype=dtype))
    assert [shape[2] for shape in shapes] == [300 if packs or most == 200 else 150]


@pytest.fixture
def always_split(monkeypatch):
    monkeypatch.setattr(torch_parts, "_SPLIT_KEYS", range(24, 49))
    monkeypatch.setattr(torch_parts, "_USUAL_SPLIT", 32)
    monkeypatch.setattr(torch_parts, "_MOST_UNSPLIT_ELEMENTS", 0)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("heads_kv", [4, 2, 1])
@pytest.mark.parametrize("seq_q, seq_k", [(1, 48), (1, 150), (1, 151), (3, 149), (8, 96)])
def test_splits_of_the_keys(dtype, heads_kv, seq_q, seq_k, always_split, no_tiles, given_to_pytorch):
    """149 and 151 are primes: no split divides them."""
    shapes = given_to_pytorch("_forward_op")
    _check_without_lse(replace(BASE, batch=1, seq_q=seq_q, seq_k=seq_k, heads_kv=heads_kv, dtype=dtype))
    assert [shape[0] for shape in shapes] == {48: [2], 150: [5], 151: [4, 1], 149: [4, 1], 96: [2]}[seq_k]


@pytest.mark.parametrize("packs", [True, False], ids=["once", "repeated"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    "batch, seq_k, splits", [(2, 63, False), (2, 64, False), (2, 150, False), (1, 150, True), (1, 151, True)]
)
def test_a_single_row_is_repeated_where_that_is_faster(
    batch, seq_k, splits, dtype, packs, no_tiles, given_to_pytorch, monkeypatch
):
    """One query of each head, with a key/value head of its own. PyTorch's kernel gets one row or four."""
    monkeypatch.setattr(tiles, "packs_16_bits", lambda: packs)
    monkeypatch.setattr(cpu, "splitting_pays", lambda q, k: splits)
    shapes = given_to_pytorch("_forward_op")
    _check_without_lse(replace(BASE, batch=batch, seq_q=1, seq_k=seq_k, dtype=dtype))
    assert {shape[2] for shape in shapes} == {1 if packs or seq_k < 64 else 4}


@pytest.mark.parametrize("which", ["q", "k", "v"])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("seq_k", [150, 151])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_nan_and_inf_in_splits(which, value, seq_k, dtype, always_split):
    case = AttentionCase(batch=1, seq_q=1, seq_k=seq_k, dtype=dtype)
    inputs = make_inputs(case)
    getattr(inputs, which)[0, -1, 0, 3] = value
    actual = flashtile.attention(inputs.q, inputs.k, inputs.v, return_lse=True, backend="cpu")
    wide = (tensor.double() for tensor in (inputs.q, inputs.k, inputs.v))
    _assert_alike(actual, flashtile.attention(*wide, return_lse=True, backend="reference"))


def _assert_alike(actual: tuple[Tensor, Tensor], expected: tuple[Tensor, Tensor]) -> None:
    """out is finite in the same places, and lse is NaN and infinite there."""
    assert torch.equal(actual[0].isfinite(), expected[0].isfinite())
    assert torch.equal(actual[1].isnan(), expected[1].isnan())
    assert torch.equal(actual[1].isposinf(), expected[1].isposinf())


@pytest.mark.parametrize("shape, heads_kv, seq_q, threads, pays", [
    ((1, 4097), 8, 1, 1, True),
    ((1, 4096), 8, 1, 1, False),
    ((1, 512), 1, 1, 2, True),  # one key/value head for two threads
    ((1, 511), 1, 1, 2, False),
    ((2, 8192), 8, 1, 1, False),
    ((1, 8192), 8, 33, 1, False),
])  # fmt: skip
def test_when_splitting_pays(shape, heads_kv, seq_q, threads, pays, monkeypatch):
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    batch, seq_k = shape
    q, k = torch.empty(batch, seq_q, 8, 64, device="meta"), torch.empty(batch, seq_k, heads_kv, 64, device="meta")
    assert torch_parts.splitting_pays(q, k) is pays


def test_zeros_as_gradient_of_lse_are_none(no_tiles):
    """`torch.compile` passes zeros."""
    case = replace(BASE, heads_kv=2)
    inputs = make_inputs(case)
    inputs.dlse.zero_()
    out = flashtile.attention(*(leaves := [t.requires_grad_() for t in (inputs.q, inputs.k, inputs.v)]), backend="cpu")
    results = run(case, inputs, "cpu")
    for name, gradient in zip(("dq", "dk", "dv"), torch.autograd.grad(out, leaves, inputs.dout)):
        assert_same(results[name], gradient)


def _check_without_lse(case):
    """Holds a call whose lse gets no gradient to the oracle."""
    inputs = make_inputs(case)
    inputs.dlse.zero_()
    assert all(value.is_contiguous() for value in check(case, "cpu", inputs=inputs).values())


SPEC = AttentionSpec(0.2)
CAUSAL = AttentionSpec(0.2, window_right=0)
SIDE = SideInputs(max_seqlen_q=64, max_seqlen_k=64)
SHAPE = (2, 64, 4, 32)
LENGTHS = torch.tensor([3, 4])


ONE = (2, 1, 4, 32)


@pytest.mark.parametrize("spec, side, q_shape, v_dim, served, says", [
    (CAUSAL, SIDE, SHAPE, 32, True, "rectangles"),
    (SPEC._replace(window_left=3), SIDE, SHAPE, 32, True, "tables"),
    (SPEC._replace(window_left=3), SIDE, ONE, 32, True, "rectangles"),
    (SPEC, SIDE._replace(sinks=LENGTHS), SHAPE, 32, True, "tables"),
    (SPEC._replace(softcap=3.0), SIDE, SHAPE, 32, False, "soft cap"),
    (CAUSAL._replace(scale=-0.2), SIDE, SHAPE, 32, False, "negative scale"),
    (SPEC._replace(scale=0.0), SIDE, SHAPE, 32, False, "all scores are 0"),
    (SPEC._replace(dropout_p=0.1), SIDE, SHAPE, 32, False, "dropout"),
    (SPEC, SIDE, SHAPE, 16, False, "head_dim"),
    (SPEC, SIDE, (0, 64, 4, 32), 32, False, "empty"),
])  # fmt: skip
def test_why_pytorch_does_not_serve_a_call(spec, side, q_shape, v_dim, served, says):
    """Which ones it serves is in `SERVED`."""
    batch = q_shape[0]
    answer, reason = cpu.served_by_torch(spec, side, q_shape, (batch, 64, 4, 32), (batch, 64, 4, v_dim), torch.float32)
    assert answer is served and says in reason


@pytest.mark.parametrize("fast", [False, True])
@pytest.mark.parametrize("x86", [False, True])
def test_16_bits_go_to_pytorch_where_that_is_faster(fast, x86, monkeypatch):
    monkeypatch.setattr(tiles, "has_float16_matmul", lambda: fast)
    monkeypatch.setattr(tiles, "emulates_bfloat16", lambda: not fast)
    monkeypatch.setattr(tiles, "has_x86_vectors", lambda: x86)
    call = SPEC, SIDE, SHAPE, SHAPE, SHAPE
    assert cpu.served_by_torch(*call, torch.float16)[0] is (fast or x86)
    assert cpu.served_by_torch(*call, torch.bfloat16)[0]
    for dtype in (torch.float16, torch.bfloat16):
        assert cpu.served_by_torch(*call, dtype, NOTHING_WANTED)[0] is fast


@given(
    seq_q=st.integers(1, 12), seq_k=st.integers(1, 12), keys=st.integers(1, 12), right=st.none() | st.integers(-3, 14),
    left=st.none() | st.integers(-3, 14), top_left=st.booleans(), masked=st.booleans(), rows=st.integers(1, 5),
)  # fmt: skip
def test_parts_hold_what_is_visible(seq_q, seq_k, keys, right, left, top_left, masked, rows):
    """Each visible pair is in one rectangle, and its score is not -inf there."""
    spec = AttentionSpec(1.0, left, right, top_left)
    keys = min(keys, seq_k)
    mask = torch.rand(1, 1, seq_q, seq_k) < 0.7 if masked else None
    side = SideInputs(key_lengths=torch.tensor([keys]), mask=mask)
    q, k = torch.empty(1, seq_q, 1, 8), torch.empty(1, seq_k, 1, 8)
    found = torch.zeros(seq_q, seq_k, dtype=torch.int64)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch_parts, "_SHARED_TABLE_ROWS", rows)
        patch.setattr(torch_parts, "_FEWEST_WINDOW_ROWS", 1)
        patch.setattr(torch_parts, "_FEWEST_TABLE_ROWS", 1)
        for parts in torch_parts.row_parts(q, k, side, spec):
            assert len({(part.rows.start, part.rows.stop) for part in parts}) == 1
            for part in parts:
                shown = torch.ones(part.rows.stop - part.rows.start, part.keys.stop - part.keys.start)
                shown = shown if part.table is None else shown + part.table[0, 0]
                shown = shown.tril() if part.causal else shown
                found[part.rows, part.keys] += (shown.nan_to_num(neginf=0) != 0).long()
    distance = torch.arange(seq_k) - torch.arange(seq_q)[:, None] - (0 if top_left else seq_k - seq_q)
    expected = (torch.arange(seq_k) < keys).repeat(seq_q, 1)
    if left is not None:
        expected &= distance >= -left
    if right is not None:
        expected &= distance <= right
    if mask is not None:
        expected &= mask[0, 0]
    assert torch.equal(found, expected.long())


@pytest.mark.parametrize("which", ["q", "k", "v"])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("heads_kv", [2, 1])
@pytest.mark.parametrize("seq_q", [70, 30])
@pytest.mark.parametrize("by_torch", [True, False], ids=["torch", "tiles"])
def test_nan_and_inf_propagate_as_in_float64(which, value, dtype, heads_kv, seq_q, by_torch, small_tiles, monkeypatch):
    """Not as in the eager computation of the same dtype: PyTorch's bfloat16 products have more NaN on CPUs with AMX."""
    if not by_torch:
        use_only_tiles(monkeypatch)
    case = AttentionCase(batch=1, seq_q=seq_q, seq_k=70, heads_kv=heads_kv, dtype=dtype, arguments={"causal": True})
    inputs = make_inputs(case)
    first = 40 - (70 - seq_q)  # the row whose last key is number 40
    getattr(inputs, which)[0, max(0, first) if which == "q" else 40, 0, 3] = value
    actual = flashtile.attention(inputs.q, inputs.k, inputs.v, causal=True, return_lse=True, backend="cpu")
    wide = (tensor.double() for tensor in (inputs.q, inputs.k, inputs.v))
    expected = flashtile.attention(*wide, causal=True, return_lse=True, backend="reference")
    rows = slice(max(0, first), None)  # those that see it; what a hidden one does to the others is nobody's promise
    _assert_alike(*((out[:, rows], lse[..., rows]) for out, lse in (actual, expected)))
    if which != "v":
        assert actual[0][:, : rows.start].isfinite().all()


_SHOWN = torch.ones(70, 70, dtype=torch.bool)
_SHOWN[:30, 40] = False


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("which", ["q", "k", "v", "bias"])
@pytest.mark.parametrize("hiding", [
    {"mask": _SHOWN},
    {"bias": torch.zeros(70, 70).masked_fill(~_SHOWN, -torch.inf)},
    {"window": (None, 10)},
    {"window": (50, 10), "sinks": torch.tensor([0.3, -1.0])},
], ids=["mask", "bias", "causal", "window"])  # fmt: skip
def test_nan_and_inf_beside_hidden_keys(hiding, which, value, dtype, monkeypatch):
    """Key 40 is hidden from the first 30 rows. PyTorch's kernel and the tiles agree about what that means."""
    inputs = make_inputs(AttentionCase(batch=1, seq_q=70, seq_k=70, dtype=dtype))
    tensors = {name: getattr(inputs, name).clone() for name in ("q", "k", "v")}
    tensors["bias"] = hiding.get("bias", torch.zeros(70, 70)).clone()
    if which == "bias":
        tensors["bias"][50, 40] = value
    else:
        tensors[which][0, 40, 0, 3] = value
    leaves = [tensors[name].requires_grad_() for name in ("q", "k", "v")]

    def results():
        out, lse = flashtile.attention(**(hiding | tensors), return_lse=True, backend="cpu")
        return out, lse, *torch.autograd.grad(out.sum(), leaves)

    out, lse, *grads = results()
    use_only_tiles(monkeypatch)
    out_of_tiles, lse_of_tiles, *grads_of_tiles = results()
    rows = slice(30 if which == "v" else 0, None)  # a hidden value may be multiplied by 0
    _assert_alike((out[:, rows], lse), (out_of_tiles[:, rows], lse_of_tiles))
    for grad, of_tiles in zip(grads, grads_of_tiles):
        assert torch.equal(grad.isfinite(), of_tiles.isfinite())


@given(
    seq_q=st.integers(1, 90), seq_k=st.integers(1, 90), keys=st.integers(1, 90), tile_rows=st.sampled_from([1, 16, 48]),
    left=st.none() | st.integers(0, 100), right=st.none() | st.integers(0, 100), top_left=st.booleans(),
)  # fmt: skip
def test_visible_key_tiles(seq_q, seq_k, keys, tile_rows, left, right, top_left):
    """Tiles hold all that is visible and each holds something; what is called clear is visible to all rows."""
    spec = AttentionSpec(1.0, left, right, top_left)
    keys = min(keys, seq_k)
    visible = shown_by_band(seq_q, seq_k, spec)[:, :keys]
    for start in range(0, seq_q, tile_rows):
        rows = range(start, min(start + tile_rows, seq_q))
        seen = visible[rows.start : rows.stop]
        found = list(tiles.visible_key_tiles(rows, tiles._band(seq_q, seq_k, keys, spec), 32))
        covered = [column for tile in found for column in range(tile.start, tile.stop)]
        assert len(covered) == len(set(covered))
        assert set(seen.any(dim=0).nonzero().flatten().tolist()) <= set(covered)
        for tile in found:
            assert 0 < tile.stop - tile.start <= 32
            assert tile.start <= tile.clear_start <= tile.clear_stop <= tile.stop
            assert seen[:, tile.start : tile.stop].any()
            assert seen[:, tile.clear_start : tile.clear_stop].all()
            hidden = (~seen[:, tile.start : tile.stop]).any(dim=0)
            assert int(hidden.sum()) == tile.stop - tile.start - (tile.clear_stop - tile.clear_start)


def test_tiles_out_of_sight_are_not_computed(small_tiles, only_tiles, monkeypatch):
    made = []
    score_tile = tiles.score_tile
    monkeypatch.setattr(tiles, "score_tile", lambda *arguments: made.append(0) or score_tile(*arguments))
    q, k, v = (torch.randn(1, 320, 1, 16, requires_grad=True) for _ in range(3))
    flashtile.attention(q, k, v, window=(31, 0), backend="cpu").sum().backward()
    assert len(made) == 2 * (10 + 9)  # forward and backward; each of 10 row tiles sees itself and the tile before


@pytest.mark.parametrize("density, side", [(0.25, 128), (1.0, 256)])
def test_empty_tiles_of_a_block_mask_are_not_computed(density, side, monkeypatch):
    """Where few are shown, here and there, the tiles are small."""
    made, score_tile = [], tiles.score_tile
    monkeypatch.setattr(tiles, "score_tile", lambda keys, q, *rest: made.append(q.shape) or score_tile(keys, q, *rest))
    q = torch.randn(1, 1024, 1, 16, requires_grad=True)
    layout = torch.zeros(8, 8, dtype=torch.bool)
    layout[::2, ::2] = True
    block_mask = flashtile.BlockMask.from_layout(layout if density < 1 else layout | True, (128, 128), 1024, 1024)
    flashtile.attention(q, q, q, block_mask=block_mask, backend="cpu").sum().backward()
    assert len(made) == 2 * round(density * (1024 // side) ** 2)  # forward and backward
    assert {shape[1] for shape in made} == {side}


#: Each call runs in a process of its own, whose peak is that of the call: `getrusage` counts what the process was
#: before it, too. These begin as copies of one that has imported flashtile.
_MEASURE_PEAKS = """
import os, re, sys, torch, flashtile

def peak():
    return int(re.search("VmHWM:\\s+(\\d+) kB", open("/proc/self/status").read())[1]) * 1024

def step(seq, heads_kv, arguments):
    q, k, v = (torch.randn(1, seq, heads, 16, requires_grad=True) for heads in (2, heads_kv, heads_kv))
    tensors = {"alibi_slopes": torch.ones(2)} if arguments.pop("alibi", False) else {}
    flashtile.attention(q, k, v, backend="cpu", **tensors, **arguments).sum().backward()

for seq, heads_kv, arguments in eval(sys.argv[1]):
    if not (child := os.fork()):
        step(512, heads_kv, dict(arguments))
        before = peak()
        step(seq, heads_kv, dict(arguments))
        print(peak() - before, flush=True)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
"""

_LONG_CALLS: list[tuple[int, int, dict[str, Any]]] = [
    (4096, 1, {"causal": True}), (4096, 1, {"dropout_p": 0.2}),
    (4096, 1, {"alibi": True, "causal": True}), (16384, 1, {"window": (300, 5)}),
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.unpoisoned
def test_memory_is_linear():
    """The peak of forward and backward over that of a short call: a few copies of the inputs, and tiles."""
    peaks = run_python("-c", _MEASURE_PEAKS, repr(_LONG_CALLS)).split()
    for call, peak in zip(_LONG_CALLS, peaks, strict=True):
        seq = call[0]
        inputs = 3 * seq * 2 * 16 * 4
        # One byte for each score, the least that anything of queries × keys takes, would not fit.
        assert int(peak) < 6 * inputs + 12 * 2**20 < 2 * seq**2, call


def test_long_sequences():
    seq = 32768
    q, k, v = (torch.randn(1, seq, heads, 8) for heads in (2, 1, 1))
    out, lse = flashtile.attention(q, k, v, window=(100, 0), return_lse=True, backend="cpu")
    expected, expected_lse = flashtile.attention(
        q[:, -50:], k[:, -150:], v[:, -150:], window=(100, 0), return_lse=True, backend="reference"
    )
    assert_same(out[:, -50:], expected)
    assert_same(lse[..., -50:], expected_lse)
