"""What the rotation means: against the formula, on the reference and on the CPU; its tables; bad input; PyTorch."""

import functools
import math
import re
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import gradcheck

import flashtile
from flashtile import RotaryScaling
from flashtile.testing import assert_same
from support.running.autograd import normal
from support.running.each_case import each_case

# PyTorch's own forward mode still uses it.
pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit.script:DeprecationWarning")
both_backends = pytest.mark.parametrize("backend", ["reference", "cpu"])
both_pairings = pytest.mark.parametrize("interleaved", [False, True], ids=["halves", "interleaved"])

#: Those of `rotary_tables` come from float32 angles, which would be all that is seen here.
_ANGLES = torch.arange(32, dtype=torch.float64)[:, None] * 10000.0 ** (-torch.arange(0, 6, 2, dtype=torch.float64) / 6)
_COS, _SIN = _ANGLES.cos(), _ANGLES.sin()


def turned(x: Tensor, position: int, interleaved: bool) -> Tensor:
    """One head `[8]` by complex numbers: the first six elements turn."""
    a, b = (x[0:6:2], x[1:6:2]) if interleaved else (x[:3], x[3:6])
    frequencies = 10000.0 ** (-torch.arange(0, 6, 2, dtype=torch.float64) / 6)
    z = torch.complex(a, b) * torch.polar(torch.ones(3, dtype=torch.float64), position * frequencies)
    out = x.clone()
    if interleaved:
        out[0:6:2], out[1:6:2] = z.real, z.imag
    else:
        out[:3], out[3:6] = z.real, z.imag
    return out


@both_backends
@both_pairings
@each_case("sign", [1, -1])
def test_is_a_multiplication_of_complex_numbers(sign, interleaved, backend):
    """With the conjugates of angles, of the negative position."""
    x, options = normal(2, 4, 3, 8), {"conjugate": sign < 0, "backend": backend}
    out = flashtile.apply_rotary(x, _COS, _SIN, interleaved, seqlen_offsets=torch.tensor([5, 0]), **options)
    for batch, offset in ((0, 5), (1, 0)):
        for row in range(4):
            assert_same(out[batch, row, 1], turned(x[batch, row, 1], sign * (row + offset), interleaved))


@both_backends
def test_packed_sequences_begin_anew(backend):
    x, cu_seqlens = normal(10, 2, 8), torch.tensor([0, 3, 3, 8], dtype=torch.int32)
    out = flashtile.apply_rotary(x, _COS, _SIN, cu_seqlens=cu_seqlens, max_seqlen=5, backend=backend)
    for begin, end in ((0, 3), (3, 8)):
        alone = flashtile.apply_rotary(x[None, begin:end], _COS, _SIN, backend=backend)[0]
        assert_same(out[begin:end], alone)
    assert torch.equal(out[8:], x[8:]), "rows of no sequence stay"


@both_backends
@each_case("strides", [(0, 32, 8, 1), (40, 8, 8, 1)])
def test_rows_that_share_memory_are_not_rotated_in_place(strides, backend):
    x = torch.randn(400).as_strided((2, 5, 4, 8), strides)
    with pytest.raises(ValueError, match=r"x: expected memory of its own for each element, because it is written"):
        flashtile.apply_rotary(x, _COS, _SIN, inplace=True, backend=backend)
    assert_same(
        flashtile.apply_rotary(x, _COS, _SIN, backend=backend),
        flashtile.apply_rotary(x.contiguous(), _COS, _SIN, backend=backend),
    )


@both_backends
@each_case("inplace", [False, True])
def test_packed_projections(inplace, backend):
    qkv, options = normal(2, 5, 3, 4, 8), {"inplace": inplace, "backend": backend}
    q, k, v = (t.clone() for t in qkv.unbind(2))
    q, k = flashtile.apply_rotary(q, _COS, _SIN), flashtile.apply_rotary(k, 2 * _COS, 2 * _SIN)
    kv = flashtile.apply_rotary_kv(qkv[:, :, 1:].clone(), 2 * _COS, 2 * _SIN, **options)
    assert_same(kv, torch.stack((k, v), dim=2))
    grouped = torch.cat((qkv[:, :, 0], qkv[:, :, 1, :2], qkv[:, :, 2, :2]), dim=2)
    grouped = flashtile.apply_rotary_qkv(grouped, _COS, _SIN, 2 * _COS, 2 * _SIN, num_heads_q=4, **options)
    assert_same(grouped, torch.cat((q, k[:, :, :2], v[:, :, :2]), dim=2))
    given = qkv.clone()
    out = flashtile.apply_rotary_qkv(given, _COS, _SIN, 2 * _COS, 2 * _SIN, **options)
    assert_same(out, torch.stack((q, k, v), dim=2))
    assert torch.equal(given, out if inplace else qkv)


@both_backends
def test_in_place_on_views(backend):
    whole = normal(2, 8, 5, 3)
    x = whole.permute(0, 2, 3, 1)  # a last dimension that is not contiguous
    expected = flashtile.apply_rotary(x.contiguous(), _COS, _SIN, backend=backend)
    assert flashtile.apply_rotary(x, _COS, _SIN, inplace=True, backend=backend) is x
    assert_same(whole.permute(0, 2, 3, 1), expected)


@both_backends
def test_what_pytorch_negates_cannot_be_rotated_in_place(backend):
    x = normal(1, 4, 2, 8)
    view = torch.complex(torch.zeros_like(x), -x).conj().imag
    assert_same(
        flashtile.apply_rotary(view, _COS, _SIN, backend=backend),
        flashtile.apply_rotary(x, _COS, _SIN, backend=backend),
    )
    with pytest.raises(ValueError, match=r"x: expected a tensor that holds its own numbers, because it is written"):
        flashtile.apply_rotary(view, _COS, _SIN, inplace=True, backend=backend)


@both_backends
def test_in_place_is_noticed_by_autograd(backend):
    x = normal(1, 4, 2, 8)
    weight = normal(1, 4, 2, 8, seed=1).requires_grad_()
    product = (weight * x).sum()
    flashtile.apply_rotary(x, _COS, _SIN, inplace=True, backend=backend)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        product.backward()


# --- tables ---------------------------------------------------------------------------------------------------------


def test_tables():
    cos, sin = flashtile.rotary_tables(1000, 64)
    angles = torch.arange(1000.0)[:, None] * (10000.0 ** (-torch.arange(0, 64, 2, dtype=torch.float64) / 64)).float()
    assert_same(cos, angles.cos())
    assert_same(sin, angles.sin())
    assert flashtile.rotary_tables(3, 64, dtype=torch.bfloat16)[0].dtype is torch.bfloat16


def test_linear_scaling_interpolates_positions():
    plain = flashtile.rotary_tables(50, 32)
    scaled = flashtile.rotary_tables(200, 32, scaling=RotaryScaling("linear", 4.0))
    for expected, actual in zip(plain, scaled, strict=True):
        assert_same(actual[::4], expected)


def test_ntk_scaling_slows_the_lowest_frequency_alone():
    plain = flashtile.rotary_frequencies(32)
    scaled = flashtile.rotary_frequencies(32, scaling=RotaryScaling("ntk", 4.0))
    ratio = plain / scaled
    assert_same(ratio[[0, -1]], torch.tensor([1.0, 4.0]))
    assert (ratio.diff() > 0).all()


def test_yarn_scaling_slows_by_turns():
    scaling = RotaryScaling("yarn", 8.0, original_length=2048)
    plain, scaled = (flashtile.rotary_frequencies(128, scaling=s) for s in (None, scaling))
    turns = 2048 * plain / (2 * math.pi)
    # The ramp runs between whole pairs, so one pair on either side may be in it.
    assert_same(scaled[turns > 32 * 1.2], plain[turns > 32 * 1.2])
    assert_same(scaled[turns < 1 / 1.2], plain[turns < 1 / 1.2] / 8)
    between = (plain / scaled)[(turns < 32 / 1.2) & (turns > 1.2)]
    assert (between > 1).all() and (between < 8).all() and (between.diff() > 0).all()
    cos, _ = flashtile.rotary_tables(3, 128, scaling=scaling)
    assert_same(cos[0], torch.full((64,), 0.1 * math.log(8) + 1))
    cos, _ = flashtile.rotary_tables(3, 128, scaling=RotaryScaling("yarn", 8.0, 2048, attention_factor=1.0))
    assert_same(cos[0], torch.ones(64))


def test_xpos_cancels_but_for_the_distance():
    scale = flashtile.xpos_scale(20, 8, 16.0)
    products = scale[:, None] / scale[None]  # [query, key, pair]
    assert_same(products[5:, 5:], products[:-5, :-5])
    assert (products[10, 0] < 1).all(), "far keys count less"


@each_case(
    "make, arguments, message",
    [
        (RotaryScaling, ("cubic", 2.0), "kind: expected 'linear', 'ntk' or 'yarn', got 'cubic'"),
        (RotaryScaling, ("ntk", 0.5), "factor: expected at least 1, got 0.5"),
        (RotaryScaling, ("linear", math.inf), "factor: expected at least 1, got inf"),
        (RotaryScaling, ("linear", "2"), "factor: expected a float, got '2'"),
        (RotaryScaling, ("yarn", 2.0), "original_length: expected a positive number for 'yarn', got None"),
        (RotaryScaling, ("yarn", 2.0, "long"), "original_length: expected a float, got 'long'"),
        (RotaryScaling, ("yarn", 2.0, 8, 0.0), "beta_slow, beta_fast: expected turns above 0"),
        (RotaryScaling, ("yarn", 2.0, 8, 1.0, 32.0), "the slow ones no more than the fast, got 32.0 and 1.0"),
        (RotaryScaling, ("yarn", 2.0, 8, 32.0, 1.0, math.nan), "attention_factor: expected a finite number, got nan"),
        (flashtile.rotary_frequencies, (5,), "dim: expected an even"),
        (flashtile.rotary_frequencies, (4, 0.0), "base: expected a positive"),
        (flashtile.rotary_frequencies, (4, "high"), "base: expected a float, got 'high'"),
        (
            flashtile.rotary_frequencies,
            (4, 1.0, RotaryScaling("yarn", 2.0, 8)),
            "base: expected more than 1 for 'yarn', got 1.0",
        ),
        (
            flashtile.rotary_frequencies,
            (4, 10.0, {"kind": "linear"}),
            "scaling: expected a RotaryScaling or None, got dict",
        ),
        (flashtile.rotary_tables, (20.5, 4), "positions: expected an int, got 20.5; pass the length of the table"),
        (flashtile.rotary_tables, (-1, 4), "positions: expected at least 0, got -1"),
        (flashtile.rotary_tables, (8, 5), "dim: expected an even number of elements, got 5"),
        (functools.partial(flashtile.rotary_tables, dtype=torch.int32), (20, 4), "dtype: expected dtype float16"),
        (flashtile.xpos_scale, (2.0, 4, 512.0), "positions: expected an int, got 2.0; pass the length of the table"),
        (flashtile.xpos_scale, (-1, 4, 512.0), "positions: expected at least 0, got -1"),
        (flashtile.xpos_scale, (20, 5, 512.0), "dim: expected an even number of elements, got 5"),
        (flashtile.xpos_scale, (20, 4, 0.0), "scale_base: expected a positive number, got 0.0"),
        (flashtile.xpos_scale, (20, 4, math.nan), "scale_base: expected a positive number, got nan"),
        (flashtile.apply_rotary_kv, (torch.randn(2, 4, 3, 3, 8), _COS, _SIN), "kv: expected [batch, seq, 2, heads, he"),
    ],
)
def test_bad_tables_and_what_they_are_made_of(make, arguments, message):
    with pytest.raises((TypeError, ValueError), match=re.escape(message)):
        make(*arguments)


# --- bad input ------------------------------------------------------------------------------------------------------

_X, _CU = torch.randn(2, 4, 3, 8), torch.tensor([0, 2, 8], dtype=torch.int32)
_PACKED = {"x": torch.randn(8, 3, 8), "cu_seqlens": _CU}
_IDS = torch.arange(4).repeat(2, 1) + torch.tensor([[0], [1]])
_META = torch.zeros(32, 3, device="meta", dtype=torch.float64)

BAD = {
    "x-list": (TypeError, {"x": [1]}, ("x: expected a torch.Tensor, got list",)),
    "x-int": (TypeError, {"x": _X.int()}, ("x: expected dtype float16", "int32")),
    "x-rank": (ValueError, {"x": _X[0]}, ("x: expected 4 dimensions [batch, seq, heads, head_dim]", "cu_seqlens")),
    "x-packed-rank": (ValueError, {"cu_seqlens": _CU}, ("x: expected 3 dimensions [total, heads, head_dim]",)),
    "cos-none": (TypeError, {"cos": None}, ("cos: expected a torch.Tensor, got NoneType",)),
    "cos-rank": (ValueError, {"cos": _COS[0]}, ("cos: expected shape (positions, rotary_dim / 2)", "got (3,)")),
    "cos-wide": (ValueError, {"cos": torch.ones(9, 5), "sin": torch.ones(9, 5)}, ("head_dim of x, 8, got (9, 5)",)),
    "cos-short": (ValueError, {"cos": _COS[:3], "sin": _SIN[:3]}, ("cos: expected at least 4 positions", "got 3")),
    "cos-device": (ValueError, {"cos": _META}, ("cos: expected the device of x, cpu, got meta",)),
    "cos-grad": (ValueError, {"cos": _COS.clone().requires_grad_()}, ("cos:", "no gradient", "detach")),
    "sin-shape": (ValueError, {"sin": _SIN[1:]}, ("sin: expected shape (32, 3), that of cos, got (31, 3)",)),
    "sin-dtype": (TypeError, {"sin": _SIN.float()}, ("sin: expected the dtype of cos", "cast one")),
    "offset": (ValueError, {"seqlen_offsets": 29}, ("cos: expected at least 33 positions, 4 rows from position 29",)),
    "offset-negative": (ValueError, {"seqlen_offsets": -1}, ("seqlen_offsets: expected at least 0, got -1",)),
    "offset-float": (TypeError, {"seqlen_offsets": 1.5}, ("seqlen_offsets: expected an int or an integer tensor",)),
    "offsets-shape": (ValueError, {"seqlen_offsets": torch.tensor([1])}, ("seqlen_offsets: expected shape (2,)",)),
    "offsets-far": (ValueError, {"seqlen_offsets": torch.tensor([0, 29])}, ("cos: expected at least 33 positions",)),
    "offsets-negative": (ValueError, {"seqlen_offsets": torch.tensor([0, -2])}, ("offsets of at least 0, got -2",)),
    "cu-falls": (ValueError, {**_PACKED, "cu_seqlens": torch.tensor([0, 5, 3])}, ("cu_seqlens:", "never decrease")),
    "cu-starts": (ValueError, {**_PACKED, "cu_seqlens": torch.tensor([1, 5])}, ("cu_seqlens: expected to start at 0",)),
    "cu-total": (ValueError, {**_PACKED, "cu_seqlens": torch.tensor([0, 9])}, ("at most the packed total, 8, got 9",)),
    "cu-dtype": (TypeError, {**_PACKED, "cu_seqlens": torch.ones(3)}, ("cu_seqlens: expected dtype int32 or int64",)),
    "max-seqlen": (TypeError, {**_PACKED, "max_seqlen": 2.0}, ("max_seqlen: expected an int, got 2.0",)),
    "max-seqlen-far": (ValueError, {**_PACKED, "max_seqlen": 40}, ("cos: expected at least 40 positions",)),
    "ids-list": (TypeError, {"position_ids": [0]}, ("position_ids: expected an int32 or int64 tensor, got list",)),
    "ids-float": (TypeError, {"position_ids": torch.ones(2, 4)}, ("position_ids: expected dtype int32 or int64",)),
    "ids-shape": (
        ValueError,
        {"position_ids": _IDS[:, :3]},
        ("position_ids: expected shape (2, 4) or (1, 4)", "(2, 3)"),
    ),
    "ids-batch": (ValueError, {"position_ids": _IDS[[0, 1, 1]]}, ("position_ids: expected shape (2, 4)", "(3, 4)")),
    "ids-packed": (ValueError, {"position_ids": _IDS[0]}, ("x: expected 3 dimensions [total, heads, head_dim]",)),
    "ids-rank": (ValueError, {**_PACKED, "position_ids": _IDS}, ("cu_seqlens: expected None beside position_ids",)),
    "ids-offset": (ValueError, {"position_ids": _IDS, "seqlen_offsets": 1}, ("seqlen_offsets: expected None beside",)),
    "ids-longest": (ValueError, {"position_ids": _IDS, "max_seqlen": 4}, ("max_seqlen: expected None beside",)),
    "ids-device": (ValueError, {"position_ids": _IDS.to("meta")}, ("position_ids: expected the device of x, cpu",)),
    "ids-far": (ValueError, {"position_ids": _IDS * 8}, ("cos: expected at least 33 positions", "got 32")),
    "ids-negative": (
        ValueError,
        {"position_ids": _IDS - 2},
        ("position_ids: expected positions of at least 0, got -2",),
    ),
    "inplace": (TypeError, {"inplace": 1}, ("inplace: expected True or False, got 1",)),
    "backend": (ValueError, {"backend": "fast"}, ("backend: expected one of 'auto'",)),
}


@each_case("name", BAD)
def test_bad_input(name):
    error, changes, message = BAD[name]
    with pytest.raises(error, match=".*".join(map(re.escape, message))):
        flashtile.apply_rotary(**{"x": _X, "cos": _COS, "sin": _SIN, **changes})


@each_case(
    "changes, message",
    [
        (
            {"num_heads_q": 7},
            r"num_heads_q: expected None for qkv \(2, 4, 3, 3, 8\), where q, k and v are apart, got 7",
        ),
        ({"qkv": _X}, r"num_heads_q: expected an int for qkv of 4 dimensions, got None"),
        ({"qkv": _X, "num_heads_q": 2}, r"leaves an even number of the 3 heads for k and v, got 2"),
        ({"qkv": torch.randn(2, 4, 2, 3, 8)}, r"qkv: expected 4 dimensions"),
        ({"cos_k": _COS}, r"cos_k, sin_k: expected both or neither"),
        ({"cos_k": _COS[1:], "sin_k": _SIN[1:]}, r"cos_k: expected the shape and dtype of cos"),
        ({"qkv": torch.randn(2, 4, 3, 6, 8)[..., :3, :], "inplace": True}, r"qkv: expected heads that follow one"),
    ],
)
def test_bad_qkv(changes, message):
    with pytest.raises((TypeError, ValueError), match=message):
        flashtile.apply_rotary_qkv(**{"qkv": torch.randn(2, 4, 3, 3, 8), "cos": _COS, "sin": _SIN, **changes})


@both_backends
@pytest.mark.parametrize("inplace", [False, True], ids=["new", "inplace"])
def test_positions_of_rows(inplace, backend):
    """Any order; what offsets and cumulative lengths say is the same said otherwise; also compiled and transformed."""
    options: dict[str, Any] = {"inplace": inplace, "backend": backend}
    x, ids = normal(2, 3, 2, 8), torch.tensor([[5, 0, 9], [2, 2, 31]])
    rotate = lambda x, ids: flashtile.apply_rotary(x * 1, _COS, _SIN, position_ids=ids, **options)  # noqa: E731
    rows = [
        [flashtile.apply_rotary(x[None, None, b, s], _COS, _SIN, seqlen_offsets=int(ids[b, s])) for s in range(3)]
        for b in range(2)
    ]
    assert_same(rotate(x, ids), torch.cat([torch.cat(row, 1) for row in rows]))
    assert_same(rotate(x.flatten(0, 1), ids.flatten().int()), rotate(x, ids).flatten(0, 1))
    offsets = torch.tensor([4, 20])
    expected = flashtile.apply_rotary(x, _COS, _SIN, seqlen_offsets=offsets)
    assert_same(rotate(x, offsets[:, None] + torch.arange(3)), expected)
    assert_same(rotate(x, torch.arange(3)[None]), flashtile.apply_rotary(x, _COS, _SIN))
    assert gradcheck(lambda x: rotate(x, ids), x.requires_grad_())
    compiled = torch.compile(rotate, fullgraph=True, backend="aot_eager", dynamic=True)
    assert_same(
        torch.autograd.grad(compiled(x, ids).sin().sum(), x), torch.autograd.grad(rotate(x, ids).sin().sum(), x)
    )


def test_positions_of_rows_of_packed_projections():
    qkv, ids = normal(2, 3, 3, 2, 8), torch.tensor([[5, 0, 9], [2, 2, 31]])
    rotated = flashtile.apply_rotary_qkv(qkv, _COS, _SIN, position_ids=ids)
    q, k = (flashtile.apply_rotary(qkv[:, :, part], _COS, _SIN, position_ids=ids) for part in range(2))
    assert_same(rotated, torch.stack((q, k, qkv[:, :, 2]), 2))
    assert_same(flashtile.apply_rotary_kv(qkv[:, :, 1:], _COS, _SIN, position_ids=ids), rotated[:, :, 1:])
    packed = flashtile.apply_rotary_qkv(qkv.flatten(0, 1), _COS, _SIN, position_ids=ids.flatten())
    assert_same(packed, rotated.flatten(0, 1))
