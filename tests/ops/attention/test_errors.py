"""Bad input: each error names the argument, what was expected, what came and the remedy."""

import re
import warnings
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor

import flashtile
from flashtile.ops.attention import checks as attention_checks
from flashtile.ops.common import checks
from support.running.each_case import each_case


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


#: Wrong calls by function and error: what is changed in a good one, and what the message holds, in this order.
_WRONG: dict[tuple[Callable[..., Any], type[Exception]], list[tuple[Any, ...]]] = {
    (dense, TypeError): [
        ({"q": [[1.0]]}, "q: expected a torch.Tensor", "got list", "torch.as_tensor"),
        ({"k": numpy.zeros((2, 5, 2, 8))}, "k: expected a torch.Tensor", "got ndarray"),
        ({"v": 1.0}, "v: expected a torch.Tensor", "got float"),
        ({"q": zeros(2, 4, 2, 8).to_sparse()}, "q: expected a dense tensor", "sparse_coo; pass q."),
        ({"k": zeros(2, 5, 2, 8, dtype=torch.float16)}, "k: expected the dtype of q, torch.float32",
         "got torch.float16", "cast"),
        ({"v": zeros(2, 5, 2, 8, dtype=torch.float64)}, "v: expected the dtype of q"),
        ({name: zeros(2, 4, 2, 8, dtype=torch.int32) for name in "qkv"},
         "q, k, v: expected dtype float16, bfloat16, float32 or float64", "got torch.int32", "cast"),
        ({"causal": "no"}, "causal: expected True or False", "got 'no'", "bool"),
        ({"deterministic": 1}, "deterministic: expected True or False", "got 1"),
        ({"window": 4}, "window: expected a pair (left, right)", "got 4", "None"),
        ({"window": (1, 2, 3)}, "window: expected a pair", "(1, 2, 3)"),
        ({"window": "ab"}, "window: expected a pair", "'ab'"),
        ({"window": (1.0, 0)}, "window: expected int or None on the left", "got 1.0"),
        ({"window": (1, True)}, "window: expected int or None on the right", "got True"),
        ({"scale": torch.tensor(0.5)}, "scale: expected a float", "Tensor", "multiply q"),
        ({"scale": "0.5"}, "scale: expected a float", "got '0.5'"),
        ({"scale": True}, "scale: expected a float", "got True"),
        ({"dropout_p": False}, "dropout_p: expected a float", "got False"),
        ({"dropout_seed": 7}, "dropout_seed: expected an int64 tensor", "got int", "draw_"),
        ({"dropout_seed": seed(2, dtype=torch.int32)}, "dropout_seed: expected dtype int64"),
        ({"is_causal": True}, "flashtile.attention has no argument is_causal", "it is called causal"),
        ({"key_lengths": [1, 2]}, "key_lengths: expected an int32 or int64 tensor", "list"),
        ({"key_lengths": zeros(2)}, "key_lengths: expected dtype int32", "got torch.float32"),
        ({"softcap": torch.tensor(2.0)}, "softcap: expected a float", "Tensor", "pass"),
        ({"bias": [0.0] * 5}, "bias: expected a torch.Tensor", "got list"),
        ({"bias": zeros(3, 5, dtype=torch.float16)}, "bias: expected the dtype of q, torch.float32",
         "got torch.float16", "cast"),
        ({"bias": zeros(3, 5, dtype=torch.bool)}, "bias: expected the dtype of q", "bool"),
        ({**{name: zeros(2, 4, 2, 8, dtype=torch.bfloat16) for name in "qkv"}, "bias": zeros(4, dtype=torch.float16)},
         "bias: expected the dtype of q, torch.bfloat16, or torch.float32", "got torch.float16"),
        ({"mask": [True] * 5}, "mask: expected a torch.Tensor", "got list"),
        ({"mask": zeros(3, 5)}, "mask: expected dtype bool", "got torch.float32", "bias="),
        ({"mask": cumulative(1, 1, 1, 1, 0)}, "mask: expected dtype bool", "mask.bool()"),
        ({"alibi_slopes": [0.5] * 4}, "alibi_slopes: expected a torch.Tensor", "got list"),
        ({"alibi_slopes": zeros(4, dtype=torch.float64)}, "alibi_slopes: expected dtype torch.float32",
         "got torch.float64", "cast"),
        ({"sinks": [0.0] * 4}, "sinks: expected a torch.Tensor", "got list"),
        ({"sinks": zeros(4, dtype=torch.float64)}, "sinks: expected dtype", "got torch."),
        ({**{name: zeros(2, 4, 2, 8, dtype=torch.float64) for name in "qkv"}, "sinks": zeros(2)},
         "sinks: expected dtype torch.float64", "got torch.float32"),
    ],
    (dense, ValueError): [
        ({"q": zeros(3, 4, 8)}, "q: expected 4 dimensions [batch, seq, heads, head_dim]", "got shape (3, 4, 8)",
         "attention_varlen"),
        ({"v": zeros(8)}, "v: expected 4 dimensions", "got shape (8,)"),
        ({"k": zeros(2, 5, 2, 8, device="meta")}, "k: expected the device of q, cpu", "got meta", "move"),
        ({"q": zeros(2, 3, 4, 8, device="meta")}, "k: expected the device of q, meta"),
        ({"v": zeros(2, 4, 2, 8)}, "v: expected the batch, seq, heads of k", "got (2, 4, 2)"),
        ({"v": zeros(2, 5, 1, 8)}, "v: expected", "(2, 5, 2)", "got (2, 5, 1)"),
        ({"q": zeros(3, 3, 4, 8)}, "k: expected the batch size of q, 3", "got 2", "expand"),
        ({"q": zeros(2, 3, 4, 9)}, "k: expected the head_dim of q, 9", "got 8"),
        ({"q": zeros(1, 1, 1, 513), "k": zeros(1, 1, 1, 513), "v": zeros(1, 1, 1, 4)},
         "q: expected head_dim from 1 to 512", "got 513", "split"),
        ({"v": zeros(2, 5, 2, 513)}, "v: expected head_dim from 1 to 512", "got 513"),
        ({"v": zeros(2, 5, 2, 0)}, "v: expected head_dim from 1 to 512", "got 0"),
        ({"q": zeros(2, 3, 3, 8)}, "k, v: expected a number of heads that divides the 3 of q", "got 2"),
        ({"k": zeros(2, 5, 0, 8), "v": zeros(2, 5, 0, 8)}, "divides the 4 of q", "got 0"),
        ({"align": "middle"}, "align: expected one of 'bottom_right', 'top_left'", "'middle'; "),
        ({"window": (-1, 0)}, "window: expected left from 0", "got -1", "None"),
        ({"window": (0, 2**31)}, "window: expected right from 0", "got 2147483648"),
        ({"scale": float("nan")}, "scale: expected a finite number", "got nan", "leave"),
        ({"scale": -float("inf")}, "scale: expected a finite number", "got -inf"),
        ({"scale": 10**400}, "scale: expected a number that a float holds", "1.8e308"),
        ({"scale": -1e39}, "scale: expected a magnitude of at most 2.3e+38", "got -1e+39"),
        ({"dropout_p": 1.0}, "dropout_p: expected a probability in [0, 1)", "got 1.0"),
        ({"dropout_p": -0.1}, "dropout_p: expected a probability", "got -0.1"),
        ({"dropout_p": float("nan")}, "dropout_p: expected a probability", "got nan"),
        ({"dropout_seed": seed(3)}, "dropout_seed: expected shape (2,)", "got (3,)"),
        ({"dropout_seed": seed(2, device="meta")}, "dropout_seed: expected the device"),
        ({"backend": "cuda"}, "backend: expected one of 'auto'", "got 'cuda'; 'auto'"),
        ({"key_lengths": seed(3)}, "key_lengths: expected shape (2,)", "got (3,)"),
        ({"key_lengths": seed(2, 1)}, "key_lengths: expected shape (2,)", "(2, 1); it"),
        ({"key_lengths": seed(2, device="meta")}, "key_lengths: expected the device of q"),
        ({"key_lengths": cumulative(2, -1)}, "key_lengths: expected", "got -1"),
        ({"key_lengths": cumulative(2, 9)}, "key_lengths: expected lengths of at most", "got 9"),
        ({"softcap": -1.0}, "softcap: expected a finite number", "got -1.0", "leave"),
        ({"softcap": float("inf")}, "softcap: expected a finite number", "got inf"),
        ({"softcap": float("nan")}, "softcap: expected a finite number", "got nan"),
        ({"softcap": 1e39}, "softcap: expected at most 2.3e+38", "got 1e+39"),
        ({"softcap": 1e-30, "scale": 1e10}, "as much of scale / softcap", "got 1e-30"),
        ({"bias": zeros(3, 4)}, "bias: expected a shape that broadcasts to", "= [2, 4, 3, 5]", "got [3, 4]",
         "insert dimensions of size 1"),
        ({"bias": zeros(2, 5)}, "got [2, 5]", "for padded keys bias[:, None, None]"),
        ({"mask": zeros(2, 5).bool()}, "of size 1, for padded keys mask[:, None, None]"),
        ({"mask": zeros(2, 3, 5).bool()}, "of size 1, for all heads mask[:, None]"),
        ({"bias": zeros(1, 2, 4, 3, 5)}, "bias: expected a shape", "got [1, 2, 4, 3, 5]"),
        ({"bias": zeros(0)}, "bias: expected a shape that broadcasts", "got [0]"),
        ({"bias": zeros(5, device="meta")}, "bias: expected the device of q", "got meta"),
        ({"mask": zeros(2, 5, dtype=torch.bool)}, "mask: expected a shape that broadcasts to", "[2, 4, 3, 5]",
         "got [2, 5]"),
        ({"mask": zeros(5, dtype=torch.bool, device="meta")}, "mask: expected the device"),
        ({"alibi_slopes": zeros(2)}, "alibi_slopes: expected shape [heads_q] = [4] or [batch, heads_q] = [2, 4]",
         "got [2]", "query heads"),
        ({"alibi_slopes": zeros(1, 4)}, "alibi_slopes: expected shape", "got [1, 4]"),
        ({"alibi_slopes": zeros(4, device="meta")}, "alibi_slopes: expected the device"),
        ({"sinks": zeros(2)}, "sinks: expected shape [heads_q] = [4]", "got [2]"),
        ({"sinks": zeros(2, 4)}, "sinks: expected shape", "one logit", "got [2, 4]; "),
        ({"sinks": zeros(4, device="meta")}, "sinks: expected the device of q"),
    ],
    (packed, TypeError): [
        ({"q": numpy.zeros((5, 2, 8))}, "q: expected a torch.Tensor", "got ndarray"),
        ({"cu_seqlens_q": None}, "cu_seqlens_q: expected a torch.Tensor", "NoneType"),
        ({"cu_seqlens_k": [0, 5]}, "cu_seqlens_k: expected a torch.Tensor", "got list"),
        ({"cu_seqlens_q": zeros(3)}, "cu_seqlens_q: expected dtype int32 or int64"),
        ({"max_seqlen_q": torch.tensor(3)}, "max_seqlen_q", "Tensor", "leave"),
        ({"max_seqlen_k": 3.5}, "max_seqlen_k: expected an int", "got 3.5"),
        ({"max_seqlen_k": True}, "max_seqlen_k: expected an int", "got True"),
    ],
    (packed, ValueError): [
        ({"k": zeros(1, 5, 2, 8)}, "k: expected 3 dimensions [total, heads, head_dim]", "got shape (1, 5, 2, 8)",
         "flashtile.attention"),
        ({"key_lengths": cumulative(2, 9)}, "number of keys", "at index 1"),
        ({"cu_seqlens_q": seed(3, 1)}, "cu_seqlens_q: expected shape (batch + 1,)"),
        ({"cu_seqlens_q": seed(0)}, "cu_seqlens_q", "got (0,)", "empty batch"),
        ({"cu_seqlens_k": cumulative(0, 5)}, "cu_seqlens_k: expected shape (3,)", "got (2,)"),
        ({"cu_seqlens_q": cumulative(1, 2, 5)}, "cu_seqlens_q: expected to start at 0", "got 1", "prepend 0"),
        ({"cu_seqlens_k": cumulative(0, 4, 3)}, "cu_seqlens_k: expected cumulative lengths that never decrease",
         "got 4 then 3 at index 2"),
        ({"cu_seqlens_q": cumulative(0, 2, 6)},
         "cu_seqlens_q: expected its last value to be at most the packed total, 5", "got 6"),
        ({"cu_seqlens_q": seed(3, device="meta")}, "cu_seqlens_q", "got meta"),
        ({"max_seqlen_q": -1}, "max_seqlen_q: expected an upper bound", "-1"),
        ({"max_seqlen_q": 2}, "max_seqlen_q: expected an upper bound", "got 2 for a sequence of 3", "leave it out"),
        ({"max_seqlen_k": 0}, "max_seqlen_k", "got 0 for a sequence of 3"),
        ({"bias": zeros(3, 3)}, "max_seqlen_q, max_seqlen_k: expected both beside bias, mask or block_mask", "longest"),
        ({"bias": zeros(3, 3), "max_seqlen_q": 3}, "max_seqlen_q, max_seqlen_k: expected both"),
        ({"bias": zeros(2, 1, 3, 3), "max_seqlen_q": 3, "max_seqlen_k": 3},
         "bias: expected a shape that broadcasts to", "= [1, 2, 3, 3]", "max_seqlen_k", "got [2, 1, 3, 3]"),
        ({"alibi_slopes": zeros(3, 2)}, "= [2, 2], got [3, 2]"),
    ],
}  # fmt: skip


@each_case("call, error, row", [(*group, row) for group, rows in _WRONG.items() for row in rows])
def test_wrong_argument_is_named(call, error, row):
    changes, *message = row
    with pytest.raises(error) as raised:
        call(**changes)
    pattern = ".*".join(map(re.escape, message))
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


_SIZES = ("batch", "heads", "seq_q", "seq_k")


@each_case(
    "arguments, error, message",
    [
        *(({"dropout_seed": seed}, TypeError, "dropout_seed: expected an int64 tensor") for seed in (3, None)),
        ({"dropout_p": 1.5}, ValueError, r"dropout_p: expected a probability in \[0, 1\), got 1.5"),
        *(
            ({name: size}, error, f"{name}: expected .*, got {size}; pass that of the call")
            for name in _SIZES
            for size, error in ((-1, ValueError), (2.0, TypeError), (True, TypeError))
        ),
    ],
)
def test_wrong_argument_of_a_dropout_mask(arguments, error, message):
    good = {"dropout_seed": torch.tensor([1, 2]), "dropout_p": 0.5, **dict.fromkeys(_SIZES, 2)}
    with pytest.raises(error, match=message):
        flashtile.dropout_mask(**{**good, **arguments})


def test_values_are_read_on_a_gpu_only_on_request_and_while_no_graph_is_captured(monkeypatch):
    # A stand-in for a GPU tensor: what matters is only the type of its device.
    class OnGpu:
        device = torch.device("cuda")

    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(checks, "CHECK_VALUES", False)
    assert not checks.readable(OnGpu())
    monkeypatch.setattr(checks, "CHECK_VALUES", True)
    assert checks.readable(OnGpu())
    assert checks.read_on_request(torch.zeros(1))
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
