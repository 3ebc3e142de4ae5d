"""Bad input: each error names the argument, what was expected, what came and the remedy."""

import re
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy
import pytest
import torch
from torch import Tensor

import flashtile
from flashtile.ops.attention import checks as attention_checks
from flashtile.ops.common import checks


def dense(**changes: Any) -> Any:
    """A good dense call, with some arguments changed."""
    arguments = {"q": torch.randn(2, 3, 4, 8), "k": torch.randn(2, 5, 2, 8), "v": torch.randn(2, 5, 2, 8)}
    return flashtile.attention(**{**arguments, **changes})


def packed(**changes: Any) -> Any:
    """A good packed call of the lengths 2 and 3, with some arguments changed."""
    arguments = {name: torch.randn(5, 2, 8) for name in "qkv"}
    return flashtile.attention_varlen(**{**arguments, "cu_seqlens_q": cumulative(0, 2, 5), **changes})


def cumulative(*values: int, dtype: torch.dtype = torch.int32) -> Tensor:
    return torch.tensor(values, dtype=dtype)


def zeros(*shape: int, dtype: torch.dtype = torch.float32, device: str = "cpu") -> Tensor:
    return torch.zeros(shape, dtype=dtype, device=device)


def seed(*shape: int, dtype: torch.dtype = torch.int64, device: str = "cpu") -> Tensor:
    return torch.zeros(shape, dtype=dtype, device=device)


class Bad(NamedTuple):
    """One wrong call: what is changed in a good one, and what the message holds, in this order."""

    name: str
    error: type[Exception]
    changes: dict[str, Any]
    message: tuple[str, ...]
    call: Callable[..., Any] = dense


QKV = [
    Bad("q-list", TypeError, {"q": [[1.0]]}, ("q: expected a torch.Tensor", "got list", "torch.as_tensor")),
    Bad("q-none", TypeError, {"q": None}, ("q: expected a torch.Tensor", "got NoneType")),
    Bad("k-numpy", TypeError, {"k": numpy.zeros((2, 5, 2, 8))}, ("k: expected a torch.Tensor", "got ndarray")),
    Bad("v-float", TypeError, {"v": 1.0}, ("v: expected a torch.Tensor", "got float")),
    Bad("q-numpy", TypeError, {"q": numpy.zeros((5, 2, 8))}, ("q: expected a torch.Tensor", "got ndarray"), packed),
    Bad(
        "q-rank",
        ValueError,
        {"q": zeros(3, 4, 8)},
        ("q: expected 4 dimensions [batch, seq, heads, head_dim]", "got shape (3, 4, 8)", "attention_varlen"),
    ),
    Bad(
        "q-sparse",
        TypeError,
        {"q": zeros(2, 4, 2, 8).to_sparse()},
        ("q: expected a dense tensor", "sparse_coo; pass q."),
    ),
    Bad("v-rank", ValueError, {"v": zeros(8)}, ("v: expected 4 dimensions", "got shape (8,)")),
    Bad(
        "k-rank-packed",
        ValueError,
        {"k": zeros(1, 5, 2, 8)},
        ("k: expected 3 dimensions [total, heads, head_dim]", "got shape (1, 5, 2, 8)", "flashtile.attention"),
        packed,
    ),
    Bad(
        "k-dtype",
        TypeError,
        {"k": zeros(2, 5, 2, 8, dtype=torch.float16)},
        ("k: expected the dtype of q, torch.float32", "got torch.float16", "cast"),
    ),
    Bad("v-dtype", TypeError, {"v": zeros(2, 5, 2, 8, dtype=torch.float64)}, ("v: expected the dtype of q",)),
    Bad(
        "integers",
        TypeError,
        {name: zeros(2, 4, 2, 8, dtype=torch.int32) for name in "qkv"},
        ("q, k, v: expected dtype float16, bfloat16, float32 or float64", "got torch.int32", "cast"),
    ),
    Bad(
        "k-device",
        ValueError,
        {"k": zeros(2, 5, 2, 8, device="meta")},
        ("k: expected the device of q, cpu", "got meta", "move"),
    ),
    Bad("q-device", ValueError, {"q": zeros(2, 3, 4, 8, device="meta")}, ("k: expected the device of q, meta",)),
    Bad("v-seq", ValueError, {"v": zeros(2, 4, 2, 8)}, ("v: expected the batch, seq, heads of k", "got (2, 4, 2)")),
    Bad("v-heads", ValueError, {"v": zeros(2, 5, 1, 8)}, ("v: expected", "(2, 5, 2)", "got (2, 5, 1)")),
    Bad("batch", ValueError, {"q": zeros(3, 3, 4, 8)}, ("k: expected the batch size of q, 3", "got 2", "expand")),
    Bad("head-dim", ValueError, {"q": zeros(2, 3, 4, 9)}, ("k: expected the head_dim of q, 9", "got 8")),
    Bad(
        "head-dim-513",
        ValueError,
        {"q": zeros(1, 1, 1, 513), "k": zeros(1, 1, 1, 513), "v": zeros(1, 1, 1, 4)},
        ("q: expected head_dim from 1 to 512", "got 513", "split"),
    ),
    Bad("head-dim-v-513", ValueError, {"v": zeros(2, 5, 2, 513)}, ("v: expected head_dim from 1 to 512", "got 513")),
    Bad("head-dim-v-0", ValueError, {"v": zeros(2, 5, 2, 0)}, ("v: expected head_dim from 1 to 512", "got 0")),
    Bad(
        "heads-do-not-divide",
        ValueError,
        {"q": zeros(2, 3, 3, 8)},
        ("k, v: expected a number of heads that divides the 3 of q", "got 2"),
    ),
    Bad("more-kv-heads", ValueError, {"q": zeros(2, 3, 1, 8)}, ("divides the 1 of q", "got 2")),
    Bad("no-heads", ValueError, {"k": zeros(2, 5, 0, 8), "v": zeros(2, 5, 0, 8)}, ("divides the 4 of q", "got 0")),
]

OPTIONS = [
    Bad("align", ValueError, {"align": "middle"}, ("align: expected one of 'bottom_right', 'top_left'", "'middle'; ")),
    Bad("causal-str", TypeError, {"causal": "no"}, ("causal: expected True or False", "got 'no'", "bool")),
    Bad("causal-tensor", TypeError, {"causal": torch.tensor(True)}, ("causal: expected True or False", "got tensor")),
    Bad("deterministic-int", TypeError, {"deterministic": 1}, ("deterministic: expected True or False", "got 1")),
    Bad("window-int", TypeError, {"window": 4}, ("window: expected a pair (left, right)", "got 4", "None")),
    Bad("window-triple", TypeError, {"window": (1, 2, 3)}, ("window: expected a pair", "(1, 2, 3)")),
    Bad("window-str", TypeError, {"window": "ab"}, ("window: expected a pair", "'ab'")),
    Bad("window-float", TypeError, {"window": (1.0, 0)}, ("window: expected int or None on the left", "got 1.0")),
    Bad("window-bool", TypeError, {"window": (1, True)}, ("window: expected int or None on the right", "got True")),
    Bad("window-negative", ValueError, {"window": (-1, 0)}, ("window: expected left from 0", "got -1", "None")),
    Bad("window-huge", ValueError, {"window": (0, 2**31)}, ("window: expected right from 0", "got 2147483648")),
    Bad("scale-nan", ValueError, {"scale": float("nan")}, ("scale: expected a finite number", "got nan", "leave")),
    Bad("scale-inf", ValueError, {"scale": -float("inf")}, ("scale: expected a finite number", "got -inf")),
    Bad("scale-huge", ValueError, {"scale": 10**400}, ("scale: expected a number that a float holds", "1.8e308")),
    Bad("softcap-huge", ValueError, {"softcap": 10**400}, ("softcap: expected a number that a float holds",)),
    Bad("dropout-huge", ValueError, {"dropout_p": 10**400}, ("dropout_p: expected a number that a float holds",)),
    Bad("scale-large", ValueError, {"scale": -1e39}, ("scale: expected a magnitude of at most 2.3e+38", "got -1e+39")),
    Bad("scale-tensor", TypeError, {"scale": torch.tensor(0.5)}, ("scale: expected a float", "Tensor", "multiply q")),
    Bad("scale-str", TypeError, {"scale": "0.5"}, ("scale: expected a float", "got '0.5'")),
    Bad("scale-bool", TypeError, {"scale": True}, ("scale: expected a float", "got True")),
    Bad("scale-complex", TypeError, {"scale": 1j}, ("scale: expected a float", "got 1j")),
    Bad("dropout-1", ValueError, {"dropout_p": 1.0}, ("dropout_p: expected a probability in [0, 1)", "got 1.0")),
    Bad("dropout-negative", ValueError, {"dropout_p": -0.1}, ("dropout_p: expected a probability", "got -0.1")),
    Bad("dropout-nan", ValueError, {"dropout_p": float("nan")}, ("dropout_p: expected a probability", "got nan")),
    Bad("dropout-str", TypeError, {"dropout_p": "0.1"}, ("dropout_p: expected a float", "got '0.1'")),
    Bad("dropout-none", TypeError, {"dropout_p": None}, ("dropout_p: expected a float", "got None")),
    Bad("dropout-bool", TypeError, {"dropout_p": False}, ("dropout_p: expected a float", "got False")),
    Bad("dropout-tensor", TypeError, {"dropout_p": torch.tensor(0.0)}, ("dropout_p: expected a float", "Tensor")),
    Bad("seed-int", TypeError, {"dropout_seed": 7}, ("dropout_seed: expected an int64 tensor", "got int", "draw_")),
    Bad("seed-dtype", TypeError, {"dropout_seed": seed(2, dtype=torch.int32)}, ("dropout_seed: expected dtype int64",)),
    Bad("seed-shape", ValueError, {"dropout_seed": seed(3)}, ("dropout_seed: expected shape (2,)", "got (3,)")),
    Bad("seed-device", ValueError, {"dropout_seed": seed(2, device="meta")}, ("dropout_seed: expected the device",)),
    Bad("seed-packed", TypeError, {"dropout_p": 0.1, "dropout_seed": 7}, ("dropout_seed: expected",), packed),
    Bad("backend", ValueError, {"backend": "cuda"}, ("backend: expected one of 'auto'", "got 'cuda'; 'auto'")),
    Bad("backend-none", ValueError, {"backend": None}, ("backend: expected one of", "got None")),
    Bad(
        "keyword",
        TypeError,
        {"is_causal": True},
        ("flashtile.attention has no argument is_causal", "it is called causal"),
    ),
]

LENGTHS = [
    Bad("keys-list", TypeError, {"key_lengths": [1, 2]}, ("key_lengths: expected an int32 or int64 tensor", "list")),
    Bad("keys-float", TypeError, {"key_lengths": zeros(2)}, ("key_lengths: expected dtype int32", "got torch.float32")),
    Bad("keys-shape", ValueError, {"key_lengths": seed(3)}, ("key_lengths: expected shape (2,)", "got (3,)")),
    Bad("keys-rank", ValueError, {"key_lengths": seed(2, 1)}, ("key_lengths: expected shape (2,)", "(2, 1); it")),
    Bad("keys-device", ValueError, {"key_lengths": seed(2, device="meta")}, ("key_lengths: expected the device of q",)),
    Bad("keys-negative", ValueError, {"key_lengths": cumulative(2, -1)}, ("key_lengths: expected", "got -1")),
    Bad(
        "keys-long",
        ValueError,
        {"key_lengths": cumulative(2, 9)},
        ("key_lengths: expected lengths of at most", "got 9"),
    ),
    Bad("keys-packed-long", ValueError, {"key_lengths": cumulative(2, 9)}, ("number of keys", "at index 1"), packed),
    Bad("keys-packed", ValueError, {"key_lengths": seed(5)}, ("key_lengths: expected shape (2,)",), packed),
    Bad("cu-missing", TypeError, {"cu_seqlens_q": None}, ("cu_seqlens_q: expected a torch.Tensor", "NoneType"), packed),
    Bad("cu-list", TypeError, {"cu_seqlens_k": [0, 5]}, ("cu_seqlens_k: expected a torch.Tensor", "got list"), packed),
    Bad("cu-dtype", TypeError, {"cu_seqlens_q": zeros(3)}, ("cu_seqlens_q: expected dtype int32 or int64",), packed),
    Bad("cu-rank", ValueError, {"cu_seqlens_q": seed(3, 1)}, ("cu_seqlens_q: expected shape (batch + 1,)",), packed),
    Bad("cu-empty", ValueError, {"cu_seqlens_q": seed(0)}, ("cu_seqlens_q", "got (0,)", "empty batch"), packed),
    Bad(
        "cu-batch",
        ValueError,
        {"cu_seqlens_k": cumulative(0, 5)},
        ("cu_seqlens_k: expected shape (3,)", "got (2,)"),
        packed,
    ),
    Bad(
        "cu-start",
        ValueError,
        {"cu_seqlens_q": cumulative(1, 2, 5)},
        ("cu_seqlens_q: expected to start at 0", "got 1", "prepend 0"),
        packed,
    ),
    Bad(
        "cu-decreasing",
        ValueError,
        {"cu_seqlens_k": cumulative(0, 4, 3)},
        ("cu_seqlens_k: expected cumulative lengths that never decrease", "got 4 then 3 at index 2"),
        packed,
    ),
    Bad(
        "cu-total",
        ValueError,
        {"cu_seqlens_q": cumulative(0, 2, 6)},
        ("cu_seqlens_q: expected its last value to be at most the packed total, 5", "got 6"),
        packed,
    ),
    Bad("cu-device", ValueError, {"cu_seqlens_q": seed(3, device="meta")}, ("cu_seqlens_q", "got meta"), packed),
    Bad("max-tensor", TypeError, {"max_seqlen_q": torch.tensor(3)}, ("max_seqlen_q", "Tensor", "leave"), packed),
    Bad("max-float", TypeError, {"max_seqlen_k": 3.5}, ("max_seqlen_k: expected an int", "got 3.5"), packed),
    Bad("max-bool", TypeError, {"max_seqlen_k": True}, ("max_seqlen_k: expected an int", "got True"), packed),
    Bad("max-str", TypeError, {"max_seqlen_q": "3"}, ("max_seqlen_q: expected an int", "got '3'"), packed),
    Bad("max-negative", ValueError, {"max_seqlen_q": -1}, ("max_seqlen_q: expected an upper bound", "-1"), packed),
    Bad(
        "max-too-small",
        ValueError,
        {"max_seqlen_q": 2},
        ("max_seqlen_q: expected an upper bound", "got 2 for a sequence of 3", "leave it out"),
        packed,
    ),
    Bad("max-k-too-small", ValueError, {"max_seqlen_k": 0}, ("max_seqlen_k", "got 0 for a sequence of 3"), packed),
]


SCORES = [
    Bad("softcap-negative", ValueError, {"softcap": -1.0}, ("softcap: expected a finite number", "got -1.0", "leave")),
    Bad("softcap-inf", ValueError, {"softcap": float("inf")}, ("softcap: expected a finite number", "got inf")),
    Bad("softcap-nan", ValueError, {"softcap": float("nan")}, ("softcap: expected a finite number", "got nan")),
    Bad("softcap-large", ValueError, {"softcap": 1e39}, ("softcap: expected at most 2.3e+38", "got 1e+39")),
    Bad("softcap-small", ValueError, {"softcap": 1e-30, "scale": 1e10}, ("as much of scale / softcap", "got 1e-30")),
    Bad("softcap-tensor", TypeError, {"softcap": torch.tensor(2.0)}, ("softcap: expected a float", "Tensor", "pass")),
    Bad("softcap-str", TypeError, {"softcap": "2"}, ("softcap: expected a float", "got '2'")),
    Bad("softcap-bool", TypeError, {"softcap": True}, ("softcap: expected a float", "got True")),
    Bad("bias-list", TypeError, {"bias": [0.0] * 5}, ("bias: expected a torch.Tensor", "got list")),
    Bad(
        "bias-half",
        TypeError,
        {"bias": zeros(3, 5, dtype=torch.float16)},
        ("bias: expected the dtype of q, torch.float32", "got torch.float16", "cast"),
    ),
    Bad("bias-double", TypeError, {"bias": zeros(3, 5, dtype=torch.float64)}, ("bias: expected", "got torch.float64")),
    Bad("bias-bool", TypeError, {"bias": zeros(3, 5, dtype=torch.bool)}, ("bias: expected the dtype of q", "bool")),
    Bad(
        "bias-beside-bfloat16",
        TypeError,
        {**{name: zeros(2, 4, 2, 8, dtype=torch.bfloat16) for name in "qkv"}, "bias": zeros(4, dtype=torch.float16)},
        ("bias: expected the dtype of q, torch.bfloat16, or torch.float32", "got torch.float16"),
    ),
    Bad(
        "bias-shape",
        ValueError,
        {"bias": zeros(3, 4)},
        ("bias: expected a shape that broadcasts to", "= [2, 4, 3, 5]", "got [3, 4]", "insert dimensions of size 1"),
    ),
    Bad("bias-padding", ValueError, {"bias": zeros(2, 5)}, ("got [2, 5]", "for padded keys bias[:, None, None]")),
    Bad("mask-padding", ValueError, {"mask": zeros(2, 5).bool()}, ("of size 1, for padded keys mask[:, None, None]",)),
    Bad("mask-heads", ValueError, {"mask": zeros(2, 3, 5).bool()}, ("of size 1, for all heads mask[:, None]",)),
    Bad("bias-heads-kv", ValueError, {"bias": zeros(2, 3, 5)}, ("bias: expected a shape that", "got [2, 3, 5]")),
    Bad("bias-batch", ValueError, {"bias": zeros(3, 1, 1, 5)}, ("bias: expected a shape that", "got [3, 1, 1, 5]")),
    Bad("bias-rank", ValueError, {"bias": zeros(1, 2, 4, 3, 5)}, ("bias: expected a shape", "got [1, 2, 4, 3, 5]")),
    Bad("bias-empty", ValueError, {"bias": zeros(0)}, ("bias: expected a shape that broadcasts", "got [0]")),
    Bad("bias-device", ValueError, {"bias": zeros(5, device="meta")}, ("bias: expected the device of q", "got meta")),
    Bad(
        "bias-packed",
        ValueError,
        {"bias": zeros(3, 3)},
        ("max_seqlen_q, max_seqlen_k: expected both beside bias, mask or block_mask", "longest"),
        packed,
    ),
    Bad(
        "bias-one-maximum",
        ValueError,
        {"bias": zeros(3, 3), "max_seqlen_q": 3},
        ("max_seqlen_q, max_seqlen_k: expected both",),
        packed,
    ),
    Bad(
        "bias-packed-batch",
        ValueError,
        {"bias": zeros(2, 1, 3, 3), "max_seqlen_q": 3, "max_seqlen_k": 3},
        ("bias: expected a shape that broadcasts to", "= [1, 2, 3, 3]", "max_seqlen_k", "got [2, 1, 3, 3]"),
        packed,
    ),
    Bad(
        "bias-packed-total",
        ValueError,
        {"bias": zeros(5, 5), "max_seqlen_q": 3, "max_seqlen_k": 3},
        ("bias: expected a shape that broadcasts to", "got [5, 5]"),
        packed,
    ),
    Bad("mask-list", TypeError, {"mask": [True] * 5}, ("mask: expected a torch.Tensor", "got list")),
    Bad("mask-float", TypeError, {"mask": zeros(3, 5)}, ("mask: expected dtype bool", "got torch.float32", "bias=")),
    Bad("mask-int", TypeError, {"mask": cumulative(1, 1, 1, 1, 0)}, ("mask: expected dtype bool", "mask.bool()")),
    Bad(
        "mask-shape",
        ValueError,
        {"mask": zeros(2, 5, dtype=torch.bool)},
        ("mask: expected a shape that broadcasts to", "[2, 4, 3, 5]", "got [2, 5]"),
    ),
    Bad("mask-device", ValueError, {"mask": zeros(5, dtype=torch.bool, device="meta")}, ("mask: expected the device",)),
    Bad("mask-packed", ValueError, {"mask": zeros(3, 3, dtype=torch.bool)}, ("max_seqlen_q, max_seqlen_k",), packed),
    Bad("slopes-list", TypeError, {"alibi_slopes": [0.5] * 4}, ("alibi_slopes: expected a torch.Tensor", "got list")),
    Bad(
        "slopes-heads-kv",
        ValueError,
        {"alibi_slopes": zeros(2)},
        ("alibi_slopes: expected shape [heads_q] = [4] or [batch, heads_q] = [2, 4]", "got [2]", "query heads"),
    ),
    Bad("slopes-batch", ValueError, {"alibi_slopes": zeros(1, 4)}, ("alibi_slopes: expected shape", "got [1, 4]")),
    Bad("slopes-number", ValueError, {"alibi_slopes": zeros()}, ("alibi_slopes: expected shape", "got []")),
    Bad("slopes-packed", ValueError, {"alibi_slopes": zeros(3, 2)}, ("= [2, 2], got [3, 2]",), packed),
    Bad(
        "slopes-double",
        TypeError,
        {"alibi_slopes": zeros(4, dtype=torch.float64)},
        ("alibi_slopes: expected dtype torch.float32", "got torch.float64", "cast"),
    ),
    Bad("slopes-device", ValueError, {"alibi_slopes": zeros(4, device="meta")}, ("alibi_slopes: expected the device",)),
    Bad("sinks-list", TypeError, {"sinks": [0.0] * 4}, ("sinks: expected a torch.Tensor", "got list")),
    Bad("sinks-heads-kv", ValueError, {"sinks": zeros(2)}, ("sinks: expected shape [heads_q] = [4]", "got [2]")),
    Bad("sinks-batch", ValueError, {"sinks": zeros(2, 4)}, ("sinks: expected shape", "one logit", "got [2, 4]; ")),
    Bad("sinks-double", TypeError, {"sinks": zeros(4, dtype=torch.float64)}, ("sinks: expected dtype", "got torch.")),
    Bad("sinks-int", TypeError, {"sinks": zeros(4, dtype=torch.int64)}, ("sinks: expected dtype", "got torch.int64")),
    Bad(
        "sinks-beside-double",
        TypeError,
        {**{name: zeros(2, 4, 2, 8, dtype=torch.float64) for name in "qkv"}, "sinks": zeros(2)},
        ("sinks: expected dtype torch.float64", "got torch.float32"),
    ),
    Bad("sinks-device", ValueError, {"sinks": zeros(4, device="meta")}, ("sinks: expected the device of q",)),
]


@pytest.mark.parametrize("bad", QKV + OPTIONS + LENGTHS + SCORES, ids=lambda bad: bad.name)
def test_wrong_argument_is_named(bad):
    with pytest.raises(bad.error) as raised:
        bad.call(**bad.changes)
    pattern = ".*".join(map(re.escape, bad.message))
    assert re.search(pattern, str(raised.value)), str(raised.value)


@pytest.mark.parametrize("call", [dense, packed])
def test_good_calls_are_good(call):
    assert call().isfinite().all()


@pytest.mark.parametrize("name", ["scale", "dropout_p", "softcap"])
@pytest.mark.parametrize("number", [0, numpy.float32(0.5), numpy.float64(0.5)], ids=repr)
def test_any_real_number_is_a_number(name, number):
    assert dense(**{name: number}).isfinite().all()


@pytest.mark.parametrize("flag", ["return_lse", "scale", "causal", "dropout_p"])
def test_options_are_keyword_only(flag):
    q = zeros(1, 1, 1, 1)
    with pytest.raises(TypeError, match="takes 3 arguments by position"):
        flashtile.attention(q, q, q, flag)


def test_float64_on_triton_names_the_remedy():
    inputs = {name: zeros(1, 2, 1, 8, dtype=torch.float64) for name in "qkv"}
    with pytest.raises(ValueError, match="triton"):
        dense(**inputs, backend="triton")


def test_attribute_error_of_tensors_is_not_disguised(monkeypatch):
    # An AttributeError makes the edge look for arguments that are no tensors; one of another cause stays what it is.
    monkeypatch.setattr(attention_checks, "check_qkv", lambda *_: torch.no_such_name)
    with pytest.raises(AttributeError, match="no_such_name"):
        dense()


@pytest.mark.parametrize(
    "arguments, message",
    [
        ({"dropout_seed": 3}, "dropout_seed: expected an int64 tensor"),
        ({"dropout_seed": None}, "dropout_seed: expected an int64 tensor"),
        ({"dropout_p": 1.5}, r"dropout_p: expected a probability in \[0, 1\), got 1.5"),
    ],
    ids=["seed-int", "seed-none", "probability"],
)
def test_dropout_mask(arguments, message):
    good = {"dropout_seed": seed(2), "dropout_p": 0.5}
    with pytest.raises((TypeError, ValueError), match=message):
        flashtile.dropout_mask(**{**good, **arguments}, batch=1, heads=1, seq_q=2, seq_k=2)


@pytest.mark.parametrize("size, error", [(-1, ValueError), (2.0, TypeError), (True, TypeError)])
@pytest.mark.parametrize("name", ["batch", "heads", "seq_q", "seq_k"])
def test_sizes_of_a_dropout_mask(name, size, error):
    sizes = {"batch": 1, "heads": 1, "seq_q": 2, "seq_k": 2, name: size}
    with pytest.raises(error, match=f"{name}: expected .*, got {size}; pass that of the call"):
        flashtile.dropout_mask(torch.tensor([1, 2]), 0.5, **sizes)


def test_values_are_read_on_a_gpu_only_on_request(monkeypatch):
    # A stand-in for a GPU tensor: what matters is only the type of its device.
    class OnGpu:
        device = torch.device("cuda")

    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(checks, "CHECK_VALUES", False)
    assert not checks.readable(OnGpu())
    monkeypatch.setattr(checks, "CHECK_VALUES", True)
    assert checks.readable(OnGpu())
    assert checks.read_on_request(torch.zeros(1))


def test_values_are_not_read_while_a_graph_is_captured(monkeypatch):
    class OnGpu:
        device = torch.device("cuda")

    monkeypatch.setattr(checks, "CHECK_VALUES", True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert not checks.readable(OnGpu())


@pytest.mark.parametrize("layout", [torch.jagged, torch.strided], ids=["jagged", "strided"])
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_nested_tensors_are_refused(layout):
    nested = torch.nested.nested_tensor([zeros(3, 4, 8), zeros(5, 4, 8)], layout=layout)
    dense = zeros(2, 5, 4, 8)
    message = "expected a dense tensor, got a nested one; pass its values and offsets to flashtile.attention_varlen"
    for q, k, v, name in ((nested, nested, nested, "q"), (dense, nested, nested, "k"), (dense, dense, nested, "v")):
        with pytest.raises(TypeError, match=f"{name}: {message}"):
            flashtile.attention(q, k, v)
    for function, arguments in (
        (flashtile.explain, (nested,) * 3),
        (flashtile.attention_varlen, (*(nested,) * 3, cumulative(0, 3, 8))),
        (flashtile.attention_probs, (nested,) * 2),
        (flashtile.flex_attention, (nested,) * 3),
    ):
        with pytest.raises(TypeError, match=message):
            function(*arguments)


@pytest.mark.parametrize("layout", ["dense", "packed"])
def test_the_layout_of_pytorch_is_warned_of_once(layout, monkeypatch):
    monkeypatch.setattr(attention_checks, "_warned", False)
    q = zeros(16, 300, 8) if layout == "packed" else zeros(2, 16, 300, 8)

    def call(q: torch.Tensor) -> torch.Tensor:
        return flashtile.attention(q, q, q) if q.dim() == 4 else flashtile.attention_varlen(q, q, q, cumulative(0, 16))

    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        call(zeros(2, 300, 16, 8) if layout == "dense" else zeros(16, 4, 8))
        flashtile.scaled_dot_product_attention(*[zeros(300, 16, 8)] * 3)
        assert not found
        for length in (300, 301):
            call(q[..., :1, :].expand(*q.shape[:-2], length, 8))
    (warning,) = found
    assert warning.filename == __file__
    assert "16 tokens of 300 heads" in str(warning.message)
    assert "flashtile.scaled_dot_product_attention" in str(warning.message)


def test_repeated_calls_do_not_look_at_the_layout(monkeypatch):
    q = zeros(1, 5, 3, 8)
    flashtile.attention(q, q, q)
    monkeypatch.setattr(attention_checks, "warn_swapped_layout", lambda *arguments: pytest.fail("looks at the layout"))
    flashtile.attention(q, q, q)


def test_counts_beyond_64_bits_are_refused_by_name():
    q, huge = zeros(4, 2, 8), 2**70
    calls: dict[str, Callable[[], object]] = {
        "max_seqlen_q": lambda: flashtile.attention_varlen(q, q, q, cumulative(0, 4), max_seqlen_q=huge),
        "left": lambda: flashtile.patterns.sliding_window(64, 64, huge),
        "seq_q": lambda: flashtile.BlockMask.from_predicate(lambda b, h, q, k: q >= k, 1, 1, huge, 4),
        "positions": lambda: flashtile.rotary_tables(huge, 8),
    }
    for name, call in calls.items():
        with pytest.raises(ValueError, match=rf"^{name}: expected .* below 2\*\*62, got {huge}"):
            call()
