"""Launches of tensors of more than 2³¹ elements: each number that a kernel is given fits the type of its parameter.

Tensors are on the meta device, which has sizes and strides and no memory, and what is launched is written down.
"""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from flashtile._backends import clear_plans, tma
from flashtile._backends import launch as backend_launch
from flashtile._backends.launch import KernelSource
from flashtile.ops.attention.hopper import launch as hopper
from flashtile.ops.attention.spec import FP8, AttentionSpec, BackwardInputs, SideInputs, Wanted
from flashtile.ops.attention.split import launch as split
from flashtile.ops.attention.triton import launch as triton
from flashtile.ops.cross_entropy import kernels as cross_entropy
from flashtile.ops.cross_entropy.spec import CrossEntropySpec, LossInputs, LossUpstream
from flashtile.ops.dense import kernels as dense
from flashtile.ops.dense.spec import Activated, ActivationSpec, ActivationUpstream, Summed
from flashtile.ops.dense.spec import Wanted as ActivationWanted
from flashtile.ops.kv_cache.spec import CacheCall, CacheSpec
from flashtile.ops.kv_cache.triton import launch as kv_cache
from flashtile.ops.layer_norm import kernels as layer_norm
from flashtile.ops.layer_norm import spec as norms
from flashtile.ops.rotary import kernels as rotary
from flashtile.ops.rotary.spec import RotarySpec, Rotation
from flashtile.ops.softmax import kernels as softmax
from flashtile.ops.softmax.spec import (
    IsFirst,
    Merge,
    MergedPart,
    OutputType,
    SoftmaxGradient,
    SoftmaxInputs,
    SoftmaxSpec,
)

pytestmark = pytest.mark.unpoisoned

_BITS = {"i32": 32, "i64": 64}
#: Names of kernels in the order of their launches. One list for all tests: launchers stay for the next call.
_LAUNCHED: list[str] = []
_BF16 = torch.bfloat16
_UNWANTED = Wanted()


def _meta(*shape: int, dtype: torch.dtype = _BF16, strides: tuple[int, ...] | None = None) -> Tensor:
    if strides is None:
        return torch.empty(shape, dtype=dtype, device="meta")
    return torch.empty_strided(shape, strides, dtype=dtype, device="meta")


def _encode(*arguments: Any) -> int:
    """Stands for `tma._encode`: a kernel takes the sizes of a descriptor in 32 bits, and its strides in 64."""
    *_, shape, strides, _ = arguments
    assert max(shape) < 2**31 and max(strides) < 2**63
    return 0


@pytest.fixture
def launched(monkeypatch):
    """Names of the kernels that were launched; fails where a number does not fit."""
    _LAUNCHED.clear()

    def make_launch(source: KernelSource, programs: int, scalars: tuple[Any, ...], _: Any) -> Callable[..., None]:
        types = [of for of in source.types if of != "constexpr"]
        of_plan = [value for value, of in zip(scalars, source.types[-len(scalars) :]) if of != "constexpr"]

        def launch(*given: Any) -> None:
            name = source.function.__name__
            assert 0 < programs < 2**31, f"{name}: {programs} programs"
            for at, (of, argument) in enumerate(zip(types, (*given, *of_plan), strict=True)):
                if of in _BITS:
                    limit = 2 ** (_BITS[of] - 1)
                    assert -limit <= argument < limit, f"{name}: argument {at} of type {of} is {argument}"
            _LAUNCHED.append(name)

        return launch

    monkeypatch.setattr(backend_launch, "make_launch", make_launch)
    hopper_gpu = SimpleNamespace(
        name="stand-in", major=9, minor=0, shared_memory_per_block_optin=227 * 1024, multi_processor_count=132
    )
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: hopper_gpu)
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(hopper, "tile_counter", lambda device: _meta(2, dtype=torch.int32))
    monkeypatch.setattr(tma, "_encode", _encode)
    clear_plans()
    yield _LAUNCHED
    clear_plans()


#: Strides of q, k and v, and of dout, of shape [batch, rows, heads, head_dim]; None = contiguous.
_ROWS, _HEADS, _D = 2**19, 32, 128
_ATTENTION: dict[str, tuple[tuple[int, ...], tuple[int, ...] | None]] = {
    "one_sequence": ((1, _ROWS, _HEADS, _D), None),
    "batch": ((3, 2 * _ROWS, _HEADS, _D), None),
    "rows_apart": ((1, 4096, 2, _D), (_D, 2**31 + 8, 2**20, 1)),
    "heads_first": ((2, 2**25, 2, _D), (2**33, _D, 2**32, 1)),
    "narrow": ((4, 2**28, 1, 8), None),
}
_PACKED = ((2**25, 2, _D), (3 * 2**31, 2**31, 1))


def _attention(backend: Any, tensor: Tensor, side: SideInputs, spec: AttentionSpec, wanted: Wanted = _UNWANTED) -> None:
    """Forward and backward, where every tensor is like the given one, of out as it comes."""
    out, lse = backend.forward(tensor, tensor, tensor, side, spec)
    if hasattr(backend, "backward"):
        inputs = BackwardInputs(tensor, torch.empty_like(lse), tensor, tensor, tensor, out, lse)
        backend.backward(inputs, side, spec, wanted)


def _side(rows: int, **changes: Any) -> SideInputs:
    return SideInputs(None, None, rows, rows)._replace(**changes)


@pytest.mark.parametrize("form", _ATTENTION)
@pytest.mark.parametrize("window", [(None, None), (64, 0)], ids=["full", "window"])
@pytest.mark.parametrize("backend", [triton, hopper], ids=["triton", "hopper"])
def test_attention(backend, window, form, launched):
    shape, strides = _ATTENTION[form]
    if backend is hopper and form == "narrow":  # of all rows the sums of dq, 64 columns each, would be 256 GiB
        shape = (2, *shape[1:])
    tensor = _meta(*shape, strides=strides)
    _attention(backend, tensor, _side(shape[1]), AttentionSpec(1.0, *window, deterministic=True))
    of_shares = launched.count("attention_shares_kernel")  # few walks over many queries are in parts
    assert len(launched) - of_shares == (3 if backend is triton else 4)


@pytest.mark.parametrize("backend", [triton, hopper], ids=["triton", "hopper"])
def test_packed_attention(backend, launched):
    shape, strides = _PACKED
    lengths = _meta(1001, dtype=torch.int64)
    side = SideInputs(lengths, lengths, shape[0], shape[0])
    _attention(backend, _meta(*shape, strides=strides), side, AttentionSpec(1.0, None, 0))
    assert len(launched) == (3 if backend is triton else 4)


@pytest.mark.parametrize("backend", [triton, hopper], ids=["triton", "hopper"])
def test_attention_with_a_block_mask(backend, launched):
    shape, _ = _ATTENTION["batch"]
    patterns = 1000
    lists, tile_masks = _meta(2**31 - 4, dtype=torch.int32), _meta(patterns, 128, 128, dtype=torch.uint8)
    side = _side(shape[1], block_lists=lists, block_patterns=tile_masks, alibi_slopes=_meta(3, _HEADS).float())
    spec = AttentionSpec(1.0, None, 0, block_shape=(3, _HEADS, 128, 128), deterministic=backend is hopper)
    _attention(backend, _meta(*shape), side, spec)
    assert len(launched) == (3 if backend is triton else 4)


_TABLES = {
    "whole": ((4, 2, 2**16, 2**16), None),
    "rows_apart": ((4, 2, 2**16, 2**16), (2**16, 2**18, 2**31 + 16, 1)),
    "turned": ((4, 2, 2**16, 2**16), (2**33, 2**32, 1, 2**16)),
    "columns_apart": ((1, 1, 2**16, 2**16), (1, 1, 1, 2**32)),
    "scalar": ((1, 1, 1, 1), None),
}


@pytest.mark.parametrize("name", _TABLES)
def test_attention_with_tables(name, launched):
    """With everything beside them that the portable kernels alone have. A scalar bias is shared by 2³¹ tiles."""
    shape, strides = _TABLES[name]
    rows = 2**20 if name == "scalar" else 2**16
    bias, mask = (_meta(*shape, dtype=dtype, strides=strides) for dtype in (torch.float32, torch.bool))
    side = _side(
        rows, key_lengths=_meta(4, dtype=torch.int64), dropout_seed=_meta(2, dtype=torch.int64), bias=bias, mask=mask,
        alibi_slopes=_meta(4, 2).float(), sinks=_meta(2).float(),
    )  # fmt: skip
    tensor = _meta(4, rows, 2, 256)
    wanted = Wanted(bias=True, alibi_slopes=True, sinks=True)
    _attention(triton, tensor, side, AttentionSpec(1.0, 2**31 - 1, 0, dropout_p=0.1, softcap=2.0), wanted)
    sums = ["attention_bias_parts_kernel"] if name == "scalar" else []
    assert launched[3:] == ["attention_dbias_kernel", *sums]


def test_column_sums(launched):
    shape, _ = _ATTENTION["batch"]
    triton.column_sums(
        _meta(*shape), _meta(*shape), _meta(3, _HEADS, shape[1]).float(), _side(shape[1]), AttentionSpec(1.0)
    )
    assert launched == ["attention_column_sums_kernel"]


@pytest.mark.parametrize("backend", [triton, hopper], ids=["triton", "hopper"])
@pytest.mark.parametrize("packed", [False, True], ids=["dense", "packed"])
def test_attention_of_8_bits(packed, backend, launched):
    if packed:
        tensor, side = _meta(2**26, 8, _D, dtype=FP8, strides=(2**34, 2**32, 1)), _side(2**26)
        lengths = _meta(3, dtype=torch.int32)
        side = side._replace(cu_seqlens_q=lengths, cu_seqlens_k=lengths)
    else:
        tensor, side = _meta(2, 2**21, 64, _D, dtype=FP8, strides=(2**36, 2**14, _D, 1)), _side(2**21)
    descale = _meta(2, tensor.shape[-2], dtype=torch.float32, strides=(2**33, 2**32))
    backend.forward(
        tensor,
        tensor,
        tensor,
        side._replace(descale_q=descale, descale_k=descale, descale_v=descale),
        AttentionSpec(1.0),
    )
    assert launched[-1] == "attention_forward_kernel"


@pytest.mark.parametrize("keys", [2**26, 2**29])
def test_few_queries_of_many_keys(keys, launched):
    q, k = _meta(2, 3, 16, _D), _meta(2, keys, 2, _D)
    side = _side(keys, alibi_slopes=_meta(2, 16).float(), sinks=_meta(16).float())
    split.forward(q, k, k, side, AttentionSpec(1.0, 2**30, 0))
    assert launched == ["attend_kernel", "combine_kernel"]


@pytest.mark.parametrize("paged", [False, True], ids=["whole", "pages"])
def test_attention_over_a_cache(paged, launched):
    q, new, table = _meta(2, 4, 16, _D), _meta(2, 4, 2, _D, strides=(2**33, 2**32, _D, 1)), None
    cache = _meta(2, 2**25, 2, _D)
    if paged:
        cache, table = _meta(2**22, 48, 2, _D), _meta(2, 2**20, dtype=torch.int32, strides=(2**32, 1))
    angles = _meta(2**27, 32, strides=(2**32, 1))
    lengths = _meta(2, dtype=torch.int64)
    call = CacheCall(q, cache, cache, new, new, lengths, None, lengths, table, angles, angles)
    kv_cache.forward(call, CacheSpec(0, 1.0, 2**30, 0))
    assert launched == ["append_kernel", "attend_kernel", "combine_kernel"]


def test_softmax(launched):
    x, mask = _meta(8, 32, 2**14, 2**14), _meta(8, 1, 2**14, 2**14, dtype=torch.bool, strides=(2**33, 1, 2**32, 1))
    out = softmax.forward(SoftmaxInputs(x, mask.expand(x.shape)), SoftmaxSpec(1.0, True))
    softmax.backward(SoftmaxGradient(x, out), SoftmaxSpec(1.0, True))
    softmax.forward(SoftmaxInputs(_meta(1, 1, 2**31 - 2**16, 3), None), SoftmaxSpec(1.0, False))
    assert launched == ["softmax_forward_kernel", "softmax_backward_kernel", "softmax_forward_kernel"]


def test_merge(launched):
    acc = _meta(3, 2**21, 64, _D, dtype=torch.float32)
    row_max, lse = (
        _meta(3, 64, 2**21, dtype=torch.float32),
        _meta(3, 64, 2**21, dtype=torch.float32, strides=(2**38, 2**32, 1)),
    )
    for first in (True, False):
        softmax.merge_part(MergedPart(acc, row_max, row_max, acc.bfloat16(), lse), IsFirst(first))
    softmax.merge_finish(Merge(acc, row_max, row_max), OutputType(torch.bfloat16))
    assert launched == ["merge_part_kernel", "merge_part_kernel", "merge_finish_kernel"]


@pytest.mark.parametrize("rows, width", [(2**24, 4096), (2**16, 65536), (2**31 - 2**16, 3)])
def test_norms(rows, width, launched):
    x, weight = _meta(rows, width, strides=(2**32, 1)), _meta(width)
    spec = norms.NormSpec(False, 1e-5, 0.1, 1.0, False, torch.float32, rows)
    seed, residual = _meta(2, dtype=torch.int64), _meta(rows, width, dtype=torch.float32, strides=(2**33, 1))
    operands = norms.Operands(x, residual, x, weight, weight, dropout_seed=seed)
    z, _, total, mean, rstd = layer_norm.forward(operands, spec)
    saved = (total, None, mean, rstd, weight, weight, None, None, None, None, None, None, seed)
    layer_norm.backward(norms.Upstream(z, None, residual, *saved), spec, norms.Wanted(rows, True, True, True))
    assert len(launched) == 3


@pytest.mark.parametrize("inplace", [False, True], ids=["new", "inplace"])
def test_rotary(inplace, launched):
    x, angles = _meta(3, 2**20, 96, _D, strides=(2**40, 2**33, _D, 1)), _meta(2**21, 32, strides=(2**32, 1))
    rotary.forward(Rotation(x, angles, angles, angles, angles), RotarySpec(False, False, 32, 64, 2**20), inplace)
    assert launched == ["rotary_kernel"]


@pytest.mark.parametrize("rows, columns", [(2**20, 50257), (4, 2**30), (2**31 - 2**16, 2)])
def test_cross_entropy(rows, columns, launched):
    logits, labels = _meta(rows, columns, strides=(2**33 + 1, 1)), _meta(rows, dtype=torch.int64)
    spec = CrossEntropySpec(0.1, 1.0, 0.1, -(2**40), "mean", True, 0, columns, "")
    loss, _, normaliser, scale = cross_entropy.forward(LossInputs(logits, labels, None), spec)
    gradient = cross_entropy.backward(LossUpstream(loss, scale, logits, labels, None, normaliser), spec)
    cross_entropy.multiply(gradient, loss)
    assert len(launched) == 4


@pytest.mark.parametrize("rows, width", [(2**22, 8192), (2**31 - 2**16, 3)])
def test_dense(rows, width, launched):
    spec = ActivationSpec("silu", True)
    pre = _meta(rows, 2 * width)
    hidden = dense.activate(Activated(pre), spec)
    dense.activate_backward(ActivationUpstream(hidden, pre), spec, ActivationWanted(True, True))
    dense.column_sum(Summed(pre))
    assert len(launched) == 5


def _refused(call: Callable[..., Any], *arguments: Any, match: str) -> None:
    with pytest.raises(ValueError, match=match):
        call(*arguments)


def test_more_rows_than_kernels_count_are_refused(launched):
    """Beyond any memory, unless rows lie upon one another; but never a wrong result."""
    rows = 2**31
    most = r"expected at most \d+ rows on a GPU, got"
    long = _meta(1, 2**29 + 1, 1, 64)
    short = _meta(1, 4, 1, 64)
    for backend in (triton, hopper, split):
        _refused(backend.forward, short, long, long, _side(2**29 + 1), AttentionSpec(1.0), match="k: " + most)
    for backend in (triton, hopper, split):
        _refused(backend.forward, long, short, short, _side(2**29 + 1), AttentionSpec(1.0), match="q: " + most)
        many = _meta(2**31, 1, 1, 8)
        _refused(backend.forward, many, many, many, _side(1), AttentionSpec(1.0), match="q: expected fewer than")
    grouped = _meta(1, 2**28, 8, 8)
    most_of_group = "q with all heads that share keys: " + most
    _refused(split.forward, grouped, *[_meta(1, 4, 1, 8)] * 2, _side(4), AttentionSpec(1.0), match=most_of_group)
    caches = [_meta(1, 16, 1, 8)] * 2
    _refused(kv_cache.forward, CacheCall(grouped, *caches), CacheSpec(4, 1.0, num_splits=1), match=most_of_group)
    _refused(kv_cache.forward, CacheCall(_meta(1, 2**29 + 1, 1, 8), *caches), CacheSpec(4, 1.0), match="q: " + most)
    table = _meta(1, 2**26, dtype=torch.int32)
    call = CacheCall(short, _meta(2, 16, 1, 64), _meta(2, 16, 1, 64), block_table=table)
    _refused(kv_cache.forward, call, CacheSpec(4, 1.0), match="block_table: " + most)
    _refused(
        softmax.forward, SoftmaxInputs(_meta(2, 1, rows // 2, 1), None), SoftmaxSpec(1.0, False), match="x: " + most
    )
    spec = norms.NormSpec(True, 1e-5, 0.0, 1.0, False, _BF16, rows)
    _refused(layer_norm.forward, norms.Operands(_meta(rows, 1)), spec, match="x0: " + most)
    angles = _meta(4, 1)
    _refused(rotary.forward, Rotation(_meta(rows, 1, 1, 2), angles, angles), RotarySpec(False, False, 1, 1, 0), False,
             match="x: " + most)  # fmt: skip
    spec = CrossEntropySpec(0.0, 1.0, 0.0, -100, "sum", False, 0, 1, "")
    inputs = LossInputs(_meta(rows, 1), _meta(rows, dtype=torch.int64), None)
    _refused(cross_entropy.forward, inputs, spec, match="logits: " + most)
    _refused(dense.activate, Activated(_meta(rows, 1)), ActivationSpec("relu", False), match="x: " + most)
    _refused(dense.column_sum, Summed(_meta(rows, 1)), match="x: " + most)
    assert not launched
