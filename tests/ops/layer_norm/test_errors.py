"""Bad input: each error names the argument, what was expected, what came and the remedy."""

import inspect
import re

import pytest
import torch

import flashtile
from support.running.each_case import each_case

_FP64, _BF16 = torch.float64, torch.bfloat16


def zeros(*shape: int, dtype: torch.dtype = torch.float32, device: str = "cpu", grad: bool = False) -> torch.Tensor:
    return torch.zeros(shape, dtype=dtype, device=device, requires_grad=grad)


def numbers(*values: int) -> torch.Tensor:
    return torch.tensor(values)


BAD_SUMS = [
    (TypeError, {"x0": [1.0]}, "x0: expected a torch.Tensor", "got list", "torch.as_tensor"),
    (TypeError, {"x0": zeros(3, 8, dtype=torch.int32)}, "x0: expected dtype float16", "int32", "cast"),
    (ValueError, {"x0": zeros()}, "x0: expected shape (..., hidden)", "got ()"),
    (ValueError, {"x0": zeros(3, 0)}, "x0: expected a last dimension from 1 to 65536, got 0"),
    (ValueError, {"x0": zeros(1, 65537)}, "from 1 to 65536, got 65537"),
    (ValueError, {"residual": zeros(8)}, "residual: expected shape (3, 8), that of the sum, got (8,)", "expand"),
    (ValueError, {"residual": zeros(3, 8, device="meta")}, "residual: expected the device of x0"),
    (TypeError, {"residual": zeros(3, 8, dtype=_FP64)}, "residual: expected float64 exactly"),
    (ValueError, {"weight": zeros(7)}, "weight: expected shape (8,)", "got (7,)"),
    (TypeError, {"weight": zeros(8, dtype=_FP64)}, "weight: expected float64 exactly where x0 is"),
    (ValueError, {"bias": zeros(1, 8)}, "bias: expected shape (8,)", "got (1, 8)"),
    (TypeError, {"bias": 1.0}, "bias: expected a torch.Tensor, got float"),
    (ValueError, {"layerscale": zeros(3)}, "layerscale: expected shape (8,)", "got (3,)"),
    (ValueError, {"rowscale": zeros(8)}, "rowscale: expected shape (3,)", "got (8,)", "reshape"),
    (ValueError, {"rowscale": zeros(3, grad=True)}, "rowscale:", "no gradient", "detach"),
    (ValueError, {"x1": zeros(3, 9)}, "x1: expected shape (3, 8), that of the sum, got (3, 9)"),
    (TypeError, {"x1": zeros(3, 8, dtype=_BF16)}, "x1: expected the dtype of x0", "bfloat16", "cast"),
    (ValueError, {"x1": zeros(3, 8), "rowscale": zeros(3)}, "rowscale: expected None together with x1",
     "scale x0 and x1 before"),
    (ValueError, {"x1": zeros(3, 8), "rowscale_const": 2.0}, "rowscale_const: expected None"),
    (ValueError, {"bias1": zeros(8)}, "bias1: expected None without weight1", "give weight1"),
    (ValueError, {"weight1": zeros(9)}, "weight1: expected shape (8,)"),
    (ValueError, {"dropout_p": 1.0}, "dropout_p: expected a probability in [0, 1), got 1.0"),
    (TypeError, {"dropout_p": zeros()}, "dropout_p: expected a float, got a Tensor"),
    (TypeError, {"dropout_seed": zeros(2)}, "dropout_seed: expected dtype int64", "draw_dropout_seed"),
    (ValueError, {"epsilon": -1.0}, "epsilon: expected a finite number of at least 0, got -1.0"),
    (TypeError, {"epsilon": "small"}, "epsilon: expected a float, got 'small'"),
    (ValueError, {"rowscale_const": float("nan")}, "rowscale_const: expected a finite number"),
    (ValueError, {"rowscale_const": 1e39}, "rowscale_const: expected a magnitude of at most"),
    (TypeError, {"prenorm": 1}, "prenorm: expected True or False, got 1"),
    (TypeError, {"residual_in_fp32": None}, "residual_in_fp32: expected True or False, got None"),
    (ValueError, {"backend": "cuda"}, "backend: expected one of 'auto'", "got 'cuda'"),
    (ValueError, {"backend": "triton"}, "backend: 'triton' cannot serve this call", "needs a GPU"),
    (TypeError, {"x0_subset": zeros(3)}, "x0_subset: expected dtype int32 or int64"),
    (ValueError, {"x0_subset": numbers(1, 4)}, "x0_subset: expected numbers from 1 to 3", "got 4"),
    (ValueError, {"x0_subset": numbers(-1, 0)}, "x0_subset:", "got -1"),
    (ValueError, {"x0_subset": numbers(2, 2)}, "x0_subset: expected each row at most once", "row 2"),
    (
        ValueError, {"x0_subset": numbers(1, 2), "residual": zeros(3, 8)}, "residual: expected shape (2, 8), that of",
        "got (3, 8)",
    ),
    (ValueError, {"out_subset": numbers(1, 2)}, "out_subset: expected 3 numbers", "got 2"),
    (ValueError, {"out_subset": numbers(1, 0, 2), "out_numrows": 1}, "out_subset: expected", "got 2"),
    (ValueError, {"out_numrows": 2}, "out_numrows: expected 0 without out_subset, got 2"),
    (TypeError, {"out_numrows": 2.0}, "out_numrows: expected an int, got 2.0"),
    (ValueError, {"out_numrows": -1, "out_subset": numbers(0, 0, 0)}, "out_numrows: expected at least 0, got -1"),
]  # fmt: skip


@each_case("function", [flashtile.dropout_add_layer_norm, flashtile.dropout_add_rms_norm])
@each_case("row", BAD_SUMS)
def test_dropout_add(row, function):
    error, changes, *message = row
    arguments = {"x0": torch.randn(3, 8), "residual": None, "weight": None, "bias": None, **changes}
    with pytest.raises(error, match=".*".join(map(re.escape, message))):
        function(**arguments)


@each_case("function", [flashtile.layer_norm, flashtile.rms_norm])
@each_case(
    "changes, message",
    [
        ({"x": None}, "x: expected a torch.Tensor, got NoneType"),
        ({"x": zeros(3, dtype=torch.int64)}, "x: expected dtype float16"),
        ({"weight": zeros(3)}, r"weight: expected shape \(8,\), the last dimension of x, got \(3,\)"),
        ({"bias": zeros(8, device="meta")}, "bias: expected the device of x, cpu, got meta; move it"),
        ({"eps": float("inf")}, "eps: expected a finite number"),
        ({"zero_centered_weight": 0}, "zero_centered_weight: expected True or False"),
        ({"backend": "fast"}, "backend: expected one of"),
    ],
)
def test_plain(changes, message, function):
    with pytest.raises((TypeError, ValueError), match=message):
        function(**{"x": torch.randn(2, 8), **changes})


@each_case("norm", [flashtile.layer_norm, flashtile.rms_norm])
def test_weights_are_float64_exactly_where_x_is(norm):
    for x, weight in ((zeros(2, 8, dtype=_FP64), zeros(8)), (zeros(2, 8), zeros(8, dtype=_FP64))):
        with pytest.raises(TypeError, match="weight: expected float64 exactly where x is"):
            norm(x, weight)
    assert "float64 exactly where x is" in inspect.getdoc(flashtile.layer_norm)


def test_float64_on_triton_says_what_to_do():
    from flashtile.ops.common.backends import StandardCall, standard_backends

    call = StandardCall("layer_norm", "triton", "cuda", _FP64, None, False)
    choice = standard_backends("layer_norm").choose(call)
    assert choice.backend is None and "float64" in choice.reason and "backend='reference'" in choice.reason
